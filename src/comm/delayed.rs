//! A group that dawdles: seeded delays before and after chosen calls, so that tests meet the orders of events that a quiet
//! machine never shows. Never changes what a call does.
use super::seam::{Hook, Hooked, Seam, Started};
use super::{Collective, Ticket};
use crate::base::rng::Rng;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;

pub type Delayed = Hooked<Delays>;

pub struct Delays {
    rng: Rng,
    drawn: AtomicU64,
    seams: Vec<Seam>,
    longest: Duration,
}

impl Delayed {
    /// Delays up to `longest`, on average a quarter of it, at each of `seams`. Ranks with equal seeds are delayed
    /// differently.
    pub fn new(inner: Arc<dyn Collective>, seed: u64, seams: &[Seam], longest: Duration) -> Delayed {
        let rng = Rng::new(seed, (inner.axis() as u64) << 32 | inner.rank() as u64);
        Hooked::with(inner, Delays { rng, drawn: AtomicU64::new(0), seams: seams.to_vec(), longest })
    }
}

impl Delays {
    fn dawdle(&self, seam: Seam) {
        if self.seams.contains(&seam) {
            let x = self.rng.uniform(self.drawn.fetch_add(1, Relaxed));
            // Half of the time not at all: being first matters as much as being late.
            std::thread::sleep(self.longest.mul_f64((2.0 * x - 1.0).max(0.0)));
        }
    }
}
impl Hook for Delays {
    fn before(&self, seam: Seam, _: Started) {
        self.dawdle(seam);
    }
    fn after(&self, seam: Seam, _: Started, _: Option<Ticket>) {
        self.dawdle(seam);
    }
    fn before_wait(&self, seam: Seam, _: Ticket) {
        self.dawdle(seam);
    }
    fn after_wait(&self, seam: Seam, _: Ticket) {
        self.dawdle(seam);
    }
}
