//! A group of ranks over shared memory: checks, starts, waits. Never lets a rank sleep while it has something to do for
//! the others.
//!
//! [Note: progress] There is no communication thread: a rank's cores belong to its compute. What cannot be done when an
//! operation starts (a peer has not released the buffer, the peers' gradients are not complete) is done by this rank's next
//! call into the group. A rank that blocks moves on everything it has pending, in this and its other groups, until the one
//! thing that it waits for is there. So waits can come in any order.
use super::arena::{Mapping, PAGE, aligned};
use super::op::{Op, Step};
use super::record::{Desc, Kind, Lanes, Phase, RING};
use super::seat::{Held, Seat, lock};
use super::sum::Sources;
use crate::base::meter::Lease;
use crate::base::{Category, DType, Error, Result};
use crate::comm::{Axis, Collective, CommStats, CommUse, Reduce, Tag, Ticket};
use crate::device::{Buf, View, ViewMut};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU32, Ordering::AcqRel};
use std::sync::{Arc, Mutex};
use std::time::Instant;

/// What the operations of a group see of it.
pub(super) struct Hub {
    pub lanes: Lanes,
    /// World ranks of the members.
    pub ranks: Vec<usize>,
    /// This rank's index among them.
    pub me: usize,
    axis: Axis,
    seat: Arc<Seat>,
}

impl Hub {
    pub fn size(&self) -> usize {
        self.ranks.len()
    }
    pub fn publish(&self, seq: u64, phase: Phase) {
        self.lanes.record(self.me, seq).publish(seq, phase);
    }
    pub fn reached(&self, rank: usize, seq: u64, phase: Phase) -> bool {
        self.lanes.record(rank, seq).reached(seq, phase)
    }
    fn all_reached(&self, seq: u64, phase: Phase) -> bool {
        (0..self.size()).all(|r| self.reached(r, seq, phase))
    }
    fn ring(&self) {
        for (r, &rank) in self.ranks.iter().enumerate() {
            if r != self.me {
                self.seat.ring(rank);
            }
        }
    }
    pub fn error(&self, op: &'static str, tag: Tag, what: String) -> Error {
        Error::Comm { rank: self.seat.rank, op, group: self.axis.name().into(), unit: tag.to_string(), what }
    }
}

/// A gather whose buffer some rank may still hold: bytes `start..end` of the group's buffers (see [`Group::place`]).
struct Content {
    seq: u64,
    start: u64,
    end: u64,
}

struct Inner {
    next: u64,
    /// Slot `seq % RING`, as in the arena.
    ring: Box<[Op]>,
    /// Operations with steps to take, oldest first.
    active: Vec<u64>,
    contents: Vec<Content>,
    last_staged: Option<u64>,
    /// Allocations so far, and where the next one goes in the arena.
    allocs: u64,
    cursor: u64,
    /// Started and not complete; since when there is one.
    in_flight: usize,
    since: Instant,
    stats: CommStats,
    /// What ended this group's work: (operation, tag, message).
    failed: Option<(&'static str, Tag, String)>,
}

pub struct Group {
    hub: Hub,
    /// Region of the arena: distinguishes this rank's groups.
    id: u64,
    inner: Mutex<Inner>,
}

/// The owner behind a buffer of [`Collective::alloc`].
struct Owner {
    seat: Arc<Seat>,
    mapping: Mapping,
    /// File offset of the mapping.
    offset: u64,
    bytes: usize,
    ranks: usize,
    group: u64,
    index: u64,
    _lease: Lease,
}
impl Drop for Owner {
    fn drop(&mut self) {
        self.seat.drop_held(self.group, self.index);
        // The first page counts the ranks that have dropped the buffer. The last one gives the memory back, and only the
        // last: peers may still read.
        // SAFETY: an atomic.
        let dropped: &AtomicU32 = unsafe { self.mapping.shared(0) };
        if dropped.fetch_add(1, AcqRel) + 1 == self.ranks as u32 {
            self.seat.arena.punch(self.offset, self.bytes);
        }
    }
}

/// What a blocked rank waits for.
#[derive(Clone, Copy)]
enum Until {
    /// The slot for this operation is free.
    Room(u64),
    Complete(u64),
    Sent(u64),
}

const TICKET_SEQ: u32 = 48;

impl Group {
    /// `ranks` are world ranks in group order; this rank is among them.
    pub(super) fn new(seat: Arc<Seat>, axis: Axis, region: u64, ranks: Vec<usize>) -> Result<Arc<Group>> {
        let me = ranks.iter().position(|&r| r == seat.rank);
        let me = me.ok_or_else(|| Error::op("group", format!("rank {} is not one of {ranks:?}", seat.rank)))?;
        let bytes = Lanes::bytes(ranks.len());
        let lanes = Lanes::new(seat.arena.map(region, bytes)?);
        let inner = Inner {
            next: 0,
            ring: (0..RING).map(|_| Op::none()).collect(),
            active: Vec::with_capacity(RING as usize),
            contents: Vec::with_capacity(RING as usize),
            last_staged: None,
            allocs: 0,
            cursor: region + bytes.next_multiple_of(PAGE) as u64,
            in_flight: 0,
            since: Instant::now(),
            stats: CommStats::default(),
            failed: None,
        };
        let hub = Hub { lanes, ranks, me, axis, seat: seat.clone() };
        let id = region / super::arena::REGION;
        let group = Arc::new(Group { hub, id, inner: Mutex::new(inner) });
        seat.enter(&group);
        Ok(group)
    }

