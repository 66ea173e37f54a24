//! AdamW and SGD: one pass over memory, element by element, so the bits do not depend on how the range is cut.
//! Never keeps state of its own.
use crate::base::dtype::Float;
use crate::device::{AdamW, Sgd};

/// What one step shares between elements; prepared in f64, as PyTorch does.
struct Step {
    scale: f32,
    /// 1 - lr * weight_decay.
    keep: f32,
    new_m: f32,
    beta2: f32,
    new_v: f32,
    /// lr / (1 - beta1^step).
    size: f32,
    /// 1 / sqrt(1 - beta2^step).
    root: f32,
    eps: f32,
}

impl Step {
    fn new(h: &AdamW, scale: f32) -> Step {
        let (lr, beta1, beta2, step) = (h.lr as f64, h.beta1 as f64, h.beta2 as f64, h.step as f64);
        Step {
            scale,
            keep: (1.0 - lr * h.weight_decay as f64) as f32,
            new_m: (1.0 - beta1) as f32,
            beta2: h.beta2,
            new_v: (1.0 - beta2) as f32,
            size: (lr / (1.0 - beta1.powf(step))) as f32,
            root: (1.0 / (1.0 - beta2.powf(step)).sqrt()) as f32,
            eps: h.eps,
        }
    }
    #[inline(always)]
    fn update(&self, g: f32, m: &mut f32, v: &mut f32, p: &mut f32) -> f32 {
        let g = g * self.scale;
        *m += (g - *m) * self.new_m;
        *v = *v * self.beta2 + g * g * self.new_v;
        *p = *p * self.keep - self.size * *m / (v.sqrt() * self.root + self.eps);
        *p
    }
}

/// `torch.optim.AdamW` (single tensor): decay, moments, then `p -= lr/bc1 * m / (sqrt(v)/sqrt(bc2) + eps)`.
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
    let step = Step::new(h, scale);
    let elements = g.iter().zip(m).zip(v).zip(p);
    match out {
        None => {
            for (((g, m), v), p) in elements {
                step.update(*g, m, v, p);
            }
        }
        Some(out) => {
            for ((((g, m), v), p), out) in elements.zip(out) {
                *out = T::from_f32(step.update(*g, m, v, p));
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
