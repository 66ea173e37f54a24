//! SwiGLU, GeGLU, both forms of GELU, xIELU and limits, elementwise. Never reads an element other than its own.
use super::simd::{exp, sigmoid};
use crate::View;
use crate::ops::{
    Clamp, ClampBackward, Gelu, GeluBackward, Glu, GluBackward, Xielu, XieluBackward, XieluCurve, XieluGrads,
};
use flatshard_base::{Error, Result, dtype::Float};

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

/// The normal distribution's mass up to x. Relative error 1.2e-7, from the Chebyshev fit of erfc in Press et al. 1992,
/// "Numerical Recipes", chapter 6.2.
#[inline(always)]
fn normal_mass(x: f32) -> f32 {
    const FIT: [f32; 9] = [
        -0.822_152_26,
        1.488_515_9,
        -1.135_204,
        0.278_868_08,
        -0.186_288_06,
        0.096_784_18,
        0.374_091_95,
        1.000_023_7,
        -1.265_512_2,
    ];
    let z = x.abs() * std::f32::consts::FRAC_1_SQRT_2;
    let t = 1.0 / 0.5f32.mul_add(z, 1.0);
    let fit = FIT.into_iter().fold(0.170_872_76f32, |sum, c| sum.mul_add(t, c));
    let tail = 0.5 * t * exp((-z).mul_add(z, fit));
    if x < 0.0 { tail } else { 1.0 - tail }
}

#[inline(always)]
pub fn gelu_exact<T: Float>(op: Gelu) -> Result<()> {
    const OP: &str = "gelu_exact";
    op.check()?;
    let (x, y) = (op.x.host::<T>(OP)?, op.y.host::<T>(OP)?);
    for (x, y) in x.iter().zip(y) {
        let x = x.to_f32();
        *y = T::from_f32(x * normal_mass(x));
    }
    Ok(())
}

/// d gelu / dx = mass + x density.
#[inline(always)]
pub fn gelu_exact_backward<T: Float>(op: GeluBackward) -> Result<()> {
    const OP: &str = "gelu_exact_backward";
    const DENSITY: f32 = 0.398_942_3; // 1 / sqrt(2 pi)
    op.check()?;
    let (x, dy, dx) = (op.x.host::<T>(OP)?, op.dy.host::<T>(OP)?, op.dx.host::<T>(OP)?);
    for ((x, dy), dx) in x.iter().zip(dy).zip(dx) {
        let x = x.to_f32();
        let slope = (x * DENSITY).mul_add(exp(-0.5 * x * x), normal_mass(x));
        *dx = T::from_f32(dy.to_f32() * slope);
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
pub fn clamp<T: Float>(op: Clamp) -> Result<()> {
    let [low, high] = op.limits;
    for x in op.x.host::<T>(Clamp::OP)? {
        let value = x.to_f32();
        *x = T::from_f32(if value < low {
            low
        } else if value > high {
            high
        } else {
            value
        });
    }
    Ok(())
}

#[inline(always)]
pub fn clamp_backward<T: Float>(op: ClampBackward) -> Result<()> {
    const OP: &str = ClampBackward::OP;
    op.check()?;
    let [low, high] = op.limits;
    for (x, dx) in op.x.host::<T>(OP)?.iter().zip(op.dx.host::<T>(OP)?) {
        let x = x.to_f32();
        if x <= low || x > high {
            *dx = T::from_f32(0.0);
        }
    }
    Ok(())
}

/// xIELU's numbers: p, n, beta and eps, then the derivatives of p and n.
fn curve<T: Float>(op: &'static str, of: XieluCurve) -> Result<[f32; 6]> {
    let one = |x: View| Ok::<_, Error>(x.host::<T>(op)?[0].to_f32());
    let (p, n, beta, eps) = (one(of.alpha_p)?, one(of.alpha_n)?, one(of.beta)?, one(of.eps)?);
    let softplus = |x: f32| x.max(0.0) + (-x.abs()).exp().ln_1p();
    Ok([softplus(p), beta + softplus(n), beta, eps, sigmoid(p).0, sigmoid(n).0])
}

#[inline(always)]
pub fn xielu<T: Float>(op: Xielu) -> Result<()> {
    const OP: &str = Xielu::OP;
    op.check()?;
    let ([p, n, beta, eps, ..], x, y) = (curve::<T>(OP, op.curve)?, op.x.host::<T>(OP)?, op.y.host::<T>(OP)?);
    for (x, y) in x.iter().zip(y) {
        let x = x.to_f32();
        *y = T::from_f32(beta * x + if x > 0.0 { p * x * x } else { n * (x.min(eps).exp_m1() - x) });
    }
    Ok(())
}

#[inline(always)]
pub fn xielu_backward<T: Float>(op: XieluBackward) -> Result<()> {
    const OP: &str = XieluBackward::OP;
    op.check()?;
    let [p, n, beta, eps, ..] = curve::<T>(OP, op.curve)?;
    let (x, dy, dx) = (op.x.host::<T>(OP)?, op.dy.host::<T>(OP)?, op.dx.host::<T>(OP)?);
    for ((x, dy), dx) in x.iter().zip(dy).zip(dx) {
        let x = x.to_f32();
        let slope = match x > 0.0 {
            true => 2.0 * p * x,
            false => n * if x < eps { x.exp_m1() } else { -1.0 },
        };
        *dx = T::from_f32(dy.to_f32() * (beta + slope));
    }
    Ok(())
}

#[inline(always)]
pub fn xielu_grads<T: Float>(op: XieluGrads) -> Result<()> {
    const OP: &str = XieluGrads::OP;
    op.check()?;
    let [_, _, _, eps, dp, dn] = curve::<T>(OP, op.curve)?;
    let mut sums = [0f64; 2];
    for (x, dy) in op.x.host::<T>(OP)?.iter().zip(op.dy.host::<T>(OP)?) {
        let (x, dy) = (x.to_f32(), dy.to_f32());
        let (which, term) = if x > 0.0 { (0, x * x) } else { (1, x.min(eps).exp_m1() - x) };
        sums[which] += f64::from(dy * term);
    }
    for (grad, sum) in [(op.dalpha_p, sums[0] * f64::from(dp)), (op.dalpha_n, sums[1] * f64::from(dn))] {
        grad.host::<f32>(OP)?[0] += sum as f32;
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
