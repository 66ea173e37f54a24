//! Buffers that are addresses without memory: what a plan allocates, so that a model of any size can be laid out on a
//! machine of any size. Nobody may follow their pointers: to the host they are memory of a GPU, and the kernel has
//! mapped nothing there.
use super::buf::{Buf, Place};
use crate::base::meter::Lease;
use crate::base::{DType, Error, Result};
use rustix::mm::{MapFlags, ProtFlags, mmap_anonymous, munmap};
use std::{ptr::NonNull, sync::Arc};

struct Addresses {
    at: NonNull<u8>,
    bytes: usize,
    _lease: Lease,
}
// SAFETY: addresses that cannot be read or written.
unsafe impl Send for Addresses {}
// SAFETY: as above.
unsafe impl Sync for Addresses {}

impl Drop for Addresses {
    fn drop(&mut self) {
        // SAFETY: mapped by `alloc` with this length; the last holder is gone.
        let _ = unsafe { munmap(self.at.as_ptr().cast(), self.bytes) };
    }
}

/// `len` elements that take no memory, counted by `lease`. An error where addresses run out (128 TiB on x86-64).
pub fn alloc(dtype: DType, len: usize, lease: Lease) -> Result<Buf> {
    alloc_at(Place::Device, dtype, len, lease)
}
/// The same, for offloaded buffers say: what the host may follow takes memory once it is written.
pub fn alloc_at(place: Place, dtype: DType, len: usize, lease: Lease) -> Result<Buf> {
    let failed = |what: String| Error::op("alloc", format!("addresses for {len} elements of {dtype}: {what}"));
    let bytes = len.checked_mul(dtype.size()).ok_or_else(|| failed("more than there are".into()))?.max(1);
    let access = if place == Place::Device { ProtFlags::empty() } else { ProtFlags::READ | ProtFlags::WRITE };
    // SAFETY: a fresh mapping at an address of the kernel's choice.
    let at = unsafe {
        mmap_anonymous(std::ptr::null_mut(), bytes, access, MapFlags::PRIVATE | MapFlags::NORESERVE)
            .map_err(|e| failed(e.to_string()))?
    };
    let at = NonNull::new(at.cast::<u8>()).ok_or_else(|| failed("address 0".into()))?;
    let owner = Arc::new(Addresses { at, bytes, _lease: lease });
    // SAFETY: page-aligned and reserved as long as `owner` lives; the host may read and write unless `Place::Device`
    // keeps it from that, and no device that launches kernels allocates here.
    Ok(unsafe { Buf::from_raw(at, dtype, len, place, owner) })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::base::{Category, Meter};

    #[test]
    fn a_terabyte_is_addressed_counted_and_never_read() {
        let meter = Meter::default();
        let elements = 1usize << 38;
        let mut buf = alloc(DType::F32, elements, meter.lease(Category::Params, elements * 4)).unwrap();
        assert_eq!((buf.bytes(), meter.live(Category::Params)), (1 << 40, 1 << 40));
        let end = buf.view().slice(elements - 1..elements);
        assert_eq!(end.address() - buf.view().address(), (1 << 40) - 4);
        assert!(end.host::<f32>("test").is_err() && buf.view_mut().host_bytes_mut("test").is_err());
        drop(buf);
        assert_eq!(meter.total(), 0);
        assert!(alloc(DType::F32, usize::MAX / 2, meter.lease(Category::Params, 0)).is_err());
    }
}
