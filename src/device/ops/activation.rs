//! Operands of what works element by element: activations and dropout. All are alike in dtype and length.
use super::check::{float, read, written};
use crate::base::{DType, Error, Result};
use crate::device::{View, ViewMut};

/// A gated activation: `y = silu(gate) * up` (SwiGLU, Shazeer 2020), or with the tanh form of GELU (GeGLU; Gemma).
/// Assigns.
pub struct Glu<'a> {
    pub gate: View<'a>,
    pub up: View<'a>,
    pub y: ViewMut<'a>,
}

impl Glu<'_> {
    pub fn check(&self, op: &'static str) -> Result<()> {
        let (dtype, n) = (float(op, self.gate.dtype())?, self.gate.len());
        read(op, &[("up", &self.up, dtype, n)])?;
        written(op, &[("y", &self.y, dtype, n)])
    }
}

/// Backward of [`Glu`]. Assigns `dgate` and `dup`.
pub struct GluBackward<'a> {
    pub gate: View<'a>,
    pub up: View<'a>,
    pub dy: View<'a>,
    pub dgate: ViewMut<'a>,
    pub dup: ViewMut<'a>,
}

impl GluBackward<'_> {
    pub fn check(&self, op: &'static str) -> Result<()> {
        let (dtype, n) = (float(op, self.gate.dtype())?, self.gate.len());
        read(op, &[("up", &self.up, dtype, n), ("dy", &self.dy, dtype, n)])?;
        written(op, &[("dgate", &self.dgate, dtype, n), ("dup", &self.dup, dtype, n)])
    }
}

/// `y = gelu(x)`, the tanh form (`gelu_new` of GPT-2). Assigns.
pub struct Gelu<'a> {
    pub x: View<'a>,
    pub y: ViewMut<'a>,
}

impl Gelu<'_> {
    pub const OP: &'static str = "gelu";
    pub fn check(&self) -> Result<()> {
        written(Self::OP, &[("y", &self.y, float(Self::OP, self.x.dtype())?, self.x.len())])
    }
}

/// Backward of [`Gelu`]. Assigns `dx`.
pub struct GeluBackward<'a> {
    pub x: View<'a>,
    pub dy: View<'a>,
    pub dx: ViewMut<'a>,
}

impl GeluBackward<'_> {
    pub const OP: &'static str = "gelu_backward";
    pub fn check(&self) -> Result<()> {
        let (dtype, n) = (float(Self::OP, self.x.dtype())?, self.x.len());
        read(Self::OP, &[("dy", &self.dy, dtype, n)])?;
        written(Self::OP, &[("dx", &self.dx, dtype, n)])
    }
}

/// In place: `x[i] = keep(i) ? x[i] / (1 - p) : 0`, keep from the counter (key, index of the element). The same on the
/// gradient is the backward pass.
pub struct Dropout<'a> {
    /// In [0, 1).
    pub p: f32,
    /// (2) u32, the low word first: an [`Rng::key`](crate::base::rng::Rng::key) that names run, step, micro-batch, rank
    /// and place in the model.
    pub key: View<'a>,
    pub x: ViewMut<'a>,
}

impl Dropout<'_> {
    pub const OP: &'static str = "dropout";
    pub fn check(&self) -> Result<()> {
        if !(0.0..1.0).contains(&self.p) {
            return Err(Error::op(Self::OP, format!("p = {} is not in [0, 1)", self.p)));
        }
        float(Self::OP, self.x.dtype())?;
        read(Self::OP, &[("key", &self.key, DType::U32, 2)])
    }
    /// A word of the counter below this drops its element.
    pub fn threshold(&self) -> u32 {
        (self.p as f64 * 4_294_967_296.0) as u32
    }
    /// Multiplies what is kept.
    pub fn scale(&self) -> f32 {
        1.0 / (1.0 - self.p)
    }
}
