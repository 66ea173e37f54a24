//! Element types, and the only place that converts between them. Never touches buffers.
use half::{bf16, f16};
use std::fmt;

#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Hash, PartialOrd, Ord)]
pub enum DType {
    #[default]
    F32,
    Bf16,
    /// IEEE binary16: finite up to 65504, normal down to 2^-14.
    F16,
    /// Exact partial sums of the gradient norm and the loss.
    F64,
    /// Token ids, positions, `cu_seqlens`.
    U32,
    /// Targets: -100 marks a token that is not trained on.
    I32,
    U8,
}

impl DType {
    /// Bytes per element.
    pub const fn size(self) -> usize {
        match self {
            DType::F64 => 8,
            DType::F32 | DType::U32 | DType::I32 => 4,
            DType::Bf16 | DType::F16 => 2,
            DType::U8 => 1,
        }
    }
    pub const fn name(self) -> &'static str {
        match self {
            DType::F64 => "f64",
            DType::F32 => "f32",
            DType::U32 => "u32",
            DType::I32 => "i32",
            DType::Bf16 => "bf16",
            DType::F16 => "f16",
            DType::U8 => "u8",
        }
    }
}
impl fmt::Display for DType {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// A Rust type that a buffer can hold.
pub trait Elem: bytemuck::Pod + Send + Sync + 'static {
    const DTYPE: DType;
}
macro_rules! elem {
    ($($rust:ty: $dtype:ident),*) => { $(impl Elem for $rust { const DTYPE: DType = DType::$dtype; })* };
}
elem!(f32: F32, bf16: Bf16, f16: F16, f64: F64, u32: U32, i32: I32, u8: U8);

/// A floating-point type that layers compute with: stored as is, computed in f32.
pub trait Float: Elem + PartialOrd {
    fn to_f32(self) -> f32;
    /// Rounds to nearest, ties to even.
    fn from_f32(x: f32) -> Self;
}
impl Float for f32 {
    #[inline(always)]
    fn to_f32(self) -> f32 {
        self
    }
    #[inline(always)]
    fn from_f32(x: f32) -> f32 {
        x
    }
}
impl Float for bf16 {
    #[inline(always)]
    fn to_f32(self) -> f32 {
        f32::from_bits((self.to_bits() as u32) << 16)
    }
    /// Branch-free so that loops over it vectorize, and in 32 bits until the end, so that they narrow once. A NaN stays
    /// a NaN (its top mantissa bit is set).
    #[inline(always)]
    fn from_f32(x: f32) -> bf16 {
        let bits = x.to_bits();
        let rounded = bits.wrapping_add(0x7fff + (bits >> 16 & 1));
        let chosen = if x.is_nan() { bits | 0x40_0000 } else { rounded };
        bf16::from_bits((chosen >> 16) as u16)
    }
}
impl Float for f16 {
    /// Branch-free so that loops over it vectorize. Normal numbers have their exponent rebased by 127 - 15. Subnormals
    /// become 2^-14 (1 + m), and subtracting 2^-14 is exact.
    #[inline(always)]
    fn to_f32(self) -> f32 {
        const MOVED: u32 = (127 - 15) << 23;
        const ONE: u32 = 1 << 23;
        let bits = self.to_bits() as u32;
        let magnitude = (bits & 0x7fff) << 13;
        let exponent = magnitude & (0x7c00 << 13);
        let normal = magnitude + MOVED;
        // Infinities and NaNs get the largest exponent.
        let special = magnitude + MOVED + ((128 - 16) << 23);
        let subnormal = (f32::from_bits(normal + ONE) - f32::from_bits(MOVED + ONE)).to_bits();
        let finite = if exponent == 0 { subnormal } else { normal };
        let value = if exponent == 0x7c00 << 13 { special } else { finite };
        f32::from_bits(value | (bits & 0x8000) << 16)
    }
    /// Branch-free. 65520 and above become infinite; a NaN stays a NaN (its top mantissa bit is set). Below 2^-14,
    /// adding 0.5, whose last bit is 2^-24, rounds to the subnormals.
    #[inline(always)]
    fn from_f32(x: f32) -> f16 {
        const HALF: u32 = 126 << 23;
        let bits = x.to_bits();
        let magnitude = bits & 0x7fff_ffff;
        let subnormal = (f32::from_bits(magnitude) + f32::from_bits(HALF)).to_bits().wrapping_sub(HALF);
        let normal = magnitude.wrapping_sub((127 - 15) << 23).wrapping_add(0xfff + (magnitude >> 13 & 1)) >> 13;
        let finite = if magnitude < 113 << 23 { subnormal } else { normal };
        let special = if magnitude > 0x7f80_0000 { 0x7e00 } else { 0x7c00 };
        let value = if magnitude >= (127 + 16) << 23 { special } else { finite };
        f16::from_bits((value | (bits >> 16 & 0x8000)) as u16)
    }
}

