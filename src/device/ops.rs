//! The operands of every operation of a [`Device`](super::Device): one struct each, named after the method, with
//! shapes, what it computes, and for each result whether it *assigns* or *adds*. Values that layers keep, without
//! buffers, are named `...Shape`.
//!
//! Operands have the compute dtype (f32, bf16 or f16, the same within a call) unless documented otherwise; statistics
//! and weight gradients are f32. Every device calls `check` before it starts: wrong lengths and dtypes are an
//! [`Error::Op`](flatshard_base::Error::Op), never undefined behavior. It returns the sizes derived from the operands.
//! Never allocates.

// Checks of operands.
mod check;
// Matrix products, their epilogues, biases.
mod gemm;
// RMSNorm and LayerNorm.
mod norm;
// Rotary position embeddings.
mod rope;
// Attention, whole and in passes.
mod attention;
// Activations and dropout.
mod activation;
// Embedding lookup.
mod embed;
// Cross entropy.
mod loss;
// Knowledge distillation.
mod distill;
// 4-bit weights.
mod expand;
// Casts to and from FP8.
mod fp8;
// The gradient norm and the optimizers.
mod optim;
// Mixtures of experts.
mod experts;
// Routers with scores, biases and groups.
mod scored;
// What gpt-oss has besides.
mod clamped;
// The gated delta rule, short convolutions, output gates.
mod delta;

pub use activation::*;
pub use attention::*;
pub use clamped::*;
pub use delta::*;
pub use distill::*;
pub use embed::*;
pub use expand::*;
pub use experts::*;
pub use fp8::*;
pub use gemm::*;
pub use loss::*;
pub use norm::*;
pub use optim::*;
pub use rope::*;
pub use scored::*;
