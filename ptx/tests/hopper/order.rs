//! Small kernels: which mechanisms order memory among threads, warps and CTAs, and which do not.
use flatshard_ptx::emulate::{Argument, FindingKind, GlobalMemory, KernelLaunch, LaunchReport, parse};

const SCHEDULES: std::ops::Range<u64> = 0..8;

/// Runs a body with `%t` (thread), `%c` (CTA), `%p`, `%q`, registers `%r0..7`, `%d0..7`, an array `s` and 64 words at
/// `%y`.
fn run(body: &str, grid: u32, block: u32, schedule: u64) -> Result<Vec<u32>, LaunchReport> {
    let source = format!(
        ".visible .entry k(.param .u64 p_y) {{\n.reg .pred %p, %q;\n.reg .b32 %t, %c, %r<8>;\n.reg .b64 %y, %z, %d<8>;
        .shared .align 128 .b8 s[1024];\n.shared .align 8 .b64 bar[4];\nld.param.u64 %y, [p_y];\nmov.u32 %t, %tid.x;
        mov.u32 %c, %ctaid.x;\n{body}\nret;\n}}"
    );
    let kernels = parse("k.ptx", &source).unwrap_or_else(|e| panic!("{e}"));
    let mut memory = GlobalMemory::new();
    let y = memory.upload("y", &[0; 256]);
    let (grid, block) = ([grid, 1, 1], [block, 1, 1]);
    let launch = KernelLaunch {
        kernel: &kernels[0],
        grid,
        block,
        dynamic_shared: 0,
        arguments: &[Argument::Pointer(y)],
        schedule,
    };
    launch.run(&mut memory)?;
    Ok(memory.download(y).unwrap().as_chunks().0.iter().map(|b| u32::from_le_bytes(*b)).collect())
}
fn right(body: &str, grid: u32, block: u32) -> Vec<u32> {
    let first = run(body, grid, block, 0).unwrap_or_else(|report| panic!("{report}"));
    for schedule in SCHEDULES {
        let again = run(body, grid, block, schedule).unwrap_or_else(|report| panic!("schedule {schedule}: {report}"));
        assert_eq!(again, first, "schedule {schedule}");
    }
    first
}
fn wrong(kind: FindingKind, body: &str, grid: u32, block: u32) {
    for schedule in SCHEDULES {
        let report =
            run(body, grid, block, schedule).err().unwrap_or_else(|| panic!("schedule {schedule}: nothing found"));
        assert!(report.has(kind), "schedule {schedule}: no {kind:?} in\n{report}");
    }
}

/// CTA 0 writes a word and raises a flag; CTA 1 waits for the flag and reads the word.
const HAND_OVER: &str = "
    setp.ne.u32 %p, %c, 0;
    @%p bra READ;
    st.global.b32 [%y], 42;
    RAISE
    bra END;
READ:
    LOOK
    setp.eq.u32 %p, %r0, 0;
    @%p bra READ;
    BELIEVE
    ld.global.b32 %r1, [%y];
    st.global.b32 [%y+8], %r1;
END:";
fn hand_over(raise: &str, look: &str, believe: &str) -> String {
    HAND_OVER.replace("RAISE", raise).replace("LOOK", look).replace("BELIEVE", believe)
}

