//! Operands of rotary position embeddings, alone and after the norms of queries and keys. N: rows (tokens).
use super::check::{float, read, rows, written};
use super::norm::RmsNormShape;
use crate::{View, ViewMut};
use flatshard_base::{DType, Error, Result};

/// Which elements of a head rotate together.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum RotaryPairs {
    /// Element i and i + half of the rotated ones (GPT-NeoX, Llama in Hugging Face's form).
    #[default]
    Halves,
    /// Elements 2 i and 2 i + 1 (Su et al. 2021; GLM, Cohere, ERNIE).
    Adjacent,
}

/// Which heads of a row of `qkv` are rotated: the first `heads` (queries, then keys).
#[derive(Clone, Copy, Debug)]
pub struct RopeShape {
    /// Query plus key heads.
    pub heads: usize,
    pub head_dim: usize,
    /// Elements of a head that are rotated, the first ones: D.
    pub rotated: usize,
    pub pairs: RotaryPairs,
    /// Elements in a row of `qkv`.
    pub row: usize,
}

/// Rotates the query and key heads of `qkv` in place (Su et al. 2021).
pub struct Rope<'a> {
    pub shape: RopeShape,
    /// (max_len, D) f32: one row per position with D/2 cosines, then D/2 sines.
    pub table: View<'a>,
    /// (N) u32
    pub positions: View<'a>,
    /// (N, row)
    pub qkv: ViewMut<'a>,
    /// Rotates in the opposite direction, for backward.
    pub inverse: bool,
}

impl Rope<'_> {
    pub const OP: &'static str = "rope";
    /// Returns N and the number of table rows.
    pub fn check(&self) -> Result<(usize, usize)> {
        let RopeShape { heads, head_dim, rotated, row, .. } = self.shape;
        float(Self::OP, self.qkv.dtype())?;
        if heads * head_dim > row || rotated > head_dim {
            return Err(Error::op(Self::OP, format!("{:?}: the heads do not fit the row", self.shape)));
        }
        let n = rows(Self::OP, "qkv", self.qkv.len(), row)?;
        Ok((n, check_table(Self::OP, rotated, &self.table, &self.positions, n)?))
    }
}

/// Returns the number of table rows; there must be one position for each of `n` rows.
fn check_table(op: &'static str, rotated: usize, table: &View, positions: &View, n: usize) -> Result<usize> {
    if rotated == 0 || !rotated.is_multiple_of(2) {
        return Err(Error::op(op, format!("{rotated} rotated elements: rotary positions need a positive even number")));
    }
    read(op, &[("table", table, DType::F32, table.len()), ("positions", positions, DType::U32, n)])?;
    rows(op, "table", table.len(), rotated)
}

/// The heads of a row of `qkv` that are each normalized and rotated: queries, then keys. Values follow.
#[derive(Clone, Copy, Debug)]
pub struct QkNormRopeShape {
    pub heads: usize,
    pub kv_heads: usize,
    pub head_dim: usize,
    pub norm: RmsNormShape,
}

impl QkNormRopeShape {
    /// Elements in a row of `qkv`.
    pub fn row(&self) -> usize {
        (self.heads + 2 * self.kv_heads) * self.head_dim
    }
}

/// RMSNorm of each query head with `wq` and of each key head with `wk`, then [`Rope`] of whole heads by halves (Qwen 3,
/// Gemma 3). Assigns `out` and `rstd`.
pub struct QkNormRope<'a> {
    pub shape: QkNormRopeShape,
    /// See [`Rope`], D = head_dim.
    pub table: View<'a>,
    /// (N) u32
    pub positions: View<'a>,
    /// (head_dim)
    pub wq: View<'a>,
    /// (head_dim)
    pub wk: View<'a>,
    /// (N, row)
    pub qkv: View<'a>,
    /// (N, row): rotated queries, rotated keys, unchanged values.
    pub out: ViewMut<'a>,
    /// (N, heads + kv_heads) f32, saved for backward.
    pub rstd: ViewMut<'a>,
}

impl QkNormRope<'_> {
    pub const OP: &'static str = "qk_norm_rope";
    /// Returns N and the number of table rows.
    pub fn check(&self) -> Result<(usize, usize)> {
        let Self { shape, table, positions, wq, wk, qkv, out, rstd } = self;
        let (dtype, d) = (float(Self::OP, qkv.dtype())?, shape.head_dim);
        let n = rows(Self::OP, "qkv", qkv.len(), shape.row())?;
        read(Self::OP, &[("wq", wq, dtype, d), ("wk", wk, dtype, d)])?;
        let stats = n * (shape.heads + shape.kv_heads);
        written(Self::OP, &[("out", out, dtype, qkv.len()), ("rstd", rstd, DType::F32, stats)])?;
        Ok((n, check_table(Self::OP, d, table, positions, n)?))
    }
}

/// Backward of [`QkNormRope`]. Assigns `dqkv` in place, from the gradient of `out` to that of `qkv`. Adds to `dwq` and
/// `dwk`.
pub struct QkNormRopeBackward<'a> {
    pub shape: QkNormRopeShape,
    /// See [`Rope`], D = head_dim.
    pub table: View<'a>,
    /// (N) u32
    pub positions: View<'a>,
    /// (head_dim)
    pub wq: View<'a>,
    /// (head_dim)
    pub wk: View<'a>,
    /// (N, row), the input of the forward pass.
    pub qkv: View<'a>,
    /// (N, heads + kv_heads) f32, from the forward pass.
    pub rstd: View<'a>,
    /// (N, row)
    pub dqkv: ViewMut<'a>,
    /// (head_dim) f32
    pub dwq: ViewMut<'a>,
    /// (head_dim) f32
    pub dwk: ViewMut<'a>,
}

impl QkNormRopeBackward<'_> {
    pub const OP: &'static str = "qk_norm_rope_backward";
    /// Returns N and the number of table rows.
    pub fn check(&self) -> Result<(usize, usize)> {
        let Self { shape, table, positions, wq, wk, qkv, rstd, dqkv, dwq, dwk } = self;
        let (dtype, d) = (float(Self::OP, qkv.dtype())?, shape.head_dim);
        let n = rows(Self::OP, "qkv", qkv.len(), shape.row())?;
        let stats = n * (shape.heads + shape.kv_heads);
        read(Self::OP, &[("wq", wq, dtype, d), ("wk", wk, dtype, d), ("rstd", rstd, DType::F32, stats)])?;
        written(
            Self::OP,
            &[("dqkv", dqkv, dtype, qkv.len()), ("dwq", dwq, DType::F32, d), ("dwk", dwk, DType::F32, d)],
        )?;
        Ok((n, check_table(Self::OP, d, table, positions, n)?))
    }
}
