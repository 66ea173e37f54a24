//! Every check is proved by a planted fault that it catches, under several schedules; the same kernels without the fault
//! raise no alarm under any. And what is not modelled is refused.
use flatshard_ptx::emulate::{Argument, Counts, Kind, Launch, Memory, Report, parse};

const SCHEDULES: std::ops::Range<u64> = 0..8;

/// out[0] += sum of x[i], i < n: shuffles within a warp, shared memory between warps, an atomic between CTAs.
const SUM: &str = "\
.version 8.0
.target sm_80
.address_size 64
.visible .entry sum(.param .u64 p_x, .param .u64 p_out, .param .u32 p_n)
.maxntid 96, 1, 1
{
    .reg .pred %in, %first, %zero;
    .reg .b32 %t, %b, %d, %i, %n, %lane, %warp, %slot;
    .reg .b64 %x, %out, %at;
    .reg .f32 %sum, %other, %part<4>;
    .shared .align 16 .b8 slots[16];
    ld.param.u64 %x, [p_x];
    ld.param.u64 %out, [p_out];
    ld.param.u32 %n, [p_n];
    mov.u32 %t, %tid.x;
    mov.u32 %b, %ctaid.x;
    mov.u32 %d, %ntid.x;
    and.b32 %lane, %t, 31;
    shr.u32 %warp, %t, 5;
    mad.lo.u32 %i, %b, %d, %t;
    setp.lt.u32 %in, %i, %n;
    mov.f32 %sum, 0f00000000;
    mul.wide.u32 %at, %i, 4;
    add.u64 %at, %at, %x;
    @%in ld.global.f32 %sum, [%at];
    shfl.sync.bfly.b32 %other, %sum, 16, 31, -1;  add.f32 %sum, %sum, %other;
    shfl.sync.bfly.b32 %other, %sum, 8, 31, -1;   add.f32 %sum, %sum, %other;
    shfl.sync.bfly.b32 %other, %sum, 4, 31, -1;   add.f32 %sum, %sum, %other;
    shfl.sync.bfly.b32 %other, %sum, 2, 31, -1;   add.f32 %sum, %sum, %other;
    shfl.sync.bfly.b32 %other, %sum, 1, 31, -1;   add.f32 %sum, %sum, %other;
    setp.eq.u32 %first, %lane, 0;
    mov.u32 %slot, slots;
    mad.lo.u32 %slot, %warp, 4, %slot;
    @%first st.shared.f32 [%slot], %sum;
    bar.sync 0;
    setp.eq.u32 %zero, %t, 0;
    @!%zero bra END;
    ld.shared.v2.f32 {%part0, %part1}, [slots];
    ld.shared.f32 %part2, [slots+8];
    add.f32 %sum, %part0, %part1;
    add.f32 %sum, %sum, %part2;
    red.global.add.f32 [%out], %sum;
END:
    ret;
}
";

/// One warp reverses rows of 32 words through shared memory, copied there asynchronously, two rows in flight.
const REVERSE: &str = "\
.version 8.0
.target sm_80
.address_size 64
.visible .entry reverse(.param .u64 p_x, .param .u64 p_y, .param .u32 p_rows)
{
    .reg .pred %more, %end;
    .reg .b32 %lane, %rows, %row, %slot, %to, %v, %back, %use;
    .reg .b64 %x, %y, %off;
    .shared .align 16 .b32 stage[64];
    ld.param.u64 %x, [p_x];
    ld.param.u64 %y, [p_y];
    ld.param.u32 %rows, [p_rows];
    mov.u32 %lane, %laneid;
    mul.wide.u32 %off, %lane, 4;
    add.u64 %x, %x, %off;
    add.u64 %y, %y, %off;
    mov.u32 %slot, stage;
    mad.lo.u32 %to, %lane, 4, %slot;
    xor.b32 %back, %lane, 31;
    mad.lo.u32 %back, %back, 4, %slot;
    mov.u32 %row, 0;
    cp.async.ca.shared.global [%to], [%x], 4;
    cp.async.commit_group;
LOOP:
    add.u32 %row, %row, 1;
    setp.lt.u32 %more, %row, %rows;
    and.b32 %use, %row, 1;
    mad.lo.u32 %use, %use, 128, %to;
    add.u64 %x, %x, 128;
    @%more cp.async.ca.shared.global [%use], [%x], 4;
    cp.async.commit_group;
    cp.async.wait_group 1;
    bar.warp.sync -1;
    add.u32 %use, %row, 1;
    and.b32 %use, %use, 1;
    mad.lo.u32 %use, %use, 128, %back;
    ld.shared.b32 %v, [%use];
    st.global.b32 [%y], %v;
    add.u64 %y, %y, 128;
    bar.warp.sync 0xffffffff;
    setp.ge.u32 %end, %row, %rows;
    @!%end bra LOOP;
    ret;
}
";

