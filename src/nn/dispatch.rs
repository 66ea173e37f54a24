//! Dispatch of routed rows to the ranks of ep that have their experts, and back. Never multiplies, and never drops a
//! row.
//!
//! Every rank has its rows sorted by expert, so those for one peer follow each other. The ranks gather each other's
//! counts; from these all know who sends what to whom, and how many *rounds* it takes. A rank's incoming rows, in the
//! order of their senders, are cut into windows of [`capacity`] rows, and round t carries window t of every rank:
//! skewed routing takes more rounds, never more memory.
//!
//! ```text
//! rows (R, C)  --all_to_all-->  wire (B, C), by sender  --sorted by expert-->  held (B, C)
//! rows (R, C)  <--all_to_all--  wire (B, C), by sender  <--sorted by sender--  held (B, C)
//! ```
//!
//! Within an expert, rows are in the order of their senders, then of their tokens: that of all tokens of the group.
//! What comes back takes the places of what was sent.
use super::context::Cx;
use super::split::Slice;
use super::tensor::{Tensor, TensorShape, table};
use crate::base::{Category, DType, Result};
use crate::comm::{Axis, CommUse, Tag};
use crate::device::ops::TakeRows;
use crate::device::{Device, View};
use std::ops::Range;

table! {
    /// Buffers of a rank; all empty unless experts are shared. R: routed rows of its tokens, B: rows that it holds of
    /// all ranks' tokens, E: its experts.
    DispatchBuffers {
        /// (ep, all experts + 1) u32: the first routed row of each expert on each rank.
        all_offsets,
        /// (1, E + 1) u32: the first held row of each expert.
        offsets,
        /// (B) u32: the place in `wire` of each held row, and the held row at each place.
        sorted,
        unsorted,
        /// (B, C): as it is sent and received.
        wire,
        /// (B, C): the experts' inputs, then their outputs.
        held,
        /// (B, C): the gradients of the outputs, then of the inputs. From here on: backward only.
        dheld,
        /// (R) and (B) f32: the rows' weights, then their gradients, as sent and received.
        sent_weights,
        wire_weights,
        /// (B) f32, of the held rows.
        weights,
        dweights,
    }
}

/// Rows that a rank holds at once, when it routes `rows`: a quarter more than if experts are used evenly, so that most
/// steps take one round; never more than there can be.
pub fn capacity(rows: usize, ep: Slice) -> usize {
    if ep.of == 1 { rows } else { (rows + rows / 4).min(ep.of * rows) }
}

