//! The interface of a GPU: memory, copies, launches and matrix products, executed in call order. [`super::sim`]
//! implements it with the emulator, `cuda` with the driver. Never knows what a kernel computes.
pub use super::args::{Arg, Kernel, LaunchShape, Map, ScaledGemm, Swizzle};
use super::calls::{Calls, Enqueued};
use crate::ops::{Gemm, GemmThen};
use crate::{Buf, View, ViewMut};
use flatshard_base::meter::Lease;
use flatshard_base::timeline::Mark;
use flatshard_base::{Category, DType, Error, Result};
use std::any::Any;
use std::time::Instant;

/// One compute stream of one GPU. A call enqueues and returns; only [`download`] and [`synchronize`] wait, and only
/// they must report errors of earlier calls. `upload` has read `src` when it returns. Only [`alloc`] allocates memory;
/// anything else that a driver needs (a workspace for matrix products, pinned pages), it allocates when it is created.
/// All memory of a device comes from its driver, or from a group created for that driver.
///
/// [`alloc`]: Driver::alloc
/// [`download`]: Driver::download
/// [`synchronize`]: Driver::synchronize
pub trait Driver: Send + Sync {
    /// For messages and metrics: "sim (sm_80)".
    fn name(&self) -> String;
    /// Compute capability: 80, 90, 100. Launches choose their variant by it.
    fn arch(&self) -> u32;
    /// Number of multiprocessors, from which launches derive their grids.
    fn multiprocessors(&self) -> u32;

    /// Whether this variant runs slowly because of the driver's compiler: launches choose another where there is one.
    fn avoids(&self, _variant: &str) -> bool {
        false
    }

    /// Whether calls are synchronous, so that launch results can be read without waiting.
    fn waits(&self) -> bool {
        false
    }

    /// Zeroed, aligned to at least 256 bytes. The lease ends when the buffer's last reference is dropped.
    fn alloc(&self, dtype: DType, len: usize, category: Category, lease: Lease) -> Result<Buf>;
    /// Zeroed host memory that launches and copies can access: pinned, and mapped into the GPU's address space.
    fn alloc_host(&self, dtype: DType, len: usize, lease: Lease) -> Result<Buf>;
    /// Lengths in bytes are equal, here and below; the launch layer has checked them.
    fn upload(&self, src: &[u8], dst: ViewMut) -> Result<()>;
    /// Downloads all parts, with one wait.
    fn download(&self, parts: &mut [(View, &mut [u8])]) -> Result<()>;
    /// Same dtype and length. Either may come from [`Driver::alloc_host`].
    fn copy(&self, src: View, dst: ViewMut) -> Result<()>;
    fn zero(&self, x: ViewMut) -> Result<()>;

    /// Runs an entry of a variant of [`super::kernels`], with every argument in the kernel's order. Errors name the
    /// device, the kernel and the problem.
    fn launch(&self, kernel: Kernel, shape: LaunchShape, args: &mut [Arg]) -> Result<()>;
    /// See [`crate::Device::gemm`]. Accumulates in f32, whatever the dtypes.
    fn gemm(&self, op: Gemm) -> Result<()>;
    /// Whether [`Driver::gemm_then`] can fuse this product with its epilogue. Enqueues nothing.
    fn fuses(&self, _: &GemmThen) -> Result<bool> {
        Ok(false)
    }
    /// See [`crate::Device::gemm_then`]. Called only if the driver [fuses](Driver::fuses).
    fn gemm_then(&self, _: GemmThen) -> Result<()> {
        Err(Error::op("gemm_then", format!("{} cannot fuse this epilogue", self.name())))
    }
    /// Whether it multiplies operands in FP8 with scales of blocks.
    fn multiplies_fp8(&self) -> bool {
        false
    }
    /// Whether [`Driver::scaled_gemm`] can fuse this product with its epilogue. Enqueues nothing.
    fn fuses_scaled(&self, _: &ScaledGemm) -> Result<bool> {
        Ok(false)
    }
    /// Called only if the driver [multiplies](Driver::multiplies_fp8) FP8, and fuses the epilogue if there is one.
    fn scaled_gemm(&self, _: ScaledGemm) -> Result<()> {
        Err(Error::op("scaled_gemm", format!("{} cannot multiply FP8", self.name())))
    }
    /// Waits until all enqueued work is done.
    fn synchronize(&self) -> Result<()>;

    /// Captures these calls as one graph for [`Driver::replay`], without executing them. All have been executed before.
    fn capture(&self, calls: Calls) -> Result<Graph>;
    /// Replays a graph of this driver.
    fn replay(&self, graph: &mut Graph) -> Result<()>;

    /// See [`crate::Device`]. A synchronous driver marks by the host's clock.
    fn begin_marks(&self) -> Result<()> {
        Ok(())
    }
    fn end_marks(&self) {}
    fn mark(&self) -> Result<Mark> {
        Ok(Mark::now())
    }
    fn when(&self, mark: Mark) -> Result<Instant> {
        match mark {
            Mark::At(at) => Ok(at),
            Mark::Event(_) => Err(Error::op("when", "this driver has no events")),
        }
    }
}

/// Captured calls and the driver's graph. Scalar operands have the values at capture.
pub struct Graph {
    /// Dropped first, because it points into the calls.
    pub made: Box<dyn Any + Send>,
    pub calls: Calls,
}

/// Makes `driver` execute these calls one by one.
pub fn run(driver: &dyn Driver, calls: &mut Calls) -> Result<()> {
    calls.each(|call| match call {
        Enqueued::Launch(kernel, shape, args) => driver.launch(kernel, shape, args),
        Enqueued::Gemm(op) => driver.gemm(op),
        Enqueued::GemmThen(op) => driver.gemm_then(op),
        Enqueued::ScaledGemm(op) => driver.scaled_gemm(op),
        Enqueued::Copy(src, dst) => driver.copy(src, dst),
        Enqueued::Zero(x) => driver.zero(x),
        Enqueued::Guest(guest, asked, args) => guest.enqueue(asked, args),
    })
}
