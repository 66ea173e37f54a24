//! Latent attention's projections (DeepSeek-AI 2024, "DeepSeek-V2"): queries from a normalized low-rank latent, or
//! from the model's width; keys and values of all heads from another one; and a rotated part of keys that all heads
//! share. Never attends: queries, keys and values become rows of ordinary attention.
//!
//! A head's rotated elements come first in these rows, in queries and keys alike, which changes no score. Queries and
//! keys may be wider than values or narrower: the narrower ones are padded with zeros, which attention multiplies.
//!
//! Saved for backward: the latents. Backward normalizes them again.
use super::context::Cx;
use super::latent_buffers::{LatentSaved, LatentScratch};
use super::linear::Linear;
use super::product_buffers::AdapterScratch;
use super::spec::Latent;
use super::store::{Grads, Weights};
use super::tensor::Tensor;
use crate::base::Result;
use crate::device::ops::{CombineRows, RmsNorm, RmsNormBackward, RmsNormShape};
use crate::device::{View, ViewMut};

/// The epsilon of the latents' norms, whatever the model's is.
const EPS: f32 = 1e-6;

/// The projections of one layer, over the heads of this tp rank.
#[derive(Clone, Debug)]
pub struct LatentProjections {
    pub shape: Latent,
    pub heads: usize,
    /// Elements of a head in rows of attention.
    pub head_dim: usize,
    /// To the queries' latent, and the segment of its norm; none if queries come from the model's width.
    pub q_latent: Option<(Linear, usize)>,
    pub q: Linear,
    /// To the latent of keys and values, followed by the rotated part of keys.
    pub kv_latent: Linear,
    pub kv_norm: usize,
    /// To each head's keys and values.
    pub kv: Linear,
}

/// Where columns are in rows: the row's elements and the first column.
#[derive(Clone, Copy)]
struct LatentColumns(usize, usize);

/// Copies `width` columns of `n` rows.
fn copy(cx: &Cx, width: usize, (src, from): (View, LatentColumns), (dst, to): (ViewMut, LatentColumns)) -> Result<()> {
    cx.copy_columns([cx.n, width], (src, from.0, from.1), (dst, to.0, to.1))
}

impl LatentProjections {
    fn norm() -> RmsNormShape {
        RmsNormShape { eps: EPS, offset: 0.0 }
    }
    /// Elements of a row of attention.
    fn row(&self) -> usize {
        3 * self.heads * self.head_dim
    }
    /// The linear layers, for adapters.
    pub fn linears(&mut self) -> impl Iterator<Item = &mut Linear> {
        let LatentProjections { q_latent, q, kv_latent, kv, .. } = self;
        q_latent.iter_mut().map(|(linear, _)| linear).chain([q, kv_latent, kv])
    }

