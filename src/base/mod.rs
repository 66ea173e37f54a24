//! Floor 0: errors, dtypes, the counter-based generator, memory accounting, and what files of others may be. Never
//! knows of devices, ranks or layers.
pub mod error; // what a call may end with: Error, Result
mod quote; // text of others, fit for a message
pub mod dtype; // element types
pub mod rng; // random numbers by counter
pub mod limits; // largest sizes that are accepted
pub mod open; // files that are opened for reading
pub mod timeline; // marks of when something ran
mod category; // what memory is for
pub mod history; // the meter's bytes over time
pub mod meter; // bytes held, and their peak

pub use category::{CATEGORIES, Category};
pub use dtype::{DType, Elem};
pub use error::{Error, Result};
pub use meter::Meter;
pub use quote::{printable, quote};
