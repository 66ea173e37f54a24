//! One warp's state: registers, the groups that its lanes have diverged into, its view of other warps' clocks. Never
//! executes anything.
use super::kernel::Kernel;
use std::collections::VecDeque;

pub const LANES: usize = 32;

/// Lanes that share a program counter.
#[derive(Clone, Copy, Debug)]
pub struct Group {
    pub pc: usize,
    pub mask: u32,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum State {
    Ready,
    /// At a barrier of that id, for so many threads (none: all of the CTA), since that instruction.
    Waiting {
        barrier: u64,
        threads: Option<u64>,
        pc: usize,
    },
    Done,
}

/// A `cp.async` in flight: an offset in shared memory, and the bytes as they were at issue.
pub struct Copy {
    pub to: usize,
    pub data: Vec<u8>,
}

/// One lane's copies: not yet committed, and the committed groups, oldest first.
#[derive(Default)]
pub struct Copies {
    pub open: Vec<Copy>,
    pub groups: VecDeque<Vec<Copy>>,
}

pub struct Warp {
    pub id: usize,
    /// Lowest program counter first; the first that can run does. Equal ones merge, so structured code reconverges.
    pub groups: Vec<Group>,
    pub registers: Vec<[u64; LANES]>,
    /// Lanes in which each register holds something.
    pub written: Vec<u32>,
    /// See [Note: clocks] in shadow.rs.
    pub clocks: Vec<u32>,
    pub state: State,
    pub copies: [Copies; LANES],
}

/// The lanes of a mask.
pub fn lanes(mask: u32) -> impl Iterator<Item = usize> {
    (0..LANES).filter(move |lane| mask >> lane & 1 == 1)
}

impl Warp {
    /// Warp `id` of a CTA of `threads`; registers hold a value that is hardly ever right.
    pub fn new(kernel: &Kernel, id: usize, threads: usize) -> Warp {
        let here = (threads - id * LANES).min(LANES);
        let mut clocks = vec![0; threads.div_ceil(LANES)];
        clocks[id] = 1;
        Warp {
            id,
            groups: vec![Group { pc: 0, mask: u32::MAX >> (LANES - here) }],
            registers: vec![[0xDEAD_BEEF_DEAD_BEEF; LANES]; kernel.registers.len()],
            written: vec![0; kernel.registers.len()],
            clocks,
            state: State::Ready,
            copies: Default::default(),
        }
    }
    /// Lanes that have not returned.
    pub fn live(&self) -> u32 {
        self.groups.iter().fold(0, |all, group| all | group.mask)
    }
    pub fn set(&mut self, register: usize, mask: u32, values: &[u64; LANES]) {
        for lane in lanes(mask) {
            self.registers[register][lane] = values[lane];
        }
        self.written[register] |= mask;
    }
    /// Sends lanes `taken` of a group to `to` and the others to the next instruction.
    pub fn advance(&mut self, group: usize, taken: u32, to: Option<usize>) {
        let Group { pc, mask } = self.groups[group];
        self.groups[group] = Group { pc: pc + 1, mask: mask & !taken };
        if let Some(pc) = to {
            self.groups.push(Group { pc, mask: taken });
        }
        if self.groups.len() > 1 || self.groups[0].mask == 0 {
            self.merge();
        }
        if self.groups.is_empty() {
            self.state = State::Done;
        }
    }
    fn merge(&mut self) {
        self.groups.retain(|group| group.mask != 0);
        self.groups.sort_unstable_by_key(|group| group.pc);
        self.groups.dedup_by(|next, kept| {
            let same = next.pc == kept.pc;
            kept.mask |= if same { next.mask } else { 0 };
            same
        });
    }
}
