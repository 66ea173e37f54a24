//! The access history of each piece of memory, and whether an earlier access is ordered before the current one. The
//! order itself is in clock.rs (see [Note: clocks] there). Never sees the data.
//!
//! A page starts with one record per 16 bytes and is permanently split when a finer access comes: so adjacent bytes of
//! two lanes do not race, and tiles stay cheap.
use super::clock::{Epoch, FencedMemory, LaneViews};
use super::lane::{LANES, lanes};
use std::ops::Range;

const PAGE: usize = 256;
/// Binary logarithm of the bytes per record before any finer access.
const COARSE: u32 = 4;

/// How an access reaches memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Proxy {
    Generic,
    Async(FencedMemory),
}

/// The accessing lanes; several if one instruction acts for all of them.
#[derive(Clone, Copy)]
pub struct Accessor<'a> {
    pub cta: u32,
    pub warp: usize,
    /// Warps of the CTA.
    pub warps: usize,
    pub lanes: u32,
    /// The warp's time, what its lanes know, and when each executed its last proxy fence of each memory.
    pub time: u32,
    pub views: &'a LaneViews,
    pub fenced: &'a FenceTimes,
    pub pc: usize,
    pub proxy: Proxy,
}

/// When each lane executed its last proxy fence, by [`FencedMemory`]; 0 for never.
pub type FenceTimes = [[u32; LANES]; FencedMemory::ALL.len()];

enum WriteOrder {
    Before,
    /// Ordered, but without a proxy fence.
    Unshown,
    None,
}

impl Accessor<'_> {
    pub fn epoch(&self) -> Epoch {
        let Accessor { cta, warp, lanes, time, pc, proxy, .. } = *self;
        let asynchronous = proxy != Proxy::Generic;
        Epoch { cta, clock: time, pc: pc as u16, warp: warp as u8, lanes, asynchronous }
    }
    /// Whether `e` happened before this access, or is this thread's own.
    #[inline]
    pub fn follows(&self, e: &Epoch) -> bool {
        let own =
            e.lanes == self.lanes && e.cta == self.cta && e.warp as usize == self.warp && e.lanes.is_power_of_two();
        own || self.views.all(self.lanes, |view| view.knows(e))
    }
    /// Whether a proxy fence of that memory came after `e`, which happened before: of this thread, or of one that it
    /// knows of.
    pub fn shows(&self, memory: FencedMemory, e: &Epoch) -> bool {
        let mine = (e.cta, e.warp as usize) == (self.cta, self.warp) && e.lanes & !self.lanes == 0;
        mine && lanes(e.lanes).all(|lane| e.clock <= self.fenced[memory as usize][lane])
            || self.views.all(self.lanes, |view| view.shows(memory, e))
    }
    /// The same for a write, which must also be visible to the proxy.
    fn sees(&self, e: &Epoch) -> WriteOrder {
        let by_thread = (e.warp as usize) < self.warps;
        match (self.follows(e), self.proxy) {
            (false, _) => WriteOrder::None,
            (true, Proxy::Async(memory)) if by_thread && !self.shows(memory, e) => WriteOrder::Unshown,
            (true, _) => WriteOrder::Before,
        }
    }
}

/// Accesses not superseded by later ones.
#[derive(Clone, Default)]
enum Accesses {
    #[default]
    None,
    One(Epoch),
    /// `ctas` has a bit for each of their CTAs, by its number modulo 16: most reads of global memory are by a CTA that
    /// need not be added, which shows without a look at the epochs.
    Many {
        ctas: u16,
        last: Epoch,
        #[allow(clippy::box_collection)] // a Vec makes every cell larger
        others: Box<Vec<Epoch>>,
    },
    /// None, with the list of a cell that many read in turn.
    #[allow(clippy::box_collection)]
    Superseded(Box<Vec<Epoch>>),
}

