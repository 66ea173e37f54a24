//! The GPU device: every operation is a launch of a kernel of `kernels/`, a copy or a matrix product, handed to a
//! [`Driver`]. Operations stand in one file a family, which checks operands and shapes the launch. Never waits for the
//! GPU but in `download`, and takes memory only in `alloc` and when it is made.
//!
//! Whatever the driver, the launch code is the same, so all of it runs in CI on the simulated GPU ([`sim`]).

// Every kernel variant of this build, and its text.
pub mod kernels;
// A launch as values: kernel, threads, arguments.
pub mod args;
// Work between a device's calls that is not the device's: collectives.
pub mod guest;
// Calls to a driver as values.
pub mod calls;
// What a GPU must be able to do.
pub mod driver;
// Memory that launches use among themselves.
mod scratch;
// The device and what launches share.
mod launch;
// Casts, sums, biases, dropout.
mod element;
// RMSNorm and LayerNorm.
mod norm;
// Rotary positions, alone and behind norms.
mod rope;
// Attention, whole and the passes of ring attention.
mod attention;
// Around the passes of ring attention.
mod ring;
// SwiGLU, GeGLU, GELU.
mod activation;
// Table lookup and its scatter.
mod embed;
// The loss and its gradient.
mod loss;
// The gradient norm and the optimizers.
mod optim;
// The operations, each in a line.
mod device;
// Runs of calls captured and replayed.
pub mod graphs;
// The simulated GPU: a driver over the emulator.
pub mod sim;
// A real GPU: a driver over CUDA.
pub mod cuda;
// What a GPU reports about itself.
pub mod telemetry;

pub use attention::sums as attention_sums;
pub use driver::{Arg, Driver, Kernel, LaunchShape};
pub use launch::GpuDevice;
