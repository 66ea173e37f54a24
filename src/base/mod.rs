//! Floor 0: errors, dtypes, the counter-based generator and memory accounting. Never knows of devices, ranks or layers.
pub mod dtype;
pub mod error;
pub mod history;
pub mod meter;
pub mod rng;
pub mod text;
pub mod timeline;

pub use dtype::{DType, Elem};
pub use error::{Error, Result};
pub use meter::{Category, Meter};
pub use text::printable;
