//! Scratch memory of the matrix product's loops: packed blocks and partial sums. Grows and never shrinks.
use crate::pages::{HUGE, HostPages};
use flatshard_base::Elem;
use std::alloc::{Layout, handle_alloc_error};

/// Blocks of A and B in the order in which the kernel reads them, of C while its sums are partial, and the block sums
/// of one panel of B.
#[derive(Default)]
pub(super) struct Buffers {
    pub a: CacheLines,
    pub b: CacheLines,
    pub c: CacheLines,
    pub sums: CacheLines,
    /// Bytes of all results of the batch that the next product belongs to.
    pub among: usize,
}

/// Memory in whole cache lines, so that no vector or tile row straddles two.
#[derive(Default)]
pub(in crate::cpu) struct CacheLines(Option<HostPages>);

impl Buffers {
    pub fn bytes(&self) -> usize {
        [&self.a, &self.b, &self.c, &self.sums].map(CacheLines::bytes).iter().sum()
    }
}

impl CacheLines {
    fn bytes(&self) -> usize {
        self.0.as_ref().map_or(0, HostPages::bytes)
    }
    /// Space for `len` elements, with arbitrary contents.
    pub fn take<T: Elem>(&mut self, len: usize) -> &mut [T] {
        let bytes = len * size_of::<T>();
        // Half of a huge page and more take a whole one: A is read again for each panel of B, and with small pages the
        // products of the 105.8 M model take 4 % longer.
        let bytes = bytes.next_multiple_of(if bytes < HUGE / 2 { 64 } else { HUGE });
        if self.bytes() < bytes {
            self.0 = None; // first, so that old and new are never held together
            self.0 = HostPages::new(bytes).ok();
        }
        match &self.0 {
            // SAFETY: the pages hold `bytes`, zeroed or written before; any bits are elements; borrowed with `self`.
            Some(pages) => unsafe { std::slice::from_raw_parts_mut(pages.at().as_ptr().cast(), len) },
            None if len == 0 => &mut [],
            None => handle_alloc_error(Layout::array::<T>(len).unwrap_or(Layout::new::<T>())),
        }
    }
}
