//! Approximate instructions: as far off as the PTX ISA allows, and a kernel that needs exact results fails.
use super::*;
use flatshard_ptx::emulate::PtxKernel;

/// `%y = f(%x, %z)` for 32 lanes, as if on GPU number `seed`.
fn each(text: &str, x: &[f32], z: f32, seed: u64) -> Vec<f32> {
    let source = format!(
        ".visible .entry k(.param .u64 p_x, .param .u64 p_y, .param .f32 p_z) {{ .reg .f32 %x, %y, %z; .reg .b32 %t, %i; .reg .b64 %a, %b, %o;
        .reg .pred %p; ld.param.u64 %a, [p_x]; ld.param.u64 %b, [p_y]; ld.param.f32 %z, [p_z];
        mov.u32 %t, %tid.x; mul.wide.u32 %o, %t, 4;
        add.u64 %a, %a, %o; add.u64 %b, %b, %o; ld.global.f32 %x, [%a]; {text} st.global.f32 [%b], %y; ret; }}"
    );
    let kernels = parse("k.ptx", &source).unwrap_or_else(|e| panic!("{text}: {e}"));
    let mut kernel: PtxKernel = kernels.into_iter().next().unwrap();
    kernel.seed = seed;
    let (mut memory, block) = (GlobalMemory::new(), [x.len() as u32, 1, 1]);
    let arguments = [memory.upload("x", &bytes(x)), memory.alloc("y", 4 * x.len())].map(Argument::Pointer);
    let arguments = &[arguments[0], arguments[1], Argument::F32(z)];
    let launch = KernelLaunch { kernel: &kernel, grid: [1; 3], block, dynamic_shared: 0, arguments, schedule: 0 };
    launch.run(&mut memory).unwrap_or_else(|report| panic!("{text}: {report}"));
    let Argument::Pointer(y) = arguments[1] else { unreachable!() };
    floats(memory.download(y).unwrap())
}

/// The largest error that the manual allows, by operand and result.
type Most = fn(f64, f64) -> f64;

