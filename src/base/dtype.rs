//! Element types, and the only place where one becomes another. Never touches buffers.
use half::bf16;
use std::fmt;

#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash, PartialOrd, Ord)]
pub enum DType {
    F32,
    Bf16,
    /// Exact partial sums of the gradient norm and of the loss.
    F64,
    /// Token ids, positions, `cu_seqlens`.
    U32,
    /// Targets: -100 marks a token without loss.
    I32,
    U8,
}

impl DType {
    /// Bytes of one element.
    pub const fn size(self) -> usize {
        match self {
            DType::F64 => 8,
            DType::F32 | DType::U32 | DType::I32 => 4,
            DType::Bf16 => 2,
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
impl Elem for f32 {
    const DTYPE: DType = DType::F32;
}
impl Elem for bf16 {
    const DTYPE: DType = DType::Bf16;
}
impl Elem for f64 {
    const DTYPE: DType = DType::F64;
}
impl Elem for u32 {
    const DTYPE: DType = DType::U32;
}
impl Elem for i32 {
    const DTYPE: DType = DType::I32;
}
impl Elem for u8 {
    const DTYPE: DType = DType::U8;
}

/// A floating type that layers compute with: stored as itself, computed in f32.
pub trait Float: Elem + PartialOrd {
    fn to_f32(self) -> f32;
    /// To nearest, ties to even.
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
    /// Branch-free, so that loops over it vectorise; a NaN stays a NaN (its top mantissa bit is set).
    #[inline(always)]
    fn from_f32(x: f32) -> bf16 {
        let bits = x.to_bits();
        let rounded = (bits.wrapping_add(0x7fff + (bits >> 16 & 1)) >> 16) as u16;
        let nan = (bits >> 16) as u16 | 0x40;
        bf16::from_bits(if x.is_nan() { nan } else { rounded })
    }
}
