//! Dispatch of routed rows to the ranks of ep that have their experts, and back. Never multiplies, and never drops a
//! row.
//!
//! Every rank has its rows sorted by expert, so those for one peer follow each other. The ranks gather each other's
//! counts; from these all know who sends what to whom, and how many *rounds* it takes. A rank's incoming rows, sorted
//! by expert, are cut into windows of [`capacity`] rows, and round t carries window t of every rank: skewed routing
//! takes more rounds, never more memory.
//!
//! ```text
//! rows (R, C)  --all_to_all-->  wire (B, C), by sender  --sorted by expert-->  held (B, C)
//! rows (R, C)  <--all_to_all--  wire (B, C), by sender  <--sorted by sender--  held (B, C)
//! ```
//!
//! Within an expert, rows are in the order of their senders, then of their tokens: that of all tokens of the group.
//! What comes back takes the places of what was sent.
//!
//! [Note: counts] The host must know the counts: they are the lengths of what is sent and received, as in DeepEP and
//! torchtitan. So the host waits for a GPU here, once per sparse block and micro-batch: forward keeps the counts for
//! backward, because a block that is recomputed is routed with the same bits.
//!
//! [Note: halves] To overlap the exchange with the experts, a window travels in two halves, and each has its own
//! all_to_all, there and back: the second is on its way while the experts of the first compute, and what the first
//! gives back while those of the second do. Either half takes its part of the buffers, in which the rows of both are
//! sorted by expert as those of one window are. So halves take no memory, and products over all rows of a window have
//! the same bits.
use super::context::Cx;
use super::split::Slice;
use super::tensor::{Tensor, TensorShape, table};
use super::windows::{HALVES, Held, RowWindows, capacity, offset_rows, run_rows};
use crate::base::{Category, DType, Error, Result};
use crate::comm::{Axis, CommUse, Tag, Ticket};
use crate::device::ops::{PlaceRuns, TakeRows};
use crate::device::{Device, View};
use std::ops::Range;

table! {
    /// Buffers of a rank; all empty unless experts are shared. R: routed rows of its tokens, B: rows that it holds of
    /// all ranks' tokens, E: its experts.
    pub struct DispatchBuffers {
        /// (ep, all experts + 1) u32: the first routed row of each expert on each rank.
        all_offsets,
        /// (1 or 3, E + 1) u32: the first held row of each expert; if there are halves, then the same within each.
        offsets,
        /// (runs, 3) u32: rows that follow each other in `wire` and in `held`, as in [`PlaceRuns`].
        runs,
        /// (B) u32: the place in `wire` of each held row, and the held row at each place, within a half.
        sorted,
        unsorted,
        /// (B, C): as it is sent and received.
        wire,
        /// (B, C): the experts' inputs, then their outputs.
        held,
        /// (B, C) each: the gradients of the outputs, then of the inputs. From here on: backward only.
        dwire,
        dheld,
        /// (R) and (B) f32: the rows' weights, then their gradients, as sent and received.
        sent_weights,
        wire_weights,
        /// (B) f32, of the held rows.
        weights,
        dweights,
    }
}

/// What dispatch is planned for.
#[derive(Clone, Copy)]
pub struct DispatchPlan {
    /// Routed rows of a rank's tokens, and their width.
    pub rows: usize,
    pub width: usize,
    /// In a block.
    pub experts: usize,
    /// Sparse ones.
    pub blocks: usize,
    pub ep: Slice,
    /// Whether windows travel in two halves.
    pub overlap: bool,
    pub dtype: DType,
    pub train: bool,
}

impl DispatchPlan {
    fn parts(&self) -> usize {
        if self.overlap { HALVES } else { 1 }
    }
    fn buffers(&self) -> DispatchBuffers<TensorShape> {
        let &DispatchPlan { rows, width, experts, ep, dtype, train, .. } = self;
        let there = ep.of > 1 && experts > 0;
        let own = |dtype, rows, width| TensorShape::new(Category::Scratch, dtype, if there { rows } else { 0 }, width);
        let back = |dtype, rows, width| own(dtype, if train { rows } else { 0 }, width);
        let sent = |shape: TensorShape| shape.through(Axis::Ep, CommUse::Reduced);
        let most = capacity(rows, ep);
        DispatchBuffers {
            all_offsets: own(DType::U32, ep.of, experts + 1).through(Axis::Ep, CommUse::Gathered),
            offsets: own(DType::U32, offset_rows(self.parts()), ep.share(experts).len() + 1),
            runs: own(DType::U32, run_rows(self.parts(), experts, ep), 3),
            sorted: own(DType::U32, most, 1),
            unsorted: own(DType::U32, most, 1),
            wire: sent(own(dtype, most, width)),
            held: own(dtype, most, width),
            dwire: sent(back(dtype, most, width)),
            dheld: back(dtype, most, width),
            sent_weights: sent(back(DType::F32, rows, 1)),
            wire_weights: sent(back(DType::F32, most, 1)),
            weights: back(DType::F32, most, 1),
            dweights: back(DType::F32, most, 1),
        }
    }
}