fn bytes(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|v| v.to_le_bytes()).collect()
}
fn floats(bytes: &[u8]) -> Vec<f32> {
    bytes.as_chunks().0.iter().map(|b| f32::from_le_bytes(*b)).collect()
}
/// Replaces one piece of text; a plant that changes nothing would prove nothing.
fn plant(source: &str, old: &str, new: &str) -> String {
    assert!(source.contains(old), "nothing to replace: {old}");
    source.replacen(old, new, 1)
}

type Ran = Result<(Vec<f32>, Counts), Report>;

const N: usize = 250;
fn sum_of(source: &str, claimed: u32, schedule: u64) -> Ran {
    let mut memory = Memory::new();
    let x = memory.upload("x", &bytes(&(0..N).map(|i| i as f32).collect::<Vec<_>>()));
    let out = memory.upload("out", &[0; 4]);
    run(source, &mut memory, 3, 96, &[Argument::Pointer(x), Argument::Pointer(out), Argument::U32(claimed)], schedule)
        .map(|counts| (floats(memory.download(out).unwrap()), counts))
}
fn reverse_of(source: &str, schedule: u64) -> Ran {
    let mut memory = Memory::new();
    let x = memory.upload("x", &bytes(&(0..160).map(|i| i as f32).collect::<Vec<_>>()));
    let y = memory.alloc("y", 160 * 4);
    run(source, &mut memory, 1, 32, &[Argument::Pointer(x), Argument::Pointer(y), Argument::U32(5)], schedule)
        .map(|counts| (floats(memory.download(y).unwrap()), counts))
}
fn run(
    source: &str,
    memory: &mut Memory,
    grid: u32,
    block: u32,
    arguments: &[Argument],
    schedule: u64,
) -> Result<Counts, Report> {
    let kernels = parse("k.ptx", source).unwrap();
    let (grid, block) = ([grid, 1, 1], [block, 1, 1]);
    Launch { kernel: &kernels[0], grid, block, dynamic_shared: 0, arguments, schedule }.run(memory)
}
/// Under every schedule: a finding of that kind, which says all of `words`.
fn caught(kind: Kind, words: &[&str], run: impl Fn(u64) -> Ran) {
    for schedule in SCHEDULES {
        let report = run(schedule).map(|r| r.0).expect_err("the fault was not caught");
        let said = |f: &&flatshard_ptx::emulate::Finding| words.iter().all(|w| f.to_string().contains(w));
        let found = report.findings.iter().filter(|f| f.kind == kind).any(|f| said(&f));
        assert!(found, "schedule {schedule}: no {kind:?} with {words:?} in\n{report}");
    }
}
fn line(source: &str, text: &str) -> String {
    format!("k.ptx:{}", 1 + source.lines().position(|l| l.contains(text)).unwrap())
}

#[test]
fn correct_kernels_raise_no_alarm_and_count_alike() {
    let want = (0..N).sum::<usize>() as f32;
    let reversed: Vec<f32> = (0..160).map(|i| (i / 32 * 32 + 31 - i % 32) as f32).collect();
    let (first, again) = (sum_of(SUM, N as u32, 0).unwrap().1, reverse_of(REVERSE, 0).unwrap().1);
    for schedule in SCHEDULES {
        let (sum, counts) = sum_of(SUM, N as u32, schedule).unwrap_or_else(|report| panic!("{report}"));
        assert_eq!((sum[0], counts), (want, first));
        let (y, counts) = reverse_of(REVERSE, schedule).unwrap_or_else(|report| panic!("{report}"));
        assert_eq!((&y, counts), (&reversed, again));
    }
}

