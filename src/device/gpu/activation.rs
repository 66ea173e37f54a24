//! Launches of activations and their gradients.
use super::driver::Arg;
use super::launch::{GpuDevice, by_dtype};
use crate::ops::{
    ClampedGlu, ClampedGluBackward, Gelu, GeluBackward, Glu, GluBackward, SigmoidGate, SigmoidGateBackward,
};
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

pub fn sigmoid_gate(gpu: &GpuDevice, op: SigmoidGate) -> Result<()> {
    op.check()?;
    let (n, dtype) = (op.x.len(), op.x.dtype());
    let variant = by_dtype!(SigmoidGate::OP, dtype, "sigmoid_gate")?;
    gpu.each(variant, "glu", n, dtype, &mut [Arg::In(op.gate), Arg::In(op.x), Arg::Out(op.y), Arg::U64(n as u64)])
}
/// The gradient of x replaces that of y.
pub fn sigmoid_gate_backward(gpu: &GpuDevice, mut op: SigmoidGateBackward) -> Result<()> {
    op.check()?;
    let (n, dtype) = (op.x.len(), op.x.dtype());
    let variant = by_dtype!(SigmoidGateBackward::OP, dtype, "sigmoid_gate_backward")?;
    // SAFETY: each thread reads an element of `dy` before it writes the same element.
    let dy = unsafe { op.dy.as_view().alias() };
    let args = &mut [
        Arg::In(op.gate),
        Arg::In(op.x),
        Arg::In(dy.view()),
        Arg::Out(op.dgate),
        Arg::InOut(op.dy.reborrow()),
        Arg::U64(n as u64),
    ];
    gpu.each(variant, "glu_backward", n, dtype, args)
}

pub fn gelu(gpu: &GpuDevice, op: Gelu) -> Result<()> {
    plain(gpu, by_dtype!(Gelu::OP, op.x.dtype(), "gelu")?, op)
}
pub fn relu_squared(gpu: &GpuDevice, op: Gelu) -> Result<()> {
    plain(gpu, by_dtype!("relu_squared", op.x.dtype(), "relu_squared")?, op)
}
fn plain(gpu: &GpuDevice, variant: &'static str, op: Gelu) -> Result<()> {
    op.check()?;
    let (n, dtype) = (op.x.len(), op.x.dtype());
    gpu.each(variant, "gelu", n, dtype, &mut [Arg::In(op.x), Arg::Out(op.y), Arg::U64(n as u64)])
}

pub fn gelu_backward(gpu: &GpuDevice, op: GeluBackward) -> Result<()> {
    plain_backward(gpu, by_dtype!(GeluBackward::OP, op.x.dtype(), "gelu_backward")?, op)
}
pub fn relu_squared_backward(gpu: &GpuDevice, op: GeluBackward) -> Result<()> {
    plain_backward(gpu, by_dtype!("relu_squared_backward", op.x.dtype(), "relu_squared_backward")?, op)
}
fn plain_backward(gpu: &GpuDevice, variant: &'static str, op: GeluBackward) -> Result<()> {
    op.check()?;
    let (n, dtype) = (op.x.len(), op.x.dtype());
    let args = &mut [Arg::In(op.x), Arg::In(op.dy), Arg::Out(op.dx), Arg::U64(n as u64)];
    gpu.each(variant, "gelu_backward", n, dtype, args)
}

pub fn clamped_glu(gpu: &GpuDevice, op: ClampedGlu) -> Result<()> {
    const OP: &str = ClampedGlu::OP;
    op.check()?;
    let (n, dtype, clamp) = (op.y.len(), op.y.dtype(), op.clamp);
    let variant = by_dtype!(OP, dtype, "clamped_glu")?;
    let (n_, alpha, limit) = (Arg::U64(n as u64), Arg::F32(clamp.alpha), Arg::F32(clamp.limit));
    gpu.each(variant, OP, n, dtype, &mut [Arg::In(op.gate_up), Arg::Out(op.y), n_, alpha, limit])
}
pub fn clamped_glu_backward(gpu: &GpuDevice, op: ClampedGluBackward) -> Result<()> {
    const OP: &str = ClampedGluBackward::OP;
    op.check()?;
    let (n, dtype, clamp) = (op.dy.len(), op.dy.dtype(), op.clamp);
    let variant = by_dtype!(OP, dtype, "clamped_glu_backward")?;
    let [gate_up, dy, out] = [Arg::In(op.gate_up), Arg::In(op.dy), Arg::Out(op.dgate_up)];
    let args = &mut [gate_up, dy, out, Arg::U64(n as u64), Arg::F32(clamp.alpha), Arg::F32(clamp.limit)];
    gpu.each(variant, ClampedGlu::OP, n, dtype, args)
}
