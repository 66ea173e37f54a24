//! The threads of one CPU device. They take the jobs of one call at a time together with its caller, and sleep between
//! calls. Never decides how work is divided, and never allocates or starts a thread after it is created.
//!
//! [Note: turns] A call is a turn. `state` holds the turn's number, odd while jobs are open, in the upper half, and how
//! many threads are inside in the lower half. Threads enter only while it is odd, so the caller, who makes it even when
//! no job is left, waits only for those inside: a thread that the system has not woken yet delays nothing.
use flatshard_base::{Error, Result};
use std::cell::UnsafeCell;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed, SeqCst};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize};
use std::sync::{Arc, Mutex, TryLockError};
use std::thread::{self, JoinHandle, Thread};

/// What a call runs: `job(thread, number)`, with thread 0 for the caller.
type PoolJob<'a> = &'a (dyn Fn(usize, usize) + Sync + 'a);

/// Rounds of waiting before a thread sleeps, some 30 us: about as long as the caller computes alone between two calls.
/// Without a core for each thread, waiting would delay the one that works.
const SPINS: u32 = 2000;

/// Low half of a turn's state: threads inside.
const INSIDE: u64 = u32::MAX as u64;
/// Added to open and to close a turn.
const NEXT: u64 = 1 << 32;

fn is_open(state: u64) -> bool {
    state / NEXT % 2 == 1
}

pub(super) struct Pool {
    turns: Arc<Turns>,
    threads: Vec<JoinHandle<()>>,
    /// Held by the caller of a turn.
    busy: Mutex<()>,
}

struct Turns {
    state: AtomicU64,
    /// Written by the caller before it opens a turn, read by threads inside.
    turn: UnsafeCell<Option<Turn>>,
    next: AtomicUsize,
    panicked: AtomicBool,
    over: AtomicBool,
    spins: u32,
}
struct Turn {
    /// Valid while the turn has threads inside.
    job: PoolJob<'static>,
    jobs: usize,
    caller: Thread,
}

// SAFETY: `turn` is written only while no thread is inside, and read only by threads inside; entering and leaving are
// ordered by `state`.
unsafe impl Sync for Turns {}
// SAFETY: as above; a `Turn` is Send, as jobs are Sync.
unsafe impl Send for Turns {}

impl Turns {
    fn new(spins: u32) -> Turns {
        Turns {
            state: AtomicU64::new(0),
            turn: UnsafeCell::new(None),
            next: AtomicUsize::new(0),
            panicked: AtomicBool::new(false),
            over: AtomicBool::new(false),
            spins,
        }
    }
    /// A thread's main loop.
    fn work(&self, me: usize) {
        let (mut last, mut spins) = (0, 0);
        while !self.over.load(Acquire) {
            let state = self.state.load(Acquire);
            if !is_open(state) || state / NEXT == last {
                spins += 1;
                if spins < self.spins {
                    std::hint::spin_loop();
                } else {
                    thread::park();
                    spins = 0;
                }
            } else if self.state.compare_exchange(state, state + 1, AcqRel, Relaxed).is_ok() {
                (last, spins) = (state / NEXT, 0);
                self.inside(me);
            }
        }
    }
    fn inside(&self, me: usize) {
        // SAFETY: this thread is inside, so the turn does not change.
        let Some(Turn { job, jobs, caller }) = (unsafe { &*self.turn.get() }) else { return };
        let caller = caller.clone();
        if catch_unwind(AssertUnwindSafe(|| self.take(me, job, *jobs))).is_err() {
            self.panicked.store(true, Relaxed);
        }
        let left = self.state.fetch_sub(1, AcqRel) - 1;
        if left & INSIDE == 0 && !is_open(left) {
            caller.unpark();
        }
    }
    /// Runs jobs until none is left.
    fn take(&self, me: usize, job: PoolJob, jobs: usize) {
        loop {
            match self.next.fetch_add(1, Relaxed) {
                number if number < jobs => job(me, number),
                _ => return,
            }
        }
    }
    /// Ends the turn, and waits for the threads inside.
    fn close(&self) {
        self.state.fetch_add(NEXT, AcqRel);
        let mut spins = 0;
        while self.state.load(Acquire) & INSIDE > 0 {
            spins += 1;
            if spins < self.spins {
                std::hint::spin_loop();
            } else {
                thread::park();
            }
        }
    }
}

/// Closes the turn even if one of the caller's jobs panics.
struct OpenTurn<'a>(&'a Turns);
impl Drop for OpenTurn<'_> {
    fn drop(&mut self) {
        self.0.close();
    }
}

