//! A CUDA driver without a GPU: libcuda's driver API over the PTX emulator of `flatshard_ptx`, so that programs written
//! for a GPU, their calls and their order, run and are judged on any machine. Never linked by what is shipped, and
//! never pretends to be a GPU: its devices are called "Simulated GPU".
//!
//! Built as one shared library. Under the names libcuda.so.1, libcublasLt.so.12, libnccl.so.2 and libnvidia-ml.so.1
//! (symbolic links to one file: the loader takes one inode for one library, so they share their streams and memory) it
//! serves a whole process.
//!
//! # The seam
//!
//! The other libraries (matrix products, collectives) enqueue their work where the driver does:
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
//! * A stream is the `CUstream` as a number. Work runs when somebody waits (or asks, or nobody has called for a while),
//!   on the thread that waits, under the driver's one lock: it must not call the API, and must not block. What depends
//!   on another process answers [`NodeProgress::Waits`]; other streams then go on, and it is asked again.
//! * Addresses are numbers too: [`DriverMemory::read`] and [`DriverMemory::write`] look them up, whether of a device or
//!   pinned. Out of bounds, and bytes that nothing has written, are errors that are printed to standard error and
//!   lose the context, as a kernel's fault does.
//! * An `Err` loses the context: every later call answers with its code.
//! * While the stream captures, the node becomes one of the graph's, and nothing runs; whatever is to be checked at the
//!   call is checked before [`enqueue`]. [`capturing`] says whether a stream does.
mod code; // results
mod settings; // FLATSHARD_SIMCUDA: the machine, the order, planted faults
mod memory; // device memory, pinned memory, what was never written
mod queue; // streams, events, the order in which work runs
mod kernels; // modules, and launches in the emulator
mod capture; // calls captured as graphs, and graphs that run
mod state; // everything, behind one lock; waiting
pub mod api; // libcuda's functions: pointers are followed in the `extern "C"` functions and nowhere else
mod cublaslt; // libcublasLt: matrix products
mod nccl; // libnccl: collectives between processes
mod nvml; // libnvidia-ml: what a monitor reads

pub use code::{Code, CuResult, say};
pub use memory::DriverMemory;
pub use queue::{Node, NodeProgress, NodeRun, at_once, node};
pub use state::{alloc, capturing, current_gpu, enqueue, free, room};
