//! Launches that work element by element: casts, sums, biases, dropout. Never knows what the elements mean.
use super::driver::{Arg, Kernel, LaunchShape};
use super::launch::{BLOCK, GpuDevice, VECTOR, by_dtype, rows};
use super::scratch::{CTAS, words};
use crate::base::{DType, Error, Result};
use crate::device::{View, ViewMut};

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
    src.fits(OP, "src", from, n)?;
    dst.fits(OP, "dst", to, n)?;
    gpu.each(variant, "cast", n, DType::F32, &mut [Arg::In(src), Arg::Out(dst), Arg::U64(n as u64)])
}

pub fn add(gpu: &GpuDevice, x: View, y: ViewMut) -> Result<()> {
    const OP: &str = "add";
    let (n, from, to) = (x.len(), x.dtype(), y.dtype());
    let variant = adds(from, to)?;
    x.fits(OP, "x", from, n)?;
    y.fits(OP, "y", to, n)?;
    gpu.each(variant, "add", n, to, &mut [Arg::In(x), Arg::InOut(y), Arg::U64(n as u64)])
}

pub fn scale(gpu: &GpuDevice, factor: f32, x: ViewMut) -> Result<()> {
    const OP: &str = "scale";
    let (n, dtype) = (x.len(), x.dtype());
    let variant = by_dtype!(OP, dtype, "scale")?;
    gpu.each(variant, OP, n, dtype, &mut [Arg::InOut(x), Arg::U64(n as u64), Arg::F32(factor)])
}

/// A grid of strips of columns over chunks of rows, as `kernels/strip.ptx` has them: enough chunks to fill the GPU.
fn strips(gpu: &GpuDevice, dtype: DType, rows: usize, columns: usize) -> LaunchShape {
    let strips = columns.div_ceil(32 * VECTOR / dtype.size()) as u32;
    let chunks = (CTAS * gpu.driver.multiprocessors() / strips).clamp(1, rows.div_ceil(BLOCK as usize / 32) as u32);
    LaunchShape { grid: [strips, chunks, 1], block: [BLOCK, 1, 1], shared: 0 }
}

pub fn bias(gpu: &GpuDevice, bias: View, y: ViewMut) -> Result<()> {
    const OP: &str = "bias";
    let (dtype, columns) = (y.dtype(), bias.len());
    let variant = by_dtype!(OP, dtype, "bias")?;
    bias.fits(OP, "bias", dtype, columns)?;
    let n = rows(OP, "y", y.len(), columns)?;
    if n == 0 {
        return Ok(());
    }
    let shape = strips(gpu, dtype, n, columns);
    let args = &mut [Arg::In(bias), Arg::InOut(y), Arg::U32(n as u32), Arg::U32(columns as u32)];
    gpu.driver.launch(Kernel { variant, entry: OP }, shape, args)
}

pub fn bias_backward(gpu: &GpuDevice, dy: View, db: ViewMut) -> Result<()> {
    const OP: &str = "bias_backward";
    let (dtype, columns) = (dy.dtype(), db.len());
    let variant = by_dtype!(OP, dtype, "bias_backward")?;
    db.fits(OP, "db", DType::F32, columns)?;
    let n = rows(OP, "dy", dy.len(), columns)?;
    if n == 0 {
        return Ok(());
    }
    let mut scratch = gpu.scratch();
    let mut shape = strips(gpu, dtype, n, columns);
    let [_, chunks, _] = &mut shape.grid;
    *chunks = (*chunks).clamp(1, (scratch.words.len() / columns).max(1) as u32);
    let mut partial = words(OP, &mut scratch.words, *chunks as usize * columns)?;
    let args = &mut [Arg::In(dy), Arg::Out(partial.reborrow()), Arg::U32(n as u32), Arg::U32(columns as u32)];
    gpu.driver.launch(Kernel { variant, entry: OP }, shape, args)?;
    gpu.sum_rows(partial.as_view(), db)
}

pub fn dropout(gpu: &GpuDevice, p: f32, key: View, x: ViewMut) -> Result<()> {
    const OP: &str = "dropout";
    if !(0.0..1.0).contains(&p) {
        return Err(Error::op(OP, format!("p = {p} is not in [0, 1)")));
    }
    key.fits(OP, "key", DType::U32, 2)?;
    let (n, dtype) = (x.len(), x.dtype());
    let variant = by_dtype!(OP, dtype, "dropout")?;
    let threshold = (p as f64 * 4_294_967_296.0) as u32;
    let scale = 1.0 / (1.0 - p);
    let args = &mut [Arg::InOut(x), Arg::In(key), Arg::U64(n as u64), Arg::U32(threshold), Arg::F32(scale)];
    gpu.each(variant, OP, n, dtype, args)
}
