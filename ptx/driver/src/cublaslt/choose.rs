//! Which problems have an algorithm, from the tables of the cuBLAS documentation (cublasLtMatmul, "regular" matrices),
//! the comments of cublasLt.h 13.4, and the limits known to nvmath-python 0.6. Anything that none of them allows is
//! refused.

pub const F32: i32 = 0;
pub const F16: i32 = 2;
pub const BF16: i32 = 14;
pub const E4M3: i32 = 28;
pub const E5M2: i32 = 29;

/// `cublasLtMatmulMatrixScale_t`: none; a scale for 128 elements along k of each row; for blocks of 128 x 128.
pub const SCALAR: i32 = 0;
pub const VEC128: i32 = 4;
pub const BLK128X128: i32 = 5;
/// The only architecture with scales of blocks of 128, and the first version.
pub const SCALED: (u32, usize) = (90, 120_900);

/// `cublasComputeType_t`: f32, and f32 through the tensor cores in tf32.
pub const COMPUTE_32F: i32 = 68;
pub const COMPUTE_32F_FAST_TF32: i32 = 77;

/// `cublasLtEpilogue_t`.
pub const DEFAULT: u32 = 1;
pub const BIAS: u32 = 4;
pub const GELU_AUX: u32 = 160;
pub const GELU_AUX_BIAS: u32 = 164;
pub const DGELU: u32 = 192;

/// Bytes of an element; `None` for types that these products do not support.
pub fn width(dtype: i32) -> Option<usize> {
    match dtype {
        F32 => Some(4),
        F16 | BF16 => Some(2),
        E4M3 | E5M2 => Some(1),
        _ => None,
    }
}

#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub struct MatrixLayout {
    pub dtype: i32,
    pub rows: u64,
    pub columns: u64,
    pub ld: i64,
}

/// A product as its descriptors define it.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Problem {
    pub compute: i32,
    pub scale: i32,
    pub transposed: [bool; 2],
    pub epilogue: u32,
    pub aux_ld: i64,
    /// How A and B are scaled.
    pub scales: [i32; 2],
    /// A, B, C, D.
    pub layouts: [MatrixLayout; 4],
}

