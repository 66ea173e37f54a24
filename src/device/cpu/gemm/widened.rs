//! bf16 for products in f32: packing converts it exactly, and storing rounds by integer instructions. For CPUs without
//! AVX512-BF16, or where it is slower than multiply-adds. Never flushes subnormals.
use bytemuck::{Pod, Zeroable};
use flatshard_base::dtype::Float;
use flatshard_base::{DType, Elem};
use half::bf16;

#[derive(Clone, Copy, PartialEq, PartialOrd, Zeroable, Pod)]
#[repr(transparent)]
pub(super) struct Widened(bf16);

impl Elem for Widened {
    const DTYPE: DType = DType::Bf16;
}
impl Float for Widened {
    #[inline(always)]
    fn to_f32(self) -> f32 {
        Float::to_f32(self.0)
    }
    #[inline(always)]
    fn from_f32(x: f32) -> Widened {
        Widened(Float::from_f32(x))
    }
}
