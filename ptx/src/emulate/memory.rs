//! Global memory of the emulated device: allocations by name, each at its own address range, with their shadow. Never
//! shared memory, which lives and dies with a CTA.
use super::shadow::Shadow;

/// Allocation i starts at i << 36: an address tells its allocation, and running off one never meets the next.
const RANGE: u32 = 36;

pub struct Allocation {
    pub name: String,
    pub data: Vec<u8>,
    pub shadow: Shadow,
}

#[derive(Default)]
pub struct Memory {
    pub(super) allocations: Vec<Allocation>,
}

/// Why an access cannot be made at all.
pub enum Outside {
    Nowhere,
    /// Index of the allocation and first byte.
    Beyond(usize, u64),
    Misaligned(usize, u64),
}

impl Memory {
    pub fn new() -> Memory {
        Memory::default()
    }
    /// Memory that nothing has written: reading it is a finding. Its bytes are 0xFF, a NaN in every format.
    pub fn alloc(&mut self, name: &str, bytes: usize) -> u64 {
        self.add(name, vec![0xFF; bytes], false)
    }
    pub fn upload(&mut self, name: &str, bytes: &[u8]) -> u64 {
        self.add(name, bytes.to_vec(), true)
    }
    fn add(&mut self, name: &str, data: Vec<u8>, written: bool) -> u64 {
        let shadow = Shadow::new(data.len(), written);
        self.allocations.push(Allocation { name: name.to_string(), data, shadow });
        (self.allocations.len() as u64) << RANGE
    }
    /// An allocation's bytes. A byte that nothing has written is an error: the kernel was to fill it.
    pub fn download(&self, pointer: u64) -> Result<&[u8], String> {
        let index = (pointer >> RANGE).checked_sub(1).filter(|_| pointer.trailing_zeros() >= RANGE);
        let found = index.and_then(|i| self.allocations.get(i as usize));
        let found = found.ok_or_else(|| format!("{pointer:#x} is no allocation"))?;
        match found.shadow.unwritten() {
            Some(byte) => Err(format!("byte {byte} of '{}' was never written", found.name)),
            None => Ok(&found.data),
        }
    }
    /// Allocation and offset of an aligned access.
    pub(super) fn find(&self, address: u64, bytes: usize) -> Result<(usize, usize), Outside> {
        let offset = address & ((1 << RANGE) - 1);
        let index = (address >> RANGE).checked_sub(1).ok_or(Outside::Nowhere)? as usize;
        let allocation = self.allocations.get(index).ok_or(Outside::Nowhere)?;
        if offset + bytes as u64 > allocation.data.len() as u64 {
            return Err(Outside::Beyond(index, offset));
        }
        if !offset.is_multiple_of(bytes as u64) {
            return Err(Outside::Misaligned(index, offset));
        }
        Ok((index, offset as usize))
    }
}
