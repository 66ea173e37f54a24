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
use super::layout::Layout;
use super::saved::{MlpSaved, Routing, Scratch, SparseScratch};
use super::store::{Grads, Stride, Weights};
use super::tensor::Tensor;
use crate::base::{Error, Result};
use crate::comm::Tag;
use crate::device::ops::{CombineRows, Glu, GluBackward, Grouped, GroupedGemm, TakeRows, WeighRows};
use crate::device::{View, ViewMut};

#[derive(Clone, Debug)]
pub struct ExpertLayer {
    /// Where the store has them.
    pub layer: usize,
    pub top_k: usize,
    /// Segments (F, C), (F, C) and (C, F) of each expert of this rank.
    pub gate: Stride,
    pub up: Stride,
    pub down: Stride,
    /// C and F.
    pub width: usize,
    pub ff: usize,
}

/// Rows on this rank, and the first row of each of its experts.
type Held<'a> = (usize, View<'a>);

/// The weights of rows, as in [`WeighRows`].
struct Weighing<'a> {
    order: Option<View<'a>>,
    weights: View<'a>,
    dweights: ViewMut<'a>,
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
        let r = cx.tokens() * self.top_k;
        let Scratch { h, sparse: SparseScratch { rows, act, dispatch, .. }, .. } = scratch;
        let MlpSaved { experts_gate: gate, experts_up: up, routing, .. } = saved;
        self.take(cx, routing, h.rows(cx.n), rows)?;
        let (offsets, tag) = (routing.offsets.rows(1), |what| Tag::new(what, self.layer));
        if cx.split.ep.of == 1 {
            self.open(cx, w, (r, offsets), rows, [gate, up])?;
            return self.close(cx, w, (r, offsets), [gate, up], act, rows);
        }
        let Dispatch { buffers, exchange } = dispatch;
        // The first round is last, so that its products are those that backward finds.
        for round in (0..exchange.begin(cx, tag("rows of experts"), offsets, r, buffers)?).rev() {
            exchange.round(cx.dev, round, buffers)?;
            let DispatchBuffers { offsets, sorted, unsorted, wire, held, .. } = buffers;
            exchange.send(cx, tag("dispatch"), rows, wire, sorted, held)?;
            if exchange.held > 0 {
                let of = (exchange.held, offsets.rows(1));
                self.open(cx, w, of, held, [gate, up])?;
                self.close(cx, w, of, [gate, up], act, held)?;
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
        let SparseScratch { rows, drows, act, dact, dup, dweights, dispatch, .. } = sparse;
        let MlpSaved { experts_gate: gate, experts_up: up, routing, .. } = saved;
        self.take(cx, routing, h.rows(cx.n), rows)?;
        let d_branch = cx.whole(cx.branch_grad(DropoutSite::Mlp, dy, masked)?, whole)?;
        self.take(cx, routing, d_branch.rows, drows)?;
        cx.release(d_branch)?;
        let (offsets, order, weights) = (routing.offsets.rows(1), routing.order.rows(n), routing.weights.rows(n));
        let tag = |what| Tag::new(what, self.layer);
        if cx.split.ep.of == 1 {
            if !is_whole {
                self.open(cx, w, (r, offsets), rows, [gate, up])?;
            }
            let weighing = Weighing { order: Some(order), weights, dweights: dweights.rows_mut(n) };
            return self.differentiate(cx, w, dw, (r, offsets), (rows, drows), [gate, up], [act, dact, dup], weighing);
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
                    self.open(cx, w, of, held, [gate, up])?;
                }
                let (weights, dweights) = (weights.rows(exchange.held), dweights.rows_mut(exchange.held));
                let weighing = Weighing { order: None, weights, dweights };
                self.differentiate(cx, w, dw, of, (held, dheld), [gate, up], [act, dact, dup], weighing)?;
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
    fn open(&self, cx: &Cx, w: Weights, of: Held, rows: &Tensor, [gate, up]: [&mut Tensor; 2]) -> Result<()> {
        for (kind, out) in [(&self.gate, gate), (&self.up, up)] {
            self.product(cx, w, kind, Grouped::Forward, of.1, rows.rows(of.0), out.rows_mut(of.0), false)?;
        }
        Ok(())
    }
    /// Assigns the outputs of the experts.
    fn close(
        &self,
        cx: &Cx,
        w: Weights,
        (r, offsets): Held,
        [gate, up]: [&mut Tensor; 2],
        act: &mut Tensor,
        rows: &mut Tensor,
    ) -> Result<()> {
        cx.dev.swiglu(Glu { gate: gate.rows(r), up: up.rows(r), y: act.rows_mut(r) })?;
        self.product(cx, w, &self.down, Grouped::Forward, offsets, act.rows(r), rows.rows_mut(r), false)
    }
    /// The gradients of outputs become those of inputs, in `drows`.
    #[allow(clippy::too_many_arguments)] // a forward's operands and their gradients
    fn differentiate(
        &self,
        cx: &Cx,
        w: Weights,
        dw: &mut Grads,
        (r, offsets): Held,
        (rows, drows): (&Tensor, &mut Tensor),
        [gate, up]: [&mut Tensor; 2],
        [act, dact, dup]: [&mut Tensor; 3],
        Weighing { order, weights, dweights }: Weighing,
    ) -> Result<()> {
        // Down: the rows' gradients for weights of 1, then what follows from the weights.
        self.product(cx, w, &self.down, Grouped::Input, offsets, drows.rows(r), dact.rows_mut(r), false)?;
        let (gate, up) = (gate.rows(r), up.rows(r));
        cx.dev.swiglu(Glu { gate, up, y: act.rows_mut(r) })?;
        let (act_rows, dact_rows) = (act.rows_mut(r), dact.rows_mut(r));
        cx.dev.weigh_rows(WeighRows { order, weights, act: act_rows, dact: dact_rows, dweights })?;
        self.weight_grad(cx, dw, &self.down, offsets, drows.rows(r), act.rows(r))?;

        // Gate and up. The activation is no longer needed, so its buffer holds the gate's gradient.
        let (dgate, dup_out) = (act.rows_mut(r), dup.rows_mut(r));
        cx.dev.swiglu_backward(GluBackward { gate, up, dy: dact.rows(r), dgate, dup: dup_out })?;
        self.weight_grad(cx, dw, &self.gate, offsets, act.rows(r), rows.rows(r))?;
        self.weight_grad(cx, dw, &self.up, offsets, dup.rows(r), rows.rows(r))?;
        self.product(cx, w, &self.gate, Grouped::Input, offsets, act.rows(r), drows.rows_mut(r), false)?;
        self.product(cx, w, &self.up, Grouped::Input, offsets, dup.rows(r), drows.rows_mut(r), true)
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
        // With ep a group's rows are those of several ranks, which must change no bit; a generated token is alone.
        let alike = cx.past.is_none();
        cx.dev.grouped_gemm(GroupedGemm { kind: form, n, k, offsets, a, b, c, stride, accumulate, alike })
    }
    /// Adds `dyᵀ x` of each expert's rows to the gradients of its matrix of `kind`, unless it is frozen.
    fn weight_grad(&self, cx: &Cx, dw: &mut Grads, kind: &Stride, offsets: View, dy: View, x: View) -> Result<()> {
        let Some((c, stride, accumulate)) = dw.strided(kind)? else { return Ok(()) };
        let (n, k) = if kind.first == self.down.first { (self.width, self.ff) } else { (self.ff, self.width) };
        let (kind, a, b, alike) = (Grouped::Weight, dy, x, false);
        cx.dev.grouped_gemm(GroupedGemm { kind, n, k, offsets, a, b, c, stride, accumulate, alike })
    }
}
