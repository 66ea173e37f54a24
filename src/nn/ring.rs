//! Ring attention (Liu et al. 2023): queries stay, keys and values of all ranks of sp come by. Never asks how rows were
//! dealt to the ranks: their numbers in the packed batch say who sees whom.
//!
//! [Note: the ring] Rank r attends to its own block first, then to that of rank r - 1, r - 2, ...: each hop every rank
//! hands the block that it has at hand to the rank behind it. The transfer is started before the attention over the
//! block at hand, between two buffers that swap. What a pass makes is f32 and so is what the passes add up to; each
//! result is rounded once, at the end. Backward takes the same way: the gradient of a block travels one hop behind it,
//! so that it moves under the pass over the next block, and comes home after as many hops as there are ranks: its own
//! rank adds the first part.
//!
//! With [`RingImpl::AllGather`] the blocks come at once, under the pass over one's own, and their gradients go home in
//! one reduce-scatter. The passes are the same in the same order, so outputs are the same bits. It holds the keys and
//! values of all ranks, and is one operation where the ring has as many as ranks: for short sequences and few key/value
//! heads.
use super::context::Cx;
use super::split::{Groups, RingImpl, Split};
use super::tensor::{Tensor, TensorShape, table};
use crate::base::{Category, DType, Error, Result};
use crate::comm::{Axis, Collective, CommUse, Tag, Ticket};
use crate::device::ops::{
    AttentionDelta, AttentionMerge, AttentionPass, AttentionPassBackward, AttentionRanges, AttentionShape, CopyColumns,
};
use crate::device::{Device, View, ViewMut};
use std::ops::Range;

table! {
    /// What the passes of one rank work in; all of it empty without a ring. R: ranks, N: rows of each, C: elements in a
    /// row of keys and values.
    Ring {
        /// (R N, 2) u32: in each rank's block, the keys that each query of this rank sees.
        of_queries,
        /// (R N, 2) u32: of this rank's queries, those that see each key of each block.
        of_keys,
        /// As `of_queries`, in layers within a window.
        near_queries,
        /// As `of_keys`, in layers within a window.
        near_keys,
        /// (N, C): keys and values at hand.
        kv,
        /// (N, C): those that are on their way.
        next,
        /// (R N, C): those of all ranks, where they come at once.
        all,
        /// (N, heads * head_dim) f32: what passes add up to: outputs, or gradients of queries.
        sum,
        /// (N, heads * head_dim) f32: the output of one pass.
        pass,
        /// (heads, N) f32
        pass_lse,
        /// (N, C) f32: gradients of the block at hand.
        dkv,
        /// (N, C) f32: those that are on their way on.
        leaving,
        /// (N, C) f32: those that come from the rank before.
        arriving,
        /// (R N, C) f32: those of all blocks, where they go home at once.
        all_dkv,
    }
}

impl Ring<TensorShape> {
    /// For up to `tokens` rows of each rank of sp, activations of `dtype`. `heads`: of this rank's layers, whatever
    /// their windows. `sights`: whether there are layers that see all of a document, and layers within a window.
    pub fn plan(
        heads: &AttentionShape,
        sights: [bool; 2],
        split: &Split,
        tokens: usize,
        dtype: DType,
        train: bool,
    ) -> Ring<TensorShape> {
        let (ranks, ring) = (split.sp.of, split.ring);
        let (inner, c) = (heads.heads * heads.head_dim, heads.kv_row());
        let (hops, at_once) = (ring == RingImpl::Ring, ring == RingImpl::AllGather);
        let rows = |there: bool, n: usize| if there { n } else { 0 };
        let own = |dtype, rows, width| TensorShape::new(Category::Scratch, dtype, rows, width);
        let sent = |dtype, rows, usage| own(dtype, rows, c).through(Axis::Sp, usage);
        let [far, near] = sights.map(|sight| own(DType::U32, rows(sight, ranks * tokens), 2));
        let travels = |dtype, there| sent(dtype, rows(there, tokens), CommUse::Reduced);
        Ring {
            of_queries: far,
            of_keys: far,
            near_queries: near,
            near_keys: near,
            kv: travels(dtype, true),
            next: travels(dtype, hops),
            all: sent(dtype, rows(at_once, ranks * tokens), CommUse::Gathered),
            sum: own(DType::F32, tokens, inner),
            pass: own(DType::F32, tokens, inner),
            pass_lse: own(DType::F32, tokens, heads.heads),
            dkv: travels(DType::F32, train && hops),
            leaving: travels(DType::F32, train && hops),
            arriving: travels(DType::F32, train),
            all_dkv: sent(DType::F32, rows(train && at_once, ranks * tokens), CommUse::Reduced),
        }
    }
    pub fn allocate(&self, dev: &dyn Device, groups: &Groups) -> Result<Ring> {
        self.map(&mut |name, shape: &TensorShape| shape.allocate(name, dev, groups))
    }
}

