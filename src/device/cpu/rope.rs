//! Rotary position embeddings, alone and after the norms of queries and keys. Never reads a head that is not rotated.
use super::norm::inverse_rms;
use super::operands::within;
use super::simd::sum_with;
use crate::ops::{QkNormRope, QkNormRopeBackward, QkNormRopeShape, Rope, RotaryPairs};
use crate::{View, ViewMut};
use flatshard_base::{Result, dtype::Float};

/// A rotation table with rows of `rotated`, and each token's row in it, checked to be in range.
#[derive(Clone, Copy)]
struct Rotation<'a> {
    table: &'a [f32],
    positions: &'a [u32],
    rotated: usize,
}

/// For checked operands: `max_len` rows of the table.
fn rotation<'a>(
    op: &'static str,
    rotated: usize,
    max_len: usize,
    table: View<'a>,
    positions: View<'a>,
) -> Result<Rotation<'a>> {
    let (table, positions) = (table.host(op)?, positions.host::<u32>(op)?);
    within(op, "position", positions, max_len)?;
    Ok(Rotation { table, positions, rotated })
}

impl<'a> Rotation<'a> {
    /// Each token's cosines and sines.
    #[inline(always)]
    fn rows(self) -> impl Iterator<Item = (&'a [f32], &'a [f32])> {
        let d = self.rotated;
        self.positions.iter().map(move |&p| self.table[p as usize * d..][..d].split_at(d / 2))
    }
}

#[inline(always)]
pub fn rope<T: Float>(op: Rope) -> Result<()> {
    const OP: &str = Rope::OP;
    let ((_, max_len), shape, inverse) = (op.check()?, op.shape, op.inverse);
    let rotation = rotation(OP, shape.rotated, max_len, op.table, op.positions)?;
    let qkv = op.qkv.host::<T>(OP)?;
    let (d, half) = (shape.head_dim, shape.rotated / 2);
    let sign = if inverse { -1.0 } else { 1.0 };
    for (row, (cos, sin)) in qkv.chunks_exact_mut(shape.row).zip(rotation.rows()) {
        for head in row[..shape.heads * d].chunks_exact_mut(d) {
            let head = &mut head[..shape.rotated];
            match shape.pairs {
                RotaryPairs::Halves => {
                    // Not by index: each element's bounds check would keep the loop scalar.
                    let (a, b) = head.split_at_mut(half);
                    for ((a, b), (c, s)) in a.iter_mut().zip(b).zip(cos.iter().zip(sin)) {
                        turn_pair(a, b, *c, sign * s);
                    }
                }
                RotaryPairs::Adjacent => {
                    for (pair, (c, s)) in head.chunks_exact_mut(2).zip(cos.iter().zip(sin)) {
                        let (a, b) = pair.split_at_mut(1);
                        turn_pair(&mut a[0], &mut b[0], *c, sign * s);
                    }
                }
            }
        }
    }
    Ok(())
}
/// `(a, b)` becomes `(a c - b s, b c + a s)`.
#[inline(always)]
fn turn_pair<T: Float>(a: &mut T, b: &mut T, c: f32, s: f32) {
    let (x, y) = (a.to_f32(), b.to_f32());
    *a = T::from_f32(x * c - y * s);
    *b = T::from_f32(y * c + x * s);
}

