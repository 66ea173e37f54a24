//! Launches that work element by element: casts, sums, biases, dropout. Never knows what the elements mean.
use super::{Arg, GpuDevice, Operand, by_dtype, missing};
use crate::base::{DType, Error, Result};
use crate::device::{Dropout, View, ViewMut};

pub fn copy(gpu: &GpuDevice, src: View, dst: ViewMut) -> Result<()> {
    const OP: &str = "copy";
    let (n, from, to) = (src.len(), src.dtype(), dst.dtype());
    dst.fits(OP, "dst", to, n)?;
    let variant = match (from, to) {
        (from, to) if from == to => return gpu.driver.copy(src, dst),
        (DType::F32, DType::Bf16) => "cast_f32_bf16",
        (DType::Bf16, DType::F32) => "cast_bf16_f32",
        (from, to) => return Err(Error::op(OP, format!("cannot cast {from} to {to}"))),
    };
    src.vectors(OP, "src", from, n)?;
    dst.vectors(OP, "dst", to, n)?;
    gpu.each(variant, "cast", n, DType::F32, &mut [Arg::In(src), Arg::Out(dst), Arg::U64(n as u64)])
}

pub fn add(gpu: &GpuDevice, x: View, y: ViewMut) -> Result<()> {
    const OP: &str = "add";
    let (n, dtype) = (x.len(), x.dtype());
    let variant = by_dtype!(OP, dtype, "add")?;
    x.vectors(OP, "x", dtype, n)?;
    y.vectors(OP, "y", dtype, n)?;
    gpu.each(variant, "add", n, dtype, &mut [Arg::In(x), Arg::InOut(y), Arg::U64(n as u64)])
}

pub fn scale(_: &GpuDevice, _factor: f32, _x: ViewMut) -> Result<()> {
    missing("scale")
}

pub fn bias(_: &GpuDevice, _bias: View, _y: ViewMut) -> Result<()> {
    missing("bias")
}

pub fn bias_backward(_: &GpuDevice, _dy: View, _db: ViewMut) -> Result<()> {
    missing("bias_backward")
}

pub fn dropout(_: &GpuDevice, _d: &Dropout, _x: ViewMut) -> Result<()> {
    missing("dropout")
}
