//! The operations of a group in the order of its streams: started, waited for, timed, and watched. The host waits in
//! [`Group::settle`] and where more than [`RING`] of them are under way, and nowhere else.
//!
//! [Note: streams] An operation runs on the group's stream, after an event that the compute stream records when it is started
//! (all that compute was given so far), and ends with an event that the compute stream waits for in `wait`. So a slot that
//! compute has read is never gathered into too early, and nothing but order is ever exchanged with the host.
use super::group::Group;
use super::library::{self, Handle, Nccl};
use crate::base::Result;
use crate::comm::operands::Call;
use crate::comm::{CommStats, Tag, Ticket, Times};
use crate::device::gpu::cuda::Cuda;
use cudarc::driver::CudaEvent;
use std::ffi::{c_int, c_void};
use std::sync::{Arc, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// Operations that are remembered.
const RING: u64 = 256;
/// Bits of a ticket that count operations; the rest names the group.
const COUNT: u32 = 48;

/// The operations of one group, the newest [`RING`] of them.
pub(super) struct Ring {
    ops: Vec<Op>,
    /// Operations ever started; and the first of them whose times are not counted yet.
    next: u64,
    counted: u64,
    stats: CommStats,
}

struct Op {
    tag: Tag,
    name: &'static str,
    /// Recorded in the compute stream when it is started.
    after: CudaEvent,
    /// Around it, in the group's stream.
    begin: CudaEvent,
    done: CudaEvent,
    /// Around the wait of the compute stream: how long it stood.
    halted: CudaEvent,
    resumed: CudaEvent,
    waited: bool,
    /// While a run is profiled.
    times: Times,
    /// When the watching thread first saw it under way.
    seen: Option<Instant>,
    /// Buffers in flight.
    keep: [Option<Arc<dyn Send + Sync>>; 2],
}

impl Op {
    fn new(cuda: &Cuda) -> Result<Op> {
        Ok(Op {
            tag: Tag::new("", 0),
            name: "",
            after: cuda.event(false)?,
            begin: cuda.event(true)?,
            done: cuda.event(true)?,
            halted: cuda.event(true)?,
            resumed: cuda.event(true)?,
            waited: false,
            times: Times::default(),
            seen: None,
            keep: [None, None],
        })
    }
}

impl Ring {
    pub(super) fn new(cuda: &Cuda) -> Result<Ring> {
        let ops = (0..RING).map(|_| Op::new(cuda)).collect::<Result<_>>()?;
        Ok(Ring { ops, next: 0, counted: 0, stats: CommStats::default() })
    }
}

/// Which of its group's operations.
fn number(ticket: Ticket) -> u64 {
    ticket.0 & ((1 << COUNT) - 1)
}

impl Group {
    fn lock(&self) -> MutexGuard<'_, Ring> {
        self.ring.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Enqueues `enqueue` between the events of the next operation, and `then` behind it in the same stream.
    pub(super) fn start(
        &self,
        call: Call,
        bytes: usize,
        keep: [Option<Arc<dyn Send + Sync>>; 2],
        enqueue: impl FnOnce(&Nccl, Handle, library::Stream) -> c_int,
        then: impl FnOnce() -> Result<()>,
    ) -> Result<Ticket> {
        let mut ring = self.room(&call)?;
        let seq = ring.next;
        let (stream, compute) = (&self.channel.stream, self.cuda.compute());
        let op = &mut ring.ops[(seq % RING) as usize];
        (op.tag, op.name, op.waited, op.seen, op.keep) = (call.tag, call.op, false, None, keep);
        op.times = Times::default();
        let ordered =
            op.after.record(compute).and_then(|()| stream.wait(&op.after)).and_then(|()| op.begin.record(stream));
        ordered.map_err(|e| self.failed(e))?;
        op.times.begun = self.cuda.mark_on(stream)?;
        let raw = stream.cu_stream().cast::<c_void>();
        self.channel.comm.run(|handle, nccl| enqueue(nccl, handle, raw)).map_err(|what| {
            self.cuda.break_off(call.error(what.clone()).to_string());
            call.error(what)
        })?;
        then()?;
        op.done.record(stream).map_err(|e| self.failed(e))?;
        op.times.over = self.cuda.mark_on(stream)?;
        ring.next += 1;
        ring.stats.ops += 1;
        ring.stats.bytes += bytes as u64;
        Ok(Ticket(self.id << COUNT | seq))
    }

    /// The ring with a free place. While there is none, the lock is open for the watching thread.
    fn room(&self, call: &Call) -> Result<MutexGuard<'_, Ring>> {
        loop {
            let mut ring = self.lock();
            if ring.next - ring.counted == RING {
                self.count(&mut ring)?;
            }
            if ring.next - ring.counted < RING {
                return Ok(ring);
            }
            if let Some(why) = self.channel.comm.failure() {
                return Err(call.error(why));
            }
            drop(ring);
            std::thread::sleep(Duration::from_micros(50));
        }
    }

    /// Adds up the times of what is over, in order, and lets go of its buffers.
    fn count(&self, ring: &mut Ring) -> Result<()> {
        while ring.counted < ring.next {
            let op = &mut ring.ops[(ring.counted % RING) as usize];
            let over = |event: &CudaEvent| event.try_is_complete().map_err(|e| self.failed(e));
            if !over(&op.done)? || (op.waited && !over(&op.resumed)?) {
                break;
            }
            ring.stats.in_flight_s += self.cuda.seconds(&op.begin, &op.done)?;
            if op.waited {
                ring.stats.exposed_s += self.cuda.seconds(&op.halted, &op.resumed)?;
            }
            op.keep = [None, None];
            ring.counted += 1;
        }
        Ok(())
    }

    /// The compute stream goes on when the operation is over.
    pub(super) fn order(&self, ticket: Ticket) -> Result<()> {
        let mut ring = self.lock();
        let seq = number(ticket);
        if ticket.0 >> COUNT != self.id || seq >= ring.next {
            let call = self.call("wait", Tag::new("ticket", ticket.0 as usize));
            return Err(call.error("is not of this group"));
        }
        if seq < ring.counted {
            return Ok(()); // over, as the host has seen
        }
        let compute = self.cuda.compute();
        let op = &mut ring.ops[(seq % RING) as usize];
        if let Some(why) = self.channel.comm.failure() {
            return Err(self.call(op.name, op.tag).error(why));
        }
        let ordered = if op.waited {
            compute.wait(&op.done)
        } else {
            op.waited = true;
            let from = self.cuda.mark_on(compute)?;
            let halted = op.halted.record(compute).and_then(|()| compute.wait(&op.done));
            let resumed = halted.and_then(|()| op.resumed.record(compute));
            op.times.stood = from.zip(self.cuda.mark_on(compute)?);
            resumed
        };
        ordered.map_err(|e| self.failed(e))
    }

    /// A barrier's end: the host waits until the operation, and all before it, is over.
    pub(super) fn settle(&self, ticket: Ticket) -> Result<()> {
        // Without the lock: the watching thread looks at the ring while this one waits.
        self.channel.stream.synchronize().map_err(|e| self.failed(e))?;
        let mut ring = self.lock();
        if let Some(why) = self.channel.comm.failure() {
            let op = &ring.ops[(number(ticket) % RING) as usize];
            return Err(self.call("barrier", op.tag).error(why));
        }
        self.count(&mut ring)
    }

    /// The sums of all that is over.
    pub(super) fn so_far(&self) -> CommStats {
        let mut ring = self.lock();
        let _ = self.count(&mut ring); // a failure of the GPU shows in the next call that can say so
        ring.stats
    }

    /// Of an operation that is remembered; of others nothing.
    pub(super) fn timed(&self, ticket: Ticket) -> Times {
        let (ring, seq) = (self.lock(), number(ticket));
        if seq < ring.next && ring.next <= seq + RING {
            ring.ops[(seq % RING) as usize].times
        } else {
            Times::default()
        }
    }

    /// For the watching thread: an operation that NCCL has given up on, or that has run for longer than `timeout`.
    pub(super) fn trouble(&self, timeout: Duration) -> Option<String> {
        if let Some(what) = self.channel.comm.trouble() {
            return Some(self.call("collective", Tag::new("in flight", 0)).error(what).to_string());
        }
        let mut ring = self.ring.try_lock().ok()?; // a call in progress has its own deadline
        let (counted, next) = (ring.counted, ring.next);
        let flying = (counted..next).find(|seq| !ring.ops[(seq % RING) as usize].done.is_complete())?;
        let op = &mut ring.ops[(flying % RING) as usize];
        // Not before its turn: what it waits for may be compute.
        if !op.begin.is_complete() {
            return None;
        }
        let since = *op.seen.get_or_insert_with(Instant::now);
        (since.elapsed() > timeout).then(|| {
            let peers: Vec<String> =
                self.channel.ranks.iter().filter(|&&r| r != self.world_rank).map(|r| r.to_string()).collect();
            let what = format!("no answer within {timeout:?} from among ranks {}", peers.join(", "));
            self.call(op.name, op.tag).error(what).to_string()
        })
    }
}
