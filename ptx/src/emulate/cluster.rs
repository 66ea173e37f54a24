//! Clusters: which CTA an address means, the barrier of a cluster, and what must have happened before a CTA ends. Never
//! schedules.
//!
//! [Note: clusters] The CTAs of a cluster are resident together. An address of shared memory has the rank of its CTA
//! in its upper byte: `mov` gives a variable's in the executing CTA, `mapa` replaces the byte. In another CTA one can
//! arrive at mbarriers and let copies land, and nothing else is modeled. A descriptor of wgmma has no place for the
//! rank. Without `.cluster` an arrival in another CTA orders only what the asynchronous proxy has done or a proxy
//! fence has shown it: a copy that follows may overwrite what was copied or multiplied before. PTX promises less;
//! CUTLASS's pipelines depend on it. Reads and writes of threads need `.release.cluster` and `.acquire.cluster`. A
//! relaxed arrival at the barrier of the cluster publishes only what `fence.mbarrier_init` did (with what that lane
//! did before: more than PTX promises).
//!
//! Shared memory ends with its CTA. So a thread of the CTA must have waited for every arrival and copy from others, and
//! must know that every copy from here to others has been read.
use super::clock::{ClockView, Epoch};
use super::in_flight::ArrivingCopy;
use super::machine::{Cta, Emulator, Site, StepResult, Stop};
use super::op::Hopper;
use super::operand::{Address, PtxSource, Space, mapped, unmapped};
use super::report::FindingKind;
use super::warp::{ClusterPhase, Warp, WarpState};

/// The barrier id used for `barrier.cluster`.
pub const CLUSTER: u64 = 16;

