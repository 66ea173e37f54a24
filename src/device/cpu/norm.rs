//! RMSNorm and LayerNorm, row by row. Never sums over rows in any order but row order.
use super::simd::sum;
use crate::ViewMut;
use crate::ops::{Bias, BiasBackward, LayerNorm, LayerNormBackward, RmsNorm, RmsNormBackward};
use flatshard_base::{Result, dtype::Float};

/// 1 / sqrt(mean(x^2) + eps)
#[inline(always)]
pub fn inverse_rms<T: Float>(eps: f32, x: &[T]) -> f32 {
    let squares = sum(
        [x],
        #[inline(always)]
        |[x]| x * x,
    );
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

/// With n = x rstd and g = (w + offset) dy: `dx += rstd (g - n mean(g n))`, `dw += dy n`. Without `WEIGHTS`, `dw` is
/// not accessed: see [`rmsnorm_weights`].
#[inline(always)]
pub fn rmsnorm_backward<T: Float, const WEIGHTS: bool>(op: RmsNormBackward) -> Result<()> {
    const OP: &str = RmsNormBackward::OP;
    op.check()?;
    let (x, w, rstd, dy) = (op.x.host::<T>(OP)?, op.w.host::<T>(OP)?, op.rstd.host::<f32>(OP)?, op.dy.host::<T>(OP)?);
    let dx = op.dx.host::<T>(OP)?;
    let dw = if WEIGHTS { op.dw.host::<f32>(OP)? } else { &mut [] };
    rmsnorm_gradients::<T, WEIGHTS>(op.shape.offset, x, w, rstd, dy, dx, dw);
    Ok(())
}
/// Some columns of the gradient of the weights: `dw`, from column `first` on.
#[inline(always)]
pub fn rmsnorm_weights<T: Float>(op: &RmsNormBackward, first: usize, dw: ViewMut) -> Result<()> {
    const OP: &str = RmsNormBackward::OP;
    let (x, rstd, dy, dw) = (op.x.host::<T>(OP)?, op.rstd.host::<f32>(OP)?, op.dy.host::<T>(OP)?, dw.host::<f32>(OP)?);
    let c = op.w.len();
    for ((x, dy), &r) in x.chunks_exact(c).zip(dy.chunks_exact(c)).zip(rstd) {
        for ((dw, x), dy) in dw.iter_mut().zip(&x[first..]).zip(&dy[first..]) {
            *dw += dy.to_f32() * (x.to_f32() * r);
        }
    }
    Ok(())
}
/// Takes slices, which the compiler knows do not overlap.
#[inline(always)]
fn rmsnorm_gradients<T: Float, const WEIGHTS: bool>(
    offset: f32,
    x: &[T],
    w: &[T],
    rstd: &[f32],
    dy: &[T],
    dx: &mut [T],
    dw: &mut [f32],
) {
    let c = w.len();
    for (((x, dy), dx), &r) in x.chunks_exact(c).zip(dy.chunks_exact(c)).zip(dx.chunks_exact_mut(c)).zip(rstd) {
        let dot = sum(
            [w, dy, x],
            #[inline(always)]
            |[w, dy, x]| (w + offset) * dy * (x * r),
        );
        let mean = dot / c as f32;
        for i in 0..c {
            let (n, dy) = (x[i].to_f32() * r, dy[i].to_f32());
            if WEIGHTS {
                dw[i] += dy * n;
            }
            dx[i] = T::from_f32(dx[i].to_f32() + r * ((w[i].to_f32() + offset) * dy - n * mean));
        }
    }
}

#[inline(always)]
pub fn layernorm<T: Float>(op: LayerNorm) -> Result<()> {
    layernorm_of::<T, false>(op)
}
/// The same with weights that are stored minus 1.
#[inline(always)]
pub fn layernorm_from_one<T: Float>(op: LayerNorm) -> Result<()> {
    layernorm_of::<T, true>(op)
}
/// The factor that a stored weight stands for.
#[inline(always)]
fn factor<const FROM_ONE: bool>(w: f32) -> f32 {
    if FROM_ONE { 1.0 + w } else { w }
}
#[inline(always)]
fn layernorm_of<T: Float, const FROM_ONE: bool>(op: LayerNorm) -> Result<()> {
    const OP: &str = LayerNorm::OP;
    op.check()?;
    let (x, w, eps) = (op.x.host::<T>(OP)?, op.w.host::<T>(OP)?, op.eps);
    let b = op.b.map(|b| b.host::<T>(OP)).transpose()?;
    let (y, stats) = (op.y.host::<T>(OP)?, op.stats.host::<f32>(OP)?);
    let c = w.len();
    for ((x, y), stats) in x.chunks_exact(c).zip(y.chunks_exact_mut(c)).zip(stats.chunks_exact_mut(2)) {
        let mean = sum(
            [x],
            #[inline(always)]
            |[x]| x,
        ) / c as f32;
        // Two passes: the row is in L1, and this avoids the difference of large squares.
        let squares = sum(
            [x],
            #[inline(always)]
            |[x]| (x - mean) * (x - mean),
        );
        let r = 1.0 / (squares / c as f32 + eps).sqrt();
        stats.copy_from_slice(&[mean, r]);
        match b {
            Some(b) => {
                for i in 0..c {
                    let w = factor::<FROM_ONE>(w[i].to_f32());
                    y[i] = T::from_f32(((x[i].to_f32() - mean) * r).mul_add(w, b[i].to_f32()));
                }
            }
            None => {
                for i in 0..c {
                    y[i] = T::from_f32((x[i].to_f32() - mean) * r * factor::<FROM_ONE>(w[i].to_f32()));
                }
            }
        }
    }
    Ok(())
}

/// With n = (x - mean) rstd and g = w dy: `dx += rstd (g - mean(g) - n mean(g n))`, `dw += dy n`, `db += dy`. Without
/// `WEIGHTS`, `dw` and `db` are not accessed: see [`layernorm_weights`].
#[inline(always)]
pub fn layernorm_backward<T: Float, const FROM_ONE: bool, const WEIGHTS: bool>(op: LayerNormBackward) -> Result<()> {
    const OP: &str = LayerNormBackward::OP;
    op.check()?;
    let (x, w, stats, dy) = (op.x.host::<T>(OP)?, op.w.host::<T>(OP)?, op.stats.host::<f32>(OP)?, op.dy.host::<T>(OP)?);
    let dx = op.dx.host::<T>(OP)?;
    let (dw, db): (&mut [f32], &mut [f32]) =
        if WEIGHTS { (op.dw.host(OP)?, op.db.host(OP)?) } else { (&mut [], &mut []) };
    layernorm_gradients::<T, FROM_ONE, WEIGHTS>(x, w, stats, dy, dx, dw, db);
    Ok(())
}
/// Some columns of the gradients of weights and biases, from column `first` on.
#[inline(always)]
pub fn layernorm_weights<T: Float>(op: &LayerNormBackward, first: usize, [dw, db]: [ViewMut; 2]) -> Result<()> {
    const OP: &str = LayerNormBackward::OP;
    let (x, stats, dy) = (op.x.host::<T>(OP)?, op.stats.host::<f32>(OP)?, op.dy.host::<T>(OP)?);
    let (dw, db, c) = (dw.host::<f32>(OP)?, db.host::<f32>(OP)?, op.w.len());
    for ((x, dy), stats) in x.chunks_exact(c).zip(dy.chunks_exact(c)).zip(stats.chunks_exact(2)) {
        let (mean, r) = (stats[0], stats[1]);
        for (((dw, db), x), dy) in dw.iter_mut().zip(&mut *db).zip(&x[first..]).zip(&dy[first..]) {
            *dw += dy.to_f32() * ((x.to_f32() - mean) * r);
            *db += dy.to_f32();
        }
    }
    Ok(())
}
#[inline(always)]
fn layernorm_gradients<T: Float, const FROM_ONE: bool, const WEIGHTS: bool>(
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
        let g = sum(
            [w, dy],
            #[inline(always)]
            |[w, dy]| factor::<FROM_ONE>(w) * dy,
        ) / c as f32;
        let dot = sum(
            [w, dy, x],
            #[inline(always)]
            |[w, dy, x]| factor::<FROM_ONE>(w) * dy * ((x - mean) * r),
        ) / c as f32;
        for i in 0..c {
            let (n, dy) = ((x[i].to_f32() - mean) * r, dy[i].to_f32());
            if WEIGHTS {
                dw[i] += dy * n;
                db[i] += dy;
            }
            let w = factor::<FROM_ONE>(w[i].to_f32());
            dx[i] = T::from_f32(dx[i].to_f32() + r * (w * dy - g - n * dot));
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

/// Some columns: `db`, from column `first` on.
#[inline(always)]
pub fn bias_backward<T: Float>(op: &BiasBackward, first: usize, db: ViewMut) -> Result<()> {
    let (dy, db) = (op.dy.host::<T>(BiasBackward::OP)?, db.host::<f32>(BiasBackward::OP)?);
    for dy in dy.chunks_exact(op.db.len()) {
        for (db, dy) in db.iter_mut().zip(&dy[first..]) {
            *db += dy.to_f32();
        }
    }
    Ok(())
}
