//! Flash-style attention, forward and backward, in tiles of f32. Never builds a T x T matrix.
use super::simd::{exp, sum};
use crate::base::{Error, Result, dtype::Float};
use crate::device::Attention;

/// Rows of a `qkv` of `len` elements.
pub fn rows(op: &'static str, a: &Attention, len: usize) -> Result<usize> {
    let divides = a.head_dim > 0 && a.kv_heads > 0 && a.heads > 0 && a.heads % a.kv_heads == 0;
    if !divides || len % a.row() != 0 {
        return Err(Error::op(op, format!("qkv holds {len} elements, which do not fit {a:?}")));
    }
    Ok(len / a.row())
}

/// The boundaries, once they are known to rise from 0 to `n`.
pub fn documents<'a>(op: &'static str, cu_seqlens: &'a [u32], n: usize) -> Result<&'a [u32]> {
    let ends = (cu_seqlens.first().copied(), cu_seqlens.last().map(|&end| end as usize));
    if ends == (Some(0), Some(n)) && cu_seqlens.is_sorted() {
        return Ok(cu_seqlens);
    }
    Err(Error::op(op, format!("cu_seqlens {cu_seqlens:?} does not rise from 0 to {n}, the rows")))
}

/// Reused between calls.
#[derive(Default)]
pub struct Scratch {
    scores: Vec<f32>,
    out: Vec<f32>,
    dk: Vec<f32>,
    dv: Vec<f32>,
}

#[inline(always)]
pub fn forward<T: Float>(s: &mut Scratch, a: &Attention, cu: &[u32], qkv: &[T], o: &mut [T], lse: &mut [f32]) {
    let (d, row, group) = (a.head_dim, a.row(), a.heads / a.kv_heads);
    let n = o.len() / (a.heads * d);
    s.out.resize(d, 0.0);
    for doc in cu.windows(2) {
        let (start, end) = (doc[0] as usize, doc[1] as usize);
        s.scores.resize((end - start).max(s.scores.len()), 0.0);
        for h in 0..a.heads {
            let (k0, v0) = ((a.heads + h / group) * d, (a.heads + a.kv_heads + h / group) * d);
            for i in start..end {
                let q = &qkv[i * row + h * d..][..d];
                let mut max = f32::NEG_INFINITY;
                for j in start..=i {
                    let k = &qkv[j * row + k0..][..d];
                    let x = a.scale
                        * sum(
                            d,
                            #[inline(always)]
                            |c| q[c].to_f32() * k[c].to_f32(),
                        );
                    s.scores[j - start] = x;
                    max = max.max(x);
                }
                s.out.fill(0.0);
                let mut total = 0.0;
                for j in start..=i {
                    let p = exp(s.scores[j - start] - max);
                    total += p;
                    for (out, v) in s.out.iter_mut().zip(&qkv[j * row + v0..][..d]) {
                        *out += p * v.to_f32();
                    }
                }
                lse[h * n + i] = max + total.ln();
                for (o, out) in o[(i * a.heads + h) * d..][..d].iter_mut().zip(&s.out) {
                    *o = T::from_f32(out / total);
                }
            }
        }
    }
}

#[inline(always)]
#[allow(clippy::too_many_arguments)]
pub fn backward<T: Float>(
    s: &mut Scratch,
    a: &Attention,
    cu: &[u32],
    qkv: &[T],
    o: &[T],
    lse: &[f32],
    d_o: &[T],
    delta: &mut [f32],
    dqkv: &mut [T],
) {
    let (d, row, group) = (a.head_dim, a.row(), a.heads / a.kv_heads);
    let n = o.len() / (a.heads * d);
    s.out.resize(d, 0.0);
    for doc in cu.windows(2) {
        let (start, end) = (doc[0] as usize, doc[1] as usize);
        for kv in 0..a.kv_heads {
            let (k0, v0) = ((a.heads + kv) * d, (a.heads + a.kv_heads + kv) * d);
            for grad in [&mut s.dk, &mut s.dv] {
                grad.clear();
                grad.resize((end - start) * d, 0.0);
            }
            for h in kv * group..(kv + 1) * group {
                for i in start..end {
                    let q = &qkv[i * row + h * d..][..d];
                    let (o, d_o) = (&o[(i * a.heads + h) * d..][..d], &d_o[(i * a.heads + h) * d..][..d]);
                    let di = sum(
                        d,
                        #[inline(always)]
                        |c| o[c].to_f32() * d_o[c].to_f32(),
                    );
                    delta[h * n + i] = di;
                    s.out.fill(0.0);
                    for j in start..=i {
                        let (k, v) = (&qkv[j * row + k0..][..d], &qkv[j * row + v0..][..d]);
                        let x = a.scale
                            * sum(
                                d,
                                #[inline(always)]
                                |c| q[c].to_f32() * k[c].to_f32(),
                            );
                        let p = exp(x - lse[h * n + i]);
                        let dp = sum(
                            d,
                            #[inline(always)]
                            |c| d_o[c].to_f32() * v[c].to_f32(),
                        );
                        let ds = p * (dp - di) * a.scale;
                        let (dk, dv) = (&mut s.dk[(j - start) * d..][..d], &mut s.dv[(j - start) * d..][..d]);
                        for c in 0..d {
                            s.out[c] += ds * k[c].to_f32();
                            dk[c] += ds * q[c].to_f32();
                            dv[c] += p * d_o[c].to_f32();
                        }
                    }
                    for (dq, x) in dqkv[i * row + h * d..][..d].iter_mut().zip(&s.out) {
                        *dq = T::from_f32(*x);
                    }
                }
            }
            for (at, grad) in [(k0, &s.dk), (v0, &s.dv)] {
                for (j, grad) in grad.chunks_exact(d).enumerate() {
                    for (out, x) in dqkv[(start + j) * row + at..][..d].iter_mut().zip(grad) {
                        *out = T::from_f32(*x);
                    }
                }
            }
        }
    }
}