/// Addresses in a descriptor.
#[derive(Clone, Copy, Debug, Default)]
pub struct OperandsApart {
    pub bias: u64,
    pub aux: u64,
    /// The scales of A and B.
    pub scales: [u64; 2],
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Refusal {
    /// Inconsistent descriptors: CUBLAS_STATUS_INVALID_VALUE.
    Invalid(&'static str),
    /// No algorithm: CUBLAS_STATUS_NOT_SUPPORTED.
    Unsupported(&'static str),
}

impl Problem {
    /// m, n, k of D (m, n).
    pub fn shape(&self) -> (u64, u64, u64) {
        let [a, _, _, d] = self.layouts;
        (d.rows, d.columns, if self.transposed[0] { a.rows } else { a.columns })
    }
    pub fn has_bias(&self) -> bool {
        matches!(self.epilogue, BIAS | GELU_AUX_BIAS)
    }
    pub fn has_aux(&self) -> bool {
        matches!(self.epilogue, GELU_AUX | GELU_AUX_BIAS | DGELU)
    }

    pub fn is_fp8(&self) -> bool {
        self.layouts[..2].iter().any(|l| matches!(l.dtype, E4M3 | E5M2))
    }
    /// From "To use tensor- or block-scaled FP8 kernels" (cublasLtMatmul) and "128-element 1D and 128x128 2D Block
    /// Scaling For FP8 Data Types". The limit on m is that of the library's log: "M must be divisible by 16".
    fn check_fp8(&self, scales: [u64; 2]) -> Result<(), Refusal> {
        use Refusal::{Invalid, Unsupported};
        let ((m, n, k), [a, b, c, d]) = (self.shape(), self.layouts);
        let types = (a.dtype, b.dtype);
        if !matches!(types, (E4M3, E4M3) | (E4M3, E5M2) | (E5M2, E4M3)) || !matches!(d.dtype, BF16 | F16 | F32) {
            return Err(Unsupported("the combination of types is not supported"));
        }
        if (self.compute, self.scale) != (COMPUTE_32F, F32) || self.transposed != [true, false] {
            return Err(Unsupported("FP8 is computed in f32, with A transposed and B not"));
        }
        let width = |l: MatrixLayout| width(l.dtype).unwrap_or(1) as i64;
        let rows = [a, b, c, d].map(|l| l.ld * width(l));
        // The documentation says 4; Transformer Engine asserts 8, "required by cuBLASLt".
        let columns = if self.scales[1] == VEC128 { 8 } else { 4 };
        if m % 16 != 0 || k % 16 != 0 || n % columns != 0 || rows.iter().any(|bytes| bytes % 16 != 0) {
            return Err(Unsupported("m, k or rows are not multiples of 16 bytes, or n is not a multiple of 4 or 8"));
        }
        if self.epilogue == BIAS && d.dtype == F32 {
            return Err(Unsupported("the bias of a result in f32 is read as bf16, unless its type is set"));
        }
        if !matches!(self.scales, [VEC128, VEC128] | [VEC128, BLK128X128] | [BLK128X128, VEC128]) {
            return Err(Unsupported("the combination of scaling modes is not supported"));
        }
        if scales.iter().any(|at| *at == 0 || at % 16 != 0) {
            return Err(Invalid("scales are missing, or not aligned to 16 bytes"));
        }
        match self.epilogue {
            DEFAULT | BIAS => Ok(()),
            _ => Err(Unsupported("the simulated library has no such epilogue for FP8")),
        }
    }

    /// Alignments of what is apart are checked.
    pub fn check(&self, OperandsApart { bias, aux, scales }: OperandsApart) -> Result<(), Refusal> {
        use Refusal::{Invalid, Unsupported};
        let [a, b, c, d] = self.layouts;
        let of = |l: MatrixLayout, transposed: bool| if transposed { (l.columns, l.rows) } else { (l.rows, l.columns) };
        let ((m, k), (k_too, n)) = (of(a, self.transposed[0]), of(b, self.transposed[1]));
        if (k, m, n) != (k_too, d.rows, d.columns) || (c.rows, c.columns) != (d.rows, d.columns) {
            return Err(Invalid("the shapes of A, B, C and D are inconsistent"));
        }
        if m * n * k == 0 {
            return Err(Invalid("a matrix is empty"));
        }
        if self.layouts.iter().any(|l| l.ld < l.rows as i64) {
            return Err(Invalid("a leading dimension is less than the rows"));
        }
        if self.is_fp8() {
            self.check_fp8(scales)?;
        } else if self.scales != [SCALAR; 2] {
            return Err(Unsupported("only FP8 is scaled"));
        }
        // Compute and scale type; A and B; C; bias. C and D always have the same type.
        let types = (self.compute, self.scale, a.dtype, d.dtype);
        let known = matches!(
            types,
            (COMPUTE_32F, F32, F32, F32)
                | (COMPUTE_32F, F32, BF16, BF16 | F32)
                | (COMPUTE_32F, F32, F16, F16 | F32)
                | (COMPUTE_32F_FAST_TF32, F32, F32, F32)
        );
        if !self.is_fp8() && (!known || a.dtype != b.dtype) || c.dtype != d.dtype {
            return Err(Unsupported("the combination of types is not supported"));
        }
        let bytes = width(d.dtype).unwrap_or(1) as u64;
        match self.epilogue {
            DEFAULT | BIAS | GELU_AUX | GELU_AUX_BIAS | DGELU => {}
            _ => return Err(Unsupported("the simulated library does not support this epilogue")),
        }
        if self.has_bias() && (bias == 0 || !bias.is_multiple_of(bytes)) {
            return Err(Invalid("the epilogue's bias is missing or misaligned"));
        }
        if self.has_aux() {
            if aux == 0 || self.aux_ld < m as i64 {
                return Err(Invalid(
                    "the epilogue's aux matrix is missing, or its leading dimension is less than D's rows",
                ));
            }
            if self.aux_ld % 8 != 0 {
                return Err(Unsupported("the leading dimension of aux is not a multiple of 8"));
            }
            if !aux.is_multiple_of(16) {
                return Err(Unsupported("aux is not aligned to 16 bytes"));
            }
            if self.epilogue == DGELU && k == 1 {
                return Err(Unsupported("DGELU of a product with k = 1"));
            }
        }
        Ok(())
    }

    /// Bytes of workspace that the algorithm uses, at most `most`: products long in k are split and summed there.
    pub fn workspace(&self, most: u64) -> u64 {
        let (m, n, _) = self.shape();
        let needed = m * n * 4;
        if needed <= most { needed } else { 0 }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn problem(epilogue: u32) -> Problem {
        let layout = |rows, columns| MatrixLayout { dtype: BF16, rows, columns, ld: rows as i64 };
        let layouts = [layout(32, 16), layout(32, 8), layout(16, 8), layout(16, 8)];
        let scales = [SCALAR; 2];
        Problem { compute: COMPUTE_32F, scale: F32, transposed: [true, false], epilogue, aux_ld: 16, scales, layouts }
    }

    #[test]
    fn what_the_documentation_allows_is_allowed() {
        for epilogue in [DEFAULT, BIAS, GELU_AUX, GELU_AUX_BIAS, DGELU] {
            assert_eq!(
                problem(epilogue).check(OperandsApart { bias: 256, aux: 256, ..OperandsApart::default() }),
                Ok(()),
                "{epilogue}"
            );
        }
        assert_eq!(problem(DEFAULT).shape(), (16, 8, 32));
        assert_eq!((problem(DEFAULT).workspace(1 << 20), problem(DEFAULT).workspace(16)), (512, 0));
    }

    #[test]
    fn what_it_does_not_is_refused() {
        use Refusal::{Invalid, Unsupported};
        type Change = fn(&mut Problem);
        let refused = |epilogue: u32, change: Change, bias: u64, aux: u64| {
            let mut p = problem(epilogue);
            change(&mut p);
            p.check(OperandsApart { bias, aux, ..OperandsApart::default() }).unwrap_err()
        };
        let invalid: [(u32, Change, u64, u64); 6] = [
            (DEFAULT, |p| p.transposed[0] = false, 0, 0),
            (DEFAULT, |p| p.layouts[0].ld = 31, 0, 0),
            (DEFAULT, |p| p.layouts[2].rows = 15, 0, 0),
            (BIAS, |_| (), 0, 0),
            (BIAS, |_| (), 257, 0),
            (GELU_AUX, |p| p.aux_ld = 8, 0, 256),
        ];
        for (epilogue, change, bias, aux) in invalid {
            assert!(matches!(refused(epilogue, change, bias, aux), Invalid(_)), "{epilogue}");
        }
        let unsupported: [(u32, Change, u64, u64); 7] = [
            (DEFAULT, |p| p.compute = COMPUTE_32F_FAST_TF32, 0, 0),
            (DEFAULT, |p| p.scale = BF16, 0, 0),
            (DEFAULT, |p| p.layouts[3].dtype = F32, 0, 0),
            (GELU_AUX, |p| p.aux_ld = 20, 0, 256),
            (DGELU, |_| (), 0, 264),
            (DGELU, |p| [p.layouts[0].rows, p.layouts[1].rows] = [1, 1], 0, 256),
            (512, |_| (), 256, 0),
        ];
        for (epilogue, change, bias, aux) in unsupported {
            assert!(matches!(refused(epilogue, change, bias, aux), Unsupported(_)), "{epilogue}");
        }
    }

    #[test]
    fn fp8_needs_its_layout_its_scales_and_their_alignment() {
        use Refusal::{Invalid, Unsupported};
        let layout = |dtype, rows, columns| MatrixLayout { dtype, rows, columns, ld: rows as i64 };
        let whole = || Problem {
            scales: [BLK128X128, VEC128],
            layouts: [layout(E4M3, 48, 32), layout(E5M2, 48, 8), layout(BF16, 32, 8), layout(BF16, 32, 8)],
            ..problem(DEFAULT)
        };
        let check = |change: fn(&mut Problem), scales| {
            let mut p = whole();
            change(&mut p);
            p.check(OperandsApart { bias: 256, scales, ..OperandsApart::default() })
        };
        assert_eq!(check(|_| (), [16, 32]), Ok(()));
        assert_eq!(check(|p| p.epilogue = BIAS, [16, 32]), Ok(()));
        assert!(matches!(check(|_| (), [16, 0]), Err(Invalid(_))));
        assert!(matches!(check(|_| (), [8, 16]), Err(Invalid(_))));
        let unsupported: [fn(&mut Problem); 11] = [
            |p| [1, 2, 3].iter().for_each(|&i| p.layouts[i].columns = 12),
            |p| (p.epilogue, p.layouts[2].dtype, p.layouts[3].dtype) = (BIAS, F32, F32),
            |p| (p.transposed, p.layouts[0]) = ([false; 2], MatrixLayout { rows: 32, columns: 48, ..p.layouts[0] }),
            |p| p.scales = [BLK128X128; 2],
            |p| p.scales = [SCALAR, VEC128],
            |p| p.layouts[0].dtype = E5M2,
            |p| p.layouts[0].ld = 56,
            |p| p.layouts[2..].iter_mut().for_each(|l| l.ld = 36),
            |p| (p.layouts[0].rows, p.layouts[1].rows) = (40, 40),
            |p| [1, 2, 3].iter().for_each(|&i| p.layouts[i].columns = 6),
            |p| p.epilogue = DGELU,
        ];
        for (i, change) in unsupported.into_iter().enumerate() {
            assert!(matches!(check(change, [16, 32]), Err(Unsupported(_))), "{i}");
        }
        let scaled = Problem { scales: [VEC128; 2], ..problem(DEFAULT) };
        assert!(matches!(scaled.check(OperandsApart::default()), Err(Unsupported(_))));
    }
}
