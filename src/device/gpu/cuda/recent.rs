//! The most recent kernel launches, for fault messages. Never waits and never locks.
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

/// Number of launches that a fault message lists.
const RECENT: usize = 8;

/// The most recent kernels, by module index.
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
    /// Number of launches so far.
    pub fn launches(&self) -> usize {
        self.launches.load(Relaxed)
    }
    /// Records a launch.
    pub fn note(&self, index: usize) {
        let newest = self.launches.fetch_add(1, Relaxed);
        self.ring[newest % RECENT].store(index, Relaxed);
    }
    /// The most recent launches after the first `before`, oldest first.
    pub fn since(&self, before: usize) -> Vec<usize> {
        let end = self.launches();
        (before.max(end.saturating_sub(RECENT))..end).map(|at| self.ring[at % RECENT].load(Relaxed)).collect()
    }
}
