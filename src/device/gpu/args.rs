//! A launch as values: which kernel, how many threads, and its arguments. Never launches.
use crate::device::{View, ViewMut};
pub use flatshard_ptx::emulate::Swizzle;

/// Names an entry of a variant in [`super::kernels`].
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Kernel {
    pub variant: &'static str,
    pub entry: &'static str,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct LaunchShape {
    /// CTAs.
    pub grid: [u32; 3],
    /// Threads of a CTA.
    pub block: [u32; 3],
    /// Bytes for the kernel's shared array that has no length of its own.
    pub shared: u32,
}

impl LaunchShape {
    pub fn line(ctas: u32, threads: u32) -> LaunchShape {
        LaunchShape { grid: [ctas, 1, 1], block: [threads, 1, 1], shared: 0 }
    }
}

/// An argument. What a launch does with memory is said here, so that the simulated GPU can hold the kernel to it.
pub enum Arg<'a> {
    /// Read only.
    In(View<'a>),
    /// Read, written, or in part.
    InOut(ViewMut<'a>),
    /// Written all over, whatever was there.
    Out(ViewMut<'a>),
    /// A pointer that this variant does not follow.
    Null,
    U32(u32),
    U64(u64),
    F32(f32),
    /// What the launch reads by tensor copies.
    Map(Map<'a>),
}

/// A tensor map (CUtensorMap): a tensor of three dimensions, the contiguous one first, and the box of it that a copy
/// brings to shared memory, swizzled. What lies outside reads as zeros.
#[derive(Clone, Copy)]
pub struct Map<'a> {
    /// From the first element on; aligned to 16 bytes.
    pub of: View<'a>,
    pub sizes: [u64; 3],
    /// Elements between neighbours of the second and the third dimension: multiples of 16 bytes.
    pub strides: [u64; 2],
    pub tile: [u32; 3],
    pub swizzle: Swizzle,
}