impl Ring {
    /// Who sees whom in a new batch. `rows` (R, N): those of the packed batch `cu_seqlens` that each rank has;
    /// `windows`: of the layers, as [`AttentionShape::window`].
    pub fn set_ranges(
        &mut self,
        dev: &dyn Device,
        group: &dyn Collective,
        heads: &AttentionShape,
        windows: impl IntoIterator<Item = usize>,
        cu_seqlens: View,
        rows: View,
    ) -> Result<()> {
        let (ranks, n) = (group.size(), rows.len() / group.size());
        let block = |rank: usize| rank * n..(rank + 1) * n;
        let mine = rows.slice(block(group.rank()));
        for window in windows {
            let shape = AttentionShape { window, ..*heads };
            let [of_queries, of_keys] = match window {
                0 => [&mut self.of_queries, &mut self.of_keys],
                _ => [&mut self.near_queries, &mut self.near_keys],
            };
            for block in (0..ranks).map(block) {
                let (q_rows, k_rows) = (mine, rows.slice(block.clone()));
                let (of_queries, of_keys) = (of_queries.band_mut(&block), of_keys.band_mut(&block));
                dev.attention_ranges(AttentionRanges { shape, cu_seqlens, q_rows, k_rows, of_queries, of_keys })?;
            }
        }
        Ok(())
    }
}

/// One layer's attention over the rows of all ranks.
#[derive(Clone, Copy)]
pub struct RingAttention<'a> {
    pub dev: &'a dyn Device,
    pub group: &'a dyn Collective,
    pub ring: RingImpl,
    pub shape: &'a AttentionShape,
    pub layer: usize,
}

impl<'a> RingAttention<'a> {
    /// Where rows are cut over a ring.
    pub fn of(cx: &'a Cx, shape: &'a AttentionShape) -> Option<RingAttention<'a>> {
        let (dev, group, ring) = (cx.dev, &*cx.groups.sp, cx.split.ring);
        cx.batch.rows.map(|_| RingAttention { dev, group, ring, shape, layer: cx.layer })
    }
}

