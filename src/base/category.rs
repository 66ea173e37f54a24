//! What memory is for: the categories that the meter counts in. Never counts.

#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, serde::Serialize, serde::Deserialize)]
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

impl Category {
    pub fn name(self) -> &'static str {
        CATEGORIES[self as usize].1
    }
}
