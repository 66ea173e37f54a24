//! ldmatrix and mma.sync compared with a naive product, and faults in their use. The tile kernel is written in the
//! expander's syntax: A (16, k) and B (8, k) by rows through shared memory in two stages, D = A Bᵀ.
use flatshard_ptx::emulate::{Argument, FindingKind, GlobalMemory, KernelLaunch, LaunchCounts, LaunchReport, parse};
use flatshard_ptx::expand::expand;
use half::{bf16, f16};

const TILE: &str = "\
.const STRIDE = 48      // bytes between rows in shared memory; 48 puts eight rows into different banks
.const TRANS = 0        // B is stored (k, 8) instead
.const HALF = 0         // f16 in place of bf16
.const B_ROWS = TRANS ? 16 : 8
.const B_STRIDE = TRANS ? 16 : STRIDE
.const STAGE = 16 * STRIDE + B_ROWS * B_STRIDE
.visible .entry tile(.param .u64 p_a, .param .u64 p_b, .param .u64 p_d, .param .u32 p_k)
.reqntid 32, 1, 1
{
    .reg .pred %more, %done, %half;
    .reg .b32 %lane, %k, %at, %stage, %to_a, %to_b, %from, %row, %col, %fa<4>, %fb<2>, %base, %t, %zero;
    .reg .b64 %a, %b, %d, %step_a, %step_b, %off;
    .reg .f32 %acc<4>;
    .shared .align 16 .b8 stages[${2 * STAGE}];
    ld.param.u64 %a, [p_a];
    ld.param.u64 %b, [p_b];
    ld.param.u64 %d, [p_d];
    ld.param.u32 %k, [p_k];
    mov.u32 %lane, %laneid;
    mov.u32 %base, stages;
    mov.u32 %zero, 0;
    .for i in 0 .. 4 { mov.f32 %acc[i], 0f00000000; }

    // A: a lane copies half a row. B: lanes below 16 do.
    shr.u32 %row, %lane, 1;
    and.b32 %col, %lane, 1;
    mad.lo.u32 %to_a, %row, $STRIDE, %base;
    mad.lo.u32 %to_a, %col, 16, %to_a;
    mul.lo.u32 %t, %row, %k;
    mad.lo.u32 %t, %col, 8, %t;
    mad.wide.u32 %a, %t, 2, %a;
    mov.u64 %step_a, 32;
    .if TRANS {
        setp.lt.u32 %half, %lane, 16;
        mad.lo.u32 %to_b, %lane, $B_STRIDE, %base;
        mad.wide.u32 %b, %lane, 16, %b;
        mov.u64 %step_b, 256;
    } .else {
        setp.lt.u32 %half, %lane, 16;
        mad.lo.u32 %to_b, %row, $B_STRIDE, %base;
        mad.lo.u32 %to_b, %col, 16, %to_b;
        mad.wide.u32 %b, %t, 2, %b;
        mov.u64 %step_b, 32;
    }
    .macro FETCH() {
        cp.async.cg.shared.global [%to_a], [%a], 16;
        @%half cp.async.cg.shared.global [%to_b + ${16 * STRIDE}], [%b], 16;
        add.u64 %a, %a, %step_a;
        add.u64 %b, %b, %step_b;
    }
    FETCH!();
    cp.async.commit_group;
    mov.u32 %at, 0;
    mov.u32 %stage, 0;

    // Lane 8 i + r points at row r of matrix i: rows 0-7 and 8-15, then the upper half of k.
    and.b32 %row, %lane, 15;
    shr.u32 %col, %lane, 4;
    mad.lo.u32 %from, %row, $STRIDE, %base;
    mad.lo.u32 %from, %col, 16, %from;
    and.b32 %row, %lane, 7;
    shr.u32 %col, %lane, 3;
    and.b32 %col, %col, 1;
    .if TRANS {
        and.b32 %row, %lane, 15;
        mul.lo.u32 %t, %row, $B_STRIDE;
    } .else {
        mul.lo.u32 %t, %row, $B_STRIDE;
        mad.lo.u32 %t, %col, 16, %t;
    }
    add.u32 %t, %t, %base;
LOOP:
    add.u32 %at, %at, 16;
    setp.lt.u32 %more, %at, %k;
    xor.b32 %stage, %stage, 1;
    mad.lo.u32 %to_a, %stage, $STAGE, %to_a;
    mad.lo.u32 %to_b, %stage, $STAGE, %to_b;
    @!%more bra LAST;
    FETCH!();
LAST:
    cp.async.commit_group;
    cp.async.wait_group 1;
    bar.warp.sync -1;
    ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%fa[0 .. 4]}, [%from];
    .if TRANS { ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%fb0, %fb1}, [%t + ${16 * STRIDE}]; }
    .else     { ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%fb0, %fb1}, [%t + ${16 * STRIDE}]; }
    .if HALF {
        mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%acc[0 .. 4]}, {%fa[0 .. 4]}, {%fb[0 .. 2]}, {%acc[0 .. 4]};
    }
    .else {
        mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32
            {%acc[0 .. 4]}, {%fa[0 .. 4]}, {%fb[0 .. 2]}, {%acc[0 .. 4]};
    }
    bar.warp.sync 0xffffffff;
    // The other stage is next, for copies and for fragments.
    setp.eq.u32 %done, %stage, 1;
    @%done add.u32 %from, %from, $STAGE;
    @%done add.u32 %t, %t, $STAGE;
    @!%done sub.u32 %from, %from, $STAGE;
    @!%done sub.u32 %t, %t, $STAGE;
    @%done sub.u32 %to_a, %to_a, $STAGE;
    @%done sub.u32 %to_b, %to_b, $STAGE;
    @%more bra LOOP;

    shr.u32 %row, %lane, 2;
    and.b32 %col, %lane, 3;
    mad.lo.u32 %row, %row, 4, %col;
    mad.wide.u32 %d, %row, 8, %d;
    st.global.v2.f32 [%d], {%acc0, %acc1};
    st.global.v2.f32 [%d + 256], {%acc2, %acc3};
    ret;
}
";

