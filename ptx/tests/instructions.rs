//! Results of single instructions, lane by lane, compared with values worked out by hand or by Rust.
use flatshard_ptx::emulate::{Argument, GlobalMemory, KernelLaunch, parse};

/// Runs `text` in one warp with %a, %b, %c (32 bits) and %A, %B (64 bits) given, %p = a < b and %lane; stores `what`.
fn warp(text: &str, what: &str, a: u64, b: u64, c: u64) -> Vec<u64> {
    let source = format!(
        ".visible .entry k(.param .u64 p_out, .param .u64 p_a, .param .u64 p_b, .param .u64 p_c) {{
        .reg .pred %p, %q; .reg .b16 %h, %i; .reg .b32 %a, %b, %c, %r, %s, %lane; .reg .b64 %A, %B, %C, %R, %out, %off;
        ld.param.u64 %out, [p_out]; ld.param.u64 %A, [p_a]; ld.param.u64 %B, [p_b]; ld.param.u64 %C, [p_c];
        cvt.u32.u64 %a, %A; cvt.u32.u64 %b, %B; cvt.u32.u64 %c, %C; mov.u32 %lane, %laneid;
        setp.lt.u32 %p, %a, %b; mul.wide.u32 %off, %lane, 8; add.u64 %out, %out, %off;
        mov.b32 %r, 0; mov.b64 %R, 0; mov.b32 %s, 0;
        {text}
        {what} st.global.b64 [%out], %R; ret; }}"
    );
    let kernels = parse("k.ptx", &source).unwrap_or_else(|e| panic!("{text}: {e}"));
    let mut memory = GlobalMemory::new();
    let out = memory.alloc("out", 32 * 8);
    let arguments = [Argument::Pointer(out), Argument::U64(a), Argument::U64(b), Argument::U64(c)];
    let launch = KernelLaunch {
        kernel: &kernels[0],
        grid: [1; 3],
        block: [32, 1, 1],
        dynamic_shared: 0,
        arguments: &arguments,
        schedule: 1,
    };
    launch.run(&mut memory).unwrap_or_else(|report| panic!("{text}: {report}"));
    memory.download(out).unwrap().as_chunks().0.iter().map(|b| u64::from_le_bytes(*b)).collect()
}
/// The 32-bit %r in lane 0.
fn narrow(text: &str, a: u32, b: u32, c: u32) -> u32 {
    warp(text, "cvt.u64.u32 %R, %r;", a as u64, b as u64, c as u64)[0] as u32
}
fn wide(text: &str, a: u64, b: u64, c: u64) -> u64 {
    warp(text, "", a, b, c)[0]
}
fn float(text: &str, a: f32, b: f32, c: f32) -> f32 {
    f32::from_bits(narrow(text, a.to_bits(), b.to_bits(), c.to_bits()))
}

