//! The CPU device: runs every operation synchronously, on the caller's thread and the device's others. [`CpuDevice`]
//! chooses the compiled variant and divides the work; checks and arithmetic are in one file per family. Never allocates
//! after the first step, except for attention tiles and the packed panels of the matrix product, which grow to the
//! largest shape seen and stay. The meter does not count those, as they hold no buffers of the model.

// Vector widths, reductions, exponentials.
pub mod simd;
// Operands that are read as numbers.
mod operands;
// Pages, and copies between them.
pub(super) mod memory;
// Casts, sums, scaling.
mod element;
// Matrix products.
pub mod gemm;
// RMSNorm, LayerNorm, biases.
mod norm;
// Rotary position embeddings.
mod rope;
// Attention of a group of heads, in tiles.
mod tile;
// Attention over whole documents.
mod attention;
// Attention over pages of keys and values.
mod paged;
// The passes of ring attention.
mod ring;
// SwiGLU, GeGLU, GELU.
mod activation;
// Counter-based dropout.
mod dropout;
// Embedding lookup.
mod embed;
// Cross entropy.
mod distill;
// 4-bit weights.
mod expand;
// Casts to and from FP8.
mod fp8;
mod loss;
// The gated delta rule.
mod delta;
// What runs along documents, or along sequences that go on.
mod sequences;
// Short convolutions and output gates.
mod conv;
// Routing to experts.
mod experts;
// What gpt-oss has besides.
mod clamped;
// The exact sum of squares.
mod reduce;
// Sums over ranks.
pub mod sum;
// AdamW, SGD and Muon's polynomial.
mod optim;
// The device's threads.
mod pool;
// Parts of operations, one per thread.
mod divide;
// The device, dispatch of every operation, and its parts on threads.
mod device;

pub use device::CpuDevice;
