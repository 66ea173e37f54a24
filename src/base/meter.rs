//! Bytes held, by category, with their peak: what a memory plan is checked against. What is offloaded to host memory has a
//! category of its own and is in no total. Never allocates buffers itself.
use super::history::History;
use std::collections::BTreeMap;
use std::fmt;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Category {
    /// Master shards and their compute-dtype copies.
    Params,
    /// Sharded gradients, or the replicated ones of DDP.
    Grads,
    Optimizer,
    /// Full-size staging buffers for gathered weights and unreduced gradients.
    Slots,
    /// What backward needs of the forward pass.
    Saved,
    /// Reused within a block, the loss or an operation.
    Scratch,
    /// Batches, tables and other small things.
    Other,
    /// Whatever of the above is offloaded: in host memory, where all else is the device's.
    Host,
}
pub const CATEGORIES: [(Category, &str); 8] = [
    (Category::Params, "params"),
    (Category::Grads, "grads"),
    (Category::Optimizer, "optimizer"),
    (Category::Slots, "slots"),
    (Category::Saved, "saved"),
    (Category::Scratch, "scratch"),
    (Category::Other, "other"),
    (Category::Host, "host"),
];

#[derive(Default, Debug)]
struct Counts {
    live: [AtomicUsize; CATEGORIES.len()],
    total: AtomicUsize,
    peak: AtomicUsize,
    allocations: AtomicUsize,
    /// How many leases of each category and size are held: what an out-of-memory error lists.
    held: Mutex<BTreeMap<(usize, usize), usize>>,
    history: OnceLock<History>,
}
impl Counts {
    fn held(&self) -> MutexGuard<'_, BTreeMap<(usize, usize), usize>> {
        self.held.lock().unwrap_or_else(PoisonError::into_inner)
    }
    /// The bytes of a category have become others.
    fn tell(&self, category: Category) {
        if let Some(history) = self.history.get() {
            history.changed(category as usize, self.live[category as usize].load(Relaxed));
        }
    }
}

/// Live buffers that are alike.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Held {
    pub name: &'static str,
    /// Of one.
    pub bytes: usize,
    pub count: usize,
}
impl fmt::Display for Held {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        write!(f, "{} x {:.1} MiB {}", self.count, self.bytes as f64 / (1 << 20) as f64, self.name)
    }
}

/// Shared by the device and the groups of one rank; clones count together.
#[derive(Clone, Default, Debug)]
pub struct Meter(Arc<Counts>);

/// Keeps `bytes` counted until dropped.
#[derive(Debug)]
pub struct Lease {
    counts: Arc<Counts>,
    category: Category,
    bytes: usize,
}

impl Meter {
    pub fn lease(&self, category: Category, bytes: usize) -> Lease {
        let c = &self.0;
        c.live[category as usize].fetch_add(bytes, Relaxed);
        c.allocations.fetch_add(1, Relaxed);
        if category != Category::Host {
            let total = c.total.fetch_add(bytes, Relaxed) + bytes;
            c.peak.fetch_max(total, Relaxed);
        }
        *c.held().entry((category as usize, bytes)).or_default() += 1;
        c.tell(category);
        Lease { counts: c.clone(), category, bytes }
    }
    /// Every change from now on is written there; the first such call counts.
    pub fn keep(&self, history: &History) {
        let _ = self.0.history.set(history.clone());
    }
    pub fn live(&self, category: Category) -> usize {
        self.0.live[category as usize].load(Relaxed)
    }
    /// On the device, as is the peak.
    pub fn total(&self) -> usize {
        self.0.total.load(Relaxed)
    }
    pub fn peak(&self) -> usize {
        self.0.peak.load(Relaxed)
    }
    /// Live buffers, those with most bytes in all first.
    pub fn held(&self) -> Vec<Held> {
        let named = |(&(category, bytes), &count): (&(usize, usize), &usize)| Held {
            name: CATEGORIES[category].1,
            bytes,
            count,
        };
        let mut held: Vec<Held> = self.0.held().iter().map(named).collect();
        held.sort_by_key(|h| std::cmp::Reverse(h.bytes * h.count));
        held
    }
    /// How many buffers were ever allocated: constant across steps, which a test asserts.
    pub fn allocations(&self) -> usize {
        self.0.allocations.load(Relaxed)
    }
}
impl Drop for Lease {
    fn drop(&mut self) {
        self.counts.live[self.category as usize].fetch_sub(self.bytes, Relaxed);
        if self.category != Category::Host {
            self.counts.total.fetch_sub(self.bytes, Relaxed);
        }
        self.counts.tell(self.category);
        let (mut held, key) = (self.counts.held(), (self.category as usize, self.bytes));
        if let Some(count) = held.get_mut(&key) {
            *count -= 1;
            if *count == 0 {
                held.remove(&key);
            }
        }
    }
}
