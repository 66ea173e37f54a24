//! The simulated GPUs' memory: allocations at device addresses, pinned host memory at host addresses, memory of other
//! processes that this one has opened, and whether each byte was ever written. Never decides when something is read.
//!
//! Device addresses are unmapped in the process, so host code that dereferences one crashes, as with a GPU. No address
//! is reused, so that a use of freed memory is detected.
use crate::code::{Code, CuResult, say};
use crate::shared::{IpcHandle, SharedBytes};
use flatshard_ptx::emulate::{Allocation, Backing, GlobalMemory, Shadow};
use std::alloc::Layout;
use std::ops::Range;
use std::sync::atomic::AtomicU32;
use std::time::Duration;

/// Beyond what user space can map.
const DEVICE: u64 = 1 << 50;
/// Distance between allocations: an overrun never hits another one.
const RANGE: u64 = 1 << 36;
/// All that the driver guarantees about an allocation's address, and no more.
const ALIGNED: u64 = 256;
const PAGE: usize = 4096;

enum BlockBytes {
    /// On this GPU.
    Device(usize, Vec<u8>),
    Pinned(PinnedBytes),
    /// The program's own host memory, registered: start and bytes.
    Registered(*mut u8, usize),
    /// Exported to other processes.
    Exported(SharedBytes),
    /// Opened here, another process's.
    Opened(SharedBytes),
    /// Freed; the address is not reused.
    Gone,
}

/// Host memory that a program accesses freely.
struct PinnedBytes {
    at: *mut u8,
    layout: Layout,
}
// SAFETY: the memory of one allocation, which only its owner frees.
unsafe impl Send for PinnedBytes {}

impl Drop for PinnedBytes {
    fn drop(&mut self) {
        // SAFETY: allocated with this layout in `DriverMemory::pin`, freed once.
        unsafe { std::alloc::dealloc(self.at, self.layout) }
    }
}

struct AllocatedBlock {
    name: String,
    address: u64,
    bytes: BlockBytes,
    shadow: Shadow,
}

// SAFETY: registered memory is the program's, which keeps it until it unregisters it.
unsafe impl Send for BlockBytes {}

impl AllocatedBlock {
    /// The GPU that it counts for.
    fn owner(&self) -> Option<usize> {
        match &self.bytes {
            BlockBytes::Device(gpu, _) => Some(*gpu),
            BlockBytes::Exported(shared) => Some(shared.gpu),
            _ => None,
        }
    }
    fn len(&self) -> usize {
        match &self.bytes {
            BlockBytes::Device(_, bytes) => bytes.len(),
            BlockBytes::Pinned(pinned) => pinned.layout.size(),
            BlockBytes::Registered(_, bytes) => *bytes,
            BlockBytes::Exported(shared) | BlockBytes::Opened(shared) => shared.len(),
            BlockBytes::Gone => 0,
        }
    }
    fn slice(&mut self) -> &mut [u8] {
        match &mut self.bytes {
            BlockBytes::Device(_, bytes) => bytes,
            // SAFETY: lives as long as the block. An owner that accesses it while the "GPU" does has a race on a GPU
            // too.
            BlockBytes::Pinned(pinned) => unsafe { std::slice::from_raw_parts_mut(pinned.at, pinned.layout.size()) },
            // SAFETY: the program keeps it registered; and as above.
            BlockBytes::Registered(at, bytes) => unsafe { std::slice::from_raw_parts_mut(*at, *bytes) },
            BlockBytes::Exported(shared) | BlockBytes::Opened(shared) => shared.slice(),
            BlockBytes::Gone => &mut [],
        }
    }
}

#[derive(Default)]
pub struct DriverMemory {
    /// In address order.
    blocks: Vec<AllocatedBlock>,
    allocated: u64,
    /// Simulated time that work has taken beyond the emulator's own.
    spent: Duration,
}

