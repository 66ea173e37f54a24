//! Loads, stores and atomics: every byte's address is checked, its shadow updated, and its traffic counted. Copies are
//! in copy.rs and bulk.rs.
use super::clock::{ClockView, Epoch};
use super::kernel::Field;
use super::lane::{LANES, lanes};
use super::machine::{Cta, Emulator, Site, StepResult, Stop, little_endian, put_little_endian};
use super::memory::{Allocation, Backing, Outside, aligned};
use super::op::{MemoryOrder, PtxOp};
use super::operand::{Address, SHARED_BASE, Space};
use super::report::{FindingKind, Thread};
use super::shadow::{Access, Proxy, Trouble};
use super::warp::Warp;
use std::ops::Range;

/// 4-byte words that shared memory serves in one pass.
const BANKS: u64 = 32;
/// Bytes per sector of global memory.
const SECTOR: u64 = 32;

/// An access of one lane.
#[derive(Clone, Copy)]
pub(super) struct Touch {
    pub space: Space,
    pub address: u64,
    pub bytes: usize,
    pub access: Access,
    pub proxy: Proxy,
}

/// What an access is to: a shared array, or an allocation, by index.
#[derive(Clone, Copy)]
pub(super) enum Touched {
    Shared(usize),
    Global(usize),
}

