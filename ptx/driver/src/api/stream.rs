//! Streams: creation, destruction, waiting; host functions. Capture is in `graph`.
use super::call::{bound, give, waiting};
use crate::code::Code;
use crate::queue::at_once;
use crate::state::DriverState;
use std::ffi::{c_int, c_uint, c_void};

/// CU_STREAM_NON_BLOCKING.
const NON_BLOCKING: c_uint = 1;

/// # Safety
/// As in cuda.h.
unsafe fn create(state: &mut DriverState, to: *mut u64, flags: c_uint, priority: c_int) -> Result<(), Code> {
    if flags & !NON_BLOCKING != 0 {
        return Err(Code::INVALID_VALUE);
    }
    let handle = state.handle();
    state.streams.add(handle, flags & NON_BLOCKING == 0, priority.clamp(-5, 0));
    unsafe { give(to, handle) }
}
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuStreamCreate(to: *mut u64, flags: c_uint) -> c_int {
    bound(|state| unsafe { create(state, to, flags, 0) })
}
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuStreamCreateWithPriority(to: *mut u64, flags: c_uint, priority: c_int) -> c_int {
    bound(|state| unsafe { create(state, to, flags, priority) })
}
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuStreamGetPriority(stream: u64, priority: *mut c_int) -> c_int {
    bound(|state| {
        let known = state.streams.get(stream).ok_or(Code::INVALID_HANDLE)?;
        unsafe { give(priority, known.priority) }
    })
}
/// Returns at once; work already enqueued still runs.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuStreamDestroy_v2(stream: u64) -> c_int {
    bound(|state| {
        let orphan = state.handle();
        if stream <= crate::queue::PER_THREAD || state.streams.get(stream).is_none() {
            return Err(Code::INVALID_HANDLE);
        }
        state.streams.remove(stream, orphan);
        Ok(())
    })
}
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuStreamSynchronize(stream: u64) -> c_int {
    waiting(|state| {
        state.waitable(stream)?;
        Ok(vec![state.streams.mark(stream)])
    })
}
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuStreamQuery(stream: u64) -> c_int {
    bound(|state| {
        state.waitable(stream)?;
        state.step()?;
        let over = state.streams.get(stream).is_some_and(|s| s.is_empty());
        if over { Ok(()) } else { Err(Code::NOT_READY) }
    })
}
/// The function and its argument, which the program keeps alive until the call.
#[derive(Clone, Copy)]
struct HostCall(unsafe extern "C" fn(*mut c_void), *mut c_void);
// SAFETY: the program allows it by enqueuing it: CUDA calls it from one of its own threads.
unsafe impl Send for HostCall {}
unsafe impl Sync for HostCall {}
impl HostCall {
    fn run(&self) {
        // SAFETY: the program's function with the program's argument.
        unsafe { (self.0)(self.1) }
    }
}
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuLaunchHostFunc(
    stream: u64,
    function: Option<unsafe extern "C" fn(*mut c_void)>,
    data: *mut c_void,
) -> c_int {
    bound(|state| {
        let call = HostCall(function.ok_or(Code::INVALID_VALUE)?, data);
        state.enqueue(
            stream,
            at_once(move |_| {
                call.run();
                Ok(())
            }),
        )
    })
}
