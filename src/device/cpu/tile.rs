//! Attention of one group of query heads over its keys and values in tiles, forward and backward (Dao et al. 2022),
//! with f32 softmax and sums. Never builds a T x T matrix, and never knows documents or ranks.
//!
//! Forward packs all keys and values, then takes [`SIDE`] queries at a time through tiles of keys. Backward packs all
//! queries and output gradients, then takes [`SIDE`] keys at a time through tiles of queries; its blocks of weights
//! have keys as rows, so that they are left operands as they are. Blocks that no query sees are skipped.
use super::gemm::panels::{COLUMNS, Products, line};
use super::gemm::{CacheLines, GemmKernel};
use super::simd::LANES;
use crate::device::ops::AttentionShape;

/// Queries (forward) or keys (backward) that sums are kept for, in cache: a multiple of the rows of every kernel's
/// panels and of the columns.
const SIDE: usize = 96;
/// Keys (forward) or queries (backward) in a tile.
const ACROSS: usize = 192;

/// Runs `$call` with the products of `$kernel` for operands of type `$T`.
macro_rules! with_products {
    ($kernel:expr, $level:expr, $T:ty, $products:ident => $call:expr) => {
        match $kernel {
            // SAFETY: kernels are chosen only where they are available, and this thread's tiles are free.
            #[cfg(target_arch = "x86_64")]
            $crate::device::cpu::gemm::GemmKernel::Amx if <$T>::DTYPE == $crate::base::DType::Bf16 => {
                let $products = unsafe { &<$T as $crate::device::cpu::gemm::panels::PanelFloat>::amx() };
                $crate::device::cpu::simd::Level::Avx512.run(
                    #[inline(always)]
                    || $call,
                )
            }
            // SAFETY: as above.
            #[cfg(target_arch = "x86_64")]
            $crate::device::cpu::gemm::GemmKernel::Amx | $crate::device::cpu::gemm::GemmKernel::Avx512 => {
                let $products = unsafe { &<$T as $crate::device::cpu::gemm::panels::PanelFloat>::dot() };
                $crate::device::cpu::simd::Level::Avx512.run(
                    #[inline(always)]
                    || $call,
                )
            }
            _ => {
                let $products = &$crate::device::cpu::gemm::panels::Portable($level);
                $level.run(
                    #[inline(always)]
                    || $call,
                )
            }
        }
    };
}

// What a query attends to, and where rows are read and written.
mod operands;
// Arithmetic on sixteen lanes.
mod lanes;
// From queries, keys and values to outputs.
mod forward;
// From gradients of the outputs to gradients of the inputs.
mod backward;

pub use backward::{GroupGradients, backward};
pub use forward::{Group, forward};
pub use operands::{HeadRows, Mask, Shared, To};

/// The kernel of the products, and memory reused between calls, which grows to fit the longest document.
pub struct AttentionScratch {
    pub kernel: GemmKernel,
    lines: CacheLines,
}

impl AttentionScratch {
    pub fn new(kernel: GemmKernel) -> AttentionScratch {
        AttentionScratch { kernel, lines: CacheLines::default() }
    }
    /// Slices of these lengths in whole cache lines, with arbitrary contents.
    fn take<const N: usize>(&mut self, lens: [usize; N]) -> [&mut [f32]; N] {
        let lens = lens.map(|len| len.next_multiple_of(LANES));
        let mut rest = self.lines.take(lens.iter().sum());
        lens.map(|len| {
            let (taken, left) = std::mem::take(&mut rest).split_at_mut(len);
            rest = left;
            taken
        })
    }
}

/// What both directions need to know of the heads.
struct Sizes {
    group: usize,
    dim: usize,
    /// Column panels, row panels and steps of `dim`.
    columns: usize,
    rows: usize,
    steps: usize,
    /// Elements of a line.
    line: usize,
    /// Elements of a block of sums.
    block: usize,
}
impl Sizes {
    #[inline(always)]
    fn new<T, P: Products<T>>(a: &AttentionShape) -> Sizes {
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
fn packed_len(s: &Sizes, tokens: usize, side: usize) -> [usize; 2] {
    let over_dim = tokens.next_multiple_of(side) * s.steps;
    let over_tokens = s.dim.next_multiple_of(side) * tokens.div_ceil(s.line);
    [over_dim * LANES, over_tokens * LANES]
}
