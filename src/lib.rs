//! flatshard: a manual sharding engine for training transformers.
//!
//! Two ranks, threads of this process, train a Llama of 4 blocks with FSDP, without flags or files:
//!
//! ```
//! use flatshard::comm::{MeshSizes, run_ranks};
//! use flatshard::data::MicroBatch;
//! use flatshard::device::cpu::CpuDevice;
//! use flatshard::engine::{Engine, EngineOptions, Step};
//! use flatshard::nn::Spec;
//! use std::sync::Arc;
//!
//! fn main() -> flatshard::base::Result<()> {
//!     let (heads, kv_heads, head_dim, ff, max_len) = (2, 2, 16, 64, 16);
//!     let spec = Spec { vocab: 64, dim: 32, layers: 4, heads, kv_heads, head_dim, ff, max_len, ..Spec::default() };
//!     let options = EngineOptions { spec, tokens: 16, ..EngineOptions::default() };
//!     let losses = run_ranks(MeshSizes::sharded(2), |mesh, meter| {
//!         let mut engine = Engine::new(Arc::new(CpuDevice::new(meter)), &mesh, &options)?;
//!         (1..=20)
//!             .map(|number| {
//!                 let row: Vec<u32> = (0..16).map(|at| (at + mesh.rank() as u32) % 64).collect();
//!                 let batch = MicroBatch::from_rows([&row[..]]);
//!                 let tokens = engine.global_count(batch.loss_tokens())?; // of all ranks: the loss is divided by it
//!                 Ok(engine.train_step(&[batch], &Step { number, lr: 1e-2, tokens })?.loss)
//!             })
//!             .collect::<flatshard::base::Result<Vec<f64>>>()
//!     })?;
//!     assert_eq!(losses[0], losses[1]); // the same bits on every rank
//!     assert!(losses[0][19] < 0.5 * losses[0][0]);
//!     Ok(())
//! }
//! ```
//!
//! `examples/` has a training loop, a custom parameter store, a collective and a custom kernel. The binaries call
//! [`run::main`].
//!
//! A module uses only its own floor and lower ones (`tests/tidy` checks the `use` lines):
//! - 0 [`base`]: errors, dtypes, random numbers
//! - 1 [`device`]: buffers and the operations on them
//! - 2 [`comm`]: groups of ranks
//! - 3 [`nn`]: layers as forward and backward, and the single layer loop; *defines* the parameter store trait
//! - 4 [`store`]: parameter storage: sharded or replicated
//! - 5 [`optim`], [`data`], [`hub`]
//! - 6 [`ckpt`]
//! - 7 [`engine`]: one rank's training step
//! - 8 [`run`]: flags, files, the plan, the loop
#![deny(unsafe_code)]
pub use flatshard_base as base;
pub mod ckpt;
pub mod comm;
pub mod data;
pub use flatshard_device as device;
pub mod engine;
pub mod hub;
pub mod nn;
pub mod optim;
pub mod run;
pub mod store;
