//! Buffers of [`Collective::alloc`](crate::comm::Collective::alloc): their addresses on each rank, who still reads
//! gathered contents, and when memory is freed. Never waits.
use super::arena::{Arena, Mapping, PAGE, aligned};
use super::record::BYTE;
use super::words::{Front, Reader};
use crate::base::meter::Lease;
use crate::base::{Category, DType, Error, Meter, Result};
use crate::comm::CommUse;
use crate::comm::seam::Seam;
use crate::device::buf::{Buf, Place};
use crate::device::pages::HUGE;
use std::ops::Range;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

pub(in crate::comm) struct ShmBuffer {
    arena: Arc<Arena>,
    /// The front pages, then one buffer, or one per rank.
    mapping: Mapping,
    file_offset: u64,
    front: usize,
    ranks: usize,
    me: usize,
    usage: CommUse,
    /// The allocating group, and the buffer's number in the group.
    group: u64,
    index: u64,
    bytes: usize,
    /// Distance between consecutive ranks' buffers.
    stride: usize,
    /// Number of gathers into this buffer that this rank has started.
    started: AtomicU64,
    _lease: Lease,
}

/// A group and a buffer's number in it: the same on all ranks.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) struct BufferName {
    pub group: u64,
    pub index: u64,
}
impl BufferName {
    /// The buffer that contains a place.
    pub fn of(group: u64, place: u64) -> BufferName {
        BufferName { group, index: place >> BYTE }
    }
}

/// Properties of a new buffer, and where in the arena there is room for it.
pub(super) struct BufferRequest {
    pub dtype: DType,
    pub len: usize,
    pub usage: CommUse,
    pub category: Category,
    pub ranks: usize,
    pub me: usize,
    pub group: u64,
    pub index: u64,
}

impl ShmBuffer {
    /// Allocates in the group's region at `cursor`, and advances it. All ranks get the same offset, because they
    /// allocate the same buffers in the same order.
    pub(super) fn new(arena: &Arc<Arena>, meter: &Meter, cursor: &mut u64, r: BufferRequest) -> Result<ShmBuffer> {
        let bytes = r.len * r.dtype.size();
        let front = (size_of::<Front>() + r.ranks * size_of::<Reader>()).next_multiple_of(PAGE);
        let each = aligned(bytes as u64, bytes) as usize;
        let (stride, copies) = if r.usage == CommUse::Gathered { (0, 1) } else { (each, r.ranks) };
        let data = aligned(*cursor + front as u64, bytes);
        let total = front + each * copies;
        let file_offset = data - front as u64;
        let lease = meter.lease_of(r.category, r.dtype, r.len, r.usage.counted(bytes, r.ranks));
        let mapping = match arena.map(file_offset, total) {
            Ok(mapping) => mapping,
            Err(e) => return Err(lease.refused(e)),
        };
        *cursor = file_offset + total as u64;
        // Its own buffer, or a share of the only one, where huge pages start.
        match r.usage {
            CommUse::Gathered => {
                let share = |rank: usize| (bytes * rank / r.ranks).next_multiple_of(HUGE).min(bytes);
                mapping.touch(front + share(r.me), share(r.me + 1) - share(r.me));
            }
            _ => mapping.touch(front + r.me * stride, bytes),
        }
        Ok(ShmBuffer {
            arena: arena.clone(),
            mapping,
            file_offset,
            front,
            ranks: r.ranks,
            me: r.me,
            usage: r.usage,
            group: r.group,
            index: r.index,
            bytes,
            stride,
            started: AtomicU64::new(0),
            _lease: lease,
        })
    }
    /// This rank's buffer as a compute buffer.
    pub(super) fn into_buf(self: Arc<Self>, dtype: DType, len: usize) -> Result<Buf> {
        let ptr = NonNull::new(self.of(self.me)).ok_or_else(|| Error::op(Seam::Alloc.name(), "mapped at address 0"))?;
        // SAFETY: page-aligned, `bytes` long, mapped as long as `self` lives; other ranks' accesses follow the
        // protocol.
        Ok(unsafe { Buf::from_raw(ptr, dtype, len, Place::Host, self) })
    }
    /// A rank's buffer.
    pub fn of(&self, rank: usize) -> *mut u8 {
        self.mapping.at(self.front + rank * self.stride)
    }
    /// Address range of this rank's buffer.
    pub fn range(&self) -> Range<usize> {
        let start = self.of(self.me) as usize;
        start..start + self.bytes
    }
    pub fn usage(&self) -> CommUse {
        self.usage
    }
    pub fn group(&self) -> u64 {
        self.group
    }
    pub fn stride(&self) -> usize {
        self.stride
    }
    pub(super) fn name(&self) -> BufferName {
        BufferName { group: self.group, index: self.index }
    }
    /// The place of byte `at` of the buffer: the same number on all ranks.
    pub fn place(&self, at: usize) -> u64 {
        self.index << BYTE | at as u64
    }
    /// The address of `place` in a rank's buffer.
    pub fn at(&self, rank: usize, place: u64) -> *const u8 {
        self.of(rank).wrapping_add((place & ((1 << BYTE) - 1)) as usize)
    }

    fn reader(&self, rank: usize) -> &Reader {
        // SAFETY: atomics.
        unsafe { self.mapping.shared(size_of::<Front>() + rank * size_of::<Reader>()) }
    }
    /// Starts a gather on this rank and returns the number of its contents.
    pub fn begin(&self) -> u64 {
        self.started.fetch_add(1, Relaxed)
    }
    /// Whether `rank` has released all contents before this one.
    pub fn free_of(&self, rank: usize, content: u64) -> bool {
        self.reader(rank).is_past(content)
    }
    /// This rank no longer reads these contents; it has released all earlier ones.
    pub fn release(&self, content: u64) {
        self.reader(self.me).release(content);
    }
}

impl Drop for ShmBuffer {
    fn drop(&mut self) {
        // SAFETY: atomics.
        let front: &Front = unsafe { self.mapping.shared(0) };
        // Only the last rank frees the memory: peers may still be reading.
        if front.drop_last(self.ranks) {
            self.arena.punch(self.file_offset, self.mapping.bytes());
        }
    }
}
