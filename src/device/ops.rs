//! The operands of every operation of a [`Device`](super::Device): a struct for each, named as the method, with shapes,
//! what it computes, and for each result whether it *assigns* or *adds*. Values that layers keep, without buffers, are
//! `...Shape`.
//!
//! Operands are in the compute dtype (f32, bf16 or f16, all alike in one call) unless a line says otherwise; statistics
//! and weight gradients are f32. `check` is what every device asks before it starts: lengths and dtypes that do not fit
//! are an [`Error::Op`](crate::base::Error::Op), never undefined behavior. It returns the sizes that follow. Never
//! allocates.

// What operands must be.
mod check;
// Matrix products, what follows them, biases.
mod gemm;
// RMSNorm and LayerNorm.
mod norm;
// Rotary positions.
mod rope;
// Attention, whole and in passes.
mod attention;
// Activations and dropout.
mod activation;
// Table lookup.
mod embed;
// Cross entropy.
mod loss;
// The gradient norm and updates.
mod optim;

pub use activation::*;
pub use attention::*;
pub use embed::*;
pub use gemm::*;
pub use loss::*;
pub use norm::*;
pub use optim::*;
pub use rope::*;
