//! Launches of rotary position embeddings: one warp per row at a time.
use super::driver::Arg;
use super::launch::{GpuDevice, VECTOR, by_dtype};
use super::scratch::{Indexed, LaunchScratch, words};
use crate::ops::{QkNormRope, QkNormRopeBackward, Rope, RopeShape, RotaryPairs};
use flatshard_base::{DType, Error, Result};

/// Threads per CTA; each warp handles a row at a time.
const THREADS: u32 = 128;
const ROWS: usize = THREADS as usize / 32;
/// Threads per multiprocessor: rotation alone, with norms, and with their gradients, in increasing order of registers.
const RESIDENT: [u32; 3] = [1024, 640, 384];

pub fn rope(gpu: &GpuDevice, op: Rope) -> Result<()> {
    const OP: &str = Rope::OP;
    let ((n, max_len), RopeShape { heads, head_dim, rotated, pairs, row }) = (op.check()?, op.shape);
    let Rope { table, positions, qkv, inverse, .. } = op;
    let variant = match pairs {
        RotaryPairs::Halves => by_dtype!(OP, qkv.dtype(), "rope")?,
        RotaryPairs::Adjacent => by_dtype!(OP, qkv.dtype(), "rope_adjacent")?,
    };
    if n == 0 {
        return Ok(());
    }
    let mut scratch = gpu.scratch();
    gpu.check(Indexed::Rope, positions, max_len, &mut scratch.faults)?;
    let [table, positions, qkv] = [Arg::In(table), Arg::In(positions), Arg::InOut(qkv)];
    let fault = Arg::In(scratch.faults.of(Indexed::Rope));
    let [n_arg, heads, head_dim, rotated, row] = [n, heads, head_dim, rotated, row].map(|x| Arg::U32(x as u32));
    let sign = Arg::F32(if inverse { -1.0 } else { 1.0 });
    let ctas = gpu.resident(n.div_ceil(ROWS), THREADS, RESIDENT[0]);
    let args = &mut [table, positions, qkv, fault, n_arg, heads, head_dim, rotated, row, sign];
    gpu.line(variant, OP, (ctas, THREADS), args)
}

/// Elements of a head at most: 32 lanes have 8 of each half.
const MOST: usize = 512;

/// Whether a head needs the kernel in which lanes have more than 16 bytes of a half.
fn is_wide(op: &'static str, head_dim: usize, dtype: DType) -> Result<bool> {
    match head_dim <= MOST {
        true => Ok(64 * VECTOR / dtype.size() < head_dim),
        false => Err(Error::op(op, format!("head_dim {head_dim} exceeds this kernel's limit of {MOST}"))),
    }
}

pub fn qk_norm_rope(gpu: &GpuDevice, op: QkNormRope) -> Result<()> {
    const OP: &str = QkNormRope::OP;
    let ((n, max_len), dtype) = (op.check()?, op.qkv.dtype());
    let QkNormRope { shape, table, positions, wq, wk, qkv, out, rstd } = op;
    let variant = match is_wide(OP, shape.head_dim, dtype)? {
        true => "qk_norm_rope_f32_512",
        false => by_dtype!(OP, dtype, "qk_norm_rope")?,
    };
    if n == 0 {
        return Ok(());
    }
    let mut scratch = gpu.scratch();
    gpu.check(Indexed::QkNormRope, positions, max_len, &mut scratch.faults)?;
    let [table, positions, wq, wk, qkv] = [table, positions, wq, wk, qkv].map(Arg::In);
    let fault = Arg::In(scratch.faults.of(Indexed::QkNormRope));
    let [rows, heads, kv_heads, d] = [n, shape.heads, shape.kv_heads, shape.head_dim].map(|x| Arg::U32(x as u32));
    let (out, rstd, eps, offset) =
        (Arg::Out(out), Arg::Out(rstd), Arg::F32(shape.norm.eps), Arg::F32(shape.norm.offset));
    let ctas = gpu.resident(n.div_ceil(ROWS), THREADS, RESIDENT[1]);
    let args = &mut [table, positions, wq, wk, qkv, out, rstd, fault, rows, heads, kv_heads, d, eps, offset];
    gpu.line(variant, OP, (ctas, THREADS), args)
}

pub fn qk_norm_rope_backward(gpu: &GpuDevice, op: QkNormRopeBackward) -> Result<()> {
    const OP: &str = QkNormRopeBackward::OP;
    let ((n, max_len), dtype) = (op.check()?, op.qkv.dtype());
    let QkNormRopeBackward { shape, table, positions, wq, wk, qkv, rstd, dqkv, dwq, dwk } = op;
    let variant = match is_wide(OP, shape.head_dim, dtype)? {
        true => "qk_norm_rope_backward_f32_512",
        false => by_dtype!(OP, dtype, "qk_norm_rope_backward")?,
    };
    if n == 0 {
        return Ok(());
    }
    let ctas = gpu.resident(n.div_ceil(ROWS), THREADS, RESIDENT[2]);
    let part = ctas as usize * shape.head_dim;
    let mut scratch = gpu.scratch();
    let LaunchScratch { words: all, faults, .. } = &mut *scratch;
    gpu.check(Indexed::QkNormRopeBackward, positions, max_len, faults)?;
    let mut partial = words(OP, all, 2 * part)?;
    let [table, positions, wq, wk, qkv, rstd] = [table, positions, wq, wk, qkv, rstd].map(Arg::In);
    let (dqkv, out) = (Arg::InOut(dqkv), Arg::Out(partial.reborrow()));
    let fault = Arg::In(faults.of(Indexed::QkNormRopeBackward));
    let [rows, heads, kv_heads, d] = [n, shape.heads, shape.kv_heads, shape.head_dim].map(|x| Arg::U32(x as u32));
    let offset = Arg::F32(shape.norm.offset);
    let args = &mut [table, positions, wq, wk, qkv, rstd, dqkv, out, fault, rows, heads, kv_heads, d, offset];
    gpu.line(variant, OP, (ctas, THREADS), args)?;
    gpu.sum_rows(partial.as_view().slice(0..part), dwq)?;
    gpu.sum_rows(partial.as_view().slice(part..2 * part), dwk)
}
