//! Brings fresh memory into place before a step needs it, in huge pages where the system gives them: a fault, with 4
//! KiB to clear, takes as long as some 10,000 multiplications. Never changes contents; what the system refuses (old
//! kernels, no free huge pages) comes page by page, when it is used.
use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap_anonymous, munmap};
use std::ffi::c_int;
use std::ptr::NonNull;

/// Bytes of a huge page.
pub const HUGE: usize = 2 << 20;

/// Linux's advice to replace a range by huge pages now. It also works on shared memory where huge pages are off by
/// default, as on most systems. rustix does not have it.
const MADV_COLLAPSE: c_int = 25;
mod system {
    use std::ffi::{c_int, c_void};
    unsafe extern "C" {
        pub fn madvise(at: *mut c_void, bytes: usize, advice: c_int) -> c_int;
    }
}

/// Zeroed memory from the system, from the start of a page on, of a huge one if it fills one.
pub struct HostPages {
    at: NonNull<u8>,
    bytes: usize,
}
// SAFETY: private anonymous memory, accessed only through its owner.
unsafe impl Send for HostPages {}
// SAFETY: as above.
unsafe impl Sync for HostPages {}

impl HostPages {
    /// At least one byte, so that it has an address.
    pub fn new(bytes: usize) -> rustix::io::Result<HostPages> {
        const PAGE: usize = 4096;
        let bytes = bytes.max(1).next_multiple_of(PAGE);
        let spare = if bytes < HUGE { 0 } else { HUGE - PAGE };
        // SAFETY: a fresh mapping at an address that the kernel chooses, of which whole pages before and after the
        // result are unmapped again. Advice changes no contents; what is smaller than a huge page asks for one too,
        // since neighbors with the same advice share them.
        let at = unsafe {
            let flags = (ProtFlags::READ | ProtFlags::WRITE, MapFlags::PRIVATE);
            let all = mmap_anonymous(std::ptr::null_mut(), bytes + spare, flags.0, flags.1)?;
            let before = if spare == 0 { 0 } else { (all as usize).next_multiple_of(HUGE) - all as usize };
            let at = all.byte_add(before);
            for (at, bytes) in [(all, before), (at.byte_add(bytes), spare - before)] {
                if bytes > 0 {
                    munmap(at, bytes)?;
                }
            }
            let _ = madvise(at, bytes, Advice::LinuxHugepage);
            at
        };
        NonNull::new(at.cast()).map(|at| HostPages { at, bytes }).ok_or(rustix::io::Errno::NOMEM)
    }
    pub fn at(&self) -> NonNull<u8> {
        self.at
    }
    pub fn bytes(&self) -> usize {
        self.bytes
    }
}

impl Drop for HostPages {
    fn drop(&mut self) {
        // SAFETY: mapped by `new` with this length. Unmapping a mapping cannot fail.
        let _ = unsafe { munmap(self.at.as_ptr().cast(), self.bytes) };
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
