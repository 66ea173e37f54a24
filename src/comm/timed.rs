//! Groups that record their operations on a timeline: when each was in flight, and how long it stalled the compute
//! stream. Never changes what a call does, and never allocates while recording.
//!
//! An operation counts as in flight from the start of its call until its group notices its completion. In shared memory
//! that is a later call of this rank, since nothing makes progress in between ([Note: progress] in `shm::group`). So
//! the in-flight time is an upper bound there; the time in calls is exact.
use super::seam::{Hook, Hooked, Seam, Started};
use super::{Collective, Mesh, Tag, Ticket, Times};
use crate::base::timeline::{Flow, Lane, Mark, Span, Timeline};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Operations per group whose calls are matched: more than are ever in flight.
const KEPT: usize = 256;

/// Records every group of the mesh on `timeline`.
pub fn watch(mesh: Mesh, timeline: &Timeline) -> Mesh {
    mesh.wrap(|group| {
        let state = TimedState { entered: Mark::now(), ops: Vec::with_capacity(KEPT), next: 0 };
        let hook = Timing { group: group.clone(), timeline: timeline.clone(), state: Mutex::new(state) };
        Arc::new(Hooked::with(group, hook)) as Arc<dyn Collective>
    })
}

struct Timing {
    group: Arc<dyn Collective>,
    timeline: Timeline,
    state: Mutex<TimedState>,
}

struct TimedState {
    /// When the current call began. Only one thread at a time calls a group.
    entered: Mark,
    /// A ring; `next` is the next position.
    ops: Vec<TimedOp>,
    next: usize,
}

#[derive(Clone, Copy)]
struct TimedOp {
    ticket: Ticket,
    lane: Lane,
    tag: Tag,
    flow: Flow,
    start: Mark,
    /// It has finished and is on the timeline.
    recorded: bool,
}

fn lane(seam: Seam) -> Option<Lane> {
    match seam {
        Seam::AllGather => Some(Lane::Gathers),
        Seam::ReduceScatter => Some(Lane::Scatters),
        Seam::AllReduce => Some(Lane::AllReduces),
        Seam::SendRecv | Seam::AllToAll => Some(Lane::Sends),
        Seam::Broadcast | Seam::Barrier => Some(Lane::Others),
        Seam::Alloc | Seam::Wait | Seam::Release | Seam::WaitSent => None,
    }
}

impl Timing {
    fn lock(&self) -> MutexGuard<'_, TimedState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
    fn enter(&self) {
        if self.timeline.is_on() {
            self.lock().entered = Mark::now();
        }
    }
    fn span(&self, op: &TimedOp, call: Option<&'static str>, start: Mark, end: Mark) {
        let flow = Some(Flow { call, ..op.flow });
        let (lane, what, number) = (op.lane, op.tag.what, Some(op.tag.unit as u64));
        self.timeline.record(Span { lane, what, number, start, end, flow });
    }
    /// Compute-stream time in a call of `op`: the host's time in it where calls do the work; where work is enqueued,
    /// the time the stream stalled.
    fn held(&self, op: &TimedOp, call: &'static str, host: (Mark, Mark), times: &Times) {
        match (times.begun, times.stood) {
            (None, _) => self.span(op, Some(call), host.0, host.1),
            (Some(_), Some((from, to))) if call == Seam::Wait.name() => self.span(op, Some(call), from, to),
            (Some(_), _) => {}
        }
    }
}

impl Hook for Timing {
    fn before(&self, _: Seam, _: Started) {
        self.enter();
    }
    fn after(&self, seam: Seam, started: Started, ticket: Option<Ticket>) {
        let (true, Some(lane)) = (self.timeline.is_on(), lane(seam)) else { return };
        let end = Mark::now();
        let mut state = self.lock();
        let start = state.entered;
        let axis = self.group.axis().name();
        let flow = Flow { id: self.timeline.flow(), axis, bytes: started.bytes, call: None };
        // A barrier has no ticket: it has already finished.
        let mut op = TimedOp {
            ticket: ticket.unwrap_or(Ticket(u64::MAX)),
            lane,
            tag: started.tag,
            flow,
            start,
            recorded: false,
        };
        let times = ticket.map(|ticket| self.group.times(ticket)).unwrap_or_default();
        self.held(&op, seam.name(), (start, end), &times);
        if ticket.is_none() {
            op.recorded = true;
            self.span(&op, None, start, end);
        }
        let place = state.next;
        match state.ops.len() == KEPT {
            true => state.ops[place] = op,
            false => state.ops.push(op),
        }
        state.next = (place + 1) % KEPT;
    }
    fn before_wait(&self, _: Seam, _: Ticket) {
        self.enter();
    }
    fn after_wait(&self, seam: Seam, ticket: Ticket) {
        if !self.timeline.is_on() {
            return;
        }
        let end = Mark::now();
        let mut state = self.lock();
        let start = state.entered;
        // Unknown if it started before profiling did.
        let Some(op) = state.ops.iter_mut().rev().find(|op| op.ticket == ticket) else { return };
        let times = self.group.times(ticket);
        self.held(op, seam.name(), (start, end), &times);
        // The input may be reusable before all data has arrived.
        let landed = if seam == Seam::Wait { Some(times.over.unwrap_or(end)) } else { times.over };
        if let Some(over) = landed.filter(|_| !op.recorded) {
            op.recorded = true;
            self.span(op, None, times.begun.unwrap_or(op.start), over);
        }
    }
}
