//! A GPU as a [`Driver`]: each method is one line or one driver call. Waits only in `download` and `synchronize` (and
//! in `upload`, when 12 MiB are in flight).
use super::device::{Cuda, lock};
use super::operands::{Operands, Then};
use super::{blas, graph, memory, room};
use crate::buf::Place;
use crate::gpu::calls::Calls;
use crate::gpu::driver::{Arg, Driver, Graph, Kernel, LaunchShape, ScaledGemm};
use crate::ops::{Gemm, GemmShape, GemmThen};
use crate::{Buf, View, ViewMut};
use cudarc::driver::sys::CUdeviceptr;
use cudarc::driver::{result, sys};
use flatshard_base::meter::Lease;
use flatshard_base::timeline::Mark;
use flatshard_base::{Category, DType, Error, Result};
use std::time::Instant;

impl Cuda {
    /// Enqueues a product. `k` is not 0.
    fn product(&self, shape: &GemmShape, operands: &Operands) -> Result<()> {
        self.context.bind_to_thread().map_err(|e| self.failed("gemm", e))?;
        lock(&self.blas).gemm(shape, operands, self.compute.cu_stream())
    }
}

fn address(view: View) -> CUdeviceptr {
    view.as_ptr() as CUdeviceptr
}

impl Driver for Cuda {
    fn name(&self) -> String {
        format!("{}, {} kernel variants", self.name, self.modules.len())
    }
    fn arch(&self) -> u32 {
        self.arch
    }
    fn multiprocessors(&self) -> u32 {
        self.multiprocessors
    }
    fn avoids(&self, variant: &str) -> bool {
        self.modules.serialized().iter().any(|(serialized, _)| *serialized == variant)
    }
    fn alloc(&self, dtype: DType, len: usize, category: Category, lease: Lease) -> Result<Buf> {
        memory::alloc(&self.compute, dtype, len, lease).map_err(|e| {
            let op = format!("allocation of {} for {category:?}", room::amount(len * dtype.size()));
            self.failed(&op, e)
        })
    }
    fn alloc_host(&self, dtype: DType, len: usize, lease: Lease) -> Result<Buf> {
        memory::alloc_host(&self.compute, dtype, len, lease).map_err(|e| {
            let op = format!("allocation of {} of pinned host memory", room::amount(len * dtype.size()));
            self.failed(&op, e)
        })
    }
    fn upload(&self, src: &[u8], dst: ViewMut) -> Result<()> {
        if dst.place() == Place::Mapped {
            self.synchronize()?; // enqueued work may read it
            dst.host_bytes_mut("upload")?.copy_from_slice(src);
            return Ok(());
        }
        lock(&self.staging).upload(src, address(dst.as_view())).map_err(|e| self.failed("upload", e))
    }
    fn download(&self, parts: &mut [(View, &mut [u8])]) -> Result<()> {
        if parts.iter().any(|(src, _)| src.place() == Place::Mapped) {
            self.synchronize()?; // enqueued work may write it
        }
        let mut of_device = Vec::with_capacity(parts.len());
        for (src, dst) in parts {
            match src.place() {
                Place::Mapped => dst.copy_from_slice(src.host_bytes("download")?),
                _ => of_device.push((address(*src), &mut **dst)),
            }
        }
        lock(&self.staging).download(&mut of_device).map_err(|e| self.failed("download", e))?;
        self.unbroken()
    }
    fn copy(&self, src: View, dst: ViewMut) -> Result<()> {
        if src.is_empty() {
            return Ok(());
        }
        let failed = |e| self.failed("copy", e);
        self.context.bind_to_thread().map_err(failed)?;
        // SAFETY: both hold `src.bytes()` bytes (checked by the launch layer), of this device or mapped into its
        // address space; the driver distinguishes them by address.
        let copied =
            unsafe { sys::cuMemcpyAsync(address(dst.as_view()), address(src), src.bytes(), self.compute.cu_stream()) };
        copied.result().map_err(failed)
    }
    fn zero(&self, x: ViewMut) -> Result<()> {
        if x.is_empty() {
            return Ok(());
        }
        let failed = |e| self.failed("zero", e);
        self.context.bind_to_thread().map_err(failed)?;
        // SAFETY: `x` holds that many bytes of this device.
        unsafe { result::memset_d8_async(address(x.as_view()), 0, x.bytes(), self.compute.cu_stream()) }.map_err(failed)
    }
    fn launch(&self, kernel: Kernel, shape: LaunchShape, args: &mut [Arg]) -> Result<()> {
        self.launch_on(&self.compute, kernel, shape, args)
    }
    fn gemm(&self, op: Gemm) -> Result<()> {
        let Gemm { shape, a, b, c } = op;
        if shape.k == 0 {
            // Empty sum: nothing to add, or zeros to assign.
            return match (shape.accumulate, shape.ldc == shape.n) {
                (true, _) => Ok(()),
                (false, true) => self.zero(c.slice(0..shape.m * shape.n)),
                (false, false) => Err(Error::op("gemm", "cannot zero C with k 0, because it has gaps between rows")),
            };
        }
        self.product(&shape, &Operands::of(a, b, &c, Then::default()))
    }
    fn fuses(&self, GemmThen { shape, a, b, c, then }: &GemmThen) -> Result<bool> {
        self.context.bind_to_thread().map_err(|e| self.failed("gemm", e))?;
        // An empty sum is not a product.
        Ok(shape.k > 0 && lock(&self.blas).fuses(shape, &Operands::of(*a, *b, c, Then::of(then)))?)
    }
    fn gemm_then(&self, GemmThen { shape, a, b, c, then }: GemmThen) -> Result<()> {
        self.product(&shape, &Operands::of(a, b, &c, Then::of(&then)))
    }
    fn multiplies_fp8(&self) -> bool {
        blas::without_fp8(self.arch).is_none()
    }
    fn fuses_scaled(&self, op: &ScaledGemm) -> Result<bool> {
        self.context.bind_to_thread().map_err(|e| self.failed("gemm", e))?;
        lock(&self.blas).fuses(&op.shape, &Operands::of_scaled(op))
    }
    fn scaled_gemm(&self, op: ScaledGemm) -> Result<()> {
        self.product(&op.shape, &Operands::of_scaled(&op))
    }
    fn synchronize(&self) -> Result<()> {
        self.compute.synchronize().map_err(|e| self.failed("synchronize", e))?;
        self.unbroken()
    }
    fn begin_marks(&self) -> Result<()> {
        Cuda::begin_marks(self)
    }
    fn end_marks(&self) {
        Cuda::end_marks(self);
    }
    fn mark(&self) -> Result<Mark> {
        Ok(self.mark_on(&self.compute)?.unwrap_or_else(Mark::now))
    }
    fn when(&self, mark: Mark) -> Result<Instant> {
        self.when_marked(mark)
    }
    fn capture(&self, calls: Calls) -> Result<Graph> {
        graph::capture(self, calls)
    }
    fn replay(&self, graph: &mut Graph) -> Result<()> {
        graph::replay(self, graph)
    }
}
