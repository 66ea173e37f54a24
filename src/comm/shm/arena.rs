//! The memory that all ranks of a host map: a sparse memfd. Ranks map only what they use, each for itself, so threads
//! in a test run the same code as processes. Never interprets what is stored in it.
//!
//! [Note: sanitizer] A thread sanitizer identifies memory by address, so it would not see that two threads' mappings
//! are shared. With cfg(tsan) (scripts/tsan_check.sh) an arena maps each part once for all its threads.
use crate::base::{Error, Result};
use crate::device::pages::{self, HUGE};
use rustix::fs::{FallocateFlags, MemfdFlags, fallocate, ftruncate, memfd_create};
use rustix::io::Errno;
use rustix::mm::{MapFlags, ProtFlags, mmap, mmap_anonymous, munmap};
use std::fs::{File, OpenOptions};
use std::os::fd::{AsRawFd, RawFd};
use std::os::unix::fs::FileExt;
use std::ptr::NonNull;

pub(super) const PAGE: usize = 4096;
/// File offsets reserved for one group. The file is sparse and unused offsets cost nothing, so groups need not
/// coordinate.
pub(super) const REGION: u64 = 4 << 40;
/// Regions 1.. are for groups, one for each axis (see [`Arena::region`]); region 0 holds the header.
const GROUPS_PER_RANK: u64 = 10;
/// Offset of the nonce that identifies this arena (see `rendezvous`): the last word of region 0.
const NONCE_AT: u64 = REGION - 8;

/// A memfd. Its number may be passed to child processes, which [`Arena::open`] it.
#[derive(Debug)]
pub struct Arena {
    file: File,
    world: usize,
    #[cfg(tsan)]
    maps: Maps,
}

/// See [Note: sanitizer].
#[cfg(tsan)]
type Maps = std::sync::Mutex<std::collections::HashMap<(u64, usize), usize>>;

impl Arena {
    /// Creates an arena for `world` ranks. Inherited by child processes (not close-on-exec).
    pub fn create(world: usize) -> Result<Arena> {
        let failed = |what, e| Error::Run(format!("shared memory: {what}: {e}"));
        let fd = memfd_create("flatshard", MemfdFlags::empty()).map_err(|e| failed("memfd_create", e))?;
        ftruncate(&fd, REGION * (1 + GROUPS_PER_RANK * world as u64)).map_err(|e| match e {
            Errno::FBIG => {
                Error::input("the file-size limit blocks the shared-memory arena: run `ulimit -f unlimited`")
            }
            e => failed("ftruncate", e),
        })?;
        Ok(Arena::of(File::from(fd), world))
    }
    /// Opens the arena behind descriptor `fd` of this process.
    pub fn open(fd: RawFd, world: usize) -> Result<Arena> {
        Arena::open_path(&format!("/proc/self/fd/{fd}"), world)
    }
    pub(super) fn open_path(path: &str, world: usize) -> Result<Arena> {
        let file =
            OpenOptions::new().read(true).write(true).open(path).map_err(|e| Error::io("open arena", path, e))?;
        let bytes = file.metadata().map_err(|e| Error::io("stat arena", path, e))?.len();
        let needs = REGION * (1 + GROUPS_PER_RANK * world as u64);
        if bytes != needs {
            return Err(Error::input(format!(
                "{path} is not the shared-memory arena of {world} ranks ({bytes} bytes)"
            )));
        }
        Ok(Arena::of(file, world))
    }
    fn of(file: File, world: usize) -> Arena {
        Arena {
            file,
            world,
            #[cfg(tsan)]
            maps: Maps::default(),
        }
    }
    /// The descriptor that child processes inherit.
    pub fn fd(&self) -> RawFd {
        self.file.as_raw_fd()
    }
    pub(super) fn nonce(&self) -> Option<u64> {
        let mut bytes = [0; 8];
        self.file.read_exact_at(&mut bytes, NONCE_AT).ok()?;
        Some(u64::from_ne_bytes(bytes))
    }
    pub(super) fn set_nonce(&self, nonce: u64) -> Result<()> {
        self.file.write_all_at(&nonce.to_ne_bytes(), NONCE_AT).map_err(|e| Error::io("write", "arena", e))
    }
    pub(super) fn world(&self) -> usize {
        self.world
    }
    /// Start of the region of the group of `axis` whose first world rank is `lead`.
    pub(super) fn region(&self, axis: usize, lead: usize) -> u64 {
        debug_assert!((axis as u64) < GROUPS_PER_RANK && lead < self.world);
        REGION * (1 + (axis * self.world + lead) as u64)
    }
    /// Maps `bytes`, rounded up to pages, at an address that is equal to `offset` modulo [`HUGE`], as huge pages need.
    /// Memory never written is zero.
    pub(super) fn map(&self, offset: u64, bytes: usize) -> Result<Mapping> {
        let bytes = bytes.max(1).next_multiple_of(PAGE);
        #[cfg(tsan)]
        let mut maps = self.maps.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        #[cfg(tsan)]
        if let Some(ptr) = maps.get(&(offset, bytes)).and_then(|&at| NonNull::new(at as *mut u8)) {
            return Ok(Mapping { ptr, bytes });
        }
        let (prot, flags) = (ProtFlags::READ | ProtFlags::WRITE, MapFlags::SHARED | MapFlags::NORESERVE);
        let failed = |e| Error::Run(format!("shared memory: mmap of {bytes} bytes: {e}"));
        let reserve = MapFlags::PRIVATE | MapFlags::NORESERVE;
        let room = bytes + HUGE;
        // SAFETY: a fresh mapping at an address that the kernel chooses. Of it, a range is replaced by the file, which
        // is never truncated after creation, and the rest is returned.
        let ptr = unsafe {
            let at = mmap_anonymous(std::ptr::null_mut(), room, ProtFlags::empty(), reserve).map_err(failed)?;
            let before = (offset as usize).wrapping_sub(at as usize) % HUGE;
            let start = at.byte_add(before);
            let mapped = mmap(start, bytes, prot, flags | MapFlags::FIXED, &self.file, offset);
            for (at, bytes) in [(at, before), (start.byte_add(bytes), HUGE - before)] {
                let _ = if bytes > 0 { munmap(at, bytes) } else { Ok(()) };
            }
            mapped.inspect_err(|_| _ = munmap(start, bytes)).map_err(failed)?
        };
        let ptr =
            NonNull::new(ptr.cast()).ok_or_else(|| Error::Run("shared memory: mmap returned address 0".into()))?;
        #[cfg(tsan)]
        maps.insert((offset, bytes), ptr.as_ptr() as usize);
        Ok(Mapping { ptr, bytes })
    }
    /// Returns the pages to the system; they read as zero afterwards.
    pub(super) fn punch(&self, offset: u64, bytes: usize) {
        let bytes = bytes.next_multiple_of(PAGE) as u64;
        // Kernels without hole punching refuse; the memory then stays until the arena is gone.
        let _ = fallocate(&self.file, FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE, offset, bytes);
    }
}

