//! One warp's state: registers, groups of diverged lanes, its view of other warps' clocks. Never executes anything.
use super::clock::{ClockView, Epoch, FencedMemory, LaneViews};
use super::in_flight::{AsyncCopies, BulkStores, WgmmasInFlight};
use super::kernel::PtxKernel;
use super::lane::{LANES, LaneValues, lanes};
use super::operand::PtxSource;
use super::shadow::{Accessor, FenceTimes, Proxy};
use std::collections::{BTreeMap, HashMap};

/// LaneValues that share a program counter.
#[derive(Clone, Copy, Debug)]
pub struct LaneGroup {
    pub pc: usize,
    pub mask: u32,
}

/// When diverged lanes reconverge.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Meet {
    /// Lowest program counter first; equal ones merge, so structured code reconverges.
    Soon,
    /// Only at instructions that need them together: one group runs as far as it can, then the next. Those that take a
    /// branch go first, or those that do not.
    Late { taken_first: bool },
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WarpState {
    Ready,
    /// Waiting at that instruction for an mbarrier's phase or free registers.
    Polling {
        pc: usize,
    },
    /// Waiting until global memory is written: it has read the same value again after `writes` writes.
    Spinning {
        pc: usize,
        writes: u64,
    },
    /// Waiting since that instruction at a barrier of that id, for that many threads (none: all of the CTA).
    Waiting {
        barrier: u64,
        threads: Option<u64>,
        pc: usize,
    },
    Done,
}

/// The phase of a warp at the cluster's barrier.
pub enum ClusterPhase {
    Before,
    /// It has published this view.
    Arrived(ClockView),
    /// All have arrived: it will know this.
    Open(ClockView),
}

/// A strong read.
pub struct Spin {
    pub pc: usize,
    pub active: u32,
    pub addresses: [u64; LANES],
    pub values: [u64; LANES],
    /// Executed since.
    pub instructions: u64,
}

pub struct Warp {
    pub id: usize,
    /// Its CTA.
    pub cta: u32,
    /// The first group that can run does. See [`Meet`].
    pub groups: Vec<LaneGroup>,
    pub meet: Meet,
    pub registers: Vec<[u64; LANES]>,
    /// LaneValues in which each register has been written.
    pub written: Vec<u32>,
    /// Warps of the CTA.
    pub warps: usize,
    /// See [Note: clocks] in clock.rs. Starts at 1, because others know nothing of it.
    pub time: u32,
    pub views: LaneViews,
    pub order: Fences,
    /// The asynchronous proxy sees what a lane wrote before its last proxy fence.
    pub fenced: FenceTimes,
    /// Since `barrier.cluster.arrive`, until the wait.
    pub cluster: ClusterPhase,
    /// What the last `fence.mbarrier_init` makes visible to the cluster.
    pub initialized: Option<ClockView>,
    pub state: WarpState,
    pub copies: [AsyncCopies; LANES],
    /// Bulk stores, by lane.
    pub bulk: BTreeMap<usize, BulkStores>,
    /// Waits that have failed once: see [Note: waiting] in mbarrier_ops.rs.
    pub polled: Vec<(u64, u64, u32)>,
    /// The last strong read, until something other than arithmetic follows; and the writes that strong reads have
    /// missed, by address and lane. See [Note: spinning] in spin.rs.
    pub spin: Option<Spin>,
    pub missed: HashMap<(u64, usize), Epoch>,
    pub flying: WgmmasInFlight,
    /// Registers per thread, as set by `setmaxnreg`.
    pub budget: u32,
}

/// How fences combine with relaxed accesses: a release is a fence and a write, an acquire a read and a fence.
#[derive(Default)]
pub struct Fences {
    /// What these lanes' last fence may publish.
    pub passed: Option<(u32, ClockView)>,
    /// What relaxed reads have seen, not yet ordered by a fence.
    pub met: Option<ClockView>,
}

