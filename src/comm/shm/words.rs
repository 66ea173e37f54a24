//! The synchronization words in shared memory: records of operations, bells, and counts of who still reads a buffer.
//! Every memory ordering that the protocol needs is in this file. Never refers to buffers, waits or calls the system,
//! so that `loom/` can run this very file under every interleaving.
//!
//! [Note: phases] Operation `seq` of a group has one record per rank, in slot `seq % RING` of the rank's lane. Its
//! state is `seq << 3 | phase` and only increases, so "rank r has reached phase p of operation s" is one comparison,
//! which remains true after r has gone on to later operations. A rank writes only its own records. It stores the state
//! with Release after the writes that the phase announces, and peers load it with Acquire before they read that data. A
//! slot is reused once all ranks have retired its operation, because none of them reads the old record any more.
//!
//! [Note: contents] A gathered buffer holds one set of contents at a time. In the page before it, each rank counts the
//! contents that it has released. Every rank starts the same gathers into it, so gather k (from 0) may write once all
//! ranks have released k contents. The counts only increase: a rank stores its own with Release after its last read,
//! and a writer loads them with Acquire before it writes.
//!
//! [Note: bells] A blocked rank sleeps on *one* futex word, whatever it waits for, because a peer in any group may
//! unblock it. Whoever publishes a state adds 1 to the bells of the peers concerned. No wake-up is lost: the sleeper
//! reads the bell, checks the states, registers in `sleepers` and lets the kernel compare the bell again; the ringer
//! publishes, changes the bell, then reads `sleepers`. Each has a sequentially consistent fence between its write and
//! its read, so either the ringer sees the sleeper and wakes it, or the kernel sees the changed bell and does not
//! sleep.
#[cfg(loom)]
use loom::{
    cell::UnsafeCell,
    sync::atomic::{AtomicU32, AtomicU64, fence},
};
use std::sync::atomic::Ordering::*;
#[cfg(not(loom))]
use std::sync::atomic::{AtomicU32, AtomicU64, fence};

/// The interface of loom's, which checks accesses.
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
    /// The record is posted.
    Posted = 1,
    /// Data that peers read first is complete: the shard of a gather, the input of a reduction.
    Ready,
    /// All-reduce: this rank's slice is reduced.
    Reduced,
    /// This rank has read all it needs from its peers.
    Done,
    /// This rank is finished with the operation.
    Retired,
}

const fn state(seq: u64, phase: Phase) -> u64 {
    seq << 3 | phase as u64
}

/// What a rank publishes about an operation, described by `D`.
#[repr(C, align(128))]
#[cfg_attr(loom, derive(Default))]
pub struct Record<D> {
    state: AtomicU64,
    /// Chunks written to the own mailbox, and chunks read from the mailboxes of all senders.
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
    /// Only for a record that has reached `Posted` for an operation that this rank has not retired.
    pub fn desc(&self) -> D {
        // SAFETY: its owner wrote it before `Posted` and rewrites it only after this rank has retired the operation.
        self.desc.with(|desc| unsafe { *desc })
    }
    /// Only for an own record whose last operation all ranks have retired.
    pub fn post(&self, seq: u64, desc: D, phase: Phase) {
        // SAFETY: all ranks have retired the slot's previous operation, so nobody reads it.
        self.desc.with_mut(|to| unsafe { *to = desc });
        self.put.store(0, Relaxed);
        self.taken.store(0, Relaxed);
        self.publish(seq, phase);
    }
    /// For messages: of a rank that may be posting concurrently, so the value may be torn.
    #[cfg(not(loom))]
    pub fn glimpse(&self) -> D
    where
        D: bytemuck::Pod,
    {
        // SAFETY: plain integers, for which any bytes are valid; volatile, so that the compiler does not assume the
        // value constant.
        self.desc.with(|desc| unsafe { desc.read_volatile() })
    }

    /// That many rounds have been written to the own mailbox.
    pub fn set_put(&self, rounds: u32) {
        self.put.store(rounds, Release);
    }
    /// Whether this sender has written round `round` (from 0).
    pub fn has_put(&self, round: u32) -> bool {
        self.put.load(Acquire) > round
    }
    /// That many rounds have been read.
    pub fn set_taken(&self, rounds: u32) {
        self.taken.store(rounds, Release);
    }
    /// Whether this reader is done with the half mailbox of round `round`: it has read the round before last.
    pub fn leaves_half_of(&self, seq: u64, round: u32) -> bool {
        round < 2 || self.reached(seq, Phase::Posted) && self.taken.load(Acquire) + 1 >= round
    }
}

/// Two cache lines, because adjacent lines are prefetched together.
#[repr(C, align(128))]
#[cfg_attr(loom, derive(Default))]
pub struct Bell {
    count: AtomicU32,
    sleepers: AtomicU32,
    /// Process of the rank; 0 before it joins.
    pub pid: AtomicU32,
}

impl Bell {
    /// To be read before checking peers' states.
    pub fn count(&self) -> u32 {
        self.count.load(Acquire)
    }
    /// `wake` wakes everything that sleeps on the word.
    pub fn ring(&self, wake: impl FnOnce(&AtomicU32)) {
        self.count.fetch_add(1, Release);
        fence(SeqCst);
        if self.sleepers.load(Relaxed) != 0 {
            wake(&self.count);
        }
    }
    /// `sleep` returns at once if the word differs from what [`Bell::count`] returned.
    pub fn sleep(&self, sleep: impl FnOnce(&AtomicU32)) {
        self.sleepers.fetch_add(1, Relaxed);
        fence(SeqCst);
        sleep(&self.count);
        self.sleepers.fetch_sub(1, Relaxed);
    }
}

/// Before each buffer, shared by all ranks: how many of them have dropped it.
#[repr(C, align(64))]
#[cfg_attr(loom, derive(Default))]
pub struct Front {
    dropped: AtomicU32,
}
impl Front {
    /// This rank no longer uses the buffer. Returns whether it is the last of `ranks`.
    pub fn drop_last(&self, ranks: usize) -> bool {
        self.dropped.fetch_add(1, AcqRel) + 1 == ranks as u32
    }
}

/// Follows, once per rank.
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
    /// The rank no longer reads these contents; it has released all earlier ones.
    pub fn release(&self, content: u64) {
        self.released.store(content + 1, Release);
    }
}
