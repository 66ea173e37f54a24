//! What processes on one host share: device memory, by CUDA IPC handles; words in host memory that streams write and
//! wait for; and copies and sums of such memory on a caller's stream. Never decides their order.
use super::device::Cuda;
use crate::gpu::driver::{Arg, Kernel, LaunchShape};
use crate::{Buf, View, ViewMut};
use cudarc::driver::sys::{self, CUdeviceptr, CUipcMemHandle};
use cudarc::driver::{CudaContext, CudaStream, DriverError};
use flatshard_base::{DType, Error, Result};
use std::ffi::c_void;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering::SeqCst};

/// Bytes of a `CUipcMemHandle`.
pub const IPC_HANDLE: usize = 64;

/// Device memory of another process, mapped into this one's address space; closed when dropped.
pub struct ImportedMemory {
    address: CUdeviceptr,
    bytes: usize,
    context: Arc<CudaContext>,
}
impl ImportedMemory {
    /// The address of `bytes` bytes from `at`. Panics if they are not within.
    pub fn part(&self, at: usize, bytes: usize) -> u64 {
        assert!(at + bytes <= self.bytes, "bytes {at}..{} of {}", at + bytes, self.bytes);
        self.address + at as u64
    }
}
impl Drop for ImportedMemory {
    fn drop(&mut self) {
        if self.context.bind_to_thread().is_ok() {
            // SAFETY: opened in `Cuda::import`, closed once; its user has synchronized.
            let _ = unsafe { sys::cuIpcCloseMemHandle(self.address) };
        }
    }
}

/// Words (u32) in host memory that several processes map. Streams write them and wait for them; unlike an event of
/// another process, a word can also be written by this one, which ends a wait for a process that died.
pub struct StreamWords {
    /// u32. Unregistered before it is freed.
    memory: Buf,
    /// Its first word, as the GPU addresses it.
    device: CUdeviceptr,
    context: Arc<CudaContext>,
}
impl StreamWords {
    fn place(&self, word: usize) -> *mut u32 {
        assert!(word < self.memory.len(), "word {word} of {}", self.memory.len());
        self.memory.view().as_ptr().cast::<u32>().cast_mut().wrapping_add(word)
    }
    fn atomic(&self, word: usize) -> &AtomicU32 {
        // SAFETY: within the memory (asserted), aligned as u32; everybody accesses these words atomically.
        unsafe { AtomicU32::from_ptr(self.place(word)) }
    }
    pub fn get(&self, word: usize) -> u32 {
        self.atomic(word).load(SeqCst)
    }
    pub fn set(&self, word: usize, value: u32) {
        self.atomic(word).store(value, SeqCst);
    }
    fn address(&self, word: usize) -> CUdeviceptr {
        let _ = self.place(word);
        self.device + (word * size_of::<u32>()) as u64
    }
    /// Enqueues a write of the word in `stream`; what the stream wrote before is then visible to other GPUs.
    pub fn write(&self, stream: &CudaStream, word: usize, value: u32) -> std::result::Result<(), DriverError> {
        // SAFETY: a registered word; CU_STREAM_WRITE_VALUE_DEFAULT, with its memory barrier.
        unsafe { sys::cuStreamWriteValue32_v2(stream.cu_stream(), self.address(word), value, 0) }.result()
    }
    /// `stream` goes on when the word is `value` or has passed it (modulo 2^32).
    pub fn wait(&self, stream: &CudaStream, word: usize, value: u32) -> std::result::Result<(), DriverError> {
        let flags = sys::CUstreamWaitValue_flags::CU_STREAM_WAIT_VALUE_GEQ as u32;
        // SAFETY: a registered word.
        unsafe { sys::cuStreamWaitValue32_v2(stream.cu_stream(), self.address(word), value, flags) }.result()
    }
}
impl Drop for StreamWords {
    fn drop(&mut self) {
        if self.context.bind_to_thread().is_ok() {
            // SAFETY: registered in `Cuda::share_words`, once.
            let _ = unsafe { sys::cuMemHostUnregister(self.place(0).cast::<c_void>()) };
        }
    }
}

/// How ranks' parts become one.
#[derive(Clone, Copy)]
pub struct RankSum {
    pub ranks: usize,
    /// Bytes between the parts.
    pub stride: usize,
    pub from: DType,
    /// To what is there.
    pub add: bool,
    /// The largest instead of the sum.
    pub largest: bool,
}

