//! One kind of matrix product in cuBLASLt's terms: its descriptors, and the algorithms that compute it. Never enqueues
//! one.
use super::operands::{Operands, Scaled, Then, alignment};
use crate::ops::GemmShape;
use cudarc::cublaslt::{result, sys};
use flatshard_base::fp8::Fp8;
use flatshard_base::{DType, Error, Result};
use std::fmt::{Display, Formatter};
use sys::cublasLtEpilogue_t as Follows;
use sys::cublasLtMatmulDescAttributes_t as Attribute;
use sys::cublasLtMatmulMatrixScale_t as Scales;

/// Bytes of workspace shared by all products: what the cuBLAS documentation (cublasSetWorkspace) recommends for Hopper
/// and data-center Blackwell. Older GPUs need 4 MiB.
pub const WORKSPACE: usize = 32 << 20;

/// What determines the algorithm.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(super) struct ProductKey {
    shape: GemmShape,
    inputs: DType,
    output: DType,
    /// The format of A, if operands are bytes in FP8.
    format: Option<Fp8>,
    /// Alignments of A, B, C and the epilogue's bias, z and residual, at most [`super::operands::ALIGNED`].
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
        let (shape, format) = (*shape, at.scaled.map(|scaled| scaled.format));
        let key = ProductKey { shape, inputs: at.inputs, output: at.output, format, aligned, follows, tf32 };
        at.then.fits(&shape, at.output).then_some(key)
    }
}

/// The name of the product in tables of choices: all that determines the algorithm.
impl Display for ProductKey {
    fn fmt(&self, f: &mut Formatter) -> std::fmt::Result {
        let GemmShape { m, n, k, ta, tb, lda, ldb, ldc, accumulate, symmetric: _ } = self.shape;
        let form = |transposed| if transposed { 't' } else { 'n' };
        let added = if accumulate { "+=" } else { "=" };
        let how = match (self.tf32, self.format) {
            (true, _) => " tf32",
            (_, None) => "",
            (_, Some(Fp8::E4m3)) => " e4m3",
            (_, Some(Fp8::E5m2)) => " e5m2",
        };
        let [a, b, c, bias, z, residual] = self.aligned;
        write!(
            f,
            "{m}x{n}x{k} {}{} ld {lda} {ldb} {ldc} {} {added} {}{how} epilogue {} aligned {a} {b} {c} {bias} {z} \
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

pub(super) fn failed(what: &str, e: result::CublasError) -> Error {
    Error::op("gemm", format!("cuBLASLt: {what}: {e}"))
}

fn data_type(dtype: DType) -> Result<sys::cudaDataType> {
    match dtype {
        DType::F32 => Ok(sys::cudaDataType::CUDA_R_32F),
        DType::Bf16 => Ok(sys::cudaDataType::CUDA_R_16BF),
        DType::F16 => Ok(sys::cudaDataType::CUDA_R_16F),
        other => Err(Error::op("gemm", format!("multiplies f32, bf16 or f16, got {other}"))),
    }
}

fn fp8_type(format: Fp8) -> sys::cudaDataType {
    match format {
        Fp8::E4m3 => sys::cudaDataType::CUDA_R_8F_E4M3,
        Fp8::E5m2 => sys::cudaDataType::CUDA_R_8F_E5M2,
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
    pub fn choose(handle: sys::cublasLtHandle_t, key: &ProductKey, at: &Operands) -> Result<BlasProduct> {
        let compute = match key.tf32 {
            true => sys::cublasComputeType_t::CUBLAS_COMPUTE_32F_FAST_TF32,
            false => sys::cublasComputeType_t::CUBLAS_COMPUTE_32F,
        };
        // The library reads the bias of an FP8 product into f32 as bf16.
        if key.format.is_some() && key.output == DType::F32 && at.then.bias != 0 {
            return Err(Error::op("gemm", format!("cuBLASLt: no bias in f32 for the product {key}")));
        }
        let (output, [of_first, of_second]) = match key.format {
            Some(format) => (data_type(key.output)?, [Fp8::E4m3, format].map(fp8_type)),
            None => (data_type(key.output)?, [data_type(key.inputs)?; 2]),
        };
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
        for (slot, (matrix, dtype)) in [(first, of_first), (second, of_second), (out, output)].into_iter().enumerate() {
            product.layouts[slot] = result::create_matrix_layout(dtype, matrix.0, matrix.1, matrix.2).map_err(e)?;
        }
        // Biases and z have C's type, which is the library's default.
        product.set(Attribute::CUBLASLT_MATMUL_DESC_EPILOGUE, &(key.follows as u32))?;
        if at.then.z != 0 {
            product.set(Attribute::CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD, &(key.shape.n as i64))?;
        }
        if key.format.is_some() {
            // Our B, the weight, comes first.
            let of_weight = Scales::CUBLASLT_MATMUL_MATRIX_SCALE_BLK128x128_32F as i32;
            let of_rows = Scales::CUBLASLT_MATMUL_MATRIX_SCALE_VEC128_32F as i32;
            product.set(Attribute::CUBLASLT_MATMUL_DESC_A_SCALE_MODE, &of_weight)?;
            product.set(Attribute::CUBLASLT_MATMUL_DESC_B_SCALE_MODE, &of_rows)?;
        }
        product.point(at)?;
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
    /// Sets the addresses of the next product's scales, bias and z.
    pub fn point(&self, Operands { then, scaled, .. }: &Operands) -> Result<()> {
        if let Some(Scaled { a, b, .. }) = scaled {
            self.set(Attribute::CUBLASLT_MATMUL_DESC_A_SCALE_POINTER, b)?;
            self.set(Attribute::CUBLASLT_MATMUL_DESC_B_SCALE_POINTER, a)?;
        }
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
        // Parts of a sum that are added in 16 bits lose what f32 sums keep: on an H200 eight times C's rounding.
        if key.output != DType::F32 {
            let (scheme, in_f32) = (
                Preferred::CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK,
                sys::cublasLtReductionScheme_t::CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE as u32,
            );
            // SAFETY: as above.
            unsafe { result::set_matmul_pref_attribute(preference.0, scheme, (&raw const in_f32).cast(), 4) }
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
}
