//! What happened to each piece of memory, and whether something orders it before what happens now: races by vector
//! clocks, in the manner of FastTrack (Flanagan & Freund 2009). Never sees the data.
//!
//! [Note: clocks] Each warp has a clock, and a view of the other warps' clocks that barriers join. An access carries the
//! clock of its warp; it happened before the present one if the present warp's view has reached it. Lanes of one warp are
//! ordered by their own program, and among each other only when `bar.warp.sync` or a barrier advances the warp's clock:
//! a shuffle orders no memory. CTAs are never ordered within a launch, which is why nothing but atomics may meet there.
//! So a race between executed accesses shows under every schedule: order is judged by clocks, not by what ran first.

/// Bytes that share a record: bf16 neighbours written by two lanes are no race.
pub const CELL: usize = 2;
/// In place of a lane: several lanes of one warp, at one clock.
pub const SEVERAL: u16 = 32;

/// An access: who, when, and by which instruction.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Epoch {
    pub cta: u32,
    pub clock: u32,
    pub pc: u32,
    pub warp: u16,
    pub lane: u16,
}

/// The accessing thread and its warp's view.
#[derive(Clone, Copy)]
pub struct Who<'a> {
    pub cta: u32,
    pub warp: usize,
    pub lane: usize,
    pub pc: usize,
    pub clocks: &'a [u32],
}

impl Who<'_> {
    fn epoch(&self) -> Epoch {
        let clock = self.clocks[self.warp];
        Epoch { cta: self.cta, clock, pc: self.pc as u32, warp: self.warp as u16, lane: self.lane as u16 }
    }
    /// Whether `e` happened before this access, or is this thread's own.
    fn follows(&self, e: &Epoch) -> bool {
        let warp = e.warp as usize;
        e.cta == self.cta
            && if warp == self.warp {
                e.lane as usize == self.lane && e.lane != SEVERAL || e.clock < self.clocks[warp]
            } else {
                e.clock <= self.clocks[warp]
            }
    }
}

/// Accesses that none of the others has overtaken.
#[derive(Default)]
enum Accesses {
    #[default]
    None,
    One(Epoch),
    Many(Vec<Epoch>),
}

impl Accesses {
    fn slice(&self) -> &[Epoch] {
        match self {
            Accesses::None => &[],
            Accesses::One(epoch) => std::slice::from_ref(epoch),
            Accesses::Many(epochs) => epochs,
        }
    }
    fn unordered(&self, who: &Who) -> Option<Epoch> {
        self.slice().iter().find(|e| !who.follows(e)).copied()
    }
    fn add(&mut self, who: &Who) {
        let mut new = who.epoch();
        match self {
            Accesses::None => *self = Accesses::One(new),
            Accesses::One(old) if who.follows(old) => *old = new,
            Accesses::One(old) if same_step(old, &new) => old.lane = SEVERAL,
            Accesses::One(old) => *self = Accesses::Many(vec![*old, new]),
            Accesses::Many(epochs) => {
                // Two CTAs: whatever plain write comes is a race with one of them.
                if epochs.iter().any(|e| e.cta != epochs[0].cta) {
                    return;
                }
                epochs.retain(|e| {
                    if same_step(e, &new) {
                        new.lane = SEVERAL;
                    }
                    !same_step(e, &new) && !who.follows(e)
                });
                epochs.push(new);
            }
        }
    }
}
fn same_step(a: &Epoch, b: &Epoch) -> bool {
    (a.cta, a.warp, a.clock) == (b.cta, b.warp, b.clock)
}

#[derive(Default)]
struct Cell {
    write: Option<Epoch>,
    reads: Accesses,
    atomics: Accesses,
    written: bool,
    /// An asynchronous copy has been issued for it and not been waited for.
    in_flight: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    Read,
    Write,
    Atomic,
}

/// What is wrong with an access.
#[derive(Debug, PartialEq, Eq)]
pub enum Trouble {
    Unwritten,
    InFlight,
    /// With an earlier access of that kind.
    Race(Access, Epoch),
}

#[derive(Default)]
pub struct Shadow {
    cells: Vec<Cell>,
}

impl Shadow {
    pub fn new(bytes: usize, written: bool) -> Shadow {
        let cell = || Cell { written, ..Cell::default() };
        Shadow { cells: std::iter::repeat_with(cell).take(bytes.div_ceil(CELL)).collect() }
    }
    fn cells(&mut self, offset: usize, bytes: usize) -> &mut [Cell] {
        &mut self.cells[offset / CELL..(offset + bytes).div_ceil(CELL)]
    }
    /// The end of a launch orders everything.
    pub fn forget(&mut self) {
        for cell in &mut self.cells {
            *cell = Cell { written: cell.written, ..Cell::default() };
        }
    }
    /// Bytes from the first that nothing has written.
    pub fn unwritten(&self) -> Option<usize> {
        self.cells.iter().position(|c| !c.written).map(|cell| cell * CELL)
    }
    /// Judges and records an access; the first trouble counts.
    pub fn access(&mut self, offset: usize, bytes: usize, kind: Access, who: &Who) -> Option<Trouble> {
        let mut trouble = None;
        for cell in self.cells(offset, bytes) {
            trouble = trouble.or_else(|| cell.judge(kind, who));
            match kind {
                Access::Read => cell.reads.add(who),
                Access::Atomic => cell.atomics.add(who),
                Access::Write => {
                    *cell =
                        Cell { write: Some(who.epoch()), written: true, in_flight: cell.in_flight, ..Cell::default() }
                }
            }
        }
        trouble
    }
    /// A copy has been issued: until it has landed nobody may touch its destination.
    pub fn depart(&mut self, offset: usize, bytes: usize) {
        self.cells(offset, bytes).iter_mut().for_each(|cell| cell.in_flight = true);
    }
    /// The copy is there, for the thread that waited for it: to others it is a write of now.
    pub fn land(&mut self, offset: usize, bytes: usize, who: &Who) {
        for cell in self.cells(offset, bytes) {
            *cell = Cell { write: Some(who.epoch()), written: true, ..Cell::default() };
        }
    }
}

impl Cell {
    fn judge(&self, kind: Access, who: &Who) -> Option<Trouble> {
        if self.in_flight {
            return Some(Trouble::InFlight);
        }
        if kind != Access::Write && !self.written {
            return Some(Trouble::Unwritten);
        }
        let write = self.write.filter(|e| !who.follows(e)).map(|e| Trouble::Race(Access::Write, e));
        let read = || self.reads.unordered(who).map(|e| Trouble::Race(Access::Read, e));
        let atomic = || self.atomics.unordered(who).map(|e| Trouble::Race(Access::Atomic, e));
        match kind {
            Access::Read => write.or_else(atomic),
            Access::Atomic => write.or_else(read),
            Access::Write => write.or_else(read).or_else(atomic),
        }
    }
}