#[test]
fn integers() {
    let minus = |x: i32| x as u32;
    for (text, a, b, c, want) in [
        ("add.u32 %r, %a, %b;", u32::MAX, 2, 0, 1),
        ("sub.s32 %r, %a, %b;", 1, 3, 0, minus(-2)),
        ("mul.lo.u32 %r, %a, %b;", 1 << 31, 3, 0, 1 << 31),
        ("mul.hi.u32 %r, %a, %b;", u32::MAX, u32::MAX, 0, u32::MAX - 1),
        ("mad.lo.s32 %r, %a, %b, %c;", minus(-3), 5, 1, minus(-14)),
        ("div.u32 %r, %a, %b;", 17, 5, 0, 3),
        ("rem.u32 %r, %a, %b;", 17, 5, 0, 2),
        ("min.s32 %r, %a, %b;", minus(-1), 1, 0, minus(-1)),
        ("min.u32 %r, %a, %b;", minus(-1), 1, 0, 1),
        ("max.s32 %r, %a, %b;", minus(-1), 1, 0, 1),
        ("neg.s32 %r, %a;", 5, 0, 0, minus(-5)),
        ("abs.s32 %r, %a;", minus(-5), 0, 0, 5),
        ("not.b32 %r, %a;", 0xff, 0, 0, 0xffff_ff00),
        ("xor.b32 %r, %a, -1;", 0xff, 0, 0, 0xffff_ff00),
        ("shl.b32 %r, %a, %b;", 3, 31, 0, 1 << 31),
        ("shl.b32 %r, %a, %b;", 3, 32, 0, 0),
        ("shr.u32 %r, %a, %b;", 1 << 31, 31, 0, 1),
        ("shr.u32 %r, %a, %b;", 1 << 31, 40, 0, 0),
        ("shr.s32 %r, %a, %b;", 1 << 31, 40, 0, u32::MAX),
        ("popc.b32 %r, %a;", 0xf0f0, 0, 0, 8),
        ("clz.b32 %r, %a;", 0xf0f0, 0, 0, 16),
        ("brev.b32 %r, %a;", 1, 0, 0, 1 << 31),
        ("bfe.u32 %r, %a, %b, %c;", 0xabcd_1234, 8, 12, 0xd12),
        ("bfe.u32 %r, %a, %b, %c;", 0xabcd_1234, 16, 32, 0xabcd),
        ("prmt.b32 %r, %a, %b, %c;", 0x3322_1100, 0x7766_5544, 0x7410, 0x7744_1100),
        ("prmt.b32 %r, %a, %b, 0x8;", 0x80, 0, 0, 0x8080_80ff),
        ("selp.b32 %r, %a, %b, %p;", 1, 2, 0, 1),
        ("selp.b32 %r, %a, %b, %p;", 2, 1, 0, 1),
        ("mov.b32 {%h, %i}, %a; cvt.u32.u16 %r, %i;", 0xabcd_1234, 0, 0, 0xabcd),
        ("cvt.u16.u32 %h, %a; cvt.u16.u32 %i, %b; mov.b32 %r, {%h, %i};", 0x1_1111, 0x2_2222, 0, 0x2222_1111),
    ] {
        assert_eq!(narrow(text, a, b, c), want, "{text} {a:#x} {b:#x} {c:#x}");
    }
    for (text, a, b, want) in [
        ("add.u64 %R, %A, %B;", u64::MAX, 2, 1),
        ("mul.wide.u32 %R, %a, %b;", 0xffff_ffff, 0xffff_ffff, 0xffff_fffe_0000_0001),
        ("mul.wide.s32 %R, %a, %b;", 0xffff_ffff, 2, u64::MAX - 1),
        ("mad.wide.u32 %R, %a, %b, %A;", 3, 5, 18),
        ("shl.b64 %R, %A, %b;", 1, 63, 1 << 63),
        ("shl.b64 %R, %A, %b;", 1, 64, 0),
        ("shr.s64 %R, %A, %b;", 1 << 63, 70, u64::MAX),
        ("cvt.s64.s32 %R, %a;", 0xffff_fffe, 0, u64::MAX - 1),
        ("cvt.u64.u32 %R, %a;", 0xffff_fffe, 0, 0xffff_fffe),
        ("mov.b64 {%r, %s}, %A; mov.b64 %R, {%s, %r};", 0x1111_1111_2222_2222, 0, 0x2222_2222_1111_1111),
        ("mov.b64 {_, %s}, %A; cvt.u64.u32 %R, %s;", 0x1111_1111_2222_2222, 0, 0x1111_1111),
    ] {
        assert_eq!(wide(text, a, b, 0), want, "{text} {a:#x} {b:#x}");
    }
}

