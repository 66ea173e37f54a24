//! Keys and values of the tokens that came before: what lets a sequence go on one token at a time, for the price of one.
//! Never holds more than one sequence, and never forgets a token of it by itself.
//!
//! A sequence begins with all the tokens that there are, by the attention of any pass, which also leaves its keys and values
//! here, as they were when they met: normalised and rotated. From then on a pass is over one token: its keys and values are
//! laid behind the others, and its query attends to all of them in one pass of ring attention, which is attention over a
//! block of keys and values that are not the queries' own.
use super::context::Cx;
use super::parallel::Groups;
use super::spec::Spec;
use super::workspace::{Fixed, Shape, Tensor, Workspace, table};
use crate::base::{Category, DType, Error, Result};
use crate::device::{Attention, Columns, Device, View, ViewMut};

table! {
    /// Empty where no sequence goes on. B: blocks, T: tokens of the sequence at most, C: elements in a row of keys and values.
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

impl Cache<Shape> {
    /// `spec`: as wide as this rank's part. `tokens`: T.
    pub fn plan(spec: &Spec, dtype: DType, tokens: usize) -> Cache<Shape> {
        let kv_row = 2 * spec.kv_heads * spec.head_dim;
        let one = |dtype, width| Shape::new(Category::Scratch, dtype, tokens.min(1), width);
        Cache {
            kv: Shape::new(Category::Saved, dtype, spec.layers * tokens, kv_row),
            sees: one(DType::U32, 2),
            near: one(DType::U32, 2),
            o: one(DType::F32, spec.heads * spec.head_dim),
        }
    }
    fn allocate(&self, dev: &dyn Device, groups: &Groups) -> Result<Cache> {
        self.map(&mut |name, shape: &Shape| shape.allocate(name, dev, groups))
    }
}

/// A table of positions of `rows` rows, none where there is no rotation, as long as `tokens` need.
fn turns(spec: &Spec, rows: usize, tokens: usize) -> Shape {
    let rows = if rows > 0 { rows.max(tokens.min(spec.max_len)) } else { 0 };
    Shape::new(Category::Other, DType::F32, rows, spec.head_dim)
}

impl Workspace<Shape, ()> {
    /// Bytes that [`Workspace::remember`] adds to this.
    pub(super) fn planned_memory(&self, spec: &Spec, dtype: DType, tokens: usize) -> Vec<(Category, usize)> {
        let mut bytes = vec![];
        let mut count = |_, shape: &Shape| {
            bytes.push((shape.category, shape.bytes()));
            Ok(())
        };
        Cache::plan(spec, dtype, tokens).map(&mut count).ok(); // counting cannot fail
        let Fixed { table, local_table, .. } = &self.fixed;
        bytes.extend([table, local_table].map(|t| (t.category, turns(spec, t.rows, tokens).bytes() - t.bytes())));
        bytes
    }
}

impl Workspace {
    /// Room for keys and values of `tokens` of one sequence, and tables of as many positions, which are then to be filled.
    pub(super) fn remember(&mut self, spec: &Spec, dev: &dyn Device, tokens: usize) -> Result<()> {
        let Workspace { scratch, fixed: Fixed { table, local_table, .. }, groups, .. } = self;
        let plan = |tokens| Cache::plan(spec, scratch.act.dtype(), tokens);
        scratch.cache = plan(0).allocate(dev, groups)?; // first what was there goes
        scratch.cache = plan(tokens).allocate(dev, groups)?;
        for (name, table) in [("table", table), ("local_table", local_table)] {
            let longer = turns(spec, table.capacity(), tokens);
            if longer.rows > table.capacity() {
                *table = longer.allocate(name, dev, groups)?;
            }
        }
        Ok(())
    }
}

/// Where a batch stands in its sequence: how many tokens of it came before, and how many there may be.
#[derive(Clone, Copy, Debug)]
pub struct Past {
    pub tokens: usize,
    pub room: usize,
}

impl Past {
    /// An error unless `n` more tokens may come: all at first, then one by one.
    pub fn check(&self, n: usize) -> Result<()> {
        let Past { tokens, room } = *self;
        match (tokens == 0 || n == 1) && tokens + n <= room {
            true => Ok(()),
            false => Err(Error::op("go on", format!("{n} tokens after {tokens}, with room for {room}"))),
        }
    }

    /// Says what the next token sees, in layers within `window` and in the others. At first it is not asked.
    pub fn look(&self, dev: &dyn Device, cache: &mut Cache, window: usize) -> Result<()> {
        if self.tokens == 0 {
            return Ok(());
        }
        let end = self.tokens as u32 + 1;
        let near = end.saturating_sub(u32::try_from(window).unwrap_or(u32::MAX));
        dev.upload(bytemuck::bytes_of(&[0, end]), cache.sees.rows_mut(1))?;
        dev.upload(bytemuck::bytes_of(&[near, end]), cache.near.rows_mut(1))
    }

    /// As [`Device::attention`], over the tokens before as well: assigns `o` and `lse` of the batch's rows, and keeps their keys
    /// and values.
    pub fn attention(
        &self,
        cx: &Cx,
        shape: &Attention,
        cache: &mut Cache,
        qkv: View,
        o: ViewMut,
        lse: ViewMut,
    ) -> Result<()> {
        let (dev, c, row) = (cx.dev, shape.kv_row(), shape.row());
        let block = (cx.layer - 1) * self.room;
        let end = block + self.tokens + cx.n;
        let columns = Columns { rows: cx.n, width: c, src_row: row, dst_row: c };
        dev.copy_columns(&columns, qkv.slice(row - c..qkv.len()), cache.kv.band_mut(&(block + self.tokens..end)))?;
        if self.tokens == 0 {
            return dev.attention(shape, cx.batch.cu_seqlens, qkv, o, lse);
        }
        let sees = if shape.window == 0 { &cache.sees } else { &cache.near };
        dev.attention_pass(shape, sees.rows(1), qkv, cache.kv.band(&(block..end)), cache.o.rows_mut(1), lse)?;
        dev.copy(cache.o.rows(1), o)
    }
}