#[test]
fn counts_are_what_a_hand_gives() {
    let (_, counts) = sum_of(SUM, N as u32, 1).unwrap();
    // 250 floats are 32 sectors (the last one in part), three CTAs add to one sector each.
    assert_eq!(counts.global_sectors, 32 + 3);
    assert_eq!(counts.bank_conflicts, 0);
    // Each of 9 warps: 13 up to the load, it, 10 shuffles and adds, 7 to the branch, ret; and 5 in one warp of each CTA,
    // whose lanes part at the branch and meet again at END.
    assert_eq!(counts.instructions, 9 * (13 + 1 + 10 + 7 + 1) + 3 * 5);
    // Every lane of a warp in one bank: 31 more passes; two lanes to a bank: 1 more.
    for (stride, conflicts) in [(4, 0), (8, 1), (16, 3), (128, 31)] {
        let source = format!(
            ".visible .entry k() {{ .reg .b32 %a, %l; .shared .b32 s[1024]; mov.u32 %l, %laneid; mov.u32 %a, s;
             mad.lo.u32 %a, %l, {stride}, %a; st.shared.b32 [%a], %l; ret; }}"
        );
        let counts = run(&source, &mut Memory::new(), 1, 32, &[], 0).unwrap();
        assert_eq!(counts.bank_conflicts, conflicts, "stride {stride}");
    }
    // 16 bytes a lane: a quarter of the warp at a time, no conflict.
    let wide =
        ".visible .entry k() { .reg .b32 %a, %l; .shared .align 16 .b32 s[128]; mov.u32 %l, %laneid; mov.u32 %a, s;
        mad.lo.u32 %a, %l, 16, %a; st.shared.v4.b32 [%a], {%l, %l, %l, %l}; ret; }";
    assert_eq!(run(wide, &mut Memory::new(), 1, 32, &[], 0).unwrap().bank_conflicts, 0);
}

#[test]
fn races_in_shared_memory() {
    let source = plant(SUM, "    bar.sync 0;\n", "\n");
    let write = line(&source, "st.shared");
    caught(Kind::Race, &["sum at k.ptx:", "shared 'slots' bytes", "lane 0", &write], |s| sum_of(&source, 250, s));
}
#[test]
fn races_within_a_warp() {
    let first = plant(REVERSE, "    bar.warp.sync -1;\n", "\n");
    caught(Kind::Race, &["read of shared 'stage'", "unordered with the write by"], |s| reverse_of(&first, s));
    let second = plant(REVERSE, "    bar.warp.sync 0xffffffff;\n", "\n");
    caught(Kind::Race, &["write of shared 'stage'", "unordered with the read by"], |s| reverse_of(&second, s));
}
#[test]
fn races_in_global_memory() {
    // Between CTAs, in place of an atomic.
    let source = plant(SUM, "red.global.add.f32 [%out], %sum", "st.global.f32 [%out], %sum");
    caught(Kind::Race, &["write of 'out' bytes 0..4", "unordered with the write by cta"], |s| sum_of(&source, 250, s));
    // An atomic and a plain read.
    let source = plant(SUM, "END:", "    ld.global.f32 %sum, [%out];\nEND:");
    caught(Kind::Race, &["'out' bytes 0..4", "atomic"], |s| sum_of(&source, 250, s));
    // Between warps of a CTA: all write to the first word.
    let source = plant(SUM, "@%in ld.global.f32 %sum, [%at]", "st.global.f32 [%out], %sum");
    caught(Kind::Race, &["write of 'out'", "unordered with the write"], |s| sum_of(&source, 250, s));
}
#[test]
fn neighbours_in_one_word_are_no_race() {
    let source = ".visible .entry k(.param .u64 p) { .reg .b64 %p, %o; .reg .b32 %t; .reg .b16 %h; ld.param.u64 %p, [p];
        mov.u32 %t, %tid.x; mul.wide.u32 %o, %t, 2; add.u64 %p, %p, %o; cvt.u16.u32 %h, %t; st.global.b16 [%p], %h; ret; }";
    for schedule in SCHEDULES {
        let mut memory = Memory::new();
        let y = memory.alloc("y", 64 * 2);
        run(source, &mut memory, 1, 64, &[Argument::Pointer(y)], schedule).unwrap();
        let bytes: Vec<u8> = (0..64u16).flat_map(|t| t.to_le_bytes()).collect();
        assert_eq!(memory.download(y).unwrap(), bytes);
    }
}

