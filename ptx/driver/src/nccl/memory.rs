//! Memory of nccl.h: allocation, registration with a communicator, symmetric windows. Only this file and `api`
//! dereference callers' pointers. Never reads or writes the memory.
use super::api::{code, find, fresh, live, settle};
use super::code::{INVALID_ARGUMENT, INVALID_USAGE, SUCCESS, UNHANDLED_CUDA_ERROR};
use super::comm::{NcclComm, Registered, complain, lock};
use super::settings::{self, is_set};
use super::wire::FrameKind;
use std::ffi::{c_int, c_void};
use std::sync::Mutex;
use std::sync::atomic::Ordering::SeqCst;

/// At least two pages of 2 MiB: `ncclMemAlloc`'s granularity.
const GRANULE: usize = 2 << 20;
/// `NCCL_WIN_REQUIRED_ALIGNMENT`.
const ALIGNED: u64 = 4096;
/// `NCCL_WIN_COLL_SYMMETRIC`.
const SYMMETRIC: c_int = 1;
/// The first version with windows that collectives use, 2.27.3.
const WINDOWS: c_int = 22_703;

/// Live memory of `ncclMemAlloc`: address, bytes, and the driver's address, which has a smaller alignment. Windows need
/// such memory, which peers can map.
static ALLOCATED: Mutex<Vec<(u64, usize, u64)>> = Mutex::new(Vec::new());

/// # Safety
/// `out` can hold an address.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclMemAlloc(out: *mut *mut c_void, bytes: usize) -> c_int {
    let whole = bytes.max(1).next_multiple_of(GRANULE);
    match crate::alloc(whole + ALIGNED as usize) {
        Ok(of_driver) => {
            let address = of_driver.next_multiple_of(ALIGNED);
            lock(&ALLOCATED).push((address, whole, of_driver));
            // SAFETY: the caller's pointer.
            unsafe { *out = address as *mut c_void };
            SUCCESS
        }
        Err(_) => UNHANDLED_CUDA_ERROR,
    }
}

#[unsafe(no_mangle)]
pub extern "C" fn ncclMemFree(at: *mut c_void) -> c_int {
    let at = at as u64;
    let holds = |comm: &NcclComm| lock(&comm.registered).iter().any(|known| known.start == at);
    if live().iter().any(|comm| holds(comm)) {
        complain(&format!("ncclMemFree of {at:#x}, which is still registered"));
        return INVALID_USAGE;
    }
    let known = {
        let mut allocated = lock(&ALLOCATED);
        let known = allocated.iter().position(|(start, ..)| *start == at);
        known.map(|known| allocated.remove(known))
    };
    match known.map(|(.., of_driver)| crate::free(of_driver)) {
        Some(Ok(())) => SUCCESS,
        Some(Err(_)) => UNHANDLED_CUDA_ERROR,
        None => {
            complain(&format!("ncclMemFree of {at:#x}, which ncclMemAlloc did not return"));
            INVALID_ARGUMENT
        }
    }
}

/// # Safety
/// `out` can hold a handle.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclCommRegister(
    handle: *mut c_void,
    at: *mut c_void,
    bytes: usize,
    out: *mut *mut c_void,
) -> c_int {
    code(find(handle).and_then(|comm| {
        if at.is_null() || bytes == 0 {
            return Err(INVALID_ARGUMENT);
        }
        let registered = (!is_set("unregistered")).then(|| {
            let registered = Registered { handle: 0x20_0000 + 64 * fresh(), start: at as u64, bytes, window: false };
            lock(&comm.registered).push(registered);
            registered.handle
        });
        // SAFETY: the caller's handle.
        unsafe { *out = registered.unwrap_or(0) as *mut c_void };
        Ok(SUCCESS)
    }))
}

#[unsafe(no_mangle)]
pub extern "C" fn ncclCommDeregister(handle: *mut c_void, registration: *mut c_void) -> c_int {
    code(find(handle).and_then(|comm| forget(&comm, registration, false)))
}

fn forget(comm: &NcclComm, handle: *mut c_void, window: bool) -> Result<c_int, c_int> {
    let mut registered = lock(&comm.registered);
    let at = registered.iter().position(|known| known.handle == handle as usize && known.window == window);
    registered.remove(at.ok_or_else(|| {
        complain(&format!("{handle:?} is not registered with this communicator, or as something else"));
        INVALID_ARGUMENT
    })?);
    Ok(SUCCESS)
}

