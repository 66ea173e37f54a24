//! The experts of a sparse block: `down(silu(gate x) * up x)` of each routed row, with the matrices of its expert. Rows
//! are sorted by expert, so that one call multiplies the rows of all experts. Never routes, and never mixes rows.
//!
//! They are a layer of their own: what they read of their block is in scratch, so a store may have dropped the block's
//! weights, and may spread experts over other ranks than the rest.
//!
//! Saved for backward: the outputs of gate and up. The gradient of a row's weight follows from the gradient of its
//! activation, so that the outputs of the experts are not needed.
use super::context::{Cx, DropoutSite};
use super::layout::Layout;
use super::saved::{MlpSaved, Scratch, SparseScratch};
use super::store::{Grads, Stride, Weights};
use super::tensor::Tensor;
use crate::base::{Error, Result};
use crate::device::ops::{Glu, GluBackward, Grouped, GroupedGemm, TakeRows, WeighRows};
use crate::device::{View, ViewMut};

#[derive(Clone, Debug)]
pub struct ExpertLayer {
    /// Where the store has them.
    pub layer: usize,
    pub top_k: usize,
    /// Segments (F, C), (F, C) and (C, F) of each expert.
    pub gate: Stride,
    pub up: Stride,
    pub down: Stride,
    /// C and F.
    pub width: usize,
    pub ff: usize,
}

impl ExpertLayer {
    /// Checks that an operation can find the experts of a kind at equal distances.
    pub fn check(&self, layout: &Layout) -> Result<()> {
        for kind in [&self.gate, &self.up, &self.down] {
            let trainable = |e: usize| layout.segments[kind.segment(e)].trainable;
            if let Some(e) = (0..kind.count).find(|&e| trainable(e) != trainable(0)) {
                return Err(Error::input(format!(
                    "freeze: {} is trained and {} is not; freeze all experts of a block or none",
                    layout.segments[kind.segment(if trainable(0) { 0 } else { e })].name,
                    layout.segments[kind.segment(if trainable(0) { e } else { 0 })].name
                )));
            }
        }
        Ok(())
    }

    /// Assigns `rows (R, C)` of scratch from its `h (N, C)`: the output of each chosen expert, sorted by expert.
    pub fn forward(&self, cx: &Cx, w: Weights, saved: &mut MlpSaved, scratch: &mut Scratch) -> Result<()> {
        let (dev, r) = (cx.dev, cx.tokens() * self.top_k);
        let Scratch { h, sparse: SparseScratch { rows, act, .. }, .. } = scratch;
        self.take(cx, saved, h.rows(cx.n), rows)?;
        self.open(cx, w, saved, rows.rows(r))?;
        let (gate, up) = (saved.experts_gate.rows(r), saved.experts_up.rows(r));
        dev.swiglu(Glu { gate, up, y: act.rows_mut(r) })?;
        let offsets = saved.routing.offsets.rows(1);
        self.product(cx, w, &self.down, Grouped::Forward, offsets, act.rows(r), rows.rows_mut(r), false)
    }