#[test]
fn missing_waits() {
    let wait = "cp.async.wait_group 1;";
    let read = line(REVERSE, "ld.shared");
    for wrong in ["", "cp.async.wait_group 2;"] {
        let source = plant(REVERSE, wait, wrong);
        caught(Kind::InFlight, &[&read, "read of shared 'stage'"], |s| reverse_of(&source, s));
    }
    let source = plant(REVERSE, wait, "cp.async.wait_all;");
    reverse_of(&source, 3).unwrap();
    // Writing to where a copy is in flight.
    let source = plant(REVERSE, wait, "st.shared.b32 [%to], %lane;");
    caught(Kind::InFlight, &["write of shared 'stage'"], |s| reverse_of(&source, s));
}

#[test]
fn copies_fill_up_with_zeros_and_read_no_further() {
    let copy = |lanes: u32, part: &str, offset: u32| {
        let source = format!(
            ".visible .entry k(.param .u64 p_x, .param .u64 p_y) {{ .reg .b32 %lane, %to, %v, %n; .reg .b64 %x, %y, %off;
            .shared .align 16 .b8 s[512]; ld.param.u64 %x, [p_x]; ld.param.u64 %y, [p_y]; mov.u32 %lane, %laneid;
            mul.wide.u32 %off, %lane, 16; add.u64 %x, %x, %off; mul.wide.u32 %off, %lane, 4; add.u64 %y, %y, %off;
            mov.u32 %to, s; mad.lo.u32 %to, %lane, 16, %to; {part}
            cp.async.cg.shared.global [%to], [%x+{offset}], 16, %n; cp.async.wait_all; ld.shared.b32 %v, [%to+4];
            st.global.b32 [%y], %v; ret; }}"
        );
        let mut memory = Memory::new();
        let words: Vec<u8> = (0..lanes * 4).flat_map(|i| i.to_le_bytes()).collect();
        let (x, y) = (memory.upload("x", &words), memory.alloc("y", 128));
        run(&source, &mut memory, 1, 32, &[Argument::Pointer(x), Argument::Pointer(y)], 1)?;
        let words = memory.download(y).unwrap().as_chunks().0.iter();
        Ok::<Vec<u32>, Report>(words.map(|b| u32::from_le_bytes(*b)).collect())
    };
    let each = |f: fn(u32) -> u32| (0..32).map(f).collect::<Vec<u32>>();
    assert_eq!(copy(32, "mov.u32 %n, 16;", 0).unwrap(), each(|l| 4 * l + 1));
    assert_eq!(copy(32, "mov.u32 %n, 6;", 0).unwrap(), each(|l| (4 * l + 1) & 0xffff));
    assert_eq!(copy(32, "mov.u32 %n, 0;", 0).unwrap(), each(|_| 0));
    // x ends after 20 lanes: those beyond copy nothing.
    let some = "setp.lt.u32 %p, %lane, 20; selp.u32 %n, 16, 0, %p;";
    let some = format!(".reg .pred %p; {some}");
    assert_eq!(copy(20, &some, 0).unwrap(), each(|l| if l < 20 { 4 * l + 1 } else { 0 }));
    assert!(copy(20, "mov.u32 %n, 16;", 0).unwrap_err().has(Kind::OutOfBounds));
    assert!(copy(32, "mov.u32 %n, 8;", 4).unwrap_err().has(Kind::Misaligned));
    assert!(copy(32, "mov.u32 %n, 7;", 0).unwrap_err().has(Kind::Misaligned));
}

