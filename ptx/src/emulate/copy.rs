//! cp.async, and the source locking of all copies from global memory: held from the copy to its wait. Never moves bulk
//! copies.
use super::clock::Epoch;
use super::in_flight::{AsyncCopy, Stretch};
use super::lane::lanes;
use super::machine::{Cta, Emulator, Site, StepResult, Stop};
use super::memory_ops::{Touch, Touched};
use super::op::PtxOp;
use super::operand::{PtxSource, SHARED_BASE, Space};
use super::report::FindingKind;
use super::shadow::{Access, Proxy};
use super::warp::Warp;

/// Granularity of cp.async in bytes: it can copy any even number.
const PIECE: usize = 2;

impl Emulator<'_, '_> {
    /// `cp.async`: the bytes are read at issue. Until the wait their source may not be written, and the destination is
    /// 0xFF and inaccessible: as late as the hardware may be, never earlier.
    pub(super) fn copy(&mut self, cta: &mut Cta, warp: &mut Warp, active: u32, op: &PtxOp, at: Site) -> StepResult {
        if let PtxOp::CopyAsync { bytes, to, from, read } = op {
            let to = self.addresses(cta, warp, (Space::Shared, *to), active, at)?;
            let from = self.addresses(cta, warp, (Space::Global, *from), active, at)?;
            let read = self.read(warp, read.unwrap_or(PtxSource::Immediate(*bytes as u64)), active, at);
            self.count(Space::Shared, &to, active, *bytes);
            self.count(Space::Global, &from, lanes(active).filter(|&l| read[l] > 0).fold(0, |m, l| m | 1 << l), *bytes);
            for lane in lanes(active) {
                let mut data = [0; AsyncCopy::MOST];
                let wanted = (read[lane] as u32 as usize).min(*bytes);
                if wanted > 0 && !from[lane].is_multiple_of(*bytes as u64) || wanted % PIECE != 0 {
                    let what = format!("copies {wanted} of {bytes} bytes from address {:#x}", from[lane]);
                    self.find(FindingKind::Misaligned, Site { lane: Some(lane), ..at }, what);
                    return Err(Stop);
                }
                // A partial copy reads no byte beyond its part.
                let (at_once, mut read_at) = (if wanted == *bytes { wanted } else { PIECE }, vec![]);
                for (i, piece) in data[..wanted].chunks_mut(at_once).enumerate() {
                    let address = from[lane] + (at_once * i) as u64;
                    read_at.push(self.hold(warp, lane, address, piece, Proxy::Generic, at)?);
                }
                let (address, access) = (to[lane], Access::Write);
                let touch = Touch { space: Space::Shared, address, bytes: *bytes, access, proxy: Proxy::Generic };
                self.touch(cta, warp, lane, touch, at)?.fill(0xFF);
                let to = (to[lane] - SHARED_BASE) as usize;
                cta.shadow.depart(to, *bytes);
                warp.copies[lane].open.push(AsyncCopy { to, bytes: *bytes, data, from: read_at });
            }
        }
        for lane in lanes(active) {
            let copies = &mut warp.copies[lane];
            let mut landed = vec![];
            match op {
                PtxOp::CopyCommit => copies.groups.push_back(std::mem::take(&mut copies.open)),
                PtxOp::CopyWait(Some(left)) => {
                    let done = copies.groups.len().saturating_sub(*left as usize);
                    landed = copies.groups.drain(..done).flatten().collect();
                }
                PtxOp::CopyWait(None) => {
                    landed = copies.groups.drain(..).flatten().chain(copies.open.drain(..)).collect()
                }
                _ => {}
            }
            for AsyncCopy { to, bytes, data, from } in landed {
                cta.shared[to..to + bytes].copy_from_slice(&data[..bytes]);
                let who = warp.who(cta.id, 1 << lane, at.pc, Proxy::Generic);
                cta.shadow.land(to, bytes, who.epoch());
                self.let_go(&from, who.epoch(), |e| who.follows(e));
            }
        }
        Ok(())
    }
    /// Reads global memory for an asynchronous copy: nobody may write there until [`Emulator::let_go`].
    #[allow(clippy::too_many_arguments)] // who reads, where, and by which proxy
    pub(super) fn hold(
        &mut self,
        warp: &Warp,
        lane: usize,
        address: u64,
        data: &mut [u8],
        proxy: Proxy,
        at: Site,
    ) -> Result<Stretch, Stop> {
        let (at, bytes) = (Site { lane: Some(lane), ..at }, data.len());
        let (allocation, offset) = self.find_global(address, bytes, at)?;
        let who = warp.who(warp.cta, 1 << lane, at.pc, proxy);
        let source = &mut self.memory.allocations[allocation];
        data.copy_from_slice(&source.data.bytes()[offset..offset + bytes]);
        let trouble = source.shadow.hold(offset, bytes, &who);
        self.judge(trouble, Access::Read, (Touched::Global(allocation), offset), bytes, at);
        Ok(Stretch { allocation, offset, bytes })
    }
    /// The copy has read its source: a read of `by`, which `follows` others.
    pub(super) fn let_go(&mut self, from: &[Stretch], by: Epoch, follows: impl Fn(&Epoch) -> bool) {
        for Stretch { allocation, offset, bytes } in from {
            self.memory.allocations[*allocation].shadow.let_go(*offset, *bytes, by, &follows);
        }
    }
}
