//! The feed-forward branch: `y = x + dropout(post(down(activation(norm(x)))))`. Never saves the activation: backward
//! recomputes it from the saved products.
use super::context::{Cx, DropoutSite};
use super::linear::Linear;
use super::norm::Norm;
use super::saved::{MlpSaved, Scratch};
use super::spec::Activation;
use super::store::{Grads, Weights};
use super::tensor::Tensor;

use crate::base::{Error, Result};
use crate::device::ops::{
    Clamp, ClampBackward, Gelu, GeluBackward, Glu, GluBackward, Xielu, XieluBackward, XieluCurve, XieluGrads,
};
use crate::device::{View, ViewMut};

#[derive(Clone, Debug)]
pub struct MlpBranch {
    pub norm: Norm,
    /// Whether gate and up are sharded over tp, by columns.
    pub cut: bool,
    pub activation: Activation,
    /// Present in SwiGLU and GeGLU (Shazeer 2020).
    pub gate: Option<Linear>,
    /// A factor of the gate.
    pub gate_factor: f32,
    pub up: Linear,
    pub down: Linear,
    /// Segments (1) of xIELU: alpha_p, alpha_n, beta and eps.
    pub curve: Option<[usize; 4]>,
    /// Normalizes the branch's output before it is added to the residual.
    pub post: Option<Norm>,
    /// It is one addend of several: the gradient of their sum is in `beside` of scratch.
    pub summed: bool,
}

impl MlpBranch {
    /// Gate, up and down.
    pub(super) fn linears(&mut self) -> [Option<&mut Linear>; 3] {
        [self.gate.as_mut(), Some(&mut self.up), Some(&mut self.down)]
    }
    /// Assigns `y (R, C)` from `saved.x (R, C)`: this rank's rows of the residual stream; or, if `beside` is given, the
    /// branch reads that instead, and its output is added to `saved.x`. Without `y`, computes only what backward needs.
    pub fn forward(
        &self,
        cx: &Cx,
        w: Weights,
        beside: Option<View>,
        saved: &mut MlpSaved,
        scratch: &mut Scratch,
        y: Option<ViewMut>,
    ) -> Result<()> {
        let (n, rows) = (cx.n, cx.rows());
        self.fit(scratch);
        [&mut saved.gate, &mut saved.up].into_iter().for_each(|tensor| tensor.fit(self.up.outputs()));
        let x = beside.unwrap_or(saved.x.rows(rows));
        self.norm.forward(cx, w, x, scratch.h.rows_mut(rows), scratch.stats.rows_mut(rows))?;
        let h = cx.whole(scratch.h.rows(rows), &mut scratch.whole)?;
        if let Some(gate) = &self.gate {
            gate.forward(cx, w, h.rows, &mut scratch.adapter, saved.gate.rows_mut(n))?;
            self.scale_gate(cx, &mut saved.gate)?;
        }
        let further = y.is_some() || self.post.is_some();
        let fused = further && self.activation == Activation::Gelu;
        match fused {
            true => {
                let act = scratch.act.rows_mut(n);
                self.up.forward_gelu(cx, w, h.rows, &mut scratch.adapter, saved.up.rows_mut(n), act)?
            }
            false => self.up.forward(cx, w, h.rows, &mut scratch.adapter, saved.up.rows_mut(n))?,
        }
        cx.release(h)?;
        if !further {
            return Ok(());
        }
        if !fused {
            self.activation(cx, w, saved, scratch.act.rows_mut(n))?;
        }
        let Scratch { act, parts, adapter, stats, .. } = scratch;
        let (act, x, summed) = (act.rows(n), saved.x.rows(rows), (self.cut, parts));
        let Some(norm) = &self.post else {
            let Some(y) = y else { return Ok(()) };
            return self.down.onto_residual(cx, w, act, adapter, summed, DropoutSite::Mlp, x, y);
        };
        self.down.summed(cx, w, act, adapter, summed, saved.branch.rows_mut(rows))?;
        let Some(y) = y else { return Ok(()) };
        norm.onto_residual(cx, w, saved.branch.rows(rows), DropoutSite::Mlp, x, y, stats.rows_mut(rows))
    }

    /// Blocks may differ in the width of this branch, and share buffers.
    fn fit(&self, scratch: &mut Scratch) {
        let Scratch { act, dact, dup, .. } = scratch;
        [act, dact, dup].into_iter().for_each(|tensor| tensor.fit(self.up.outputs()));
    }