/// The buffers of dispatch, and the current exchange.
pub struct Dispatch<T = Tensor> {
    pub buffers: DispatchBuffers<T>,
    pub exchange: RowExchange,
}

impl Dispatch<TensorShape> {
    pub fn plan(plan: &DispatchPlan) -> Self {
        let &DispatchPlan { rows, experts, blocks, ep, .. } = plan;
        let peers = || vec![0..0; ep.of];
        let windows = RowWindows::new(ep, experts, rows, plan.parts());
        let counted = vec![0; blocks * windows.offsets.len()];
        Dispatch {
            buffers: plan.buffers(),
            exchange: RowExchange { windows, counted, sent: peers(), received: peers() },
        }
    }
}

impl<T> Dispatch<T> {
    pub(super) fn map<U>(&self, f: &mut dyn FnMut(&'static str, &T) -> Result<U>) -> Result<Dispatch<U>> {
        Ok(Dispatch { buffers: self.buffers.map(f)?, exchange: self.exchange.clone() })
    }
}

/// Rows that this rank has the experts of, and the first of each of its experts among them.
pub struct HeldRows<'a> {
    pub rows: Range<usize>,
    pub offsets: View<'a>,
}

impl<'a> HeldRows<'a> {
    pub(super) fn held(&self) -> Held<'a> {
        (self.rows.len(), self.offsets)
    }
}

/// The all_to_alls of one tensor in a round: of each half there, and back.
#[derive(Default)]
#[must_use = "its end must be awaited"]
pub struct RoundTrip {
    there: [Option<Ticket>; HALVES],
    back: [Option<Ticket>; HALVES],
}

/// The exchange of rows in a round.
#[derive(Clone)]
pub struct RowExchange {
    windows: RowWindows,
    /// The windows' offsets of each sparse block.
    counted: Vec<u32>,
    /// Per peer, in elements: what is sent to it and received from it.
    sent: Vec<Range<usize>>,
    received: Vec<Range<usize>>,
}

impl RowExchange {
    /// Gathers the counts of all ranks for sparse block `block`, and returns the number of rounds: at least 1, and the
    /// same on all ranks. `offsets`: the first of this rank's `rows` of each expert.
    pub fn begin(
        &mut self,
        cx: &Cx,
        tag: Tag,
        block: usize,
        (offsets, rows): (View, usize),
        buffers: &mut DispatchBuffers,
    ) -> Result<usize> {
        let counted = self.counted(block);
        let (group, all, windows) = (&cx.groups.ep, &mut buffers.all_offsets, &mut self.windows);
        let ticket = group.all_gather(tag, offsets, all.rows_mut(group.size()))?;
        group.wait(ticket)?;
        windows.offsets.fill(0);
        cx.dev.download(all.rows(group.size()), bytemuck::cast_slice_mut(&mut windows.offsets))?;
        group.release(ticket)?;
        windows.assume(rows);
        self.counted[counted].copy_from_slice(&windows.offsets);
        Ok(windows.rounds())
    }
    /// The number of rounds of a block in backward, by the counts of its forward pass.
    pub fn resume(&mut self, block: usize) -> usize {
        let counted = self.counted(block);
        self.windows.offsets.copy_from_slice(&self.counted[counted]);
        self.windows.rounds()
    }
    fn counted(&self, block: usize) -> Range<usize> {
        let words = self.windows.offsets.len();
        block * words..(block + 1) * words
    }
    /// Prepares `round`: who sends what, and where the rows of each expert are.
    pub fn round(&mut self, dev: &dyn Device, round: usize, buffers: &mut DispatchBuffers) -> Result<()> {
        let windows = &mut self.windows;
        windows.arrange(round);
        let DispatchBuffers { offsets, runs, sorted, unsorted, .. } = buffers;
        dev.upload(bytemuck::cast_slice(&windows.own), offsets.rows_mut(offsets.capacity()))?;
        dev.upload(bytemuck::cast_slice(&windows.runs), runs.rows_mut(runs.capacity()))?;
        let each = runs.capacity() / windows.parts.len();
        for (index, part) in windows.parts.iter().enumerate().filter(|(_, part)| !part.held.is_empty()) {
            let runs = runs.band(&(index * each..(index + 1) * each));
            let (order, places) = (sorted.band_mut(&part.held), unsorted.band_mut(&part.held));
            dev.place_runs(PlaceRuns { runs, order, places })?;
        }
        Ok(())
    }

