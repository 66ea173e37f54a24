//! The exact norm of the gradients, and clipping by it.
use super::harness::*;
use flatshard_base::{Category, DType};
use flatshard_device::ops::{ClipScale, SumSquares};
use flatshard_device::{ALIGN, Device, LIMBS};

/// The accumulator after these parts of `x`, each (start, end).
fn limbs(dev: &dyn Device, x: &[f64], cuts: &[(usize, usize)]) -> Vec<f64> {
    let x = buf(dev, DType::F32, x);
    let mut acc = dev.alloc(DType::F64, LIMBS, Category::Other).unwrap();
    for &(start, end) in cuts {
        dev.sum_squares(SumSquares { x: x.view().slice(start..end), acc: acc.view_mut() }).unwrap();
    }
    read(dev, &acc)
}
fn clip(dev: &dyn Device, acc: &[f64], max_norm: f32) -> [f64; 2] {
    unscaled_clip(dev, acc, max_norm, 1.0)
}
fn unscaled_clip(dev: &dyn Device, acc: &[f64], max_norm: f32, unscale: f32) -> [f64; 2] {
    let acc = buf(dev, DType::F64, acc);
    let mut out = buf(dev, DType::F32, &[9.0, 9.0]);
    let unscale = buf(dev, DType::F32, &[unscale as f64]);
    dev.clip_scale(ClipScale { acc: acc.view(), max_norm, unscale: unscale.view(), out: out.view_mut() }).unwrap();
    read(dev, &out).try_into().unwrap()
}

/// Numbers of every f32 magnitude, including subnormals and zeros; the last block is short.
fn wild() -> Vec<f64> {
    let magnitude = |i: usize| 2f64.powi((i * 37 % 277) as i32 - 149);
    let mut x: Vec<f64> = normal(9, 20 * ALIGN + 77).iter().enumerate().map(|(i, x)| x * magnitude(i)).collect();
    x[5 * ALIGN..6 * ALIGN].fill(0.0);
    x[7 * ALIGN..8 * ALIGN].fill(f32::from_bits(1) as f64);
    x.iter().map(|&x| (x as f32).clamp(f32::MIN, f32::MAX) as f64).collect()
}

#[test]
fn limbs_do_not_depend_on_split_or_order() {
    let x = wild();
    let n = x.len();
    let mut first: Option<Vec<f64>> = None;
    for dev in devices() {
        let whole = limbs(&*dev, &x, &[(0, n)]);
        assert!(
            whole.iter().all(|&l| l.fract() == 0.0 && (0.0..4_294_967_296.0).contains(&l)),
            "whole limbs below 2^32"
        );
        let blocks: Vec<_> = (0..n.div_ceil(ALIGN)).map(|b| (b * ALIGN, ((b + 1) * ALIGN).min(n))).collect();
        assert_eq!(limbs(&*dev, &x, &blocks), whole, "block by block");
        let backwards: Vec<_> = blocks.iter().rev().copied().collect();
        assert_eq!(limbs(&*dev, &x, &backwards), whole, "backwards");
        assert_eq!(limbs(&*dev, &x, &[(7 * ALIGN, n), (0, 0), (3 * ALIGN, 7 * ALIGN), (0, 3 * ALIGN)]), whole);
        // Ranks that each hold a part, with their limbs all-reduced: the same norm, to the bit.
        let parts = [(0, 4 * ALIGN), (4 * ALIGN, 13 * ALIGN), (13 * ALIGN, n)];
        let mut summed = vec![0.0; LIMBS];
        for part in parts {
            limbs(&*dev, &x, &[part]).iter().zip(&mut summed).for_each(|(l, s)| *s += l);
        }
        let bits = |acc: &[f64]| clip(&*dev, acc, 1.0).map(f64::to_bits);
        assert_eq!(bits(&summed), bits(&whole));
        assert_eq!(first.get_or_insert(whole.clone()), &whole, "every device, every width");
    }
}

