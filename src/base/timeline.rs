//! Spans of time recorded while a run is profiled. Recording never allocates, never waits for a GPU before the spans
//! are drained, and costs one branch when disabled.
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

/// A point in time: a host timestamp, or the moment a stream reaches an event of its device.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Mark {
    At(Instant),
    /// The event's number, counted from 0 by its device.
    Event(u64),
}
impl Mark {
    pub fn now() -> Mark {
        Mark::At(Instant::now())
    }
}

/// What a span measures: its row in the trace.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum Lane {
    /// A whole step, from the end of the previous step to its own end.
    Steps,
    /// Forward and backward per layer, and the loss.
    Compute,
    /// A store call: its own work (zeroing, casting) and the calls it makes.
    Store,
    Gathers,
    Scatters,
    AllReduces,
    Sends,
    /// Broadcasts, barriers.
    Others,
    /// The gradient norm and the update.
    Optimizer,
    Data,
    Checkpoint,
}

impl Lane {
    pub const ALL: [Lane; 11] = [
        Lane::Steps,
        Lane::Compute,
        Lane::Store,
        Lane::Gathers,
        Lane::Scatters,
        Lane::AllReduces,
        Lane::Sends,
        Lane::Others,
        Lane::Optimizer,
        Lane::Data,
        Lane::Checkpoint,
    ];
    pub fn name(self) -> &'static str {
        match self {
            Lane::Steps => "steps",
            Lane::Compute => "compute",
            Lane::Store => "store",
            Lane::Gathers => "gathers",
            Lane::Scatters => "scatters",
            Lane::AllReduces => "all-reduces",
            Lane::Sends => "sends",
            Lane::Others => "other collectives",
            Lane::Optimizer => "optimizer",
            Lane::Data => "data",
            Lane::Checkpoint => "checkpoint",
        }
    }
    /// Whether the lane's spans are collectives in flight.
    pub fn is_communication(self) -> bool {
        matches!(self, Lane::Gathers | Lane::Scatters | Lane::AllReduces | Lane::Sends | Lane::Others)
    }
}

/// The collective that a span represents or is a call for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Flow {
    /// Counts from 1 over all groups of the rank.
    pub id: u64,
    pub axis: &'static str,
    /// Bytes of the collective, as its lane counts them.
    pub bytes: usize,
    /// Set on a compute-stream span: which call this is.
    pub call: Option<&'static str>,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Span {
    /// With a [`Flow::call`]: the lane of the collective that stalled the compute stream.
    pub lane: Lane,
    pub what: &'static str,
    /// A layer, unit or step number, depending on the lane.
    pub number: Option<u64>,
    pub start: Mark,
    pub end: Mark,
    pub flow: Option<Flow>,
}

struct TimelineInner {
    on: AtomicBool,
    flows: AtomicU64,
    ring: Mutex<Ring>,
}
struct Ring {
    spans: Vec<Span>,
    /// Spans dropped because the ring was full.
    lost: u64,
}

/// The timeline of one rank. Clones share it; the default one records nothing.
#[derive(Clone, Default)]
pub struct Timeline(Option<Arc<TimelineInner>>);

impl Timeline {
    /// Allocates room for `spans` spans between drains. Starts disabled.
    pub fn with_room(spans: usize) -> Timeline {
        let ring = Mutex::new(Ring { spans: Vec::with_capacity(spans), lost: 0 });
        Timeline(Some(Arc::new(TimelineInner { on: AtomicBool::new(false), flows: AtomicU64::new(0), ring })))
    }
    pub fn is_on(&self) -> bool {
        self.0.as_ref().is_some_and(|shared| shared.on.load(Relaxed))
    }
    pub fn switch(&self, on: bool) {
        if let Some(shared) = &self.0 {
            shared.on.store(on, Relaxed);
        }
    }
    /// The next operation number of a [`Flow`].
    pub fn flow(&self) -> u64 {
        self.0.as_ref().map_or(0, |shared| shared.flows.fetch_add(1, Relaxed) + 1)
    }
    pub fn record(&self, span: Span) {
        let Some(shared) = self.0.as_ref().filter(|shared| shared.on.load(Relaxed)) else { return };
        let mut ring = lock(&shared.ring);
        match ring.spans.len() < ring.spans.capacity() {
            true => ring.spans.push(span),
            false => ring.lost += 1,
        }
    }
    /// Runs `f` and records its time by the host's clock.
    pub fn host<T>(&self, lane: Lane, what: &'static str, number: Option<u64>, f: impl FnOnce() -> T) -> T {
        if !self.is_on() {
            return f();
        }
        let start = Mark::now();
        let result = f();
        self.record(Span { lane, what, number, start, end: Mark::now(), flow: None });
        result
    }
    /// Appends the recorded spans to `into` and returns how many were dropped.
    pub fn drain(&self, into: &mut Vec<Span>) -> u64 {
        let Some(shared) = &self.0 else { return 0 };
        let mut ring = lock(&shared.ring);
        into.extend_from_slice(&ring.spans);
        ring.spans.clear();
        std::mem::take(&mut ring.lost)
    }
}

fn lock<T>(m: &Mutex<T>) -> MutexGuard<'_, T> {
    m.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn spans(timeline: &Timeline) -> (Vec<&'static str>, u64) {
        let mut spans = vec![];
        let lost = timeline.drain(&mut spans);
        (spans.iter().map(|s| s.what).collect(), lost)
    }

    #[test]
    fn what_is_recorded_while_it_is_on_is_drained_once() {
        let timeline = Timeline::with_room(2);
        let clone = timeline.clone();
        assert_eq!(timeline.host(Lane::Data, "before", None, || 1), 1);
        timeline.switch(true);
        clone.host(Lane::Data, "a", None, || ());
        timeline.host(Lane::Data, "b", Some(3), || ());
        timeline.host(Lane::Data, "too many", None, || ());
        assert_eq!(spans(&clone), (vec!["a", "b"], 1));
        assert_eq!(spans(&timeline), (vec![], 0));
        timeline.switch(false);
        timeline.host(Lane::Data, "after", None, || ());
        assert_eq!(spans(&timeline), (vec![], 0));
        let none = Timeline::default();
        none.switch(true);
        assert!(!none.is_on());
    }
}
