//! Device memory with an owner, and the pinned host memory that stages copies to and from pageable memory. Never
//! decides what is allocated.
use crate::Buf;
use crate::buf::Place;
use cudarc::driver::{CudaContext, CudaEvent, CudaStream, result, sys};
use flatshard_base::DType;
use flatshard_base::meter::Lease;
use std::ffi::c_void;
use std::ptr::NonNull;
use std::sync::Arc;

/// Bytes of a pinned staging buffer: copies of this size run at bus speed while the next buffer is filled.
const PIECE: usize = 4 << 20;
const PIECES: usize = 4;

pub(super) type DriverResult<T> = std::result::Result<T, result::DriverError>;

/// An allocation, freed when its last reference is dropped.
struct Owned {
    address: sys::CUdeviceptr,
    context: Arc<CudaContext>,
    _lease: Lease,
}
impl Drop for Owned {
    fn drop(&mut self) {
        // A failure here is ignored: the process is exiting, or a kernel fault was already reported.
        if self.context.bind_to_thread().is_ok() {
            // SAFETY: allocated in `alloc`, freed once; cuMemFree waits until no work uses it.
            let _ = unsafe { result::free_sync(self.address) };
        }
    }
}

/// Zeroed in the order of `stream`. Aligned to 256 bytes, the driver's own alignment of allocations.
pub(super) fn alloc(stream: &CudaStream, dtype: DType, len: usize, lease: Lease) -> DriverResult<Buf> {
    let bytes = (len * dtype.size()).max(1); // empty allocations are not allowed
    let context = stream.context();
    context.bind_to_thread()?;
    // SAFETY: initialized below, in the order of the stream that uses it first.
    let address = unsafe { result::malloc_sync(bytes) }?;
    let owner = Arc::new(Owned { address, context: context.clone(), _lease: lease });
    // SAFETY: `address` holds `bytes` and lives as long as `owner`, which the buffer keeps.
    unsafe { result::memset_d8_async(address, 0, bytes, stream.cu_stream()) }?;
    let pointer =
        NonNull::new(address as *mut u8).ok_or(result::DriverError(sys::CUresult::CUDA_ERROR_OUT_OF_MEMORY))?;
    // SAFETY: the driver aligns allocations to at least 256 bytes, and `owner` keeps them; the pointer is the device's.
    Ok(unsafe { Buf::from_raw(pointer, dtype, len, Place::Device, owner) })
}

/// A page-locked host allocation, freed when its last reference is dropped.
struct Pinned {
    memory: NonNull<u8>,
    context: Arc<CudaContext>,
    _lease: Lease,
}
// SAFETY: pinned host memory, freed once; the driver accepts it from any thread.
unsafe impl Send for Pinned {}
// SAFETY: accessed only through the `Buf` that owns it.
unsafe impl Sync for Pinned {}

impl Drop for Pinned {
    fn drop(&mut self) {
        if self.context.bind_to_thread().is_ok() {
            // SAFETY: allocated in `alloc_host`, freed once; the driver waits for work that uses it.
            let _ = unsafe { result::free_host(self.memory.as_ptr().cast::<c_void>()) };
        }
    }
}

/// Zeroed, pinned and mapped: with unified addressing (every 64-bit platform with CUDA), the device uses the host's
/// address.
pub(super) fn alloc_host(stream: &CudaStream, dtype: DType, len: usize, lease: Lease) -> DriverResult<Buf> {
    let bytes = (len * dtype.size()).max(1);
    let context = stream.context();
    context.bind_to_thread()?;
    // SAFETY: written before it is read.
    let memory = unsafe { result::malloc_host(bytes, sys::CU_MEMHOSTALLOC_DEVICEMAP | sys::CU_MEMHOSTALLOC_PORTABLE) }?;
    let memory =
        NonNull::new(memory.cast::<u8>()).ok_or(result::DriverError(sys::CUresult::CUDA_ERROR_OUT_OF_MEMORY))?;
    // SAFETY: just allocated with that many bytes.
    unsafe { memory.write_bytes(0, bytes) };
    let owner = Arc::new(Pinned { memory, context: context.clone(), _lease: lease });
    // SAFETY: pinned memory is aligned to a page, and `owner` keeps it.
    Ok(unsafe { Buf::from_raw(memory, dtype, len, Place::Mapped, owner) })
}

/// Rotating pinned buffers. A buffer is free once its event has completed. Small uploads share one, so that many are in
/// flight before the host waits for the first.
pub(super) struct Staging {
    pieces: Vec<StagingPiece>,
    turn: StagingTurn,
    stream: Arc<CudaStream>,
}

/// The buffer being filled (a running count), and how far.
#[derive(Clone, Copy)]
struct StagingTurn {
    piece: usize,
    filled: usize,
}

impl StagingTurn {
    /// Reserves `bytes`, at most [`PIECE`]. Returns buffer, offset, and whether the buffer may still be in use.
    fn take(&mut self, bytes: usize) -> (usize, usize, bool) {
        let next = self.filled + bytes > PIECE;
        if next {
            *self = StagingTurn { piece: self.piece + 1, filled: 0 };
        }
        let at = self.filled;
        self.filled = (at + bytes).next_multiple_of(256);
        (self.piece % PIECES, at, next)
    }
}
struct StagingPiece {
    memory: NonNull<u8>,
    done: CudaEvent,
}
// SAFETY: pinned host memory, owned by the piece; the driver accepts it from any thread.
unsafe impl Send for StagingPiece {}

