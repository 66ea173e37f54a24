//! What a warp and its CTA have in flight: copies by cp.async, bulk copies both ways, wgmmas. Never moves anything.
use super::operand::Register;
use std::collections::VecDeque;
use std::hash::{DefaultHasher, Hasher};

/// A `cp.async` in flight: an offset in shared memory, the bytes as they were at issue, and where they are read.
pub struct AsyncCopy {
    pub to: usize,
    pub data: Vec<u8>,
    pub from: Vec<Stretch>,
}

/// Bytes of an allocation of global memory, by its index.
#[derive(Clone, Copy)]
pub struct Stretch {
    pub allocation: usize,
    pub offset: usize,
    pub bytes: usize,
}

/// One lane's copies: not yet committed, and the committed groups, oldest first.
#[derive(Default)]
pub struct AsyncCopies {
    pub open: Vec<AsyncCopy>,
    pub groups: VecDeque<Vec<AsyncCopy>>,
}

/// A copy on its way to shared memory: pieces with their offsets there, and the mbarrier that counts them.
pub struct ArrivingCopy {
    pub pieces: Vec<(usize, Vec<u8>)>,
    pub from: Vec<Stretch>,
    pub bytes: usize,
    pub barrier: usize,
    pub pc: usize,
}

/// A copy on its way out of shared memory.
pub struct DepartingCopy {
    /// Offset in shared memory, address in global memory, bytes.
    pub pieces: Vec<(usize, Option<u64>, usize)>,
    /// Once it has been read.
    pub data: Option<Vec<Vec<u8>>>,
    /// f32 are added to what is there.
    pub add: bool,
    pub pc: usize,
}

/// One lane's copies out: not yet committed, and the committed groups, oldest first.
#[derive(Default)]
pub struct BulkStores {
    pub open: Vec<DepartingCopy>,
    pub groups: VecDeque<Vec<DepartingCopy>>,
}

impl BulkStores {
    /// A copy whose shared memory may still be read.
    pub fn unread(&self) -> Option<&DepartingCopy> {
        self.groups.iter().flatten().chain(&self.open).find(|leaving| leaving.data.is_none())
    }
}

/// What a warp's wgmmas in flight hold.
pub struct WgmmasInFlight {
    /// Registers that other instructions have touched since the last `wgmma.fence`.
    pub touched: Vec<bool>,
    /// Wgmmas in flight by register.
    pub busy: Vec<u16>,
    pub clobbered: Option<Register>,
    pub fenced: bool,
    pub open: Vec<WgmmaOperands>,
    pub groups: VecDeque<Vec<WgmmaOperands>>,
    /// What all four warps must have in common.
    pub trace: DefaultHasher,
}

pub struct WgmmaOperands {
    pub n: usize,
    pub to: Vec<Register>,
    pub a: Vec<Register>,
    /// Offsets in shared memory of 16 bytes each.
    pub reads: Vec<usize>,
}

impl WgmmasInFlight {
    pub fn new(registers: usize) -> WgmmasInFlight {
        WgmmasInFlight {
            touched: vec![false; registers],
            busy: vec![0; registers],
            clobbered: None,
            fenced: false,
            open: vec![],
            groups: VecDeque::new(),
            trace: DefaultHasher::new(),
        }
    }
    /// An instruction that is no wgmma reads or writes the register.
    pub fn touch(&mut self, register: Register) {
        self.touched[register] = true;
        if self.busy[register] > 0 {
            self.clobbered = Some(register);
        }
    }
    pub fn trace(&self) -> u64 {
        self.trace.finish()
    }
    pub fn idle(&self) -> bool {
        self.open.is_empty() && self.groups.is_empty()
    }
}
