//! The CPU device's matrix product: `C (+)= op(A) op(B)` on one thread, accumulating in f32. Chooses the kernel at run
//! time. Never starts a thread, and allocates only while its scratch grows.
//!
//! bf16 uses AMX tiles, else AVX512-BF16 dot products where those are faster than AVX-512 multiply-adds. f32 uses AMX
//! too, as three bf16 parts of each number (`split`), else multiply-adds; so does f16, which packing converts to f32
//! (accumulating in f16 would lose precision). These share everything but the innermost block: packing (`pack`),
//! writing C (`store`) and the surrounding loops (`blocked`; for up to 256 rows of A, such as one expert's, `swapped`
//! and `strips`, which read B once and pack little of it; with a side as narrow as a rank, `narrow`, which packs
//! nothing of the other). CPUs without AVX-512 use the `gemm-f32` crate, converting bf16 and f16 to f32. Few rows have
//! loops of their own: up to eight with AVX-512 (`few`), which change no bit; one elsewhere (`thin`). (On AVX-512, the
//! crate is as fast in most forms, but 10 % to 15 % slower for weight gradients, where it also allocates up to a whole
//! L3 cache per call.)
#[cfg(all(target_arch = "x86_64", target_os = "linux"))]
mod amx;
#[cfg(target_arch = "x86_64")]
mod avx512;
#[cfg(target_arch = "x86_64")]
mod block;
#[cfg(target_arch = "x86_64")]
mod blocked;
mod buffers;
mod completion;
#[cfg(target_arch = "x86_64")]
mod few;
#[cfg(target_arch = "x86_64")]
mod narrow;
#[cfg(target_arch = "x86_64")]
mod pack;
pub(super) mod panels;
mod plain;
#[cfg(target_arch = "x86_64")]
mod split;
mod squares;
#[cfg(target_arch = "x86_64")]
mod store;
#[cfg(target_arch = "x86_64")]
mod strips;
#[cfg(target_arch = "x86_64")]
mod swapped;
#[cfg(test)]
mod tests;
mod thin;
#[cfg(target_arch = "x86_64")]
mod widened;
#[cfg(target_arch = "x86_64")]
pub(super) use self::few::AddProducts;
#[cfg(target_arch = "x86_64")]
pub(super) use self::pack::transposed;

use self::buffers::Buffers;
pub(super) use self::buffers::CacheLines;
use self::completion::{Completion, written};
use crate::ViewMut;
use crate::ops::{Epilogue, Gemm, GemmShape, GemmThen};
use flatshard_base::dtype::Float;
use flatshard_base::{DType, Error, Result};
use half::{bf16, f16};

/// The most rows of A for which any kernel has loops of its own.
#[cfg(target_arch = "x86_64")]
pub(super) const FEW_ROWS: usize = few::ROWS;
#[cfg(not(target_arch = "x86_64"))]
pub(super) const FEW_ROWS: usize = 1;
#[cfg(target_arch = "x86_64")]
use self::blocked::NEAR_ROWS;
#[cfg(not(target_arch = "x86_64"))]
const NEAR_ROWS: usize = 0;

/// How products are computed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum GemmKernel {
    /// Tiles of Intel's matrix extension, 16 x 16 x 32 bf16 products per instruction; six of them for one of f32. f16
    /// as in `Avx512`. As in `Avx512Bf16`, operands and sums of bf16 products below 2^-126 are zero.
    Amx,
    /// `vdpbf16ps` for bf16, 32 products per instruction; f32 and f16 as in `Avx512`.
    Avx512Bf16,
    /// AVX-512 multiply-adds, 16 f32 products per instruction; packing converts bf16 and f16.
    Avx512,
    /// f32 through the `gemm-f32` crate; bf16 and f16 converted to f32 in blocks. Runs everywhere.
    Plain,
}

impl GemmKernel {
    /// Fastest first, on most CPUs.
    pub const ALL: [GemmKernel; 4] = [GemmKernel::Amx, GemmKernel::Avx512Bf16, GemmKernel::Avx512, GemmKernel::Plain];