impl RingAttention<'_> {
    /// As [`Device::attention`]: assigns `o` and `lse` of this rank's queries, in `qkv` with its own keys and values.
    pub fn forward(&self, ring: &mut Ring, qkv: View, o: ViewMut, mut lse: ViewMut) -> Result<()> {
        let (dev, shape) = (self.dev, *self.shape);
        let n = self.rows(qkv)?;
        let Ring { of_queries, near_queries, kv, next, all, sum, pass, pass_lse, .. } = ring;
        let of_queries = if shape.window == 0 { of_queries } else { near_queries };
        let mut blocks = self.blocks(qkv, n, kv, next, all)?;
        for hop in 0..self.group.size() {
            blocks.fetch(hop)?;
            let (of_queries, kv) = (of_queries.band(&self.block(hop, n)), blocks.at_hand(hop));
            if hop == 0 {
                // Sees itself at least: no output is without a key from here on.
                let (o, lse) = (sum.rows_mut(n), lse.reborrow());
                dev.attention_pass(AttentionPass { shape, of_queries, qkv, kv, o, lse })?;
            } else {
                let (o, lse_pass) = (pass.rows_mut(n), pass_lse.rows_mut(n));
                dev.attention_pass(AttentionPass { shape, of_queries, qkv, kv, o, lse: lse_pass })?;
                let (o_pass, lse_pass) = (pass.rows(n), pass_lse.rows(n));
                let (o, lse) = (sum.rows_mut(n), lse.reborrow());
                dev.attention_merge(AttentionMerge { shape, o_pass, lse_pass, o, lse })?;
            }
            blocks.arrive(hop)?;
        }
        blocks.end()?;
        dev.copy(sum.rows(n), o)
    }

    /// As [`Device::attention_backward`]: assigns `dqkv` of this rank's rows, to which the queries of all ranks
    /// contribute.
    #[allow(clippy::too_many_arguments)] // a forward's operands and their gradients
    pub fn backward(
        &self,
        ring: &mut Ring,
        qkv: View,
        o: View,
        lse: View,
        d_o: View,
        [mut delta, mut sums]: [ViewMut; 2],
        mut dqkv: ViewMut,
    ) -> Result<()> {
        let (dev, shape) = (self.dev, *self.shape);
        let n = self.rows(qkv)?;
        let Ring { of_queries, of_keys, near_queries, near_keys, kv, next, all, sum, .. } = ring;
        let Ring { dkv, leaving, arriving, all_dkv, .. } = ring;
        let sees = if shape.window == 0 { [of_queries, of_keys] } else { [near_queries, near_keys] };
        dev.attention_delta(AttentionDelta { shape, o, d_o, delta: delta.reborrow() })?;
        dev.zero(sum.rows_mut(n))?;
        let mut grads = Homeward { attention: *self, n, dkv, leaving, arriving, all: all_dkv, ticket: None };
        grads.begin()?;
        let mut blocks = self.blocks(qkv, n, kv, next, all)?;
        for hop in 0..self.group.size() {
            blocks.fetch(hop)?;
            let [of_queries, of_keys] = [&sees[0], &sees[1]].map(|of| of.band(&self.block(hop, n)));
            dev.attention_pass_backward(AttentionPassBackward {
                shape,
                of_queries,
                of_keys,
                qkv,
                kv: blocks.at_hand(hop),
                lse,
                delta: delta.as_view(),
                d_o,
                sums: sums.reborrow(),
                dq: sum.rows_mut(n),
                dkv: grads.at_hand(hop)?,
            })?;
            grads.pass_on()?;
            blocks.arrive(hop)?;
        }
        blocks.end()?;
        grads.end()?;
        let (inner, c, row) = (shape.heads * shape.head_dim, shape.kv_row(), shape.row());
        let columns = |width, src: View, dst: ViewMut| {
            dev.copy_columns(CopyColumns { rows: n, width, src_row: width, dst_row: row, src, dst })
        };
        columns(inner, sum.rows(n), dqkv.reborrow())?;
        let len = dqkv.len();
        columns(c, arriving.rows(n), dqkv.slice(inner.min(len)..len))
    }

    fn rows(&self, qkv: View) -> Result<usize> {
        match self.shape.rows("ring attention", qkv.len())? {
            0 => Err(Error::op("ring attention", "no rows: every rank has as many, and at least one")),
            n => Ok(n),
        }
    }
    /// The rank whose block is at hand.
    fn owner(&self, hop: usize) -> usize {
        let ranks = self.group.size();
        (self.group.rank() + ranks - hop) % ranks
    }
    /// Its rows, in buffers of all ranks' rows.
    fn block(&self, hop: usize, n: usize) -> Range<usize> {
        let owner = self.owner(hop);
        owner * n..(owner + 1) * n
    }
    /// Sends to the rank behind, receives from the one before.
    fn hand_on(&self, what: &'static str, send: View, recv: ViewMut) -> Result<Ticket> {
        let (rank, ranks) = (self.group.rank(), self.group.size());
        let (to, from) = ((rank + 1) % ranks, (rank + ranks - 1) % ranks);
        self.group.send_recv(Tag::new(what, self.layer), to, send, from, recv)
    }
    /// Ready to go round: this rank's keys and values in `kv`.
    fn blocks<'a>(
        &'a self,
        qkv: View,
        n: usize,
        kv: &'a mut Tensor,
        next: &'a mut Tensor,
        all: &'a mut Tensor,
    ) -> Result<Blocks<'a>> {
        let (c, row) = (self.shape.kv_row(), self.shape.row());
        let (src, dst) = (qkv.slice(row - c..qkv.len()), kv.rows_mut(n));
        self.dev.copy_columns(CopyColumns { rows: n, width: c, src_row: row, dst_row: c, src, dst })?;
        Ok(Blocks { attention: *self, n, kv, next, all, ticket: None })
    }
}

/// Keys and values of all ranks, one block after the other.
struct Blocks<'a> {
    attention: RingAttention<'a>,
    n: usize,
    kv: &'a mut Tensor,
    next: &'a mut Tensor,
    all: &'a mut Tensor,
    /// Of what is on its way; of the gather until the end.
    ticket: Option<Ticket>,
}

