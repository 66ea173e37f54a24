//! A kernel in executable form: instructions with their operands as slots, offsets and indices. Never text.
use super::lex::SourceLine;
use super::op::PtxOp;
use super::operand::Register;
use std::sync::Arc;

/// Registers of a multiprocessor.
const REGISTERS: u32 = 65536;
pub struct Instruction {
    /// Executes where this predicate is 1, or 0 if negated.
    pub guard: Option<(Register, bool)>,
    pub op: PtxOp,
    pub place: SourceLine,
}

/// A parameter or a shared array.
#[derive(Clone, Debug)]
pub struct Field {
    /// Shared by reference, because each access names it.
    pub name: Arc<str>,
    pub offset: usize,
    pub bytes: usize,
}

pub struct PtxKernel {
    pub name: String,
    pub parameters: Vec<Field>,
    pub instructions: Vec<Instruction>,
    /// Their names, by slot.
    pub registers: Vec<String>,
    /// Offsets count from `SHARED_BASE`. An array without a length gets the launch's.
    pub shared: Vec<Field>,
    /// `.maxntid`, or `.reqntid`, as a product.
    pub max_threads: Option<u32>,
    /// `.maxnreg` and `.minnctapersm`: what `setmaxnreg` starts from.
    pub max_registers: Option<u32>,
    pub min_ctas: u32,
    /// `.reqnctapercluster`: neighbors in x.
    pub cluster: u32,
    /// The block has exactly that many threads.
    pub exact_threads: bool,
    /// Seed of the errors of approximate instructions, as if it ran on another GPU.
    pub seed: u64,
    pub(super) files: Vec<String>,
}

impl PtxKernel {
    /// Registers that each of `threads` starts with, in the hardware's units of 8.
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
