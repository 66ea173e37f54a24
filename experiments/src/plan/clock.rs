//! The streams of one rank, in simulated time: the host that enqueues, the compute stream, and a stream for each group
//! of ranks. Events are the calls that the engine makes, in its order, so the schedule is the stores' own. Never
//! decides what happens next.
//!
//! All ranks of a group are alike (the same calls, the same sizes), so one rank's streams stand for all, and what the
//! others contribute is the length of a collective. With that, a step of 16,384 ranks costs what a step of one does.
//!
//! [Note: streams] As `comm` says: a collective begins after everything that compute was given before it and after the
//! collectives of its own group; a wait makes compute stand until it is over. That stand is the exposed communication.
//! Where ranks communicate in the thread that computes (the CPU), a call takes its time at once, and all of it is
//! exposed.
use std::sync::{Mutex, MutexGuard, PoisonError};

/// Seconds since the clock was last reset.
pub type Seconds = f64;

/// Where an event lies.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum SimStream {
    Compute,
    /// Of the groups whose ranks are the same.
    Group(usize),
}

#[derive(Clone, PartialEq, Debug)]
pub struct SimEvent {
    pub stream: SimStream,
    pub name: &'static str,
    /// Of the unit, where it is a collective's.
    pub unit: Option<usize>,
    pub begin: Seconds,
    pub seconds: Seconds,
}

/// Sums over the time since the last reset.
#[derive(Clone, Copy, Default, PartialEq, Debug)]
pub struct Totals {
    /// Until both the host and the compute stream are done.
    pub seconds: Seconds,
    /// That the compute stream worked.
    pub compute: Seconds,
    /// That operations of memory alone took of it.
    pub memory: Seconds,
    /// That collectives took on their streams.
    pub communication: Seconds,
    /// That the compute stream stood for them.
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
    totals: Totals,
    /// Kept where somebody wants to see them.
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
    /// The host takes `launch` to enqueue what then takes `seconds`.
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
    /// Starts a collective; returns when it is over.
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
    /// Compute goes on when `end` has passed.
    pub fn wait(&self, end: Seconds) {
        let mut s = self.state();
        let from = s.host.max(s.compute);
        if end > from {
            s.totals.exposed += end - from;
            s.compute = end;
        }
    }
    /// Communication in the computing thread, after its start: all of it exposed.
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
    /// Everything that was under way is over: time starts at 0.
    pub fn reset(&self) {
        let mut s = self.state();
        (s.host, s.compute, s.totals) = (0.0, 0.0, Totals::default());
        s.groups.fill(0.0);
        if let Some(events) = &mut s.events {
            events.clear();
        }
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
    fn a_collective_runs_under_compute_and_is_waited_for() {
        let clock = Clock::new(true);
        let group = clock.group();
        clock.compute("a", 0.0, 2.0, 1);
        let end = clock.start(group, ("gather", 1), 0.0, 3.0);
        clock.compute("b", 0.0, 1.0, 0);
        clock.wait(end);
        clock.compute("c", 0.0, 1.0, 0);
        // a 0-2; gather 2-5, of which b covers 1; c 5-6.
        let t = clock.totals();
        assert_eq!((t.seconds, t.exposed, t.compute, t.communication), (6.0, 2.0, 4.0, 3.0));
        assert_eq!((t.flops, t.memory, t.launches, t.collectives), (1, 2.0, 3, 1));
        let begins: Vec<_> = clock.events().iter().map(|e| (e.name, e.begin)).collect();
        assert_eq!(begins, [("a", 0.0), ("gather", 2.0), ("b", 2.0), ("c", 5.0)]);
        clock.reset();
        assert_eq!((clock.totals(), clock.events().len()), (Totals::default(), 0));
    }

    #[test]
    fn collectives_of_a_group_queue_and_those_of_others_do_not() {
        let clock = Clock::new(false);
        let (a, b) = (clock.group(), clock.group());
        let ends = [(a, 2.0), (a, 1.0), (b, 1.0)].map(|(group, s)| clock.start(group, ("x", 0), 0.0, s));
        assert_eq!(ends, [2.0, 3.0, 1.0]);
    }

    #[test]
    fn short_kernels_wait_for_the_host_and_a_result_stops_it() {
        let clock = Clock::new(false);
        (0..10).for_each(|_| clock.compute("small", 5.0, 1.0, 0));
        assert_eq!(clock.totals().seconds, 51.0);
        clock.sync();
        clock.compute("after", 5.0, 1.0, 0);
        assert_eq!(clock.totals().seconds, 57.0);
    }

    #[test]
    fn communication_in_the_computing_thread_is_all_exposed() {
        let clock = Clock::new(false);
        let end = clock.start(SimStream::Compute, ("gather", 0), 0.0, 1.0);
        clock.stand(("gather", 0), 0.5);
        clock.wait(end);
        let t = clock.totals();
        assert_eq!((t.seconds, t.exposed, t.communication), (1.5, 1.5, 1.5));
    }
}
