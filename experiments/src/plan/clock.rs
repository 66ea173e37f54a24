//! The streams of one rank in simulated time: the host that enqueues, the compute stream, and one stream per group of
//! ranks. Events are the engine's own calls in their order, so the schedule is that of the real stores. Never decides
//! what happens next.
//!
//! All ranks of a group are alike (same calls, same sizes), so one rank's streams stand for all, and the other ranks
//! only determine the duration of a collective. Hence simulating a step of 16,384 ranks costs the same as a step of
//! one.
//!
//! [Note: streams] The rules are those of `comm`: a collective starts after all compute enqueued before it, and after
//! the earlier collectives of its group; a wait blocks compute until the collective ends. This blocked time is the
//! exposed communication. If ranks communicate on the computing thread (CPU), a call takes its time immediately, and
//! all of it is exposed.
use std::sync::{Mutex, MutexGuard, PoisonError};

/// Seconds since the clock was last reset.
pub type Seconds = f64;

/// The stream of an event.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum SimStream {
    Compute,
    /// Shared by groups with the same ranks.
    Group(usize),
}

#[derive(Clone, PartialEq, Debug)]
pub struct SimEvent {
    pub stream: SimStream,
    pub name: &'static str,
    /// The unit, for a collective.
    pub unit: Option<usize>,
    pub begin: Seconds,
    pub seconds: Seconds,
}

/// Totals since the last reset.
#[derive(Clone, Copy, Default, PartialEq, Debug)]
pub struct Totals {
    /// Until both the host and the compute stream are done.
    pub seconds: Seconds,
    /// Busy time of the compute stream.
    pub compute: Seconds,
    /// Part of `compute` in operations that only move memory.
    pub memory: Seconds,
    /// Busy time of the communication streams.
    pub communication: Seconds,
    /// Time the compute stream was blocked by them.
    pub exposed: Seconds,
    pub flops: u64,
    pub launches: u64,
    pub collectives: u64,
}

#[derive(Default)]
struct ClockState {
    host: Seconds,
    compute: Seconds,
    groups: Vec<Seconds>,
    resets: u64,
    totals: Totals,
    /// Recorded on request.
    events: Option<Vec<SimEvent>>,
}

#[derive(Default)]
pub struct Clock(Mutex<ClockState>);

