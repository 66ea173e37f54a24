//! Ordering and convergence: races, waits, lanes of a warp, barriers.
use super::*;

#[test]
fn races_in_shared_memory() {
    let source = plant(SUM, "    bar.sync 0;\n", "\n");
    let write = line(&source, "st.shared");
    caught(FindingKind::Race, &["sum at k.ptx:", "shared 'slots' bytes", "lane 0", &write], |s| {
        sum_of(&source, 250, s)
    });
}
#[test]
fn races_within_a_warp() {
    let first = plant(REVERSE, "    bar.warp.sync -1;\n", "\n");
    caught(FindingKind::Race, &["read of shared 'stage'", "unordered with the write by"], |s| reverse_of(&first, s));
    let second = plant(REVERSE, "    bar.warp.sync 0xffffffff;\n", "\n");
    caught(FindingKind::Race, &["write of shared 'stage'", "unordered with the read by"], |s| reverse_of(&second, s));
}
#[test]
fn races_in_global_memory() {
    // Between CTAs, in place of an atomic.
    let source = plant(SUM, "red.global.add.f32 [%out], %sum", "st.global.f32 [%out], %sum");
    caught(FindingKind::Race, &["write of 'out' bytes 0..4", "unordered with the write by cta"], |s| {
        sum_of(&source, 250, s)
    });
    // An atomic and a plain read.
    let source = plant(SUM, "END:", "    ld.global.f32 %sum, [%out];\nEND:");
    caught(FindingKind::Race, &["'out' bytes 0..4", "atomic"], |s| sum_of(&source, 250, s));
    // Between warps of a CTA: all write to the first word.
    let source = plant(SUM, "@%in ld.global.f32 %sum, [%at]", "st.global.f32 [%out], %sum");
    caught(FindingKind::Race, &["write of 'out'", "unordered with the write"], |s| sum_of(&source, 250, s));
}
#[test]
fn neighbors_in_one_word_are_no_race() {
    let source = ".visible .entry k(.param .u64 p) { .reg .b64 %p, %o; .reg .b32 %t; .reg .b16 %h; ld.param.u64 %p, [p];
        mov.u32 %t, %tid.x; mul.wide.u32 %o, %t, 2; add.u64 %p, %p, %o; cvt.u16.u32 %h, %t; st.global.b16 [%p], %h; ret; }";
    for schedule in SCHEDULES {
        let mut memory = GlobalMemory::new();
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
        caught(FindingKind::InFlight, &[&read, "read of shared 'stage'"], |s| reverse_of(&source, s));
    }
    let source = plant(REVERSE, wait, "cp.async.wait_all;");
    reverse_of(&source, 3).unwrap();
    // Writing to where a copy is in flight.
    let source = plant(REVERSE, wait, "st.shared.b32 [%to], %lane;");
    caught(FindingKind::InFlight, &["write of shared 'stage'"], |s| reverse_of(&source, s));
}

/// The source of a copy may not be written before the wait, neither by the copying thread nor by one that only knows
/// that it copies.
#[test]
fn sources_of_copies_in_flight() {
    let wait = "cp.async.wait_group 1;";
    let source = plant(REVERSE, wait, &format!("@%more st.global.b32 [%x], %lane; {wait}"));
    caught(FindingKind::InFlight, &["write of 'x'", "which an asynchronous copy or a wgmma still reads"], |s| {
        reverse_of(&source, s)
    });
    let waited = plant(REVERSE, wait, "cp.async.wait_group 0; @%more st.global.b32 [%x], %lane;");
    for schedule in SCHEDULES {
        reverse_of(&waited, schedule).unwrap_or_else(|report| panic!("{report}"));
    }
    // The neighbor's word, after a barrier that follows the copy. At run time the wait comes first, but nothing orders
    // it.
    let store = "xor.b32 %use, %lane, 1; mul.wide.u32 %off, %use, 4; mov.u64 %z, %x0; add.u64 %z, %z, %off; st.global.b32 [%z], %lane;";
    let other = |text: &str| {
        let source = plant(
            REVERSE,
            "    mul.wide.u32 %off, %lane, 4;",
            ".reg .b64 %z, %x0; mov.u64 %x0, %x; mul.wide.u32 %off, %lane, 4;",
        );
        plant(&source, "LOOP:\n", &format!("{text}\nLOOP:\n"))
    };
    let early = other(&format!("bar.warp.sync -1; cp.async.wait_group 0; {store}"));
    let late = other(&format!("cp.async.wait_group 0; bar.warp.sync -1; {store}"));
    caught(FindingKind::Race, &["write of 'x'", "unordered with the read by"], |s| reverse_of(&early, s));
    for schedule in SCHEDULES {
        reverse_of(&late, schedule).unwrap_or_else(|report| panic!("{report}"));
    }
}

