//! The categories in which the meter counts memory. Never counts.

#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, serde::Serialize, serde::Deserialize)]
pub enum Category {
    /// Master weights and their compute-dtype copies.
    Params,
    /// Sharded gradients, or DDP's replicated ones.
    Grads,
    Optimizer,
    /// Full-size staging buffers for gathered weights and unreduced gradients.
    Slots,
    /// Activations saved for backward.
    Saved,
    /// Reused within a block, the loss or an operation.
    Scratch,
    /// Batches, tables and other small things.
    Other,
    /// Anything above that is offloaded to host memory. The other categories count device memory.
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
