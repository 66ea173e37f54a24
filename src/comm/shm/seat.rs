//! One rank's state in the world: its bell, the abort word, and its shared-memory buffers. Never moves data.
use super::arena::{Arena, Mapping};
use super::buffer::{BufferName, BufferRequest, ShmBuffer};
use super::words::Bell;
use crate::base::{Error, Meter, Result};
use crate::comm::Patience;
use crate::device::Buf;
use rustix::thread::futex;
use std::ops::Range;
use std::sync::atomic::{AtomicU32, Ordering::*};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant};

/// At the start of the arena: zero, or 1 + the world rank that failed first, on this host or another.
#[repr(C, align(128))]
struct ArenaHeader {
    failed: AtomicU32,
}

pub(super) struct Seat {
    /// Index among the ranks of this host.
    pub rank: usize,
    /// World rank of the first of them: they are numbered consecutively.
    pub first: usize,
    pub arena: Arc<Arena>,
    pub meter: Meter,
    pub timeout: Patience,
    words: Mapping,
    /// Spin rounds before sleeping: increased when spinning sufficed, decreased when it did not.
    spin: AtomicU32,
    spin_max: u32,
    /// Live buffers of this rank's groups.
    held: Mutex<Vec<HeldBuffer>>,
}

struct HeldBuffer {
    range: Range<usize>,
    name: BufferName,
    buffer: Weak<ShmBuffer>,
}

/// Ignores poisoning: after a panic elsewhere, reporting the failure matters more than this state.
pub(super) fn lock<T>(m: &Mutex<T>) -> MutexGuard<'_, T> {
    m.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Seat {
    pub fn take(arena: Arc<Arena>, rank: usize, first: usize, meter: Meter, timeout: Duration) -> Result<Seat> {
        let seat = Seat { first, ..Seat::view(arena, rank, meter, timeout)? };
        if let Err(pid) = seat.bell(rank).pid.compare_exchange(0, std::process::id(), AcqRel, Acquire) {
            let rank = seat.name(rank);
            let what = format!("two processes claim to be rank {rank}: {pid} and {}", std::process::id());
            return Err(Error::input(what));
        }
        Ok(seat)
    }
    /// Without joining: only to read the shared words.
    pub fn view(arena: Arc<Arena>, rank: usize, meter: Meter, timeout: Duration) -> Result<Seat> {
        let words = arena.map(0, size_of::<ArenaHeader>() + arena.world() * size_of::<Bell>())?;
        // Spinning only helps if the peer runs at the same time.
        let cores = std::thread::available_parallelism().map_or(1, |n| n.get());
        let spin_max = if cores < arena.world() { SPIN_MIN } else { SPIN_MAX };
        Ok(Seat {
            rank,
            first: 0,
            arena,
            meter,
            timeout: Patience::new(timeout),
            words,
            spin: AtomicU32::new(SPIN_MIN),
            spin_max,
            held: Mutex::default(),
        })
    }
    fn header(&self) -> &ArenaHeader {
        // SAFETY: made of atomics.
        unsafe { self.words.shared(0) }
    }
    fn bell(&self, rank: usize) -> &Bell {
        // SAFETY: made of atomics.
        unsafe { self.words.shared(size_of::<ArenaHeader>() + rank * size_of::<Bell>()) }
    }

    /// World rank of a rank on this host.
    pub fn name(&self, rank: usize) -> usize {
        self.first + rank
    }

    /// Waits until all ranks have joined.
    pub fn assemble(&self, deadline: Instant) -> Result<()> {
        let empty = |&r: &usize| self.bell(r).pid.load(Acquire) == 0;
        let missing = || -> Vec<usize> { (0..self.arena.world()).filter(empty).map(|r| self.name(r)).collect() };
        let me = self.name(self.rank);
        while !missing().is_empty() {
            if let Some(rank) = self.failed() {
                return Err(Error::Run(format!("rank {me}: rank {rank} failed while ranks were starting")));
            }
            if Instant::now() > deadline {
                let what = format!("rank {me}: of {} ranks, these never started: {:?}", self.arena.world(), missing());
                return Err(Error::Run(what));
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        Ok(())
    }
    /// The world rank that failed first, if any.
    pub fn failed(&self) -> Option<usize> {
        (self.header().failed.load(Acquire) as usize).checked_sub(1)
    }
    /// Reports to all ranks of this host that a world rank failed. Only the first report counts.
    pub fn abort(&self, rank: usize) {
        let _ = self.header().failed.compare_exchange(0, rank as u32 + 1, AcqRel, Acquire);
        for r in 0..self.arena.world() {
            self.ring(r);
        }
    }

    /// To be read before checking peers' states, and passed to [`Seat::listen`] afterwards.
    pub fn bell_count(&self) -> u32 {
        self.bell(self.rank).count()
    }
    pub fn ring(&self, rank: usize) {
        // Flags::empty: not private, because processes share the word. Waking cannot fail on a mapped word.
        self.bell(rank).ring(|word| _ = futex::wake(word, futex::Flags::empty(), i32::MAX as u32));
    }
    /// Returns when the bell differs from `heard`, after `at_most`, or spuriously.
    pub fn listen(&self, heard: u32, at_most: Duration) {
        let bell = self.bell(self.rank);
        let budget = self.spin.load(Relaxed);
        for _ in 0..budget {
            if bell.count() != heard {
                self.spin.store((budget * 2).min(self.spin_max), Relaxed);
                return;
            }
            std::hint::spin_loop();
        }
        self.spin.store((budget / 2).max(SPIN_MIN), Relaxed);
        let timeout = futex::Timespec { tv_sec: at_most.as_secs() as _, tv_nsec: at_most.subsec_nanos() as _ };
        // Whatever the outcome (woken, bell already changed, timeout, signal), the caller checks again.
        bell.sleep(|word| _ = futex::wait(word, futex::Flags::empty(), heard, Some(&timeout)));
    }

    /// Allocates a buffer for one of this rank's groups, in the group's region from `cursor` on.
    pub fn alloc(&self, cursor: &mut u64, request: BufferRequest) -> Result<Buf> {
        let (dtype, len) = (request.dtype, request.len);
        let buffer = Arc::new(ShmBuffer::new(&self.arena, &self.meter, cursor, request)?);
        let mut held = lock(&self.held);
        held.retain(|held| held.buffer.strong_count() > 0);
        held.push(HeldBuffer { range: buffer.range(), name: buffer.name(), buffer: Arc::downgrade(&buffer) });
        drop(held);
        buffer.into_buf(dtype, len)
    }
    /// The live buffer, of any of this rank's groups, that contains `bytes` at `start`.
    pub fn find(&self, start: *const u8, bytes: usize) -> Option<Arc<ShmBuffer>> {
        let (start, end) = (start as usize, start as usize + bytes);
        self.find_held(|held| held.range.start <= start && end <= held.range.end)
    }

    /// The live buffer of that name.
    pub fn named(&self, name: BufferName) -> Option<Arc<ShmBuffer>> {
        self.find_held(|held| held.name == name)
    }
    fn find_held(&self, is: impl Fn(&HeldBuffer) -> bool) -> Option<Arc<ShmBuffer>> {
        lock(&self.held).iter().filter(|held| is(held)).find_map(|held| held.buffer.upgrade())
    }
}

/// A round is one `pause`: 10 to 50 ns. So 0.5 to 3 us at least, 20 to 100 us at most.
const SPIN_MIN: u32 = 64;
const SPIN_MAX: u32 = 2048;
