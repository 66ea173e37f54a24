//! One operation in flight: its input, its output, and its steps. A step never blocks: it does what the peers' states
//! allow now and returns whether anything changed.
//!
//! [Note: in place] A gather into a [`CommUse::Gathered`](crate::comm::CommUse) buffer: every rank writes its own shard
//! (once all ranks have released the previous contents), and then all have everything. A reduction of a `Reduced`
//! buffer reads the peers' buffers directly, and data sent from one is copied from there. Everything else is *staged*:
//! split into rounds of a chunk, which go through the ranks' mailboxes (`mail`).
use super::buffer::ShmBuffer;
use super::hub::Hub;
use super::record::{Desc, Phase};
use crate::base::{DType, Error, Result};
use crate::comm::seam::Seam;
use crate::comm::{Reduce, Tag};
use crate::device::cpu::sum::{Fold, Sources};
use std::sync::Arc;
use std::time::Instant;

pub(super) type KeepAlive = [Option<Arc<dyn Send + Sync>>; 2];

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum OpStep {
    /// In-place gather: write this rank's shard once earlier contents are released.
    Write,
    /// In-place gather: wait for the peers' shards.
    Collect,
    /// In-place reduction: wait for the peers' inputs, reduce this rank's shard.
    Reduce,
    /// In-place all_reduce: wait for the peers' slices, copy them.
    Copy,
    /// Staged: rounds through the mailboxes.
    Mail,
    /// Wait until the peers have read this rank's data.
    Drain,
    /// Allocation, barrier: wait until all ranks have arrived.
    Meet,
    Retired,
}

/// The caller's view of an operation. Pointers are valid as long as `keep` lives; the caller leaves the memory alone
/// until its waits return (see the Note in `comm`).
pub(super) struct ShmOp {
    pub seq: u64,
    pub kind: Seam,
    pub tag: Tag,
    pub desc: Desc,
    pub dtype: DType,
    pub step: OpStep,
    /// The result is available to the caller.
    pub complete: bool,
    /// When this rank noticed its completion.
    pub over: Option<Instant>,
    /// In-place gather: the buffer, and the number of its contents (Note in `words`).
    pub into: Option<(Arc<ShmBuffer>, u64)>,
    /// The caller has already released those contents.
    pub released: bool,
    pub src: *const u8,
    pub dst: *mut u8,
    /// Dtype of `dst`: f32 for some sums of narrower elements.
    pub dst_dtype: DType,
    pub accumulate: bool,
    pub reduce: Reduce,
    /// In-place reductions: the ranks' inputs.
    pub sources: Sources,
    pub keep: KeepAlive,
    /// The previous staged operation, whose mailboxes must be read first.
    pub before: Option<u64>,
    /// Rounds written to the own mailbox, and rounds read from the senders'.
    pub wrote: u32,
    pub read: u32,
    /// All_to_all: the rounds of all mailboxes; known once all ranks have posted.
    pub rounds: Option<u32>,
    matched: bool,
}

// SAFETY: the pointers stand for buffers kept alive by `keep`, lent to the operation until its waits are done.
unsafe impl Send for ShmOp {}

impl ShmOp {
    pub fn new(kind: Seam, tag: Tag, dtype: DType, len: usize, step: OpStep) -> ShmOp {
        ShmOp {
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
            rounds: None,
            matched: false,
        }
    }
    /// An unused slot of the ring.
    pub fn none() -> ShmOp {
        let mut op = ShmOp::new(Seam::Barrier, Tag::new("", 0), DType::U8, 0, OpStep::Retired);
        op.complete = true;
        op
    }
    pub fn bytes(&self) -> usize {
        self.desc.len as usize * self.dtype.size()
    }
    /// Whether it goes through this rank's mailbox.
    pub fn is_staged(&self) -> bool {
        self.step == OpStep::Mail && self.desc.place == Desc::STAGED
    }
    pub fn pending(&self) -> bool {
        self.step != OpStep::Retired
    }
    /// The phase that peers must reach for this step to end, for messages.
    pub fn awaited(&self) -> Phase {
        match self.step {
            OpStep::Copy => Phase::Reduced,
            OpStep::Drain => Phase::Done,
            OpStep::Mail if self.matched => Phase::Done,
            OpStep::Mail => Phase::Posted,
            _ => Phase::Ready,
        }
    }
    pub fn retire(&mut self, hub: &Hub) {
        hub.publish(self.seq, Phase::Retired);
        self.step = OpStep::Retired;
        self.keep = [None, None];
        self.into = None;
    }
    pub fn fold(&self, hub: &Hub) -> Fold {
        let (from, into) = (self.dtype, self.dst_dtype);
        Fold { level: hub.level, from, into, op: self.reduce, accumulate: self.accumulate }
    }
    /// Whether all peers have reached `phase`. Compares each peer's record as soon as it is posted.
    pub fn met(&mut self, hub: &Hub, phase: Phase) -> Result<bool> {
        let (mut all, mut posted) = (true, true);
        for peer in (0..hub.size()).filter(|&r| r != hub.me) {
            let record = hub.lanes.record(peer, self.seq);
            if !record.reached(self.seq, Phase::Posted) {
                (all, posted) = (false, false);
                continue;
            }
            if !self.matched {
                let pair = |of, with| hub.lanes.pair(of, self.seq, with);
                let mine = self.desc.toward(peer, || pair(hub.me, peer));
                let theirs = record.desc().toward(hub.me, || pair(peer, hub.me));
                if !Desc::agrees(&mine, hub.me, &theirs, peer) {
                    let (me, peer) = (hub.name(hub.me), hub.name(peer));
                    let what =
                        format!("operation {} differs: rank {me} called {mine}, rank {peer} called {theirs}", self.seq);
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
}
