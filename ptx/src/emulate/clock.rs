//! Vector clocks of a launch's threads, the copy engine and the tensor cores: which events each knows of. Never
//! accesses memory.
//!
//! [Note: clocks] A warp's lanes share a time that advances with each release. An access carries that time and the
//! lanes that made it; it happened before another if the other's *view* has reached that time for each of those lanes.
//! Barriers, mbarriers, `bar.warp.sync`, and releases that are acquired join views; a shuffle orders no memory. So a
//! race between executed accesses is found under every schedule: clocks determine the order, not what happened to run
//! first. After FastTrack (Flanagan & Freund 2009).
//!
//! Bulk copies and wgmma use the *asynchronous proxy*: a thread's writes are visible there, and its reads come before
//! writes there, only with a `fence.proxy.async` in between. So a view has a second part, for each memory that such a
//! fence may be restricted to: what was known when it was executed.
use super::lane::{LANES, lanes};

/// An event: who, when, and by which instruction.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Epoch {
    pub cta: u32,
    pub clock: u32,
    pub lanes: u32,
    pub pc: u16,
    /// One past the last warp stands for [agents](Agent).
    pub warp: u8,
    /// By the asynchronous proxy.
    pub asynchronous: bool,
}

/// Actors other than warps, represented as lanes of the warp one past the last.
#[derive(Clone, Copy)]
pub enum Agent {
    CopyEngine,
    /// The unit of a warpgroup.
    TensorCore(usize),
}

impl Agent {
    pub fn epoch(self, cta: u32, warps: usize, clock: u32, pc: usize) -> Epoch {
        let lane = match self {
            Agent::CopyEngine => 0,
            Agent::TensorCore(group) => 1 + group,
        };
        Epoch { cta, clock, pc: pc as u16, warp: warps as u8, lanes: 1 << lane, asynchronous: true }
    }
}

/// A memory that a proxy fence orders: one of them, or without a qualifier both.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FencedMemory {
    Shared,
    Global,
}

impl FencedMemory {
    pub const ALL: [FencedMemory; 2] = [FencedMemory::Shared, FencedMemory::Global];
}

/// A warp's place in [`Clocks`]: the time of each lane, then one that all of them have reached, which is most often
/// the one asked for.
const TIMES: usize = LANES + 1;

/// The latest known time of every thread and agent of a CTA, [`TIMES`] for each warp.
#[derive(Clone, Debug, Default)]
struct Clocks {
    seen: Vec<u32>,
    /// What a proxy fence has made visible to the asynchronous proxy, by [`FencedMemory`]. Empty until there was one.
    shown: [Vec<u32>; FencedMemory::ALL.len()],
}

impl Clocks {
    fn join(&mut self, other: &Clocks) {
        highest(&mut self.seen, &other.seen);
        self.shown.iter_mut().zip(&other.shown).for_each(|(to, from)| highest(to, from));
    }
}

/// What is known about one's own CTA, and about others that have synchronized with it.
#[derive(Clone, Debug, Default)]
pub struct ClockView {
    cta: u32,
    own: Clocks,
    others: Vec<(u32, Clocks)>,
}

fn highest(to: &mut Vec<u32>, from: &[u32]) {
    if to.len() < from.len() {
        to.resize(from.len(), 0);
    }
    to.iter_mut().zip(from).for_each(|(to, &from)| *to = from.max(*to));
}
#[inline]
fn reaches(clocks: &[u32], e: &Epoch) -> bool {
    let first = e.warp as usize * TIMES;
    let Some(times) = clocks.get(first..first + TIMES) else { return false };
    e.clock <= times[LANES] || lanes(e.lanes).all(|lane| e.clock <= times[lane])
}

