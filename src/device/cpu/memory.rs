//! Pages for buffers, which the kernel hands out zeroed, and bytes moved between them. Never converts.
use super::operands::length;
use crate::base::meter::Lease;
use crate::base::{DType, Error, Result};
use crate::device::buf::{Buf, Place, View, ViewMut};
use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap_anonymous, munmap};
use std::{ptr::NonNull, sync::Arc};

/// Buffers from here on ask for huge pages: one page of 2 MiB in place of 512.
const HUGE: usize = 4 << 20;

struct Pages {
    at: NonNull<u8>,
    bytes: usize,
    _lease: Lease,
}
// SAFETY: private anonymous memory, reached only through the `Buf` that owns it.
unsafe impl Send for Pages {}
// SAFETY: as above.
unsafe impl Sync for Pages {}

impl Drop for Pages {
    fn drop(&mut self) {
        // SAFETY: mapped by `alloc` with this length; the last holder is gone. Unmapping what was mapped cannot fail.
        let _ = unsafe { munmap(self.at.as_ptr().cast(), self.bytes) };
    }
}

/// Zeroed and page-aligned. An empty buffer takes one page, so that it has an address.
pub fn alloc(dtype: DType, len: usize, lease: Lease) -> Result<Buf> {
    alloc_at(Place::Host, dtype, len, lease)
}
/// The same, for an offloaded buffer say.
pub fn alloc_at(place: Place, dtype: DType, len: usize, lease: Lease) -> Result<Buf> {
    let bytes = (len * dtype.size()).max(1);
    // SAFETY: a fresh mapping at an address of the kernel's choice.
    let mapped =
        unsafe { mmap_anonymous(std::ptr::null_mut(), bytes, ProtFlags::READ | ProtFlags::WRITE, MapFlags::PRIVATE) };
    let at = match mapped {
        Ok(at) => at,
        Err(e) => return Err(lease.refused(e)),
    };
    let at = NonNull::new(at.cast::<u8>()).ok_or_else(|| Error::op("alloc", "mapped at address 0"))?;
    if bytes >= HUGE {
        // SAFETY: the range just mapped. Only advice: a kernel without huge pages refuses, and nothing is lost.
        let _ = unsafe { madvise(at.as_ptr().cast(), bytes, Advice::LinuxHugepage) };
    }
    let pages = Pages { at, bytes, _lease: lease };
    // SAFETY: page alignment fits every dtype; `pages` unmaps when the last holder of the Buf is gone.
    Ok(unsafe { Buf::from_raw(at, dtype, len, place, Arc::new(pages)) })
}

pub fn upload(src: &[u8], mut dst: ViewMut) -> Result<()> {
    length("upload", "source (bytes)", src.len(), dst.bytes())?;
    // SAFETY: `dst` is exclusive and holds as many bytes; every dtype takes any bits.
    unsafe { std::ptr::copy_nonoverlapping(src.as_ptr(), dst.as_mut_ptr(), src.len()) };
    Ok(())
}
pub fn download(src: View, dst: &mut [u8]) -> Result<()> {
    length("download", "destination (bytes)", dst.len(), src.bytes())?;
    // SAFETY: `dst` is exclusive and holds as many bytes.
    unsafe { std::ptr::copy_nonoverlapping(src.as_ptr(), dst.as_mut_ptr(), dst.len()) };
    Ok(())
}
/// Alike in dtype.
pub fn copy(src: View, mut dst: ViewMut) -> Result<()> {
    length("copy", "dst", dst.len(), src.len())?;
    // SAFETY: alike in dtype and length; `dst` is exclusive, so they do not overlap.
    unsafe { std::ptr::copy_nonoverlapping(src.as_ptr(), dst.as_mut_ptr(), src.bytes()) };
    Ok(())
}
pub fn zero(mut x: ViewMut) -> Result<()> {
    // SAFETY: `x` is exclusive; zero bits are zero in every dtype.
    unsafe { std::ptr::write_bytes(x.as_mut_ptr(), 0, x.bytes()) };
    Ok(())
}