impl Clock {
    pub fn new(keep_events: bool) -> Clock {
        Clock(Mutex::new(ClockState { events: keep_events.then(Vec::new), ..ClockState::default() }))
    }
    fn state(&self) -> MutexGuard<'_, ClockState> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
    /// A new stream for a group.
    pub fn group(&self) -> SimStream {
        let mut s = self.state();
        s.groups.push(0.0);
        SimStream::Group(s.groups.len() - 1)
    }
    /// The host takes `launch` to enqueue an operation that takes `seconds`.
    pub fn compute(&self, name: &'static str, launch: Seconds, seconds: Seconds, flops: u64) {
        let mut s = self.state();
        s.host += launch;
        let begin = s.host.max(s.compute);
        s.compute = begin + seconds;
        s.totals.compute += seconds;
        s.totals.flops += flops;
        s.totals.launches += 1;
        if flops == 0 {
            s.totals.memory += seconds;
        }
        s.note(SimEvent { stream: SimStream::Compute, name, unit: None, begin, seconds });
    }
    /// Starts a collective; returns its end time.
    pub fn start(&self, stream: SimStream, name: (&'static str, usize), launch: Seconds, seconds: Seconds) -> Seconds {
        let mut s = self.state();
        s.host += launch;
        let after = s.host.max(s.compute);
        let begin = match stream {
            SimStream::Compute => after,
            SimStream::Group(i) => after.max(s.groups[i]),
        };
        let end = begin + seconds;
        match stream {
            SimStream::Compute => {
                s.compute = end;
                s.totals.exposed += seconds;
            }
            SimStream::Group(i) => s.groups[i] = end,
        }
        s.totals.communication += seconds;
        s.totals.collectives += 1;
        s.note(SimEvent { stream, name: name.0, unit: Some(name.1), begin, seconds });
        end
    }
    /// Blocks compute until `end`.
    pub fn wait(&self, end: Seconds) {
        let mut s = self.state();
        let from = s.host.max(s.compute);
        if end > from {
            s.totals.exposed += end - from;
            s.compute = end;
        }
    }
    /// Communication on the computing thread, after its start: fully exposed.
    pub fn stand(&self, name: (&'static str, usize), seconds: Seconds) {
        let mut s = self.state();
        let begin = s.host.max(s.compute);
        s.compute = begin + seconds;
        s.totals.exposed += seconds;
        s.totals.communication += seconds;
        s.note(SimEvent { stream: SimStream::Compute, name: name.0, unit: Some(name.1), begin, seconds });
    }
    /// The host reads a result: it waits for compute.
    pub fn sync(&self) {
        let mut s = self.state();
        s.host = s.host.max(s.compute);
    }
    pub fn totals(&self) -> Totals {
        let s = self.state();
        Totals { seconds: s.host.max(s.compute), ..s.totals }
    }
    /// Waits for everything in flight, and resets the time to 0.
    pub fn reset(&self) {
        let mut s = self.state();
        (s.host, s.compute, s.totals) = (0.0, 0.0, Totals::default());
        s.resets += 1;
        s.groups.fill(0.0);
        if let Some(events) = &mut s.events {
            events.clear();
        }
    }
    /// How often it was reset: what ends before a reset has ended after it.
    pub fn resets(&self) -> u64 {
        self.state().resets
    }
    pub fn events(&self) -> Vec<SimEvent> {
        self.state().events.clone().unwrap_or_default()
    }
}

impl ClockState {
    fn note(&mut self, event: SimEvent) {
        if let Some(events) = &mut self.events {
            events.push(event);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_collective_overlaps_compute_and_is_waited_for() {
        let clock = Clock::new(true);
        let group = clock.group();
        clock.compute("a", 0.0, 2.0, 1);
        let end = clock.start(group, ("gather", 1), 0.0, 3.0);
        clock.compute("b", 0.0, 1.0, 0);
        clock.wait(end);
        clock.compute("c", 0.0, 1.0, 0);
        // a 0-2; gather 2-5, of which b hides 1; c 5-6.
        let t = clock.totals();
        assert_eq!((t.seconds, t.exposed, t.compute, t.communication), (6.0, 2.0, 4.0, 3.0));
        assert_eq!((t.flops, t.memory, t.launches, t.collectives), (1, 2.0, 3, 1));
        let begins: Vec<_> = clock.events().iter().map(|e| (e.name, e.begin)).collect();
        assert_eq!(begins, [("a", 0.0), ("gather", 2.0), ("b", 2.0), ("c", 5.0)]);
        clock.reset();
        assert_eq!((clock.totals(), clock.events().len()), (Totals::default(), 0));
    }

    #[test]
    fn collectives_queue_only_within_their_group() {
        let clock = Clock::new(false);
        let (a, b) = (clock.group(), clock.group());
        let ends = [(a, 2.0), (a, 1.0), (b, 1.0)].map(|(group, s)| clock.start(group, ("x", 0), 0.0, s));
        assert_eq!(ends, [2.0, 3.0, 1.0]);
    }

    #[test]
    fn short_kernels_are_launch_bound_and_reading_a_result_blocks() {
        let clock = Clock::new(false);
        (0..10).for_each(|_| clock.compute("small", 5.0, 1.0, 0));
        assert_eq!(clock.totals().seconds, 51.0);
        clock.sync();
        clock.compute("after", 5.0, 1.0, 0);
        assert_eq!(clock.totals().seconds, 57.0);
    }

    #[test]
    fn communication_on_the_computing_thread_is_fully_exposed() {
        let clock = Clock::new(false);
        let end = clock.start(SimStream::Compute, ("gather", 0), 0.0, 1.0);
        clock.stand(("gather", 0), 0.5);
        clock.wait(end);
        let t = clock.totals();
        assert_eq!((t.seconds, t.exposed, t.communication), (1.5, 1.5, 1.5));
    }
}
