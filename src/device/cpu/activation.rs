//! SwiGLU, GeGLU and GELU, elementwise. Never reads an element other than its own.
use super::simd::sigmoid;
use crate::ops::{Gelu, GeluBackward, Glu, GluBackward};
use flatshard_base::{Result, dtype::Float};

#[inline(always)]
pub fn swiglu<T: Float>(op: Glu) -> Result<()> {
    const OP: &str = "swiglu";
    op.check(OP)?;
    let (gate, up, y) = (op.gate.host::<T>(OP)?, op.up.host::<T>(OP)?, op.y.host::<T>(OP)?);
    for ((g, u), y) in gate.iter().zip(up).zip(y) {
        let g = g.to_f32();
        *y = T::from_f32(g * sigmoid(g).0 * u.to_f32());
    }
    Ok(())
}

/// With s = sigmoid(g): d silu / dg = s + g s (1 - s).
#[inline(always)]
pub fn swiglu_backward<T: Float>(op: GluBackward) -> Result<()> {
    const OP: &str = "swiglu_backward";
    op.check(OP)?;
    let (gate, up, dy) = (op.gate.host::<T>(OP)?, op.up.host::<T>(OP)?, op.dy.host::<T>(OP)?);
    let (dgate, dup) = (op.dgate.host::<T>(OP)?, op.dup.host::<T>(OP)?);
    for ((((g, u), dy), dg), du) in gate.iter().zip(up).zip(dy).zip(dgate).zip(dup) {
        let (g, u, dy) = (g.to_f32(), u.to_f32(), dy.to_f32());
        let (s, rest) = sigmoid(g);
        *dg = T::from_f32(dy * u * (g * s).mul_add(rest, s));
        *du = T::from_f32(dy * g * s);
    }
    Ok(())
}

/// sqrt(2/pi) and the cubic coefficient of Hendrycks & Gimpel 2016.
const C: f32 = 0.797_884_6;
const CUBIC: f32 = 0.044715;

/// x (1 + tanh u) / 2 = x sigmoid(2u), which does not cancel for negative x. Returns (sigmoid, 1 - sigmoid).
#[inline(always)]
fn gelu_sigmoid(x: f32) -> (f32, f32) {
    sigmoid(2.0 * C * x * (CUBIC * x).mul_add(x, 1.0))
}
/// d gelu / dx, from the result of [`gelu_sigmoid`].
#[inline(always)]
fn gelu_slope(x: f32, (s, rest): (f32, f32)) -> f32 {
    (x * s * rest).mul_add(2.0 * C * (3.0 * CUBIC * x).mul_add(x, 1.0), s)
}

#[inline(always)]
pub fn gelu_at(x: f32) -> f32 {
    x * gelu_sigmoid(x).0
}
#[inline(always)]
pub fn gelu_slope_at(x: f32) -> f32 {
    gelu_slope(x, gelu_sigmoid(x))
}

#[inline(always)]
pub fn gelu<T: Float>(op: Gelu) -> Result<()> {
    op.check()?;
    let (x, y) = (op.x.host::<T>(Gelu::OP)?, op.y.host::<T>(Gelu::OP)?);
    for (x, y) in x.iter().zip(y) {
        *y = T::from_f32(gelu_at(x.to_f32()));
    }
    Ok(())
}

#[inline(always)]
pub fn gelu_backward<T: Float>(op: GeluBackward) -> Result<()> {
    const OP: &str = GeluBackward::OP;
    op.check()?;
    let (x, dy, dx) = (op.x.host::<T>(OP)?, op.dy.host::<T>(OP)?, op.dx.host::<T>(OP)?);
    for ((x, dy), dx) in x.iter().zip(dy).zip(dx) {
        *dx = T::from_f32(dy.to_f32() * gelu_slope_at(x.to_f32()));
    }
    Ok(())
}

#[inline(always)]
pub fn relu_squared<T: Float>(op: Gelu) -> Result<()> {
    const OP: &str = "relu_squared";
    op.check()?;
    let (x, y) = (op.x.host::<T>(OP)?, op.y.host::<T>(OP)?);
    for (x, y) in x.iter().zip(y) {
        let x = x.to_f32().max(0.0);
        *y = T::from_f32(x * x);
    }
    Ok(())
}

#[inline(always)]
pub fn relu_squared_backward<T: Float>(op: GeluBackward) -> Result<()> {
    const OP: &str = "relu_squared_backward";
    op.check()?;
    let (x, dy, dx) = (op.x.host::<T>(OP)?, op.dy.host::<T>(OP)?, op.dx.host::<T>(OP)?);
    for ((x, dy), dx) in x.iter().zip(dy).zip(dx) {
        *dx = T::from_f32(dy.to_f32() * 2.0 * x.to_f32().max(0.0));
    }
    Ok(())
}

#[inline(always)]
pub fn geglu<T: Float>(op: Glu) -> Result<()> {
    const OP: &str = "geglu";
    op.check(OP)?;
    let (gate, up, y) = (op.gate.host::<T>(OP)?, op.up.host::<T>(OP)?, op.y.host::<T>(OP)?);
    for ((g, u), y) in gate.iter().zip(up).zip(y) {
        let g = g.to_f32();
        *y = T::from_f32(g * gelu_sigmoid(g).0 * u.to_f32());
    }
    Ok(())
}

#[inline(always)]
pub fn geglu_backward<T: Float>(op: GluBackward) -> Result<()> {
    const OP: &str = "geglu_backward";
    op.check(OP)?;
    let (gate, up, dy) = (op.gate.host::<T>(OP)?, op.up.host::<T>(OP)?, op.dy.host::<T>(OP)?);
    let (dgate, dup) = (op.dgate.host::<T>(OP)?, op.dup.host::<T>(OP)?);
    for ((((g, u), dy), dg), du) in gate.iter().zip(up).zip(dy).zip(dgate).zip(dup) {
        let (g, u, dy) = (g.to_f32(), u.to_f32(), dy.to_f32());
        let s = gelu_sigmoid(g);
        *dg = T::from_f32(dy * u * gelu_slope(g, s));
        *du = T::from_f32(dy * g * s.0);
    }
    Ok(())
}