    /// Takes the pending steps; rings the peers if anything changed.
    fn progress(&self, inner: &mut Inner) -> Result<()> {
        let mut any = false;
        let result = loop {
            match self.sweep(inner) {
                Ok(true) => any = true,
                Ok(false) => break Ok(()),
                Err(e) => break Err(e),
            }
        };
        if any {
            self.hub.ring();
        }
        result
    }
    /// One look at every pending operation; true if any of them moved.
    fn sweep(&self, inner: &mut Inner) -> Result<bool> {
        let Inner { ring, active, contents, in_flight, since, stats, failed, .. } = inner;
        let (mut moved, mut mailbox_taken, mut i) = (false, false, 0);
        while let Some(&seq) = active.get(i) {
            let op = &mut ring[(seq % RING) as usize];
            let mut free = true;
            if op.step == Step::Write && op.desc.place != Desc::STAGED {
                let (start, end) = self.content(op);
                free = contents.iter().all(|c| {
                    c.seq >= seq || c.end <= start || end <= c.start || self.hub.all_reached(c.seq, Phase::Retired)
                });
            }
            if op.step == Step::Mail && mailbox_taken {
                i += 1;
                continue;
            }
            let complete = op.complete;
            match op.advance(&self.hub, free) {
                Ok(m) => moved |= m,
                Err(e) => {
                    if let Error::Comm { what, .. } = &e {
                        *failed = Some((op.kind.name(), op.tag, what.clone()));
                    }
                    return Err(e);
                }
            }
            mailbox_taken |= op.step == Step::Mail;
            if op.complete && !complete {
                *in_flight -= 1;
                if *in_flight == 0 {
                    stats.in_flight_s += since.elapsed().as_secs_f64();
                }
            }
            if op.pending() {
                i += 1;
            } else {
                active.remove(i);
            }
        }
        Ok(moved)
    }
    /// Called by this rank when it blocks in another group. An error is kept for who uses this group next.
    pub(super) fn try_progress(&self) {
        if let Ok(mut inner) = self.inner.try_lock()
            && inner.failed.is_none()
        {
            let _ = self.progress(&mut inner);
        }
    }

    fn check_alive(&self, inner: &Inner, op: &'static str, tag: Tag) -> Result<()> {
        if let Some(rank) = self.hub.seat.failed() {
            return Err(self.hub.error(op, tag, format!("rank {rank} failed")));
        }
        match &inner.failed {
            Some((op, tag, what)) => Err(self.hub.error(op, *tag, what.clone())),
            None => Ok(()),
        }
    }

