//! Ring attention (Liu et al. 2023): queries stay, while keys and values of all ranks of the ring pass by. Never
//! depends on how rows are assigned to ranks: row numbers in the packed batch determine which keys a query attends to.
//!
//! [Note: the ring] Member r attends to its own block first, then to those of ranks r - 1, r - 2, ...: in each hop
//! every member sends its current block to the next one. The transfer starts before attention over the current block
//! and overlaps it, with two buffers that swap. Each pass writes f32 and passes are summed in f32; results are rounded
//! once, at the end. Backward takes the same path: a block's gradient follows one hop after the block, so that its
//! transfer overlaps the pass over the next block, and returns to its owner after a full round.
//!
//! With [`SpImpl::AllGather`] all blocks arrive at once, overlapping the pass over the rank's own, and their
//! gradients return in one reduce_scatter. The passes and their order are the same, so outputs are bitwise equal. It
//! holds the keys and values of all ranks, but replaces one operation per rank by a single one: for short sequences and
//! few key/value heads.
use super::split::{Slice, SpGrid, SpImpl};
use super::tensor::{Tensor, TensorShape, table};
use crate::base::{Category, DType, Error, Result};
use crate::comm::{Axis, Collective, CommUse, Tag, Ticket};
use crate::device::ops::{
    AttentionDelta, AttentionMerge, AttentionPass, AttentionPassBackward, AttentionRanges, AttentionShape, CopyColumns,
};
use crate::device::{Device, View, ViewMut};
use std::ops::Range;

table! {
    /// Buffers for the passes of one rank; all empty without a ring. R: ranks of the ring, N: rows of each, C: elements
    /// in a row of keys and values.
    pub struct RingBuffers {
        /// (R N, 2) u32: for each block, the range of keys that each local query attends to.
        of_queries,
        /// (R N, 2) u32: the range of local queries that attend to each key of each block.
        of_keys,
        /// Like `of_queries`, for layers with a sliding window.
        near_queries,
        /// Like `of_keys`, for layers with a sliding window.
        near_keys,
        /// (N, C): the current block's keys and values.
        kv,
        /// (N, C): the block in flight.
        next,
        /// (R N, C): all blocks, with all_gather.
        all,
        /// (N, heads * head_dim) f32: the sum over passes: outputs, or gradients of queries.
        sum,
        /// (N, heads * head_dim) f32: the output of one pass.
        pass,
        /// (heads, N) f32
        pass_lse,
        /// (N, C) f32: gradients of the current block.
        dkv,
        /// (N, C) f32: gradients being sent on.
        leaving,
        /// (N, C) f32: gradients being received.
        arriving,
        /// (R N, C) f32: gradients of all blocks, with reduce_scatter.
        all_dkv,
    }
}

