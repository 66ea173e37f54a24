//! Staged operations: rounds through the ranks' mailboxes, for buffers that peers cannot access. Never blocks.
//!
//! A send_recv from a buffer of the group is not staged: the receiver copies from it. Since each rank may send from a
//! different place, receivers find it in the sender's record.
//!
//! Every rank reads every mailbox, except in a broadcast (only the root's), send_recv (pairs) and all_to_all
//! (`pairs`). Operations use the
//! mailboxes one after another, in the order they were started. A mailbox has two halves, so that a rank fills one
//! while its peers read the other; records count the rounds.
use super::buffer::BufferName;
use super::hub::Hub;
use super::op::ShmOp;
use super::record::{CHUNK, Desc, Phase};
use crate::base::Result;
use crate::comm::seam::Seam;
use crate::device::cpu::sum::Sources;

impl ShmOp {
    /// Bytes per round: a chunk, or for a reduce_scatter each rank's equal part of a chunk.
    fn cell(&self, hub: &Hub) -> usize {
        match self.kind {
            Seam::ReduceScatter => (CHUNK / hub.size()) & !63,
            _ => CHUNK,
        }
    }
    pub fn rounds_out(&self, hub: &Hub) -> u32 {
        match self.kind {
            Seam::Broadcast if hub.me != self.desc.to as usize => 0,
            Seam::AllToAll if !self.mails(hub, hub.me) => 0,
            Seam::AllToAll => self.rounds.unwrap_or(0),
            _ if !self.is_staged() => 0,
            _ => self.bytes().div_ceil(self.cell(hub)) as u32,
        }
    }
    pub fn rounds_in(&self, hub: &Hub) -> u32 {
        match self.kind {
            Seam::Broadcast if hub.me == self.desc.to as usize => 0,
            Seam::AllToAll => self.rounds.unwrap_or(0),
            Seam::SendRecv => (self.desc.recv_len as usize * self.dtype.size()).div_ceil(CHUNK) as u32,
            _ => self.bytes().div_ceil(self.cell(hub)) as u32,
        }
    }
    fn reads_me(&self, hub: &Hub, peer: usize) -> bool {
        match self.kind {
            Seam::Broadcast => peer != hub.me,
            Seam::SendRecv => peer == self.desc.to as usize,
            _ => true,
        }
    }
    fn sends_me(&self, hub: &Hub, peer: usize) -> bool {
        match self.kind {
            Seam::AllToAll => self.mails(hub, peer),
            Seam::Broadcast => peer == self.desc.to as usize,
            Seam::SendRecv => peer == self.desc.from as usize,
            _ => true,
        }
    }

