//! Operands of an instruction, as written and as executed. Never knows an instruction.
/// Address of the first shared byte: not 0, so that a zero address is not in shared memory.
pub const SHARED_BASE: u64 = 1024;
/// Bits of an address within a CTA's shared memory. The rank of the CTA in its cluster follows, also in the address of
/// a variable that `mov` takes (SASS: SR_CgaCtaId).
const OWN_BITS: u32 = 24;
/// Generic address of the parameter buffer: below every allocation, above shared memory.
pub const PARAMETER_BASE: u64 = 1 << 35;
/// Generic addresses below this are shared memory.
const SHARED_END: u64 = 1 << 32;

/// An index into a warp's registers. Predicates, 32-bit and 64-bit registers share one file of 64-bit slots.
pub type Register = usize;

#[derive(Clone, Copy, Debug, PartialEq)]
pub enum SpecialRegister {
    Tid(usize),
    Ntid(usize),
    Ctaid(usize),
    Nctaid(usize),
    Lane,
    Warp,
    /// Rank of the CTA in its cluster.
    Rank,
    /// CTAs of a cluster.
    Ranks,
    /// The address of a shared variable, given that within the CTA's shared memory.
    Variable(u64),
}

#[derive(Clone, Debug, PartialEq)]
pub enum PtxOperand {
    Register(Register),
    /// `!%p`
    Not(Register),
    Immediate(u64),
    /// A shared variable, by its address within the CTA's shared memory.
    Variable(u64),
    Special(SpecialRegister),
    /// Offset in the parameter buffer.
    Parameter(usize),
    /// Index of an instruction, once labels are resolved.
    Label(usize),
    /// `[base + offset]`
    Memory(Box<PtxOperand>, i64),
    /// `[map, {x, y}]`: a tensor map and coordinates.
    Tensor(Box<PtxOperand>, Vec<PtxOperand>),
    /// `{a, b}`
    List(Vec<PtxOperand>),
    /// `_`
    Nothing,
}

#[derive(Clone, Copy, Debug)]
pub enum PtxSource {
    Register(Register),
    Immediate(u64),
}
#[derive(Clone, Copy, Debug)]
pub struct Address {
    pub base: PtxSource,
    pub offset: i64,
}
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Space {
    Global,
    Shared,
    /// The space that contains the address.
    Generic,
}

impl Space {
    /// The space of an address; generic addresses determine it.
    pub fn of(self, address: u64) -> Space {
        match self {
            Space::Generic if address < SHARED_END => Space::Shared,
            Space::Generic => Space::Global,
            known => known,
        }
    }
}

/// `mapa`: an address in the shared memory of the CTA of a rank, from the same one in any other.
pub fn mapped(address: u64, rank: u64) -> u64 {
    address & ((1 << OWN_BITS) - 1) | rank << OWN_BITS & 0xffff_ffff
}
/// The rank of the CTA that an address names, and the address within that CTA.
pub fn unmapped(address: u64) -> (u32, u64) {
    ((address >> OWN_BITS) as u32, address & ((1 << OWN_BITS) - 1))
}

/// Errors say what was expected.
pub type Decoded<T> = Result<T, String>;

pub fn source(operand: &PtxOperand) -> Decoded<PtxSource> {
    match operand {
        PtxOperand::Register(register) => Ok(PtxSource::Register(*register)),
        PtxOperand::Immediate(value) => Ok(PtxSource::Immediate(*value)),
        PtxOperand::Parameter(offset) => Ok(PtxSource::Immediate(PARAMETER_BASE + *offset as u64)),
        other => Err(format!("expected a register or a number, found {other:?}")),
    }
}
pub fn register(operand: &PtxOperand) -> Decoded<Register> {
    match operand {
        PtxOperand::Register(register) => Ok(*register),
        other => Err(format!("expected a register, found {other:?}")),
    }
}
pub fn target(operand: &PtxOperand) -> Decoded<Option<Register>> {
    if *operand == PtxOperand::Nothing { Ok(None) } else { register(operand).map(Some) }
}
pub fn address(operand: &PtxOperand) -> Decoded<Address> {
    match operand {
        PtxOperand::Memory(base, offset) => {
            let base = if let PtxOperand::Variable(own) = **base { PtxSource::Immediate(own) } else { source(base)? };
            Ok(Address { base, offset: *offset })
        }
        other => Err(format!("expected [address], found {other:?}")),
    }
}
pub fn number(operand: &PtxOperand) -> Decoded<u64> {
    match operand {
        PtxOperand::Immediate(value) => Ok(*value),
        other => Err(format!("expected a number, found {other:?}")),
    }
}
/// The elements of `{a, b}`, or the operand alone.
pub fn list(operand: &PtxOperand) -> &[PtxOperand] {
    if let PtxOperand::List(list) = operand { list } else { std::slice::from_ref(operand) }
}