impl Pool {
    /// `threads` in all, at least 1: the callers' own and others, which are started here. They inherit the CPUs that
    /// the calling thread may run on.
    pub fn start(threads: usize) -> Result<Pool> {
        let cores = thread::available_parallelism().map_or(1, usize::from);
        let turns = Arc::new(Turns::new(if threads <= cores { SPINS } else { 0 }));
        let mut pool = Pool { turns, threads: Vec::with_capacity(threads), busy: Mutex::new(()) };
        for me in 1..threads {
            let turns = pool.turns.clone();
            let thread = thread::Builder::new().name(format!("cpu {me}")).spawn(move || turns.work(me));
            let refused = |e| Error::op("cpu device", format!("cannot start thread {me} of {threads}: {e}"));
            pool.threads.push(thread.map_err(refused)?);
        }
        Ok(pool)
    }
    /// Threads in all.
    pub fn threads(&self) -> usize {
        self.threads.len() + 1
    }
    /// Runs `job(thread, number)` for each number below `jobs`, in any order and on any thread, and returns when all
    /// are done. Callers that find the threads taken run their jobs alone.
    pub fn run(&self, jobs: usize, job: PoolJob) {
        let free = match self.busy.try_lock() {
            Ok(free) => Some(free),
            Err(TryLockError::Poisoned(free)) => Some(free.into_inner()),
            Err(TryLockError::WouldBlock) => None,
        };
        if free.is_none() || jobs < 2 || self.threads.is_empty() {
            return (0..jobs).for_each(|number| job(0, number));
        }
        let turns = &*self.turns;
        // SAFETY: the turn is closed and nobody is inside, so nobody reads it. The job outlives the turn, which
        // `OpenTurn` closes before this returns or unwinds.
        unsafe {
            let job = std::mem::transmute::<PoolJob, PoolJob<'static>>(job);
            *turns.turn.get() = Some(Turn { job, jobs, caller: thread::current() });
        }
        turns.next.store(0, Relaxed);
        turns.state.fetch_add(NEXT, SeqCst);
        let open = OpenTurn(turns);
        self.threads.iter().take(jobs - 1).for_each(|thread| thread.thread().unpark());
        turns.take(0, job, jobs);
        drop(open);
        assert!(!turns.panicked.swap(false, Relaxed), "a thread of the CPU device panicked");
    }
}

/// The caller's thread alone.
impl Default for Pool {
    fn default() -> Pool {
        Pool { turns: Arc::new(Turns::new(0)), threads: Vec::new(), busy: Mutex::new(()) }
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        self.turns.over.store(true, SeqCst);
        for thread in self.threads.drain(..) {
            thread.thread().unpark();
            let _ = thread.join(); // panics of jobs are caught
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_job_of_every_call_runs_once() {
        for threads in [1, 2, 3, 8] {
            let pool = Pool::start(threads).unwrap();
            let runs: Vec<AtomicUsize> = (0..17).map(|_| AtomicUsize::new(0)).collect();
            for call in 1..=3000 {
                let jobs = call % (runs.len() + 1);
                let before: Vec<usize> = runs.iter().map(|n| n.load(Relaxed)).collect();
                pool.run(jobs, &|thread, number| {
                    assert!(thread < threads);
                    runs[number].fetch_add(1, Relaxed);
                });
                for (number, n) in runs.iter().enumerate() {
                    assert_eq!(n.load(Relaxed) - before[number], usize::from(number < jobs), "call {call}");
                }
            }
        }
    }

    #[test]
    fn concurrent_callers_and_calls_within_a_job_run_alone() {
        let (pool, runs) = (Pool::start(3).unwrap(), AtomicUsize::new(0));
        thread::scope(|scope| {
            for _ in 0..2 {
                scope.spawn(|| {
                    for _ in 0..200 {
                        pool.run(4, &|_, _| {
                            pool.run(2, &|_, _| _ = runs.fetch_add(1, Relaxed));
                        });
                    }
                });
            }
        });
        assert_eq!(runs.into_inner(), 2 * 200 * 4 * 2);
    }

    #[test]
    fn a_panic_reaches_the_caller_and_the_threads_live_on() {
        let pool = Pool::start(2).unwrap();
        for bad in 0..8 {
            let run = catch_unwind(AssertUnwindSafe(|| pool.run(8, &|_, number| assert_ne!(number, bad))));
            assert!(run.is_err(), "job {bad}");
        }
        let runs = AtomicUsize::new(0);
        pool.run(100, &|_, _| _ = runs.fetch_add(1, Relaxed));
        assert_eq!(runs.into_inner(), 100);
    }
}
