//! What each rank publishes about each operation: a record in a ring in the arena. Never moves data. `words` defines
//! how ranks order their accesses.
use super::arena::{Mapping, PAGE};
use super::words;
use crate::base::{DType, printable};
use crate::comm::seam::Seam;
use crate::comm::{Reduce, Tag};
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering::*};

/// Maximum unfinished operations of one group.
pub(super) const RING: u64 = 1024;
/// Half a mailbox: one half is filled while peers read the other.
pub(super) const CHUNK: usize = 256 << 10;

/// An operation in the form that ranks compare. Plain integers, so any bytes in shared memory are a valid value.
#[derive(Clone, Copy, PartialEq, Eq, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C)]
pub(in crate::comm) struct Desc {
    kind: u8,
    dtype: u8,
    /// The reduction, or the usage of an allocated buffer.
    pub arg: u8,
    what_len: u8,
    unit: u32,
    /// Elements: of the shard, of the buffer, or sent (an all_to_all: to all ranks or, in [`Desc::toward`], to one).
    pub len: u64,
    /// Elements received (send_recv, all_to_all).
    pub recv_len: u64,
    /// The operand's place in the arena ([`Desc::STAGED`] if not there), the same for all ranks.
    pub place: u64,
    /// Group ranks: destination, or the root of a broadcast; source. [`Desc::NOBODY`]: on another host.
    pub to: u32,
    pub from: u32,
    what: [u8; 24],
}

/// Bits of a place for the byte offset; the rest identify the group's buffer.
pub(super) const BYTE: u32 = 44;

const DTYPES: [DType; 7] = [DType::F32, DType::Bf16, DType::F64, DType::U32, DType::I32, DType::U8, DType::F16];

impl Desc {
    /// Not in the arena: uses the mailboxes.
    pub const STAGED: u64 = u64::MAX;
    pub const NOBODY: u32 = u32::MAX;

    pub fn new(kind: Seam, tag: Tag, dtype: DType, len: usize) -> Desc {
        let mut what = [0; 24];
        let n = tag.what.len().min(what.len());
        what[..n].copy_from_slice(&tag.what.as_bytes()[..n]);
        Desc {
            kind: kind as u8,
            dtype: DTYPES.iter().position(|&d| d == dtype).unwrap_or(DTYPES.len()) as u8,
            arg: 0,
            what_len: n as u8,
            unit: tag.unit as u32,
            len: len as u64,
            recv_len: 0,
            place: Desc::STAGED,
            to: 0,
            from: 0,
            what,
        }
    }
    /// The operation as it concerns a peer: of an all_to_all, the elements that the two exchange.
    pub fn toward(mut self, peer: usize, pair: impl FnOnce() -> PairParts) -> Desc {
        if self.kind == Seam::AllToAll as u8 {
            let pair = pair();
            (self.to, self.from, self.len, self.recv_len) = (peer as u32, peer as u32, pair.sends, pair.recvs);
        }
        self
    }
    /// Whether `mine`, of group rank `me`, and `theirs`, of group rank `peer`, are the same operation.
    pub fn agrees(mine: &Desc, me: usize, theirs: &Desc, peer: usize) -> bool {
        if ![Seam::SendRecv as u8, Seam::AllToAll as u8].contains(&mine.kind) {
            return mine == theirs;
        }
        let same = |d: &Desc| (d.kind, d.dtype, d.unit, d.what);
        let pair = |a: &Desc, i: usize, b: &Desc, j: usize| (a.to == j as u32) == (b.from == i as u32);
        let len = |a: &Desc, j: usize, b: &Desc| a.to != j as u32 || a.len == b.recv_len;
        same(mine) == same(theirs)
            && pair(mine, me, theirs, peer)
            && pair(theirs, peer, mine, me)
            && len(mine, peer, theirs)
            && len(theirs, me, mine)
    }
}
impl std::fmt::Display for Desc {
    fn fmt(&self, f: &mut std::fmt::Formatter) -> std::fmt::Result {
        let Some(kind) = Seam::ALL.into_iter().find(|&k| k as u8 == self.kind) else {
            return write!(f, "an unknown operation");
        };
        let what = String::from_utf8_lossy(&self.what[..(self.what_len as usize).min(self.what.len())]);
        let what = printable(&what, self.what.len()); // from a peer
        write!(f, "{} ({what} {})", kind.name(), self.unit)?;
        if kind == Seam::Barrier {
            return Ok(());
        }
        write!(f, " of {} {}", self.len, DTYPES.get(self.dtype as usize).map_or("?", |d| d.name()))?;
        match kind {
            Seam::Alloc if self.arg == 0 => write!(f, ", gathered"),
            Seam::Alloc => write!(f, ", reduced"),
            Seam::AllReduce if self.arg == Reduce::Max as u8 => write!(f, ", max"),
            Seam::Broadcast => write!(f, " from {}", self.to),
            Seam::AllToAll if self.to == Desc::NOBODY => Ok(()),
            Seam::SendRecv | Seam::AllToAll => write!(f, " to {}, {} from {}", self.to, self.recv_len, self.from),
            _ => Ok(()),
        }?;
        match self.place {
            Desc::STAGED => Ok(()),
            place => write!(f, " in group buffer {} at byte {}", place >> BYTE, place & ((1 << BYTE) - 1)),
        }
    }
}

