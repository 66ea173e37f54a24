//! Operands of an instruction: as written, and as they are executed. Never knows an instruction.
/// Where the first shared byte lies: not 0, so that a zero address is no shared memory.
pub const SHARED_BASE: u64 = 1024;
/// Where the parameter buffer lies as generic memory: below every allocation, above shared memory.
pub const PARAMETER_BASE: u64 = 1 << 35;
/// Generic addresses below this are shared memory.
const SHARED_END: u64 = 1 << 32;

/// An index into a warp's registers. Predicates, 32 and 64 bits share one file of 64-bit slots.
pub type Register = usize;

#[derive(Clone, Copy, Debug, PartialEq)]
pub enum SpecialRegister {
    Tid(usize),
    Ntid(usize),
    Ctaid(usize),
    Nctaid(usize),
    Lane,
    Warp,
    /// What is the same for every thread.
    Constant(u32),
}

#[derive(Clone, Debug, PartialEq)]
pub enum PtxOperand {
    Register(Register),
    /// `!%p`
    Not(Register),
    Immediate(u64),
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
    /// Whichever the address lies in.
    Generic,
}

impl Space {
    /// The space that an address lies in: generic addresses tell it.
    pub fn of(self, address: u64) -> Space {
        match self {
            Space::Generic if address < SHARED_END => Space::Shared,
            Space::Generic => Space::Global,
            known => known,
        }
    }
}

/// An error says what was expected.
pub type Decoded<T> = Result<T, String>;

pub fn source(operand: &PtxOperand) -> Decoded<PtxSource> {
    match operand {
        PtxOperand::Register(register) => Ok(PtxSource::Register(*register)),
        PtxOperand::Immediate(value) => Ok(PtxSource::Immediate(*value)),
        PtxOperand::Parameter(offset) => Ok(PtxSource::Immediate(PARAMETER_BASE + *offset as u64)),
        other => Err(format!("a register or a number expected, found {other:?}")),
    }
}
pub fn register(operand: &PtxOperand) -> Decoded<Register> {
    match operand {
        PtxOperand::Register(register) => Ok(*register),
        other => Err(format!("a register expected, found {other:?}")),
    }
}
pub fn target(operand: &PtxOperand) -> Decoded<Option<Register>> {
    if *operand == PtxOperand::Nothing { Ok(None) } else { register(operand).map(Some) }
}
pub fn address(operand: &PtxOperand) -> Decoded<Address> {
    match operand {
        PtxOperand::Memory(base, offset) => Ok(Address { base: source(base)?, offset: *offset }),
        other => Err(format!("[address] expected, found {other:?}")),
    }
}
pub fn number(operand: &PtxOperand) -> Decoded<u64> {
    match operand {
        PtxOperand::Immediate(value) => Ok(*value),
        other => Err(format!("a number expected, found {other:?}")),
    }
}
/// The elements of `{a, b}`, or the operand alone.
pub fn list(operand: &PtxOperand) -> &[PtxOperand] {
    if let PtxOperand::List(list) = operand { list } else { std::slice::from_ref(operand) }
}