impl Accesses {
    /// CTAs with a record: a write that is ordered after both of a cluster still races with a third.
    const CTAS: u32 = 3;

    /// In their order.
    #[inline]
    fn iter(&self) -> impl Iterator<Item = &Epoch> {
        let (others, last) = match self {
            Accesses::None | Accesses::Superseded(_) => (&[][..], None),
            Accesses::One(epoch) => (&[][..], Some(epoch)),
            Accesses::Many { last, others, .. } => (&others[..], Some(last)),
        };
        others.iter().chain(last)
    }
    fn unordered(&self, who: &Accessor) -> Option<Epoch> {
        self.iter().find(|e| !who.follows(e)).copied()
    }
    /// The epoch of threads before which the accessor's proxy may write.
    fn unshown(&self, who: &Accessor) -> Option<Epoch> {
        let Proxy::Async(memory) = who.proxy else { return None };
        self.iter().find(|e| !e.asynchronous && !who.shows(memory, e)).copied()
    }
    fn is_empty(&self) -> bool {
        matches!(self, Accesses::None | Accesses::Superseded(_))
    }
    /// A write supersedes them all.
    fn clear(&mut self) {
        *self = match std::mem::take(self) {
            Accesses::Many { mut others, .. } => {
                others.clear();
                Accesses::Superseded(others)
            }
            Accesses::Superseded(others) => Accesses::Superseded(others),
            _ => Accesses::None,
        };
    }
    /// Adds `new`, which supersedes everything it `follows`.
    #[inline]
    fn add(&mut self, mut new: Epoch, follows: impl Fn(&Epoch) -> bool) {
        match self {
            Accesses::None => *self = Accesses::One(new),
            Accesses::One(old) if same_step(old, &new) => old.lanes |= new.lanes,
            Accesses::One(old) if follows(old) => *old = new,
            Accesses::One(old) => {
                *self = Accesses::Many { ctas: bit(old) | bit(&new), last: new, others: Box::new(vec![*old]) };
            }
            Accesses::Superseded(others) => {
                *self = Accesses::Many { ctas: bit(&new), last: new, others: std::mem::take(others) };
            }
            Accesses::Many { ctas, .. } if ctas.count_ones() >= Self::CTAS && *ctas & bit(&new) == 0 => {}
            Accesses::Many { last, .. } if same_step(last, &new) => last.lanes |= new.lanes,
            Accesses::Many { ctas, last, others } => {
                others.retain(|e| {
                    if same_step(e, &new) {
                        new.lanes |= e.lanes;
                    }
                    !same_step(e, &new) && !follows(e)
                });
                if !follows(last) {
                    others.push(*last);
                }
                *last = new;
                *ctas = others.iter().fold(bit(&new), |all, e| all | bit(e));
            }
        }
    }
}
fn bit(e: &Epoch) -> u16 {
    1 << (e.cta % u16::BITS)
}
fn same_step(a: &Epoch, b: &Epoch) -> bool {
    (a.cta, a.warp, a.clock) == (b.cta, b.warp, b.clock)
}

/// A line of the CPU's caches: a kernel's access to 4 bytes often costs a miss.
#[derive(Clone, Default)]
#[repr(align(64))]
struct Cell {
    write: Option<Epoch>,
    reads: Accesses,
    /// Rare.
    atomics: Option<Box<Accesses>>,
    written: bool,
    /// An asynchronous copy to it was issued and has not landed.
    in_flight: bool,
    /// Number of asynchronous reads that nobody has waited for.
    held: u16,
}

const _: () = assert!(size_of::<Cell>() == 64);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    Read,
    Write,
    Atomic,
}

/// A problem with an access.
#[derive(Debug, PartialEq, Eq)]
pub enum Trouble {
    Unwritten,
    InFlight,
    /// Written while a bulk copy or a wgmma still reads it.
    Held,
    /// A race with an earlier access of that kind.
    Race(Access, Epoch),
    /// The asynchronous proxy may not see this write, or may overwrite what this read is still to see.
    Unshown(Access, Epoch),
}

