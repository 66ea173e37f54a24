//! Matrix products by cuBLASLt with f32 accumulation. The algorithm for a shape is requested once; after that a product
//! is one call. Never allocates after the first product of a shape.
//!
//! cuBLASLt is column-major. A row-major C (m, n), read by columns, is Cᵀ (n, m) with the same leading dimension, and
//! Cᵀ = op(B)ᵀ op(A)ᵀ. So the operands are swapped, and each keeps its transposition flag. A bias over n columns
//! becomes one over n rows, which is what the library's epilogues add.
use crate::base::{DType, Error, Result};
use crate::device::ops::{Epilogue, GemmShape};
use crate::device::{View, ViewMut};
use cudarc::cublaslt::{result, sys};
use cudarc::driver::sys::{CUdeviceptr, CUstream};
use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::ffi::c_void;
use sys::cublasLtEpilogue_t as Follows;
use sys::cublasLtMatmulDescAttributes_t as Attribute;

/// Bytes of workspace shared by all products: NVIDIA's recommendation for Hopper; older GPUs need less.
pub const WORKSPACE: usize = 32 << 20;
/// cuBLASLt does not benefit from larger alignments.
const ALIGNED: u32 = 256;

/// What determines the algorithm.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
struct Key {
    shape: GemmShape,
    inputs: DType,
    output: DType,
    /// Alignments of A, B, C and the epilogue's bias, z and residual, at most [`ALIGNED`].
    aligned: [u32; 6],
    follows: Follows,
}

/// Descriptors of one kind of product, and its algorithm.
struct BlasProduct {
    operation: sys::cublasLtMatmulDesc_t,
    /// In cuBLASLt's order: our B, our A, C.
    layouts: [sys::cublasLtMatrixLayout_t; 3],
    algorithm: sys::cublasLtMatmulAlgo_t,
}

/// Addresses of a product's operands.
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
    follows: Follows,
    bias: CUdeviceptr,
    z: CUdeviceptr,
    residual: CUdeviceptr,
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
    fn plain(&self) -> bool {
        self.follows == Follows::CUBLASLT_EPILOGUE_DEFAULT && self.residual == 0
    }
}

pub(super) struct Blas {
    handle: sys::cublasLtHandle_t,
    workspace: CUdeviceptr,
    /// Computes f32 products on tensor cores with 10 bits of mantissa.
    tf32: bool,
    /// None if the library has no algorithm with this epilogue.
    products: HashMap<Key, Option<BlasProduct>>,
}
// SAFETY: handles of cuBLASLt, which any thread may use; a lock around `Blas` ensures one at a time.
unsafe impl Send for Blas {}

impl Blas {
    /// `workspace` holds [`WORKSPACE`] bytes and outlives this. The context must be current on the calling thread.
    pub(super) fn new(workspace: CUdeviceptr, tf32: bool) -> Result<Blas> {
        if !present() {
            return Err(missing());
        }
        let handle = result::create_handle().map_err(|e| failed("cublasLtCreate", e))?;
        Ok(Blas { handle, workspace, tf32, products: HashMap::new() })
    }

    /// The product of this shape and these alignments; chooses its algorithm at the first call. None if no algorithm
    /// supports the epilogue.
    fn product(&mut self, shape: &GemmShape, at: &Operands) -> Result<Option<&mut BlasProduct>> {
        let Then { follows, bias, z, residual } = at.then;
        if !at.then.fits(shape) {
            return Ok(None);
        }
        let aligned = [at.a, at.b, at.c, bias, z, residual].map(alignment);
        let key = Key { shape: *shape, inputs: at.inputs, output: at.output, aligned, follows };
        let product = match self.products.entry(key) {
            Entry::Occupied(known) => known.into_mut(),
            Entry::Vacant(new) => new.insert(match BlasProduct::choose(self.handle, &key, &at.then, self.tf32) {
                Err(_) if !at.then.plain() => None,
                chosen => Some(chosen?),
            }),
        };
        Ok(product.as_mut())
    }

    /// Whether one call can do it, epilogue included. `k` is not 0.
    pub(super) fn fuses(&mut self, shape: &GemmShape, at: &Operands) -> Result<bool> {
        Ok(self.product(shape, at)?.is_some())
    }

