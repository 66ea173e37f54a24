//! The driver's whole state behind one lock, and waiting for work. Never dereferences a pointer.
//!
//! [Note: progress] Work runs on the thread that waits. A peer may wait for work that nobody waits for here. So queries
//! (cuEventQuery) run a step too, and after a while without calls a thread of the driver continues the work.
use crate::capture::{Capture, CapturedCall, CapturedGraph, Exec, RELAXED};
use crate::code::{Code, CuResult, say};
use crate::kernels::Kernels;
use crate::memory::DriverMemory;
use crate::queue::{Node, NodeProgress, StreamMark, Streams};
use crate::settings::SimSettings;
use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

/// Without a call for this long, a thread of the driver continues the work.
const UNATTENDED: Duration = Duration::from_millis(250);
/// How often work that waits for another process is polled.
const REST: Duration = Duration::from_micros(50);

#[derive(Default)]
pub struct DriverEvent {
    pub timing: bool,
    /// Where the last record is in its stream.
    pub mark: Option<Arc<StreamMark>>,
    /// If the last record was captured: the capture and its dependencies.
    pub captured: Option<(u64, Vec<usize>)>,
}

pub struct DriverState {
    pub settings: SimSettings,
    pub memory: DriverMemory,
    pub streams: Streams,
    pub events: HashMap<u64, DriverEvent>,
    pub captures: HashMap<u64, Capture>,
    pub graphs: HashMap<u64, CapturedGraph>,
    pub execs: HashMap<u64, Exec>,
    pub kernels: Kernels,
    pub ready: bool,
    /// The code that every call returns once the context is lost.
    pub lost: Option<Code>,
    handles: u64,
    called: Instant,
    /// Counts of launches, allocations and stream waits for events and for words, by which planted faults are chosen.
    pub launches: u64,
    pub allocations: u64,
    pub waits: u64,
    pub word_waits: u64,
}

static STATE: OnceLock<Mutex<DriverState>> = OnceLock::new();
/// Number of threads that want the lock; whoever runs work yields to them in between.
static WANTED: AtomicUsize = AtomicUsize::new(0);

thread_local! {
    /// Contexts, the current one last.
    pub static CONTEXTS: RefCell<Vec<u64>> = const { RefCell::new(vec![]) };
    /// As in cuThreadExchangeStreamCaptureMode.
    pub static MODE: Cell<i32> = const { Cell::new(crate::capture::GLOBAL) };
}
/// The primary context of GPU 0; those of others follow.
pub const CONTEXT: u64 = 0xC0_0000;

pub fn lock() -> MutexGuard<'static, DriverState> {
    let state = STATE.get_or_init(|| Mutex::new(DriverState::new()));
    WANTED.fetch_add(1, SeqCst);
    let guard = state.lock().unwrap_or_else(PoisonError::into_inner);
    WANTED.fetch_sub(1, SeqCst);
    guard
}

/// The GPU of the calling thread's context.
pub fn current_gpu() -> CuResult<usize> {
    let current = CONTEXTS.with_borrow(|all| all.last().copied()).filter(|context| *context != 0);
    current.map(|context| (context - CONTEXT) as usize).ok_or(Code::INVALID_CONTEXT)
}

/// The compute capability of every GPU: 80, 90.
pub fn arch() -> u32 {
    lock().settings.arch
}

impl DriverState {
    fn new() -> DriverState {
        let settings = SimSettings::read().unwrap_or_else(|what| {
            say(&what);
            std::process::exit(2)
        });
        DriverState {
            streams: Streams::new(settings.seed),
            settings,
            memory: DriverMemory::default(),
            events: HashMap::new(),
            captures: HashMap::new(),
            graphs: HashMap::new(),
            execs: HashMap::new(),
            kernels: Kernels::default(),
            ready: false,
            lost: None,
            handles: 0x10_0000,
            called: Instant::now(),
            launches: 0,
            allocations: 0,
            waits: 0,
            word_waits: 0,
        }
    }
    /// A unique number.
    pub fn handle(&mut self) -> u64 {
        self.handles += 16;
        self.handles
    }
    pub fn called(&mut self) {
        self.called = Instant::now();
    }
    /// Counts a stream's wait for an event. Whether it is the one that is to be forgotten.
    pub fn forgets_wait(&mut self) -> bool {
        self.waits += 1;
        let forgotten = self.settings.forget_wait == Some(self.waits);
        if forgotten {
            say(&format!("planted fault: wait {} is skipped", self.waits));
        }
        forgotten
    }
    /// As [`DriverState::forgets_wait`], for a word.
    pub fn forgets_word(&mut self) -> bool {
        self.word_waits += 1;
        let forgotten = self.settings.forget_word == Some(self.word_waits);
        if forgotten {
            say(&format!("planted fault: wait {} for a word is skipped", self.word_waits));
        }
        forgotten
    }
    fn lose(&mut self, code: Code) -> Code {
        *self.lost.get_or_insert(code)
    }
    pub fn step(&mut self) -> CuResult<NodeProgress> {
        if let Some(code) = self.lost {
            return Err(code);
        }
        self.streams.step(&mut self.memory).map_err(|code| self.lose(code))
    }

