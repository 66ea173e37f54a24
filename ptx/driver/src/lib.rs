//! A CUDA driver without a GPU: libcuda's driver API over the PTX emulator of `flatshard_ptx`, so that programs for a
//! GPU can run on any machine, with their calls and their order checked. Never linked into shipped code, and never
//! passes for a GPU: its devices are named "Simulated GPU".
//!
//! Built as one shared library. It serves a whole process under the names libcuda.so.1, libcublasLt.so.12, libnccl.so.2
//! and libnvidia-ml.so.1: symbolic links to one file, which the loader treats as one library, so they share streams and
//! memory.
//!
//! # Interface for the other libraries
//!
//! The other libraries (matrix products, collectives) enqueue their work as the driver does:
//!
//! ```
//! use flatshard_simcuda::{NodeProgress, enqueue, node, at_once};
//! # fn products(stream: u64, to: u64, bytes: usize) -> Result<(), flatshard_simcuda::Code> {
//! enqueue(stream, at_once(move |memory| memory.write(to, bytes).map(|bytes| bytes.fill(0))))?;   // done in one go
//! enqueue(stream, node(move || {                  // called at each launch, also of a graph that has captured it
//!     let mut asked = 0;                          // the state of one launch
//!     Box::new(move |_memory| {                   // asked again and again until it is `Done`
//!         asked += 1;
//!         Ok(if asked < 3 { NodeProgress::Waits } else { NodeProgress::Done })
//!     })
//! }))
//! # }
//! ```
//!
//! * A stream is the `CUstream` as a number. Work runs when somebody waits (or queries, or nobody has called for a
//!   while), on the waiting thread, under the driver's one lock: it must not call the API, and must not block. Work
//!   that depends on another process returns [`NodeProgress::Waits`]; other streams then proceed, and it is polled
//!   again.
//! * Addresses are numbers too: [`DriverMemory::read`] and [`DriverMemory::write`] look them up, whether of a device or
//!   pinned. Out-of-bounds and uninitialized accesses are errors that are printed to standard error and lose the
//!   context, as a kernel's fault does.
//! * An `Err` loses the context: every later call returns its code.
//! * While the stream captures, the node becomes part of the graph, and nothing runs; anything to be checked at the
//!   call must be checked before [`enqueue`]. [`capturing`] tells whether a stream captures.
mod code; // results
mod settings; // FLATSHARD_SIMCUDA: the machine, the order, planted faults
mod shared; // memory of several processes
mod memory; // device memory, pinned memory, initialization tracking
mod queue; // streams, events, execution order
mod kernels; // modules, and launches in the emulator
mod capture; // calls captured as graphs, and graphs that run
mod state; // everything, behind one lock; waiting
pub mod api; // libcuda's functions: only `extern "C"` functions dereference pointers
mod cublaslt; // libcublasLt: matrix products
mod nccl; // libnccl: collectives between processes
mod nvml; // libnvidia-ml: monitoring

pub use code::{Code, CuResult, say};
pub use memory::DriverMemory;
pub use queue::{Node, NodeProgress, NodeRun, at_once, node};
pub use state::{alloc, arch, capturing, current_gpu, enqueue, free, room};