impl ClockView {
    pub fn new(cta: u32, warps: usize) -> ClockView {
        let seen = vec![0; (warps + 1) * TIMES];
        ClockView { cta, own: Clocks { seen, ..Clocks::default() }, others: vec![] }
    }
    pub fn join(&mut self, other: &ClockView) {
        self.learn(other.cta, &other.own);
        for (cta, clocks) in &other.others {
            self.learn(*cta, clocks);
        }
    }
    fn learn(&mut self, cta: u32, clocks: &Clocks) {
        if cta == self.cta {
            return self.own.join(clocks);
        }
        match self.others.iter_mut().find(|(other, _)| *other == cta) {
            Some((_, known)) => known.join(clocks),
            None => self.others.push((cta, clocks.clone())),
        }
    }
    #[inline]
    fn of(&self, e: &Epoch) -> Option<&Clocks> {
        if e.cta == self.cta {
            return Some(&self.own);
        }
        self.others.iter().find(|(cta, _)| *cta == e.cta).map(|(_, clocks)| clocks)
    }
    /// An event is known from now on.
    pub fn note(&mut self, e: &Epoch) {
        let times = &mut self.own.seen[e.warp as usize * TIMES..][..TIMES];
        let all = (e.lanes == u32::MAX).then_some(LANES);
        for lane in lanes(e.lanes).chain(all) {
            times[lane] = e.clock.max(times[lane]);
        }
    }
    /// What the asynchronous proxy of the cluster knows of it: its own work, and what a proxy fence has shown it.
    pub fn asynchronous(&self) -> ClockView {
        let mut view = self.clone();
        for Clocks { seen, shown } in view.others.iter_mut().map(|(_, clocks)| clocks).chain([&mut view.own]) {
            let threads = seen.len().saturating_sub(TIMES);
            let shown = shown[FencedMemory::Shared as usize].iter().chain(std::iter::repeat(&0));
            seen[..threads].iter_mut().zip(shown).for_each(|(seen, shown)| *seen = *shown);
        }
        view
    }
    #[inline]
    pub fn knows(&self, e: &Epoch) -> bool {
        self.of(e).is_some_and(|clocks| reaches(&clocks.seen, e))
    }
    /// Whether it was known at a proxy fence of that memory.
    pub fn shows(&self, memory: FencedMemory, e: &Epoch) -> bool {
        self.of(e).is_some_and(|clocks| reaches(&clocks.shown[memory as usize], e))
    }
    /// Makes what a thread of this CTA wrote to that memory up to that time visible to the asynchronous proxy.
    pub fn show_own(&mut self, memory: FencedMemory, warp: usize, lane: usize, clock: u32) {
        if clock == 0 {
            return; // no fence yet
        }
        let Clocks { seen, shown } = &mut self.own;
        let shown = &mut shown[memory as usize];
        shown.resize(seen.len(), 0);
        let known = &mut shown[warp * TIMES + lane];
        *known = clock.max(*known);
    }
    /// Executes a proxy fence of that memory.
    pub fn show(&mut self, memory: FencedMemory) {
        let others = self.others.iter_mut().map(|(_, clocks)| clocks);
        others.chain([&mut self.own]).for_each(|clocks| highest(&mut clocks.shown[memory as usize], &clocks.seen));
    }
}

/// The views of a warp's lanes: one for all, until some learn something that others do not.
#[derive(Clone, Debug)]
pub enum LaneViews {
    Same(ClockView),
    Each(Vec<ClockView>),
}

impl LaneViews {
    pub fn of(&self, lane: usize) -> &ClockView {
        match self {
            LaneViews::Same(view) => view,
            LaneViews::Each(views) => &views[lane],
        }
    }
    /// What any of these lanes knows.
    pub fn joined(&self, mask: u32) -> ClockView {
        match self {
            LaneViews::Same(view) => view.clone(),
            LaneViews::Each(views) => {
                let mut all = lanes(mask).map(|lane| &views[lane]);
                let mut joined = all.next().cloned().unwrap_or_default();
                all.for_each(|view| joined.join(view));
                joined
            }
        }
    }
    /// Changes what these lanes know; `live` are the lanes that have not returned.
    pub fn change(&mut self, mask: u32, live: u32, mut change: impl FnMut(&mut ClockView)) {
        if let LaneViews::Same(view) = self {
            if live & !mask == 0 {
                return change(view);
            }
            *self = LaneViews::Each(vec![view.clone(); LANES]);
        }
        if let LaneViews::Each(views) = self {
            lanes(mask).for_each(|lane| change(&mut views[lane]));
        }
    }
    /// From now on these lanes know exactly this.
    pub fn set(&mut self, mask: u32, live: u32, view: &ClockView) {
        match live & !mask {
            0 => *self = LaneViews::Same(view.clone()),
            _ => self.change(mask, live, |old| old.clone_from(view)),
        }
    }
    /// Whether all these lanes know the event.
    #[inline]
    pub fn all(&self, mask: u32, known: impl Fn(&ClockView) -> bool) -> bool {
        match self {
            LaneViews::Same(view) => known(view),
            LaneViews::Each(views) => lanes(mask).all(|lane| known(&views[lane])),
        }
    }
}