    /// Enqueues `C (+)= op(A) op(B)` with a fused epilogue. `k` is not 0.
    pub(super) fn gemm(&mut self, shape: &GemmShape, at: &Operands, stream: CUstream) -> Result<()> {
        let (handle, workspace, residual) = (self.handle, self.workspace, at.then.residual);
        let Some(product) = self.product(shape, at)? else {
            return Err(Error::op("gemm", format!("cuBLASLt: no algorithm computes {shape:?} with its epilogue")));
        };
        product.point(&at.then)?;
        // The addend: C itself, or the residual in its place.
        let added = if residual == 0 { at.c } else { residual };
        let (alpha, beta) = (1f32, if shape.accumulate || residual != 0 { 1f32 } else { 0.0 });
        let [first, second, out] = product.layouts;
        let pointer = |address: CUdeviceptr| address as *const c_void;
        // SAFETY: the launch layer has checked that A, B and C match the shape; descriptors and workspace live as long
        // as `self`; the call reads alpha and beta (host pointer mode); the scale type is f32.
        let done = unsafe {
            result::matmul(
                handle,
                product.operation,
                (&raw const alpha).cast(),
                (&raw const beta).cast(),
                pointer(at.b),
                first,
                pointer(at.a),
                second,
                pointer(added),
                out,
                at.c as *mut c_void,
                out,
                &product.algorithm,
                workspace as *mut c_void,
                WORKSPACE,
                stream.cast(),
            )
        };
        done.map_err(|e| failed(&format!("{} product {shape:?}", at.inputs), e))
    }
}

/// Whether cuBLASLt can be loaded; [`missing`] is the error if not.
pub fn present() -> bool {
    // SAFETY: loads the library, whose initializers have no requirements.
    unsafe { sys::is_culib_present() }
}
pub fn missing() -> Error {
    Error::input(
        "`device: cuda` needs cuBLASLt (libcublasLt.so.12 or .13), but it was not found: install the CUDA runtime libraries \
         (package libcublas-12-8, or pip install nvidia-cublas) and put their directory in LD_LIBRARY_PATH, or use \
         `device: cpu`",
    )
}

impl Drop for Blas {
    fn drop(&mut self) {
        self.products.clear();
        // SAFETY: created in `new`, destroyed once.
        let _ = unsafe { result::destroy_handle(self.handle) };
    }
}

fn failed(what: &str, e: result::CublasError) -> Error {
    Error::op("gemm", format!("cuBLASLt: {what}: {e}"))
}

/// The largest power of two that divides the address, at most [`ALIGNED`].
fn alignment(address: CUdeviceptr) -> u32 {
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
    fn choose(handle: sys::cublasLtHandle_t, key: &Key, then: &Then, tf32: bool) -> Result<BlasProduct> {
        let compute = match (key.inputs, tf32) {
            (DType::F32, true) => sys::cublasComputeType_t::CUBLAS_COMPUTE_32F_FAST_TF32,
            _ => sys::cublasComputeType_t::CUBLAS_COMPUTE_32F,
        };
        let (inputs, output) = (data_type(key.inputs)?, data_type(key.output)?);
        let e = |e| failed("descriptors", e);
        let operation = result::create_matmul_desc(compute, sys::cudaDataType::CUDA_R_32F).map_err(e)?;
        // From here on, `drop` destroys what was created; null descriptors are skipped.
        let none = std::ptr::null_mut();
        let algorithm = sys::cublasLtMatmulAlgo_t { data: [0; 8] };
        let mut product = BlasProduct { operation, layouts: [none; 3], algorithm };
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
        product.algorithm = product.ask(handle, key)?;
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
    fn point(&self, then: &Then) -> Result<()> {
        if then.bias != 0 {
            self.set(Attribute::CUBLASLT_MATMUL_DESC_BIAS_POINTER, &then.bias)?;
        }
        if then.z != 0 {
            self.set(Attribute::CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER, &then.z)?;
        }
        Ok(())
    }

    fn ask(&self, handle: sys::cublasLtHandle_t, key: &Key) -> Result<sys::cublasLtMatmulAlgo_t> {
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
        let [first, second, out] = self.layouts;
        // SAFETY: all descriptors are alive.
        let found =
            unsafe { result::get_matmul_algo_heuristic(handle, self.operation, first, second, out, out, preference.0) };
        let none = |e| failed(&format!("no algorithm for {} to {}, {:?}", key.inputs, key.output, key.shape), e);
        Ok(found.map_err(none)?.algo)
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
            let g = GemmShape { m, n, k, ta, tb, lda: wa + 1, ldb: wb + 2, ldc: n + 3, accumulate: false };
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
