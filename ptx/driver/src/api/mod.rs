//! The functions of cuda.h, under their own names and signatures. Nothing but pointers is theirs: each looks at what it was given and asks
//! `state`. A function that is missing here is missing for the program too, which says its name.
//!
//! Safety, of all of them: pointers are null or as cuda.h says; null is an error where it is not allowed.
#![allow(non_snake_case)] // the names are NVIDIA's
#![allow(clippy::missing_safety_doc)] // said above, once
pub mod device;
pub mod event;
pub mod graph;
pub mod launch;
pub mod memory;
pub mod stream;

use crate::code::{Code, Result};
use crate::state::{State, current_gpu, lock};
use std::ffi::c_int;

fn number(result: Result) -> c_int {
    result.map_or_else(|code| code.0, |()| 0)
}
/// A call that needs an initialised driver and no context.
fn call(act: impl FnOnce(&mut State) -> Result) -> c_int {
    let mut state = lock();
    state.called();
    number(if state.ready { act(&mut state) } else { Err(Code::NOT_INITIALIZED) })
}
/// A call that needs a context that is not lost.
fn bound(act: impl FnOnce(&mut State) -> Result) -> c_int {
    call(|state| {
        current_gpu()?;
        state.lost.map_or(Ok(()), Err)?;
        act(state)
    })
}
/// The same, with something to wait for when the lock is open again.
fn waiting(act: impl FnOnce(&mut State) -> Result<Vec<std::sync::Arc<crate::queue::Mark>>>) -> c_int {
    let mut marks = vec![];
    let code = bound(|state| {
        marks = act(state)?;
        Ok(())
    });
    if code != 0 { code } else { number(crate::state::wait(&marks)) }
}
/// # Safety
/// `to` is null or can be written.
unsafe fn give<T>(to: *mut T, value: T) -> Result {
    if to.is_null() {
        return Err(Code::INVALID_VALUE);
    }
    // SAFETY: the caller's word.
    unsafe { to.write(value) };
    Ok(())
}
