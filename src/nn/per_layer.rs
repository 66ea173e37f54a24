//! Embeddings of each layer (Gemma 4): the root makes every block an input of its own from tokens and their embeddings,
//! and a third branch of the block, `y = x + post(out(gelu(gate(x)) input))`, adds it to the residual. Never sharded
//! over tp: its products are small, and every rank has all of them.
use super::context::Cx;
use super::linear::Linear;
use super::norm::Norm;
use super::per_layer_buffers::{PerLayerSaved, PerLayerScratch};
use super::product_buffers::AdapterScratch;
use super::saved::Scratch;
use super::store::{Grads, Weights};
use super::tensor::Tensor;
use crate::base::Result;
use crate::device::ops::{Embed, EmbedBackward, EmbedShape, Glu, GluBackward, RmsNorm, RmsNormBackward, RmsNormShape};
use crate::device::{View, ViewMut};

/// The part of the root: `input = (norm(projection(x) / sqrt(C)) + table[token] sqrt(P)) / sqrt(2)`.
#[derive(Clone, Debug)]
pub struct PerLayerRoot {
    /// Segment (words, L P), and its number of rows.
    pub table: usize,
    pub words: usize,
    pub projection: Linear,
    /// Segment (P).
    pub norm: usize,
    pub shape: RmsNormShape,
    /// Elements of a block's input.
    pub width: usize,
    /// Factor of the projection.
    pub projection_scale: f32,
}

impl PerLayerRoot {
    fn table(&self) -> EmbedShape {
        EmbedShape::whole(self.words, (self.width as f32).sqrt())
    }
    /// Assigns the inputs of all blocks from the embeddings `x (N, C)`.
    pub fn forward(
        &self,
        cx: &Cx,
        w: Weights,
        x: View,
        scratch: &mut PerLayerScratch,
        adapter: &mut AdapterScratch,
    ) -> Result<()> {
        let (dev, n, scale) = (cx.dev, cx.n, std::f32::consts::FRAC_1_SQRT_2);
        let PerLayerScratch { inputs, projected, stats, .. } = scratch;
        self.projection.forward(cx, w, x, adapter, projected.rows_mut(n))?;
        dev.scale(self.projection_scale, projected.rows_mut(n))?;
        let (x, weight, y) = (projected.rows(n), w.get(self.norm), inputs.rows_mut(n));
        let rstd = stats.rows_mut(n);
        dev.rmsnorm(RmsNorm { shape: self.shape, x, w: weight, y, rstd })?;
        let (shape, tokens, weight) = (self.table(), cx.batch.tokens, w.get(self.table));
        dev.embed(Embed { shape, tokens, w: weight, y: inputs.rows_mut(n), accumulate: true })?;
        dev.scale(scale, inputs.rows_mut(n))
    }
    /// Adds to the weights' gradients, and to `dx (N, C)`, that of the embeddings `x`.
    #[allow(clippy::too_many_arguments)] // a forward's operands and their gradients
    pub fn backward(
        &self,
        cx: &Cx,
        w: Weights,
        dw: &mut Grads,
        x: View,
        scratch: &mut PerLayerScratch,
        adapter: &mut AdapterScratch,
        unused: ViewMut,
        dx: ViewMut,
    ) -> Result<()> {
        let (dev, n, scale) = (cx.dev, cx.n, std::f32::consts::FRAC_1_SQRT_2);
        let PerLayerScratch { projected, stats, d_inputs, d_projected, .. } = scratch;
        dev.scale(scale, d_inputs.rows_mut(n))?;
        if let Some(dw) = dw.get(self.table)? {
            let (shape, tokens) = (self.table(), cx.batch.tokens);
            dev.embed_backward(EmbedBackward { shape, tokens, dy: d_inputs.rows(n), dw })?;
        }
        dev.zero(d_projected.rows_mut(n))?;
        let grad = dw.get(self.norm)?.unwrap_or_else(|| unused.slice(0..self.width));
        dev.rmsnorm_backward(RmsNormBackward {
            shape: self.shape,
            x: projected.rows(n),
            w: w.get(self.norm),
            rstd: stats.rows(n),
            dy: d_inputs.rows(n),
            dx: d_projected.rows_mut(n),
            dw: grad,
        })?;
        dev.scale(self.projection_scale, d_projected.rows_mut(n))?;
        self.projection.backward(cx, w, dw, x, d_projected.rows(n), adapter, dx, true)
    }
}

