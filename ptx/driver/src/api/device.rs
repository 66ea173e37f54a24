//! Initialization, errors, devices, contexts. Only primary contexts; cuCtxCreate is missing.
use super::call::{bound, call, give, number, waiting};
use crate::code::{Code, words};
use crate::kernels::{REGISTERS, THREADS, UNASKED, shared_most};
use crate::state::{CONTEXT, CONTEXTS, DriverState, attend, current_gpu, lock};
use std::ffi::{CStr, CString, c_char, c_int, c_uint};

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuInit(_flags: c_uint) -> c_int {
    let mut state = lock();
    match state.settings.init {
        0 if state.settings.gpus == 0 => Code::NO_DEVICE.0,
        0 => {
            state.ready = true;
            attend();
            0
        }
        code => code,
    }
}
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuDriverGetVersion(version: *mut c_int) -> c_int {
    number(unsafe { give(version, lock().settings.cuda) })
}
fn text(to: *mut *const c_char, code: c_int, choose: fn((&'static CStr, &'static CStr)) -> &'static CStr) -> c_int {
    let said = words(code).map(choose);
    // SAFETY: the caller's pointer, as in cuda.h.
    let given = unsafe { give(to, said.map_or(std::ptr::null(), CStr::as_ptr)) };
    number(given.and(said.map(|_| ()).ok_or(Code::INVALID_VALUE)))
}
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuGetErrorName(code: c_int, to: *mut *const c_char) -> c_int {
    text(to, code, |(name, _)| name)
}
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuGetErrorString(code: c_int, to: *mut *const c_char) -> c_int {
    text(to, code, |(_, meaning)| meaning)
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuDeviceGetCount(count: *mut c_int) -> c_int {
    call(|state| unsafe { give(count, state.settings.gpus as c_int) })
}
fn known(state: &DriverState, device: c_int) -> Result<usize, Code> {
    usize::try_from(device).ok().filter(|&d| d < state.settings.gpus).ok_or(Code::INVALID_DEVICE)
}
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuDeviceGet(device: *mut c_int, ordinal: c_int) -> c_int {
    call(|state| known(state, ordinal).and_then(|gpu| unsafe { give(device, gpu as c_int) }))
}
/// A name that nobody can mistake for a real GPU's.
pub fn name() -> &'static str {
    "Simulated GPU"
}
/// # Safety
/// `to` holds `room` bytes.
unsafe fn give_text(to: *mut c_char, room: c_int, text: &str) -> Result<(), Code> {
    let text = CString::new(text).map_err(|_| Code::UNKNOWN)?;
    let bytes = text.as_bytes_with_nul();
    if to.is_null() || (room as usize) < bytes.len() {
        return Err(Code::INVALID_VALUE);
    }
    // SAFETY: upheld by the caller, and the length was checked.
    unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr().cast(), to, bytes.len()) };
    Ok(())
}
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuDeviceGetName(to: *mut c_char, room: c_int, device: c_int) -> c_int {
    call(|state| known(state, device).and_then(|_| unsafe { give_text(to, room, name()) }))
}
/// "0000:00:00.0" for GPU 0: no real machine has a GPU there.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuDeviceGetPCIBusId(to: *mut c_char, room: c_int, device: c_int) -> c_int {
    call(|state| {
        let gpu = known(state, device)?;
        unsafe { give_text(to, room, &format!("0000:{gpu:02x}:00.0")) }
    })
}
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuDeviceGetUuid_v2(uuid: *mut [u8; 16], device: c_int) -> c_int {
    call(|state| {
        let mut bytes = *b"simulated GPU  \0";
        bytes[15] = known(state, device)? as u8;
        unsafe { give(uuid, bytes) }
    })
}
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuDeviceTotalMem_v2(bytes: *mut usize, device: c_int) -> c_int {
    call(|state| known(state, device).and_then(|_| unsafe { give(bytes, state.settings.bytes) }))
}
/// `CUdevice_attribute` by number. Unknown ones are an error, so that programs that query them are noticed.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuDeviceGetAttribute(value: *mut c_int, attribute: c_int, device: c_int) -> c_int {
    call(|state| {
        known(state, device)?;
        let (arch, shared) = (state.settings.arch, shared_most(state.settings.arch));
        let answer = match attribute {
            1 => 1024,                                     // threads of a block
            2 | 3 => 1024,                                 // .. along x and y
            4 => 64,                                       // .. along z
            5 => i32::MAX as usize,                        // blocks of a grid along x
            6 | 7 => 65535,                                // .. along y and z
            8 => UNASKED,                                  // shared bytes per block without opt-in
            10 => 32,                                      // threads of a warp
            12 | 82 => REGISTERS,                          // of a block; of a multiprocessor
            16 => state.settings.multiprocessors as usize, // multiprocessors
            19 | 41 => 1,                                  // mapped host memory, unified addressing
            39 => THREADS,                                 // threads of a multiprocessor
            75 => arch as usize / 10,                      // compute capability
            76 => arch as usize % 10,
            81 => shared + 1024, // shared bytes of a multiprocessor
            97 => shared,        // shared bytes per block with opt-in
            78 | 95 => 1,        // stream priorities, cooperative launches
            115 => 0,            // memory pools: no cuMemAllocAsync
            _ => return Err(Code::INVALID_VALUE),
        };
        unsafe { give(value, answer as c_int) }
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuDevicePrimaryCtxRetain(context: *mut u64, device: c_int) -> c_int {
    call(|state| known(state, device).and_then(|gpu| unsafe { give(context, CONTEXT + gpu as u64) }))
}
/// Keeps what the context holds, so a process that continues with it has not lost it.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuDevicePrimaryCtxRelease_v2(device: c_int) -> c_int {
    call(|state| known(state, device).map(|_| ()))
}
fn is_context(state: &DriverState, context: u64) -> Result<(), Code> {
    let gpus = CONTEXT..CONTEXT + state.settings.gpus as u64;
    if context == 0 || gpus.contains(&context) { Ok(()) } else { Err(Code::INVALID_CONTEXT) }
}
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuCtxGetCurrent(context: *mut u64) -> c_int {
    call(|_| unsafe { give(context, CONTEXTS.with_borrow(|all| all.last().copied()).unwrap_or(0)) })
}
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuCtxSetCurrent(context: u64) -> c_int {
    call(|state| {
        is_context(state, context)?;
        CONTEXTS.with_borrow_mut(|all| {
            all.pop();
            all.push(context);
        });
        Ok(())
    })
}
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuCtxPushCurrent_v2(context: u64) -> c_int {
    call(|state| {
        is_context(state, context)?;
        CONTEXTS.with_borrow_mut(|all| all.push(context));
        Ok(())
    })
}
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuCtxPopCurrent_v2(context: *mut u64) -> c_int {
    call(|_| {
        let popped = CONTEXTS.with_borrow_mut(Vec::pop).ok_or(Code::INVALID_CONTEXT)?;
        if context.is_null() { Ok(()) } else { unsafe { give(context, popped) } }
    })
}
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuCtxGetDevice(device: *mut c_int) -> c_int {
    call(|_| current_gpu().and_then(|gpu| unsafe { give(device, gpu as c_int) }))
}
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuCtxSetFlags(_flags: c_uint) -> c_int {
    bound(|_| Ok(()))
}
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuCtxSynchronize() -> c_int {
    waiting(|state| {
        state.uncaptured()?;
        let streams = state.streams.handles();
        Ok(streams.into_iter().map(|stream| state.streams.mark(stream)).collect())
    })
}
/// Lower numbers have priority, as on every GPU since 2013.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuCtxGetStreamPriorityRange(least: *mut c_int, greatest: *mut c_int) -> c_int {
    bound(|_| {
        for (to, value) in [(least, 0), (greatest, -5)] {
            if !to.is_null() {
                unsafe { give(to, value) }?;
            }
        }
        Ok(())
    })
}
