//! The attention branch: `y = x + dropout(post(out(attention(turn(qkv(norm(x)))))))`. Never masks: documents are the
//! device's job.
use super::context::{Cx, Place};
use super::linear::Linear;
use super::norm::Norm;
use super::store::{Grads, Weights};
use super::workspace::{AttentionSaved, Scratch, Tensor};
use crate::base::Result;
use crate::device::{Attention, Device, QkNormRope, Rope, View, ViewMut};

#[derive(Clone, Debug)]
pub struct AttentionBranch {
    pub norm: Norm,
    /// Each fills its columns of the fused rows `qkv`: one projection, or three.
    pub qkv: Vec<Linear>,
    /// Of the three.
    pub bias: Option<RowBias>,
    pub turn: Turn,
    /// Which of the context's tables it turns by.
    pub table: usize,
    pub shape: Attention,
    pub out: Linear,
    /// Of what the branch adds to the residual.
    pub post: Option<Norm>,
}

/// What becomes of queries and keys before they meet.
#[derive(Clone, Copy, Debug)]
pub enum Turn {
    /// Nothing: positions were learned.
    None,
    Rope(Rope),
    /// Each head is normalised first: segments `wq` and `wk`.
    NormRope {
        shape: QkNormRope,
        wq: usize,
        wk: usize,
    },
}

/// Biases of projections that share rows, segment by segment in the order of their columns: laid side by side first, so
/// that the rows are passed over once.
#[derive(Clone, Debug)]
pub struct RowBias(pub Vec<usize>);

impl RowBias {
    /// `y += bias`, whole rows.
    fn add(&self, dev: &dyn Device, w: Weights, row: &mut Tensor, y: ViewMut) -> Result<()> {
        let mut rest = row.rows_mut(1);
        for &segment in &self.0 {
            let bias = w.get(segment);
            let (part, right) = rest.split_at(bias.len());
            dev.copy(bias, part)?;
            rest = right;
        }
        dev.bias(row.rows(1), y)
    }
    /// Adds the column sums of `dy` to the biases' gradients.
    fn grad(&self, dev: &dyn Device, dw: &mut Grads, row: &mut Tensor, dy: View) -> Result<()> {
        if !self.0.iter().any(|&segment| dw.layout.segments[segment].trainable) {
            return Ok(());
        }
        dev.zero(row.rows_mut(1))?;
        dev.bias_backward(dy, row.rows_mut(1))?;
        let mut at = 0;
        for &segment in &self.0 {
            let columns = at..at + dw.layout.segments[segment].len();
            at = columns.end;
            if let Some(grad) = dw.get(segment) {
                dev.add(row.rows(1).slice(columns), grad)?;
            }
        }
        Ok(())
    }
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
            projection.forward(dev, w, scratch.h.rows(n), &mut scratch.low, saved.qkv.rows_mut(n))?;
        }
        if let Some(bias) = &self.bias {
            bias.add(dev, w, &mut scratch.bias, saved.qkv.rows_mut(n))?;
        }
        if let Turn::Rope(rope) = &self.turn {
            dev.rope(rope, cx.tables[self.table], cx.batch.positions, saved.qkv.rows_mut(n), false)?;
        }
        let AttentionSaved { qkv, o, lse, branch } = saved;
        if !cx.attended {
            let qkv = self.turned(cx, w, qkv, &mut scratch.turned, &mut scratch.turned_stats)?;
            dev.attention(&self.shape, cx.batch.cu_seqlens, qkv, o.rows_mut(n), lse.rows_mut(n))?;
        }
        match &self.post {
            None => self.out.forward(dev, w, o.rows(n), &mut scratch.low, y.reborrow())?,
            Some(norm) => {
                self.out.forward(dev, w, o.rows(n), &mut scratch.low, branch.rows_mut(n))?;
                norm.forward(dev, w, branch.rows(n), y.reborrow(), scratch.stats.rows_mut(n))?;
            }
        }
        cx.drop(Place::Attention, y.reborrow())?;
        dev.add(x, y)
    }

    /// The rows that attention reads: those of `qkv`, or their heads normalised and rotated, in `turned`.
    fn turned<'a>(
        &self,
        cx: &Cx,
        w: Weights,
        qkv: &'a Tensor,
        turned: &'a mut Tensor,
        stats: &mut Tensor,
    ) -> Result<View<'a>> {
        let Turn::NormRope { shape, wq, wk } = &self.turn else { return Ok(qkv.rows(cx.n)) };
        let (wq, wk, qkv) = (w.get(*wq), w.get(*wk), qkv.rows(cx.n));
        let (out, rstd) = (turned.rows_mut(cx.n), stats.rows_mut(cx.n));
        cx.dev.qk_norm_rope(shape, cx.tables[self.table], cx.batch.positions, wq, wk, qkv, out, rstd)?;
        Ok(turned.rows(cx.n))
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
        let (dev, n, positions) = (cx.dev, cx.n, cx.batch.positions);
        let (o, lse) = (saved.o.rows(n), saved.lse.rows(n));
        let mut d_branch = cx.branch_grad(Place::Attention, dy.as_view(), &mut scratch.masked)?;
        if let Some(norm) = &self.post {
            let Scratch { h, stats, dh, unused, .. } = scratch;
            d_branch =
                norm.branch_backward(dev, w, dw, saved.branch.rows(n), d_branch, [h, stats, dh], unused.rows_mut(2))?;
        }
        let low = [&mut scratch.low, &mut scratch.dlow];
        self.out.backward(dev, w, dw, o, d_branch, low, scratch.d_o.rows_mut(n), false)?;

        let qkv = self.turned(cx, w, &saved.qkv, &mut scratch.turned, &mut scratch.turned_stats)?;
        let (delta, dqkv) = (scratch.delta.rows_mut(n), scratch.dqkv.rows_mut(n));
        dev.attention_backward(&self.shape, cx.batch.cu_seqlens, qkv, o, lse, scratch.d_o.rows(n), delta, dqkv)?;
        match &self.turn {
            Turn::None => {}
            Turn::Rope(rope) => dev.rope(rope, cx.tables[self.table], positions, scratch.dqkv.rows_mut(n), true)?,
            Turn::NormRope { shape, wq, wk } => {
                let (dwq, dwk) = dw.pair(*wq, *wk, scratch.unused.rows_mut(2));
                let (wq, wk, qkv, rstd) = (w.get(*wq), w.get(*wk), saved.qkv.rows(n), scratch.turned_stats.rows(n));
                let dqkv = scratch.dqkv.rows_mut(n);
                dev.qk_norm_rope_backward(shape, cx.tables[self.table], positions, wq, wk, qkv, rstd, dqkv, dwq, dwk)?;
            }
        }
        if let Some(bias) = &self.bias {
            bias.grad(dev, dw, &mut scratch.bias_grad, scratch.dqkv.rows(n))?;
        }

        self.norm.forward(dev, w, x, scratch.h.rows_mut(n), scratch.stats.rows_mut(n))?;
        for (i, projection) in self.qkv.iter().enumerate() {
            let Scratch { h, dqkv, dh, low, dlow, .. } = &mut *scratch;
            projection.backward(dev, w, dw, h.rows(n), dqkv.rows(n), [low, dlow], dh.rows_mut(n), i > 0)?;
        }
        let Scratch { stats, dh, unused, .. } = scratch;
        self.norm.backward(dev, w, dw, x, stats.rows(n), dh.rows(n), dy, unused.rows_mut(2))
    }
}
