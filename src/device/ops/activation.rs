//! Operands of elementwise operations: activations and dropout. All have the same dtype and length.
use super::check::{float, read, rows, written};
use crate::{View, ViewMut};
use flatshard_base::{DType, Error, Result};

/// A gated activation: `y = silu(gate) * up` (SwiGLU, Shazeer 2020), or with GELU's tanh form (GeGLU; Gemma). Assigns.
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

/// `x *= factor`, in place, with a factor in memory.
pub struct ScaleBy<'a> {
    /// (1), of the dtype of `x`.
    pub factor: View<'a>,
    pub x: ViewMut<'a>,
}

impl ScaleBy<'_> {
    pub const OP: &'static str = "scale_by";
    pub fn check(&self) -> Result<()> {
        self.factor.fits(Self::OP, "factor", float(Self::OP, self.x.dtype())?, 1)
    }
}

/// `x = min(max(x, low), high)`, in place. ReLU is that of 0 and infinity.
pub struct Clamp<'a> {
    pub limits: [f32; 2],
    pub x: ViewMut<'a>,
}

impl Clamp<'_> {
    pub const OP: &'static str = "clamp";
    pub const RELU: [f32; 2] = [0.0, f32::INFINITY];
    pub fn check(&self) -> Result<()> {
        float(Self::OP, self.x.dtype()).map(drop)
    }
}

/// Backward of [`Clamp`], in place: `dx` becomes 0 where its input `x` was outside of (low, high].
pub struct ClampBackward<'a> {
    pub limits: [f32; 2],
    pub x: View<'a>,
    pub dx: ViewMut<'a>,
}

impl ClampBackward<'_> {
    pub const OP: &'static str = "clamp_backward";
    pub fn check(&self) -> Result<()> {
        written(Self::OP, &[("dx", &self.dx, float(Self::OP, self.x.dtype())?, self.x.len())])
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

/// xIELU (Huang & Schlag 2024): `y = p x^2 + beta x` where x > 0, else `n (expm1(min(x, eps)) - x) + beta x`. Assigns.
pub struct Xielu<'a> {
    pub curve: XieluCurve<'a>,
    pub x: View<'a>,
    pub y: ViewMut<'a>,
}

/// The numbers of xIELU, (1) each, of the dtype of `x`.
#[derive(Clone, Copy)]
pub struct XieluCurve<'a> {
    /// `p = softplus(alpha_p)`
    pub alpha_p: View<'a>,
    /// `n = beta + softplus(alpha_n)`
    pub alpha_n: View<'a>,
    pub beta: View<'a>,
    pub eps: View<'a>,
}

impl XieluCurve<'_> {
    fn check(&self, op: &'static str, dtype: DType) -> Result<()> {
        let &XieluCurve { alpha_p, alpha_n, beta, eps } = self;
        read(op, &[("alpha_p", &alpha_p, dtype, 1), ("alpha_n", &alpha_n, dtype, 1), ("beta", &beta, dtype, 1)])?;
        eps.fits(op, "eps", dtype, 1)
    }
}

impl Xielu<'_> {
    pub const OP: &'static str = "xielu";
    pub fn check(&self) -> Result<()> {
        let dtype = float(Self::OP, self.x.dtype())?;
        self.curve.check(Self::OP, dtype)?;
        written(Self::OP, &[("y", &self.y, dtype, self.x.len())])
    }
}

/// Backward of [`Xielu`]. Assigns `dx`.
pub struct XieluBackward<'a> {
    pub curve: XieluCurve<'a>,
    pub x: View<'a>,
    pub dy: View<'a>,
    pub dx: ViewMut<'a>,
}

impl XieluBackward<'_> {
    pub const OP: &'static str = "xielu_backward";
    pub fn check(&self) -> Result<()> {
        let (dtype, n) = (float(Self::OP, self.x.dtype())?, self.x.len());
        self.curve.check(Self::OP, dtype)?;
        read(Self::OP, &[("dy", &self.dy, dtype, n)])?;
        written(Self::OP, &[("dx", &self.dx, dtype, n)])
    }
}

/// The gradients of [`Xielu`]'s two learned numbers, f32. Adds.
pub struct XieluGrads<'a> {
    pub curve: XieluCurve<'a>,
    pub x: View<'a>,
    pub dy: View<'a>,
    pub dalpha_p: ViewMut<'a>,
    pub dalpha_n: ViewMut<'a>,
}

impl XieluGrads<'_> {
    pub const OP: &'static str = "xielu_grads";
    pub fn check(&self) -> Result<()> {
        let dtype = float(Self::OP, self.x.dtype())?;
        self.curve.check(Self::OP, dtype)?;
        read(Self::OP, &[("dy", &self.dy, dtype, self.x.len())])?;
        let one = |name, x| (name, x, DType::F32, 1);
        written(Self::OP, &[one("dalpha_p", &self.dalpha_p), one("dalpha_n", &self.dalpha_n)])
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

/// In place: `x[i] = keep(i) ? x[i] / (1 - p) : 0`, with keep from the counter (key, index of the element). Backward is
/// the same operation on the gradient.
pub struct Dropout<'a> {
    /// In [0, 1).
    pub p: f32,
    /// (2) u32, low word first: an [`Rng::key`](flatshard_base::rng::Rng::key) that identifies run, step, micro-batch,
    /// rank and position in the model.
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
    /// Elements whose counter word is below this are dropped.
    pub fn threshold(&self) -> u32 {
        threshold(self.p)
    }
    /// Factor of the kept elements.
    pub fn scale(&self) -> f32 {
        scale(self.p)
    }
}
fn threshold(p: f32) -> u32 {
    (p as f64 * 4_294_967_296.0) as u32
}
fn scale(p: f32) -> f32 {
    1.0 / (1.0 - p)
}

/// Dropout of rows of which ranks hold slices, with the whole row's mask: element j of row i is channel `c = first + j`
/// of token `t = rows[i]` (without `rows`, `t = i`), and is kept if word `c % 4` of the counter `[c / 4, t]` is at
/// least `p * 2^32`. Kept elements are multiplied by `1 / (1 - p)`. Assigns `y`, or adds to it with `accumulate`.
/// Backward is the same operation on the gradient.
pub struct DropoutRows<'a> {
    /// In [0, 1).
    pub p: f32,
    /// (2) u32, low word first, as in [`Dropout`].
    pub key: View<'a>,
    /// (N) u32.
    pub rows: Option<View<'a>>,
    /// Elements in a row of `x` and `y`.
    pub width: usize,
    pub first: usize,
    pub x: View<'a>,
    pub y: ViewMut<'a>,
    pub accumulate: bool,
}

impl DropoutRows<'_> {
    pub const OP: &'static str = "dropout_rows";
    /// Returns N.
    pub fn check(&self) -> Result<usize> {
        if !(0.0..1.0).contains(&self.p) {
            return Err(Error::op(Self::OP, format!("p = {} is not in [0, 1)", self.p)));
        }
        let (dtype, n) = (float(Self::OP, self.x.dtype())?, rows(Self::OP, "x", self.x.len(), self.width)?);
        read(Self::OP, &[("key", &self.key, DType::U32, 2)])?;
        if let Some(rows) = &self.rows {
            read(Self::OP, &[("rows", rows, DType::U32, n)])?;
        }
        written(Self::OP, &[("y", &self.y, dtype, self.x.len())])?;
        Ok(n)
    }
    /// See [`Dropout`].
    pub fn threshold(&self) -> u32 {
        threshold(self.p)
    }
    /// See [`Dropout`].
    pub fn scale(&self) -> f32 {
        scale(self.p)
    }
}