#[test]
fn floats() {
    for (text, a, b, c, want) in [
        ("add.rn.f32 %r, %a, %b;", 1e8, 1.0, 0.0, 1e8),
        (
            "fma.rn.f32 %r, %a, %b, %c;",
            1.0 + f32::EPSILON,
            1.0 + f32::EPSILON,
            -1.0,
            2.0 * f32::EPSILON + 1.4210855e-14,
        ),
        ("div.rn.f32 %r, %a, %b;", 1.0, 3.0, 0.0, 1.0 / 3.0),
        ("rcp.rn.f32 %r, %a;", 3.0, 0.0, 0.0, 1.0 / 3.0),
        ("sqrt.rn.f32 %r, %a;", 2.0, 0.0, 0.0, std::f32::consts::SQRT_2),
        ("ex2.approx.f32 %r, %a;", -3.0, 0.0, 0.0, 0.125),
        ("ex2.approx.ftz.f32 %r, %a;", -127.0, 0.0, 0.0, 0.0),
        ("ex2.approx.f32 %r, %a;", -127.0, 0.0, 0.0, 2f32.powi(-127)),
        ("lg2.approx.f32 %r, %a;", 8.0, 0.0, 0.0, 3.0),
        ("min.f32 %r, %a, %b;", f32::NAN, 2.0, 0.0, 2.0),
        ("neg.f32 %r, %a;", 2.0, 0.0, 0.0, -2.0),
        ("abs.f32 %r, %a;", -2.0, 0.0, 0.0, 2.0),
        ("cvt.rn.f16.f32 %h, %a; cvt.f32.f16 %r, %h;", 1.0 + 1.0 / 2048.0, 0.0, 0.0, 1.0),
        ("cvt.rn.bf16.f32 %h, %a; cvt.f32.bf16 %r, %h;", 1.0 + 3.0 / 256.0, 0.0, 0.0, 1.015625),
        ("cvt.f64.f32 %R, %a; mul.rn.f64 %R, %R, %R; cvt.rn.f32.f64 %r, %R;", 3.0, 0.0, 0.0, 9.0),
    ] {
        let got = float(text, a, b, c);
        assert!(got == want, "{text} {a} {b} {c}: {got}, not {want}");
    }
    let f = |x: f32| x.to_bits();
    for (text, a, b, want) in [
        ("cvt.rzi.s32.f32 %r, %a;", f(-2.7), 0, -2i32 as u32),
        ("cvt.rni.s32.f32 %r, %a;", f(2.5), 0, 2),
        ("cvt.rzi.u32.f32 %r, %a;", f(-2.7), 0, 0),
        ("cvt.rn.f32.s32 %r, %a;", -3i32 as u32, 0, f(-3.0)),
        ("cvt.rn.f32.u32 %r, %a;", u32::MAX, 0, f(4294967296.0)),
        ("cvt.rn.bf16x2.f32 %r, %a, %b;", f(1.0), f(-2.0), 0x3f80_c000),
        ("cvt.rn.f16x2.f32 %r, %a, %b;", f(1.0), f(-2.0), 0x3c00_c000),
        ("cvt.rn.bf16x2.f32 %r, %a, %b;", f(f32::NAN), f(-f32::NAN), 0x7fff_7fff),
        ("fma.rn.bf16x2 %r, %a, %a, %b;", 0x3f80_4000, 0x3f80_3f80, 0x4000_40a0),
    ] {
        assert_eq!(narrow(text, a, b, 0), want, "{text} {a:#x} {b:#x}");
    }
}

#[test]
fn comparisons() {
    let nan = f32::NAN.to_bits();
    let one = 1f32.to_bits();
    for (comparison, a, b, want) in [
        ("lt.u32", 1, u32::MAX, 1),
        ("lt.s32", 1, u32::MAX, 0),
        ("ge.s32", 1, u32::MAX, 1),
        ("eq.b32", 7, 7, 1),
        ("ne.u32", 7, 7, 0),
        ("le.f32", one, one, 1),
        ("lt.f32", one, nan, 0),
        ("ge.f32", one, nan, 0),
        ("ne.f32", one, nan, 0),
        ("neu.f32", one, nan, 1),
        ("nan.f32", one, nan, 1),
        ("nan.f32", one, one, 0),
    ] {
        let text = format!("setp.{comparison} %q, %a, %b; selp.u32 %r, 1, 0, %q;");
        assert_eq!(narrow(&text, a, b, 0), want, "{text} {a:#x} {b:#x}");
    }
    assert_eq!(
        narrow("setp.lt.s64 %q, %A, 0; and.pred %q, %q, %p; not.pred %q, %q; selp.u32 %r, 1, 0, %q;", 1, 2, 0),
        1
    );
}

