//! The `Collective` over one communicator. Never waits on the host but in `barrier`, and where more than [`RING`] operations
//! are under way.
//!
//! [Note: streams] An operation runs on the group's stream, after an event that the compute stream records when it is started
//! (all that compute was given so far), and ends with an event that the compute stream waits for in `wait`. So a slot that
//! compute has read is never gathered into too early, and nothing but order is ever exchanged with the host.
use super::comm::Comm;
use super::library::{self, Handle, IN_PROGRESS, Nccl, SUCCESS};
use super::slot;
use crate::base::{Category, DType, Error, Meter, Result};
use crate::comm::operands::Call;
use crate::comm::{Axis, Collective, CommStats, CommUse, Reduce, Tag, Ticket, Times};
use crate::device::gpu::cuda::Cuda;
use crate::device::gpu::driver::Driver;
use crate::device::{Buf, View, ViewMut};
use cudarc::driver::{CudaEvent, CudaStream, DriverError};
use std::ffi::{c_int, c_void};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// Operations that are remembered.
const RING: u64 = 256;
/// Bits of a ticket that count operations; the rest names the group.
const COUNT: u32 = 48;

/// A communicator and its stream: shared by the axes whose groups are the same ranks.
pub(super) struct Channel {
    pub comm: Arc<Comm>,
    pub stream: Arc<CudaStream>,
    /// World ranks.
    pub ranks: Vec<usize>,
}

pub(super) struct Group {
    channel: Arc<Channel>,
    cuda: Arc<Cuda>,
    meter: Meter,
    axis: Axis,
    /// "fsdp of 4".
    name: String,
    /// World rank, and place in the group.
    world_rank: usize,
    index: usize,
    id: u64,
    ring: Mutex<Ring>,
    /// f32 (1): what a barrier sums.
    token: Mutex<Buf>,
}

struct Ring {
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

impl Group {
    pub(super) fn new(
        cuda: Arc<Cuda>,
        channel: Arc<Channel>,
        axis: Axis,
        rank: usize,
        id: u64,
        meter: Meter,
    ) -> Result<Group> {
        let index = channel.ranks.iter().position(|&r| r == rank);
        let index = index.ok_or_else(|| Error::op("group", format!("rank {rank} is not among {:?}", channel.ranks)))?;
        let ops = (0..RING).map(|_| Op::new(&cuda)).collect::<Result<_>>()?;
        let lease = meter.lease(Category::Other, DType::F32.size());
        let token = cuda.alloc(DType::F32, 1, Category::Other, lease)?;
        Ok(Group {
            name: format!("{} of {}", axis.name(), channel.ranks.len()),
            channel,
            cuda,
            meter,
            axis,
            world_rank: rank,
            index,
            id,
            ring: Mutex::new(Ring { ops, next: 0, counted: 0, stats: CommStats::default() }),
            token: Mutex::new(token),
        })
    }
    fn call(&self, op: &'static str, tag: Tag) -> Call<'_> {
        Call { rank: self.world_rank, op, group: &self.name, size: self.channel.ranks.len(), tag }
    }
    fn lock(&self) -> MutexGuard<'_, Ring> {
        self.ring.lock().unwrap_or_else(PoisonError::into_inner)
    }
    fn failed(&self, e: DriverError) -> Error {
        self.cuda.failed(&self.name, e)
    }

