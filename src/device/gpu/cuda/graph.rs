//! Calls captured as a CUDA graph, and replayed. Never decides which: that is `graphs`.
use super::Cuda;
use crate::base::{Error, Result};
use crate::device::gpu::calls::Calls;
use crate::device::gpu::driver::Graph;
use cudarc::driver::{CudaGraph, sys};

/// A graph, ready to launch, and the kernels that stand last in it, oldest first: what a fault would name.
struct Captured {
    graph: CudaGraph,
    last: Vec<usize>,
}
// SAFETY: handles of the driver, which takes them from any thread; a graph stands in a lock, so one thread uses it at a time.
unsafe impl Send for Captured {}

/// Between begin and end the stream takes the calls down and does none of them. The capture is this thread's: others (the one that
/// watches NCCL) go on using the driver. All calls have been done before, so products have their algorithms; their workspace
/// is the device's, and nothing here allocates.
pub(super) fn capture(cuda: &Cuda, mut calls: Calls) -> Result<Graph> {
    let failed = |e| cuda.failed("capture a graph", e);
    let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
    cuda.compute.begin_capture(mode).map_err(failed)?;
    let before = cuda.recent.launches();
    let run = calls.run(cuda);
    let last = cuda.recent.since(before);
    // Ended in any case: a stream that captures can do nothing else.
    let graph = cuda.compute.end_capture(sys::CUgraphInstantiate_flags(0));
    run?;
    let none = || Error::op("capture", format!("{}: no graph of {} calls", cuda.name, calls.len()));
    let graph = graph.map_err(failed)?.ok_or_else(none)?;
    Ok(Graph { made: Box::new(Captured { graph, last }), calls })
}

pub(super) fn replay(cuda: &Cuda, graph: &mut Graph) -> Result<()> {
    let Some(Captured { graph, last }) = graph.made.downcast_ref::<Captured>() else {
        return Err(Error::op("replay", format!("{}: a graph of another driver", cuda.name)));
    };
    last.iter().for_each(|kernel| cuda.recent.note(*kernel));
    graph.launch().map_err(|e| cuda.failed("launch a graph", e))
}
