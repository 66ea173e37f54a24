//! Floor 4: how parameters are stored. Every store implements `ParamStore` for the model and [`Store`] for the
//! optimizer, clipping and checkpoints. Never knows what a layer computes.
pub mod offload; // offload to host memory
mod traits; // the store interface for optimizer and checkpoints
mod kept; // masters and their compute-dtype copies
pub mod flat; // layers, units, shards: arithmetic
pub mod init; // initial weights
mod replicas; // gradient sums over dp_replicate
mod begun; // which segments of a gradient hold part of the step's sum
mod shards; // the shards of one rank
mod packed; // 4-bit weights, quantized
mod coded; // weights in FP8, cast before they are gathered
mod slots; // primitives: unshard, wait, reshard, reduce-scatter
mod units; // common to the stores that shard units
pub mod sharded; // FSDP schedule
pub mod zero; // ZeRO schedule
pub mod replicated; // DDP
pub mod reference; // per-tensor FSDP: the oracle
mod apart; // experts in a store of their own

pub use apart::{allocate, apart};
pub use flat::Wrap;
pub use init::{initialize, initialize_only};
pub use kept::{assign, values};
pub use offload::Offload;
pub use packed::{ReadValues, VisitValues};
pub use reference::{Reference, ReferenceOptions};
pub use replicated::{Replicated, ReplicatedOptions};
pub use sharded::{BackwardPrefetch, Sharded, ShardedOptions};
pub use traits::{PackedShard, PartId, Shard, Store, Strategy};
pub use zero::{Stage, Zero, ZeroOptions};