    /// Blocks, progressing, until it is so.
    fn until(&self, inner: &mut Inner, until: Until, op: &'static str, tag: Tag) -> Result<()> {
        let seat = &self.hub.seat;
        let mut deadline = None;
        loop {
            let heard = seat.bell_count();
            self.check_alive(inner, op, tag)?;
            self.progress(inner)?;
            if self.is_so(inner, until) {
                return Ok(());
            }
            seat.progress_others(self);
            let now = Instant::now();
            let deadline = *deadline.get_or_insert(now + seat.timeout);
            if now >= deadline {
                return Err(self.timed_out(inner, until, op, tag));
            }
            seat.listen(heard, deadline - now);
        }
    }
    fn is_so(&self, inner: &Inner, until: Until) -> bool {
        match until {
            Until::Room(seq) => {
                seq < RING
                    || inner.ring[(seq % RING) as usize].step == Step::Retired
                        && self.hub.all_reached(seq - RING, Phase::Retired)
            }
            Until::Complete(seq) => self.op(inner, seq).is_none_or(|op| op.complete),
            Until::Sent(seq) => self.op(inner, seq).is_none_or(|op| match op.kind {
                Kind::ReduceScatter => op.step == Step::Retired || op.desc.place == Desc::STAGED && op.complete,
                _ => op.complete,
            }),
        }
    }
    /// The operation, unless its slot has passed on to a later one: then it was retired.
    fn op<'a>(&self, inner: &'a Inner, seq: u64) -> Option<&'a Op> {
        Some(&inner.ring[(seq % RING) as usize]).filter(|op| op.seq == seq)
    }

    fn timed_out(&self, inner: &mut Inner, until: Until, op: &'static str, tag: Tag) -> Error {
        let hub = &self.hub;
        let (seq, phase, what) = match until {
            Until::Room(seq) => (seq - RING, Phase::Retired, "has not finished an earlier operation: "),
            Until::Complete(seq) | Until::Sent(seq) => match self.op(inner, seq) {
                Some(op) if op.step == Step::Write => {
                    let (start, end) = self.content(op);
                    let held = inner.contents.iter().find(|c| {
                        c.seq < seq && start < c.end && c.start < end && !hub.all_reached(c.seq, Phase::Retired)
                    });
                    (held.map_or(seq, |c| c.seq), Phase::Retired, "still holds the gathered buffer: ")
                }
                Some(op) => (seq, op.awaited(), ""),
                None => (seq, Phase::Done, ""),
            },
        };
        let missing: Vec<usize> = (0..hub.size()).filter(|&r| !hub.reached(r, seq, phase)).collect();
        let names: Vec<String> = missing.iter().map(|&r| hub.ranks[r].to_string()).collect();
        let details: Vec<String> =
            missing.iter().map(|&r| format!("rank {}: {what}{}", hub.ranks[r], hub.lanes.last(r))).collect();
        let text = format!(
            "no answer within {:?} from rank{} {} ({})",
            hub.seat.timeout,
            if names.len() == 1 { "" } else { "s" },
            names.join(", "),
            details.join("; ")
        );
        inner.failed = Some((op, tag, text.clone()));
        hub.error(op, tag, text)
    }

    /// Runs `f` with the time that it takes counted as exposed.
    fn call<T>(&self, f: impl FnOnce(&mut Inner) -> Result<T>) -> Result<T> {
        let start = Instant::now();
        let mut inner = lock(&self.inner);
        let result = f(&mut inner);
        inner.stats.exposed_s += start.elapsed().as_secs_f64();
        result
    }

    /// `bytes`: received from peers, by the algorithm's count.
    fn start(&self, op: Op, bytes: usize) -> Result<Ticket> {
        self.call(|inner| {
            inner.stats.bytes += bytes as u64;
            inner.stats.ops += 1;
            self.start_in(inner, op)
        })
    }
    fn start_in(&self, inner: &mut Inner, mut op: Op) -> Result<Ticket> {
        let (name, tag) = (op.kind.name(), op.tag);
        self.check_alive(inner, name, tag)?;
        let seq = inner.next;
        self.until(inner, Until::Room(seq), name, tag)?;
        op.seq = seq;
        if op.step == Step::Mail {
            op.before = inner.last_staged.replace(seq);
        }
        if op.step == Step::Write && op.desc.place != Desc::STAGED {
            let (start, end) = self.content(&op);
            let hub = &self.hub;
            inner.contents.retain(|c| !hub.all_reached(c.seq, Phase::Retired));
            let over = |c: &&Content| start < c.end && c.start < end && !hub.reached(hub.me, c.seq, Phase::Retired);
            if let Some(held) = inner.contents.iter().find(over).and_then(|c| self.op(inner, c.seq))
                && !held.released
            {
                let what = format!("this rank has not released what was gathered there before ({})", held.tag);
                return Err(hub.error(name, tag, what));
            }
            inner.contents.push(Content { seq, start, end });
        }
        let phase = if matches!(op.step, Step::Reduce | Step::Meet) { Phase::Ready } else { Phase::Posted };
        self.hub.lanes.post(self.hub.me, seq, op.desc, phase);
        if inner.in_flight == 0 {
            inner.since = Instant::now();
        }
        inner.in_flight += 1;
        inner.next += 1;
        inner.active.push(seq);
        inner.ring[(seq % RING) as usize] = op;
        self.hub.ring();
        self.progress(inner)?;
        Ok(Ticket(self.id << TICKET_SEQ | seq))
    }

    fn seq(&self, inner: &Inner, op: &'static str, ticket: Ticket) -> Result<u64> {
        let (group, seq) = (ticket.0 >> TICKET_SEQ, ticket.0 & ((1 << TICKET_SEQ) - 1));
        if group != self.id || seq >= inner.next {
            return Err(self.hub.error(op, Tag::new("ticket", ticket.0 as usize), "is not of this group".into()));
        }
        Ok(seq)
    }
    fn tag(&self, inner: &Inner, seq: u64) -> (&'static str, Tag) {
        self.op(inner, seq).map_or(("wait", Tag::new("operation", seq as usize)), |op| (op.kind.name(), op.tag))
    }
    fn wait_until(&self, ticket: Ticket, until: fn(u64) -> Until) -> Result<()> {
        self.call(|inner| {
            let seq = self.seq(inner, "wait", ticket)?;
            let (op, tag) = self.tag(inner, seq);
            self.until(inner, until(seq), op, tag)
        })
    }

    fn refuse(&self, kind: Kind, tag: Tag, what: String) -> Error {
        self.hub.error(kind.name(), tag, what)
    }
    /// Where a buffer is among this group's allocations with that usage: buffer index and byte, alike on all ranks.
    /// Memory that all ranks share is refused unless it is to be gathered into: ranks would overwrite each other.
    fn place(&self, kind: Kind, tag: Tag, ptr: *const u8, bytes: usize, usage: CommUse) -> Result<(u64, Sources)> {
        let solo = if self.hub.size() == 1 { Sources::new(ptr, 0) } else { Sources::default() };
        if bytes == 0 {
            return Ok((Desc::STAGED, solo));
        }
        match self.hub.seat.find(ptr, bytes) {
            Some(held) if held.group == self.id && held.usage == usage => {
                let at = ptr as usize - held.start;
                Ok((held.index << 44 | at as u64, Sources::new((held.base + at) as *const u8, held.stride)))
            }
            Some(held) if held.usage == CommUse::Gathered => {
                let what =
                    "writes a Gathered buffer, which all ranks of its group share: only that group's all_gather may";
                Err(self.refuse(kind, tag, what.into()))
            }
            _ => Ok((Desc::STAGED, solo)),
        }
    }
    /// The bytes of the group's buffers that a gather in place writes.
    fn content(&self, op: &Op) -> (u64, u64) {
        (op.desc.place, op.desc.place + (op.bytes() * self.hub.size()) as u64)
    }
    /// Whether an operation on a buffer with that place needs no mailbox.
    fn direct(&self, place: u64) -> bool {
        place != Desc::STAGED || self.hub.size() == 1
    }
    fn check_rank(&self, kind: Kind, tag: Tag, rank: usize) -> Result<()> {
        match rank < self.hub.size() {
            true => Ok(()),
            false => Err(self.refuse(kind, tag, format!("no rank {rank} in a group of {}", self.hub.size()))),
        }
    }
    fn check_dtypes(&self, kind: Kind, tag: Tag, a: DType, b: DType) -> Result<()> {
        match a == b {
            true => Ok(()),
            false => Err(self.refuse(kind, tag, format!("from {a} into {b}"))),
        }
    }
    fn check_lens(&self, kind: Kind, tag: Tag, shard: usize, full: usize) -> Result<()> {
        let n = self.hub.size();
        match shard * n == full {
            true => Ok(()),
            false => Err(self.refuse(
                kind,
                tag,
                format!("full has {full} elements, {n} shards of {shard} are {}", n * shard),
            )),
        }
    }
}