/// Why a window cannot be registered, whatever the other ranks do. The real library would return a null window for
/// some of it, or an error.
fn unfit(at: u64, bytes: usize, flags: c_int, allocated: &[(u64, usize, u64)]) -> Option<String> {
    let inside = |&(start, whole, _): &(u64, usize, u64)| start <= at && at + bytes as u64 <= start + whole as u64;
    if bytes == 0 || !at.is_multiple_of(ALIGNED) {
        return Some(format!("{bytes} bytes at {at:#x}: a window has at least one, aligned to {ALIGNED}"));
    }
    if flags != SYMMETRIC {
        return Some(format!("flags {flags}, not NCCL_WIN_COLL_SYMMETRIC"));
    }
    (!allocated.iter().any(inside)).then(|| format!("{bytes} bytes at {at:#x} are not of ncclMemAlloc"))
}

/// Every rank calls, with as many bytes and the same flags. The window is there once the communicator is no longer in
/// progress; null where the library has none.
///
/// # Safety
/// `out` can hold a handle until then.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclCommWindowRegister(
    handle: *mut c_void,
    at: *mut c_void,
    bytes: usize,
    out: *mut *mut c_void,
    flags: c_int,
) -> c_int {
    code((|| {
        let comm = find(handle)?;
        comm.ready()?;
        let why = match settings::version() < WINDOWS {
            true => Some("this version has no windows".into()),
            false => unfit(at as u64, bytes, flags, &lock(&ALLOCATED)),
        };
        if let Some(why) = why {
            complain(&format!("ncclCommWindowRegister : {why}"));
            return Err(INVALID_ARGUMENT);
        }
        // SAFETY: the caller's handle; null until the ranks have met.
        unsafe { *out = std::ptr::null_mut() };
        if is_set("forget_window") {
            return Ok(SUCCESS); // a planted mistake: as if the program had not called
        }
        let (at, out) = (at as u64, out as usize);
        comm.in_background(move |comm| {
            let number = comm.request(FrameKind::Window, [bytes as u64, flags as u64, 0, 0, 0], Vec::new());
            let Some(frame) = comm.wait(number) else { return Ok(()) };
            if frame.kind != FrameKind::Done {
                return Err((frame.words[0] as c_int, String::from_utf8_lossy(&frame.body).into_owned()));
            }
            if is_set("unregistered") || is_set("windowless") {
                return Ok(());
            }
            let window = 0x40_0000 + 64 * fresh();
            lock(&comm.registered).push(Registered { handle: window, start: at, bytes, window: true });
            comm.windows.fetch_add(1, SeqCst);
            // SAFETY: the caller keeps the memory until the call is complete.
            unsafe { (out as *mut *mut c_void).write_volatile(window as *mut c_void) };
            Ok(())
        });
        Ok(settle(&comm))
    })())
}

/// Local to the rank. A null window is none.
#[unsafe(no_mangle)]
pub extern "C" fn ncclCommWindowDeregister(handle: *mut c_void, window: *mut c_void) -> c_int {
    code(find(handle).and_then(|comm| match window.is_null() || is_set("keep_window") {
        true => Ok(SUCCESS), // the latter a planted mistake: as if the program had not called
        false => forget(&comm, window, true),
    }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn windows_are_of_aligned_memory_that_nccl_allocated() {
        let allocated = [(0x20_0000, GRANULE, 0x20_0000)];
        assert_eq!(unfit(0x20_0000, GRANULE, SYMMETRIC, &allocated), None);
        assert_eq!(unfit(0x20_1000, 8, SYMMETRIC, &allocated), None);
        for (at, bytes, flags, says) in [
            (0x20_0000, GRANULE + 1, SYMMETRIC, "not of ncclMemAlloc"),
            (0x10_0000, 4096, SYMMETRIC, "not of ncclMemAlloc"),
            (0x20_0100, 4096, SYMMETRIC, "aligned to 4096"),
            (0x20_0000, 0, SYMMETRIC, "at least one"),
            (0x20_0000, 4096, 0, "NCCL_WIN_COLL_SYMMETRIC"),
        ] {
            let why = unfit(at, bytes, flags, &allocated).unwrap();
            assert!(why.contains(says), "{why}");
        }
    }
}
