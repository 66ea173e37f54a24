//! The sparse feed-forward branch: `y = x + dropout(sum over a token's experts of weight * down(silu(gate h) * up h))`,
//! with `h = norm(x)`, and for some families a shared expert that every token uses. Every token reaches all experts
//! that it chose. Never drops a token, and never multiplies by an expert's matrix: [`ExpertLayer`] does, between the
//! steps of this file, as a layer of its own.
//!
//! ```text
//! forward     forward (norm, route, shared expert), the experts, combine
//! backward    renorm, the experts, backward (route, shared expert, norm)
//! ```
//!
//! Saved for backward: routing, and what the shared expert multiplies. The router's logits, probabilities and weights
//! are f32.
use super::beside::Beside;
use super::context::{Cx, DropoutSite};
use super::expert_layer::ExpertLayer;
use super::linear::Linear;
use super::norm::Norm;
use super::saved::{MlpSaved, Routing, Scratch};
use super::sparse_buffers::SparseScratch;
use super::store::{Grads, Weights};
use super::tensor::Tensor;
use crate::base::{Error, Result};
use crate::device::ops::{
    Bias, BiasBackward, CombineRows, Gelu, GeluBackward, Gemm, GemmShape, Glu, GluBackward, Route, RouteBackward,
    RouteLoad, RouteRule, RouteScored, RouteScoredBackward, RouteShape, ScaleChosen, ScaleChosenBackward, Sigmoid,
    WeighRows,
};
use crate::device::{View, ViewMut};

#[derive(Clone, Debug)]
pub struct SparseBranch {
    pub norm: Norm,
    /// Whether the columns of all experts are sharded over tp.
    pub cut: bool,
    pub shape: RouteShape,
    /// Segment (E, C).
    pub router: usize,
    /// Segment (E): added to the router's logits.
    pub router_bias: Option<usize>,
    /// How experts are chosen if not by their probabilities, and the segment (E) of the bias of the choice.
    pub rule: Option<(RouteRule, Option<usize>)>,
    pub experts: ExpertLayer,
    /// C
    pub width: usize,
    pub shared: Option<SharedExpert>,
    pub beside: Option<Beside>,
    /// Normalizes the output of the experts, the shared one included, before it is added to the residual.
    pub post: Option<Norm>,
}

/// `sigmoid(h router) * down(silu(gate h) * up h)`, or `down(max(up h, 0)^2)` without a gate.
#[derive(Clone, Debug)]
pub struct SharedExpert {
    pub gate: Option<Linear>,
    pub up: Linear,
    pub down: Linear,
    /// Segment (1, C); without it, the output is added as it is.
    pub router: Option<usize>,
}

impl SharedExpert {
    /// Assigns the activation.
    fn activation(&self, cx: &Cx, saved: &MlpSaved, y: ViewMut) -> Result<()> {
        let (n, up) = (cx.tokens(), saved.shared_up.rows(cx.tokens()));
        match self.gate {
            Some(_) => cx.dev.swiglu(Glu { gate: saved.shared_gate.rows(n), up, y }),
            None => cx.dev.relu_squared(Gelu { x: up, y }),
        }
    }
    /// Assigns the gradients of the outputs of gate and up from that of the activation.
    fn activation_backward(&self, cx: &Cx, saved: &MlpSaved, dy: View, dgate: ViewMut, dup: ViewMut) -> Result<()> {
        let (n, up) = (cx.tokens(), saved.shared_up.rows(cx.tokens()));
        match self.gate {
            Some(_) => cx.dev.swiglu_backward(GluBackward { gate: saved.shared_gate.rows(n), up, dy, dgate, dup }),
            None => cx.dev.relu_squared_backward(GeluBackward { x: up, dy, dx: dup }),
        }
    }
}

