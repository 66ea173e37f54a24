//! The experts of a sparse block: `down(silu(gate x) * up x)` of each routed row, with the matrices of its expert. Rows
//! are sorted by expert, so that one call multiplies the rows of all experts. Never routes, and never mixes rows.
//!
//! They are a layer of their own: what they read of their block is in scratch, so a store may have dropped the block's
//! weights. With ep, a rank has some of the experts, and rows go to the rank that has theirs ([`Dispatch`]).
//!
//! Saved for backward: the outputs of gate and up. The gradient of a row's weight follows from the gradient of its
//! activation, so that the outputs of the experts are not needed.
use super::context::{Cx, DropoutSite};
use super::dispatch::{Dispatch, DispatchBuffers};
use super::grouped::{GroupedLinear, Held};
use super::layout::Layout;
use super::lora::Lora;
use super::saved::{AdapterScratch, MlpSaved, Routing, Scratch, SparseScratch};
use super::store::{Grads, Weights};
use super::tensor::Tensor;
use crate::base::Result;
use crate::comm::Tag;
use crate::device::ops::{CombineRows, Glu, GluBackward, TakeRows, WeighRows};
use crate::device::{View, ViewMut};

#[derive(Clone, Debug)]
pub struct ExpertLayer {
    /// Where the store has them.
    pub layer: usize,
    pub top_k: usize,
    /// Matrices (F, C), (F, C) and (C, F) of each expert of this rank.
    pub gate: GroupedLinear,
    pub up: GroupedLinear,
    pub down: GroupedLinear,
    /// C
    pub width: usize,
}

/// The weights of rows, as in [`WeighRows`].
struct Weighing<'a> {
    order: Option<View<'a>>,
    weights: View<'a>,
    dweights: ViewMut<'a>,
}

impl ExpertLayer {
    /// Checks that operations can find the tensors of all experts.
    pub fn check(&self, layout: &Layout) -> Result<()> {
        [&self.gate, &self.up, &self.down].into_iter().try_for_each(|kind| kind.check(layout))
    }
    /// Attaches the adapters in `layout` to their matrices.
    pub fn adapt(&mut self, lora: &Lora, layout: &Layout) {
        for kind in [&mut self.gate, &mut self.up, &mut self.down] {
            lora.adapt_experts(kind, layout);
        }
    }

    /// Assigns `rows (R, C)` of scratch from its `h (N, C)`: the output of each chosen expert, sorted by expert.
    pub fn forward(&self, cx: &Cx, w: Weights, saved: &mut MlpSaved, scratch: &mut Scratch) -> Result<()> {
        let r = cx.tokens() * self.top_k;
        let Scratch { h, sparse: SparseScratch { rows, act, adapter, dispatch, .. }, .. } = scratch;
        let MlpSaved { experts_gate: gate, experts_up: up, routing, .. } = saved;
        self.take(cx, routing, h.rows(cx.n), rows)?;
        let (offsets, tag) = (routing.offsets.rows(1), |what| Tag::new(what, self.layer));
        if cx.split.ep.of == 1 {
            self.open(cx, w, (r, offsets), rows, adapter, [gate, up])?;
            return self.close(cx, w, (r, offsets), [gate, up], act, adapter, rows);
        }
        let Dispatch { buffers, exchange } = dispatch;
        // The first round is last, so that its products are those that backward finds.
        for round in (0..exchange.begin(cx, tag("rows of experts"), offsets, r, buffers)?).rev() {
            exchange.round(cx.dev, round, buffers)?;
            let DispatchBuffers { offsets, sorted, unsorted, wire, held, .. } = buffers;
            exchange.send(cx, tag("dispatch"), rows, wire, sorted, held)?;
            if exchange.held > 0 {
                let of = (exchange.held, offsets.rows(1));
                self.open(cx, w, of, held, adapter, [gate, up])?;
                self.close(cx, w, of, [gate, up], act, adapter, held)?;
            }
            exchange.give_back(cx, tag("combine"), held, unsorted, wire, rows)?;
        }
        Ok(())
    }

