//! A launch from arguments to counts: CTAs start and end, warps run in an order drawn from a seed, barriers open. Never
//! executes an instruction itself.
use super::cluster::open_cluster;
use super::draw::SplitMix64;
use super::kernel::{Field, PtxKernel};
use super::lane::LANES;
use super::machine::{Cta, Emulator, LaneScratch, Stop};
use super::memory::GlobalMemory;
use super::report::{Finding, FindingKind, LaunchCounts, LaunchReport};
use super::shadow::Shadow;
use super::sync_ops::release;
use super::tensor::MAP_BYTES;
use super::warp::{Meet, Warp, WarpState};
use std::collections::{BTreeMap, HashMap};
use std::ops::Range;

/// Number of CTAs resident at a time, as on a multiprocessor.
const RESIDENT: usize = 4;
/// Warp instructions without a CTA ending: far more than the resident ones should need, and a second or two of run
/// time.
const MOST: u64 = 1 << 24;
/// When the schedule is drawn, one in this many turns lands a copy in flight.
const LANDING: usize = 4;

#[derive(Clone, Copy, Debug)]
pub enum Argument {
    Pointer(u64),
    U64(u64),
    U32(u32),
    F32(f32),
    /// As [`TensorMap::encode`](super::TensorMap::encode) gives it.
    TensorMap([u8; MAP_BYTES]),
}

/// A CTA has at most these, in PTX.
const MOST_THREADS: u32 = 1024;

impl Argument {
    fn bytes(self) -> Vec<u8> {
        match self {
            Argument::TensorMap(bytes) => bytes.to_vec(),
            Argument::Pointer(value) | Argument::U64(value) => value.to_le_bytes().to_vec(),
            Argument::U32(value) => value.to_le_bytes().to_vec(),
            Argument::F32(value) => value.to_le_bytes().to_vec(),
        }
    }
}

pub struct KernelLaunch<'a> {
    pub kernel: &'a PtxKernel,
    pub grid: [u32; 3],
    pub block: [u32; 3],
    /// Length in bytes of the dynamic shared array.
    pub dynamic_shared: usize,
    pub arguments: &'a [Argument],
    /// 0: CTAs in order, and each warp runs as long as it can. Otherwise CTAs are shuffled, and a randomly drawn warp
    /// runs for 1 to 64 instructions. With [`LATE`], diverged lanes stay apart as long as possible; if the number is
    /// odd, those that take a branch go first. More instructions are executed then, and counted.
    pub schedule: u64,
}

/// Added to a [`KernelLaunch`]'s schedule: kernels that assume that lanes reconverge after a branch fail.
pub const LATE: u64 = 1 << 63;
/// Added to a schedule: the launch ends soon after its first finding, for those who ask only whether there is one.
pub const FIRST: u64 = 1 << 62;

struct Resident {
    cta: Cta,
    warps: Vec<Warp>,
}

