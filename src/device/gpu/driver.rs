//! What a GPU must be able to do: memory, copies, launches and matrix products, all in the order in which they are
//! asked for. [`super::sim`] does it with the emulator, `cuda` with the driver. Never knows what a kernel computes.
pub use super::args::{Arg, Kernel, LaunchShape, Map, Swizzle};
use super::calls::{Calls, Enqueued};
use crate::base::meter::Lease;
use crate::base::timeline::Mark;
use crate::base::{Category, DType, Error, Result};
use crate::device::ops::{Gemm, GemmThen};
use crate::device::{Buf, View, ViewMut};
use std::any::Any;
use std::time::Instant;

/// One compute stream of one GPU. A call enqueues there and returns, after what was enqueued before; only [`download`]
/// and [`synchronize`] wait, and only they need report what went wrong on the way. `upload` has read `src` when it
/// returns. Nothing but [`alloc`] takes memory: what a driver needs beside (a workspace of the matrix product, pinned
/// pages), it takes when it is made. All memory of a device comes from its driver, or from a group made for that
/// driver.
///
/// [`alloc`]: Driver::alloc
/// [`download`]: Driver::download
/// [`synchronize`]: Driver::synchronize
pub trait Driver: Send + Sync {
    /// For people and metrics: "sim (sm_80)".
    fn name(&self) -> String;
    /// What this GPU executes: 80, 90, 100. Launches choose their variant by it.
    fn arch(&self) -> u32;
    /// How many CTAs it takes to fill the GPU, over their residents each.
    fn multiprocessors(&self) -> u32;

    /// Whether everything is done when a call returns, so that what a launch has found can be read without waiting.
    fn waits(&self) -> bool {
        false
    }

    /// Zeroed, aligned to 256 bytes at least. The lease goes back when the buffer's last holder is gone.
    fn alloc(&self, dtype: DType, len: usize, category: Category, lease: Lease) -> Result<Buf>;
    /// Zeroed host memory that launches and copies reach too: pinned, and mapped into the GPU's address space.
    fn alloc_host(&self, dtype: DType, len: usize, lease: Lease) -> Result<Buf>;
    /// Lengths in bytes are equal; the launch layer has checked it, here and below.
    fn upload(&self, src: &[u8], dst: ViewMut) -> Result<()>;
    /// All of them, with one wait.
    fn download(&self, parts: &mut [(View, &mut [u8])]) -> Result<()>;
    /// Alike in dtype and length. Either may be of [`Driver::alloc_host`].
    fn copy(&self, src: View, dst: ViewMut) -> Result<()>;
    fn zero(&self, x: ViewMut) -> Result<()>;

    /// Runs an entry of a variant of [`super::kernels`]. Every argument of the kernel in order; an error names device,
    /// kernel and what is wrong.
    fn launch(&self, kernel: Kernel, shape: LaunchShape, args: &mut [Arg]) -> Result<()>;
    /// See [`crate::device::Device::gemm`]: f32 sums, whatever A, B and C hold.
    fn gemm(&self, op: Gemm) -> Result<()>;
    /// Whether [`Driver::gemm_then`] does this product, with what follows it, in one pass. Nothing is enqueued.
    fn fuses(&self, _: &GemmThen) -> Result<bool> {
        Ok(false)
    }
    /// See [`crate::device::Device::gemm_then`]. Asked for only where the driver [fuses](Driver::fuses).
    fn gemm_then(&self, _: GemmThen) -> Result<()> {
        Err(Error::op("gemm_then", format!("{}: not in one pass", self.name())))
    }
    /// Until everything that was enqueued is done.
    fn synchronize(&self) -> Result<()>;

    /// These calls as one, which [`Driver::replay`] enqueues. None of them is done now, and all have been done before.
    fn capture(&self, calls: Calls) -> Result<Graph>;
    /// Of this driver's.
    fn replay(&self, graph: &mut Graph) -> Result<()>;

    /// As of [`crate::device::Device`]. A driver that is done when a call returns marks by the host's clock.
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

/// Calls that a driver was given to keep, and what it made of them. Numbers among their operands are those of then.
pub struct Graph {
    /// Goes first: what it points to is the calls'.
    pub made: Box<dyn Any + Send>,
    pub calls: Calls,
}

/// Has `driver` do these calls, one by one.
pub fn run(driver: &dyn Driver, calls: &mut Calls) -> Result<()> {
    calls.each(|call| match call {
        Enqueued::Launch(kernel, shape, args) => driver.launch(kernel, shape, args),
        Enqueued::Gemm(op) => driver.gemm(op),
        Enqueued::GemmThen(op) => driver.gemm_then(op),
        Enqueued::Copy(src, dst) => driver.copy(src, dst),
        Enqueued::Zero(x) => driver.zero(x),
        Enqueued::Guest(guest, asked, args) => guest.enqueue(asked, args),
    })
}