impl RingBuffers<TensorShape> {
    /// For up to `tokens` rows on each of the `ranks` of a ring, activations of `dtype`. `heads`: shape of this rank's
    /// layers, ignoring windows; `keys`: that of layers with the widest keys and values, and `widest` the largest such
    /// on any rank of sp. `sights`: whether there are layers with full
    /// attention, and with a sliding window.
    pub fn plan(
        [heads, _]: [AttentionShape; 2],
        [keys, widest]: [AttentionShape; 2],
        sights: [bool; 2],
        (sp_impl, ranks): (SpImpl, usize),
        tokens: usize,
        dtype: DType,
        train: bool,
    ) -> RingBuffers<TensorShape> {
        let tokens = if ranks > 1 { tokens } else { 0 };
        let (inner, c) = (heads.width(), keys.kv_row());
        let at_once = sp_impl == SpImpl::AllGather;
        let hops = !at_once;
        let rows = |there: bool, n: usize| if there { n } else { 0 };
        let own = |dtype, rows, width| TensorShape::new(Category::Scratch, dtype, rows, width);
        let sent = |dtype, rows, usage| own(dtype, rows, c).through(Axis::Sp, usage).reserve(widest.kv_row());
        let [far, near] = sights.map(|sight| own(DType::U32, rows(sight, ranks * tokens), 2));
        let travels = |dtype, there| sent(dtype, rows(there, tokens), CommUse::Reduced);
        RingBuffers {
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
}

impl RingBuffers {
    /// Layers may differ in the widths of their heads.
    fn fit(&mut self, shape: &AttentionShape) {
        let RingBuffers { kv, next, all, sum, pass, dkv, leaving, arriving, all_dkv, .. } = self;
        [kv, next, all, dkv, leaving, arriving, all_dkv].into_iter().for_each(|tensor| tensor.fit(shape.kv_row()));
        [sum, pass].into_iter().for_each(|tensor| tensor.fit(shape.width()));
    }
    /// Sets the attention ranges of a new batch for member `at`. `rows` (R, N): each member's row numbers in the packed
    /// batch `cu_seqlens`; `windows`: of the layers, as in [`AttentionShape::window`].
    pub fn set_ranges(
        &mut self,
        dev: &dyn Device,
        at: Slice,
        heads: &AttentionShape,
        windows: impl IntoIterator<Item = usize>,
        cu_seqlens: View,
        rows: View,
    ) -> Result<()> {
        let (ranks, n) = (at.of, rows.len() / at.of);
        let block = |rank: usize| rank * n..(rank + 1) * n;
        let mine = rows.slice(block(at.index));
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

/// One layer's attention over the rows of all members.
#[derive(Clone, Copy)]
pub(super) struct RingAttention<'a> {
    pub dev: &'a dyn Device,
    /// The ranks of sp.
    pub group: &'a dyn Collective,
    pub grid: SpGrid,
    /// The ring is the whole group, as with [`SpImpl::AllGather`].
    pub at_once: bool,
    pub shape: &'a AttentionShape,
    pub layer: usize,
}

impl RingAttention<'_> {
    /// Like [`Device::attention`]: assigns `o` and `lse` of this rank's queries; `qkv` also holds its own keys and
    /// values.
    pub fn forward(&self, ring: &mut RingBuffers, qkv: View, o: ViewMut, mut lse: ViewMut) -> Result<()> {
        let (dev, shape) = (self.dev, *self.shape);
        let n = self.rows(qkv)?;
        ring.fit(&shape);
        let RingBuffers { of_queries, near_queries, kv, next, all, sum, pass, pass_lse, .. } = ring;
        let of_queries = if shape.window == 0 { of_queries } else { near_queries };
        let mut blocks = self.blocks(qkv, n, kv, next, all)?;
        for hop in 0..self.grid.ring.of {
            blocks.fetch(hop)?;
            let (of_queries, kv) = (of_queries.band(&self.block(hop, n)), blocks.at_hand(hop));
            if hop == 0 {
                // Each query attends at least to itself, so every output now has a key.
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

    /// Like [`Device::attention_backward`]: assigns `dqkv` of this rank's rows, to which the queries of all ranks
    /// contribute.
    #[allow(clippy::too_many_arguments)] // a forward's operands and their gradients
    pub fn backward(
        &self,
        ring: &mut RingBuffers,
        qkv: View,
        o: View,
        lse: View,
        d_o: View,
        [mut delta, mut sums]: [ViewMut; 2],
        mut dqkv: ViewMut,
    ) -> Result<()> {
        let (dev, shape) = (self.dev, *self.shape);
        let n = self.rows(qkv)?;
        ring.fit(&shape);
        let RingBuffers { of_queries, of_keys, near_queries, near_keys, kv, next, all, sum, .. } = ring;
        let RingBuffers { dkv, leaving, arriving, all_dkv, .. } = ring;
        let sees = if shape.window == 0 { [of_queries, of_keys] } else { [near_queries, near_keys] };
        dev.attention_delta(AttentionDelta { shape, o, d_o, lse, delta: delta.reborrow(), sums: sums.reborrow() })?;
        dev.zero(sum.rows_mut(n))?;
        let mut grads = Homeward { attention: *self, n, dkv, leaving, arriving, all: all_dkv, ticket: None };
        grads.begin()?;
        let mut blocks = self.blocks(qkv, n, kv, next, all)?;
        for hop in 0..self.grid.ring.of {
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
            0 => Err(Error::op("ring attention", "0 rows: every rank needs the same number, at least 1")),
            n => Ok(n),
        }
    }
    /// The member that owns the current block.
    fn owner(&self, hop: usize) -> usize {
        let Slice { index, of } = self.grid.ring;
        (index + of - hop) % of
    }
    /// The owner's rows in buffers of all members' rows.
    fn block(&self, hop: usize, n: usize) -> Range<usize> {
        let owner = self.owner(hop);
        owner * n..(owner + 1) * n
    }
    /// Sends to the next member, receives from the previous one.
    fn hand_on(&self, what: &'static str, send: View, recv: ViewMut) -> Result<Ticket> {
        let Slice { index, of } = self.grid.ring;
        let [to, from] = [index + 1, index + of - 1].map(|member| self.grid.rank(member % of, self.grid.ulysses.index));
        self.group.send_recv(Tag::new(what, self.layer), to, send, from, recv)
    }
    /// Starts a round with this rank's keys and values in `kv`.
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

/// Keys and values of all ranks, one block after another.
struct Blocks<'a> {
    attention: RingAttention<'a>,
    n: usize,
    kv: &'a mut Tensor,
    next: &'a mut Tensor,
    all: &'a mut Tensor,
    /// The transfer in flight; an all_gather is in flight until the end.
    ticket: Option<Ticket>,
}

impl Blocks<'_> {
    /// Starts the transfer of the next hop's block.
    fn fetch(&mut self, hop: usize) -> Result<()> {
        let RingAttention { group, grid, at_once, layer, .. } = self.attention;
        match at_once {
            false if hop + 1 < grid.ring.of => {
                let (kv, next) = (self.kv.rows(self.n), self.next.rows_mut(self.n));
                self.ticket = Some(self.attention.hand_on("ring kv", kv, next)?);
            }
            true if hop == 0 => {
                let all = self.all.rows_mut(self.n * group.size());
                self.ticket = Some(group.all_gather(Tag::new("ring kv", layer), self.kv.rows(self.n), all)?);
            }
            _ => {}
        }
        Ok(())
    }
    fn at_hand(&self, hop: usize) -> View<'_> {
        match self.attention.at_once {
            true if hop > 0 => self.all.band(&self.attention.block(hop, self.n)),
            _ => self.kv.rows(self.n),
        }
    }
    /// Waits for the next hop's block.
    fn arrive(&mut self, hop: usize) -> Result<()> {
        let RingAttention { group, at_once, .. } = self.attention;
        match (at_once, self.ticket) {
            (false, Some(ticket)) => {
                self.ticket = None;
                std::mem::swap(&mut self.kv, &mut self.next);
                group.wait(ticket)?;
                group.wait_sent(ticket)
            }
            (true, Some(ticket)) if hop == 0 => group.wait(ticket),
            _ => Ok(()),
        }
    }
    /// Ends the reading of the blocks.
    fn end(self) -> Result<()> {
        match (self.attention.at_once, self.ticket) {
            (true, Some(ticket)) => self.attention.group.release(ticket),
            _ => Ok(()),
        }
    }
}

/// Gradients of all blocks on the way to their owners.
struct Homeward<'a> {
    attention: RingAttention<'a>,
    n: usize,
    dkv: &'a mut Tensor,
    leaving: &'a mut Tensor,
    arriving: &'a mut Tensor,
    all: &'a mut Tensor,
    /// The transfer of the previous hop.
    ticket: Option<Ticket>,
}

impl Homeward<'_> {
    fn begin(&mut self) -> Result<()> {
        match self.attention.at_once {
            false => Ok(()),
            true => self.attention.dev.zero(self.all.rows_mut(self.n * self.attention.group.size())),
        }
    }
    /// The zeroed buffer for this rank's contribution to the current block's gradient.
    fn at_hand(&mut self, hop: usize) -> Result<ViewMut<'_>> {
        match self.attention.at_once {
            false => {
                self.attention.dev.zero(self.dkv.rows_mut(self.n))?;
                Ok(self.dkv.rows_mut(self.n))
            }
            true => Ok(self.all.band_mut(&self.attention.block(hop, self.n))),
        }
    }
    /// Adds the previous ranks' contributions, received during the pass, and sends the sum on.
    fn pass_on(&mut self) -> Result<()> {
        if self.attention.at_once {
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
        let RingAttention { group, at_once, layer, .. } = self.attention;
        let ticket = match at_once {
            false => self.ticket.take(),
            true => {
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
