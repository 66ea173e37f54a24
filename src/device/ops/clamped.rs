//! Operands of what gpt-oss has besides other mixtures of experts: attention sinks, a clamped activation of
//! interleaved gate and up, and biases of experts. N: tokens, R: rows sorted by expert.
use super::attention::AttentionShape;
use super::check::{float, read, rows, written};
use crate::{View, ViewMut};
use flatshard_base::{DType, Error, Result};

/// A learned score per head that takes part in each softmax and has no value. `o` and `lse` of attention without it
/// become those of attention with it.
pub struct HeadSinks<'a> {
    pub shape: AttentionShape,
    /// (heads)
    pub sinks: View<'a>,
    /// (N, heads * head_dim)
    pub o: ViewMut<'a>,
    /// (heads, N) f32
    pub lse: ViewMut<'a>,
}

impl HeadSinks<'_> {
    pub const OP: &'static str = "sink";
    /// Returns N.
    pub fn check(&self) -> Result<usize> {
        let Self { shape, sinks, o, lse } = self;
        let (dtype, n) = (float(Self::OP, o.dtype())?, rows(Self::OP, "o", o.len(), shape.width())?);
        read(Self::OP, &[("sinks", sinks, dtype, shape.heads)])?;
        written(Self::OP, &[("lse", lse, DType::F32, shape.heads * n)])?;
        Ok(n)
    }
}

/// Backward of [`HeadSinks`], after attention's backward from its outputs. Adds.
pub struct HeadSinksBackward<'a> {
    /// (heads)
    pub sinks: View<'a>,
    /// (heads, N) f32, both as attention's backward has them.
    pub lse: View<'a>,
    pub delta: View<'a>,
    /// (heads) f32
    pub dsinks: ViewMut<'a>,
}

impl HeadSinksBackward<'_> {
    pub const OP: &'static str = "sink_backward";
    /// Returns N.
    pub fn check(&self) -> Result<usize> {
        let Self { sinks, lse, delta, dsinks } = self;
        let (dtype, heads) = (float(Self::OP, sinks.dtype())?, dsinks.len());
        let n = rows(Self::OP, "lse", lse.len(), heads)?;
        let stats = [("lse", lse, DType::F32, heads * n), ("delta", delta, DType::F32, heads * n)];
        read(Self::OP, &[("sinks", sinks, dtype, heads), stats[0], stats[1]])?;
        written(Self::OP, &[("dsinks", dsinks, DType::F32, heads)])?;
        Ok(n)
    }
}

/// A gated activation whose inputs are clamped: `(up + 1) gate sigmoid(alpha gate)`, gate at most `limit`, up within
/// plus or minus `limit`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct GluClamp {
    pub alpha: f32,
    pub limit: f32,
}

/// The activation of rows in which gate and up alternate. Assigns.
pub struct ClampedGlu<'a> {
    pub clamp: GluClamp,
    /// (R, 2 F)
    pub gate_up: View<'a>,
    /// (R, F)
    pub y: ViewMut<'a>,
}

impl ClampedGlu<'_> {
    pub const OP: &'static str = "clamped_glu";
    pub fn check(&self) -> Result<()> {
        let dtype = float(Self::OP, self.y.dtype())?;
        read(Self::OP, &[("gate_up", &self.gate_up, dtype, 2 * self.y.len())])
    }
}

/// Backward of [`ClampedGlu`]. Assigns.
pub struct ClampedGluBackward<'a> {
    pub clamp: GluClamp,
    /// (R, 2 F)
    pub gate_up: View<'a>,
    /// (R, F)
    pub dy: View<'a>,
    /// (R, 2 F)
    pub dgate_up: ViewMut<'a>,
}

impl ClampedGluBackward<'_> {
    pub const OP: &'static str = "clamped_glu_backward";
    pub fn check(&self) -> Result<()> {
        let (dtype, len) = (float(Self::OP, self.dy.dtype())?, 2 * self.dy.len());
        read(Self::OP, &[("gate_up", &self.gate_up, dtype, len)])?;
        written(Self::OP, &[("dgate_up", &self.dgate_up, dtype, len)])
    }
}

/// Where the biases of E experts are: `width` each, `stride` elements apart; and the first row of each expert's rows.
#[derive(Clone, Copy)]
pub struct BiasPlaces<'a> {
    pub width: usize,
    pub stride: usize,
    /// (E + 1) u32
    pub offsets: View<'a>,
}

impl BiasPlaces<'_> {
    /// Whether `len` elements hold the biases. Returns R.
    fn check(&self, op: &'static str, biases: usize, rows_len: usize) -> Result<usize> {
        let experts = self.offsets.len().saturating_sub(1);
        read(op, &[("offsets", &self.offsets, DType::U32, experts + 1)])?;
        match experts > 0 && biases >= (experts - 1) * self.stride + self.width {
            true => rows(op, "rows", rows_len, self.width),
            false => Err(Error::op(op, format!("{biases} elements do not hold biases of {experts} experts"))),
        }
    }
}

/// Adds to each row the bias of its expert.
pub struct ExpertBias<'a> {
    pub places: BiasPlaces<'a>,
    pub bias: View<'a>,
    /// (R, width)
    pub y: ViewMut<'a>,
}

impl ExpertBias<'_> {
    pub const OP: &'static str = "expert_bias";
    /// Returns R.
    pub fn check(&self) -> Result<usize> {
        let dtype = float(Self::OP, self.y.dtype())?;
        self.bias.fits(Self::OP, "bias", dtype, self.bias.len())?;
        self.places.check(Self::OP, self.bias.len(), self.y.len())
    }
}

/// Backward of [`ExpertBias`], for rows of outputs that are multiplied by a weight afterwards, or not.
pub struct ExpertBiasBackward<'a> {
    pub places: BiasPlaces<'a>,
    /// (R, width): gradients for weights of 1.
    pub dy: View<'a>,
    pub weighed: Option<WeighedBias<'a>>,
    /// f32: the gradients of the biases, unless they are frozen. Assigns, or adds with `accumulate`.
    pub db: Option<ViewMut<'a>>,
    pub accumulate: bool,
}

/// The weights of rows, as in [`super::WeighRows`], and the biases. Adds to `dweights`.
pub struct WeighedBias<'a> {
    pub bias: View<'a>,
    pub order: Option<View<'a>>,
    pub weights: View<'a>,
    pub dweights: ViewMut<'a>,
}

impl ExpertBiasBackward<'_> {
    pub const OP: &'static str = "expert_bias_backward";
    /// Returns R.
    pub fn check(&self) -> Result<usize> {
        let Self { places, dy, weighed, db, .. } = self;
        let dtype = float(Self::OP, dy.dtype())?;
        let r = rows(Self::OP, "dy", dy.len(), places.width)?;
        if let Some(db) = db {
            db.fits(Self::OP, "db", DType::F32, db.len())?;
            places.check(Self::OP, db.len(), dy.len())?;
        }
        if let Some(WeighedBias { bias, order, weights, dweights }) = weighed {
            bias.fits(Self::OP, "bias", dtype, bias.len())?;
            places.check(Self::OP, bias.len(), dy.len())?;
            order.map_or(Ok(()), |order| order.fits(Self::OP, "order", DType::U32, r))?;
            read(Self::OP, &[("weights", weights, DType::F32, r)])?;
            written(Self::OP, &[("dweights", dweights, DType::F32, r)])?;
        }
        Ok(r)
    }
}
