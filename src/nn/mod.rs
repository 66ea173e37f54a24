//! Floor 3: layers as pairs of forward and backward, and the one layer loop. Never knows which store it runs on, the
//! optimizer, or files.
pub mod layout;
pub mod spec;
pub mod store;

pub use layout::{Init, Layout, Segment};
pub use spec::{Arch, Spec};
pub use store::{Grads, ParamStore, Pass, ROOT, Weights};
