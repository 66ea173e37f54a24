//! Operands of RMSNorm and LayerNorm. N: rows; C: elements of a row, `w.len()`.
use super::check::{float, read, rows, written};
use crate::{View, ViewMut};
use flatshard_base::{DType, Result};

/// Normalizes a row to x / sqrt(mean(x^2) + eps) * (w + offset).
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RmsNormShape {
    pub eps: f32,
    /// 0; or 1 if weights are stored minus 1 (Gemma).
    pub offset: f32,
}

/// `y = x * rstd * (w + offset)` (Zhang & Sennrich 2019). Assigns `y` and `rstd`.
pub struct RmsNorm<'a> {
    pub shape: RmsNormShape,
    /// (N, C)
    pub x: View<'a>,
    /// (C)
    pub w: View<'a>,
    /// (N, C)
    pub y: ViewMut<'a>,
    /// (N) f32, saved for backward.
    pub rstd: ViewMut<'a>,
}

impl RmsNorm<'_> {
    pub const OP: &'static str = "rmsnorm";
    /// Returns N.
    pub fn check(&self) -> Result<usize> {
        let Self { x, w, y, rstd, .. } = self;
        let (dtype, n) = (float(Self::OP, x.dtype())?, rows(Self::OP, "x", x.len(), w.len())?);
        read(Self::OP, &[("w", w, dtype, w.len())])?;
        written(Self::OP, &[("y", y, dtype, x.len()), ("rstd", rstd, DType::F32, n)])?;
        Ok(n)
    }
}

/// Backward of [`RmsNorm`]. Adds to `dx`, the residual's gradient, and to `dw`.
pub struct RmsNormBackward<'a> {
    pub shape: RmsNormShape,
    /// (N, C)
    pub x: View<'a>,
    /// (C)
    pub w: View<'a>,
    /// (N) f32, from the forward pass.
    pub rstd: View<'a>,
    /// (N, C)
    pub dy: View<'a>,
    /// (N, C)
    pub dx: ViewMut<'a>,
    /// (C) f32
    pub dw: ViewMut<'a>,
}

impl RmsNormBackward<'_> {
    pub const OP: &'static str = "rmsnorm_backward";
    /// Returns N.
    pub fn check(&self) -> Result<usize> {
        let Self { x, w, rstd, dy, dx, dw, .. } = self;
        let (dtype, n, c) = (float(Self::OP, x.dtype())?, rows(Self::OP, "x", x.len(), w.len())?, w.len());
        read(Self::OP, &[("w", w, dtype, c), ("rstd", rstd, DType::F32, n), ("dy", dy, dtype, x.len())])?;
        written(Self::OP, &[("dx", dx, dtype, x.len()), ("dw", dw, DType::F32, c)])?;
        Ok(n)
    }
}

/// `y = (x - mean) * rstd * w [+ b]` (Ba et al. 2016). Assigns `y` and `stats`.
pub struct LayerNorm<'a> {
    pub eps: f32,
    /// (N, C)
    pub x: View<'a>,
    /// (C)
    pub w: View<'a>,
    /// (C)
    pub b: Option<View<'a>>,
    /// (N, C)
    pub y: ViewMut<'a>,
    /// (N, 2) f32: mean and rstd, saved for backward.
    pub stats: ViewMut<'a>,
}

impl LayerNorm<'_> {
    pub const OP: &'static str = "layernorm";
    /// Returns N.
    pub fn check(&self) -> Result<usize> {
        let Self { x, w, b, y, stats, .. } = self;
        let (dtype, n, c) = (float(Self::OP, x.dtype())?, rows(Self::OP, "x", x.len(), w.len())?, w.len());
        read(Self::OP, &[("w", w, dtype, c), ("b", b.as_ref().unwrap_or(w), dtype, c)])?;
        written(Self::OP, &[("y", y, dtype, x.len()), ("stats", stats, DType::F32, 2 * n)])?;
        Ok(n)
    }
    /// Bytes that it moves.
    pub fn bytes(&self) -> usize {
        let weights = self.w.bytes() + self.b.map_or(0, |b| b.bytes());
        self.x.bytes() + weights + self.y.bytes() + self.stats.bytes()
    }
}

/// Backward of [`LayerNorm`]. Adds to `dx`, the residual's gradient, and to `dw` and `db`.
pub struct LayerNormBackward<'a> {
    /// (N, C)
    pub x: View<'a>,
    /// (C)
    pub w: View<'a>,
    /// (N, 2) f32, from the forward pass.
    pub stats: View<'a>,
    /// (N, C)
    pub dy: View<'a>,
    /// (N, C)
    pub dx: ViewMut<'a>,
    /// (C) f32
    pub dw: ViewMut<'a>,
    /// (C) f32
    pub db: ViewMut<'a>,
}

impl LayerNormBackward<'_> {
    pub const OP: &'static str = "layernorm_backward";
    /// Returns N.
    pub fn check(&self) -> Result<usize> {
        let Self { x, w, stats, dy, dx, dw, db } = self;
        let (dtype, n, c) = (float(Self::OP, x.dtype())?, rows(Self::OP, "x", x.len(), w.len())?, w.len());
        read(Self::OP, &[("w", w, dtype, c), ("stats", stats, DType::F32, 2 * n), ("dy", dy, dtype, x.len())])?;
        written(Self::OP, &[("dx", dx, dtype, x.len()), ("dw", dw, DType::F32, c), ("db", db, DType::F32, c)])?;
        Ok(n)
    }
}
