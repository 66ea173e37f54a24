//! Test helpers. Each test program includes all of them once; the tests of experiments and the benches include single
//! files.
#![allow(dead_code, unused_imports)] // each program uses its part
pub mod agent;
pub mod alone;
pub mod binaries;
pub mod counting_gpu;
pub mod deep;
pub mod golden_tensors;
pub mod hooked_store;
pub mod known_state;
pub mod network;
pub mod plain_store;
pub mod probe;
pub mod programs;
pub mod reference;
pub mod round;
pub mod runs;
pub mod simcuda;
pub mod sparse_model;
pub mod stores;
pub mod terminal;
pub mod time;
pub mod worlds;

pub use worlds::*;
