//! Attention of one group of query heads over its keys and values in tiles, forward and backward (Dao et al. 2022),
//! with f32 softmax and sums. Never builds a T x T matrix, and never knows documents or ranks.
//!
//! Forward packs all keys and values, then takes `SIDE` queries at a time through tiles of keys. Backward packs all
//! queries and output gradients, then takes `SIDE` keys at a time through tiles of queries; its blocks of weights
//! have keys as rows, so that they are left operands as they are. Blocks that no query sees are skipped.

// What a query attends to, and where rows are read and written.
mod operands;
// The kernel, sizes and scratch of both directions.
mod scratch;
// Arithmetic on sixteen lanes.
mod lanes;
// From queries, keys and values to outputs.
mod forward;
// The same of one token, without packing.
#[cfg(target_arch = "x86_64")]
mod single;
// From gradients of the outputs to gradients of the inputs.
mod backward;

pub use backward::{GroupGradients, backward};
pub use forward::forward;
pub use operands::{Group, HeadRows, Mask, Shared, To};
pub use scratch::{ACROSS, AttentionScratch};
#[cfg(target_arch = "x86_64")]
pub use single::{SingleToken, single, takes};
