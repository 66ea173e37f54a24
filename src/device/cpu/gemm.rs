//! The matrix product of the CPU device: `C (+)= op(A) op(B)` on one thread, sums always in f32. Chooses the kernel at
//! run time; never starts a thread, and allocates only while its scratch grows.
//!
//! bf16 goes to AMX tiles, else to AVX512-BF16 dot products; f32 goes to AVX-512 multiply-adds on the same CPUs, and so
//! does f16, which packing turns into f32: sums of f16 products in f16 would lose what f32 keeps. These share
//! everything but the innermost block: packing (`pack`) and the loops around it (`blocked`). Any other CPU uses the
//! `gemm` crate, for bf16 and f16 after a conversion to f32. A single row of A takes loops of its own (`thin`). (That
//! crate is as fast here in most forms, but 10 % to 15 % slower for weight gradients, for which it also allocates up to
//! a whole third cache in every call.)
#[cfg(all(target_arch = "x86_64", target_os = "linux"))]
mod amx;
#[cfg(target_arch = "x86_64")]
mod avx512;
#[cfg(target_arch = "x86_64")]
mod blocked;
mod buffers;
#[cfg(target_arch = "x86_64")]
mod pack;
mod plain;
#[cfg(test)]
mod tests;
mod thin;

use self::buffers::Buffers;
pub(super) use self::buffers::CacheLines;
use super::simd::Level;
use crate::base::{DType, Error, Result};
use crate::device::ops::{Gemm, GemmShape};
use crate::device::{View, ViewMut};
use half::{bf16, f16};

/// How products are computed; named after bf16. The bf16 instructions of the first two count operands and sums below
/// 2^-126 as zero.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum GemmKernel {
    /// Tiles of Intel's matrix extension, 16 x 16 x 32 products an instruction; f32 and f16 as in `Avx512`.
    Amx,
    /// `vdpbf16ps`, 32 products an instruction; f32 and f16 by AVX-512 multiply-adds, 16 an instruction.
    Avx512,
    /// f32 through the `gemm` crate, bf16 and f16 converted to f32 by blocks. Works everywhere.
    Plain,
}

impl GemmKernel {
    /// Fastest first.
    pub const ALL: [GemmKernel; 3] = [GemmKernel::Amx, GemmKernel::Avx512, GemmKernel::Plain];

    pub fn name(self) -> &'static str {
        match self {
            GemmKernel::Amx => "amx-bf16",
            GemmKernel::Avx512 => "avx512-bf16",
            GemmKernel::Plain => "plain",
        }
    }
    /// Whether this CPU and this operating system run it. Asking for AMX asks Linux for the tile registers.
    pub fn available(self) -> bool {
        match self {
            #[cfg(all(target_arch = "x86_64", target_os = "linux"))]
            GemmKernel::Amx => avx512::available() && amx::available(),
            #[cfg(target_arch = "x86_64")]
            GemmKernel::Avx512 => avx512::available(),
            GemmKernel::Plain => true,
            #[allow(unreachable_patterns)] // reached where the kernels above are not compiled
            _ => false,
        }
    }
}

/// The chosen kernel and its packing buffers: they grow to the largest product seen and are then reused. At most 9 MB,
/// with [`GemmKernel::Plain`] 4 KB for each unit of k and 1 MB.
pub struct GemmScratch {
    kernel: GemmKernel,
    buffers: Buffers,
}

