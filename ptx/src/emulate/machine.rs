//! The emulated GPU: the state of a launch and its CTAs, and helpers for every instruction. Never executes one.
use super::clock::{ClockView, Epoch};
use super::in_flight::ArrivingCopy;
use super::kernel::{Field, PtxKernel};
use super::lane::{LANES, LaneValues};
use super::mbarrier::Mbarrier;
use super::memory::GlobalMemory;
use super::operand::PtxSource;
use super::report::{Finding, FindingKind, LaunchCounts, LaunchReport, Thread};
use super::shadow::Shadow;
use super::warp::Warp;
use std::collections::{BTreeMap, HashMap};

/// The launch cannot continue; the report says why.
pub struct Stop;
pub type StepResult = Result<(), Stop>;

/// A warp that has arrived at a named barrier without waiting.
pub struct BarrierArrival {
    pub barrier: u64,
    pub threads: u64,
    pub warp: usize,
    pub view: ClockView,
}

/// State shared by a CTA's warps.
#[derive(Default)]
pub struct Cta {
    pub id: u32,
    pub index: [u32; 3],
    /// In its cluster, whose CTAs have consecutive ids.
    pub rank: u32,
    pub shared: Vec<u8>,
    pub shadow: Shadow,
    /// Warps that have arrived at named barriers without waiting.
    pub arrivals: Vec<BarrierArrival>,
    /// By offset in shared memory.
    pub mbarriers: BTreeMap<usize, Mbarrier>,
    /// Bulk copies in flight to shared memory.
    pub flights: Vec<ArrivingCopy>,
    /// The time of actors other than warps.
    pub agents: u32,
    /// Registers that `setmaxnreg` has released.
    pub spare_registers: u32,
    /// Number of events that may let a polling warp proceed.
    pub progress: u64,
    /// When copies to other CTAs had read this one's shared memory.
    pub sent: Vec<Epoch>,
    pub ended: bool,
}

/// The old value under a strong write.
pub struct Overwritten {
    pub by: Epoch,
    pub value: u64,
}

/// Where an instruction computes, so that no room has to be cleared for each.
#[derive(Default)]
pub struct LaneScratch {
    pub result: LaneValues,
    pub immediates: [LaneValues; 3],
}

pub struct Emulator<'a, 'm> {
    pub kernel: &'a PtxKernel,
    pub memory: &'a mut GlobalMemory<'m>,
    pub scratch: LaneScratch,
    /// Bytes that the current lane reads from memory lent read-only.
    pub lent: Vec<u8>,
    /// The parameter buffer.
    pub arguments: Vec<u8>,
    /// Shared arrays, with the launch's dynamic length filled in.
    pub shared: Vec<Field>,
    pub grid: [u32; 3],
    pub block: [u32; 3],
    /// The other CTAs of the cluster that executes.
    pub peers: Vec<Cta>,
    pub report: LaunchReport,
    /// The kinds of findings so far, with their instructions.
    pub found: Vec<(FindingKind, usize)>,
    pub counts: LaunchCounts,
    /// Warp instructions executed, including wait loops.
    pub executed: u64,
    /// Old values under strong writes to global memory, and when, by address.
    pub past: HashMap<u64, Overwritten>,
    /// Number of writes to global memory.
    pub writes: u64,
    /// Views published by releases, by address, and by CTA for CTA scope.
    pub releases: HashMap<(u64, Option<u32>), ClockView>,
}

/// The current position, for findings.
#[derive(Clone, Copy)]
pub struct Site {
    pub pc: usize,
    pub cta: u32,
    pub warp: usize,
    pub lane: Option<usize>,
}

impl Emulator<'_, '_> {
    /// Whether such a finding of an instruction would not be kept: a race repeats it for each byte, and its text costs
    /// more than the access.
    pub fn is_known(&self, kind: FindingKind, at: Site) -> bool {
        self.found.contains(&(kind, at.pc))
    }
    pub fn find(&mut self, kind: FindingKind, at: Site, what: String) {
        if self.is_known(kind, at) {
            return;
        }
        self.found.push((kind, at.pc));
        let lane = at.lane.map(|lane| lane as u32);
        let thread = Some(Thread { cta: at.cta, warp: at.warp as u32, lane });
        let place = Some(self.kernel.place(at.pc));
        self.report.add(Finding { kind, kernel: self.kernel.name.clone(), place, thread, what });
    }
    /// A source's values; lanes of the mask must have written it.
    pub fn read(&mut self, warp: &mut Warp, source: PtxSource, mask: u32, at: Site) -> [u64; LANES] {
        self.check_written(warp, source, mask, at);
        warp.all(source)
    }
    pub(super) fn check_written(&mut self, warp: &mut Warp, source: PtxSource, mask: u32, at: Site) {
        let PtxSource::Register(register) = source else { return };
        let missing = mask & !warp.written[register];
        if missing != 0 && !self.is_known(FindingKind::Uninitialized, at) {
            let lane = missing.trailing_zeros() as usize;
            let what =
                format!("register {} was never written (lanes {missing:#010x})", self.kernel.registers[register]);
            self.find(FindingKind::Uninitialized, Site { lane: Some(lane), ..at }, what);
        }
        warp.flying.touch(register);
    }
}

/// An element's bytes as a number, without a call for the usual sizes.
#[inline]
pub fn little_endian(bytes: &[u8]) -> u64 {
    match *bytes {
        [a, b] => u16::from_le_bytes([a, b]) as u64,
        [a, b, c, d] => u32::from_le_bytes([a, b, c, d]) as u64,
        _ => bytes.iter().rev().fold(0, |value, byte| value << 8 | *byte as u64),
    }
}
/// The inverse.
#[inline]
pub fn put_little_endian(to: &mut [u8], value: u64) {
    let value = value.to_le_bytes();
    match to {
        [a, b] => [*a, *b] = [value[0], value[1]],
        [a, b, c, d] => [*a, *b, *c, *d] = [value[0], value[1], value[2], value[3]],
        _ => to.iter_mut().zip(value).for_each(|(to, byte)| *to = byte),
    }
}
