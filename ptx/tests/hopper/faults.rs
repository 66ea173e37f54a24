//! The product with one thing missing or wrong: each fault is found under every schedule, with its kind and place.
use super::product::{SCHEDULES, Setting, USUAL, product, source};
use flatshard_ptx::emulate::{FindingKind, Swizzle};

/// Every schedule must report `kind` with text that contains all of `words`.
pub fn caught(kind: FindingKind, words: &[&str], source: &str, set: &Setting) {
    for schedule in SCHEDULES {
        let report = match product(source, set, schedule) {
            Ok(_) => panic!("schedule {schedule}: nothing found, not {kind:?} with {words:?}"),
            Err(report) => report,
        };
        let said = |text: String| words.iter().all(|word| text.contains(word));
        let found = report.findings.iter().any(|f| f.kind == kind && said(f.to_string()));
        assert!(found, "schedule {schedule}: no {kind:?} with {words:?} in\n{report}");
    }
}
/// Which of a mistake's several faults is found depends on the schedule; that one is found does not.
fn noticed(kinds: &[FindingKind], source: &str, set: &Setting) {
    for schedule in SCHEDULES {
        let report =
            product(source, set, schedule).err().unwrap_or_else(|| panic!("schedule {schedule}: nothing found"));
        assert!(kinds.iter().any(|kind| report.has(*kind)), "schedule {schedule}: none of {kinds:?} in\n{report}");
    }
}
/// Replaces the n-th occurrence of a text; a plant that changes nothing would prove nothing.
fn plant(n: usize, old: &str, new: &str) -> String {
    let source = source();
    let (at, _) = source.match_indices(old).nth(n).unwrap_or_else(|| panic!("nothing to replace: {old}"));
    format!("{}{new}{}", &source[..at], &source[at + old.len()..])
}
const COPY: &str = "cp.async.bulk.tensor.2d.shared::cluster.global";
/// The loop of a try_wait.
const AGAIN: &str = "@!%done bra AGAIN;";

