//! One operation in flight: where it reads, where it writes, and the steps it takes. A step never blocks: it does what the
//! peers' states allow now and says whether anything moved.
//!
//! [Note: in place] A gather into a [`CommUse::Gathered`](crate::comm::CommUse) buffer is: every rank writes its own piece
//! (when all ranks have released what was there before), then all have everything. A reduction of a `Reduced` buffer reads
//! the peers' buffers where they are, and what is sent from one is copied from there. Everything else is *staged*: cut into
//! rounds of a chunk, which go through the ranks' mailboxes (`mail`).
use super::buffer::Shared;
use super::group::Hub;
use super::record::{Desc, Kind, Phase};
use super::sum::{Fold, Sources};
use crate::base::{DType, Error, Result};
use crate::comm::{Reduce, Tag};
use std::sync::Arc;
use std::time::Instant;

pub(super) type Keep = [Option<Arc<dyn Send + Sync>>; 2];

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Step {
    /// Gather in place: write the own piece as soon as earlier contents are released.
    Write,
    /// Gather in place: wait for the peers' pieces.
    Collect,
    /// Reduction in place: wait for the peers' inputs, reduce the own part.
    Reduce,
    /// All-reduce in place: wait for the peers' parts, copy them.
    Copy,
    /// Staged: rounds through the mailboxes.
    Mail,
    /// Wait until the peers have read what is this rank's.
    Drain,
    /// Allocation, barrier: wait until all are here.
    Meet,
    Retired,
}

/// The caller's side of an operation. Pointers are valid as long as `keep`; the caller leaves the memory alone until the
/// waits say so (Note in `comm`).
pub(super) struct Op {
    pub seq: u64,
    pub kind: Kind,
    pub tag: Tag,
    pub desc: Desc,
    pub dtype: DType,
    pub step: Step,
    /// The result is there for the caller.
    pub complete: bool,
    /// When this rank saw that it was.
    pub over: Option<Instant>,
    /// Gather in place: the buffer, and as its how manieth content (Note in `words`).
    pub into: Option<(Arc<Shared>, u64)>,
    /// The caller has released that content already.
    pub released: bool,
    pub src: *const u8,
    pub dst: *mut u8,
    /// Of what is written to `dst`: f32 for some sums of narrower elements.
    pub dst_dtype: DType,
    pub accumulate: bool,
    pub reduce: Reduce,
    /// Reductions in place: the ranks' inputs.
    pub sources: Sources,
    pub keep: Keep,
    /// The staged operation before this one: its mailboxes must be read empty.
    pub before: Option<u64>,
    /// Rounds that went into the own mailbox, and that were read from the senders'.
    pub wrote: u32,
    pub read: u32,
    matched: bool,
}

// SAFETY: the pointers stand for buffers kept alive by `keep`, lent to the operation until its waits are done.
unsafe impl Send for Op {}

impl Op {
    pub fn new(kind: Kind, tag: Tag, dtype: DType, len: usize, step: Step) -> Op {
        Op {
            seq: 0,
            kind,
            tag,
            desc: Desc::new(kind, tag, dtype, len),
            dtype,
            step,
            complete: false,
            over: None,
            into: None,
            released: false,
            src: std::ptr::null(),
            dst: std::ptr::null_mut(),
            dst_dtype: dtype,
            accumulate: false,
            reduce: Reduce::Sum,
            sources: Sources::default(),
            keep: [None, None],
            before: None,
            wrote: 0,
            read: 0,
            matched: false,
        }
    }
    /// A slot of the ring that was never used.
    pub fn none() -> Op {
        let mut op = Op::new(Kind::Barrier, Tag::new("", 0), DType::U8, 0, Step::Retired);
        op.complete = true;
        op
    }
    pub fn bytes(&self) -> usize {
        self.desc.len as usize * self.dtype.size()
    }
    /// Goes through this rank's mailbox.
    pub fn is_staged(&self) -> bool {
        self.step == Step::Mail && self.desc.place == Desc::STAGED
    }
    pub fn pending(&self) -> bool {
        self.step != Step::Retired
    }
    /// The phase that peers must reach for this step to end: for messages.
    pub fn awaited(&self) -> Phase {
        match self.step {
            Step::Copy => Phase::Reduced,
            Step::Drain => Phase::Done,
            Step::Mail if self.matched => Phase::Done,
            Step::Mail => Phase::Posted,
            _ => Phase::Ready,
        }
    }
    pub fn retire(&mut self, hub: &Hub) {
        hub.publish(self.seq, Phase::Retired);
        self.step = Step::Retired;
        self.keep = [None, None];
        self.into = None;
    }
    pub fn fold(&self, hub: &Hub) -> Fold {
        let (from, into) = (self.dtype, self.dst_dtype);
        Fold { level: hub.level, from, into, op: self.reduce, accumulate: self.accumulate }
    }
    /// All ranks have released what the gather will overwrite.
    fn free(&self, hub: &Hub) -> bool {
        self.into.as_ref().is_none_or(|(buffer, content)| hub.vacant(buffer, *content))
    }

