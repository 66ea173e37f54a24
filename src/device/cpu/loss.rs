//! Cross entropy over rows of logits, loss and gradient together. Never holds more than the chunk it is given.
use super::gemm::GemmScratch;
use super::simd::{exp, sum, tanh};
use crate::ops::{CrossEntropy, CrossEntropyPart, CrossEntropyShape, IGNORE, RowEntropies, VocabPart};
use flatshard_base::{Error, Result, dtype::Float};

/// Fails at the first target that is no word.
pub fn check(op: &'static str, targets: &[i32], vocab: usize) -> Result<()> {
    match targets.iter().position(|&t| t != IGNORE && !(0..vocab as i64).contains(&(t as i64))) {
        None => Ok(()),
        Some(i) => {
            Err(Error::op(op, format!("target {} at row {i} is neither {IGNORE} nor in 0..{vocab}", targets[i])))
        }
    }
}

/// Logits per block: small enough that its second pass (the sum, after the maximum) hits L1.
const BLOCK: usize = 1024;

/// (max, sum of exp(x - max)) of a row's logits in one pass over memory (Milakov & Gimelshein 2018, block by block).
/// The maximum starts finite, so that a block of minus infinities adds 0 and not a NaN. Calls `save` with every block's
/// exponentials and the maximum so far, which they are relative to.
#[inline(always)]
fn max_and_sum<T: Float>(row: &[T], logit: impl Fn(T) -> f32, mut save: impl FnMut(&[f32], f32)) -> (f32, f32) {
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
        // Through memory: the compiler vectorizes this loop, but not one that also sums.
        for (e, x) in exps.iter_mut().zip(block) {
            *e = exp(logit(*x) - block_max);
        }
        let block_sum = sum(
            [&exps[..block.len()]],
            #[inline(always)]
            |[x]| x,
        );
        save(&exps[..block.len()], block_max);
        total = total * exp(max - block_max) + block_sum;
        max = block_max;
    }
    (max, total)
}

/// Runs `$rows` with `$logit`, which maps a stored element to its logit, and `$with_slope`, which also returns the
/// derivative.
macro_rules! capped {
    ($cap:expr, $logit:ident, $with_slope:ident => $rows:expr) => {{
        let cap = $cap;
        if cap == 0.0 {
            let ($logit, $with_slope) = (|x: T| x.to_f32(), |x: T| (x.to_f32(), 1.0));
            $rows
        } else {
            let $with_slope = |x: T| {
                let (t, slope) = tanh(x.to_f32() / cap);
                (cap * t, slope)
            };
            let $logit = |x: T| $with_slope(x).0;
            $rows
        }
    }};
}

pub(super) use capped;

#[inline(always)]
pub fn cross_entropy<T: Float>(op: CrossEntropy, scratch: &mut GemmScratch) -> Result<()> {
    const OP: &str = CrossEntropy::OP;
    op.check()?;
    let (shape, targets, logits) = (op.shape, op.targets.host::<i32>(OP)?, op.logits.host::<T>(OP)?);
    check(OP, targets, shape.vocab)?;
    let (scales, losses) = (op.scale.map(|scale| scale.host::<f32>(OP)).transpose()?, op.loss.host::<f64>(OP)?);
    if op.by_row {
        losses.fill(0.0);
    }
    let (exps, tops) = scratch.floats(shape.vocab + shape.vocab.div_ceil(BLOCK)).split_at_mut(shape.vocab);
    let rows = logits.chunks_exact_mut(shape.vocab).zip(targets).enumerate();
    capped!(shape.softcap, logit, with_slope => for (i, (row, &target)) in rows {
        let i = if op.by_row { i } else { 0 };
        let scale = scales.map(|scales| scales[i]);
        if target == IGNORE {
            ignore(scale, row);
            continue;
        }
        let target = target as usize;
        let mut saved = exps.chunks_mut(BLOCK).zip(&mut *tops);
        let (max, total) = max_and_sum(row, logit, |block, max| {
            if let Some((exps, top)) = saved.next() {
                exps.copy_from_slice(block);
                *top = max;
            }
        });
        losses[i] += (total as f64).ln() + (max as f64 - logit(row[target]) as f64);
        let Some(scale) = scale else { continue };
        let at_target = target_gradient(scale, row[target], max, total, with_slope);
        for ((block, exps), top) in row.chunks_mut(BLOCK).zip(exps.chunks(BLOCK)).zip(&*tops) {
            let factor = exp(top - max) / total * scale;
            for (x, e) in block.iter_mut().zip(exps) {
                *x = T::from_f32(e * factor * with_slope(*x).1);
            }
        }
        row[target] = at_target;
    });
    Ok(())
}

