//! A real GPU: the `Driver` over cudarc, whose libraries are loaded when a device is made. Never waits but in
//! `download` and `synchronize` (and in `upload` where 12 MiB are on their way), and takes no memory after it is made
//! but in `alloc` (cuBLASLt's descriptors of a new shape and graphs aside).
//!
//! Order: everything of a device runs on its one compute stream; groups of ranks have streams of their own, and order
//! them against it by events ([`Cuda::compute`]). cudarc's own event tracking is off.
// Results of the driver as messages.
mod failure;
// Which GPUs there are, and whether they serve.
mod machine;
// Tensor maps.
mod maps;
// Device memory, pinned memory.
mod memory;
// Kernels, compiled by the driver.
mod modules;
// Every kernel through the JIT linker, with its words.
#[cfg(feature = "cust")]
pub mod link;
// Matrix products.
mod blas;
// The kernels launched last.
mod recent;
// Whether a run fits, and what holds the memory when it did not.
mod room;
// A rank's GPU.
mod device;
// Launches: arguments as words.
mod launch;
// Points of streams in time.
mod marks;
// Calls captured and replayed.
mod graph;
// The GPU as a driver.
mod driver;

pub use blas::{WORKSPACE, missing as no_blas, present as has_blas};
pub use device::{Cuda, CudaOptions};
pub use machine::{Gpu, Machine};
pub use modules::Compiled;
pub use room::fits;