impl GemmScratch {
    /// With the fastest kernel of this machine.
    pub fn new() -> GemmScratch {
        let kernel = GemmKernel::ALL.into_iter().find(|k| k.available()).unwrap_or(GemmKernel::Plain);
        GemmScratch { kernel, buffers: Buffers::default() }
    }
    /// With this kernel; an error where the machine does not have it.
    pub fn with_kernel(kernel: GemmKernel) -> Result<GemmScratch> {
        if !kernel.available() {
            return Err(Error::op("gemm", format!("this machine has no {}", kernel.name())));
        }
        Ok(GemmScratch { kernel, buffers: Buffers::default() })
    }
    pub fn kernel(&self) -> GemmKernel {
        self.kernel
    }
    /// "amx-bf16", "avx512-bf16" or "plain".
    pub fn kernel_name(&self) -> &'static str {
        self.kernel.name()
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

/// Without `accumulate` C is assigned and never read; with k = 0 it becomes zero.
pub fn gemm(scratch: &mut GemmScratch, op: Gemm) -> Result<()> {
    op.check()?;
    let (shape, a, b, c) = (&op.shape, op.a, op.b, op.c);
    if shape.is_empty() {
        return Ok(());
    }
    match (a.dtype(), b.dtype(), c.dtype()) {
        (DType::F32, DType::F32, DType::F32) => f32_product(scratch, shape, a, b, c),
        (DType::Bf16, DType::Bf16, DType::F32) => bf16_product::<f32>(scratch, shape, a, b, c),
        (DType::Bf16, DType::Bf16, DType::Bf16) => bf16_product::<bf16>(scratch, shape, a, b, c),
        (DType::F16, DType::F16, DType::F32) => f16_product::<f32>(scratch, shape, a, b, c),
        (DType::F16, DType::F16, DType::F16) => f16_product::<f16>(scratch, shape, a, b, c),
        (a, b, c) => Err(Error::op("gemm", format!("no product of {a} and {b} into {c}"))),
    }
}

fn f32_product(scratch: &mut GemmScratch, shape: &GemmShape, a: View, b: View, c: ViewMut) -> Result<()> {
    let (a, b, c) = (a.host("gemm")?, b.host("gemm")?, c.host("gemm")?);
    if thin::suits(shape) {
        Level::best().run(
            #[inline(always)]
            || thin::product(shape, a, b, c, &mut scratch.buffers),
        );
        return Ok(());
    }
    match scratch.kernel {
        // SAFETY: `new` and `with_kernel` choose what is available only; `check` has checked the extents.
        #[cfg(target_arch = "x86_64")]
        GemmKernel::Amx | GemmKernel::Avx512 => unsafe {
            blocked::product::<f32, f32, _>(&avx512::Dot, shape, a, b, c, &mut scratch.buffers)
        },
        _ => plain::f32_product(shape, a, b, c),
    }
    Ok(())
}

fn bf16_product<C: plain::Output>(
    scratch: &mut GemmScratch,
    shape: &GemmShape,
    a: View,
    b: View,
    c: ViewMut,
) -> Result<()> {
    let (a, b, c) = (a.host::<bf16>("gemm")?, b.host::<bf16>("gemm")?, c.host::<C>("gemm")?);
    let buffers = &mut scratch.buffers;
    if thin::suits(shape) {
        Level::best().run(
            #[inline(always)]
            || thin::product(shape, a, b, c, buffers),
        );
        return Ok(());
    }
    match scratch.kernel {
        // SAFETY: as above.
        #[cfg(all(target_arch = "x86_64", target_os = "linux"))]
        GemmKernel::Amx => unsafe { blocked::product(&amx::Tiles::configure(), shape, a, b, c, buffers) },
        // SAFETY: as above.
        #[cfg(target_arch = "x86_64")]
        GemmKernel::Avx512 => unsafe { blocked::product(&avx512::Dot, shape, a, b, c, buffers) },
        _ => plain::narrow_product(shape, a, b, c, buffers),
    }
    Ok(())
}

fn f16_product<C: plain::Output>(
    scratch: &mut GemmScratch,
    shape: &GemmShape,
    a: View,
    b: View,
    c: ViewMut,
) -> Result<()> {
    let (a, b, c) = (a.host::<f16>("gemm")?, b.host::<f16>("gemm")?, c.host::<C>("gemm")?);
    let buffers = &mut scratch.buffers;
    match scratch.kernel {
        // SAFETY: as above.
        #[cfg(target_arch = "x86_64")]
        GemmKernel::Amx | GemmKernel::Avx512 => unsafe { blocked::product(&avx512::Dot, shape, a, b, c, buffers) },
        _ => plain::narrow_product(shape, a, b, c, buffers),
    }
    Ok(())
}