#[test]
fn shared_memory_read_before_the_copy_has_landed() {
    // The consumer tries once and goes on.
    noticed(&[FindingKind::InFlight, FindingKind::Uninitialized], &plant(1, AGAIN, ""), &USUAL);
    // It waits for the phase before the first, which has always completed.
    let source = source();
    let wait = source.match_indices("and.b32 %parity, %parity, 1;").nth(1).unwrap().0;
    let turned = format!("{}xor.b32 %parity, %parity, 1;\n{}", &source[..wait + 28], &source[wait + 28..]);
    noticed(&[FindingKind::InFlight, FindingKind::Uninitialized], &turned, &USUAL);
    // One lane waits, and nothing informs the others.
    let alone = source.match_indices(AGAIN).nth(1).unwrap().0;
    let first = source[..alone].rfind("mbarrier.try_wait").unwrap();
    let alone = format!(
        "{}setp.ne.u32 %leader, %lane, 0; @%leader bra ALONE; {}{AGAIN} ALONE: {}",
        &source[..first],
        &source[first..alone],
        &source[alone + AGAIN.len()..]
    );
    let alone =
        alone.replacen("{\n    .reg .pred %done;\nAGAIN:\nsetp.ne", "{\n    .reg .pred %done;\n AGAIN: setp.ne", 1);
    caught(FindingKind::InFlight, &["shared 'ring'"], &alone, &USUAL);
    let told = alone.replacen("ALONE:", "ALONE: bar.warp.sync -1;", 1);
    product(&told, &USUAL, 1).unwrap_or_else(|report| panic!("{report}"));
}
#[test]
fn a_copy_over_what_is_still_read() {
    // The producer checks only once whether the stage is free.
    noticed(&[FindingKind::Race, FindingKind::InFlight, FindingKind::Phase], &plant(0, AGAIN, ""), &USUAL);
    // The stage is released before the products that read it have finished.
    let wait = "wgmma.wait_group.sync.aligned 0;";
    let early = plant(0, wait, "wgmma.wait_group.sync.aligned 1;");
    caught(
        FindingKind::InFlight,
        &["write of shared 'ring'", "still reads"],
        &early,
        &Setting { tiles: 3, depth: 192, ..USUAL },
    );
}
#[test]
fn one_warp_too_few_gives_a_stage_back() {
    let source =
        plant(0, "mbarrier.init.shared::cta.b64 [%empty + 0], 4;", "mbarrier.init.shared::cta.b64 [%empty + 0], 3;");
    // Four arrivals at a count of three: a phase too many, and eventually a stage is written while it is read.
    noticed(&[FindingKind::Race, FindingKind::InFlight, FindingKind::Phase, FindingKind::Deadlock], &source, &USUAL);
    let source = plant(0, "[%empty + 0], 4;", "[%empty + 0], 5;");
    caught(
        FindingKind::Deadlock,
        &["mbarrier bars+16: phase 0 lacks 1 arrivals and 0 bytes", "warp 0 waiting"],
        &source,
        &USUAL,
    );
}
#[test]
fn bytes_that_do_not_add_up() {
    let expect = "expect_tx.shared::cta.b64 _, [%at], 16384;";
    let more = plant(0, expect, "expect_tx.shared::cta.b64 _, [%at], 16400;");
    caught(FindingKind::Deadlock, &["mbarrier bars+0: phase 0 lacks 0 arrivals and 16 bytes"], &more, &USUAL);
    // The phase completes with the first of two copies; the second is still in flight.
    let less = plant(0, expect, "expect_tx.shared::cta.b64 _, [%at], 8192;");
    noticed(&[FindingKind::InFlight, FindingKind::Deadlock], &less, &USUAL);
    assert!(product(&less, &USUAL, 0).unwrap_err().has(FindingKind::InFlight));
}
#[test]
fn mbarriers_before_their_initialisation() {
    let source = plant(0, "bar.sync 0;", "");
    noticed(&[FindingKind::Race, FindingKind::Uninitialized], &source, &USUAL);
    let source = plant(0, "fence.mbarrier_init.release.cluster;", "");
    caught(
        FindingKind::Proxy,
        &["uses an mbarrier that no fence.mbarrier_init followed", "initialization at k.ptx:"],
        &source,
        &USUAL,
    );
    let source = plant(0, "mbarrier.init.shared::cta.b64 [%full + 0], 1;", "");
    caught(FindingKind::Uninitialized, &["no mbarrier is initialized"], &source, &USUAL);
}
#[test]
fn phases() {
    // A parity that never flips: the previous phase is awaited again.
    let source = plant(1, "and.b32 %parity, %parity, 1;", "mov.u32 %parity, 0;");
    noticed(&[FindingKind::Phase, FindingKind::InFlight, FindingKind::Deadlock], &source, &USUAL);
    // All lanes arrive instead of one.
    let source = plant(0, "@%leader mbarrier.arrive", "mbarrier.arrive");
    noticed(&[FindingKind::Race, FindingKind::InFlight, FindingKind::Phase, FindingKind::Deadlock], &source, &USUAL);
    let source = plant(
        0,
        "@%leader mbarrier.arrive.shared::cta.b64 _, [%at];",
        "@%leader mbarrier.arrive.shared::cta.b64 _, [%at], 5;",
    );
    caught(FindingKind::Phase, &["arrives 5 times", "lacks 4 arrivals"], &source, &USUAL);
    let init = "mbarrier.init.shared::cta.b64 [%full + 0], 1;";
    caught(FindingKind::Phase, &["an mbarrier of 0 arrivals"], &plant(0, init, &init.replace("1;", "0;")), &USUAL);
}
#[test]
fn proxy_fences() {
    let source = plant(0, "fence.proxy.async.shared::cta;", "");
    caught(FindingKind::Proxy, &["read of shared 'out'", "no fence.proxy.async after the write"], &source, &USUAL);
    // A fence of the copying thread, after the barrier, works as well.
    let source = plant(0, "fence.proxy.async.shared::cta;", "").replacen(
        "bar.sync 1, 128;",
        "bar.sync 1, 128; fence.proxy.async;",
        1,
    );
    product(&source, &USUAL, 1).unwrap();
    // But not one before the writes.
    let source = plant(0, "fence.proxy.async.shared::cta;", "").replacen(
        "and.b32 %warp, %warp, 3;",
        "fence.proxy.async; and.b32 %warp, %warp, 3;",
        1,
    );
    caught(FindingKind::Proxy, &["read of shared 'out'"], &source, &USUAL);
}
#[test]
fn copies_out() {
    let source = plant(0, "cp.async.bulk.wait_group.read 0;", "");
    caught(FindingKind::InFlight, &["the thread ends while this copy may still read"], &source, &USUAL);
    let source = plant(0, "cp.async.bulk.commit_group;", "");
    caught(FindingKind::InFlight, &["the thread ends while this copy may still read"], &source, &USUAL);
    // Overwritten before it has been read.
    let source =
        plant(0, "cp.async.bulk.wait_group.read 0;", "st.shared.f32 [%base], %c0; cp.async.bulk.wait_group.read 0;");
    caught(FindingKind::InFlight, &["write of shared 'out' bytes 0..4", "still reads"], &source, &USUAL);
    // In the other order it is correct.
    let source =
        plant(0, "cp.async.bulk.wait_group.read 0;", "cp.async.bulk.wait_group.read 0; st.shared.f32 [%base], %c0;");
    product(&source, &USUAL, 2).unwrap();
}
#[test]
fn named_barriers() {
    let source = plant(0, "bar.sync 1, 128;", "");
    caught(FindingKind::Race, &["shared 'out'", "unordered with the"], &source, &USUAL);
    caught(FindingKind::Deadlock, &["at barrier 1"], &plant(0, "bar.sync 1, 128;", "bar.sync 1, 160;"), &USUAL);
    caught(
        FindingKind::Launch,
        &["a multiple of 32 threads"],
        &plant(0, "bar.sync 1, 128;", "bar.sync 1, 100;"),
        &USUAL,
    );
    // Three warps arrive, one waits for them: correct, except that their counts differ.
    let source = plant(0, "bar.sync 1, 128;", "setp.ge.u32 %p, %t, 160; @%p bar.arrive 1, 128; @!%p bar.sync 1, 128;");
    product(&source, &USUAL, 3).unwrap_or_else(|report| panic!("{report}"));
    let source = source.replacen("@%p bar.arrive 1, 128;", "@%p bar.arrive 1, 96;", 1);
    noticed(&[FindingKind::Phase, FindingKind::Deadlock, FindingKind::Race], &source, &USUAL);
    let twice = plant(
        0,
        "bar.sync 1, 128;",
        "setp.ge.u32 %p, %t, 160; @%p bar.arrive 1, 128; @%p bar.arrive 1, 128; @!%p bar.sync 1, 128;",
    );
    caught(FindingKind::Phase, &["arrives at barrier 1 a second time"], &twice, &USUAL);
}
#[test]
fn registers_of_a_wgmma() {
    let fence = "wgmma.fence.sync.aligned;";
    caught(FindingKind::Wgmma, &["no wgmma.fence comes before the first"], &plant(0, fence, ""), &USUAL);
    let touched = plant(0, fence, &format!("{fence} mov.f32 %c3, 0f00000000;"));
    caught(FindingKind::Wgmma, &["no wgmma.fence orders an earlier access to register %c3"], &touched, &USUAL);
    // Read in flight.
    let commit = "wgmma.commit_group.sync.aligned;";
    let read = plant(0, commit, &format!("{commit} mov.b32 %x, %c7;"));
    caught(FindingKind::Wgmma, &["register %c7 is accessed while a wgmma uses it"], &read, &USUAL);
    let without = plant(0, "wgmma.wait_group.sync.aligned 0;", "");
    caught(
        FindingKind::Wgmma,
        &["is accessed while a wgmma uses it"],
        &without,
        &Setting { tiles: 1, depth: 64, ..USUAL },
    );
    caught(
        FindingKind::Wgmma,
        &["is accessed while a wgmma uses it"],
        &plant(0, commit, ""),
        &Setting { tiles: 1, depth: 64, ..USUAL },
    );
    // Accumulating into uninitialized registers.
    let source = plant(0, "setp.ne.u32 %p, %i, 0;", "setp.eq.u32 %p, 0, 0;");
    caught(FindingKind::Uninitialized, &["register %c", "was never written"], &source, &USUAL);
}
#[test]
fn a_warpgroup_acts_as_one() {
    // One warp skips a product; one lane does.
    let mma = "wgmma.mma_async";
    let skip = format!("setp.eq.u32 %leader, %warp, 5; @%leader bra SKIP; {mma}");
    let source = plant(3, mma, &skip).replacen("wgmma.commit_group", "SKIP: wgmma.commit_group", 1);
    caught(FindingKind::Divergent, &["has not executed the same wgmma", "warp 5"], &source, &USUAL);
    let source = plant(3, mma, &format!("setp.eq.u32 %leader, %lane, 5; @!%leader {mma}"));
    caught(FindingKind::Divergent, &["never arrive at this instruction"], &source, &USUAL);
    caught(
        FindingKind::Divergent,
        &["never arrive"],
        &plant(0, "setmaxnreg.inc", "setp.eq.u32 %p, %lane, 0; @%p setmaxnreg.inc"),
        &USUAL,
    );
}
#[test]
fn registers_of_a_warp() {
    // The other warpgroup cannot get registers that the copying one does not release.
    let source = plant(0, "setmaxnreg.dec.sync.aligned.u32 40;", "");
    caught(FindingKind::Deadlock, &["warp 4 waiting"], &source, &USUAL);
    let source = plant(0, "setmaxnreg.inc", "setmaxnreg.dec");
    caught(FindingKind::Launch, &["setmaxnreg.dec to 232 from 168"], &source, &USUAL);
}
#[test]
fn descriptors_and_boxes() {
    let source = plant(0, "add.u64 %db, %da, 512;", "add.u64 %db, %da, 520;");
    caught(FindingKind::Misaligned, &["not aligned to its pattern of 1024 bytes"], &source, &USUAL);
    let source = plant(0, "add.u64 %db, %da, 512;", "add.u64 %db, %da, 8192;");
    caught(FindingKind::OutOfBounds, &["shared"], &source, &USUAL);
    let source = plant(0, "0x4000004000010000", "0x4002004000010000");
    caught(FindingKind::Misaligned, &["bits that are not modeled"], &source, &USUAL);
    let source = plant(0, "mov.u32 %base, ring;", "mov.u32 %base, ring; add.u32 %base, %base, 128;");
    caught(FindingKind::Misaligned, &["a box with B128", "aligned to 1024 bytes"], &source, &USUAL);
    // On a GPU an illegal instruction: found on an H200.
    let source = plant(1, COPY, &format!("add.u32 %x, %x, 4; {COPY}"));
    caught(FindingKind::Misaligned, &["a box starts at 4 of 2 bytes", "multiple of 16 bytes"], &source, &USUAL);
    let source = plant(1, COPY, &format!("add.u32 %slot, %slot, 24576; {COPY}"));
    caught(FindingKind::OutOfBounds, &["of shared 'ring' (32768 bytes)"], &source, &USUAL);
    // The kernel reads with one swizzle what was written with another: no finding, but a wrong result.
    let plain = Setting { swizzle: Swizzle::None, tiles: 5, depth: 320 };
    let (d, _) = product(&super::product::source(), &plain, 1).unwrap();
    assert_ne!(d, super::product::exact(320));
    let source = plant(0, "cvta.param.u64 %a, %a;", "add.u64 %a, %a, 64;");
    caught(FindingKind::OutOfBounds, &["no tensor map is at"], &source, &USUAL);
    // A prefetch of the map changes nothing; one of anything else is a mistake.
    let prefetch =
        |at: &str| plant(0, "cvta.param.u64 %a, %a;", &format!("cvta.param.u64 %a, %a; prefetch.tensormap [{at}];"));
    assert_eq!(
        product(&prefetch("%a"), &USUAL, 1).unwrap().0,
        product(&super::product::source(), &USUAL, 1).unwrap().0
    );
    caught(FindingKind::OutOfBounds, &["no tensor map is at"], &prefetch("%a + 64"), &USUAL);
    let three = plant(0, ".2d.shared::cluster", ".3d.shared::cluster").replacen(
        "[%a, {%x, %row}]",
        "[%a, {%x, %row, %row}]",
        1,
    );
    caught(FindingKind::Launch, &["3 coordinates for a map of 2 dimensions"], &three, &USUAL);
}
#[test]
fn a_copy_that_nobody_waits_for() {
    let source = plant(0, "setp.lt.u32 %p, %i, %tiles;", "setp.le.u32 %p, %i, %tiles;");
    caught(
        FindingKind::InFlight,
        &["the CTA ends without a wait for this copy"],
        &source,
        &Setting { tiles: 1, depth: 64, ..USUAL },
    );
}
