//! Memory: allocation, copies, memset. What is checked at the call and what when it runs follows the driver's
//! documentation ("API synchronization behavior"): pinned host memory is read and written when the copy runs, other
//! host memory at the call.
use super::call::{bound, call, give, number, waiting};
use crate::code::{Code, CuResult};
use crate::queue::{LEGACY, Node, at_once};
use crate::state::{DriverState, alloc, current_gpu, free, lock, settle};
use std::ffi::{c_int, c_uint, c_void};

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemGetInfo_v2(available: *mut usize, total: *mut usize) -> c_int {
    bound(|state| {
        let all = state.settings.bytes;
        let used = state.memory.used(current_gpu()?);
        unsafe { give(available, all.saturating_sub(used)).and_then(|()| give(total, all)) }
    })
}
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemAlloc_v2(to: *mut u64, bytes: usize) -> c_int {
    let code = bound(|_| Ok(()));
    if code != 0 {
        return code;
    }
    number(alloc(bytes).and_then(|address| unsafe { give(to, address) }))
}
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemFree_v2(address: u64) -> c_int {
    let code = bound(|_| Ok(()));
    if code != 0 || address == 0 {
        return code;
    }
    number(free(address))
}
/// CU_MEMHOSTALLOC_PORTABLE, .._DEVICEMAP, .._WRITECOMBINED.
const HOST_FLAGS: c_uint = 7;
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemHostAlloc(to: *mut *mut c_void, bytes: usize, flags: c_uint) -> c_int {
    bound(|state| {
        state.uncaptured()?;
        if bytes == 0 || flags & !HOST_FLAGS != 0 {
            return Err(Code::INVALID_VALUE);
        }
        let at = state.memory.pin(bytes)?;
        unsafe { give(to, at.cast()) }
    })
}
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemFreeHost(at: *mut c_void) -> c_int {
    let code = bound(|state| state.uncaptured());
    if code != 0 {
        return code;
    }
    number(settle().and_then(|()| lock().memory.unpin(at as u64)))
}
/// With unified addressing, the device uses the host's address.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemHostGetDevicePointer_v2(to: *mut u64, at: *mut c_void, _flags: c_uint) -> c_int {
    bound(|state| match state.memory.is_pinned(at as u64) {
        true => unsafe { give(to, at as u64) },
        false => Err(Code::INVALID_VALUE),
    })
}