impl KernelLaunch<'_> {
    /// Runs to completion; memory holds the results. Any finding makes it an error.
    pub fn run(&self, memory: &mut GlobalMemory) -> Result<LaunchCounts, LaunchReport> {
        self.run_some(0..self.grid.iter().product(), memory)
    }
    /// The same for some CTAs of a grid that would take too long.
    pub fn run_some(&self, ctas: Range<u32>, memory: &mut GlobalMemory) -> Result<LaunchCounts, LaunchReport> {
        let kernel = self.kernel;
        memory.allocations.iter_mut().for_each(|a| a.shadow.forget());
        let mut machine = Emulator {
            kernel,
            memory,
            scratch: LaneScratch::default(),
            lent: vec![],
            arguments: vec![],
            shared: kernel.shared.clone(),
            grid: self.grid,
            block: self.block,
            peers: vec![],
            report: LaunchReport::default(),
            found: vec![],
            counts: LaunchCounts::default(),
            executed: 0,
            past: HashMap::new(),
            writes: 0,
            releases: HashMap::new(),
        };
        if let Some(open) = machine.shared.iter_mut().find(|f| f.bytes == 0) {
            open.bytes = self.dynamic_shared;
        }
        let outcome = self.check(&mut machine).and_then(|()| self.schedule(&mut machine, ctas));
        if outcome.is_err() || !machine.report.findings.is_empty() { Err(machine.report) } else { Ok(machine.counts) }
    }
    fn blame(&self, machine: &mut Emulator, kind: FindingKind, what: String) -> Stop {
        machine.report.add(Finding { kind, kernel: self.kernel.name.clone(), place: None, thread: None, what });
        Stop
    }
    /// The shape of the launch and the parameter buffer.
    fn check(&self, machine: &mut Emulator) -> Result<(), Stop> {
        let threads = self.threads();
        let most = self.kernel.max_threads.map_or(MOST_THREADS, |most| most.min(MOST_THREADS));
        let least = if self.kernel.exact_threads { most } else { 1 };
        if !(least as usize..=most as usize).contains(&threads) || self.grid.contains(&0) {
            let what =
                format!("grid {:?} and block {:?}: a CTA must have {least} to {most} threads", self.grid, self.block);
            return Err(self.blame(machine, FindingKind::Launch, what));
        }
        let cluster = self.kernel.cluster;
        if !self.grid[0].is_multiple_of(cluster) {
            let what = format!("grid {:?} cannot be divided into clusters of {cluster} CTAs", self.grid);
            return Err(self.blame(machine, FindingKind::Launch, what));
        }
        let wanted = &self.kernel.parameters;
        if wanted.len() != self.arguments.len() {
            let what = format!("takes {} arguments, got {}", wanted.len(), self.arguments.len());
            return Err(self.blame(machine, FindingKind::Launch, what));
        }
        machine.arguments = vec![0; wanted.last().map_or(0, |f| f.offset + f.bytes)];
        for (Field { name, offset, bytes }, argument) in wanted.iter().zip(self.arguments) {
            let given = argument.bytes();
            if given.len() != *bytes {
                let what = format!("parameter {name} has {bytes} bytes, got {}", given.len());
                return Err(self.blame(machine, FindingKind::Launch, what));
            }
            machine.arguments[*offset..offset + bytes].copy_from_slice(&given);
        }
        Ok(())
    }
    fn threads(&self) -> usize {
        self.block.iter().map(|&n| n as usize).product()
    }
    fn start(&self, machine: &Emulator, id: u32) -> Resident {
        let shared = machine.shared.last().map_or(0, |f| f.offset + f.bytes);
        let [x, y, _] = self.grid;
        let index = [id % x, id / x % y, id / x / y];
        let cta = Cta {
            id,
            index,
            rank: id % self.kernel.cluster,
            shared: vec![0xFF; shared],
            shadow: Shadow::new(shared, false),
            arrivals: vec![],
            mbarriers: BTreeMap::new(),
            flights: vec![],
            agents: 0,
            spare_registers: 0,
            progress: 0,
            sent: vec![],
            ended: false,
        };
        let threads = self.threads();
        Resident {
            cta,
            warps: (0..threads.div_ceil(LANES)).map(|w| Warp::new(self.kernel, id, w, threads, self.meet())).collect(),
        }
    }
    fn meet(&self) -> Meet {
        if self.schedule & LATE == 0 { Meet::Soon } else { Meet::Late { taken_first: self.schedule & 1 == 1 } }
    }
    fn schedule(&self, machine: &mut Emulator, ctas: Range<u32>) -> Result<(), Stop> {
        let schedule = self.schedule & !(LATE | FIRST);
        let mut draw = SplitMix64(schedule);
        let cluster = self.kernel.cluster;
        let mut queue: Vec<u32> = ctas.step_by(cluster as usize).collect();
        queue.reverse();
        if schedule != 0 {
            for i in (1..queue.len()).rev() {
                queue.swap(i, draw.below(i + 1));
            }
        }
        let (mut residents, mut ended_at): (Vec<Resident>, u64) = (vec![], 0);
        loop {
            while residents.is_empty() || residents.len() + cluster as usize <= RESIDENT {
                let Some(first) = queue.pop() else { break };
                residents.extend((first..first + cluster).map(|id| self.start(machine, id)));
            }
            if residents.is_empty() {
                return Ok(());
            }
            let turn = if schedule == 0 { 0 } else { draw.below(residents.len()) };
            if residents[turn].cta.ended {
                residents.rotate_left(1);
                continue;
            }
            lend(machine, &mut residents, turn);
            let Resident { cta, warps } = &mut residents[turn];
            let landing = !cta.flights.is_empty() && schedule != 0 && draw.below(LANDING) == 0;
            if landing {
                machine.land(cta, warps.len(), draw.below(cta.flights.len()));
            }
            wake(cta, warps, machine.writes);
            let ready: Vec<usize> = warps.iter().filter(|w| w.state == WarpState::Ready).map(|w| w.id).collect();
            if ready.is_empty() && !cta.flights.is_empty() {
                // As late as possible: nothing can proceed without it.
                machine.land(cta, warps.len(), draw.below(cta.flights.len()));
                take_back(machine, &mut residents);
                continue;
            }
            if ready.is_empty() {
                // It waits for something that another CTA does.
                let may = cluster > 1 || spins(warps);
                take_back(machine, &mut residents);
                if may && residents.iter().any(|resident| resident.goes_on(machine.writes)) {
                    residents.rotate_left(1);
                    continue;
                }
                let of = residents[turn].cta.id / cluster;
                let stuck = residents.iter().filter(|r| r.cta.id / cluster == of && !r.cta.ended);
                return Err(self.deadlock(machine, stuck));
            }
            let (next, fuel) = match schedule {
                0 => (ready[0], 4096),
                _ => (ready[draw.below(ready.len())], 1 + draw.below(64) as u32),
            };
            machine.run(cta, &mut warps[next], fuel)?;
            if self.schedule & FIRST != 0 && !machine.found.is_empty() {
                return Err(Stop);
            }
            if machine.executed - ended_at > MOST {
                let what = format!("no CTA ended within {MOST} warp instructions");
                return Err(self.blame(machine, FindingKind::Endless, what));
            }
            if warps[next].state == WarpState::Done {
                machine.finish_bulk(cta, &mut warps[next]);
            }
            release(cta, warps);
            if warps.iter().all(|w| w.state == WarpState::Done) {
                ended_at = machine.executed;
                machine.finish_flights(cta);
                machine.finish_wgmma(cta, warps);
                machine.finish_cluster(cta, warps);
            }
            let (goes_on, of) = (warps[next].state == WarpState::Ready, cta.id / cluster);
            take_back(machine, &mut residents);
            let mut together = residents.iter_mut().filter(|resident| resident.cta.id / cluster == of);
            open_cluster(&mut together.by_ref().flat_map(|resident| &mut resident.warps).collect::<Vec<_>>());
            if residents.iter().all(|resident| resident.cta.ended || resident.cta.id / cluster != of) {
                residents.retain(|resident| resident.cta.id / cluster != of);
            } else if schedule == 0 && goes_on {
                // It may be spinning on something that another CTA does.
                residents.rotate_left(1);
            }
        }
    }
    fn deadlock<'r>(&self, machine: &mut Emulator, stuck: impl Iterator<Item = &'r Resident>) -> Stop {
        let what = stuck.map(|resident| self.waits(machine, resident)).collect::<Vec<_>>().join("; ");
        self.blame(machine, FindingKind::Deadlock, what)
    }
    fn waits(&self, machine: &Emulator, resident: &Resident) -> String {
        let waits = resident.warps.iter().filter_map(|w| match w.state {
            WarpState::Waiting { barrier, pc, .. } => {
                Some(format!("warp {} at barrier {barrier} ({})", w.id, self.kernel.place(pc)))
            }
            WarpState::Polling { pc } | WarpState::Spinning { pc, .. } => {
                Some(format!("warp {} waiting ({})", w.id, self.kernel.place(pc)))
            }
            _ => None,
        });
        let mbarriers = resident.cta.mbarriers.iter().map(|(offset, barrier)| {
            let array = machine.shared.iter().rfind(|f| f.offset <= *offset);
            let name = array.map_or(String::new(), |f| format!("{}+{}", f.name, offset - f.offset));
            format!("mbarrier {name}: {}", barrier.state())
        });
        let what = waits.chain(mbarriers).collect::<Vec<_>>().join(", ");
        format!("cta {}: {what}", resident.cta.id)
    }
}

