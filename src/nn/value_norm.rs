//! The norm of values, head by head and without a weight (Gemma 4). Never touches queries and keys, except that values
//! may be projected keys.
use super::context::Cx;
use super::saved::Scratch;
use super::tensor::Tensor;
use crate::base::Result;
use crate::device::ops::{AttentionShape, RmsNorm, RmsNormBackward, RmsNormShape};
use crate::device::{View, ViewMut};

/// Values are normalized head by head, without a weight.
#[derive(Clone, Copy, Debug)]
pub struct ValueNorm {
    /// The norm's weights are stored minus 1, and 0 here.
    pub norm: RmsNormShape,
    /// The column of projected rows that values come from: their own, or the keys'.
    pub from: usize,
}

impl ValueNorm {
    /// Assigns the values of `rotated (N, row)` from the projected rows `qkv`. Statistics follow those of queries and
    /// keys in `stats`.
    #[allow(clippy::too_many_arguments)] // its operands and its scratch
    pub fn forward(
        &self,
        cx: &Cx,
        heads: &AttentionShape,
        qkv: View,
        rotated: ViewMut,
        stats: ViewMut,
        [row, normed]: [&mut Tensor; 2],
        zeros: &Tensor,
    ) -> Result<()> {
        let columns = ValueColumns::of(heads, cx.n);
        columns.copy(cx, (qkv, columns.row, self.from), (row.rows_mut(cx.n).slice(columns.all()), columns.width, 0))?;
        let (x, y) = (row.rows(cx.n).slice(columns.all()), normed.rows_mut(cx.n).slice(columns.all()));
        let (w, rstd) = (zeros.rows(1).slice(0..heads.head_dim), stats.slice(columns.stats(heads)));
        cx.dev.rmsnorm(RmsNorm { shape: self.norm, x, w, y, rstd })?;
        let y = normed.rows(cx.n).slice(columns.all());
        columns.copy(cx, (y, columns.width, 0), (rotated, columns.row, columns.values))
    }

    /// Replaces the values' part of `scratch.dqkv`, the gradient of normalized values, by that of projected ones: adds
    /// it to the keys' part if values are projected keys.
    pub fn backward(&self, cx: &Cx, heads: &AttentionShape, qkv: View, scratch: &mut Scratch) -> Result<()> {
        let columns = ValueColumns::of(heads, cx.n);
        // The queries' gradient was the last use of `d_o`.
        let Scratch { dqkv, row, normed, d_o, head_stats, unused, zeros, .. } = scratch;
        let (row_width, width, all) = (columns.row, columns.width, columns.all());
        columns.copy(cx, (qkv, row_width, self.from), (row.rows_mut(cx.n).slice(all.clone()), width, 0))?;
        let d_values = normed.rows_mut(cx.n).slice(all.clone());
        columns.copy(cx, (dqkv.rows(cx.n), row_width, columns.values), (d_values, width, 0))?;
        let d_from = d_o.rows_mut(cx.n).slice(all.clone());
        match self.from == columns.values {
            true => cx.dev.zero(d_from)?,
            false => columns.copy(cx, (dqkv.rows(cx.n), row_width, self.from), (d_from, width, 0))?,
        }
        cx.dev.rmsnorm_backward(RmsNormBackward {
            shape: self.norm,
            x: row.rows(cx.n).slice(all.clone()),
            w: zeros.rows(1).slice(0..heads.head_dim),
            rstd: head_stats.rows(cx.n).slice(columns.stats(heads)),
            dy: normed.rows(cx.n).slice(all.clone()),
            dx: d_o.rows_mut(cx.n).slice(all.clone()),
            dw: unused.rows_mut(1).slice(0..heads.head_dim),
        })?;
        columns.copy(cx, (d_o.rows(cx.n).slice(all), width, 0), (dqkv.rows_mut(cx.n), row_width, self.from))
    }
}

/// Where the values of N rows are.
struct ValueColumns {
    n: usize,
    /// Elements of a row, and of its values.
    row: usize,
    width: usize,
    /// The column of the values.
    values: usize,
}

impl ValueColumns {
    fn of(heads: &AttentionShape, n: usize) -> ValueColumns {
        let &AttentionShape { heads: queries, kv_heads, head_dim, .. } = heads;
        ValueColumns { n, row: heads.row(), width: kv_heads * head_dim, values: (queries + kv_heads) * head_dim }
    }
    fn all(&self) -> std::ops::Range<usize> {
        0..self.n * self.width
    }
    /// After the statistics of queries and keys.
    fn stats(&self, heads: &AttentionShape) -> std::ops::Range<usize> {
        let first = self.n * (heads.heads + heads.kv_heads);
        first..first + self.n * heads.kv_heads
    }
    /// Copies values, each side with the width of its rows and the column.
    fn copy(&self, cx: &Cx, from: (View, usize, usize), to: (ViewMut, usize, usize)) -> Result<()> {
        cx.copy_columns([self.n, self.width], from, to)
    }
}