#[test]
fn shuffles_and_votes() {
    let run = |text: &str| warp(text, "cvt.u64.u32 %R, %r;", 0, 1, 0);
    let each = |f: fn(u64) -> u64| (0..32).map(f).collect::<Vec<u64>>();
    assert_eq!(run("shfl.sync.bfly.b32 %r, %lane, 5, 31, -1;"), each(|l| l ^ 5));
    assert_eq!(run("shfl.sync.up.b32 %r, %lane, 3, 0, -1;"), each(|l| if l < 3 { l } else { l - 3 }));
    assert_eq!(run("shfl.sync.down.b32 %r, %lane, 3, 31, -1;"), each(|l| if l > 28 { l } else { l + 3 }));
    assert_eq!(run("shfl.sync.idx.b32 %r, %lane, 7, 31, -1;"), each(|_| 7));
    // Segments of eight lanes: the upper bits of the clamp are 0x18.
    assert_eq!(run("shfl.sync.idx.b32 %r, %lane, 2, 0x181f, -1;"), each(|l| l / 8 * 8 + 2));
    assert_eq!(run("shfl.sync.down.b32 %r, %lane, 1, 0x181f, -1;"), each(|l| if l % 8 == 7 { l } else { l + 1 }));
    assert_eq!(run("shfl.sync.down.b32 %s|%q, %lane, 1, 31, -1; selp.u32 %r, 1, 0, %q;"), each(|l| (l < 31) as u64));
    assert_eq!(run("setp.lt.u32 %q, %lane, 4; vote.sync.ballot.b32 %r, %q, -1;"), each(|_| 0xf));
    assert_eq!(run("setp.lt.u32 %q, %lane, 4; vote.sync.ballot.b32 %r, !%q, -1;"), each(|_| 0xffff_fff0));
    let any = "setp.eq.u32 %q, %lane, 9; vote.sync.any.pred %q, %q, -1; selp.u32 %r, 1, 0, %q;";
    assert_eq!(run(any), each(|_| 1));
    let all = "setp.eq.u32 %q, %lane, 9; vote.sync.all.pred %q, %q, -1; selp.u32 %r, 1, 0, %q;";
    assert_eq!(run(all), each(|_| 0));
}

#[test]
fn branches_part_and_meet_again() {
    let text = "and.b32 %s, %lane, 1; setp.eq.u32 %q, %s, 0; @%q bra EVEN; mov.b32 %r, 100; bra MEET;
        EVEN: mov.b32 %r, 200; MEET: shfl.sync.bfly.b32 %s, %r, 1, 31, -1; add.u32 %r, %r, %s;";
    assert_eq!(warp(text, "cvt.u64.u32 %R, %r;", 0, 0, 0), vec![300; 32]);
    // A loop with as many iterations as the lane's number.
    let text = "AGAIN: setp.ge.u32 %q, %s, %lane; @%q bra OUT; add.u32 %s, %s, 1; add.u32 %r, %r, %s; bra AGAIN; OUT:";
    let want: Vec<u64> = (0..32).map(|l| l * (l + 1) / 2).collect();
    assert_eq!(warp(text, "cvt.u64.u32 %R, %r;", 0, 0, 0), want);
}

#[test]
fn atomics_are_whole() {
    let source = ".visible .entry k(.param .u64 p_at) { .reg .b32 %o, %t; .reg .b64 %at; .reg .pred %p;
        ld.param.u64 %at, [p_at]; mov.u32 %t, %tid.x; atom.global.add.u32 %o, [%at], 1; red.global.max.u32 [%at+4], %t;
        atom.global.cas.b32 %o, [%at+8], 0, 77; red.global.add.f32 [%at+12], 0f3F000000;
        atom.global.exch.b32 %o, [%at+16], 5; red.global.or.b32 [%at+20], %t; red.global.add.u64 [%at+24], 3;
        atom.global.inc.u32 %o, [%at+32], 99; ret; }";
    let kernels = parse("k.ptx", source).unwrap();
    for schedule in 0..4 {
        let mut memory = GlobalMemory::new();
        let at = memory.upload("at", &[0; 36]);
        let arguments = [Argument::Pointer(at)];
        let (grid, block) = ([3, 1, 1], [64, 1, 1]);
        let launch =
            KernelLaunch { kernel: &kernels[0], grid, block, dynamic_shared: 0, arguments: &arguments, schedule };
        launch.run(&mut memory).unwrap();
        let words: Vec<u32> =
            memory.download(at).unwrap().as_chunks().0.iter().map(|b| u32::from_le_bytes(*b)).collect();
        // The last one counts 192 modulo 100.
        assert_eq!(words, [192, 63, 77, 96f32.to_bits(), 5, 63, 576, 0, 92]);
    }
}
