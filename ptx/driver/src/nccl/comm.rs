//! A communicator: its rank, its pending operations, its error. Never blocks a caller: threads and streams do what
//! takes time, and callers poll.
use super::code::{IN_PROGRESS, INVALID_ARGUMENT, REMOTE_ERROR, SUCCESS};
use super::link::HubLink;
use super::wire::{Frame, FrameKind};
use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU64, AtomicUsize, Ordering::SeqCst};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

/// How often a waiting thread polls.
pub const POLL: Duration = Duration::from_micros(200);

/// A communicator's position in its world.
pub struct CommRank {
    pub link: Arc<HubLink>,
    pub id: u64,
    pub rank: usize,
    pub size: usize,
}

/// What a config sets.
#[derive(Clone, Copy, Debug)]
pub struct CommConfig {
    pub blocking: bool,
    pub max_ctas: Option<i32>,
}

/// Memory registered with a communicator.
#[derive(Clone, Copy)]
pub struct Registered {
    pub handle: usize,
    pub start: u64,
    pub bytes: usize,
    /// As a symmetric window.
    pub window: bool,
}

pub struct NcclComm {
    seat: OnceLock<CommRank>,
    /// Its GPU.
    pub gpu: usize,
    pub config: CommConfig,
    /// With sockets, a rank's death closes connections; without, kernels spin on its memory forever.
    pub sockets: bool,
    /// Number of calls running in the background.
    busy: AtomicUsize,
    error: AtomicI32,
    aborted: AtomicBool,
    /// Number of collectives started, in the order in which streams reach them.
    next: AtomicU64,
    /// Set while an operation runs: one at a time, as on the real library's own stream.
    pub running: AtomicBool,
    /// Number of messages sent to and received from each rank.
    posts: Mutex<HashMap<(bool, usize), u64>>,
    /// Operations that streams hold, and nodes that graphs hold.
    pub in_flight: AtomicUsize,
    pub nodes: AtomicUsize,
    /// The number of the request that ends it, whose answer stays: a rank that leaves after that is not lost.
    end: OnceLock<u64>,
    pub registered: Mutex<Vec<Registered>>,
    /// Windows registered so far.
    pub windows: AtomicUsize,
}

pub fn lock<T>(m: &Mutex<T>) -> MutexGuard<'_, T> {
    m.lock().unwrap_or_else(PoisonError::into_inner)
}

impl NcclComm {
    pub fn new(gpu: usize, config: CommConfig, sockets: bool) -> Arc<NcclComm> {
        Arc::new(NcclComm {
            seat: OnceLock::new(),
            gpu,
            config,
            sockets,
            busy: AtomicUsize::new(0),
            error: AtomicI32::new(SUCCESS),
            aborted: AtomicBool::new(false),
            next: AtomicU64::new(0),
            running: AtomicBool::new(false),
            posts: Mutex::default(),
            in_flight: AtomicUsize::new(0),
            nodes: AtomicUsize::new(0),
            end: OnceLock::new(),
            registered: Mutex::default(),
            windows: AtomicUsize::new(0),
        })
    }
    /// Available once its world has answered.
    pub fn seat(&self) -> Option<&CommRank> {
        self.seat.get()
    }
    pub fn sit(&self, seat: CommRank) {
        let _ = self.seat.set(seat);
    }
    /// `ncclCommGetAsyncError`.
    pub fn state(&self) -> i32 {
        self.check_lost();
        match self.error.load(SeqCst) {
            SUCCESS if self.busy.load(SeqCst) > 0 => IN_PROGRESS,
            code => code,
        }
    }
    /// Whether it is ready for the next call, as `ncclCommEnsureReady`: only after the last one has succeeded.
    pub fn ready(&self) -> Result<(), i32> {
        match self.state() {
            SUCCESS => Ok(()),
            IN_PROGRESS => {
                complain("attempt to use a communicator before the previous operation returned ncclSuccess");
                Err(INVALID_ARGUMENT)
            }
            code => Err(code),
        }
    }
    pub fn fail(&self, code: i32, why: &str) {
        if self.error.compare_exchange(SUCCESS, code, SeqCst, SeqCst).is_ok() {
            complain(why);
        }
    }
    pub fn abort(&self) {
        self.aborted.store(true, SeqCst);
    }
    pub fn aborted(&self) -> bool {
        self.aborted.load(SeqCst)
    }
    /// With sockets a lost rank is an error; a kernel that spins on its memory never notices.
    fn check_lost(&self) {
        if let Some(rank) = self.seat().filter(|_| self.sockets).and_then(|seat| seat.link.lost())
            && !self.has_ended()
        {
            self.fail(REMOTE_ERROR, &format!("rank {rank} of the world closed its connection"));
        }
    }

    /// Runs `job` in the background; until it ends, the communicator is in progress. Its error becomes the
    /// communicator's.
    pub fn in_background(
        self: &Arc<NcclComm>,
        job: impl FnOnce(&Arc<NcclComm>) -> Result<(), (i32, String)> + Send + 'static,
    ) {
        self.busy.fetch_add(1, SeqCst);
        let comm = self.clone();
        std::thread::spawn(move || {
            if let Err((code, why)) = job(&comm) {
                comm.fail(code, &why);
            }
            comm.busy.fetch_sub(1, SeqCst);
        });
    }

    /// Sends a request to the hub and returns the number of its answer.
    pub fn request(&self, kind: FrameKind, words: [u64; 5], body: Vec<u8>) -> u64 {
        let number = self.next.fetch_add(1, SeqCst);
        if kind == FrameKind::End {
            let _ = self.end.set(number);
        }
        if let Some(seat) = self.seat() {
            // A missing hub counts as a lost rank.
            let _ = seat.link.send(&Frame::new(kind, seat.id, number, words, body));
        }
        number
    }
    pub fn answer(&self, number: u64) -> Option<Frame> {
        self.seat().and_then(|seat| seat.link.answer(seat.id, number))
    }
    fn has_ended(&self) -> bool {
        self.seat().zip(self.end.get()).is_some_and(|(seat, &number)| seat.link.has_answer(seat.id, number))
    }
    /// Waits for the answer, on threads of this library; `None` once aborted or failed.
    pub fn wait(&self, number: u64) -> Option<Frame> {
        self.wait_until(|| self.answer(number))
    }
    /// Waits until all ranks have ended it, or until it is aborted or failed.
    pub fn wait_for_end(&self) {
        self.wait_until(|| self.has_ended().then_some(()));
    }
    fn wait_until<T>(&self, done: impl Fn() -> Option<T>) -> Option<T> {
        loop {
            if let Some(result) = done() {
                return Some(result);
            }
            self.check_lost();
            if self.aborted() || self.error.load(SeqCst) != SUCCESS {
                return None;
            }
            std::thread::sleep(POLL);
        }
    }
    /// The number of the next message to (or from) a rank.
    pub fn nth(&self, sent: bool, peer: usize) -> u64 {
        let mut posts = lock(&self.posts);
        let nth = posts.entry((sent, peer)).or_default();
        *nth += 1;
        *nth
    }
}

/// As NCCL_DEBUG=WARN would, prints the reason for an error code.
pub fn complain(what: &str) {
    eprintln!("simulated NCCL: {what}");
}
