//! The sparse feed-forward branch: `y = x + dropout(sum over a token's experts of weight * down(silu(gate h) * up h))`,
//! with `h = norm(x)`, and for some families a shared expert that every token uses. Every token reaches all experts
//! that it chose: rows are sorted by expert, so that one call multiplies the rows of all experts. Never drops a token.
//!
//! Saved for backward: routing, and the outputs of gate and up. The gradient of a row's weight follows from the
//! gradient of its activation, so that the outputs of the experts are not needed. The router's logits, probabilities
//! and weights are f32.
use super::context::{Cx, DropoutSite};
use super::layout::Layout;
use super::linear::Linear;
use super::norm::Norm;
use super::saved::{MlpSaved, Routing, Scratch, SparseScratch};
use super::store::{Grads, Stride, Weights};
use crate::base::{Error, Result};
use crate::device::ops::{
    CombineRows, Gemm, GemmShape, Glu, GluBackward, Grouped, GroupedGemm, Route, RouteBackward, RouteLoad, RouteShape,
    Sigmoid, TakeRows, WeighRows,
};
use crate::device::{View, ViewMut};

#[derive(Clone, Debug)]
pub struct SparseBranch {
    pub norm: Norm,
    pub shape: RouteShape,
    /// Index among the sparse blocks.
    pub index: usize,
    /// Segment (E, C).
    pub router: usize,
    /// Segments (F, C), (F, C) and (C, F) of each expert.
    pub gate: Stride,
    pub up: Stride,
    pub down: Stride,
    /// C and F.
    pub width: usize,
    pub ff: usize,
    pub shared: Option<SharedExpert>,
}

/// `sigmoid(h router) * down(silu(gate h) * up h)`.
#[derive(Clone, Debug)]
pub struct SharedExpert {
    pub gate: Linear,
    pub up: Linear,
    pub down: Linear,
    /// Segment (1, C).
    pub router: usize,
}

impl SparseBranch {
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

    /// Assigns `y (R, C)` from `saved.x (R, C)`. Without `y`, computes only what backward needs, and counts no load.
    pub fn forward(
        &self,
        cx: &Cx,
        w: Weights,
        saved: &mut MlpSaved,
        scratch: &mut Scratch,
        y: Option<ViewMut>,
    ) -> Result<()> {
        let (dev, n) = (cx.dev, cx.n);
        let Scratch { h, stats, adapter, sparse, .. } = scratch;
        self.norm.forward(dev, w, saved.x.rows(n), h.rows_mut(n), stats.rows_mut(n))?;
        let h = h.rows(n);
        let Routing { probs, chosen, weights, offsets, order, places } = &mut saved.routing;
        self.router_gemm(cx, w, self.router, h, probs.rows_mut(n))?;
        dev.route(Route {
            shape: self.shape,
            probs: probs.rows_mut(n),
            chosen: chosen.rows_mut(n),
            weights: weights.rows_mut(n),
            offsets: offsets.rows_mut(1),
            order: order.rows_mut(n),
            places: places.rows_mut(n),
        })?;
        let SparseScratch { load, rows, act, shared_act, shared_out, .. } = sparse;
        let top_k = self.shape.top_k;
        let (order, offsets) = (order.rows(n), offsets.rows(1));
        dev.take_rows(TakeRows { top_k, order, x: h, y: rows.rows_mut(n) })?;
        for (kind, out) in [(&self.gate, &mut saved.experts_gate), (&self.up, &mut saved.experts_up)] {
            self.product(cx, w, kind, Grouped::Forward, offsets, rows.rows(n), out.rows_mut(n), false)?;
        }
        if let Some(shared) = &self.shared {
            shared.gate.forward(cx, w, h, adapter, saved.shared_gate.rows_mut(n))?;
            shared.up.forward(cx, w, h, adapter, saved.shared_up.rows_mut(n))?;
            self.router_gemm(cx, w, shared.router, h, saved.shared_weight.rows_mut(n))?;
            dev.sigmoid(Sigmoid { x: saved.shared_weight.rows_mut(n), dy: None })?;
        }
        let Some(mut y) = y else { return Ok(()) };
        let experts = self.shape.experts;
        let first_sum = load.len().saturating_sub(experts);
        let (counts, sums) = load.all_mut().split_at(first_sum);
        let counts = counts.slice(self.index * experts..(self.index + 1) * experts);
        dev.route_load(RouteLoad { probs: probs.rows(n), offsets, counts, sums })?;

        let (gate, up) = (saved.experts_gate.rows(n), saved.experts_up.rows(n));
        dev.swiglu(Glu { gate, up, y: act.rows_mut(n) })?;
        self.product(cx, w, &self.down, Grouped::Forward, offsets, act.rows(n), rows.rows_mut(n), false)?;
        let (width, places, weights) = (self.width, Some(places.rows(n)), Some(weights.rows(n)));
        let x = rows.rows(n);
        dev.combine_rows(CombineRows { width, top_k, places, weights, x, y: y.reborrow(), accumulate: false })?;
        if let Some(shared) = &self.shared {
            let (gate, up) = (saved.shared_gate.rows(n), saved.shared_up.rows(n));
            dev.swiglu(Glu { gate, up, y: shared_act.rows_mut(n) })?;
            shared.down.forward(cx, w, shared_act.rows(n), adapter, shared_out.rows_mut(n))?;
            let (x, weights) = (shared_out.rows(n), Some(saved.shared_weight.rows(n)));
            let y = y.reborrow();
            dev.combine_rows(CombineRows { width, top_k: 1, places: None, weights, x, y, accumulate: true })?;
        }
        cx.drop(DropoutSite::Mlp, y.reborrow())?;
        dev.add(saved.x.rows(n), y)
    }