impl Emulator<'_, '_> {
    /// The addresses of the active lanes; those in shared memory without the rank of this CTA.
    pub(super) fn addresses(
        &mut self,
        cta: &Cta,
        warp: &mut Warp,
        (space, address): (Space, Address),
        active: u32,
        at: Site,
    ) -> Result<[u64; LANES], Stop> {
        let base = self.read(warp, address.base, active, at);
        let mut all = base.map(|base| base.wrapping_add_signed(address.offset));
        if space == Space::Global || self.kernel.cluster == 1 {
            return Ok(all);
        }
        for lane in lanes(active) {
            if space.of(all[lane]) == Space::Shared {
                all[lane] = self.own(cta, address, all[lane], Site { lane: Some(lane), ..at })?;
            }
        }
        Ok(all)
    }
    pub(super) fn memory(&mut self, cta: &mut Cta, warp: &mut Warp, active: u32, op: &PtxOp, at: Site) -> StepResult {
        match op {
            PtxOp::Load { order, space, bytes, to, address } => {
                let access = if order.strong { Access::Atomic } else { Access::Read };
                let total = bytes * to.len();
                let addresses = self.addresses(cta, warp, (*space, *address), active, at)?;
                let moved = self.counts.global_sectors;
                self.count(*space, &addresses, active, total);
                let moved = self.counts.global_sectors - moved;
                let (mut first, mut current) = ([0; LANES], true);
                for lane in lanes(active) {
                    let (address, proxy) = (addresses[lane], Proxy::Generic);
                    let touch = Touch { space: *space, address, bytes: total, access, proxy };
                    let data: &[u8] = match order.strong {
                        true => self.touch(cta, warp, lane, touch, at)?,
                        false => self.fetch(cta, warp, lane, touch, at)?,
                    };
                    first[lane] = little_endian(&data[..*bytes]);
                    for (to, element) in to.iter().zip(data.chunks_exact(*bytes)).skip(1) {
                        if let Some(to) = to {
                            warp.registers[*to][lane] = little_endian(element);
                        }
                    }
                    match self.missed(cta, warp, lane, *order, address, at) {
                        Some(old) => (first[lane], current) = (old, false),
                        None => self.ordered(cta, warp, lane, *order, address, false),
                    }
                }
                self.strong_read(warp, active, *order, (&addresses, &first, moved), current, at);
                to[1..].iter().flatten().for_each(|to| warp.wrote(*to, active));
                if let Some(to) = to[0] {
                    warp.set(to, active, &first);
                }
            }
            PtxOp::Store { order, space, bytes, from, address } => {
                let access = if order.strong { Access::Atomic } else { Access::Write };
                let total = bytes * from.len();
                let addresses = self.addresses(cta, warp, (*space, *address), active, at)?;
                self.count(*space, &addresses, active, total);
                from.iter().for_each(|&source| self.check_written(warp, source, active, at));
                for lane in lanes(active) {
                    let (address, proxy) = (addresses[lane], Proxy::Generic);
                    let by = warp.who(cta.id, 1 << lane, at.pc, proxy).epoch();
                    self.ordered(cta, warp, lane, *order, address, true);
                    let touch = Touch { space: *space, address, bytes: total, access, proxy };
                    let data = self.touch(cta, warp, lane, touch, at)?;
                    let old = little_endian(&data[..*bytes]);
                    for (element, &source) in data.chunks_exact_mut(*bytes).zip(from) {
                        put_little_endian(element, warp.of(source, lane));
                    }
                    self.replaced(*order, (*space, address), old, by);
                }
            }
            PtxOp::Atomic { order, space, bytes, function, to, address, from } => {
                let addresses = self.addresses(cta, warp, (*space, *address), active, at)?;
                self.count(*space, &addresses, active, *bytes);
                let [a, b] = from.map(|source| self.read(warp, source, active, at));
                let mut old = [0; LANES];
                for lane in lanes(active) {
                    let (address, bytes, access) = (addresses[lane], *bytes, Access::Atomic);
                    let by = warp.who(cta.id, 1 << lane, at.pc, Proxy::Generic).epoch();
                    self.ordered(cta, warp, lane, *order, address, true);
                    if to.is_some() {
                        self.ordered(cta, warp, lane, *order, address, false);
                    }
                    let touch = Touch { space: *space, address, bytes, access, proxy: Proxy::Generic };
                    let data = self.touch(cta, warp, lane, touch, at)?;
                    old[lane] = little_endian(data);
                    let mut new = [0; LANES];
                    function([&[old[lane]; LANES], &[a[lane]; LANES], &[b[lane]; LANES]], &mut new);
                    put_little_endian(data, new[lane]);
                    self.replaced(*order, (*space, address), old[lane], by);
                }
                if let Some(to) = to {
                    warp.set(*to, active, &old);
                }
            }
            _ => {}
        }
        Ok(())
    }
    /// What a strong access publishes before a write, or learns after a read: see [`Fences`](super::warp::Fences).
    fn ordered(&mut self, cta: &Cta, warp: &mut Warp, lane: usize, order: MemoryOrder, address: u64, write: bool) {
        if !order.strong {
            return;
        }
        let (mine, scopes) = (1 << lane, [None, Some(cta.id)]);
        // Anything visible to the device is visible to the CTA, but not vice versa.
        let scopes = &scopes[order.cta as usize..];
        if write {
            let fenced = warp.order.passed.as_ref().filter(|(mask, _)| mask & mine != 0).map(|(_, view)| view.clone());
            let told = if order.release { Some(warp.release(mine, cta.id)) } else { fenced };
            if let Some(view) = told {
                for scope in scopes {
                    let known =
                        self.releases.entry((address, *scope)).or_insert_with(|| ClockView::new(cta.id, warp.warps));
                    known.join(&view);
                }
            }
            return;
        }
        for scope in scopes {
            let Some(view) = self.releases.get(&(address, *scope)) else { continue };
            match order.acquire {
                true => warp.acquire(mine, view),
                false => warp.order.met.get_or_insert_with(|| ClockView::new(cta.id, warp.warps)).join(view),
            }
        }
    }
    /// Checks one lane's access and returns its bytes.
    pub(super) fn touch<'b>(
        &'b mut self,
        cta: &'b mut Cta,
        warp: &Warp,
        lane: usize,
        touch: Touch,
        at: Site,
    ) -> Result<&'b mut [u8], Stop> {
        self.touch_as(cta, warp, lane, 1 << lane, touch, at)
    }
    /// The same for an address of one lane that all of `lanes` receive: writes by any of them must be ordered for all.
    pub(super) fn touch_as<'b>(
        &'b mut self,
        cta: &'b mut Cta,
        warp: &Warp,
        lane: usize,
        lanes: u32,
        touch: Touch,
        at: Site,
    ) -> Result<&'b mut [u8], Stop> {
        let at = Site { lane: Some(lane), ..at };
        match self.check(cta, warp, lanes, touch, at)? {
            (Touched::Shared(_), range) => Ok(&mut cta.shared[range]),
            (Touched::Global(index), range) => self.bytes(index, touch.access, range, at),
        }
    }
    /// The same for a plain load, whose bytes are not copied.
    fn fetch<'b>(
        &'b mut self,
        cta: &'b mut Cta,
        warp: &Warp,
        lane: usize,
        touch: Touch,
        at: Site,
    ) -> Result<&'b [u8], Stop> {
        match self.check(cta, warp, 1 << lane, touch, Site { lane: Some(lane), ..at })? {
            (Touched::Shared(_), range) => Ok(&cta.shared[range]),
            (Touched::Global(index), range) => Ok(&self.memory.allocations[index].data.bytes()[range]),
        }
    }
    /// The place, and the bytes of the CTA's shared memory or of the allocation.
    #[inline]
    fn check(
        &mut self,
        cta: &mut Cta,
        warp: &Warp,
        lanes: u32,
        touch: Touch,
        at: Site,
    ) -> Result<(Touched, Range<usize>), Stop> {
        let Touch { space, address, bytes, access, proxy } = touch;
        let who = warp.who(warp.cta, lanes, at.pc, proxy);
        let (place, offset, start, shadow) = match space.of(address) {
            Space::Shared => {
                let (array, base, offset) = self.find_shared(address, bytes, at)?;
                (Touched::Shared(array), offset, base + offset, &mut cta.shadow)
            }
            _ => {
                let (index, offset) = self.find_global(address, bytes, at)?;
                (Touched::Global(index), offset, offset, &mut self.memory.allocations[index].shadow)
            }
        };
        let trouble = shadow.access(start, bytes, access, &who);
        self.judge(trouble, access, (place, offset), bytes, at);
        Ok((place, start..start + bytes))
    }
    /// Bytes of global memory. Memory lent read-only comes as a copy.
    pub(super) fn bytes(
        &mut self,
        index: usize,
        access: Access,
        range: Range<usize>,
        at: Site,
    ) -> Result<&mut [u8], Stop> {
        let Allocation { name, data, .. } = &self.memory.allocations[index];
        if access != Access::Read && matches!(data, Backing::Read(_)) {
            let what = format!("bytes {}..{} of '{name}', which is read-only in this launch", range.start, range.end);
            self.find(FindingKind::ReadOnly, at, what);
            return Err(Stop);
        }
        match &mut self.memory.allocations[index].data {
            Backing::Own(data) => Ok(&mut data[range]),
            Backing::Write(data) => Ok(&mut data[range]),
            Backing::Read(data) => {
                self.lent.clear();
                self.lent.extend_from_slice(&data[range]);
                Ok(&mut self.lent)
            }
        }
    }
    pub(super) fn find_global(&mut self, address: u64, bytes: usize, at: Site) -> Result<(usize, usize), Stop> {
        let (kind, what) = match self.memory.find(address, bytes) {
            Ok(found) => return Ok(found),
            Err(Outside::Nowhere) => {
                (FindingKind::OutOfBounds, format!("address {address:#x} is outside all allocations"))
            }
            Err(Outside::Beyond(index, offset)) => {
                let of = &self.memory.allocations[index];
                let (end, len) = (offset + bytes as i64, of.data.bytes().len());
                let what = format!("bytes {offset}..{end} of '{}' ({len} bytes)", of.name);
                (FindingKind::OutOfBounds, what)
            }
            Err(Outside::Misaligned(index, offset)) => {
                let name = &self.memory.allocations[index].name;
                (FindingKind::Misaligned, format!("{bytes} bytes at byte {offset} of '{name}'"))
            }
        };
        self.find(kind, at, what);
        Err(Stop)
    }
    /// The array, by index, its offset and the offset within it.
    pub(super) fn find_shared(&mut self, address: u64, bytes: usize, at: Site) -> Result<(usize, usize, usize), Stop> {
        let offset = address.wrapping_sub(SHARED_BASE);
        let inside = |f: &Field| {
            let end = offset.checked_add(bytes as u64);
            offset >= f.offset as u64 && end.is_some_and(|end| end <= (f.offset + f.bytes) as u64)
        };
        let Some(index) = self.shared.iter().position(inside) else {
            let before = self.shared.iter().rfind(|f| offset < 1 << 32 && f.offset as u64 <= offset);
            let what = match before {
                Some(f) => {
                    let start = offset - f.offset as u64;
                    format!("bytes {start}..{} of shared '{}' ({} bytes)", start + bytes as u64, f.name, f.bytes)
                }
                None => format!("address {address:#x} is outside all shared arrays"),
            };
            self.find(FindingKind::OutOfBounds, at, what);
            return Err(Stop);
        };
        let field = &self.shared[index];
        let base = field.offset;
        let within = offset as usize - base;
        if !aligned(offset, bytes) {
            let what = format!("{bytes} bytes at byte {within} of shared '{}'", field.name);
            self.find(FindingKind::Misaligned, at, what);
            return Err(Stop);
        }
        Ok((index, base, within))
    }
    /// Reports what is wrong with an access to these bytes, if anything.
    pub(super) fn judge(
        &mut self,
        trouble: Option<Box<Trouble>>,
        access: Access,
        (place, offset): (Touched, usize),
        bytes: usize,
        at: Site,
    ) {
        let Some(trouble) = trouble else { return };
        let kind = match *trouble {
            Trouble::Unwritten => FindingKind::Uninitialized,
            Trouble::InFlight | Trouble::Held => FindingKind::InFlight,
            Trouble::Race(Access::Write | Access::Read, e) if e.warp as usize == self.warps() => FindingKind::InFlight,
            Trouble::Race(..) => FindingKind::Race,
            Trouble::Unshown(..) => FindingKind::Proxy,
        };
        if self.is_known(kind, at) {
            return;
        }
        let verb = |access| match access {
            Access::Read => "read",
            Access::Write => "write",
            Access::Atomic => "atomic",
        };
        let name = match place {
            Touched::Shared(array) => format!("shared '{}'", self.shared[array].name),
            Touched::Global(index) => format!("'{}'", self.memory.allocations[index].name),
        };
        let here = format!("{} of {name} bytes {offset}..{}", verb(access), offset + bytes);
        let by = |e: &Epoch| (self.thread(e), self.kernel.place(e.pc as usize));
        let what = match *trouble {
            Trouble::Unwritten => format!("{here}, which nothing has written"),
            Trouble::InFlight => format!("{here}, to which an asynchronous copy is in flight"),
            Trouble::Held => format!("{here}, which an asynchronous copy or a wgmma still reads"),
            Trouble::Race(other, e) if kind == FindingKind::InFlight => {
                let (_, place) = by(&e);
                let way = if other == Access::Write { "to" } else { "from" };
                format!("{here}, {way} which {place} copies; its mbarrier has not been waited for")
            }
            Trouble::Race(other, e) => {
                let (thread, place) = by(&e);
                format!("{here}, unordered with the {} by {thread} at {place}", verb(other))
            }
            Trouble::Unshown(other, e) => {
                let ((thread, place), other) = (by(&e), verb(other));
                format!(
                    "{here} by the asynchronous proxy: no fence.proxy.async after the {other} by {thread} at {place}"
                )
            }
        };
        self.find(kind, at, what);
    }
    fn warps(&self) -> usize {
        self.block.iter().map(|&n| n as usize).product::<usize>().div_ceil(LANES)
    }
    fn thread(&self, e: &Epoch) -> Thread {
        let lane = (e.lanes.count_ones() == 1).then_some(e.lanes.trailing_zeros());
        Thread { cta: e.cta, warp: e.warp as u32, lane }
    }
    pub(super) fn count_sectors(&mut self, sectors: &mut [u64]) {
        self.counts.global_sectors += distinct(sectors).len() as u64;
    }
    /// Counts sectors of global memory, and excess passes of shared memory.
    pub(super) fn count(&mut self, space: Space, addresses: &[u64; LANES], active: u32, bytes: usize) {
        match space.of(addresses[active.trailing_zeros() as usize % LANES]) {
            Space::Shared => {
                // 8 bytes per lane are served by half warps, 16 by quarter warps: 32 words each time.
                let together = LANES / bytes.div_ceil(4);
                for first in (0..LANES).step_by(together) {
                    let part = active & (u32::MAX >> (LANES - together)) << first;
                    let (mut words, mut n) = ([0; LANES], 0);
                    for lane in lanes(part) {
                        for word in addresses[lane] / 4..addresses[lane] / 4 + bytes.div_ceil(4) as u64 {
                            (words[n], n) = (word, n + 1);
                        }
                    }
                    let mut banks = [0u64; BANKS as usize];
                    distinct(&mut words[..n]).iter().for_each(|word| banks[(word % BANKS) as usize] += 1);
                    self.counts.bank_conflicts += banks.iter().max().unwrap_or(&0).saturating_sub(1);
                }
            }
            _ => {
                let (mut sectors, mut n) = ([0; LANES], 0);
                for lane in lanes(active) {
                    (sectors[n], n) = (addresses[lane] / SECTOR, n + 1);
                }
                self.count_sectors(&mut sectors[..n]);
            }
        }
    }
}

/// Sorts and removes duplicates. The input is mostly sorted.
fn distinct(values: &mut [u64]) -> &[u64] {
    if !values.is_sorted() {
        values.sort_unstable();
    }
    let mut kept = 0;
    for i in 0..values.len() {
        if i == 0 || values[i] != values[kept - 1] {
            values[kept] = values[i];
            kept += 1;
        }
    }
    &values[..kept]
}
