//! What must be ordered, and what must come together: races, waits, lanes of a warp, barriers.
use crate::*;

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
