//! Launches of the loss and its gradient: a CTA takes a row of logits at a time.
use super::driver::Arg;
use super::launch::{GpuDevice, VECTOR, by_dtype, rows};
use super::scratch::{Indexed, LaunchScratch, words};
use crate::base::{DType, Error, Result};
use crate::device::{CrossEntropy, View, ViewMut, VocabPart};

/// Threads of a CTA at most: those that keep most of a long row in registers.
const MOST: usize = 1024;

/// A vector each, where that are not too many.
fn threads(vocab: usize, dtype: DType) -> u32 {
    vocab.div_ceil(VECTOR / dtype.size()).next_multiple_of(32).min(MOST) as u32
}

/// The factor of the gradient, null where none is wanted.
fn gradient<'a>(op: &'static str, scale: Option<View<'a>>) -> Result<Arg<'a>> {
    let Some(scale) = scale else { return Ok(Arg::Null) };
    scale.fits(op, "scale", DType::F32, 1)?;
    Ok(Arg::In(scale))
}

pub fn cross_entropy(
    gpu: &GpuDevice,
    shape: &CrossEntropy,
    targets: View,
    scale: Option<View>,
    logits: ViewMut,
    loss: ViewMut,
) -> Result<()> {
    const OP: &str = "cross_entropy";
    let (dtype, vocab) = (logits.dtype(), shape.vocab);
    let n = rows(OP, "logits", logits.len(), vocab)?;
    let variant = match shape.softcap {
        0.0 => by_dtype!(OP, dtype, "cross_entropy")?,
        _ => by_dtype!(OP, dtype, "cross_entropy_cap")?,
    };
    targets.fits(OP, "targets", DType::I32, n)?;
    loss.fits(OP, "loss", DType::F64, 1)?;
    if n == 0 {
        return Ok(());
    }
    let mut scratch = gpu.scratch();
    let LaunchScratch { words: all, faults, .. } = &mut *scratch;
    gpu.check(Indexed::CrossEntropy, targets, vocab, faults)?;
    // An f64 a row.
    let mut losses = words(OP, all, 2 * n)?;
    let threads = threads(vocab, dtype);
    let [targets, logits, out] = [Arg::In(targets), Arg::InOut(logits), Arg::Out(losses.reborrow())];
    let fault = Arg::In(faults.of(Indexed::CrossEntropy));
    let [rows, vocab] = [n, vocab].map(|x| Arg::U32(x as u32));
    let args = &mut [targets, logits, out, fault, gradient(OP, scale)?, rows, vocab, Arg::F32(shape.softcap)];
    gpu.line(variant, OP, (gpu.resident(n, threads, MOST as u32), threads), args)?;
    let args = &mut [Arg::In(losses.as_view()), Arg::InOut(loss), Arg::U32(n as u32)];
    gpu.line("sum_losses", "sum_losses", (1, 256), args)
}

pub fn part(
    gpu: &GpuDevice,
    shape: &CrossEntropy,
    part: &VocabPart,
    targets: View,
    logits: View,
    said: ViewMut,
) -> Result<()> {
    const OP: &str = "cross_entropy_part";
    let (dtype, vocab) = (logits.dtype(), shape.vocab);
    let n = rows(OP, "logits", logits.len(), vocab)?;
    let variant = match shape.softcap {
        0.0 => by_dtype!(OP, dtype, "cross_entropy_part")?,
        _ => by_dtype!(OP, dtype, "cross_entropy_part_cap")?,
    };
    targets.fits(OP, "targets", DType::I32, n)?;
    said.fits(OP, "said", DType::F32, VocabPart::SAID * n)?;
    if n == 0 {
        return Ok(());
    }
    let mut scratch = gpu.scratch();
    gpu.check(Indexed::CrossEntropyPart, targets, part.of, &mut scratch.faults)?;
    let fault = Arg::In(scratch.faults.of(Indexed::CrossEntropyPart));
    let threads = threads(vocab, dtype);
    let [rows, vocab, first] = [n, vocab, part.first].map(|x| Arg::U32(x as u32));
    let args =
        &mut [Arg::In(targets), Arg::In(logits), Arg::Out(said), fault, rows, vocab, first, Arg::F32(shape.softcap)];
    gpu.line(variant, OP, (gpu.resident(n, threads, 2048), threads), args)
}

#[allow(clippy::too_many_arguments)] // an operation's operands
pub fn finish(
    gpu: &GpuDevice,
    shape: &CrossEntropy,
    part: &VocabPart,
    targets: View,
    said: View,
    scale: Option<View>,
    logits: ViewMut,
    loss: ViewMut,
) -> Result<()> {
    const OP: &str = "cross_entropy_finish";
    let (dtype, vocab) = (logits.dtype(), shape.vocab);
    let n = rows(OP, "logits", logits.len(), vocab)?;
    let variant = match shape.softcap {
        0.0 => by_dtype!(OP, dtype, "cross_entropy_finish")?,
        _ => by_dtype!(OP, dtype, "cross_entropy_finish_cap")?,
    };
    targets.fits(OP, "targets", DType::I32, n)?;
    loss.fits(OP, "loss", DType::F64, 1)?;
    said.fits(OP, "said", DType::F32, said.len())?;
    if n == 0 {
        return Ok(());
    }
    let parts = rows(OP, "said", said.len(), VocabPart::SAID * n)?;
    if parts == 0 {
        return Err(Error::op(OP, "no part has said anything"));
    }
    let mut scratch = gpu.scratch();
    let LaunchScratch { words: all, faults, .. } = &mut *scratch;
    gpu.check(Indexed::CrossEntropyFinish, targets, part.of, faults)?;
    // An f64 a row.
    let mut losses = words(OP, all, 2 * n)?;
    let threads = threads(vocab, dtype);
    let [targets, said, logits] = [Arg::In(targets), Arg::In(said), Arg::InOut(logits)];
    let (out, fault) = (Arg::Out(losses.reborrow()), Arg::In(faults.of(Indexed::CrossEntropyFinish)));
    let [rows, parts, vocab, first] = [n, parts, vocab, part.first].map(|x| Arg::U32(x as u32));
    let (scale, cap) = (gradient(OP, scale)?, Arg::F32(shape.softcap));
    let args = &mut [targets, said, logits, out, fault, scale, rows, parts, vocab, first, cap];
    gpu.line(variant, OP, (gpu.resident(n, threads, 2048), threads), args)?;
    let args = &mut [Arg::In(losses.as_view()), Arg::InOut(loss), Arg::U32(n as u32)];
    gpu.line("sum_losses", "sum_losses", (1, 256), args)
}
