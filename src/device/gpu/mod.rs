//! The GPU device: every operation is a launch of a kernel of `kernels/`, a copy or a matrix product, passed to a
//! [`Driver`]. One file per family of operations checks operands and shapes the launch. Waits for the GPU only in
//! `download`, and allocates memory only in `alloc` and at creation.
//!
//! The launch code is the same for every driver, so all of it runs in CI on the simulated GPU ([`sim`]).

// Every kernel variant of this build, and its text.
pub mod kernels;
// A launch as values: kernel, threads, arguments.
pub mod args;
// Work ordered with the device's calls: collectives.
pub mod guest;
// Driver calls as values.
pub mod calls;
// The interface of a GPU.
pub mod driver;
// Scratch memory of launches.
mod scratch;
// The device, and helpers of launches.
mod launch;
// Casts, sums, biases, dropout.
mod element;
// RMSNorm and LayerNorm.
mod norm;
// Rotary position embeddings, alone and after norms.
mod rope;
// Attention, whole and in passes of ring attention.
mod attention;
// Steps between the passes of ring attention.
mod ring;
// SwiGLU, GeGLU, GELU.
mod activation;
// Mixtures of experts.
mod experts;
// Embedding lookup and its scatter-add.
mod embed;
// 4-bit weights.
mod expand;
// Casts to and from FP8.
mod fp8;
// Products in FP8.
mod scaled;
// The loss and its gradient.
mod distill;
mod loss;
// Gated delta rules and short convolutions.
mod delta;
// The gradient norm and the optimizers.
mod optim;
// Dispatch of every operation.
mod device;
// Capturing and replaying steps as CUDA graphs.
pub mod graphs;
// The simulated GPU: a driver over the emulator.
pub mod sim;
// A real GPU: a driver over CUDA.
pub mod cuda;
// What a GPU reports about itself.
pub mod telemetry;

use crate::ops::BackwardOf;
use flatshard_base::DType;

pub use delta::MOST_OF_KEY;
pub use driver::{Arg, Driver, Kernel, LaunchShape};
pub use launch::GpuDevice;

/// Like [`Device::backward_scratch`](crate::Device::backward_scratch), the largest size on any GPU.
pub fn backward_scratch(of: &BackwardOf, dtype: DType, rows: usize) -> usize {
    scratch_of(launch::SM_90A, of, dtype, rows)
}
/// The same on a GPU of architecture `arch`.
fn scratch_of(arch: u32, of: &BackwardOf, dtype: DType, rows: usize) -> usize {
    match of {
        BackwardOf::Attention(shape) => attention::sums_of(arch, shape, dtype, rows),
        BackwardOf::DeltaRule(shape) => delta::scratch(shape, rows),
    }
}
