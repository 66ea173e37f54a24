//! The attention branch: `y = x + dropout(out(attention(qkv(norm(x)))))`. Never masks: documents are the device's job.
use super::context::{Cx, Place};
use super::linear::Linear;
use super::norm::Norm;
use super::store::{Grads, Weights};
use super::workspace::{AttentionSaved, Scratch};
use crate::base::Result;
use crate::device::{Attention, Rope, View, ViewMut};

#[derive(Clone, Debug)]
pub struct AttentionBranch {
    pub norm: Norm,
    /// Each fills its columns of the fused rows `qkv`: one projection, or three.
    pub qkv: Vec<Linear>,
    /// Rotary positions, where the family has them.
    pub rope: Option<Rope>,
    pub shape: Attention,
    pub out: Linear,
}

impl AttentionBranch {
    /// Assigns `y (N, C)` from `x (N, C)`.
    pub fn forward(
        &self,
        cx: &Cx,
        w: Weights,
        x: View,
        saved: &mut AttentionSaved,
        scratch: &mut Scratch,
        mut y: ViewMut,
    ) -> Result<()> {
        let (dev, n) = (cx.dev, cx.n);
        self.norm.forward(dev, w, x, scratch.h.rows_mut(n), scratch.stats.rows_mut(n))?;
        for projection in &self.qkv {
            projection.forward(dev, w, scratch.h.rows(n), saved.qkv.rows_mut(n))?;
        }
        if let Some(rope) = &self.rope {
            dev.rope(rope, cx.table, cx.batch.positions, saved.qkv.rows_mut(n), false)?;
        }
        let (qkv, o, lse) = (saved.qkv.rows(n), saved.o.rows_mut(n), saved.lse.rows_mut(n));
        dev.attention(&self.shape, cx.batch.cu_seqlens, qkv, o, lse)?;
        self.out.forward(dev, w, saved.o.rows(n), y.reborrow())?;
        cx.drop(Place::Attention, y.reborrow())?;
        dev.add(x, y)
    }

    /// `dy (N, C)` is the residual's gradient: the branch's is added to it. Adds to the weights' gradients.
    #[allow(clippy::too_many_arguments)] // a forward's operands and their gradients
    pub fn backward(
        &self,
        cx: &Cx,
        w: Weights,
        dw: &mut Grads,
        x: View,
        saved: &AttentionSaved,
        scratch: &mut Scratch,
        dy: ViewMut,
    ) -> Result<()> {
        let (dev, n) = (cx.dev, cx.n);
        let (qkv, o, lse) = (saved.qkv.rows(n), saved.o.rows(n), saved.lse.rows(n));
        let d_branch = cx.branch_grad(Place::Attention, dy.as_view(), &mut scratch.masked)?;
        self.out.weight_grad(dev, dw, o, d_branch)?;
        self.out.input_grad(dev, w, d_branch, scratch.d_o.rows_mut(n), false)?;

        let (delta, dqkv) = (scratch.delta.rows_mut(n), scratch.dqkv.rows_mut(n));
        dev.attention_backward(&self.shape, cx.batch.cu_seqlens, qkv, o, lse, scratch.d_o.rows(n), delta, dqkv)?;
        if let Some(rope) = &self.rope {
            dev.rope(rope, cx.table, cx.batch.positions, scratch.dqkv.rows_mut(n), true)?;
        }

        self.norm.forward(dev, w, x, scratch.h.rows_mut(n), scratch.stats.rows_mut(n))?;
        for (i, projection) in self.qkv.iter().enumerate() {
            projection.weight_grad(dev, dw, scratch.h.rows(n), scratch.dqkv.rows(n))?;
            projection.input_grad(dev, w, scratch.dqkv.rows(n), scratch.dh.rows_mut(n), i > 0)?;
        }
        let Scratch { stats, dh, unused, .. } = scratch;
        self.norm.backward(dev, w, dw, x, stats.rows(n), dh.rows(n), dy, unused.rows_mut(2))
    }
}