#[derive(Default)]
struct Page {
    /// Binary logarithm of the bytes per record.
    grain: u32,
    /// Empty until something accesses the page; its bytes are then alike.
    cells: Vec<Cell>,
    written: bool,
}

impl Page {
    #[cold]
    fn split(&mut self, grain: u32) {
        if self.cells.is_empty() {
            let cell = Cell { written: self.written, ..Cell::default() };
            (self.grain, self.cells) = (grain, vec![cell; PAGE >> grain]);
        } else if grain < self.grain {
            let times = 1 << (self.grain - grain);
            self.cells = self.cells.iter().flat_map(|cell| std::iter::repeat_n(cell, times).cloned()).collect();
            self.grain = grain;
        }
    }
}

#[derive(Default)]
pub struct Shadow {
    pages: Vec<Page>,
    bytes: usize,
    /// Pages with records.
    touched: Vec<usize>,
}

impl Shadow {
    pub fn new(bytes: usize, written: bool) -> Shadow {
        let page = || Page { grain: COARSE, cells: vec![], written };
        Shadow { pages: std::iter::repeat_with(page).take(bytes.div_ceil(PAGE)).collect(), bytes, touched: vec![] }
    }
    #[inline]
    fn each(&mut self, offset: usize, bytes: usize, mut act: impl FnMut(&mut Cell)) {
        let (mut at, end) = (offset, offset + bytes);
        while at < end {
            let page = &mut self.pages[at / PAGE];
            let (first, start) = (at / PAGE * PAGE, at % PAGE);
            let stop = (end - first).min(PAGE);
            let grain = COARSE.min((start | stop).trailing_zeros());
            if page.cells.is_empty() {
                self.touched.push(at / PAGE);
                page.split(grain);
            } else if grain < page.grain {
                page.split(grain);
            }
            page.cells[start >> page.grain..stop >> page.grain].iter_mut().for_each(&mut act);
            at = first + stop;
        }
    }
    /// The end of a launch orders everything.
    pub fn forget(&mut self) {
        let Shadow { pages, touched, .. } = self;
        touched.retain(|&index| {
            let page = &mut pages[index];
            let Some(first) = page.cells.first().map(|cell| cell.written) else { return false };
            let mixed = page.cells.iter().any(|cell| cell.written != first);
            match mixed {
                true => page.cells.iter_mut().for_each(|c| *c = Cell { written: c.written, ..Cell::default() }),
                false => (page.written, page.cells) = (first, vec![]),
            }
            mixed
        });
    }
    /// Between launches: marks bytes as initialized or uninitialized.
    pub fn set(&mut self, range: Range<usize>, written: bool) {
        let (mut at, end) = (range.start, range.end);
        while at < end {
            let stop = ((at / PAGE + 1) * PAGE).min(end);
            if at.is_multiple_of(PAGE) && (stop - at == PAGE || stop == self.bytes) {
                (self.pages[at / PAGE].cells, self.pages[at / PAGE].written) = (vec![], written);
            } else {
                self.each(at, stop - at, |cell| *cell = Cell { written, ..Cell::default() });
            }
            at = stop;
        }
        self.forget();
    }
    /// The first uninitialized byte in the range.
    pub fn unwritten_in(&self, range: Range<usize>) -> Option<usize> {
        let (mut at, end) = (range.start, range.end.min(self.bytes));
        while at < end {
            let page = &self.pages[at / PAGE];
            let (written, step) = match page.cells.is_empty() {
                true => (page.written, PAGE),
                false => (page.cells[(at % PAGE) >> page.grain].written, 1 << page.grain),
            };
            if !written {
                return Some(at);
            }
            at = (at / step + 1) * step;
        }
        None
    }
    /// The first uninitialized byte.
    pub fn unwritten(&self) -> Option<usize> {
        self.unwritten_in(0..self.bytes)
    }
    /// Checks and records an access; returns the first problem.
    pub fn access(&mut self, offset: usize, bytes: usize, kind: Access, who: &Accessor) -> Option<Box<Trouble>> {
        let (mut trouble, new) = (None, who.epoch());
        self.each(offset, bytes, |cell| {
            if trouble.is_none() && !cell.is_plain(kind, who) {
                trouble = cell.judge(kind, who).map(Box::new);
            }
            match kind {
                Access::Read => cell.reads.add(new, |e| who.follows(e)),
                Access::Atomic => cell.atomics.get_or_insert_default().add(new, |e| who.follows(e)),
                Access::Write => cell.overwrite(new),
            }
        });
        trouble
    }
    /// A copy was issued: nobody may access its destination until it lands.
    pub fn depart(&mut self, offset: usize, bytes: usize) {
        self.each(offset, bytes, |cell| cell.in_flight = true);
    }
    /// The copy has landed: a write of `by`, with which others must synchronize.
    pub fn land(&mut self, offset: usize, bytes: usize, by: Epoch) {
        self.each(offset, bytes, |cell| {
            cell.overwrite(by);
            cell.in_flight = false;
        });
    }
    /// An asynchronous read begins: checked now, and nobody may write until [`Shadow::let_go`].
    pub fn hold(&mut self, offset: usize, bytes: usize, who: &Accessor) -> Option<Box<Trouble>> {
        let mut trouble = None;
        self.each(offset, bytes, |cell| {
            if trouble.is_none() {
                trouble = cell.judge(Access::Read, who).map(Box::new);
            }
            cell.held += 1;
        });
        trouble
    }
    /// The read has finished: a read of `by`, which `follows` others.
    pub fn let_go(&mut self, offset: usize, bytes: usize, by: Epoch, follows: impl Fn(&Epoch) -> bool) {
        self.each(offset, bytes, |cell| {
            cell.held = cell.held.saturating_sub(1);
            cell.reads.add(by, &follows);
        });
    }
}

