//! Where the operands of a product are, in cuBLASLt's terms. Never dereferences an address.
use crate::gpu::driver::ScaledGemm;
use crate::ops::{Epilogue, GemmShape};
use crate::{View, ViewMut};
use cudarc::cublaslt::sys::cublasLtEpilogue_t as Follows;
use cudarc::driver::sys::CUdeviceptr;
use flatshard_base::DType;
use flatshard_base::fp8::Fp8;

/// cuBLASLt does not benefit from larger alignments.
pub(super) const ALIGNED: u32 = 256;

/// Addresses of a product's operands.
#[derive(Clone, Copy)]
pub(super) struct Operands {
    pub a: CUdeviceptr,
    pub b: CUdeviceptr,
    pub c: CUdeviceptr,
    pub inputs: DType,
    pub output: DType,
    pub then: Then,
    pub scaled: Option<Scaled>,
}

/// Operands are bytes in FP8: A in `format`, B in E4M3. Addresses of their scales.
#[derive(Clone, Copy)]
pub(super) struct Scaled {
    pub format: Fp8,
    pub a: CUdeviceptr,
    pub b: CUdeviceptr,
}

impl Operands {
    pub(super) fn of(a: View, b: View, c: &ViewMut, then: Then) -> Operands {
        let (at, out) = (|view: View| view.address() as CUdeviceptr, c.as_view());
        Operands { a: at(a), b: at(b), c: at(out), inputs: a.dtype(), output: out.dtype(), then, scaled: None }
    }
    pub(super) fn of_scaled(ScaledGemm { format, a, b, c, then, .. }: &ScaledGemm) -> Operands {
        let [of_a, of_b] = [a, b].map(|x| x.scales.address() as CUdeviceptr);
        let scaled = Some(Scaled { format: *format, a: of_a, b: of_b });
        Operands { scaled, ..Operands::of(a.bytes, b.bytes, c, Then::of(then)) }
    }
}

/// The epilogue in cuBLASLt's terms, with the addresses of its operands (0: none).
#[derive(Clone, Copy)]
pub(super) struct Then {
    pub follows: Follows,
    pub bias: CUdeviceptr,
    pub z: CUdeviceptr,
    pub residual: CUdeviceptr,
}

impl Default for Then {
    fn default() -> Then {
        Then { follows: Follows::CUBLASLT_EPILOGUE_DEFAULT, bias: 0, z: 0, residual: 0 }
    }
}

impl Then {
    pub(super) fn of(epilogue: &Epilogue) -> Then {
        let at = |view: &Option<View>| view.map_or(0, |view| view.address() as CUdeviceptr);
        let none = Then::default();
        match epilogue {
            Epilogue::Sum { bias, residual } => {
                let follows = if bias.is_some() { Follows::CUBLASLT_EPILOGUE_BIAS } else { none.follows };
                Then { follows, bias: at(bias), residual: at(residual), ..none }
            }
            Epilogue::Gelu { bias, z } => {
                let follows = match bias {
                    Some(_) => Follows::CUBLASLT_EPILOGUE_GELU_AUX_BIAS,
                    None => Follows::CUBLASLT_EPILOGUE_GELU_AUX,
                };
                Then { follows, bias: at(bias), z: z.address() as CUdeviceptr, ..none }
            }
            Epilogue::GeluBackward { z, .. } => {
                Then { follows: Follows::CUBLASLT_EPILOGUE_DGELU, z: z.address() as CUdeviceptr, ..none }
            }
        }
    }
    /// Whether cuBLASLt accepts the operands: rows of z must be multiples of 8 elements, aligned to 16 bytes. Its GELU
    /// is not precise enough for f32: on an H200 its error was four times that of naive code.
    pub(super) fn fits(&self, shape: &GemmShape, output: DType) -> bool {
        self.z == 0 || output != DType::F32 && shape.n.is_multiple_of(8) && self.z.is_multiple_of(16)
    }
    pub(super) fn plain(&self) -> bool {
        self.follows == Follows::CUBLASLT_EPILOGUE_DEFAULT && self.residual == 0
    }
}

/// The largest power of two that divides the address, at most [`ALIGNED`].
pub(super) fn alignment(address: CUdeviceptr) -> u32 {
    1 << address.trailing_zeros().min(ALIGNED.trailing_zeros())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The values of cublasLt.h; and shapes it does not accept are not requested.
    #[test]
    fn what_follows_a_product_as_the_library_names_it() {
        use crate::{Device, cpu::CpuDevice};
        use flatshard_base::{Category, Meter};
        let cpu = CpuDevice::new(Meter::default());
        let buf = |n: usize| cpu.alloc(DType::Bf16, n, Category::Other).unwrap();
        let (bias, residual, mut z, mut product) = (buf(16), buf(32), buf(48), buf(32));
        let (some, x) = (Some(bias.view()), residual.view());
        let code = |epilogue: Epilogue| {
            let then = Then::of(&epilogue);
            (then.follows as u32, then.bias != 0, then.z != 0, then.residual != 0)
        };
        assert_eq!(code(Epilogue::Sum { bias: None, residual: None }), (1, false, false, false));
        assert_eq!(code(Epilogue::Sum { bias: None, residual: Some(x) }), (1, false, false, true));
        assert_eq!(code(Epilogue::Sum { bias: some, residual: Some(x) }), (4, true, false, true));
        assert_eq!(code(Epilogue::Gelu { bias: None, z: z.view_mut() }), (32 + 128, false, true, false));
        assert_eq!(code(Epilogue::Gelu { bias: some, z: z.view_mut() }), (4 + 32 + 128, true, true, false));
        let backward = Epilogue::GeluBackward { z: x, product: product.view_mut() };
        assert_eq!(code(backward), (64 + 128, false, true, false));
        let fits = |dtype: DType, n: usize, from: usize| {
            let z = z.view().slice(from..48);
            Then { z: z.address() as CUdeviceptr, ..Then::default() }.fits(&GemmShape::nt(2, n, 8), dtype)
        };
        let of_bf16 = [(16, 0), (12, 0), (16, 4), (16, 8)].map(|(n, from)| fits(DType::Bf16, n, from));
        assert_eq!((of_bf16, fits(DType::F32, 16, 0)), ([true, false, false, true], false));
    }

    #[test]
    fn alignment_is_that_of_the_address_up_to_256_bytes() {
        assert_eq!([0x7f00_0000_0000u64, 0x1010, 0x1002, 0x1101].map(alignment), [256, 16, 2, 1]);
    }
}
