//! Reductions over the ranks' buffers, in rank order: `((g0 + g1) + g2) + ...`, so every rank, every strategy and every
//! cut of a buffer gets the same bits. Never synchronises: the caller knows that the inputs are there and stay.
use crate::base::DType;
use crate::comm::Reduce;

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

/// Elements summed at a time: 8 KiB of f32, so the accumulator stays in the L1 cache while the inputs stream by.
const BLOCK: usize = 2048;

/// `dst (+)= sum of sources`, `len` elements. The destination may be one of the sources.
///
/// # Safety
/// `dst` and all `n` sources are valid for `len` aligned elements, and nobody writes to them during the call but this one.
#[inline(always)]
unsafe fn fold<T: Copy + Default>(
    dst: *mut T,
    sources: Sources,
    n: usize,
    len: usize,
    accumulate: bool,
    op: impl Fn(T, T) -> T,
) {
    let mut acc = [T::default(); BLOCK];
    let mut start = 0;
    while start < len {
        let m = BLOCK.min(len - start);
        let acc = &mut acc[..m];
        // SAFETY: within `len`; `dst` is borrowed only after the last source.
        let source = |r| unsafe { std::slice::from_raw_parts(sources.of(r).cast::<T>().add(start), m) };
        if n == 1 {
            acc.copy_from_slice(source(0));
        } else {
            for ((a, &x), &y) in acc.iter_mut().zip(source(0)).zip(source(1)) {
                *a = op(x, y);
            }
        }
        for r in 2..n {
            for (a, &x) in acc.iter_mut().zip(source(r)) {
                *a = op(*a, x);
            }
        }
        // SAFETY: as above.
        let dst = unsafe { std::slice::from_raw_parts_mut(dst.add(start), m) };
        if accumulate {
            for (d, &a) in dst.iter_mut().zip(&*acc) {
                *d = op(*d, a);
            }
        } else {
            dst.copy_from_slice(acc);
        }
        start += m;
    }
}

/// # Safety
/// As for [`fold`].
pub(super) unsafe fn sum_f32(dst: *mut u8, sources: Sources, n: usize, len: usize, accumulate: bool) {
    // SAFETY: the caller's word.
    unsafe { fold::<f32>(dst.cast(), sources, n, len, accumulate, |a, b| a + b) }
}

/// The larger one; NaN wins, so that it is not lost on the way.
macro_rules! max {
    () => {
        |a, b| if b > a || b.is_nan() { b } else { a }
    };
}

/// `bytes` of f32 or f64.
///
/// # Safety
/// As for [`fold`].
pub(super) unsafe fn reduce(dtype: DType, op: Reduce, dst: *mut u8, sources: Sources, n: usize, bytes: usize) {
    let len = bytes / dtype.size();
    // SAFETY: the caller's word.
    unsafe {
        match (dtype, op) {
            (DType::F64, Reduce::Sum) => fold::<f64>(dst.cast(), sources, n, len, false, |a, b| a + b),
            (DType::F64, Reduce::Max) => fold::<f64>(dst.cast(), sources, n, len, false, max!()),
            (_, Reduce::Sum) => fold::<f32>(dst.cast(), sources, n, len, false, |a, b| a + b),
            (_, Reduce::Max) => fold::<f32>(dst.cast(), sources, n, len, false, max!()),
        }
    }
}
