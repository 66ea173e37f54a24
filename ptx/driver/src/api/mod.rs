//! The functions of cuda.h, under their own names and signatures. They only handle pointers: each checks its arguments
//! and calls `state`. A program that needs a function that is missing here fails with that function's name.
//!
//! Safety, for all of them: pointers are null or as cuda.h requires; null is an error where it is not allowed.
#![allow(non_snake_case)] // the names are NVIDIA's
#![allow(clippy::missing_safety_doc)] // stated above, once
mod call; // shared by all functions
pub mod device; // devices and contexts
pub mod memory; // allocations, copies
pub mod ipc; // memory of several processes
pub mod launch; // modules and launches
pub mod stream; // streams
pub mod event; // events
pub mod graph; // captures and graphs
