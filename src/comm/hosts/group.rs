//! A group over several hosts: checks the operands, hands them to the worker, waits. Never moves a byte itself.
use super::job::HostsJob;
use super::link::Link;
use super::post::{self, Places, Post};
use super::watch::HostsWatch;
use super::worker::{self, Desk, DeskState, HostsGathered, RING};
use crate::base::{Category, DType, Error, Result};
use crate::comm::operands::CheckedCall;
use crate::comm::seam::{Seam, received};
use crate::comm::shm::{self, PairParts};
use crate::comm::{Axis, Collective, CommStats, CommUse, Reduce, Tag, Ticket, Waiting};
use crate::device::cpu::sum::Sources;
use crate::device::{self, Buf, View, ViewMut};
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::Instant;

pub struct HostsGroup {
    places: Places,
    link: Arc<Link>,
    local: Arc<shm::ShmGroup>,
    desk: Arc<Desk>,
    crossed: Arc<AtomicU64>,
    worker: Mutex<Worker>,
    _watch: Arc<HostsWatch>,
}

enum Worker {
    /// No operation yet: many axes of a mesh have groups that are never used.
    Idle(Box<Post>),
    Running(JoinHandle<()>),
    Gone,
}

const TICKET_SEQ: u32 = 48;
/// Above the ids of groups inside a host.
const ID: u64 = 0x8000;

