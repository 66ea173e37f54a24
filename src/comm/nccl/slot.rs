//! Memory for collectives: allocated by NCCL if possible and registered with the communicator, so that it moves data
//! without staging copies. Never fails if that is refused: all ranks then use ordinary memory. (NCCL leaves a
//! collective undefined if only some ranks pass registered memory.)
//!
//! Not registered as symmetric windows: these require a buffer to be at the same offset on all ranks, and a
//! reduce-scatter in place puts its result at an offset that depends on the rank. Whether that is allowed, only a real
//! NCCL can tell.
use super::comm::Comm;
use crate::base::meter::Lease;
use crate::base::{Category, DType, Error, Result};
use crate::device::Buf;
use crate::device::buf::Place;
use crate::device::gpu::cuda::Cuda;
use crate::device::gpu::driver::Driver;
use std::ffi::c_void;
use std::ptr::NonNull;
use std::sync::Arc;

/// NCCL allocates in pages of 2 MiB; smaller buffers are not worth one.
const LEAST: usize = 2 << 20;

/// Memory of NCCL's or of a device buffer, with its registration.
struct Slot {
    /// Deregistered before the memory is freed.
    handle: *mut c_void,
    memory: SlotMemory,
    comm: Arc<Comm>,
    cuda: Arc<Cuda>,
}
enum SlotMemory {
    Nccl(NonNull<u8>, #[allow(dead_code)] Lease),
    Device(#[allow(dead_code)] Buf),
}
// SAFETY: a handle of NCCL's and device memory, used only in `drop`.
unsafe impl Send for Slot {}
unsafe impl Sync for Slot {}

impl Slot {
    fn deregister(&mut self) {
        let handle = std::mem::replace(&mut self.handle, std::ptr::null_mut());
        if !handle.is_null() {
            self.comm.with(|comm, nccl| {
                // SAFETY: registered with this communicator, and deregistered once.
                nccl.deregister.map(|deregister| unsafe { deregister(comm, handle) })
            });
        }
    }
}

impl Drop for Slot {
    fn drop(&mut self) {
        let bound = self.cuda.context().synchronize().is_ok(); // nothing in flight uses it now
        self.deregister();
        if let (SlotMemory::Nccl(memory, _), Some(free), true) = (&self.memory, self.comm.nccl.mem_free, bound) {
            // SAFETY: from ncclMemAlloc, and freed once; the context is current.
            let _ = unsafe { free(memory.as_ptr().cast()) };
        }
    }
}

/// Allocates zeroed GPU memory, registered if NCCL does so on every rank: `all` combines a condition over them. Ranks
/// of the group allocate the same buffers in the same order.
pub(super) fn alloc(
    cuda: &Arc<Cuda>,
    comm: &Arc<Comm>,
    dtype: DType,
    len: usize,
    category: Category,
    lease: Lease,
    all: &dyn Fn(bool) -> Result<bool>,
) -> Result<Buf> {
    let bytes = len * dtype.size();
    if bytes < LEAST {
        return cuda.alloc(dtype, len, category, lease);
    }
    let (pointer, memory) = match of_nccl(cuda, comm, bytes) {
        Some(pointer) => (pointer, SlotMemory::Nccl(pointer, lease)),
        None => {
            let buf = cuda.alloc(dtype, len, category, lease)?;
            let pointer = NonNull::new(buf.view().as_ptr().cast_mut());
            let pointer = pointer.ok_or_else(|| Error::op("alloc", "the driver returned a null address"))?;
            (pointer, SlotMemory::Device(buf))
        }
    };
    let mut slot = Slot { handle: register(comm, pointer, bytes), memory, comm: comm.clone(), cuda: cuda.clone() };
    if comm.nccl.register.is_some() && !all(!slot.handle.is_null())? {
        slot.deregister();
    }
    // SAFETY: the memory holds `bytes`, aligned to a page or to 256 bytes, as long as its owner, the slot, lives.
    let mut buf = unsafe { Buf::from_raw(pointer, dtype, len, Place::Device, Arc::new(slot)) };
    cuda.zero(buf.view_mut())?;
    Ok(buf)
}

fn of_nccl(cuda: &Cuda, comm: &Comm, bytes: usize) -> Option<NonNull<u8>> {
    let (alloc, _free) = (comm.nccl.mem_alloc?, comm.nccl.mem_free?);
    cuda.context().bind_to_thread().ok()?;
    let mut memory = std::ptr::null_mut();
    // SAFETY: writes one pointer; the context is current.
    let code = unsafe { alloc(&mut memory, bytes) };
    NonNull::new(memory.cast::<u8>()).filter(|_| code == super::library::SUCCESS)
}

/// Null if refused.
fn register(comm: &Comm, memory: NonNull<u8>, bytes: usize) -> *mut c_void {
    let register = |handle, nccl: &super::library::Nccl| {
        let (call, _) = (nccl.register?, nccl.deregister?);
        let mut registration = std::ptr::null_mut();
        // SAFETY: a live communicator and memory of that many bytes.
        let code = unsafe { call(handle, memory.as_ptr().cast(), bytes, &mut registration) };
        (code == super::library::SUCCESS).then_some(registration)
    };
    comm.with(register).flatten().unwrap_or(std::ptr::null_mut())
}
