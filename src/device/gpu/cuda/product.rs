//! One kind of matrix product in cuBLASLt's terms: its descriptors, and the algorithms that compute it. Never enqueues
//! one.
use crate::base::{DType, Error, Result};
use crate::device::ops::{Epilogue, GemmShape};
use crate::device::{View, ViewMut};
use cudarc::cublaslt::{result, sys};
use cudarc::driver::sys::CUdeviceptr;
use std::fmt::{Display, Formatter};
use sys::cublasLtEpilogue_t as Follows;
use sys::cublasLtMatmulDescAttributes_t as Attribute;

/// Bytes of workspace shared by all products: what the cuBLAS documentation (cublasSetWorkspace) recommends for Hopper
/// and data-center Blackwell. Older GPUs need 4 MiB.
pub const WORKSPACE: usize = 32 << 20;
/// cuBLASLt does not benefit from larger alignments.
pub(super) const ALIGNED: u32 = 256;

/// What determines the algorithm.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(super) struct ProductKey {
    shape: GemmShape,
    inputs: DType,
    output: DType,
    /// Alignments of A, B, C and the epilogue's bias, z and residual, at most [`ALIGNED`].
    aligned: [u32; 6],
    follows: Follows,
    /// f32 operands are rounded to 10 bits of mantissa.
    tf32: bool,
}

impl ProductKey {
    /// None if cuBLASLt does not accept the operands.
    pub fn of(shape: &GemmShape, at: &Operands, tf32: bool) -> Option<ProductKey> {
        let Then { follows, bias, z, residual } = at.then;
        let aligned = [at.a, at.b, at.c, bias, z, residual].map(alignment);
        let tf32 = tf32 && at.inputs == DType::F32;
        let key = ProductKey { shape: *shape, inputs: at.inputs, output: at.output, aligned, follows, tf32 };
        at.then.fits(shape).then_some(key)
    }
}

/// The name of the product in tables of choices: all that determines the algorithm.
impl Display for ProductKey {
    fn fmt(&self, f: &mut Formatter) -> std::fmt::Result {
        let GemmShape { m, n, k, ta, tb, lda, ldb, ldc, accumulate, symmetric: _ } = self.shape;
        let form = |transposed| if transposed { 't' } else { 'n' };
        let added = if accumulate { "+=" } else { "=" };
        let tf32 = if self.tf32 { " tf32" } else { "" };
        let [a, b, c, bias, z, residual] = self.aligned;
        write!(
            f,
            "{m}x{n}x{k} {}{} ld {lda} {ldb} {ldc} {} {added} {}{tf32} epilogue {} aligned {a} {b} {c} {bias} {z} \
             {residual}",
            form(ta),
            form(tb),
            self.output,
            self.inputs,
            self.follows as u32
        )
    }
}

/// Descriptors of one kind of product, and its algorithm.
pub(super) struct BlasProduct {
    pub operation: sys::cublasLtMatmulDesc_t,
    /// In cuBLASLt's order: our B, our A, C.
    pub layouts: [sys::cublasLtMatrixLayout_t; 3],
    pub algorithm: sys::cublasLtMatmulAlgo_t,
    /// The library's first heuristic, which is in use unless another is chosen.
    pub first: sys::cublasLtMatmulAlgo_t,
}

/// Algorithms that are compared.
const CANDIDATES: usize = 8;

/// Addresses of a product's operands.
#[derive(Clone, Copy)]
pub(super) struct Operands {
    pub a: CUdeviceptr,
    pub b: CUdeviceptr,
    pub c: CUdeviceptr,
    pub inputs: DType,
    pub output: DType,
    pub then: Then,
}

