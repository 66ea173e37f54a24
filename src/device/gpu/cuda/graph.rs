//! Captures calls as a CUDA graph and replays it. Never decides which calls: `graphs` does.
use super::device::Cuda;
use crate::View;
use crate::gpu::calls::Calls;
use crate::gpu::driver::{Graph, run};
use crate::gpu::guest::{Guest, Taken};
use cudarc::driver::sys::{CUdeviceptr, CUgraphInstantiate_flags as Flags};
use cudarc::driver::{CudaEvent, CudaGraph, CudaStream, sys};
use flatshard_base::{DType, Error, Result};
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

/// A graph that is ready to launch, and its last kernels, oldest first, for fault messages.
struct Captured {
    graph: CudaGraph,
    last: Vec<usize>,
    /// Guests with work in the graph, and their handles to it.
    guests: Vec<(Arc<dyn Guest>, Taken)>,
}
// SAFETY: handles of the driver, which any thread may use; a lock around a graph ensures one at a time.
unsafe impl Send for Captured {}

/// Between begin and end the stream records calls without executing them, and so do guests' streams that are forked
/// from it. The capture is limited to this thread; others (the one that watches NCCL) keep using the driver. All calls
/// have been executed before, so products have their algorithms; their workspace is the device's, and nothing here
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
    // Always ended, because a capturing stream can do nothing else. Collectives keep their priority over compute in a
    // graph.
    let graph = cuda.compute.end_capture(Flags::CUDA_GRAPH_INSTANTIATE_FLAG_USE_NODE_PRIORITY);
    run?;
    let none = || Error::op("capture", format!("{}: capturing {} calls gave no graph", cuda.name, calls.len()));
    let graph = graph.map_err(failed)?.ok_or_else(none)?;
    Ok(Graph { made: Box::new(Captured { graph, last, guests }), calls })
}

pub(super) fn replay(cuda: &Cuda, graph: &mut Graph) -> Result<()> {
    let Some(Captured { graph, last, guests }) = graph.made.downcast_ref::<Captured>() else {
        return Err(Error::op("replay", format!("{}: the graph belongs to another driver", cuda.name)));
    };
    guests.iter().try_for_each(|(guest, _)| guest.join())?;
    last.iter().for_each(|kernel| cuda.recent.note(*kernel));
    graph.launch().map_err(|e| cuda.failed("launch a graph", e))?;
    let number = cuda.replays.fetch_add(1, Relaxed) + 1;
    guests.iter().for_each(|(guest, taken)| guest.replayed(taken, number));
    Ok(())
}

impl Cuda {
    /// Records an event in a capture; each launch of the graph completes it again, visible to the host.
    pub fn record_in_graph(&self, event: &CudaEvent, stream: &CudaStream) -> Result<()> {
        let flags = sys::CUevent_record_flags::CU_EVENT_RECORD_EXTERNAL as u32;
        // SAFETY: both are alive and belong to this context.
        let recorded = unsafe { sys::cuEventRecordWithFlags(event.cu_event(), stream.cu_stream(), flags) };
        recorded.result().map_err(|e| self.failed("record an event in a graph", e))
    }
    /// Writes `x` to `word` (u32 (1), pinned) when `stream` reaches this point.
    pub fn write_word(&self, stream: &CudaStream, word: View, x: u32) -> Result<()> {
        word.fits("tell", "word", DType::U32, 1)?;
        // SAFETY: one word of memory that the device can access at the host's address.
        let written = unsafe { sys::cuMemsetD32Async(word.address() as CUdeviceptr, x, 1, stream.cu_stream()) };
        written.result().map_err(|e| self.failed("write a word", e))
    }
}
