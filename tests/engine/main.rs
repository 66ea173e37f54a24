//! The training step from inside, with ranks as threads: bitwise equal results for any sharding, gradients and models
//! compared with references, and what is gathered, sent, held and allocated.
#[path = "../common/mod.rs"]
mod common;
mod collectives;
mod expert_adapters;
mod expert_overlap;
mod expert_parallel;
mod experts;
mod families;
mod first_step;
mod fp8;
mod generate;
mod golden;
mod gradients;
#[path = "../common/heap.rs"]
mod heap;
mod labeled;
mod lora_dropout;
mod memory;
mod meshes;
mod muon;
mod packed;
mod parity;
mod precision;
mod distill;
mod preference;
mod grpo;
mod sampling;
mod sp;
mod sharding_options;
mod states;
mod stores;
mod tensor_parallel;
mod threads;
mod tuning;
mod work;