    /// `dy (R, C)` is the residual's gradient; adds the branch's gradient to it and to the weights' gradients.
    pub fn backward(
        &self,
        cx: &Cx,
        w: Weights,
        dw: &mut Grads,
        saved: &MlpSaved,
        scratch: &mut Scratch,
        dy: ViewMut,
    ) -> Result<()> {
        let (dev, n, top_k, width) = (cx.dev, cx.n, self.shape.top_k, self.width);
        let Scratch { h, stats, dh, masked, adapter, sparse, unused, .. } = scratch;
        let SparseScratch { rows, act, dact, dup, dweights, dlogits, dlogits_cast, .. } = sparse;
        let Routing { probs, chosen, weights, offsets, order, places } = &saved.routing;
        let (offsets, order) = (offsets.rows(1), order.rows(n));
        let d_branch = cx.branch_grad(DropoutSite::Mlp, dy.as_view(), masked)?;

        // Down: the rows' gradients for weights of 1, then what follows from the weights.
        dev.take_rows(TakeRows { top_k, order, x: d_branch, y: rows.rows_mut(n) })?;
        self.product(cx, w, &self.down, Grouped::Input, offsets, rows.rows(n), dact.rows_mut(n), false)?;
        let (gate, up) = (saved.experts_gate.rows(n), saved.experts_up.rows(n));
        dev.swiglu(Glu { gate, up, y: act.rows_mut(n) })?;
        dev.weigh_rows(WeighRows {
            order: Some(order),
            weights: weights.rows(n),
            act: act.rows_mut(n),
            dact: dact.rows_mut(n),
            dweights: dweights.rows_mut(n),
        })?;
        self.weight_grad(cx, dw, &self.down, offsets, rows.rows(n), act.rows(n))?;

        // Gate and up. The activation is no longer needed, so its buffer holds the gate's gradient.
        let (dgate, dup_out) = (act.rows_mut(n), dup.rows_mut(n));
        dev.swiglu_backward(GluBackward { gate, up, dy: dact.rows(n), dgate, dup: dup_out })?;
        let (x, normed, statistics) = (saved.x.rows(n), h.rows_mut(n), stats.rows_mut(n));
        self.norm.forward(dev, w, x, normed, statistics)?;
        dev.take_rows(TakeRows { top_k, order, x: h.rows(n), y: rows.rows_mut(n) })?;
        self.weight_grad(cx, dw, &self.gate, offsets, act.rows(n), rows.rows(n))?;
        self.weight_grad(cx, dw, &self.up, offsets, dup.rows(n), rows.rows(n))?;
        self.product(cx, w, &self.gate, Grouped::Input, offsets, act.rows(n), rows.rows_mut(n), false)?;
        self.product(cx, w, &self.up, Grouped::Input, offsets, dup.rows(n), rows.rows_mut(n), true)?;
        let (x, y) = (rows.rows(n), dh.rows_mut(n));
        let places = Some(places.rows(n));
        dev.combine_rows(CombineRows { width, top_k, places, weights: None, x, y, accumulate: false })?;

        dev.route_backward(RouteBackward {
            shape: self.shape,
            probs: probs.rows(n),
            chosen: chosen.rows(n),
            weights: weights.rows(n),
            dweights: dweights.rows(n),
            balance: cx.balance.ok_or_else(|| Error::op("router", "no gradient of the auxiliary loss"))?,
            dlogits: dlogits.rows_mut(n),
        })?;
        dev.copy(dlogits.rows(n), dlogits_cast.rows_mut(n))?;
        self.router_backward(cx, w, dw, self.router, h.rows(n), dlogits_cast.rows(n), dh.rows_mut(n))?;

        if let Some(shared) = &self.shared {
            let SparseScratch { shared_act, shared_dact, shared_dup, shared_dweight, shared_cast, .. } = sparse;
            let (gate, up) = (saved.shared_gate.rows(n), saved.shared_up.rows(n));
            dev.swiglu(Glu { gate, up, y: shared_act.rows_mut(n) })?;
            shared.down.input_grad(cx, w, d_branch, shared_dact.rows_mut(n), false)?;
            dev.weigh_rows(WeighRows {
                order: None,
                weights: saved.shared_weight.rows(n),
                act: shared_act.rows_mut(n),
                dact: shared_dact.rows_mut(n),
                dweights: shared_dweight.rows_mut(n),
            })?;
            shared.down.weight_grad(cx, dw, shared_act.rows(n), d_branch)?;
            let (dgate, dup) = (shared_act.rows_mut(n), shared_dup.rows_mut(n));
            dev.swiglu_backward(GluBackward { gate, up, dy: shared_dact.rows(n), dgate, dup })?;
            shared.gate.backward(cx, w, dw, h.rows(n), shared_act.rows(n), adapter, dh.rows_mut(n), true)?;
            shared.up.backward(cx, w, dw, h.rows(n), shared_dup.rows(n), adapter, dh.rows_mut(n), true)?;
            let weight = &mut sparse.shared_copy;
            dev.copy(saved.shared_weight.rows(n), weight.rows_mut(n))?;
            dev.sigmoid(Sigmoid { x: weight.rows_mut(n), dy: Some(shared_dweight.rows_mut(n)) })?;
            dev.copy(shared_dweight.rows(n), shared_cast.rows_mut(n))?;
            self.router_backward(cx, w, dw, shared.router, h.rows(n), shared_cast.rows(n), dh.rows_mut(n))?;
        }
        self.norm.backward(dev, w, dw, saved.x.rows(n), stats.rows(n), dh.rows(n), dy, unused.rows_mut(2))
    }

