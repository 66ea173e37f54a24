//! The KV cache: keys and values of earlier tokens, so that generating a token costs one token's work. Never holds more
//! than one sequence, and never evicts.
//!
//! The prompt runs through ordinary attention, which also stores its keys and values here, already normalized and
//! rotated. After that, each pass is over one token: its keys and values are appended, and its query attends to all of
//! them with one call of the kernel of ring attention, whose keys and values may come from another buffer than the
//! queries.
use super::context::{Cx, Past};
use super::spec::Spec;
use super::split::Groups;
use super::tensor::{Tensor, TensorShape, table};
use crate::base::{Category, DType, Result};
use crate::device::ops::{Attention, AttentionPass, AttentionShape, CopyColumns};
use crate::device::{Device, View, ViewMut};

table! {
    /// Empty unless a sequence is being generated. B: blocks, T: capacity in tokens, C: elements in a row of keys and
    /// values.
    pub struct KvCache {
        /// (B T, C), block after block.
        kv,
        /// (1, 2) u32: the range of keys that the next token's query attends to.
        sees,
        /// The same for layers with a sliding window.
        near,
        /// (1, heads * head_dim) f32: the attention output.
        o,
    }
}

impl KvCache<TensorShape> {
    /// `spec`: this rank's widths. `tokens`: T.
    pub fn plan(spec: &Spec, dtype: DType, tokens: usize) -> KvCache<TensorShape> {
        let kv_row = 2 * spec.kv_heads * spec.head_dim;
        let one = |dtype, width| TensorShape::new(Category::Scratch, dtype, tokens.min(1), width);
        KvCache {
            kv: TensorShape::new(Category::Saved, dtype, spec.layers * tokens, kv_row),
            sees: one(DType::U32, 2),
            near: one(DType::U32, 2),
            o: one(DType::F32, spec.heads * spec.head_dim),
        }
    }
    pub fn allocate(&self, dev: &dyn Device, groups: &Groups) -> Result<KvCache> {
        self.map(&mut |name, shape: &TensorShape| shape.allocate(name, dev, groups))
    }
}

impl KvCache {
    /// Sets the key ranges of the next token, with and without the `window`. The prompt's pass does not read them.
    pub fn set_ranges(&mut self, dev: &dyn Device, past: Past, window: usize) -> Result<()> {
        if past.tokens == 0 {
            return Ok(());
        }
        let end = past.tokens as u32 + 1;
        let near = end.saturating_sub(u32::try_from(window).unwrap_or(u32::MAX));
        dev.upload(bytemuck::bytes_of(&[0, end]), self.sees.rows_mut(1))?;
        dev.upload(bytemuck::bytes_of(&[near, end]), self.near.rows_mut(1))
    }

    /// As [`Device::attention`], but over earlier tokens too: assigns `o` and `lse` of the batch's rows, and stores
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
            return dev.attention(Attention { shape, documents: cx.batch.documents, qkv, o, lse });
        }
        let of_queries = if shape.window == 0 { &self.sees } else { &self.near }.rows(1);
        let (kv, pass) = (self.kv.band(&(block..end)), self.o.rows_mut(1));
        dev.attention_pass(AttentionPass { shape, of_queries, qkv, kv, o: pass, lse })?;
        dev.copy(self.o.rows(1), o)
    }
}
