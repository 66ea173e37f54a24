//! Matrix products by cuBLASLt with f32 accumulation. The algorithm for a shape is requested once; after that a product
//! is one call. Never allocates after the first product of a shape.
//!
//! cuBLASLt is column-major. A row-major C (m, n), read by columns, is Cᵀ (n, m) with the same leading dimension, and
//! Cᵀ = op(B)ᵀ op(A)ᵀ. So the operands are swapped, and each keeps its transposition flag. A bias over n columns
//! becomes one over n rows, which is what the library's epilogues add.
use super::choices::Choices;
use super::operands::Operands;
use super::product::{BlasProduct, ProductKey, WORKSPACE, failed};
use crate::ops::GemmShape;
use cudarc::cublaslt::{result, sys};
use cudarc::driver::sys::{CUdeviceptr, CUstream};
use flatshard_base::{Error, Result};
use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::ffi::c_void;

pub(super) struct Blas {
    handle: sys::cublasLtHandle_t,
    workspace: CUdeviceptr,
    /// Computes f32 products on tensor cores with 10 bits of mantissa.
    tf32: bool,
    /// None if the library has no algorithm with this epilogue.
    products: HashMap<ProductKey, Option<BlasProduct>>,
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
        let Some(key) = ProductKey::of(shape, at, self.tf32) else { return Ok(None) };
        let product = match self.products.entry(key) {
            Entry::Occupied(known) => known.into_mut(),
            Entry::Vacant(new) => new.insert(match BlasProduct::choose(self.handle, &key, at) {
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

    /// The name of a product. None if the library does not accept the operands.
    pub(super) fn name(&self, shape: &GemmShape, at: &Operands) -> Option<String> {
        ProductKey::of(shape, at, self.tf32).map(|key| key.to_string())
    }
    /// The algorithms of a product, the one in use first. None if none supports the epilogue.
    pub(super) fn algorithms(
        &mut self,
        shape: &GemmShape,
        at: &Operands,
    ) -> Result<Option<Vec<sys::cublasLtMatmulAlgo_t>>> {
        let (handle, key) = (self.handle, ProductKey::of(shape, at, self.tf32));
        let (Some(key), Some(product)) = (key, self.product(shape, at)?) else { return Ok(None) };
        product.algorithms(handle, &key).map(Some)
    }
    /// The product computes with `algorithm` from now on.
    pub(super) fn compute_with(
        &mut self,
        shape: &GemmShape,
        at: &Operands,
        algorithm: sys::cublasLtMatmulAlgo_t,
    ) -> Result<()> {
        self.product(shape, at)?.into_iter().for_each(|product| product.algorithm = algorithm);
        Ok(())
    }
    /// Whether the library accepts a choice of an earlier run for this product.
    pub(super) fn accepts(
        &mut self,
        shape: &GemmShape,
        at: &Operands,
        algorithm: &sys::cublasLtMatmulAlgo_t,
    ) -> Result<bool> {
        let handle = self.handle;
        Ok(self.product(shape, at)?.is_some_and(|product| product.accepts(handle, algorithm)))
    }
    /// Known products compute with the algorithms that the table has for them, all others with the library's first.
    /// Returns how many differ from it.
    pub(super) fn install(&mut self, choices: &Choices) -> usize {
        let handle = self.handle;
        let mut changed = 0;
        for (key, product) in self.products.iter_mut().filter_map(|(key, product)| Some((key, product.as_mut()?))) {
            let chosen = choices.get(&key.to_string()).filter(|chosen| product.accepts(handle, chosen));
            product.algorithm = chosen.unwrap_or(product.first);
            changed += usize::from(product.algorithm != product.first);
        }
        changed
    }

    /// Enqueues `C (+)= op(A) op(B)` with a fused epilogue. `k` is not 0.
    pub(super) fn gemm(&mut self, shape: &GemmShape, at: &Operands, stream: CUstream) -> Result<()> {
        let (handle, workspace, residual) = (self.handle, self.workspace, at.then.residual);
        let Some(product) = self.product(shape, at)? else {
            return Err(Error::op("gemm", format!("cuBLASLt: no algorithm computes {shape:?} with its epilogue")));
        };
        product.point(at)?;
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

/// The first version with scales for blocks of FP8, that of CUDA 12.9; and the only architecture that it has them for.
const SCALED: (usize, u32) = (120_900, 90);

/// Why a GPU of this architecture cannot multiply FP8 with scales for blocks, if it cannot. The library is loaded.
pub fn without_fp8(arch: u32) -> Option<String> {
    // SAFETY: no requirements.
    let version = unsafe { sys::cublasLtGetVersion() };
    let (needed, of) = SCALED;
    match (arch == of, version >= needed) {
        (false, _) => Some(format!(
            "cuBLASLt multiplies FP8 with scales for blocks of 128 only on sm_{of} (H100, H200), and this is sm_{arch}"
        )),
        (_, false) => Some(format!(
            "cuBLASLt {}.{}.{} cannot multiply FP8 with scales for blocks of 128: install that of CUDA 12.9 or newer \
             (pip install -U nvidia-cublas) and put its directory in LD_LIBRARY_PATH",
            version / 10_000,
            version / 100 % 100,
            version % 100
        )),
        _ => None,
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
