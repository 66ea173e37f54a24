//! Ulysses (Jacobs et al. 2023, "DeepSpeed Ulysses"): before attention the ranks of a group exchange heads for tokens
//! by an all_to_all, after it tokens for heads. Never attends, and never reorders rows: the tokens of a group's ranks
//! follow one another, so what arrives is in the order of the packed batch.
//!
//! ```text
//! here     U ranks, each N tokens of all heads     (N, heads)
//! packed   a block for each rank's share of heads  (N, share 0), (N, share 1), ...
//! there    all tokens of this rank's share         (U N, share)
//! ```
//!
//! Per layer the forward pass exchanges queries, keys and values, then outputs; the backward pass their gradients, in
//! the other order. Shares need not be equal ([`HeadShare`]).
use super::split::{Slice, SpGrid};
use super::tensor::{Tensor, TensorShape};
use crate::base::{Category, DType, Result};
use crate::comm::{Axis, Collective, CommUse, Tag};
use crate::device::ops::{AttentionShape, CopyColumns};
use crate::device::{Device, View, ViewMut};
use std::ops::Range;

/// The query heads that a rank attends with, and the key/value heads that they read.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct HeadShare {
    pub heads: Range<usize>,
    pub kv_heads: Range<usize>,
}

impl HeadShare {
    /// Ranks have whole key/value heads, as evenly as possible. If there are more ranks, those with the same one divide
    /// its query heads, as evenly as possible. `ranks` are at most the query heads.
    pub fn of(whole: &AttentionShape, ranks: Slice) -> HeadShare {
        let (kv_heads, each) = (whole.kv_heads, whole.heads / whole.kv_heads);
        if ranks.of <= kv_heads {
            let kv_heads = ranks.share(kv_heads);
            return HeadShare { heads: kv_heads.start * each..kv_heads.end * each, kv_heads };
        }
        let readers = |kv: usize| Slice { index: kv, of: kv_heads }.share(ranks.of);
        let kv = (0..kv_heads).find(|&kv| readers(kv).contains(&ranks.index)).unwrap_or(0);
        let part = Slice { index: ranks.index - readers(kv).start, of: readers(kv).len() }.share(each);
        HeadShare { heads: kv * each + part.start..kv * each + part.end, kv_heads: kv..kv + 1 }
    }
    /// The attention over the share alone.
    pub fn shape(&self, whole: &AttentionShape) -> AttentionShape {
        AttentionShape { heads: self.heads.len(), kv_heads: self.kv_heads.len(), ..*whole }
    }
    /// The largest share.
    pub fn widest(whole: &AttentionShape, ranks: usize) -> AttentionShape {
        let shapes = (0..ranks).map(|index| HeadShare::of(whole, Slice { index, of: ranks }).shape(whole));
        shapes.max_by_key(AttentionShape::row).unwrap_or(*whole)
    }
}

/// What a row holds.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum HeadColumns {
    /// Queries, keys and values, or their gradients.
    Qkv,
    /// Outputs, or their gradients.
    Outputs,
}

impl HeadColumns {
    fn width(self, shape: &AttentionShape) -> usize {
        match self {
            HeadColumns::Qkv => shape.row(),
            HeadColumns::Outputs => shape.width(),
        }
    }
    /// The columns of a share in a whole row.
    fn columns(self, whole: &AttentionShape, share: &HeadShare) -> [Range<usize>; 3] {
        let d = whole.head_dim;
        let at = |first: usize, heads: &Range<usize>| (first + heads.start) * d..(first + heads.end) * d;
        let kv = |first| if self == HeadColumns::Qkv { at(first, &share.kv_heads) } else { 0..0 };
        [at(0, &share.heads), kv(whole.heads), kv(whole.heads + whole.kv_heads)]
    }
}

