//! Every check is verified by a planted fault that it detects under several schedules; the same kernels without the
//! fault raise no finding under any. Unmodeled instructions are refused.
mod approximate;
mod memory;
mod order;
mod text;

use flatshard_ptx::emulate::{
    Argument, FindingKind, GlobalMemory, KernelLaunch, LATE, LaunchCounts, LaunchReport, parse,
};

pub const SCHEDULES: std::ops::Range<u64> = 0..8;

/// out[0] += sum of x[i], i < n: shuffles within a warp, shared memory between warps, an atomic between CTAs.
pub const SUM: &str = "\
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
pub const REVERSE: &str = "\
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

pub fn bytes(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|v| v.to_le_bytes()).collect()
}
pub fn floats(bytes: &[u8]) -> Vec<f32> {
    bytes.as_chunks().0.iter().map(|b| f32::from_le_bytes(*b)).collect()
}
/// Replaces one piece of text; a plant that changes nothing would prove nothing.
pub fn plant(source: &str, old: &str, new: &str) -> String {
    assert!(source.contains(old), "nothing to replace: {old}");
    source.replacen(old, new, 1)
}

pub type Ran = Result<(Vec<f32>, LaunchCounts), LaunchReport>;

pub const N: usize = 250;
pub fn sum_of(source: &str, claimed: u32, schedule: u64) -> Ran {
    let mut memory = GlobalMemory::new();
    let x = memory.upload("x", &bytes(&(0..N).map(|i| i as f32).collect::<Vec<_>>()));
    let out = memory.upload("out", &[0; 4]);
    run(source, &mut memory, 3, 96, &[Argument::Pointer(x), Argument::Pointer(out), Argument::U32(claimed)], schedule)
        .map(|counts| (floats(memory.download(out).unwrap()), counts))
}
pub fn reverse_of(source: &str, schedule: u64) -> Ran {
    let mut memory = GlobalMemory::new();
    let x = memory.upload("x", &bytes(&(0..160).map(|i| i as f32).collect::<Vec<_>>()));
    let y = memory.alloc("y", 160 * 4);
    run(source, &mut memory, 1, 32, &[Argument::Pointer(x), Argument::Pointer(y), Argument::U32(5)], schedule)
        .map(|counts| (floats(memory.download(y).unwrap()), counts))
}
pub fn run(
    source: &str,
    memory: &mut GlobalMemory,
    grid: u32,
    block: u32,
    arguments: &[Argument],
    schedule: u64,
) -> Result<LaunchCounts, LaunchReport> {
    let kernels = parse("k.ptx", source).unwrap();
    let (grid, block) = ([grid, 1, 1], [block, 1, 1]);
    KernelLaunch { kernel: &kernels[0], grid, block, dynamic_shared: 0, arguments, schedule }.run(memory)
}
/// Under every schedule there must be a finding of that kind whose text contains all of `words`.
pub fn caught(kind: FindingKind, words: &[&str], run: impl Fn(u64) -> Ran) {
    for schedule in SCHEDULES {
        let report = run(schedule).map(|r| r.0).expect_err("the fault was not caught");
        let said = |f: &&flatshard_ptx::emulate::Finding| words.iter().all(|w| f.to_string().contains(w));
        let found = report.findings.iter().filter(|f| f.kind == kind).any(|f| said(&f));
        assert!(found, "schedule {schedule}: no {kind:?} with {words:?} in\n{report}");
    }
}
pub fn line(source: &str, text: &str) -> String {
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
    // 250 floats are 32 sectors (the last one in part); three CTAs add to one sector each.
    assert_eq!(counts.global_sectors, 32 + 3);
    assert_eq!(counts.bank_conflicts, 0);
    // Each of 9 warps: 13 up to the load, the load, 10 shuffles and adds, 7 to the branch, ret; and 5 in one warp of
    // each CTA, whose lanes diverge at the branch and reconverge at END.
    assert_eq!(counts.instructions, 9 * (13 + 1 + 10 + 7 + 1) + 3 * 5);
    // All lanes of a warp in one bank: 31 more passes; two lanes per bank: 1 more.
    for (stride, conflicts) in [(4, 0), (8, 1), (16, 3), (128, 31)] {
        let source = format!(
            ".visible .entry k() {{ .reg .b32 %a, %l; .shared .b32 s[1024]; mov.u32 %l, %laneid; mov.u32 %a, s;
             mad.lo.u32 %a, %l, {stride}, %a; st.shared.b32 [%a], %l; ret; }}"
        );
        let counts = run(&source, &mut GlobalMemory::new(), 1, 32, &[], 0).unwrap();
        assert_eq!(counts.bank_conflicts, conflicts, "stride {stride}");
    }
    // 16 bytes per lane: a quarter of the warp at a time, no conflict.
    let wide =
        ".visible .entry k() { .reg .b32 %a, %l; .shared .align 16 .b32 s[128]; mov.u32 %l, %laneid; mov.u32 %a, s;
        mad.lo.u32 %a, %l, 16, %a; st.shared.v4.b32 [%a], {%l, %l, %l, %l}; ret; }";
    assert_eq!(run(wide, &mut GlobalMemory::new(), 1, 32, &[], 0).unwrap().bank_conflicts, 0);
}