impl SparseBranch {
    /// Assigns `h` of scratch and the routing from `saved.x (R, C)`, or from `beside` if it is given: then the output
    /// is added to `saved.x`. With `output`, also the shared expert's output and the load; otherwise only what
    /// backward needs.
    pub fn forward(
        &self,
        cx: &Cx,
        w: Weights,
        beside: Option<View>,
        saved: &mut MlpSaved,
        scratch: &mut Scratch,
        output: bool,
    ) -> Result<()> {
        let (dev, n) = (cx.dev, cx.tokens());
        match &self.beside {
            Some(beside) => beside.forward(cx, w, saved, scratch)?,
            None => self.renorm(cx, w, beside.unwrap_or(saved.x.rows(cx.rows())), scratch)?,
        }
        let Scratch { h, adapter, sparse, .. } = scratch;
        let h = h.rows(n);
        let Routing { probs, chosen, weights, scaled, offsets, order, places } = &mut saved.routing;
        self.router_gemm(cx, w, self.router, h, probs.rows_mut(n))?;
        if let Some(beside) = &self.beside {
            dev.scale(beside.logit_scale, probs.rows_mut(n))?;
        }
        if let Some(bias) = self.router_bias {
            dev.copy(w.get(bias), sparse.router_bias.rows_mut(1))?;
            dev.bias(Bias { bias: sparse.router_bias.rows(1), y: probs.rows_mut(n) })?;
        }
        let route = Route {
            shape: self.shape,
            probs: probs.rows_mut(n),
            chosen: chosen.rows_mut(n),
            weights: weights.rows_mut(n),
            offsets: offsets.rows_mut(1),
            order: order.rows_mut(n),
            places: places.rows_mut(n),
        };
        match self.rule {
            Some((rule, bias)) => dev.route_scored(RouteScored { rule, bias: bias.map(|bias| w.get(bias)), route })?,
            None => dev.route(route)?,
        }
        if let Some(beside) = &self.beside {
            let (chosen, factors, weights) = (chosen.rows(n), w.get(beside.factors), weights.rows(n));
            dev.scale_chosen(ScaleChosen { chosen, factors, weights, y: scaled.rows_mut(n) })?;
        }
        if self.experts.weighs_inputs {
            // Outputs have weights of 1, twice the sigmoid of 0.
            dev.zero(scaled.rows_mut(n))?;
            dev.sigmoid(Sigmoid { x: scaled.rows_mut(n), dy: None })?;
            dev.scale(2.0, scaled.rows_mut(n))?;
        }
        let SparseScratch { load, shared_act, shared_out, .. } = sparse;
        if let Some(shared) = &self.shared {
            if let Some(gate) = &shared.gate {
                gate.forward(cx, w, h, adapter, saved.shared_gate.rows_mut(n))?;
            }
            shared.up.forward(cx, w, h, adapter, saved.shared_up.rows_mut(n))?;
            if let Some(router) = shared.router {
                self.router_gemm(cx, w, router, h, saved.shared_weight.rows_mut(n))?;
                dev.sigmoid(Sigmoid { x: saved.shared_weight.rows_mut(n), dy: None })?;
            }
        }
        // Backward of a norm needs its input.
        let summed = output || self.post.is_some();
        if output {
            let experts = self.shape.experts;
            let first_sum = load.len().saturating_sub(experts);
            let (counts, sums) = load.all_mut().split_at(first_sum);
            let counts = counts.slice(self.experts.index * experts..(self.experts.index + 1) * experts);
            dev.route_load(RouteLoad { probs: probs.rows(n), offsets: offsets.rows(1), counts, sums })?;
        }
        if let Some(shared) = self.shared.as_ref().filter(|_| summed) {
            shared.activation(cx, saved, shared_act.rows_mut(n))?;
            shared.down.forward(cx, w, shared_act.rows(n), adapter, shared_out.rows_mut(n))?;
        }
        if self.beside.is_some() { self.renorm(cx, w, saved.x.rows(cx.rows()), scratch) } else { Ok(()) }
    }

