//! Bulk copies, plain and by tensor maps: to shared memory, counted by an mbarrier, and back, awaited in groups. They
//! complete as late as the hardware may: loads land when the scheduler decides, stores are read and written at the
//! wait. Until then, nobody may write what a copy reads.
//!
//! A copy that adds counts as a read and a write of its destination, although the hardware allows two at a time: sums
//! of f32 depend on their order, so two unordered ones are a race here.
use super::clock::{Agent, FencedMemory};
use super::in_flight::{ArrivingCopy, DepartingCopy};
use super::lane::lanes;
use super::machine::{Cta, Emulator, Site, StepResult, Stop};
use super::mbarrier::Mbarrier;
use super::memory_ops::{Touch, Touched};
use super::op::{Hopper, POLICIES};
use super::operand::{Address, PARAMETER_BASE, PtxSource, SHARED_BASE, Space, unmapped};
use super::report::FindingKind;
use super::shadow::{Access, Proxy};
use super::tensor::{BoxRun, MAP_BYTES, TensorMap};
use super::warp::Warp;
fn add(to: &mut [u8], data: &[u8]) {
    let number = |bytes: &[u8; 4]| f32::from_le_bytes(*bytes);
    for (to, data) in to.as_chunks_mut().0.iter_mut().zip(data.as_chunks().0) {
        *to = (number(to) + number(data)).to_le_bytes();
    }
}

