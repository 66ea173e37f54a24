//! The thread that runs a group's operations in the order the rank started them. Never checks operands: the rank's own
//! thread has.
//!
//! [Note: a thread] Inside a host there is no communication thread, since a rank's cores belong to its compute and
//! peers are reached in place. Between hosts a thread must react to arriving bytes while the rank computes. The kernel
//! moves the bytes, so the thread mostly sleeps in `poll` or on the host's bell. Each group has its own thread, so that
//! groups do not wait for each other.
use super::job::HostsJob;
use super::post::{self, Post};
use super::{chain, steps};
use crate::base::{Error, Result};
use crate::comm::seam::Seam;
use crate::comm::shm::{PairParts, ShmBuffer};
use crate::comm::{CommStats, Tag, Waiting};
use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

/// Maximum unfinished operations of one group.
pub(super) const RING: usize = 1024;

/// Gathered contents that this rank has not released.
pub(super) struct HostsGathered {
    pub seq: u64,
    pub tag: Tag,
    pub buffer: Arc<ShmBuffer>,
    pub content: u64,
    /// Released before it arrived.
    pub released: bool,
}

pub(super) struct DeskState {
    pub queue: VecDeque<HostsJob>,
    /// Numbers of operations started, with a result, and with a reusable input. They run in order.
    pub next: u64,
    pub complete: u64,
    pub sent: u64,
    pub contents: Vec<HostsGathered>,
    /// Lists of finished all_to_alls, for the next ones.
    pub spare: Vec<Vec<PairParts>>,
    /// Since when an operation has been incomplete.
    pub since: Instant,
    pub stats: CommStats,
    /// The failure that ended the group's work.
    pub failed: Option<(&'static str, Tag, String)>,
    closed: bool,
}

/// Where the rank queues operations and reads their progress.
pub(super) struct Desk {
    state: Mutex<DeskState>,
    called: Condvar,
    pub waiting: Arc<Waiting>,
}

impl Desk {
    pub fn new() -> Desk {
        let state = DeskState {
            queue: VecDeque::with_capacity(RING),
            next: 0,
            complete: 0,
            sent: 0,
            contents: Vec::with_capacity(RING),
            spare: Vec::new(),
            since: Instant::now(),
            stats: CommStats::default(),
            failed: None,
            closed: false,
        };
        Desk { state: Mutex::new(state), called: Condvar::new(), waiting: Arc::new(Waiting::new()) }
    }
    pub fn lock(&self) -> MutexGuard<'_, DeskState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
    /// Wakes the worker for a queued operation.
    pub fn call(&self) {
        self.called.notify_one();
    }
    /// Ends the worker, even inside a wait.
    pub fn close(&self) {
        self.lock().closed = true;
        self.waiting.close();
        self.called.notify_one();
    }
    fn next(&self) -> Option<HostsJob> {
        let mut state = self.lock();
        loop {
            if state.closed {
                return None;
            }
            if let Some(job) = state.queue.pop_front() {
                return Some(job);
            }
            state = self.called.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }
    /// Marks the oldest unfinished operation's result as available.
    fn complete(&self, post: &Post) {
        let mut state = self.lock();
        let seq = state.complete;
        state.complete += 1;
        if state.complete == state.next {
            state.stats.in_flight_s += state.since.elapsed().as_secs_f64();
        }
        if let Some(at) = state.contents.iter().position(|c| c.seq == seq && c.released) {
            let held = state.contents.swap_remove(at);
            post.local.vacate(&held.buffer, held.content);
        }
        drop(state);
        post.link.local.ring();
    }
    /// Marks its input as reusable and its result as available.
    fn finish(&self, post: &Post) {
        let mut state = self.lock();
        state.sent += 1;
        let completed = state.complete == state.sent;
        drop(state);
        match completed {
            true => post.link.local.ring(),
            false => self.complete(post),
        }
    }
    fn fail(&self, post: &Post, op: &'static str, tag: Tag, what: String) {
        self.lock().failed.get_or_insert((op, tag, what));
        post.link.local.ring();
    }
}

/// Runs operations until the desk is closed or one fails.
pub(super) fn run(desk: &Desk, mut post: Post) {
    let mut scratch = chain::ChainScratch::default();
    while let Some(mut job) = desk.next() {
        let (kind, tag) = (job.kind, job.tag);
        let ran = catch_unwind(AssertUnwindSafe(|| one(desk, &mut post, &mut job, &mut scratch)));
        let what = match ran {
            Ok(Ok(())) => None,
            Ok(Err(Error::Comm { what, .. })) => Some(what),
            Ok(Err(e)) => Some(e.to_string()),
            // The rank must not wait for a thread that has died.
            Err(_) => Some("the thread that ran it panicked".into()),
        };
        if let Some(what) = what {
            return desk.fail(&post, kind.name(), tag, what);
        }
        post.count += 1;
        if job.kind == Seam::AllToAll {
            desk.lock().spare.push(std::mem::take(&mut job.pairs));
        }
        desk.finish(&post);
    }
}

fn one(desk: &Desk, post: &mut Post, job: &mut HostsJob, scratch: &mut chain::ChainScratch) -> Result<()> {
    match job.kind {
        Seam::AllGather => steps::all_gather(post, job),
        Seam::ReduceScatter => chain::reduce_scatter(post, job, scratch, &mut |post| desk.complete(post)),
        Seam::AllReduce => chain::all_reduce(post, job, scratch),
        Seam::Broadcast => steps::broadcast(post, job),
        Seam::SendRecv => steps::send_recv(post, job),
        Seam::AllToAll => steps::all_to_all(post, job),
        Seam::Barrier => steps::barrier(post, job),
        _ => Err(post::call(&post.places, job.kind.name(), job.tag).error("is not a worker operation")),
    }
}