impl DriverMemory {
    /// Events that are passed from now on are this much later.
    pub fn spend(&mut self, time: Duration) {
        self.spent += time;
    }
    pub(crate) fn spent(&self) -> Duration {
        self.spent
    }
    /// Uninitialized device memory. Its address is a multiple of 256 but not of 512.
    pub(crate) fn alloc(&mut self, gpu: usize, bytes: usize) -> u64 {
        self.allocated += 1;
        let address = DEVICE + self.allocated * RANGE + ALIGNED;
        let name = format!("allocation {} ({bytes} bytes)", self.allocated);
        self.insert(AllocatedBlock {
            name,
            address,
            bytes: BlockBytes::Device(gpu, vec![0xFF; bytes]),
            shadow: Shadow::new(bytes, false),
        });
        address
    }
    /// Pinned host memory.
    pub(crate) fn pin(&mut self, bytes: usize) -> CuResult<*mut u8> {
        let layout = Layout::from_size_align(bytes, PAGE).map_err(|_| Code::OUT_OF_MEMORY)?;
        // SAFETY: size 0 was refused at the call.
        let at = unsafe { std::alloc::alloc(layout) };
        if at.is_null() {
            return Err(Code::OUT_OF_MEMORY);
        }
        let name = format!("pinned memory ({bytes} bytes)");
        let pinned = PinnedBytes { at, layout };
        self.insert(AllocatedBlock {
            name,
            address: at as u64,
            bytes: BlockBytes::Pinned(pinned),
            shadow: Shadow::new(bytes, true),
        });
        Ok(at)
    }
    fn insert(&mut self, block: AllocatedBlock) {
        let at = self.blocks.partition_point(|b| b.address < block.address);
        self.blocks.insert(at, block);
    }
    pub(crate) fn free(&mut self, address: u64) -> CuResult {
        let block = self.blocks.iter_mut().find(|b| b.address == address && b.owner().is_some());
        let block = block.ok_or(Code::INVALID_VALUE)?;
        if let BlockBytes::Exported(shared) = &block.bytes
            && shared.opened() > 0
        {
            say(&format!("{} is freed while another process has it open", block.name));
        }
        (block.bytes, block.shadow) = (BlockBytes::Gone, Shadow::default());
        block.name.push_str(", freed");
        Ok(())
    }
    pub(crate) fn unpin(&mut self, address: u64) -> CuResult {
        let at = self.blocks.iter().position(|b| b.address == address && matches!(b.bytes, BlockBytes::Pinned(_)));
        self.blocks.remove(at.ok_or(Code::INVALID_VALUE)?);
        Ok(())
    }
    /// A handle by which other processes open an allocation.
    pub(crate) fn export(&mut self, address: u64) -> CuResult<IpcHandle> {
        let block = self.blocks.iter_mut().find(|b| b.address == address).ok_or(Code::INVALID_VALUE)?;
        if let BlockBytes::Device(gpu, bytes) = &block.bytes {
            block.bytes = BlockBytes::Exported(SharedBytes::of(*gpu, bytes)?);
        }
        match &block.bytes {
            BlockBytes::Exported(shared) => Ok(shared.handle()),
            _ => Err(Code::INVALID_VALUE),
        }
    }
    /// Whether its bytes were written is known only to their owner: here all count as written.
    pub(crate) fn open(&mut self, handle: &IpcHandle) -> CuResult<u64> {
        let shared = SharedBytes::open(handle)?;
        self.allocated += 1;
        let address = DEVICE + self.allocated * RANGE + ALIGNED;
        let (name, shadow) = (format!("memory of {}", shared.owner()), Shadow::new(shared.len(), true));
        self.insert(AllocatedBlock { name, address, bytes: BlockBytes::Opened(shared), shadow });
        Ok(address)
    }
    pub(crate) fn close(&mut self, address: u64) -> CuResult {
        let block = self.blocks.iter_mut().find(|b| b.address == address && matches!(b.bytes, BlockBytes::Opened(_)));
        let block = block.ok_or(Code::INVALID_VALUE)?;
        (block.bytes, block.shadow) = (BlockBytes::Gone, Shadow::default());
        block.name.push_str(", closed");
        Ok(())
    }
    /// The program's own host memory, from now on accessible to devices at its address.
    pub(crate) fn register(&mut self, at: *mut u8, bytes: usize) -> CuResult {
        if at.is_null() || bytes == 0 || self.knows(at as u64) {
            return Err(Code::INVALID_VALUE);
        }
        let (name, shadow) = (format!("registered memory ({bytes} bytes)"), Shadow::new(bytes, true));
        let block = AllocatedBlock { name, address: at as u64, bytes: BlockBytes::Registered(at, bytes), shadow };
        self.insert(block);
        Ok(())
    }
    pub(crate) fn unregister(&mut self, address: u64) -> CuResult {
        let registered = |b: &AllocatedBlock| b.address == address && matches!(b.bytes, BlockBytes::Registered(..));
        let at = self.blocks.iter().position(registered);
        self.blocks.remove(at.ok_or(Code::INVALID_VALUE)?);
        Ok(())
    }
    /// A word that other processes may change at any time.
    pub(crate) fn word(&mut self, address: u64) -> CuResult<&AtomicU32> {
        let (index, range) = self.range("an access to a word", address, size_of::<u32>())?;
        let word = self.blocks[index].slice()[range].as_mut_ptr().cast::<u32>();
        match word.is_aligned() {
            // SAFETY: aligned, within the block, which is borrowed.
            true => Ok(unsafe { AtomicU32::from_ptr(word) }),
            false => Err(Code::MISALIGNED_ADDRESS),
        }
    }

