//! The lanes of a warp, and instructions where a lane's result is a function of its own operands: the table from
//! mnemonic to function. A modifier that is not in the table is refused, never ignored. Approximate instructions are in
//! approximate.rs. Plain `add` and `mul` are not contracted, which ptxas may do unless a kernel says `.rn`.
use half::{bf16, f16};

pub const LANES: usize = 32;

/// The lanes of a mask.
pub fn lanes(mask: u32) -> impl Iterator<Item = usize> {
    let mut left = mask;
    std::iter::from_fn(move || {
        let lane = left.trailing_zeros() as usize;
        left &= left.wrapping_sub(1);
        (lane < LANES).then_some(lane)
    })
}

/// A register of all lanes.
pub type LaneValues = [u64; LANES];

/// Operands as 64-bit register slots; missing ones are 0. Results fill the slot: 32-bit ones leave the upper half 0.
/// Computes all lanes, which the compiler does with vectors; an inactive lane's result is not used.
pub type LaneFn = fn([&LaneValues; 3], &mut LaneValues);

/// A [`LaneFn`] from what one lane computes.
macro_rules! lane {
    (|$a:pat_param, $b:pat_param, $c:pat_param| $result:expr) => {
        |[a, b, c], to| {
            let one = |$a: u64, $b: u64, $c: u64| -> u64 { $result };
            to.iter_mut().enumerate().for_each(|(lane, to)| *to = one(a[lane], b[lane], c[lane]));
        }
    };
}
pub(super) use lane;

fn u(x: u64) -> u32 {
    x as u32
}
fn s(x: u64) -> i32 {
    x as i32
}
fn f(x: u64) -> f32 {
    f32::from_bits(x as u32)
}
fn d(x: u64) -> f64 {
    f64::from_bits(x)
}
fn from_s(x: i32) -> u64 {
    x as u32 as u64
}
fn from_f(x: f32) -> u64 {
    x.to_bits() as u64
}
fn from_d(x: f64) -> u64 {
    x.to_bits()
}
/// To nearest even; every NaN becomes the hardware's.
pub fn to_bf16(x: f32) -> u64 {
    if x.is_nan() { 0x7fff } else { bf16::from_f32(x).to_bits() as u64 }
}
pub fn to_f16(x: f32) -> u64 {
    if x.is_nan() { 0x7fff } else { f16::from_f32(x).to_bits() as u64 }
}
pub fn from_bf16(x: u64) -> f32 {
    bf16::from_bits(x as u16).to_f32()
}
pub fn from_f16(x: u64) -> f32 {
    f16::from_bits(x as u16).to_f32()
}
fn pair_bf16(a: u64, b: u64, c: u64, op: fn(f32, f32, f32) -> f32) -> u64 {
    let half = |shift: u32| to_bf16(op(from_bf16(a >> shift), from_bf16(b >> shift), from_bf16(c >> shift)));
    half(0) | half(16) << 16
}
/// `bfe.u32`: position and length are the low bytes of their operands.
fn extract(x: u32, position: u32, length: u32) -> u32 {
    let (position, length) = (position & 255, length & 255);
    let field = x.checked_shr(position).unwrap_or(0);
    if length > 31 { field } else { field & ((1 << length) - 1) }
}
/// `prmt.b32`: a nibble of `control` chooses each byte; its highest bit replicates the sign.
fn permute(a: u32, b: u32, control: u32) -> u32 {
    let bytes = (b as u64) << 32 | a as u64;
    (0..4).fold(0, |out, i| {
        let nibble = control >> (4 * i) & 15;
        let byte = (bytes >> (8 * (nibble & 7))) as u8;
        let byte = if nibble & 8 != 0 { ((byte as i8) >> 7) as u8 } else { byte };
        out | (byte as u32) << (8 * i)
    })
}

/// The number of sources and the function.
pub fn lane_op(parts: &[&str]) -> Option<(usize, LaneFn)> {
    unary(parts).map(|f| (1, f)).or(binary(parts).map(|f| (2, f))).or(ternary(parts).map(|f| (3, f)))
}

