//! Launches of knowledge distillation: one CTA per row of logits at a time. Never holds logits.
use super::driver::Arg;
use super::launch::{GpuDevice, by_dtype};
use super::loss::threads;
use super::scratch::{Indexed, LaunchScratch, words};
use crate::ops::{DistillFinish, DistillPart};
use flatshard_base::{Error, Result};

/// Threads of a CTA, and of an SM, that the registers of these kernels allow.
const MOST: u32 = 512;
const RESIDENT: u32 = 1024;

pub fn part(gpu: &GpuDevice, op: DistillPart) -> Result<()> {
    const OP: &str = DistillPart::OP;
    let (n, dtype) = (op.check()?, op.logits.dtype());
    let DistillPart { shape, part, terms, targets, teacher, logits, stats } = op;
    if terms.reverse {
        return Err(Error::op(OP, "GPUs have no kernel of the reverse divergence"));
    }
    let variant = by_dtype!(OP, dtype, "distill_part")?;
    if n == 0 {
        return Ok(());
    }
    let mut scratch = gpu.scratch();
    gpu.check(Indexed::DistillPart, targets, part.of, &mut scratch.faults)?;
    let fault = Arg::In(scratch.faults.of(Indexed::DistillPart));
    let threads = threads(shape.vocab, dtype).min(MOST);
    let [rows, vocab, first] = [n, shape.vocab, part.first].map(|x| Arg::U32(x as u32));
    let [cap, teacher_cap, inverse] = [shape.softcap, terms.teacher_cap, 1.0 / terms.temperature].map(Arg::F32);
    let [targets, teacher, logits] = [targets, teacher, logits].map(Arg::In);
    let args = &mut [targets, teacher, logits, Arg::Out(stats), fault, rows, vocab, first, cap, teacher_cap, inverse];
    gpu.line(variant, OP, (gpu.resident(n, threads, RESIDENT), threads), args)
}

pub fn finish(gpu: &GpuDevice, op: DistillFinish) -> Result<()> {
    const OP: &str = DistillFinish::OP;
    let ((n, parts), dtype) = (op.check()?, op.logits.dtype());
    let DistillFinish { shape, part, terms, targets, teacher, stats, scale, logits, loss } = op;
    let variant = by_dtype!(OP, dtype, "distill_finish")?;
    if n == 0 {
        return Ok(());
    }
    let mut scratch = gpu.scratch();
    let LaunchScratch { words: all, faults, .. } = &mut *scratch;
    gpu.check(Indexed::DistillFinish, targets, part.of, faults)?;
    // One f64 per row.
    let mut losses = words(OP, all, 2 * n)?;
    let threads = threads(shape.vocab, dtype).min(MOST);
    let [targets, teacher, stats, scale] = [targets, teacher, stats, scale].map(Arg::In);
    let (logits, out) = (Arg::InOut(logits), Arg::Out(losses.reborrow()));
    let fault = Arg::In(faults.of(Indexed::DistillFinish));
    let [rows, parts, vocab, first] = [n, parts, shape.vocab, part.first].map(|x| Arg::U32(x as u32));
    let [cap, teacher_cap, t, alpha] = [shape.softcap, terms.teacher_cap, terms.temperature, terms.alpha].map(Arg::F32);
    let args = &mut [
        targets,
        teacher,
        stats,
        logits,
        out,
        fault,
        scale,
        rows,
        parts,
        vocab,
        first,
        cap,
        teacher_cap,
        t,
        alpha,
    ];
    gpu.line(variant, OP, (gpu.resident(n, threads, RESIDENT), threads), args)?;
    let args = &mut [Arg::In(losses.as_view()), Arg::InOut(loss), Arg::U32(n as u32)];
    gpu.line("sum_losses", "sum_losses", (1, 256), args)
}
