//! The newest operations of a group, each with its state until it has finished. Never enqueues.
use crate::base::{Category, DType, Meter, Result};
use crate::comm::{CommStats, Tag, Times};
use crate::device::Buf;
use crate::device::gpu::cuda::Cuda;
use crate::device::gpu::driver::Driver;
use cudarc::driver::CudaEvent;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Instant;

/// Number of operations kept.
pub(super) const RING: u64 = 256;
/// The newest [`RING`] operations of one group.
pub(super) struct OpRing {
    pub ops: Vec<NcclOp>,
    /// Number of operations requested, enqueued, and finished with their times counted.
    pub asked: u64,
    pub given: u64,
    pub counted: u64,
    pub stats: CommStats,
    /// Orders one stream after another at once.
    pub here: CudaEvent,
    /// While compute is being captured: the operations enqueued since.
    pub taken: Option<Vec<Arc<CapturedOp>>>,
    /// u32 (1), pinned, if steps are captured: a replay's progress. With the last value seen of it and of `given`, and
    /// when.
    pub progress: Option<Buf>,
    pub seen: (u32, u64, Instant),
}

pub(super) struct NcclOp {
    pub tag: Tag,
    pub name: &'static str,
    /// Used when it is not part of a graph.
    pub own: Events,
    /// The graph that contains it, if any.
    pub within: Option<(u64, Arc<CapturedOp>)>,
    pub waited: bool,
    /// Recorded while a run is profiled.
    pub times: Times,
    /// When the watching thread first saw it running.
    pub seen: Option<Instant>,
    /// Buffers in flight.
    pub keep: [Option<Arc<dyn Send + Sync>>; 2],
}

/// Events of an operation.
pub(super) struct Events {
    /// Before and after it, in the group's stream.
    pub begin: CudaEvent,
    pub done: CudaEvent,
    /// Before and after the wait of the compute stream: how long it was stalled.
    pub halted: CudaEvent,
    pub resumed: CudaEvent,
}

impl Events {
    pub(super) fn new(cuda: &Cuda) -> Result<Events> {
        let event = || cuda.event(true);
        Ok(Events { begin: event()?, done: event()?, halted: event()?, resumed: event()? })
    }
}

impl NcclOp {
    fn new(cuda: &Cuda) -> Result<NcclOp> {
        Ok(NcclOp {
            tag: Tag::new("", 0),
            name: "",
            own: Events::new(cuda)?,
            within: None,
            waited: false,
            times: Times::default(),
            seen: None,
            keep: [None, None],
        })
    }
}

impl OpRing {
    pub(super) fn new(cuda: &Cuda, meter: &Meter, captured: bool) -> Result<OpRing> {
        let progress = || cuda.alloc_host(DType::U32, 1, meter.lease(Category::Host, DType::U32.size()));
        Ok(OpRing {
            ops: (0..RING).map(|_| NcclOp::new(cuda)).collect::<Result<_>>()?,
            asked: 0,
            given: 0,
            counted: 0,
            stats: CommStats::default(),
            here: cuda.event(false)?,
            taken: None,
            progress: captured.then(progress).transpose()?,
            seen: (0, 0, Instant::now()),
        })
    }
    pub(super) fn op(&self, seq: u64) -> &NcclOp {
        &self.ops[(seq % RING) as usize]
    }
    pub(super) fn op_mut(&mut self, seq: u64) -> &mut NcclOp {
        &mut self.ops[(seq % RING) as usize]
    }
    /// Numbers of the enqueued operations that are still kept.
    pub(super) fn remembered(&self) -> Range<u64> {
        self.asked.saturating_sub(RING)..self.given
    }
}

/// An operation inside a graph.
pub(super) struct CapturedOp {
    pub events: Events,
    /// Recorded in the capture when it has finished.
    pub landed: CudaEvent,
    pub waited: AtomicBool,
}

/// An operation in flight for too long.
pub(super) struct Late {
    pub name: &'static str,
    pub tag: Tag,
    pub graph: Option<u64>,
}
