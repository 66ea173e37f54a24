//! Floor 0: errors, dtypes, the counter-based generator, memory accounting and limits on input files. Never knows about
//! devices, ranks or layers.
#![deny(unsafe_code)]
pub mod error; // Error, Result
mod hex; // bytes as text
mod quote; // untrusted text in messages
mod reduce; // sums and maxima
mod split_file; // names of parts of files
pub mod columns; // words in lines
pub mod dtype; // element types
pub mod dynamic8; // 8-bit blocks
pub mod nf4; // 4-bit weights as numbers
pub mod fp8; // 8-bit floating point
pub mod rng; // counter-based random numbers
pub mod limits; // largest accepted sizes
pub mod open; // opening input files
pub mod timeline; // profiling spans
mod category; // memory categories
pub mod history; // the meter's bytes over time
pub mod meter; // live bytes and their peak

pub use category::{CATEGORIES, Category};
pub use dtype::{DType, Elem};
pub use error::{Error, Result};
pub use hex::hex;
pub use meter::Meter;
pub use quote::{on_terminal, printable, quote};
pub use reduce::Reduce;
pub use split_file::split_name;
