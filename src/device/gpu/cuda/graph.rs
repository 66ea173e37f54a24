//! Calls captured as a CUDA graph, and replayed. Never decides which: that is `graphs`.
use super::device::Cuda;
use crate::base::{DType, Error, Result};
use crate::device::View;
use crate::device::gpu::calls::Calls;
use crate::device::gpu::driver::{Graph, run};
use crate::device::gpu::guest::{Guest, Taken};
use cudarc::driver::sys::{CUdeviceptr, CUgraphInstantiate_flags as Flags};
use cudarc::driver::{CudaEvent, CudaGraph, CudaStream, sys};
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

/// A graph, ready to launch, and the kernels that stand last in it, oldest first: what a fault would name.
struct Captured {
    graph: CudaGraph,
    last: Vec<usize>,
    /// Whose work is in it, and what they have of it.
    guests: Vec<(Arc<dyn Guest>, Taken)>,
}
// SAFETY: handles of the driver, which takes them from any thread; a graph stands in a lock, so one thread uses it at a
// time.
unsafe impl Send for Captured {}

/// Between begin and end the stream takes the calls down and does none of them, and so do the streams of guests that
/// are forked from it. The capture is this thread's: others (the one that watches NCCL) go on using the driver. All
/// calls have been done before, so products have their algorithms; their workspace is the device's, and nothing here
/// allocates.
pub(super) fn capture(cuda: &Cuda, mut calls: Calls) -> Result<Graph> {
    let failed = |e| cuda.failed("capture a graph", e);
    let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
    let guests = calls.guests();
    guests.iter().try_for_each(|guest| guest.join())?;
    cuda.compute.begin_capture(mode).map_err(failed)?;
    guests.iter().for_each(|guest| guest.begin());
    let before = cuda.recent.launches();
    let run = run(cuda, &mut calls).and_then(|()| guests.iter().try_for_each(|guest| guest.join()));
    let last = cuda.recent.since(before);
    let guests = guests.into_iter().map(|guest| (guest.clone(), guest.end())).collect();
    // Ended in any case: a stream that captures can do nothing else. Collectives go ahead of compute in a graph, too.
    let graph = cuda.compute.end_capture(Flags::CUDA_GRAPH_INSTANTIATE_FLAG_USE_NODE_PRIORITY);
    run?;
    let none = || Error::op("capture", format!("{}: no graph of {} calls", cuda.name, calls.len()));
    let graph = graph.map_err(failed)?.ok_or_else(none)?;
    Ok(Graph { made: Box::new(Captured { graph, last, guests }), calls })
}

pub(super) fn replay(cuda: &Cuda, graph: &mut Graph) -> Result<()> {
    let Some(Captured { graph, last, guests }) = graph.made.downcast_ref::<Captured>() else {
        return Err(Error::op("replay", format!("{}: a graph of another driver", cuda.name)));
    };
    guests.iter().try_for_each(|(guest, _)| guest.join())?;
    last.iter().for_each(|kernel| cuda.recent.note(*kernel));
    graph.launch().map_err(|e| cuda.failed("launch a graph", e))?;
    let number = cuda.replays.fetch_add(1, Relaxed) + 1;
    guests.iter().for_each(|(guest, taken)| guest.replayed(taken, number));
    Ok(())
}

impl Cuda {
    /// A point of a stream that captures, which each launch of the graph passes anew, for the host to see.
    pub fn record_in_graph(&self, event: &CudaEvent, stream: &CudaStream) -> Result<()> {
        let flags = sys::CUevent_record_flags::CU_EVENT_RECORD_EXTERNAL as u32;
        // SAFETY: both live, and are of this context.
        let recorded = unsafe { sys::cuEventRecordWithFlags(event.cu_event(), stream.cu_stream(), flags) };
        recorded.result().map_err(|e| self.failed("record an event of a graph", e))
    }
    /// Writes `x` to `word` (u32 (1), pinned) when `stream` comes to this point.
    pub fn tell(&self, stream: &CudaStream, word: View, x: u32) -> Result<()> {
        word.fits("tell", "word", DType::U32, 1)?;
        // SAFETY: one word of memory that the device reaches at the host's address.
        let told = unsafe { sys::cuMemsetD32Async(word.address() as CUdeviceptr, x, 1, stream.cu_stream()) };
        told.result().map_err(|e| self.failed("write a word", e))
    }
}
