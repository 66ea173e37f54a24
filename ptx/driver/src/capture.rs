//! Stream capture: calls recorded instead of executed, with their dependencies; and the resulting graphs, whose
//! branches run in any order that the edges allow. Never interprets a node.
use crate::code::{Code, CuResult};
use crate::queue::{Node, NodeProgress, NodeRun, StreamMark};
use flatshard_ptx::emulate::SplitMix64;
use std::collections::HashMap;
use std::sync::Arc;
use std::thread::ThreadId;

/// `CUstreamCaptureMode`.
pub const GLOBAL: i32 = 0;
pub const RELAXED: i32 = 2;

#[derive(Clone)]
pub enum CapturedCall {
    Node(Node),
    /// An event that each launch records, or waits for (CU_EVENT_RECORD_EXTERNAL, CU_EVENT_WAIT_EXTERNAL).
    Record(u64),
    Await(u64),
}

#[derive(Clone)]
pub struct Vertex {
    after: Vec<usize>,
    pub step: CapturedCall,
}
pub type CapturedGraph = Arc<Vec<Vertex>>;

/// A graph that can be launched; its launches run one after another.
pub struct Exec {
    pub graph: CapturedGraph,
    pub last: Option<Arc<StreamMark>>,
}

pub struct Capture {
    pub origin: u64,
    pub thread: ThreadId,
    pub mode: i32,
    pub invalid: bool,
    vertices: Vec<Vertex>,
    /// Dependencies of each stream's next call.
    fronts: HashMap<u64, Vec<usize>>,
}

impl Capture {
    pub fn begin(origin: u64, mode: i32) -> Capture {
        let (thread, fronts) = (std::thread::current().id(), HashMap::from([(origin, vec![])]));
        Capture { origin, thread, mode, invalid: false, vertices: vec![], fronts }
    }
    pub fn add(&mut self, stream: u64, step: CapturedCall) -> CuResult {
        if self.invalid {
            return Err(Code::STREAM_CAPTURE_INVALIDATED);
        }
        let front = self.fronts.entry(stream).or_default();
        let after = std::mem::replace(front, vec![self.vertices.len()]);
        self.vertices.push(Vertex { after, step });
        Ok(())
    }
    pub fn front(&self, stream: u64) -> Vec<usize> {
        self.fronts.get(&stream).cloned().unwrap_or_default()
    }
    /// Adds dependencies to a stream, which may be new to the capture.
    pub fn join(&mut self, stream: u64, after: &[usize]) {
        let front = self.fronts.entry(stream).or_default();
        front.extend(after);
        front.sort_unstable();
        front.dedup();
    }
    pub fn streams(&self) -> impl Iterator<Item = u64> {
        self.fronts.keys().copied()
    }
    /// The whole graph, if every forked stream has joined the stream where capture began.
    pub fn end(&self) -> CuResult<CapturedGraph> {
        if self.invalid {
            return Err(Code::STREAM_CAPTURE_INVALIDATED);
        }
        let mut joined = vec![false; self.vertices.len()];
        let mut open = self.front(self.origin);
        while let Some(at) = open.pop() {
            if !std::mem::replace(&mut joined[at], true) {
                open.extend(&self.vertices[at].after);
            }
        }
        match joined.contains(&false) {
            true => Err(Code::STREAM_CAPTURE_UNJOINED),
            false => Ok(Arc::new(self.vertices.clone())),
        }
    }
}

/// One launch: each vertex runs once, after its dependencies. `runs` are the vertices' runs.
pub fn launch(graph: CapturedGraph, runs: Vec<NodeRun>, mut draw: SplitMix64) -> NodeRun {
    let mut runs: Vec<Option<NodeRun>> = runs.into_iter().map(Some).collect();
    let random = draw.0 != 0;
    Box::new(move |memory| {
        let free = |runs: &[Option<NodeRun>], at: usize| graph[at].after.iter().all(|&before| runs[before].is_none());
        let mut ready: Vec<usize> = (0..runs.len()).filter(|&at| runs[at].is_some() && free(&runs, at)).collect();
        if random {
            for at in (1..ready.len()).rev() {
                ready.swap(at, draw.below(at + 1));
            }
        }
        for at in ready {
            let Some(run) = &mut runs[at] else { continue };
            match run(memory)? {
                NodeProgress::Done => runs[at] = None,
                NodeProgress::Moved => {}
                NodeProgress::Waits => continue,
            }
            return Ok(if runs.iter().all(Option::is_none) { NodeProgress::Done } else { NodeProgress::Moved });
        }
        Ok(if runs.is_empty() { NodeProgress::Done } else { NodeProgress::Waits })
    })
}
