//! A simulated GPU that proves kernels: it runs PTX on the CPU and reports races, missing waits, reads of what nothing
//! wrote, misaligned and out-of-bounds accesses, divergence at instructions that need whole warps, and deadlocks, with
//! kernel, line, thread and allocation. It counts instructions, global sectors and shared bank conflicts.
//!
//! What it executes: the instructions of memory-bound kernels, cp.async, ldmatrix and mma.sync (bf16, f16, tf32). Whatever
//! else a kernel holds, Hopper's instructions for now among it, is refused with its line.
//!
//! Up to four CTAs are resident and their warps run in turns drawn from a seed. No order between CTAs is modelled (fences,
//! acquire and release are refused), nor are caches or time: counts are evidence, not speed.
mod bulk;
mod clock;
mod decode;
mod decode_hopper;
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
mod sync_ops;
mod tensor;
mod warp;
mod wgmma;

pub use kernel::Kernel;
pub use launch::{Argument, Launch};
pub use layouts::Swizzle;
pub use memory::Memory;
pub use parse::parse;
pub use tensor::TensorMap;
pub use report::{Counts, Finding, Kind, Report, Thread};
