//! Warps' operations on mbarriers: arrive, expect bytes, wait; fences; and setmaxnreg, which waits as well. Never moves
//! data.
//!
//! [Note: waiting] Whether a wait fails depends on the schedule, and so would a kernel's instruction count. So the
//! first try always fails, as the hardware allows; the second one, which a correct kernel's loop makes, blocks until
//! the phase has completed, and then succeeds. A kernel that does not retry is wrong under every schedule.
use super::clock::{Agent, ClockView, Epoch, FencedMemory};
use super::lane::{LANES, lanes};
use super::machine::{Cta, Emulator, Site, StepResult, Stop};
use super::mbarrier::{MOST, Mbarrier};
use super::memory_ops::Touch;
use super::op::{Fence, Hopper};
use super::operand::{Address, PtxSource, SHARED_BASE, Space};
use super::report::FindingKind;
use super::shadow::{Access, Proxy};
use super::warp::Warp;
use std::collections::HashMap;

/// Size of the object in shared memory.
const BYTES: usize = 8;

impl Cta {
    /// The copy engine has written `bytes`.
    pub(super) fn complete(&mut self, barrier: usize, bytes: usize, by: &Epoch) {
        if let Some(barrier) = self.mbarriers.get_mut(&barrier) {
            barrier.bytes -= bytes as i64;
            barrier.landed = Some((barrier.phase, by.pc as usize));
            barrier.gathered.note(by);
            self.progress += barrier.settle() as u64;
        }
    }
}

