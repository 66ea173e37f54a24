//! Executes one instruction of one warp: chooses the group, checks that the lanes it needs are there, dispatches. Memory
//! and synchronising instructions are in memory_ops.rs, matrix_ops.rs and sync_ops.rs. Never schedules warps.
use super::bulk::Flight;
use super::clock::View;
use super::decode::{Op, Source};
use super::kernel::{Field, Kernel, Special};
use super::mbarrier::Mbarrier;
use super::memory::Memory;
use super::report::{Counts, Finding, Kind, Report, Thread};
use super::shadow::Shadow;
use super::spin::Past;
use super::sync_ops::Arrival;
use super::warp::{Group, LANES, Meet, State, Warp, lanes};
use std::collections::{BTreeMap, HashMap};

/// The launch cannot go on; why is in the report.
pub struct Stop;
pub type Step = Result<(), Stop>;

/// What a CTA's warps share.
pub struct Cta {
    pub id: u32,
    pub index: [u32; 3],
    pub shared: Vec<u8>,
    pub shadow: Shadow,
    /// Warps at named barriers that have gone on.
    pub arrivals: Vec<Arrival>,
    /// By offset in shared memory.
    pub mbarriers: BTreeMap<usize, Mbarrier>,
    /// Bulk copies on their way to shared memory.
    pub flights: Vec<Flight>,
    /// The time of what acts beside the warps.
    pub agents: u32,
    /// Registers that `setmaxnreg` has given back.
    pub spare_registers: u32,
    /// Events since the last look that may let a polling warp go on.
    pub progress: u64,
}

pub struct Machine<'a, 'm> {
    pub kernel: &'a Kernel,
    pub memory: &'a mut Memory<'m>,
    /// What the lane at hand reads of memory that is lent to be read.
    pub lent: Vec<u8>,
    /// The parameter buffer.
    pub arguments: Vec<u8>,
    /// Shared arrays with the launch's dynamic length in place.
    pub shared: Vec<Field>,
    pub grid: [u32; 3],
    pub block: [u32; 3],
    pub report: Report,
    pub counts: Counts,
    /// Warp instructions executed, loops that wait included.
    pub executed: u64,
    /// What strong writes of global memory replaced, and when, by address.
    pub past: HashMap<u64, Past>,
    /// Writes of global memory so far.
    pub writes: u64,
    /// What releases have told, by address, and CTA where the scope was that.
    pub releases: HashMap<(u64, Option<u32>), View>,
}

/// Where execution is: for findings.
#[derive(Clone, Copy)]
pub struct At {
    pub pc: usize,
    pub cta: u32,
    pub warp: usize,
    pub lane: Option<usize>,
}

