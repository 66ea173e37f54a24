//! Launches of rotary positions: a warp takes a row at a time.
use super::driver::Arg;
use super::launch::{GpuDevice, by_dtype, rows};
use super::scratch::{Indexed, LaunchScratch, words};
use crate::base::{DType, Error, Result};
use crate::device::{QkNormRope, Rope, View, ViewMut};

/// Threads of a CTA: so many warps, and rows at a time.
const THREADS: u32 = 128;
const ROWS: usize = THREADS as usize / 32;
/// Threads of a multiprocessor: rotation alone, with norms, and with their gradients, which take ever more registers.
const RESIDENT: [u32; 3] = [1024, 640, 384];

/// Rows of the table, which has one for each of `n` positions.
fn turns(op: &'static str, head_dim: usize, table: &View, positions: &View, n: usize) -> Result<usize> {
    if head_dim == 0 || !head_dim.is_multiple_of(2) {
        return Err(Error::op(op, format!("heads of {head_dim} elements: rotary positions pair two halves")));
    }
    let max_len = rows(op, "table", table.len(), head_dim)?;
    table.fits(op, "table", DType::F32, table.len())?;
    positions.fits(op, "positions", DType::U32, n)?;
    Ok(max_len)
}

pub fn rope(gpu: &GpuDevice, shape: &Rope, table: View, positions: View, qkv: ViewMut, inverse: bool) -> Result<()> {
    const OP: &str = "rope";
    let Rope { heads, head_dim, row } = *shape;
    if heads * head_dim > row {
        return Err(Error::op(OP, format!("{shape:?}: heads must fit the row")));
    }
    let variant = by_dtype!(OP, qkv.dtype(), "rope")?;
    let n = rows(OP, "qkv", qkv.len(), row)?;
    let max_len = turns(OP, head_dim, &table, &positions, n)?;
    if n == 0 {
        return Ok(());
    }
    let mut scratch = gpu.scratch();
    gpu.check(Indexed::Rope, positions, max_len, &mut scratch.faults)?;
    let [table, positions, qkv] = [Arg::In(table), Arg::In(positions), Arg::InOut(qkv)];
    let fault = Arg::In(scratch.faults.of(Indexed::Rope));
    let [n_arg, heads, head_dim, row] = [n, heads, head_dim, row].map(|x| Arg::U32(x as u32));
    let sign = Arg::F32(if inverse { -1.0 } else { 1.0 });
    let ctas = gpu.resident(n.div_ceil(ROWS), THREADS, RESIDENT[0]);
    let args = &mut [table, positions, qkv, fault, n_arg, heads, head_dim, row, sign];
    gpu.line(variant, OP, (ctas, THREADS), args)
}

/// Rows of `qkv` and of the table, of operands that fit.
fn check(op: &'static str, s: &QkNormRope, [table, positions, wq, wk, qkv]: &[View; 5]) -> Result<(usize, usize)> {
    let (dtype, d) = (qkv.dtype(), s.head_dim);
    let n = rows(op, "qkv", qkv.len(), s.row())?;
    let max_len = turns(op, d, table, positions, n)?;
    wq.fits(op, "wq", dtype, d)?;
    wk.fits(op, "wk", dtype, d)?;
    // A group of lanes, 16 bytes each, holds half a head.
    let most = 64 * 16 / dtype.size();
    match d <= most {
        true => Ok((n, max_len)),
        false => Err(Error::op(op, format!("heads of {d} elements: this kernel takes at most {most} in {dtype}"))),
    }
}

/// Of table, positions, wq, wk, qkv.
pub fn qk_norm_rope(
    gpu: &GpuDevice,
    shape: &QkNormRope,
    operands: [View; 5],
    out: ViewMut,
    rstd: ViewMut,
) -> Result<()> {
    const OP: &str = "qk_norm_rope";
    let (n, max_len) = check(OP, shape, &operands)?;
    let [.., qkv] = &operands;
    let variant = by_dtype!(OP, qkv.dtype(), "qk_norm_rope")?;
    out.fits(OP, "out", qkv.dtype(), qkv.len())?;
    rstd.fits(OP, "rstd", DType::F32, n * (shape.heads + shape.kv_heads))?;
    if n == 0 {
        return Ok(());
    }
    let mut scratch = gpu.scratch();
    gpu.check(Indexed::QkNormRope, operands[1], max_len, &mut scratch.faults)?;
    let [table, positions, wq, wk, qkv] = operands.map(Arg::In);
    let fault = Arg::In(scratch.faults.of(Indexed::QkNormRope));
    let [rows, heads, kv_heads, d] = [n, shape.heads, shape.kv_heads, shape.head_dim].map(|x| Arg::U32(x as u32));
    let (out, rstd, eps, offset) =
        (Arg::Out(out), Arg::Out(rstd), Arg::F32(shape.norm.eps), Arg::F32(shape.norm.offset));
    let ctas = gpu.resident(n.div_ceil(ROWS), THREADS, RESIDENT[1]);
    let args = &mut [table, positions, wq, wk, qkv, out, rstd, fault, rows, heads, kv_heads, d, eps, offset];
    gpu.line(variant, OP, (ctas, THREADS), args)
}

/// Of table, positions, wq, wk, qkv, rstd; dwq and dwk.
pub fn qk_norm_rope_backward(
    gpu: &GpuDevice,
    shape: &QkNormRope,
    [table, positions, wq, wk, qkv, rstd]: [View; 6],
    dqkv: ViewMut,
    [dwq, dwk]: [ViewMut; 2],
) -> Result<()> {
    const OP: &str = "qk_norm_rope_backward";
    let operands = [table, positions, wq, wk, qkv];
    let (n, max_len) = check(OP, shape, &operands)?;
    let variant = by_dtype!(OP, qkv.dtype(), "qk_norm_rope_backward")?;
    rstd.fits(OP, "rstd", DType::F32, n * (shape.heads + shape.kv_heads))?;
    dqkv.fits(OP, "dqkv", qkv.dtype(), qkv.len())?;
    dwq.fits(OP, "dwq", DType::F32, shape.head_dim)?;
    dwk.fits(OP, "dwk", DType::F32, shape.head_dim)?;
    if n == 0 {
        return Ok(());
    }
    let ctas = gpu.resident(n.div_ceil(ROWS), THREADS, RESIDENT[2]);
    let part = ctas as usize * shape.head_dim;
    let mut scratch = gpu.scratch();
    let LaunchScratch { words: all, faults, .. } = &mut *scratch;
    gpu.check(Indexed::QkNormRopeBackward, positions, max_len, faults)?;
    let mut partial = words(OP, all, 2 * part)?;
    let [table, positions, wq, wk, qkv] = operands.map(Arg::In);
    let (rstd, dqkv, out) = (Arg::In(rstd), Arg::InOut(dqkv), Arg::Out(partial.reborrow()));
    let fault = Arg::In(faults.of(Indexed::QkNormRopeBackward));
    let [rows, heads, kv_heads, d] = [n, shape.heads, shape.kv_heads, shape.head_dim].map(|x| Arg::U32(x as u32));
    let offset = Arg::F32(shape.norm.offset);
    let args = &mut [table, positions, wq, wk, qkv, rstd, dqkv, out, fault, rows, heads, kv_heads, d, offset];
    gpu.line(variant, OP, (ctas, THREADS), args)?;
    gpu.sum_rows(partial.as_view().slice(0..part), dwq)?;
    gpu.sum_rows(partial.as_view().slice(part..2 * part), dwk)
}