/// Lends the machine the other CTAs of the cluster of the one whose turn it is.
fn lend(machine: &mut Emulator, residents: &mut [Resident], turn: usize) {
    let cluster = machine.kernel.cluster;
    let here = residents[turn].cta.id;
    let peers = residents.iter_mut().filter(|r| r.cta.id != here && r.cta.id / cluster == here / cluster);
    machine.peers = peers.map(|resident| std::mem::take(&mut resident.cta)).collect();
}
/// Returns them: a lent CTA's place has no shared memory's owner, its warps know it.
fn take_back(machine: &mut Emulator, residents: &mut [Resident]) {
    for cta in std::mem::take(&mut machine.peers) {
        if let Some(resident) = residents.iter_mut().find(|r| r.warps[0].cta == cta.id) {
            resident.cta = cta;
        }
    }
}

/// A phase has completed, registers are free, or global memory has been written: waiting warps check again.
fn wake(cta: &mut Cta, warps: &mut [Warp], written: u64) {
    let progress = std::mem::take(&mut cta.progress) > 0;
    for warp in warps {
        match warp.state {
            WarpState::Polling { .. } if progress => warp.state = WarpState::Ready,
            WarpState::Spinning { writes, .. } if writes != written => warp.state = WarpState::Ready,
            _ => {}
        }
    }
}

fn spins(warps: &[Warp]) -> bool {
    warps.iter().any(|w| matches!(w.state, WarpState::Spinning { .. }))
}

impl Resident {
    fn goes_on(&self, written: u64) -> bool {
        let can = |warp: &Warp| match warp.state {
            WarpState::Ready => true,
            WarpState::Polling { .. } => self.cta.progress > 0,
            WarpState::Spinning { writes, .. } => writes != written,
            _ => false,
        };
        !self.cta.ended && (!self.cta.flights.is_empty() || self.warps.iter().any(can))
    }
}