    /// Bytes in use on a GPU.
    pub(crate) fn used(&self, gpu: usize) -> usize {
        self.blocks.iter().filter(|b| b.owner() == Some(gpu)).map(AllocatedBlock::len).sum()
    }

    /// The block that an address points into, and the offset.
    fn find(&self, address: u64) -> Option<(usize, usize)> {
        let index = self.blocks.partition_point(|b| b.address <= address).checked_sub(1)?;
        let offset = address - self.blocks[index].address;
        let near = match self.blocks[index].bytes {
            BlockBytes::Pinned(_) | BlockBytes::Registered(..) => self.blocks[index].len() as u64,
            _ => RANGE - ALIGNED,
        };
        (offset < near).then_some((index, offset as usize))
    }
    /// Whether an address belongs to an allocation of the driver, rather than the host's own memory.
    pub fn knows(&self, address: u64) -> bool {
        self.find(address).is_some()
    }
    /// The GPU that owns an address; `None` for pinned memory.
    pub fn gpu_of(&self, address: u64) -> Option<usize> {
        match self.blocks[self.find(address)?.0].bytes {
            BlockBytes::Device(gpu, _) => Some(gpu),
            BlockBytes::Exported(ref shared) | BlockBytes::Opened(ref shared) => Some(shared.gpu),
            _ => None,
        }
    }
    pub(crate) fn is_pinned(&self, address: u64) -> bool {
        let host = |bytes: &BlockBytes| matches!(bytes, BlockBytes::Pinned(_) | BlockBytes::Registered(..));
        self.find(address).is_some_and(|(index, _)| host(&self.blocks[index].bytes))
    }
    /// Start and length of the allocation that an address points into.
    pub fn extent(&self, address: u64) -> Option<(u64, usize)> {
        let block = &self.blocks[self.find(address)?.0];
        Some((block.address, block.len()))
    }
    /// Whether that many bytes are within one allocation.
    pub fn holds(&self, address: u64, bytes: usize) -> bool {
        self.find(address).is_some_and(|(index, offset)| offset + bytes <= self.blocks[index].len())
    }
    fn range(&self, what: &str, address: u64, bytes: usize) -> CuResult<(usize, Range<usize>)> {
        let Some((index, offset)) = self.find(address) else {
            say(&format!("{what} of {bytes} bytes at {address:#x}, which is outside all allocations"));
            return Err(Code::ILLEGAL_ADDRESS);
        };
        let block = &self.blocks[index];
        if offset + bytes > block.len() {
            say(&format!("{what} of bytes {offset}..{} of {}", offset + bytes, block.name));
            return Err(Code::ILLEGAL_ADDRESS);
        }
        Ok((index, offset..offset + bytes))
    }
    /// Current contents. Uninitialized bytes are an error.
    pub fn read(&mut self, address: u64, bytes: usize) -> CuResult<&[u8]> {
        let (index, range) = self.range("a read", address, bytes)?;
        let block = &mut self.blocks[index];
        if let Some(byte) = block.shadow.unwritten_in(range.clone()) {
            let Range { start, end } = range;
            say(&format!("a read of bytes {start}..{end} of {}: byte {byte} was never written", block.name));
            return Err(Code::ILLEGAL_ADDRESS);
        }
        Ok(&block.slice()[range])
    }
    /// Memory for the caller to fill; it counts as written from now on.
    pub fn write(&mut self, address: u64, bytes: usize) -> CuResult<&mut [u8]> {
        let (index, range) = self.range("a write", address, bytes)?;
        let block = &mut self.blocks[index];
        block.shadow.set(range.clone(), true);
        Ok(&mut block.slice()[range])
    }

    /// Lends all of it to the emulator for one launch.
    pub(crate) fn lend<T>(&mut self, launch: impl FnOnce(&mut GlobalMemory) -> T) -> T {
        let lent = self.blocks.iter_mut().map(|block| {
            let (name, shadow) = (std::mem::take(&mut block.name), std::mem::take(&mut block.shadow));
            let address = block.address;
            Allocation { name, address, data: Backing::Write(block.slice()), shadow }
        });
        let mut memory = GlobalMemory::of(lent.collect());
        let result = launch(&mut memory);
        let back: Vec<_> = memory.into_allocations().into_iter().map(|a| (a.name, a.shadow)).collect();
        for (block, (name, shadow)) in self.blocks.iter_mut().zip(back) {
            (block.name, block.shadow) = (name, shadow);
        }
        result
    }
}