#[test]
fn uninitialised_registers() {
    let source = plant(SUM, "    mov.f32 %sum, 0f00000000;\n", "\n");
    let place = line(&source, "shfl.sync.bfly.b32 %other, %sum, 16");
    caught(Kind::Uninitialised, &["register %sum", &place, "cta 2 warp", "lane"], |s| sum_of(&source, 250, s));
    let source = plant(SUM, "    setp.eq.u32 %zero, %t, 0;\n", "\n");
    caught(Kind::Uninitialised, &["register %zero"], |s| sum_of(&source, 250, s));
}
#[test]
fn uninitialised_memory() {
    let source = plant(SUM, "@%first st.shared.f32 [%slot], %sum;", "");
    caught(Kind::Uninitialised, &["read of shared 'slots' bytes 0..8, which nothing"], |s| sum_of(&source, 250, s));
    caught(Kind::Uninitialised, &["atomic of 'out' bytes 0..4"], |schedule| {
        let mut memory = Memory::new();
        let (x, out) = (memory.upload("x", &[0; 4 * N]), memory.alloc("out", 4));
        let arguments = [Argument::Pointer(x), Argument::Pointer(out), Argument::U32(N as u32)];
        run(SUM, &mut memory, 3, 96, &arguments, schedule).map(|counts| (vec![], counts))
    });
    let mut memory = Memory::new();
    let y = memory.alloc("y", 8);
    assert_eq!(memory.download(y).unwrap_err(), "byte 0 of 'y' was never written");
}

#[test]
fn out_of_bounds() {
    let load = line(SUM, "@%in ld.global");
    let said = ["bytes 1000..1004 of 'x' (1000 bytes)", &load, "cta 2 warp 1 lane 26"];
    caught(Kind::OutOfBounds, &said, |s| sum_of(SUM, 251, s));
    let source = plant(SUM, "@%in ld.global.f32 %sum, [%at]", "@%in ld.global.f32 %sum, [%at-4]");
    caught(Kind::OutOfBounds, &["is in no allocation", "lane 0"], |s| sum_of(&source, 250, s));
    let source = plant(SUM, "%warp, 4, %slot", "%warp, 40, %slot");
    caught(Kind::OutOfBounds, &["of shared 'slots' (16 bytes)"], |s| sum_of(&source, 250, s));
    let source = plant(SUM, "st.shared.f32 [%slot]", "st.shared.f32 [%slot-8]");
    caught(Kind::OutOfBounds, &["is in no shared array"], |s| sum_of(&source, 250, s));
    // From one array into the next.
    let source =
        plant(SUM, "    .shared .align 16 .b8 slots[16];", "    .shared .align 16 .b8 slots[8];  .shared .b8 b[64];");
    caught(Kind::OutOfBounds, &["bytes 8..12 of shared 'slots' (8 bytes)"], |s| sum_of(&source, 250, s));
}
#[test]
fn misaligned() {
    let source =
        plant(SUM, "ld.shared.v2.f32 {%part0, %part1}, [slots]", "ld.shared.v2.f32 {%part0, %part1}, [slots+4]");
    caught(Kind::Misaligned, &["8 bytes at byte 4 of shared 'slots'"], |s| sum_of(&source, 250, s));
    let source = plant(SUM, "ld.global.f32 %sum, [%at]", "ld.global.f32 %sum, [%at+2]");
    caught(Kind::Misaligned, &["4 bytes at byte", "of 'x'"], |s| sum_of(&source, 250, s));
}

