//! Floor 3: layers as pairs of forward and backward, and the one layer loop. Never knows about the store it runs on,
//! the optimizer, or files.
//!
//! A family is data: the fields of a [`Spec`] determine the parts of its root and blocks, `families` the names and
//! shapes of their segments. Parts and blocks are immutable plans, with every buffer passed in. In reading order:
mod row_transform; // norms and limits of projected rows
pub mod rotary; // rotary positions as a table
mod arch; // the families
mod recurrence; // mixers with a state, as numbers
pub mod spec; // a model as numbers
mod spec_blocks; // what it says about each block
mod spec_check; // whether it fits together
pub mod split; // a rank's share of a layer, over tp and sp
pub mod tp_plan; // transformers' tensor-parallel plans
pub mod layout; // named tensors in a flat buffer
pub mod store; // the four verbs between a model and its sharding
mod tensor; // buffers of rows, and tables of them
mod context; // what layers of a pass share; tp collectives
mod norm; // RMSNorm and LayerNorm
mod latent; // queries, keys and values from latents
mod latent_buffers; // what they save, and their scratch
mod linear; // a matrix product with a weight, and its adapter
mod windows; // which rows go to which rank of ep, and when
mod grouped; // the same with a weight per expert
mod lora; // which matrices have adapters
pub mod tuning; // which tensors are trainable, and at what rate
mod ring; // ring attention over sp
mod ulysses; // heads exchanged for tokens over sp
pub mod core; // core attention, on one rank or over sp
mod cache; // the KV cache
mod recurrent_buffers; // what mixers other than attention save
mod product_buffers; // what products with adapters, 4 bits or FP8 need
mod sparse_buffers; // what sparse branches need
mod saved; // saved activations and scratch of a block
mod conv; // the short convolution
mod delta; // the gated delta net
mod output_gate; // gates of attention's outputs
mod attention; // the attention branch
mod value_norm; // norms of values
mod shared_kv; // keys and values that several blocks read
mod per_layer_buffers; // what those inputs need
mod per_layer; // inputs that each block gets besides the residual stream
mod mlp; // the feed-forward branch
mod dispatch; // rows to the ranks of ep, and back
mod expert_inputs; // weights of what experts read
mod expert_layer; // the experts of a sparse block
mod experts; // the sparse feed-forward branch
mod beside; // dense and experts
mod block; // both branches
mod adapters; // adapters of a whole model
mod sequences; // losses of whole sequences
mod teacher; // what the head reads of a teacher
mod root; // embeddings, final norm, head and loss
mod families; // names and shapes of Llama, its descendants and GPT-2
mod model; // a spec as layers
mod recompute; // activation checkpointing
mod workspace; // every buffer of a pass
mod decoder; // the one layer loop
mod teach; // a frozen teacher
mod predict; // next tokens

pub use arch::Arch;
pub use cache::{CacheSize, PAGE};
pub use context::{Batch, LabeledRows};
pub use decoder::{Decoder, Micro, Minimized};
pub use families::{Family, expert_names};
pub use layout::{
    CodePlace, Init, Layout, Segment, SlicePart, Storage, Tp, columns_name, half_name, slice_name, sliced,
};
pub use lora::{
    ALL_LINEAR, HEAD, Lora, SCORE, goes_with_adapters, has_adapters, is_adapter, is_path_end, linear_module,
    linear_modules,
};
pub use recompute::Checkpointing;
pub use recurrence::{DeltaForm, DeltaNet, Mamba, Recurrence};
pub use rotary::{QueryGrowth, Rotary, Scaling};
pub use sequences::{LossRows, Scored, SequenceBuffers, SequenceLoss, SequenceRows};
pub use spec::{Activation, BlockFactors, Branch, Experts, HeadSizes, Latent, RowNorm, Spec};
pub use split::{Cuts, Groups, Slice, SpGrid, SpImpl, Split};
pub use store::{Grads, ParamStore, Pass, ROOT, Weights};
pub use teach::TeacherPass;
pub use teacher::{StudentRows, Teacher, TeacherChunk, TeacherStats};
pub use tuning::Tuning;
pub use workspace::{Workspace, WorkspaceOptions};
