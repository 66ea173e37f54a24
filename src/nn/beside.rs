//! A dense branch side by side with experts (Gemma 4): `y = x + dropout(post(post_1(dense(x)) + post_2(experts(x))))`.
//! Each has a norm of its input, and so has the router. Never multiplies by an expert's matrix.
//!
//! In backward, the gradients of the sum come before those of the experts.
use super::context::{Cx, DropoutSite};
use super::mlp::MlpBranch;
use super::norm::Norm;
use super::saved::{MlpSaved, Scratch};
use super::store::{Grads, Weights};
use super::tensor::Tensor;
use crate::base::Result;
use crate::device::{View, ViewMut};

#[derive(Clone, Debug)]
pub struct Beside {
    /// Ends in a norm, whose output is not added to the residual.
    pub dense: MlpBranch,
    /// The norm of the router's input.
    pub router_norm: Norm,
    /// Factor of the router's logits.
    pub logit_scale: f32,
    /// Segment (E): factors of the weights of an expert's rows.
    pub factors: usize,
    /// Norms of the experts' output, and of the sum.
    pub posts: [Norm; 2],
}

impl Beside {
    /// Assigns the dense branch's products, and the router's input `h (N, C)` of scratch.
    pub fn forward(&self, cx: &Cx, w: Weights, saved: &mut MlpSaved, scratch: &mut Scratch) -> Result<()> {
        self.dense.forward(cx, w, None, saved, scratch, None)?;
        self.router_input(cx, w, saved, scratch)
    }
    /// Also assigns the statistics of scratch.
    pub fn router_input(&self, cx: &Cx, w: Weights, saved: &MlpSaved, scratch: &mut Scratch) -> Result<()> {
        let (rows, Scratch { h, stats, whole, .. }) = (cx.rows(), scratch);
        self.router_norm.forward(cx, w, saved.x.rows(rows), h.rows_mut(rows), stats.rows_mut(rows))?;
        cx.make_whole(h, whole)
    }
    /// Assigns `sum (R, C)`.
    fn sum(&self, cx: &Cx, w: Weights, saved: &MlpSaved, [h, stats, sum]: [&mut Tensor; 3]) -> Result<()> {
        let rows = cx.rows();
        let dense = self.dense.post.unwrap_or(Norm::Absent);
        dense.forward(cx, w, saved.branch.rows(rows), sum.rows_mut(rows), stats.rows_mut(rows))?;
        self.posts[0].forward(cx, w, saved.experts_out.rows(rows), h.rows_mut(rows), stats.rows_mut(rows))?;
        cx.dev.add(h.rows(rows), sum.rows_mut(rows))
    }
    /// Once `saved` has the experts' output: assigns `y (R, C)`.
    pub fn finish(&self, cx: &Cx, w: Weights, saved: &MlpSaved, scratch: &mut Scratch, y: ViewMut) -> Result<()> {
        let (rows, Scratch { h, stats, dh, .. }) = (cx.rows(), scratch);
        self.sum(cx, w, saved, [h, stats, dh])?;
        let (last, x) = (&self.posts[1], saved.x.rows(rows));
        last.onto_residual(cx, w, dh.rows(rows), DropoutSite::Mlp, x, y, stats.rows_mut(rows))
    }

    /// Before the backward pass of the experts: from the residual's gradient `dy`, assigns the gradient of the sum to
    /// `beside` of scratch, and that of the experts' output to its `dh`.
    pub fn open_backward(
        &self,
        cx: &Cx,
        w: Weights,
        dw: &mut Grads,
        saved: &MlpSaved,
        scratch: &mut Scratch,
        dy: View,
    ) -> Result<()> {
        let (rows, Scratch { h, stats, dh, masked, beside, unused, .. }) = (cx.rows(), scratch);
        self.sum(cx, w, saved, [h, stats, dh])?;
        let (d_branch, [post, last]) = (cx.branch_grad(DropoutSite::Mlp, dy, masked)?, &self.posts);
        let into = [&mut *stats, &mut *beside];
        last.branch_backward(cx, w, dw, dh.rows(rows), d_branch, into, unused.rows_mut(2))?;
        let (x, d_sum) = (saved.experts_out.rows(rows), beside.rows(rows));
        post.branch_backward(cx, w, dw, x, d_sum, [stats, dh], unused.rows_mut(2))?;
        Ok(())
    }
}