    /// After the experts: assigns `y (R, C)`.
    pub fn combine(&self, cx: &Cx, saved: &MlpSaved, scratch: &mut Scratch, mut y: ViewMut) -> Result<()> {
        self.output(cx, (&saved.routing, &saved.shared_weight), scratch, y.reborrow())?;
        cx.leave(DropoutSite::Mlp, y.reborrow())?;
        cx.dev.add(saved.x.rows(cx.rows()), y)
    }
    /// Whether norms follow the experts: then the block goes on after them.
    pub fn goes_on(&self) -> bool {
        self.beside.is_some() || self.post.is_some()
    }
    /// [`SparseBranch::combine`] of a block that goes on. Without `y`, only what backward needs.
    pub fn combine_normed(
        &self,
        cx: &Cx,
        w: Weights,
        saved: &mut MlpSaved,
        scratch: &mut Scratch,
        y: Option<ViewMut>,
    ) -> Result<()> {
        let out = saved.experts_out.rows_mut(cx.rows());
        self.output(cx, (&saved.routing, &saved.shared_weight), scratch, out)?;
        let (rows, Some(y)) = (cx.rows(), y) else { return Ok(()) };
        if let Some(beside) = &self.beside {
            return beside.finish(cx, w, saved, scratch, y);
        }
        let (post, x) = (self.post.unwrap_or(Norm::Absent), saved.experts_out.rows(rows));
        post.onto_residual(cx, w, x, DropoutSite::Mlp, saved.x.rows(rows), y, scratch.stats.rows_mut(rows))
    }
    /// The backward pass of [`SparseBranch::combine_normed`]: from the residual's gradient `dy`, assigns that of the
    /// experts' output to `dh` of scratch.
    pub fn normed_backward(
        &self,
        cx: &Cx,
        w: Weights,
        dw: &mut Grads,
        saved: &MlpSaved,
        scratch: &mut Scratch,
        dy: View,
    ) -> Result<()> {
        if let Some(beside) = &self.beside {
            return beside.open_backward(cx, w, dw, saved, scratch, dy);
        }
        let Some(post) = &self.post else { return Ok(()) };
        let (rows, Scratch { stats, dh, masked, unused, .. }) = (cx.rows(), scratch);
        let d_branch = cx.branch_grad(DropoutSite::Mlp, dy, masked)?;
        let x = saved.experts_out.rows(rows);
        post.branch_backward(cx, w, dw, x, d_branch, [stats, dh], unused.rows_mut(2))?;
        Ok(())
    }
    /// Assigns the output of the experts, the shared one included.
    fn output(
        &self,
        cx: &Cx,
        (routing, shared_weight): (&Routing, &Tensor),
        scratch: &mut Scratch,
        y: ViewMut,
    ) -> Result<()> {
        let (dev, n, width, top_k) = (cx.dev, cx.tokens(), self.width, self.shape.top_k);
        let Scratch { parts, sparse, .. } = scratch;
        cx.sum(self.cut, parts, y, |y| {
            let mut y = self.unpadded(cx, y)?;
            let (places, weights) = (Some(routing.places.rows(n)), Some(routing.of_rows(n)));
            let x = sparse.rows.rows(n * top_k);
            dev.combine_rows(CombineRows { width, top_k, places, weights, x, y: y.reborrow(), accumulate: false })?;
            let Some(shared) = &self.shared else { return Ok(()) };
            let (x, weights) = (sparse.shared_out.rows(n), shared.router.map(|_| shared_weight.rows(n)));
            dev.combine_rows(CombineRows { width, top_k: 1, places: None, weights, x, y, accumulate: true })
        })
    }
    /// The rows of `x (N, C)` that are tokens. The others, which use no expert, become zero.
    fn unpadded<'a>(&self, cx: &Cx, x: ViewMut<'a>) -> Result<ViewMut<'a>> {
        let (x, padding) = x.split_at(cx.tokens() * self.width);
        cx.dev.zero(padding)?;
        Ok(x)
    }

    /// Assigns the statistics of scratch from the branch's input `x (R, C)`, and its `h (N, C)`.
    pub fn renorm(&self, cx: &Cx, w: Weights, x: View, scratch: &mut Scratch) -> Result<()> {
        let (rows, Scratch { h, stats, whole, .. }) = (cx.rows(), scratch);
        self.norm.forward(cx, w, x, h.rows_mut(rows), stats.rows_mut(rows))?;
        cx.make_whole(h, whole)
    }

    /// `dy (R, C)` is the residual's gradient; adds the branch's gradient to it and to the weights' gradients. `beside`
    /// as in forward.
    #[allow(clippy::too_many_arguments)] // a forward's operands and their gradients
    pub fn backward(
        &self,
        cx: &Cx,
        w: Weights,
        dw: &mut Grads,
        beside: Option<View>,
        saved: &MlpSaved,
        scratch: &mut Scratch,
        mut dy: ViewMut,
    ) -> Result<()> {
        let (dev, n, top_k, width) = (cx.dev, cx.tokens(), self.shape.top_k, self.width);
        let (rows, of_tokens) = (cx.rows(), 0..n * width);
        let Scratch { h, stats, whole, parts, dh, masked, adapter, sparse, unused, .. } = scratch;
        let Routing { probs, chosen, weights, places, .. } = &saved.routing;
        if let Some(shared) = &self.shared {
            let d_branch = match self.post {
                Some(_) => dh.rows(rows),
                None => cx.branch_grad(DropoutSite::Mlp, dy.as_view(), masked)?,
            };
            let d_branch = cx.whole(d_branch, whole)?;
            let dy = d_branch.rows.slice(of_tokens.clone());
            let SparseScratch { shared_act, shared_dact, shared_dup, shared_dweight, .. } = sparse;
            shared.activation(cx, saved, shared_act.rows_mut(n))?;
            shared.down.input_grad(cx, w, dy, adapter, shared_dact.rows_mut(n), false)?;
            if shared.router.is_some() {
                dev.weigh_rows(WeighRows {
                    order: None,
                    weights: saved.shared_weight.rows(n),
                    act: shared_act.rows_mut(n),
                    dact: shared_dact.rows_mut(n),
                    dweights: shared_dweight.rows_mut(n),
                })?;
            }
            shared.down.weight_grad(cx, w, dw, shared_act.rows(n), dy, adapter)?;
            cx.release(d_branch)?;
            let (dgate, dup) = (shared_act.rows_mut(n), shared_dup.rows_mut(n));
            shared.activation_backward(cx, saved, shared_dact.rows(n), dgate, dup)?;
        }
        if self.experts.weighs_inputs {
            self.experts.inputs_backward(cx, &saved.routing, h.rows(n), sparse)?;
        }
        let SparseScratch { drows, dweights, dlogits, dlogits_cast, .. } = sparse;
        if let Some(Beside { factors, .. }) = self.beside {
            let (chosen, weights, dy) = (chosen.rows(n), weights.rows(n), dweights.rows_mut(n));
            let (factors, dfactors) = (w.get(factors), dw.get(factors)?);
            dev.scale_chosen_backward(ScaleChosenBackward { chosen, factors, weights, dy, dfactors })?;
        }
        let route = RouteBackward {
            shape: self.shape,
            probs: probs.rows(n),
            chosen: chosen.rows(n),
            weights: weights.rows(n),
            dweights: dweights.rows(n),
            balance: cx.balance.ok_or_else(|| Error::op("router", "no gradient of the auxiliary loss"))?,
            dlogits: dlogits.rows_mut(n),
        };
        match self.rule {
            Some((rule, _)) => dev.route_scored_backward(RouteScoredBackward { rule, route })?,
            None => dev.route_backward(route)?,
        }
        if let Some(db) = self.router_bias.map(|bias| dw.get(bias)).transpose()?.flatten() {
            dev.bias_backward(BiasBackward { dy: dlogits.rows(n), db })?;
        }
        if let Some(beside) = &self.beside {
            dev.scale(beside.logit_scale, dlogits.rows_mut(n))?;
        }
        dev.copy(dlogits.rows(n), dlogits_cast.rows_mut(n))?;
        let h = h.rows(n);
        cx.sum(self.cut, parts, dh.rows_mut(rows), |dh| {
            let mut dh = self.unpadded(cx, dh)?;
            let (x, places) = (drows.rows(n * top_k), Some(places.rows(n)));
            let y = dh.reborrow();
            dev.combine_rows(CombineRows { width, top_k, places, weights: None, x, y, accumulate: false })?;
            if self.beside.is_none() {
                self.router_backward(cx, w, dw, self.router, h, dlogits_cast.rows(n), dh.reborrow())?;
            }
            let Some(shared) = &self.shared else { return Ok(()) };
            let SparseScratch { shared_act, shared_dup, shared_dweight, shared_cast, shared_copy, .. } = sparse;
            if let Some(gate) = &shared.gate {
                gate.backward(cx, w, dw, h, shared_act.rows(n), adapter, dh.reborrow(), true)?;
            }
            shared.up.backward(cx, w, dw, h, shared_dup.rows(n), adapter, dh.reborrow(), true)?;
            let Some(router) = shared.router else { return Ok(()) };
            dev.copy(saved.shared_weight.rows(n), shared_copy.rows_mut(n))?;
            dev.sigmoid(Sigmoid { x: shared_copy.rows_mut(n), dy: Some(shared_dweight.rows_mut(n)) })?;
            dev.copy(shared_dweight.rows(n), shared_cast.rows_mut(n))?;
            self.router_backward(cx, w, dw, router, h, shared_cast.rows(n), dh)
        })?;
        let x = beside.unwrap_or(saved.x.rows(rows));
        self.norm.backward(cx, w, dw, x, stats.rows(rows), dh.rows(rows), dy.reborrow(), unused.rows_mut(2))?;
        let Some(beside) = &self.beside else { return Ok(()) };
        beside.router_input(cx, w, saved, scratch)?;
        let Scratch { h, stats, parts, dh, sparse, unused, .. } = scratch;
        cx.sum(self.cut, parts, dh.rows_mut(rows), |mut dh| {
            dev.zero(dh.reborrow())?;
            let (h, dlogits, dh) = (h.rows(n), sparse.dlogits_cast.rows(n), dh.slice(of_tokens));
            self.router_backward(cx, w, dw, self.router, h, dlogits, dh)
        })?;
        let (stats, dh, unused) = (stats.rows(rows), dh.rows(rows), unused.rows_mut(2));
        beside.router_norm.backward(cx, w, dw, x, stats, dh, dy.reborrow(), unused)?;
        beside.dense.backward(cx, w, dw, None, saved, scratch, dy)
    }

    /// Assigns f32 `logits (N, outputs)` of the matrix in segment `router`.
    fn router_gemm(&self, cx: &Cx, w: Weights, router: usize, h: View, logits: ViewMut) -> Result<()> {
        let b = w.get(router);
        let shape = GemmShape::nt(h.len() / self.width, b.len() / self.width, self.width);
        cx.dev.gemm(Gemm { shape, a: h, b, c: logits })
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
        let b = w.get(router);
        let (n, outputs) = (h.len() / self.width, b.len() / self.width);
        if let Some((dw, accumulate)) = dw.product(router, 0..outputs * self.width)? {
            let shape = GemmShape { accumulate, ..GemmShape::tn(outputs, self.width, n) };
            cx.dev.gemm(Gemm { shape, a: dlogits, b: h, c: dw })?;
        }
        let shape = GemmShape::nn(n, self.width, outputs).accumulate();
        cx.dev.gemm(Gemm { shape, a: dlogits, b, c: dh })
    }
}
