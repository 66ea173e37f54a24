//! What both directions of attention in tiles share: the kernel of the products, sizes of packed operands, and memory.
//! Never computes.
use super::super::gemm::panels::{COLUMNS, Products, line};
use super::super::gemm::{CacheLines, GemmKernel};
use super::super::simd::LANES;
use crate::ops::AttentionShape;

/// Queries (forward) or keys (backward) that sums are kept for, in cache: a multiple of the rows of every kernel's
/// panels and of the columns.
pub(super) const SIDE: usize = 96;
/// Keys (forward) or queries (backward) in a tile.
pub const ACROSS: usize = 192;

/// Runs `$call` with the products of `$kernel` for operands of type `$T`.
macro_rules! with_products {
    ($kernel:expr, $level:expr, $T:ty, $products:ident => $call:expr) => {
        match $kernel {
            // SAFETY: kernels are chosen only where they are available, and this thread's tiles are free.
            #[cfg(target_arch = "x86_64")]
            $crate::cpu::gemm::GemmKernel::Amx if <$T>::DTYPE == flatshard_base::DType::Bf16 => {
                let $products = unsafe { &<$T as $crate::cpu::gemm::panels::PanelFloat>::amx() };
                $crate::cpu::simd::Level::Avx512.run(
                    #[inline(always)]
                    || $call,
                )
            }
            // SAFETY: as above.
            #[cfg(target_arch = "x86_64")]
            kernel if kernel.takes(<$T>::DTYPE) => {
                let $products = unsafe { &<$T as $crate::cpu::gemm::panels::PanelFloat>::dot() };
                $crate::cpu::simd::Level::Avx512.run(
                    #[inline(always)]
                    || $call,
                )
            }
            _ => {
                let $products = &$crate::cpu::gemm::panels::Portable($level);
                $level.run(
                    #[inline(always)]
                    || $call,
                )
            }
        }
    };
}
pub(super) use with_products;

/// The kernel of the products, and memory reused between calls, which grows to fit the longest document.
pub struct AttentionScratch {
    pub kernel: GemmKernel,
    lines: CacheLines,
    /// Keys and values that lie apart, brought together.
    pub gathered: CacheLines,
}

impl AttentionScratch {
    pub fn new(kernel: GemmKernel) -> AttentionScratch {
        AttentionScratch { kernel, lines: CacheLines::default(), gathered: CacheLines::default() }
    }
    /// Slices of these lengths from the start of a cache line on, with arbitrary contents.
    pub(in crate::cpu) fn take<const N: usize>(&mut self, lens: [usize; N]) -> [&mut [f32]; N] {
        let mut rest = self.lines.take(lens.iter().map(|len| len.next_multiple_of(LANES)).sum());
        lens.map(|len| {
            let (taken, left) = std::mem::take(&mut rest).split_at_mut(len.next_multiple_of(LANES));
            rest = left;
            &mut taken[..len]
        })
    }
}

/// What both directions need to know of the heads.
pub(super) struct Sizes {
    pub group: usize,
    pub dim: usize,
    /// Column panels, row panels and steps of `dim`.
    pub columns: usize,
    pub rows: usize,
    pub steps: usize,
    /// Elements of a line.
    pub line: usize,
    /// Elements of a block of sums.
    pub block: usize,
}
impl Sizes {
    #[inline(always)]
    pub(super) fn new<T, P: Products<T>>(a: &AttentionShape) -> Sizes {
        let (dim, line) = (a.head_dim, line::<P::Packed>());
        Sizes {
            group: a.heads / a.kv_heads,
            dim,
            columns: dim.div_ceil(COLUMNS),
            rows: dim.div_ceil(P::ROWS),
            steps: dim.div_ceil(line),
            line,
            block: P::ROWS * COLUMNS,
        }
    }
}

/// f32s that packed operands of `tokens` take: summed over `dim` and over the tokens.
#[inline(always)]
pub(super) fn packed_len(s: &Sizes, tokens: usize, side: usize) -> [usize; 2] {
    let over_dim = tokens.next_multiple_of(side) * s.steps;
    let over_tokens = s.dim.next_multiple_of(side) * tokens.div_ceil(s.line);
    [over_dim * LANES, over_tokens * LANES]
}