    /// For calls that are illegal while this thread captures: they invalidate the capture.
    pub fn uncaptured(&mut self) -> CuResult {
        if MODE.get() == RELAXED {
            return Ok(());
        }
        let me = std::thread::current().id();
        let global = MODE.get() == crate::capture::GLOBAL;
        let concerns =
            |c: &&mut Capture| c.mode != RELAXED && c.thread == me || global && c.mode == crate::capture::GLOBAL;
        match self.captures.values_mut().find(concerns) {
            Some(capture) => {
                capture.invalid = true;
                Err(Code::STREAM_CAPTURE_UNSUPPORTED)
            }
            None => Ok(()),
        }
    }
    /// The capture that a stream takes part in, if any.
    pub fn capture_of(&mut self, stream: u64) -> CuResult<Option<(u64, &mut Capture)>> {
        let id = self.streams.get(stream).ok_or(Code::INVALID_HANDLE)?.capture;
        Ok(id.and_then(|id| Some((id, self.captures.get_mut(&id)?))))
    }
    /// For waits on a capturing stream: they are illegal and invalidate the capture.
    pub fn waitable(&mut self, stream: u64) -> CuResult {
        match self.capture_of(stream)? {
            Some((_, capture)) => {
                capture.invalid = true;
                Err(Code::STREAM_CAPTURE_UNSUPPORTED)
            }
            None => self.uncaptured(),
        }
    }
    pub fn enqueue(&mut self, stream: u64, node: Node) -> CuResult {
        if let Some((_, capture)) = self.capture_of(stream)? {
            return capture.add(stream, CapturedCall::Node(node));
        }
        self.streams.run(stream, node());
        if self.settings.eager {
            while self.step()? == NodeProgress::Moved {}
        } else if self.streams.eager() {
            self.step()?;
        }
        Ok(())
    }
}

/// Waits until all these points have been reached.
pub fn wait(marks: &[Arc<StreamMark>]) -> CuResult {
    loop {
        let mut state = lock();
        state.called();
        if let Some(code) = state.lost {
            return Err(code);
        }
        if marks.iter().all(|mark| mark.passed().is_some()) {
            return Ok(());
        }
        let outcome = state.step();
        drop(state);
        match outcome? {
            NodeProgress::Moved => {}
            _ => std::thread::sleep(REST),
        }
        while WANTED.load(SeqCst) > 0 {
            std::thread::yield_now();
        }
    }
}

/// The thread that continues the work when nobody calls. It ends with the process.
pub fn attend() {
    static STARTED: OnceLock<()> = OnceLock::new();
    STARTED.get_or_init(|| {
        let go_on = || loop {
            std::thread::sleep(UNATTENDED / 8);
            let mut state = lock();
            while state.called.elapsed() > UNATTENDED && WANTED.load(SeqCst) == 0 {
                if !matches!(state.step(), Ok(NodeProgress::Moved)) {
                    break;
                }
            }
        };
        let _ = std::thread::Builder::new().name("simulated GPU".into()).spawn(go_on);
    });
}

/// Bytes of each visible GPU: in use, and total.
pub fn room() -> Vec<(usize, usize)> {
    let state = lock();
    (0..state.settings.gpus).map(|gpu| (state.memory.used(gpu), state.settings.bytes)).collect()
}
/// Enqueues a node in a stream, or adds it to the graph that the stream captures.
pub fn enqueue(stream: u64, node: Node) -> CuResult {
    lock().enqueue(stream, node)
}
/// Whether calls with this stream become part of a graph.
pub fn capturing(stream: u64) -> CuResult<bool> {
    lock().capture_of(stream).map(|capture| capture.is_some())
}
/// Uninitialized device memory of the current GPU; counted like cuMemAlloc's.
pub fn alloc(bytes: usize) -> CuResult<u64> {
    let gpu = current_gpu()?;
    let mut state = lock();
    state.uncaptured()?;
    if bytes == 0 {
        return Err(Code::INVALID_VALUE);
    }
    state.allocations += 1;
    let planted = state.settings.oom == Some(state.allocations);
    if planted || state.memory.used(gpu) + bytes > state.settings.bytes {
        return Err(Code::OUT_OF_MEMORY);
    }
    Ok(state.memory.alloc(gpu, bytes))
}
/// Frees memory from [`alloc`]. Like cuMemFree, first waits for all work.
pub fn free(address: u64) -> CuResult {
    lock().uncaptured()?;
    settle()?;
    lock().memory.free(address)
}
/// Waits for all work of all streams, except capturing ones.
pub fn settle() -> CuResult {
    let marks: Vec<Arc<StreamMark>> = {
        let mut state = lock();
        let handles = state.streams.handles();
        handles.into_iter().map(|stream| state.streams.mark(stream)).collect()
    };
    wait(&marks)
}