impl Warp {
    /// Warp `id` of a CTA of `threads`; registers start with a value that is hardly ever correct.
    pub fn new(kernel: &PtxKernel, cta: u32, id: usize, threads: usize, meet: Meet) -> Warp {
        let here = (threads - id * LANES).min(LANES);
        let warps = threads.div_ceil(LANES);
        Warp {
            id,
            cta,
            groups: vec![LaneGroup { pc: 0, mask: u32::MAX >> (LANES - here) }],
            meet,
            registers: vec![[0xDEAD_BEEF_DEAD_BEEF; LANES]; kernel.registers.len()],
            written: vec![0; kernel.registers.len()],
            warps,
            time: 1,
            views: LaneViews::Same(ClockView::new(cta, warps)),
            order: Fences::default(),
            fenced: FenceTimes::default(),
            cluster: ClusterPhase::Before,
            initialized: None,
            state: WarpState::Ready,
            copies: Default::default(),
            bulk: BTreeMap::new(),
            polled: vec![],
            spin: None,
            missed: HashMap::new(),
            flying: WgmmasInFlight::new(kernel.registers.len()),
            budget: kernel.registers_a_thread(threads),
        }
    }
    /// LaneValues that have not returned.
    pub fn live(&self) -> u32 {
        self.groups.iter().fold(0, |all, group| all | group.mask)
    }
    /// These lanes as accessors of memory now.
    pub fn who(&self, cta: u32, lanes: u32, pc: usize, proxy: Proxy) -> Accessor<'_> {
        let Warp { id: warp, warps, time, ref views, ref fenced, .. } = *self;
        Accessor { cta, warp, warps, lanes, time, views, fenced, pc, proxy }
    }
    /// Publishes what these lanes have done and know, for others to acquire; advances their time.
    pub fn release(&mut self, mask: u32, cta: u32) -> ClockView {
        let mut view = self.views.joined(mask);
        view.note(&Epoch { cta, clock: self.time, pc: 0, warp: self.id as u8, lanes: mask, asynchronous: false });
        for memory in FencedMemory::ALL {
            lanes(mask).for_each(|lane| view.show_own(memory, self.id, lane, self.fenced[memory as usize][lane]));
        }
        self.time += 1;
        view
    }
    pub fn acquire(&mut self, mask: u32, view: &ClockView) {
        let live = self.live();
        self.views.change(mask, live, |known| known.join(view));
    }
    pub fn all(&self, source: PtxSource) -> LaneValues {
        match source {
            PtxSource::Immediate(value) => [value; LANES],
            PtxSource::Register(register) => self.registers[register],
        }
    }
    /// The same without a copy: a register itself, or `room` filled with an immediate.
    #[inline]
    pub fn lent<'a>(&'a self, source: PtxSource, room: &'a mut LaneValues) -> &'a LaneValues {
        const ZEROS: &LaneValues = &[0; LANES];
        match source {
            PtxSource::Immediate(0) => ZEROS,
            PtxSource::Immediate(value) => {
                room.fill(value);
                room
            }
            PtxSource::Register(register) => &self.registers[register],
        }
    }
    pub fn set(&mut self, register: usize, mask: u32, values: &LaneValues) {
        self.wrote(register, mask);
        match mask {
            u32::MAX => self.registers[register] = *values,
            _ => lanes(mask).for_each(|lane| self.registers[register][lane] = values[lane]),
        }
    }
    /// An instruction has written those lanes of the register.
    pub fn wrote(&mut self, register: usize, mask: u32) {
        self.flying.touch(register);
        self.written[register] |= mask;
    }
    pub fn of(&self, source: PtxSource, lane: usize) -> u64 {
        match source {
            PtxSource::Immediate(value) => value,
            PtxSource::Register(register) => self.registers[register][lane],
        }
    }
    /// Sends lanes `taken` of a group to `to` and the others to the next instruction.
    pub fn advance(&mut self, group: usize, taken: u32, to: Option<usize>) {
        let LaneGroup { pc, mask } = self.groups[group];
        self.groups[group] = LaneGroup { pc: pc + 1, mask: mask & !taken };
        if let Some(pc) = to {
            let after = self.meet != Meet::Late { taken_first: true };
            self.groups.insert(group + after as usize, LaneGroup { pc, mask: taken });
        }
        if self.groups.len() > 1 || self.groups[0].mask == 0 {
            self.groups.retain(|group| group.mask != 0);
            if self.meet == Meet::Soon {
                self.merge();
            }
        }
        if self.groups.is_empty() {
            self.state = WarpState::Done;
        }
    }
    /// Groups at the same instruction become one.
    pub fn merge(&mut self) {
        self.groups.sort_by_key(|group| group.pc);
        self.groups.dedup_by(|next, kept| {
            let same = next.pc == kept.pc;
            kept.mask |= if same { next.mask } else { 0 };
            same
        });
    }
}