    /// Goes as far as it can.
    pub fn advance(&mut self, hub: &Hub) -> Result<bool> {
        let before = self.step;
        loop {
            let step = self.step;
            let moved = self.take_step(hub)?;
            if self.step == step {
                return Ok(moved || step != before);
            }
        }
    }

    fn take_step(&mut self, hub: &Hub) -> Result<bool> {
        let step = self.step;
        match step {
            Step::Write if self.free(hub) => {
                // SAFETY: `dst` is this rank's piece of the gathered buffer: all ranks have released it and only this one
                // writes it; `src` is the shard, as long as the piece. They may not overlap: they are two borrows.
                unsafe { std::ptr::copy_nonoverlapping(self.src, self.dst, self.bytes()) };
                hub.publish(self.seq, Phase::Ready);
                self.step = Step::Collect;
            }
            Step::Collect if self.met(hub, Phase::Ready)? => {
                self.complete = true;
                if self.released
                    && let Some((buffer, content)) = &self.into
                {
                    buffer.release(*content);
                }
                self.retire(hub);
            }
            Step::Reduce if self.met(hub, Phase::Ready)? => {
                if self.kind == Kind::ReduceScatter {
                    // SAFETY: peers' inputs stay as they are until this rank is `Done`; `dst` is the lent shard.
                    unsafe { self.fold(hub).run(self.dst, self.sources, hub.size(), self.desc.len as usize) };
                    self.complete = true;
                    hub.publish(self.seq, Phase::Done);
                    self.step = Step::Drain;
                } else {
                    self.reduce_slice(hub);
                    hub.publish(self.seq, Phase::Reduced);
                    self.step = Step::Copy;
                }
            }
            Step::Copy if self.met(hub, Phase::Reduced)? => {
                for peer in (0..hub.size()).filter(|&r| r != hub.me) {
                    let (at, bytes) = self.slice(hub, peer);
                    // SAFETY: the peer is done with writing its slice, and has read this rank's copy of it (it reduced
                    // it), so nobody else touches either until this rank is `Done`.
                    unsafe { std::ptr::copy_nonoverlapping(self.sources.of(peer).add(at), self.dst.add(at), bytes) };
                }
                hub.publish(self.seq, Phase::Done);
                self.step = Step::Drain;
            }
            Step::Mail => {
                let moved = self.rounds(hub)?;
                if self.wrote == self.rounds_out(hub) && self.read == self.rounds_in(hub) {
                    self.complete = true;
                    hub.publish(self.seq, Phase::Done);
                    self.step = Step::Drain;
                }
                return Ok(moved);
            }
            Step::Drain if self.met(hub, Phase::Done)? => {
                // An all-reduced buffer is the caller's again only now: peers were still copying from it.
                self.complete = true;
                self.retire(hub);
            }
            Step::Meet if self.met(hub, Phase::Ready)? => {
                self.complete = true;
                self.retire(hub);
            }
            _ => return Ok(false),
        }
        Ok(true)
    }

    /// Whether all peers have come to `phase`. Compares each peer's record as soon as it is there.
    pub fn met(&mut self, hub: &Hub, phase: Phase) -> Result<bool> {
        let (mut all, mut posted) = (true, true);
        for peer in (0..hub.size()).filter(|&r| r != hub.me) {
            let record = hub.lanes.record(peer, self.seq);
            if !record.reached(self.seq, Phase::Posted) {
                (all, posted) = (false, false);
                continue;
            }
            if !self.matched {
                let theirs = record.desc();
                if !Desc::agrees(&self.desc, hub.me, &theirs, peer) {
                    let (me, peer) = (hub.name(hub.me), hub.name(peer));
                    let what = format!(
                        "operation {} differs: rank {me} called {}, rank {peer} called {theirs}",
                        self.seq, self.desc
                    );
                    return Err(self.error(hub, what));
                }
            }
            all &= record.reached(self.seq, phase);
        }
        self.matched |= posted;
        Ok(all)
    }

    pub fn error(&self, hub: &Hub, what: String) -> Error {
        hub.error(self.kind.name(), self.tag, what)
    }

    /// All-reduce: rank `r`'s slice as (byte offset, bytes): equal slices but for the last ones, whole cache lines each.
    fn slice(&self, hub: &Hub, r: usize) -> (usize, usize) {
        let per = self.bytes().div_ceil(hub.size()).next_multiple_of(64);
        let (start, end) = ((r * per).min(self.bytes()), ((r + 1) * per).min(self.bytes()));
        (start, end - start)
    }
    fn reduce_slice(&mut self, hub: &Hub) {
        let (at, bytes) = self.slice(hub, hub.me);
        if hub.size() > 1 {
            // SAFETY: of this slice peers read nothing before this rank has published `Reduced`, and their copies of it
            // they leave alone until they have seen that; `dst` is the lent buffer.
            let len = bytes / self.dtype.size();
            unsafe { self.fold(hub).run(self.dst.add(at), self.sources.offset(at), hub.size(), len) };
        }
    }
}
