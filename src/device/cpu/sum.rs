//! Reductions over the ranks' buffers, in rank order: `((g0 + g1) + g2) + ...`, so every rank, strategy and sharding of
//! a buffer gets the same bits. f32, bf16 and f16 are summed in f32 and rounded once. Never synchronizes: the caller
//! ensures that inputs are complete and do not change.
use super::simd::Level;
use flatshard_base::dtype::Float;
use flatshard_base::{DType, Reduce};
use half::{bf16, f16};

/// The same range of every rank's buffer: rank r's starts at `base + r * stride` bytes.
#[derive(Clone, Copy)]
pub struct Sources {
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

/// Bytes of a result from which on it is stored past the caches, as large products are: what reads it next finds
/// little of it there, and a store that misses reads the line first. Granite Rapids, one core: 1.2 to 1.7 times as fast
/// from 16 MB on; 4 MB take 5 % longer.
const PAST_CACHES: usize = 8 << 20;

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
    /// Stored past the caches: `dst` starts on a line and is not read, and the level is AVX-512.
    past: bool,
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
            match self.past {
                // SAFETY: the block is within `len`.
                true => unsafe { self.block::<S, I, O, BLOCK, true>(at, op) },
                // SAFETY: as above.
                false => unsafe { self.block::<S, I, O, BLOCK, false>(at, op) },
            }
        }
        for at in whole..self.len {
            // SAFETY: as above.
            unsafe { self.block::<S, I, O, 1, false>(at, op) };
        }
        #[cfg(target_arch = "x86_64")]
        if self.past {
            // Such stores are not ordered before those that announce the result.
            // SAFETY: of every x86-64.
            unsafe { std::arch::x86_64::_mm_sfence() };
        }
    }

    /// # Safety
    /// As for [`SumJob::fold`], for elements `at..at + N`.
    #[inline(always)]
    unsafe fn block<S: Copy, I: Term<S>, O: Term<S>, const N: usize, const PAST: bool>(
        self,
        at: usize,
        op: impl Fn(S, S) -> S,
    ) {
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
        let rounded = acc.map(O::rounded);
        // SAFETY: as above. Whole lines, with AVX-512, if past the caches.
        unsafe {
            match PAST {
                #[cfg(target_arch = "x86_64")]
                true => {
                    use std::arch::x86_64::{__m512i, _mm512_stream_si512};
                    let lines = (&raw const rounded).cast::<__m512i>();
                    for line in 0..size_of::<[O; N]>() / 64 {
                        _mm512_stream_si512(out.cast::<__m512i>().add(line), lines.add(line).read_unaligned());
                    }
                }
                _ => out.write_unaligned(rounded),
            }
        }
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
pub struct Fold {
    pub level: Level,
    pub from: DType,
    /// The type of `from`, or f32; any for a single f32 source.
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
    /// Like [`Fold::run`], continuing from `before`: f32, or f64 for f64. The destination may be `before`.
    ///
    /// # Safety
    /// As for [`Fold::run`], and for `before` unless null.
    pub unsafe fn go_on(self, dst: *mut u8, before: *const u8, sources: Sources, n: usize, len: usize) {
        let read = self.accumulate || before == dst.cast_const() || (0..n).any(|r| sources.of(r) == dst.cast_const());
        let large = len * self.into.size() >= PAST_CACHES;
        let past = self.level == Level::Avx512 && large && !read && dst.addr().is_multiple_of(64);
        let job = SumJob { dst, before, sources, n, len, accumulate: self.accumulate, past };
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

#[cfg(test)]
mod tests {
    use super::*;

    /// Large results are stored past the caches where they start on a line: with the bits of others, to the end.
    #[test]
    fn stores_past_the_caches_change_no_bit() {
        const LEN: usize = PAST_CACHES / 2 + BLOCK + 7;
        let value = |i: usize| ((i * 7919 % 1009) as f32 - 500.0) / 3.0;
        let wide: Vec<f32> = (0..3 * LEN).map(value).collect();
        let narrow: Vec<bf16> = wide.iter().map(|x| bf16::from_f32(*x)).collect();
        let mut memory = vec![f32::NAN; LEN + 32];
        let line = memory.as_ptr().align_offset(64);
        for level in Level::all() {
            for (from, at, size) in [(DType::F32, wide.as_ptr().cast(), 4), (DType::Bf16, narrow.as_ptr().cast(), 2)] {
                for into in [DType::F32, DType::Bf16] {
                    let [on, off] = [line, line + 1].map(|first| {
                        let fold = Fold { level, from, into, op: Reduce::Sum, accumulate: false };
                        memory.fill(f32::NAN);
                        let dst = memory[first..].as_mut_ptr().cast::<u8>();
                        // SAFETY: three sources of LEN elements, and LEN elements of at most 4 bytes.
                        unsafe { fold.run(dst, Sources::new(at, LEN * size), 3, LEN) };
                        // SAFETY: as above; u16 has any bits.
                        let halves = unsafe { std::slice::from_raw_parts(dst.cast::<u16>(), LEN * into.size() / 2) };
                        halves.to_vec()
                    });
                    assert!(on == off, "{level} {from} into {into}");
                    let last = [0, 1, 2].map(|r| match from {
                        DType::F32 => wide[(r + 1) * LEN - 1],
                        _ => narrow[(r + 1) * LEN - 1].to_f32(),
                    });
                    let sum = last[0] + last[1] + last[2];
                    match into {
                        DType::F32 => {
                            assert_eq!(on[2 * LEN - 2..], [sum.to_bits() as u16, (sum.to_bits() >> 16) as u16])
                        }
                        _ => assert_eq!(on[LEN - 1], bf16::from_f32(sum).to_bits()),
                    }
                }
            }
        }
    }
}
