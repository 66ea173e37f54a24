//! Streams: ordered work, events between them, and the choice of the stream that runs next. Work runs only when
//! somebody waits for it, unless the seed says otherwise.
//!
//! [Note: order] CUDA guarantees the order within a stream and what events add, and nothing more. So work here runs as
//! late as those guarantees allow, with streams in an order drawn from a seed. With seed 0, what was enqueued first
//! runs first. With any other, streams have priorities, as in PCT (Burckhardt et al. 2010): the first stream that can
//! proceed does, until priorities are redrawn, with probability 1/32 per step. So one stream runs far ahead of another,
//! either way. With seeds of 1 modulo 3, some work also runs as soon as it is enqueued; with the setting `eager`, all
//! that can.
use crate::code::CuResult;
use crate::memory::DriverMemory;
use flatshard_ptx::emulate::SplitMix64;
use std::collections::{BTreeMap, VecDeque};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

/// Result of a step of work.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum NodeProgress {
    Done,
    /// It made progress and there is more.
    Moved,
    /// It waits for something else: poll again.
    Waits,
}
/// One launch of a node, polled until it is done.
pub type NodeRun = Box<dyn FnMut(&mut DriverMemory) -> CuResult<NodeProgress> + Send>;
/// What a call enqueues or a graph holds: creates a [`NodeRun`] at each launch.
pub type Node = Arc<dyn Fn() -> NodeRun + Send + Sync>;

pub fn node(launch: impl Fn() -> NodeRun + Send + Sync + 'static) -> Node {
    Arc::new(launch)
}
/// A node that finishes in one step.
pub fn at_once(act: impl Fn(&mut DriverMemory) -> CuResult + Send + Sync + 'static) -> Node {
    let act = Arc::new(act);
    node(move || {
        let act = act.clone();
        Box::new(move |memory| act(memory).map(|()| NodeProgress::Done))
    })
}

/// A point of a stream, whether it has been reached, and when.
#[derive(Default, Debug)]
pub struct StreamMark(OnceLock<Instant>);
impl StreamMark {
    pub fn passed(&self) -> Option<Instant> {
        self.0.get().copied()
    }
    /// `spent`: simulated time so far.
    pub fn pass(&self, spent: Duration) {
        let _ = self.0.set(Instant::now() + spent); // reached once
    }
}

enum Item {
    Run(NodeRun),
    Wait(Arc<StreamMark>),
    Pass(Arc<StreamMark>),
}

pub struct DriverStream {
    /// Each with the number of the call that enqueued it.
    items: VecDeque<(u64, Item)>,
    /// Ordered against the legacy default stream.
    pub blocking: bool,
    pub priority: i32,
    pub capture: Option<u64>,
    rank: usize,
}

impl DriverStream {
    pub fn is_empty(&self) -> bool {
        self.items.is_empty()
    }
}

/// The legacy default stream, and that of each thread.
pub const LEGACY: u64 = 0;
pub const PER_THREAD: u64 = 2;

pub struct Streams {
    all: BTreeMap<u64, DriverStream>,
    calls: u64,
    seed: u64,
    draw: SplitMix64,
}

impl Streams {
    pub fn new(seed: u64) -> Streams {
        let mut streams = Streams { all: BTreeMap::new(), calls: 0, seed, draw: SplitMix64(seed) };
        streams.add(LEGACY, true, 0);
        streams.add(PER_THREAD, true, 0);
        streams
    }
    pub fn add(&mut self, handle: u64, blocking: bool, priority: i32) {
        let rank = self.draw.below(1 << 20);
        self.all.insert(handle, DriverStream { items: VecDeque::new(), blocking, priority, capture: None, rank });
    }
    /// Enqueued work still runs, as CUDA guarantees; the stream is removed when it is empty.
    pub fn remove(&mut self, handle: u64, as_orphan: u64) {
        if let Some(stream) = self.all.remove(&handle).filter(|stream| !stream.is_empty()) {
            self.all.insert(as_orphan, stream);
        }
    }
    pub fn get(&self, handle: u64) -> Option<&DriverStream> {
        self.all.get(&handle)
    }
    pub fn get_mut(&mut self, handle: u64) -> Option<&mut DriverStream> {
        self.all.get_mut(&handle)
    }
    pub fn handles(&self) -> Vec<u64> {
        self.all.keys().copied().collect()
    }
    pub fn idle(&self) -> bool {
        self.all.values().all(|stream| stream.items.is_empty())
    }