/// Buffers of the exchanges; all empty without Ulysses. U: ranks of a group, N: tokens of each.
pub struct Ulysses<T = Tensor> {
    /// (N, heads of all shares): a block for each rank. Key/value heads that several ranks read repeat.
    packed: T,
    /// (N, 2 head_dim) f32 each: the gradient of a key/value head that several ranks read, and an addend. Backward
    /// only; empty if no head is shared.
    sum: T,
    addend: T,
    /// Elements of the parts, by sp rank.
    parts: [ExchangeParts; 2],
}

/// The parts of an exchange in elements, by sp rank; empty for ranks of other groups. Set for each micro-batch.
#[derive(Clone, Default)]
struct ExchangeParts {
    /// In `packed`.
    blocks: Vec<Range<usize>>,
    /// In the rows of a share.
    bands: Vec<Range<usize>>,
}

impl Ulysses<TensorShape> {
    /// For up to `tokens` rows on each rank of `grid`, activations of `dtype`. `whole`: the heads of a tp rank.
    pub fn plan(
        whole: &AttentionShape,
        grid: SpGrid,
        tokens: usize,
        dtype: DType,
        train: bool,
    ) -> Ulysses<TensorShape> {
        let ranks = grid.ulysses.of;
        let packed = (0..ranks).map(|index| HeadShare::of(whole, Slice { index, of: ranks }).shape(whole).row()).sum();
        let tokens = if ranks > 1 { tokens } else { 0 };
        let shared = if train && ranks > whole.kv_heads { tokens } else { 0 };
        let scratch = |dtype, rows, width| TensorShape::new(Category::Scratch, dtype, rows, width);
        let empty = ExchangeParts { blocks: vec![0..0; grid.ranks()], bands: vec![0..0; grid.ranks()] };
        Ulysses {
            packed: scratch(dtype, tokens, packed).through(Axis::Sp, CommUse::Reduced),
            sum: scratch(DType::F32, shared, 2 * whole.head_dim),
            addend: scratch(DType::F32, shared, 2 * whole.head_dim),
            parts: [empty.clone(), empty],
        }
    }
}

impl<T> Ulysses<T> {
    pub(super) fn map<U>(&self, f: &mut dyn FnMut(&'static str, &T) -> Result<U>) -> Result<Ulysses<U>> {
        let Ulysses { packed, sum, addend, parts } = self;
        Ok(Ulysses {
            packed: f("packed", packed)?,
            sum: f("sum", sum)?,
            addend: f("addend", addend)?,
            parts: parts.clone(),
        })
    }
}

/// The exchanges of one layer.
pub(super) struct HeadExchange<'a> {
    pub dev: &'a dyn Device,
    /// The ranks of sp.
    pub group: &'a dyn Collective,
    pub grid: SpGrid,
    /// All heads of a tp rank.
    pub whole: &'a AttentionShape,
    pub layer: usize,
}

