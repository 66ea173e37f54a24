//! A group of ranks over shared memory: checks, starts, waits. Never lets a rank sleep while it can make progress for
//! the others.
//!
//! [Note: progress] There is no communication thread: a rank's cores belong to its compute. Steps that are not possible
//! when an operation starts (a peer has not released the buffer, peers' gradients are not complete) are done by this
//! rank's next call into the group. A blocked rank makes progress on everything pending, in this and its other groups,
//! until what it waits for has happened. So waits can come in any order.
use super::arena::{PAGE, REGION};
use super::buffer::{BufferRequest, ShmBuffer};
use super::hub::Hub;
use super::op::{OpStep, ShmOp};
use super::record::{Desc, Lanes, Phase, RING};
use super::seat::{Seat, lock};
use crate::base::timeline::Mark;
use crate::base::{Category, DType, Error, Result};
use crate::comm::seam::Seam;
use crate::comm::{Axis, CommStats, CommUse, Tag, Ticket, Times, Waiting};
use crate::device::{Buf, cpu::simd::Level};
use std::sync::{Arc, Mutex, Weak};
use std::time::{Duration, Instant};

/// Gathered contents that this rank has not released.
struct ShmGathered {
    seq: u64,
    tag: Tag,
    buffer: Arc<ShmBuffer>,
    content: u64,
}

pub(super) struct Inner {
    next: u64,
    /// Slot `seq % RING`, as in the arena.
    ring: Box<[ShmOp]>,
    /// Operations with steps left, oldest first.
    active: Vec<u64>,
    contents: Vec<ShmGathered>,
    last_staged: Option<u64>,
    /// Number of allocations, and the arena offset of the next one.
    allocs: u64,
    cursor: u64,
    /// Operations that have started but not completed, and since when there is one.
    in_flight: usize,
    since: Instant,
    stats: CommStats,
    /// The failure that ended this group's work: (operation, tag, message).
    failed: Option<(&'static str, Tag, String)>,
}

pub struct ShmGroup {
    pub(super) hub: Hub,
    inner: Mutex<Inner>,
    all: Arc<RankGroups>,
}

/// The groups of one rank, which make progress together.
#[derive(Default)]
pub(super) struct RankGroups(Mutex<Vec<Weak<ShmGroup>>>);

impl RankGroups {
    /// Makes progress in all groups except the blocked one: a peer that this rank waits for may be waiting for those.
    pub fn progress(&self, blocked: Option<&ShmGroup>) {
        // Two threads of one rank may block in two groups at once; the second leaves the work to the first.
        let Ok(groups) = self.0.try_lock() else { return };
        for group in groups.iter().filter_map(Weak::upgrade) {
            if blocked.is_none_or(|blocked| !std::ptr::eq(&*group, blocked)) {
                group.try_progress();
            }
        }
    }
}

/// What a blocked rank waits for.
#[derive(Clone, Copy)]
pub(super) enum Until<'a> {
    /// The slot for this operation is free.
    Room(u64),
    Complete(u64),
    Sent(u64),
    /// The ranks have released all contents of the buffer before this one.
    Vacant(&'a ShmBuffer, u64),
}

const TICKET_SEQ: u32 = 48;
const HOLDS: &str = "still holds the gathered buffer: ";
/// With several hosts, the rank this one waits for may itself be waiting for another host. That rank should give up
/// first, because it can name who is missing.
const GRACE: Duration = Duration::from_secs(2);
/// How often a thread that waits on behalf of its rank checks whether the rank is waiting too, and vice versa.
pub(super) const POLL_INTERVAL: Duration = Duration::from_millis(50);

impl ShmGroup {
    /// `ranks` are seats in group order, including this rank's. `waiting`: set if a thread uses the group for its rank.
    pub(super) fn new(
        seat: Arc<Seat>,
        all: Arc<RankGroups>,
        axis: Axis,
        ranks: Vec<usize>,
        waiting: Option<Arc<Waiting>>,
    ) -> Result<Arc<ShmGroup>> {
        let region = seat.arena.region(axis as usize, ranks.first().copied().unwrap_or(0));
        let me = ranks.iter().position(|&r| r == seat.rank);
        let me = me.ok_or_else(|| Error::op("group", format!("rank {} is not in {ranks:?}", seat.rank)))?;
        let bytes = Lanes::bytes(ranks.len());
        let lanes = Lanes::new(seat.arena.map(region, bytes)?, ranks.len());
        let inner = Inner {
            next: 0,
            ring: (0..RING).map(|_| ShmOp::none()).collect(),
            active: Vec::with_capacity(RING as usize),
            contents: Vec::with_capacity(256),
            last_staged: None,
            allocs: 0,
            cursor: region + bytes.next_multiple_of(PAGE) as u64,
            in_flight: 0,
            since: Instant::now(),
            stats: CommStats::default(),
            failed: None,
        };
        let hub = Hub { lanes, ranks, me, axis, id: region / REGION, level: Level::best(), seat, waiting };
        let group = Arc::new(ShmGroup { hub, inner: Mutex::new(inner), all });
        lock(&group.all.0).push(Arc::downgrade(&group));
        Ok(group)
    }

