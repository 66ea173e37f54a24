//! Core attention of one layer, over tokens that the ranks of sp share: plain on one rank; with ring attention,
//! Ulysses, or a ring of Ulysses groups on several. Never projects or rotates: queries, keys and values arrive as
//! attention reads them, for this rank's tokens.
use super::context::Cx;
use super::ring::{RingAttention, RingBuffers};
use super::split::{Groups, SpGrid, SpImpl, Split};
use super::tensor::{Tensor, TensorShape, table};
use super::ulysses::{HeadColumns, HeadExchange, HeadShare, Ulysses};
use crate::base::{Category, DType, Result};
use crate::comm::{Axis, Collective, CommUse};
use crate::device::ops::{Attention, AttentionBackward, AttentionShape, BackwardOf, HeadSinks, HeadSinksBackward};
use crate::device::{Device, View, ViewMut};
use std::ops::Range;

table! {
    /// What attention reads and writes, saved for backward. With Ulysses, of a share of heads for the tokens of U
    /// ranks; otherwise U is 1 and the share is all heads of the tp rank.
    pub struct CoreSaved {
        /// (U N, (heads + 2 kv_heads) head_dim): the input; empty without Ulysses.
        qkv,
        /// (U N, heads * head_dim)
        o,
        /// (heads, U N) f32
        lse,
        /// (N, all heads * head_dim): the outputs for this rank's tokens; empty without Ulysses, where `o` is that.
        own,
    }
}
table! {
    /// Scratch of attention. The fields here: backward only.
    pub struct CoreScratch {
        /// (heads, U N) f32
        delta,
        /// f32, with the size that [`Device::backward_scratch`] requests.
        sums,
        /// (U N, heads * head_dim), (U N, (heads + 2 kv_heads) head_dim): gradients of the share; empty without
        /// Ulysses.
        d_o,
        dqkv,
        ;
        ring: RingBuffers,
        ulysses: Ulysses,
    }
}

/// What the buffers of a rank depend on.
pub struct CorePlan<'a> {
    /// Shape of a tp rank's layers, ignoring windows: that with the widest heads.
    pub heads: &'a AttentionShape,
    /// That with the widest keys and values, and that with the narrowest heads; the same with Ulysses.
    pub keys: &'a AttentionShape,
    pub narrow: &'a AttentionShape,
    /// Whether there are layers with full attention, and with a sliding window.
    pub sights: [bool; 2],
    pub split: &'a Split,
    /// Maximum tokens of a rank.
    pub tokens: usize,
    pub dtype: DType,
    /// Whether to allocate buffers for backward.
    pub train: bool,
}

impl CorePlan<'_> {
    fn grid(&self) -> SpGrid {
        self.split.grid(self.heads.heads)
    }
    /// Attention over this rank's share of heads, and over the largest share.
    fn shares(&self) -> [AttentionShape; 2] {
        let group = self.grid().ulysses;
        [HeadShare::of(self.heads, group).shape(self.heads), HeadShare::widest(self.heads, group.of)]
    }
    pub fn saved(&self) -> CoreSaved<TensorShape> {
        let (ranks, [own, widest]) = (self.grid().ulysses.of, self.shares());
        let saved = |dtype, rows, width| TensorShape::new(Category::Saved, dtype, rows, width);
        let all = |dtype, width| saved(dtype, ranks * self.tokens, width);
        let is_cut = ranks > 1;
        let o = all(self.dtype, own.width());
        CoreSaved {
            qkv: all(self.dtype, if is_cut { own.row() } else { 0 }),
            o: if is_cut { o.through(Axis::Sp, CommUse::Reduced).reserve(widest.width()) } else { o },
            lse: all(DType::F32, own.heads),
            own: saved(self.dtype, if is_cut { self.tokens } else { 0 }, self.heads.width()),
        }
    }
    pub fn scratch(&self) -> CoreScratch<TensorShape> {
        let &CorePlan { heads, keys, narrow, split, tokens, dtype, train, .. } = self;
        let (grid, shares @ [own, widest]) = (self.grid(), self.shares());
        let [narrow, _] = CorePlan { heads: narrow, ..*self }.shares();
        let (all, is_cut) = (grid.ulysses.of * tokens, grid.ulysses.of > 1);
        let only = |width| if is_cut { width } else { 0 };
        let back = |dtype, width| TensorShape::new(Category::Scratch, dtype, if train { all } else { 0 }, width);
        CoreScratch {
            delta: back(DType::F32, own.heads),
            sums: TensorShape { scratch_of: [own, narrow].map(|of| Some(BackwardOf::Attention(of))), ..back(dtype, 0) },
            d_o: back(dtype, only(own.width())),
            dqkv: back(dtype, only(own.row())).through(Axis::Sp, CommUse::Reduced).reserve(only(widest.row())),
            ring: RingBuffers::plan(
                shares,
                CorePlan { heads: keys, ..*self }.shares(),
                self.sights,
                (split.sp_impl, grid.ring.of),
                all,
                dtype,
                train,
            ),
            ulysses: Ulysses::plan(heads, grid, tokens, dtype, train),
        }
    }
}

