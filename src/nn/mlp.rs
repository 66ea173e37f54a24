//! The feed-forward branch: `y = x + dropout(post(down(activation(norm(x)))))`. Never keeps the activation: backward
//! computes it again from the products that it came from.
use super::context::{Cx, Place};
use super::linear::Linear;
use super::norm::Norm;
use super::spec::Activation;
use super::store::{Grads, Weights};
use super::workspace::{MlpSaved, Scratch};
use crate::base::Result;
use crate::device::{Device, ViewMut};

#[derive(Clone, Debug)]
pub struct MlpBranch {
    pub norm: Norm,
    pub activation: Activation,
    /// With SwiGLU and GeGLU (Shazeer 2020).
    pub gate: Option<Linear>,
    pub up: Linear,
    pub down: Linear,
    /// Of what the branch adds to the residual.
    pub post: Option<Norm>,
}

impl MlpBranch {
    /// Assigns `y (N, C)` from `saved.x (N, C)`. Without `y` only what backward needs is computed.
    pub fn forward(
        &self,
        cx: &Cx,
        w: Weights,
        saved: &mut MlpSaved,
        scratch: &mut Scratch,
        y: Option<ViewMut>,
    ) -> Result<()> {
        let (dev, n) = (cx.dev, cx.n);
        self.norm.forward(dev, w, saved.x.rows(n), scratch.h.rows_mut(n), scratch.stats.rows_mut(n))?;
        if let Some(gate) = &self.gate {
            gate.forward(dev, w, scratch.h.rows(n), &mut scratch.low, saved.gate.rows_mut(n))?;
        }
        self.up.forward(dev, w, scratch.h.rows(n), &mut scratch.low, saved.up.rows_mut(n))?;

        if y.is_none() && self.post.is_none() {
            return Ok(());
        }
        self.activation(dev, n, saved, scratch.act.rows_mut(n))?;
        if self.post.is_some() {
            self.down.forward(dev, w, scratch.act.rows(n), &mut scratch.low, saved.branch.rows_mut(n))?;
        }
        let Some(mut y) = y else { return Ok(()) };
        match &self.post {
            None => self.down.forward(dev, w, scratch.act.rows(n), &mut scratch.low, y.reborrow())?,
            Some(norm) => norm.forward(dev, w, saved.branch.rows(n), y.reborrow(), scratch.stats.rows_mut(n))?,
        }
        cx.drop(Place::Mlp, y.reborrow())?;
        dev.add(saved.x.rows(n), y)
    }

    fn activation(&self, dev: &dyn Device, n: usize, saved: &MlpSaved, act: ViewMut) -> Result<()> {
        let (gate, up) = (saved.gate.rows(n), saved.up.rows(n));
        match self.activation {
            Activation::SwiGlu => dev.swiglu(gate, up, act),
            Activation::GeGlu => dev.geglu(gate, up, act),
            Activation::Gelu => dev.gelu(up, act),
        }
    }

    /// `dy (N, C)` is the residual's gradient: the branch's is added to it. Adds to the weights' gradients.
    pub fn backward(
        &self,
        cx: &Cx,
        w: Weights,
        dw: &mut Grads,
        saved: &MlpSaved,
        scratch: &mut Scratch,
        dy: ViewMut,
    ) -> Result<()> {
        let (dev, n) = (cx.dev, cx.n);
        let (x, gate, up) = (saved.x.rows(n), saved.gate.rows(n), saved.up.rows(n));
        let mut d_branch = cx.branch_grad(Place::Mlp, dy.as_view(), &mut scratch.masked)?;
        if let Some(norm) = &self.post {
            let Scratch { h, stats, dh, unused, .. } = scratch;
            d_branch =
                norm.branch_backward(dev, w, dw, saved.branch.rows(n), d_branch, [h, stats, dh], unused.rows_mut(2))?;
        }
        self.activation(dev, n, saved, scratch.act.rows_mut(n))?;
        let low = [&mut scratch.low, &mut scratch.dlow];
        self.down.backward(dev, w, dw, scratch.act.rows(n), d_branch, low, scratch.dact.rows_mut(n), false)?;

        self.norm.forward(dev, w, x, scratch.h.rows_mut(n), scratch.stats.rows_mut(n))?;
        // The activation is read no more: its buffer takes the gate's gradient.
        let (dact, dgate, dup) = (scratch.dact.rows(n), scratch.act.rows_mut(n), scratch.dup.rows_mut(n));
        match self.activation {
            Activation::SwiGlu => dev.swiglu_backward(gate, up, dact, dgate, dup)?,
            Activation::GeGlu => dev.geglu_backward(gate, up, dact, dgate, dup)?,
            Activation::Gelu => dev.gelu_backward(up, dact, dup)?,
        }
        let Scratch { h, stats, act, dup, dh, low, dlow, unused, .. } = scratch;
        if let Some(gate) = &self.gate {
            gate.backward(dev, w, dw, h.rows(n), act.rows(n), [low, dlow], dh.rows_mut(n), false)?;
        }
        let gated = self.gate.is_some();
        self.up.backward(dev, w, dw, h.rows(n), dup.rows(n), [low, dlow], dh.rows_mut(n), gated)?;
        self.norm.backward(dev, w, dw, x, stats.rows(n), dh.rows(n), dy, unused.rows_mut(2))
    }
}
