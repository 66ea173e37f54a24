//! The functions of cuda.h, under their own names and signatures. They handle pointers and nothing else: each checks
//! its arguments and asks `state`. A program that needs a function that is missing here fails with that function's
//! name.
//!
//! Safety, of all of them: pointers are null or as cuda.h says; null is an error where it is not allowed.
#![allow(non_snake_case)] // the names are NVIDIA's
#![allow(clippy::missing_safety_doc)] // stated above, once
mod call; // what all of them have in common
pub mod device; // devices and contexts
pub mod memory; // allocations, copies
pub mod launch; // modules and launches
pub mod stream; // streams
pub mod event; // events
pub mod graph; // captures and graphs