    /// Assigns `drows (R, C)` and `dweights (N, K)` of scratch: the gradients of the experts' inputs and of the weights
    /// of their outputs. Reads `h` and this rank's rows `dy` of the residual's gradient, and adds to the gradients of
    /// the experts. Unless the block `is_whole`, its saved products are recomputed first; so are those of all rounds
    /// but the first.
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
        let SparseScratch { rows, drows, act, dact, dup, dweights, adapter, dispatch, .. } = sparse;
        let MlpSaved { experts_gate: gate, experts_up: up, routing, .. } = saved;
        self.take(cx, routing, h.rows(cx.n), rows)?;
        let d_branch = cx.whole(cx.branch_grad(DropoutSite::Mlp, dy, masked)?, whole)?;
        self.take(cx, routing, d_branch.rows, drows)?;
        cx.release(d_branch)?;
        let (offsets, order, weights) = (routing.offsets.rows(1), routing.order.rows(n), routing.weights.rows(n));
        let tag = |what| Tag::new(what, self.layer);
        if cx.split.ep.of == 1 {
            if !is_whole {
                self.open(cx, w, (r, offsets), rows, adapter, [gate, up])?;
            }
            let weighing = Weighing { order: Some(order), weights, dweights: dweights.rows_mut(n) };
            let (of, scratch) = ((r, offsets), [act, dact, dup]);
            return self.differentiate(cx, w, dw, of, (rows, drows), [gate, up], scratch, adapter, weighing);
        }
        let Dispatch { buffers, exchange } = dispatch;
        dev.take_rows(TakeRows { top_k: 1, order, x: weights, y: buffers.sent_weights.rows_mut(r) })?;
        for round in 0..exchange.begin(cx, tag("rows of experts"), offsets, r, buffers)? {
            exchange.round(dev, round, buffers)?;
            let DispatchBuffers { offsets, sorted, unsorted, wire, held, dheld, .. } = buffers;
            let DispatchBuffers { sent_weights, wire_weights, weights, dweights, .. } = buffers;
            exchange.send(cx, tag("dispatch"), rows, wire, sorted, held)?;
            exchange.send(cx, tag("dispatch gradients"), drows, wire, sorted, dheld)?;
            exchange.send(cx, tag("dispatch weights"), sent_weights, wire_weights, sorted, weights)?;
            if exchange.held > 0 {
                let of = (exchange.held, offsets.rows(1));
                if !is_whole || round > 0 {
                    self.open(cx, w, of, held, adapter, [gate, up])?;
                }
                let (weights, dweights) = (weights.rows(exchange.held), dweights.rows_mut(exchange.held));
                let weighing = Weighing { order: None, weights, dweights };
                let scratch = [&mut *act, &mut *dact, &mut *dup];
                self.differentiate(cx, w, dw, of, (held, dheld), [gate, up], scratch, adapter, weighing)?;
            }
            exchange.give_back(cx, tag("combine gradients"), dheld, unsorted, wire, drows)?;
            exchange.give_back(cx, tag("combine weights"), dweights, unsorted, wire_weights, sent_weights)?;
        }
        let (places, x, y) = (Some(routing.places.rows(n)), buffers.sent_weights.rows(r), dweights.rows_mut(n));
        dev.combine_rows(CombineRows { width: 1, top_k: 1, places, weights: None, x, y, accumulate: false })
    }

    /// Assigns to `rows` the row of `x (N, C)` for each routed row.
    fn take(&self, cx: &Cx, routing: &Routing, x: View, rows: &mut Tensor) -> Result<()> {
        let n = cx.tokens();
        let (x, order, y) = (x.slice(0..n * self.width), routing.order.rows(n), rows.rows_mut(n * self.top_k));
        cx.dev.take_rows(TakeRows { top_k: self.top_k, order, x, y })
    }
    /// Assigns the outputs of gate and up.
    fn open(
        &self,
        cx: &Cx,
        w: Weights,
        of: Held,
        rows: &Tensor,
        work: &mut AdapterScratch,
        [gate, up]: [&mut Tensor; 2],
    ) -> Result<()> {
        for (kind, out) in [(&self.gate, gate), (&self.up, up)] {
            kind.forward(cx, w, of, rows.rows(of.0), work, out.rows_mut(of.0))?;
        }
        Ok(())
    }
    /// Assigns the outputs of the experts.
    #[allow(clippy::too_many_arguments)] // operands, and scratch
    fn close(
        &self,
        cx: &Cx,
        w: Weights,
        of: Held,
        [gate, up]: [&mut Tensor; 2],
        act: &mut Tensor,
        work: &mut AdapterScratch,
        rows: &mut Tensor,
    ) -> Result<()> {
        let r = of.0;
        cx.dev.swiglu(Glu { gate: gate.rows(r), up: up.rows(r), y: act.rows_mut(r) })?;
        self.down.forward(cx, w, of, act.rows(r), work, rows.rows_mut(r))
    }
    /// The gradients of outputs become those of inputs, in `drows`.
    #[allow(clippy::too_many_arguments)] // a forward's operands and their gradients
    fn differentiate(
        &self,
        cx: &Cx,
        w: Weights,
        dw: &mut Grads,
        of: Held,
        (rows, drows): (&Tensor, &mut Tensor),
        [gate, up]: [&mut Tensor; 2],
        [act, dact, dup]: [&mut Tensor; 3],
        work: &mut AdapterScratch,
        Weighing { order, weights, dweights }: Weighing,
    ) -> Result<()> {
        // Down: the rows' gradients for weights of 1, then what follows from the weights.
        let r = of.0;
        self.down.input_grad(cx, w, of, drows.rows(r), work, dact.rows_mut(r), false)?;
        let (gate, up) = (gate.rows(r), up.rows(r));
        cx.dev.swiglu(Glu { gate, up, y: act.rows_mut(r) })?;
        let (act_rows, dact_rows) = (act.rows_mut(r), dact.rows_mut(r));
        cx.dev.weigh_rows(WeighRows { order, weights, act: act_rows, dact: dact_rows, dweights })?;
        self.down.weight_grad(cx, w, dw, of, act.rows(r), drows.rows(r), work)?;

        // Gate and up. The activation is no longer needed, so its buffer holds the gate's gradient.
        let (dgate, dup_out) = (act.rows_mut(r), dup.rows_mut(r));
        cx.dev.swiglu_backward(GluBackward { gate, up, dy: dact.rows(r), dgate, dup: dup_out })?;
        for (kind, dy, accumulate) in [(&self.gate, &*act, false), (&self.up, &*dup, true)] {
            kind.input_grad(cx, w, of, dy.rows(r), work, drows.rows_mut(r), accumulate)?;
            kind.weight_grad(cx, w, dw, of, rows.rows(r), dy.rows(r), work)?;
        }
        Ok(())
    }
}
