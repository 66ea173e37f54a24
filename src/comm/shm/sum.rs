//! Reductions over the ranks' buffers, in rank order: `((g0 + g1) + g2) + ...`, so every rank, strategy and sharding of
//! a buffer gets the same bits. f32, bf16 and f16 are summed in f32 and rounded once. Never synchronizes: the caller
//! ensures that inputs are complete and do not change.
use crate::base::DType;
use crate::base::dtype::Float;
use crate::comm::Reduce;
use crate::device::cpu::simd::Level;
use half::{bf16, f16};

/// The same range of every rank's buffer: rank r's starts at `base + r * stride` bytes.
#[derive(Clone, Copy)]
pub(in crate::comm) struct Sources {
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

/// Elements per block: held in registers, so the loop vectorizes at any width, even if the destination is one of the
/// sources.
const BLOCK: usize = 64;

/// An element of a buffer that is summed in `S`.
trait Term<S>: Copy {
    fn wide(self) -> S;
    fn rounded(sum: S) -> Self;
}
impl<T: Float> Term<f32> for T {
    #[inline(always)]
    fn wide(self) -> f32 {
        self.to_f32()
    }
    #[inline(always)]
    fn rounded(sum: f32) -> T {
        T::from_f32(sum)
    }
}
impl Term<f64> for f64 {
    #[inline(always)]
    fn wide(self) -> f64 {
        self
    }
    #[inline(always)]
    fn rounded(sum: f64) -> f64 {
        sum
    }
}

/// Operands of a reduction, its destination, and its length.
#[derive(Clone, Copy)]
struct SumJob {
    dst: *mut u8,
    /// A previous partial sum, in the accumulation dtype; null if none.
    before: *const u8,
    sources: Sources,
    n: usize,
    len: usize,
    accumulate: bool,
}

impl SumJob {
    /// `dst (+)= op over sources`, with input elements `I`, output elements `O`, accumulated in `S`.
    ///
    /// # Safety
    /// `dst` and all `n` sources are valid for `len` elements, and nobody else writes to them during the call.
    #[inline(always)]
    unsafe fn fold<S: Copy, I: Term<S>, O: Term<S>>(self, op: impl Fn(S, S) -> S + Copy) {
        let whole = self.len / BLOCK * BLOCK;
        for at in (0..whole).step_by(BLOCK) {
            // SAFETY: the block is within `len`.
            unsafe { self.block::<S, I, O, BLOCK>(at, op) };
        }
        for at in whole..self.len {
            // SAFETY: as above.
            unsafe { self.block::<S, I, O, 1>(at, op) };
        }
    }

    /// # Safety
    /// As for [`SumJob::fold`], for elements `at..at + N`.
    #[inline(always)]
    unsafe fn block<S: Copy, I: Term<S>, O: Term<S>, const N: usize>(self, at: usize, op: impl Fn(S, S) -> S) {
        // SAFETY: upheld by the caller. Unaligned reads, because a stride need not be a multiple of I's alignment.
        let load = |r: usize| unsafe { self.sources.of(r).cast::<I>().add(at).cast::<[I; N]>().read_unaligned() };
        // SAFETY: within `dst`, upheld by the caller.
        let out = unsafe { self.dst.cast::<O>().add(at).cast::<[O; N]>() };
        let (mut acc, first) = match self.before.is_null() {
            true => (load(0).map(I::wide), 1),
            // SAFETY: as for the sources.
            false => (unsafe { self.before.cast::<S>().add(at).cast::<[S; N]>().read_unaligned() }, 0),
        };
        for r in first..self.n {
            let x = load(r);
            for i in 0..N {
                acc[i] = op(acc[i], x[i].wide());
            }
        }
        if self.accumulate {
            // SAFETY: as above.
            let x = unsafe { out.read_unaligned() };
            for i in 0..N {
                acc[i] = op(x[i].wide(), acc[i]);
            }
        }
        // SAFETY: as above.
        unsafe { out.write_unaligned(acc.map(O::rounded)) };
    }

    /// # Safety
    /// As for [`SumJob::fold`].
    #[inline(always)]
    unsafe fn run<S: Copy + PartialOrd + std::ops::Add<Output = S>, I: Term<S>, O: Term<S>>(self, op: Reduce) {
        // The larger one. NaN, which alone differs from itself, wins, so that it propagates.
        #[allow(clippy::eq_op)]
        #[inline(always)]
        fn max<S: PartialOrd>(a: S, b: S) -> S {
            if b > a || b != b { b } else { a }
        }
        // SAFETY: upheld by the caller.
        unsafe {
            match op {
                Reduce::Sum => self.fold::<S, I, O>(
                    #[inline(always)]
                    |a, b| a + b,
                ),
                Reduce::Max => self.fold::<S, I, O>(max),
            }
        }
    }
}

/// One reduction: its operation, dtypes and vector instructions.
#[derive(Clone, Copy)]
pub(in crate::comm) struct Fold {
    pub level: Level,
    pub from: DType,
    /// As `from`, or f32; for a single f32 source, any.
    pub into: DType,
    pub op: Reduce,
    pub accumulate: bool,
}
impl Fold {
    /// `dst (+)= reduction of n sources`, `len` elements. The destination may be one of the sources if of the same
    /// dtype.
    ///
    /// # Safety
    /// `dst` and all `n` sources are valid for that many elements, and nobody else writes to them during the call.
    pub unsafe fn run(self, dst: *mut u8, sources: Sources, n: usize, len: usize) {
        // SAFETY: upheld by the caller.
        unsafe { self.go_on(dst, std::ptr::null(), sources, n, len) }
    }
    /// As [`Fold::run`], continuing from `before`: f32, or f64 for f64. The destination may be `before`.
    ///
    /// # Safety
    /// As for [`Fold::run`], and for `before` unless null.
    pub unsafe fn go_on(self, dst: *mut u8, before: *const u8, sources: Sources, n: usize, len: usize) {
        let job = SumJob { dst, before, sources, n, len, accumulate: self.accumulate };
        self.level.run(
            #[inline(always)]
            // SAFETY: upheld by the caller.
            || unsafe {
                match (self.from, self.into) {
                    (DType::F64, _) => job.run::<f64, f64, f64>(self.op),
                    (DType::Bf16, DType::Bf16) => job.run::<f32, bf16, bf16>(self.op),
                    (DType::Bf16, _) => job.run::<f32, bf16, f32>(self.op),
                    (DType::F16, DType::F16) => job.run::<f32, f16, f16>(self.op),
                    (DType::F16, _) => job.run::<f32, f16, f32>(self.op),
                    (_, DType::Bf16) => job.run::<f32, f32, bf16>(self.op),
                    (_, DType::F16) => job.run::<f32, f32, f16>(self.op),
                    _ => job.run::<f32, f32, f32>(self.op),
                }
            },
        )
    }
}