/// The branch of a block.
#[derive(Clone, Debug)]
pub struct PerLayerBranch {
    pub gate: Linear,
    pub out: Linear,
    pub post: Norm,
    /// The block's first column of the inputs.
    pub first: usize,
}

impl PerLayerBranch {
    /// Assigns `y (R, C)` from `saved.x`; without `y`, only what backward needs.
    pub fn forward(
        &self,
        cx: &Cx,
        w: Weights,
        saved: &mut PerLayerSaved,
        scratch: &mut Scratch,
        y: Option<ViewMut>,
    ) -> Result<()> {
        let (dev, n) = (cx.dev, cx.n);
        let Scratch { per_layer, adapter, stats, .. } = scratch;
        self.gate.forward(cx, w, saved.x.rows(n), adapter, saved.gate.rows_mut(n))?;
        self.activate(cx, &saved.gate, per_layer)?;
        self.out.forward(cx, w, per_layer.act.rows(n), adapter, saved.branch.rows_mut(n))?;
        let Some(mut y) = y else { return Ok(()) };
        self.post.forward(cx, w, saved.branch.rows(n), y.reborrow(), stats.rows_mut(n))?;
        dev.add(saved.x.rows(n), y)
    }
    /// Assigns the block's input, and its activation: the input times gelu(gate).
    fn activate(&self, cx: &Cx, gate: &Tensor, scratch: &mut PerLayerScratch) -> Result<()> {
        let PerLayerScratch { inputs, input, act, .. } = scratch;
        let (rows, width, all) = (cx.n, input.width(), inputs.width());
        cx.copy_columns([rows, width], (inputs.rows(rows), all, self.first), (input.rows_mut(rows), width, 0))?;
        cx.dev.geglu(Glu { gate: gate.rows(rows), up: input.rows(rows), y: act.rows_mut(rows) })
    }
    /// `dy (R, C)` is the residual's gradient; adds the branch's gradient to it and to the weights' gradients. Assigns
    /// that of the block's input.
    pub fn backward(
        &self,
        cx: &Cx,
        w: Weights,
        dw: &mut Grads,
        saved: &PerLayerSaved,
        scratch: &mut Scratch,
        dy: ViewMut,
    ) -> Result<()> {
        let (dev, n) = (cx.dev, cx.n);
        let Scratch { stats, dh, unused, per_layer, adapter, .. } = scratch;
        let (branch, unused) = (saved.branch.rows(n), unused.rows_mut(2));
        let d_branch = self.post.branch_backward(cx, w, dw, branch, dy.as_view(), [stats, dh], unused)?;
        self.activate(cx, &saved.gate, per_layer)?;
        let PerLayerScratch { d_inputs, input, act, d_act, d_gate, d_input, .. } = per_layer;
        self.out.backward(cx, w, dw, act.rows(n), d_branch, adapter, d_act.rows_mut(n), false)?;
        let (gate, up, dgate, dup) = (saved.gate.rows(n), input.rows(n), d_gate.rows_mut(n), d_input.rows_mut(n));
        dev.geglu_backward(GluBackward { gate, up, dy: d_act.rows(n), dgate, dup })?;
        let (width, all) = (d_input.width(), d_inputs.width());
        cx.copy_columns([n, width], (d_input.rows(n), width, 0), (d_inputs.rows_mut(n), all, self.first))?;
        self.gate.backward(cx, w, dw, saved.x.rows(n), d_gate.rows(n), adapter, dy, true)
    }
}
