//! Bytes held, by category, with their peak: what a memory plan is checked against. Never allocates buffers itself.
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

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
}
pub const CATEGORIES: [(Category, &str); 7] = [
    (Category::Params, "params"),
    (Category::Grads, "grads"),
    (Category::Optimizer, "optimizer"),
    (Category::Slots, "slots"),
    (Category::Saved, "saved"),
    (Category::Scratch, "scratch"),
    (Category::Other, "other"),
];

#[derive(Default, Debug)]
struct Counts {
    live: [AtomicUsize; CATEGORIES.len()],
    total: AtomicUsize,
    peak: AtomicUsize,
    allocations: AtomicUsize,
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
        let total = c.total.fetch_add(bytes, Relaxed) + bytes;
        c.peak.fetch_max(total, Relaxed);
        Lease { counts: c.clone(), category, bytes }
    }
    pub fn live(&self, category: Category) -> usize {
        self.0.live[category as usize].load(Relaxed)
    }
    pub fn total(&self) -> usize {
        self.0.total.load(Relaxed)
    }
    pub fn peak(&self) -> usize {
        self.0.peak.load(Relaxed)
    }
    /// How many buffers were ever allocated: constant across steps, which a test asserts.
    pub fn allocations(&self) -> usize {
        self.0.allocations.load(Relaxed)
    }
}
impl Drop for Lease {
    fn drop(&mut self) {
        self.counts.live[self.category as usize].fetch_sub(self.bytes, Relaxed);
        self.counts.total.fetch_sub(self.bytes, Relaxed);
    }
}
