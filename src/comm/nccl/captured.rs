//! A group's operations inside a CUDA graph: captured with compute, replayed with it, and monitored. `order` handles
//! those that are enqueued on streams one by one. The host never waits.
//!
//! [Note: captured] Where calls are deferred ([`Graphs::guest`](crate::device::gpu::graphs::Graphs::guest)), an
//! operation is *requested* before it is *enqueued*, and may be enqueued as part of a graph. The same events then order
//! it within the capture, where only the graph knows them. What the host must see later is recorded by nodes of the
//! graph: the times, and a word in pinned memory with the replay's progress, which is twice the number of finished
//! operations, plus one while one is running. Compute joins the group before a graph is launched, and a graph joins it
//! at its end, so a wait for an operation of an earlier graph has nothing left to wait for.
use super::group::NcclGroup;
use super::ring::{CapturedOp, Events, Late, OpRing};
use super::work::Work;
use crate::base::Result;
use crate::device::gpu::Arg;
use cudarc::driver::DriverError;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering::Relaxed};
use std::time::{Duration, Instant};

impl NcclGroup {
    pub(super) fn start_captured(&self, ring: &mut OpRing, work: Work, operands: &mut [Arg]) -> Result<()> {
        self.fork(ring)?;
        let failed = |e: DriverError| self.failed(e);
        let stream = &self.channel.stream;
        let at = ring.taken.as_ref().map_or(0, Vec::len);
        let word = ring.progress.as_ref().map(|word| word.view());
        let write_progress = |word_is: u32| word.map_or(Ok(()), |word| self.cuda.write_word(stream, word, word_is));
        let (waited, landed) = (AtomicBool::new(false), self.cuda.event(false)?);
        let captured = CapturedOp { events: Events::new(&self.cuda)?, landed, waited };
        write_progress(2 * at as u32 + 1)?;
        self.cuda.record_in_graph(&captured.events.begin, stream)?;
        let asked_as = ring.op(ring.given + at as u64);
        self.enqueue_work(self.call(asked_as.name, asked_as.tag), work, operands)?;
        self.cuda.record_in_graph(&captured.events.done, stream)?;
        write_progress(2 * at as u32 + 2)?;
        captured.landed.record(stream).map_err(failed)?;
        if let Some(taken) = &mut ring.taken {
            taken.push(Arc::new(captured));
        }
        Ok(())
    }
    pub(super) fn wait_captured(&self, ring: &mut OpRing, back: u32) -> Result<()> {
        let taken = ring.taken.as_deref().unwrap_or_default();
        // Started before the capture: compute has already joined it.
        let Some(of) = taken.len().checked_sub(back as usize).map(|at| &taken[at]) else { return Ok(()) };
        let (compute, failed) = (self.cuda.compute(), |e: DriverError| self.failed(e));
        if of.waited.swap(true, Relaxed) {
            return compute.wait(&of.landed).map_err(failed);
        }
        self.cuda.record_in_graph(&of.events.halted, compute)?;
        compute.wait(&of.landed).map_err(failed)?;
        self.cuda.record_in_graph(&of.events.resumed, compute)
    }
}

/// An operation of a replay that is overdue. Once another replay is launched, the operation in the same place is a
/// different one.
pub(super) fn late_captured(ring: &mut OpRing, timeout: Duration) -> Option<Late> {
    let word = ring.progress.as_ref()?.view().address() as *mut u32;
    // SAFETY: pinned memory of this ring, aligned, which the GPU writes one word at a time.
    let (word, given) = (unsafe { AtomicU32::from_ptr(word) }.load(Relaxed), ring.given);
    if (ring.seen.0, ring.seen.1) != (word, given) {
        ring.seen = (word, given, Instant::now());
    }
    if word % 2 == 0 || ring.seen.2.elapsed() <= timeout {
        return None;
    }
    // Belongs to the newest replay: nothing was launched since.
    let graph = ring.op(given.checked_sub(1)?).within.as_ref()?.0;
    let first = ring.remembered().find(|&seq| ring.op(seq).within.as_ref().is_some_and(|(of, _)| *of == graph))?;
    let op = ring.op(first + u64::from(word / 2));
    Some(Late { name: op.name, tag: op.tag, graph: Some(graph) })
}
