//! How long a call may block, and whether a rank is waiting for its worker thread. Never blocks.
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// A call's time limit, which may change while others wait under it.
#[derive(Debug)]
pub(super) struct Patience(AtomicU64);
impl Patience {
    pub fn new(timeout: Duration) -> Patience {
        let patience = Patience(AtomicU64::new(0));
        patience.set(timeout);
        patience
    }
    pub fn set(&self, timeout: Duration) {
        self.0.store(u64::try_from(timeout.as_micros()).unwrap_or(u64::MAX), Ordering::Relaxed);
    }
    pub fn get(&self) -> Duration {
        Duration::from_micros(self.0.load(Ordering::Relaxed))
    }
}

/// Whether a rank is waiting for its worker thread. The thread's own waits count against the timeout only while the
/// rank waits: an operation that was started early may legitimately take long.
#[derive(Debug)]
pub(super) struct Waiting {
    origin: Instant,
    /// Microseconds after `origin`; [`Waiting::IDLE`] while the rank does not wait.
    since: AtomicU64,
    /// The thread must exit.
    closed: AtomicBool,
}
impl Waiting {
    const IDLE: u64 = u64::MAX;

    pub fn new() -> Waiting {
        Waiting { origin: Instant::now(), since: AtomicU64::new(Waiting::IDLE), closed: AtomicBool::new(false) }
    }
    pub fn begin(&self) {
        self.since.store(self.origin.elapsed().as_micros() as u64, Ordering::Relaxed);
    }
    pub fn end(&self) {
        self.since.store(Waiting::IDLE, Ordering::Relaxed);
    }
    pub fn close(&self) {
        self.closed.store(true, Ordering::Relaxed);
    }
    pub fn is_late(&self, timeout: Duration) -> bool {
        let since = self.since.load(Ordering::Relaxed);
        let waited = || self.origin.elapsed().saturating_sub(Duration::from_micros(since));
        self.closed.load(Ordering::Relaxed) || since != Waiting::IDLE && waited() >= timeout
    }
}
