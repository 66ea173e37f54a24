//! Launches that do not match their kernel, and text that is refused.
use super::*;

#[test]
fn launches_that_do_not_fit() {
    let kernels = parse("k.ptx", SUM).unwrap();
    let said = |block: u32, arguments: &[Argument]| {
        let (grid, block) = ([1, 1, 1], [block, 1, 1]);
        let launch = KernelLaunch { kernel: &kernels[0], grid, block, dynamic_shared: 0, arguments, schedule: 0 };
        launch.run(&mut GlobalMemory::new()).unwrap_err().to_string()
    };
    let three = [Argument::Pointer(0), Argument::Pointer(0), Argument::F32(0.0)];
    assert_eq!(said(97, &three), "launch: sum: grid [1, 1, 1] and block [97, 1, 1]: a CTA must have 1 to 96 threads");
    let exact = parse("k.ptx", &SUM.replace(".maxntid", ".reqntid")).unwrap();
    let (grid, block) = ([1; 3], [64, 1, 1]);
    let launch = KernelLaunch { kernel: &exact[0], grid, block, dynamic_shared: 0, arguments: &three, schedule: 0 };
    assert!(
        launch.run(&mut GlobalMemory::new()).unwrap_err().to_string().ends_with("a CTA must have 96 to 96 threads")
    );
    assert_eq!(said(96, &three[..2]), "launch: sum: takes 3 arguments, got 2");
    let wrong = [three[0], three[1], Argument::U64(0)];
    assert_eq!(said(96, &wrong), "launch: sum: parameter p_n has 4 bytes, got 8");
}

#[test]
fn what_is_not_modeled_is_refused_with_its_line() {
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
        "barrier.cluster.arrive.acquire;",
        "call %r0;",
    ] {
        let source = format!(
            ".visible .entry k()\n{{\n.reg .pred %p, %q;\n.reg .b32 %r<4>;\n.reg .b64 %d<4>;\n{text}\nret;\n}}\n"
        );
        let said = parse("k.ptx", &source).err().unwrap_or_else(|| panic!("accepted: {text}"));
        assert!(said.starts_with("k.ptx:6: ") && said.ends_with("is not modeled"), "{text}: {said}");
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
        (".reg .b128 %q;", "type '.b128' is not modeled"),
        ("mov.b32 %r0 %r1;", "expected ';'"),
        ("@%r0+ ret;", "expected a name"),
        ("/* never", "a /* comment is not closed"),
    ] {
        let said = parse("k.ptx", &wrap(text)).err().unwrap_or_else(|| panic!("accepted: {text}"));
        assert!(said.starts_with("k.ptx:4: ") && said.contains(want), "{text}: {said}");
    }
    let marked = wrap("# 77 \"other.ptx\"\nbra NOWHERE;");
    assert_eq!(parse("k.ptx", &marked).err().unwrap(), "other.ptx:77: unknown name 'NOWHERE'");
}
