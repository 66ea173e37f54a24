//! The thread that runs a group's operations, in the order in which the rank started them. Never decides anything: the
//! rank's own thread has checked the operands.
//!
//! [Note: a thread] Inside a host there is no communication thread, since a rank's cores belong to its compute and
//! peers are reached in place. Between hosts somebody must be there when bytes come and go, while the rank computes;
//! the kernel moves them, and this thread sleeps in `poll` or on the host's bell for most of the time. One a group, so
//! that groups do not wait for each other.
use super::job::HostsJob;
use super::post::{self, Post};
use super::{chain, steps};
use crate::base::{Error, Result};
use crate::comm::seam::Seam;
use crate::comm::shm::ShmBuffer;
use crate::comm::{CommStats, Tag, Waiting};
use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

/// Operations of one group that may be unfinished at a time.
pub(super) const RING: usize = 1024;

/// What this rank has gathered and not released.
pub(super) struct HostsGathered {
    pub seq: u64,
    pub tag: Tag,
    pub buffer: Arc<ShmBuffer>,
    pub content: u64,
    /// Before it was there.
    pub released: bool,
}

pub(super) struct DeskState {
    pub queue: VecDeque<HostsJob>,
    /// Operations started, those whose result is there, those whose input is the caller's again. They are run in order.
    pub next: u64,
    pub complete: u64,
    pub sent: u64,
    pub contents: Vec<HostsGathered>,
    /// Since when there is an operation that is not complete.
    pub since: Instant,
    pub stats: CommStats,
    /// What ended the group's work.
    pub failed: Option<(&'static str, Tag, String)>,
    closed: bool,
}

/// Where the rank leaves its operations and sees what came of them.
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
    /// There is something in the queue.
    pub fn call(&self) {
        self.called.notify_one();
    }
    /// The worker ends, also out of a wait.
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
    /// The oldest unfinished operation's result is there.
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
    /// Its input is the caller's again, and its result there.
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

/// Runs what comes, until the desk is closed or an operation fails.
pub(super) fn run(desk: &Desk, mut post: Post) {
    let mut scratch = chain::ChainScratch::default();
    while let Some(mut job) = desk.next() {
        let (kind, tag) = (job.kind, job.tag);
        let ran = catch_unwind(AssertUnwindSafe(|| one(desk, &mut post, &mut job, &mut scratch)));
        let what = match ran {
            Ok(Ok(())) => None,
            Ok(Err(Error::Comm { what, .. })) => Some(what),
            Ok(Err(e)) => Some(e.to_string()),
            // The rank must not wait for a thread that is gone.
            Err(_) => Some("the thread that ran it panicked".into()),
        };
        if let Some(what) = what {
            return desk.fail(&post, kind.name(), tag, what);
        }
        post.count += 1;
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
        Seam::Barrier => steps::barrier(post, job),
        _ => Err(post::call(&post.places, job.kind.name(), job.tag).error("is no operation of the worker")),
    }
}
