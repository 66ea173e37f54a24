//! The emulated GPU: what a launch and its CTAs consist of, and what every instruction needs of it. Never executes one.
use super::clock::{ClockView, Epoch};
use super::in_flight::ArrivingCopy;
use super::kernel::{Field, PtxKernel};
use super::lane::LANES;
use super::mbarrier::Mbarrier;
use super::memory::GlobalMemory;
use super::operand::PtxSource;
use super::report::{Finding, FindingKind, LaunchCounts, LaunchReport, Thread};
use super::shadow::Shadow;
use super::warp::Warp;
use std::collections::{BTreeMap, HashMap};

/// The launch cannot go on; why is in the report.
pub struct Stop;
pub type StepResult = Result<(), Stop>;

/// A warp that has come to a named barrier and gone on.
pub struct BarrierArrival {
    pub barrier: u64,
    pub threads: u64,
    pub warp: usize,
    pub view: ClockView,
}

/// What a CTA's warps share.
pub struct Cta {
    pub id: u32,
    pub index: [u32; 3],
    pub shared: Vec<u8>,
    pub shadow: Shadow,
    /// Warps at named barriers that have gone on.
    pub arrivals: Vec<BarrierArrival>,
    /// By offset in shared memory.
    pub mbarriers: BTreeMap<usize, Mbarrier>,
    /// Bulk copies on their way to shared memory.
    pub flights: Vec<ArrivingCopy>,
    /// The time of what acts beside the warps.
    pub agents: u32,
    /// Registers that `setmaxnreg` has given back.
    pub spare_registers: u32,
    /// Events since the last look that may let a polling warp go on.
    pub progress: u64,
}

/// What a strong write replaced.
pub struct Overwritten {
    pub by: Epoch,
    pub value: u64,
}

pub struct Emulator<'a, 'm> {
    pub kernel: &'a PtxKernel,
    pub memory: &'a mut GlobalMemory<'m>,
    /// What the lane at hand reads of memory that is lent to be read.
    pub lent: Vec<u8>,
    /// The parameter buffer.
    pub arguments: Vec<u8>,
    /// Shared arrays with the launch's dynamic length in place.
    pub shared: Vec<Field>,
    pub grid: [u32; 3],
    pub block: [u32; 3],
    pub report: LaunchReport,
    pub counts: LaunchCounts,
    /// Warp instructions executed, loops that wait included.
    pub executed: u64,
    /// What strong writes of global memory replaced, and when, by address.
    pub past: HashMap<u64, Overwritten>,
    /// Writes of global memory so far.
    pub writes: u64,
    /// What releases have told, by address, and CTA where the scope was that.
    pub releases: HashMap<(u64, Option<u32>), ClockView>,
}

/// Where execution is: for findings.
#[derive(Clone, Copy)]
pub struct Site {
    pub pc: usize,
    pub cta: u32,
    pub warp: usize,
    pub lane: Option<usize>,
}

impl Emulator<'_, '_> {
    pub fn find(&mut self, kind: FindingKind, at: Site, what: String) {
        let lane = at.lane.map(|lane| lane as u32);
        let thread = Some(Thread { cta: at.cta, warp: at.warp as u32, lane });
        let place = Some(self.kernel.place(at.pc));
        self.report.add(Finding { kind, kernel: self.kernel.name.clone(), place, thread, what });
    }
    /// A source's values; lanes of the mask must have been written.
    pub fn read(&mut self, warp: &mut Warp, source: PtxSource, mask: u32, at: Site) -> [u64; LANES] {
        self.check_written(warp, source, mask, at);
        match source {
            PtxSource::Immediate(value) => [value; LANES],
            PtxSource::Register(register) => warp.registers[register],
        }
    }
    pub(super) fn check_written(&mut self, warp: &mut Warp, source: PtxSource, mask: u32, at: Site) {
        let PtxSource::Register(register) = source else { return };
        let missing = mask & !warp.written[register];
        if missing != 0 {
            let lane = missing.trailing_zeros() as usize;
            let what =
                format!("register {} was never written (lanes {missing:#010x})", self.kernel.registers[register]);
            self.find(FindingKind::Uninitialized, Site { lane: Some(lane), ..at }, what);
        }
        warp.flying.touch(register);
    }
}

/// Up to eight bytes as a number.
pub fn little_endian(bytes: &[u8]) -> u64 {
    bytes.iter().rev().fold(0, |value, byte| value << 8 | *byte as u64)
}
