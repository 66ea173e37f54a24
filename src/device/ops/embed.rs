//! Operands of the embedding lookup and its scatter-add. N: tokens; C: columns of the table.
use super::check::{float, read, written};
use crate::{View, ViewMut};
use flatshard_base::{DType, Error, Result};

/// A table, and which of its rows the operand holds.
#[derive(Clone, Copy, Debug)]
pub struct EmbedShape {
    /// Rows of the whole table.
    pub rows: usize,
    /// The table row that is the operand's first.
    pub first: usize,
    /// Factor of the looked-up rows.
    pub scale: f32,
}

impl EmbedShape {
    /// An operand that holds the whole table.
    pub fn whole(rows: usize, scale: f32) -> EmbedShape {
        EmbedShape { rows, first: 0, scale }
    }
    /// Number of columns, derived from operands of `table` and `out` elements with one row per token; None if there are
    /// no tokens.
    fn columns(&self, op: &'static str, tokens: &View, out: usize, table: usize) -> Result<Option<usize>> {
        let n = tokens.len();
        read(op, &[("tokens", tokens, DType::U32, n)])?;
        if n == 0 && out == 0 {
            return Ok(None);
        }
        let c = out.checked_div(n).unwrap_or(0);
        if c == 0 || c * n != out || !table.is_multiple_of(c) || self.first + table / c > self.rows {
            let what = format!("{n} tokens, {out} elements and a table of {table} do not agree on {self:?}");
            return Err(Error::op(op, what));
        }
        Ok(Some(c))
    }
}

/// `y = scale * table[tokens]`. Assigns, or adds with `accumulate` (learned positions). A token whose row is not in `w`
/// gives 0; one outside the table is an error.
pub struct Embed<'a> {
    pub shape: EmbedShape,
    /// (N) u32
    pub tokens: View<'a>,
    /// Rows of the table from [`EmbedShape::first`] on.
    pub w: View<'a>,
    /// (N, C)
    pub y: ViewMut<'a>,
    pub accumulate: bool,
}

impl Embed<'_> {
    pub const OP: &'static str = "embed";
    /// Returns C; None if there are no tokens.
    pub fn check(&self) -> Result<Option<usize>> {
        let Self { shape, tokens, w, y, .. } = self;
        written(Self::OP, &[("y", y, float(Self::OP, w.dtype())?, y.len())])?;
        shape.columns(Self::OP, tokens, y.len(), w.len())
    }
}

/// Backward of [`Embed`]: scatter-adds `scale * dy` to `dw`, in row order.
pub struct EmbedBackward<'a> {
    pub shape: EmbedShape,
    /// (N) u32
    pub tokens: View<'a>,
    /// (N, C)
    pub dy: View<'a>,
    /// f32, with the rows of `w`.
    pub dw: ViewMut<'a>,
}

impl EmbedBackward<'_> {
    pub const OP: &'static str = "embed_backward";
    /// Returns C; None if there are no tokens.
    pub fn check(&self) -> Result<Option<usize>> {
        let Self { shape, tokens, dy, dw } = self;
        float(Self::OP, dy.dtype())?;
        written(Self::OP, &[("dw", dw, DType::F32, dw.len())])?;
        shape.columns(Self::OP, tokens, dy.len(), dw.len())
    }
}
