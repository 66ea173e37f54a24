//! Floor 1: buffers and the operations on them. A device enqueues on its compute stream; the CPU runs at once.
//! Never knows of ranks, layers or parameters.
#![allow(unsafe_code)] // the device floor: raw memory behind `Buf`, cpu intrinsics

// Buffers and borrowed views of them.
pub mod buf;
// The operands of every operation.
pub mod ops;
// What every device can do: the trait.
mod interface;
// What follows a product, in passes of its own.
pub mod epilogue;
// Addresses without memory, for plans.
pub mod unbacked;
// The CPU.
pub mod cpu;
// GPUs, simulated and real.
pub mod gpu;
// Updates of offloaded weights, by threads of the host.
pub mod host;
// Host memory that a device reaches.
pub mod mapped;

pub use buf::{Buf, Place, View, ViewMut};
pub use host::HostUpdate;
pub use interface::Device;
pub use ops::{ALIGN, IGNORE, LIMBS};
