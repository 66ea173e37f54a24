//! Collectives of a group of ranks as traits and values: operations, tags, tickets and times. Never communicates.
use super::Axis;
use crate::base::timeline::Mark;
use crate::base::{Category, DType, Reduce, Result};
use crate::device::{Buf, View, ViewMut};
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

/// The purpose of a collective, for errors and traces: a static string and the unit's index.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Tag {
    pub what: &'static str,
    pub unit: usize,
}
impl Tag {
    pub const fn new(what: &'static str, unit: usize) -> Tag {
        Tag { what, unit }
    }
}
impl std::fmt::Display for Tag {
    fn fmt(&self, f: &mut std::fmt::Formatter) -> std::fmt::Result {
        write!(f, "{} {}", self.what, self.unit)
    }
}

/// How a buffer of [`Collective::alloc`] is used. Groups allocate the buffers they communicate, so that shared memory
/// needs no copies and NCCL can register them. All ranks of a group allocate the same buffers in the same order.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum CommUse {
    /// The output of all_gathers: in shared memory, one buffer for all ranks of the host.
    Gathered,
    /// The input of reduce_scatters and all_to_alls or the buffer of all_reduces: one per rank, which peers read in
    /// place.
    Reduced,
}

impl CommUse {
    /// Bytes of a buffer of `bytes` that each of `ranks` ranks on a host counts: a gathered buffer exists once for all.
    pub fn counted(self, bytes: usize, ranks: usize) -> usize {
        match self {
            CommUse::Gathered => bytes.div_ceil(ranks),
            CommUse::Reduced => bytes,
        }
    }
}

/// Identifies one operation of one group until both of its waits are done.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[must_use = "a collective must be awaited to finish"]
pub struct Ticket(pub u64);

/// Totals since the group was created.
#[derive(Clone, Copy, Default, Debug, PartialEq)]
pub struct CommStats {
    /// Seconds during which at least one operation was in flight.
    pub in_flight_s: f64,
    /// Seconds that the compute thread spent inside the group's calls: copies, reductions, waits.
    pub exposed_s: f64,
    /// Bytes received from peers, as the algorithm counts them: (n-1)/n of the full length for an all_gather or
    /// reduce_scatter, twice that for an all_reduce, the parts of other ranks for an all_to_all.
    pub bytes: u64,
    pub ops: u64,
    /// Bytes that this rank sent to other hosts over this crate's own wires; excludes NCCL.
    pub crossed: u64,
}

/// What a group knows about the times of an operation, queried after a wait for it while a run is profiled. For a
/// missing field, the calls' times are used: in flight from start to wait, with the compute stream stalled during the
/// calls.
#[derive(Clone, Copy, Default, Debug)]
pub struct Times {
    pub begun: Option<Mark>,
    /// When it finished, if it has.
    pub over: Option<Mark>,
    /// When the compute stream was stalled by it.
    pub stood: Option<(Mark, Mark)>,
    /// The launch of the CUDA graph that contained it, counted from 1. Known only for the group's last operations.
    pub graph: Option<u64>,
}

/// One rank's membership in the world: creates groups, and learns when a rank fails.
pub trait Member: Send + Sync {
    fn rank(&self) -> usize;
    fn size(&self) -> usize;
    /// The group of `ranks` (world ranks in group order, including this one). Every member creates it once per axis.
    fn group(&self, axis: Axis, ranks: Vec<usize>) -> Result<Arc<dyn Collective>>;
    /// Sets how long a call may block before it fails: longer during startup than in a step.
    fn set_timeout(&self, timeout: Duration);
    /// Reports that this rank failed: other ranks' calls into any group end with "rank N failed".
    fn abort(&self);
    /// The first rank that aborted, if known here.
    fn failed(&self) -> Option<usize>;
}

/// A group of ranks. Lengths and dtypes are checked against each other and against the peers' before data moves.
pub trait Collective: Send + Sync {
    fn rank(&self) -> usize;
    fn size(&self) -> usize;
    fn axis(&self) -> Axis;
    fn alloc(&self, dtype: DType, len: usize, usage: CommUse, category: Category) -> Result<Buf>;
    /// Sets `full[r * shard.len()..]` to the shard of rank r. `full.len() == size * shard.len()`.
    fn all_gather(&self, tag: Tag, shard: View, full: ViewMut) -> Result<Ticket>;
    /// `shard (+)= sum over ranks, in rank order, of full[rank * shard.len()..]`. `full` is f32, bf16 or f16, and is
    /// sent in that dtype; `shard` has the same dtype or f32. Summed in f32 and rounded once (NCCL rounds at every
    /// hop).
    fn reduce_scatter(&self, tag: Tag, full: ViewMut, shard: ViewMut, accumulate: bool) -> Result<Ticket>;
    /// In place, in rank order: the same bits on every rank. f32 or f64; bf16 or f16 are summed in f32 and rounded once
    /// (except by NCCL, as above).
    fn all_reduce(&self, tag: Tag, buf: ViewMut, op: Reduce) -> Result<Ticket>;
    fn broadcast(&self, tag: Tag, buf: ViewMut, root: usize) -> Result<Ticket>;
    /// Sends to `to` while receiving from `from`. Both ends of a pair give the same length; pairs may differ.
    fn send_recv(&self, tag: Tag, to: usize, send: View, from: usize, recv: ViewMut) -> Result<Ticket>;
    /// Sends the elements `sends[r]` of `send` to each rank r, and receives those of rank r as the elements `recvs[r]`
    /// of `recv`. Ranges may be empty and in any order, and those of `send` may overlap. Both ends of a pair give the
    /// same length: ranks that do not know it exchange lengths first, by an all_to_all of equal parts. In shared memory
    /// a `send` in a [`CommUse::Reduced`] buffer is copied once, by its receivers; any other goes through mailboxes.
    fn all_to_all(
        &self,
        tag: Tag,
        send: View,
        sends: &[Range<usize>],
        recv: ViewMut,
        recvs: &[Range<usize>],
    ) -> Result<Ticket>;
    fn barrier(&self, tag: Tag) -> Result<()>;
    fn wait(&self, ticket: Ticket) -> Result<()>;
    /// After an all_gather: this rank no longer reads the gathered buffer.
    fn release(&self, ticket: Ticket) -> Result<()>;
    /// After a reduce_scatter, send or all_to_all: makes the input safe to overwrite.
    fn wait_sent(&self, ticket: Ticket) -> Result<()>;
    fn stats(&self) -> CommStats;
    fn times(&self, _: Ticket) -> Times {
        Times::default()
    }
}