    fn push(&mut self, stream: u64, item: Item) {
        self.calls += 1;
        let calls = self.calls;
        if let Some(stream) = self.all.get_mut(&stream) {
            stream.items.push_back((calls, item));
        }
    }
    /// The legacy stream is ordered after everything in blocking streams, and they after it.
    fn implicit(&mut self, stream: u64) {
        let blocking = self.all.get(&stream).is_some_and(|s| s.blocking);
        let others: Vec<u64> = match stream {
            LEGACY => self.all.iter().filter(|(h, s)| **h != LEGACY && s.blocking).map(|(h, _)| *h).collect(),
            _ if blocking => vec![LEGACY],
            _ => vec![],
        };
        for other in others {
            if self.all.get(&other).is_some_and(|s| !s.items.is_empty()) {
                let mark = self.mark(other);
                self.push(stream, Item::Wait(mark));
            }
        }
    }
    pub fn run(&mut self, stream: u64, run: NodeRun) {
        self.implicit(stream);
        self.push(stream, Item::Run(run));
    }
    pub fn wait(&mut self, stream: u64, mark: Arc<StreamMark>) {
        self.push(stream, Item::Wait(mark));
    }
    /// A point after all work enqueued so far.
    pub fn mark(&mut self, stream: u64) -> Arc<StreamMark> {
        let mark = Arc::new(StreamMark::default());
        self.pass(stream, mark.clone());
        mark
    }
    pub fn pass(&mut self, stream: u64, mark: Arc<StreamMark>) {
        self.push(stream, Item::Pass(mark));
    }
    /// Whether to run something now although nobody waits.
    pub fn eager(&mut self) -> bool {
        self.seed % 3 == 1 && self.draw.below(4) == 0
    }
    pub fn draw(&mut self) -> SplitMix64 {
        SplitMix64(if self.seed == 0 { 0 } else { 1 + self.draw.below(1 << 60) as u64 })
    }

    /// Runs one step of one stream: see [Note: order]. Returns Waits if no stream can proceed by itself.
    pub fn step(&mut self, memory: &mut DriverMemory) -> CuResult<NodeProgress> {
        if self.seed != 0 && self.draw.below(32) == 0 {
            for stream in self.all.values_mut() {
                stream.rank = self.draw.below(1 << 20);
            }
        }
        let first = |s: &DriverStream| s.items.front().map(|(call, _)| *call);
        let mut turn: Vec<(u64, u64)> = match self.seed {
            0 => self.all.iter().filter_map(|(h, s)| Some((first(s)?, *h))).collect(),
            _ => self.all.iter().filter(|(_, s)| !s.items.is_empty()).map(|(h, s)| (s.rank as u64, *h)).collect(),
        };
        turn.sort_unstable();
        for (_, handle) in turn {
            let Some(stream) = self.all.get_mut(&handle) else { continue };
            let Some((call, mut item)) = stream.items.pop_front() else { continue };
            let outcome = match &mut item {
                Item::Wait(mark) if mark.passed().is_none() => NodeProgress::Waits,
                Item::Wait(_) => NodeProgress::Done,
                Item::Pass(mark) => {
                    mark.pass(memory.spent());
                    NodeProgress::Done
                }
                Item::Run(run) => run(memory)?,
            };
            if outcome != NodeProgress::Done {
                stream.items.push_front((call, item));
            }
            if outcome != NodeProgress::Waits {
                return Ok(NodeProgress::Moved);
            }
        }
        Ok(if self.idle() { NodeProgress::Done } else { NodeProgress::Waits })
    }
}