fn unary(parts: &[&str]) -> Option<LaneFn> {
    let function: LaneFn = match parts {
        ["mov", "b16" | "u16" | "s16"] => lane!(|a, _, _| a as u16 as u64),
        ["mov", "b32" | "u32" | "s32" | "f32"] => lane!(|a, _, _| u(a) as u64),
        ["mov", "b64" | "u64" | "s64" | "f64" | "pred"] => lane!(|a, _, _| a),
        // Shared memory and parameters have the same addresses in generic space.
        ["cvta", "to", "global" | "shared" | "param", "u64"] => lane!(|a, _, _| a),
        ["cvta", "global" | "shared" | "param", "u64"] => lane!(|a, _, _| a),
        ["not", "b32"] => lane!(|a, _, _| !u(a) as u64),
        ["not", "b64"] => lane!(|a, _, _| !a),
        ["not", "pred"] => lane!(|a, _, _| a ^ 1),
        ["neg", "s32"] => lane!(|a, _, _| from_s(s(a).wrapping_neg())),
        ["neg", "f32"] => lane!(|a, _, _| from_f(-f(a))),
        ["neg", "f64"] => lane!(|a, _, _| from_d(-d(a))),
        ["abs", "s32"] => lane!(|a, _, _| from_s(s(a).wrapping_abs())),
        ["abs", "f32"] => lane!(|a, _, _| from_f(f(a).abs())),
        ["abs", "f64"] => lane!(|a, _, _| from_d(d(a).abs())),
        ["popc", "b32"] => lane!(|a, _, _| u(a).count_ones() as u64),
        ["clz", "b32"] => lane!(|a, _, _| u(a).leading_zeros() as u64),
        ["brev", "b32"] => lane!(|a, _, _| u(a).reverse_bits() as u64),
        ["rcp", "rn", "f32"] => lane!(|a, _, _| from_f(1.0 / f(a))),
        ["sqrt", "rn", "f32"] => lane!(|a, _, _| from_f(f(a).sqrt())),
        ["sqrt", "rn", "f64"] => lane!(|a, _, _| from_d(d(a).sqrt())),
        ["cvt", "rn", "bf16", "f32"] => lane!(|a, _, _| to_bf16(f(a))),
        ["cvt", "f32", "bf16"] => lane!(|a, _, _| from_f(from_bf16(a))),
        ["cvt", "rn", "f16", "f32"] => lane!(|a, _, _| to_f16(f(a))),
        ["cvt", "f32", "f16"] => lane!(|a, _, _| from_f(from_f16(a))),
        ["cvt", "f64", "f32"] => lane!(|a, _, _| from_d(f(a) as f64)),
        ["cvt", "rn", "f32", "f64"] => lane!(|a, _, _| from_f(d(a) as f32)),
        ["cvt", "rn", "f32", "u32"] => lane!(|a, _, _| from_f(u(a) as f32)),
        ["cvt", "rn", "f32", "s32"] => lane!(|a, _, _| from_f(s(a) as f32)),
        ["cvt", "rn", "f64", "u64"] => lane!(|a, _, _| from_d(a as f64)),
        ["cvt", "rn", "f32", "u64"] => lane!(|a, _, _| from_f(a as f32)),
        ["cvt", "rzi", "u32", "f32"] => lane!(|a, _, _| f(a) as u32 as u64),
        ["cvt", "rzi", "s32", "f32"] => lane!(|a, _, _| from_s(f(a) as i32)),
        ["cvt", "rni", "s32", "f32"] => lane!(|a, _, _| from_s(f(a).round_ties_even() as i32)),
        ["cvt", "rzi", "u64", "f64"] => lane!(|a, _, _| d(a) as u64),
        ["cvt", "u64", "u32"] | ["cvt", "u32", "u64"] => lane!(|a, _, _| u(a) as u64),
        ["cvt", "s64", "s32"] => lane!(|a, _, _| s(a) as i64 as u64),
        ["cvt", "u32", "u16"] | ["cvt", "u16", "u32"] => lane!(|a, _, _| a as u16 as u64),
        _ => return None,
    };
    Some(function)
}