impl HeadExchange<'_> {
    /// Shares of the group's ranks, in order.
    fn shares(&self) -> impl Iterator<Item = HeadShare> {
        let of = self.grid.ulysses.of;
        (0..of).map(move |index| HeadShare::of(self.whole, Slice { index, of }))
    }
    /// The attention over this rank's share.
    pub fn shape(&self) -> AttentionShape {
        HeadShare::of(self.whole, self.grid.ulysses).shape(self.whole)
    }

    /// Sets the parts for micro-batches of `n` tokens on each rank.
    pub fn set_tokens(&self, ulysses: &mut Ulysses, n: usize) {
        for (kind, ExchangeParts { blocks, bands }) in
            [HeadColumns::Qkv, HeadColumns::Outputs].into_iter().zip(&mut ulysses.parts)
        {
            let (band, mut at) = (n * kind.width(&self.shape()), 0);
            for (index, share) in self.shares().enumerate() {
                let rank = self.grid.rank(self.grid.ring.index, index);
                let end = at + n * kind.width(&share.shape(self.whole));
                (blocks[rank], bands[rank]) = (at..end, index * band..(index + 1) * band);
                at = end;
            }
        }
    }

    /// Assigns `there (U N, share)` from `here (N, heads)`.
    pub fn to_heads(
        &self,
        what: &'static str,
        kind: HeadColumns,
        ulysses: &mut Ulysses,
        here: View,
        there: ViewMut,
    ) -> Result<()> {
        let Ulysses { packed, parts, .. } = ulysses;
        let (ExchangeParts { blocks, bands }, row) = (&parts[kind as usize], kind.width(self.whole));
        let n = here.len() / row;
        for (share, block) in self.shares().zip(self.of_group(blocks)) {
            let mut at = 0;
            for columns in kind.columns(self.whole, &share) {
                let block = packed.all_mut().slice(block.clone());
                self.copy(
                    n,
                    columns.len(),
                    (here, row, columns.start),
                    (block, kind.width(&share.shape(self.whole)), at),
                )?;
                at += columns.len();
            }
        }
        self.exchange(what, (packed.all(), blocks), (there, bands))
    }

    /// Assigns `here (N, heads)` from `there (U N, share)`. Gradients of a key/value head that several ranks read are
    /// summed in f32, in rank order.
    pub fn to_tokens(
        &self,
        what: &'static str,
        kind: HeadColumns,
        ulysses: &mut Ulysses,
        there: View,
        mut here: ViewMut,
    ) -> Result<()> {
        let Ulysses { packed, sum, addend, parts, .. } = ulysses;
        let (ExchangeParts { blocks, bands }, row) = (&parts[kind as usize], kind.width(self.whole));
        let n = here.len() / row;
        self.exchange(what, (there, bands), (packed.all_mut(), blocks))?;
        let sums = kind == HeadColumns::Qkv && self.grid.ulysses.of > self.whole.kv_heads;
        let mut last = None;
        for (share, block) in self.shares().zip(self.of_group(blocks)) {
            let (block, width) = (packed.all().slice(block.clone()), kind.width(&share.shape(self.whole)));
            let [q, k, v] = kind.columns(self.whole, &share);
            self.copy(n, q.len(), (block, width, 0), (here.reborrow(), row, q.start))?;
            if !sums {
                self.copy(n, k.len(), (block, width, q.len()), (here.reborrow(), row, k.start))?;
                self.copy(n, v.len(), (block, width, q.len() + k.len()), (here.reborrow(), row, v.start))?;
                continue;
            }
            let d = self.whole.head_dim;
            let is_first = last.replace(share.kv_heads.start) != Some(share.kv_heads.start);
            let into = if is_first { &mut *sum } else { &mut *addend };
            self.copy(n, 2 * d, (block, width, q.len()), (into.rows_mut(n), 2 * d, 0))?;
            if !is_first {
                self.dev.add(addend.rows(n), sum.rows_mut(n))?;
            }
            for (at, columns) in [(0, k), (d, v)] {
                self.copy(n, d, (sum.rows(n), 2 * d, at), (here.reborrow(), row, columns.start))?;
            }
        }
        Ok(())
    }

    /// The parts of the group's ranks, among parts by sp rank.
    fn of_group<'a>(&self, parts: &'a [Range<usize>]) -> &'a [Range<usize>] {
        let first = self.grid.rank(self.grid.ring.index, 0);
        &parts[first..first + self.grid.ulysses.of]
    }
    /// Copies `width` columns of `n` rows. A view, the length of its rows, and the first column.
    fn copy(
        &self,
        n: usize,
        width: usize,
        (src, src_row, from): (View, usize, usize),
        (dst, dst_row, to): (ViewMut, usize, usize),
    ) -> Result<()> {
        if width == 0 {
            return Ok(());
        }
        let end = dst.len();
        let (src, dst) = (src.slice(from..src.len()), dst.slice(to..end));
        self.dev.copy_columns(CopyColumns { rows: n, width, src_row, dst_row, src, dst })
    }
    fn exchange(
        &self,
        what: &'static str,
        (send, sends): (View, &[Range<usize>]),
        (recv, recvs): (ViewMut, &[Range<usize>]),
    ) -> Result<()> {
        let ticket = self.group.all_to_all(Tag::new(what, self.layer), send, sends, recv, recvs)?;
        self.group.wait(ticket)?;
        self.group.wait_sent(ticket)
    }
}
