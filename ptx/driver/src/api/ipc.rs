//! Memory shared with other processes: exported, opened, closed; host memory registered; and words that streams write
//! and wait for.
use super::call::{bound, give, number};
use crate::code::{Code, CuResult};
use crate::queue::{NodeProgress, at_once, node};
use crate::shared::IpcHandle;
use crate::state::{DriverState, lock, settle};
use std::ffi::{c_int, c_uint, c_void};
use std::sync::atomic::Ordering::{Acquire, Release};

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuIpcGetMemHandle(handle: *mut IpcHandle, address: u64) -> c_int {
    bound(|state| {
        state.uncaptured()?;
        let exported = state.memory.export(address)?;
        unsafe { give(handle, exported) }
    })
}
/// CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS is required.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuIpcOpenMemHandle_v2(to: *mut u64, handle: IpcHandle, flags: c_uint) -> c_int {
    bound(|state| {
        state.uncaptured()?;
        if flags != 1 {
            return Err(Code::INVALID_VALUE);
        }
        let address = state.memory.open(&handle)?;
        unsafe { give(to, address) }
    })
}
/// Like cuMemFree, first waits for all work.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuIpcCloseMemHandle(address: u64) -> c_int {
    let code = bound(|state| state.uncaptured());
    if code != 0 {
        return code;
    }
    number(settle().and_then(|()| lock().memory.close(address)))
}
/// CU_MEMHOSTREGISTER_PORTABLE and .._DEVICEMAP.
const REGISTER_FLAGS: c_uint = 3;
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemHostRegister_v2(at: *mut c_void, bytes: usize, flags: c_uint) -> c_int {
    bound(|state| {
        state.uncaptured()?;
        match flags & !REGISTER_FLAGS {
            0 => state.memory.register(at.cast(), bytes),
            _ => Err(Code::INVALID_VALUE),
        }
    })
}
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemHostUnregister(at: *mut c_void) -> c_int {
    let code = bound(|state| state.uncaptured());
    if code != 0 {
        return code;
    }
    number(settle().and_then(|()| lock().memory.unregister(at as u64)))
}

/// Only outside of graphs, with default flags: after all earlier work, and (a wait) until the word is not less than the
/// value, modulo 2^32.
fn plain(state: &mut DriverState, stream: u64, address: u64, flags: c_uint) -> CuResult {
    if state.capture_of(stream)?.is_some() {
        return Err(Code::NOT_SUPPORTED);
    }
    state.memory.word(address).map(|_| ())?;
    if flags == 0 { Ok(()) } else { Err(Code::NOT_SUPPORTED) }
}
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuStreamWriteValue32_v2(stream: u64, address: u64, value: c_uint, flags: c_uint) -> c_int {
    bound(|state| {
        plain(state, stream, address, flags)?;
        let write = at_once(move |memory| memory.word(address).map(|word| word.store(value, Release)));
        state.enqueue(stream, write)
    })
}
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuStreamWaitValue32_v2(stream: u64, address: u64, value: c_uint, flags: c_uint) -> c_int {
    bound(|state| {
        plain(state, stream, address, flags)?;
        if state.forgets_word() {
            return Ok(());
        }
        let poll = node(move || {
            Box::new(move |memory| {
                let ahead = memory.word(address)?.load(Acquire).wrapping_sub(value) as i32;
                Ok(if ahead >= 0 { NodeProgress::Done } else { NodeProgress::Waits })
            })
        });
        state.enqueue(stream, poll)
    })
}