struct Input {
    bytes: Vec<u8>,
    values: Vec<f64>,
}
/// Multiples of 1/8 up to 1: exact in every format, with products whose sums are exact in f32.
fn input(seed: usize, n: usize, bytes: impl Fn(f32) -> Vec<u8>) -> Input {
    let values: Vec<f64> = (0..n).map(|i| ((i * 7 + i / 5 * 3 + seed) % 17) as f64 / 8.0 - 1.0).collect();
    Input { bytes: values.iter().flat_map(|v| bytes(*v as f32)).collect(), values }
}
fn floats(bytes: &[u8]) -> Vec<f64> {
    bytes.as_chunks().0.iter().map(|b| f32::from_le_bytes(*b) as f64).collect()
}

type Ran = Result<(Vec<f64>, Vec<f64>, LaunchCounts), LaunchReport>;

/// Result, expectation, counts.
fn tile(text: &str, given: &[(&str, i64)], k: usize, schedule: u64) -> Ran {
    let has = |name: &str| given.contains(&(name, 1));
    let (half, trans) = (has("HALF"), has("TRANS"));
    let bytes = |v: f32| {
        if half { f16::from_f32(v).to_le_bytes().to_vec() } else { bf16::from_f32(v).to_le_bytes().to_vec() }
    };
    let (a, b) = (input(1, 16 * k, bytes), input(5, 8 * k, bytes));
    let text = expand("tile.ptx", text, given, &|_| None).unwrap_or_else(|e| panic!("{e}"));
    let kernels = parse("tile.ptx", &text).unwrap_or_else(|e| panic!("{e}"));
    let mut memory = GlobalMemory::new();
    let (pa, pb, pd) = (memory.upload("A", &a.bytes), memory.upload("B", &b.bytes), memory.alloc("D", 512));
    let arguments = &[Argument::Pointer(pa), Argument::Pointer(pb), Argument::Pointer(pd), Argument::U32(k as u32)];
    let launch =
        KernelLaunch { kernel: &kernels[0], grid: [1; 3], block: [32, 1, 1], dynamic_shared: 0, arguments, schedule };
    let counts = launch.run(&mut memory)?;
    let of_b = |n: usize, i: usize| b.values[if trans { i * 8 + n } else { n * k + i }];
    let dot = |m: usize, n: usize| (0..k).map(|i| a.values[m * k + i] * of_b(n, i)).sum();
    let want = (0..128).map(|d| dot(d / 8, d % 8)).collect();
    Ok((floats(memory.download(pd).unwrap()), want, counts))
}
fn plant(source: &str, old: &str, new: &str) -> String {
    assert!(source.contains(old), "nothing to replace: {old}");
    source.replacen(old, new, 1)
}
fn caught(kind: FindingKind, words: &str, text: &str, given: &[(&str, i64)]) {
    for schedule in 0..4 {
        let report = tile(text, given, 64, schedule).map(|r| r.0).expect_err("the fault was not caught");
        let found = report.findings.iter().any(|f| f.kind == kind && f.to_string().contains(words));
        assert!(found, "no {kind:?} with '{words}' in\n{report}");
    }
}