    /// Multiplies the gate, or its gradient, by its factor.
    fn scale_gate(&self, cx: &Cx, gate: &mut Tensor) -> Result<()> {
        if self.gate_factor == 1.0 { Ok(()) } else { cx.dev.scale(self.gate_factor, gate.rows_mut(cx.n)) }
    }
    fn curve<'a>(&self, w: Weights<'a>) -> Result<XieluCurve<'a>> {
        let [alpha_p, alpha_n, beta, eps] =
            self.curve.ok_or_else(|| Error::op(Xielu::OP, "no numbers"))?.map(|segment| w.get(segment));
        Ok(XieluCurve { alpha_p, alpha_n, beta, eps })
    }
    fn activation(&self, cx: &Cx, w: Weights, saved: &MlpSaved, mut act: ViewMut) -> Result<()> {
        let (dev, gate, up) = (cx.dev, saved.gate.rows(cx.n), saved.up.rows(cx.n));
        match self.activation {
            Activation::SwiGlu => dev.swiglu(Glu { gate, up, y: act }),
            Activation::GeGlu => dev.geglu(Glu { gate, up, y: act }),
            Activation::Gelu => dev.gelu(Gelu { x: up, y: act }),
            Activation::GeluExact => dev.gelu_exact(Gelu { x: up, y: act }),
            Activation::Relu => {
                dev.copy(up, act.reborrow())?;
                dev.clamp(Clamp { limits: Clamp::RELU, x: act })
            }
            Activation::ReluSquared => dev.relu_squared(Gelu { x: up, y: act }),
            Activation::Xielu => dev.xielu(Xielu { curve: self.curve(w)?, x: up, y: act }),
        }
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
        dy: ViewMut,
    ) -> Result<()> {
        let (dev, n, rows) = (cx.dev, cx.n, cx.rows());
        self.fit(scratch);
        let (x, gate, up) = (beside.unwrap_or(saved.x.rows(rows)), saved.gate.rows(n), saved.up.rows(n));
        let mut d_branch = match self.summed {
            true => scratch.beside.rows(rows),
            false => cx.branch_grad(DropoutSite::Mlp, dy.as_view(), &mut scratch.masked)?,
        };
        if let Some(norm) = &self.post {
            let Scratch { stats, dh, unused, .. } = scratch;
            d_branch =
                norm.branch_backward(cx, w, dw, saved.branch.rows(rows), d_branch, [stats, dh], unused.rows_mut(2))?;
        }
        self.activation(cx, w, saved, scratch.act.rows_mut(n))?;
        let d_branch = cx.whole(d_branch, &mut scratch.whole)?;
        let adapter = &mut scratch.adapter;
        let (act, dact) = (scratch.act.rows(n), scratch.dact.rows_mut(n));
        match self.activation {
            Activation::Gelu => {
                self.down.backward_gelu(cx, w, dw, act, d_branch.rows, adapter, up, dact, scratch.dup.rows_mut(n))?
            }
            _ => self.down.backward(cx, w, dw, act, d_branch.rows, adapter, dact, false)?,
        }
        cx.release(d_branch)?;

        self.norm.forward(cx, w, x, scratch.h.rows_mut(rows), scratch.stats.rows_mut(rows))?;
        // The activation is no longer needed, so its buffer holds the gate's gradient.
        let (dact, dgate, dup) = (scratch.dact.rows(n), scratch.act.rows_mut(n), scratch.dup.rows_mut(n));
        match self.activation {
            Activation::SwiGlu => dev.swiglu_backward(GluBackward { gate, up, dy: dact, dgate, dup })?,
            Activation::GeGlu => dev.geglu_backward(GluBackward { gate, up, dy: dact, dgate, dup })?,
            Activation::GeluExact => dev.gelu_exact_backward(GeluBackward { x: up, dy: dact, dx: dup })?,
            Activation::Relu => {
                let mut dup = dup;
                dev.copy(dact, dup.reborrow())?;
                dev.clamp_backward(ClampBackward { limits: Clamp::RELU, x: up, dx: dup })?
            }
            Activation::ReluSquared => dev.relu_squared_backward(GeluBackward { x: up, dy: dact, dx: dup })?,
            Activation::Xielu => {
                let curve = self.curve(w)?;
                dev.xielu_backward(XieluBackward { curve, x: up, dy: dact, dx: dup })?;
                let [p, n, ..] = self.curve.unwrap_or_default();
                let (dalpha_p, dalpha_n) = dw.pair(p, n, scratch.unused.rows_mut(2))?;
                dev.xielu_grads(XieluGrads { curve, x: up, dy: dact, dalpha_p, dalpha_n })?
            }
            Activation::Gelu => {}
        }
        let Scratch { h, stats, whole, parts, act, dup, dh, adapter, unused, .. } = scratch;
        let h = cx.whole(h.rows(rows), whole)?;
        cx.sum(self.cut, parts, dh.rows_mut(rows), |mut dh| {
            if let Some(gate) = &self.gate {
                self.scale_gate(cx, act)?;
                gate.backward(cx, w, dw, h.rows, act.rows(n), adapter, dh.reborrow(), false)?;
            }
            self.up.backward(cx, w, dw, h.rows, dup.rows(n), adapter, dh, self.gate.is_some())
        })?;
        cx.release(h)?;
        self.norm.backward(cx, w, dw, x, stats.rows(rows), dh.rows(rows), dy, unused.rows_mut(2))
    }
}