/// What a rank sends to another in an all_to_all, and expects from it, in elements. Plain integers, as in [`Desc`].
#[derive(Clone, Copy, Default)]
#[repr(C)]
pub(in crate::comm) struct PairParts {
    pub send_at: u64,
    pub sends: u64,
    pub recv_at: u64,
    pub recvs: u64,
}
impl PairParts {
    pub fn new(send: &Range<usize>, recv: &Range<usize>) -> PairParts {
        let [send_at, sends, recv_at, recvs] = [send.start, send.len(), recv.start, recv.len()].map(|x| x as u64);
        PairParts { send_at, sends, recv_at, recvs }
    }
}

pub(super) use words::Phase;
pub(super) type OpRecord = words::Record<Desc>;

/// A rank's lane of a group's control region: operations started, its ring, its mailbox.
const RING_AT: usize = 128;
const MAIL_AT: usize = (RING_AT + RING as usize * size_of::<OpRecord>()).next_multiple_of(PAGE);
const LANE: usize = MAIL_AT + 2 * CHUNK;

/// After the lanes: for each rank and slot of its ring, a [`PairParts`] per rank.
pub(super) struct Lanes(Mapping, usize);

impl Lanes {
    pub const fn bytes(ranks: usize) -> usize {
        (LANE + RING as usize * ranks * size_of::<PairParts>()) * ranks
    }
    pub fn new(control: Mapping, ranks: usize) -> Lanes {
        Lanes(control, ranks)
    }
    /// Number of operations a rank has started, for messages.
    fn started(&self, rank: usize) -> &AtomicU64 {
        // SAFETY: an atomic.
        unsafe { self.0.shared(rank * LANE) }
    }
    pub fn record(&self, rank: usize, seq: u64) -> &OpRecord {
        // SAFETY: atomics and an UnsafeCell of plain integers.
        unsafe { self.0.shared(rank * LANE + RING_AT + (seq % RING) as usize * size_of::<OpRecord>()) }
    }
    pub fn post(&self, rank: usize, seq: u64, desc: Desc, phase: Phase) {
        self.record(rank, seq).post(seq, desc, phase);
        self.started(rank).store(seq + 1, Release);
    }
    fn pair_at(&self, of: usize, seq: u64, with: usize) -> *mut PairParts {
        let slot = of * RING as usize + (seq % RING) as usize;
        self.0.at(LANE * self.1 + (slot * self.1 + with) * size_of::<PairParts>()).cast()
    }
    /// Only before the own record is posted.
    pub fn set_pair(&self, me: usize, seq: u64, with: usize, pair: PairParts) {
        // SAFETY: aligned and within the mapping; all ranks have retired the slot's previous operation.
        unsafe { self.pair_at(me, seq, with).write(pair) }
    }
    /// Only of a rank that has posted the operation, an all_to_all that this rank has not retired.
    pub fn pair(&self, of: usize, seq: u64, with: usize) -> PairParts {
        // SAFETY: its owner wrote it before `Posted`, and rewrites it only after this rank has retired the operation.
        unsafe { self.pair_at(of, seq, with).read() }
    }
    pub fn mailbox(&self, rank: usize, round: u32) -> *mut u8 {
        self.0.at(rank * LANE + MAIL_AT + (round % 2) as usize * CHUNK)
    }
    /// The operation that a rank started last, for messages.
    pub fn last(&self, rank: usize) -> String {
        match self.started(rank).load(Acquire).checked_sub(1) {
            None => "it has not started any operation in this group".into(),
            Some(seq) => {
                let desc = self.record(rank, seq).glimpse();
                format!("its last operation here is {desc}")
            }
        }
    }
}
