//! The operations of a group in the order of its streams: start, wait, timing, monitoring. The host waits only in
//! [`NcclGroup::settle`], and when more than [`RING`] operations are in flight. `captured` handles operations inside a
//! graph.
//!
//! [Note: streams] An operation runs on the group's stream. It starts after an event that the compute stream records
//! when the operation is started (covering all compute submitted so far), and ends with an event that the compute
//! stream waits for in `wait`. So a slot that compute is still reading is never overwritten by a gather, without any
//! synchronization on the host.
use super::captured::late_captured;
use super::group::NcclGroup;
use super::ring::{CapturedOp, Late, NcclOp, OpRing, RING};
use super::work::Work;
use crate::base::Result;
use crate::comm::operands::CheckedCall;
use crate::comm::{CommStats, Tag, Ticket, Times};
use crate::device::gpu::Arg;
use crate::device::gpu::guest::{Asked, Guest, Taken};
use cudarc::driver::CudaEvent;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, MutexGuard};
use std::time::{Duration, Instant};

/// Bits of a ticket that count operations; the rest identify the group.
const COUNT: u32 = 48;

/// The operation's number within its group.
fn number(ticket: Ticket) -> u64 {
    ticket.0 & ((1 << COUNT) - 1)
}

impl NcclGroup {
    /// Requests an operation. It is deferred along with the device's calls, or enqueued at once.
    pub(super) fn start(&self, call: CheckedCall, bytes: usize, work: Work, operands: &mut [Arg]) -> Result<Ticket> {
        let seq = {
            let mut ring = self.room(&call)?;
            let seq = ring.asked;
            let mut held = operands.iter().map(keep);
            let op = ring.op_mut(seq);
            op.keep = [held.next().flatten(), held.next().flatten()];
            (op.tag, op.name, op.waited, op.seen, op.within) = (call.tag, call.op, false, None, None);
            op.times = Times::default();
            ring.asked += 1;
            ring.stats.ops += 1;
            ring.stats.bytes += bytes as u64;
            seq
        };
        self.ask(work, operands)?;
        Ok(Ticket(self.id << COUNT | seq))
    }
    /// Orders the compute stream after the operation.
    pub(super) fn order(&self, ticket: Ticket) -> Result<()> {
        let (seq, asked) = (number(ticket), self.lock().asked);
        if ticket.0 >> COUNT != self.id || seq >= asked {
            let call = self.call("wait", Tag::new("ticket", ticket.0 as usize));
            return Err(call.error("is not from this group"));
        }
        let back = u32::try_from(asked - seq).unwrap_or(u32::MAX); // finished long ago
        self.ask(Work::Wait { back }, &mut [])
    }
    fn ask(&self, work: Work, operands: &mut [Arg]) -> Result<()> {
        if let (Some(graphs), Some(own)) = (&self.graphs, self.own.upgrade()) {
            let own: Arc<dyn Guest> = own;
            if graphs.guest(&own, work.asked(), operands)? {
                return Ok(());
            }
        }
        self.give(work, operands)
    }

