//! A simulated GPU that proves kernels: it runs PTX on the CPU and reports races, missing waits, reads of what nothing
//! wrote, misaligned and out-of-bounds accesses, divergence at instructions that need whole warps, and deadlocks, with
//! kernel, line, thread and allocation. It counts instructions, global sectors and shared bank conflicts.
//!
//! What it executes: the instructions of memory-bound kernels, cp.async, ldmatrix and mma.sync (bf16, f16, tf32), and
//! Hopper's mbarriers, bulk and tensor copies, wgmma and setmaxnreg. Whatever else a kernel holds is refused with its line.
//!
//! Up to four CTAs are resident and their warps run in turns drawn from a seed; with [`LATE`], lanes that have diverged stay apart
//! until an instruction needs them together. Fences, releases and acquires order threads of a CTA and of several; caches and time are
//! not modelled: counts are evidence, not speed. Approximate instructions are off by as much as documented, the same each time.
//! How matrices lie in registers and in shared memory is told in layouts.rs, with what is to be proven on a GPU.
mod approximate;
mod bulk;
mod clock;
mod copy;
mod decode;
mod decode_hopper;
mod decode_memory;
mod kernel;
mod lane;
mod launch;
mod layouts;
mod lex;
mod machine;
mod matrix_ops;
mod mbarrier;
mod memory;
mod memory_ops;
mod parse;
mod report;
mod shadow;
mod spin;
mod sync_ops;
mod tensor;
mod warp;
mod wgmma;

pub use kernel::Kernel;
pub use launch::{Argument, LATE, Launch};
pub use layouts::Swizzle;
pub use memory::{Allocation, Data, Memory};
pub use parse::parse;
pub use report::{Counts, Finding, Kind, Report, Thread};
pub use shadow::Shadow;
pub use tensor::TensorMap;
