//! AdamW and SGD: one pass over memory, elementwise, so the bits do not depend on how the range is divided. Never keeps
//! state of its own.
use super::operands::{constants, first};
use crate::base::{Result, dtype::Float};
use crate::device::ops::{AdamW, AdamWScalars, Sgd, SgdScalars};

/// The update of one element.
#[inline(always)]
fn update(k: &AdamWScalars, scale: f32, g: f32, m: &mut f32, v: &mut f32, p: &mut f32) -> f32 {
    let g = g * scale;
    *m += (g - *m) * k.new_m;
    *v = *v * k.beta2 + g * g * k.new_v;
    *p = *p * k.keep - k.size * *m / (v.sqrt() * k.root + k.eps);
    *p
}

/// `torch.optim.AdamW` (single tensor): decay, moments, then `p -= lr/bc1 * m / (sqrt(v)/sqrt(bc2) + eps)`.
#[inline(always)]
pub fn adamw<T: Float>(op: AdamW) -> Result<()> {
    const OP: &str = AdamW::OP;
    op.check()?;
    let (k, scale) = (&constants::<AdamWScalars>(OP, op.h)?, first(OP, op.scale)?);
    if !scale.is_finite() {
        return Ok(());
    }
    let (g, m, v, p) = (op.g.host::<f32>(OP)?, op.m.host(OP)?, op.v.host(OP)?, op.p.host(OP)?);
    let out = op.out.map(|out| out.host::<T>(OP)).transpose()?;
    adamw_slices(k, scale, g, m, v, p, out);
    Ok(())
}
/// Takes slices, which the compiler knows do not overlap.
#[inline(always)]
fn adamw_slices<T: Float>(
    k: &AdamWScalars,
    scale: f32,
    g: &[f32],
    m: &mut [f32],
    v: &mut [f32],
    p: &mut [f32],
    out: Option<&mut [T]>,
) {
    let elements = g.iter().zip(m).zip(v).zip(p);
    match out {
        None => {
            for (((g, m), v), p) in elements {
                update(k, scale, *g, m, v, p);
            }
        }
        Some(out) => {
            for ((((g, m), v), p), out) in elements.zip(out) {
                *out = T::from_f32(update(k, scale, *g, m, v, p));
            }
        }
    }
}

#[inline(always)]
pub fn sgd<T: Float>(op: Sgd) -> Result<()> {
    const OP: &str = Sgd::OP;
    op.check()?;
    let (h, scale) = (constants::<SgdScalars>(OP, op.h)?, first(OP, op.scale)?);
    if !scale.is_finite() {
        return Ok(());
    }
    let (g, p) = (op.g.host::<f32>(OP)?, op.p.host::<f32>(OP)?);
    let m = op.m.map(|m| m.host::<f32>(OP)).transpose()?;
    let out = op.out.map(|out| out.host::<T>(OP)).transpose()?;
    sgd_slices(&h, scale, g, m, p, out);
    Ok(())
}
#[inline(always)]
fn sgd_slices<T: Float>(
    h: &SgdScalars,
    scale: f32,
    g: &[f32],
    m: Option<&mut [f32]>,
    p: &mut [f32],
    out: Option<&mut [T]>,
) {
    let n = g.len();
    let p = &mut p[..n];
    match m {
        None => {
            for i in 0..n {
                p[i] -= h.lr * (g[i] * scale + h.weight_decay * p[i]);
            }
        }
        Some(m) => {
            let m = &mut m[..n];
            for i in 0..n {
                m[i] = h.momentum * m[i] + (g[i] * scale + h.weight_decay * p[i]);
                p[i] -= h.lr * m[i];
            }
        }
    }
    if let Some(out) = out {
        for (out, p) in out.iter_mut().zip(p) {
            *out = T::from_f32(*p);
        }
    }
}