impl Collective for Group {
    fn rank(&self) -> usize {
        self.hub.me
    }
    fn size(&self) -> usize {
        self.hub.size()
    }
    fn axis(&self) -> Axis {
        self.hub.axis
    }

    fn alloc(&self, dtype: DType, len: usize, usage: CommUse, category: Category) -> Result<Buf> {
        self.call(|inner| {
            let (hub, seat) = (&self.hub, &self.hub.seat);
            let bytes = len * dtype.size();
            let copies = if usage == CommUse::Gathered { 1 } else { hub.size() };
            let stride = bytes.next_multiple_of(PAGE);
            let index = inner.allocs;
            let mut op = Op::new(Kind::Alloc, Tag::new("buffer", index as usize), dtype, len, Step::Meet);
            op.desc.arg = usage as u8;
            // Does not wait: a mismatch shows in a later call.
            let _ = self.start_in(inner, op)?;

            // A page in front counts the ranks that dropped the buffer.
            let data = aligned(inner.cursor + PAGE as u64, bytes);
            let (offset, total) = (data - PAGE as u64, PAGE + stride * copies);
            let mapping = seat.arena.map(offset, total)?;
            inner.allocs += 1;
            inner.cursor = offset + total as u64;
            let (base, mine) = (mapping.at(PAGE), mapping.at(PAGE + if copies > 1 { stride * hub.me } else { 0 }));
            let (start, base) = (mine as usize, base as usize);
            seat.hold(Held { start, bytes, usage, group: self.id, index, base, stride });
            let counted = usage.counted(bytes, hub.size());
            let owner = Owner {
                seat: seat.clone(),
                mapping,
                offset,
                bytes: total,
                ranks: hub.size(),
                group: self.id,
                index,
                _lease: seat.meter.lease(category, counted),
            };
            let ptr = NonNull::new(mine).ok_or_else(|| Error::op("alloc", "null page"))?;
            // SAFETY: page-aligned, `bytes` of the mapping that `owner` holds; other ranks' accesses follow the protocol.
            Ok(unsafe { Buf::from_raw(ptr, dtype, len, Arc::new(owner)) })
        })
    }

