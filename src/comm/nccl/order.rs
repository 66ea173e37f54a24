//! The operations of a group in the order of its streams: started, waited for, timed, and watched. The host waits in
//! [`Group::settle`] and where more than [`RING`] of them are under way, and nowhere else. `captured` has those that are part of a graph.
//!
//! [Note: streams] An operation runs on the group's stream, after an event that the compute stream records when it is started
//! (all that compute was given so far), and ends with an event that the compute stream waits for in `wait`. So a slot that
//! compute has read is never gathered into too early, and nothing but order is ever exchanged with the host.
use super::captured::{Captured, late_captured};
use super::group::Group;
use super::work::Work;
use crate::base::{Category, DType, Meter, Result};
use crate::comm::operands::Call;
use crate::comm::{CommStats, Tag, Ticket, Times};
use crate::device::Buf;
use crate::device::gpu::Arg;
use crate::device::gpu::cuda::Cuda;
use crate::device::gpu::driver::Driver;
use crate::device::gpu::guest::Guest;
use cudarc::driver::CudaEvent;
use std::ops::Range;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// Operations that are remembered.
const RING: u64 = 256;
/// Bits of a ticket that count operations; the rest names the group.
const COUNT: u32 = 48;

/// The operations of one group, the newest [`RING`] of them.
pub(super) struct Ring {
    ops: Vec<Op>,
    /// Operations ever asked for, given to the streams, and over with their times counted.
    asked: u64,
    pub given: u64,
    counted: u64,
    stats: CommStats,
    /// Orders one stream after another, there and then.
    pub here: CudaEvent,
    /// While compute is captured: what has been given since.
    pub taken: Option<Vec<Arc<Captured>>>,
    /// u32 (1), pinned, where steps are captured: how far a replay has come. With what was last seen of it and of `given`, and when.
    pub progress: Option<Buf>,
    pub seen: (u32, u64, Instant),
}

pub(super) struct Op {
    pub tag: Tag,
    pub name: &'static str,
    /// Its own, for when it is not part of a graph.
    own: Events,
    /// Part of a graph, and of which.
    pub within: Option<(u64, Arc<Captured>)>,
    waited: bool,
    /// While a run is profiled.
    times: Times,
    /// When the watching thread first saw it under way.
    seen: Option<Instant>,
    /// Buffers in flight.
    keep: [Option<Arc<dyn Send + Sync>>; 2],
}

/// Points in time of an operation.
pub(super) struct Events {
    /// Around it, in the group's stream.
    pub begin: CudaEvent,
    pub done: CudaEvent,
    /// Around the wait of the compute stream: how long it stood.
    pub halted: CudaEvent,
    pub resumed: CudaEvent,
}

impl Events {
    pub(super) fn new(cuda: &Cuda) -> Result<Events> {
        let event = || cuda.event(true);
        Ok(Events { begin: event()?, done: event()?, halted: event()?, resumed: event()? })
    }
}

