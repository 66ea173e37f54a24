//! Device memory that several processes map: a file in memory, found by a handle. Never decides when it is accessed.
use crate::code::{Code, CuResult, say};
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};
use std::fs::{File, OpenOptions};
use std::os::fd::AsRawFd;
use std::sync::atomic::{AtomicU32, Ordering::SeqCst};

/// `CUipcMemHandle`: a mark, the process and its descriptor, bytes, GPU; eight bytes each.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct IpcHandle([u8; 64]);
impl IpcHandle {
    fn of(words: [u64; 5]) -> IpcHandle {
        let mut bytes = [0; 64];
        bytes.as_chunks_mut().0.iter_mut().zip(words).for_each(|(to, word)| *to = word.to_le_bytes());
        IpcHandle(bytes)
    }
    fn words(&self) -> [u64; 5] {
        let words = self.0.as_chunks().0;
        std::array::from_fn(|i| u64::from_le_bytes(words[i]))
    }
}

const MARK: u64 = 0x666c_6174_7368_6172;
/// Before the bytes: how often the memory is open in other processes.
const HEAD: usize = 4096;

pub struct SharedBytes {
    at: *mut u8,
    bytes: usize,
    pub gpu: usize,
    /// The file of its owner, with the process's number.
    file: File,
    process: u32,
    foreign: bool,
}
// SAFETY: a mapping of its own, which any thread may use.
unsafe impl Send for SharedBytes {}

impl SharedBytes {
    fn map(file: File, bytes: usize, gpu: usize, process: u32, foreign: bool) -> CuResult<SharedBytes> {
        let (prot, all) = (ProtFlags::READ | ProtFlags::WRITE, HEAD + bytes);
        // SAFETY: a fresh mapping of a file that is never truncated.
        let at = unsafe { mmap(std::ptr::null_mut(), all, prot, MapFlags::SHARED, &file, 0) };
        let at = at.map_err(|_| Code::OUT_OF_MEMORY)?.cast();
        let shared = SharedBytes { at, bytes, gpu, file, process, foreign };
        shared.count().fetch_add(u32::from(foreign), SeqCst);
        Ok(shared)
    }
    /// An allocation with these contents.
    pub fn of(gpu: usize, contents: &[u8]) -> CuResult<SharedBytes> {
        let fd = memfd_create("simulated GPU", MemfdFlags::CLOEXEC).map_err(|_| Code::OUT_OF_MEMORY)?;
        ftruncate(&fd, (HEAD + contents.len()) as u64).map_err(|_| Code::OUT_OF_MEMORY)?;
        let mut shared = SharedBytes::map(fd.into(), contents.len(), gpu, std::process::id(), false)?;
        shared.slice().copy_from_slice(contents);
        Ok(shared)
    }
    pub fn handle(&self) -> IpcHandle {
        let fd = self.file.as_raw_fd() as u64;
        IpcHandle::of([MARK, self.process.into(), fd, self.bytes as u64, self.gpu as u64])
    }
    /// Another process's. A process cannot open its own memory, as in CUDA.
    pub fn open(handle: &IpcHandle) -> CuResult<SharedBytes> {
        let [mark, process, fd, bytes, gpu] = handle.words();
        if mark != MARK {
            return Err(Code::INVALID_VALUE);
        }
        if process == u64::from(std::process::id()) {
            say("a process opens its own memory by handle");
            return Err(Code::INVALID_CONTEXT);
        }
        let file = OpenOptions::new().read(true).write(true).open(format!("/proc/{process}/fd/{fd}"));
        let file = file.map_err(|_| Code::INVALID_HANDLE)?;
        match file.metadata() {
            Ok(found) if found.len() == HEAD as u64 + bytes => {}
            _ => return Err(Code::INVALID_HANDLE),
        }
        SharedBytes::map(file, bytes as usize, gpu as usize, process as u32, true)
    }
    fn count(&self) -> &AtomicU32 {
        // SAFETY: aligned, at the start of the mapping, which is longer than a word.
        unsafe { AtomicU32::from_ptr(self.at.cast()) }
    }
    /// How often it is open in other processes.
    pub fn opened(&self) -> u32 {
        self.count().load(SeqCst)
    }
    pub fn owner(&self) -> String {
        format!("process {} ({} bytes)", self.process, self.bytes)
    }
    pub fn len(&self) -> usize {
        self.bytes
    }
    pub fn slice(&mut self) -> &mut [u8] {
        // SAFETY: mapped as long as `self` lives. Processes that access it at once have a race on a GPU too.
        unsafe { std::slice::from_raw_parts_mut(self.at.add(HEAD), self.bytes) }
    }
}

impl Drop for SharedBytes {
    fn drop(&mut self) {
        self.count().fetch_sub(u32::from(self.foreign), SeqCst);
        // SAFETY: mapped with this length, and unmapped once.
        let _ = unsafe { munmap(self.at.cast(), HEAD + self.bytes) };
    }
}