#[test]
fn tiles_are_exact_under_every_schedule() {
    for given in [&[][..], &[("HALF", 1)], &[("TRANS", 1)], &[("TRANS", 1), ("HALF", 1)]] {
        for k in [16, 32, 80] {
            for schedule in 0..4 {
                let (got, want, _) = tile(TILE, given, k, schedule).unwrap_or_else(|report| panic!("{report}"));
                assert_eq!(got, want, "{given:?} k {k}");
            }
        }
    }
}

#[test]
fn bank_conflicts_follow_the_stride() {
    let conflicts = |stride: i64| tile(TILE, &[("STRIDE", stride)], 16, 0).unwrap().2.bank_conflicts;
    // One step: four matrices of A and two of B. At 32 bytes rows 0 and 4 meet in their banks: one pass more for each;
    // at 128 bytes all eight do. The copies into shared memory cost as much: A in four quarters, B in two.
    assert_eq!(conflicts(48), copies(48));
    assert_eq!(conflicts(32), 6 + copies(32));
    assert_eq!(conflicts(128), 6 * 7 + copies(128));
}
/// Extra passes of the copies: a quarter of a warp writes both halves of four rows.
fn copies(stride: u64) -> u64 {
    let quarter = |first: u64| {
        let mut banks = [0; 32];
        for lane in first..first + 8 {
            (0..4).for_each(|word| banks[((lane / 2 * stride + lane % 2 * 16) / 4 + word) as usize % 32] += 1);
        }
        banks.iter().max().unwrap() - 1
    };
    (0..4).map(|q| quarter(8 * q)).sum::<u64>() + (0..2).map(|q| quarter(8 * q)).sum::<u64>()
}

