//! The experts of a sparse block: `down(activation(gate x) * up x)` of each routed row, with the matrices of its
//! expert, or `down(activation(up x))`, or what gpt-oss has instead ([`ClampedExperts`]). Rows are sorted by expert, so
//! that one call multiplies the rows of all experts. Never routes, and never mixes rows.
//!
//! They are a layer of their own: what they read of their block is in scratch. With ep, a rank has some of the experts,
//! and rows go to the rank that has theirs ([`Dispatch`]).
//!
//! Saved for backward: the outputs of gate and up. The gradient of a row's weight follows from the gradient of its
//! activation, so that the outputs of the experts are not needed.
use super::context::{Cx, DropoutSite};
use super::dispatch::{Dispatch, DispatchBuffers, HeldRows};
use super::grouped::GroupedLinear;
use super::layout::Layout;
use super::lora::Lora;
use super::product_buffers::AdapterScratch;
use super::saved::{MlpSaved, Routing, Scratch};
use super::sparse_buffers::SparseScratch;
use super::spec::Activation;
use super::store::{Grads, Stride, Weights};
use super::tensor::Tensor;
use crate::base::Result;
use crate::comm::Tag;
use crate::device::ops::{
    BiasPlaces, ClampedGlu, ClampedGluBackward, CombineRows, ExpertBias, ExpertBiasBackward, Gelu, GeluBackward, Glu,
    GluBackward, GluClamp, TakeRows, WeighRows, WeighedBias,
};
use crate::device::{View, ViewMut};
use std::ops::Range;

#[derive(Clone, Debug)]
pub struct ExpertLayer {
    /// Where the store has them.
    pub layer: usize,
    /// Index of their block among the sparse ones.
    pub index: usize,
    pub top_k: usize,
    /// Matrices (F, C), (F, C) and (C, F) of each expert of this rank.
    pub gate: GroupedLinear,
    /// None if `gate` has the outputs of both, which alternate; or if there is no gate: then it is up.
    pub up: Option<GroupedLinear>,
    pub down: GroupedLinear,
    pub clamped: Option<ClampedExperts>,
    /// SwiGLU or GeGLU, unless they are clamped; squared ReLU without a gate.
    pub activation: Activation,
    /// A norm follows their output, of which scratch has the gradient in `dh`.
    pub normed: bool,
    /// A token's weight, of which there is one, multiplies their input; that of their output is 1.
    pub weighs_inputs: bool,
    /// C
    pub width: usize,
}

/// `down (clamped(gate_up x + b)) + c` of each routed row.
#[derive(Clone, Debug)]
pub struct ClampedExperts {
    pub clamp: GluClamp,
    /// The biases (2 F) and (C) of each expert.
    pub bias: Stride,
    pub down_bias: Stride,
    /// Whether this rank adds the second: one rank of tp does, since their outputs are summed.
    pub is_first: bool,
}

/// The weights of rows, as in [`WeighRows`].
struct Weighing<'a> {
    order: Option<View<'a>>,
    weights: View<'a>,
    dweights: ViewMut<'a>,
}

/// What backward's steps leave for each other.
struct ExpertGrads<'a> {
    gate: &'a mut Tensor,
    up: &'a mut Tensor,
    act: &'a mut Tensor,
    dact: &'a mut Tensor,
    dup: &'a mut Tensor,
    adapter: &'a mut AdapterScratch,
}

impl ExpertLayer {
    /// Checks that operations can find the tensors of all experts.
    pub fn check(&self, layout: &Layout) -> Result<()> {
        self.up.iter().chain([&self.gate, &self.down]).try_for_each(|kind| kind.check(layout))
    }
    /// Attaches the adapters in `layout` to their matrices.
    pub fn adapt(&mut self, lora: &Lora, layout: &Layout) {
        for kind in self.up.iter_mut().chain([&mut self.gate, &mut self.down]) {
            lora.adapt_experts(kind, layout);
        }
    }

