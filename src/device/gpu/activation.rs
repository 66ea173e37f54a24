//! Launches of activations and their gradients. All operands are alike in dtype and length.
use super::{Arg, GpuDevice, Operand, by_dtype, missing};
use crate::base::Result;
use crate::device::{View, ViewMut};

pub fn swiglu(gpu: &GpuDevice, gate: View, up: View, y: ViewMut) -> Result<()> {
    const OP: &str = "swiglu";
    let (n, dtype) = (gate.len(), gate.dtype());
    let variant = by_dtype!(OP, dtype, "swiglu")?;
    gate.vectors(OP, "gate", dtype, n)?;
    up.vectors(OP, "up", dtype, n)?;
    y.vectors(OP, "y", dtype, n)?;
    gpu.each(variant, OP, n, dtype, &mut [Arg::In(gate), Arg::In(up), Arg::Out(y), Arg::U64(n as u64)])
}

pub fn swiglu_backward(gpu: &GpuDevice, gate: View, up: View, dy: View, dgate: ViewMut, dup: ViewMut) -> Result<()> {
    const OP: &str = "swiglu_backward";
    let (n, dtype) = (gate.len(), gate.dtype());
    let variant = by_dtype!(OP, dtype, "swiglu_backward")?;
    gate.vectors(OP, "gate", dtype, n)?;
    up.vectors(OP, "up", dtype, n)?;
    dy.vectors(OP, "dy", dtype, n)?;
    dgate.vectors(OP, "dgate", dtype, n)?;
    dup.vectors(OP, "dup", dtype, n)?;
    let args = &mut [Arg::In(gate), Arg::In(up), Arg::In(dy), Arg::Out(dgate), Arg::Out(dup), Arg::U64(n as u64)];
    gpu.each(variant, OP, n, dtype, args)
}

pub fn geglu(_: &GpuDevice, _gate: View, _up: View, _y: ViewMut) -> Result<()> {
    missing("geglu")
}

pub fn geglu_backward(_: &GpuDevice, _gate: View, _up: View, _dy: View, _dgate: ViewMut, _dup: ViewMut) -> Result<()> {
    missing("geglu_backward")
}

pub fn gelu(gpu: &GpuDevice, x: View, y: ViewMut) -> Result<()> {
    const OP: &str = "gelu";
    let (n, dtype) = (x.len(), x.dtype());
    let variant = by_dtype!(OP, dtype, "gelu")?;
    x.vectors(OP, "x", dtype, n)?;
    y.vectors(OP, "y", dtype, n)?;
    gpu.each(variant, OP, n, dtype, &mut [Arg::In(x), Arg::Out(y), Arg::U64(n as u64)])
}

pub fn gelu_backward(gpu: &GpuDevice, x: View, dy: View, dx: ViewMut) -> Result<()> {
    const OP: &str = "gelu_backward";
    let (n, dtype) = (x.len(), x.dtype());
    let variant = by_dtype!(OP, dtype, "gelu_backward")?;
    x.vectors(OP, "x", dtype, n)?;
    dy.vectors(OP, "dy", dtype, n)?;
    dx.vectors(OP, "dx", dtype, n)?;
    gpu.each(variant, OP, n, dtype, &mut [Arg::In(x), Arg::In(dy), Arg::Out(dx), Arg::U64(n as u64)])
}