#[test]
fn tf32_ignores_the_lower_bits() {
    // Fragments straight from memory: lane l of A holds (l / 4 + 8 (i % 2), l % 4 + 4 (i / 2)), of B (l / 4, l % 4 + 4
    // i).
    let source = ".visible .entry k(.param .u64 p_a, .param .u64 p_b, .param .u64 p_d) { .reg .b64 %a, %b, %d;
        .reg .b32 %lane, %row, %col, %t, %fa<4>, %fb<2>; .reg .f32 %acc<4>;
        ld.param.u64 %a, [p_a]; ld.param.u64 %b, [p_b]; ld.param.u64 %d, [p_d]; mov.u32 %lane, %laneid;
        shr.u32 %row, %lane, 2; and.b32 %col, %lane, 3; mad.lo.u32 %t, %row, 8, %col;
        mad.wide.u32 %a, %t, 4, %a; mad.wide.u32 %b, %t, 4, %b;
        ld.global.b32 %fa0, [%a]; ld.global.b32 %fa1, [%a+256];
        ld.global.b32 %fa2, [%a+16]; ld.global.b32 %fa3, [%a+272];
        ld.global.b32 %fb0, [%b]; ld.global.b32 %fb1, [%b+16];
        mov.f32 %acc0, 0f3F800000; mov.f32 %acc1, %acc0; mov.f32 %acc2, %acc0; mov.f32 %acc3, %acc0;
        mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32
            {%acc0, %acc1, %acc2, %acc3}, {%fa0, %fa1, %fa2, %fa3}, {%fb0, %fb1}, {%acc0, %acc1, %acc2, %acc3};
        mad.lo.u32 %t, %row, 4, %col; mad.wide.u32 %d, %t, 8, %d;
        st.global.v2.f32 [%d], {%acc0, %acc1}; st.global.v2.f32 [%d+256], {%acc2, %acc3}; ret; }";
    let kernels = parse("k.ptx", source).unwrap();
    let dirty = |v: f32| f32::from_bits(v.to_bits() | 0x1fff).to_le_bytes().to_vec();
    let (a, b) = (input(2, 128, dirty), input(3, 64, dirty));
    let mut memory = GlobalMemory::new();
    let (pa, pb, pd) = (memory.upload("A", &a.bytes), memory.upload("B", &b.bytes), memory.alloc("D", 512));
    let arguments = &[Argument::Pointer(pa), Argument::Pointer(pb), Argument::Pointer(pd)];
    let launch = KernelLaunch {
        kernel: &kernels[0],
        grid: [1; 3],
        block: [32, 1, 1],
        dynamic_shared: 0,
        arguments,
        schedule: 1,
    };
    launch.run(&mut memory).unwrap_or_else(|report| panic!("{report}"));
    let dot = |m: usize, n: usize| (0..8).map(|i| a.values[m * 8 + i] * b.values[n * 8 + i]).sum::<f64>();
    let want: Vec<f64> = (0..128).map(|d| 1.0 + dot(d / 8, d % 8)).collect();
    assert_eq!(floats(memory.download(pd).unwrap()), want);
}

#[test]
fn faults_around_tiles() {
    caught(FindingKind::InFlight, "asynchronous copy is in flight", &plant(TILE, "cp.async.wait_group 1;", ""), &[]);
    let lax = plant(TILE, "cp.async.wait_group 1;", "cp.async.wait_group 2;");
    caught(FindingKind::InFlight, "read of shared 'stages'", &lax, &[]);
    // Even the lane that waited for its own row reads other lanes' data.
    let barrier = plant(TILE, "    bar.warp.sync -1;\n", "\n");
    caught(FindingKind::Race, "read of shared 'stages'", &barrier, &[]);
    let barrier = plant(TILE, "    bar.warp.sync 0xffffffff;\n", "\n");
    caught(FindingKind::Race, "write of shared 'stages'", &barrier, &[]);
    caught(FindingKind::Misaligned, "16 bytes at byte", TILE, &[("STRIDE", 40)]);
    let beyond = plant(TILE, "%row, $STRIDE, %base;\n    mad.lo.u32 %from", "%row, 999, %base;\n    mad.lo.u32 %from");
    caught(FindingKind::OutOfBounds, "of shared 'stages'", &plant(&beyond, "999", "1024"), &[]);
    let guarded =
        plant(TILE, "mma.sync.aligned.m16n8k16.row.col.f32.bf16", "@%half mma.sync.aligned.m16n8k16.row.col.f32.bf16");
    caught(FindingKind::Divergent, "lanes 0xffff0000 never arrive", &guarded, &[]);
    let guarded = plant(TILE, "    ldmatrix.sync", "    @%half ldmatrix.sync");
    caught(FindingKind::Divergent, "never arrive", &guarded, &[]);
    let unset = plant(TILE, ".for i in 0 .. 4 {", ".for i in 0 .. 3 {");
    caught(FindingKind::Uninitialized, "register %acc3", &unset, &[]);
}

