//! The KV cache: keys and values of earlier tokens of many sequences, so that generating a token costs one token's
//! work. Never decides which sequence a page or a slot belongs to, and never evicts.
//!
//! Memory is divided into pages of [`PAGE`] tokens, and a page has the same number in every layer. In each layer, a
//! pass stores the keys and values of its rows, normalized and rotated, then each row attends to all of its sequence.
use super::context::Cx;
use super::spec::Spec;
use super::split::Groups;
use super::tensor::{Tensor, TensorShape, table};
use crate::base::{Category, DType, Result};
use crate::comm::{Axis, CommUse};
pub use crate::device::ops::PAGE;
use crate::device::ops::{AttentionPaged, AttentionShape, PagedRows, most_of_paged_table, paged_table, paged_words};
use crate::device::{Device, View, ViewMut};

/// How large a cache of keys and values is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CacheSize {
    pub pages: usize,
    /// Maximum rows of a pass.
    pub rows: usize,
    /// Maximum tokens of a sequence.
    pub longest: usize,
    /// Sequences with a state of their own, for mixers that have one.
    pub slots: usize,
}

impl CacheSize {
    /// Pages of a sequence of `tokens`.
    pub fn pages_of(tokens: usize) -> usize {
        tokens.div_ceil(PAGE)
    }
}

table! {
    /// Empty unless text is being generated. P: pages, N: rows of a pass.
    pub struct KvCache {
        /// (P PAGE, E) with E elements of a token's keys and values in all blocks: block after block, in each of which
        /// a token's are a row.
        kv,
        /// u32: where the rows of a pass are ([`paged_table`]).
        table,
        /// (N) u32: the tokens that the first rank of tp has drawn.
        drawn,
        /// (N) i32 and f64: the same as targets, and their losses.
        targets,
        losses,
    }
}

/// Elements of a token's keys and values in the blocks before those of block `i`. `spec`: this rank's widths.
pub(super) fn cached_before(spec: &Spec, i: usize) -> usize {
    (0..spec.kv_source(i).unwrap_or(i)).map(|i| spec.cached(i)).sum()
}

impl KvCache<TensorShape> {
    /// `spec`: this rank's widths.
    pub fn plan(spec: &Spec, dtype: DType, size: &CacheSize) -> KvCache<TensorShape> {
        let &CacheSize { pages, rows, longest, .. } = size;
        let all = (0..spec.layers).map(|i| spec.cached(i)).sum();
        let scratch = |dtype, rows, width| TensorShape::new(Category::Scratch, dtype, rows, width);
        KvCache {
            kv: TensorShape::new(Category::Saved, dtype, pages * PAGE, all),
            table: scratch(DType::U32, most_of_paged_table(rows, longest), 1),
            drawn: scratch(DType::U32, rows, 1).through(Axis::Tp, CommUse::Reduced),
            targets: scratch(DType::I32, rows, 1),
            losses: scratch(DType::F64, rows, 1),
        }
    }
    pub fn allocate(&self, dev: &dyn Device, groups: &Groups) -> Result<KvCache> {
        self.map(&mut |name, shape: &TensorShape| shape.allocate(name, dev, groups))
    }
}

impl KvCache {
    /// Tells the device where the rows of the next pass are.
    pub fn begin(&mut self, dev: &dyn Device, runs: &[PagedRows]) -> Result<()> {
        let table = paged_table(runs);
        dev.upload(bytemuck::cast_slice(&table), self.table.rows_mut(table.len()))
    }

    /// The same, once it has been told.
    pub fn table(&self, runs: &[PagedRows]) -> View<'_> {
        self.table.rows(paged_words(runs))
    }

    /// Like [`Device::attention`], but over earlier tokens too: assigns `o` and `lse` of the batch's rows, and stores
    /// their keys and values, which are after those of blocks with `before` elements of a token.
    #[allow(clippy::too_many_arguments)] // its operands
    pub fn attention(
        &mut self,
        cx: &Cx,
        runs: &[PagedRows],
        shape: AttentionShape,
        before: usize,
        qkv: View,
        o: ViewMut,
        lse: ViewMut,
    ) -> Result<()> {
        let (tokens, c) = (self.kv.capacity(), shape.kv_row());
        let kv = self.kv.all_mut().slice(tokens * before..tokens * (before + c));
        let table = self.table.rows(paged_words(runs));
        cx.dev.attention_paged(AttentionPaged { shape, runs, table, qkv, kv, o, lse })
    }

    /// Copies the first `tokens` of a page to another one, in all `blocks`, given as elements of a token before them
    /// and of theirs.
    pub fn copy_page(
        &mut self,
        dev: &dyn Device,
        blocks: impl Iterator<Item = (usize, usize)>,
        pages: [u32; 2],
        tokens: usize,
    ) -> Result<()> {
        let room = self.kv.capacity();
        for (before, width) in blocks {
            let [from, to] = pages.map(|page| room * before + page as usize * PAGE * width);
            self.kv.copy_within(dev, [from, to], tokens * width)?;
        }
        Ok(())
    }
}