impl Emulator<'_, '_> {
    /// Acts on the CTA whose shared memory contains an address, which it gets as that CTA's own.
    pub(super) fn at_address<T>(
        &mut self,
        cta: &mut Cta,
        address: u64,
        at: Site,
        act: impl FnOnce(&mut Self, &mut Cta, u64) -> Result<T, Stop>,
    ) -> Result<T, Stop> {
        let (rank, own) = unmapped(address);
        self.at_rank(cta, rank, at, |machine, target| act(machine, target, own))
    }
    /// An operand's address with the rank of its CTA: a variable's own is the executing one's.
    pub(super) fn ranked(&self, cta: &Cta, operand: Address, address: u64) -> u64 {
        let named = matches!(operand.base, PtxSource::Immediate(_)) && Space::Generic.of(address) == Space::Shared;
        if named { mapped(address, cta.rank as u64) } else { address }
    }
    /// The address within the executing CTA's shared memory, which it must be in.
    pub(super) fn own(&mut self, cta: &Cta, operand: Address, address: u64, at: Site) -> Result<u64, Stop> {
        if self.kernel.cluster == 1 {
            return Ok(address);
        }
        let (rank, own) = unmapped(self.ranked(cta, operand, address));
        if rank == cta.rank {
            return Ok(own);
        }
        let what = format!("address {address:#x} is in the CTA of rank {rank}, not in this one's of rank {}", cta.rank);
        self.find(FindingKind::OutOfBounds, at, what);
        Err(Stop)
    }
    /// The same for a rank.
    pub(super) fn at_rank<T>(
        &mut self,
        cta: &mut Cta,
        rank: u32,
        at: Site,
        act: impl FnOnce(&mut Self, &mut Cta) -> Result<T, Stop>,
    ) -> Result<T, Stop> {
        if rank == cta.rank {
            return act(self, cta);
        }
        let Some(index) = self.peers.iter().position(|peer| peer.rank == rank) else {
            self.find(FindingKind::OutOfBounds, at, format!("the cluster has no CTA of rank {rank}"));
            return Err(Stop);
        };
        let mut peer = self.peers.swap_remove(index);
        if peer.ended {
            let what = format!("cta {} has ended, and its shared memory with it", peer.id);
            self.find(FindingKind::InFlight, at, what);
            return Err(Stop);
        }
        let result = act(self, &mut peer);
        self.peers.push(peer);
        result
    }
    /// `barrier.cluster`: what was done before arriving happens before what follows the wait.
    pub(super) fn cluster(&mut self, cta: &Cta, warp: &mut Warp, op: &Hopper, at: Site) -> StepResult {
        match (op, std::mem::replace(&mut warp.cluster, ClusterPhase::Before)) {
            (Hopper::ClusterArrive { release }, ClusterPhase::Before) => {
                let view = match release {
                    true => Some(warp.release(warp.live(), cta.id)),
                    false => warp.initialized.take(),
                };
                let view = view.unwrap_or_else(|| ClockView::new(cta.id, warp.warps));
                warp.cluster = ClusterPhase::Arrived(view);
            }
            (Hopper::ClusterWait, ClusterPhase::Open(view)) => warp.acquire(u32::MAX, &view),
            (Hopper::ClusterWait, arrived @ ClusterPhase::Arrived(_)) => {
                warp.cluster = arrived;
                warp.state = WarpState::Waiting { barrier: CLUSTER, threads: None, pc: at.pc };
            }
            _ => {
                let what = "barrier.cluster.arrive and .wait must alternate".to_string();
                self.find(FindingKind::Phase, at, what);
                return Err(Stop);
            }
        }
        Ok(())
    }
    /// The copy with this sender has been read.
    pub(super) fn sent(&mut self, cta: &mut Cta, copy: &ArrivingCopy, by: Epoch) {
        let Some((rank, offset)) = copy.sender else { return };
        let peers = self.peers.iter_mut();
        if let Some(sender) = peers.chain([cta]).find(|cta| cta.rank == rank) {
            sender
                .shadow
                .let_go(offset, copy.data.len(), by, |e| (e.cta, e.warp, e.lanes) == (by.cta, by.warp, by.lanes));
            sender.sent.push(by);
        }
    }
    /// A CTA ends: see [Note: clusters].
    pub(super) fn finish_cluster(&mut self, cta: &mut Cta, warps: &[Warp]) {
        cta.ended = true;
        let at = |pc: usize| Site { pc, cta: cta.id, warp: 0, lane: None };
        if let Some((_, pc)) = cta.mbarriers.values().find_map(|barrier| barrier.visited) {
            let what = "the CTA ends without a wait for this arrival from another CTA at its mbarrier";
            self.find(FindingKind::InFlight, at(pc), what.into());
        }
        let known = |e: &&Epoch| warps.iter().any(|warp| warp.views.joined(u32::MAX).knows(e));
        let unread = cta.sent.iter().find(|e| !known(e)).map(|e| e.pc as usize);
        let mut flying = self.peers.iter().flat_map(|peer| &peer.flights);
        let flying = flying.find(|copy| copy.sender.is_some_and(|(rank, _)| rank == cta.rank)).map(|copy| copy.pc);
        if let Some(pc) = unread.or(flying) {
            let what = "the CTA ends while this copy to another CTA may still read its shared memory";
            self.find(FindingKind::InFlight, at(pc), what.into());
        }
    }
}

/// Opens the barrier of a cluster, whose warps these are, once all that have not returned have arrived.
pub fn open_cluster(warps: &mut [&mut Warp]) {
    let arrived = |warp: &&mut Warp| matches!(warp.cluster, ClusterPhase::Arrived(_));
    let mut live = warps.iter().filter(|warp| warp.state != WarpState::Done).peekable();
    let Some(first) = live.peek() else { return };
    let mut joined = ClockView::new(first.cta, first.warps);
    if !live.all(arrived) {
        return;
    }
    for warp in warps.iter() {
        if let ClusterPhase::Arrived(view) = &warp.cluster {
            joined.join(view);
        }
    }
    for warp in warps.iter_mut().filter(|warp| warp.state != WarpState::Done) {
        if matches!(warp.state, WarpState::Waiting { barrier: CLUSTER, .. }) {
            warp.acquire(u32::MAX, &joined);
            (warp.cluster, warp.state) = (ClusterPhase::Before, WarpState::Ready);
        } else {
            warp.cluster = ClusterPhase::Open(joined.clone());
        }
    }
}