/// Each lane stores two registers as matrices, and reads 16 bytes of them.
fn stored(text: &str, schedule: u64) -> Result<LaunchCounts, LaunchReport> {
    let source = format!(
        ".visible .entry k(.param .u64 p_y) {{ .reg .pred %half; .reg .b64 %y, %z; .reg .b32 %lane, %at, %r<4>, %unset;
        .shared .align 128 .b8 s[512]; ld.param.u64 %y, [p_y]; mov.u32 %lane, %laneid; setp.lt.u32 %half, %lane, 16;
        mov.u32 %at, s; mad.lo.u32 %at, %lane, 16, %at; mov.u32 %r0, %lane; not.b32 %r1, %lane;
        mul.wide.u32 %z, %lane, 16; add.u64 %z, %z, %y;
        {text}
        bar.warp.sync -1; @%half ld.shared.v4.b32 {{%r0, %r1, %r2, %r3}}, [%at];
        @%half st.global.v4.b32 [%z], {{%r0, %r1, %r2, %r3}}; ret; }}"
    );
    let kernels = parse("k.ptx", &source).unwrap_or_else(|e| panic!("{e}"));
    let mut memory = GlobalMemory::new();
    let y = memory.alloc("y", 256);
    let (kernel, arguments) = (&kernels[0], &[Argument::Pointer(y)]);
    let counts = KernelLaunch { kernel, grid: [1; 3], block: [32, 1, 1], dynamic_shared: 0, arguments, schedule }
        .run(&mut memory)?;
    // Register i of lane l is word l of matrix i: rows of four words.
    let words = (0..32).chain((0..32).map(|lane: u32| !lane));
    assert_eq!(memory.download(y).unwrap(), words.flat_map(|w| w.to_le_bytes()).collect::<Vec<u8>>());
    Ok(counts)
}

#[test]
fn faults_around_stored_matrices() {
    const STORE: &str = "stmatrix.sync.aligned.m8n8.x2.shared.b16 [%at], {%r0, %r1};";
    let counts = stored(STORE, 0).unwrap_or_else(|report| panic!("{report}"));
    assert_eq!(counts.bank_conflicts, 0);
    let caught = |kind: FindingKind, words: &str, text: String| {
        for schedule in 0..4 {
            let report = stored(&text, schedule).expect_err("the fault was not caught");
            let found = report.findings.iter().any(|f| f.kind == kind && f.to_string().contains(words));
            assert!(found, "no {kind:?} with '{words}' in\n{report}");
        }
    };
    // A lane's row comes from other lanes: even its giver must wait.
    let early = "@%half ld.shared.b32 %r2, [%at]; @%half st.global.b32 [%z], %r2;";
    caught(FindingKind::Race, "read of shared 's'", format!("{STORE} {early}"));
    caught(FindingKind::Race, "write of shared 's'", format!("st.shared.b32 [%at], %lane; {STORE}"));
    caught(FindingKind::Misaligned, "16 bytes at byte 8 of shared 's'", STORE.replace("[%at]", "[%at+8]"));
    caught(FindingKind::OutOfBounds, "of shared 's'", STORE.replace("[%at]", "[%at+272]"));
    caught(FindingKind::Divergent, "never arrive", format!("@%half {STORE}"));
    caught(FindingKind::Uninitialized, "register %unset", STORE.replace("%r1}", "%unset}"));
    // What ptxas refuses.
    for (count, registers) in [("x2", "%r0"), ("x4", "%r0, %r1"), ("x3", "%r0, %r1, %r2")] {
        let text = format!(
            ".visible .entry k() {{ .reg .b32 %at, %r<4>; stmatrix.sync.aligned.m8n8.{count}.shared.b16 [%at], {{{registers}}}; ret; }}"
        );
        assert!(parse("k.ptx", &text).is_err_and(|e| e.contains("not modeled")), "{count}");
    }
}
