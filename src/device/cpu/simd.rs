//! Shared by all CPU kernels: run-time choice of the vector width, fixed-order reductions, and a vectorizable
//! exponential. Never touches buffers.
//!
//! [Note: levels] A kernel is one plain `#[inline(always)]` function. [`Level::run`] inlines it into a function that
//! may use that level's instructions, where the compiler vectorizes it. Reductions keep [`LANES`] partial sums at any
//! width, and every multiply-add is fused, so all levels give the same bits.
use flatshard_base::dtype::Float;
use std::fmt;

/// Partial sums of a reduction: one register of AVX-512, two of AVX2.
pub const LANES: usize = 16;

#[derive(Clone, Copy, PartialEq, Eq, Debug, PartialOrd, Ord)]
pub enum Level {
    /// What every CPU of the target supports. On x86-64 without FMA each `mul_add` is a slow library call: correct, but
    /// not fast.
    Baseline,
    Avx2,
    Avx512,
}

impl fmt::Display for Level {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str(match self {
            Level::Baseline => "baseline",
            Level::Avx2 => "avx2",
            Level::Avx512 => "avx512",
        })
    }
}

impl Level {
    /// Whether this CPU supports it.
    pub fn available(self) -> bool {
        match self {
            Level::Baseline => true,
            #[cfg(target_arch = "x86_64")]
            Level::Avx2 => is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma"),
            #[cfg(target_arch = "x86_64")]
            Level::Avx512 => {
                Level::Avx2.available()
                    && is_x86_feature_detected!("avx512f")
                    && is_x86_feature_detected!("avx512bw")
                    && is_x86_feature_detected!("avx512dq")
                    && is_x86_feature_detected!("avx512vl")
            }
            #[cfg(not(target_arch = "x86_64"))]
            _ => false,
        }
    }
    /// The levels that this CPU supports, slowest first.
    pub fn all() -> impl Iterator<Item = Level> {
        [Level::Baseline, Level::Avx2, Level::Avx512].into_iter().filter(|l| l.available())
    }
    pub fn best() -> Level {
        Level::all().last().unwrap_or(Level::Baseline)
    }
    /// Runs `f` compiled for this level. `f` and everything it calls must be `#[inline(always)]` to benefit.
    #[inline(always)]
    pub fn run<R>(self, f: impl FnOnce() -> R) -> R {
        debug_assert!(self.available());
        match self {
            // SAFETY: a device is created only with an available level.
            #[cfg(target_arch = "x86_64")]
            Level::Avx2 => unsafe { avx2(f) },
            // SAFETY: as above.
            #[cfg(target_arch = "x86_64")]
            Level::Avx512 => unsafe { avx512(f) },
            _ => f(),
        }
    }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma")]
fn avx2<R>(f: impl FnOnce() -> R) -> R {
    f()
}
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma,avx512f,avx512bw,avx512dq,avx512vl")]
fn avx512<R>(f: impl FnOnce() -> R) -> R {
    f()
}

/// Loads the line of an address into L1, if the CPU has such an instruction. Never accesses the address.
#[inline(always)]
pub fn prefetch<T>(at: *const T) {
    // SAFETY: a hint, which cannot fault.
    #[cfg(target_arch = "x86_64")]
    unsafe {
        std::arch::x86_64::_mm_prefetch::<{ std::arch::x86_64::_MM_HINT_T0 }>(at.cast())
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = at;
}

/// The sum of the lanes, always by the same tree.
#[inline(always)]
pub fn lane_sum(mut v: [f32; LANES]) -> f32 {
    let mut half = LANES / 2;
    while half > 0 {
        for i in 0..half {
            v[i] += v[i + half];
        }
        half /= 2;
    }
    v[0]
}

/// The sum of `f` of the elements at each place of rows of equal length: lane i % LANES takes place i, then
/// [`lane_sum`]. `f` must be `#[inline(always)]`.
#[inline(always)]
pub fn sum<T: Float, const N: usize>(rows: [&[T]; N], f: impl Fn([f32; N]) -> f32) -> f32 {
    sum_with(
        rows,
        [],
        #[inline(always)]
        |x, []| f(x),
    )
}
/// [`sum`] of rows of two types.
#[inline(always)]
pub fn sum_with<T: Float, const N: usize, const M: usize>(
    rows: [&[T]; N],
    floats: [&[f32]; M],
    f: impl Fn([f32; N], [f32; M]) -> f32,
) -> f32 {
    let mut lanes = [0.0; LANES];
    // Arrays of whole vectors: with an index, each element's bounds check would keep the loop scalar.
    let (rows, floats) = (rows.map(<[T]>::as_chunks::<LANES>), floats.map(<[f32]>::as_chunks::<LANES>));
    let least = |a: usize, b: usize| a.min(b);
    let whole = rows.iter().map(|x| x.0.len()).chain(floats.iter().map(|x| x.0.len())).reduce(least).unwrap_or(0);
    let (of, of_floats) = (rows.map(|x| &x.0[..whole]), floats.map(|x| &x.0[..whole]));
    for i in 0..whole {
        for (l, lane) in lanes.iter_mut().enumerate() {
            *lane += f(
                of.map(
                    #[inline(always)]
                    |x| x[i][l].to_f32(),
                ),
                of_floats.map(
                    #[inline(always)]
                    |x| x[i][l],
                ),
            );
        }
    }
    // Through memory, in one vector: what follows takes lanes apart, and the compiler would let the loop do so too.
    let mut lanes = std::hint::black_box(lanes);
    let (rows, floats) = (rows.map(|x| x.1), floats.map(|x| x.1));
    let tail = rows.iter().map(|x| x.len()).chain(floats.iter().map(|x| x.len())).reduce(least).unwrap_or(0);
    for (l, lane) in lanes.iter_mut().enumerate().take(tail) {
        *lane += f(rows.map(|x| x[l].to_f32()), floats.map(|x| x[l]));
    }
    lane_sum(lanes)
}

/// e^x without branches, so that loops over it vectorize: x = n ln2 + r with |r| <= ln2/2, a polynomial of degree 6 in
/// r (the minimax coefficients of Cephes' `expf`), then 2^n in two factors, so that results down to the smallest
/// subnormal are correct. At most 2 ulp from e^x where the result is normal (tested). 0 below -104, infinity above
/// 88.73, NaN for NaN.
#[inline(always)]
pub fn exp(x: f32) -> f32 {
    // 1.5 * 2^23: adding it leaves the nearest integer in the low bits.
    const ROUND: f32 = 12_582_912.0;
    // ln2 = LN2_HIGH - LN2_LOW; n * LN2_HIGH is exact for |n| < 2^9.
    const LN2_HIGH: f32 = 0.693_359_4;
    const LN2_LOW: f32 = 2.121_944_4e-4;
    // Comparisons instead of `clamp` and `max`, because they let a NaN through.
    let x = if x < -106.0 { -106.0 } else { x };
    let x = if x > 90.0 { 90.0 } else { x };
    let shifted = x.mul_add(std::f32::consts::LOG2_E, ROUND);
    let n = shifted.to_bits().wrapping_sub(ROUND.to_bits()) as i32;
    let nf = shifted - ROUND;
    let r = nf.mul_add(LN2_LOW, nf.mul_add(-LN2_HIGH, x));
    let p = 1.987_569_1e-4f32;
    let p = p.mul_add(r, 1.398_2e-3);
    let p = p.mul_add(r, 8.333_452e-3);
    let p = p.mul_add(r, 4.166_579_6e-2);
    let p = p.mul_add(r, 1.666_666_5e-1);
    let p = p.mul_add(r, 0.5);
    let p = (p * r).mul_add(r, r) + 1.0;
    let power = |n: i32| f32::from_bits((n.wrapping_add(127) << 23) as u32);
    p * power(n >> 1) * power(n - (n >> 1))
}

/// (sigmoid(x), 1 - sigmoid(x)), both with full relative accuracy; the first is 0 below -80, where it is less than
/// 2e-35.
#[inline(always)]
pub fn sigmoid(x: f32) -> (f32, f32) {
    let low = x < -80.0;
    let e = exp(if low { 80.0 } else { -x });
    let s = 1.0 / (1.0 + e);
    (if low { 0.0 } else { s }, e * s)
}

/// (tanh(x), 1 - tanh(x)^2), without branches. Below 0.625, the odd polynomial of Cephes' `tanhf`, with a relative
/// error of 2e-7; above, 1 - 2 / (e^2x + 1), whose difference does not cancel.
#[inline(always)]
pub fn tanh(x: f32) -> (f32, f32) {
    let square = x * x;
    let p = (-5.704_988_8e-3f32).mul_add(square, 2.063_909e-2);
    let p = p.mul_add(square, -5.373_971_5e-2);
    let p = p.mul_add(square, 1.333_144_2e-1);
    let p = p.mul_add(square, -3.333_328e-1);
    let near = (p * square).mul_add(x, x);
    let size = x.abs();
    // e^2x is finite there, and tanh rounds to 1 from 9.01 on.
    let e = exp(2.0 * if size > 20.0 { 20.0 } else { size });
    let inverse = 1.0 / (e + 1.0);
    let far = (1.0 - 2.0 * inverse).copysign(x);
    let is_far = size >= 0.625;
    (if is_far { far } else { near }, if is_far { 4.0 * inverse * (e * inverse) } else { 1.0 - near * near })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exp_is_within_two_ulp() {
        let mut worst = 0.0f64;
        for i in -870_000..885_000 {
            let x = i as f32 * 1e-4;
            let (got, want) = (exp(x), (x as f64).exp());
            let ulp = (want as f32).to_bits();
            let ulp = f32::from_bits(ulp + 1) as f64 - f32::from_bits(ulp) as f64;
            worst = worst.max((got as f64 - want).abs() / ulp);
        }
        assert!(worst <= 2.0, "{worst} ulp");
    }

    #[test]
    fn exp_at_the_ends() {
        assert_eq!(exp(0.0), 1.0);
        assert_eq!(exp(f32::NEG_INFINITY), 0.0);
        assert_eq!(exp(-104.0), 0.0);
        assert!(exp(-100.0) > 0.0, "subnormal results must not be flushed");
        assert_eq!(exp(f32::INFINITY), f32::INFINITY);
        assert_eq!(exp(88.8), f32::INFINITY);
        assert!(exp(f32::NAN).is_nan());
    }

    #[test]
    fn tanh_and_its_slope_are_accurate() {
        for i in -200_000..200_000 {
            let x = i as f32 * 1e-4;
            let ((t, slope), want) = (tanh(x), (x as f64).tanh());
            let want_slope = 1.0 / (x as f64).cosh().powi(2);
            assert!((t as f64 - want).abs() <= 3e-7 * want.abs(), "tanh({x}) = {t}");
            assert!((slope as f64 - want_slope).abs() <= 6e-7 * want_slope, "slope at {x} = {slope}, {want_slope}");
        }
        assert_eq!((tanh(f32::INFINITY).0, tanh(f32::NEG_INFINITY).0, tanh(0.0)), (1.0, -1.0, (0.0, 1.0)));
        assert!(tanh(f32::NAN).0.is_nan());
    }

    #[test]
    fn sigmoid_at_the_ends() {
        assert_eq!(sigmoid(200.0), (1.0, 0.0));
        assert_eq!(sigmoid(-200.0), (0.0, 1.0));
        assert!(sigmoid(f32::NAN).0.is_nan());
    }

    #[test]
    fn every_level_gives_the_same_sum() {
        let x: Vec<f32> = (0..1003).map(|i| (i as f32 * 0.37).sin()).collect();
        let of = |level: Level| {
            level.run(
                #[inline(always)]
                || {
                    sum(
                        [&x[..]],
                        #[inline(always)]
                        |[x]| x * exp(x),
                    )
                },
            )
        };
        let want = of(Level::Baseline);
        assert!(want.abs() > 1.0);
        for level in Level::all() {
            assert_eq!(of(level).to_bits(), want.to_bits(), "{level}");
        }
    }
}
