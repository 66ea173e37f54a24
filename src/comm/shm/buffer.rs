//! Buffers of [`Collective::alloc`](crate::comm::Collective::alloc): where each rank's is, who still reads what was
//! gathered, and when the memory goes back. Never waits.
use super::arena::{Arena, Mapping, PAGE, aligned};
use super::record::BYTE;
use super::words::{Front, Reader};
use crate::base::meter::Lease;
use crate::base::{Category, DType, Error, Meter, Result};
use crate::comm::CommUse;
use crate::comm::seam::Seam;
use crate::device::buf::{Buf, Place};
use std::ops::Range;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

pub(in crate::comm) struct ShmBuffer {
    arena: Arc<Arena>,
    /// The pages in front, then the buffer, or one for each rank.
    mapping: Mapping,
    file_offset: u64,
    front: usize,
    ranks: usize,
    me: usize,
    usage: CommUse,
    /// The allocating group, and the number of this buffer among its own.
    group: u64,
    index: u64,
    bytes: usize,
    /// From one rank's buffer to the next one's.
    stride: usize,
    /// Gathers into this buffer that this rank has started.
    started: AtomicU64,
    _lease: Lease,
}

/// A group, and the number of a buffer among its own: the same on all ranks.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) struct BufferName {
    pub group: u64,
    pub index: u64,
}
impl BufferName {
    /// Of the buffer that a place is in.
    pub fn of(group: u64, place: u64) -> BufferName {
        BufferName { group, index: place >> BYTE }
    }
}

/// What a new buffer is to be, and where in the arena there is room for it.
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
    /// The buffer in the group's region from `cursor` on, which moves behind it: alike on all ranks, since all of them
    /// allocate the same in the same order.
    pub(super) fn new(arena: &Arc<Arena>, meter: &Meter, cursor: &mut u64, r: BufferRequest) -> Result<ShmBuffer> {
        let bytes = r.len * r.dtype.size();
        let front = (size_of::<Front>() + r.ranks * size_of::<Reader>()).next_multiple_of(PAGE);
        let stride = if r.usage == CommUse::Gathered { 0 } else { bytes.next_multiple_of(PAGE) };
        let copies = if r.usage == CommUse::Gathered { 1 } else { r.ranks };
        let data = aligned(*cursor + front as u64, bytes);
        let total = front + bytes.next_multiple_of(PAGE) * copies;
        let file_offset = data - front as u64;
        let lease = meter.lease_of(r.category, r.dtype, r.len, r.usage.counted(bytes, r.ranks));
        let mapping = match arena.map(file_offset, total) {
            Ok(mapping) => mapping,
            Err(e) => return Err(lease.refused(e)),
        };
        *cursor = file_offset + total as u64;
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
    /// This rank's buffer, to compute with.
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
    /// Addresses of this rank's buffer.
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
    /// Names byte `at` of the buffer, alike on all ranks.
    pub fn place(&self, at: usize) -> u64 {
        self.index << BYTE | at as u64
    }
    /// The byte of a rank's buffer that `place` names.
    pub fn at(&self, rank: usize, place: u64) -> *const u8 {
        self.of(rank).wrapping_add((place & ((1 << BYTE) - 1)) as usize)
    }

    fn reader(&self, rank: usize) -> &Reader {
        // SAFETY: atomics.
        unsafe { self.mapping.shared(size_of::<Front>() + rank * size_of::<Reader>()) }
    }
    /// Counts a gather that this rank starts: the number of its content.
    pub fn begin(&self) -> u64 {
        self.started.fetch_add(1, Relaxed)
    }
    /// Whether `rank` has released all contents before this one.
    pub fn free_of(&self, rank: usize, content: u64) -> bool {
        self.reader(rank).is_past(content)
    }
    /// This rank reads a content no more; all earlier ones it has released before.
    pub fn release(&self, content: u64) {
        self.reader(self.me).release(content);
    }
}

impl Drop for ShmBuffer {
    fn drop(&mut self) {
        // SAFETY: atomics.
        let front: &Front = unsafe { self.mapping.shared(0) };
        // The last one gives the memory back, and only the last: peers may still read.
        if front.drop_last(self.ranks) {
            self.arena.punch(self.file_offset, self.mapping.bytes());
        }
    }
}
