//! A real GPU: the `Driver` over cudarc, whose libraries are loaded when a device is created. Waits only in `download`
//! and `synchronize` (and in `upload`, when 12 MiB are in flight). After creation it allocates memory only in `alloc`
//! (apart from cuBLASLt's descriptors of a new shape, and graphs).
//!
//! Order: all work of a device runs on its one compute stream. Groups of ranks have streams of their own, ordered
//! against it by events ([`Cuda::compute`]). cudarc's event tracking is off.
// Driver results as messages.
mod failure;
// Which GPUs there are, and whether they are usable.
mod machine;
// Tensor maps.
mod maps;
// Device memory and pinned memory.
mod memory;
// Kernels, compiled by the driver.
mod modules;
// Every kernel through the JIT linker, with its log.
#[cfg(feature = "cust")]
pub mod link;
// Matrix products.
mod blas;
// The operands of one.
mod operands;
// One kind of product, its descriptors and algorithms.
mod product;
// Which algorithm computes which product, as a file.
mod choices;
// The algorithms of products, timed.
mod tune;
// A step without memory, which shows its products.
mod rehearsal;
// The most recent kernels.
mod recent;
// Whether a run fits, and out-of-memory messages.
mod room;
// A rank's GPU.
mod device;
// Launches and their arguments.
mod launch;
// What processes share.
mod share;
// Points of streams in time.
mod marks;
// Capturing and replaying calls.
mod graph;
// The GPU as a driver.
mod driver;

pub use blas::{missing as no_blas, present as has_blas, without_fp8};
pub use choices::Choices;
pub use device::{Cuda, CudaOptions};
pub use machine::{Gpu, Machine};
pub use modules::Compiled;
pub use product::WORKSPACE;
pub use rehearsal::Rehearsal;
pub use room::fits;
pub use share::{IPC_HANDLE, ImportedMemory, RankSum, StreamWords};
pub use tune::{TunedProducts, WantedProduct};