impl Emulator<'_, '_> {
    pub(super) fn bulk(&mut self, cta: &mut Cta, warp: &mut Warp, active: u32, op: &Hopper, at: Site) -> StepResult {
        for lane in lanes(active) {
            let at = Site { lane: Some(lane), ..at };
            match op {
                Hopper::BulkLoad { to, from, bytes, barrier } => {
                    let [to, barrier] = [*to, *barrier].map(|a| self.address(cta, warp, a, lane, at));
                    let from = self.address(cta, warp, *from, lane, at);
                    let bytes = self.value(warp, *bytes, lane, at) as u32 as u64;
                    let pieces = self.plain(from, to, bytes, at)?;
                    let (to, barrier) = (self.destination(to, barrier, at)?, unmapped(barrier).1);
                    let pieces: Vec<_> = pieces.map(|i| (Some(from + i), to.1 + i, 16)).collect();
                    self.depart(cta, warp, &[to.0], &pieces, barrier, at)?;
                }
                Hopper::BulkSend { to, from, bytes, barrier } => {
                    let [to, barrier] = [*to, *barrier].map(|a| self.address(cta, warp, a, lane, at));
                    let from = self.address_here(cta, warp, *from, lane, at)?;
                    let bytes = self.value(warp, *bytes, lane, at) as u32 as u64;
                    drop(self.plain(from, to, bytes, at)?);
                    let (to, barrier) = (self.destination(to, barrier, at)?, unmapped(barrier).1);
                    self.send(cta, warp, to, (from, bytes as usize), barrier, at)?;
                }
                Hopper::TensorLoad { to, map, at: corner, barrier, ranks } => {
                    let [to, barrier] = [*to, *barrier].map(|a| self.address(cta, warp, a, lane, at));
                    let ((rank, to), barrier) = (self.destination(to, barrier, at)?, unmapped(barrier).1);
                    let (map, pieces) = self.boxed(warp, lane, *map, corner, to, at)?;
                    let ranks = match ranks {
                        Some(mask) => self.receivers(warp, *mask, at)?,
                        None => vec![rank],
                    };
                    let place = |p: BoxRun| (p.global, map.swizzle.apply(to + p.at as u64), p.bytes);
                    let pieces: Vec<_> = pieces.into_iter().map(place).collect();
                    self.depart(cta, warp, &ranks, &pieces, barrier, at)?;
                }
                Hopper::BulkStore { to, from, bytes, add } => {
                    let to = self.address(cta, warp, *to, lane, at);
                    let from = self.address_here(cta, warp, *from, lane, at)?;
                    let bytes = self.value(warp, *bytes, lane, at) as u32 as u64;
                    let pieces = self.plain(from, to, bytes, at)?;
                    self.leave(cta, warp, lane, pieces.map(|i| (from + i, Some(to + i), 16)).collect(), *add, at)?;
                }
                Hopper::TensorStore { map, at: corner, from } => {
                    let from = self.address_here(cta, warp, *from, lane, at)?;
                    let (map, pieces) = self.boxed(warp, lane, *map, corner, from, at)?;
                    let place = |p: BoxRun| (map.swizzle.apply(from + p.at as u64), p.global, p.bytes);
                    self.leave(cta, warp, lane, pieces.into_iter().map(place).collect(), false, at)?;
                }
                Hopper::Hinted { copy, policy } => {
                    let policy = self.value(warp, *policy, lane, at);
                    if !POLICIES.iter().any(|(_, known)| *known == policy) {
                        let what = format!("{policy:#x} is no cache policy: no createpolicy made it");
                        self.find(FindingKind::Launch, at, what);
                    }
                    self.bulk(cta, warp, 1 << lane, copy, at)?;
                }
                Hopper::PrefetchMap(map) => {
                    let map = self.address(cta, warp, *map, lane, at);
                    self.tensor_map(map, at)?;
                }
                Hopper::BulkCommit => {
                    let bulk = warp.bulk.entry(lane).or_default();
                    bulk.groups.push_back(std::mem::take(&mut bulk.open));
                }
                Hopper::BulkWait { left, read } => self.bulk_wait(cta, warp, lane, *left as usize, *read, at),
                _ => {}
            }
        }
        Ok(())
    }
    /// With the rank of its CTA if it is in shared memory.
    fn address(&mut self, cta: &Cta, warp: &mut Warp, address: Address, lane: usize, at: Site) -> u64 {
        let value = self.value(warp, address.base, lane, at).wrapping_add_signed(address.offset);
        self.ranked(cta, address, value)
    }
    /// In the executing CTA's shared memory, and within it.
    fn address_here(
        &mut self,
        cta: &Cta,
        warp: &mut Warp,
        address: Address,
        lane: usize,
        at: Site,
    ) -> Result<u64, Stop> {
        let value = self.value(warp, address.base, lane, at).wrapping_add_signed(address.offset);
        self.own(cta, address, value, at)
    }
    /// Offsets of the 16-byte pieces of a plain bulk copy.
    fn plain(&mut self, from: u64, to: u64, bytes: u64, at: Site) -> Result<impl Iterator<Item = u64> + use<>, Stop> {
        if [from, to, bytes].iter().any(|n| !n.is_multiple_of(16)) {
            let what = format!("bulk copy of {bytes} bytes from {from:#x} to {to:#x}: all must be multiples of 16");
            self.find(FindingKind::Misaligned, at, what);
            return Err(Stop);
        }
        Ok((0..bytes).step_by(16))
    }
    fn tensor_map(&mut self, address: u64, at: Site) -> Result<TensorMap, Stop> {
        let offset = address.wrapping_sub(PARAMETER_BASE) as usize;
        let bytes = match offset < self.arguments.len() {
            true => self.arguments.get(offset..offset + MAP_BYTES),
            false => self.memory.bytes(address, MAP_BYTES),
        };
        bytes.and_then(TensorMap::decode).ok_or_else(|| {
            self.find(FindingKind::OutOfBounds, at, format!("no tensor map is at {address:#x}"));
            Stop
        })
    }
    /// The tensor map at an address and the box at these coordinates.
    fn boxed(
        &mut self,
        warp: &mut Warp,
        lane: usize,
        map: PtxSource,
        corner: &[PtxSource],
        shared: u64,
        at: Site,
    ) -> Result<(TensorMap, Vec<BoxRun>), Stop> {
        let address = self.value(warp, map, lane, at);
        let map = self.tensor_map(address, at)?;
        let corner: Vec<i64> = corner.iter().map(|&x| self.value(warp, x, lane, at) as u32 as i32 as i64).collect();
        if corner.len() != map.sizes.len() {
            let what = format!("{} coordinates for a map of {} dimensions", corner.len(), map.sizes.len());
            self.find(FindingKind::Launch, at, what);
            return Err(Stop);
        }
        if corner[0] * map.element as i64 % 16 != 0 {
            let what = format!(
                "a box starts at {} of {} bytes: must be a multiple of 16 bytes, or the instruction is illegal",
                corner[0], map.element
            );
            self.find(FindingKind::Misaligned, at, what);
            return Err(Stop);
        }
        let wanted = map.swizzle.pattern().max(128);
        if !shared.is_multiple_of(wanted as u64) {
            let what = format!(
                "a box with {:?} at shared address {shared:#x}: must be aligned to {wanted} bytes",
                map.swizzle
            );
            self.find(FindingKind::Misaligned, at, what);
            return Err(Stop);
        }
        let pieces = map.pieces(&corner);
        Ok((map, pieces))
    }
    /// The CTA, by rank, and its address of a copy's destination; the mbarrier must be there as well.
    fn destination(&mut self, to: u64, barrier: u64, at: Site) -> Result<(u32, u64), Stop> {
        let [(rank, to), (other, _)] = [to, barrier].map(unmapped);
        if rank != other {
            let what = format!("copies to the CTA of rank {rank}, and completes at an mbarrier of rank {other}");
            self.find(FindingKind::Launch, at, what);
            return Err(Stop);
        }
        Ok((rank, to))
    }
    /// The ranks that a multicast's mask names.
    fn receivers(&mut self, warp: &mut Warp, mask: PtxSource, at: Site) -> Result<Vec<u32>, Stop> {
        let mask = self.value(warp, mask, at.lane.unwrap_or(0), at) as u16 as u32;
        if mask == 0 || mask >> self.kernel.cluster != 0 {
            let what = format!("a multicast to the mask {mask:#x} in a cluster of {}", self.kernel.cluster);
            self.find(FindingKind::Launch, at, what);
            return Err(Stop);
        }
        Ok((0..16).filter(|rank| mask >> rank & 1 == 1).collect())
    }
    /// Global address, or zeros; shared address in each receiver; bytes. The data are read now and land later, in each
    /// CTA at its own time.
    fn depart(
        &mut self,
        cta: &mut Cta,
        warp: &mut Warp,
        ranks: &[u32],
        pieces: &[(Option<u64>, u64, usize)],
        barrier: u64,
        at: Site,
    ) -> StepResult {
        let mut sectors: Vec<u64> = pieces.iter().filter_map(|(global, ..)| global.map(|at| at / 32)).collect();
        self.count_sectors(&mut sectors);
        for rank in ranks {
            self.at_rank(cta, *rank, at, |machine, target| machine.depart_to(target, warp, pieces, barrier, at))?;
        }
        Ok(())
    }
    fn depart_to(
        &mut self,
        cta: &mut Cta,
        warp: &Warp,
        pieces: &[(Option<u64>, u64, usize)],
        barrier: u64,
        at: Site,
    ) -> StepResult {
        let lane = at.lane.unwrap_or(0);
        let barrier = self.mbarrier(cta, warp, lane, barrier, at)?;
        self.check_shown(cta, warp, lane, barrier, at);
        let (landing, data) = (Vec::with_capacity(pieces.len()), vec![0; pieces.iter().map(|piece| piece.2).sum()]);
        let mut flight = ArrivingCopy { pieces: landing, data, from: vec![], barrier, pc: at.pc, sender: None };
        let mut rest = &mut flight.data[..];
        for &(global, shared, bytes) in pieces {
            let data;
            (data, rest) = rest.split_at_mut(bytes);
            if let Some(address) = global {
                let proxy = Proxy::Async(FencedMemory::Global);
                flight.from.push(self.hold(warp, lane, address, data, proxy, at)?);
            }
            self.expose(cta, warp, shared, bytes, at)?;
            flight.pieces.push(((shared - SHARED_BASE) as usize, bytes));
        }
        cta.flights.push(flight);
        Ok(())
    }
    /// A copy to these bytes has been issued.
    fn expose(&mut self, cta: &mut Cta, warp: &Warp, shared: u64, bytes: usize, at: Site) -> StepResult {
        let proxy = Proxy::Async(FencedMemory::Shared);
        let touch = Touch { space: Space::Shared, address: shared, bytes, access: Access::Write, proxy };
        self.touch(cta, warp, at.lane.unwrap_or(0), touch, at)?.fill(0xFF);
        cta.shadow.depart((shared - SHARED_BASE) as usize, bytes);
        Ok(())
    }
    /// From shared memory to that of a CTA of the cluster, by rank. The source is read now; nobody may write it until
    /// the copy lands.
    fn send(
        &mut self,
        cta: &mut Cta,
        warp: &Warp,
        (rank, to): (u32, u64),
        (from, bytes): (u64, usize),
        barrier: u64,
        at: Site,
    ) -> StepResult {
        let (mut pieces, mut data, lane, sender) = (vec![], vec![], at.lane.unwrap_or(0), cta.rank);
        for i in (0..bytes).step_by(16) {
            let (array, base, offset) = self.find_shared(from + i as u64, 16, at)?;
            let who = warp.who(cta.id, 1 << lane, at.pc, Proxy::Async(FencedMemory::Shared));
            let trouble = cta.shadow.hold(base + offset, 16, &who);
            self.judge(trouble, Access::Read, (Touched::Shared(array), offset), 16, at);
            pieces.push(((to - SHARED_BASE) as usize + i, 16));
            data.extend_from_slice(&cta.shared[base + offset..base + offset + 16]);
        }
        let sender = Some((sender, (from - SHARED_BASE) as usize));
        self.at_rank(cta, rank, at, |machine, target| {
            let barrier = machine.mbarrier(target, warp, lane, barrier, at)?;
            machine.check_shown(target, warp, lane, barrier, at);
            for i in (0..bytes as u64).step_by(16) {
                machine.expose(target, warp, to + i, 16, at)?;
            }
            target.flights.push(ArrivingCopy { pieces, data, from: vec![], barrier, pc: at.pc, sender });
            Ok(())
        })
    }
    /// One copy arrives: its bytes are available to whoever waits for the mbarrier.
    pub(super) fn land(&mut self, cta: &mut Cta, warps: usize, index: usize) {
        let copy = cta.flights.swap_remove(index);
        let by = self.agent(cta, Agent::CopyEngine, warps, copy.pc);
        self.sent(cta, &copy, by);
        let ArrivingCopy { pieces, data, from, barrier, .. } = copy;
        self.let_go(&from, by, |e| (e.cta, e.warp, e.lanes) == (by.cta, by.warp, by.lanes));
        let mut rest = &data[..];
        for (offset, bytes) in pieces {
            let piece;
            (piece, rest) = rest.split_at(bytes);
            cta.shared[offset..offset + bytes].copy_from_slice(piece);
            cta.shadow.land(offset, bytes, by);
        }
        cta.complete(barrier, data.len(), &by);
    }
    /// Shared address; global address, or nowhere; bytes.
    fn leave(
        &mut self,
        cta: &mut Cta,
        warp: &mut Warp,
        lane: usize,
        pieces: Vec<(u64, Option<u64>, usize)>,
        add: bool,
        at: Site,
    ) -> StepResult {
        let mut leaving = DepartingCopy { pieces: vec![], data: None, add, pc: at.pc };
        let mut sectors: Vec<u64> = vec![];
        for (shared, global, bytes) in pieces {
            let (array, base, offset) = self.find_shared(shared, bytes, at)?;
            let who = warp.who(cta.id, 1 << lane, at.pc, Proxy::Async(FencedMemory::Shared));
            let trouble = cta.shadow.hold(base + offset, bytes, &who);
            self.judge(trouble, Access::Read, (Touched::Shared(array), offset), bytes, at);
            if let Some(address) = global {
                let proxy = Proxy::Async(FencedMemory::Global);
                let touch = Touch { space: Space::Global, address, bytes, access: Access::Write, proxy };
                if add {
                    self.touch(cta, warp, lane, Touch { access: Access::Read, ..touch }, at)?;
                }
                self.touch(cta, warp, lane, touch, at)?;
                let (index, start) = self.find_global(address, bytes, at)?;
                self.memory.allocations[index].shadow.depart(start, bytes);
                sectors.push(address / 32);
            }
            leaving.pieces.push((base + offset, global, bytes));
        }
        self.count_sectors(&mut sectors);
        warp.bulk.entry(lane).or_default().open.push(leaving);
        Ok(())
    }
    fn bulk_wait(&mut self, cta: &mut Cta, warp: &mut Warp, lane: usize, left: usize, read: bool, at: Site) {
        let Some(mut bulk) = warp.bulk.remove(&lane) else { return };
        let done = bulk.groups.len().saturating_sub(left);
        for leaving in bulk.groups.iter_mut().take(done).flatten() {
            self.read_leaving(cta, warp, lane, leaving, at);
        }
        if !read {
            for leaving in bulk.groups.drain(..done).flatten() {
                self.write_leaving(cta, warp, lane, leaving, at);
            }
        }
        warp.bulk.insert(lane, bulk);
    }
    fn read_leaving(&mut self, cta: &mut Cta, warp: &Warp, lane: usize, leaving: &mut DepartingCopy, at: Site) {
        if leaving.data.is_some() {
            return;
        }
        let who = warp.who(cta.id, 1 << lane, at.pc, Proxy::Async(FencedMemory::Shared));
        leaving.data = Some(leaving.pieces.iter().map(|(from, _, n)| cta.shared[*from..from + n].to_vec()).collect());
        for (from, _, bytes) in &leaving.pieces {
            cta.shadow.let_go(*from, *bytes, who.epoch(), |e| who.follows(e));
        }
    }
    fn write_leaving(&mut self, cta: &Cta, warp: &Warp, lane: usize, leaving: DepartingCopy, at: Site) {
        let by = warp.who(cta.id, 1 << lane, at.pc, Proxy::Async(FencedMemory::Global)).epoch();
        for ((_, to, bytes), data) in leaving.pieces.iter().zip(leaving.data.iter().flatten()) {
            let Some(Ok((index, start))) = to.map(|to| self.memory.find(to, *bytes)) else { continue };
            if let Ok(to) = self.bytes(index, Access::Write, start..start + bytes, at) {
                match leaving.add {
                    true => add(to, data),
                    false => to.copy_from_slice(data),
                }
            }
            self.memory.allocations[index].shadow.land(start, *bytes, by);
        }
    }
    /// A warp has returned: its outgoing copies must have read their shared memory, which is gone with the CTA. Their
    /// writes may complete later.
    pub(super) fn finish_bulk(&mut self, cta: &Cta, warp: &mut Warp) {
        for (lane, bulk) in std::mem::take(&mut warp.bulk) {
            if let Some(leaving) = bulk.unread() {
                let at = Site { pc: leaving.pc, cta: cta.id, warp: warp.id, lane: Some(lane) };
                let what =
                    "the thread ends while this copy may still read shared memory: cp.async.bulk.wait_group.read";
                self.find(FindingKind::InFlight, at, what.into());
            }
            for leaving in bulk.groups.into_iter().flatten().chain(bulk.open) {
                let at = Site { pc: leaving.pc, cta: cta.id, warp: warp.id, lane: Some(lane) };
                self.write_leaving(cta, warp, lane, leaving, at);
            }
        }
    }
    /// The CTA ends: nothing may be in flight to its memory, or have arrived without a wait.
    pub(super) fn finish_flights(&mut self, cta: &Cta) {
        let landed = cta.mbarriers.values().filter_map(Mbarrier::unwaited);
        if let Some(pc) = cta.flights.iter().map(|flight| flight.pc).chain(landed).next() {
            let at = Site { pc, cta: cta.id, warp: 0, lane: None };
            self.find(
                FindingKind::InFlight,
                at,
                "the CTA ends without a wait for this copy to its shared memory".into(),
            );
        }
    }
}