impl Drop for StagingPiece {
    fn drop(&mut self) {
        let _ = self.done.synchronize(); // a copy may still read it
        // SAFETY: allocated in `Staging::new`, freed once, after the last copy.
        let _ = unsafe { result::free_host(self.memory.as_ptr().cast::<c_void>()) };
    }
}

impl Staging {
    pub(super) fn new(stream: &Arc<CudaStream>) -> DriverResult<Staging> {
        let context = stream.context();
        context.bind_to_thread()?;
        let piece = || {
            let done = context.new_event(None)?;
            // SAFETY: written before it is read.
            let memory = unsafe { result::malloc_host(PIECE, 0) }?;
            let memory = NonNull::new(memory.cast::<u8>());
            Ok(StagingPiece {
                memory: memory.ok_or(result::DriverError(sys::CUresult::CUDA_ERROR_OUT_OF_MEMORY))?,
                done,
            })
        };
        Ok(Staging {
            pieces: (0..PIECES).map(|_| piece()).collect::<DriverResult<_>>()?,
            turn: StagingTurn { piece: 0, filled: 0 },
            stream: stream.clone(),
        })
    }

    /// Enqueues the copy; `src` has been read on return.
    pub(super) fn upload(&mut self, src: &[u8], dst: sys::CUdeviceptr) -> DriverResult<()> {
        self.stream.context().bind_to_thread()?;
        for (i, part) in src.chunks(PIECE).enumerate() {
            let (index, offset, in_use) = self.turn.take(part.len());
            let piece = &mut self.pieces[index];
            if in_use {
                piece.done.synchronize()?;
            }
            // SAFETY: the range is within the buffer's PIECE bytes and no copy uses it: copies since the buffer was
            // free lie before it.
            let staged = unsafe { std::slice::from_raw_parts_mut(piece.memory.as_ptr().add(offset), part.len()) };
            staged.copy_from_slice(part);
            let at = dst + (i * PIECE) as sys::CUdeviceptr;
            // SAFETY: the caller's `dst` holds `src.len()` bytes; the buffer is not reused before its event has
            // completed.
            unsafe { result::memcpy_htod_async(at, staged, self.stream.cu_stream()) }?;
            piece.done.record(&self.stream)?;
        }
        Ok(())
    }

    /// Waits for the stream. Later pieces are transferred while earlier ones are copied out.
    pub(super) fn download(&mut self, parts: &mut [(sys::CUdeviceptr, &mut [u8])]) -> DriverResult<()> {
        self.stream.context().bind_to_thread()?;
        let mut cut = Vec::with_capacity(parts.len());
        for (src, dst) in parts {
            let at = |i| *src + (i * PIECE) as sys::CUdeviceptr;
            cut.extend(dst.chunks_mut(PIECE).enumerate().map(|(i, part)| (at(i), part)));
        }
        let mut parts = cut;
        let (first, count, mut asked) = (self.turn.piece + 1, parts.len(), 0);
        for taken in 0..count {
            while asked < count.min(taken + PIECES) {
                let (src, part) = &parts[asked];
                let piece = &mut self.pieces[(first + asked) % PIECES];
                piece.done.synchronize()?;
                // SAFETY: the buffer holds PIECE bytes, no copy uses it any more, and this call uses it exclusively; it
                // is read only after the event below has completed.
                let staged = unsafe { std::slice::from_raw_parts_mut(piece.memory.as_ptr(), part.len()) };
                // SAFETY: the caller's `src` holds `dst.len()` bytes.
                unsafe { result::memcpy_dtoh_async(staged, *src, self.stream.cu_stream()) }?;
                piece.done.record(&self.stream)?;
                asked += 1;
            }
            let piece = &self.pieces[(first + taken) % PIECES];
            piece.done.synchronize()?;
            let (_, part) = &mut parts[taken];
            // SAFETY: the copy has completed.
            part.copy_from_slice(unsafe { std::slice::from_raw_parts(piece.memory.as_ptr(), part.len()) });
        }
        // All buffers are free again; the last one is filled from its start.
        self.turn = StagingTurn { piece: first + count, filled: 0 };
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn small_uploads_share_a_piece_and_a_piece_in_use_is_waited_for() {
        let mut turn = StagingTurn { piece: 0, filled: 0 };
        assert_eq!([turn.take(100), turn.take(300), turn.take(1)], [(0, 0, false), (0, 256, false), (0, 768, false)]);
        assert_eq!(turn.take(PIECE), (1, 0, true));
        assert_eq!(turn.take(1), (2, 0, true));
        // Micro-batches of 100 KB: 40 per buffer, so the host gets 120 ahead before it waits.
        let waits = (0..400).filter(|_| turn.take(100 << 10).2).count();
        assert_eq!(waits, 9);
    }
}
