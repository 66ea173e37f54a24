//! Buffers that are addresses without memory, for plans: a model of any size can be laid out on any machine. Their
//! pointers must not be dereferenced: they claim to be GPU memory, at addresses that no process can map.
use super::buf::{Buf, Place};
use flatshard_base::meter::Lease;
use flatshard_base::{DType, Error, Result};
use rustix::mm::{MapFlags, ProtFlags, mmap_anonymous, munmap};
use std::ptr::{NonNull, without_provenance_mut};
use std::sync::Arc;

/// Above the range that a 64-bit process can map.
const NOWHERE: usize = 1 << 62;

/// The buffer claims to be at this object's own address plus [`NOWHERE`], so no other live buffer starts there.
#[repr(align(256))] // as devices align
struct Nowhere {
    _lease: Lease,
}

/// `len` elements that take neither memory nor address space, counted by `lease`.
pub fn alloc(dtype: DType, len: usize, lease: Lease) -> Result<Buf> {
    let owner = Arc::new(Nowhere { _lease: lease });
    let at = NonNull::new(without_provenance_mut(NOWHERE | Arc::as_ptr(&owner) as usize));
    let fits = len.checked_mul(dtype.size()).is_some_and(|bytes| bytes < NOWHERE);
    let at = at.filter(|_| fits).ok_or_else(|| failed(dtype, len, "exceeds the address space"))?;
    // SAFETY: `Place::Device` keeps the host from dereferencing it, and no device that launches kernels allocates here.
    Ok(unsafe { Buf::from_raw(at, dtype, len, Place::Device, owner) })
}

struct HostRange {
    at: NonNull<u8>,
    bytes: usize,
    _lease: Lease,
}
// SAFETY: holders of the buffer's views follow their rules, as with heap memory.
unsafe impl Send for HostRange {}
// SAFETY: as above.
unsafe impl Sync for HostRange {}

impl Drop for HostRange {
    fn drop(&mut self) {
        // SAFETY: mapped by `alloc_host` with this length; the last reference is gone.
        let _ = unsafe { munmap(self.at.as_ptr().cast(), self.bytes) };
    }
}

/// The same for offloaded buffers, which the host may access: pages are allocated when written.
pub fn alloc_host(dtype: DType, len: usize, lease: Lease) -> Result<Buf> {
    let bytes = len.checked_mul(dtype.size()).ok_or_else(|| failed(dtype, len, "exceeds the address space"))?.max(1);
    let (access, flags) = (ProtFlags::READ | ProtFlags::WRITE, MapFlags::PRIVATE | MapFlags::NORESERVE);
    // SAFETY: a fresh mapping at an address that the kernel chooses.
    let at = unsafe { mmap_anonymous(std::ptr::null_mut(), bytes, access, flags) };
    let at = at.map_err(|e| failed(dtype, len, &e.to_string()))?;
    let at = NonNull::new(at.cast::<u8>()).ok_or_else(|| failed(dtype, len, "address 0"))?;
    let owner = Arc::new(HostRange { at, bytes, _lease: lease });
    // SAFETY: page-aligned, and readable and writable as long as `owner` lives.
    Ok(unsafe { Buf::from_raw(at, dtype, len, Place::Mapped, owner) })
}

fn failed(dtype: DType, len: usize, why: &str) -> Error {
    Error::op("alloc", format!("cannot reserve addresses for {len} elements of {dtype}: {why}"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use flatshard_base::{Category, Meter};

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
