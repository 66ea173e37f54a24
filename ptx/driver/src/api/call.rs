//! Shared by all functions of the driver: locking, checks, return codes.
use crate::code::{Code, CuResult};
use crate::state::{DriverState, current_gpu, lock};
use std::ffi::c_int;

pub fn number(result: CuResult) -> c_int {
    result.map_or_else(|code| code.0, |()| 0)
}
/// A call that needs an initialized driver and no context.
pub fn call(act: impl FnOnce(&mut DriverState) -> CuResult) -> c_int {
    let mut state = lock();
    state.called();
    number(if state.ready { act(&mut state) } else { Err(Code::NOT_INITIALIZED) })
}
/// A call that needs a context that has not been lost.
pub fn bound(act: impl FnOnce(&mut DriverState) -> CuResult) -> c_int {
    call(|state| {
        current_gpu()?;
        state.lost.map_or(Ok(()), Err)?;
        act(state)
    })
}
/// The same, returning events to wait for after unlocking.
pub fn waiting(act: impl FnOnce(&mut DriverState) -> CuResult<Vec<std::sync::Arc<crate::queue::StreamMark>>>) -> c_int {
    let mut marks = vec![];
    let code = bound(|state| {
        marks = act(state)?;
        Ok(())
    });
    if code != 0 { code } else { number(crate::state::wait(&marks)) }
}
/// # Safety
/// `to` is null or can be written.
pub unsafe fn give<T>(to: *mut T, value: T) -> CuResult {
    if to.is_null() {
        return Err(Code::INVALID_VALUE);
    }
    // SAFETY: upheld by the caller.
    unsafe { to.write(value) };
    Ok(())
}
