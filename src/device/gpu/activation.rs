//! Launches of activations and their gradients. All operands are alike in dtype and length.
use super::driver::Arg;
use super::launch::{GpuDevice, by_dtype};
use crate::base::Result;
use crate::device::{View, ViewMut};

pub fn swiglu(gpu: &GpuDevice, gate: View, up: View, y: ViewMut) -> Result<()> {
    const OP: &str = "swiglu";
    gated(gpu, OP, by_dtype!(OP, gate.dtype(), "swiglu")?, gate, up, y)
}

pub fn geglu(gpu: &GpuDevice, gate: View, up: View, y: ViewMut) -> Result<()> {
    const OP: &str = "geglu";
    gated(gpu, OP, by_dtype!(OP, gate.dtype(), "geglu")?, gate, up, y)
}

fn gated(gpu: &GpuDevice, op: &'static str, variant: &'static str, gate: View, up: View, y: ViewMut) -> Result<()> {
    let (n, dtype) = (gate.len(), gate.dtype());
    up.fits(op, "up", dtype, n)?;
    y.fits(op, "y", dtype, n)?;
    gpu.each(variant, "glu", n, dtype, &mut [Arg::In(gate), Arg::In(up), Arg::Out(y), Arg::U64(n as u64)])
}

/// Of gate, up, dy; dgate and dup.
pub fn swiglu_backward(gpu: &GpuDevice, operands: [View; 3], gradients: [ViewMut; 2]) -> Result<()> {
    const OP: &str = "swiglu_backward";
    gated_backward(gpu, OP, by_dtype!(OP, operands[0].dtype(), "swiglu_backward")?, operands, gradients)
}

/// Of gate, up, dy; dgate and dup.
pub fn geglu_backward(gpu: &GpuDevice, operands: [View; 3], gradients: [ViewMut; 2]) -> Result<()> {
    const OP: &str = "geglu_backward";
    gated_backward(gpu, OP, by_dtype!(OP, operands[0].dtype(), "geglu_backward")?, operands, gradients)
}

fn gated_backward(
    gpu: &GpuDevice,
    op: &'static str,
    variant: &'static str,
    [gate, up, dy]: [View; 3],
    [dgate, dup]: [ViewMut; 2],
) -> Result<()> {
    let (n, dtype) = (gate.len(), gate.dtype());
    up.fits(op, "up", dtype, n)?;
    dy.fits(op, "dy", dtype, n)?;
    dgate.fits(op, "dgate", dtype, n)?;
    dup.fits(op, "dup", dtype, n)?;
    let args = &mut [Arg::In(gate), Arg::In(up), Arg::In(dy), Arg::Out(dgate), Arg::Out(dup), Arg::U64(n as u64)];
    gpu.each(variant, "glu_backward", n, dtype, args)
}

pub fn gelu(gpu: &GpuDevice, x: View, y: ViewMut) -> Result<()> {
    const OP: &str = "gelu";
    let (n, dtype) = (x.len(), x.dtype());
    let variant = by_dtype!(OP, dtype, "gelu")?;
    x.fits(OP, "x", dtype, n)?;
    y.fits(OP, "y", dtype, n)?;
    gpu.each(variant, OP, n, dtype, &mut [Arg::In(x), Arg::Out(y), Arg::U64(n as u64)])
}

pub fn gelu_backward(gpu: &GpuDevice, x: View, dy: View, dx: ViewMut) -> Result<()> {
    const OP: &str = "gelu_backward";
    let (n, dtype) = (x.len(), x.dtype());
    let variant = by_dtype!(OP, dtype, "gelu_backward")?;
    x.fits(OP, "x", dtype, n)?;
    dy.fits(OP, "dy", dtype, n)?;
    dx.fits(OP, "dx", dtype, n)?;
    gpu.each(variant, OP, n, dtype, &mut [Arg::In(x), Arg::In(dy), Arg::Out(dx), Arg::U64(n as u64)])
}