    /// Takes possible steps, and rings the peers if anything changed.
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
    /// Checks every pending operation once. Returns whether any made progress.
    fn sweep(&self, inner: &mut Inner) -> Result<bool> {
        let Inner { ring, active, in_flight, since, stats, failed, .. } = inner;
        let (mut moved, mut mailbox_taken, mut i) = (false, false, 0);
        while let Some(&seq) = active.get(i) {
            let op = &mut ring[(seq % RING) as usize];
            if op.is_staged() && mailbox_taken {
                i += 1;
                continue;
            }
            let complete = op.complete;
            match op.advance(&self.hub) {
                Ok(m) => moved |= m,
                Err(e) => {
                    if let Error::Comm { what, .. } = &e {
                        *failed = Some((op.kind.name(), op.tag, what.clone()));
                    }
                    return Err(e);
                }
            }
            mailbox_taken |= op.is_staged();
            if op.complete && !complete {
                let now = Instant::now();
                op.over = Some(now);
                *in_flight -= 1;
                if *in_flight == 0 {
                    stats.in_flight_s += (now - *since).as_secs_f64();
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
    /// Called when this rank blocks in another group. Errors are stored for the next user of this group.
    fn try_progress(&self) {
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

    /// Makes progress until the condition holds.
    pub(super) fn until(&self, inner: &mut Inner, until: Until, op: &'static str, tag: Tag) -> Result<()> {
        let seat = &self.hub.seat;
        let mut blocked = None;
        loop {
            let heard = seat.bell_count();
            self.check_alive(inner, op, tag)?;
            self.progress(inner)?;
            if self.is_so(inner, until) {
                return Ok(());
            }
            self.all.progress(Some(self));
            let timeout = seat.timeout.get();
            let left = match &self.hub.waiting {
                Some(waiting) => {
                    if waiting.is_late(timeout + GRACE) {
                        Duration::ZERO
                    } else {
                        POLL_INTERVAL
                    }
                }
                None => timeout.saturating_sub(blocked.get_or_insert_with(Instant::now).elapsed()),
            };
            if left.is_zero() {
                return Err(self.timed_out(inner, until, op, tag));
            }
            seat.listen(heard, left);
        }
    }
    fn is_so(&self, inner: &Inner, until: Until) -> bool {
        match until {
            Until::Room(seq) => {
                seq < RING
                    || inner.ring[(seq % RING) as usize].step == OpStep::Retired
                        && self.hub.all_reached(seq - RING, Phase::Retired)
            }
            Until::Complete(seq) => self.op(inner, seq).is_none_or(|op| op.complete),
            Until::Sent(seq) => self.op(inner, seq).is_none_or(|op| match op.kind {
                Seam::ReduceScatter | Seam::AllToAll => {
                    op.step == OpStep::Retired || op.desc.place == Desc::STAGED && op.complete
                }
                Seam::SendRecv if op.desc.place != Desc::STAGED && op.desc.to != Desc::NOBODY => {
                    op.complete && self.hub.reached(op.desc.to as usize, seq, Phase::Done)
                }
                _ => op.complete,
            }),
            Until::Vacant(buffer, content) => self.hub.vacant(buffer, content),
        }
    }
    /// The operation, or None if its slot was reused: then it was retired.
    fn op<'a>(&self, inner: &'a Inner, seq: u64) -> Option<&'a ShmOp> {
        Some(&inner.ring[(seq % RING) as usize]).filter(|op| op.seq == seq)
    }

    fn timed_out(&self, inner: &mut Inner, until: Until, op: &'static str, tag: Tag) -> Error {
        let hub = &self.hub;
        let peers = |lacks: &dyn Fn(usize) -> bool| -> Vec<usize> {
            (0..hub.size()).filter(|&r| r != hub.me && lacks(r)).collect()
        };
        let (missing, what) = match until {
            Until::Room(seq) => {
                let earlier = peers(&|r| !hub.reached(r, seq - RING, Phase::Retired));
                (earlier, "has not finished an earlier operation: ")
            }
            Until::Complete(seq) | Until::Sent(seq) => match self.op(inner, seq) {
                Some(ShmOp { step: OpStep::Write, into: Some((buffer, content)), .. }) => {
                    (peers(&|r| !buffer.free_of(r, *content)), HOLDS)
                }
                Some(op) => (peers(&|r| !hub.reached(r, seq, op.awaited())), ""),
                None => (vec![], ""),
            },
            Until::Vacant(buffer, content) => (peers(&|r| !buffer.free_of(r, content)), HOLDS),
        };
        let names: Vec<String> = missing.iter().map(|&r| hub.name(r).to_string()).collect();
        let details: Vec<String> =
            missing.iter().map(|&r| format!("rank {}: {what}{}", hub.name(r), hub.lanes.last(r))).collect();
        let text = format!(
            "no answer within {:?} from rank{} {} ({})",
            hub.seat.timeout.get(),
            if names.len() == 1 { "" } else { "s" },
            names.join(", "),
            details.join("; ")
        );
        inner.failed = Some((op, tag, text.clone()));
        hub.error(op, tag, text)
    }

    /// Runs `f` and counts its time as exposed.
    pub(super) fn call<T>(&self, f: impl FnOnce(&mut Inner) -> Result<T>) -> Result<T> {
        let start = Instant::now();
        let mut inner = lock(&self.inner);
        let result = f(&mut inner);
        inner.stats.exposed_s += start.elapsed().as_secs_f64();
        result
    }

    /// `bytes`: received from peers, as the algorithm counts them.
    pub(super) fn start(&self, op: ShmOp, bytes: usize) -> Result<Ticket> {
        self.start_with(op, bytes, |_| {})
    }
    /// `publish` writes what belongs to the operation's slot, before its record.
    pub(super) fn start_with(&self, op: ShmOp, bytes: usize, publish: impl FnOnce(u64)) -> Result<Ticket> {
        self.call(|inner| {
            inner.stats.bytes += bytes as u64;
            inner.stats.ops += 1;
            let seq = inner.next;
            self.until(inner, Until::Room(seq), op.kind.name(), op.tag)?;
            publish(seq);
            self.start_in(inner, op)
        })
    }
    fn start_in(&self, inner: &mut Inner, mut op: ShmOp) -> Result<Ticket> {
        let (name, tag) = (op.kind.name(), op.tag);
        self.check_alive(inner, name, tag)?;
        let seq = inner.next;
        self.until(inner, Until::Room(seq), name, tag)?;
        op.seq = seq;
        if op.is_staged() {
            op.before = inner.last_staged.replace(seq);
        }
        if let Some((buffer, content)) = &mut op.into {
            if let Some(held) = inner.contents.iter().find(|c| Arc::ptr_eq(&c.buffer, buffer)) {
                let what = format!("this rank has not released the buffer's previous contents ({})", held.tag);
                return Err(self.hub.error(name, tag, what));
            }
            *content = buffer.begin();
            inner.contents.push(ShmGathered { seq, tag, buffer: buffer.clone(), content: *content });
        }
        let phase = if matches!(op.step, OpStep::Reduce | OpStep::Meet) { Phase::Ready } else { Phase::Posted };
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
        Ok(Ticket(self.hub.id << TICKET_SEQ | seq))
    }

    fn seq(&self, inner: &Inner, op: &'static str, ticket: Ticket) -> Result<u64> {
        let (group, seq) = (ticket.0 >> TICKET_SEQ, ticket.0 & ((1 << TICKET_SEQ) - 1));
        if group != self.hub.id || seq >= inner.next {
            return Err(self.hub.error(op, Tag::new("ticket", ticket.0 as usize), "is not from this group".into()));
        }
        Ok(seq)
    }
    fn tag(&self, inner: &Inner, seq: u64) -> (&'static str, Tag) {
        self.op(inner, seq).map_or(("wait", Tag::new("operation", seq as usize)), |op| (op.kind.name(), op.tag))
    }
    pub(super) fn wait_until(&self, ticket: Ticket, until: fn(u64) -> Until<'static>) -> Result<()> {
        self.call(|inner| {
            let seq = self.seq(inner, "wait", ticket)?;
            let (op, tag) = self.tag(inner, seq);
            self.until(inner, until(seq), op, tag)
        })
    }

    pub(super) fn release_in(&self, inner: &mut Inner, ticket: Ticket) -> Result<()> {
        let seq = self.seq(inner, "release", ticket)?;
        // Not found: already released, or gathered through mailboxes.
        let Some(at) = inner.contents.iter().position(|c| c.seq == seq) else { return Ok(()) };
        let held = inner.contents.swap_remove(at);
        let op = &mut inner.ring[(seq % RING) as usize];
        if op.seq == seq && !op.complete {
            op.released = true;
        } else {
            held.buffer.release(held.content);
            self.hub.ring();
        }
        self.progress(inner)
    }
    /// Does not wait for the peers; a later call detects allocations that differ.
    pub(super) fn alloc_in(
        &self,
        inner: &mut Inner,
        dtype: DType,
        len: usize,
        usage: CommUse,
        category: Category,
    ) -> Result<Buf> {
        let (hub, index) = (&self.hub, inner.allocs);
        let mut op = ShmOp::new(Seam::Alloc, Tag::new("buffer", index as usize), dtype, len, OpStep::Meet);
        op.desc.arg = usage as u8;
        let _ = self.start_in(inner, op)?;
        inner.allocs += 1;
        let request =
            BufferRequest { dtype, len, usage, category, ranks: hub.size(), me: hub.me, group: hub.id, index };
        hub.seat.alloc(&mut inner.cursor, request)
    }
    /// Progress happens in this rank's calls, so an operation that peers complete during compute counts as finished at
    /// the next call.
    pub(super) fn times_of(&self, ticket: Ticket) -> Times {
        let inner = lock(&self.inner);
        let over = self.seq(&inner, "times", ticket).ok().and_then(|seq| self.op(&inner, seq)?.over);
        Times { over: over.map(Mark::At), ..Times::default() }
    }
    pub(super) fn stats_now(&self) -> CommStats {
        let inner = lock(&self.inner);
        let open = if inner.in_flight > 0 { inner.since.elapsed().as_secs_f64() } else { 0.0 };
        CommStats { in_flight_s: inner.stats.in_flight_s + open, ..inner.stats }
    }
}
