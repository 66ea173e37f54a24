//! Launches of RMSNorm and LayerNorm: one CTA per row at a time. Weight gradients are first summed per CTA.
use super::driver::Arg;
use super::launch::{GpuDevice, by_dtype, threads};
use super::scratch::words;
use crate::ops::{LayerNorm, LayerNormBackward, RmsNorm, RmsNormBackward};
use flatshard_base::{Error, Result};

/// Maximum threads per CTA: of RMSNorm; of LayerNorm and gradients, which hold more of a row in registers.
const MOST: usize = 1024;
const MOST_HELD: usize = 512;
/// Threads per multiprocessor whose registers hold a row's gradients. Each CTA writes its own sums.
const RESIDENT: u32 = 512;

pub fn rmsnorm(gpu: &GpuDevice, op: RmsNorm) -> Result<()> {
    const OP: &str = RmsNorm::OP;
    let (n, dtype, columns) = (op.check()?, op.x.dtype(), op.w.len());
    let variant = by_dtype!(OP, dtype, "rmsnorm")?;
    if n == 0 {
        return Ok(());
    }
    let threads = threads(OP, columns, MOST)?;
    let [x, w, y, rstd] = [Arg::In(op.x), Arg::In(op.w), Arg::Out(op.y), Arg::Out(op.rstd)];
    let (rows, columns) = (Arg::U32(n as u32), Arg::U32(columns as u32));
    let args = &mut [x, w, y, rstd, rows, columns, Arg::F32(op.shape.eps), Arg::F32(op.shape.offset)];
    gpu.line(variant, "norm", (gpu.resident(n, threads, 2048), threads), args)
}

pub fn rmsnorm_backward(gpu: &GpuDevice, op: RmsNormBackward) -> Result<()> {
    const OP: &str = RmsNormBackward::OP;
    let (n, dtype, columns) = (op.check()?, op.x.dtype(), op.w.len());
    let variant = by_dtype!(OP, dtype, "rmsnorm_backward")?;
    if n == 0 {
        return Ok(());
    }
    let threads = threads(OP, columns, MOST_HELD)?;
    let ctas = gpu.resident(n, threads, RESIDENT);
    let mut scratch = gpu.scratch();
    let mut partial = words(OP, &mut scratch.words, ctas as usize * columns)?;
    let [x, w, rstd, dy] = [op.x, op.w, op.rstd, op.dy].map(Arg::In);
    let (dx, out, offset) = (Arg::InOut(op.dx), Arg::Out(partial.reborrow()), Arg::F32(op.shape.offset));
    let args = &mut [x, w, rstd, dy, dx, out, Arg::U32(n as u32), Arg::U32(columns as u32), offset];
    gpu.line(variant, "norm_backward", (ctas, threads), args)?;
    gpu.sum_rows(partial.as_view(), op.dw)
}

/// `from_one`: the weight is stored minus 1.
pub fn layernorm(gpu: &GpuDevice, op: LayerNorm, from_one: bool) -> Result<()> {
    const OP: &str = LayerNorm::OP;
    let (n, dtype, columns) = (op.check()?, op.x.dtype(), op.w.len());
    let variant = match op.b {
        Some(_) if from_one => by_dtype!(OP, dtype, "layernorm_from_one")?,
        Some(_) => by_dtype!(OP, dtype, "layernorm")?,
        None if from_one => return Err(Error::op(OP, "a weight that is stored minus 1, without a bias")),
        None => by_dtype!(OP, dtype, "layernorm_plain")?,
    };
    if n == 0 {
        return Ok(());
    }
    let threads = threads(OP, columns, MOST_HELD)?;
    let ([x, w], [y, stats]) = ([op.x, op.w].map(Arg::In), [op.y, op.stats].map(Arg::Out));
    let [rows, columns, eps] = [Arg::U32(n as u32), Arg::U32(columns as u32), Arg::F32(op.eps)];
    let grid = (gpu.resident(n, threads, 2048), threads);
    match op.b.map(Arg::In) {
        Some(b) => gpu.line(variant, "norm", grid, &mut [x, w, b, y, stats, rows, columns, eps]),
        None => gpu.line(variant, "norm", grid, &mut [x, w, y, stats, rows, columns, eps]),
    }
}

pub fn layernorm_backward(gpu: &GpuDevice, op: LayerNormBackward, from_one: bool) -> Result<()> {
    const OP: &str = LayerNormBackward::OP;
    let (n, dtype, columns) = (op.check()?, op.x.dtype(), op.w.len());
    let variant = match from_one {
        true => by_dtype!(OP, dtype, "layernorm_from_one_backward")?,
        false => by_dtype!(OP, dtype, "layernorm_backward")?,
    };
    if n == 0 {
        return Ok(());
    }
    let threads = threads(OP, columns, MOST_HELD)?;
    let ctas = gpu.resident(n, threads, RESIDENT);
    let part = ctas as usize * columns;
    let mut scratch = gpu.scratch();
    let mut partial = words(OP, &mut scratch.words, 2 * part)?;
    let [x, w, stats, dy] = [op.x, op.w, op.stats, op.dy].map(Arg::In);
    let (dx, out) = (Arg::InOut(op.dx), Arg::Out(partial.reborrow()));
    let args = &mut [x, w, stats, dy, dx, out, Arg::U32(n as u32), Arg::U32(columns as u32)];
    gpu.line(variant, "norm_backward", (ctas, threads), args)?;
    gpu.sum_rows(partial.as_view().slice(0..part), op.dw)?;
    gpu.sum_rows(partial.as_view().slice(part..2 * part), op.db)
}
