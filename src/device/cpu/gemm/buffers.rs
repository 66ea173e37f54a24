//! Scratch memory of the matrix product's loops: packed blocks and partial sums. Grows and never shrinks.
use crate::base::Elem;

/// Blocks of A and B in the order in which the kernel reads them, of C while its sums are partial, and the block sums
/// of one panel of B.
#[derive(Default)]
pub(super) struct Buffers {
    pub a: CacheLines,
    pub b: CacheLines,
    pub c: CacheLines,
    pub sums: CacheLines,
}

/// Memory in whole cache lines, so that no vector or tile row straddles two.
#[derive(Default)]
pub(in crate::device::cpu) struct CacheLines(Vec<CacheLine>);

#[derive(Clone, Copy, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C, align(64))]
struct CacheLine([u8; 64]);

impl Buffers {
    pub fn bytes(&self) -> usize {
        64 * (self.a.0.len() + self.b.0.len() + self.c.0.len() + self.sums.0.len())
    }
}

impl CacheLines {
    /// Space for `len` elements, with arbitrary contents.
    pub fn take<T: Elem>(&mut self, len: usize) -> &mut [T] {
        let lines = (len * size_of::<T>()).div_ceil(64);
        if self.0.len() < lines {
            self.0.resize(lines, CacheLine([0; 64]));
        }
        &mut bytemuck::cast_slice_mut(&mut self.0)[..len]
    }
}
