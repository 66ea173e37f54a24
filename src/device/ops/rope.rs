//! Operands of rotary position embeddings, alone and after the norms of queries and keys. N: rows (tokens).
use super::check::{float, read, rows, written};
use super::norm::RmsNormShape;
use crate::{View, ViewMut};
use flatshard_base::{DType, Error, Result};

/// Which heads of a row of `qkv` are rotated: the first `heads` (queries, then keys).
#[derive(Clone, Copy, Debug)]
pub struct RopeShape {
    /// Query plus key heads.
    pub heads: usize,
    pub head_dim: usize,
    /// Elements in a row of `qkv`.
    pub row: usize,
}

/// Rotates the query and key heads of `qkv` in place (Su et al. 2021, the half-split form of Hugging Face: element i
/// pairs with i + head_dim/2).
pub struct Rope<'a> {
    pub shape: RopeShape,
    /// (max_len, head_dim) f32: one row per position with head_dim/2 cosines, then head_dim/2 sines.
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
        let RopeShape { heads, head_dim, row } = self.shape;
        float(Self::OP, self.qkv.dtype())?;
        if heads * head_dim > row {
            return Err(Error::op(Self::OP, format!("{:?}: the heads do not fit the row", self.shape)));
        }
        let n = rows(Self::OP, "qkv", self.qkv.len(), row)?;
        Ok((n, check_table(Self::OP, head_dim, &self.table, &self.positions, n)?))
    }
}

/// Returns the number of table rows; there must be one position for each of `n` rows.
fn check_table(op: &'static str, head_dim: usize, table: &View, positions: &View, n: usize) -> Result<usize> {
    if head_dim == 0 || !head_dim.is_multiple_of(2) {
        return Err(Error::op(op, format!("head_dim {head_dim}: rotary positions need a positive even number")));
    }
    read(op, &[("table", table, DType::F32, table.len()), ("positions", positions, DType::U32, n)])?;
    rows(op, "table", table.len(), head_dim)
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

/// RMSNorm of each query head with `wq` and of each key head with `wk`, then [`Rope`] (Qwen 3, Gemma 3). Assigns `out`
/// and `rstd`.
pub struct QkNormRope<'a> {
    pub shape: QkNormRopeShape,
    /// As in [`Rope`].
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
    /// As in [`Rope`].
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