impl HostsGroup {
    pub(super) fn new(link: Arc<Link>, watch: Arc<HostsWatch>, axis: Axis, ranks: Vec<usize>) -> Result<HostsGroup> {
        let places = Places::new(axis, ranks, link.rank, |rank| link.wire.roster().host(rank))?;
        let desk = Arc::new(Desk::new());
        let post = Post::new(link.clone(), places.clone(), desk.waiting.clone())?;
        let (local, crossed) = (post.local.clone(), post.crossed.clone());
        let worker = Mutex::new(Worker::Idle(Box::new(post)));
        Ok(HostsGroup { places, link, local, desk, crossed, worker, _watch: watch })
    }
    fn check(&self, kind: Seam, tag: Tag) -> CheckedCall<'static> {
        post::call(&self.places, kind.name(), tag)
    }
    fn id(&self) -> u64 {
        ID | self.places.axis as u64
    }
    fn check_host(&self, kind: Seam, tag: Tag, places: &[device::buf::Place]) -> Result<()> {
        match places.iter().all(|&place| place != device::buf::Place::Device) {
            true => Ok(()),
            false => Err(self.check(kind, tag).error("a group of CPU ranks cannot access GPU memory")),
        }
    }
    /// Locates an operand that the host's other ranks also read or write, if it is in one of the group's buffers for
    /// that use.
    fn place(&self, job: &mut HostsJob, view: &mut ViewMut, usage: CommUse) -> Result<()> {
        job.there = (self.places.columns == 1).then(|| Sources::new(view.as_mut_ptr().cast_const(), 0));
        if let Some(found) = self.local.place(job.kind, job.tag, view, usage)? {
            job.desc.place = found.place;
            job.there = Some(found.sources);
            job.content = (usage == CommUse::Gathered).then_some((found.buffer, 0));
        }
        Ok(())
    }

    /// Runs `f` and counts its time as exposed.
    fn timed<T>(&self, f: impl FnOnce() -> Result<T>) -> Result<T> {
        let start = Instant::now();
        let result = f();
        self.desk.lock().stats.exposed_s += start.elapsed().as_secs_f64();
        result
    }
    fn check_alive(&self, state: &DeskState, op: &'static str, tag: Tag) -> Result<()> {
        if let Some((op, tag, what)) = &state.failed {
            return Err(post::call(&self.places, op, *tag).error(what.clone()));
        }
        match self.link.local.failed() {
            Some(rank) => Err(post::call(&self.places, op, tag).error(self.link.describe(rank))),
            None => Ok(()),
        }
    }
    /// Blocks until the condition holds or the worker has failed. Meanwhile this rank's groups on this host make
    /// progress, because a peer may be waiting for them.
    fn until(&self, is_so: impl Fn(&DeskState) -> bool) -> Result<()> {
        if is_so(&self.desk.lock()) {
            return Ok(());
        }
        let _waits = Waits::begin(&self.desk.waiting);
        self.link.local.rest_until(&mut || {
            let state = self.desk.lock();
            is_so(&state) || state.failed.is_some()
        });
        let state = self.desk.lock();
        match &state.failed {
            Some((op, tag, what)) if !is_so(&state) => Err(post::call(&self.places, op, *tag).error(what.clone())),
            _ => Ok(()),
        }
    }

    /// `bytes`: received from peers, as the algorithm counts them.
    fn start(&self, mut job: HostsJob, bytes: usize) -> Result<Ticket> {
        let (op, tag) = (job.kind.name(), job.tag);
        self.timed(|| {
            self.check_alive(&self.desk.lock(), op, tag)?;
            self.until(|state| state.queue.len() < RING && state.contents.len() < RING)?;
            let mut state = self.desk.lock();
            let seq = state.next;
            if let Some((buffer, content)) = &mut job.content {
                if let Some(held) = state.contents.iter().find(|c| Arc::ptr_eq(&c.buffer, buffer)) {
                    let what = format!("this rank has not released the buffer's previous contents ({})", held.tag);
                    return Err(self.check(job.kind, tag).error(what));
                }
                *content = buffer.begin();
                let (buffer, content) = (buffer.clone(), *content);
                state.contents.push(HostsGathered { seq, tag, buffer, content, released: false });
            }
            state.stats.bytes += bytes as u64;
            state.stats.ops += 1;
            if state.complete == state.next {
                state.since = Instant::now();
            }
            state.next += 1;
            state.queue.push_back(job);
            drop(state);
            self.desk.call();
            self.hire()?;
            Ok(Ticket(self.id() << TICKET_SEQ | seq))
        })
    }
    /// Starts the worker thread at the first operation.
    fn hire(&self) -> Result<()> {
        let mut worker = self.worker.lock().unwrap_or_else(PoisonError::into_inner);
        if !matches!(*worker, Worker::Idle(_)) {
            return Ok(());
        }
        if let Worker::Idle(post) = std::mem::replace(&mut *worker, Worker::Gone) {
            let (desk, name) = (self.desk.clone(), format!("hosts {}", self.places.axis.name()));
            let thread = std::thread::Builder::new().name(name).spawn(move || worker::run(&desk, *post));
            *worker = Worker::Running(thread.map_err(|e| Error::Run(format!("cannot start a thread: {e}")))?);
        }
        Ok(())
    }
    fn seq(&self, ticket: Ticket) -> Result<u64> {
        let (group, seq) = (ticket.0 >> TICKET_SEQ, ticket.0 & ((1 << TICKET_SEQ) - 1));
        if group != self.id() || seq >= self.desk.lock().next {
            return Err(
                post::call(&self.places, "wait", Tag::new("ticket", ticket.0 as usize)).error("is not from this group")
            );
        }
        Ok(seq)
    }
}

/// Marks the rank as waiting for its worker while alive.
struct Waits<'a>(&'a Waiting);
impl Waits<'_> {
    fn begin(waiting: &Waiting) -> Waits<'_> {
        waiting.begin();
        Waits(waiting)
    }
}
impl Drop for Waits<'_> {
    fn drop(&mut self) {
        self.0.end();
    }
}

impl Drop for HostsGroup {
    fn drop(&mut self) {
        self.desk.close();
        let worker = std::mem::replace(&mut *self.worker.lock().unwrap_or_else(PoisonError::into_inner), Worker::Gone);
        if let Worker::Running(thread) = worker {
            let _ = thread.join(); // it catches its own panics
        }
    }
}

impl Collective for HostsGroup {
    fn rank(&self) -> usize {
        self.places.me
    }
    fn size(&self) -> usize {
        self.places.size()
    }
    fn axis(&self) -> Axis {
        self.places.axis
    }

