//! The KV cache: keys and values of earlier tokens of many sequences, so that generating a token costs one token's
//! work. Never decides which sequence a page or a slot belongs to, and never evicts.
//!
//! Memory is divided into pages of [`PAGE`] tokens, and a page has the same number in every layer. Each pass first
//! stores the keys and values of its rows, normalized and rotated, then each row attends to all of its sequence.
use super::context::Cx;
use super::spec::Spec;
use super::split::Groups;
use super::tensor::{Tensor, TensorShape, table};
use crate::base::{Category, DType, Result};
use crate::comm::{Axis, CommUse};
use crate::device::ops::{AttentionPaged, AttentionShape, CopyColumns, PagedRows};
use crate::device::{Device, View, ViewMut};

/// Tokens in a page.
pub const PAGE: usize = 32;

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
        /// (N, heads * head_dim) f32, (N, 2) u32 and (longest, C): scratch of attention, with C elements in a block's
        /// widest row of keys and values.
        o_pass,
        of_queries,
        gathered,
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
        let most = |of: &dyn Fn(usize) -> usize| (0..spec.layers).map(of).max().unwrap_or(0);
        let (all, kv_row) = ((0..spec.layers).map(|i| spec.cached(i)).sum(), most(&|i| spec.cached(i)));
        let width = most(&|i| spec.heads * spec.heads_of(i).head_dim);
        let scratch = |dtype, rows, width| TensorShape::new(Category::Scratch, dtype, rows, width);
        KvCache {
            kv: TensorShape::new(Category::Saved, dtype, pages * PAGE, all),
            o_pass: scratch(DType::F32, rows, width),
            of_queries: scratch(DType::U32, rows, 2),
            gathered: scratch(dtype, longest, kv_row),
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
    /// As [`Device::attention`], but over earlier tokens too: assigns `o` and `lse` of the batch's rows, and stores
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
        let (dev, c, row) = (cx.dev, shape.kv_row(), shape.row());
        let tokens = self.kv.capacity();
        let block = tokens * before..tokens * (before + c);
        for run in runs {
            let mut done = 0;
            while done < run.rows {
                let at = run.past + done;
                let rows = (PAGE - at % PAGE).min(run.rows - done);
                let first = run.first + done;
                let src = qkv.slice(first * row + row - c..(first + rows) * row);
                let to = run.pages[at / PAGE] as usize * PAGE + at % PAGE;
                let dst = self.kv.all_mut().slice(block.start + to * c..block.start + (to + rows) * c);
                dev.copy_columns(CopyColumns { rows, width: c, src_row: row, dst_row: c, src, dst })?;
                done += rows;
            }
        }
        dev.attention_paged(AttentionPaged {
            shape,
            runs,
            page: PAGE,
            qkv,
            kv: self.kv.all().slice(block),
            o,
            lse,
            o_pass: self.o_pass.rows_mut(cx.n),
            of_queries: self.of_queries.rows_mut(cx.n),
            gathered: self.gathered.all_mut(),
        })
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