/// An instruction, its second operand, its function, and its largest error.
type Case = (&'static str, f32, fn(f64, f64) -> f64, Most);

#[test]
fn results_are_off_by_no_more_than_the_manual_allows_and_no_less_on_some_gpu() {
    let part = |bits: i32| 2f64.powi(-bits);
    let place = |y: f64| 2f64.powi(y.abs().log2().floor() as i32 - 23);
    assert_eq!((part(22), place(1.5)), (1.0 / 4194304.0, 1.0 / 8388608.0));
    const CASES: [Case; 11] = [
        ("ex2.approx.f32 %y, %x;", 0.0, |x, _| x.exp2(), |_, y| y * 2f64.powi(-22)),
        ("ex2.approx.ftz.f32 %y, %x;", 0.0, |x, _| x.exp2(), |_, y| y * 2f64.powi(-22)),
        ("lg2.approx.f32 %y, %x;", 0.0, |x, _| x.log2(), |x, y| 2f64.powi(-22) * if x < 2.0 { 1.0 } else { y.abs() }),
        ("rcp.approx.f32 %y, %x;", 0.0, |x, _| 1.0 / x, |_, y| 2f64.powi(y.log2().floor() as i32 - 23)),
        ("rcp.approx.ftz.f32 %y, %x;", 0.0, |x, _| 1.0 / x, |_, y| 2f64.powi(y.log2().floor() as i32 - 23)),
        ("sqrt.approx.f32 %y, %x;", 0.0, |x, _| x.sqrt(), |_, y| y * 2f64.powi(-23)),
        ("rsqrt.approx.f32 %y, %x;", 0.0, |x, _| 1.0 / x.sqrt(), |_, y| y * 2f64.powf(-22.9)),
        ("sin.approx.f32 %y, %x;", 0.0, |x, _| x.sin(), |_, _| 2f64.powf(-20.5)),
        ("cos.approx.f32 %y, %x;", 0.0, |x, _| x.cos(), |_, _| 2f64.powf(-20.5)),
        ("tanh.approx.f32 %y, %x;", 0.0, |x, _| x.tanh(), |_, y| y * 2f64.powi(-11)),
        ("div.full.f32 %y, %x, %z;", 3.0, |x, z| x / z, |_, y| 2.0 * 2f64.powi(y.log2().floor() as i32 - 23)),
    ];
    let x: Vec<f32> = (0..1024).map(|i| 0.501 + 4.0 * (i * 37 % 1024) as f32 / 1024.0).collect();
    for (text, z, function, most) in CASES {
        let mut largest = 0.0f64;
        for seed in 0..4 {
            let y = each(text, &x, z, seed);
            assert_eq!(each(text, &x, z, seed), y, "{text}: not deterministic");
            for (x, y) in x.iter().zip(&y) {
                let exact = function(*x as f64, z as f64);
                let part = (*y as f64 - exact).abs() / most(*x as f64, exact);
                assert!(part <= 1.0 + 1e-3, "{text} of {x}: {y}, {part} times what is allowed from {exact}");
                largest = largest.max(part);
            }
        }
        assert!(largest > 0.75, "{text}: never off by more than {largest} of what is allowed");
        assert_ne!(each(text, &x, z, 0), each(text, &x, z, 1), "{text}: the seed changes nothing");
    }
}

#[test]
fn special_values_are_those_of_the_manual() {
    let infinite = f32::INFINITY;
    for (text, x, y) in [
        ("ex2.approx.f32 %y, %x;", 0.0, 1.0),
        ("ex2.approx.f32 %y, %x;", -infinite, 0.0),
        ("ex2.approx.f32 %y, %x;", 200.0, infinite),
        ("ex2.approx.ftz.f32 %y, %x;", -126.5, 0.0),
        ("lg2.approx.f32 %y, %x;", 0.0, -infinite),
        ("lg2.approx.ftz.f32 %y, %x;", 1e-40, -infinite),
        ("rcp.approx.f32 %y, %x;", -0.0, -infinite),
        ("rcp.approx.ftz.f32 %y, %x;", 1e-40, infinite),
        ("tanh.approx.f32 %y, %x;", infinite, 1.0),
        ("cos.approx.f32 %y, %x;", 0.0, 1.0),
        ("div.full.f32 %y, %x, %z;", 0.0, 0.0),
    ] {
        for seed in 0..8 {
            assert_eq!(each(text, &[x], 7.0, seed), [y], "{text} of {x}");
        }
    }
    assert!(each("lg2.approx.f32 %y, %x;", &[-1.0], 0.0, 0)[0].is_nan());
}

/// Powers of two by ex2.approx, truncated: correct only where the result is exact, so on no GPU. Rounded, they are
/// correct on all.
#[test]
fn a_kernel_that_needs_an_exact_power_fails() {
    let x: Vec<f32> = (1..20).map(|i| i as f32).collect();
    let want: Vec<f32> = x.iter().map(|x| x.exp2()).collect();
    for seed in 0..8 {
        let of = |how: &str| {
            each(&format!("ex2.approx.f32 %y, %x; cvt.{how}.s32.f32 %i, %y; cvt.rn.f32.s32 %y, %i;"), &x, 0.0, seed)
        };
        assert_eq!(of("rni"), want, "rounded, seed {seed}");
        assert_ne!(of("rzi"), want, "cut off, seed {seed}");
        // A number times its reciprocal is not 1, except for correctly rounded ones of a few numbers.
        let of = |how: &str| each(&format!("rcp.{how}.f32 %y, %x; mul.rn.f32 %y, %y, %x;"), &x[..16], 0.0, seed);
        assert_eq!(of("rn"), [1.0; 16]);
        assert_ne!(of("approx"), [1.0; 16], "seed {seed}");
    }
}