    /// One gathered buffer per host; other buffers are per rank.
    fn alloc(&self, dtype: DType, len: usize, usage: CommUse, category: Category) -> Result<Buf> {
        self.timed(|| {
            self.check_alive(&self.desk.lock(), Seam::Alloc.name(), Tag::new("buffer", 0))?;
            // The worker starts operations in the host's group too, and all ranks must start them in the same order.
            self.until(|state| state.sent == state.next)?;
            self.local.alloc(dtype, len, usage, category)
        })
    }

    fn all_gather(&self, tag: Tag, shard: View, mut full: ViewMut) -> Result<Ticket> {
        let (kind, bytes) = (Seam::AllGather, shard.bytes());
        self.check_host(kind, tag, &[shard.place(), full.place()])?;
        self.check(kind, tag).same(shard.dtype(), full.dtype())?;
        self.check(kind, tag).shards(shard.len(), full.len())?;
        let mut job = HostsJob::new(kind, tag, shard.dtype(), shard.len());
        self.place(&mut job, &mut full, CommUse::Gathered)?;
        (job.src, job.dst, job.keep) = (shard.as_ptr(), full.as_mut_ptr(), [Some(shard.keep()), Some(full.keep())]);
        self.start(job, bytes * (self.size() - 1))
    }

    fn reduce_scatter(&self, tag: Tag, mut full: ViewMut, mut shard: ViewMut, accumulate: bool) -> Result<Ticket> {
        let (kind, bytes) = (Seam::ReduceScatter, full.bytes() / self.size());
        self.check_host(kind, tag, &[full.place(), shard.place()])?;
        self.check(kind, tag).scattered(full.dtype(), shard.dtype())?;
        self.check(kind, tag).shards(shard.len(), full.len())?;
        let mut job = HostsJob::new(kind, tag, full.dtype(), shard.len());
        self.place(&mut job, &mut shard, CommUse::Reduced)?;
        (job.desc, job.there) = (shm::Desc::new(kind, tag, full.dtype(), shard.len()), None);
        self.place(&mut job, &mut full, CommUse::Reduced)?;
        (job.accumulate, job.into) = (accumulate, shard.dtype());
        (job.src, job.dst, job.keep) = (full.as_mut_ptr(), shard.as_mut_ptr(), [Some(full.keep()), Some(shard.keep())]);
        self.start(job, bytes * (self.size() - 1))
    }

    fn all_reduce(&self, tag: Tag, mut buf: ViewMut, reduce: Reduce) -> Result<Ticket> {
        let kind = Seam::AllReduce;
        self.check_host(kind, tag, &[buf.place()])?;
        self.check(kind, tag).reducible(buf.dtype(), reduce)?;
        let mut job = HostsJob::new(kind, tag, buf.dtype(), buf.len());
        self.place(&mut job, &mut buf, CommUse::Reduced)?;
        (job.desc.arg, job.reduce) = (reduce as u8, reduce);
        (job.src, job.dst, job.keep) = (buf.as_mut_ptr(), buf.as_mut_ptr(), [Some(buf.keep()), None]);
        self.start(job, 2 * buf.bytes() * (self.size() - 1) / self.size())
    }

    fn broadcast(&self, tag: Tag, mut buf: ViewMut, root: usize) -> Result<Ticket> {
        let kind = Seam::Broadcast;
        self.check_host(kind, tag, &[buf.place()])?;
        self.check(kind, tag).rank(root)?;
        let mut job = HostsJob::new(kind, tag, buf.dtype(), buf.len());
        self.place(&mut job, &mut buf, CommUse::Reduced)?;
        // Wherever the buffer is, ranks copy only from the root.
        (job.desc.place, job.desc.to) = (shm::Desc::STAGED, root as u32);
        (job.src, job.dst, job.keep) = (buf.as_mut_ptr(), buf.as_mut_ptr(), [Some(buf.keep()), None]);
        self.start(job, if root == self.rank() { 0 } else { buf.bytes() })
    }

