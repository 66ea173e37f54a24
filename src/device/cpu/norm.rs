//! RMSNorm and LayerNorm, row by row. Never sums over rows but in row order.
use super::simd::sum;
use crate::base::{Result, dtype::Float};
use crate::device::ops::{Bias, BiasBackward, LayerNorm, LayerNormBackward, RmsNorm, RmsNormBackward};

/// 1 / sqrt(mean(x^2) + eps)
#[inline(always)]
pub fn inverse_rms<T: Float>(eps: f32, x: &[T]) -> f32 {
    let squares = sum(x.len(), |i| x[i].to_f32() * x[i].to_f32());
    1.0 / (squares / x.len() as f32 + eps).sqrt()
}

#[inline(always)]
pub fn rmsnorm<T: Float>(op: RmsNorm) -> Result<()> {
    const OP: &str = RmsNorm::OP;
    op.check()?;
    let (x, w, norm) = (op.x.host::<T>(OP)?, op.w.host::<T>(OP)?, op.shape);
    let (y, rstd) = (op.y.host::<T>(OP)?, op.rstd.host::<f32>(OP)?);
    let c = w.len();
    for ((x, y), rstd) in x.chunks_exact(c).zip(y.chunks_exact_mut(c)).zip(rstd) {
        let r = inverse_rms(norm.eps, x);
        *rstd = r;
        for i in 0..c {
            y[i] = T::from_f32(x[i].to_f32() * r * (w[i].to_f32() + norm.offset));
        }
    }
    Ok(())
}

/// With n = x rstd and g = (w + offset) dy: `dx += rstd (g - n mean(g n))`, `dw += dy n`.
#[inline(always)]
pub fn rmsnorm_backward<T: Float>(op: RmsNormBackward) -> Result<()> {
    const OP: &str = RmsNormBackward::OP;
    op.check()?;
    let (x, w, rstd, dy) = (op.x.host::<T>(OP)?, op.w.host::<T>(OP)?, op.rstd.host::<f32>(OP)?, op.dy.host::<T>(OP)?);
    let (dx, dw) = (op.dx.host::<T>(OP)?, op.dw.host::<f32>(OP)?);
    rmsnorm_gradients(op.shape.offset, x, w, rstd, dy, dx, dw);
    Ok(())
}
/// Of slices, which the compiler knows to be apart.
#[inline(always)]
fn rmsnorm_gradients<T: Float>(offset: f32, x: &[T], w: &[T], rstd: &[f32], dy: &[T], dx: &mut [T], dw: &mut [f32]) {
    let c = w.len();
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
pub fn layernorm<T: Float>(op: LayerNorm) -> Result<()> {
    const OP: &str = LayerNorm::OP;
    op.check()?;
    let (x, w, b, eps) = (op.x.host::<T>(OP)?, op.w.host::<T>(OP)?, op.b.host::<T>(OP)?, op.eps);
    let (y, stats) = (op.y.host::<T>(OP)?, op.stats.host::<f32>(OP)?);
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
    Ok(())
}

/// With n = (x - mean) rstd and g = w dy: `dx += rstd (g - mean(g) - n mean(g n))`, `dw += dy n`, `db += dy`.
#[inline(always)]
pub fn layernorm_backward<T: Float>(op: LayerNormBackward) -> Result<()> {
    const OP: &str = LayerNormBackward::OP;
    op.check()?;
    let (x, w, stats, dy) = (op.x.host::<T>(OP)?, op.w.host::<T>(OP)?, op.stats.host::<f32>(OP)?, op.dy.host::<T>(OP)?);
    let (dx, dw, db) = (op.dx.host::<T>(OP)?, op.dw.host::<f32>(OP)?, op.db.host::<f32>(OP)?);
    layernorm_gradients(x, w, stats, dy, dx, dw, db);
    Ok(())
}
#[inline(always)]
fn layernorm_gradients<T: Float>(
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
pub fn bias<T: Float>(op: Bias) -> Result<()> {
    op.check()?;
    let (bias, y) = (op.bias.host::<T>(Bias::OP)?, op.y.host::<T>(Bias::OP)?);
    for y in y.chunks_exact_mut(bias.len()) {
        for (y, b) in y.iter_mut().zip(bias) {
            *y = T::from_f32(y.to_f32() + b.to_f32());
        }
    }
    Ok(())
}

#[inline(always)]
pub fn bias_backward<T: Float>(op: BiasBackward) -> Result<()> {
    op.check()?;
    let (dy, db) = (op.dy.host::<T>(BiasBackward::OP)?, op.db.host::<f32>(BiasBackward::OP)?);
    for dy in dy.chunks_exact(db.len()) {
        for (db, dy) in db.iter_mut().zip(dy) {
            *db += dy.to_f32();
        }
    }
    Ok(())
}
