//! The gated short convolution, a mixer that sees a few tokens back (LFM 2): `y = x + out(c conv(b u))`, where b, c and
//! u are parts of `in(norm(x))`. Never sees other documents: the convolution starts anew with each. Sequences that are
//! generated go on from the last rows that the convolution has seen. In LFM 3, a norm follows `out`.
//!
//! ```text
//! saved per token: b, c and u
//! ```
//!
//! Backward repeats the convolution, which takes one pass over memory.
use super::context::{Cx, DropoutSite};
use super::linear::Linear;
use super::norm::Norm;
use super::recurrent_buffers::RecurrentSaved;
use super::saved::Scratch;
use super::store::{Grads, Weights};
use super::tensor::Tensor;
use crate::base::Result;
use crate::device::ops::{ConvKind, RowSequences, ShortConv, ShortConvBackward};
use crate::device::{View, ViewMut};

const KIND: ConvKind = ConvKind::Gated;

#[derive(Clone, Debug)]
pub struct ConvBranch {
    pub norm: Norm,
    /// To b, c and u.
    pub inputs: Linear,
    /// Segment (C, 1, taps).
    pub conv: usize,
    pub taps: usize,
    pub out: Linear,
    /// Normalizes the branch's output before it is added to the residual.
    pub post: Option<Norm>,
    /// Whether channels are sharded over tp.
    pub cut: bool,
}

impl ConvBranch {
    /// The branch's matrices, in the order of their segments.
    pub fn linears(&mut self) -> Vec<&mut Linear> {
        vec![&mut self.inputs, &mut self.out]
    }

    /// Assigns `y (R, C)` from `x (R, C)`: this rank's rows of the residual stream. Saves the input of `post` in
    /// `branch`.
    #[allow(clippy::too_many_arguments)] // a branch's operands, and what it saves
    pub fn forward(
        &self,
        cx: &Cx,
        w: Weights,
        x: View,
        saved: &mut RecurrentSaved,
        branch: &mut Tensor,
        scratch: &mut Scratch,
        y: ViewMut,
    ) -> Result<()> {
        let (dev, n, rows) = (cx.dev, cx.n, cx.rows());
        self.norm.forward(cx, w, x, scratch.h.rows_mut(rows), scratch.stats.rows_mut(rows))?;
        let h = cx.whole(scratch.h.rows(rows), &mut scratch.whole)?;
        self.inputs.forward(cx, w, h.rows, &mut scratch.adapter, saved.mixed.rows_mut(n))?;
        cx.release(h)?;
        let along = match cx.paged {
            None => RowSequences::Whole(cx.batch.documents),
            Some(runs) => {
                let [_, memory] = scratch.recurrent_cache.of_block(cx);
                RowSequences::Carried { runs, table: scratch.cache.table(runs), memory }
            }
        };
        let (mixed, convolved) = (saved.mixed.rows(n), scratch.recurrent.convolved.rows_mut(n));
        let (taps, conv) = (self.taps, w.get(self.conv));
        dev.short_conv(ShortConv { kind: KIND, taps, along, x: mixed, w: conv, bias: None, y: convolved })?;
        let Scratch { parts, adapter, recurrent, stats, .. } = scratch;
        let (convolved, summed, site) = (recurrent.convolved.rows(n), (self.cut, parts), DropoutSite::Attention);
        let Some(norm) = &self.post else {
            return self.out.onto_residual(cx, w, convolved, adapter, summed, site, x, y);
        };
        self.out.summed(cx, w, convolved, adapter, summed, branch.rows_mut(rows))?;
        norm.onto_residual(cx, w, branch.rows(rows), site, x, y, stats.rows_mut(rows))
    }

    /// `dy (R, C)` is the residual's gradient; adds the branch's gradient to it and to the weights' gradients.
    #[allow(clippy::too_many_arguments)] // a forward's operands and their gradients
    pub fn backward(
        &self,
        cx: &Cx,
        w: Weights,
        dw: &mut Grads,
        x: View,
        saved: &RecurrentSaved,
        branch: &Tensor,
        scratch: &mut Scratch,
        dy: ViewMut,
    ) -> Result<()> {
        let (dev, n, rows, taps) = (cx.dev, cx.n, cx.rows(), self.taps);
        let (documents, mixed, conv) = (cx.batch.documents, saved.mixed.rows(n), w.get(self.conv));
        let mut d_branch = cx.branch_grad(DropoutSite::Attention, dy.as_view(), &mut scratch.masked)?;
        if let Some(norm) = &self.post {
            let Scratch { stats, dh, unused, .. } = scratch;
            d_branch = norm.branch_backward(cx, w, dw, branch.rows(rows), d_branch, [stats, dh], unused.rows_mut(2))?;
        }
        let d_branch = cx.whole(d_branch, &mut scratch.whole)?;
        let Scratch { recurrent, adapter, .. } = scratch;
        let (along, y) = (RowSequences::Whole(documents), recurrent.convolved.rows_mut(n));
        dev.short_conv(ShortConv { kind: KIND, taps, along, x: mixed, w: conv, bias: None, y })?;
        let (convolved, dconvolved) = (recurrent.convolved.rows(n), recurrent.dconvolved.rows_mut(n));
        self.out.backward(cx, w, dw, convolved, d_branch.rows, adapter, dconvolved, false)?;
        cx.release(d_branch)?;

        let (dy_conv, dx) = (recurrent.dconvolved.rows(n), recurrent.dmixed.rows_mut(n));
        let of_conv = dw.get(self.conv)?;
        dev.short_conv_backward(ShortConvBackward {
            kind: KIND,
            taps,
            documents,
            x: mixed,
            w: conv,
            bias: None,
            dy: dy_conv,
            dx,
            dw: of_conv,
            dbias: None,
        })?;

        let Scratch { h, stats, whole, parts, dh, adapter, unused, recurrent, .. } = scratch;
        self.norm.forward(cx, w, x, h.rows_mut(rows), stats.rows_mut(rows))?;
        let h = cx.whole(h.rows(rows), whole)?;
        cx.sum(self.cut, parts, dh.rows_mut(rows), |dh| {
            self.inputs.backward(cx, w, dw, h.rows, recurrent.dmixed.rows(n), adapter, dh, false)
        })?;
        cx.release(h)?;
        self.norm.backward(cx, w, dw, x, stats.rows(rows), dh.rows(rows), dy, unused.rows_mut(2))
    }
}
