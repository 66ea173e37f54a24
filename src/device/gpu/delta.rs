//! Launches of gated delta rules, of Mamba 2 and of short convolutions. Never reads the documents, which only the GPU
//! has.
//!
//! A rule goes along documents forward, and backward twice: once from the states in front of blocks, for the numbers of
//! each row, which Mamba 2 has at hand, and once from the end, for the gradients of values and states. What is left
//! does not run along documents, and is computed block by block.
use super::driver::{Arg, Kernel, LaunchShape};
use super::element::bias_backward;
use super::launch::{GpuDevice, WARPS, by_dtype, int};
use super::scratch::words;
use crate::ops::{
    BiasBackward, ConvKind, DELTA_BLOCK, DeltaRule, DeltaRuleBackward, DeltaShape, RowSequences, ShortConv,
    ShortConvBackward, StateRule,
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
    match (shape.key_dim, shape.rule.replaces()) {
        (n, true) if n <= NARROW_KEY => by_dtype!(op, dtype, "delta_rule"),
        (n, true) if n <= MOST_OF_KEY => by_dtype!(op, dtype, "delta_rule_wide"),
        (n, false) if n <= NARROW_KEY => by_dtype!(op, dtype, "mamba_rule"),
        (n, false) if n <= MOST_OF_KEY => by_dtype!(op, dtype, "mamba_rule_wide"),
        (n, _) => Err(Error::op(op, format!("keys of {n} elements; up to {MOST_OF_KEY} are possible"))),
    }
}

/// `args!(shape, n, skip; first ..)`: an array of the first arguments, followed by the sizes and by what only Mamba 2
/// has.
macro_rules! args {
    ($shape:expr, $n:expr, $skip:expr; $($first:expr),* $(; $last:expr)?) => {{
        let s: &DeltaShape = &$shape;
        let [least, most] = match s.rule {
            StateRule::Delta { .. } => [0.0, s.most()],
            StateRule::Decay { limits } => limits,
        };
        let sizes = [$n, s.key_heads, s.value_heads, s.key_dim, s.value_dim].map(int);
        let [n, key_heads, value_heads, key_dim, value_dim] = sizes;
        &mut [
            $($first,)* n, key_heads, value_heads, key_dim, value_dim, Arg::F32(most), $($last,)? Arg::F32(least),
            $skip.map_or(Arg::Null, Arg::In)
        ]
    }};
}
/// The arguments without those of Mamba 2 if the rule is another, or without the last one for `blocks`.
fn of_rule<'a, 'b>(shape: &DeltaShape, args: &'b mut [Arg<'a>], blocks: bool) -> &'b mut [Arg<'a>] {
    let without = if shape.rule.replaces() { 2 } else { usize::from(blocks) };
    let len = args.len() - without;
    &mut args[..len]
}

/// CTAs for each head's columns and for `starts`; nothing without rows.
fn launch(gpu: &GpuDevice, kernel: Kernel, shape: &DeltaShape, starts: usize, args: &mut [Arg]) -> Result<()> {
    let grid = [starts as u32, (shape.value_heads * shape.value_dim.div_ceil(COLUMNS)) as u32, 1];
    let args = of_rule(shape, args, false);
    match starts {
        0 => Ok(()),
        _ => gpu.driver.launch(kernel, LaunchShape { grid, block: [256, 1, 1], shared: 0 }, args),
    }
}

pub fn delta_rule(gpu: &GpuDevice, op: DeltaRule) -> Result<()> {
    const OP: &str = DeltaRule::OP;
    let (n, shape) = (op.check()?, op.shape);
    let variant = along(OP, &shape, op.qkv.dtype())?;
    let (entry, starts, table, states, last) = match op.along {
        RowSequences::Whole(documents) => {
            let keeps = !op.states.is_empty();
            let states = if keeps { Arg::InOut(op.states) } else { Arg::Null };
            (OP, n.div_ceil(DELTA_BLOCK), documents, states, usize::from(keeps))
        }
        RowSequences::Carried { table, memory, .. } => ("delta_carried", n, table, Arg::InOut(memory), shape.carried()),
    };
    let [qkv, a, a_log, dt_bias, table] = [op.qkv, op.a, op.a_log, op.dt_bias, table].map(Arg::In);
    let b = if op.b.is_empty() { Arg::Null } else { Arg::In(op.b) };
    let args = args!(shape, n, op.skip; qkv, a, b, a_log, dt_bias, table, states, Arg::Out(op.o); int(last));
    launch(gpu, Kernel { variant, entry }, &shape, starts, args)
}