impl CoreSaved<TensorShape> {
    pub fn allocate(&self, dev: &dyn Device, groups: &Groups) -> Result<CoreSaved> {
        self.map(&mut |name, shape: &TensorShape| shape.allocate(name, dev, groups))
    }
}
impl CoreScratch<TensorShape> {
    pub fn allocate(&self, dev: &dyn Device, groups: &Groups) -> Result<CoreScratch> {
        self.map(&mut |name, shape: &TensorShape| shape.allocate(name, dev, groups))
    }
}
impl CoreSaved {
    /// The outputs for the `n` tokens of this rank.
    pub fn outputs(&self, n: usize) -> View<'_> {
        if self.own.len() > 0 { self.own.rows(n) } else { self.o.rows(n) }
    }
}

/// Core attention of one layer.
pub struct CoreAttention<'a> {
    pub dev: &'a dyn Device,
    /// The ranks of sp.
    pub group: &'a dyn Collective,
    pub split: Split,
    /// All heads of the tp rank.
    pub shape: &'a AttentionShape,
    /// Both as in [`Batch`](super::context::Batch).
    pub cu_seqlens: View<'a>,
    pub documents: View<'a>,
    pub layer: usize,
    /// (heads): a score per head without a key or a value.
    pub sinks: Option<View<'a>>,
}

impl<'a> CoreAttention<'a> {
    pub(super) fn of(cx: &'a Cx, shape: &'a AttentionShape) -> CoreAttention<'a> {
        let (dev, group, batch) = (cx.dev, &*cx.groups.sp, &cx.batch);
        let (cu_seqlens, documents) = (batch.cu_seqlens, batch.documents);
        CoreAttention { dev, group, split: cx.split, shape, cu_seqlens, documents, layer: cx.layer, sinks: None }
    }
}

