//! Floor 4: how parameters are kept. Every store implements `ParamStore` towards the model and [`Store`] towards the
//! optimizer, clipping and checkpoints. Never knows which layer it is holding.
pub mod offload; // what is in host memory
mod traits; // a store to the optimizer and to checkpoints
mod kept; // masters, and the copy that is computed with
pub mod flat; // layers, units, shards: arithmetic
pub mod init; // initial weights
mod replicas; // sums over dp_replicate
mod shards; // what a rank owns of each unit
mod slots; // the primitives: unshard, wait, reshard, reduce-scatter
mod units; // what stores that shard units have in common
pub mod sharded; // FSDP's schedule
pub mod zero; // ZeRO's
pub mod replicated; // DDP
pub mod reference; // FSDP tensor by tensor: the oracle

pub use flat::Wrap;
pub use init::initialize;
pub use kept::{Keep, assign};
pub use offload::Offload;
pub use reference::{Reference, ReferenceOptions};
pub use replicated::{Replicated, ReplicatedOptions};
pub use sharded::{BackwardPrefetch, Sharded, ShardedOptions};
pub use traits::{Shard, Store, Strategy};
pub use zero::{Stage, Zero, ZeroOptions};