    /// The parts that rows travel in.
    pub fn parts(&self) -> Range<usize> {
        0..self.windows.parts.len()
    }
    /// The rows of a part. `offsets`: [`DispatchBuffers::offsets`].
    pub fn part<'a>(&self, index: usize, offsets: &'a Tensor) -> HeldRows<'a> {
        let row = if self.parts().len() == 1 { 0 } else { 1 + index };
        HeldRows { rows: self.windows.parts[index].held.clone(), offsets: offsets.band(&(row..row + 1)) }
    }
    /// The rows of all parts.
    pub fn window<'a>(&self, offsets: &'a Tensor) -> HeldRows<'a> {
        HeldRows { rows: 0..self.windows.held(), offsets: offsets.rows(1) }
    }

    /// Starts sending `rows` of all parts, which arrive in `wire`.
    pub fn send(&mut self, cx: &Cx, tag: Tag, rows: &Tensor, wire: &mut Tensor) -> Result<RoundTrip> {
        let mut trip = RoundTrip::default();
        for part in self.parts() {
            self.measure(part, rows.width());
            let (send, recv) = (rows.all(), wire.all_mut());
            trip.there[part] = Some(cx.groups.ep.all_to_all(tag, send, &self.sent, recv, &self.received)?);
        }
        Ok(trip)
    }
    /// Waits for a part, and assigns its rows of `held`. `order`: [`DispatchBuffers::sorted`].
    pub fn arrive(
        &self,
        cx: &Cx,
        trip: &RoundTrip,
        part: usize,
        order: &Tensor,
        wire: &Tensor,
        held: &mut Tensor,
    ) -> Result<()> {
        cx.groups.ep.wait(started(trip.there[part])?)?;
        self.take(cx, part, order, wire, held)
    }
    /// Starts the way back of a part, whose rows take the places of those that this rank sent. `order`:
    /// [`DispatchBuffers::unsorted`].
    #[allow(clippy::too_many_arguments)] // the way there, and the operands of the way back
    pub fn give_back(
        &mut self,
        cx: &Cx,
        tag: Tag,
        trip: &mut RoundTrip,
        part: usize,
        order: &Tensor,
        [held, wire, rows]: [&mut Tensor; 3],
    ) -> Result<()> {
        self.take(cx, part, order, held, wire)?;
        cx.groups.ep.wait_sent(started(trip.there[part].take())?)?;
        self.measure(part, rows.width());
        let (send, recv) = (wire.all(), rows.all_mut());
        trip.back[part] = Some(cx.groups.ep.all_to_all(tag, send, &self.received, recv, &self.sent)?);
        Ok(())
    }
    /// Waits for what is still on its way.
    pub fn end(&self, cx: &Cx, trip: RoundTrip) -> Result<()> {
        let group = &cx.groups.ep;
        trip.back.iter().flatten().try_for_each(|&ticket| group.wait(ticket))?;
        trip.there.iter().chain(&trip.back).flatten().try_for_each(|&ticket| group.wait_sent(ticket))
    }
    /// Sets the ranges of elements of a part, in rows of `width`.
    fn measure(&mut self, part: usize, width: usize) {
        let part = &self.windows.parts[part];
        for (rows, elements) in [(&part.sends, &mut self.sent), (&part.arrivals, &mut self.received)] {
            for (rows, elements) in rows.iter().zip(elements) {
                *elements = rows.start * width..rows.end * width;
            }
        }
    }
    fn take(&self, cx: &Cx, part: usize, order: &Tensor, from: &Tensor, to: &mut Tensor) -> Result<()> {
        let rows = &self.windows.parts[part].held;
        if rows.is_empty() {
            return Ok(());
        }
        let (order, x, y) = (order.band(rows), from.band(rows), to.band_mut(rows));
        cx.dev.take_rows(TakeRows { top_k: 1, order, x, y })
    }
}

fn started(ticket: Option<Ticket>) -> Result<Ticket> {
    ticket.ok_or_else(|| Error::op("dispatch", "rows that were not sent"))
}