/// Elements of what the kernels of backward hand on: r, which Mamba 2 has as its values; du, the states' gradients,
/// gradients of queries and keys by value head, and those of log decays, of gates and of skipped values by row.
fn handed_on(shape: &DeltaShape, n: usize) -> [usize; 5] {
    let (values, of_keys) = (n * shape.values(), 2 * n * shape.value_heads * shape.key_dim);
    let (r, sums) = if shape.rule.replaces() { (values, 2) } else { (0, 3) };
    [r, values, DeltaShape::kept(n) * shape.state(), of_keys, sums * n * shape.value_heads]
}
/// Elements of scratch of backward.
pub fn scratch(shape: &DeltaShape, n: usize) -> usize {
    handed_on(shape, n).iter().sum()
}

pub fn delta_rule_backward(gpu: &GpuDevice, op: DeltaRuleBackward) -> Result<()> {
    const OP: &str = DeltaRuleBackward::OP;
    let (n, shape, dtype) = (op.check()?, op.shape, op.qkv.dtype());
    let variant = along(OP, &shape, dtype)?;
    let by_blocks = match shape.rule.replaces() {
        true => by_dtype!(OP, dtype, "delta_blocks")?,
        false => by_dtype!(OP, dtype, "mamba_blocks")?,
    };
    let (have, needed) = (op.scratch.len(), scratch(&shape, n));
    if have < needed {
        return Err(Error::op(OP, format!("scratch of {have} elements; {needed} are needed")));
    }
    if n == 0 {
        return Ok(());
    }
    let DeltaRuleBackward { documents, qkv, a, a_log, dt_bias, skip, states, d_o, scratch, mut dqkv, da, .. } = op;
    let b = || if op.b.is_empty() { Arg::Null } else { Arg::In(op.b) };
    let db = if op.db.is_empty() { Arg::Null } else { Arg::Out(op.db) };
    let [of_r, of_du, of_states, of_keys, of_sums] = handed_on(&shape, n);
    let (mut r, rest) = scratch.split_at(of_r);
    let (mut du, rest) = rest.split_at(of_du);
    let (mut dstates, rest) = rest.split_at(of_states);
    let (mut dqk, rest) = rest.split_at(of_keys);
    let mut sums = rest.slice(0..of_sums);
    let blocks = n.div_ceil(DELTA_BLOCK);

    if shape.rule.replaces() {
        let [x0, x1, x3, x4, x5, x6] = [qkv, a, a_log, dt_bias, documents, states].map(Arg::In);
        let args = args!(shape, n, skip; x0, x1, b(), x3, x4, x5, x6, Arg::Out(r.reborrow()));
        launch(gpu, Kernel { variant, entry: "delta_replay" }, &shape, blocks, args)?;
    }

    let [x0, x1, x3, x4, x5, x6] = [qkv, a, a_log, dt_bias, documents, d_o].map(Arg::In);
    let (values, states_after) = (Arg::InOut(dqkv.reborrow()), Arg::InOut(dstates.reborrow()));
    let args = args!(shape, n, skip; x0, x1, b(), x3, x4, x5, x6, values, Arg::Out(du.reborrow()), states_after);
    launch(gpu, Kernel { variant, entry: "delta_walk" }, &shape, blocks, args)?;

    let [x0, x1, x3, x4, x5, x6] = [qkv, a, a_log, dt_bias, documents, d_o].map(Arg::In);
    let y1 = if of_r == 0 { Arg::Null } else { Arg::In(r.as_view()) };
    let [y0, y2, y3] = [states, du.as_view(), dstates.as_view()].map(Arg::In);
    let [z0, z1, z3] = [dqk.reborrow(), da, sums.reborrow()].map(Arg::Out);
    let args = args!(shape, n, skip; x0, x1, b(), x3, x4, x5, x6, y0, y1, y2, y3, z0, z1, db, z3);
    let args = of_rule(&shape, args, true);
    let grid = LaunchShape { grid: [blocks as u32, shape.value_heads as u32, 1], block: [256, 1, 1], shared: 0 };
    gpu.driver.launch(Kernel { variant: by_blocks, entry: "delta_blocks" }, grid, args)?;

    let args = args!(shape, n, skip; Arg::In(qkv), Arg::In(dqk.as_view()), Arg::InOut(dqkv));
    gpu.launch(by_blocks, "delta_lengths", (2 * n * shape.key_heads).div_ceil(WARPS), &mut args[..8])?;

    let each = n * shape.value_heads;
    for (i, grad) in [op.da_log, op.ddt_bias, op.dskip].into_iter().enumerate() {
        if let Some(db) = grad {
            bias_backward(gpu, BiasBackward { dy: sums.as_view().slice(i * each..(i + 1) * each), db })?;
        }
    }
    Ok(())
}