#[inline(always)]
pub fn qk_norm_rope<T: Float>(op: QkNormRope) -> Result<()> {
    const OP: &str = QkNormRope::OP;
    let ((_, max_len), shape) = (op.check()?, op.shape);
    let rotation = rotation(OP, shape.head_dim, max_len, op.table, op.positions)?;
    let (wq, wk, qkv) = (op.wq.host::<T>(OP)?, op.wk.host::<T>(OP)?, op.qkv.host::<T>(OP)?);
    let (out, rstd) = (op.out.host::<T>(OP)?, op.rstd.host::<f32>(OP)?);
    qk_norm_rope_rows(&shape, rotation, [wq, wk], qkv, out, rstd);
    Ok(())
}
/// Takes slices, which the compiler knows do not overlap.
#[inline(always)]
fn qk_norm_rope_rows<T: Float>(
    shape: &QkNormRopeShape,
    rotation: Rotation,
    [wq, wk]: [&[T]; 2],
    qkv: &[T],
    out: &mut [T],
    rstd: &mut [f32],
) {
    let (d, half, offset) = (shape.head_dim, shape.head_dim / 2, shape.norm.offset);
    let (row, rotated) = (shape.row(), shape.heads + shape.kv_heads);
    let rows = qkv.chunks_exact(row).zip(out.chunks_exact_mut(row)).zip(rstd.chunks_exact_mut(rotated));
    for (((qkv, out), rstd), (cos, sin)) in rows.zip(rotation.rows()) {
        for (head, rstd) in rstd.iter_mut().enumerate() {
            let w = if head < shape.heads { wq } else { wk };
            let (x, out) = (&qkv[head * d..][..d], &mut out[head * d..][..d]);
            let r = inverse_rms(shape.norm.eps, x);
            *rstd = r;
            let ((xa, xb), (wa, wb), (a, b)) = (x.split_at(half), w.split_at(half), out.split_at_mut(half));
            for i in 0..half {
                let (x, y) =
                    (xa[i].to_f32() * r * (wa[i].to_f32() + offset), xb[i].to_f32() * r * (wb[i].to_f32() + offset));
                a[i] = T::from_f32(x * cos[i] - y * sin[i]);
                b[i] = T::from_f32(y * cos[i] + x * sin[i]);
            }
        }
        out[rotated * d..].copy_from_slice(&qkv[rotated * d..]);
    }
}

