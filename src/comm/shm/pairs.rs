//! The all_to_all: ranks publish which elements they send to and expect from each other. Receivers copy from senders'
//! group buffers, each element once; what is sent from other memory goes through the mailboxes. Never blocks.
//!
//! The parts of a mailbox are equal, one for each receiver. All ranks write and read the same number of rounds, that of
//! the largest part that is sent through a mailbox, so that records need only one count.
use super::buffer::BufferName;
use super::group::ShmGroup;
use super::hub::Hub;
use super::op::{KeepAlive, OpStep, ShmOp};
use super::record::{CHUNK, Desc, PairParts, Phase};
use crate::base::{DType, Result};
use crate::comm::seam::Seam;
use crate::comm::{CommUse, Tag, Ticket};
use std::ptr::copy_nonoverlapping;

impl ShmGroup {
    /// An all_to_all from and to these addresses and lengths, whose pairs [`ShmGroup::start_pairs`] publishes.
    pub(super) fn pairs_op(
        &self,
        tag: Tag,
        dtype: DType,
        (src, len): (*const u8, usize),
        (dst, recv_len): (*mut u8, usize),
        keep: KeepAlive,
    ) -> ShmOp {
        let mut op = ShmOp::new(Seam::AllToAll, tag, dtype, len, OpStep::Mail);
        (op.src, op.dst, op.keep) = (src, dst, keep);
        (op.desc.recv_len, op.desc.to, op.desc.from) = (recv_len as u64, Desc::NOBODY, Desc::NOBODY);
        if len > 0
            && let Some((found, CommUse::Reduced, true)) = self.find(src, op.bytes())
        {
            op.desc.place = found.place;
        }
        op
    }
    /// Starts an all_to_all. `pair(r)` is what this rank sends to member `r` and expects from it.
    pub(super) fn start_pairs(&self, op: ShmOp, bytes: usize, pair: impl Fn(usize) -> PairParts) -> Result<Ticket> {
        self.start_with(op, bytes, |seq| {
            for peer in 0..self.hub.size() {
                self.hub.lanes.set_pair(self.hub.me, seq, peer, pair(peer));
            }
        })
    }
}

impl ShmOp {
    /// Once all ranks have posted: copies from the group buffers, and counts the rounds for the rest. Returns whether
    /// it did.
    pub fn pull_pairs(&mut self, hub: &Hub) -> Result<bool> {
        if self.rounds.is_some() || !self.met(hub, Phase::Posted)? {
            return Ok(false);
        }
        let (size, mut longest) = (self.dtype.size(), 0);
        for from in 0..hub.size() {
            let mine = hub.lanes.pair(hub.me, self.seq, from);
            let theirs = hub.lanes.pair(from, self.seq, hub.me);
            if self.mails(hub, from) {
                let parts = (0..hub.size()).filter(|&to| to != from).map(|to| hub.lanes.pair(from, self.seq, to));
                longest = parts.map(|pair| pair.sends as usize * size).fold(longest, usize::max);
            }
            let source = match self.place_of(hub, from) {
                _ if from == hub.me => self.src,
                Desc::STAGED => continue,
                place => match hub.seat.named(BufferName::of(hub.id, place)) {
                    Some(buffer) => buffer.at(from, place),
                    None => {
                        let what = "is sent from a group buffer that this rank has dropped";
                        return Err(self.error(hub, what.into()));
                    }
                },
            };
            // SAFETY: the sender posts only when its data is complete, and leaves the data alone until this rank is
            // `Done`. Both have checked their ranges, whose lengths agree. `dst` is the lent output, the own part
            // included.
            unsafe {
                let (from, to) =
                    (source.add(theirs.send_at as usize * size), self.dst.add(mine.recv_at as usize * size));
                copy_nonoverlapping(from, to, mine.recvs as usize * size);
            }
        }
        self.rounds = Some(longest.div_ceil(pair_cell(hub)) as u32);
        Ok(true)
    }
    /// The place that `rank` sends from.
    fn place_of(&self, hub: &Hub, rank: usize) -> u64 {
        if rank == hub.me { self.desc.place } else { hub.lanes.record(rank, self.seq).desc().place }
    }
    /// Whether `rank` sends through its mailbox.
    pub fn mails(&self, hub: &Hub, rank: usize) -> bool {
        self.place_of(hub, rank) == Desc::STAGED
    }
    /// The next round of each other rank's part, into the own mailbox.
    pub fn fill_pairs(&self, hub: &Hub) {
        let (cell, size, mail) = (pair_cell(hub), self.dtype.size(), hub.lanes.mailbox(hub.me, self.wrote));
        for to in (0..hub.size()).filter(|&r| r != hub.me) {
            let pair = hub.lanes.pair(hub.me, self.seq, to);
            let (at, bytes) = round(self.wrote, cell, pair.sends as usize * size);
            // SAFETY: this half of the own mailbox is free, and a cell for each rank fits in it. The source range is
            // within the lent input.
            unsafe { copy_nonoverlapping(self.src.add(pair.send_at as usize * size + at), mail.add(to * cell), bytes) };
        }
    }
    /// The next round of this rank's parts, out of the mailboxes.
    pub fn empty_pairs(&self, hub: &Hub) {
        let (cell, size) = (pair_cell(hub), self.dtype.size());
        for from in (0..hub.size()).filter(|&r| r != hub.me && self.mails(hub, r)) {
            let pair = hub.lanes.pair(hub.me, self.seq, from);
            let (at, bytes) = round(self.read, cell, pair.recvs as usize * size);
            let mail = hub.lanes.mailbox(from, self.read).cast_const();
            // SAFETY: the sender has published this round and leaves it until it is read; `dst` is the lent output.
            unsafe {
                copy_nonoverlapping(mail.add(hub.me * cell), self.dst.add(pair.recv_at as usize * size + at), bytes);
            }
        }
    }
}

/// Bytes of a round for one receiver.
fn pair_cell(hub: &Hub) -> usize {
    (CHUNK / hub.size()) & !63
}
/// Where round `n` of a part of `total` bytes starts, and its bytes: none after the part's end.
fn round(n: u32, cell: usize, total: usize) -> (usize, usize) {
    let at = (n as usize * cell).min(total);
    (at, cell.min(total - at))
}
