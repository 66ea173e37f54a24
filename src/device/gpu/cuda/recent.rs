//! Which kernels were launched last, for the message of a fault. Never waits and never locks.
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

/// Launches that a kernel fault names.
const RECENT: usize = 8;

/// The kernels launched last, by their number in the table of modules.
pub(super) struct Recent {
    ring: [AtomicUsize; RECENT],
    launches: AtomicUsize,
}

impl Default for Recent {
    fn default() -> Recent {
        Recent { ring: [const { AtomicUsize::new(usize::MAX) }; RECENT], launches: AtomicUsize::new(0) }
    }
}

impl Recent {
    /// Launches so far.
    pub fn launches(&self) -> usize {
        self.launches.load(Relaxed)
    }
    /// A kernel is launched.
    pub fn note(&self, index: usize) {
        let newest = self.launches.fetch_add(1, Relaxed);
        self.ring[newest % RECENT].store(index, Relaxed);
    }
    /// The last of those that were launched after the first `before`, oldest first.
    pub fn since(&self, before: usize) -> Vec<usize> {
        let end = self.launches();
        (before.max(end.saturating_sub(RECENT))..end).map(|at| self.ring[at % RECENT].load(Relaxed)).collect()
    }
}