    /// Assigns f32 `logits (N, outputs)` of the matrix in segment `router`.
    fn router_gemm(&self, cx: &Cx, w: Weights, router: usize, h: View, logits: ViewMut) -> Result<()> {
        let shape = GemmShape::nt(cx.n, logits.len() / cx.n, self.width);
        cx.dev.gemm(Gemm { shape, a: h, b: w.get(router), c: logits })
    }
    /// Adds to the gradients of the matrix in segment `router` and of `h`.
    #[allow(clippy::too_many_arguments)] // a forward's operands and their gradients
    fn router_backward(
        &self,
        cx: &Cx,
        w: Weights,
        dw: &mut Grads,
        router: usize,
        h: View,
        dlogits: View,
        dh: ViewMut,
    ) -> Result<()> {
        let outputs = dlogits.len() / cx.n;
        if let Some((dw, accumulate)) = dw.product(router, 0..outputs * self.width)? {
            let shape = GemmShape { accumulate, ..GemmShape::tn(outputs, self.width, cx.n) };
            cx.dev.gemm(Gemm { shape, a: dlogits, b: h, c: dw })?;
        }
        let shape = GemmShape::nn(cx.n, self.width, outputs).accumulate();
        cx.dev.gemm(Gemm { shape, a: dlogits, b: w.get(router), c: dh })
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