/// Source or destination of a copy.
#[derive(Clone, Copy)]
enum CopyEnd {
    /// Looked up when the copy runs.
    Known(u64),
    /// Ordinary host memory, which cannot be accessed after the call.
    Pageable(u64),
}
fn end(state: &DriverState, address: u64, bytes: usize) -> CuResult<CopyEnd> {
    match (state.memory.knows(address), state.memory.holds(address, bytes)) {
        (true, true) => Ok(CopyEnd::Known(address)),
        // An invalid or overrun device address: the driver checks at the call.
        (true, false) => Err(Code::INVALID_VALUE),
        (false, _) if address == 0 || address >= 1 << 47 => Err(Code::INVALID_VALUE),
        (false, _) => Ok(CopyEnd::Pageable(address)),
    }
}
fn move_bytes(from: u64, to: u64, bytes: usize) -> Node {
    at_once(move |memory| {
        let data = memory.read(from, bytes)?.to_vec();
        memory.write(to, bytes)?.copy_from_slice(&data);
        Ok(())
    })
}
/// Returns whether the call must wait for the copy.
///
/// # Safety
/// Host memory at `from` and `to` holds `bytes` bytes.
unsafe fn copy(state: &mut DriverState, to: u64, from: u64, bytes: usize, stream: u64) -> CuResult<bool> {
    if bytes == 0 {
        return Ok(false);
    }
    let captures = state.capture_of(stream)?.is_some();
    match (end(state, from, bytes)?, end(state, to, bytes)?) {
        (CopyEnd::Known(from), CopyEnd::Known(to)) => {
            state.enqueue(stream, move_bytes(from, to, bytes)).map(|()| false)
        }
        (CopyEnd::Pageable(from), CopyEnd::Known(to)) => {
            // SAFETY: upheld by the caller.
            let data = unsafe { std::slice::from_raw_parts(from as *const u8, bytes) }.to_vec();
            let put = at_once(move |memory| memory.write(to, bytes).map(|to| to.copy_from_slice(&data)));
            state.enqueue(stream, put).map(|()| false)
        }
        (CopyEnd::Known(from), CopyEnd::Pageable(to)) => {
            let fetch = at_once(move |memory| {
                let data = memory.read(from, bytes)?;
                // SAFETY: upheld by the caller: the call waits for this, or the graph's owner keeps it alive.
                unsafe { std::ptr::copy_nonoverlapping(data.as_ptr(), to as *mut u8, bytes) };
                Ok(())
            });
            state.enqueue(stream, fetch).map(|()| !captures)
        }
        (CopyEnd::Pageable(from), CopyEnd::Pageable(to)) => {
            // SAFETY: upheld by the caller.
            unsafe { std::ptr::copy(from as *const u8, to as *mut u8, bytes) };
            Ok(false)
        }
    }
}
/// # Safety
/// As for [`copy`].
unsafe fn copy_async(to: u64, from: u64, bytes: usize, stream: u64) -> c_int {
    waiting(|state| {
        let waits = unsafe { copy(state, to, from, bytes, stream) }?;
        Ok(if waits { vec![state.streams.mark(stream)] } else { vec![] })
    })
}
/// In the legacy stream, waiting for completion.
///
/// # Safety
/// As for [`copy`].
unsafe fn copy_now(to: u64, from: u64, bytes: usize) -> c_int {
    waiting(|state| {
        state.uncaptured()?;
        unsafe { copy(state, to, from, bytes, LEGACY) }?;
        Ok(vec![state.streams.mark(LEGACY)])
    })
}
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemcpy(to: u64, from: u64, bytes: usize) -> c_int {
    unsafe { copy_now(to, from, bytes) }
}
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemcpyHtoD_v2(to: u64, from: *const c_void, bytes: usize) -> c_int {
    unsafe { copy_now(to, from as u64, bytes) }
}
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemcpyDtoH_v2(to: *mut c_void, from: u64, bytes: usize) -> c_int {
    unsafe { copy_now(to as u64, from, bytes) }
}
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemcpyDtoD_v2(to: u64, from: u64, bytes: usize) -> c_int {
    unsafe { copy_now(to, from, bytes) }
}
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemcpyAsync(to: u64, from: u64, bytes: usize, stream: u64) -> c_int {
    unsafe { copy_async(to, from, bytes, stream) }
}
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemcpyHtoDAsync_v2(to: u64, from: *const c_void, bytes: usize, stream: u64) -> c_int {
    unsafe { copy_async(to, from as u64, bytes, stream) }
}
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemcpyDtoHAsync_v2(to: *mut c_void, from: u64, bytes: usize, stream: u64) -> c_int {
    unsafe { copy_async(to as u64, from, bytes, stream) }
}
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemcpyDtoDAsync_v2(to: u64, from: u64, bytes: usize, stream: u64) -> c_int {
    unsafe { copy_async(to, from, bytes, stream) }
}

fn set(state: &mut DriverState, to: u64, value: u8, bytes: usize, stream: u64) -> CuResult {
    if bytes == 0 {
        return Ok(());
    }
    match end(state, to, bytes)? {
        CopyEnd::Known(to) => {
            state.enqueue(stream, at_once(move |memory| memory.write(to, bytes).map(|to| to.fill(value))))
        }
        CopyEnd::Pageable(_) => Err(Code::INVALID_VALUE),
    }
}
/// On any memory that a device can access, with aligned words.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemsetD32Async(to: u64, value: c_uint, words: usize, stream: u64) -> c_int {
    bound(|state| {
        let (bytes, value) = (words * size_of::<u32>(), value.to_ne_bytes());
        match end(state, to, bytes)? {
            CopyEnd::Known(to) if to.is_multiple_of(4) => state.enqueue(
                stream,
                at_once(move |memory| {
                    let to = memory.write(to, bytes)?;
                    to.iter_mut().zip(value.iter().cycle()).for_each(|(to, from)| *to = *from);
                    Ok(())
                }),
            ),
            _ => Err(Code::INVALID_VALUE),
        }
    })
}
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemsetD8Async(to: u64, value: u8, bytes: usize, stream: u64) -> c_int {
    bound(|state| set(state, to, value, bytes, stream))
}
/// Does not wait if the memory is a device's.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemsetD8_v2(to: u64, value: u8, bytes: usize) -> c_int {
    bound(|state| {
        state.uncaptured()?;
        set(state, to, value, bytes, LEGACY)
    })
}

/// Supports only CU_POINTER_ATTRIBUTE_MEMORY_TYPE.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuPointerGetAttribute(to: *mut c_void, attribute: c_int, address: u64) -> c_int {
    call(|state| match (attribute, state.memory.is_pinned(address), state.memory.gpu_of(address)) {
        (2, true, _) => unsafe { give(to.cast::<c_uint>(), 1) },
        (2, _, Some(_)) => unsafe { give(to.cast::<c_uint>(), 2) },
        (2, ..) => Err(Code::INVALID_VALUE),
        _ => Err(Code::NOT_SUPPORTED),
    })
}
