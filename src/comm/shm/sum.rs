//! Reductions over the ranks' buffers, in rank order: `((g0 + g1) + g2) + ...`, so every rank, every strategy and every
//! cut of a buffer gets the same bits. Never synchronises: the caller knows that the inputs are there and stay.
use crate::base::DType;
use crate::comm::Reduce;
use crate::device::cpu::simd::Level;

/// The same range of every rank's buffer: rank r's starts at `base + r * stride` bytes.
#[derive(Clone, Copy)]
pub(super) struct Sources {
    base: *const u8,
    stride: usize,
}
impl Default for Sources {
    fn default() -> Sources {
        Sources::new(std::ptr::null(), 0)
    }
}
impl Sources {
    pub fn new(base: *const u8, stride: usize) -> Sources {
        Sources { base, stride }
    }
    pub fn of(self, rank: usize) -> *const u8 {
        self.base.wrapping_add(rank * self.stride)
    }
    pub fn offset(self, bytes: usize) -> Sources {
        Sources::new(self.base.wrapping_add(bytes), self.stride)
    }
}

/// Elements taken at a time: as arrays that live in registers, the loop vectorises at any width, also where the destination
/// is one of the sources.
const BLOCK: usize = 64;

/// `dst (+)= op over sources`, `len` elements.
///
/// # Safety
/// `dst` and all `n` sources are valid for `len` elements, and nobody else writes to them during the call.
#[inline(always)]
unsafe fn fold<T: Copy>(
    dst: *mut T,
    sources: Sources,
    n: usize,
    len: usize,
    accumulate: bool,
    op: impl Fn(T, T) -> T + Copy,
) {
    let whole = len / BLOCK * BLOCK;
    for at in (0..whole).step_by(BLOCK) {
        // SAFETY: the block is within `len`.
        unsafe { fold_block::<T, BLOCK>(dst, sources, n, at, accumulate, op) };
    }
    for at in whole..len {
        // SAFETY: as above.
        unsafe { fold_block::<T, 1>(dst, sources, n, at, accumulate, op) };
    }
}

/// # Safety
/// As for [`fold`], of the elements `at..at + N`.
#[inline(always)]
unsafe fn fold_block<T: Copy, const N: usize>(
    dst: *mut T,
    sources: Sources,
    n: usize,
    at: usize,
    accumulate: bool,
    op: impl Fn(T, T) -> T,
) {
    // SAFETY: valid by the caller's word; read unaligned, because a stride need not be a multiple of T's alignment.
    let load = |from: *const T| unsafe { from.add(at).cast::<[T; N]>().read_unaligned() };
    let mut acc = load(sources.of(0).cast());
    for r in 1..n {
        let x = load(sources.of(r).cast());
        for i in 0..N {
            acc[i] = op(acc[i], x[i]);
        }
    }
    if accumulate {
        let x = load(dst);
        for i in 0..N {
            acc[i] = op(x[i], acc[i]);
        }
    }
    // SAFETY: as above.
    unsafe { dst.add(at).cast::<[T; N]>().write_unaligned(acc) };
}

/// The larger one; NaN wins, so that it is not lost on the way.
macro_rules! max {
    () => {
        #[inline(always)]
        |a, b| if b > a || b.is_nan() { b } else { a }
    };
}
macro_rules! add {
    () => {
        #[inline(always)]
        |a, b| a + b
    };
}

/// One reduction: of what, and with which vector instructions.
#[derive(Clone, Copy)]
pub(super) struct Fold {
    pub level: Level,
    pub dtype: DType,
    pub op: Reduce,
    pub accumulate: bool,
}
impl Fold {
    /// `dst (+)= reduction of n sources`, `bytes` of f32 or f64. The destination may be one of the sources.
    ///
    /// # Safety
    /// `dst` and all `n` sources are valid for so many bytes, and nobody else writes to them during the call.
    pub unsafe fn run(self, dst: *mut u8, sources: Sources, n: usize, bytes: usize) {
        let (len, acc) = (bytes / self.dtype.size(), self.accumulate);
        self.level.run(
            #[inline(always)]
            // SAFETY: the caller's word.
            || unsafe {
                match (self.dtype, self.op) {
                    (DType::F64, Reduce::Sum) => fold::<f64>(dst.cast(), sources, n, len, acc, add!()),
                    (DType::F64, Reduce::Max) => fold::<f64>(dst.cast(), sources, n, len, acc, max!()),
                    (_, Reduce::Sum) => fold::<f32>(dst.cast(), sources, n, len, acc, add!()),
                    (_, Reduce::Max) => fold::<f32>(dst.cast(), sources, n, len, acc, max!()),
                }
            },
        )
    }
}
