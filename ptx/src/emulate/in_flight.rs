//! Operations of a warp and its CTA in flight: cp.async copies, bulk copies both ways, wgmmas. Never moves data.
use super::operand::Register;
use std::collections::VecDeque;
use std::hash::{DefaultHasher, Hasher};
use std::sync::Arc;

/// A `cp.async` in flight: an offset in shared memory, the bytes as of issue, and their source.
pub struct AsyncCopy {
    pub to: usize,
    pub bytes: usize,
    /// The first `bytes` of them.
    pub data: [u8; AsyncCopy::MOST],
    pub from: Vec<Stretch>,
}

impl AsyncCopy {
    pub const MOST: usize = 16;
}

/// A range of an allocation of global memory, by index.
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

/// A copy in flight to shared memory: pieces, by offset and bytes there, with their data one after another, and the
/// mbarrier that counts them.
pub struct ArrivingCopy {
    pub pieces: Vec<(usize, usize)>,
    pub data: Vec<u8>,
    pub from: Vec<Stretch>,
    pub barrier: usize,
    pub pc: usize,
    /// The CTA of the cluster from whose shared memory it comes, by rank, and where.
    pub sender: Option<(u32, usize)>,
}

/// A copy in flight from shared memory.
pub struct DepartingCopy {
    /// Offset in shared memory, address in global memory, bytes.
    pub pieces: Vec<(usize, Option<u64>, usize)>,
    /// Set once it has been read.
    pub data: Option<Vec<Vec<u8>>>,
    /// f32 are added to the destination.
    pub add: bool,
    pub pc: usize,
}

/// One lane's outgoing copies: not yet committed, and the committed groups, oldest first.
#[derive(Default)]
pub struct BulkStores {
    pub open: Vec<DepartingCopy>,
    pub groups: VecDeque<Vec<DepartingCopy>>,
}

impl BulkStores {
    /// A copy that may still read shared memory.
    pub fn unread(&self) -> Option<&DepartingCopy> {
        self.groups.iter().flatten().chain(&self.open).find(|leaving| leaving.data.is_none())
    }
}

/// What a warp's wgmmas in flight use.
pub struct WgmmasInFlight {
    /// Registers that other instructions accessed since the last `wgmma.fence`.
    pub touched: Vec<bool>,
    /// Number of wgmmas in flight per register.
    pub busy: Vec<u16>,
    pub clobbered: Option<Register>,
    pub fenced: bool,
    pub open: Vec<WgmmaOperands>,
    pub groups: VecDeque<Vec<WgmmaOperands>>,
    /// What all four warps must have executed alike.
    pub trace: DefaultHasher,
}

pub struct WgmmaOperands {
    pub n: usize,
    pub to: Arc<[Register]>,
    pub a: Arc<[Register]>,
    /// Offsets in shared memory, 16 bytes each.
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
    /// An instruction other than wgmma reads or writes the register.
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
