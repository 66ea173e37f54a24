//! Launches of table lookup and its scatter.
use super::rows::{Follows, threads, words};
use super::{Arg, GpuDevice, Scratch, by_dtype};
use crate::base::{DType, Error, Result};
use crate::device::{View, ViewMut};

/// Threads of a CTA at most.
const MOST: usize = 1024;

/// Columns of a table of `table` elements whose rows fill `out` elements, one a token; nothing where there is no token.
fn width(op: &'static str, tokens: &View, out: usize, table: usize) -> Result<Option<usize>> {
    tokens.fits(op, "tokens", DType::U32, tokens.len())?;
    if tokens.is_empty() && out == 0 {
        return Ok(None);
    }
    let c = out.checked_div(tokens.len()).unwrap_or(0);
    if c == 0 || c * tokens.len() != out || !table.is_multiple_of(c) {
        let what = format!("{} tokens, {out} elements and a table of {table} do not agree on columns", tokens.len());
        return Err(Error::op(op, what));
    }
    Ok(Some(c))
}

pub fn embed(gpu: &GpuDevice, tokens: View, w: View, scale: f32, y: ViewMut, accumulate: bool) -> Result<()> {
    const OP: &str = "embed";
    let (dtype, n) = (w.dtype(), tokens.len());
    let variant = by_dtype!(OP, dtype, "embed")?;
    y.fits(OP, "y", dtype, y.len())?;
    let Some(columns) = width(OP, &tokens, y.len(), w.len())? else { return Ok(()) };
    let threads = threads(OP, columns, MOST)?;
    let mut scratch = gpu.scratch();
    gpu.check(Follows::Embed, tokens, w.len() / columns, &mut scratch.faults)?;
    let y = if accumulate { Arg::InOut(y) } else { Arg::Out(y) };
    let fault = Arg::In(scratch.faults.of(Follows::Embed));
    let [rows, columns] = [n, columns].map(|x| Arg::U32(x as u32));
    let args =
        &mut [Arg::In(tokens), Arg::In(w), y, fault, rows, columns, Arg::F32(scale), Arg::U32(accumulate as u32)];
    gpu.line(variant, OP, (gpu.resident(n, threads, 2048), threads), args)
}

pub fn embed_backward(gpu: &GpuDevice, tokens: View, dy: View, scale: f32, dw: ViewMut) -> Result<()> {
    const OP: &str = "embed_backward";
    let n = tokens.len();
    let variant = by_dtype!(OP, dy.dtype(), "embed_backward")?;
    dw.fits(OP, "dw", DType::F32, dw.len())?;
    let Some(columns) = width(OP, &tokens, dy.len(), dw.len())? else { return Ok(()) };
    let threads = threads(OP, columns, MOST)?;
    let mut scratch = gpu.scratch();
    let Scratch { words: all, faults, .. } = &mut *scratch;
    gpu.check(Follows::EmbedBackward, tokens, dw.len() / columns, faults)?;
    let (mut order, mut sorted) = words(OP, all, 2 * n)?.split_at(n);
    let fault = || Arg::In(faults.of(Follows::EmbedBackward));
    let [rows, columns] = [n as u32, columns as u32];
    let args = &mut [Arg::In(tokens), Arg::Out(order.reborrow()), Arg::Out(sorted.reborrow()), fault(), Arg::U32(rows)];
    gpu.line("embed_sort", "embed_sort", (n.div_ceil(32) as u32, 256), args)?;
    let (order, sorted) = (Arg::In(order.as_view()), Arg::In(sorted.as_view()));
    let [rows, columns] = [rows, columns].map(Arg::U32);
    let args = &mut [order, sorted, Arg::In(dy), Arg::InOut(dw), fault(), rows, columns, Arg::F32(scale)];
    gpu.line(variant, OP, (gpu.resident(n, threads, 2048), threads), args)
}