    /// Locks the ring once it has a free slot, unlocking it for the watching thread while waiting. Where a capture ends
    /// for lack of slots depends only on what was requested, so it is the same on all ranks.
    fn room(&self, call: &CheckedCall) -> Result<MutexGuard<'_, OpRing>> {
        let kept_back = {
            let ring = self.lock();
            ring.asked - ring.given
        };
        if let Some(graphs) = self.graphs.as_ref().filter(|_| kept_back == RING / 2) {
            graphs.cut(); // the next call reports its errors
        }
        loop {
            let mut ring = self.lock();
            if ring.asked - ring.counted == RING {
                self.count(&mut ring)?;
            }
            if ring.asked - ring.counted < RING {
                return Ok(ring);
            }
            if let Some(why) = self.channel.transport.failure() {
                return Err(call.error(why));
            }
            drop(ring);
            std::thread::sleep(Duration::from_micros(50));
        }
    }

    fn give(&self, work: Work, operands: &mut [Arg]) -> Result<()> {
        let mut ring = self.lock();
        let captures = ring.taken.is_some();
        match (work, captures) {
            (Work::Wait { back }, false) => self.wait_given(&mut ring, back),
            (Work::Wait { back }, true) => self.wait_captured(&mut ring, back),
            (_, false) => self.start_given(&mut ring, work, operands),
            (_, true) => self.start_captured(&mut ring, work, operands),
        }
    }
    fn start_given(&self, ring: &mut OpRing, work: Work, operands: &mut [Arg]) -> Result<()> {
        self.fork(ring)?;
        let (seq, stream) = (ring.given, &self.channel.stream);
        let op = ring.op_mut(seq);
        op.own.begin.record(stream).map_err(|e| self.failed(e))?;
        op.times.begun = self.cuda.mark_on(stream)?;
        self.enqueue_work(self.call(op.name, op.tag), work, operands)?;
        op.times.over = self.cuda.mark_on(stream)?; // recorded before the awaited event, so it will have passed
        op.own.done.record(stream).map_err(|e| self.failed(e))?;
        ring.given += 1;
        Ok(())
    }
    fn wait_given(&self, ring: &mut OpRing, back: u32) -> Result<()> {
        let seq = ring.given.saturating_sub(u64::from(back));
        if seq < ring.counted || ring.op_mut(seq).within.is_some() {
            return Ok(()); // known to have finished, or joined with its graph
        }
        let compute = self.cuda.compute();
        let op = ring.op_mut(seq);
        if let Some(why) = self.channel.transport.failure() {
            return Err(self.call(op.name, op.tag).error(why));
        }
        let ordered = if op.waited {
            compute.wait(&op.own.done)
        } else {
            op.waited = true;
            let from = self.cuda.mark_on(compute)?;
            let halted = op.own.halted.record(compute).and_then(|()| compute.wait(&op.own.done));
            let resumed = halted.and_then(|()| op.own.resumed.record(compute));
            op.times.stood = from.zip(self.cuda.mark_on(compute)?);
            resumed
        };
        ordered.map_err(|e| self.failed(e))
    }

    /// Adds up the times of finished operations, in order, and releases their buffers.
    fn count(&self, ring: &mut OpRing) -> Result<()> {
        while ring.counted < ring.given {
            let op = &mut ring.ops[(ring.counted % RING) as usize];
            match &op.within {
                None => {
                    let over = |event: &CudaEvent| event.try_is_complete().map_err(|e| self.failed(e));
                    if !over(&op.own.done)? || (op.waited && !over(&op.own.resumed)?) {
                        break;
                    }
                    ring.stats.in_flight_s += self.cuda.seconds(&op.own.begin, &op.own.done)?;
                    if op.waited {
                        ring.stats.exposed_s += self.cuda.seconds(&op.own.halted, &op.own.resumed)?;
                    }
                }
                // Only the newest finished replay has times. The graph owns its buffers.
                Some((_, of)) => {
                    let between = |from, to| self.cuda.seconds(from, to).unwrap_or(0.0).max(0.0);
                    ring.stats.in_flight_s += between(&of.events.begin, &of.events.done);
                    if of.waited.load(Relaxed) {
                        ring.stats.exposed_s += between(&of.events.halted, &of.events.resumed);
                    }
                }
            }
            op.keep = [None, None];
            ring.counted += 1;
        }
        Ok(())
    }

    /// End of a barrier: the host waits until the operation, and all before it, have finished.
    pub(super) fn settle(&self, tag: Tag) -> Result<()> {
        if let Some(graphs) = &self.graphs {
            graphs.cut();
        }
        // Compute waits for the operation. The lock is released, because the watching thread reads the ring meanwhile.
        self.cuda.compute().synchronize().map_err(|e| self.failed(e))?;
        if let Some(why) = self.channel.transport.failure() {
            return Err(self.call("barrier", tag).error(why));
        }
        self.count(&mut self.lock())
    }

    /// Totals of all finished operations.
    pub(super) fn so_far(&self) -> CommStats {
        let mut ring = self.lock();
        let _ = self.count(&mut ring); // the next call that can fail reports a GPU failure
        ring.stats
    }

    /// Times of a recent operation; empty for older ones.
    pub(super) fn timed(&self, ticket: Ticket) -> Times {
        let (ring, seq) = (self.lock(), number(ticket));
        if seq < ring.asked && ring.asked <= seq + RING {
            let op = ring.op(seq);
            Times { graph: op.within.as_ref().map(|(graph, _)| *graph), ..op.times }
        } else {
            Times::default()
        }
    }

    /// For the watching thread: an operation that NCCL has given up on, or that has run longer than `timeout`.
    pub(super) fn trouble(&self, timeout: Duration) -> Option<String> {
        let mut ring = self.ring.try_lock().ok()?; // a call in progress has its own deadline
        let given_up = self.channel.transport.trouble();
        let within = if given_up.is_some() { Duration::ZERO } else { timeout };
        let late = late_given(&mut ring, within).or_else(|| late_captured(&mut ring, within));
        late.map(|Late { name, tag, graph }| {
            let what = given_up.map_or(format!("no answer within {timeout:?} from"), |what| format!("{what},"));
            let replay = graph.map_or(String::new(), |graph| format!(", in replay of graph {graph}"));
            self.call(name, tag).error(format!("{what} among ranks {}{replay}", self.peers())).to_string()
        })
    }
    /// An NCCL error, whatever operation is in flight.
    pub(super) fn given_up(&self) -> Option<String> {
        let what = format!("{}, among ranks {}", self.channel.transport.trouble()?, self.peers());
        Some(self.call("collective", Tag::new("in flight", 0)).error(what).to_string())
    }
}

