//! A simulated GPU that verifies kernels: it runs PTX on the CPU and reports races, missing waits, reads of
//! uninitialized memory, misaligned and out-of-bounds accesses, divergence at instructions that need whole warps, and
//! deadlocks, with kernel, line, thread and allocation. It counts instructions, global sectors and shared-memory bank
//! conflicts.
//!
//! It executes the instructions of memory-bound kernels, cp.async, ldmatrix and mma.sync (bf16, f16, tf32), and
//! Hopper's mbarriers, bulk and tensor copies, wgmma and setmaxnreg. It refuses any other instruction, with its line.
//!
//! Up to four CTAs are resident, those of a cluster together, and their warps run in an order drawn from a seed; with
//! [`LATE`], diverged lanes stay apart until an instruction needs them together. Fences, releases and acquires order
//! threads within and across CTAs. Caches and time are not modeled: counts are evidence, not speed. Approximate
//! instructions are off by the documented error, the same each time. layouts.rs defines matrix layouts in registers and
//! shared memory, cluster.rs what orders the CTAs of a cluster; what must still be verified on a GPU is listed there.

// From text to kernels.
mod draw; // pseudo-random numbers
mod lex; // PTX text to tokens
mod lane; // per-lane arithmetic
mod approximate; // approximate per-lane arithmetic
mod operand; // operands of an instruction
mod op; // instructions as data
mod kernel; // a kernel in executable form
mod decode_memory; // mnemonics of memory accesses
mod decode_hopper; // mnemonics of sm_90
mod decode; // all mnemonics
mod parse; // tokens to kernels

// The parts of a launch.
mod report; // findings and counts
mod layouts; // matrix layouts in registers and shared memory
mod tensor; // tensor maps

mod clock; // vector clocks: happens-before
mod shadow; // access history of each byte
mod memory; // global memory
mod in_flight; // asynchronous copies and products
mod mbarrier; // mbarrier objects
mod warp; // a warp's state
mod machine; // the emulated GPU's state

// The actions of warps.
mod spin; // loops that wait for another CTA
mod memory_ops; // loads, stores, atomics
mod cluster; // CTAs of a cluster
mod copy; // cp.async
mod mbarrier_ops; // mbarriers, fences, setmaxnreg
mod bulk; // bulk and tensor copies
mod matrix_ops; // ldmatrix, mma.sync
mod wgmma; // wgmma
mod sync_ops; // barriers, shuffles, votes
mod step; // one instruction
mod launch; // a whole launch

pub use draw::SplitMix64;
pub use kernel::PtxKernel;
pub use launch::{Argument, FIRST, KernelLaunch, LATE};
pub use layouts::Swizzle;
pub use memory::{Allocation, Backing, GlobalMemory};
pub use parse::parse;
pub use report::{Finding, FindingKind, LaunchCounts, LaunchReport, Thread};
pub use shadow::Shadow;
pub use tensor::TensorMap;
