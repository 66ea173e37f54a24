//! The history of a meter's bytes: one row per allocation and release and, in detailed steps, one per change in use.
//! Never counts bytes itself.
use super::CATEGORIES;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

/// Capacity for a run of usual length, so that no step allocates.
const ROOM: usize = 1 << 14;

/// The subset of allocated bytes that is being read or written.
#[derive(Clone, Copy, Default, PartialEq, Eq, Debug)]
pub struct InUse {
    /// Unsharded weights between acquire and release, counted in full even where the ranks of a host share them.
    pub weights: usize,
    /// Gradients being accumulated, before their reduction starts.
    pub grads: usize,
    /// Activations saved for backward and not yet consumed.
    pub saved: usize,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct MemoryRow {
    pub at: Instant,
    /// The current step, or the last completed one.
    pub step: u64,
    pub phase: &'static str,
    /// Layer that the phase belongs to.
    pub layer: Option<usize>,
    /// Live bytes, in the order of [`CATEGORIES`].
    pub live: [usize; CATEGORIES.len()],
    pub in_use: InUse,
}

/// The history of one rank. Clones share it.
#[derive(Clone, Debug)]
pub struct History(Arc<HistoryInner>);

#[derive(Debug)]
struct HistoryInner {
    origin: Instant,
    detailed: AtomicBool,
    rows: Mutex<Vec<MemoryRow>>,
}

impl Default for History {
    fn default() -> History {
        let origin = Instant::now();
        let mut rows = Vec::with_capacity(ROOM);
        let live = [0; CATEGORIES.len()];
        rows.push(MemoryRow { at: origin, step: 0, phase: "start", layer: None, live, in_use: InUse::default() });
        History(Arc::new(HistoryInner { origin, detailed: AtomicBool::new(false), rows: Mutex::new(rows) }))
    }
}

impl History {
    fn rows(&self) -> MutexGuard<'_, Vec<MemoryRow>> {
        self.0.rows.lock().unwrap_or_else(PoisonError::into_inner)
    }
    /// Appends a copy of the last row, changed by `change` and timestamped now.
    fn push(&self, change: impl FnOnce(&mut MemoryRow)) {
        let mut rows = self.rows();
        let Some(mut row) = rows.last().copied() else { return };
        row.at = Instant::now();
        change(&mut row);
        rows.push(row);
    }
    /// Called by the meter.
    pub(super) fn changed(&self, category: usize, live: usize) {
        self.push(|row| row.live[category] = live);
    }
    /// Starts a phase, which labels the rows up to the next one.
    pub fn phase(&self, step: u64, phase: &'static str) {
        self.push(|row| (row.step, row.phase, row.layer) = (step, phase, None));
    }
    /// Records bytes in use; only in detailed steps.
    pub fn used(&self, phase: &'static str, layer: Option<usize>, in_use: InUse) {
        self.push(|row| (row.phase, row.layer, row.in_use) = (phase, layer, in_use));
    }
    /// Turns recording of bytes in use on or off.
    pub fn set_detailed(&self, closely: bool) {
        self.0.detailed.store(closely, Relaxed);
    }
    pub fn is_detailed(&self) -> bool {
        self.0.detailed.load(Relaxed)
    }
    /// The start time and all rows recorded since.
    pub fn all(&self) -> (Instant, Vec<MemoryRow>) {
        (self.0.origin, self.rows().clone())
    }
}