impl Operands {
    pub(super) fn of(a: View, b: View, c: &ViewMut, then: Then) -> Operands {
        let (at, out) = (|view: View| view.address() as CUdeviceptr, c.as_view());
        Operands { a: at(a), b: at(b), c: at(out), inputs: a.dtype(), output: out.dtype(), then }
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
    /// Whether cuBLASLt accepts the operands: rows of z must be multiples of 8 elements, aligned to 16 bytes.
    fn fits(&self, shape: &GemmShape) -> bool {
        self.z == 0 || shape.n.is_multiple_of(8) && self.z.is_multiple_of(16)
    }
    pub(super) fn plain(&self) -> bool {
        self.follows == Follows::CUBLASLT_EPILOGUE_DEFAULT && self.residual == 0
    }
}

pub(super) fn failed(what: &str, e: result::CublasError) -> Error {
    Error::op("gemm", format!("cuBLASLt: {what}: {e}"))
}

/// The largest power of two that divides the address, at most [`ALIGNED`].
pub(super) fn alignment(address: CUdeviceptr) -> u32 {
    1 << address.trailing_zeros().min(ALIGNED.trailing_zeros())
}

fn data_type(dtype: DType) -> Result<sys::cudaDataType> {
    match dtype {
        DType::F32 => Ok(sys::cudaDataType::CUDA_R_32F),
        DType::Bf16 => Ok(sys::cudaDataType::CUDA_R_16BF),
        DType::F16 => Ok(sys::cudaDataType::CUDA_R_16F),
        other => Err(Error::op("gemm", format!("multiplies f32, bf16 or f16, got {other}"))),
    }
}

/// A matrix in cuBLASLt's terms: rows, columns and leading dimension (column-major), and whether it is transposed.
type Matrix = (u64, u64, i64, bool);

/// Our operands in cuBLASLt's order: B, A, C, read by columns.
fn by_columns(g: &GemmShape) -> [Matrix; 3] {
    let (m, n, k) = (g.m as u64, g.n as u64, g.k as u64);
    // Row-major (r, c) is column-major (c, r).
    let b = if g.tb { (k, n) } else { (n, k) };
    let a = if g.ta { (m, k) } else { (k, m) };
    [(b.0, b.1, g.ldb as i64, g.tb), (a.0, a.1, g.lda as i64, g.ta), (n, m, g.ldc as i64, false)]
}

impl BlasProduct {
    /// With the library's first choice of an algorithm.
    pub fn choose(handle: sys::cublasLtHandle_t, key: &ProductKey, then: &Then) -> Result<BlasProduct> {
        let compute = match key.tf32 {
            true => sys::cublasComputeType_t::CUBLAS_COMPUTE_32F_FAST_TF32,
            false => sys::cublasComputeType_t::CUBLAS_COMPUTE_32F,
        };
        let (inputs, output) = (data_type(key.inputs)?, data_type(key.output)?);
        let e = |e| failed("descriptors", e);
        let operation = result::create_matmul_desc(compute, sys::cudaDataType::CUDA_R_32F).map_err(e)?;
        // From here on, `drop` destroys what was created; null descriptors are skipped.
        let none = std::ptr::null_mut();
        let algorithm = sys::cublasLtMatmulAlgo_t { data: [0; 8] };
        let mut product = BlasProduct { operation, layouts: [none; 3], algorithm, first: algorithm };
        let [first, second, out] = by_columns(&key.shape);
        let transposed = [Attribute::CUBLASLT_MATMUL_DESC_TRANSA, Attribute::CUBLASLT_MATMUL_DESC_TRANSB];
        for (attribute, matrix) in transposed.into_iter().zip([first, second]) {
            // CUBLAS_OP_N or CUBLAS_OP_T, four bytes.
            product.set(attribute, &i32::from(matrix.3))?;
        }
        for (slot, (matrix, dtype)) in [(first, inputs), (second, inputs), (out, output)].into_iter().enumerate() {
            product.layouts[slot] = result::create_matrix_layout(dtype, matrix.0, matrix.1, matrix.2).map_err(e)?;
        }
        // Biases and z have C's type, which is the library's default.
        product.set(Attribute::CUBLASLT_MATMUL_DESC_EPILOGUE, &(key.follows as u32))?;
        if then.z != 0 {
            product.set(Attribute::CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD, &(key.shape.n as i64))?;
        }
        product.point(then)?;
        let none = || Error::op("gemm", format!("cuBLASLt: no algorithm for the product {key}"));
        product.first = product.ask(handle, key, 1)?.first().copied().ok_or_else(none)?;
        product.algorithm = product.first;
        Ok(product)
    }