#[test]
fn the_norm_is_correctly_rounded() {
    for dev in devices() {
        let norm = |x: &[f64]| clip(&*dev, &limbs(&*dev, x, &[(0, x.len())]), 0.0)[1];
        for x in [normal(3, 100_000), normal(4, 1), vec![], vec![0.0; 300], vec![3.0, 4.0]] {
            let want = x.iter().map(|x| x * x).sum::<f64>().sqrt();
            assert!((norm(&x) - want).abs() <= 6e-8 * want, "{} is not {want}", norm(&x));
        }
        let (tiny, huge) = (f32::from_bits(1) as f64, f32::MAX as f64);
        assert_eq!(norm(&[tiny]), tiny);
        assert_eq!(norm(&vec![tiny; 4 * ALIGN * ALIGN]), tiny * 2.0 * ALIGN as f64);
        assert_eq!(norm(&[huge, tiny]), huge);
        assert_eq!(norm(&[1e30, 1e-30]), 1e30f32 as f64);
        assert_eq!(norm(&[huge; 4]), f64::INFINITY, "twice the largest f32");
    }
}

#[test]
fn clipping() {
    for dev in devices() {
        let acc = limbs(&*dev, &[3.0, 4.0], &[(0, 2)]);
        assert_eq!(clip(&*dev, &acc, 0.0), [1.0, 5.0], "0 is off");
        assert_eq!(clip(&*dev, &acc, 10.0), [1.0, 5.0]);
        assert_eq!(clip(&*dev, &acc, 1.0), [(1.0 / (5.0 + 1e-6)) as f32 as f64, 5.0]);
        assert_eq!(clip(&*dev, &[0.0; LIMBS], 1.0), [1.0, 0.0]);
    }
}

/// A power-of-two loss scale changes no bits except the factor's exponent.
#[test]
fn a_scaled_gradient_is_clipped_like_the_unscaled_one() {
    let x: Vec<f64> = normal(3, 3 * ALIGN).to_vec();
    let scaled: Vec<f64> = x.iter().map(|x| x * 65536.0).collect();
    for dev in devices() {
        let [plain, scaled] = [&x, &scaled].map(|x| limbs(&*dev, x, &[(0, 3 * ALIGN)]));
        for max_norm in [0.0, 1.0, 100.0] {
            let [scale, norm] = clip(&*dev, &plain, max_norm);
            assert!(norm > 10.0 && norm < 100.0);
            let got = unscaled_clip(&*dev, &scaled, max_norm, 1.0 / 65536.0);
            assert_eq!(got, [scale / 65536.0, norm], "{} max {max_norm}", dev.name());
        }
    }
}

#[test]
fn a_non_finite_gradient_makes_the_norm_non_finite() {
    for dev in devices() {
        for bad in [f64::NAN, f64::INFINITY, f64::NEG_INFINITY] {
            for at in [0, 127, 128, 299] {
                let mut x = vec![1.0; 300];
                x[at] = bad;
                let parts = limbs(&*dev, &x, &[(0, 128), (128, 300)]);
                let [scale, norm] = clip(&*dev, &parts, 1.0);
                assert!(!norm.is_finite() && !scale.is_finite(), "{bad} at {at} gave scale {scale}, norm {norm}");
            }
        }
    }
}

#[test]
fn the_norm_refuses_mismatched_operands() {
    let acc = operand("acc", Kind::Fixed(DType::F64), Role::Input, [0.0; LIMBS]);
    let x = operand("x", Kind::Fixed(DType::F32), Role::Scratch, [1.0]);
    conform("sum_squares", FORWARD, &[x, acc.clone()], vec![], vec![], &|dev, bufs| {
        let [x, acc] = bufs else { unreachable!() };
        dev.sum_squares(SumSquares { x: x.view(), acc: acc.view_mut() })
    });
    conform(
        "clip_scale",
        FORWARD,
        &[acc, operand("unscale", Kind::Fixed(DType::F32), Role::Scratch, [1.0]), f32_out("out", &[0.0; 2])],
        vec![vec![1.0, 0.0]],
        vec![vec![1.0, 0.0]],
        &|dev, bufs| {
            let [acc, unscale, out] = bufs else { unreachable!() };
            dev.clip_scale(ClipScale { acc: acc.view(), max_norm: 1.0, unscale: unscale.view(), out: out.view_mut() })
        },
    );
}