impl DispatchBuffers<TensorShape> {
    /// For `rows` routed rows of `width`, and `experts` in a block.
    pub fn plan(
        rows: usize,
        width: usize,
        experts: usize,
        ep: Slice,
        dtype: DType,
        train: bool,
    ) -> DispatchBuffers<TensorShape> {
        let there = ep.of > 1 && experts > 0;
        let own = |dtype, rows, width| TensorShape::new(Category::Scratch, dtype, if there { rows } else { 0 }, width);
        let back = |dtype, rows, width| own(dtype, if train { rows } else { 0 }, width);
        let sent = |shape: TensorShape| shape.through(Axis::Ep, CommUse::Reduced);
        let most = capacity(rows, ep);
        DispatchBuffers {
            all_offsets: own(DType::U32, ep.of, experts + 1).through(Axis::Ep, CommUse::Gathered),
            offsets: own(DType::U32, 1, ep.share(experts).len() + 1),
            sorted: own(DType::U32, most, 1),
            unsorted: own(DType::U32, most, 1),
            wire: sent(own(dtype, most, width)),
            held: own(dtype, most, width),
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
    /// For `rows` routed rows of `width`, and `experts` in a block.
    pub fn plan(rows: usize, width: usize, experts: usize, ep: Slice, dtype: DType, train: bool) -> Self {
        Dispatch {
            buffers: DispatchBuffers::plan(rows, width, experts, ep, dtype, train),
            exchange: RowExchange::new(ep, experts, capacity(rows, ep)),
        }
    }
}

impl<T> Dispatch<T> {
    pub(super) fn map<U>(&self, f: &mut dyn FnMut(&'static str, &T) -> Result<U>) -> Result<Dispatch<U>> {
        Ok(Dispatch { buffers: self.buffers.map(f)?, exchange: self.exchange.clone() })
    }
}

/// Who sends which rows to whom. Only `round` and what follows differ between the ranks of ep.
#[derive(Clone)]
pub struct RowExchange {
    ep: Slice,
    experts: usize,
    capacity: usize,
    /// (ep, experts + 1): the first routed row of each expert on each rank.
    offsets: Vec<u32>,
    /// Rows that this rank holds in the round.
    pub held: usize,
    /// Per peer: which of this rank's rows it gets, and where its rows arrive; then in elements.
    sends: Vec<Range<usize>>,
    arrivals: Vec<Range<usize>>,
    sent: Vec<Range<usize>>,
    received: Vec<Range<usize>>,
    /// (own experts + 1), (B), (B): as in [`DispatchBuffers`].
    own: Vec<u32>,
    sorted: Vec<u32>,
    unsorted: Vec<u32>,
}

impl RowExchange {
    fn new(ep: Slice, experts: usize, capacity: usize) -> RowExchange {
        let there = |len: usize| vec![0; if ep.of > 1 { len } else { 0 }];
        let parts = || vec![0..0; ep.of];
        RowExchange {
            ep,
            experts,
            capacity,
            offsets: there(ep.of * (experts + 1)),
            held: 0,
            sends: parts(),
            arrivals: parts(),
            sent: parts(),
            received: parts(),
            own: there(ep.share(experts).len() + 1),
            sorted: there(capacity),
            unsorted: there(capacity),
        }
    }

    /// Gathers the counts of all ranks, and returns the number of rounds: at least 1, and the same on all ranks.
    /// `offsets`: the first of this rank's `rows` of each expert.
    pub fn begin(
        &mut self,
        cx: &Cx,
        tag: Tag,
        offsets: View,
        rows: usize,
        buffers: &mut DispatchBuffers,
    ) -> Result<usize> {
        let (ep, group, all) = (self.ep, &cx.groups.ep, &mut buffers.all_offsets);
        let ticket = group.all_gather(tag, offsets, all.rows_mut(ep.of))?;
        group.wait(ticket)?;
        self.offsets.fill(0);
        cx.dev.download(all.rows(ep.of), bytemuck::cast_slice_mut(&mut self.offsets))?;
        group.release(ticket)?;
        // A device that only plans has counted nothing: all experts are used alike.
        if self.first(ep.index, self.experts) < rows {
            let alike = |i: usize| (i % (self.experts + 1) * rows / self.experts) as u32;
            self.offsets.iter_mut().enumerate().for_each(|(i, at)| *at = alike(i));
        }
        Ok(self.rounds())
    }

    /// The first routed row of `expert` on a rank.
    fn first(&self, rank: usize, expert: usize) -> usize {
        self.offsets[rank * (self.experts + 1) + expert] as usize
    }
    /// The routed rows of `from` that `to` has the experts of.
    fn rows(&self, from: usize, to: usize) -> Range<usize> {
        let own = Slice { index: to, of: self.ep.of }.share(self.experts);
        self.first(from, own.start)..self.first(from, own.end)
    }
    fn rounds(&self) -> usize {
        let incoming = |to| (0..self.ep.of).map(|from| self.rows(from, to).len()).sum::<usize>();
        (0..self.ep.of).map(incoming).max().unwrap_or(0).div_ceil(self.capacity).max(1)
    }
    /// The rows of `from` that `to` gets in `round`, and where in its window they arrive.
    fn part(&self, round: usize, from: usize, to: usize) -> (Range<usize>, Range<usize>) {
        let (rows, window) = (self.rows(from, to), round * self.capacity..(round + 1) * self.capacity);
        let before: usize = (0..from).map(|earlier| self.rows(earlier, to).len()).sum();
        let start = before.clamp(window.start, window.end);
        let end = (before + rows.len()).clamp(window.start, window.end);
        let row = |place: usize| rows.start + place.saturating_sub(before).min(rows.len());
        (row(start)..row(end), start - window.start..end - window.start)
    }

    /// Prepares `round`: who sends what, and where the rows of each expert are.
    pub fn round(&mut self, dev: &dyn Device, round: usize, buffers: &mut DispatchBuffers) -> Result<()> {
        let me = self.ep.index;
        for peer in 0..self.ep.of {
            (self.sends[peer], self.arrivals[peer]) = (self.part(round, me, peer).0, self.part(round, peer, me).1);
        }
        let mut held = 0;
        for (index, expert) in self.ep.share(self.experts).enumerate() {
            for from in 0..self.ep.of {
                let (rows, arrival) = self.part(round, from, me);
                let start = self.first(from, expert).clamp(rows.start, rows.end);
                let end = self.first(from, expert + 1).clamp(rows.start, rows.end);
                for row in start..end {
                    let place = arrival.start + row - rows.start;
                    (self.sorted[held], self.unsorted[place]) = (place as u32, held as u32);
                    held += 1;
                }
            }
            self.own[index + 1] = held as u32;
        }
        self.held = held;
        dev.upload(bytemuck::cast_slice(&self.own), buffers.offsets.rows_mut(1))?;
        dev.upload(bytemuck::cast_slice(&self.sorted[..held]), buffers.sorted.rows_mut(held))?;
        dev.upload(bytemuck::cast_slice(&self.unsorted[..held]), buffers.unsorted.rows_mut(held))
    }

    /// Assigns `held` from all ranks' `rows`, through `wire`. `order`: [`DispatchBuffers::sorted`].
    pub fn send(
        &mut self,
        cx: &Cx,
        tag: Tag,
        rows: &Tensor,
        wire: &mut Tensor,
        order: &Tensor,
        held: &mut Tensor,
    ) -> Result<()> {
        self.measure(rows.width());
        let (group, capacity) = (&cx.groups.ep, wire.capacity());
        let (send, recv) = (rows.rows(rows.capacity()), wire.rows_mut(capacity));
        let ticket = group.all_to_all(tag, send, &self.sent, recv, &self.received)?;
        group.wait(ticket)?;
        group.wait_sent(ticket)?;
        self.take(cx, order, wire, held)
    }
    /// The way back: assigns the rows that this rank sent. `order`: [`DispatchBuffers::unsorted`].
    pub fn give_back(
        &mut self,
        cx: &Cx,
        tag: Tag,
        held: &Tensor,
        order: &Tensor,
        wire: &mut Tensor,
        rows: &mut Tensor,
    ) -> Result<()> {
        self.take(cx, order, held, wire)?;
        self.measure(rows.width());
        let (group, capacity) = (&cx.groups.ep, rows.capacity());
        let (send, recv) = (wire.rows(wire.capacity()), rows.rows_mut(capacity));
        let ticket = group.all_to_all(tag, send, &self.received, recv, &self.sent)?;
        group.wait(ticket)?;
        group.wait_sent(ticket)
    }
    /// Sets the ranges of elements, in rows of `width`.
    fn measure(&mut self, width: usize) {
        for (rows, elements) in [(&self.sends, &mut self.sent), (&self.arrivals, &mut self.received)] {
            for (rows, elements) in rows.iter().zip(elements) {
                *elements = rows.start * width..rows.end * width;
            }
        }
    }
    fn take(&self, cx: &Cx, order: &Tensor, from: &Tensor, to: &mut Tensor) -> Result<()> {
        if self.held == 0 {
            return Ok(());
        }
        let (order, x, y) = (order.rows(self.held), from.rows(self.held), to.rows_mut(self.held));
        cx.dev.take_rows(TakeRows { top_k: 1, order, x, y })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Counts of 3 ranks for 5 experts, which 2, 2 and 1 ranks hold; and a rank to which most rows go.
    fn exchange(index: usize, capacity: usize, counts: [[u32; 5]; 3]) -> RowExchange {
        let mut offsets = Vec::new();
        for of_rank in counts {
            let mut at = 0;
            offsets.push(at);
            offsets.extend(of_rank.iter().map(|count| {
                at += count;
                at
            }));
        }
        RowExchange { offsets, ..RowExchange::new(Slice { index, of: 3 }, 5, capacity) }
    }

    #[test]
    fn every_row_arrives_once_in_as_many_rounds_as_the_fullest_rank_needs() {
        let even = [[2, 2, 2, 2, 2]; 3];
        let skewed = [[0, 10, 0, 0, 0], [1, 2, 3, 4, 0], [9, 0, 0, 0, 1]];
        for (counts, capacity, rounds) in
            [(even, 12, 1), (even, 11, 2), (skewed, 12, 2), (skewed, 5, 5), (skewed, 1, 22)]
        {
            assert_eq!(exchange(0, capacity, counts).rounds(), rounds, "{counts:?} {capacity}");
            for to in 0..3 {
                let plan = exchange(to, capacity, counts);
                let mut incoming = Vec::new();
                for round in 0..rounds {
                    let mut held = 0;
                    for from in 0..3 {
                        let (rows, arrival) = plan.part(round, from, to);
                        // Both ends agree, and nothing lies on something else.
                        assert_eq!((rows.len(), arrival.start), (arrival.len(), held));
                        assert_eq!(exchange(from, capacity, counts).part(round, from, to).0, rows);
                        held += rows.len();
                        incoming.extend(rows.map(|row| (from, row)));
                    }
                    assert!(held <= capacity);
                }
                let all: Vec<_> = (0..3).flat_map(|from| plan.rows(from, to).map(move |row| (from, row))).collect();
                assert_eq!(incoming, all, "to {to} with {capacity}");
            }
        }
    }
}
