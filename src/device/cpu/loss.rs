//! Cross entropy over rows of logits, loss and gradient together. Never holds more than the chunk that it was given.
use super::simd::{exp, sum, tanh};
use crate::base::{Error, Result, dtype::Float};
use crate::device::{CrossEntropy, IGNORE};

pub fn check(op: &'static str, targets: &[i32], vocab: usize) -> Result<()> {
    match targets.iter().position(|&t| t != IGNORE && !(0..vocab as i64).contains(&(t as i64))) {
        None => Ok(()),
        Some(i) => {
            Err(Error::op(op, format!("target {} at row {i} is neither {IGNORE} nor in 0..{vocab}", targets[i])))
        }
    }
}

/// Logits of a block: small enough that its second reading (the sum, after the maximum) hits the first-level cache.
const BLOCK: usize = 1024;

/// (max, sum of exp(x - max)) of a row's logits in one pass over memory (Milakov & Gimelshein 2018, a block at a time). The maximum
/// starts finite, so that a block of minus infinities adds 0 and not a NaN.
#[inline(always)]
fn max_and_sum<T: Float>(row: &[T], logit: impl Fn(T) -> f32) -> (f32, f32) {
    let (mut max, mut total) = (f32::MIN, 0.0);
    let mut exps = [0.0; BLOCK];
    for block in row.chunks(BLOCK) {
        let mut lanes = [f32::MIN; super::simd::LANES];
        let (whole, tail) = block.as_chunks::<{ super::simd::LANES }>();
        for x in whole {
            for (lane, x) in lanes.iter_mut().zip(x) {
                let x = logit(*x);
                *lane = if x > *lane { x } else { *lane };
            }
        }
        let block_max = lanes.into_iter().chain(tail.iter().map(|x| logit(*x))).fold(max, f32::max);
        // Through memory: the compiler vectorises this loop, but not one that also sums.
        for (e, x) in exps.iter_mut().zip(block) {
            *e = exp(logit(*x) - block_max);
        }
        let block_sum = sum(block.len(), |i| exps[i]);
        total = total * exp(max - block_max) + block_sum;
        max = block_max;
    }
    (max, total)
}

#[inline(always)]
pub fn cross_entropy<T: Float>(shape: &CrossEntropy, targets: &[i32], logits: &mut [T], loss: &mut f64) {
    let cap = shape.softcap;
    if cap == 0.0 {
        rows(shape, targets, logits, loss, |x| x.to_f32(), |x| (x.to_f32(), 1.0));
    } else {
        let capped = |x: T| {
            let (t, slope) = tanh(x.to_f32() / cap);
            (cap * t, slope)
        };
        rows(shape, targets, logits, loss, |x| capped(x).0, capped);
    }
}

/// `logit` is what the loss is of, `with_slope` that and its derivative by what stands in the row.
#[inline(always)]
fn rows<T: Float>(
    shape: &CrossEntropy,
    targets: &[i32],
    logits: &mut [T],
    loss: &mut f64,
    logit: impl Fn(T) -> f32,
    with_slope: impl Fn(T) -> (f32, f32),
) {
    for (row, &target) in logits.chunks_exact_mut(shape.vocab).zip(targets) {
        if target == IGNORE {
            if shape.grad {
                row.fill(T::from_f32(0.0));
            }
            continue;
        }
        let target = target as usize;
        let (max, total) = max_and_sum(row, &logit);
        let (at_target, slope) = with_slope(row[target]);
        *loss += (total as f64).ln() + (max as f64 - at_target as f64);
        if shape.grad {
            let (inverse, scale) = (1.0 / total, shape.scale);
            for x in row.iter_mut() {
                let (z, slope) = with_slope(*x);
                *x = T::from_f32(exp(z - max) * inverse * scale * slope);
            }
            row[target] = T::from_f32((exp(at_target - max) * inverse - 1.0) * scale * slope);
        }
    }
}