fn binary(parts: &[&str]) -> Option<LaneFn> {
    if let ["setp", comparison, kind] = parts {
        return compare(comparison, kind);
    }
    let function: LaneFn = match parts {
        ["add", "u32" | "s32"] => lane!(|a, b, _| u(a).wrapping_add(u(b)) as u64),
        ["add", "u64" | "s64"] => lane!(|a, b, _| a.wrapping_add(b)),
        ["add", "f32"] | ["add", "rn", "f32"] => lane!(|a, b, _| from_f(f(a) + f(b))),
        ["add", "f64"] | ["add", "rn", "f64"] => lane!(|a, b, _| from_d(d(a) + d(b))),
        ["sub", "u32" | "s32"] => lane!(|a, b, _| u(a).wrapping_sub(u(b)) as u64),
        ["sub", "u64" | "s64"] => lane!(|a, b, _| a.wrapping_sub(b)),
        ["sub", "f32"] | ["sub", "rn", "f32"] => lane!(|a, b, _| from_f(f(a) - f(b))),
        ["sub", "f64"] | ["sub", "rn", "f64"] => lane!(|a, b, _| from_d(d(a) - d(b))),
        ["mul", "lo", "u32" | "s32"] => lane!(|a, b, _| u(a).wrapping_mul(u(b)) as u64),
        ["mul", "lo", "u64" | "s64"] => lane!(|a, b, _| a.wrapping_mul(b)),
        ["mul", "hi", "u32"] => lane!(|a, b, _| (u(a) as u64 * u(b) as u64) >> 32),
        ["mul", "wide", "u32"] => lane!(|a, b, _| u(a) as u64 * u(b) as u64),
        ["mul", "wide", "s32"] => lane!(|a, b, _| (s(a) as i64 * s(b) as i64) as u64),
        ["mul", "f32"] | ["mul", "rn", "f32"] => lane!(|a, b, _| from_f(f(a) * f(b))),
        ["mul", "f64"] | ["mul", "rn", "f64"] => lane!(|a, b, _| from_d(d(a) * d(b))),
        ["div", "rn", "f32"] => lane!(|a, b, _| from_f(f(a) / f(b))),
        ["div", "rn", "f64"] => lane!(|a, b, _| from_d(d(a) / d(b))),
        // Division by zero gives all ones and the dividend, like the hardware's sequence.
        ["div", "u32"] => lane!(|a, b, _| u(a).checked_div(u(b)).unwrap_or(!0) as u64),
        ["rem", "u32"] => lane!(|a, b, _| u(a).checked_rem(u(b)).unwrap_or(u(a)) as u64),
        ["div", "u64"] => lane!(|a, b, _| a.checked_div(b).unwrap_or(!0)),
        ["rem", "u64"] => lane!(|a, b, _| a.checked_rem(b).unwrap_or(a)),
        ["min", "u32"] => lane!(|a, b, _| u(a).min(u(b)) as u64),
        ["max", "u32"] => lane!(|a, b, _| u(a).max(u(b)) as u64),
        ["min", "s32"] => lane!(|a, b, _| from_s(s(a).min(s(b)))),
        ["max", "s32"] => lane!(|a, b, _| from_s(s(a).max(s(b)))),
        ["min", "u64"] => lane!(|a, b, _| a.min(b)),
        ["max", "u64"] => lane!(|a, b, _| a.max(b)),
        // A number wins over a NaN.
        ["min", "f32"] => lane!(|a, b, _| from_f(f(a).min(f(b)))),
        ["max", "f32"] => lane!(|a, b, _| from_f(f(a).max(f(b)))),
        ["and", "b32"] => lane!(|a, b, _| u(a & b) as u64),
        ["or", "b32"] => lane!(|a, b, _| u(a | b) as u64),
        ["xor", "b32"] => lane!(|a, b, _| u(a ^ b) as u64),
        ["and", "b64" | "pred"] => lane!(|a, b, _| a & b),
        ["or", "b64" | "pred"] => lane!(|a, b, _| a | b),
        ["xor", "b64" | "pred"] => lane!(|a, b, _| a ^ b),
        // Shifts saturate: by the width or more gives 0, or the sign.
        ["shl", "b32"] => lane!(|a, b, _| u(a).checked_shl(u(b)).unwrap_or(0) as u64),
        ["shr", "b32" | "u32"] => lane!(|a, b, _| u(a).checked_shr(u(b)).unwrap_or(0) as u64),
        ["shr", "s32"] => lane!(|a, b, _| from_s(s(a) >> u(b).min(31))),
        ["shl", "b64"] => lane!(|a, b, _| a.checked_shl(u(b)).unwrap_or(0)),
        ["shr", "b64" | "u64"] => lane!(|a, b, _| a.checked_shr(u(b)).unwrap_or(0)),
        ["shr", "s64"] => lane!(|a, b, _| (a as i64 >> u(b).min(63)) as u64),
        // The first source is the upper half.
        ["cvt", "rn", "bf16x2", "f32"] => lane!(|a, b, _| to_bf16(f(a)) << 16 | to_bf16(f(b))),
        ["cvt", "rn", "f16x2", "f32"] => lane!(|a, b, _| to_f16(f(a)) << 16 | to_f16(f(b))),
        _ => return None,
    };
    Some(function)
}