    /// Assigns `rows (R, C)` of scratch from its `h (N, C)`: the output of each chosen expert, sorted by expert.
    pub fn forward(&self, cx: &Cx, w: Weights, saved: &mut MlpSaved, scratch: &mut Scratch) -> Result<()> {
        let r = cx.tokens() * self.top_k;
        let Scratch { h, sparse: SparseScratch { rows, row_weights, act, adapter, dispatch, .. }, .. } = scratch;
        let MlpSaved { experts_gate: gate, experts_up: up, routing, .. } = saved;
        self.inputs(cx, routing, h.rows(cx.n), row_weights, rows)?;
        let (offsets, tag) = (routing.offsets.rows(1), |what| Tag::new(what, self.layer));
        if cx.split.ep.of == 1 {
            let all = HeldRows { rows: 0..r, offsets };
            self.open(cx, w, &all, rows, adapter, [gate, up])?;
            return self.close(cx, w, &all, [gate, up], act, adapter, rows);
        }
        let Dispatch { buffers, exchange } = dispatch;
        // The first round is last, so that its products are those that backward finds.
        for round in (0..exchange.begin(cx, tag("rows of experts"), self.index, (offsets, r), buffers)?).rev() {
            exchange.round(cx.dev, round, buffers)?;
            let DispatchBuffers { offsets, sorted, unsorted, wire, held, .. } = buffers;
            let mut trip = exchange.send(cx, tag("dispatch"), rows, wire)?;
            for part in exchange.parts() {
                exchange.arrive(cx, &trip, part, sorted, wire, held)?;
                let of = exchange.part(part, offsets);
                if !of.rows.is_empty() {
                    self.open(cx, w, &of, held, adapter, [gate, up])?;
                    self.close(cx, w, &of, [gate, up], act, adapter, held)?;
                }
                exchange.give_back(cx, tag("combine"), &mut trip, part, unsorted, [held, wire, rows])?;
            }
            exchange.end(cx, trip)?;
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
        let Scratch { h, whole, masked, dh, sparse, .. } = scratch;
        let SparseScratch { rows, row_weights, drows, act, dact, dup, dweights, adapter, dispatch, .. } = sparse;
        let MlpSaved { experts_gate: gate, experts_up: up, routing, .. } = saved;
        self.inputs(cx, routing, h.rows(cx.n), row_weights, rows)?;
        let d_branch = match self.normed {
            true => dh.rows(cx.rows()),
            false => cx.branch_grad(DropoutSite::Mlp, dy, masked)?,
        };
        let d_branch = cx.whole(d_branch, whole)?;
        self.take(cx, routing, d_branch.rows, drows)?;
        cx.release(d_branch)?;
        let (offsets, order, weights) = (routing.offsets.rows(1), routing.order.rows(n), routing.of_rows(n));
        let (tag, mut work) = (|what| Tag::new(what, self.layer), ExpertGrads { gate, up, act, dact, dup, adapter });
        if cx.split.ep.of == 1 {
            let all = HeldRows { rows: 0..r, offsets };
            if !is_whole {
                self.open(cx, w, &all, rows, work.adapter, [work.gate, work.up])?;
            }
            let weighing = Weighing { order: Some(order), weights, dweights: dweights.rows_mut(n) };
            self.close_backward(cx, w, dw, &all, drows, &mut work, weighing)?;
            self.close_grads(cx, w, dw, &all, drows, &mut work)?;
            self.open_backward(cx, w, &all, drows, &mut work)?;
            return self.open_grads(cx, w, dw, &all, rows, &mut work);
        }
        let Dispatch { buffers, exchange } = dispatch;
        dev.take_rows(TakeRows { top_k: 1, order, x: weights, y: buffers.sent_weights.rows_mut(r) })?;
        for round in 0..exchange.resume(self.index) {
            exchange.round(dev, round, buffers)?;
            let DispatchBuffers { offsets, sorted, unsorted, wire, held, dwire, dheld, .. } = buffers;
            let DispatchBuffers { sent_weights, wire_weights, weights, dweights, .. } = buffers;
            // Inputs are needed last, unless products are recomputed from them.
            let opens = !is_whole || round > 0;
            let mut weighed = exchange.send(cx, tag("dispatch weights"), sent_weights, wire_weights)?;
            let early = if opens { Some(exchange.send(cx, tag("dispatch"), rows, wire)?) } else { None };
            let mut grads = exchange.send(cx, tag("dispatch gradients"), drows, dwire)?;
            let inputs = match early {
                Some(inputs) => inputs,
                None => exchange.send(cx, tag("dispatch"), rows, wire)?,
            };
            for part in exchange.parts() {
                let of = exchange.part(part, offsets);
                if opens {
                    exchange.arrive(cx, &inputs, part, sorted, wire, held)?;
                    self.open(cx, w, &of, held, work.adapter, [work.gate, work.up])?;
                }
                exchange.arrive(cx, &weighed, part, sorted, wire_weights, weights)?;
                exchange.arrive(cx, &grads, part, sorted, dwire, dheld)?;
                if !of.rows.is_empty() {
                    let (order, weights, dweights) = (None, weights.band(&of.rows), dweights.band_mut(&of.rows));
                    let weighing = Weighing { order, weights, dweights };
                    self.close_backward(cx, w, dw, &of, dheld, &mut work, weighing)?;
                }
                let back = [&mut *dweights, &mut *wire_weights, &mut *sent_weights];
                exchange.give_back(cx, tag("combine weights"), &mut weighed, part, unsorted, back)?;
            }
            let all = exchange.window(offsets);
            if !all.rows.is_empty() {
                self.close_grads(cx, w, dw, &all, dheld, &mut work)?;
            }
            for part in exchange.parts() {
                let of = exchange.part(part, offsets);
                if !of.rows.is_empty() {
                    self.open_backward(cx, w, &of, dheld, &mut work)?;
                }
                exchange.give_back(cx, tag("combine gradients"), &mut grads, part, unsorted, [dheld, dwire, drows])?;
            }
            if !opens {
                exchange.parts().try_for_each(|part| exchange.arrive(cx, &inputs, part, sorted, wire, held))?;
            }
            if !all.rows.is_empty() {
                self.open_grads(cx, w, dw, &all, held, &mut work)?;
            }
            [inputs, weighed, grads].into_iter().try_for_each(|trip| exchange.end(cx, trip))?;
        }
        let (places, x, y) = (Some(routing.places.rows(n)), buffers.sent_weights.rows(r), dweights.rows_mut(n));
        dev.combine_rows(CombineRows { width: 1, top_k: 1, places, weights: None, x, y, accumulate: false })
    }

    /// Assigns to `rows` the row of `x (N, C)` for each routed row.
    pub(super) fn take(&self, cx: &Cx, routing: &Routing, x: View, rows: &mut Tensor) -> Result<()> {
        let n = cx.tokens();
        let (x, order, y) = (x.slice(0..n * self.width), routing.order.rows(n), rows.rows_mut(n * self.top_k));
        cx.dev.take_rows(TakeRows { top_k: self.top_k, order, x, y })
    }
    /// Assigns the outputs of gate and up.
    fn open(
        &self,
        cx: &Cx,
        w: Weights,
        of: &HeldRows,
        rows: &Tensor,
        adapter: &mut AdapterScratch,
        [gate, up]: [&mut Tensor; 2],
    ) -> Result<()> {
        if of.rows.is_empty() {
            return Ok(());
        }
        let (at, x) = (&of.rows, rows.band(&of.rows));
        self.gate.forward(cx, w, of.held(), x, adapter, gate.band_mut(at))?;
        if let Some(kind) = &self.up {
            kind.forward(cx, w, of.held(), x, adapter, up.band_mut(at))?;
        }
        match &self.clamped {
            Some(clamped) => add_bias(cx, w, &clamped.bias, of, gate),
            None => Ok(()),
        }
    }
    /// Assigns the activations.
    fn activation(&self, cx: &Cx, at: &Range<usize>, [gate, up]: [&Tensor; 2], act: &mut Tensor) -> Result<()> {
        let (gate_up, y) = (gate.band(at), act.band_mut(at));
        match &self.clamped {
            Some(ClampedExperts { clamp, .. }) => cx.dev.clamped_glu(ClampedGlu { clamp: *clamp, gate_up, y }),
            None if self.activation == Activation::ReluSquared => cx.dev.relu_squared(Gelu { x: gate_up, y }),
            None => {
                let op = Glu { gate: gate_up, up: up.band(at), y };
                if self.activation == Activation::GeGlu { cx.dev.geglu(op) } else { cx.dev.swiglu(op) }
            }
        }
    }
    /// Assigns the outputs of the experts.
    #[allow(clippy::too_many_arguments)] // operands, and scratch
    fn close(
        &self,
        cx: &Cx,
        w: Weights,
        of: &HeldRows,
        [gate, up]: [&mut Tensor; 2],
        act: &mut Tensor,
        adapter: &mut AdapterScratch,
        rows: &mut Tensor,
    ) -> Result<()> {
        let at = &of.rows;
        self.activation(cx, at, [gate, up], act)?;
        self.down.forward(cx, w, of.held(), act.band(at), adapter, rows.band_mut(at))?;
        match &self.clamped {
            Some(clamped) if clamped.is_first => add_bias(cx, w, &clamped.down_bias, of, rows),
            _ => Ok(()),
        }
    }

    // Backward has four steps, so that the products of all rows of a window can follow those of its parts.

    /// Assigns the weighted activations and their gradients, from the gradients `dy` of outputs for weights of 1. Adds
    /// to the gradients of down's biases.
    #[allow(clippy::too_many_arguments)] // a forward's operands and their gradients
    fn close_backward(
        &self,
        cx: &Cx,
        w: Weights,
        dw: &mut Grads,
        of: &HeldRows,
        dy: &Tensor,
        work: &mut ExpertGrads,
        Weighing { order, weights, mut dweights }: Weighing,
    ) -> Result<()> {
        let (at, ExpertGrads { gate, up, act, dact, adapter, .. }) = (&of.rows, work);
        self.down.input_grad(cx, w, of.held(), dy.band(at), adapter, dact.band_mut(at), false)?;
        self.activation(cx, at, [gate, up], act)?;
        let (act, dact, sums) = (act.band_mut(at), dact.band_mut(at), dweights.reborrow());
        cx.dev.weigh_rows(WeighRows { order, weights, act, dact, dweights: sums })?;
        let Some(ClampedExperts { down_bias, is_first: true, .. }) = &self.clamped else { return Ok(()) };
        let (bias, stride) = w.strided(down_bias)?;
        let weighed = Some(WeighedBias { bias, order, weights, dweights });
        bias_backward(cx, dw, down_bias, of, (dy.width(), stride), dy, weighed)
    }
    /// Adds to the gradients of down.
    fn close_grads(
        &self,
        cx: &Cx,
        w: Weights,
        dw: &mut Grads,
        of: &HeldRows,
        dy: &Tensor,
        work: &mut ExpertGrads,
    ) -> Result<()> {
        self.down.weight_grad(cx, w, dw, of.held(), work.act.band(&of.rows), dy.band(&of.rows), work.adapter)
    }
    /// The gradients of outputs become those of inputs. The activations are no longer needed, so their buffer holds the
    /// gate's gradients.
    fn open_backward(
        &self,
        cx: &Cx,
        w: Weights,
        of: &HeldRows,
        drows: &mut Tensor,
        work: &mut ExpertGrads,
    ) -> Result<()> {
        let (at, ExpertGrads { gate, up, act, dact, dup, adapter }) = (&of.rows, work);
        if let Some(ClampedExperts { clamp, .. }) = &self.clamped {
            let (clamp, gate_up, dy, dgate_up) = (*clamp, gate.band(at), dact.band(at), dup.band_mut(at));
            cx.dev.clamped_glu_backward(ClampedGluBackward { clamp, gate_up, dy, dgate_up })?;
            return self.gate.input_grad(cx, w, of.held(), dup.band(at), adapter, drows.band_mut(at), false);
        }
        let (x, dy, dx) = (gate.band(at), dact.band(at), act.band_mut(at));
        match self.activation {
            Activation::ReluSquared => cx.dev.relu_squared_backward(GeluBackward { x, dy, dx })?,
            activation => {
                let op = GluBackward { gate: x, up: up.band(at), dy, dgate: dx, dup: dup.band_mut(at) };
                if activation == Activation::GeGlu { cx.dev.geglu_backward(op)? } else { cx.dev.swiglu_backward(op)? }
            }
        }
        for (kind, dy, accumulate) in self.opening(act, dup) {
            kind.input_grad(cx, w, of.held(), dy.band(at), adapter, drows.band_mut(at), accumulate)?;
        }
        Ok(())
    }
    /// Adds to the gradients of gate and up.
    fn open_grads(
        &self,
        cx: &Cx,
        w: Weights,
        dw: &mut Grads,
        of: &HeldRows,
        rows: &Tensor,
        work: &mut ExpertGrads,
    ) -> Result<()> {
        let (at, ExpertGrads { act, dup, adapter, .. }) = (&of.rows, work);
        if let Some(ClampedExperts { bias, .. }) = &self.clamped {
            let (_, stride) = w.strided(bias)?;
            bias_backward(cx, dw, bias, of, (dup.width(), stride), dup, None)?;
            return self.gate.weight_grad(cx, w, dw, of.held(), rows.band(at), dup.band(at), adapter);
        }
        for (kind, dy, _) in self.opening(act, dup) {
            kind.weight_grad(cx, w, dw, of.held(), rows.band(at), dy.band(at), adapter)?;
        }
        Ok(())
    }
    /// Gate and up with the gradients of their outputs, and whether the gradient of their input is added to.
    fn opening<'a>(
        &'a self,
        dgate: &'a Tensor,
        dup: &'a Tensor,
    ) -> impl Iterator<Item = (&'a GroupedLinear, &'a Tensor, bool)> {
        [(&self.gate, dgate, false)].into_iter().chain(self.up.iter().map(move |up| (up, dup, true)))
    }
}

/// Adds the biases of experts to their rows.
fn add_bias(cx: &Cx, w: Weights, kind: &Stride, of: &HeldRows, rows: &mut Tensor) -> Result<()> {
    let (bias, stride) = w.strided(kind)?;
    let places = BiasPlaces { width: rows.width(), stride, offsets: of.offsets };
    cx.dev.expert_bias(ExpertBias { places, bias, y: rows.band_mut(&of.rows) })
}
/// Adds to the gradients of biases, `width` each and `stride` elements apart, and of the weights of their rows.
fn bias_backward(
    cx: &Cx,
    dw: &mut Grads,
    kind: &Stride,
    of: &HeldRows,
    (width, stride): (usize, usize),
    dy: &Tensor,
    weighed: Option<WeighedBias>,
) -> Result<()> {
    let (db, accumulate) = match dw.strided(kind)? {
        Some((db, _, accumulate)) => (Some(db), accumulate),
        None => (None, true),
    };
    let (places, dy) = (BiasPlaces { width, stride, offsets: of.offsets }, dy.band(&of.rows));
    cx.dev.expert_bias_backward(ExpertBiasBackward { places, dy, weighed, db, accumulate })
}