impl Cell {
    fn overwrite(&mut self, by: Epoch) {
        (self.write, self.written, self.atomics) = (Some(by), true, None);
        self.reads.clear();
    }
    /// Whether there is nothing to [`judge`](Cell::judge), which is what most accesses find.
    #[inline]
    fn is_plain(&self, kind: Access, who: &Accessor) -> bool {
        let fits = match kind {
            Access::Read => self.written,
            Access::Write => self.held == 0 && self.reads.is_empty(),
            Access::Atomic => false,
        };
        let alone = !self.in_flight && self.atomics.is_none() && who.proxy == Proxy::Generic;
        fits && alone && self.write.as_ref().is_none_or(|e| who.follows(e))
    }
    fn judge(&self, kind: Access, who: &Accessor) -> Option<Trouble> {
        if self.in_flight {
            return Some(Trouble::InFlight);
        }
        if kind != Access::Read && self.held > 0 {
            return Some(Trouble::Held);
        }
        if kind != Access::Write && !self.written {
            return Some(Trouble::Unwritten);
        }
        let write = self.write.and_then(|e| match who.sees(&e) {
            WriteOrder::Before => None,
            WriteOrder::Unshown => Some(Trouble::Unshown(Access::Write, e)),
            WriteOrder::None => Some(Trouble::Race(Access::Write, e)),
        });
        let read = || {
            let race = self.reads.unordered(who).map(|e| Trouble::Race(Access::Read, e));
            race.or_else(|| self.reads.unshown(who).map(|e| Trouble::Unshown(Access::Read, e)))
        };
        let atomic = || self.atomics.as_ref()?.unordered(who).map(|e| Trouble::Race(Access::Atomic, e));
        match kind {
            Access::Read => write.or_else(atomic),
            Access::Atomic => write.or_else(read),
            Access::Write => write.or_else(read).or_else(atomic),
        }
    }
}