impl Machine<'_, '_> {
    pub fn find(&mut self, kind: Kind, at: At, what: String) {
        let lane = at.lane.map(|lane| lane as u32);
        let thread = Some(Thread { cta: at.cta, warp: at.warp as u32, lane });
        let place = Some(self.kernel.place(at.pc));
        self.report.add(Finding { kind, kernel: self.kernel.name.clone(), place, thread, what });
    }
    /// Runs the warp until it waits, ends, or has executed `fuel` instructions.
    pub fn run(&mut self, cta: &mut Cta, warp: &mut Warp, fuel: u32) -> Step {
        for _ in 0..fuel {
            if warp.state != State::Ready {
                break;
            }
            self.step(cta, warp)?;
        }
        Ok(())
    }
    /// A source's values; lanes of the mask must have been written.
    pub fn read(&mut self, warp: &mut Warp, source: Source, mask: u32, at: At) -> [u64; LANES] {
        self.check_written(warp, source, mask, at);
        match source {
            Source::Immediate(value) => [value; LANES],
            Source::Register(register) => warp.registers[register],
        }
    }
    fn check_written(&mut self, warp: &mut Warp, source: Source, mask: u32, at: At) {
        let Source::Register(register) = source else { return };
        let missing = mask & !warp.written[register];
        if missing != 0 {
            let lane = missing.trailing_zeros() as usize;
            let what =
                format!("register {} was never written (lanes {missing:#010x})", self.kernel.registers[register]);
            self.find(Kind::Uninitialised, At { lane: Some(lane), ..at }, what);
        }
        warp.flying.touch(register);
    }
    /// The lanes of a group that execute its instruction: those whose guard is 1.
    fn active(&mut self, warp: &mut Warp, group: Group, at: At) -> u32 {
        let Some((guard, negated)) = self.kernel.instructions[group.pc].guard else { return group.mask };
        let values = self.read(warp, Source::Register(guard), group.mask, at);
        lanes(group.mask).filter(|&lane| (values[lane] != 0) != negated).fold(0, |mask, lane| mask | 1 << lane)
    }
    /// Lanes that must execute the instruction together with `active`.
    fn needed(&mut self, warp: &mut Warp, pc: usize, active: u32, at: At) -> u32 {
        match self.kernel.instructions[pc].op {
            Op::Barrier { .. } | Op::BarrierArrive { .. } => warp.live(),
            // Undefined without all 32, even where some have returned.
            Op::LoadMatrix { .. } | Op::Mma { .. } => u32::MAX,
            Op::Hopper(ref op) if op.aligned() => u32::MAX,
            Op::WarpBarrier { mask } | Op::Elect { mask, .. } | Op::Shuffle { mask, .. } | Op::Vote { mask, .. } => {
                self.read(warp, mask, active, at)[active.trailing_zeros() as usize % LANES] as u32 & warp.live()
            }
            _ => 0,
        }
    }
    fn step(&mut self, cta: &mut Cta, warp: &mut Warp) -> Step {
        let (mut blocked, mut polling) = (None, None);
        for index in 0..warp.groups.len() {
            let group = warp.groups[index];
            let at = At { pc: group.pc, cta: cta.id, warp: warp.id, lane: None };
            if group.pc == self.kernel.instructions.len() {
                let pc = group.pc - 1;
                self.find(Kind::Launch, At { pc, ..at }, "runs past the last instruction: 'ret' is missing".into());
                return Err(Stop);
            }
            let active = self.active(warp, group, at);
            let missing = match active {
                0 => 0,
                _ => self.needed(warp, group.pc, active, at) & !active,
            };
            if missing == 0 {
                if let Op::Hopper(op) = &self.kernel.instructions[group.pc].op
                    && self.must_wait(cta, warp, active, op, at)?
                {
                    polling.get_or_insert(group.pc);
                    continue;
                }
                self.counts.instructions += 1;
                self.executed += 1;
                warp.looks_on(&self.kernel.instructions[group.pc].op);
                self.execute(cta, warp, index, active, at)?;
                self.check_flying(warp, at);
                if matches!(warp.state, State::Looking { .. }) && warp.meet != Meet::Soon && warp.groups.len() > 1 {
                    // What it looks out for may be for the other lanes to do.
                    warp.groups.rotate_left(1);
                    warp.state = State::Ready;
                }
                return Ok(());
            }
            blocked.get_or_insert((at, active, missing));
        }
        if blocked.is_some() && warp.meet != Meet::Soon {
            let apart = warp.groups.len();
            warp.merge();
            if warp.groups.len() < apart {
                return Ok(());
            }
        }
        if let Some(pc) = polling {
            warp.state = State::Polling { pc };
            return Ok(());
        }
        let Some((at, active, missing)) = blocked else { return Ok(()) };
        let lane = Some(active.trailing_zeros() as usize);
        let what =
            format!("lanes {missing:#010x} never arrive at this instruction, which lanes {active:#010x} execute");
        self.find(Kind::Divergent, At { lane, ..at }, what);
        Err(Stop)
    }
    fn execute(&mut self, cta: &mut Cta, warp: &mut Warp, group: usize, active: u32, at: At) -> Step {
        let kernel = self.kernel;
        match &kernel.instructions[at.pc].op {
            Op::Lane { function, to, from } => {
                // Most of what runs: read in place.
                from.iter().for_each(|&source| self.check_written(warp, source, active, at));
                let value = |source: Source, lane: usize| match source {
                    Source::Immediate(value) => value,
                    Source::Register(register) => warp.registers[register][lane],
                };
                let [a, b, c] = *from;
                let mut values = [0; LANES];
                for lane in lanes(active) {
                    values[lane] = function(value(a, lane), value(b, lane), value(c, lane));
                }
                warp.set(*to, active, &values);
            }
            Op::Approximate { how, to, from } => {
                let [a, b] = from.map(|source| self.read(warp, source, active, at));
                let of =
                    |lane: usize| how.of(f32::from_bits(a[lane] as u32), f32::from_bits(b[lane] as u32), kernel.seed);
                let mut values = [0; LANES];
                for lane in lanes(active) {
                    values[lane] = of(lane).to_bits() as u64;
                }
                warp.set(*to, active, &values);
            }
            Op::Special { to, which } => {
                let values = std::array::from_fn(|lane| self.special(cta, warp.id, lane, *which) as u64);
                warp.set(*to, active, &values);
            }
            Op::Split { to, bits, from } => {
                let values = self.read(warp, *from, active, at);
                for (half, to) in to.iter().enumerate() {
                    if let Some(to) = to {
                        let part = values.map(|v| v >> (half as u32 * bits) & ((1 << bits) - 1));
                        warp.set(*to, active, &part);
                    }
                }
            }
            Op::Parameter { to, offset, bytes } => {
                for (k, to) in to.iter().enumerate() {
                    let start = offset + k * bytes;
                    let Some(value) = self.arguments.get(start..start + bytes) else {
                        self.find(Kind::OutOfBounds, at, format!("parameter bytes {start}..{}", start + bytes));
                        return Err(Stop);
                    };
                    warp.set(*to, active, &[little_endian(value); LANES]);
                }
            }
            Op::Branch(target) => {
                warp.advance(group, active, Some(*target));
                return Ok(());
            }
            Op::Exit => {
                warp.advance(group, active, None);
                return Ok(());
            }
            op @ (Op::Load { .. } | Op::Store { .. } | Op::Atomic { .. }) => self.memory(cta, warp, active, op, at)?,
            op @ (Op::CopyAsync { .. } | Op::CopyCommit | Op::CopyWait(_)) => self.copy(cta, warp, active, op, at)?,
            op @ (Op::LoadMatrix { .. } | Op::Mma { .. }) => self.matrix(cta, warp, active, op, at)?,
            Op::Hopper(op) => self.hopper(cta, warp, active, op, at)?,
            Op::Fence(fence) => self.fence(cta, warp, active, *fence),
            op => self.synchronise(cta, warp, active, op, at)?,
        }
        warp.advance(group, 0, None);
        Ok(())
    }
    fn special(&self, cta: &Cta, warp: usize, lane: usize, which: Special) -> u32 {
        let thread = (warp * LANES + lane) as u32;
        let [x, y, _] = self.block;
        match which {
            Special::Tid(axis) => [thread % x, thread / x % y, thread / x / y][axis],
            Special::Ntid(axis) => self.block[axis],
            Special::Ctaid(axis) => cta.index[axis],
            Special::Nctaid(axis) => self.grid[axis],
            Special::Lane => lane as u32,
            Special::Warp => warp as u32,
            Special::Constant(value) => value,
        }
    }
}

/// Up to eight bytes as a number.
pub fn little_endian(bytes: &[u8]) -> u64 {
    bytes.iter().rev().fold(0, |value, byte| value << 8 | *byte as u64)
}
