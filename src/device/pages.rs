//! Brings fresh memory into place before a step needs it, in huge pages where the system gives them: a fault, with 4
//! KiB to clear, takes as long as some 10,000 multiplications. Never changes contents; what the system refuses (old
//! kernels, no free huge pages) comes page by page, when it is used.
use rustix::mm::{Advice, madvise};
use std::ffi::{c_int, c_void};

/// Bytes of a huge page.
pub const HUGE: usize = 2 << 20;

/// Linux's advice to replace a range by huge pages now. It also works on shared memory where huge pages are off by
/// default, as on most systems. rustix does not have it.
const MADV_COLLAPSE: c_int = 25;
mod system {
    use super::{c_int, c_void};
    unsafe extern "C" {
        pub fn madvise(at: *mut c_void, bytes: usize, advice: c_int) -> c_int;
    }
}

/// Requests huge pages for a private mapping that nothing has used yet.
///
/// # Safety
/// The range is mapped.
pub unsafe fn prefer_huge(at: *mut u8, bytes: usize) {
    if bytes >= HUGE {
        // SAFETY: upheld by the caller. Advice changes no contents.
        let _ = unsafe { madvise(at.cast(), bytes, Advice::LinuxHugepage) };
    }
}

/// Brings writable pages into place.
///
/// # Safety
/// The range starts at a page and is mapped.
pub unsafe fn touch(at: *mut u8, bytes: usize) {
    // SAFETY: upheld by the caller. Advice changes no contents.
    let _ = unsafe { madvise(at.cast(), bytes, Advice::LinuxPopulateWrite) };
}

/// The same in a mapping of shared memory, whose addresses and file offsets are equal modulo [`HUGE`].
///
/// # Safety
/// As for [`touch`].
pub unsafe fn touch_shared(at: *mut u8, bytes: usize) {
    const PAGE: usize = 4096;
    let first = (at as usize).next_multiple_of(HUGE) - at as usize;
    let (mut done, end) = (first.min(bytes), first.min(bytes) + bytes.saturating_sub(first) / HUGE * HUGE);
    // SAFETY: upheld by the caller: all ranges are within its range.
    unsafe {
        touch(at, done);
        // A huge page is made from at least one small one, and its other pages need not be cleared twice.
        while done < end {
            touch(at.add(done), PAGE);
            if system::madvise(at.add(done).cast(), HUGE, MADV_COLLAPSE) != 0 {
                break;
            }
            done += HUGE;
        }
        touch(at.add(done), bytes - done);
    }
}
