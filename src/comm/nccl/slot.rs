//! Memory for collectives: allocated by NCCL if possible and registered with the communicator, so that it moves data
//! without staging copies. Never fails if that is refused: all ranks then use ordinary memory. (NCCL leaves a
//! collective undefined if only some ranks pass registered memory.)
//!
//! [Note: windows] On request it is registered as a symmetric window, a collective call. NCCL's documentation asks that
//! an operand have the same offset in the windows of all ranks. Here that holds for what peers access: the output of an
//! all_gather, the input of a reduce_scatter, the buffer of an all_reduce. It does not hold for what only its own rank
//! accesses: an all_gather's input and a reduce_scatter's output, in place, lie at an offset that depends on the rank.
//! NCCL's symmetric reduce_scatter addresses its output locally; its all_gather has not been read.
use super::comm::Comm;
use super::library::{Nccl, SUCCESS, WINDOW_SYMMETRIC};
use crate::base::meter::Lease;
use crate::base::{Category, DType, Error, Result};
use crate::comm::operands::CheckedCall;
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
    /// Ended before the memory is freed.
    registration: Registration,
    memory: SlotMemory,
    comm: Arc<Comm>,
    cuda: Arc<Cuda>,
}
#[derive(Clone, Copy)]
enum Registration {
    None,
    Buffer(*mut c_void),
    Window(*mut c_void),
}
enum SlotMemory {
    Nccl(NonNull<u8>, #[allow(dead_code)] Lease),
    Device(#[allow(dead_code)] Buf),
}
// SAFETY: handles of NCCL's and device memory, used only in `drop`.
unsafe impl Send for Slot {}
unsafe impl Sync for Slot {}

impl Slot {
    /// Registers the memory with `register`, on every rank or on none.
    fn register(
        &mut self,
        all: &dyn Fn(bool) -> Result<bool>,
        register: impl FnOnce() -> Result<Registration>,
    ) -> Result<bool> {
        self.registration = register()?;
        let everywhere = all(!matches!(self.registration, Registration::None))?;
        if !everywhere {
            self.deregister();
        }
        Ok(everywhere)
    }
    fn deregister(&mut self) {
        match std::mem::replace(&mut self.registration, Registration::None) {
            Registration::None => {}
            Registration::Buffer(handle) => {
                self.comm.with(|comm, nccl| {
                    // SAFETY: registered with this communicator, and deregistered once.
                    nccl.deregister.map(|deregister| unsafe { deregister(comm, handle) })
                });
            }
            Registration::Window(window) => {
                // An error means that the communicator was aborted, which has ended its windows.
                let _ = self.comm.run(|comm, nccl| match nccl.window_deregister {
                    // SAFETY: registered with this communicator, and deregistered once.
                    Some(deregister) => unsafe { deregister(comm, window) },
                    None => SUCCESS,
                });
            }
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
    call: CheckedCall,
    (dtype, len): (DType, usize),
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
    let of_nccl = matches!(memory, SlotMemory::Nccl(..));
    let mut slot = Slot { registration: Registration::None, memory, comm: comm.clone(), cuda: cuda.clone() };
    // A window is registered by all ranks together, so all need such memory first.
    let windowed =
        comm.options.windows && all(of_nccl)? && slot.register(all, || window(comm, call, pointer, bytes))?;
    if !windowed && comm.nccl.register.is_some() {
        slot.register(all, || Ok(buffer(comm, pointer, bytes)))?;
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
    NonNull::new(memory.cast::<u8>()).filter(|_| code == SUCCESS)
}

/// A handle as the registration that `made` of it; NCCL returns null where it does not support one.
fn unless_null(handle: *mut c_void, made: fn(*mut c_void) -> Registration) -> Registration {
    if handle.is_null() { Registration::None } else { made(handle) }
}

fn buffer(comm: &Comm, memory: NonNull<u8>, bytes: usize) -> Registration {
    let register = |handle, nccl: &Nccl| {
        let (call, _) = (nccl.register?, nccl.deregister?);
        let mut registration = std::ptr::null_mut();
        // SAFETY: a live communicator and memory of that many bytes.
        let code = unsafe { call(handle, memory.as_ptr().cast(), bytes, &mut registration) };
        (code == SUCCESS).then_some(registration)
    };
    let handle = comm.with(register).flatten().unwrap_or(std::ptr::null_mut());
    unless_null(handle, Registration::Buffer)
}

/// Every rank calls. An error ends the run, because the other ranks may wait in the call.
fn window(comm: &Comm, call: CheckedCall, memory: NonNull<u8>, bytes: usize) -> Result<Registration> {
    // An NCCL thread writes this while the call is polled, so it must not move.
    let mut window: Box<*mut c_void> = Box::new(std::ptr::null_mut());
    let out: *mut *mut c_void = &mut *window;
    let done = comm.run(|handle, nccl| match nccl.window_register {
        // SAFETY: a live communicator, memory of that many bytes, and `out` stays valid until this has settled.
        Some(register) => unsafe { register(handle, memory.as_ptr().cast(), bytes, out, WINDOW_SYMMETRIC) },
        None => SUCCESS,
    });
    if let Err(what) = done {
        std::mem::forget(window); // NCCL may still write to it
        return Err(call.error(format!("ncclCommWindowRegister: {what}")));
    }
    // SAFETY: written at most once, before the call settled.
    Ok(unless_null(unsafe { out.read_volatile() }, Registration::Window))
}