#[test]
fn release_and_acquire_between_ctas() {
    let (raise, look) = ("st.release.gpu.global.b32 [%y+4], 1;", "ld.acquire.gpu.global.b32 %r0, [%y+4];");
    assert_eq!(right(&hand_over(raise, look, ""), 2, 1)[..3], [42, 1, 42]);
    let (relaxed, peek) = ("st.relaxed.gpu.global.b32 [%y+4], 1;", "ld.relaxed.gpu.global.b32 %r0, [%y+4];");
    let fence = "fence.acq_rel.gpu;";
    right(&hand_over(&format!("{fence} {relaxed}"), peek, fence), 2, 1);
    right(&hand_over("membar.gl; red.global.add.u32 [%y+4], 1;", peek, fence), 2, 1);
    right(&hand_over("atom.release.gpu.global.add.u32 %r2, [%y+4], 1;", look, ""), 2, 1);
    // One half is missing, on either side; or has only CTA scope.
    wrong(FindingKind::Race, &hand_over(relaxed, look, ""), 2, 1);
    wrong(FindingKind::Race, &hand_over(raise, peek, ""), 2, 1);
    wrong(FindingKind::Race, &hand_over(&format!("{relaxed} {fence}"), peek, fence), 2, 1);
    wrong(FindingKind::Race, &hand_over(&format!("{fence} {relaxed}"), peek, ""), 2, 1);
    wrong(FindingKind::Race, &hand_over(&raise.replace("gpu", "cta"), look, ""), 2, 1);
    wrong(FindingKind::Race, &hand_over(raise, &look.replace("gpu", "cta"), ""), 2, 1);
    // A flag that is not atomic.
    wrong(FindingKind::Race, &hand_over("st.global.b32 [%y+4], 1;", look, ""), 2, 1);
}

#[test]
fn a_part_of_a_warp() {
    // Lanes 0 and 1 exchange words; the others have returned.
    let body = |sync: &str| {
        format!(
            "
        setp.gt.u32 %p, %t, 1;  @%p bra END;
        mov.u32 %r0, s;  mad.lo.u32 %r1, %t, 4, %r0;  st.shared.b32 [%r1], %t;  {sync}
        xor.b32 %r1, %r1, 4;  ld.shared.b32 %r2, [%r1];
        mul.wide.u32 %d0, %t, 4;  add.u64 %d0, %d0, %y;  st.global.b32 [%d0], %r2;
    END:"
        )
    };
    assert_eq!(right(&body("bar.warp.sync 3;"), 1, 32)[..2], [1, 0]);
    wrong(FindingKind::Race, &body(""), 1, 32);
    // A third lane that is not in the mask.
    let third = body("bar.warp.sync 3;").replace("%t, 1;  @%p", "%t, 2;  @%p").replace(
        "bar.warp.sync 3;",
        "setp.eq.u32 %q, %t, 2; @!%q bar.warp.sync 3; @%q mov.u32 %r1, s; @%q xor.b32 %r1, %r1, 4;",
    );
    wrong(FindingKind::Race, &third, 1, 32);
}

#[test]
fn elections_choose_the_lowest_lane() {
    let body = "elect.sync %r0|%p, 0xfffffff0; selp.u32 %r1, 7, 9, %p; mul.wide.u32 %d0, %t, 4; add.u64 %d0, %d0, %y;
        st.global.b32 [%d0], %r1; st.global.b32 [%d0+112], %r0;";
    let body = format!("setp.lt.u32 %p, %t, 4; @%p bra END; {body} END:");
    let y = right(&body, 1, 32);
    assert_eq!((y[4], y[5], y[32], y[59]), (7, 9, 4, 4));
    wrong(
        FindingKind::Divergent,
        &body
            .replace("0xfffffff0", "-1")
            .replace("@%p bra END; ", "@%p bra MORE; ")
            .replace("END:", "bra END; MORE: bar.warp.sync -1; END:"),
        1,
        32,
    );
}

