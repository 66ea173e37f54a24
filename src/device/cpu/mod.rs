//! The CPU device: runs every operation at once, on the caller's thread. [`CpuDevice`] chooses the compiled form;
//! checks and arithmetic are in the files by family. Never allocates after the first step, but for the tiles of
//! attention and the packed panels of the matrix product, which grow to the largest shape seen and stay (uncounted by
//! the meter: buffers of the model are not in them).

// Vector widths, reductions, exponentials.
pub mod simd;
// Operands that are read as numbers.
mod operands;
// Pages, and bytes between them.
pub(super) mod memory;
// Casts, sums, scales.
mod element;
// Matrix products.
pub mod gemm;
// RMSNorm, LayerNorm, biases.
mod norm;
// Rotary positions.
mod rope;
// Products of tiles in the cache.
mod tile;
// Attention of whole documents.
mod attention;
// The passes of ring attention.
mod ring;
// SwiGLU, GeGLU, GELU.
mod activation;
// Dropout from a counter.
mod dropout;
// Table lookup.
mod embed;
// Cross entropy.
mod loss;
// The exact sum of squares.
mod reduce;
// AdamW and SGD.
mod optim;
// The operations, each in a line.
mod device;

pub use device::{AttentionSums, CpuDevice};
