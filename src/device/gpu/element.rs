//! Launches of elementwise operations: casts, sums, biases, dropout. Never knows what the elements mean.
use super::driver::{Arg, Kernel, LaunchShape};
use super::launch::{BLOCK, GpuDevice, VECTOR, by_dtype};
use super::scratch::{CTAS, words};
use crate::ops::{Bias, BiasBackward, Dropout, DropoutRows, ScaleBy};
use crate::{View, ViewMut};
use flatshard_base::{DType, Error, Result};

/// The kernel of `y = x` between two dtypes.
pub fn casts(from: DType, to: DType) -> Result<&'static str> {
    match (from, to) {
        (DType::F32, DType::Bf16) => Ok("cast_f32_bf16"),
        (DType::F32, DType::F16) => Ok("cast_f32_f16"),
        (DType::Bf16, DType::F32) => Ok("cast_bf16_f32"),
        (DType::F16, DType::F32) => Ok("cast_f16_f32"),
        (from, to) => Err(Error::op("copy", format!("cannot cast {from} to {to}"))),
    }
}
/// The kernel of `y += x`.
pub fn adds(from: DType, to: DType) -> Result<&'static str> {
    match (from, to) {
        (DType::Bf16, DType::F32) => Ok("add_bf16_f32"),
        (DType::F16, DType::F32) => Ok("add_f16_f32"),
        (from, to) if from == to => by_dtype!("add", to, "add"),
        (from, to) => Err(Error::op("add", format!("cannot add {from} to {to}"))),
    }
}

pub fn copy(gpu: &GpuDevice, src: View, dst: ViewMut) -> Result<()> {
    const OP: &str = "copy";
    let (n, from, to) = (src.len(), src.dtype(), dst.dtype());
    dst.fits(OP, "dst", to, n)?;
    if from == to {
        return gpu.driver.copy(src, dst);
    }
    let variant = casts(from, to)?;
    gpu.each(variant, "cast", n, DType::F32, &mut [Arg::In(src), Arg::Out(dst), Arg::U64(n as u64)])
}

pub fn add(gpu: &GpuDevice, x: View, y: ViewMut) -> Result<()> {
    const OP: &str = "add";
    let (n, from, to) = (x.len(), x.dtype(), y.dtype());
    let variant = adds(from, to)?;
    y.fits(OP, "y", to, n)?;
    gpu.each(variant, "add", n, to, &mut [Arg::In(x), Arg::InOut(y), Arg::U64(n as u64)])
}

pub fn scale(gpu: &GpuDevice, factor: f32, x: ViewMut) -> Result<()> {
    const OP: &str = "scale";
    let (n, dtype) = (x.len(), x.dtype());
    let variant = by_dtype!(OP, dtype, "scale")?;
    gpu.each(variant, OP, n, dtype, &mut [Arg::InOut(x), Arg::U64(n as u64), Arg::F32(factor)])
}

pub fn scale_by(gpu: &GpuDevice, op: ScaleBy) -> Result<()> {
    const OP: &str = ScaleBy::OP;
    op.check()?;
    let (n, dtype) = (op.x.len(), op.x.dtype());
    let args = &mut [Arg::InOut(op.x), Arg::U64(n as u64), Arg::In(op.factor)];
    gpu.each(by_dtype!(OP, dtype, "scale_by")?, "scale", n, dtype, args)
}

/// A grid of column strips over chunks of rows, as `kernels/strip.ptx` expects: enough chunks to fill the GPU.
fn strips(gpu: &GpuDevice, dtype: DType, rows: usize, columns: usize) -> LaunchShape {
    let strips = columns.div_ceil(32 * VECTOR / dtype.size()) as u32;
    let chunks = (CTAS * gpu.driver.multiprocessors() / strips).clamp(1, rows.div_ceil(BLOCK as usize / 32) as u32);
    LaunchShape { grid: [strips, chunks, 1], block: [BLOCK, 1, 1], shared: 0 }
}

pub fn bias(gpu: &GpuDevice, op: Bias) -> Result<()> {
    const OP: &str = Bias::OP;
    let (n, dtype, columns) = (op.check()?, op.y.dtype(), op.bias.len());
    let variant = by_dtype!(OP, dtype, "bias")?;
    if n == 0 {
        return Ok(());
    }
    let shape = strips(gpu, dtype, n, columns);
    let args = &mut [Arg::In(op.bias), Arg::InOut(op.y), Arg::U32(n as u32), Arg::U32(columns as u32)];
    gpu.driver.launch(Kernel { variant, entry: OP }, shape, args)
}

pub fn bias_backward(gpu: &GpuDevice, op: BiasBackward) -> Result<()> {
    const OP: &str = BiasBackward::OP;
    let (n, dtype, columns) = (op.check()?, op.dy.dtype(), op.db.len());
    let variant = by_dtype!(OP, dtype, "bias_backward")?;
    if n == 0 {
        return Ok(());
    }
    let mut scratch = gpu.scratch();
    let mut shape = strips(gpu, dtype, n, columns);
    let [_, chunks, _] = &mut shape.grid;
    *chunks = (*chunks).clamp(1, (scratch.words.len() / columns).max(1) as u32);
    let mut partial = words(OP, &mut scratch.words, *chunks as usize * columns)?;
    let args = &mut [Arg::In(op.dy), Arg::Out(partial.reborrow()), Arg::U32(n as u32), Arg::U32(columns as u32)];
    gpu.driver.launch(Kernel { variant, entry: OP }, shape, args)?;
    gpu.sum_rows(partial.as_view(), op.db)
}

pub fn dropout(gpu: &GpuDevice, op: Dropout) -> Result<()> {
    const OP: &str = Dropout::OP;
    op.check()?;
    let (threshold, scale) = (Arg::U32(op.threshold()), Arg::F32(op.scale()));
    let (n, dtype) = (op.x.len(), op.x.dtype());
    let variant = by_dtype!(OP, dtype, "dropout")?;
    let args = &mut [Arg::InOut(op.x), Arg::In(op.key), Arg::U64(n as u64), threshold, scale];
    gpu.each(variant, OP, n, dtype, args)
}

/// A thread handles one counter's channels, row after row.
pub fn dropout_rows(gpu: &GpuDevice, op: DropoutRows) -> Result<()> {
    const OP: &str = DropoutRows::OP;
    let (n, variant) = (op.check()?, by_dtype!(OP, op.x.dtype(), "dropout_rows")?);
    if n == 0 {
        return Ok(());
    }
    let counters = (op.first % 4 + op.width).div_ceil(4);
    let columns = counters.div_ceil(BLOCK as usize) as u32;
    let rows = (CTAS * gpu.driver.multiprocessors()).div_ceil(columns).clamp(1, n as u32);
    let shape = LaunchShape { grid: [rows, columns, 1], block: [BLOCK, 1, 1], shared: 0 };
    let (threshold, scale) = (Arg::U32(op.threshold()), Arg::F32(op.scale()));
    let mapped = Arg::U32(op.rows.is_some().into());
    let y = if op.accumulate { Arg::InOut(op.y) } else { Arg::Out(op.y) };
    let args = &mut [
        Arg::In(op.x),
        Arg::In(op.key),
        op.rows.map_or(Arg::Null, Arg::In),
        y,
        Arg::U32(n as u32),
        Arg::U32(op.width as u32),
        Arg::U32(op.first as u32),
        threshold,
        scale,
        mapped,
        Arg::U32(op.accumulate.into()),
    ];
    gpu.driver.launch(Kernel { variant, entry: OP }, shape, args)
}