/// The first offset at or after `offset` where a buffer of that many bytes may start.
pub(super) fn aligned(offset: u64, bytes: usize) -> u64 {
    offset.next_multiple_of(if bytes >= HUGE { HUGE } else { PAGE } as u64)
}

pub(super) struct Mapping {
    ptr: NonNull<u8>,
    bytes: usize,
}

// SAFETY: plain memory; the group's protocol determines who may touch which part when.
unsafe impl Send for Mapping {}
unsafe impl Sync for Mapping {}

impl Mapping {
    pub fn bytes(&self) -> usize {
        self.bytes
    }
    /// `offset` must be within the mapping or at its end.
    pub fn at(&self, offset: usize) -> *mut u8 {
        assert!(offset <= self.bytes, "offset {offset} is beyond the mapping's {} bytes", self.bytes);
        // SAFETY: within the mapping.
        unsafe { self.ptr.as_ptr().add(offset) }
    }
    /// Brings a range of pages into place.
    pub fn touch(&self, offset: usize, bytes: usize) {
        assert!(offset + bytes <= self.bytes, "{bytes} bytes at {offset} are beyond the mapping's {}", self.bytes);
        // SAFETY: within the mapping, whose address `Arena::map` chose.
        unsafe { pages::touch_shared(self.at(offset), bytes) };
    }
    /// A word or record in the arena.
    ///
    /// # Safety
    /// `T` is made of atomics and `UnsafeCell`s, and every bit pattern is valid for it.
    pub unsafe fn shared<T>(&self, offset: usize) -> &T {
        assert!(offset.is_multiple_of(align_of::<T>()) && offset + size_of::<T>() <= self.bytes);
        // SAFETY: aligned and inside (asserted; pages are 4096-aligned), initialized (fresh pages are zero).
        unsafe { &*self.at(offset).cast() }
    }
}

#[cfg(not(tsan))]
impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: mapped by `Arena::map` with this length; nothing borrows it any more.
        let _ = unsafe { munmap(self.ptr.as_ptr().cast(), self.bytes) };
    }
}

/// Mappings live as long as the arena, which every rank holds.
#[cfg(tsan)]
impl Drop for Arena {
    fn drop(&mut self) {
        for ((_, bytes), at) in self.maps.get_mut().unwrap_or_else(std::sync::PoisonError::into_inner).drain() {
            // SAFETY: mapped by `Arena::map` with this length; all users held the arena.
            let _ = unsafe { munmap(at as *mut _, bytes) };
        }
    }
}
