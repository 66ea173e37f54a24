//! Launches of activations and their gradients.
use super::driver::Arg;
use super::launch::{BLOCK, GpuDevice, VECTOR, by_dtype};
use super::scratch::words;
use crate::ops::{
    Clamp, ClampBackward, ClampedGlu, ClampedGluBackward, Gelu, GeluBackward, Glu, GluBackward, SigmoidGate,
    SigmoidGateBackward, Xielu, XieluBackward, XieluCurve, XieluGrads,
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
    const OP: &str = SigmoidGate::OP;
    op.check()?;
    let SigmoidGate { gate, x: up, y } = op;
    gated(gpu, OP, by_dtype!(OP, gate.dtype(), "sigmoid_gate")?, Glu { gate, up, y })
}
/// The gradient of x replaces that of y, so unlike [`gated_backward`]'s it is read too.
pub fn sigmoid_gate_backward(gpu: &GpuDevice, op: SigmoidGateBackward) -> Result<()> {
    const OP: &str = SigmoidGateBackward::OP;
    op.check()?;
    let SigmoidGateBackward { gate, x, dy: dx, dgate } = op;
    let (n, dtype) = (x.len(), x.dtype());
    // SAFETY: each thread reads an element of `dy` before it writes the same element.
    let dy = unsafe { dx.as_view().alias() };
    let [gate, x, dy] = [gate, x, dy.view()].map(Arg::In);
    let args = &mut [gate, x, dy, Arg::Out(dgate), Arg::InOut(dx), Arg::U64(n as u64)];
    gpu.each(by_dtype!(OP, dtype, "sigmoid_gate_backward")?, "glu_backward", n, dtype, args)
}

pub fn gelu(gpu: &GpuDevice, op: Gelu) -> Result<()> {
    plain(gpu, by_dtype!(Gelu::OP, op.x.dtype(), "gelu")?, op)
}
pub fn gelu_exact(gpu: &GpuDevice, op: Gelu) -> Result<()> {
    plain(gpu, by_dtype!("gelu_exact", op.x.dtype(), "gelu_exact")?, op)
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
pub fn gelu_exact_backward(gpu: &GpuDevice, op: GeluBackward) -> Result<()> {
    plain_backward(gpu, by_dtype!("gelu_exact_backward", op.x.dtype(), "gelu_exact_backward")?, op)
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

pub fn clamp(gpu: &GpuDevice, op: Clamp) -> Result<()> {
    const OP: &str = Clamp::OP;
    op.check()?;
    let (n, dtype, [low, high]) = (op.x.len(), op.x.dtype(), op.limits.map(Arg::F32));
    gpu.each(by_dtype!(OP, dtype, "clamp")?, OP, n, dtype, &mut [Arg::InOut(op.x), Arg::U64(n as u64), low, high])
}
pub fn clamp_backward(gpu: &GpuDevice, op: ClampBackward) -> Result<()> {
    op.check()?;
    let (n, dtype, [low, high]) = (op.x.len(), op.x.dtype(), op.limits.map(Arg::F32));
    let variant = by_dtype!(ClampBackward::OP, dtype, "clamp_backward")?;
    let args = &mut [Arg::InOut(op.dx), Arg::U64(n as u64), low, high, Arg::In(op.x)];
    gpu.each(variant, Clamp::OP, n, dtype, args)
}

/// The numbers of xIELU, the last arguments.
fn numbers(curve: XieluCurve) -> [Arg; 4] {
    [curve.alpha_p, curve.alpha_n, curve.beta, curve.eps].map(Arg::In)
}
pub fn xielu(gpu: &GpuDevice, op: Xielu) -> Result<()> {
    const OP: &str = Xielu::OP;
    op.check()?;
    let (n, dtype, [p, minus, beta, eps]) = (op.x.len(), op.x.dtype(), numbers(op.curve));
    let args = &mut [Arg::In(op.x), Arg::Out(op.y), Arg::U64(n as u64), p, minus, beta, eps];
    gpu.each(by_dtype!(OP, dtype, "xielu")?, OP, n, dtype, args)
}
pub fn xielu_backward(gpu: &GpuDevice, op: XieluBackward) -> Result<()> {
    op.check()?;
    let (n, dtype, [p, minus, beta, eps]) = (op.x.len(), op.x.dtype(), numbers(op.curve));
    let variant = by_dtype!(XieluBackward::OP, dtype, "xielu_backward")?;
    let args = &mut [Arg::In(op.x), Arg::In(op.dy), Arg::Out(op.dx), Arg::U64(n as u64), p, minus, beta, eps];
    gpu.each(variant, Xielu::OP, n, dtype, args)
}
pub fn xielu_grads(gpu: &GpuDevice, op: XieluGrads) -> Result<()> {
    const OP: &str = XieluGrads::OP;
    op.check()?;
    let (n, dtype, [p, minus, beta, eps]) = (op.x.len(), op.x.dtype(), numbers(op.curve));
    let variant = by_dtype!(OP, dtype, "xielu_grads")?;
    let ctas = gpu.ctas(n.div_ceil(BLOCK as usize * VECTOR / dtype.size()));
    if ctas == 0 {
        return Ok(());
    }
    let mut scratch = gpu.scratch();
    let mut partial = words(OP, &mut scratch.words, 2 * ctas as usize)?;
    let out = Arg::Out(partial.reborrow());
    let args = &mut [Arg::In(op.x), Arg::In(op.dy), out, Arg::U64(n as u64), p, minus, beta, eps];
    gpu.line(variant, Xielu::OP, (ctas, BLOCK), args)?;
    let (of_p, of_n) = partial.split_at(ctas as usize);
    gpu.sum_rows(of_p.as_view(), op.dalpha_p)?;
    gpu.sum_rows(of_n.as_view(), op.dalpha_n)
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