#[test]
fn cluster_barriers_of_one_cta() {
    let body = "mov.u32 %r0, s;  mad.lo.u32 %r0, %t, 4, %r0;  st.shared.b32 [%r0], %t;  barrier.cluster.arrive.release.aligned;
        barrier.cluster.wait.acquire.aligned;  xor.b32 %r1, %t, 32;  mov.u32 %r0, s;  mad.lo.u32 %r0, %r1, 4, %r0;
        ld.shared.b32 %r1, [%r0]; mov.u32 %r0, %cluster_ctarank; add.u32 %r1, %r1, %r0;
        mul.wide.u32 %d0, %t, 4;  add.u64 %d0, %d0, %y;  st.global.b32 [%d0], %r1;";
    assert_eq!(right(body, 1, 64), (32..64).chain(0..32).collect::<Vec<u32>>());
    wrong(FindingKind::Phase, &body.replace("barrier.cluster.arrive.release.aligned;", ""), 1, 64);
    // What is written between arriving and waiting is not ordered.
    let late = "st.shared.b32 [%r0], %t;  barrier.cluster.arrive.release.aligned;";
    let source = body.replace(late, "barrier.cluster.arrive.release.aligned; st.shared.b32 [%r0], %t;");
    for schedule in SCHEDULES {
        let report = run(&source, 1, 64, schedule).unwrap_err();
        assert!(report.has(FindingKind::Race), "{report}");
    }
}

#[test]
fn generic_addresses_tell_their_space_and_bytes_are_no_neighbors() {
    // Byte t of an array, by each thread, through generic addresses; then read as words by one warp.
    let body = "mov.u32 %r0, s;  cvt.u64.u32 %d0, %r0;  cvta.shared.u64 %d0, %d0;  cvt.u64.u32 %d1, %t;
        add.u64 %d1, %d0, %d1;  st.u8 [%d1], %t;  bar.sync 0;  setp.gt.u32 %p, %t, 15;  @%p bra END;
        mul.wide.u32 %d2, %t, 4;  add.u64 %d0, %d0, %d2;  ld.b32 %r1, [%d0];  add.u64 %d2, %d2, %y;  st.b32 [%d2], %r1;
        ld.global.b8 %r2, [%d2+1];  st.global.b8 [%d2+64], %r2; END:";
    let y = right(body, 1, 64);
    for (i, word) in y[..16].iter().enumerate() {
        assert_eq!(*word, u32::from_le_bytes([0, 1, 2, 3].map(|k| 4 * i as u8 + k)));
        assert_eq!(y[16 + i], 4 * i as u32 + 1);
    }
    wrong(FindingKind::Race, &body.replace("bar.sync 0;", ""), 1, 64);
    wrong(FindingKind::OutOfBounds, &body.replace("cvta.shared.u64 %d0, %d0;", "add.u64 %d0, %d0, 8192;"), 1, 64);
}

/// Thread 0 loads 64 words from global memory; a thread of another warp stores them doubled.
const ROUND: &str = "
    setp.ne.u32 %p, %t, 0;
    @%p bra WAIT;
    mbarrier.init.shared.b64 [bar], 1;
    fence.proxy.async;
    mbarrier.expect_tx.relaxed.cta.shared.b64 [bar], 128;
    cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [s], [%y], 128, [bar];
    mbarrier.arrive.release.cta.shared::cta.b64 %d0, [bar];
WAIT:
    bar.sync 0;
TRY:
    mbarrier.test_wait.parity.acquire.cta.shared::cta.b64 %q, [bar], 0;
    @!%q bra TRY;
    mov.u32 %r0, s;
    mad.lo.u32 %r0, %t, 4, %r0;
    setp.lt.u32 %p, %t, 32;
    @%p ld.shared.b32 %r1, [%r0];
    @%p add.u32 %r1, %r1, %t;
    @%p st.shared.b32 [%r0+128], %r1;
    fence.proxy.async.shared::cta;
    bar.sync 0;
    setp.ne.u32 %p, %t, 40;
    @%p bra END;
    cp.async.bulk.global.shared::cta.bulk_group [%y+128], [s+128], 128;
    cp.async.bulk.commit_group;
    cp.async.bulk.wait_group 0;
    ld.global.b32 %r2, [%y+132];
    st.global.b32 [%y], %r2;
    mbarrier.inval.shared.b64 [bar];
END:";

