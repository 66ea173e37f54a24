//! AdamW and SGD: one pass over memory, element by element, so the bits do not depend on how the range is cut.
//! Never keeps state of its own.
use crate::base::dtype::Float;
use crate::device::{AdamW, Sgd};

/// `torch.optim.AdamW` (single tensor): decay, moments, then `p -= lr/bc1 * m / (sqrt(v)/sqrt(bc2) + eps)`. Scalars are
/// prepared in f64, as there.
#[inline(always)]
pub fn adamw<T: Float>(
    h: &AdamW,
    scale: f32,
    g: &[f32],
    m: &mut [f32],
    v: &mut [f32],
    p: &mut [f32],
    out: Option<&mut [T]>,
) {
    let (lr, b1, b2, step) = (h.lr as f64, h.beta1 as f64, h.beta2 as f64, h.step as f64);
    let keep = (1.0 - lr * h.weight_decay as f64) as f32;
    let (new1, new2) = ((1.0 - b1) as f32, (1.0 - b2) as f32);
    let size = (lr / (1.0 - b1.powf(step))) as f32;
    let root = (1.0 / (1.0 - b2.powf(step)).sqrt()) as f32;
    let n = g.len();
    let (m, v, p) = (&mut m[..n], &mut v[..n], &mut p[..n]);
    let mut update = |i: usize| {
        let g = g[i] * scale;
        m[i] += (g - m[i]) * new1;
        v[i] = v[i] * h.beta2 + g * g * new2;
        p[i] = p[i] * keep - size * m[i] / (v[i].sqrt() * root + h.eps);
        p[i]
    };
    match out {
        None => {
            for i in 0..n {
                update(i);
            }
        }
        Some(out) => {
            for (i, out) in out[..n].iter_mut().enumerate() {
                *out = T::from_f32(update(i));
            }
        }
    }
}

#[inline(always)]
pub fn sgd<T: Float>(h: &Sgd, scale: f32, g: &[f32], m: Option<&mut [f32]>, p: &mut [f32], out: Option<&mut [T]>) {
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
