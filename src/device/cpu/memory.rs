//! Memory for buffers, which the kernel zeroes, and byte copies between them. Never converts.
use super::operands::length;
use crate::buf::{Buf, Place, View, ViewMut};
use crate::pages::HostPages;
use flatshard_base::meter::Lease;
use flatshard_base::{DType, Result};
use std::sync::Arc;

struct Leased {
    _pages: HostPages,
    _lease: Lease,
}

/// Zeroed and page-aligned. An empty buffer takes one page, so that it has an address.
pub fn alloc(dtype: DType, len: usize, lease: Lease) -> Result<Buf> {
    alloc_at(Place::Host, dtype, len, lease)
}
/// The same at another place, e.g. for offloaded buffers.
pub fn alloc_at(place: Place, dtype: DType, len: usize, lease: Lease) -> Result<Buf> {
    let pages = match HostPages::new(len * dtype.size()) {
        Ok(pages) => pages,
        Err(e) => return Err(lease.refused(e)),
    };
    let (at, owner) = (pages.at(), Leased { _pages: pages, _lease: lease });
    // SAFETY: page alignment fits every dtype; `owner` unmaps when the last reference to the Buf is gone.
    Ok(unsafe { Buf::from_raw(at, dtype, len, place, Arc::new(owner)) })
}

pub fn upload(src: &[u8], mut dst: ViewMut) -> Result<()> {
    length("upload", "source (bytes)", src.len(), dst.bytes())?;
    // SAFETY: `dst` is exclusive and of the same size; any bits are valid for every dtype.
    unsafe { std::ptr::copy_nonoverlapping(src.as_ptr(), dst.as_mut_ptr(), src.len()) };
    Ok(())
}
pub fn download(src: View, dst: &mut [u8]) -> Result<()> {
    length("download", "destination (bytes)", dst.len(), src.bytes())?;
    // SAFETY: `dst` is exclusive and of the same size.
    unsafe { std::ptr::copy_nonoverlapping(src.as_ptr(), dst.as_mut_ptr(), dst.len()) };
    Ok(())
}
/// Both must have the same dtype.
pub fn copy(src: View, mut dst: ViewMut) -> Result<()> {
    length("copy", "dst", dst.len(), src.len())?;
    // SAFETY: same dtype and length; `dst` is exclusive, so they do not overlap.
    unsafe { std::ptr::copy_nonoverlapping(src.as_ptr(), dst.as_mut_ptr(), src.bytes()) };
    Ok(())
}
pub fn zero(mut x: ViewMut) -> Result<()> {
    // SAFETY: `x` is exclusive; zero bits are zero in every dtype.
    unsafe { std::ptr::write_bytes(x.as_mut_ptr(), 0, x.bytes()) };
    Ok(())
}
