//! Which problems have an algorithm, from the tables of the cuBLAS documentation (cublasLtMatmul, "regular" matrices),
//! the comments of cublasLt.h 13.4, and the limits known to nvmath-python 0.6. Anything that none of them allows is
//! refused.

pub const F32: i32 = 0;
pub const F16: i32 = 2;
pub const BF16: i32 = 14;

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
    /// A, B, C, D.
    pub layouts: [MatrixLayout; 4],
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

    /// `bias`, `aux`: addresses in the descriptor, whose alignment is checked.
    pub fn check(&self, bias: u64, aux: u64) -> Result<(), Refusal> {
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
        // Compute and scale type; A and B; C; bias. C and D always have the same type.
        let types = (self.compute, self.scale, a.dtype, d.dtype);
        let known = matches!(
            types,
            (COMPUTE_32F, F32, F32, F32)
                | (COMPUTE_32F, F32, BF16, BF16 | F32)
                | (COMPUTE_32F, F32, F16, F16 | F32)
                | (COMPUTE_32F_FAST_TF32, F32, F32, F32)
        );
        if !known || a.dtype != b.dtype || c.dtype != d.dtype {
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
        Problem { compute: COMPUTE_32F, scale: F32, transposed: [true, false], epilogue, aux_ld: 16, layouts }
    }

    #[test]
    fn what_the_documentation_allows_is_allowed() {
        for epilogue in [DEFAULT, BIAS, GELU_AUX, GELU_AUX_BIAS, DGELU] {
            assert_eq!(problem(epilogue).check(256, 256), Ok(()), "{epilogue}");
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
            p.check(bias, aux).unwrap_err()
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
}