impl CoreAttention<'_> {
    /// Prepares the layers of a new batch. `rows` (sp ranks, N): each rank's row numbers in the batch; `windows`: of
    /// the layers, as in [`AttentionShape::window`].
    pub fn begin(&self, scratch: &mut CoreScratch, windows: impl IntoIterator<Item = usize>, rows: View) -> Result<()> {
        let exchange = self.exchange();
        exchange.set_tokens(&mut scratch.ulysses, rows.len() / exchange.grid.ranks());
        let ring = exchange.grid.ring;
        if ring.of == 1 {
            return Ok(());
        }
        scratch.ring.set_ranges(self.dev, ring, self.shape, windows, self.cu_seqlens, rows)
    }

    /// Assigns `saved` from `qkv (N, (heads + 2 kv_heads) head_dim)`. `attended`: except attention's own outputs, which
    /// are there.
    pub fn forward(&self, scratch: &mut CoreScratch, qkv: View, saved: &mut CoreSaved, attended: bool) -> Result<()> {
        let (exchange, n) = (self.exchange(), self.shape.rows("attention", qkv.len())?);
        let CoreScratch { ring, ulysses, .. } = scratch;
        let all = exchange.grid.ulysses.of * n;
        let CoreSaved { qkv: there, o, lse, own } = saved;
        let is_cut = exchange.grid.ulysses.of > 1;
        if is_cut {
            exchange.to_heads("ulysses qkv", HeadColumns::Qkv, ulysses, qkv, there.rows_mut(all))?;
        }
        if !attended {
            let qkv = if is_cut { there.rows(all) } else { qkv };
            let (mut o, mut lse) = (o.rows_mut(all), lse.rows_mut(all));
            let shape = exchange.shape();
            match self.ring(&shape) {
                Some(attention) => attention.forward(ring, qkv, o.reborrow(), lse.reborrow())?,
                None => {
                    let (documents, o, lse) = (self.documents, o.reborrow(), lse.reborrow());
                    self.dev.attention(Attention { shape, documents, qkv, o, lse })?
                }
            }
            self.sink(&shape, o, lse)?;
        }
        match is_cut {
            true => exchange.to_tokens("ulysses o", HeadColumns::Outputs, ulysses, o.rows(all), own.rows_mut(n)),
            false => Ok(()),
        }
    }

    /// Assigns `dqkv` of this rank's tokens, to which the queries of all ranks contribute. `qkv` is forward's.
    pub fn backward(
        &self,
        scratch: &mut CoreScratch,
        qkv: View,
        saved: &CoreSaved,
        d_o: View,
        dqkv: ViewMut,
    ) -> Result<()> {
        let (exchange, n) = (self.exchange(), self.shape.rows("attention", qkv.len())?);
        let CoreScratch { delta, sums, d_o: d_o_there, dqkv: dqkv_there, ring, ulysses } = scratch;
        let all = exchange.grid.ulysses.of * n;
        let (o, lse, delta, sums) = (saved.o.rows(all), saved.lse.rows(all), delta.rows_mut(all), sums.all_mut());
        let (shape, documents) = (exchange.shape(), self.documents);
        let attend = |qkv, d_o, dqkv| match self.ring(&shape) {
            Some(attention) => attention.backward(ring, qkv, o, lse, d_o, [delta, sums], dqkv),
            None => {
                self.dev.attention_backward(AttentionBackward { shape, documents, qkv, o, lse, d_o, delta, sums, dqkv })
            }
        };
        if exchange.grid.ulysses.of == 1 {
            return attend(qkv, d_o, dqkv);
        }
        exchange.to_heads("ulysses d_o", HeadColumns::Outputs, ulysses, d_o, d_o_there.rows_mut(all))?;
        attend(saved.qkv.rows(all), d_o_there.rows(all), dqkv_there.rows_mut(all))?;
        exchange.to_tokens("ulysses dqkv", HeadColumns::Qkv, ulysses, dqkv_there.rows(all), dqkv)
    }

    /// Takes this rank's heads of `shape` to softmaxes with their sinks, if there are any.
    pub(super) fn sink(&self, shape: &AttentionShape, o: ViewMut, lse: ViewMut) -> Result<()> {
        let Some(sinks) = self.sinks else { return Ok(()) };
        self.dev.sink(HeadSinks { shape: *shape, sinks: sinks.slice(self.held_heads()), o, lse })
    }
    /// After backward: adds to the gradient of the sinks.
    pub(super) fn sink_backward(
        &self,
        scratch: &CoreScratch,
        saved: &CoreSaved,
        n: usize,
        dsinks: ViewMut,
    ) -> Result<()> {
        let Some(sinks) = self.sinks else { return Ok(()) };
        let (all, heads) = (self.exchange().grid.ulysses.of * n, self.held_heads());
        let (lse, delta) = (saved.lse.rows(all), scratch.delta.rows(all));
        let (sinks, dsinks) = (sinks.slice(heads.clone()), dsinks.slice(heads));
        self.dev.sink_backward(HeadSinksBackward { sinks, lse, delta, dsinks })
    }
    /// The heads of the tp rank that this rank attends with.
    fn held_heads(&self) -> Range<usize> {
        HeadShare::of(self.shape, self.exchange().grid.ulysses).heads
    }

    /// Layers may differ in the widths of their heads, and share what they save.
    pub(super) fn fit(&self, saved: &mut CoreSaved) {
        if self.exchange().grid.ulysses.of == 1 {
            saved.o.fit(self.shape.width());
        }
    }
    /// Whether there is nothing left to do if attention's own outputs are there.
    pub(super) fn is_done(&self, attended: bool) -> bool {
        attended && self.split.grid(self.shape.heads).ulysses.of == 1
    }
    fn exchange(&self) -> HeadExchange<'_> {
        let &CoreAttention { dev, group, shape, layer, .. } = self;
        HeadExchange { dev, group, grid: self.split.grid(shape.heads), whole: shape, layer }
    }
    /// The ring over which the rows of `shape` are sharded, if there is one.
    fn ring<'a>(&'a self, shape: &'a AttentionShape) -> Option<RingAttention<'a>> {
        let &CoreAttention { dev, group, layer, .. } = self;
        let (grid, at_once) = (self.split.grid(self.shape.heads), self.split.sp_impl == SpImpl::AllGather);
        (grid.ring.of > 1).then_some(RingAttention { dev, group, grid, at_once, shape, layer })
    }
}