/// With g = `dqkv` rotated back and n = x rstd: `dx = rstd ((w + offset) g - n mean((w + offset) g n))`, `dw += g n`.
/// Without `WEIGHTS`, `dwq` and `dwk` are not accessed: see [`qk_norm_rope_weights`].
#[inline(always)]
pub fn qk_norm_rope_backward<T: Float, const WEIGHTS: bool>(op: QkNormRopeBackward) -> Result<()> {
    const OP: &str = QkNormRopeBackward::OP;
    let ((_, max_len), shape) = (op.check()?, op.shape);
    let rotation = rotation(OP, shape.head_dim, max_len, op.table, op.positions)?;
    let (wq, wk, qkv) = (op.wq.host::<T>(OP)?, op.wk.host::<T>(OP)?, op.qkv.host::<T>(OP)?);
    let (rstd, dqkv) = (op.rstd.host::<f32>(OP)?, op.dqkv.host::<T>(OP)?);
    let (dwq, dwk): (&mut [f32], &mut [f32]) =
        if WEIGHTS { (op.dwq.host(OP)?, op.dwk.host(OP)?) } else { (&mut [], &mut []) };
    qk_norm_rope_gradients::<T, WEIGHTS>(&shape, rotation, [wq, wk], qkv, rstd, dqkv, [dwq, dwk]);
    Ok(())
}
/// Some columns of the gradients of the weights, from column `first` of each half of a head on: the columns of both
/// halves of the query weights, then of the key weights. Reads `dqkv` before it is replaced.
#[inline(always)]
pub fn qk_norm_rope_weights<T: Float>(op: &QkNormRopeBackward, first: usize, dw: [ViewMut; 4]) -> Result<()> {
    const OP: &str = QkNormRopeBackward::OP;
    let ((_, max_len), shape) = (op.check()?, op.shape);
    let rotation = rotation(OP, shape.head_dim, max_len, op.table, op.positions)?;
    let (qkv, rstd, dqkv) = (op.qkv.host::<T>(OP)?, op.rstd.host::<f32>(OP)?, op.dqkv.as_view().host::<T>(OP)?);
    let [qa, qb, ka, kb] = dw.map(|dw| dw.host::<f32>(OP));
    let (qa, qb, ka, kb) = (qa?, qb?, ka?, kb?);
    let (d, half) = (shape.head_dim, shape.head_dim / 2);
    let (row, rotated) = (shape.row(), shape.heads + shape.kv_heads);
    let rows = qkv.chunks_exact(row).zip(dqkv.chunks_exact(row)).zip(rstd.chunks_exact(rotated));
    for (((qkv, dqkv), rstd), (cos, sin)) in rows.zip(rotation.rows()) {
        let (cos, sin) = (&cos[first..], &sin[first..]);
        for (head, &r) in rstd.iter().enumerate() {
            let (dwa, dwb) = if head < shape.heads { (&mut *qa, &mut *qb) } else { (&mut *ka, &mut *kb) };
            let ((xa, xb), (a, b)) = (qkv[head * d..][..d].split_at(half), dqkv[head * d..][..d].split_at(half));
            let (xa, xb, a, b) = (&xa[first..], &xb[first..], &a[first..], &b[first..]);
            for i in 0..dwa.len() {
                let (x, y) = (a[i].to_f32(), b[i].to_f32());
                dwa[i] += (x * cos[i] + y * sin[i]) * (xa[i].to_f32() * r);
                dwb[i] += (y * cos[i] - x * sin[i]) * (xb[i].to_f32() * r);
            }
        }
    }
    Ok(())
}
#[inline(always)]
fn qk_norm_rope_gradients<T: Float, const WEIGHTS: bool>(
    shape: &QkNormRopeShape,
    rotation: Rotation,
    [wq, wk]: [&[T]; 2],
    qkv: &[T],
    rstd: &[f32],
    dqkv: &mut [T],
    [dwq, dwk]: [&mut [f32]; 2],
) {
    let (d, half, offset) = (shape.head_dim, shape.head_dim / 2, shape.norm.offset);
    let (row, rotated) = (shape.row(), shape.heads + shape.kv_heads);
    let rows = qkv.chunks_exact(row).zip(dqkv.chunks_exact_mut(row)).zip(rstd.chunks_exact(rotated));
    for (((qkv, dqkv), rstd), (cos, sin)) in rows.zip(rotation.rows()) {
        for (head, &r) in rstd.iter().enumerate() {
            let (w, dw) = if head < shape.heads { (wq, &mut *dwq) } else { (wk, &mut *dwk) };
            let (x, dx) = (&qkv[head * d..][..d], &mut dqkv[head * d..][..d]);
            let ((xa, xb), (wa, wb), (a, b)) = (x.split_at(half), w.split_at(half), dx.split_at_mut(half));
            let (dwa, dwb) = dw.split_at_mut(if WEIGHTS { half } else { 0 });
            let back = |x: f32, y: f32, i: usize| (x * cos[i] + y * sin[i], y * cos[i] - x * sin[i]);
            let dot = sum_with(
                [wa, wb, xa, xb, &*a, &*b],
                [cos, sin],
                #[inline(always)]
                |[wa, wb, xa, xb, a, b], [cos, sin]| {
                    let (ga, gb) = (a * cos + b * sin, b * cos - a * sin);
                    (wa + offset) * ga * (xa * r) + (wb + offset) * gb * (xb * r)
                },
            );
            let mean = dot / d as f32;
            for i in 0..half {
                let (ga, gb) = back(a[i].to_f32(), b[i].to_f32(), i);
                let (na, nb) = (xa[i].to_f32() * r, xb[i].to_f32() * r);
                if WEIGHTS {
                    dwa[i] += ga * na;
                    dwb[i] += gb * nb;
                }
                a[i] = T::from_f32(r * ((wa[i].to_f32() + offset) * ga - na * mean));
                b[i] = T::from_f32(r * ((wb[i].to_f32() + offset) * gb - nb * mean));
            }
        }
    }
}
