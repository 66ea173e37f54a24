//! Keys and values of the tokens that came before: what lets a sequence go on one token at a time, for the price
//! of one. Never holds more than one sequence, and never forgets a token of it by itself.
//!
//! A sequence begins with all the tokens that there are, by the attention of any pass, which also leaves its keys and
//! values here, as they were when they met: normalised and rotated. From then on a pass is over one token: its keys and
//! values are laid behind the others, and its query attends to all of them in one pass of ring attention, which is
//! attention over a block of keys and values that are not the queries' own.
use super::context::{Cx, Past};
use super::spec::Spec;
use super::split::Groups;
use super::tensor::{Tensor, TensorShape, table};
use crate::base::{Category, DType, Result};
use crate::device::ops::{Attention, AttentionPass, AttentionShape, CopyColumns};
use crate::device::{Device, View, ViewMut};

table! {
    /// Empty where no sequence goes on. B: blocks, T: tokens of the sequence at most, C: elements in a row of keys and
    /// values.
    Cache {
        /// (B T, C), block after block.
        kv,
        /// (1, 2) u32: the keys that the next token's query sees.
        sees,
        /// The same in layers within a window.
        near,
        /// (1, heads * head_dim) f32: what it makes of their values.
        o,
    }
}

impl Cache<TensorShape> {
    /// `spec`: as wide as this rank's part. `tokens`: T.
    pub fn plan(spec: &Spec, dtype: DType, tokens: usize) -> Cache<TensorShape> {
        let kv_row = 2 * spec.kv_heads * spec.head_dim;
        let one = |dtype, width| TensorShape::new(Category::Scratch, dtype, tokens.min(1), width);
        Cache {
            kv: TensorShape::new(Category::Saved, dtype, spec.layers * tokens, kv_row),
            sees: one(DType::U32, 2),
            near: one(DType::U32, 2),
            o: one(DType::F32, spec.heads * spec.head_dim),
        }
    }
    pub fn allocate(&self, dev: &dyn Device, groups: &Groups) -> Result<Cache> {
        self.map(&mut |name, shape: &TensorShape| shape.allocate(name, dev, groups))
    }
}

impl Cache {
    /// Says what the next token sees, in layers within `window` and in the others. At first it is not asked.
    pub fn set_ranges(&mut self, dev: &dyn Device, past: Past, window: usize) -> Result<()> {
        if past.tokens == 0 {
            return Ok(());
        }
        let end = past.tokens as u32 + 1;
        let near = end.saturating_sub(u32::try_from(window).unwrap_or(u32::MAX));
        dev.upload(bytemuck::bytes_of(&[0, end]), self.sees.rows_mut(1))?;
        dev.upload(bytemuck::bytes_of(&[near, end]), self.near.rows_mut(1))
    }

    /// As [`Device::attention`], over the tokens before as well: assigns `o` and `lse` of the batch's rows, and keeps
    /// their keys and values.
    pub fn attention(
        &mut self,
        cx: &Cx,
        past: Past,
        shape: AttentionShape,
        qkv: View,
        o: ViewMut,
        lse: ViewMut,
    ) -> Result<()> {
        let (dev, c, row) = (cx.dev, shape.kv_row(), shape.row());
        let block = (cx.layer - 1) * past.room;
        let end = block + past.tokens + cx.n;
        let (src, dst) = (qkv.slice(row - c..qkv.len()), self.kv.band_mut(&(block + past.tokens..end)));
        dev.copy_columns(CopyColumns { rows: cx.n, width: c, src_row: row, dst_row: c, src, dst })?;
        if past.tokens == 0 {
            return dev.attention(Attention { shape, cu_seqlens: cx.batch.cu_seqlens, qkv, o, lse });
        }
        let of_queries = if shape.window == 0 { &self.sees } else { &self.near }.rows(1);
        let (kv, pass) = (self.kv.band(&(block..end)), self.o.rows_mut(1));
        dev.attention_pass(AttentionPass { shape, of_queries, qkv, kv, o: pass, lse })?;
        dev.copy(self.o.rows(1), o)
    }
}