    fn all_gather(&self, tag: Tag, shard: View, mut full: ViewMut) -> Result<Ticket> {
        let kind = Kind::AllGather;
        self.check_dtypes(kind, tag, shard.dtype(), full.dtype())?;
        self.check_lens(kind, tag, shard.len(), full.len())?;
        let (place, _) = self.place(kind, tag, full.as_mut_ptr(), full.bytes(), CommUse::Gathered)?;
        let mut op = Op::new(kind, tag, shard.dtype(), shard.len(), Step::Mail);
        op.desc.place = place;
        (op.src, op.dst, op.keep) = (shard.as_ptr(), full.as_mut_ptr(), [Some(shard.keep()), Some(full.keep())]);
        if self.direct(place) {
            op.step = Step::Write;
            op.released = place == Desc::STAGED;
            op.dst = op.dst.wrapping_add(self.hub.me * shard.bytes());
        }
        self.start(op, shard.bytes() * (self.size() - 1))
    }

    fn reduce_scatter(&self, tag: Tag, mut full: ViewMut, mut shard: ViewMut, accumulate: bool) -> Result<Ticket> {
        let kind = Kind::ReduceScatter;
        self.check_dtypes(kind, tag, full.dtype(), shard.dtype())?;
        self.check_lens(kind, tag, shard.len(), full.len())?;
        if full.dtype() != DType::F32 {
            return Err(self.refuse(kind, tag, format!("reduces f32, got {}", full.dtype())));
        }
        self.place(kind, tag, shard.as_mut_ptr(), shard.bytes(), CommUse::Reduced)?;
        let (place, sources) = self.place(kind, tag, full.as_mut_ptr(), full.bytes(), CommUse::Reduced)?;
        let mut op = Op::new(kind, tag, DType::F32, shard.len(), Step::Mail);
        op.desc.place = place;
        op.accumulate = accumulate;
        (op.src, op.dst, op.keep) = (full.as_mut_ptr(), shard.as_mut_ptr(), [Some(full.keep()), Some(shard.keep())]);
        if self.direct(place) {
            op.step = Step::Reduce;
            op.sources = sources.offset(self.hub.me * shard.bytes());
        }
        self.start(op, shard.bytes() * (self.size() - 1))
    }

