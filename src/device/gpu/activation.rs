//! Launches of activations and their gradients.
use super::driver::Arg;
use super::launch::{GpuDevice, by_dtype};
use crate::ops::{Gelu, GeluBackward, Glu, GluBackward};
use flatshard_base::Result;

pub fn swiglu(gpu: &GpuDevice, op: Glu) -> Result<()> {
    const OP: &str = "swiglu";
    gated(gpu, OP, by_dtype!(OP, op.gate.dtype(), "swiglu")?, op)
}
pub fn geglu(gpu: &GpuDevice, op: Glu) -> Result<()> {
    const OP: &str = "geglu";
    gated(gpu, OP, by_dtype!(OP, op.gate.dtype(), "geglu")?, op)
}
fn gated(gpu: &GpuDevice, name: &'static str, variant: &'static str, op: Glu) -> Result<()> {
    op.check(name)?;
    let (n, dtype) = (op.gate.len(), op.gate.dtype());
    gpu.each(variant, "glu", n, dtype, &mut [Arg::In(op.gate), Arg::In(op.up), Arg::Out(op.y), Arg::U64(n as u64)])
}

pub fn swiglu_backward(gpu: &GpuDevice, op: GluBackward) -> Result<()> {
    const OP: &str = "swiglu_backward";
    gated_backward(gpu, OP, by_dtype!(OP, op.gate.dtype(), "swiglu_backward")?, op)
}
pub fn geglu_backward(gpu: &GpuDevice, op: GluBackward) -> Result<()> {
    const OP: &str = "geglu_backward";
    gated_backward(gpu, OP, by_dtype!(OP, op.gate.dtype(), "geglu_backward")?, op)
}
fn gated_backward(gpu: &GpuDevice, name: &'static str, variant: &'static str, op: GluBackward) -> Result<()> {
    op.check(name)?;
    let (n, dtype) = (op.gate.len(), op.gate.dtype());
    let [gate, up, dy] = [op.gate, op.up, op.dy].map(Arg::In);
    let [dgate, dup] = [op.dgate, op.dup].map(Arg::Out);
    gpu.each(variant, "glu_backward", n, dtype, &mut [gate, up, dy, dgate, dup, Arg::U64(n as u64)])
}

pub fn gelu(gpu: &GpuDevice, op: Gelu) -> Result<()> {
    op.check()?;
    let (n, dtype) = (op.x.len(), op.x.dtype());
    let variant = by_dtype!(Gelu::OP, dtype, "gelu")?;
    gpu.each(variant, Gelu::OP, n, dtype, &mut [Arg::In(op.x), Arg::Out(op.y), Arg::U64(n as u64)])
}
pub fn gelu_backward(gpu: &GpuDevice, op: GeluBackward) -> Result<()> {
    const OP: &str = GeluBackward::OP;
    op.check()?;
    let (n, dtype) = (op.x.len(), op.x.dtype());
    let variant = by_dtype!(OP, dtype, "gelu_backward")?;
    gpu.each(variant, OP, n, dtype, &mut [Arg::In(op.x), Arg::In(op.dy), Arg::Out(op.dx), Arg::U64(n as u64)])
}