/// A type in which the optimizer stores its state.
pub trait Stored: Float {
    /// Rounds stochastically by the upper half of `word`: see [Note: stochastic rounding] in `device/ops/optim.rs`.
    fn store(x: f32, word: u32) -> Self;
}
impl Stored for f32 {
    #[inline(always)]
    fn store(x: f32, _: u32) -> f32 {
        x
    }
}
impl Stored for bf16 {
    /// Infinities and NaNs have no neighbors.
    #[inline(always)]
    fn store(x: f32, word: u32) -> bf16 {
        let bits = x.to_bits();
        let moved = bits.wrapping_add(word >> 16);
        let chosen = if bits & 0x7f80_0000 == 0x7f80_0000 { bits } else { moved };
        bf16::from_bits((if x.is_nan() { bits | 0x40_0000 } else { chosen } >> 16) as u16)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Over all 16-bit words: only the two neighbors occur, in proportion, and what bf16 has stays.
    #[test]
    fn bf16_is_stored_without_bias() {
        let kept = |x: f32| (0..=u16::MAX).map(move |word| bf16::store(x, (word as u32) << 16 | 0xffff));
        for x in [0.0, -0.0, 1.0, -1.5, f32::MIN_POSITIVE, f32::INFINITY, f32::NEG_INFINITY] {
            assert!(kept(x).all(|y| y.to_f32().to_bits() == x.to_bits()), "{x} stays");
        }
        assert!(
            [f32::NAN, f32::from_bits(0x7f80_0001), f32::from_bits(u32::MAX)]
                .iter()
                .all(|x| kept(*x).all(bf16::is_nan))
        );
        for x in [1.0 + 1.0 / 1024.0, -3.341_592_7, 1e-40, 6.3e-8, -2e38f32] {
            let (near, bits) = (x.to_bits() & 0xffff_0000, x.to_bits() & 0xffff);
            let far = kept(x).filter(|y| (y.to_bits() as u32) << 16 != near).inspect(|y| {
                assert_eq!((y.to_bits() as u32) << 16, near + 0x1_0000, "{x}: not a neighbor");
            });
            assert_eq!(far.count(), bits as usize, "{x}: away from 0 in {bits} of 65536 cases");
        }
    }

    /// Compares with the `half` crate, which uses the CPU's conversion instructions where available.
    #[test]
    fn f16_converts_as_ieee_demands() {
        for bits in 0..=u16::MAX {
            let x = f16::from_bits(bits);
            let (got, want) = (Float::to_f32(x), x.to_f32());
            assert!(got.to_bits() == want.to_bits() || got.is_nan() && want.is_nan(), "{bits:#x}: {got}, {want}");
        }
        // Every pattern of the upper bits, combined with the lower bits that decide ties.
        for upper in 0..=u16::MAX as u32 {
            for lower in [0, 1, 0xfff, 0x1000, 0x1001, 0x2fff, 0x3000, 0x7fff, 0x8000, 0xefff, 0xf000, 0xffff] {
                let x = f32::from_bits(upper << 16 | lower);
                let (got, want) = (<f16 as Float>::from_f32(x), f16::from_f32(x));
                assert!(got.to_bits() == want.to_bits() || got.is_nan() && want.is_nan(), "{x:e}: {got}, {want}");
            }
        }
    }
}
