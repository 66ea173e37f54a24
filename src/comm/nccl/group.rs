//! A group: what moves its data, its stream, and the ring of its operations. `order` schedules them, `calls` checks
//! requests. Never waits on the host.
use super::ring::OpRing;
use super::transport::{Transport, TransportCall};
use super::work::{PairRanges, Work};
use crate::base::{Category, DType, Error, Meter, Result};
use crate::comm::operands::CheckedCall;
use crate::comm::{Axis, Tag};
use crate::device::Buf;
use crate::device::gpu::Arg;
use crate::device::gpu::cuda::Cuda;
use crate::device::gpu::driver::Driver;
use crate::device::gpu::graphs::Graphs;
use cudarc::driver::{CudaStream, DriverError};
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

/// A transport and its stream, shared by axes whose groups have the same ranks.
pub(super) struct NcclChannel {
    pub transport: Arc<dyn Transport>,
    pub stream: Arc<CudaStream>,
    /// World ranks.
    pub ranks: Vec<usize>,
    /// Something was enqueued since compute last joined.
    pub ahead: AtomicBool,
}

impl NcclChannel {
    pub(super) fn new(transport: Arc<dyn Transport>, stream: Arc<CudaStream>, ranks: Vec<usize>) -> NcclChannel {
        NcclChannel { transport, stream, ranks, ahead: AtomicBool::new(false) }
    }
}

/// One list per table, each with one entry per rank.
pub(super) type PairTables = Vec<Vec<PairRanges>>;

pub(super) struct NcclGroup {
    pub(super) channel: Arc<NcclChannel>,
    pub(super) cuda: Arc<Cuda>,
    pub(super) meter: Meter,
    pub(super) axis: Axis,
    /// "fsdp of 4".
    name: String,
    /// World rank, and index in the group.
    pub(super) world_rank: usize,
    pub(super) index: usize,
    pub(super) id: u64,
    /// Defers calls where steps are captured.
    pub(super) graphs: Option<Arc<Graphs>>,
    /// A weak reference to itself.
    pub(super) own: Weak<NcclGroup>,
    pub(super) ring: Mutex<OpRing>,
    /// The ranges of all_to_alls. Repeated ones of deferred calls are kept once, so that captured calls repeat too.
    pub(super) tables: Mutex<PairTables>,
    /// f32 (1): a barrier all-reduces its maximum.
    pub(super) token: Mutex<Buf>,
}

impl NcclGroup {
    pub(super) fn new(
        cuda: Arc<Cuda>,
        graphs: Option<Arc<Graphs>>,
        channel: Arc<NcclChannel>,
        axis: Axis,
        rank: usize,
        meter: Meter,
    ) -> Result<Arc<NcclGroup>> {
        let index = channel.ranks.iter().position(|&r| r == rank);
        let index = index.ok_or_else(|| Error::op("group", format!("rank {rank} is not in {:?}", channel.ranks)))?;
        let ring = Mutex::new(OpRing::new(&cuda, &meter, graphs.is_some())?);
        let lease = meter.lease(Category::Other, DType::F32.size());
        let token = cuda.alloc(DType::F32, 1, Category::Other, lease)?;
        Ok(Arc::new_cyclic(|own| NcclGroup {
            name: format!("{} of {}", axis.name(), channel.ranks.len()),
            channel,
            cuda,
            meter,
            axis,
            world_rank: rank,
            index,
            id: axis as u64,
            graphs,
            own: own.clone(),
            ring,
            tables: Mutex::default(),
            token: Mutex::new(token),
        }))
    }
    pub(super) fn call(&self, op: &'static str, tag: Tag) -> CheckedCall<'_> {
        CheckedCall { rank: self.world_rank, op, group: &self.name, size: self.channel.ranks.len(), tag }
    }
    pub(super) fn failed(&self, e: DriverError) -> Error {
        self.cuda.failed(&self.name, e)
    }

    pub(super) fn tables(&self) -> MutexGuard<'_, PairTables> {
        self.tables.lock().unwrap_or_else(PoisonError::into_inner)
    }
    pub(super) fn lock(&self) -> MutexGuard<'_, OpRing> {
        self.ring.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Orders the group's stream after all work submitted to compute.
    pub(super) fn fork(&self, ring: &OpRing) -> Result<()> {
        let forked = ring.here.record(self.cuda.compute()).and_then(|()| self.channel.stream.wait(&ring.here));
        self.channel.ahead.store(true, Relaxed);
        forked.map_err(|e| self.failed(e))
    }
    /// Enqueues an operation in the group's stream.
    pub(super) fn enqueue_work(&self, call: CheckedCall, work: Work, operands: &mut [Arg]) -> Result<()> {
        let tables = self.tables();
        let pairs = match work {
            Work::AllToAll { table } => tables.get(table as usize).map_or(&[][..], Vec::as_slice),
            _ => &[],
        };
        let NcclChannel { transport, stream, .. } = &*self.channel;
        let enqueued = transport.enqueue(TransportCall { call, work, pairs }, operands, stream);
        enqueued.inspect_err(|e| self.cuda.break_off(e.to_string()))
    }

    /// The other ranks, or those that are known to be missing: "0, 2".
    pub(super) fn peers(&self) -> String {
        let others = || self.channel.ranks.iter().copied().filter(|&rank| rank != self.world_rank).collect();
        let ranks: Vec<usize> = self.channel.transport.missing().unwrap_or_else(others);
        ranks.iter().map(usize::to_string).collect::<Vec<String>>().join(", ")
    }
    pub(super) fn abort(&self, why: &str) {
        self.channel.transport.abort(why);
    }
}
