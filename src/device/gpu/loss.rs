//! Launches of the loss and its gradient: one CTA per row of logits at a time.
use super::driver::Arg;
use super::launch::{GpuDevice, VECTOR, by_dtype};
use super::scratch::{Indexed, LaunchScratch, words};
use crate::ops::{CrossEntropy, CrossEntropyFinish, CrossEntropyPart};
use crate::{View, ViewMut};
use flatshard_base::{DType, Result};

/// Maximum threads per CTA: enough to keep most of a long row in registers.
const MOST: usize = 1024;

/// One vector per thread, up to the maximum.
pub fn threads(vocab: usize, dtype: DType) -> u32 {
    vocab.div_ceil(VECTOR / dtype.size()).next_multiple_of(32).min(MOST) as u32
}

/// The gradient's factor, null if no gradient is needed; and the distance of a row's from the previous one's, in bytes.
fn gradient(scale: Option<View>, by_row: bool) -> [Arg; 2] {
    [scale.map_or(Arg::Null, Arg::In), Arg::U32(if by_row { size_of::<f32>() as u32 } else { 0 })]
}

/// Adds the losses of `n` rows to `loss`, unless it has one for each row.
fn sum(gpu: &GpuDevice, n: usize, losses: Option<ViewMut>, loss: ViewMut) -> Result<()> {
    let Some(losses) = losses else { return Ok(()) };
    let args = &mut [Arg::In(losses.as_view()), Arg::InOut(loss), Arg::U32(n as u32)];
    gpu.line("sum_losses", "sum_losses", (1, 256), args)
}

pub fn cross_entropy(gpu: &GpuDevice, op: CrossEntropy) -> Result<()> {
    const OP: &str = CrossEntropy::OP;
    let (n, dtype) = (op.check()?, op.logits.dtype());
    let CrossEntropy { shape, targets, by_row, scale, logits, mut loss } = op;
    let vocab = shape.vocab;
    let variant = match shape.softcap {
        0.0 => by_dtype!(OP, dtype, "cross_entropy")?,
        _ => by_dtype!(OP, dtype, "cross_entropy_cap")?,
    };
    if n == 0 {
        return Ok(());
    }
    let mut scratch = gpu.scratch();
    let LaunchScratch { words: all, faults, .. } = &mut *scratch;
    gpu.check(Indexed::CrossEntropy, targets, vocab, faults)?;
    // One f64 per row.
    let mut losses = if by_row { None } else { Some(words(OP, all, 2 * n)?) };
    let threads = threads(vocab, dtype);
    let out = Arg::Out(losses.as_mut().map_or_else(|| loss.reborrow(), |losses| losses.reborrow()));
    let ([targets, logits], [scale, pace]) = ([Arg::In(targets), Arg::InOut(logits)], gradient(scale, by_row));
    let fault = Arg::In(faults.of(Indexed::CrossEntropy));
    let [rows, vocab] = [n, vocab].map(|x| Arg::U32(x as u32));
    let args = &mut [targets, logits, out, fault, scale, rows, vocab, Arg::F32(shape.softcap), pace];
    gpu.line(variant, OP, (gpu.resident(n, threads, MOST as u32), threads), args)?;
    sum(gpu, n, losses, loss)
}

pub fn part(gpu: &GpuDevice, op: CrossEntropyPart) -> Result<()> {
    const OP: &str = CrossEntropyPart::OP;
    let (n, dtype) = (op.check()?, op.logits.dtype());
    let CrossEntropyPart { shape, part, targets, logits, stats } = op;
    let vocab = shape.vocab;
    let variant = match shape.softcap {
        0.0 => by_dtype!(OP, dtype, "cross_entropy_part")?,
        _ => by_dtype!(OP, dtype, "cross_entropy_part_cap")?,
    };
    if n == 0 {
        return Ok(());
    }
    let mut scratch = gpu.scratch();
    gpu.check(Indexed::CrossEntropyPart, targets, part.of, &mut scratch.faults)?;
    let fault = Arg::In(scratch.faults.of(Indexed::CrossEntropyPart));
    let threads = threads(vocab, dtype);
    let [rows, vocab, first] = [n, vocab, part.first].map(|x| Arg::U32(x as u32));
    let args =
        &mut [Arg::In(targets), Arg::In(logits), Arg::Out(stats), fault, rows, vocab, first, Arg::F32(shape.softcap)];
    gpu.line(variant, OP, (gpu.resident(n, threads, 2048), threads), args)
}

pub fn finish(gpu: &GpuDevice, op: CrossEntropyFinish) -> Result<()> {
    const OP: &str = CrossEntropyFinish::OP;
    let ((n, parts), dtype) = (op.check()?, op.logits.dtype());
    let CrossEntropyFinish { shape, part, targets, stats, by_row, scale, logits, mut loss } = op;
    let vocab = shape.vocab;
    let variant = match shape.softcap {
        0.0 => by_dtype!(OP, dtype, "cross_entropy_finish")?,
        _ => by_dtype!(OP, dtype, "cross_entropy_finish_cap")?,
    };
    if n == 0 {
        return Ok(());
    }
    let mut scratch = gpu.scratch();
    let LaunchScratch { words: all, faults, .. } = &mut *scratch;
    gpu.check(Indexed::CrossEntropyFinish, targets, part.of, faults)?;
    // One f64 per row.
    let mut losses = if by_row { None } else { Some(words(OP, all, 2 * n)?) };
    let threads = threads(vocab, dtype);
    let [targets, stats, logits] = [Arg::In(targets), Arg::In(stats), Arg::InOut(logits)];
    let out = Arg::Out(losses.as_mut().map_or_else(|| loss.reborrow(), |losses| losses.reborrow()));
    let fault = Arg::In(faults.of(Indexed::CrossEntropyFinish));
    let [rows, parts, vocab, first] = [n, parts, vocab, part.first].map(|x| Arg::U32(x as u32));
    let ([scale, pace], cap) = (gradient(scale, by_row), Arg::F32(shape.softcap));
    let args = &mut [targets, stats, logits, out, fault, scale, rows, parts, vocab, first, cap, pace];
    gpu.line(variant, OP, (gpu.resident(n, threads, 2048), threads), args)?;
    sum(gpu, n, losses, loss)
}
