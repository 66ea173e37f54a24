//! RMSNorm and LayerNorm, row by row. Never sums over rows but in row order.
use super::simd::sum;
use crate::base::dtype::Float;
use crate::device::RmsNorm;

/// 1 / sqrt(mean(x^2) + eps)
#[inline(always)]
pub fn inverse_rms<T: Float>(eps: f32, x: &[T]) -> f32 {
    let squares = sum(x.len(), |i| x[i].to_f32() * x[i].to_f32());
    1.0 / (squares / x.len() as f32 + eps).sqrt()
}

#[inline(always)]
pub fn rmsnorm<T: Float>(norm: &RmsNorm, x: &[T], w: &[T], y: &mut [T], rstd: &mut [f32]) {
    let c = w.len();
    for ((x, y), rstd) in x.chunks_exact(c).zip(y.chunks_exact_mut(c)).zip(rstd) {
        let r = inverse_rms(norm.eps, x);
        *rstd = r;
        for i in 0..c {
            y[i] = T::from_f32(x[i].to_f32() * r * (w[i].to_f32() + norm.offset));
        }
    }
}

/// With n = x rstd and g = (w + offset) dy: `dx += rstd (g - n mean(g n))`, `dw += dy n`.
#[inline(always)]
pub fn rmsnorm_backward<T: Float>(
    norm: &RmsNorm,
    x: &[T],
    w: &[T],
    rstd: &[f32],
    dy: &[T],
    dx: &mut [T],
    dw: &mut [f32],
) {
    let (c, offset) = (w.len(), norm.offset);
    for (((x, dy), dx), &r) in x.chunks_exact(c).zip(dy.chunks_exact(c)).zip(dx.chunks_exact_mut(c)).zip(rstd) {
        let dot = sum(c, |i| (w[i].to_f32() + offset) * dy[i].to_f32() * (x[i].to_f32() * r));
        let mean = dot / c as f32;
        for i in 0..c {
            let (n, dy) = (x[i].to_f32() * r, dy[i].to_f32());
            dw[i] += dy * n;
            dx[i] = T::from_f32(dx[i].to_f32() + r * ((w[i].to_f32() + offset) * dy - n * mean));
        }
    }
}

#[inline(always)]
pub fn layernorm<T: Float>(eps: f32, x: &[T], w: &[T], b: &[T], y: &mut [T], stats: &mut [f32]) {
    let c = w.len();
    for ((x, y), stats) in x.chunks_exact(c).zip(y.chunks_exact_mut(c)).zip(stats.chunks_exact_mut(2)) {
        let mean = sum(c, |i| x[i].to_f32()) / c as f32;
        // Two passes: the row is in the first-level cache, and the difference of large squares never appears.
        let squares = sum(c, |i| (x[i].to_f32() - mean) * (x[i].to_f32() - mean));
        let r = 1.0 / (squares / c as f32 + eps).sqrt();
        stats.copy_from_slice(&[mean, r]);
        for i in 0..c {
            y[i] = T::from_f32(((x[i].to_f32() - mean) * r).mul_add(w[i].to_f32(), b[i].to_f32()));
        }
    }
}

/// With n = (x - mean) rstd and g = w dy: `dx += rstd (g - mean(g) - n mean(g n))`, `dw += dy n`, `db += dy`.
#[inline(always)]
pub fn layernorm_backward<T: Float>(
    x: &[T],
    w: &[T],
    stats: &[f32],
    dy: &[T],
    dx: &mut [T],
    dw: &mut [f32],
    db: &mut [f32],
) {
    let c = w.len();
    let rows = x.chunks_exact(c).zip(dy.chunks_exact(c)).zip(dx.chunks_exact_mut(c)).zip(stats.chunks_exact(2));
    for (((x, dy), dx), stats) in rows {
        let (mean, r) = (stats[0], stats[1]);
        let g = sum(c, |i| w[i].to_f32() * dy[i].to_f32()) / c as f32;
        let dot = sum(c, |i| w[i].to_f32() * dy[i].to_f32() * ((x[i].to_f32() - mean) * r)) / c as f32;
        for i in 0..c {
            let (n, dy) = ((x[i].to_f32() - mean) * r, dy[i].to_f32());
            dw[i] += dy * n;
            db[i] += dy;
            dx[i] = T::from_f32(dx[i].to_f32() + r * (w[i].to_f32() * dy - g - n * dot));
        }
    }
}

/// `y += bias`, row by row.
#[inline(always)]
pub fn bias<T: Float>(bias: &[T], y: &mut [T]) {
    for y in y.chunks_exact_mut(bias.len()) {
        for (y, b) in y.iter_mut().zip(bias) {
            *y = T::from_f32(y.to_f32() + b.to_f32());
        }
    }
}

#[inline(always)]
pub fn bias_backward<T: Float>(dy: &[T], db: &mut [f32]) {
    for dy in dy.chunks_exact(db.len()) {
        for (db, dy) in db.iter_mut().zip(dy) {
            *db += dy.to_f32();
        }
    }
}