    fn all_reduce(&self, tag: Tag, mut buf: ViewMut, reduce: Reduce) -> Result<Ticket> {
        let kind = Kind::AllReduce;
        if !matches!(buf.dtype(), DType::F32 | DType::F64) {
            return Err(self.refuse(kind, tag, format!("reduces f32 or f64, got {}", buf.dtype())));
        }
        let (place, sources) = self.place(kind, tag, buf.as_mut_ptr(), buf.bytes(), CommUse::Reduced)?;
        let mut op = Op::new(kind, tag, buf.dtype(), buf.len(), Step::Mail);
        op.desc.place = place;
        op.desc.arg = reduce as u8;
        op.reduce = reduce;
        (op.src, op.dst, op.keep) = (buf.as_mut_ptr(), buf.as_mut_ptr(), [Some(buf.keep()), None]);
        if self.direct(place) {
            op.step = Step::Reduce;
            op.sources = sources;
        }
        self.start(op, 2 * buf.bytes() * (self.size() - 1) / self.size())
    }

    fn broadcast(&self, tag: Tag, mut buf: ViewMut, root: usize) -> Result<Ticket> {
        let kind = Kind::Broadcast;
        self.check_rank(kind, tag, root)?;
        self.place(kind, tag, buf.as_mut_ptr(), buf.bytes(), CommUse::Reduced)?;
        let mut op = Op::new(kind, tag, buf.dtype(), buf.len(), Step::Mail);
        op.desc.to = root as u32;
        (op.src, op.dst, op.keep) = (buf.as_mut_ptr(), buf.as_mut_ptr(), [Some(buf.keep()), None]);
        if self.size() == 1 {
            op.step = Step::Meet;
        }
        self.start(op, if root == self.rank() { 0 } else { buf.bytes() })
    }

    fn send_recv(&self, tag: Tag, to: usize, send: View, from: usize, mut recv: ViewMut) -> Result<Ticket> {
        let kind = Kind::SendRecv;
        self.check_rank(kind, tag, to)?;
        self.check_rank(kind, tag, from)?;
        self.check_dtypes(kind, tag, send.dtype(), recv.dtype())?;
        if to == self.rank() && from == to && send.len() != recv.len() {
            return Err(self.refuse(kind, tag, format!("{} elements into {}", send.len(), recv.len())));
        }
        self.place(kind, tag, recv.as_mut_ptr(), recv.bytes(), CommUse::Reduced)?;
        let mut op = Op::new(kind, tag, send.dtype(), send.len(), Step::Mail);
        (op.desc.to, op.desc.from, op.desc.recv_len) = (to as u32, from as u32, recv.len() as u64);
        (op.src, op.dst, op.keep) = (send.as_ptr(), recv.as_mut_ptr(), [Some(send.keep()), Some(recv.keep())]);
        self.start(op, if from == self.rank() { 0 } else { recv.bytes() })
    }

    fn barrier(&self, tag: Tag) -> Result<()> {
        let ticket = self.start(Op::new(Kind::Barrier, tag, DType::U8, 0, Step::Meet), 0)?;
        self.wait(ticket)
    }

    fn wait(&self, ticket: Ticket) -> Result<()> {
        self.wait_until(ticket, Until::Complete)
    }
    fn wait_sent(&self, ticket: Ticket) -> Result<()> {
        self.wait_until(ticket, Until::Sent)
    }
    fn release(&self, ticket: Ticket) -> Result<()> {
        self.call(|inner| {
            let seq = self.seq(inner, "release", ticket)?;
            let op = &mut inner.ring[(seq % RING) as usize];
            if op.seq == seq && !op.released {
                op.released = true;
                if op.step == Step::Held {
                    op.retire(&self.hub);
                    self.hub.ring();
                }
            }
            self.progress(inner)
        })
    }
    fn stats(&self) -> CommStats {
        let inner = lock(&self.inner);
        let open = if inner.in_flight > 0 { inner.since.elapsed().as_secs_f64() } else { 0.0 };
        CommStats { in_flight_s: inner.stats.in_flight_s + open, ..inner.stats }
    }
}
