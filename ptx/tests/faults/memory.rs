//! Memory accesses: uninitialized, out of bounds, misaligned, and the extent of copies.
use super::*;

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
        let mut memory = GlobalMemory::new();
        let words: Vec<u8> = (0..lanes * 4).flat_map(|i| i.to_le_bytes()).collect();
        let (x, y) = (memory.upload("x", &words), memory.alloc("y", 128));
        run(&source, &mut memory, 1, 32, &[Argument::Pointer(x), Argument::Pointer(y)], 1)?;
        let words = memory.download(y).unwrap().as_chunks().0.iter();
        Ok::<Vec<u32>, LaunchReport>(words.map(|b| u32::from_le_bytes(*b)).collect())
    };
    let each = |f: fn(u32) -> u32| (0..32).map(f).collect::<Vec<u32>>();
    assert_eq!(copy(32, "mov.u32 %n, 16;", 0).unwrap(), each(|l| 4 * l + 1));
    assert_eq!(copy(32, "mov.u32 %n, 6;", 0).unwrap(), each(|l| (4 * l + 1) & 0xffff));
    assert_eq!(copy(32, "mov.u32 %n, 0;", 0).unwrap(), each(|_| 0));
    // x ends after 20 lanes: those beyond copy nothing.
    let some = "setp.lt.u32 %p, %lane, 20; selp.u32 %n, 16, 0, %p;";
    let some = format!(".reg .pred %p; {some}");
    assert_eq!(copy(20, &some, 0).unwrap(), each(|l| if l < 20 { 4 * l + 1 } else { 0 }));
    assert!(copy(20, "mov.u32 %n, 16;", 0).unwrap_err().has(FindingKind::OutOfBounds));
    assert!(copy(32, "mov.u32 %n, 8;", 4).unwrap_err().has(FindingKind::Misaligned));
    assert!(copy(32, "mov.u32 %n, 7;", 0).unwrap_err().has(FindingKind::Misaligned));
}

#[test]
fn uninitialized_registers() {
    let source = plant(SUM, "    mov.f32 %sum, 0f00000000;\n", "\n");
    let place = line(&source, "shfl.sync.bfly.b32 %other, %sum, 16");
    caught(FindingKind::Uninitialized, &["register %sum", &place, "cta 2 warp", "lane"], |s| sum_of(&source, 250, s));
    let source = plant(SUM, "    setp.eq.u32 %zero, %t, 0;\n", "\n");
    caught(FindingKind::Uninitialized, &["register %zero"], |s| sum_of(&source, 250, s));
}
#[test]
fn uninitialized_memory() {
    let source = plant(SUM, "@%first st.shared.f32 [%slot], %sum;", "");
    caught(FindingKind::Uninitialized, &["read of shared 'slots' bytes 0..8, which nothing"], |s| {
        sum_of(&source, 250, s)
    });
    caught(FindingKind::Uninitialized, &["atomic of 'out' bytes 0..4"], |schedule| {
        let mut memory = GlobalMemory::new();
        let (x, out) = (memory.upload("x", &[0; 4 * N]), memory.alloc("out", 4));
        let arguments = [Argument::Pointer(x), Argument::Pointer(out), Argument::U32(N as u32)];
        run(SUM, &mut memory, 3, 96, &arguments, schedule).map(|counts| (vec![], counts))
    });
    let mut memory = GlobalMemory::new();
    let y = memory.alloc("y", 8);
    assert_eq!(memory.download(y).unwrap_err(), "byte 0 of 'y' was never written");
}

#[test]
fn out_of_bounds() {
    let load = line(SUM, "@%in ld.global");
    let said = ["bytes 1000..1004 of 'x' (1000 bytes)", &load, "cta 2 warp 1 lane 26"];
    caught(FindingKind::OutOfBounds, &said, |s| sum_of(SUM, 251, s));
    let source = plant(SUM, "@%in ld.global.f32 %sum, [%at]", "@%in ld.global.f32 %sum, [%at-4]");
    caught(FindingKind::OutOfBounds, &["is outside all allocations", "lane 0"], |s| sum_of(&source, 250, s));
    let source = plant(SUM, "%warp, 4, %slot", "%warp, 40, %slot");
    caught(FindingKind::OutOfBounds, &["of shared 'slots' (16 bytes)"], |s| sum_of(&source, 250, s));
    let source = plant(SUM, "st.shared.f32 [%slot]", "st.shared.f32 [%slot-8]");
    caught(FindingKind::OutOfBounds, &["is outside all shared arrays"], |s| sum_of(&source, 250, s));
    // From one array into the next.
    let source =
        plant(SUM, "    .shared .align 16 .b8 slots[16];", "    .shared .align 16 .b8 slots[8];  .shared .b8 b[64];");
    caught(FindingKind::OutOfBounds, &["bytes 8..12 of shared 'slots' (8 bytes)"], |s| sum_of(&source, 250, s));
}
#[test]
fn misaligned() {
    let source =
        plant(SUM, "ld.shared.v2.f32 {%part0, %part1}, [slots]", "ld.shared.v2.f32 {%part0, %part1}, [slots+4]");
    caught(FindingKind::Misaligned, &["8 bytes at byte 4 of shared 'slots'"], |s| sum_of(&source, 250, s));
    let source = plant(SUM, "ld.global.f32 %sum, [%at]", "ld.global.f32 %sum, [%at+2]");
    caught(FindingKind::Misaligned, &["4 bytes at byte", "of 'x'"], |s| sum_of(&source, 250, s));
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
        let mut memory = GlobalMemory::new();
        let arguments = &[Argument::Pointer(memory.alloc("out", 128))];
        let (grid, block) = ([1; 3], [32, 1, 1]);
        KernelLaunch { kernel: &kernels[0], grid, block, dynamic_shared, arguments, schedule: 0 }.run(&mut memory)
    };
    run(128).unwrap_or_else(|report| panic!("{report}"));
    let report = run(124).unwrap_err();
    assert!(
        report.has(FindingKind::OutOfBounds) && report.to_string().contains("124..128 of shared 'open'"),
        "{report}"
    );
    let twice = text.replace(".reg .b32 %t", ".shared .b32 own; .reg .b32 %t");
    assert!(parse("k.ptx", &twice).err().unwrap().ends_with("cannot have other shared arrays"));
}