/// With z relative to its maximum: log(sum exp z) - sum z exp z / sum exp z.
#[inline(always)]
pub fn entropies<T: Float>(op: RowEntropies) -> Result<()> {
    const OP: &str = RowEntropies::OP;
    let (shape, targets, logits) = (op.shape, op.targets.host::<i32>(OP)?, op.logits.host::<T>(OP)?);
    let entropies = op.entropies.host::<f32>(OP)?;
    let mut weighted = [0.0; BLOCK];
    capped!(shape.softcap, logit, _slope => for ((row, &target), entropy) in logits.chunks_exact(shape.vocab).zip(targets).zip(entropies) {
        *entropy = 0.0;
        if target == IGNORE {
            continue;
        }
        let (max, total) = max_and_sum(row, logit, |_, _| {});
        let mut all = 0.0;
        for block in row.chunks(BLOCK) {
            for (w, x) in weighted.iter_mut().zip(block) {
                let z = logit(*x) - max;
                // Minus infinity would be a NaN; what is far below adds nothing.
                *w = if z < -80.0 { 0.0 } else { exp(z) * z };
            }
            all += sum(
                [&weighted[..block.len()]],
                #[inline(always)]
                |[w]| w,
            );
        }
        *entropy = total.ln() - all / total;
    });
    Ok(())
}

/// The column of a target, if this rank's part contains it.
#[inline(always)]
pub(super) fn column(shape: &CrossEntropyShape, part: &VocabPart, target: i32) -> Option<usize> {
    (target as usize).checked_sub(part.first).filter(|&column| column < shape.vocab)
}

#[inline(always)]
pub fn part<T: Float>(op: CrossEntropyPart) -> Result<()> {
    const OP: &str = CrossEntropyPart::OP;
    op.check()?;
    let (shape, targets, logits) = (op.shape, op.targets.host::<i32>(OP)?, op.logits.host::<T>(OP)?);
    check(OP, targets, op.part.of)?;
    let stats = op.stats.host::<f32>(OP)?.as_chunks_mut::<{ VocabPart::STATS }>().0;
    capped!(shape.softcap, logit, _slope => for ((row, &target), stats) in logits.chunks_exact(shape.vocab).zip(targets).zip(stats) {
        *stats = [0.0; 3];
        if target != IGNORE {
            let (max, total) = max_and_sum(row, logit, |_, _| {});
            *stats = [max, total, column(&shape, &op.part, target).map_or(0.0, |target| logit(row[target]))];
        }
    });
    Ok(())
}

/// [`CrossEntropyFinish`] of one of its rows, after its check and that of the targets.
#[derive(Clone, Copy)]
pub struct FinishRow<'a> {
    pub shape: CrossEntropyShape,
    pub part: VocabPart,
    pub target: i32,
    /// The row's statistics in the first part, and those of the others, [`FinishRow::apart`] further each.
    pub stats: &'a [[f32; VocabPart::STATS]],
    pub apart: usize,
    pub scale: Option<f32>,
}

/// Replaces the row by its gradient, if there is a scale, and returns its loss.
#[inline(always)]
pub fn finish<T: Float>(x: &FinishRow, row: &mut [T]) -> f64 {
    if x.target == IGNORE {
        ignore(x.scale, row);
        return 0.0;
    }
    let (mut max, mut total, mut at_target) = (f32::MIN, 0.0, 0.0);
    for &[part_max, part_total, part_target] in x.stats.iter().step_by(x.apart) {
        let top = max.max(part_max);
        total = total * exp(max - top) + part_total * exp(part_max - top);
        max = top;
        at_target += part_target;
    }
    capped!(x.shape.softcap, _logit, with_slope => {
        gradient(x.scale, row, column(&x.shape, &x.part, x.target), max, total, with_slope);
    });
    (total as f64).ln() + (max as f64 - at_target as f64)
}

#[inline(always)]
fn ignore<T: Float>(scale: Option<f32>, row: &mut [T]) {
    if scale.is_some() {
        row.fill(T::from_f32(0.0));
    }
}

/// Replaces the row by its gradient, if requested.
#[inline(always)]
fn gradient<T: Float>(
    scale: Option<f32>,
    row: &mut [T],
    target: Option<usize>,
    max: f32,
    total: f32,
    with_slope: impl Fn(T) -> (f32, f32),
) {
    let Some(scale) = scale else { return };
    let factor = 1.0 / total * scale;
    let hot = target.map(|target| (target, target_gradient(scale, row[target], max, total, &with_slope)));
    for x in row.iter_mut() {
        let (z, slope) = with_slope(*x);
        *x = T::from_f32(exp(z - max) * factor * slope);
    }
    if let Some((target, gradient)) = hot {
        row[target] = gradient;
    }
}

/// The gradient of the target's logit `x`.
#[inline(always)]
fn target_gradient<T: Float>(scale: f32, x: T, max: f32, total: f32, with_slope: impl Fn(T) -> (f32, f32)) -> T {
    let (z, slope) = with_slope(x);
    T::from_f32((exp(z - max) / total - 1.0) * scale * slope)
}