#[test]
fn plain_bulk_copies_go_both_ways() {
    let y = right(ROUND, 1, 64);
    assert_eq!(y[0], 1);
    assert_eq!(y[32..], (0..32).collect::<Vec<u32>>());
    for fence in ["", "fence.proxy.async.global;"] {
        wrong(FindingKind::Proxy, &ROUND.replace("fence.proxy.async.shared::cta;", fence), 1, 64);
    }
    wrong(FindingKind::Proxy, &ROUND.replace("    fence.proxy.async;\n", ""), 1, 64);
    wrong(FindingKind::InFlight, &ROUND.replace("wait_group 0", "wait_group.read 0"), 1, 64);
    wrong(FindingKind::Misaligned, &ROUND.replace("[%y], 128, [bar]", "[%y+8], 128, [bar]"), 1, 64);
    wrong(FindingKind::Misaligned, &ROUND.replace("[%y], 128, [bar]", "[%y], 120, [bar]"), 1, 64);
    wrong(FindingKind::OutOfBounds, &ROUND.replace("[%y], 128, [bar]", "[%y+192], 128, [bar]"), 1, 64);
    wrong(FindingKind::OutOfBounds, &ROUND.replace("[%y+128], [s+128], 128", "[%y+128], [s+128], 256"), 1, 64);
    wrong(FindingKind::Uninitialized, &ROUND.replace("[s+128], 128;", "[s+256], 128;"), 1, 64);
    wrong(
        FindingKind::Uninitialized,
        &ROUND.replace("inval.shared.b64 [bar];", "inval.shared.b64 [bar]; mbarrier.arrive.shared.b64 %d0, [bar];"),
        1,
        64,
    );
}

/// Thread 0 copies zeros over words that all threads have read.
#[test]
fn a_bulk_copy_over_what_threads_have_read() {
    let over = |fence: &str| {
        format!(
            "mov.u32 %r0, s;
    mad.lo.u32 %r0, %t, 4, %r0;
    st.shared.b32 [%r0], %t;
    fence.proxy.async.shared::cta;
    ld.shared.b32 %r1, [%r0];
    bar.sync 0;
    setp.ne.u32 %p, %t, 0;
    @%p bra WAIT;
    mbarrier.init.shared.b64 [bar], 1;
    fence.mbarrier_init.release.cluster;
    {fence}
    mbarrier.arrive.expect_tx.shared.b64 %d0, [bar], 128;
    cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [s], [%y], 128, [bar];
WAIT:
    bar.sync 0;
TRY:
    mbarrier.test_wait.parity.acquire.cta.shared::cta.b64 %q, [bar], 0;
    @!%q bra TRY;
    ld.shared.b32 %r2, [%r0];
    mad.lo.u32 %r1, %r1, 2, %r2;
    mad.wide.u32 %z, %t, 4, %y;
    st.global.b32 [%z+128], %r1;"
        )
    };
    let twice: Vec<u32> = (0..32).map(|i| 2 * i).collect();
    assert_eq!(right(&over("fence.proxy.async.shared::cta;"), 1, 32)[32..], twice);
    for fence in ["", "fence.proxy.async.global;"] {
        wrong(FindingKind::Proxy, &over(fence), 1, 32);
    }
}

/// Thread 0 overwrites the source of the copy to shared memory before it has landed, which only the mbarrier can tell.
#[test]
fn sources_of_bulk_copies_in_flight() {
    let issued = "mbarrier.arrive.release.cta.shared::cta.b64 %d0, [bar];\n";
    assert!(ROUND.contains(issued));
    wrong(FindingKind::InFlight, &ROUND.replace(issued, &format!("{issued}    st.global.b32 [%y+64], %t;\n")), 1, 64);
    // A thread of the other warp, after the barrier, has not waited for the mbarrier; after its wait it may write.
    let store = "setp.eq.u32 %q, %t, 50; @%q st.global.b32 [%y+64], %t;";
    wrong(FindingKind::InFlight, &ROUND.replace("TRY:", &format!("{store}\nTRY:")), 1, 64);
    let waited = ROUND.replace("    mov.u32 %r0, s;", &format!("    {store}\n    mov.u32 %r0, s;"));
    assert_eq!(right(&waited, 1, 64)[16], 50);
}