    /// Sets an attribute of four or eight bytes, as the library's tables specify.
    fn set<T>(&self, attribute: Attribute, value: &T) -> Result<()> {
        let (at, bytes) = ((value as *const T).cast(), size_of::<T>());
        // SAFETY: the descriptor is alive; the call reads the value, whose size the library checks.
        unsafe { result::set_matmul_desc_attribute(self.operation, attribute, at, bytes) }
            .map_err(|e| failed("descriptors", e))
    }
    /// Sets the addresses of the next product's bias and z.
    pub fn point(&self, then: &Then) -> Result<()> {
        if then.bias != 0 {
            self.set(Attribute::CUBLASLT_MATMUL_DESC_BIAS_POINTER, &then.bias)?;
        }
        if then.z != 0 {
            self.set(Attribute::CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER, &then.z)?;
        }
        Ok(())
    }

    /// The algorithms worth comparing, the one in use first.
    pub fn algorithms(
        &self,
        handle: sys::cublasLtHandle_t,
        key: &ProductKey,
    ) -> Result<Vec<sys::cublasLtMatmulAlgo_t>> {
        let mut all = self.ask(handle, key, CANDIDATES)?;
        all.retain(|algorithm| *algorithm != self.first);
        all.insert(0, self.first);
        Ok(all)
    }
    /// Whether the library accepts an algorithm that it chose in an earlier run.
    pub fn accepts(&self, handle: sys::cublasLtHandle_t, algorithm: &sys::cublasLtMatmulAlgo_t) -> bool {
        let ([first, second, out], mut found) = (self.layouts, unfound());
        // SAFETY: all descriptors are alive; the call reads 64 bytes and writes one result.
        let checked = unsafe {
            sys::cublasLtMatmulAlgoCheck(handle, self.operation, first, second, out, out, algorithm, &mut found)
        };
        checked.result().is_ok() && found.workspaceSize <= WORKSPACE
    }