    /// Enqueues `enqueue` between the events of the next operation, and `then` behind it in the same stream.
    fn start(
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
    fn order(&self, ticket: Ticket) -> Result<()> {
        let mut ring = self.lock();
        let seq = ticket.0 & ((1 << COUNT) - 1);
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
    pub(super) fn abort(&self, why: &str) {
        self.channel.comm.abort(why);
    }
}

/// `ncclDataType_t`.
fn data_type(dtype: DType) -> c_int {
    match dtype {
        DType::U8 => 1,
        DType::I32 => 2,
        DType::U32 => 3,
        DType::F16 => 6,
        DType::F32 => 7,
        DType::F64 => 8,
        DType::Bf16 => 9,
    }
}
fn reduction(op: Reduce) -> c_int {
    match op {
        Reduce::Sum => library::SUM,
        Reduce::Max => library::MAX,
    }
}
fn range(view: &View) -> std::ops::Range<usize> {
    let start = view.as_ptr() as usize;
    start..start + view.bytes()
}

impl Collective for Group {
    fn rank(&self) -> usize {
        self.index
    }
    fn size(&self) -> usize {
        self.channel.ranks.len()
    }
    fn axis(&self) -> Axis {
        self.axis
    }
    fn alloc(&self, dtype: DType, len: usize, _: CommUse, category: Category) -> Result<Buf> {
        let lease = self.meter.lease_of(category, dtype, len, len * dtype.size());
        slot::alloc(&self.cuda, &self.channel.comm, dtype, len, category, lease)
    }
    fn all_gather(&self, tag: Tag, shard: View, mut full: ViewMut) -> Result<Ticket> {
        let call = self.call("all_gather", tag);
        call.same(shard.dtype(), full.dtype())?;
        call.shards(shard.len(), full.len())?;
        call.overlap(range(&shard), range(&full.as_view()), self.index)?;
        let (from, to, count, dtype) = (shard.as_ptr(), full.as_mut_ptr(), shard.len(), data_type(shard.dtype()));
        let received = full.bytes() - shard.bytes();
        let enqueue = |nccl: &Nccl, comm, stream| {
            // SAFETY: lengths are checked above; both buffers are kept until the operation is over.
            unsafe { (nccl.all_gather)(from.cast(), to.cast(), count, dtype, comm, stream) }
        };
        self.start(call, received, [Some(shard.keep()), Some(full.keep())], enqueue, || Ok(()))
    }
    fn reduce_scatter(&self, tag: Tag, mut full: ViewMut, mut shard: ViewMut, accumulate: bool) -> Result<Ticket> {
        let call = self.call("reduce_scatter", tag);
        call.scattered(full.dtype(), shard.dtype())?;
        call.shards(shard.len(), full.len())?;
        let (count, dtype) = (shard.len(), full.dtype());
        let own = self.index * count..(self.index + 1) * count;
        let keep = [Some(full.keep()), Some(shard.keep())];
        let received = (self.size() - 1) * count * dtype.size();
        let from = full.as_mut_ptr();
        // NCCL assigns, in the dtype that it sums. To add or to widen, the sum is made in place, in this rank's part of the
        // input, and taken from there.
        let straight = !accumulate && shard.dtype() == dtype;
        let to = match straight {
            true => shard.as_mut_ptr(),
            false => from.wrapping_add(own.start * dtype.size()),
        };
        let enqueue = |nccl: &Nccl, comm, stream| {
            // SAFETY: lengths are checked above; both buffers are kept until the operation is over.
            unsafe {
                (nccl.reduce_scatter)(from.cast(), to.cast(), count, data_type(dtype), library::SUM, comm, stream)
            }
        };
        let take = || match straight {
            true => Ok(()),
            false => self.cuda.take_on(&self.channel.stream, full.as_view().slice(own), shard.reborrow(), accumulate),
        };
        self.start(call, received, keep, enqueue, take)
    }
    fn all_reduce(&self, tag: Tag, mut buf: ViewMut, op: Reduce) -> Result<Ticket> {
        let call = self.call("all_reduce", tag);
        call.reducible(buf.dtype(), op)?;
        let (at, count, dtype, op) = (buf.as_mut_ptr(), buf.len(), data_type(buf.dtype()), reduction(op));
        let n = self.size();
        let enqueue = |nccl: &Nccl, comm, stream| {
            // SAFETY: in place, over the buffer's own length; it is kept until the operation is over.
            unsafe { (nccl.all_reduce)(at.cast_const().cast(), at.cast(), count, dtype, op, comm, stream) }
        };
        self.start(call, 2 * buf.bytes() * (n - 1) / n, [Some(buf.keep()), None], enqueue, || Ok(()))
    }
    fn broadcast(&self, tag: Tag, mut buf: ViewMut, root: usize) -> Result<Ticket> {
        let call = self.call("broadcast", tag);
        call.rank(root)?;
        let (at, count, dtype) = (buf.as_mut_ptr(), buf.len(), data_type(buf.dtype()));
        let received = if root == self.index { 0 } else { buf.bytes() };
        let enqueue = |nccl: &Nccl, comm, stream| {
            // SAFETY: as in `all_reduce`.
            unsafe { (nccl.broadcast)(at.cast_const().cast(), at.cast(), count, dtype, root as c_int, comm, stream) }
        };
        self.start(call, received, [Some(buf.keep()), None], enqueue, || Ok(()))
    }
    fn send_recv(&self, tag: Tag, to: usize, send: View, from: usize, mut recv: ViewMut) -> Result<Ticket> {
        let call = self.call("send_recv", tag);
        call.rank(to)?;
        call.rank(from)?;
        call.same(send.dtype(), recv.dtype())?;
        let dtype = data_type(send.dtype());
        let (source, sent) = (send.as_ptr(), send.len());
        let (target, wanted) = (recv.as_mut_ptr(), recv.len());
        let enqueue = |nccl: &Nccl, comm, stream| {
            // SAFETY: lengths are the views' own; both are kept until the operation is over. Grouped, so that neither
            // waits for the other.
            let codes = unsafe {
                [
                    (nccl.group_start)(),
                    (nccl.send)(source.cast(), sent, dtype, to as c_int, comm, stream),
                    (nccl.recv)(target.cast(), wanted, dtype, from as c_int, comm, stream),
                    (nccl.group_end)(),
                ]
            };
            // The group's end says whether all of it is under way; an error of a part comes first.
            let wrong = codes.into_iter().find(|&code| !matches!(code, SUCCESS | IN_PROGRESS));
            wrong.unwrap_or(codes[3])
        };
        self.start(call, recv.bytes(), [Some(send.keep()), Some(recv.keep())], enqueue, || Ok(()))
    }
    fn barrier(&self, tag: Tag) -> Result<()> {
        let mut token = self.token.lock().unwrap_or_else(PoisonError::into_inner);
        let ticket = self.all_reduce(tag, token.view_mut(), Reduce::Max)?;
        let seq = ticket.0 & ((1 << COUNT) - 1);
        self.order(ticket)?;
        // Without the lock: the watching thread looks at the ring while this one waits.
        self.channel.stream.synchronize().map_err(|e| self.failed(e))?;
        let mut ring = self.lock();
        if let Some(why) = self.channel.comm.failure() {
            let op = &ring.ops[(seq % RING) as usize];
            return Err(self.call("barrier", op.tag).error(why));
        }
        self.count(&mut ring)
    }
    fn wait(&self, ticket: Ticket) -> Result<()> {
        self.order(ticket)
    }
    /// The next gather into the buffer waits for the compute stream by itself.
    fn release(&self, _: Ticket) -> Result<()> {
        Ok(())
    }
    fn wait_sent(&self, ticket: Ticket) -> Result<()> {
        self.order(ticket)
    }
    fn stats(&self) -> CommStats {
        let mut ring = self.lock();
        let _ = self.count(&mut ring); // a failure of the GPU shows in the next call that can say so
        ring.stats
    }
    fn times(&self, ticket: Ticket) -> Times {
        let (ring, seq) = (self.lock(), ticket.0 & ((1 << COUNT) - 1));
        if seq < ring.next && ring.next <= seq + RING {
            ring.ops[(seq % RING) as usize].times
        } else {
            Times::default()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Against nccl.h.
    #[test]
    fn dtypes_have_the_numbers_of_nccl() {
        let dtypes = [DType::U8, DType::I32, DType::U32, DType::F16, DType::F32, DType::F64, DType::Bf16];
        assert_eq!(dtypes.map(data_type), [1, 2, 3, 6, 7, 8, 9]);
        assert_eq!([reduction(Reduce::Sum), reduction(Reduce::Max)], [0, 2]);
    }
}