#[test]
fn divergence() {
    let shuffle = "shfl.sync.bfly.b32 %other, %sum, 16, 31, -1;";
    let source = plant(SUM, shuffle, &format!("setp.eq.u32 %first, %lane, 0; @%first {shuffle}"));
    let said = ["lanes 0xfffffffe never arrive", "which lanes 0x00000001 execute"];
    caught(Kind::Divergent, &said, |s| sum_of(&source, 250, s));
    let source = plant(SUM, "bar.sync 0;", "@%first bar.sync 0;");
    caught(Kind::Divergent, &["never arrive"], |s| sum_of(&source, 250, s));
    // By a branch: half the warp returns to a place that the other half waits behind.
    let source = plant(SUM, shuffle, &format!("setp.lt.u32 %first, %lane, 16; @%first bra END; {shuffle}"));
    let source = plant(&source, "END:\n", "END:\n    bar.sync 0;\n");
    caught(Kind::Divergent, &["never arrive"], |s| sum_of(&source, 250, s));
    // Taking from a lane that does not take part.
    let source =
        plant(SUM, shuffle, "setp.lt.u32 %first, %lane, 16; @%first shfl.sync.bfly.b32 %other, %sum, 16, 31, 0xffff;");
    caught(Kind::Divergent, &["takes from lane 16"], |s| sum_of(&source, 250, s));
}
#[test]
fn deadlock_and_endless_loops() {
    let source = plant(SUM, "bar.sync 0;", "setp.eq.u32 %zero, %warp, 1;\n@%zero bar.sync 1;\n@!%zero bar.sync 0;");
    caught(Kind::Deadlock, &["sum: cta", "warp 1 at barrier 1 (k.ptx:", "warp 0 at barrier 0"], |s| {
        sum_of(&source, 250, s)
    });
    let source = plant(SUM, "END:\n", "END:\n    bra END;\n");
    let report = sum_of(&source, 250, 1).map(|r| r.0).unwrap_err();
    assert!(report.has(Kind::Endless), "{report}");
    let source = plant(SUM, "    ret;\n", "");
    caught(Kind::Launch, &["'ret' is missing"], |s| sum_of(&source, 250, s));
}
#[test]
fn launches_that_do_not_fit() {
    let kernels = parse("k.ptx", SUM).unwrap();
    let said = |block: u32, arguments: &[Argument]| {
        let (grid, block) = ([1, 1, 1], [block, 1, 1]);
        let launch = Launch { kernel: &kernels[0], grid, block, dynamic_shared: 0, arguments, schedule: 0 };
        launch.run(&mut Memory::new()).unwrap_err().to_string()
    };
    let three = [Argument::Pointer(0), Argument::Pointer(0), Argument::F32(0.0)];
    assert_eq!(said(97, &three), "launch: sum: grid [1, 1, 1] and block [97, 1, 1]: 1 to 96 threads a CTA are allowed");
    let exact = parse("k.ptx", &SUM.replace(".maxntid", ".reqntid")).unwrap();
    let (grid, block) = ([1; 3], [64, 1, 1]);
    let launch = Launch { kernel: &exact[0], grid, block, dynamic_shared: 0, arguments: &three, schedule: 0 };
    assert!(launch.run(&mut Memory::new()).unwrap_err().to_string().ends_with("96 to 96 threads a CTA are allowed"));
    assert_eq!(said(96, &three[..2]), "launch: sum: takes 3 arguments, given 2");
    let wrong = [three[0], three[1], Argument::U64(0)];
    assert_eq!(said(96, &wrong), "launch: sum: parameter p_n has 4 bytes, given 8");
}

#[test]
fn the_open_array_has_the_length_that_the_launch_gives() {
    let text = ".extern .shared .align 128 .b8 open[];
        .visible .entry k(.param .u64 p_out) { .reg .b32 %t, %at, %r; .reg .b64 %out, %off; ld.param.u64 %out, [p_out];
        mov.u32 %t, %tid.x; mad.lo.u32 %at, %t, 4, open; st.shared.b32 [%at], %t; ld.shared.b32 %r, [%at];
        mul.wide.u32 %off, %t, 4; add.u64 %out, %out, %off; st.global.b32 [%out], %r; ret; }";
    let text = text.replace("mad.lo.u32 %at, %t, 4, open", "mov.u32 %r, open; mad.lo.u32 %at, %t, 4, %r");
    let kernels = parse("k.ptx", &text).unwrap();
    let run = |dynamic_shared| {
        let mut memory = Memory::new();
        let arguments = &[Argument::Pointer(memory.alloc("out", 128))];
        let (grid, block) = ([1; 3], [32, 1, 1]);
        Launch { kernel: &kernels[0], grid, block, dynamic_shared, arguments, schedule: 0 }.run(&mut memory)
    };
    run(128).unwrap_or_else(|report| panic!("{report}"));
    let report = run(124).unwrap_err();
    assert!(report.has(Kind::OutOfBounds) && report.to_string().contains("124..128 of shared 'open'"), "{report}");
    let twice = text.replace(".reg .b32 %t", ".shared .b32 own; .reg .b32 %t");
    assert!(parse("k.ptx", &twice).err().unwrap().ends_with("has no arrays of its own"));
}