    /// This machine's fastest.
    pub fn best() -> GemmKernel {
        let slow = |kernel: GemmKernel| match kernel {
            #[cfg(target_arch = "x86_64")]
            GemmKernel::Avx512Bf16 => avx512::bf16_is_slow(),
            _ => false,
        };
        GemmKernel::ALL.into_iter().find(|k| k.available() && !slow(*k)).unwrap_or(GemmKernel::Plain)
    }
    pub fn name(self) -> &'static str {
        match self {
            GemmKernel::Amx => "amx-bf16",
            GemmKernel::Avx512Bf16 => "avx512-bf16",
            GemmKernel::Avx512 => "avx512-f32",
            GemmKernel::Plain => "plain",
        }
    }
    /// Rows that it multiplies at a time: threads start at multiples of it.
    pub fn panel(self) -> usize {
        match self {
            GemmKernel::Amx => 32,
            GemmKernel::Avx512Bf16 | GemmKernel::Avx512 => 12,
            GemmKernel::Plain => 16,
        }
    }
    /// Whether its block products take panels of this type, else attention computes in portable f32.
    pub(super) fn takes(self, dtype: DType) -> bool {
        match self {
            GemmKernel::Amx | GemmKernel::Avx512Bf16 => true,
            GemmKernel::Avx512 => dtype != DType::Bf16,
            GemmKernel::Plain => false,
        }
    }
    /// Whether this CPU and operating system support it. For AMX, requests the tile registers from Linux.
    pub fn available(self) -> bool {
        match self {
            #[cfg(all(target_arch = "x86_64", target_os = "linux"))]
            GemmKernel::Amx => avx512::has_bf16() && amx::available(),
            #[cfg(target_arch = "x86_64")]
            GemmKernel::Avx512Bf16 => avx512::has_bf16(),
            #[cfg(target_arch = "x86_64")]
            GemmKernel::Avx512 => avx512::available(),
            GemmKernel::Plain => true,
            #[allow(unreachable_patterns)] // used if the kernels above are not compiled
            _ => false,
        }
    }
}

/// The chosen kernel and its packing buffers, which grow to the largest product seen and are reused. At most 19 MB;
/// with [`GemmKernel::Plain`], 4 KB per unit of k plus 1 MB.
pub struct GemmScratch {
    kernel: GemmKernel,
    buffers: Buffers,
}

impl GemmScratch {
    /// Uses this machine's fastest kernel.
    pub fn new() -> GemmScratch {
        GemmScratch::of(GemmKernel::best())
    }
    /// Uses this kernel; fails if the machine lacks it.
    pub fn with_kernel(kernel: GemmKernel) -> Result<GemmScratch> {
        if !kernel.available() {
            return Err(Error::op("gemm", format!("this machine does not support {}", kernel.name())));
        }
        Ok(GemmScratch::of(kernel))
    }
    fn of(kernel: GemmKernel) -> GemmScratch {
        GemmScratch { kernel, buffers: Buffers::default() }
    }
    pub fn kernel(&self) -> GemmKernel {
        self.kernel
    }
    /// "amx-bf16", "avx512-bf16", "avx512-f32" or "plain".
    pub fn kernel_name(&self) -> &'static str {
        self.kernel.name()
    }
    /// Memory that the next product overwrites, with arbitrary contents.
    pub(super) fn floats(&mut self, len: usize) -> &mut [f32] {
        self.buffers.b.take(len)
    }
    /// Whether [`gemm_narrow`] is to compute the product. Not where tiles of bf16 are faster than converting it to f32.
    pub(super) fn is_narrow(&self, shape: &GemmShape, dtype: DType) -> bool {
        #[cfg(target_arch = "x86_64")]
        match (self.kernel, dtype) {
            (GemmKernel::Plain, _) | (GemmKernel::Amx, DType::Bf16) => false,
            _ => narrow::is_narrow(shape),
        }
        #[cfg(not(target_arch = "x86_64"))]
        false
    }
    /// Whether threads divide the product by columns rather than by rows: each reads and packs its part of B, and all
    /// of A, which is then the smaller. Not where `strips` reads whole rows of B.
    pub(super) fn by_columns(&self, shape: &GemmShape) -> bool {
        let strips = !shape.ta && !shape.tb && shape.m <= NEAR_ROWS;
        let wide = self.kernel != GemmKernel::Plain && shape.n > shape.m && !strips;
        wide || self.kernel == GemmKernel::Plain && !shape.ta && shape.m <= 1
    }
    /// Whether [`gemm_then`] can compute products: not through the `gemm-f32` crate.
    pub(super) fn fuses(&self) -> bool {
        self.kernel != GemmKernel::Plain
    }
    /// Bytes held by the packing buffers.
    pub fn bytes(&self) -> usize {
        self.buffers.bytes()
    }
}
impl Default for GemmScratch {
    fn default() -> GemmScratch {
        GemmScratch::new()
    }
}

