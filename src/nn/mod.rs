//! Floor 3: layers as pairs of forward and backward, and the one layer loop. Never knows which store it runs on, the
//! optimizer, or files.
//!
//! A family is data: the fields of a [`Spec`] say which parts its root and its blocks have, `llama` and `gpt` the names and
//! shapes of their segments. The parts and the blocks are plans: immutable, with every buffer passed in.
mod attention;
mod block;
mod cache;
mod context;
mod decoder;
mod gpt;
pub mod layout;
mod linear;
mod llama;
mod lora;
mod mlp;
mod norm;
pub mod parallel;
mod recompute;
pub mod ring;
mod root;
pub mod rotary;
pub mod spec;
pub mod store;
pub mod tuning;
mod workspace;

pub use context::Batch;
pub use decoder::{Decoder, Micro};
pub use layout::{Init, Layout, Segment, Tp};
pub use lora::{Lora, has_adapters, is_adapter};
pub use parallel::{Cuts, Groups, RingImpl, Slice, Split};
pub use recompute::Checkpointing;
pub use rotary::{Rotary, Scaling};
pub use spec::{Activation, Arch, Spec};
pub use store::{Grads, ParamStore, Pass, ROOT, Weights};
pub use tuning::Tuning;
pub use workspace::{Workspace, WorkspaceOptions};
