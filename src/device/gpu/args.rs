//! A kernel launch as values: which kernel, how many threads, and its arguments; and a product in FP8. Never launches.
use crate::ops::{Coded, Epilogue, GemmShape};
use crate::{View, ViewMut};
use flatshard_base::fp8::Fp8;
pub use flatshard_ptx::emulate::Swizzle;

/// Names an entry point of a variant in [`super::kernels`].
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Kernel {
    pub variant: &'static str,
    pub entry: &'static str,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct LaunchShape {
    /// CTAs.
    pub grid: [u32; 3],
    /// Threads per CTA.
    pub block: [u32; 3],
    /// Bytes of dynamic shared memory.
    pub shared: u32,
}

impl LaunchShape {
    pub fn line(ctas: u32, threads: u32) -> LaunchShape {
        LaunchShape { grid: [ctas, 1, 1], block: [threads, 1, 1], shared: 0 }
    }
}

/// An argument. It declares how the launch accesses memory, so that the simulated GPU can enforce it.
pub enum Arg<'a> {
    /// Read only.
    In(View<'a>),
    /// Read and written, or partly written.
    InOut(ViewMut<'a>),
    /// Completely overwritten.
    Out(ViewMut<'a>),
    /// A pointer that this variant does not dereference.
    Null,
    U32(u32),
    U64(u64),
    F32(f32),
    /// A tensor that the launch reads by TMA copies.
    Map(Map<'a>),
}

/// A tensor map (CUtensorMap): a tensor of three dimensions, the contiguous one first, and the box of it that a copy
/// brings to shared memory, swizzled. Out-of-bounds elements read as zeros.
#[derive(Clone, Copy)]
pub struct Map<'a> {
    /// The tensor's first element; aligned to 16 bytes.
    pub of: View<'a>,
    pub sizes: [u64; 3],
    /// Elements between neighbors in the second and third dimensions: multiples of 16 bytes.
    pub strides: [u64; 2],
    pub tile: [u32; 3],
    pub swizzle: Swizzle,
}

/// `C (m, n) (+)= A Bᵀ`, A (m, k) and B (n, k) in FP8 with the layouts of `src/device/gpu/scaled.rs`, and an epilogue.
pub struct ScaledGemm<'a> {
    pub shape: GemmShape,
    /// The format of A; B is in E4M3.
    pub format: Fp8,
    pub a: Coded<'a>,
    pub b: Coded<'a>,
    /// bf16 or f32
    pub c: ViewMut<'a>,
    pub then: Epilogue<'a>,
}
