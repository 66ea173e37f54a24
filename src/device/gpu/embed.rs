//! Launches of the embedding lookup and its scatter-add. Never reads a token: kernels check them.
use super::driver::Arg;
use super::launch::{GpuDevice, by_dtype, threads};
use super::scratch::{Indexed, LaunchScratch, words};
use crate::ops::{Embed, EmbedBackward};
use flatshard_base::Result;

/// Maximum threads per CTA.
const MOST: usize = 1024;

pub fn embed(gpu: &GpuDevice, op: Embed) -> Result<()> {
    const OP: &str = Embed::OP;
    let Some(columns) = op.check()? else { return Ok(()) };
    let Embed { shape, tokens, w, y, accumulate } = op;
    let (dtype, n) = (w.dtype(), tokens.len());
    let variant = by_dtype!(OP, dtype, "embed")?;
    let threads = threads(OP, columns, MOST)?;
    let mut scratch = gpu.scratch();
    gpu.check(Indexed::Embed, tokens, shape.rows, &mut scratch.faults)?;
    let y = if accumulate { Arg::InOut(y) } else { Arg::Out(y) };
    let fault = Arg::In(scratch.faults.of(Indexed::Embed));
    let held = w.len() / columns;
    let [rows, columns, adds, first, held] =
        [n, columns, accumulate as usize, shape.first, held].map(|x| Arg::U32(x as u32));
    let args = &mut [Arg::In(tokens), Arg::In(w), y, fault, rows, columns, Arg::F32(shape.scale), adds, first, held];
    gpu.line(variant, OP, (gpu.resident(n, threads, 2048), threads), args)
}

pub fn embed_backward(gpu: &GpuDevice, op: EmbedBackward) -> Result<()> {
    const OP: &str = EmbedBackward::OP;
    let Some(columns) = op.check()? else { return Ok(()) };
    let EmbedBackward { shape, tokens, dy, dw } = op;
    let n = tokens.len();
    let variant = by_dtype!(OP, dy.dtype(), "embed_backward")?;
    let threads = threads(OP, columns, MOST)?;
    let mut scratch = gpu.scratch();
    let LaunchScratch { words: all, faults, .. } = &mut *scratch;
    gpu.check(Indexed::EmbedBackward, tokens, shape.rows, faults)?;
    let (mut order, mut sorted) = words(OP, all, 2 * n)?.split_at(n);
    let fault = || Arg::In(faults.of(Indexed::EmbedBackward));
    let rows = Arg::U32(n as u32);
    let args = &mut [Arg::In(tokens), Arg::Out(order.reborrow()), Arg::Out(sorted.reborrow()), fault(), rows];
    gpu.line("embed_sort", "embed_sort", (n.div_ceil(32) as u32, 256), args)?;
    let (order, sorted) = (Arg::In(order.as_view()), Arg::In(sorted.as_view()));
    let held = dw.len() / columns;
    let [rows, columns, first, held] = [n, columns, shape.first, held].map(|x| Arg::U32(x as u32));
    let args =
        &mut [order, sorted, Arg::In(dy), Arg::InOut(dw), fault(), rows, columns, Arg::F32(shape.scale), first, held];
    gpu.line(variant, OP, (gpu.resident(n, threads, 2048), threads), args)
}
