//! What a group of ranks does together, as traits and values: collectives, their tags, tickets and times. Never
//! communicates.
use crate::base::timeline::Mark;
use crate::base::{Category, DType, Result};
use crate::device::{Buf, View, ViewMut};
use std::sync::Arc;
use std::time::Duration;

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Reduce {
    Sum,
    Max,
}

/// The axes of the mesh, outermost first, and the groups that fold several of them.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash)]
pub enum Axis {
    World,
    DpReplicate,
    DpShard,
    Sp,
    Tp,
    /// dp_shard x sp: what parameters are sharded over.
    Fsdp,
    /// dp_replicate x dp_shard: ranks that see different samples.
    Dp,
    /// dp_replicate x dp_shard x sp, all but tp: ranks that see different tokens. Losses are summed over it.
    Loss,
}

impl Axis {
    pub fn name(self) -> &'static str {
        match self {
            Axis::World => "world",
            Axis::DpReplicate => "dp_replicate",
            Axis::DpShard => "dp_shard",
            Axis::Sp => "sp",
            Axis::Tp => "tp",
            Axis::Fsdp => "fsdp",
            Axis::Dp => "dp",
            Axis::Loss => "loss",
        }
    }
}

/// What a collective is for, so that errors and traces can say so: a static purpose and the unit's index.
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

/// How a buffer of [`Collective::alloc`] is used. Groups allocate what they communicate, so that shared memory needs no
/// copies and NCCL can register it. All ranks of a group allocate the same things in the same order.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum CommUse {
    /// The output of all-gathers: on shared memory one buffer for all ranks of the host.
    Gathered,
    /// The input of reduce-scatters, or the buffer of all-reduces: one a rank, which peers read in place.
    Reduced,
}

impl CommUse {
    /// Bytes that a buffer of `bytes` counts for each of `ranks` ranks on a host: one that is gathered into is there
    /// once for all of them.
    pub fn counted(self, bytes: usize, ranks: usize) -> usize {
        match self {
            CommUse::Gathered => bytes.div_ceil(ranks),
            CommUse::Reduced => bytes,
        }
    }
}

/// Names one operation of one group until both its waits are done.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[must_use = "a collective that is never waited for is never finished"]
pub struct Ticket(pub u64);

/// Since the group was made.
#[derive(Clone, Copy, Default, Debug, PartialEq)]
pub struct CommStats {
    /// Seconds during which at least one operation was in flight.
    pub in_flight_s: f64,
    /// Seconds that the compute thread spent inside calls of the group: copies, reductions, waits.
    pub exposed_s: f64,
    /// Bytes received from peers, by the algorithm's count: (n-1)/n of the full length for a gather or a
    /// reduce-scatter, twice that for an all-reduce.
    pub bytes: u64,
    pub ops: u64,
    /// Bytes that this rank sent to other hosts, where this crate sends them: neither inside a host nor by NCCL.
    pub crossed: u64,
}

/// What a group knows of an operation's times; asked for after a wait for it, while a run is profiled. What it leaves
/// out is taken from the calls: in flight from its start until it was waited for, and the compute stream held up for
/// the time of the calls.
#[derive(Clone, Copy, Default, Debug)]
pub struct Times {
    pub begun: Option<Mark>,
    /// As far as it is over.
    pub over: Option<Mark>,
    /// From when to when the compute stream stood for it.
    pub stood: Option<(Mark, Mark)>,
    /// The launch of a graph that it was part of; counts from 1. Known while the operation is among the group's last.
    pub graph: Option<u64>,
}

/// One rank's membership in the world: where its groups come from, and how ranks learn that one of them failed.
pub trait Member: Send + Sync {
    fn rank(&self) -> usize;
    fn size(&self) -> usize;
    /// The group of `ranks` (world ranks in group order, this one among them). Made once per axis by every member.
    fn group(&self, axis: Axis, ranks: Vec<usize>) -> Result<Arc<dyn Collective>>;
    /// From now on a call may block so long before it fails: longer while ranks start than in a step.
    fn set_timeout(&self, timeout: Duration);
    /// This rank failed: calls of the others into any group end with "rank N failed".
    fn abort(&self);
    /// The first rank that aborted, as far as this one knows.
    fn failed(&self) -> Option<usize>;
}

/// A group of ranks. Lengths and dtypes are checked against each other and against the peers' before anything moves.
pub trait Collective: Send + Sync {
    fn rank(&self) -> usize;
    fn size(&self) -> usize;
    fn axis(&self) -> Axis;
    fn alloc(&self, dtype: DType, len: usize, usage: CommUse, category: Category) -> Result<Buf>;
    /// `full[r * shard.len()..] = shard of rank r`; `full.len() == size * shard.len()`.
    fn all_gather(&self, tag: Tag, shard: View, full: ViewMut) -> Result<Ticket>;
    /// `shard (+)= sum over ranks, in rank order, of full[rank * shard.len()..]`. `full` f32, bf16 or f16, which is
    /// what travels; `shard` the same or f32. Summed in f32 and rounded once (NCCL rounds at every hop).
    fn reduce_scatter(&self, tag: Tag, full: ViewMut, shard: ViewMut, accumulate: bool) -> Result<Ticket>;
    /// In place, in rank order: the same bits on every rank. f32 or f64; bf16 or f16, summed in f32 and rounded once
    /// (but for NCCL, as above).
    fn all_reduce(&self, tag: Tag, buf: ViewMut, op: Reduce) -> Result<Ticket>;
    fn broadcast(&self, tag: Tag, buf: ViewMut, root: usize) -> Result<Ticket>;
    /// Sends to `to` while receiving from `from`; lengths may differ between pairs, not within one.
    fn send_recv(&self, tag: Tag, to: usize, send: View, from: usize, recv: ViewMut) -> Result<Ticket>;
    fn barrier(&self, tag: Tag) -> Result<()>;
    fn wait(&self, ticket: Ticket) -> Result<()>;
    /// After an all-gather: this rank reads the gathered buffer no more.
    fn release(&self, ticket: Ticket) -> Result<()>;
    /// After a reduce-scatter or send: the input may be overwritten.
    fn wait_sent(&self, ticket: Ticket) -> Result<()>;
    fn stats(&self) -> CommStats;
    fn times(&self, _: Ticket) -> Times {
        Times::default()
    }
}
