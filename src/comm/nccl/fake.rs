//! A fake NCCL for tests: communicators that complete after a given number of polls, fail, or never answer. Moves no
//! data.
use super::comm::Comm;
use super::library::{Handle, IN_PROGRESS, Nccl, NcclConfig, NcclOptions, SUCCESS, Stream, UniqueId};
use std::ffi::{c_char, c_int, c_void};
use std::sync::Arc;
use std::sync::atomic::{AtomicI32, AtomicUsize, Ordering::SeqCst};
use std::time::Duration;

/// Test controls of one communicator; the handle points to it.
#[derive(Default)]
pub struct FakeComm {
    /// Polls until the current operation is done; `i32::MAX`: never.
    pub polls: AtomicI32,
    /// What polls then return.
    pub result: AtomicI32,
    pub aborted: AtomicUsize,
    pub destroyed: AtomicUsize,
}

fn state(handle: Handle) -> &'static FakeComm {
    // SAFETY: handles of this library are leaked states.
    unsafe { &*handle.cast::<FakeComm>() }
}
extern "C" fn version(out: *mut c_int) -> c_int {
    // SAFETY: the caller's int.
    unsafe { *out = 22_809 };
    SUCCESS
}
extern "C" fn unique_id(_: *mut UniqueId) -> c_int {
    SUCCESS
}
/// The id starts with the state's address, followed by a byte for the polls.
extern "C" fn init(out: *mut Handle, _: c_int, id: UniqueId, _: c_int, _: *mut NcclConfig) -> c_int {
    let address = u64::from_le_bytes(std::array::from_fn(|i| id.0[i]));
    // SAFETY: the caller's handle.
    unsafe { *out = std::ptr::with_exposed_provenance_mut(address as usize) };
    IN_PROGRESS
}
extern "C" fn split(handle: Handle, _: c_int, _: c_int, out: *mut Handle, _: *mut NcclConfig) -> c_int {
    let new: &'static FakeComm = Box::leak(Box::default());
    let out = out as usize;
    // As in NCCL, a thread completes it after the call has returned.
    std::thread::spawn(move || {
        std::thread::sleep(Duration::from_millis(20));
        // SAFETY: the caller keeps the memory until the handle is written.
        unsafe {
            std::ptr::with_exposed_provenance_mut::<Handle>(out).write_volatile((&raw const *new).cast_mut().cast())
        };
    });
    let _ = state(handle).polls.fetch_update(SeqCst, SeqCst, |polls| (polls != i32::MAX).then_some(3));
    IN_PROGRESS
}
extern "C" fn finalize(_: Handle) -> c_int {
    IN_PROGRESS
}
extern "C" fn destroy(handle: Handle) -> c_int {
    state(handle).destroyed.fetch_add(1, SeqCst);
    SUCCESS
}
extern "C" fn abort(handle: Handle) -> c_int {
    state(handle).aborted.fetch_add(1, SeqCst);
    SUCCESS
}
extern "C" fn async_error(handle: Handle, out: *mut c_int) -> c_int {
    let s = state(handle);
    let left = s.polls.load(SeqCst);
    if left > 0 && left != i32::MAX {
        s.polls.store(left - 1, SeqCst);
    }
    // SAFETY: the caller's int.
    unsafe { *out = if left > 0 { IN_PROGRESS } else { s.result.load(SeqCst) } };
    SUCCESS
}
extern "C" fn gather(_: *const c_void, _: *mut c_void, _: usize, _: c_int, _: Handle, _: Stream) -> c_int {
    IN_PROGRESS
}
extern "C" fn reduce(_: *const c_void, _: *mut c_void, _: usize, _: c_int, _: c_int, _: Handle, _: Stream) -> c_int {
    IN_PROGRESS
}
extern "C" fn send(_: *const c_void, _: usize, _: c_int, _: c_int, _: Handle, _: Stream) -> c_int {
    SUCCESS
}
extern "C" fn recv(_: *mut c_void, _: usize, _: c_int, _: c_int, _: Handle, _: Stream) -> c_int {
    SUCCESS
}
extern "C" fn nothing() -> c_int {
    SUCCESS
}
extern "C" fn error_string(code: c_int) -> *const c_char {
    if code == 6 { c"remote process exited".as_ptr() } else { c"unhandled".as_ptr() }
}

pub fn nccl() -> Arc<Nccl> {
    Arc::new(Nccl {
        version,
        unique_id,
        init,
        split,
        finalize,
        destroy,
        abort,
        async_error,
        all_gather: gather,
        reduce_scatter: reduce,
        all_reduce: reduce,
        broadcast: reduce,
        send,
        recv,
        group_start: nothing,
        group_end: nothing,
        mem_alloc: None,
        mem_free: None,
        register: None,
        deregister: None,
        window_register: None,
        window_deregister: None,
        error_string,
        _library: libloading::os::unix::Library::this().into(),
    })
}

/// A communicator that is ready after that many polls.
pub fn comm(
    polls: i32,
    timeout: Duration,
    stop: &dyn Fn() -> Option<String>,
) -> (crate::base::Result<Comm>, &'static FakeComm) {
    let s: &'static FakeComm = Box::leak(Box::default());
    s.polls.store(polls, SeqCst);
    let mut id = [0; 128];
    id[..8].copy_from_slice(&((&raw const *s).expose_provenance() as u64).to_le_bytes());
    (Comm::init(nccl(), NcclOptions::default(), id, (0, 2), timeout, stop), s)
}