/// An mbarrier counts up to 2^20 - 1 bytes and as many arrivals; an arrival counts at least one.
#[test]
fn what_an_mbarrier_cannot_count() {
    let body = |text: &str| {
        format!(
            "setp.ne.u32 %p, %t, 0; @%p bra END; mbarrier.init.shared.b64 [bar], 4; {text} mbarrier.inval.shared.b64 [bar]; END:"
        )
    };
    let expect = |bytes: u32| format!("mbarrier.expect_tx.relaxed.cta.shared.b64 [bar], {bytes};");
    let arrive = |bytes: u32| format!("mbarrier.arrive.expect_tx.shared.b64 %d0, [bar], {bytes};");
    for text in [expect(0xfffff), arrive(0xfffff), expect(0xffff0) + &arrive(15)] {
        right(&body(&text), 1, 32);
    }
    for text in [
        expect(1 << 20),
        arrive(1 << 20),
        expect(u32::MAX),
        expect(0xffff0) + &expect(16),
        expect(0xfffff) + &arrive(1),
    ] {
        wrong(FindingKind::Phase, &body(&text), 1, 32);
    }
    wrong(FindingKind::Phase, &body("mbarrier.arrive.shared.b64 %d0, [bar], 0;"), 1, 32);
    wrong(FindingKind::Phase, &body("").replace("[bar], 4", "[bar], 1048576"), 1, 32);
}

/// Each CTA adds four numbers after the CTAs before it.
const ADD: &str = "
    setp.ne.u32 %p, %t, 0;
    @%p bra END;
    mov.b32 %r0, 0f3F800000;
    st.shared.v4.b32 [s], {%r0, %r0, %r0, %r0};
LOOK:
    ld.acquire.gpu.global.u32 %r1, [%y+128];
    setp.ne.u32 %p, %r1, %c;
    @%p bra LOOK;
    fence.proxy.async;
    cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%y], [s], 16;
    cp.async.bulk.commit_group;
    cp.async.bulk.wait_group 0;
    add.u32 %r1, %c, 1;
    st.release.gpu.global.u32 [%y+128], %r1;
END:";

#[test]
fn copies_that_add_take_turns() {
    let y = right(ADD, 3, 32);
    assert_eq!((&y[..5], y[32]), (&[3f32.to_bits(), 3f32.to_bits(), 3f32.to_bits(), 3f32.to_bits(), 0][..], 3));
    let without = |old: &str| {
        assert!(ADD.contains(old), "{old}");
        ADD.replace(old, "")
    };
    // Without turns, or without publishing them, the order of the sum is undefined.
    wrong(FindingKind::Race, &without("@%p bra LOOK;"), 3, 32);
    wrong(FindingKind::Race, &ADD.replace("acquire", "relaxed"), 3, 32);
    wrong(FindingKind::Race, &ADD.replace("release", "relaxed"), 3, 32);
    // A fence of one memory orders nothing of the other: a copy out reads shared memory and adds to global memory.
    for fence in ["", "fence.proxy.async.global;", "fence.proxy.async.shared::cta;"] {
        wrong(FindingKind::Proxy, &ADD.replace("fence.proxy.async;", fence), 3, 32);
    }
    right(&ADD.replace("fence.proxy.async;", "fence.proxy.async.global; fence.proxy.async.shared::cta;"), 3, 32);
    // Read does not mean written: the next one adds to data in flight, or data that arrived unsynchronized.
    for early in [ADD.replace("wait_group 0", "wait_group.read 0"), without("cp.async.bulk.wait_group 0;")] {
        for schedule in SCHEDULES {
            let report = run(&early, 3, 32, schedule).unwrap_err();
            assert!(
                report.has(FindingKind::InFlight) || report.has(FindingKind::Race),
                "schedule {schedule}: {report}"
            );
        }
    }
    wrong(FindingKind::Misaligned, &ADD.replace("[s], 16", "[s+8], 16"), 3, 32);
    wrong(FindingKind::OutOfBounds, &ADD.replace("[%y], [s]", "[%y+256], [s]"), 3, 32);
    // Nobody passes the turn; and turns by CTA number, where the first may wait for room that the others take.
    wrong(FindingKind::Deadlock, &without("st.release.gpu.global.u32 [%y+128], %r1;"), 3, 32);
    let stuck = |schedule| run(ADD, 6, 32, schedule).is_err_and(|report| report.has(FindingKind::Deadlock));
    assert!(!stuck(0) && SCHEDULES.clone().any(stuck));
}