    /// Assigns `qkv`, not rotated yet, from `h (N, C)`.
    #[allow(clippy::too_many_arguments)] // operands, and scratch
    pub fn forward(
        &self,
        cx: &Cx,
        w: Weights,
        h: View,
        saved: &mut LatentSaved,
        scratch: &mut LatentScratch,
        adapter: &mut AdapterScratch,
        qkv: &mut Tensor,
    ) -> Result<()> {
        let (n, row, Latent { kv_rank, nope, rope, value, .. }) = (cx.n, self.row(), self.shape);
        if let Some((linear, _)) = &self.q_latent {
            linear.forward(cx, w, h, adapter, saved.q.rows_mut(n))?;
        }
        self.kv_latent.forward(cx, w, h, adapter, saved.kv.rows_mut(n))?;
        let x = self.normed_q(cx, w, saved, scratch)?;
        self.q.forward(cx, w, x.map_or(h, |()| scratch.q.rows(n)), adapter, scratch.q_heads.rows_mut(n))?;
        self.normed_kv(cx, w, saved, scratch)?;
        self.kv.forward(cx, w, scratch.kv.rows(n), adapter, scratch.kv_heads.rows_mut(n))?;
        if nope + rope < self.head_dim || value < self.head_dim {
            cx.dev.zero(qkv.rows_mut(n))?;
        }
        let (q, kv) = (&scratch.q_heads, &scratch.kv_heads);
        for head in 0..self.heads {
            let [to_q, to_k, to_v] = self.places(head);
            let of_q = |at: usize| (q.rows(n), LatentColumns(q.width(), head * (nope + rope) + at));
            let of_kv = |at: usize| (kv.rows(n), LatentColumns(kv.width(), head * (nope + value) + at));
            let shared = (saved.kv.rows(n), LatentColumns(kv_rank + rope, kv_rank));
            copy(cx, rope, of_q(nope), (qkv.rows_mut(n), LatentColumns(row, to_q)))?;
            copy(cx, nope, of_q(0), (qkv.rows_mut(n), LatentColumns(row, to_q + rope)))?;
            copy(cx, rope, shared, (qkv.rows_mut(n), LatentColumns(row, to_k)))?;
            copy(cx, nope, of_kv(0), (qkv.rows_mut(n), LatentColumns(row, to_k + rope)))?;
            copy(cx, value, of_kv(nope), (qkv.rows_mut(n), LatentColumns(row, to_v)))?;
        }
        Ok(())
    }
    /// The first columns of a head's query, key and value.
    fn places(&self, head: usize) -> [usize; 3] {
        [0, 1, 2].map(|kind| (kind * self.heads + head) * self.head_dim)
    }
    /// Assigns `q` and `stats` of scratch, if queries have a latent.
    fn normed_q(&self, cx: &Cx, w: Weights, saved: &LatentSaved, scratch: &mut LatentScratch) -> Result<Option<()>> {
        let Some((_, norm)) = self.q_latent else { return Ok(None) };
        let LatentScratch { q, stats, .. } = scratch;
        let (x, y, rstd) = (saved.q.rows(cx.n), q.rows_mut(cx.n), stats.rows_mut(cx.n));
        cx.dev.rmsnorm(RmsNorm { shape: Self::norm(), x, w: w.get(norm), y, rstd })?;
        Ok(Some(()))
    }
    /// Assigns `kv_apart`, `kv` and `stats` of scratch.
    fn normed_kv(&self, cx: &Cx, w: Weights, saved: &LatentSaved, scratch: &mut LatentScratch) -> Result<()> {
        let (n, Latent { kv_rank, rope, .. }) = (cx.n, self.shape);
        let LatentScratch { kv, kv_apart, stats, .. } = scratch;
        let to = (kv_apart.rows_mut(n), LatentColumns(kv_rank, 0));
        copy(cx, kv_rank, (saved.kv.rows(n), LatentColumns(kv_rank + rope, 0)), to)?;
        let (x, y, rstd) = (kv_apart.rows(n), kv.rows_mut(n), stats.rows_mut(n));
        cx.dev.rmsnorm(RmsNorm { shape: Self::norm(), x, w: w.get(self.kv_norm), y, rstd })
    }

    /// Attention's output `o` without padding.
    pub fn narrow<'a>(&self, cx: &Cx, o: View<'a>, scratch: &'a mut LatentScratch) -> Result<View<'a>> {
        let (value, wide) = (self.shape.value, self.head_dim);
        if value == wide {
            return Ok(o);
        }
        let to = LatentColumns(self.heads * value, 0);
        for head in 0..self.heads {
            let from = LatentColumns(self.heads * wide, head * wide);
            copy(cx, value, (o, from), (scratch.o.rows_mut(cx.n), LatentColumns(to.0, head * value)))?;
        }
        Ok(scratch.o.rows(cx.n))
    }
    /// Backward of `out`, which reads attention's output `o` without padding: assigns the gradient `d_o` of that with
    /// it, and adds to the gradients of `out`.
    #[allow(clippy::too_many_arguments)] // a forward's operands and their gradients
    pub fn out_backward(
        &self,
        cx: &Cx,
        w: Weights,
        dw: &mut Grads,
        out: &Linear,
        o: View,
        dy: View,
        adapter: &mut AdapterScratch,
        scratch: &mut LatentScratch,
        d_o: &mut Tensor,
    ) -> Result<()> {
        let (n, value, wide) = (cx.n, self.shape.value, self.head_dim);
        if value == wide {
            return out.backward(cx, w, dw, o, dy, adapter, d_o.rows_mut(n), false);
        }
        self.narrow(cx, o, scratch)?;
        let LatentScratch { o, d_o: d_narrow, .. } = scratch;
        out.backward(cx, w, dw, o.rows(n), dy, adapter, d_narrow.rows_mut(n), false)?;
        cx.dev.zero(d_o.rows_mut(n))?;
        for head in 0..self.heads {
            let from = (d_narrow.rows(n), LatentColumns(self.heads * value, head * value));
            copy(cx, value, from, (d_o.rows_mut(n), LatentColumns(self.heads * wide, head * wide)))?;
        }
        Ok(())
    }