/// A convolution's variant.
fn variant(op: &'static str, kind: ConvKind, biased: bool, dtype: DType) -> Result<&'static str> {
    match kind {
        ConvKind::Silu if biased => by_dtype!(op, dtype, "short_conv_biased"),
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
    let ((n, channels), variant) = (op.check()?, variant(OP, op.kind, op.bias.is_some(), op.x.dtype())?);
    if n == 0 || channels == 0 {
        return Ok(());
    }
    let (x, w, y) = (Arg::In(op.x), Arg::In(op.w), Arg::Out(op.y));
    let (bias, without) = (op.bias.map_or(Arg::Null, Arg::In), usize::from(op.bias.is_none()));
    let [rows, width, taps] = [n, channels, op.taps].map(int);
    match op.along {
        RowSequences::Whole(documents) => {
            let args = &mut [x, w, Arg::In(documents), y, rows, width, taps, int(CHUNK), bias];
            let args = &mut args[..9 - without];
            gpu.driver.launch(Kernel { variant, entry: OP }, by_chunks(channels, n.div_ceil(CHUNK)), args)
        }
        RowSequences::Carried { table, memory, .. } => {
            let args = &mut [x, w, Arg::In(table), Arg::InOut(memory), y, rows, width, taps, bias];
            let args = &mut args[..9 - without];
            gpu.driver.launch(Kernel { variant, entry: "short_conv_carried" }, by_chunks(channels, n), args)
        }
    }
}

pub fn short_conv_backward(gpu: &GpuDevice, op: ShortConvBackward) -> Result<()> {
    const OP: &str = ShortConvBackward::OP;
    let ((n, channels), variant) = (op.check()?, variant(OP, op.kind, op.bias.is_some(), op.x.dtype())?);
    if n == 0 || channels == 0 {
        return Ok(());
    }
    let mut scratch = gpu.scratch();
    let is_biased = op.bias.is_some();
    let of_chunk = channels * (op.taps + usize::from(is_biased));
    // No more chunks than the scratch has room for.
    let most = (scratch.words.len() / of_chunk).max(1);
    let chunk = n.div_ceil(most).max(2 * CHUNK);
    let chunks = n.div_ceil(chunk);
    let (mut parts, mut of_bias) =
        words(OP, &mut scratch.words, chunks * of_chunk)?.split_at(chunks * channels * op.taps);
    let wanted = op.dw.is_some() || op.dbias.is_some();
    let [x, w, documents, dy] = [op.x, op.w, op.documents, op.dy].map(Arg::In);
    let [rows, width, taps, of_rows, is_wanted] = [n, channels, op.taps, chunk, usize::from(wanted)].map(int);
    let [sums, of_biases] = match wanted {
        true => [parts.reborrow(), of_bias.reborrow()].map(Arg::Out),
        false => [Arg::Null, Arg::Null],
    };
    let bias = op.bias.map_or(Arg::Null, Arg::In);
    let args =
        &mut [x, w, documents, dy, Arg::Out(op.dx), sums, rows, width, taps, of_rows, is_wanted, bias, of_biases];
    let args = &mut args[..if is_biased { 13 } else { 11 }];
    gpu.driver.launch(Kernel { variant, entry: OP }, by_chunks(channels, chunks), args)?;
    op.dw.map_or(Ok(()), |dw| gpu.sum_rows(parts.as_view(), dw))?;
    op.dbias.map_or(Ok(()), |dbias| gpu.sum_rows(of_bias.as_view(), dbias))
}
