//! The training step from inside, with ranks as threads: the same bits however parameters are sharded, gradients and
//! models against references, what is gathered, sent, held and allocated.
#[path = "../common/mod.rs"]
mod common;
mod collectives;
mod families;
mod generate;
mod golden;
mod gradients;
#[path = "../common/heap.rs"]
mod heap;
mod lora_dropout;
mod memory;
mod meshes;
mod parity;
mod precision;
mod ring;
mod sharding_options;
mod stores;
mod tensor_parallel;
mod tuning;