/// [`gemm`] as one of several whose results have `bytes` together. The result of a row does not depend on the number of
/// rows.
pub(super) fn gemm_among(scratch: &mut GemmScratch, op: Gemm, bytes: usize) -> Result<()> {
    scratch.buffers.among = bytes;
    let done = gemm(scratch, op);
    scratch.buffers.among = 0;
    done
}

/// Without `accumulate`, C is assigned and never read; with k = 0 it becomes zero.
pub fn gemm(scratch: &mut GemmScratch, op: Gemm) -> Result<()> {
    product(scratch, op, None)
}

/// [`gemm`] of rows or columns of a product with a narrow side ([`GemmScratch::is_narrow`]): the bits of a result do
/// not depend on which.
#[cfg(target_arch = "x86_64")]
pub(super) fn gemm_narrow(scratch: &mut GemmScratch, op: Gemm) -> Result<()> {
    op.check()?;
    let Gemm { shape, a, b, c } = op;
    if shape.is_empty() {
        return Ok(());
    }
    let buffers = &mut scratch.buffers;
    macro_rules! narrow {
        ($E:ty, $C:ty) => {{
            let (a, b, c) = (a.host::<$E>("gemm")?, b.host("gemm")?, written::<$C>(c)?);
            // SAFETY: the extents are checked; only available kernels are chosen.
            unsafe { narrow::product(&shape, a, b, c, buffers) }
        }};
    }
    use self::widened::Widened;
    use DType::{Bf16, F32};
    match (scratch.kernel, a.dtype(), c.dtype()) {
        (_, F32, _) => narrow!(f32, f32),
        (GemmKernel::Avx512, Bf16, F32) => narrow!(Widened, f32),
        (GemmKernel::Avx512, Bf16, _) => narrow!(Widened, Widened),
        (_, Bf16, F32) => narrow!(bf16, f32),
        (_, Bf16, _) => narrow!(bf16, bf16),
        (_, _, F32) => narrow!(f16, f32),
        _ => narrow!(f16, f16),
    }
    Ok(())
}
#[cfg(not(target_arch = "x86_64"))]
pub(super) use self::gemm as gemm_narrow;

/// The elements on and below the diagonal, of rows of a square C from row `first` on, and some above it. The kernel
/// must have blocks ([`GemmScratch::fuses`]).
pub(super) fn gemm_lower(scratch: &mut GemmScratch, op: Gemm, first: usize) -> Result<()> {
    let n = op.shape.n.min(first + op.shape.m);
    product(scratch, Gemm { shape: GemmShape { n, ..op.shape }, ..op }, Some(first))
}