    /// Assigns `drows (R, C)` and `dweights (N, K)` of scratch: the gradients of the experts' inputs and of the weights
    /// of their outputs. Reads `h` and this rank's rows `dy` of the residual's gradient, and adds to the gradients of
    /// the experts. Unless the block `is_whole`, its saved products are recomputed first.
    #[allow(clippy::too_many_arguments)] // a forward's operands and their gradients
    pub fn backward(
        &self,
        cx: &Cx,
        w: Weights,
        dw: &mut Grads,
        saved: &mut MlpSaved,
        scratch: &mut Scratch,
        dy: View,
        is_whole: bool,
    ) -> Result<()> {
        let (dev, n, r) = (cx.dev, cx.tokens(), cx.tokens() * self.top_k);
        let Scratch { h, whole, masked, sparse, .. } = scratch;
        let SparseScratch { rows, act, drows, dact, dup, dweights, .. } = sparse;
        self.take(cx, saved, h.rows(cx.n), rows)?;
        if !is_whole {
            self.open(cx, w, saved, rows.rows(r))?;
        }
        let d_branch = cx.whole(cx.branch_grad(DropoutSite::Mlp, dy, masked)?, whole)?;
        self.take(cx, saved, d_branch.rows, drows)?;
        cx.release(d_branch)?;
        let offsets = saved.routing.offsets.rows(1);

        // Down: the rows' gradients for weights of 1, then what follows from the weights.
        self.product(cx, w, &self.down, Grouped::Input, offsets, drows.rows(r), dact.rows_mut(r), false)?;
        let (gate, up) = (saved.experts_gate.rows(r), saved.experts_up.rows(r));
        dev.swiglu(Glu { gate, up, y: act.rows_mut(r) })?;
        dev.weigh_rows(WeighRows {
            order: Some(saved.routing.order.rows(n)),
            weights: saved.routing.weights.rows(n),
            act: act.rows_mut(r),
            dact: dact.rows_mut(r),
            dweights: dweights.rows_mut(n),
        })?;
        self.weight_grad(cx, dw, &self.down, offsets, drows.rows(r), act.rows(r))?;

        // Gate and up. The activation is no longer needed, so its buffer holds the gate's gradient.
        let (dgate, dup_out) = (act.rows_mut(r), dup.rows_mut(r));
        dev.swiglu_backward(GluBackward { gate, up, dy: dact.rows(r), dgate, dup: dup_out })?;
        self.weight_grad(cx, dw, &self.gate, offsets, act.rows(r), rows.rows(r))?;
        self.weight_grad(cx, dw, &self.up, offsets, dup.rows(r), rows.rows(r))?;
        self.product(cx, w, &self.gate, Grouped::Input, offsets, act.rows(r), drows.rows_mut(r), false)?;
        self.product(cx, w, &self.up, Grouped::Input, offsets, dup.rows(r), drows.rows_mut(r), true)
    }

    /// Assigns to `rows` the row of `x (N, C)` for each routed row.
    fn take(&self, cx: &Cx, saved: &MlpSaved, x: View, rows: &mut Tensor) -> Result<()> {
        let n = cx.tokens();
        let (x, order, y) = (x.slice(0..n * self.width), saved.routing.order.rows(n), rows.rows_mut(n * self.top_k));
        cx.dev.take_rows(TakeRows { top_k: self.top_k, order, x, y })
    }
    /// Assigns the saved outputs of gate and up.
    fn open(&self, cx: &Cx, w: Weights, saved: &mut MlpSaved, rows: View) -> Result<()> {
        let (r, offsets) = (cx.tokens() * self.top_k, saved.routing.offsets.rows(1));
        for (kind, out) in [(&self.gate, &mut saved.experts_gate), (&self.up, &mut saved.experts_up)] {
            self.product(cx, w, kind, Grouped::Forward, offsets, rows, out.rows_mut(r), false)?;
        }
        Ok(())
    }

    /// One product per expert with its matrix of `kind`: assigns `c`, or adds to it with `accumulate`.
    #[allow(clippy::too_many_arguments)] // the operands of a grouped product
    fn product(
        &self,
        cx: &Cx,
        w: Weights,
        kind: &Stride,
        form: Grouped,
        offsets: View,
        a: View,
        c: ViewMut,
        accumulate: bool,
    ) -> Result<()> {
        let (b, stride) = w.strided(kind)?;
        let down = kind.first == self.down.first;
        // Gate and up map C to F, down maps F to C; their input gradients the other way.
        let (n, k) = if down == (form == Grouped::Forward) { (self.width, self.ff) } else { (self.ff, self.width) };
        cx.dev.grouped_gemm(GroupedGemm { kind: form, n, k, offsets, a, b, c, stride, accumulate })
    }
    /// Adds `dyᵀ x` of each expert's rows to the gradients of its matrix of `kind`, unless it is frozen.
    fn weight_grad(&self, cx: &Cx, dw: &mut Grads, kind: &Stride, offsets: View, dy: View, x: View) -> Result<()> {
        let Some((c, stride, accumulate)) = dw.strided(kind)? else { return Ok(()) };
        let (n, k) = if kind.first == self.down.first { (self.width, self.ff) } else { (self.ff, self.width) };
        let (a, b) = (dy, x);
        cx.dev.grouped_gemm(GroupedGemm { kind: Grouped::Weight, n, k, offsets, a, b, c, stride, accumulate })
    }
}
