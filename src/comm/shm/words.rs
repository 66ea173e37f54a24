//! The words in shared memory by which ranks order their accesses to all the rest of it: records of operations, bells,
//! and counts of who still reads a buffer. Every memory ordering that the protocol needs stands here. Names no buffer,
//! waits for nothing and calls no system, so that `loom/` runs this very file in every order of events.
//!
//! [Note: phases] Operation `seq` of a group has one record per rank, in slot `seq % RING` of the rank's lane. Its
//! state is `seq << 3 | phase` and only grows, so "rank r has come at least to phase p of operation s" is one
//! comparison, which also holds after r has gone on to later operations. A rank writes only its own records. It stores
//! the state with Release after the writes that the phase announces, and peers load it with Acquire before they read
//! what it announces. A slot is used again when all ranks have retired its operation: none of them looks at the old
//! record any more.
//!
//! [Note: contents] A buffer that is gathered into holds one gathered content at a time. In the page in front of it
//! each rank counts the contents that it has released. Every rank starts the same gathers into it, so gather k (from 0)
//! may write when all ranks have released k contents. The counts only grow: a rank stores its own with Release after
//! its last read, and a writer loads them with Acquire before it writes.
//!
//! [Note: bells] A blocked rank sleeps on *one* futex word, whatever it waits for, because a peer in any group may be
//! what unblocks it. Whoever publishes a state adds 1 to the bells of the peers concerned. No wake-up is lost: the
//! sleeper reads the bell, looks at the states, announces itself in `sleepers` and lets the kernel compare the bell
//! again; the ringer publishes, changes the bell, then reads `sleepers`. Each has a sequentially consistent fence
//! between its write and its read, so either the ringer sees the sleeper and wakes it, or the kernel sees the changed
//! bell and does not sleep.
#[cfg(loom)]
use loom::{
    cell::UnsafeCell,
    sync::atomic::{AtomicU32, AtomicU64, fence},
};
use std::sync::atomic::Ordering::*;
#[cfg(not(loom))]
use std::sync::atomic::{AtomicU32, AtomicU64, fence};

/// As loom's, which checks accesses.
#[cfg(not(loom))]
#[repr(transparent)]
struct UnsafeCell<T>(std::cell::UnsafeCell<T>);
#[cfg(not(loom))]
impl<T> UnsafeCell<T> {
    fn with<R>(&self, f: impl FnOnce(*const T) -> R) -> R {
        f(self.0.get())
    }
    fn with_mut<R>(&self, f: impl FnOnce(*mut T) -> R) -> R {
        f(self.0.get())
    }
}

#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum Phase {
    /// The record is there.
    Posted = 1,
    /// What peers read first is there: the piece of a gather, the input of a reduction.
    Ready,
    /// All-reduce: this rank's slice is reduced.
    Reduced,
    /// This rank has read all that it needs of its peers.
    Done,
    /// This rank has no more to do with the operation.
    Retired,
}

const fn state(seq: u64, phase: Phase) -> u64 {
    seq << 3 | phase as u64
}

/// What a rank publishes about an operation, which `D` describes.
#[repr(C, align(128))]
#[cfg_attr(loom, derive(Default))]
pub struct Record<D> {
    state: AtomicU64,
    /// Chunks put into the own mailbox, and chunks taken from the mailboxes of all senders.
    put: AtomicU32,
    taken: AtomicU32,
    desc: UnsafeCell<D>,
}

impl<D: Copy> Record<D> {
    pub fn reached(&self, seq: u64, phase: Phase) -> bool {
        self.state.load(Acquire) >= state(seq, phase)
    }
    pub fn publish(&self, seq: u64, phase: Phase) {
        debug_assert!(self.state.load(Relaxed) < state(seq, phase));
        self.state.store(state(seq, phase), Release);
    }
    /// Only of a record that has reached `Posted` for an operation that this rank has not retired.
    pub fn desc(&self) -> D {
        // SAFETY: its owner wrote it before `Posted` and writes it again only when this rank has retired the operation.
        self.desc.with(|desc| unsafe { *desc })
    }
    /// Of an own record whose last operation all ranks have retired.
    pub fn post(&self, seq: u64, desc: D, phase: Phase) {
        // SAFETY: all ranks have retired the operation that was there: nobody reads it.
        self.desc.with_mut(|to| unsafe { *to = desc });
        self.put.store(0, Relaxed);
        self.taken.store(0, Relaxed);
        self.publish(seq, phase);
    }
    /// Of a rank that may be posting just now: perhaps a mixture, for messages.
    #[cfg(not(loom))]
    pub fn glimpse(&self) -> D
    where
        D: bytemuck::Pod,
    {
        // SAFETY: plain integers, of which any bytes are a value; volatile, since the compiler may not think them
        // constant.
        self.desc.with(|desc| unsafe { desc.read_volatile() })
    }

    /// That many rounds are in the own mailbox, or were.
    pub fn set_put(&self, rounds: u32) {
        self.put.store(rounds, Release);
    }
    /// Round `round` (from 0) of this sender is in its mailbox.
    pub fn has_put(&self, round: u32) -> bool {
        self.put.load(Acquire) > round
    }
    /// That many rounds are read.
    pub fn set_taken(&self, rounds: u32) {
        self.taken.store(rounds, Release);
    }
    /// This reader leaves the half mailbox of round `round` to its owner: the round before last is read.
    pub fn leaves_half_of(&self, seq: u64, round: u32) -> bool {
        round < 2 || self.reached(seq, Phase::Posted) && self.taken.load(Acquire) + 1 >= round
    }
}

/// Two cache lines: adjacent lines are fetched together.
#[repr(C, align(128))]
#[cfg_attr(loom, derive(Default))]
pub struct Bell {
    count: AtomicU32,
    sleepers: AtomicU32,
    /// Process of the rank; 0 before it joined.
    pub pid: AtomicU32,
}

impl Bell {
    /// Read before looking at peers' states.
    pub fn count(&self) -> u32 {
        self.count.load(Acquire)
    }
    /// `wake` wakes all that sleep on the word.
    pub fn ring(&self, wake: impl FnOnce(&AtomicU32)) {
        self.count.fetch_add(1, Release);
        fence(SeqCst);
        if self.sleepers.load(Relaxed) != 0 {
            wake(&self.count);
        }
    }
    /// `sleep` returns at once where the word is no longer what [`Bell::count`] said.
    pub fn sleep(&self, sleep: impl FnOnce(&AtomicU32)) {
        self.sleepers.fetch_add(1, Relaxed);
        fence(SeqCst);
        sleep(&self.count);
        self.sleepers.fetch_sub(1, Relaxed);
    }
}

/// In front of each buffer, shared by all ranks: how many of them have dropped it.
#[repr(C, align(64))]
#[cfg_attr(loom, derive(Default))]
pub struct Front {
    dropped: AtomicU32,
}
impl Front {
    /// This rank reads the buffer no more. Whether it is the last of `ranks`.
    pub fn drop_last(&self, ranks: usize) -> bool {
        self.dropped.fetch_add(1, AcqRel) + 1 == ranks as u32
    }
}

/// After that, one for each rank.
#[repr(C, align(64))]
#[cfg_attr(loom, derive(Default))]
pub struct Reader {
    released: AtomicU64,
}
impl Reader {
    /// Whether the rank has released all contents before this one.
    pub fn is_past(&self, content: u64) -> bool {
        self.released.load(Acquire) >= content
    }
    /// The rank reads a content no more; all earlier ones it has released before.
    pub fn release(&self, content: u64) {
        self.released.store(content + 1, Release);
    }
}
