//! The feed-forward branch: `y = x + dropout(down(activation(norm(x))))`. Never keeps the activation: backward computes
//! it again from the products that it came from.
use super::context::{Cx, Place};
use super::linear::Linear;
use super::norm::Norm;
use super::store::{Grads, Weights};
use super::workspace::{MlpSaved, Scratch};
use crate::base::Result;
use crate::device::{Device, ViewMut};

#[derive(Clone, Debug)]
pub struct MlpBranch {
    pub norm: Norm,
    /// SwiGLU where there is one (Shazeer 2020), else GELU of `up` alone.
    pub gate: Option<Linear>,
    pub up: Linear,
    pub down: Linear,
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
            gate.forward(dev, w, scratch.h.rows(n), saved.gate.rows_mut(n))?;
        }
        self.up.forward(dev, w, scratch.h.rows(n), saved.up.rows_mut(n))?;

        let Some(mut y) = y else { return Ok(()) };
        self.activation(dev, n, saved, scratch.act.rows_mut(n))?;
        self.down.forward(dev, w, scratch.act.rows(n), y.reborrow())?;
        cx.drop(Place::Mlp, y.reborrow())?;
        dev.add(saved.x.rows(n), y)
    }

    fn activation(&self, dev: &dyn Device, n: usize, saved: &MlpSaved, act: ViewMut) -> Result<()> {
        match self.gate {
            Some(_) => dev.swiglu(saved.gate.rows(n), saved.up.rows(n), act),
            None => dev.gelu(saved.up.rows(n), act),
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
        let d_branch = cx.branch_grad(Place::Mlp, dy.as_view(), &mut scratch.masked)?;
        self.activation(dev, n, saved, scratch.act.rows_mut(n))?;
        self.down.weight_grad(dev, dw, scratch.act.rows(n), d_branch)?;
        self.down.input_grad(dev, w, d_branch, scratch.dact.rows_mut(n), false)?;

        self.norm.forward(dev, w, x, scratch.h.rows_mut(n), scratch.stats.rows_mut(n))?;
        if let Some(projection) = &self.gate {
            // The activation is read no more: its buffer takes the gate's gradient.
            let (dgate, dup) = (scratch.act.rows_mut(n), scratch.dup.rows_mut(n));
            dev.swiglu_backward(gate, up, scratch.dact.rows(n), dgate, dup)?;
            projection.weight_grad(dev, dw, scratch.h.rows(n), scratch.act.rows(n))?;
            projection.input_grad(dev, w, scratch.act.rows(n), scratch.dh.rows_mut(n), false)?;
        } else {
            dev.gelu_backward(up, scratch.dact.rows(n), scratch.dup.rows_mut(n))?;
        }
        self.up.weight_grad(dev, dw, scratch.h.rows(n), scratch.dup.rows(n))?;
        self.up.input_grad(dev, w, scratch.dup.rows(n), scratch.dh.rows_mut(n), self.gate.is_some())?;
        let Scratch { stats, dh, unused, .. } = scratch;
        self.norm.backward(dev, w, dw, x, stats.rows(n), dh.rows(n), dy, unused.rows_mut(2))
    }
}
