//! Barriers, shuffles, votes and elections. step.rs has checked that the lanes they need are present.
use super::clock::{ClockView, LaneViews};
use super::cluster::CLUSTER;
use super::lane::{LANES, lanes};
use super::machine::{BarrierArrival, Cta, Emulator, Site, StepResult, Stop};
use super::op::{PtxOp, Shuffle, WarpVote};
use super::operand::PtxSource;
use super::report::FindingKind;
use super::warp::{Warp, WarpState};

impl Emulator<'_, '_> {
    pub(super) fn synchronize(
        &mut self,
        cta: &mut Cta,
        warp: &mut Warp,
        active: u32,
        op: &PtxOp,
        at: Site,
    ) -> StepResult {
        if active == 0 {
            return Ok(());
        }
        let first = active.trailing_zeros() as usize;
        match op {
            PtxOp::Barrier { id, threads } => {
                let barrier = self.read(warp, *id, active, at)[first];
                let threads = threads.map(|threads| self.read(warp, threads, active, at)[first]);
                self.check_barrier(cta, barrier, threads, at)?;
                warp.state = WarpState::Waiting { barrier, threads, pc: at.pc };
            }
            PtxOp::BarrierArrive { id, threads } => {
                let [barrier, threads] = [*id, *threads].map(|source| self.read(warp, source, active, at)[first]);
                self.check_barrier(cta, barrier, Some(threads), at)?;
                if cta.arrivals.iter().any(|a| (a.barrier, a.warp) == (barrier, warp.id)) {
                    let what = format!("arrives at barrier {barrier} a second time before it opened");
                    self.find(FindingKind::Phase, at, what);
                    return Err(Stop);
                }
                let view = warp.release(warp.live(), cta.id);
                cta.arrivals.push(BarrierArrival { barrier, threads, warp: warp.id, view });
            }
            PtxOp::WarpBarrier { mask } => {
                let live = warp.live();
                let mask = self.read(warp, *mask, active, at)[first] as u32 & live;
                let view = warp.release(mask, cta.id);
                warp.views.set(mask, live, &view);
            }
            PtxOp::Elect { to, chosen, mask } => {
                let leader = (self.read(warp, *mask, active, at)[first] as u32).trailing_zeros() as usize % LANES;
                if let Some(to) = to {
                    warp.set(*to, active, &[leader as u64; LANES]);
                }
                warp.set(*chosen, active, &std::array::from_fn(|lane| (lane == leader) as u64));
            }
            PtxOp::Shuffle { how, to, valid, from, lane, clamp, .. } => {
                let [values, b, c] = [*from, *lane, *clamp].map(|source| self.read(warp, source, active, at));
                let (mut moved, mut inside) = ([0; LANES], [0; LANES]);
                for lane in lanes(active) {
                    let (source, ok) = shuffle(*how, lane, b[lane] as u32, c[lane] as u32);
                    if active >> source & 1 == 0 {
                        let what = format!("reads lane {source}, which does not participate");
                        self.find(FindingKind::Divergent, Site { lane: Some(lane), ..at }, what);
                    }
                    (moved[lane], inside[lane]) = (values[source] as u32 as u64, ok as u64);
                }
                warp.set(*to, active, &moved);
                if let Some(valid) = valid {
                    warp.set(*valid, active, &inside);
                }
            }
            PtxOp::Vote { how, to, from, negated, .. } => {
                let values = self.read(warp, PtxSource::Register(*from), active, at);
                let votes = lanes(active).filter(|&l| (values[l] != 0) != *negated).fold(0u32, |v, l| v | 1 << l);
                let result = match how {
                    WarpVote::Ballot => votes as u64,
                    WarpVote::Any => (votes != 0) as u64,
                    WarpVote::All => (votes == active) as u64,
                };
                warp.set(*to, active, &[result; LANES]);
            }
            _ => {}
        }
        Ok(())
    }
    /// All warps at one barrier must agree on the number of threads.
    fn check_barrier(&mut self, cta: &Cta, barrier: u64, threads: Option<u64>, at: Site) -> StepResult {
        if barrier > 15 || threads.is_some_and(|n| n == 0 || !n.is_multiple_of(LANES as u64)) {
            let what = format!("barrier {barrier} of {} threads", threads.unwrap_or(0));
            self.find(FindingKind::Launch, at, format!("{what}: there are 16, each of a multiple of {LANES} threads"));
            return Err(Stop);
        }
        let other = cta.arrivals.iter().find(|a| a.barrier == barrier && Some(a.threads) != threads);
        if let Some(BarrierArrival { threads: n, warp, .. }) = other {
            let what = format!("at barrier {barrier} for {threads:?} threads; warp {warp} came there for {n}");
            self.find(FindingKind::Phase, at, what);
            return Err(Stop);
        }
        Ok(())
    }
}

/// Opens every barrier at which all warps have arrived: what they did before now happens before what each of them does
/// next.
pub fn release(cta: &mut Cta, warps: &mut [Warp]) {
    let counted: Vec<(u64, u64)> = cta.arrivals.iter().map(|a| (a.barrier, a.threads)).collect();
    for (barrier, threads) in counted {
        open(cta, warps, barrier, Some(threads));
    }
    for first in 0..warps.len() {
        if let WarpState::Waiting { barrier, threads, .. } = warps[first].state
            && barrier != CLUSTER
        {
            open(cta, warps, barrier, threads);
        }
    }
}

fn open(cta: &mut Cta, warps: &mut [Warp], barrier: u64, threads: Option<u64>) {
    let here = |w: &Warp| matches!(w.state, WarpState::Waiting { barrier: b, .. } if b == barrier);
    let arrived = cta.arrivals.iter().filter(|a| a.barrier == barrier).count();
    let waiting = warps.iter().filter(|w| here(w)).count();
    let needed = match threads {
        Some(threads) => threads.div_ceil(LANES as u64) as usize,
        None => warps.iter().filter(|w| w.state != WarpState::Done).count(),
    };
    if waiting + arrived < needed {
        return;
    }
    let mut joined = ClockView::new(cta.id, warps.len());
    for arrival in cta.arrivals.extract_if(.., |a| a.barrier == barrier) {
        joined.join(&arrival.view);
    }
    for warp in warps.iter_mut().filter(|w| here(w)) {
        joined.join(&warp.release(u32::MAX, cta.id));
    }
    for warp in warps.iter_mut().filter(|w| here(w)) {
        let mut known = warp.views.joined(u32::MAX);
        known.join(&joined);
        warp.views = LaneViews::Same(known);
        warp.state = WarpState::Ready;
    }
}

/// The lane to read from, and whether it is within the segment (PTX ISA, shfl.sync: the pseudocode of its semantics).
fn shuffle(how: Shuffle, lane: usize, b: u32, c: u32) -> (usize, bool) {
    let (lane32, b, clamp, segments) = (lane as u32, b & 31, c & 31, c >> 8 & 31);
    let highest = (lane32 & segments) | (clamp & !segments);
    let lowest = lane32 & segments;
    let (source, inside) = match how {
        Shuffle::Up => (lane32.wrapping_sub(b), lane32 as i32 - b as i32 >= highest as i32),
        Shuffle::Down => (lane32 + b, lane32 + b <= highest),
        Shuffle::Butterfly => (lane32 ^ b, lane32 ^ b <= highest),
        Shuffle::Index => (lowest | (b & !segments), lowest | (b & !segments) <= highest),
    };
    if inside { (source as usize, true) } else { (lane, false) }
}
