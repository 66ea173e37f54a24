//! A kernel as it is executed: instructions with their operands as slots, offsets and indices. Never text.
use super::decode::Op;
use super::lex::Place;
use std::sync::Arc;

/// Where the first shared byte lies: not 0, so that a zero address is no shared memory.
pub const SHARED_BASE: u64 = 1024;
/// Where the parameter buffer lies as generic memory: below every allocation, above shared memory.
pub const PARAMETER_BASE: u64 = 1 << 35;
/// Registers of a multiprocessor.
const REGISTERS: u32 = 65536;
/// An index into a warp's registers. Predicates, 32 and 64 bits share one file of 64-bit slots.
pub type Register = usize;

#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Special {
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
pub enum Operand {
    Register(Register),
    /// `!%p`
    Not(Register),
    Immediate(u64),
    Special(Special),
    /// Offset in the parameter buffer.
    Parameter(usize),
    /// Index of an instruction, once labels are resolved.
    Label(usize),
    /// `[base + offset]`
    Memory(Box<Operand>, i64),
    /// `[map, {x, y}]`: a tensor map and coordinates.
    Tensor(Box<Operand>, Vec<Operand>),
    /// `{a, b}`
    List(Vec<Operand>),
    /// `_`
    Nothing,
}

pub struct Instruction {
    /// Executed where this predicate is 1, or 0 if negated.
    pub guard: Option<(Register, bool)>,
    pub op: Op,
    pub place: Place,
}

/// A parameter or a shared array.
#[derive(Clone, Debug)]
pub struct Field {
    /// Shared, for it is named with each access.
    pub name: Arc<str>,
    pub offset: usize,
    pub bytes: usize,
}

pub struct Kernel {
    pub name: String,
    pub parameters: Vec<Field>,
    pub instructions: Vec<Instruction>,
    /// Their names, by slot.
    pub registers: Vec<String>,
    /// Offsets count from [`SHARED_BASE`]. An array without a length takes what the launch gives.
    pub shared: Vec<Field>,
    /// `.maxntid`, or `.reqntid`, as a product.
    pub max_threads: Option<u32>,
    /// `.maxnreg` and `.minnctapersm`: what `setmaxnreg` starts from.
    pub max_registers: Option<u32>,
    pub min_ctas: u32,
    /// The block has exactly so many threads.
    pub exact_threads: bool,
    /// What the errors of approximate instructions are drawn from: as if it ran on another GPU.
    pub seed: u64,
    pub(super) files: Vec<String>,
}

impl Kernel {
    /// Registers that each of `threads` has when it starts, in the hardware's units of 8.
    pub fn registers_a_thread(&self, threads: usize) -> u32 {
        let most = REGISTERS / (self.min_ctas * threads.max(1) as u32) / 8 * 8;
        self.max_registers.unwrap_or(most).min(most).min(255)
    }
    /// "file:line" of an instruction.
    pub fn place(&self, pc: usize) -> String {
        let place = self.instructions[pc].place;
        format!("{}:{}", self.files[place.file], place.line)
    }
}
