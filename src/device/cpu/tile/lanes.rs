//! Arithmetic on sixteen lanes of a tile: exponentials of numbers up to 0, maxima, masks. Never knows attention.
use super::super::simd::LANES;
use std::ops::Range;

/// e^x for x <= 0 without branches, in 13 instructions: 2^(x log2 e) as a polynomial of degree 6 (the coefficients of
/// Cephes' `exp2f`) times a power. Relative error below 3e-7 + 6e-8 |x|; 0 below -88; NaN for NaN.
#[inline(always)]
pub(super) fn exp_below(x: f32) -> f32 {
    // Adding it rounds to an integer, plus the exponent's bias, in the low bits.
    const ROUND: f32 = 12_582_912.0 + 127.0;
    let x = x * std::f32::consts::LOG2_E;
    let x = if -127.0 > x { -127.0 } else { x };
    let rounded = x + ROUND;
    let r = x - (rounded - ROUND);
    let p = 1.535_336_2e-4f32.mul_add(r, 1.339_887_4e-3);
    let p = p.mul_add(r, 9.618_437e-3);
    let p = p.mul_add(r, 5.550_332_5e-2);
    let p = p.mul_add(r, 2.402_264_8e-1);
    let p = p.mul_add(r, std::f32::consts::LN_2);
    p.mul_add(r, 1.0) * f32::from_bits(rounded.to_bits() << 23)
}

/// Sixteen columns of a row of sums.
pub(super) type LaneRow = [f32; LANES];

#[inline(always)]
pub(super) fn each(x: &mut LaneRow, f: impl Fn(f32) -> f32) {
    x.iter_mut().for_each(|x| *x = f(*x));
}
#[inline(always)]
pub(super) fn larger(a: f32, b: f32) -> f32 {
    if a > b { a } else { b }
}
#[inline(always)]
pub(super) fn max_lane(mut v: LaneRow) -> f32 {
    let mut half = LANES / 2;
    while half > 0 {
        for i in 0..half {
            v[i] = larger(v[i + half], v[i]);
        }
        half /= 2;
    }
    v[0]
}
/// Sets all but the visible of the elements from `start` on.
#[inline(always)]
pub(super) fn hide(x: &mut LaneRow, start: usize, visible: &Range<usize>, hidden: f32) {
    for (l, x) in x.iter_mut().enumerate() {
        *x = if visible.start <= start + l && start + l < visible.end { *x } else { hidden };
    }
}
