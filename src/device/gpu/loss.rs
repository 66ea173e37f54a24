//! Launches of the loss and its gradient: a CTA takes a row of logits at a time.
use super::rows::{Follows, rows, words};
use super::{Arg, GpuDevice, Scratch, VECTOR, by_dtype};
use crate::base::{DType, Result};
use crate::device::{CrossEntropy, View, ViewMut};

/// Threads of a CTA at most: those that keep most of a long row in registers.
const MOST: usize = 1024;

pub fn cross_entropy(
    gpu: &GpuDevice,
    shape: &CrossEntropy,
    targets: View,
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
    let Scratch { words: all, faults, .. } = &mut *scratch;
    gpu.check(Follows::CrossEntropy, targets, vocab, faults)?;
    // An f64 a row.
    let mut losses = words(OP, all, 2 * n)?;
    let threads = vocab.div_ceil(VECTOR / dtype.size()).next_multiple_of(32).min(MOST) as u32;
    let [targets, logits, out] = [Arg::In(targets), Arg::InOut(logits), Arg::Out(losses.reborrow())];
    let fault = Arg::In(faults.of(Follows::CrossEntropy));
    let [rows, vocab, grad] = [n as u32, vocab as u32, shape.grad as u32].map(Arg::U32);
    let [scale, cap] = [shape.scale, shape.softcap].map(Arg::F32);
    let args = &mut [targets, logits, out, fault, rows, vocab, scale, cap, grad];
    gpu.line(variant, OP, (gpu.resident(n, threads, MOST as u32), threads), args)?;
    let args = &mut [Arg::In(losses.as_view()), Arg::InOut(loss), Arg::U32(n as u32)];
    gpu.line("sum_losses", "sum_losses", (1, 256), args)
}
