//! How a meter's bytes came about: a row at each allocation and each release, and in chosen steps a row wherever what
//! is in use changes. Never counts.
use super::CATEGORIES;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

/// Rows that a run of usual length needs: none is allocated in its steps.
const ROOM: usize = 1 << 14;

/// Of what is allocated, what somebody reads or fills at the moment.
#[derive(Clone, Copy, Default, PartialEq, Eq, Debug)]
pub struct InUse {
    /// Weights that layers were handed and have not released, whole, though ranks of a host may share them.
    pub weights: usize,
    /// Gradients that are added into and whose reduction has not started.
    pub grads: usize,
    /// What blocks keep for backward that it has not passed yet.
    pub saved: usize,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct MemoryRow {
    pub at: Instant,
    /// The step at hand, or the one that was done last.
    pub step: u64,
    pub phase: &'static str,
    /// Layer of the phase.
    pub layer: Option<usize>,
    /// In the order of [`CATEGORIES`].
    pub live: [usize; CATEGORIES.len()],
    pub in_use: InUse,
}

/// One rank's. Clones share it.
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
    /// The last row with what `change` makes of it, now.
    fn push(&self, change: impl FnOnce(&mut MemoryRow)) {
        let mut rows = self.rows();
        let Some(mut row) = rows.last().copied() else { return };
        row.at = Instant::now();
        change(&mut row);
        rows.push(row);
    }
    /// For the meter.
    pub(super) fn changed(&self, category: usize, live: usize) {
        self.push(|row| row.live[category] = live);
    }
    /// What follows is this, until the next phase.
    pub fn phase(&self, step: u64, phase: &'static str) {
        self.push(|row| (row.step, row.phase, row.layer) = (step, phase, None));
    }
    /// Within a phase of a step that is looked at closely.
    pub fn used(&self, phase: &'static str, layer: Option<usize>, in_use: InUse) {
        self.push(|row| (row.phase, row.layer, row.in_use) = (phase, layer, in_use));
    }
    /// From now on a step tells what it uses, or no more.
    pub fn set_detailed(&self, closely: bool) {
        self.0.detailed.store(closely, Relaxed);
    }
    pub fn is_detailed(&self) -> bool {
        self.0.detailed.load(Relaxed)
    }
    /// When it began, and all rows so far.
    pub fn all(&self) -> (Instant, Vec<MemoryRow>) {
        (self.0.origin, self.rows().clone())
    }
}