impl Blocks<'_> {
    /// Starts what brings the block of the next hop.
    fn fetch(&mut self, hop: usize) -> Result<()> {
        let RingAttention { group, ring, layer, .. } = self.attention;
        match ring {
            RingImpl::Ring if hop + 1 < group.size() => {
                let (kv, next) = (self.kv.rows(self.n), self.next.rows_mut(self.n));
                self.ticket = Some(self.attention.hand_on("ring kv", kv, next)?);
            }
            RingImpl::AllGather if hop == 0 => {
                let all = self.all.rows_mut(self.n * group.size());
                self.ticket = Some(group.all_gather(Tag::new("ring kv", layer), self.kv.rows(self.n), all)?);
            }
            _ => {}
        }
        Ok(())
    }
    fn at_hand(&self, hop: usize) -> View<'_> {
        match self.attention.ring {
            RingImpl::AllGather if hop > 0 => self.all.band(&self.attention.block(hop, self.n)),
            _ => self.kv.rows(self.n),
        }
    }
    /// Waits for the block of the next hop.
    fn arrive(&mut self, hop: usize) -> Result<()> {
        let RingAttention { group, ring, .. } = self.attention;
        match (ring, self.ticket) {
            (RingImpl::Ring, Some(ticket)) => {
                self.ticket = None;
                std::mem::swap(&mut self.kv, &mut self.next);
                group.wait(ticket)?;
                group.wait_sent(ticket)
            }
            (RingImpl::AllGather, Some(ticket)) if hop == 0 => group.wait(ticket),
            _ => Ok(()),
        }
    }
    /// The blocks are read no more.
    fn end(self) -> Result<()> {
        match (self.attention.ring, self.ticket) {
            (RingImpl::AllGather, Some(ticket)) => self.attention.group.release(ticket),
            _ => Ok(()),
        }
    }
}

/// Gradients of all blocks on their way to their owners.
struct Homeward<'a> {
    attention: RingAttention<'a>,
    n: usize,
    dkv: &'a mut Tensor,
    leaving: &'a mut Tensor,
    arriving: &'a mut Tensor,
    all: &'a mut Tensor,
    /// Of the hop before.
    ticket: Option<Ticket>,
}

impl Homeward<'_> {
    fn begin(&mut self) -> Result<()> {
        match self.attention.ring {
            RingImpl::Ring => Ok(()),
            RingImpl::AllGather => self.attention.dev.zero(self.all.rows_mut(self.n * self.attention.group.size())),
        }
    }
    /// Where this rank adds its part of the gradient of the block at hand: zero so far.
    fn at_hand(&mut self, hop: usize) -> Result<ViewMut<'_>> {
        match self.attention.ring {
            RingImpl::Ring => {
                self.attention.dev.zero(self.dkv.rows_mut(self.n))?;
                Ok(self.dkv.rows_mut(self.n))
            }
            RingImpl::AllGather => Ok(self.all.band_mut(&self.attention.block(hop, self.n))),
        }
    }
    /// Adds the parts of the ranks before, which came under the pass, and hands the sum on.
    fn pass_on(&mut self) -> Result<()> {
        if self.attention.ring == RingImpl::AllGather {
            return Ok(());
        }
        self.settle()?;
        std::mem::swap(&mut self.dkv, &mut self.leaving);
        let (leaving, arriving) = (self.leaving.rows(self.n), self.arriving.rows_mut(self.n));
        self.ticket = Some(self.attention.hand_on("ring dkv", leaving, arriving)?);
        Ok(())
    }
    fn settle(&mut self) -> Result<()> {
        let (group, Some(ticket)) = (self.attention.group, self.ticket.take()) else { return Ok(()) };
        group.wait(ticket)?;
        group.wait_sent(ticket)?;
        self.attention.dev.add(self.arriving.rows(self.n), self.dkv.rows_mut(self.n))
    }
    /// Assigns `arriving`: the gradient of this rank's own keys and values.
    fn end(mut self) -> Result<()> {
        let RingAttention { group, ring, layer, .. } = self.attention;
        let ticket = match ring {
            RingImpl::Ring => self.ticket.take(),
            RingImpl::AllGather => {
                let all = self.all.rows_mut(self.n * group.size());
                let home = self.arriving.rows_mut(self.n);
                Some(group.reduce_scatter(Tag::new("ring dkv", layer), all, home, false)?)
            }
        };
        let Some(ticket) = ticket else { return Ok(()) };
        group.wait(ticket)?;
        group.wait_sent(ticket)
    }
}
