//! Global memory of the emulated device: allocations by name and address, with their shadow. Never shared memory, which
//! lives and dies with a CTA.
use super::shadow::Shadow;
use std::cell::Cell;

/// By default, allocation i occupies [i << 36, (i + 1) << 36), so an overrun never hits the next.
const RANGE: u32 = 36;
/// Host memory that is lent keeps its offset modulo this, so that misalignment is preserved.
const KEPT: u64 = 4096;

/// An allocation's bytes.
pub enum Backing<'m> {
    Own(Vec<u8>),
    Read(&'m [u8]),
    Write(&'m mut [u8]),
}

impl Backing<'_> {
    pub fn bytes(&self) -> &[u8] {
        match self {
            Backing::Own(data) => data,
            Backing::Read(data) => data,
            Backing::Write(data) => data,
        }
    }
}

pub struct Allocation<'m> {
    pub name: String,
    /// The address of the first byte.
    pub address: u64,
    pub data: Backing<'m>,
    pub shadow: Shadow,
}

/// The memory a kernel can access, owned or lent by the host.
#[derive(Default)]
pub struct GlobalMemory<'m> {
    /// In address order.
    pub(super) allocations: Vec<Allocation<'m>>,
    /// Index of the allocation found last: most accesses are to the same one.
    recent: Cell<usize>,
}

/// Why an access is impossible.
pub enum Outside {
    Nowhere,
    /// Index of the allocation and first byte.
    Beyond(usize, i64),
    Misaligned(usize, u64),
}

/// Whether that is a multiple of the bytes. Divides only by what is no power of two.
#[inline]
pub(super) fn aligned(address: u64, bytes: usize) -> bool {
    match bytes.is_power_of_two() {
        true => address & (bytes as u64 - 1) == 0,
        false => address.is_multiple_of(bytes as u64),
    }
}

impl<'m> GlobalMemory<'m> {
    pub fn new() -> GlobalMemory<'m> {
        GlobalMemory::default()
    }
    /// Allocations at the caller's addresses, in order: memory that outlives a launch, with its shadow.
    pub fn of(allocations: Vec<Allocation<'m>>) -> GlobalMemory<'m> {
        debug_assert!(allocations.is_sorted_by_key(|a| a.address));
        GlobalMemory { allocations, ..GlobalMemory::default() }
    }
    pub fn into_allocations(self) -> Vec<Allocation<'m>> {
        self.allocations
    }
    /// Uninitialized memory: reading it is a finding. Its bytes are 0xFF, a NaN in every format.
    pub fn alloc(&mut self, name: &str, bytes: usize) -> u64 {
        self.add(name, 0, Backing::Own(vec![0xFF; bytes]), false)
    }
    pub fn upload(&mut self, name: &str, bytes: &[u8]) -> u64 {
        self.add(name, 0, Backing::Own(bytes.to_vec()), true)
    }
    /// Host memory, without a copy: a write to it is a finding.
    pub fn lend(&mut self, name: &str, bytes: &'m [u8]) -> u64 {
        self.add(name, bytes.as_ptr() as u64 % KEPT, Backing::Read(bytes), true)
    }
    /// Host memory, without a copy. Unless `written`, the kernel must fill it: its bytes become 0xFF, and reading them
    /// first is a finding.
    pub fn lend_mut(&mut self, name: &str, bytes: &'m mut [u8], written: bool) -> u64 {
        if !written {
            bytes.fill(0xFF);
        }
        self.add(name, bytes.as_ptr() as u64 % KEPT, Backing::Write(bytes), written)
    }
    /// A buffer of up to 64 GiB of which only pieces exist, in order, each at its offset; an access elsewhere is out of
    /// bounds. So addresses beyond 4 GiB cost no memory. Returns the address of byte 0; each piece is an allocation at
    /// its offset from that.
    pub fn sparse(&mut self, name: &str, pieces: Vec<(u64, Vec<u8>)>, written: bool) -> u64 {
        let base = self.next();
        for (offset, bytes) in pieces {
            self.put(&format!("{name} + {offset:#x}"), base + offset, Backing::Own(bytes), written);
        }
        base
    }
    /// The first address of the next range.
    fn next(&self) -> u64 {
        (self.allocations.last().map_or(0, |last| last.address >> RANGE) + 1) << RANGE
    }
    fn add(&mut self, name: &str, start: u64, data: Backing<'m>, written: bool) -> u64 {
        let address = self.next() + start;
        self.put(name, address, data, written);
        address
    }
    fn put(&mut self, name: &str, address: u64, data: Backing<'m>, written: bool) {
        let shadow = Shadow::new(data.bytes().len(), written);
        self.allocations.push(Allocation { name: name.to_string(), address, data, shadow });
    }
    /// An allocation's bytes. An uninitialized byte is an error: the kernel had to fill it.
    pub fn download(&self, pointer: u64) -> Result<&[u8], String> {
        let found = self.allocations.iter().find(|a| a.address == pointer);
        let found = found.ok_or_else(|| format!("{pointer:#x} is not an allocation"))?;
        found.filled().map(|()| found.data.bytes())
    }
    /// Fails for the first allocation that was not completely written.
    pub fn filled(&self) -> Result<(), String> {
        self.allocations.iter().try_for_each(Allocation::filled)
    }
    /// That many bytes from an address, if an allocation contains them.
    pub(super) fn bytes(&self, address: u64, bytes: usize) -> Option<&[u8]> {
        let (index, start) = self.find(address, 1).ok()?;
        self.allocations[index].data.bytes().get(start..start + bytes)
    }
    /// Allocation and offset of an aligned access.
    #[inline]
    pub(super) fn find(&self, address: u64, bytes: usize) -> Result<(usize, usize), Outside> {
        match self.allocations.get(self.recent.get()).and_then(|a| a.within(address, bytes)) {
            Some(offset) if aligned(address, bytes) => Ok((self.recent.get(), offset as usize)),
            _ => self.search(address, bytes),
        }
    }
    fn search(&self, address: u64, bytes: usize) -> Result<(usize, usize), Outside> {
        let next = self.allocations.partition_point(|a| a.address <= address);
        let near = |index: &usize| self.allocations.get(*index).is_some_and(|a| a.address >> RANGE == address >> RANGE);
        let index = next.checked_sub(1).filter(near).or(Some(next).filter(near)).ok_or(Outside::Nowhere)?;
        let allocation = &self.allocations[index];
        let offset = address.wrapping_sub(allocation.address);
        if allocation.within(address, bytes).is_none() {
            return Err(Outside::Beyond(index, offset as i64));
        }
        if !aligned(address, bytes) {
            return Err(Outside::Misaligned(index, offset));
        }
        self.recent.set(index);
        Ok((index, offset as usize))
    }
}

impl Allocation<'_> {
    /// The offset of an access that it contains.
    #[inline]
    fn within(&self, address: u64, bytes: usize) -> Option<u64> {
        let offset = address.checked_sub(self.address)?;
        (offset.checked_add(bytes as u64)? <= self.data.bytes().len() as u64).then_some(offset)
    }
    fn filled(&self) -> Result<(), String> {
        match self.shadow.unwritten() {
            Some(byte) => Err(format!("byte {byte} of '{}' was never written", self.name)),
            None => Ok(()),
        }
    }
}