impl Cuda {
    /// A handle by which other processes of this host can open the allocation that `buf` is.
    pub fn export(&self, buf: &Buf) -> Result<[u8; IPC_HANDLE]> {
        let failed = |e| self.failed("export memory to other processes", e);
        self.context.bind_to_thread().map_err(failed)?;
        let mut handle = CUipcMemHandle { reserved: [0; IPC_HANDLE] };
        // SAFETY: the start of an allocation of this device; writes the handle.
        unsafe { sys::cuIpcGetMemHandle(&mut handle, buf.view().address() as CUdeviceptr) }.result().map_err(failed)?;
        Ok(handle.reserved.map(|byte| byte as u8))
    }
    /// Opens the `bytes` bytes that another process has exported. Its GPU may be another one.
    pub fn import(&self, handle: [u8; IPC_HANDLE], bytes: usize) -> std::result::Result<ImportedMemory, DriverError> {
        self.context.bind_to_thread()?;
        let (handle, mut address) = (CUipcMemHandle { reserved: handle.map(|byte| byte as _) }, 0);
        let flags = sys::CUipcMem_flags::CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS as u32;
        // SAFETY: writes the address.
        unsafe { sys::cuIpcOpenMemHandle_v2(&mut address, handle, flags) }.result()?;
        Ok(ImportedMemory { address, bytes, context: self.context.clone() })
    }
    /// Makes host memory (u32) that other processes map accessible to this GPU.
    pub fn share_words(&self, memory: Buf) -> Result<StreamWords> {
        let failed = |e| self.failed("register host memory", e);
        if memory.dtype() != DType::U32 || memory.is_empty() {
            return Err(Error::op("register", format!("{} elements of {}", memory.len(), memory.dtype())));
        }
        self.context.bind_to_thread().map_err(failed)?;
        let (at, flags) = (memory.view().as_ptr().cast_mut().cast::<c_void>(), sys::CU_MEMHOSTREGISTER_DEVICEMAP);
        // SAFETY: host memory of that many bytes, which the words keep until they unregister it.
        unsafe { sys::cuMemHostRegister_v2(at, memory.bytes(), flags) }.result().map_err(failed)?;
        let mut words = StreamWords { memory, device: 0, context: self.context.clone() };
        // SAFETY: registered above; writes the address.
        unsafe { sys::cuMemHostGetDevicePointer_v2(&mut words.device, at, 0) }.result().map_err(failed)?;
        Ok(words)
    }
    /// Whether all work of `stream` has finished, or cannot finish because the context is lost.
    pub fn is_idle(&self, stream: &CudaStream) -> bool {
        // SAFETY: a live stream of this context.
        let query = || unsafe { sys::cuStreamQuery(stream.cu_stream()) };
        self.context.bind_to_thread().is_err() || query() != sys::CUresult::CUDA_ERROR_NOT_READY
    }
    /// Copies on `stream`. Between GPUs, a copy engine moves the bytes.
    ///
    /// # Safety
    /// Both addresses hold that many bytes, of device memory, imported memory or pinned memory, until the copy is done.
    pub unsafe fn copy_on(&self, stream: &CudaStream, to: u64, from: u64, bytes: usize) -> Result<()> {
        if bytes == 0 || to == from {
            return Ok(());
        }
        let failed = |e| self.failed("copy", e);
        self.context.bind_to_thread().map_err(failed)?;
        // SAFETY: upheld by the caller; the driver distinguishes memory by address.
        unsafe { sys::cuMemcpyAsync(to, from, bytes, stream.cu_stream()) }.result().map_err(failed)
    }
    /// `y (+)= sum of the parts in rank order`, or their maximum, on `stream`: what `comm::shm` computes, bit for bit.
    pub fn sum_ranks_on(&self, stream: &CudaStream, sum: RankSum, parts: View, mut y: ViewMut) -> Result<()> {
        const OP: &str = "sum_ranks";
        let (n, to) = (y.len(), y.dtype());
        if n == 0 {
            return Ok(());
        }
        let variant = match (sum.from, to) {
            (DType::F32, DType::F32) => "sum_ranks_f32",
            (DType::F64, DType::F64) => "sum_ranks_f64",
            (DType::Bf16, DType::Bf16) => "sum_ranks_bf16",
            (DType::Bf16, DType::F32) => "sum_ranks_bf16_f32",
            (DType::F16, DType::F16) => "sum_ranks_f16",
            (DType::F16, DType::F32) => "sum_ranks_f16_f32",
            (from, to) => return Err(Error::op(OP, format!("cannot sum {from} into {to}"))),
        };
        if sum.ranks == 0 || (sum.ranks - 1) * sum.stride + n * sum.from.size() > parts.bytes() {
            return Err(Error::op(OP, format!("{} parts of {n} elements in {} bytes", sum.ranks, parts.bytes())));
        }
        let (block, vector) = (256u32, 16 / to.size());
        let ctas = n.div_ceil(block as usize * vector).min(8 * self.multiprocessors as usize) as u32;
        let target = if sum.add { Arg::InOut(y.reborrow()) } else { Arg::Out(y.reborrow()) };
        let [n, stride] = [n, sum.stride].map(|x| Arg::U64(x as u64));
        let [ranks, add, largest] = [sum.ranks as u32, sum.add.into(), sum.largest.into()].map(Arg::U32);
        let args = &mut [Arg::In(parts), target, n, stride, ranks, add, largest];
        self.launch_on(stream, Kernel { variant, entry: OP }, LaunchShape::line(ctas, block), args)
    }
}
