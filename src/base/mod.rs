//! Floor 0: errors, dtypes, the counter-based generator, memory accounting, and what files of others may be. Never knows of
//! devices, ranks or layers.
pub mod dtype;
pub mod error;
pub mod history;
pub mod limits;
pub mod meter;
pub mod open;
mod quote;
pub mod rng;
pub mod timeline;

pub use dtype::{DType, Elem};
pub use error::{Error, Result};
pub use meter::{Category, Meter};
pub use quote::{printable, quote};
