//! Keys and values that later blocks read too (Gemma 4): those of the last block of each sight that has its own. They
//! stay in memory for a whole micro-batch, and the gradients of all their readers are summed until the block that has
//! them runs backward. Never normalizes or rotates.
use super::context::Cx;
use super::tensor::{Tensor, TensorShape, table};
use crate::base::{Category, DType, Result};
use crate::device::ops::AttentionShape;
use crate::device::{Device, View, ViewMut};

/// What the tokens of a block see.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Sight {
    All,
    Window,
}

/// Whether keys and values are of one block.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum KvSharing {
    /// No other block reads them.
    Own,
    /// Later blocks of this sight read them.
    Gives(Sight),
    /// They are an earlier block's; this block projects only queries.
    Takes(Sight),
}

table! {
    /// Empty without blocks that take keys and values. C: elements in a row of keys and values.
    pub struct SharedKv {
        /// (N, C) each: as attention reads them.
        all,
        window,
        /// (N, C) each: sums of their gradients; backward only.
        d_all,
        d_window,
    }
}

impl SharedKv<TensorShape> {
    /// `rows`: elements in a row of keys and values, for each [`Sight`].
    pub fn plan(rows: [usize; 2], (tokens, dtype, train): (usize, DType, bool)) -> SharedKv<TensorShape> {
        let [all, window] = rows.map(|row| TensorShape::new(Category::Scratch, dtype, tokens, row));
        let [d_all, d_window] = [all, window].map(|of| TensorShape { rows: if train { tokens } else { 0 }, ..of });
        SharedKv { all, window, d_all, d_window }
    }
}

impl SharedKv {
    fn of(&mut self, sight: Sight) -> [&mut Tensor; 2] {
        match sight {
            Sight::All => [&mut self.all, &mut self.d_all],
            Sight::Window => [&mut self.window, &mut self.d_window],
        }
    }
    /// Begins the sums of a micro-batch.
    pub fn begin_backward(&mut self, dev: &dyn Device) -> Result<()> {
        let sums = [&mut self.d_all, &mut self.d_window].into_iter().filter(|sum| sum.width() > 0);
        sums.map(Tensor::all_mut).try_for_each(|sum| dev.zero(sum))
    }
    /// Keeps the keys and values of rows `qkv`.
    pub fn put(&mut self, cx: &Cx, sight: Sight, heads: &AttentionShape, qkv: View) -> Result<()> {
        let [kept, _] = self.of(sight);
        from_rows(cx, heads, qkv, kept.rows_mut(cx.n))
    }
    /// Assigns the keys and values of rows `qkv`.
    pub fn take(&self, cx: &Cx, sight: Sight, heads: &AttentionShape, qkv: ViewMut) -> Result<()> {
        let kept = if sight == Sight::All { &self.all } else { &self.window };
        to_rows(cx, heads, kept.rows(cx.n), qkv)
    }
    /// Adds the keys' and values' part of `dqkv` to the sums. `part` is scratch.
    pub fn collect(
        &mut self,
        cx: &Cx,
        sight: Sight,
        heads: &AttentionShape,
        dqkv: View,
        part: &mut Tensor,
    ) -> Result<()> {
        let ([_, sum], len) = (self.of(sight), cx.n * heads.kv_row());
        from_rows(cx, heads, dqkv, part.rows_mut(cx.n).slice(0..len))?;
        cx.dev.add(part.rows(cx.n).slice(0..len), sum.rows_mut(cx.n))
    }
    /// Adds the sums to the keys' and values' part of `dqkv`.
    pub fn add_to(
        &mut self,
        cx: &Cx,
        sight: Sight,
        heads: &AttentionShape,
        mut dqkv: ViewMut,
        part: &mut Tensor,
    ) -> Result<()> {
        let ([_, sum], len) = (self.of(sight), cx.n * heads.kv_row());
        from_rows(cx, heads, dqkv.as_view(), part.rows_mut(cx.n).slice(0..len))?;
        cx.dev.add(sum.rows(cx.n), part.rows_mut(cx.n).slice(0..len))?;
        to_rows(cx, heads, part.rows(cx.n).slice(0..len), dqkv.reborrow())
    }
}

/// Copies the keys and values of rows of queries, keys and values.
fn from_rows(cx: &Cx, heads: &AttentionShape, qkv: View, dst: ViewMut) -> Result<()> {
    let (row, width) = (heads.row(), heads.kv_row());
    cx.copy_columns([cx.n, width], (qkv, row, row - width), (dst, width, 0))
}
/// The reverse.
fn to_rows(cx: &Cx, heads: &AttentionShape, src: View, qkv: ViewMut) -> Result<()> {
    let (row, width) = (heads.row(), heads.kv_row());
    cx.copy_columns([cx.n, width], (src, width, 0), (qkv, row, row - width))
}
