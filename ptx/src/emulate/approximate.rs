//! Approximate instructions: the exact result, off by as much as the PTX ISA allows. The error is a function of the
//! operands and a seed, so a kernel gives the same bits each time, and a kernel that needs exact results fails. Never
//! changes the special values that the manual fixes: results for zeros, infinities and NaN.

use super::draw::{GAMMA, finalize};

/// Largest error of an instruction.
#[derive(Clone, Copy)]
enum ErrorBound {
    /// Units in the last place.
    Ulps(f64),
    Relative(f64),
    Absolute(f64),
}
use ErrorBound::*;

/// An instruction: its function in f64, and its error for an operand.
#[derive(Clone, Copy)]
pub struct Approximate {
    function: fn(f64, f64) -> f64,
    error: fn(f64) -> ErrorBound,
    /// Subnormal operands and results become zeros of their sign.
    flushes: bool,
}

/// The number of sources, and the instruction.
pub fn approximate(parts: &[&str]) -> Option<(usize, Approximate)> {
    // 2^-22.9
    const ROOT: f64 = 1.2776e-7;
    const MANTISSA: f64 = 1.0 / (1 << 22) as f64;
    let (flushes, plain) = match parts {
        [name, how, "ftz", "f32"] => (true, [*name, *how]),
        [name, how, "f32"] => (false, [*name, *how]),
        _ => return None,
    };
    let one = |function, error| Some((1, Approximate { function, error, flushes }));
    match plain {
        ["ex2", "approx"] => one(|x, _| x.exp2(), |_| Relative(MANTISSA)),
        // Near 1 the logarithm is near 0, so its relative error is unbounded.
        ["lg2", "approx"] => {
            one(|x, _| x.log2(), |x| if x > 0.5 && x < 2.0 { Absolute(MANTISSA) } else { Relative(MANTISSA) })
        }
        ["rcp", "approx"] => one(|x, _| 1.0 / x, |_| Ulps(1.0)),
        ["sqrt", "approx"] => one(|x, _| x.sqrt(), |_| Relative(MANTISSA / 2.0)),
        ["rsqrt", "approx"] => one(|x, _| 1.0 / x.sqrt(), |_| Relative(ROOT)),
        ["sin", "approx"] => one(|x, _| x.sin(), turned),
        ["cos", "approx"] => one(|x, _| x.cos(), turned),
        ["tanh", "approx"] => one(|x, _| x.tanh(), |_| Relative(1.0 / 2048.0)),
        ["div", "approx" | "full"] => Some((2, Approximate { function: |x, y| x / y, error: |_| Ulps(2.0), flushes })),
        _ => None,
    }
}

/// Error of sines and cosines: 2^-20.5 within two rotations, 2^-14.7 within a hundred half rotations; the manual
/// guarantees nothing beyond.
fn turned(x: f64) -> ErrorBound {
    use std::f64::consts::PI;
    Absolute(if x.abs() <= 2.0 * PI { 6.74e-7 } else { 3.76e-5 })
}

impl Approximate {
    pub fn of(&self, a: f32, b: f32, seed: u64) -> f32 {
        let flush = |x: f32| if self.flushes && x.is_subnormal() { 0.0f32.copysign(x) } else { x };
        let (a, b) = (flush(a), flush(b));
        let exact = (self.function)(a as f64, b as f64);
        let nearest = exact as f32;
        let fixed = a == 0.0 || !a.is_finite() || nearest == 0.0 || !nearest.is_finite();
        if fixed {
            return flush(nearest);
        }
        // Units in the result's last place: 2^-23 of its power of two, and at least the smallest subnormal.
        let place = f32::from_bits((nearest.to_bits() & 0x7f80_0000).max(1 << 23)) as f64 / (1 << 23) as f64;
        let most = match (self.error)(a as f64) {
            Ulps(n) => n * place,
            Relative(part) => part * exact.abs(),
            Absolute(error) => error,
        };
        // Rounding contributes up to half a unit of it.
        let moved = exact + (most - place / 2.0).max(0.0) * draw(a.to_bits(), b.to_bits(), seed);
        flush(moved as f32)
    }
}

/// From -1 to 1.
fn draw(a: u32, b: u32, seed: u64) -> f64 {
    finalize(((b as u64) << 32 | a as u64) ^ seed.wrapping_mul(GAMMA)) as i64 as f64 / (1u64 << 63) as f64
}
