//! Loops that wait for another CTA by reading global memory until it changes. Never reads memory itself.
//!
//! [Note: spinning] The number of iterations of such a loop depends on the schedule, and so would its kernel's counts,
//! and whether a test detects a kernel that reads only once. So, as with mbarriers ([Note: waiting] in
//! mbarrier_ops.rs), a strong read (relaxed, acquire) misses an unordered write the first time, as the memory model
//! allows; and a loop of arithmetic around one such read counts as a single iteration. A warp that has read the same
//! value twice sleeps until global memory is written.
use super::clock::Epoch;
use super::lane::{LANES, lanes};
use super::machine::{Cta, Emulator, Overwritten, Site};
use super::op::{MemoryOrder, PtxOp};
use super::operand::Space;
use super::shadow::Proxy;
use super::warp::{Spin, Warp, WarpState};

impl Warp {
    /// Tracks the next instruction: part of a polling loop, or its end.
    pub(super) fn track_spin(&mut self, op: &PtxOp) {
        match (op, &mut self.spin) {
            (
                PtxOp::Lane { .. }
                | PtxOp::Approximate { .. }
                | PtxOp::Branch(_)
                | PtxOp::Load { order: MemoryOrder { strong: true, .. }, .. },
                Some(spin),
            ) => {
                spin.instructions += 1;
            }
            _ => self.spin = None,
        }
    }
}

impl Emulator<'_, '_> {
    /// Global memory has been written.
    pub(super) fn replaced(&mut self, order: MemoryOrder, (space, address): (Space, u64), value: u64, by: Epoch) {
        if space.of(address) == Space::Global {
            self.writes += 1;
            if order.strong {
                self.past.insert(address, Overwritten { by, value });
            }
        }
    }
    /// The old value that a lane reads when it misses a write.
    pub(super) fn missed(
        &mut self,
        cta: &Cta,
        warp: &mut Warp,
        lane: usize,
        order: MemoryOrder,
        address: u64,
        at: Site,
    ) -> Option<u64> {
        let Overwritten { by, value } = order.strong.then(|| self.past.get(&address))??;
        let who = warp.who(cta.id, 1 << lane, at.pc, Proxy::Generic);
        if who.follows(by) || warp.missed.get(&(address, lane)) == Some(by) {
            return None;
        }
        warp.missed.insert((address, lane), *by);
        Some(*value)
    }
    /// A load returned these values, for that many sectors; `current`: no write was missed.
    pub(super) fn strong_read(
        &mut self,
        warp: &mut Warp,
        active: u32,
        order: MemoryOrder,
        (addresses, values, sectors): (&[u64; LANES], &[u64; LANES], u64),
        current: bool,
        at: Site,
    ) {
        if !order.strong || active == 0 {
            return;
        }
        let new = Spin { pc: at.pc, active, addresses: *addresses, values: *values, instructions: 0 };
        let alike = |a: &[u64; LANES], b: &[u64; LANES]| lanes(active).all(|lane| a[lane] == b[lane]);
        let again = |last: &Spin| (last.pc, last.active) == (at.pc, active) && alike(&last.addresses, addresses);
        if let Some(last) = warp.spin.replace(new).filter(again) {
            self.counts.instructions -= last.instructions;
            self.counts.global_sectors -= sectors;
            // Lanes that are further ahead do not run before this one (see `Warp::groups`).
            if current && alike(&last.values, values) {
                warp.state = WarpState::Spinning { pc: at.pc, writes: self.writes };
            }
        }
    }
}
