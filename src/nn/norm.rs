//! RMSNorm, LayerNorm and none behind one interface. Never stores statistics: backward takes those that forward wrote.
use super::context::{Cx, DropoutSite};
use super::store::{Grads, Weights};
use super::tensor::Tensor;
use crate::base::Result;
use crate::device::ops::{LayerNorm, LayerNormBackward, RmsNorm, RmsNormBackward, RmsNormShape};
use crate::device::{View, ViewMut};

#[derive(Clone, Copy, Debug)]
pub enum Norm {
    /// RMSNorm: segment `w`; one f32 of statistics per row.
    Rms { w: usize, shape: RmsNormShape },
    /// LayerNorm: segments `w`, whose values may be stored minus 1, and, with biases, `b`; two f32 of statistics per
    /// row.
    Layer { w: usize, b: Option<usize>, eps: f32, from_one: bool },
    /// LayerNorm without weights and biases, or RMSNorm without; statistics as above.
    Bare { eps: f32, rms: bool },
    /// The output is the input; no statistics.
    Absent,
}

impl Norm {
    /// Statistics of a row.
    pub fn statistics(&self) -> usize {
        match self {
            Norm::Rms { .. } | Norm::Bare { rms: true, .. } => 1,
            Norm::Layer { .. } | Norm::Bare { .. } => 2,
            Norm::Absent => 0,
        }
    }
    /// Assigns `y` and `stats`.
    pub fn forward(&self, cx: &Cx, weights: Weights, x: View, y: ViewMut, stats: ViewMut) -> Result<()> {
        let dev = cx.dev;
        match *self {
            Norm::Rms { w, shape } => dev.rmsnorm(RmsNorm { shape, x, w: weights.get(w), y, rstd: stats }),
            Norm::Layer { w, b, eps, from_one } => {
                let op = LayerNorm { eps, x, w: weights.get(w), b: b.map(|b| weights.get(b)), y, stats };
                if from_one { dev.layernorm_from_one(op) } else { dev.layernorm(op) }
            }
            Norm::Bare { eps, rms: false } => dev.layernorm(LayerNorm { eps, x, w: cx.ones, b: None, y, stats }),
            Norm::Bare { eps, rms: true } => {
                dev.rmsnorm(RmsNorm { shape: RmsNormShape { eps, offset: 0.0 }, x, w: cx.ones, y, rstd: stats })
            }
            Norm::Absent => dev.copy(x, y),
        }
    }
    /// A norm at the end of a branch: assigns `y (N, C)`, the residual stream with the branch's normalized output `x`.
    #[allow(clippy::too_many_arguments)] // a norm's operands and a residual stream
    pub fn onto_residual(
        &self,
        cx: &Cx,
        weights: Weights,
        x: View,
        place: DropoutSite,
        residual: View,
        mut y: ViewMut,
        stats: ViewMut,
    ) -> Result<()> {
        self.forward(cx, weights, x, y.reborrow(), stats)?;
        cx.leave(place, y.reborrow())?;
        cx.dev.add(residual, y)
    }
    /// Its backward pass: the gradient of its input `x (N, C)` from that of its output. Recomputes the statistics, into
    /// `stats`; assigns `dx`. Adds to the gradients of the weights, or to
    /// `unused` if they are frozen.
    #[allow(clippy::too_many_arguments)] // a forward's operands and their gradients
    pub fn branch_backward<'a>(
        &self,
        cx: &Cx,
        weights: Weights,
        grads: &mut Grads,
        x: View,
        dy: View,
        [stats, dx]: [&'a mut Tensor; 2],
        unused: ViewMut,
    ) -> Result<View<'a>> {
        let n = x.len() / dx.width();
        self.forward(cx, weights, x, dx.rows_mut(n), stats.rows_mut(n))?;
        cx.dev.zero(dx.rows_mut(n))?;
        self.backward(cx, weights, grads, x, stats.rows(n), dy, dx.rows_mut(n), unused)?;
        Ok(dx.rows(n))
    }
    /// Adds to `dx` (the residual's gradient) and to the gradients of `w` and `b`, or to `unused` (2, C) f32 if they
    /// are frozen.
    #[allow(clippy::too_many_arguments)] // a forward's operands and their gradients
    pub fn backward(
        &self,
        cx: &Cx,
        weights: Weights,
        grads: &mut Grads,
        x: View,
        stats: View,
        dy: View,
        dx: ViewMut,
        unused: ViewMut,
    ) -> Result<()> {
        let dev = cx.dev;
        match *self {
            Norm::Rms { w, shape } => {
                let dw = grads.get(w)?.unwrap_or_else(|| unused.slice(0..weights.get(w).len()));
                dev.rmsnorm_backward(RmsNormBackward { shape, x, w: weights.get(w), rstd: stats, dy, dx, dw })
            }
            Norm::Layer { w, b, from_one, .. } => {
                let len = weights.get(w).len();
                let (dw, db) = match b {
                    Some(b) => grads.pair(w, b, unused)?,
                    None => {
                        let (spare, db) = unused.split_at(len);
                        (grads.get(w)?.unwrap_or(spare), db.slice(0..len))
                    }
                };
                let op = LayerNormBackward { x, w: weights.get(w), stats, dy, dx, dw, db };
                if from_one { dev.layernorm_from_one_backward(op) } else { dev.layernorm_backward(op) }
            }
            Norm::Bare { eps, rms: true } => {
                let (shape, w) = (RmsNormShape { eps, offset: 0.0 }, cx.ones);
                dev.rmsnorm_backward(RmsNormBackward { shape, x, w, rstd: stats, dy, dx, dw: unused.slice(0..w.len()) })
            }
            Norm::Bare { .. } => {
                let (w, (dw, db)) = (cx.ones, unused.split_at(cx.ones.len()));
                let db = db.slice(0..w.len());
                dev.layernorm_backward(LayerNormBackward { x, w, stats, dy, dx, dw, db })
            }
            Norm::Absent => dev.add(dy, dx),
        }
    }
}