#[test]
fn what_is_not_modelled_is_refused_with_its_line() {
    for text in [
        "add.sat.s32 %r0, %r1, %r2;",
        "add.rz.f32 %r0, %r1, %r2;",
        "mul.hi.u64 %d0, %d1, %d2;",
        "cvt.rzi.s64.f32 %d0, %r1;",
        "mad.lo.cc.u32 %r0, %r1, %r2, %r3;",
        "setp.lt.and.u32 %p, %r1, %r2, %q;",
        "ld.volatile.global.b32 %r0, [%d0];",
        "ld.global.s8 %r0, [%d0];",
        "ld.release.gpu.global.b32 %r0, [%d0];",
        "ld.global.v4.b64 {%d0, %d1, %d2, %d3}, [%d0];",
        "ld.global.v2.b32 %r0, [%d0];",
        "st.acquire.gpu.global.b32 [%d0], %r0;",
        "atom.global.cas.b32 %r0, [%d0], %r1;",
        "red.global.cas.b32 [%d0], %r1, %r2;",
        "fence.proxy.alias;",
        "bar.arrive 0;",
        "shfl.bfly.b32 %r0, %r1, 1, 31;",
        "cp.async.cg.shared.global [%r0], [%d0], 8;",
        "wgmma.mma_async.sync.aligned.m64n8k16.f32.e4m3.e4m3 {%r0, %r1, %r2, %r3}, %d0, %d1, 1, 1, 1;",
        "wgmma.mma_async.sync.aligned.m64n16k16.f32.bf16.bf16 {%r0, %r1, %r2, %r3}, %d0, %d1, 1, 1, 1, 0, 0;",
        "wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {%r0, %r1, %r2, %r3}, %d0, %d1, 1, 1, 2, 0, 0;",
        "mbarrier.arrive.noComplete.shared.b64 %d0, [%r0], 1;",
        "cp.async.bulk.tensor.2d.shared::cluster.global.im2col.mbarrier::complete_tx::bytes [%r0], [%d0, {%r1, %r2}], [%r0];",
        "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%r0], [%d0, {%r1, %r2}], [%r0];",
        "barrier.cluster.arrive.relaxed;",
        "call %r0;",
    ] {
        let source = format!(
            ".visible .entry k()\n{{\n.reg .pred %p, %q;\n.reg .b32 %r<4>;\n.reg .b64 %d<4>;\n{text}\nret;\n}}\n"
        );
        let said = parse("k.ptx", &source).err().unwrap_or_else(|| panic!("accepted: {text}"));
        assert!(said.starts_with("k.ptx:6: ") && said.ends_with("is not modelled"), "{text}: {said}");
    }
}
#[test]
fn errors_of_the_text_name_their_line() {
    let wrap = |text: &str| format!(".visible .entry k()\n{{\n.reg .b32 %r<4>;\n{text}\nret;\n}}\n");
    for (text, want) in [
        ("mov.b32 %r0, %x;", "undeclared register '%x'"),
        ("mov.b32 %r4, 1;", "undeclared register '%r4'"),
        ("mov.b32 %r0, 1.0;", "bad number '1.0'"),
        ("bra NOWHERE;", "unknown name 'NOWHERE'"),
        ("{ INNER: } bra INNER;", "unknown name 'INNER'"),
        ("A: A: ret;", "label 'A' is defined twice"),
        (".reg .b32 %r1;\n", "'%r1' is defined twice"),
        (".reg .b128 %q;", "type '.b128' is not modelled"),
        ("mov.b32 %r0 %r1;", "';' expected"),
        ("@%r0+ ret;", "a name expected"),
        ("/* never", "a /* comment never ends"),
    ] {
        let said = parse("k.ptx", &wrap(text)).err().unwrap_or_else(|| panic!("accepted: {text}"));
        assert!(said.starts_with("k.ptx:4: ") && said.contains(want), "{text}: {said}");
    }
    let marked = wrap("# 77 \"other.ptx\"\nbra NOWHERE;");
    assert_eq!(parse("k.ptx", &marked).err().unwrap(), "other.ptx:77: unknown name 'NOWHERE'");
}