#[test]
fn cache_policies() {
    let hinted = |policy: &str| {
        let copy = "bulk_group.L2::cache_hint.add.f32 [%y], [s], 16, %d0;";
        let add = ADD.replace("bulk_group.add.f32 [%y], [s], 16;", copy);
        assert!(add.contains(copy));
        format!("{policy} {add}")
    };
    for priority in ["evict_first", "evict_last"] {
        let made = format!("createpolicy.fractional.L2::{priority}.b64 %d0;");
        assert_eq!(right(&hinted(&made), 2, 32), right(ADD, 2, 32));
    }
    // Any other number is not a policy, and a policy must be made before it is used.
    wrong(FindingKind::Launch, &hinted("mov.b64 %d0, 1;"), 2, 32);
    wrong(FindingKind::Uninitialized, &hinted(""), 2, 32);
    let unknown = hinted("createpolicy.fractional.L2::evict_never.b64 %d0;");
    let source = format!(".visible .entry k() {{ .reg .b64 %d<8>, %y; {} ret; }}", unknown.lines().next().unwrap());
    assert!(parse("k.ptx", &source).is_err_and(|e| e.contains("createpolicy")));
}

#[test]
fn waits_by_phase() {
    let body = "setp.ne.u32 %p, %t, 0; @%p bra END; mbarrier.init.shared.b64 [bar], 1;
        mbarrier.arrive.shared.b64 %d0, [bar];
    ONE: mbarrier.try_wait.shared.b64 %q, [bar], %d0; @!%q bra ONE;
        mbarrier.arrive.shared.b64 %d0, [bar];
    TWO: mbarrier.try_wait.parity.shared.b64 %q, [bar], 1, 1000; @!%q bra TWO;
        st.global.b64 [%y], %d0; END:";
    assert_eq!(right(body, 1, 32)[0], 1);
    // The same phase twice: the parity was not flipped.
    let twice =
        body.replace("    TWO:", "AGAIN: mbarrier.try_wait.parity.shared.b64 %q, [bar], 1; @!%q bra AGAIN; TWO:");
    wrong(FindingKind::Phase, &twice, 1, 32);
    // Two phases complete between two waits of one thread.
    let missed =
        body.replace("    TWO:", "mbarrier.arrive.shared.b64 %d0, [bar]; TWO:").replace("[bar], 1, 1000", "[bar], 0");
    wrong(FindingKind::Phase, &missed, 1, 32);
    // Nobody arrives.
    wrong(FindingKind::Deadlock, &body.replacen("mbarrier.arrive.shared.b64 %d0, [bar];", "mov.u64 %d0, 0;", 1), 1, 32);
    wrong(FindingKind::Uninitialized, &body.replace("[bar], 1;\n", "[bar+8], 1;\n"), 1, 32);
    wrong(FindingKind::Misaligned, &body.replace("init.shared.b64 [bar]", "init.shared.b64 [bar+4]"), 1, 32);
}
