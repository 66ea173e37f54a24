//! A group with seeded delays before and after chosen calls, so that tests see event orders that an idle machine never
//! produces. Never changes what a call does.
use super::seam::{Hook, Hooked, Seam, Started};
use super::{Collective, Ticket};
use crate::base::rng::Rng;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

pub type Delayed = Hooked<Delays>;

pub struct Delays {
    rng: Rng,
    drawn: AtomicU64,
    seams: Vec<Seam>,
    longest: Duration,
}

impl Delayed {
    /// Delays each of `seams` by up to `longest`, a quarter of it on average. Ranks with equal seeds get different
    /// delays.
    pub fn new(inner: Arc<dyn Collective>, seed: u64, seams: &[Seam], longest: Duration) -> Delayed {
        let rng = Rng::new(seed, (inner.axis() as u64) << 32 | inner.rank() as u64);
        Hooked::with(inner, Delays { rng, drawn: AtomicU64::new(0), seams: seams.to_vec(), longest })
    }
}

impl Delays {
    fn dawdle(&self, seam: Seam) {
        if self.seams.contains(&seam) {
            let x = self.rng.uniform(self.drawn.fetch_add(1, Relaxed));
            // Half of the calls are not delayed: being first matters as much as being late.
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

/// A group on a slow wire: an operation's result is available no earlier than `latency` after its start, whatever the
/// rank does meanwhile. Shows what prefetching hides.
pub type Slow = Hooked<SlowWire>;

pub struct SlowWire {
    latency: Duration,
    /// When the operations in flight arrive.
    due: Mutex<Vec<(Ticket, Instant)>>,
}

impl Slow {
    pub fn new(inner: Arc<dyn Collective>, latency: Duration) -> Slow {
        Hooked::with(inner, SlowWire { latency, due: Mutex::default() })
    }
}

impl Hook for SlowWire {
    fn before(&self, _: Seam, _: Started) {}
    fn after(&self, _: Seam, _: Started, ticket: Option<Ticket>) {
        if let Some(ticket) = ticket {
            let mut due = self.due.lock().unwrap_or_else(PoisonError::into_inner);
            due.push((ticket, Instant::now() + self.latency));
        }
    }
    fn before_wait(&self, seam: Seam, ticket: Ticket) {
        let due = self.due.lock().unwrap_or_else(PoisonError::into_inner);
        let due = due.iter().find(|(of, _)| *of == ticket).filter(|_| seam != Seam::Release).map(|(_, due)| *due);
        if let Some(left) = due.and_then(|due| due.checked_duration_since(Instant::now())) {
            std::thread::sleep(left);
        }
    }
    fn after_wait(&self, seam: Seam, ticket: Ticket) {
        if seam == Seam::Wait {
            self.due.lock().unwrap_or_else(PoisonError::into_inner).retain(|(of, _)| *of != ticket);
        }
    }
}