    fn send_recv(&self, tag: Tag, to: usize, send: View, from: usize, mut recv: ViewMut) -> Result<Ticket> {
        let kind = Seam::SendRecv;
        let call = self.check(kind, tag);
        self.check_host(kind, tag, &[send.place(), recv.place()])?;
        call.rank(to)?;
        call.rank(from)?;
        call.same(send.dtype(), recv.dtype())?;
        if to == self.rank() && from == to && send.len() != recv.len() {
            return Err(call.error(format!("{} elements into {}", send.len(), recv.len())));
        }
        let mut job = HostsJob::new(kind, tag, send.dtype(), send.len());
        self.place(&mut job, &mut recv, CommUse::Reduced)?;
        job.desc.place = shm::Desc::STAGED;
        (job.desc.to, job.desc.from, job.desc.recv_len) = (to as u32, from as u32, recv.len() as u64);
        (job.src, job.dst, job.keep) = (send.as_ptr(), recv.as_mut_ptr(), [Some(send.keep()), Some(recv.keep())]);
        self.start(job, if from == self.rank() { 0 } else { recv.bytes() })
    }

    fn all_to_all(
        &self,
        tag: Tag,
        send: View,
        sends: &[Range<usize>],
        mut recv: ViewMut,
        recvs: &[Range<usize>],
    ) -> Result<Ticket> {
        let (kind, call) = (Seam::AllToAll, self.check(Seam::AllToAll, tag));
        self.check_host(kind, tag, &[send.place(), recv.place()])?;
        call.same(send.dtype(), recv.dtype())?;
        call.parts(self.rank(), (send.len(), sends), (recv.len(), recvs))?;
        let mut job = HostsJob::new(kind, tag, send.dtype(), send.len());
        self.place(&mut job, &mut recv, CommUse::Reduced)?;
        job.desc.place = shm::Desc::STAGED;
        (job.desc.to, job.desc.from) = (shm::Desc::NOBODY, shm::Desc::NOBODY);
        job.desc.recv_len = recv.len() as u64;
        job.pairs = self.desk.lock().spare.pop().unwrap_or_default();
        job.pairs.clear();
        job.pairs.extend(sends.iter().zip(recvs).map(|(send, recv)| PairParts::new(send, recv)));
        (job.src, job.dst, job.keep) = (send.as_ptr(), recv.as_mut_ptr(), [Some(send.keep()), Some(recv.keep())]);
        self.start(job, received(self.rank(), recvs) * recv.dtype().size())
    }

    fn barrier(&self, tag: Tag) -> Result<()> {
        let ticket = self.start(HostsJob::new(Seam::Barrier, tag, DType::U8, 0), 0)?;
        self.wait(ticket)
    }
    fn wait(&self, ticket: Ticket) -> Result<()> {
        let seq = self.seq(ticket)?;
        self.timed(|| self.until(|state| state.complete > seq))
    }
    fn wait_sent(&self, ticket: Ticket) -> Result<()> {
        let seq = self.seq(ticket)?;
        self.timed(|| self.until(|state| state.sent > seq))
    }
    fn release(&self, ticket: Ticket) -> Result<()> {
        let seq = self.seq(ticket)?;
        let mut state = self.desk.lock();
        // Not found: already released, or not gathered into a buffer of the group.
        let Some(at) = state.contents.iter().position(|c| c.seq == seq) else { return Ok(()) };
        if state.complete > seq {
            let held = state.contents.swap_remove(at);
            self.local.vacate(&held.buffer, held.content);
        } else {
            state.contents[at].released = true;
        }
        Ok(())
    }
    fn stats(&self) -> CommStats {
        let state = self.desk.lock();
        let open = if state.complete < state.next { state.since.elapsed().as_secs_f64() } else { 0.0 };
        let crossed = self.crossed.load(Relaxed);
        CommStats { in_flight_s: state.stats.in_flight_s + open, crossed, ..state.stats }
    }
}
