//! Executes one instruction of one warp: chooses the group, checks that the required lanes are present, dispatches.
//! Memory, tensor-core and synchronization instructions are in the *_ops.rs, copy.rs, bulk.rs and wgmma.rs. Never
//! schedules warps.
use super::clock::{Agent, FencedMemory};
use super::lane::{LANES, lanes};
use super::machine::{Cta, Emulator, LaneScratch, Site, StepResult, Stop, little_endian};
use super::op::{Hopper, PtxOp};
use super::operand::{PtxSource, SpecialRegister, mapped};
use super::report::FindingKind;
use super::shadow::Proxy;
use super::warp::{LaneGroup, Meet, Warp, WarpState};
use super::wgmma::GROUP;
use std::hash::Hash;

impl Emulator<'_, '_> {
    /// Runs the warp until it waits, ends, or has executed `fuel` instructions.
    pub fn run(&mut self, cta: &mut Cta, warp: &mut Warp, fuel: u32) -> StepResult {
        for _ in 0..fuel {
            if warp.state != WarpState::Ready {
                break;
            }
            self.step(cta, warp)?;
        }
        Ok(())
    }
    /// The lanes of a group that execute its instruction: those whose guard is 1.
    fn active(&mut self, warp: &mut Warp, group: LaneGroup, at: Site) -> u32 {
        let Some((guard, negated)) = self.kernel.instructions[group.pc].guard else { return group.mask };
        self.check_written(warp, PtxSource::Register(guard), group.mask, at);
        let set = warp.registers[guard].iter().rev().fold(0, |mask, &value| mask << 1 | (value != 0) as u32);
        group.mask & if negated { !set } else { set }
    }
    /// Lanes that must execute the instruction together with `active`.
    fn needed(&mut self, warp: &mut Warp, pc: usize, active: u32, at: Site) -> u32 {
        match self.kernel.instructions[pc].op {
            PtxOp::Barrier { .. } | PtxOp::BarrierArrive { .. } => warp.live(),
            // Undefined without all 32, even if some have returned.
            PtxOp::LoadMatrix { .. } | PtxOp::StoreMatrix { .. } | PtxOp::Mma { .. } => u32::MAX,
            PtxOp::Hopper(ref op) if op.aligned() => u32::MAX,
            PtxOp::WarpBarrier { mask }
            | PtxOp::Elect { mask, .. }
            | PtxOp::Shuffle { mask, .. }
            | PtxOp::Vote { mask, .. } => {
                self.read(warp, mask, active, at)[active.trailing_zeros() as usize % LANES] as u32 & warp.live()
            }
            _ => 0,
        }
    }
    fn step(&mut self, cta: &mut Cta, warp: &mut Warp) -> StepResult {
        let (mut blocked, mut polling) = (None, None);
        for index in 0..warp.groups.len() {
            let group = warp.groups[index];
            let at = Site { pc: group.pc, cta: cta.id, warp: warp.id, lane: None };
            if group.pc == self.kernel.instructions.len() {
                let pc = group.pc - 1;
                self.find(
                    FindingKind::Launch,
                    Site { pc, ..at },
                    "runs past the last instruction: 'ret' is missing".into(),
                );
                return Err(Stop);
            }
            let active = self.active(warp, group, at);
            let missing = match active {
                0 => 0,
                _ => self.needed(warp, group.pc, active, at) & !active,
            };
            if missing == 0 {
                if let PtxOp::Hopper(op) = &self.kernel.instructions[group.pc].op
                    && self.must_wait(cta, warp, active, op, at)?
                {
                    polling.get_or_insert(group.pc);
                    continue;
                }
                self.counts.instructions += 1;
                self.executed += 1;
                warp.track_spin(&self.kernel.instructions[group.pc].op);
                self.execute(cta, warp, index, active, at)?;
                self.check_flying(warp, at);
                if matches!(warp.state, WarpState::Spinning { .. }) && warp.meet != Meet::Soon && warp.groups.len() > 1
                {
                    // It may be waiting for something that the other lanes do.
                    warp.groups.rotate_left(1);
                    warp.state = WarpState::Ready;
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
            warp.state = WarpState::Polling { pc };
            return Ok(());
        }
        let Some((at, active, missing)) = blocked else { return Ok(()) };
        let lane = Some(active.trailing_zeros() as usize);
        let what =
            format!("lanes {missing:#010x} never arrive at this instruction, which lanes {active:#010x} execute");
        self.find(FindingKind::Divergent, Site { lane, ..at }, what);
        Err(Stop)
    }
    fn execute(&mut self, cta: &mut Cta, warp: &mut Warp, group: usize, active: u32, at: Site) -> StepResult {
        let kernel = self.kernel;
        match &kernel.instructions[at.pc].op {
            PtxOp::Lane { function, to, from } => {
                from.iter().for_each(|&source| self.check_written(warp, source, active, at));
                let LaneScratch { result, immediates: [a, b, c] } = &mut self.scratch;
                function([warp.lent(from[0], a), warp.lent(from[1], b), warp.lent(from[2], c)], result);
                warp.set(*to, active, result);
            }
            PtxOp::Approximate { how, to, from } => {
                let [a, b] = from.map(|source| self.read(warp, source, active, at));
                let of =
                    |lane: usize| how.of(f32::from_bits(a[lane] as u32), f32::from_bits(b[lane] as u32), kernel.seed);
                let mut values = [0; LANES];
                for lane in lanes(active) {
                    values[lane] = of(lane).to_bits() as u64;
                }
                warp.set(*to, active, &values);
            }
            PtxOp::Special { to, which } => {
                let values = std::array::from_fn(|lane| self.special(cta, warp.id, lane, *which) as u64);
                warp.set(*to, active, &values);
            }
            PtxOp::Split { to, bits, from } => {
                let values = self.read(warp, *from, active, at);
                for (half, to) in to.iter().enumerate() {
                    if let Some(to) = to {
                        let part = values.map(|v| v >> (half as u32 * bits) & ((1 << bits) - 1));
                        warp.set(*to, active, &part);
                    }
                }
            }
            PtxOp::Parameter { to, offset, bytes } => {
                for (k, to) in to.iter().enumerate() {
                    let start = offset + k * bytes;
                    let Some(value) = self.arguments.get(start..start + bytes) else {
                        self.find(FindingKind::OutOfBounds, at, format!("parameter bytes {start}..{}", start + bytes));
                        return Err(Stop);
                    };
                    warp.set(*to, active, &[little_endian(value); LANES]);
                }
            }
            PtxOp::Branch(target) => {
                warp.advance(group, active, Some(*target));
                return Ok(());
            }
            PtxOp::Exit => {
                warp.advance(group, active, None);
                return Ok(());
            }
            op @ (PtxOp::Load { .. } | PtxOp::Store { .. } | PtxOp::Atomic { .. }) => {
                self.memory(cta, warp, active, op, at)?
            }
            op @ (PtxOp::CopyAsync { .. } | PtxOp::CopyCommit | PtxOp::CopyWait(_)) => {
                self.copy(cta, warp, active, op, at)?
            }
            op @ (PtxOp::LoadMatrix { .. } | PtxOp::StoreMatrix { .. } | PtxOp::Mma { .. }) => {
                self.matrix(cta, warp, active, op, at)?
            }
            PtxOp::Hopper(op) => self.hopper(cta, warp, active, op, at)?,
            PtxOp::Fence(fence) => self.fence(cta, warp, active, *fence),
            op => self.synchronize(cta, warp, active, op, at)?,
        }
        warp.advance(group, 0, None);
        Ok(())
    }
    fn special(&self, cta: &Cta, warp: usize, lane: usize, which: SpecialRegister) -> u32 {
        let thread = (warp * LANES + lane) as u32;
        let [x, y, _] = self.block;
        match which {
            SpecialRegister::Tid(axis) => [thread % x, thread / x % y, thread / x / y][axis],
            SpecialRegister::Ntid(axis) => self.block[axis],
            SpecialRegister::Ctaid(axis) => cta.index[axis],
            SpecialRegister::Nctaid(axis) => self.grid[axis],
            SpecialRegister::Lane => lane as u32,
            SpecialRegister::Warp => warp as u32,
            SpecialRegister::Rank => cta.rank,
            SpecialRegister::Ranks => self.kernel.cluster,
            SpecialRegister::Variable(own) => mapped(own, cta.rank as u64) as u32,
        }
    }
    pub(super) fn hopper(&mut self, cta: &mut Cta, warp: &mut Warp, active: u32, op: &Hopper, at: Site) -> StepResult {
        if active == 0 {
            return Ok(());
        }
        use Hopper::*;
        match op {
            Wait { .. } => return self.wait(cta, warp, active, op, at),
            BulkLoad { .. }
            | BulkStore { .. }
            | BulkSend { .. }
            | TensorLoad { .. }
            | TensorStore { .. }
            | Hinted { .. }
            | PrefetchMap(_)
            | BulkCommit
            | BulkWait { .. } => return self.bulk(cta, warp, active, op, at),
            ClusterArrive { .. } | ClusterWait => return self.cluster(cta, warp, op, at),
            WgmmaFence => {
                warp.flying.touched.fill(false);
                warp.flying.fenced = true;
            }
            WgmmaCommit => {
                let open = std::mem::take(&mut warp.flying.open);
                warp.flying.groups.push_back(open);
            }
            WgmmaWait(left) => {
                let done = warp.flying.groups.len().saturating_sub(*left as usize);
                let by = self.agent(cta, Agent::TensorCore(warp.id / GROUP), warp.warps, at.pc);
                let live = warp.live();
                warp.views.change(live, live, |view| view.note(&by));
                for held in warp.flying.groups.drain(..done).flatten().collect::<Vec<_>>() {
                    held.to.iter().chain(held.a.iter()).for_each(|&register| warp.flying.busy[register] -= 1);
                    let who = warp.who(cta.id, u32::MAX, at.pc, Proxy::Async(FencedMemory::Shared));
                    held.reads.iter().for_each(|&offset| cta.shadow.let_go(offset, 16, by, |e| who.follows(e)));
                }
            }
            Wgmma(op) => self.wgmma(cta, warp, op, at)?,
            _ => return self.mbarrier_op(cta, warp, active, op, at),
        }
        at.pc.hash(&mut warp.flying.trace);
        Ok(())
    }
}