fn late_given(ring: &mut OpRing, timeout: Duration) -> Option<Late> {
    let under_way = |op: &NcclOp| op.within.is_none() && !op.own.done.is_complete();
    let flying = (ring.counted..ring.given).find(|&seq| under_way(ring.op(seq)))?;
    let op = ring.op_mut(flying);
    // Not until it has begun: it may be waiting for compute.
    if !op.own.begin.is_complete() {
        return None;
    }
    let since = *op.seen.get_or_insert_with(Instant::now);
    (since.elapsed() > timeout).then_some(Late { name: op.name, tag: op.tag, graph: None })
}

/// Keeps an operand's memory alive.
fn keep(arg: &Arg) -> Option<Arc<dyn Send + Sync>> {
    match arg {
        Arg::In(view) => Some(view.keep()),
        Arg::InOut(view) | Arg::Out(view) => Some(view.as_view().keep()),
        _ => None,
    }
}

impl Guest for NcclGroup {
    fn enqueue(&self, asked: Asked, operands: &mut [Arg]) -> Result<()> {
        self.give(Work::of(asked)?, operands)
    }
    fn join(&self) -> Result<()> {
        if let Some(why) = self.channel.transport.failure() {
            return Err(self.call("collective", Tag::new("in flight", 0)).error(why));
        }
        if !self.channel.ahead.swap(false, Relaxed) {
            return Ok(());
        }
        let ring = self.lock();
        let joined = ring.here.record(&self.channel.stream).and_then(|()| self.cuda.compute().wait(&ring.here));
        joined.map_err(|e| self.failed(e))
    }
    fn begin(&self) {
        self.lock().taken = Some(Vec::new());
    }
    fn end(&self) -> Taken {
        Box::new(self.lock().taken.take().unwrap_or_default())
    }
    fn replayed(&self, taken: &Taken, graph: u64) {
        let mut ring = self.lock();
        for captured in taken.downcast_ref::<Vec<Arc<CapturedOp>>>().into_iter().flatten() {
            let seq = ring.given;
            ring.op_mut(seq).within = Some((graph, captured.clone()));
            ring.given += 1;
        }
    }
}
