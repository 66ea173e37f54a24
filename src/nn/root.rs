//! Layer 0: the embeddings below the blocks, the final norm, the head and the loss above them. Full logits never exist.
use super::context::{Cx, Place};
use super::linear::Linear;
use super::norm::Norm;
use super::store::{Grads, Weights};
use super::workspace::{Scratch, Tensor};
use crate::base::{DType, Result};
use crate::device::{CrossEntropy, View, ViewMut};
use half::bf16;

#[derive(Clone, Debug)]
pub struct Root {
    /// Segment (vocab, C).
    pub tokens: usize,
    /// Learned positions: segment (max_len, C).
    pub positions: Option<usize>,
    /// Multiplies the token embeddings.
    pub embed_scale: f32,
    pub norm: Norm,
    /// Its weight is the token embedding where the two are tied.
    pub head: Linear,
    pub vocab: usize,
    /// Logits become cap * tanh(logits / cap); 0: they stay.
    pub logit_cap: f32,
}

/// What a loss needs to go backward.
pub struct LossGrad<'a> {
    pub grads: Grads<'a>,
    /// Multiplies every gradient: 1 / loss tokens of the whole step.
    pub scale: f32,
    /// (N, C): the residual's gradient, assigned.
    pub dx: ViewMut<'a>,
}

impl Root {
    /// The embeddings' factor for weights in `dtype`: transformers rounds it to that first (55.4256 is 55.5 in bf16).
    fn scale(&self, dtype: DType) -> f32 {
        if dtype == DType::Bf16 { bf16::from_f32(self.embed_scale).to_f32() } else { self.embed_scale }
    }

    /// Assigns `y (N, C)`.
    pub fn embed(&self, cx: &Cx, w: Weights, mut y: ViewMut) -> Result<()> {
        let scale = self.scale(y.dtype());
        cx.dev.embed(cx.batch.tokens, w.get(self.tokens), scale, y.reborrow(), false)?;
        if let Some(positions) = self.positions {
            cx.dev.embed(cx.batch.positions, w.get(positions), 1.0, y.reborrow(), true)?;
        }
        cx.drop(Place::Embedding, y)
    }

    /// Adds to the embeddings' gradients; `dx (N, C)` is masked on the way.
    pub fn embed_backward(&self, cx: &Cx, mut dw: Grads, mut dx: ViewMut) -> Result<()> {
        cx.drop(Place::Embedding, dx.reborrow())?;
        if let Some(dw) = dw.get(self.tokens) {
            let scale = self.scale(dx.dtype());
            cx.dev.embed_backward(cx.batch.tokens, dx.as_view(), scale, dw)?;
        }
        match self.positions.and_then(|positions| dw.get(positions)) {
            Some(dw) => cx.dev.embed_backward(cx.batch.positions, dx.as_view(), 1.0, dw),
            None => Ok(()),
        }
    }

    /// Adds the token losses of `x (N, C)` to `loss`, in chunks of rows. Each chunk goes backward at once where
    /// gradients are asked for, so that no logits wait.
    pub fn loss(
        &self,
        cx: &Cx,
        w: Weights,
        x: View,
        scratch: &mut Scratch,
        loss: &mut Tensor,
        mut backward: Option<LossGrad>,
    ) -> Result<()> {
        let (dev, n) = (cx.dev, cx.n);
        let scale = backward.as_ref().map_or(0.0, |b| b.scale);
        let shape = CrossEntropy { vocab: self.vocab, scale, grad: backward.is_some(), softcap: self.logit_cap };
        self.norm.forward(dev, w, x, scratch.h.rows_mut(n), scratch.stats.rows_mut(n))?;
        let chunk = scratch.logits.capacity();
        for start in (0..n).step_by(chunk) {
            let band = start..n.min(start + chunk);
            let (h, rows) = (scratch.h.band(&band), band.len());
            self.head.forward(dev, w, h, &mut scratch.low, scratch.logits.rows_mut(rows))?;
            let targets = cx.batch.targets.slice(band.clone());
            dev.cross_entropy(&shape, targets, scratch.logits.rows_mut(rows), loss.rows_mut(1))?;
            if let Some(LossGrad { grads, .. }) = &mut backward {
                let Scratch { h, logits, dh, low, dlow, .. } = &mut *scratch;
                let (h, dlogits, dh) = (h.band(&band), logits.rows(rows), dh.band_mut(&band));
                self.head.backward(dev, w, grads, h, dlogits, [low, dlow], dh, false)?;
            }
        }
        let Some(LossGrad { mut grads, mut dx, .. }) = backward else { return Ok(()) };
        dev.zero(dx.reborrow())?;
        let Scratch { stats, dh, unused, .. } = scratch;
        self.norm.backward(dev, w, &mut grads, x, stats.rows(n), dh.rows(n), dx, unused.rows_mut(2))
    }

    /// Assigns `logits (1, vocab)` f32 from one row `x (1, C)`, not capped.
    pub fn logits(&self, cx: &Cx, w: Weights, x: View, scratch: &mut Scratch, logits: ViewMut) -> Result<()> {
        self.norm.forward(cx.dev, w, x, scratch.h.rows_mut(1), scratch.stats.rows_mut(1))?;
        self.head.forward(cx.dev, w, scratch.h.rows(1), &mut scratch.low, logits)
    }
}