    /// Does as many rounds as the peers allow. Returns whether there were any.
    pub fn rounds(&mut self, hub: &Hub) -> Result<bool> {
        let mut moved = self.pull(hub)?;
        let (out, inn) = (self.rounds_out(hub), self.rounds_in(hub));
        loop {
            let (wrote, read) = (self.wrote, self.read);
            if wrote < out && self.mailbox_free(hub) {
                self.fill(hub);
                self.wrote += 1;
                hub.lanes.record(hub.me, self.seq).set_put(self.wrote);
            }
            if read < inn && self.met(hub, Phase::Posted)? && self.round_there(hub) {
                self.empty(hub);
                self.read += 1;
                hub.lanes.record(hub.me, self.seq).set_taken(self.read);
            }
            if (wrote, read) == (self.wrote, self.read) {
                return Ok(moved);
            }
            moved = true;
        }
    }
    /// Copies from the sender's group buffer. Returns whether it did.
    fn pull(&mut self, hub: &Hub) -> Result<bool> {
        if self.kind == Seam::AllToAll {
            return self.pull_pairs(hub);
        }
        let inn = self.rounds_in(hub);
        if self.kind != Seam::SendRecv || self.read == inn || !self.met(hub, Phase::Posted)? {
            return Ok(false);
        }
        let from = self.desc.from as usize;
        let place = if from == hub.me { self.desc.place } else { hub.lanes.record(from, self.seq).desc().place };
        if place == Desc::STAGED {
            return Ok(false);
        }
        let Some(buffer) = hub.seat.named(BufferName::of(hub.id, place)) else {
            return Err(self.error(hub, "is sent from a group buffer that this rank has dropped".into()));
        };
        let bytes = self.desc.recv_len as usize * self.dtype.size();
        // SAFETY: the sender posts only when its data is complete, and leaves the data alone until this rank is `Done`.
        // It has checked that the buffer, the same on all ranks, holds the data. `dst` is the lent output.
        unsafe { std::ptr::copy_nonoverlapping(buffer.at(from, place), self.dst, bytes) };
        self.read = inn;
        Ok(true)
    }
    /// Whether all readers are done with the half for the next round.
    fn mailbox_free(&self, hub: &Hub) -> bool {
        (0..hub.size()).all(|r| {
            let record = hub.lanes.record(r, self.seq);
            // The first two rounds always fit, once the previous operation has finished.
            let earlier = self.wrote >= 2 || self.before.is_none_or(|b| r == hub.me || hub.reached(r, b, Phase::Done));
            earlier && (!self.reads_me(hub, r) || record.leaves_half_of(self.seq, self.wrote))
        })
    }
    fn round_there(&self, hub: &Hub) -> bool {
        (0..hub.size()).filter(|&r| self.sends_me(hub, r)).all(|r| hub.lanes.record(r, self.seq).has_put(self.read))
    }

    fn fill(&self, hub: &Hub) {
        if self.kind == Seam::AllToAll {
            return self.fill_pairs(hub);
        }
        let (cell, mail) = (self.cell(hub), hub.lanes.mailbox(hub.me, self.wrote));
        let at = self.wrote as usize * cell;
        let bytes = cell.min(self.bytes() - at);
        let parts = if self.kind == Seam::ReduceScatter { hub.size() } else { 1 };
        for part in 0..parts {
            // SAFETY: this half of the own mailbox is free, and `parts` cells fit in it. The source range is within the
            // lent input (of `parts * self.bytes()` bytes).
            unsafe {
                let src = self.src.add(part * self.bytes() + at);
                std::ptr::copy_nonoverlapping(src, mail.add(part * cell), bytes);
            }
        }
    }
    fn empty(&self, hub: &Hub) {
        if self.kind == Seam::AllToAll {
            return self.empty_pairs(hub);
        }
        let (cell, at) = (self.cell(hub), self.read as usize * self.cell(hub));
        let mail = |r: usize| hub.lanes.mailbox(r, self.read).cast_const();
        let stride = mail(1.min(hub.size() - 1)) as usize - mail(0) as usize;
        let total =
            if self.kind == Seam::SendRecv { self.desc.recv_len as usize * self.dtype.size() } else { self.bytes() };
        let (n, bytes) = (hub.size(), cell.min(total - at));
        // In elements: sums may be wider than what is sent.
        let (first, len) = (at / self.dtype.size(), bytes / self.dtype.size());
        // SAFETY: senders have published this round and leave it until it is read; the destination is the lent output.
        unsafe {
            match self.kind {
                Seam::AllGather => {
                    for r in 0..n {
                        std::ptr::copy_nonoverlapping(mail(r), self.dst.add(r * total + at), bytes);
                    }
                }
                Seam::ReduceScatter => {
                    let sources = Sources::new(mail(0), stride).offset(hub.me * cell);
                    self.fold(hub).run(self.dst.add(first * self.dst_dtype.size()), sources, n, len);
                }
                Seam::AllReduce => {
                    self.fold(hub).run(self.dst.add(at), Sources::new(mail(0), stride), n, len);
                }
                Seam::Broadcast => std::ptr::copy_nonoverlapping(mail(self.desc.to as usize), self.dst.add(at), bytes),
                Seam::SendRecv => std::ptr::copy_nonoverlapping(mail(self.desc.from as usize), self.dst.add(at), bytes),
                _ => {} // move nothing
            }
        }
    }
}
