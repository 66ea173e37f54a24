//! Launches of RMSNorm and LayerNorm: a CTA takes a row at a time. Gradients of weights are summed by CTA first.
use super::driver::Arg;
use super::launch::{GpuDevice, by_dtype, rows, threads};
use super::scratch::words;
use crate::base::{DType, Result};
use crate::device::{RmsNorm, View, ViewMut};

/// Threads of a CTA at most: of RMSNorm; of LayerNorm and of gradients, which hold more of a row in registers.
const MOST: usize = 1024;
const MOST_HELD: usize = 512;
/// Threads of a multiprocessor whose registers hold a row's gradients: each CTA of them leaves sums of its own.
const RESIDENT: u32 = 512;

pub fn rmsnorm(gpu: &GpuDevice, norm: &RmsNorm, x: View, w: View, y: ViewMut, rstd: ViewMut) -> Result<()> {
    const OP: &str = "rmsnorm";
    let (dtype, columns) = (x.dtype(), w.len());
    let n = rows(OP, "x", x.len(), columns)?;
    let variant = by_dtype!(OP, dtype, "rmsnorm")?;
    w.fits(OP, "w", dtype, columns)?;
    y.fits(OP, "y", dtype, x.len())?;
    rstd.fits(OP, "rstd", DType::F32, n)?;
    if n == 0 {
        return Ok(());
    }
    let threads = threads(OP, columns, MOST)?;
    let [x, w, y, rstd] = [Arg::In(x), Arg::In(w), Arg::Out(y), Arg::Out(rstd)];
    let (rows, columns) = (Arg::U32(n as u32), Arg::U32(columns as u32));
    let args = &mut [x, w, y, rstd, rows, columns, Arg::F32(norm.eps), Arg::F32(norm.offset)];
    gpu.line(variant, "norm", (gpu.resident(n, threads, 2048), threads), args)
}

/// Of x, w, rstd, dy.
pub fn rmsnorm_backward(
    gpu: &GpuDevice,
    norm: &RmsNorm,
    [x, w, rstd, dy]: [View; 4],
    dx: ViewMut,
    dw: ViewMut,
) -> Result<()> {
    const OP: &str = "rmsnorm_backward";
    let (dtype, columns) = (x.dtype(), w.len());
    let n = rows(OP, "x", x.len(), columns)?;
    let variant = by_dtype!(OP, dtype, "rmsnorm_backward")?;
    w.fits(OP, "w", dtype, columns)?;
    rstd.fits(OP, "rstd", DType::F32, n)?;
    dy.fits(OP, "dy", dtype, x.len())?;
    dx.fits(OP, "dx", dtype, x.len())?;
    dw.fits(OP, "dw", DType::F32, columns)?;
    if n == 0 {
        return Ok(());
    }
    let threads = threads(OP, columns, MOST_HELD)?;
    let ctas = gpu.resident(n, threads, RESIDENT);
    let mut scratch = gpu.scratch();
    let mut partial = words(OP, &mut scratch.words, ctas as usize * columns)?;
    let operands = [Arg::In(x), Arg::In(w), Arg::In(rstd), Arg::In(dy), Arg::InOut(dx), Arg::Out(partial.reborrow())];
    let [x, w, rstd, dy, dx, out] = operands;
    let args = &mut [x, w, rstd, dy, dx, out, Arg::U32(n as u32), Arg::U32(columns as u32), Arg::F32(norm.offset)];
    gpu.line(variant, "norm_backward", (ctas, threads), args)?;
    gpu.sum_rows(partial.as_view(), dw)
}

pub fn layernorm(gpu: &GpuDevice, eps: f32, x: View, w: View, b: View, y: ViewMut, stats: ViewMut) -> Result<()> {
    const OP: &str = "layernorm";
    let (dtype, columns) = (x.dtype(), w.len());
    let n = rows(OP, "x", x.len(), columns)?;
    let variant = by_dtype!(OP, dtype, "layernorm")?;
    w.fits(OP, "w", dtype, columns)?;
    b.fits(OP, "b", dtype, columns)?;
    y.fits(OP, "y", dtype, x.len())?;
    stats.fits(OP, "stats", DType::F32, 2 * n)?;
    if n == 0 {
        return Ok(());
    }
    let threads = threads(OP, columns, MOST_HELD)?;
    let [x, w, b, y, stats] = [Arg::In(x), Arg::In(w), Arg::In(b), Arg::Out(y), Arg::Out(stats)];
    let args = &mut [x, w, b, y, stats, Arg::U32(n as u32), Arg::U32(columns as u32), Arg::F32(eps)];
    gpu.line(variant, "norm", (gpu.resident(n, threads, 2048), threads), args)
}

/// Of x, w, stats, dy.
pub fn layernorm_backward(
    gpu: &GpuDevice,
    [x, w, stats, dy]: [View; 4],
    dx: ViewMut,
    dw: ViewMut,
    db: ViewMut,
) -> Result<()> {
    const OP: &str = "layernorm_backward";
    let (dtype, columns) = (x.dtype(), w.len());
    let n = rows(OP, "x", x.len(), columns)?;
    let variant = by_dtype!(OP, dtype, "layernorm_backward")?;
    w.fits(OP, "w", dtype, columns)?;
    stats.fits(OP, "stats", DType::F32, 2 * n)?;
    dy.fits(OP, "dy", dtype, x.len())?;
    dx.fits(OP, "dx", dtype, x.len())?;
    dw.fits(OP, "dw", DType::F32, columns)?;
    db.fits(OP, "db", DType::F32, columns)?;
    if n == 0 {
        return Ok(());
    }
    let threads = threads(OP, columns, MOST_HELD)?;
    let ctas = gpu.resident(n, threads, RESIDENT);
    let part = ctas as usize * columns;
    let mut scratch = gpu.scratch();
    let mut partial = words(OP, &mut scratch.words, 2 * part)?;
    let operands = [Arg::In(x), Arg::In(w), Arg::In(stats), Arg::In(dy), Arg::InOut(dx), Arg::Out(partial.reborrow())];
    let [x, w, stats, dy, dx, out] = operands;
    let args = &mut [x, w, stats, dy, dx, out, Arg::U32(n as u32), Arg::U32(columns as u32)];
    gpu.line(variant, "norm_backward", (ctas, threads), args)?;
    gpu.sum_rows(partial.as_view().slice(0..part), dw)?;
    gpu.sum_rows(partial.as_view().slice(part..2 * part), db)
}