    /// The library's heuristics, by its estimate of their times; at most `count`.
    fn ask(
        &self,
        handle: sys::cublasLtHandle_t,
        key: &ProductKey,
        count: usize,
    ) -> Result<Vec<sys::cublasLtMatmulAlgo_t>> {
        let e = |e| failed("preferences", e);
        let preference = Preference(result::create_matmul_pref().map_err(e)?);
        use sys::cublasLtMatmulPreferenceAttributes_t as Preferred;
        let workspace = WORKSPACE as u64;
        let limit = Preferred::CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES;
        // SAFETY: created above; the value has the attribute's size of eight bytes.
        unsafe { result::set_matmul_pref_attribute(preference.0, limit, (&raw const workspace).cast(), 8) }
            .map_err(e)?;
        let [a, b, c, _, _, residual] = key.aligned;
        for (attribute, bytes) in [
            (Preferred::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, b),
            (Preferred::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, a),
            (Preferred::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, c.min(residual)),
            (Preferred::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, c),
        ] {
            // SAFETY: as above, four bytes.
            unsafe { result::set_matmul_pref_attribute(preference.0, attribute, (&raw const bytes).cast(), 4) }
                .map_err(e)?;
        }
        let ([first, second, out], op) = (self.layouts, self.operation);
        let (mut found, mut returned) = (vec![unfound(); count], 0);
        // SAFETY: all descriptors are alive; the call writes at most `count` results and one int.
        let asked = unsafe {
            let to = found.as_mut_ptr();
            sys::cublasLtMatmulAlgoGetHeuristic(
                handle,
                op,
                first,
                second,
                out,
                out,
                preference.0,
                count as i32,
                to,
                &mut returned,
            )
        };
        asked.result().map_err(|e| failed(&format!("no algorithm for the product {key}"), e))?;
        found.truncate(returned.max(0) as usize);
        found.retain(|choice| choice.state.result().is_ok() && choice.workspaceSize <= WORKSPACE);
        Ok(found.into_iter().map(|choice| choice.algo).collect())
    }
}

/// A result that the library fills.
fn unfound() -> sys::cublasLtMatmulHeuristicResult_t {
    sys::cublasLtMatmulHeuristicResult_t {
        algo: sys::cublasLtMatmulAlgo_t { data: [0; 8] },
        workspaceSize: 0,
        state: sys::cublasStatus_t::CUBLAS_STATUS_NOT_SUPPORTED,
        wavesCount: 0.0,
        reserved: [0; 4],
    }
}

impl Drop for BlasProduct {
    fn drop(&mut self) {
        for layout in self.layouts.into_iter().filter(|l| !l.is_null()) {
            // SAFETY: created in `choose`, destroyed once.
            let _ = unsafe { result::destroy_matrix_layout(layout) };
        }
        // SAFETY: as above.
        let _ = unsafe { result::destroy_matmul_desc(self.operation) };
    }
}

struct Preference(sys::cublasLtMatmulPreference_t);
impl Drop for Preference {
    fn drop(&mut self) {
        // SAFETY: created in `ask`, destroyed once.
        let _ = unsafe { result::destroy_matmul_pref(self.0) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// cuBLASLt's product by definition: D (rows, cols) = op(A) op(B), all column-major.
    fn by_definition(first: Matrix, a: &[f64], second: Matrix, b: &[f64], out: Matrix, d: &mut [f64]) {
        let at = |m: Matrix, r: u64, c: u64| {
            let (r, c) = if m.3 { (c, r) } else { (r, c) };
            assert!(r < m.0 && c < m.1, "({r}, {c}) of {m:?}");
            (c as i64 * m.2) as usize + r as usize
        };
        let k = if first.3 { first.0 } else { first.1 };
        for r in 0..out.0 {
            for c in 0..out.1 {
                d[at(out, r, c)] = (0..k).map(|i| a[at(first, r, i)] * b[at(second, i, c)]).sum();
            }
        }
    }

    #[test]
    fn operands_that_change_places_give_the_row_major_product() {
        let (m, n, k) = (3, 5, 2);
        for (ta, tb) in [(false, false), (false, true), (true, false), (true, true)] {
            let (wa, wb) = (if ta { m } else { k }, if tb { k } else { n });
            let g = GemmShape { m, n, k, ta, tb, lda: wa + 1, ldb: wb + 2, ldc: n + 3, ..GemmShape::nn(0, 0, 0) };
            let [la, lb, lc] = g.extents();
            let a: Vec<f64> = (0..la).map(|i| (i * 7 % 5) as f64).collect();
            let b: Vec<f64> = (0..lb).map(|i| (i * 3 % 7) as f64).collect();
            let (mut c, mut want) = (vec![-1.0; lc], vec![-1.0; lc]);
            for i in 0..m {
                for j in 0..n {
                    let x = |p: usize| a[if ta { p * g.lda + i } else { i * g.lda + p }];
                    let y = |p: usize| b[if tb { j * g.ldb + p } else { p * g.ldb + j }];
                    want[i * g.ldc + j] = (0..k).map(|p| x(p) * y(p)).sum();
                }
            }
            let [first, second, out] = by_columns(&g);
            by_definition(first, &b, second, &a, out, &mut c);
            assert_eq!(c, want, "ta {ta} tb {tb}");
        }
    }

    /// The values of cublasLt.h; and shapes it does not accept are not requested.
    #[test]
    fn what_follows_a_product_as_the_library_names_it() {
        use crate::base::{Category, Meter};
        use crate::device::{Device, cpu::CpuDevice};
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
        let fits = |n: usize, from: usize| {
            let z = z.view().slice(from..48);
            Then { z: z.address() as CUdeviceptr, ..Then::default() }.fits(&GemmShape::nt(2, n, 8))
        };
        assert_eq!([fits(16, 0), fits(12, 0), fits(16, 4), fits(16, 8)], [true, false, false, true]);
    }

    #[test]
    fn alignment_is_that_of_the_address_up_to_256_bytes() {
        assert_eq!([0x7f00_0000_0000u64, 0x1010, 0x1002, 0x1101].map(alignment), [256, 16, 2, 1]);
    }
}