/// Copies the elements below the diagonal of a square matrix to above it, in squares that stay in L1.
#[inline(always)]
pub(super) fn mirror<T: Float>(shape: &GemmShape, c: ViewMut) -> Result<()> {
    const SQUARE: usize = 32;
    let (n, ld, c) = (shape.n, shape.ldc, c.host::<T>("gemm")?);
    for (i0, j0) in (0..n).step_by(SQUARE).flat_map(|i| (0..=i).step_by(SQUARE).map(move |j| (i, j))) {
        for i in i0..n.min(i0 + SQUARE) {
            for j in j0..i.min(j0 + SQUARE) {
                c[j * ld + i] = c[i * ld + j];
            }
        }
    }
    Ok(())
}

fn product(scratch: &mut GemmScratch, op: Gemm, lower: Option<usize>) -> Result<()> {
    op.check()?;
    let Gemm { shape, a, b, c } = op;
    let then = Epilogue::Sum { bias: None, residual: None };
    // SAFETY: `check` has checked the extents.
    unsafe { dispatch(scratch, GemmThen { shape, a, b, c, then }, lower) }
}

/// A product and its epilogue in one pass, in f32 until it is written. The kernel must be able to
/// ([`GemmScratch::fuses`]).
///
/// # Safety
/// The product, or the one that it is a part of, has passed [`GemmThen::check`].
pub(super) unsafe fn gemm_then(scratch: &mut GemmScratch, op: GemmThen) -> Result<()> {
    // SAFETY: upheld by the caller.
    unsafe { dispatch(scratch, op, None) }
}

/// By the kernel, and by the types that it sees the operands as.
///
/// # Safety
/// The operands hold their extents.
unsafe fn dispatch(scratch: &mut GemmScratch, op: GemmThen, lower: Option<usize>) -> Result<()> {
    const OP: &str = "gemm";
    let GemmThen { shape, a, b, c, then } = op;
    if shape.is_empty() {
        return Ok(());
    }
    let (kernel, buffers) = (scratch.kernel, &mut scratch.buffers);
    #[cfg(target_arch = "x86_64")]
    if kernel != GemmKernel::Plain {
        macro_rules! many {
            ($kernel:expr, $E:ty, $C:ty) => {{
                let (a, b, c, then) = (a.host::<$E>(OP)?, b.host(OP)?, written::<$C>(c)?, Completion::of(then)?);
                // SAFETY: upheld by the caller; only available kernels are chosen.
                unsafe { blocked::product(&$kernel, &shape, a, b, c, (then, lower), buffers) }
            }};
        }
        macro_rules! dot {
            ($E:ty, $C:ty) => {
                match lower.is_none() && few::takes::<$E>(&shape, <$C as flatshard_base::Elem>::DTYPE) {
                    false => many!(avx512::Dot, $E, $C),
                    true => {
                        let (a, b, c) = (a.host::<$E>(OP)?, b.host(OP)?, written::<$C>(c)?);
                        // SAFETY: as above.
                        unsafe { few::product(&shape, a, b, c, Completion::of(then)?, buffers) }
                    }
                }
            };
        }
        use self::widened::Widened;
        use DType::{Bf16, F32};
        match (kernel, a.dtype(), c.dtype()) {
            #[cfg(target_os = "linux")]
            (GemmKernel::Amx, F32, _) => many!(amx::Tiles::configure(), split::SplitF32, f32),
            #[cfg(target_os = "linux")]
            (GemmKernel::Amx, Bf16, F32) => many!(amx::Tiles::configure(), bf16, f32),
            #[cfg(target_os = "linux")]
            (GemmKernel::Amx, Bf16, _) => many!(amx::Tiles::configure(), bf16, bf16),
            (_, F32, _) => dot!(f32, f32),
            (GemmKernel::Avx512, Bf16, F32) => dot!(Widened, f32),
            (GemmKernel::Avx512, Bf16, _) => dot!(Widened, Widened),
            (_, Bf16, F32) => dot!(bf16, f32),
            (_, Bf16, _) => dot!(bf16, bf16),
            (_, _, F32) => dot!(f16, f32),
            _ => dot!(f16, f16),
        }
        return Ok(());
    }
    macro_rules! plain {
        ($E:ty, $C:ty, $product:path) => {{
            let (a, b, c) = (a.host::<$E>(OP)?, b.host::<$E>(OP)?, c.host::<$C>(OP)?);
            $product(&shape, a, b, c, buffers)
        }};
    }
    match (a.dtype(), c.dtype()) {
        (DType::F32, _) => plain!(f32, f32, plain::f32_product),
        (DType::Bf16, DType::F32) => plain!(bf16, f32, plain::narrow_product),
        (DType::Bf16, _) => plain!(bf16, bf16, plain::narrow_product),
        (_, DType::F32) => plain!(f16, f32, plain::narrow_product),
        _ => plain!(f16, f16, plain::narrow_product),
    }
    Ok(())
}