fn ternary(parts: &[&str]) -> Option<LaneFn> {
    let function: LaneFn = match parts {
        ["mad", "lo", "u32" | "s32"] => lane!(|a, b, c| u(a).wrapping_mul(u(b)).wrapping_add(u(c)) as u64),
        ["mad", "lo", "u64" | "s64"] => lane!(|a, b, c| a.wrapping_mul(b).wrapping_add(c)),
        ["mad", "wide", "u32"] => lane!(|a, b, c| (u(a) as u64 * u(b) as u64).wrapping_add(c)),
        ["mad", "wide", "s32"] => lane!(|a, b, c| ((s(a) as i64 * s(b) as i64) as u64).wrapping_add(c)),
        ["fma", "rn", "f32"] => lane!(|a, b, c| from_f(f(a).mul_add(f(b), f(c)))),
        ["fma", "rn", "f64"] => lane!(|a, b, c| from_d(d(a).mul_add(d(b), d(c)))),
        ["fma", "rn", "bf16x2"] => lane!(|a, b, c| pair_bf16(a, b, c, f32::mul_add)),
        ["selp", "b32" | "u32" | "s32" | "f32"] => lane!(|a, b, p| u(if p != 0 { a } else { b }) as u64),
        ["selp", "b64" | "u64" | "s64" | "f64"] => lane!(|a, b, p| if p != 0 { a } else { b }),
        ["bfe", "u32"] => lane!(|a, b, c| extract(u(a), u(b), u(c)) as u64),
        ["prmt", "b32"] => lane!(|a, b, c| permute(u(a), u(b), u(c)) as u64),
        _ => return None,
    };
    Some(function)
}

/// `setp`: ordered comparisons are false if an operand is NaN; `neu` and `nan` are the unordered ones modeled.
fn compare(comparison: &str, kind: &str) -> Option<LaneFn> {
    macro_rules! choose {
        ($read:expr) => {
            match comparison {
                "eq" => lane!(|a, b, _| ($read(a) == $read(b)) as u64),
                "ne" => lane!(|a, b, _| ($read(a) != $read(b)) as u64),
                "lt" => lane!(|a, b, _| ($read(a) < $read(b)) as u64),
                "le" => lane!(|a, b, _| ($read(a) <= $read(b)) as u64),
                "gt" => lane!(|a, b, _| ($read(a) > $read(b)) as u64),
                "ge" => lane!(|a, b, _| ($read(a) >= $read(b)) as u64),
                _ => return None,
            }
        };
    }
    let function: LaneFn = match (kind, comparison) {
        ("u32" | "b32", _) => choose!(u),
        ("s32", _) => choose!(s),
        ("u64" | "b64", _) => choose!(|x: u64| x),
        ("s64", _) => choose!(|x: u64| x as i64),
        // Rust's != is unordered.
        ("f32", "ne") => lane!(|a, b, _| (f(a) < f(b) || f(a) > f(b)) as u64),
        ("f32", "neu") => lane!(|a, b, _| (f(a) != f(b)) as u64),
        ("f32", "nan") => lane!(|a, b, _| (f(a).is_nan() || f(b).is_nan()) as u64),
        ("f32", _) => choose!(f),
        ("f64", "ne") => lane!(|a, b, _| (d(a) < d(b) || d(a) > d(b)) as u64),
        ("f64", "neu") => lane!(|a, b, _| (d(a) != d(b)) as u64),
        ("f64", _) => choose!(d),
        _ => return None,
    };
    Some(function)
}
