//! Floor 3: layers as pairs of forward and backward, and the one layer loop. Never knows which store it runs on, the
//! optimizer, or files.
//!
//! A family is data: the fields of a [`Spec`] say which parts its root and its blocks have, `families` the names and
//! shapes of their segments. The parts and the blocks are plans: immutable, with every buffer passed in. In reading
//! order:
pub mod rotary; // rotary positions as a table
pub mod spec; // a model as numbers
pub mod split; // what of a layer is one rank's, over tp and sp
pub mod tp_plan; // tensor-parallel plans in the words of transformers
pub mod layout; // named tensors in a flat buffer
pub mod store; // the four verbs between a model and its sharding
mod tensor; // buffers of rows, and tables of them
mod context; // what every layer of one pass shares; what ranks of tp do together
mod norm; // RMSNorm and LayerNorm
mod linear; // a matrix product with a weight, and its adapter
mod lora; // which matrices have adapters
pub mod tuning; // which tensors learn, and how fast
pub mod ring; // attention over the rows of all ranks of sp
mod cache; // keys and values of the tokens before
mod saved; // what a block keeps for backward, and what it works in
mod attention; // the attention branch
mod mlp; // the feed-forward branch
mod block; // both branches
mod root; // embeddings, final norm, head and loss
mod families; // names and shapes of Llama and its descendants, and of GPT-2
mod model; // a spec as layers
mod recompute; // activation checkpointing
mod workspace; // every buffer of a pass
mod decoder; // the one layer loop

pub use context::Batch;
pub use decoder::{Decoder, Micro};
pub use layout::{Init, Layout, Segment, Tp};
pub use lora::{Lora, has_adapters, is_adapter};
pub use recompute::Checkpointing;
pub use rotary::{Rotary, Scaling};
pub use spec::{Activation, Arch, Spec};
pub use split::{Cuts, Groups, RingImpl, Slice, Split};
pub use store::{Grads, ParamStore, Pass, ROOT, Weights};
pub use tuning::Tuning;
pub use workspace::{Workspace, WorkspaceOptions};
