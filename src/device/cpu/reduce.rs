//! The exact sum of squares behind the gradient norm, and the clip scale from it. Never rounds between blocks.
//!
//! [Note: exact norm] A block of [`ALIGN`] squares is summed in f64, in a fixed order: squares of f32 are exact there,
//! their sum is rounded within the block only. Block sums are then added exactly, in fixed point (Kulisch's
//! accumulator): limb i counts units of 2^(32 i - 1074), the smallest f64, so every f64 is a whole number of units.
//! Whole numbers add in any order to the same result. On return the limbs are carried through: each is below 2^32,
//! stored in an f64, which leaves 21 bits for ranks to add limb by limb without rounding; [`norm`] carries again. The
//! last limb counts blocks that were not finite.
use super::operands::first;
use crate::base::Result;
use crate::device::ops::{ALIGN, ClipScale, LIMBS, SumSquares};

const POISON: usize = LIMBS - 1;
/// Limb 0 counts these: 2^-1074.
const UNIT: i32 = -1074;
/// Blocks between two carries: each adds less than 2^33 to a limb of 64 bits.
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

#[inline(always)]
pub fn sum_squares(op: SumSquares) -> Result<()> {
    op.check()?;
    let (x, acc) = (op.x.host::<f32>(SumSquares::OP)?, op.acc.host::<f64>(SumSquares::OP)?);
    let mut limbs = load(acc);
    for part in x.chunks(CARRY_EVERY * ALIGN) {
        for block in part.chunks(ALIGN) {
            let sum = block_sum(block);
            if sum.is_finite() {
                add(&mut limbs, sum);
            } else {
                limbs[POISON] += 1;
            }
        }
        carry(&mut limbs);
    }
    for (acc, limb) in acc.iter_mut().zip(limbs) {
        *acc = limb as f64;
    }
    Ok(())
}

/// Square root of the accumulated sum, which is first rounded correctly to f64. NaN where a block was not finite.
fn norm(acc: &[f64]) -> f64 {
    let mut limbs = load(acc);
    if limbs[POISON] > 0 {
        return f64::NAN;
    }
    carry(&mut limbs);
    let Some(top) = limbs.iter().rposition(|&l| l > 0) else { return 0.0 };
    // The highest four limbs hold at least 97 significant bits. What lies below only breaks ties: one sticky bit.
    let lowest = top.saturating_sub(3);
    let head = (lowest..=top).rev().fold(0u128, |head, i| head << 32 | limbs[i] as u128);
    let sticky = limbs[..lowest].iter().any(|&l| l > 0) as u128;
    // Powers of two in two factors: each is a normal f64, and the product of an f32 norm's square always is.
    let power = 32 * lowest as i32 + UNIT;
    let sum = (head | sticky) as f64 * 2f64.powi(power / 2) * 2f64.powi(power - power / 2);
    sum.sqrt()
}

/// [clip scale, norm] as `torch.nn.utils.clip_grad_norm_` has them, of the gradient times `unscale`, which the scale
/// includes; without clipping (`max_norm` 0) it is nothing else.
pub fn clip_scale(op: ClipScale) -> Result<()> {
    const OP: &str = ClipScale::OP;
    op.check()?;
    let (acc, unscale, out) = (op.acc.host::<f64>(OP)?, first(OP, op.unscale)?, op.out.host::<f32>(OP)?);
    let max_norm = op.max_norm;
    let unscale = unscale as f64;
    let norm = norm(acc) * unscale;
    let scale = max_norm as f64 / (norm + 1e-6);
    // Not `f64::min`, which would drop a NaN: a non-finite norm must reach the parameters' owner as it is.
    let clip = if max_norm == 0.0 || scale > 1.0 { 1.0 } else { scale };
    out[1] = norm as f32;
    out[0] = if out[1].is_finite() { (clip * unscale) as f32 } else { f32::NAN };
    Ok(())
}
