//! Floor 1: buffers and the operations on them. A device enqueues on its compute stream; the CPU runs synchronously.
//! Never knows about ranks, layers or parameters.
#![allow(unsafe_code)] // the device floor: raw memory behind `Buf`, cpu intrinsics

// Buffers and borrowed views of them.
pub mod buf;
// The operands of every operation.
pub mod ops;
// The interface of a device.
mod interface;
// Epilogues of products, as separate passes.
pub mod epilogue;
// Products in FP8, computed in bf16.
pub mod fp8;
// Pages in place before they are used.
pub mod pages;
// Addresses without memory, for plans.
pub mod unbacked;
// The FLOPs and bytes of one operation.
pub mod cost;
// A device that turns calls into costs, or computes nothing.
pub mod counted;
// The CPU.
pub mod cpu;
// GPUs, simulated and real.
pub mod gpu;
// Updates of offloaded weights on host threads.
pub mod host;
// Read-only file mappings.
pub mod mapped;

pub use buf::{Buf, Place, View, ViewMut};
pub use host::HostUpdate;
pub use interface::Device;
pub use ops::{ALIGN, IGNORE, LIMBS};
