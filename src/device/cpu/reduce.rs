//! The exact sum of squares for the gradient norm, and the clip scale computed from it. Never rounds between blocks.
//!
//! [Note: exact norm] A block of [`NORM_BLOCK`] squares is summed in f64, in a fixed order: squares of f32 are exact in
//! f64, so only the sum within the block is rounded. Block sums are then added exactly, in fixed point (Kulisch's
//! accumulator): limb i counts units of 2^(32 i - 1074), the smallest f64, so every f64 is an integer number of units.
//! Integers add to the same result in any order. On return, carries are propagated: each limb is below 2^32, stored in
//! an f64, which leaves 21 bits for ranks to add limb by limb without rounding; [`norm`] propagates carries again. The
//! last limb counts blocks that were not finite.
use super::operands::first;
use crate::ops::{ClipScale, LIMBS, NORM_BLOCK};
use flatshard_base::Result;

const POISON: usize = LIMBS - 1;
/// The unit of limb 0 is 2^-1074.
const UNIT: i32 = -1074;
/// Blocks between two carry propagations: each adds less than 2^33 to a 64-bit limb.
const CARRY_EVERY: usize = 1 << 28;
const SUMS: usize = 8;

#[inline(always)]
fn block_sum(x: &[f32]) -> f64 {
    let mut sums = [0.0f64; SUMS];
    let (whole, tail) = x.as_chunks::<SUMS>();
    for x in whole {
        for (sum, &x) in sums.iter_mut().zip(x) {
            *sum += x as f64 * x as f64;
        }
    }
    for (sum, &x) in sums.iter_mut().zip(tail) {
        *sum += x as f64 * x as f64;
    }
    let [a, b, c, d, e, f, g, h] = sums;
    ((a + e) + (c + g)) + ((b + f) + (d + h))
}

/// Adds a finite x >= 0, exactly.
#[inline(always)]
fn add(limbs: &mut [u64; LIMBS], x: f64) {
    let bits = x.to_bits();
    let (exponent, fraction) = (bits >> 52, bits & ((1 << 52) - 1));
    // A subnormal has the unit of exponent 1 and no hidden bit.
    let mantissa = if exponent == 0 { fraction } else { fraction | 1 << 52 };
    let shift = exponent.max(1) as usize - 1;
    let wide = (mantissa as u128) << (shift % 32);
    let i = shift / 32;
    limbs[i] += wide as u32 as u64;
    limbs[i + 1] += (wide >> 32) as u32 as u64;
    limbs[i + 2] += (wide >> 64) as u64;
}

fn carry(limbs: &mut [u64; LIMBS]) {
    let mut over = 0;
    for limb in &mut limbs[..POISON] {
        let sum = *limb + over;
        (*limb, over) = (sum & 0xffff_ffff, sum >> 32);
    }
    debug_assert_eq!(over, 0, "2^44 times the largest f64");
}

fn load(acc: &[f64]) -> [u64; LIMBS] {
    std::array::from_fn(|i| acc[i] as u64)
}
fn store(limbs: &[u64; LIMBS], acc: &mut [f64]) {
    acc.iter_mut().zip(limbs).for_each(|(acc, &limb)| *acc = limb as f64);
}

/// [`SumSquares`](crate::ops::SumSquares) of checked operands.
#[inline(always)]
pub fn sum_squares(x: &[f32], acc: &mut [f64]) {
    let mut limbs = load(acc);
    for part in x.chunks(CARRY_EVERY * NORM_BLOCK) {
        for block in part.chunks(NORM_BLOCK) {
            let sum = block_sum(block);
            if sum.is_finite() {
                add(&mut limbs, sum);
            } else {
                limbs[POISON] += 1;
            }
        }
        carry(&mut limbs);
    }
    store(&limbs, acc);
}

/// Adds an accumulator to another one.
pub fn merge(sum: &[f64], acc: &mut [f64]) {
    let mut limbs = load(acc);
    limbs.iter_mut().zip(load(sum)).for_each(|(limb, more)| *limb += more);
    carry(&mut limbs);
    store(&limbs, acc);
}

/// Square root of the accumulated sum, first rounded correctly to f64. NaN if a block was not finite.
fn norm(acc: &[f64]) -> f64 {
    let mut limbs = load(acc);
    if limbs[POISON] > 0 {
        return f64::NAN;
    }
    carry(&mut limbs);
    let Some(top) = limbs.iter().rposition(|&l| l > 0) else { return 0.0 };
    // The highest four limbs hold at least 97 significant bits. Lower limbs only break ties: one sticky bit.
    let lowest = top.saturating_sub(3);
    let head = (lowest..=top).rev().fold(0u128, |head, i| head << 32 | limbs[i] as u128);
    let sticky = limbs[..lowest].iter().any(|&l| l > 0) as u128;
    // The power of two is applied in two factors: each is a normal f64, and the square of an f32 norm always is.
    let power = 32 * lowest as i32 + UNIT;
    let sum = (head | sticky) as f64 * 2f64.powi(power / 2) * 2f64.powi(power - power / 2);
    sum.sqrt()
}

/// [clip scale, norm] as in `torch.nn.utils.clip_grad_norm_`, for the gradient times `unscale`, which the scale
/// includes. Without clipping (`max_norm` 0) the scale is `unscale`.
pub fn clip_scale(op: ClipScale) -> Result<()> {
    const OP: &str = ClipScale::OP;
    op.check()?;
    let (acc, unscale, out) = (op.acc.host::<f64>(OP)?, first(OP, op.unscale)?, op.out.host::<f32>(OP)?);
    let max_norm = op.max_norm;
    let unscale = unscale as f64;
    let norm = norm(acc) * unscale;
    let scale = max_norm as f64 / (norm + 1e-6);
    // Not `f64::min`, which would drop a NaN: a non-finite norm must reach the caller.
    let clip = if max_norm == 0.0 || scale > 1.0 { 1.0 } else { scale };
    out[1] = norm as f32;
    out[0] = if out[1].is_finite() { (clip * unscale) as f32 } else { f32::NAN };
    Ok(())
}