    /// Assigns `dh (N, C)` from `dqkv`, rotated back, and adds to the weights' gradients, or to `unused` if they are
    /// frozen.
    #[allow(clippy::too_many_arguments)] // a forward's operands and their gradients
    pub fn backward(
        &self,
        cx: &Cx,
        w: Weights,
        dw: &mut Grads,
        h: View,
        saved: &LatentSaved,
        scratch: &mut LatentScratch,
        adapter: &mut AdapterScratch,
        dqkv: View,
        mut dh: ViewMut,
        unused: &mut Tensor,
    ) -> Result<()> {
        let (dev, n, row) = (cx.dev, cx.n, self.row());
        let Latent { q_rank, kv_rank, nope, rope, value } = self.shape;
        for head in 0..self.heads {
            let [of_q, of_k, of_v] = self.places(head);
            let LatentScratch { q_heads, kv_heads, d_turned, .. } = &mut *scratch;
            let (q_row, kv_row) = (q_heads.width(), kv_heads.width());
            let mut to_q = |at: usize, width, from| {
                let to = LatentColumns(q_row, head * (nope + rope) + at);
                copy(cx, width, (dqkv, LatentColumns(row, from)), (q_heads.rows_mut(n), to))
            };
            to_q(nope, rope, of_q)?;
            to_q(0, nope, of_q + rope)?;
            let mut to_kv = |at: usize, width, from| {
                let to = LatentColumns(kv_row, head * (nope + value) + at);
                copy(cx, width, (dqkv, LatentColumns(row, from)), (kv_heads.rows_mut(n), to))
            };
            to_kv(0, nope, of_k + rope)?;
            to_kv(nope, value, of_v)?;
            let to = (d_turned.rows_mut(n), LatentColumns(self.heads * rope, head * rope));
            copy(cx, rope, (dqkv, LatentColumns(row, of_k)), to)?;
        }
        let is_low = self.normed_q(cx, w, saved, scratch)?.is_some();
        let LatentScratch { q, stats, q_heads, d_normed, d_latent, .. } = &mut *scratch;
        let all = 0..n * q_rank;
        match &self.q_latent {
            Some((linear, norm)) if is_low => {
                let d_x = d_normed.all_mut().slice(all.clone());
                self.q.backward(cx, w, dw, q.rows(n), q_heads.rows(n), adapter, d_x, false)?;
                dev.zero(d_latent.all_mut().slice(all.clone()))?;
                let spare = unused.rows_mut(2).slice(0..q_rank);
                dev.rmsnorm_backward(RmsNormBackward {
                    shape: Self::norm(),
                    x: saved.q.rows(n),
                    w: w.get(*norm),
                    rstd: stats.rows(n),
                    dy: d_normed.all().slice(all.clone()),
                    dx: d_latent.all_mut().slice(all.clone()),
                    dw: dw.get(*norm)?.unwrap_or(spare),
                })?;
                linear.backward(cx, w, dw, h, d_latent.all().slice(all), adapter, dh.reborrow(), false)?;
            }
            _ => self.q.backward(cx, w, dw, h, q_heads.rows(n), adapter, dh.reborrow(), false)?,
        }
        self.normed_kv(cx, w, saved, scratch)?;
        let LatentScratch { kv, kv_apart, stats, kv_heads, d_normed, d_latent, d_kv, d_turned, d_shared, .. } = scratch;
        let all = 0..n * kv_rank;
        let d_x = d_normed.all_mut().slice(all.clone());
        self.kv.backward(cx, w, dw, kv.rows(n), kv_heads.rows(n), adapter, d_x, false)?;
        dev.zero(d_latent.all_mut().slice(all.clone()))?;
        let spare = unused.rows_mut(2).slice(0..kv_rank);
        dev.rmsnorm_backward(RmsNormBackward {
            shape: Self::norm(),
            x: kv_apart.rows(n),
            w: w.get(self.kv_norm),
            rstd: stats.rows(n),
            dy: d_normed.all().slice(all.clone()),
            dx: d_latent.all_mut().slice(all.clone()),
            dw: dw.get(self.kv_norm)?.unwrap_or(spare),
        })?;
        // The heads share the rotated part: their gradients are summed in f32.
        dev.combine_rows(CombineRows {
            width: rope,
            top_k: self.heads,
            places: None,
            weights: None,
            x: d_turned.rows(n),
            y: d_shared.rows_mut(n),
            accumulate: false,
        })?;
        let both = kv_rank + rope;
        copy(
            cx,
            kv_rank,
            (d_latent.all().slice(all), LatentColumns(kv_rank, 0)),
            (d_kv.rows_mut(n), LatentColumns(both, 0)),
        )?;
        copy(cx, rope, (d_shared.rows(n), LatentColumns(rope, 0)), (d_kv.rows_mut(n), LatentColumns(both, kv_rank)))?;
        self.kv_latent.backward(cx, w, dw, h, d_kv.rows(n), adapter, dh, true)
    }
}