impl Op {
    fn new(cuda: &Cuda) -> Result<Op> {
        Ok(Op {
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

impl Ring {
    pub(super) fn new(cuda: &Cuda, meter: &Meter, captured: bool) -> Result<Ring> {
        let progress = || cuda.alloc_host(DType::U32, 1, meter.lease(Category::Host, DType::U32.size()));
        Ok(Ring {
            ops: (0..RING).map(|_| Op::new(cuda)).collect::<Result<_>>()?,
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
    pub(super) fn op(&self, seq: u64) -> &Op {
        &self.ops[(seq % RING) as usize]
    }
    pub(super) fn op_mut(&mut self, seq: u64) -> &mut Op {
        &mut self.ops[(seq % RING) as usize]
    }
    /// Those that were given, as far back as any are remembered.
    pub(super) fn remembered(&self) -> Range<u64> {
        self.asked.saturating_sub(RING)..self.given
    }
}

/// Which of its group's operations.
fn number(ticket: Ticket) -> u64 {
    ticket.0 & ((1 << COUNT) - 1)
}

impl Group {
    pub(super) fn lock(&self) -> MutexGuard<'_, Ring> {
        self.ring.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Asks for an operation: it is kept back with the device's calls where these are, or given to the streams at once.
    pub(super) fn start(&self, call: Call, bytes: usize, work: Work, operands: &mut [Arg]) -> Result<Ticket> {
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
    /// The compute stream goes on when the operation is over.
    pub(super) fn order(&self, ticket: Ticket) -> Result<()> {
        let (seq, asked) = (number(ticket), self.lock().asked);
        if ticket.0 >> COUNT != self.id || seq >= asked {
            let call = self.call("wait", Tag::new("ticket", ticket.0 as usize));
            return Err(call.error("is not of this group"));
        }
        let back = u32::try_from(asked - seq).unwrap_or(u32::MAX); // over long ago
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

    /// The ring with a free place. While there is none, the lock is open for the watching thread. Where a piece ends for lack of room
    /// depends on what was asked for alone: on all ranks alike.
    fn room(&self, call: &Call) -> Result<MutexGuard<'_, Ring>> {
        let kept_back = {
            let ring = self.lock();
            ring.asked - ring.given
        };
        if let Some(graphs) = self.graphs.as_ref().filter(|_| kept_back == RING / 2) {
            graphs.cut(); // what goes wrong there is said by the next call
        }
        loop {
            let mut ring = self.lock();
            if ring.asked - ring.counted == RING {
                self.count(&mut ring)?;
            }
            if ring.asked - ring.counted < RING {
                return Ok(ring);
            }
            if let Some(why) = self.channel.comm.failure() {
                return Err(call.error(why));
            }
            drop(ring);
            std::thread::sleep(Duration::from_micros(50));
        }
    }

    pub(super) fn give(&self, work: Work, operands: &mut [Arg]) -> Result<()> {
        let mut ring = self.lock();
        let captures = ring.taken.is_some();
        match (work, captures) {
            (Work::Wait { back }, false) => self.wait_given(&mut ring, back),
            (Work::Wait { back }, true) => self.wait_captured(&mut ring, back),
            (_, false) => self.start_given(&mut ring, work, operands),
            (_, true) => self.start_captured(&mut ring, work, operands),
        }
    }
    /// The group's stream goes on after all that compute was given.
    pub(super) fn fork(&self, ring: &Ring) -> Result<()> {
        let forked = ring.here.record(self.cuda.compute()).and_then(|()| self.channel.stream.wait(&ring.here));
        self.channel.ahead.store(true, Relaxed);
        forked.map_err(|e| self.failed(e))
    }
    /// NCCL's part, and what it leaves to do, in the group's stream.
    pub(super) fn enqueue_nccl(&self, call: Call, work: Work, operands: &mut [Arg]) -> Result<()> {
        let raw = self.channel.stream.cu_stream().cast();
        let enqueued = self.channel.comm.run(|handle, nccl| self.call_nccl(work, operands, nccl, handle, raw));
        enqueued.map_err(|what| {
            self.cuda.break_off(call.error(what.clone()).to_string());
            call.error(what)
        })?;
        self.after_nccl(work, operands)
    }

    fn start_given(&self, ring: &mut Ring, work: Work, operands: &mut [Arg]) -> Result<()> {
        self.fork(ring)?;
        let (seq, stream) = (ring.given, &self.channel.stream);
        let op = ring.op_mut(seq);
        op.own.begin.record(stream).map_err(|e| self.failed(e))?;
        op.times.begun = self.cuda.mark_on(stream)?;
        self.enqueue_nccl(self.call(op.name, op.tag), work, operands)?;
        op.times.over = self.cuda.mark_on(stream)?; // before what is waited for: it is passed by then
        op.own.done.record(stream).map_err(|e| self.failed(e))?;
        ring.given += 1;
        Ok(())
    }
    fn wait_given(&self, ring: &mut Ring, back: u32) -> Result<()> {
        let seq = ring.given.saturating_sub(u64::from(back));
        if seq < ring.counted || ring.op_mut(seq).within.is_some() {
            return Ok(()); // over, as the host has seen, or joined with its graph
        }
        let compute = self.cuda.compute();
        let op = ring.op_mut(seq);
        if let Some(why) = self.channel.comm.failure() {
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

    /// Adds up the times of what is over, in order, and lets go of its buffers.
    fn count(&self, ring: &mut Ring) -> Result<()> {
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
                // Of the newest replay that is over: others have left no times. Its buffers are the graph's.
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

    /// A barrier's end: the host waits until the operation, and all before it, is over.
    pub(super) fn settle(&self, tag: Tag) -> Result<()> {
        if let Some(graphs) = &self.graphs {
            graphs.cut();
        }
        // Compute waits for the operation. Without the lock: the watching thread looks at the ring while this one waits.
        self.cuda.compute().synchronize().map_err(|e| self.failed(e))?;
        if let Some(why) = self.channel.comm.failure() {
            return Err(self.call("barrier", tag).error(why));
        }
        self.count(&mut self.lock())
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
        if seq < ring.asked && ring.asked <= seq + RING {
            let op = &ring.ops[(seq % RING) as usize];
            Times { graph: op.within.as_ref().map(|(graph, _)| *graph), ..op.times }
        } else {
            Times::default()
        }
    }

    /// For the watching thread: an operation that NCCL has given up on, or that has run for longer than `timeout`.
    pub(super) fn trouble(&self, timeout: Duration) -> Option<String> {
        let mut ring = self.ring.try_lock().ok()?; // a call in progress has its own deadline
        let given_up = self.channel.comm.trouble();
        let within = if given_up.is_some() { Duration::ZERO } else { timeout };
        let late = late_given(&mut ring, within).or_else(|| late_captured(&mut ring, within));
        late.map(|Late { name, tag, graph }| {
            let what = given_up.map_or(format!("no answer within {timeout:?} from"), |what| format!("{what},"));
            let replay = graph.map_or(String::new(), |graph| format!(", in replay of graph {graph}"));
            self.call(name, tag).error(format!("{what} among ranks {}{replay}", self.peers())).to_string()
        })
    }
    /// An error of NCCL's, whatever is under way.
    pub(super) fn given_up(&self) -> Option<String> {
        let what = format!("{}, among ranks {}", self.channel.comm.trouble()?, self.peers());
        Some(self.call("collective", Tag::new("in flight", 0)).error(what).to_string())
    }
    fn peers(&self) -> String {
        let others = self.channel.ranks.iter().filter(|&&rank| rank != self.world_rank);
        others.map(usize::to_string).collect::<Vec<String>>().join(", ")
    }
}

/// An operation that is under way for too long.
pub(super) struct Late {
    pub name: &'static str,
    pub tag: Tag,
    pub graph: Option<u64>,
}

fn late_given(ring: &mut Ring, timeout: Duration) -> Option<Late> {
    let under_way = |op: &Op| op.within.is_none() && !op.own.done.is_complete();
    let flying = (ring.counted..ring.given).find(|seq| under_way(&ring.ops[(seq % RING) as usize]))?;
    let op = ring.op_mut(flying);
    // Not before its turn: what it waits for may be compute.
    if !op.own.begin.is_complete() {
        return None;
    }
    let since = *op.seen.get_or_insert_with(Instant::now);
    (since.elapsed() > timeout).then_some(Late { name: op.name, tag: op.tag, graph: None })
}
/// What holds an operand's memory.
fn keep(arg: &Arg) -> Option<Arc<dyn Send + Sync>> {
    match arg {
        Arg::In(view) => Some(view.keep()),
        Arg::InOut(view) | Arg::Out(view) => Some(view.as_view().keep()),
        _ => None,
    }
}