/// A product of f32 in memory that is no device's buffer, with f32 multiply-adds.
pub(super) fn f32_product(scratch: &mut GemmScratch, shape: &GemmShape, a: &[f32], b: &[f32], c: &mut [f32]) {
    let [need_a, need_b, need_c] = shape.extents();
    assert!(a.len() >= need_a && b.len() >= need_b && c.len() >= need_c, "the operands hold their extents");
    if shape.is_empty() {
        return;
    }
    #[cfg(target_arch = "x86_64")]
    if scratch.kernel != GemmKernel::Plain {
        let then = (Completion::Nothing, None);
        // SAFETY: extents were checked; kernels other than the plain one are chosen only where AVX-512 is available.
        return unsafe { blocked::product(&avx512::Dot, shape, a, b, c.as_mut_ptr(), then, &mut scratch.buffers) };
    }
    plain::f32_product(shape, a, b, c, &mut scratch.buffers);
}

/// A product without its multiplications, for benchmarks: packs A and B and writes zeros to C, with the kernel's block
/// sizes. Only f32, and bf16 into f32 or bf16.
pub fn pack_and_store(scratch: &mut GemmScratch, op: Gemm) -> Result<()> {
    const OP: &str = "pack_and_store";
    op.check()?;
    let Gemm { shape, a, b, c } = op;
    if shape.is_empty() {
        return Ok(());
    }
    #[cfg(target_arch = "x86_64")]
    macro_rules! run {
        ($kernel:ty, $E:ty, $C:ty) => {{
            let (skip, a, b, c) =
                (blocked::Skip::<$kernel>(std::marker::PhantomData), a.host::<$E>(OP)?, b.host(OP)?, written::<$C>(c)?);
            // SAFETY: as below.
            unsafe { blocked::product(&skip, &shape, a, b, c, (Completion::Nothing, None), &mut scratch.buffers) }
        }};
    }
    match (scratch.kernel, a.dtype(), c.dtype()) {
        #[cfg(target_arch = "x86_64")]
        (GemmKernel::Avx512Bf16 | GemmKernel::Avx512, DType::F32, _) => run!(avx512::Dot, f32, f32),
        #[cfg(all(target_arch = "x86_64", target_os = "linux"))]
        (GemmKernel::Amx, DType::F32, _) => run!(amx::Tiles, split::SplitF32, f32),
        #[cfg(all(target_arch = "x86_64", target_os = "linux"))]
        (GemmKernel::Amx, DType::Bf16, DType::F32) => run!(amx::Tiles, bf16, f32),
        #[cfg(all(target_arch = "x86_64", target_os = "linux"))]
        (GemmKernel::Amx, DType::Bf16, _) => run!(amx::Tiles, bf16, bf16),
        #[cfg(target_arch = "x86_64")]
        (GemmKernel::Avx512Bf16, DType::Bf16, DType::F32) => run!(avx512::Dot, bf16, f32),
        #[cfg(target_arch = "x86_64")]
        (GemmKernel::Avx512Bf16, DType::Bf16, _) => run!(avx512::Dot, bf16, bf16),
        (kernel, a, _) => return Err(Error::op(OP, format!("{} does not pack {a}", kernel.name()))),
    }
    #[allow(unreachable_code)] // without the kernels above
    Ok(())
}