impl Emulator<'_, '_> {
    /// Offset in shared memory of the mbarrier that a lane names, which must be initialized.
    pub(super) fn mbarrier(
        &mut self,
        cta: &mut Cta,
        warp: &Warp,
        lane: usize,
        address: u64,
        at: Site,
    ) -> Result<usize, Stop> {
        let touch =
            Touch { space: Space::Shared, address, bytes: BYTES, access: Access::Atomic, proxy: Proxy::Generic };
        let known = address.wrapping_sub(SHARED_BASE) as usize;
        if !cta.mbarriers.contains_key(&known) {
            let what = format!("no mbarrier is initialized at shared address {address:#x}");
            self.find(FindingKind::Uninitialized, Site { lane: Some(lane), ..at }, what);
            return Err(Stop);
        }
        self.touch(cta, warp, lane, touch, at)?;
        Ok(known)
    }
    /// Whether a bulk copy of this lane may use the mbarrier: a fence must follow its initialization.
    pub(super) fn check_shown(&mut self, cta: &Cta, warp: &Warp, lane: usize, barrier: usize, at: Site) {
        let Some(barrier) = cta.mbarriers.get(&barrier) else { return };
        let who = warp.who(warp.cta, 1 << lane, at.pc, Proxy::Generic);
        if !barrier.shown && !who.shows(FencedMemory::Shared, &barrier.init) {
            let place = self.kernel.place(barrier.init.pc as usize);
            let what =
                format!("uses an mbarrier that no fence.mbarrier_init followed since its initialization at {place}");
            self.find(FindingKind::Proxy, Site { lane: Some(lane), ..at }, what);
        }
    }
    /// Lanes by the address they name: in this CTA, or with `mapped` with its rank in any.
    fn by_address(
        &mut self,
        cta: &Cta,
        warp: &mut Warp,
        (address, mapped): (Address, bool),
        active: u32,
        at: Site,
    ) -> Result<Vec<(u64, u32)>, Stop> {
        let addresses = match mapped {
            true => {
                let base = self.read(warp, address.base, active, at);
                base.map(|base| self.ranked(cta, address, base.wrapping_add_signed(address.offset)))
            }
            false => self.addresses(cta, warp, (Space::Shared, address), active, at)?,
        };
        let mut by: Vec<(u64, u32)> = vec![];
        for lane in lanes(active) {
            match by.iter_mut().find(|(address, _)| *address == addresses[lane]) {
                Some((_, mask)) => *mask |= 1 << lane,
                None => by.push((addresses[lane], 1 << lane)),
            }
        }
        Ok(by)
    }
    /// Whether the instruction must keep waiting.
    pub(super) fn must_wait(
        &mut self,
        cta: &mut Cta,
        warp: &mut Warp,
        active: u32,
        op: &Hopper,
        at: Site,
    ) -> Result<bool, Stop> {
        match op {
            _ if active == 0 => Ok(false),
            Hopper::Wait { at: address, phase, parity, .. } => {
                let first = active.trailing_zeros() as usize;
                let phases = self.read(warp, *phase, active, at);
                let all = self.by_address(cta, warp, (*address, false), active, at)?;
                let key = (all[0].0, phases[first], active);
                let again = warp.polled.contains(&key);
                let passed = |cta: &Cta, address: u64, lane: usize| {
                    let barrier = cta.mbarriers.get(&(address.wrapping_sub(SHARED_BASE) as usize));
                    barrier.is_none_or(|barrier| barrier.has_passed(phases[lane], *parity))
                };
                Ok(again && !all.into_iter().all(|(address, mask)| lanes(mask).all(|lane| passed(cta, address, lane))))
            }
            Hopper::Registers { count, more: true } => {
                let wanted = (*count as u32).saturating_sub(warp.budget) * LANES as u32;
                Ok(wanted > cta.spare_registers)
            }
            _ => Ok(false),
        }
    }
    pub(super) fn wait(&mut self, cta: &mut Cta, warp: &mut Warp, active: u32, op: &Hopper, at: Site) -> StepResult {
        let Hopper::Wait { wide, to, at: address, phase, parity } = op else { return Ok(()) };
        let by = self.by_address(cta, warp, (*address, false), active, at)?;
        let Some(&(first, _)) = by.first() else { return Ok(()) };
        for (address, mask) in &by {
            for lane in lanes(*mask) {
                self.mbarrier(cta, warp, lane, *address, at)?;
            }
        }
        let phases = self.read(warp, *phase, active, at);
        let key = (first, phases[active.trailing_zeros() as usize], active);
        let Some(again) = warp.polled.iter().position(|known| *known == key) else {
            warp.polled.push(key);
            warp.set(*to, active, &[0; LANES]);
            return Ok(());
        };
        warp.polled.swap_remove(again);
        for (address, mask) in by {
            let Some(barrier) = cta.mbarriers.get_mut(&((address - SHARED_BASE) as usize)) else { continue };
            let done = if *parity { barrier.phase - 1 } else { phases[mask.trailing_zeros() as usize] as i64 };
            let mut wrong = None;
            for lane in lanes(mask) {
                match barrier.seen.insert((warp.id, lane), done) {
                    Some(last) if last == done => wrong = Some((lane, "a second time: the parity has not flipped")),
                    Some(last) if done > last + 1 => wrong = Some((lane, "and missed the previous one")),
                    _ => {}
                }
            }
            warp.acquire(mask, &barrier.opened);
            if let Some(opened) = barrier.opened_wide.as_ref().filter(|_| *wide) {
                warp.acquire(mask, opened);
            }
            for pending in [&mut barrier.landed, &mut barrier.visited] {
                *pending = pending.filter(|(phase, _)| *phase > done);
            }
            if let Some((lane, how)) = wrong {
                let what = format!("waits for phase {done} of the mbarrier at {address:#x} {how}");
                self.find(FindingKind::Phase, Site { lane: Some(lane), ..at }, what);
            }
        }
        warp.set(*to, active, &[1; LANES]);
        Ok(())
    }
    pub(super) fn mbarrier_op(
        &mut self,
        cta: &mut Cta,
        warp: &mut Warp,
        active: u32,
        op: &Hopper,
        at: Site,
    ) -> StepResult {
        match op {
            Hopper::MbarrierInit { at: address, count } => {
                let counts = self.read(warp, *count, active, at);
                for (address, mask) in self.by_address(cta, warp, (*address, false), active, at)? {
                    let lane = mask.trailing_zeros() as usize;
                    let touch = Touch {
                        space: Space::Shared,
                        address,
                        bytes: BYTES,
                        access: Access::Write,
                        proxy: Proxy::Generic,
                    };
                    for lane in lanes(mask) {
                        self.touch(cta, warp, lane, touch, at)?;
                    }
                    let count = counts[lane] as u32 as u64;
                    if !(1..=MOST as u64).contains(&count) {
                        self.find(FindingKind::Phase, at, format!("an mbarrier of {count} arrivals"));
                        return Err(Stop);
                    }
                    let init = warp.who(cta.id, mask, at.pc, Proxy::Generic).epoch();
                    let view = ClockView::new(cta.id, warp.warps);
                    let (gathered, opened, seen) = (view.clone(), view, HashMap::new());
                    let new = Mbarrier {
                        count,
                        pending: count,
                        bytes: 0,
                        phase: 0,
                        gathered,
                        opened,
                        gathered_wide: None,
                        opened_wide: None,
                        init,
                        shown: false,
                        seen,
                        landed: None,
                        visited: None,
                    };
                    cta.mbarriers.insert((address - SHARED_BASE) as usize, new);
                }
            }
            Hopper::MbarrierInvalidate { at: address } => {
                for (address, mask) in self.by_address(cta, warp, (*address, false), active, at)? {
                    let touch = Touch {
                        space: Space::Shared,
                        address,
                        bytes: BYTES,
                        access: Access::Write,
                        proxy: Proxy::Generic,
                    };
                    self.touch(cta, warp, mask.trailing_zeros() as usize, touch, at)?;
                    cta.mbarriers.remove(&(address.wrapping_sub(SHARED_BASE) as usize));
                }
            }
            Hopper::Arrive { mapped, wide, to, at: address, count, expect } => {
                let counts = self.read(warp, *count, active, at);
                let expect = expect.map(|expect| self.read(warp, expect, active, at));
                let mut phases = [0; LANES];
                for (address, mask) in self.by_address(cta, warp, (*address, *mapped), active, at)? {
                    let view = warp.release(mask, cta.id);
                    for lane in lanes(mask) {
                        let expect = expect.map(|expect| expect[lane]);
                        let arrival = (counts[lane] as u32 as u64, expect, *wide, &view);
                        let at = Site { lane: Some(lane), ..at };
                        phases[lane] = match mapped {
                            true => self.at_address(cta, address, at, |machine, target, own| {
                                machine.arrive(target, warp, own, arrival, at)
                            })?,
                            false => self.arrive(cta, warp, address, arrival, at)?,
                        };
                    }
                }
                if let Some(to) = to {
                    warp.set(*to, active, &phases);
                }
            }
            Hopper::ExpectTx { at: address, bytes } => {
                let addresses = self.addresses(cta, warp, (Space::Shared, *address), active, at)?;
                let bytes = self.read(warp, *bytes, active, at);
                for lane in lanes(active) {
                    let offset = self.mbarrier(cta, warp, lane, addresses[lane], at)?;
                    let Some(barrier) = cta.mbarriers.get_mut(&offset) else { continue };
                    let countable = barrier.expect(bytes[lane]);
                    let state = barrier.state();
                    self.check_bytes(countable, &state, addresses[lane], lane, at)?;
                }
            }
            Hopper::Registers { count, more } => {
                let count = *count as u32;
                if *more != (count > warp.budget) && count != warp.budget {
                    let how = if *more { "inc" } else { "dec" };
                    let what = format!("setmaxnreg.{how} to {count} from {} registers", warp.budget);
                    self.find(FindingKind::Launch, at, what);
                    return Err(Stop);
                }
                let all = cta.spare_registers + warp.budget * LANES as u32;
                cta.spare_registers = all - count * LANES as u32;
                cta.progress += !*more as u64;
                warp.budget = count;
            }
            _ => {}
        }
        Ok(())
    }
    /// One lane arrives at the mbarrier at an address of a CTA: how many times, expecting bytes or not, releasing this
    /// view to the cluster or not. Returns the phase.
    fn arrive(
        &mut self,
        cta: &mut Cta,
        warp: &Warp,
        address: u64,
        (count, expect, wide, view): (u64, Option<u64>, bool, &ClockView),
        at: Site,
    ) -> Result<u64, Stop> {
        let lane = at.lane.unwrap_or(0);
        let offset = self.mbarrier(cta, warp, lane, address, at)?;
        let Some(barrier) = cta.mbarriers.get_mut(&offset) else { return Ok(0) };
        let countable = expect.is_none_or(|expect| barrier.expect(expect));
        if warp.cta == cta.id {
            barrier.gathered.join(view);
        } else {
            barrier.gathered.join(&view.asynchronous());
            barrier.visited = Some((barrier.phase, at.pc));
            if wide {
                let new = || ClockView::new(cta.id, warp.warps);
                barrier.gathered_wide.get_or_insert_with(new).join(view);
            }
        }
        let phase = barrier.phase as u64;
        let wrong = !(1..=barrier.pending).contains(&count);
        let state = barrier.state();
        barrier.pending = barrier.pending.saturating_sub(count);
        cta.progress += barrier.settle() as u64;
        if wrong {
            let what = format!("arrives {count} times at the mbarrier at {address:#x}: {state}");
            self.find(FindingKind::Phase, at, what);
            return Err(Stop);
        }
        self.check_bytes(countable, &state, address, lane, at)?;
        Ok(phase)
    }
    fn check_bytes(&mut self, countable: bool, state: &str, address: u64, lane: usize, at: Site) -> StepResult {
        if countable {
            return Ok(());
        }
        let what = format!("expects more bytes than the mbarrier at {address:#x} can count ({MOST}): {state}");
        self.find(FindingKind::Phase, Site { lane: Some(lane), ..at }, what);
        Err(Stop)
    }
    pub(super) fn fence(&mut self, cta: &mut Cta, warp: &mut Warp, active: u32, fence: Fence) {
        if active == 0 {
            return;
        }
        match fence {
            Fence::Order { .. } => {
                if let Some(met) = warp.order.met.take() {
                    warp.acquire(active, &met);
                }
                warp.order.passed = Some((active, warp.release(active, cta.id)));
            }
            Fence::Proxy(only) => {
                let live = warp.live();
                for memory in FencedMemory::ALL.into_iter().filter(|memory| only.is_none_or(|only| only == *memory)) {
                    lanes(active).for_each(|lane| warp.fenced[memory as usize][lane] = warp.time);
                    warp.views.change(active, live, |view| view.show(memory));
                }
                warp.time += 1;
            }
            Fence::MbarrierInit => {
                let own = |e: &Epoch| e.warp as usize == warp.id && e.lanes & !active == 0;
                let mut view = ClockView::new(cta.id, warp.warps);
                for barrier in cta.mbarriers.values_mut().filter(|b| own(&b.init)) {
                    barrier.shown = true;
                    view.note(&barrier.init);
                }
                warp.initialized = Some(view);
                warp.time += 1; // what follows is not published
            }
        }
    }
    /// The time of an actor's next action.
    pub(super) fn agent(&self, cta: &mut Cta, agent: Agent, warps: usize, pc: usize) -> Epoch {
        cta.agents += 1;
        agent.epoch(cta.id, warps, cta.agents, pc)
    }
    pub(super) fn value(&mut self, warp: &mut Warp, source: PtxSource, lane: usize, at: Site) -> u64 {
        self.read(warp, source, 1 << lane, at)[lane]
    }
}
