//! flatshard: a manual sharding engine for training transformers.
//!
//! A module names its own floor and lower ones only (`tests/tidy.rs` reads the `use` lines):
//! - 0 [`base`]: errors, dtypes, random numbers
//! - 1 [`device`]: buffers and the operations on them
//! - 2 [`comm`]: groups of ranks
//! - 3 [`nn`]: layers as forward and backward, and the one layer loop; *defines* the parameter store's trait
//! - 4 [`store`]: how parameters are kept: sharded or replicated
//! - 5 [`optim`], [`data`]
//! - 6 [`ckpt`]
//! - 7 [`engine`]: one rank's training step
//! - 8 [`run`]: flags, files, the plan, the loop
#![deny(unsafe_code)]
pub mod base;
pub mod ckpt;
pub mod comm;
pub mod data;
pub mod device;
pub mod engine;
pub mod nn;
pub mod optim;
pub mod run;
pub mod store;
