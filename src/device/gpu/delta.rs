//! Launches of gated delta rules and of short convolutions. Never reads the documents, which only the GPU has.
//!
//! A delta rule goes along documents forward, and backward twice: once from the states in front of blocks, for the
//! numbers of each row, and once from the end, for the gradients of values and states. What is left does not run along
//! documents, and is computed block by block.
use super::driver::{Arg, Kernel, LaunchShape};
use super::element::bias_backward;
use super::launch::{GpuDevice, WARPS, by_dtype, int};
use super::scratch::words;
use crate::View;
use crate::ops::{
    BiasBackward, ConvKind, DELTA_BLOCK, DeltaRule, DeltaRuleBackward, DeltaShape, RowSequences, ShortConv,
    ShortConvBackward,
};
use flatshard_base::{DType, Error, Result};

/// Columns of a head's state in a CTA of `kernels/delta_rule.ptx`.
const COLUMNS: usize = 32;
/// Elements of a key in its smaller variant, and in its larger one.
const NARROW_KEY: usize = 128;
pub const MOST_OF_KEY: usize = 256;
/// Channels of a CTA of `kernels/short_conv.ptx`, and rows of one of its chunks.
const CHANNELS: usize = 256;
const CHUNK: usize = 32;

/// The variant that goes along rows.
fn along(op: &'static str, shape: &DeltaShape, dtype: DType) -> Result<&'static str> {
    match shape.key_dim {
        n if n <= NARROW_KEY => by_dtype!(op, dtype, "delta_rule"),
        n if n <= MOST_OF_KEY => by_dtype!(op, dtype, "delta_rule_wide"),
        n => Err(Error::op(op, format!("keys of {n} elements; up to {MOST_OF_KEY} are possible"))),
    }
}

/// Refuses Mamba 2.
fn replaces(op: &'static str, shape: &DeltaShape) -> Result<()> {
    match shape.rule.replaces() {
        true => Ok(()),
        false => Err(Error::op(op, "there are no kernels of Mamba 2 yet")),
    }
}
/// Refuses convolutions with biases.
fn without_bias(op: &'static str, bias: Option<View>) -> Result<()> {
    match bias {
        None => Ok(()),
        Some(_) => Err(Error::op(op, "there are no kernels of short convolutions with biases yet")),
    }
}

/// `args!(shape, n; first ..)`: an array of the first arguments, followed by the sizes.
macro_rules! args {
    ($shape:expr, $n:expr; $($first:expr),* $(; $last:expr)?) => {{
        let s: &DeltaShape = &$shape;
        let most = Arg::F32(s.most());
        &mut [
            $($first,)* int($n), int(s.key_heads), int(s.value_heads), int(s.key_dim), int(s.value_dim), most, $($last)?
        ]
    }};
}

/// CTAs for each head's columns and for `starts`; nothing without rows.
fn launch(gpu: &GpuDevice, kernel: Kernel, shape: &DeltaShape, starts: usize, args: &mut [Arg]) -> Result<()> {
    let grid = [starts as u32, (shape.value_heads * shape.value_dim.div_ceil(COLUMNS)) as u32, 1];
    match starts {
        0 => Ok(()),
        _ => gpu.driver.launch(kernel, LaunchShape { grid, block: [256, 1, 1], shared: 0 }, args),
    }
}

pub fn delta_rule(gpu: &GpuDevice, op: DeltaRule) -> Result<()> {
    const OP: &str = DeltaRule::OP;
    let (n, shape) = (op.check()?, op.shape);
    replaces(OP, &shape)?;
    let variant = along(OP, &shape, op.qkv.dtype())?;
    let (entry, starts, table, states, last) = match op.along {
        RowSequences::Whole(documents) => {
            let keeps = !op.states.is_empty();
            let states = if keeps { Arg::InOut(op.states) } else { Arg::Null };
            (OP, n.div_ceil(DELTA_BLOCK), documents, states, usize::from(keeps))
        }
        RowSequences::Carried { table, memory, .. } => ("delta_carried", n, table, Arg::InOut(memory), shape.carried()),
    };
    let [qkv, a, b, a_log, dt_bias, table] = [op.qkv, op.a, op.b, op.a_log, op.dt_bias, table].map(Arg::In);
    let args = args!(shape, n; qkv, a, b, a_log, dt_bias, table, states, Arg::Out(op.o); int(last));
    launch(gpu, Kernel { variant, entry }, &shape, starts, args)
}

/// Elements of what the kernels of backward hand on: r, du, the states' gradients, gradients of queries and keys by
/// value head, and those of log decays and gates by row.
fn handed_on(shape: &DeltaShape, n: usize) -> [usize; 5] {
    let (values, of_keys) = (n * shape.values(), 2 * n * shape.value_heads * shape.key_dim);
    [values, values, DeltaShape::kept(n) * shape.state(), of_keys, 2 * n * shape.value_heads]
}
/// Elements of scratch of backward.
pub fn scratch(shape: &DeltaShape, n: usize) -> usize {
    handed_on(shape, n).iter().sum()
}

pub fn delta_rule_backward(gpu: &GpuDevice, op: DeltaRuleBackward) -> Result<()> {
    const OP: &str = DeltaRuleBackward::OP;
    let (n, shape, dtype) = (op.check()?, op.shape, op.qkv.dtype());
    replaces(OP, &shape)?;
    let (variant, by_blocks) = (along(OP, &shape, dtype)?, by_dtype!(OP, dtype, "delta_blocks")?);
    let (have, needed) = (op.scratch.len(), scratch(&shape, n));
    if have < needed {
        return Err(Error::op(OP, format!("scratch of {have} elements; {needed} are needed")));
    }
    if n == 0 {
        return Ok(());
    }
    let DeltaRuleBackward { documents, qkv, a, b, a_log, dt_bias, states, d_o, scratch, mut dqkv, da, db, .. } = op;
    let [of_r, of_du, of_states, of_keys, of_sums] = handed_on(&shape, n);
    let (mut r, rest) = scratch.split_at(of_r);
    let (mut du, rest) = rest.split_at(of_du);
    let (mut dstates, rest) = rest.split_at(of_states);
    let (mut dqk, rest) = rest.split_at(of_keys);
    let mut sums = rest.slice(0..of_sums);
    let blocks = n.div_ceil(DELTA_BLOCK);

    let [x0, x1, x2, x3, x4, x5, x6] = [qkv, a, b, a_log, dt_bias, documents, states].map(Arg::In);
    let args = args!(shape, n; x0, x1, x2, x3, x4, x5, x6, Arg::Out(r.reborrow()));
    launch(gpu, Kernel { variant, entry: "delta_replay" }, &shape, blocks, args)?;

    let [x0, x1, x2, x3, x4, x5, x6] = [qkv, a, b, a_log, dt_bias, documents, d_o].map(Arg::In);
    let (values, states_after) = (Arg::InOut(dqkv.reborrow()), Arg::InOut(dstates.reborrow()));
    let args = args!(shape, n; x0, x1, x2, x3, x4, x5, x6, values, Arg::Out(du.reborrow()), states_after);
    launch(gpu, Kernel { variant, entry: "delta_walk" }, &shape, blocks, args)?;

    let [x0, x1, x2, x3, x4, x5, x6] = [qkv, a, b, a_log, dt_bias, documents, d_o].map(Arg::In);
    let [y0, y1, y2, y3] = [states, r.as_view(), du.as_view(), dstates.as_view()].map(Arg::In);
    let [z0, z1, z2, z3] = [dqk.reborrow(), da, db, sums.reborrow()].map(Arg::Out);
    let args = args!(shape, n; x0, x1, x2, x3, x4, x5, x6, y0, y1, y2, y3, z0, z1, z2, z3);
    let grid = LaunchShape { grid: [blocks as u32, shape.value_heads as u32, 1], block: [256, 1, 1], shared: 0 };
    gpu.driver.launch(Kernel { variant: by_blocks, entry: "delta_blocks" }, grid, args)?;

    let args = args!(shape, n; Arg::In(qkv), Arg::In(dqk.as_view()), Arg::InOut(dqkv));
    gpu.launch(by_blocks, "delta_lengths", (2 * n * shape.key_heads).div_ceil(WARPS), &mut args[..8])?;

    let [of_decays, of_gates] = sums.as_view().split_at(n * shape.value_heads);
    for (dy, grad) in [(of_decays, op.da_log), (of_gates, op.ddt_bias)] {
        if let Some(db) = grad {
            bias_backward(gpu, BiasBackward { dy, db })?;
        }
    }
    Ok(())
}

/// A convolution's variant.
fn variant(op: &'static str, kind: ConvKind, dtype: DType) -> Result<&'static str> {
    match kind {
        ConvKind::Silu => by_dtype!(op, dtype, "short_conv"),
        ConvKind::Gated => by_dtype!(op, dtype, "short_conv_gated"),
    }
}
fn by_chunks(channels: usize, chunks: usize) -> LaunchShape {
    let grid = [channels.div_ceil(CHANNELS) as u32, chunks as u32, 1];
    LaunchShape { grid, block: [CHANNELS as u32, 1, 1], shared: 0 }
}

pub fn short_conv(gpu: &GpuDevice, op: ShortConv) -> Result<()> {
    const OP: &str = ShortConv::OP;
    let ((n, channels), variant) = (op.check()?, variant(OP, op.kind, op.x.dtype())?);
    without_bias(OP, op.bias)?;
    if n == 0 || channels == 0 {
        return Ok(());
    }
    let (x, w, y) = (Arg::In(op.x), Arg::In(op.w), Arg::Out(op.y));
    let [rows, width, taps] = [n, channels, op.taps].map(int);
    match op.along {
        RowSequences::Whole(documents) => {
            let args = &mut [x, w, Arg::In(documents), y, rows, width, taps, int(CHUNK)];
            gpu.driver.launch(Kernel { variant, entry: OP }, by_chunks(channels, n.div_ceil(CHUNK)), args)
        }
        RowSequences::Carried { table, memory, .. } => {
            let args = &mut [x, w, Arg::In(table), Arg::InOut(memory), y, rows, width, taps];
            gpu.driver.launch(Kernel { variant, entry: "short_conv_carried" }, by_chunks(channels, n), args)
        }
    }
}

pub fn short_conv_backward(gpu: &GpuDevice, op: ShortConvBackward) -> Result<()> {
    const OP: &str = ShortConvBackward::OP;
    let ((n, channels), variant) = (op.check()?, variant(OP, op.kind, op.x.dtype())?);
    without_bias(OP, op.bias)?;
    if n == 0 || channels == 0 {
        return Ok(());
    }
    let mut scratch = gpu.scratch();
    let of_chunk = channels * op.taps;
    // No more chunks than the scratch has room for.
    let most = (scratch.words.len() / of_chunk).max(1);
    let chunk = n.div_ceil(most).max(2 * CHUNK);
    let chunks = n.div_ceil(chunk);
    let mut parts = words(OP, &mut scratch.words, chunks * of_chunk)?;
    let [x, w, documents, dy] = [op.x, op.w, op.documents, op.dy].map(Arg::In);
    let [rows, width, taps, of_rows, wanted] = [n, channels, op.taps, chunk, usize::from(op.dw.is_some())].map(int);
    let sums = if op.dw.is_some() { Arg::Out(parts.reborrow()) } else { Arg::Null };
    let args = &mut [x, w, documents, dy, Arg::Out(op.dx), sums, rows, width, taps, of_rows, wanted];
    gpu.driver.launch(Kernel { variant, entry: OP }, by_chunks(channels, chunks), args)?;
    op.dw.map_or(Ok(()), |dw| gpu.sum_rows(parts.as_view(), dw))
}