/// Both sides of a branch increment a counter, and all read it afterwards: no race, because the accesses are strong,
/// and correct as long as lanes reconverge. Only a barrier guarantees that.
#[test]
fn lanes_that_meet_late() {
    let count = |meet: &str| {
        let source = format!(
            ".visible .entry k(.param .u64 p_y) {{ .reg .pred %p; .reg .b32 %t, %s, %v; .reg .b64 %y, %o; .shared .b32 s;
            ld.param.u64 %y, [p_y]; mov.u32 %t, %tid.x; mov.u32 %s, s; setp.eq.u32 %p, %t, 0;
            @%p st.shared.b32 [%s], 0; bar.warp.sync -1;
            setp.lt.u32 %p, %t, 16; @%p bra LOW; red.relaxed.cta.shared.add.u32 [%s], 1; bra MEET;
            LOW: red.relaxed.cta.shared.add.u32 [%s], 1;
            MEET: {meet} ld.relaxed.cta.shared.b32 %v, [%s]; mul.wide.u32 %o, %t, 4; add.u64 %y, %y, %o; st.global.b32 [%y], %v; ret; }}"
        );
        move |schedule: u64| {
            let mut memory = GlobalMemory::new();
            let y = memory.alloc("y", 128);
            run(&source, &mut memory, 1, 32, &[Argument::Pointer(y)], schedule)
                .unwrap_or_else(|report| panic!("{report}"));
            memory.download(y).unwrap().as_chunks().0.iter().map(|b| u32::from_le_bytes(*b)).collect::<Vec<u32>>()
        }
    };
    let (implied, ordered) = (count(""), count("bar.warp.sync -1;"));
    for schedule in SCHEDULES {
        assert_eq!(implied(schedule), [32; 32], "schedule {schedule}");
        // Whichever side goes first sees only itself.
        assert_eq!(implied(LATE | schedule).iter().filter(|v| **v == 16).count(), 16, "schedule {schedule}, late");
        assert_eq!(ordered(LATE | schedule), [32; 32], "schedule {schedule}, late");
    }
    // The correct kernels stay correct, and their faults are detected.
    let want = (0..N).sum::<usize>() as f32;
    for schedule in SCHEDULES.map(|s| s | LATE) {
        assert_eq!(sum_of(SUM, N as u32, schedule).unwrap_or_else(|report| panic!("{report}")).0[0], want);
        let diverged = plant(SUM, "bar.sync 0;", "@%first bar.sync 0;");
        assert!(sum_of(&diverged, 250, schedule).is_err_and(|report| report.has(FindingKind::Divergent)));
    }
}

#[test]
fn divergence() {
    let shuffle = "shfl.sync.bfly.b32 %other, %sum, 16, 31, -1;";
    let source = plant(SUM, shuffle, &format!("setp.eq.u32 %first, %lane, 0; @%first {shuffle}"));
    let said = ["lanes 0xfffffffe never arrive", "which lanes 0x00000001 execute"];
    caught(FindingKind::Divergent, &said, |s| sum_of(&source, 250, s));
    let source = plant(SUM, "bar.sync 0;", "@%first bar.sync 0;");
    caught(FindingKind::Divergent, &["never arrive"], |s| sum_of(&source, 250, s));
    // By a branch: half of the warp goes to a place where the other half waits.
    let source = plant(SUM, shuffle, &format!("setp.lt.u32 %first, %lane, 16; @%first bra END; {shuffle}"));
    let source = plant(&source, "END:\n", "END:\n    bar.sync 0;\n");
    caught(FindingKind::Divergent, &["never arrive"], |s| sum_of(&source, 250, s));
    // Reading from a lane that does not participate.
    let source =
        plant(SUM, shuffle, "setp.lt.u32 %first, %lane, 16; @%first shfl.sync.bfly.b32 %other, %sum, 16, 31, 0xffff;");
    caught(FindingKind::Divergent, &["reads lane 16"], |s| sum_of(&source, 250, s));
}
#[test]
fn deadlock_and_endless_loops() {
    let source = plant(SUM, "bar.sync 0;", "setp.eq.u32 %zero, %warp, 1;\n@%zero bar.sync 1;\n@!%zero bar.sync 0;");
    caught(FindingKind::Deadlock, &["sum: cta", "warp 1 at barrier 1 (k.ptx:", "warp 0 at barrier 0"], |s| {
        sum_of(&source, 250, s)
    });
    let source = plant(SUM, "END:\n", "END:\n    bra END;\n");
    let report = sum_of(&source, 250, 1).map(|r| r.0).unwrap_err();
    assert!(report.has(FindingKind::Endless), "{report}");
    let source = plant(SUM, "    ret;\n", "");
    caught(FindingKind::Launch, &["'ret' is missing"], |s| sum_of(&source, 250, s));
}
