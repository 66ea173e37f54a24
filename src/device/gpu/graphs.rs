//! A driver that wraps another and passes it a step in pieces, as CUDA graphs for pieces seen before. Never changes
//! what is executed, nor its order.
//!
//! [Note: pieces] Calls are deferred up to the next point where someone else depends on the order: an upload, a
//! download, or a collective that cannot be deferred itself. The calls since the last such point are a *piece*.
//!
//! ```text
//! upload | embed block .. | gather .. wait | block .. | .. | reduce-scatter | adamw adamw | all-reduce wait | download
//!          piece                             piece                            piece
//! upload | embed gather block .. wait block .. reduce-scatter .. adamw all-reduce wait | download
//!          piece                                                                    [Note: joint pieces]
//! ```
//!
//! A new piece is executed call by call, so that matrix products choose their algorithms. The second time it is
//! captured, and from then on it is a single graph launch. Equality is checked every time and covers everything:
//! kernels, grids, addresses, lengths, numbers. So a replay does exactly what the calls would have done, however the
//! model varies between steps. A graph holds its operands, so it cannot outlive the memory that it points to. A piece
//! that changes (a shape or number among the arguments) is executed call by call. Values that change between steps are
//! in memory ([`crate::Device`]), so in a step of static shapes nothing else changes.
//!
//! [Note: joint pieces] With static shapes, NCCL's collectives are calls of a piece ([`Guest`], [`Graphs::join_in`]),
//! so that a micro-batch is one graph. NCCL requires that a collective be captured on all of its ranks or on none, and
//! that all of them launch a graph that contains it (User Guide, "Using NCCL with CUDA Graphs"). No communication is
//! needed for that: ranks run the same schedule, so with static shapes a piece is new, known or changed on all of them
//! at once. Which shapes are static follows from the settings alone, which the ranks have compared. Each rank hashes
//! its decisions ([`Graphs::decided`]), and the hashes are compared before each step: ranks that differ get an error
//! that names them. In other cases, and with groups in shared memory, where the host waits, collectives end pieces. So
//! they do where ranks share experts: how many rows a rank gets is in what it launches and exchanges.
//!
//! [Note: static shapes] Rows cut from a token stream have one length. Packed sequences fall short of it by less than 3
//! % (tests/data/packing.rs): they are padded with documents without loss, which costs that much more work. Unpacked
//! rows have lengths of their own and may be mostly padding, so they are executed call by call. An estimate: a launch
//! takes the host about 5 us, so 1,500 of them take 8 ms, which is hidden behind 100 ms of GPU work per step; a third
//! more rows would take 33 ms.
use super::calls::Calls;
use super::driver::{Arg, Driver, Graph, Kernel, LaunchShape, ScaledGemm, run};
use super::guest::{Asked, Guest};
use crate::ops::{Gemm, GemmThen};
use crate::{Buf, View, ViewMut};
use flatshard_base::meter::Lease;
use flatshard_base::timeline::Mark;
use flatshard_base::{Category, DType, Error, Result};
use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::fmt::{Display, Formatter};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

/// Maximum number of graphs: those of 1,000 layers, forward and backward, twice.
const MOST: usize = 4096;
/// Maximum number of pieces remembered after one execution.
const SEEN: usize = 1 << 16;
/// Maximum number of joint pieces: first and later micro-batches, the end of a step, those after an evaluation.
const JOINT: usize = 64;

pub struct Graphs {
    pieces: Mutex<Pieces>,
    driver: Arc<dyn Driver>,
}

#[derive(Default)]
struct Pieces {
    /// The calls since the last cut.
    queue: Calls,
    own: Known,
    joint: Known,
    /// Whether guests' calls are deferred.
    joins: bool,
    /// Whether nothing is deferred, because times are marked between calls.
    marks: bool,
    /// Hash of the decisions about joint pieces.
    decided: u64,
    tally: Given,
    /// Error of a piece that no call could return; the next call does.
    failed: Option<Error>,
}

/// Pieces by hash. The state of joint pieces depends on joint pieces only.
#[derive(Default)]
struct Known {
    pieces: HashMap<u64, GraphPiece>,
    graphs: usize,
}
enum GraphPiece {
    Once,
    /// With the call number of its last use.
    Graph(Graph, u64),
}

/// What to do with a piece.
enum Next<'a> {
    Single,
    Capture,
    Replay(&'a mut Graph),
}

/// Calls received and calls made.
#[derive(Clone, Copy, Default, Debug, PartialEq)]
pub struct Given {
    /// Launches, products and copies requested.
    pub asked: u64,
    /// Calls made to the wrapped driver: single calls, and graphs.
    pub single: u64,
    pub graphs: u64,
    /// Number of graphs captured.
    pub captured: u64,
}

impl Display for Given {
    fn fmt(&self, f: &mut Formatter) -> std::fmt::Result {
        let Given { asked, single, graphs, captured } = self;
        let share = 100.0 * (asked - single) as f64 / (*asked).max(1) as f64;
        write!(f, "compile: {share:.0} % of {asked} GPU calls ran in {graphs} launches of {captured} graphs")?;
        if share < 50.0 {
            write!(f, ": shapes changed between steps, or there were few steps")?;
        }
        Ok(())
    }
}

impl Graphs {
    pub fn new(driver: Arc<dyn Driver>) -> Graphs {
        Graphs { pieces: Mutex::default(), driver }
    }
    pub fn given(&self) -> Given {
        self.lock().tally
    }
    /// Declares whether, from now on, shapes are the same in each step and on each rank: see [Note: joint pieces].
    pub fn join_in(&self, joins: bool) -> Result<()> {
        let mut pieces = self.lock();
        if std::mem::replace(&mut pieces.joins, joins) && !joins {
            return pieces.flush(&*self.driver);
        }
        Ok(())
    }
    /// Whether guests' calls are deferred.
    pub fn defers(&self) -> bool {
        self.lock().defers()
    }
    /// Defers a guest's call. If it returns false, all earlier calls are with the driver and the guest must enqueue
    /// now.
    pub fn guest(&self, guest: &Arc<dyn Guest>, asked: Asked, operands: &[Arg]) -> Result<bool> {
        let mut pieces = self.lock();
        pieces.failed.take().map_or(Ok(()), Err)?;
        if !pieces.defers() {
            return pieces.flush(&*self.driver).map(|()| false);
        }
        pieces.tally.asked += 1;
        pieces.queue.guest(guest, asked, operands);
        Ok(true)
    }
    /// Hash of the decisions about joint pieces so far. It must be the same on all ranks.
    pub fn decided(&self) -> u64 {
        self.lock().decided
    }
    /// Drops all graphs. Call before destroying what they captured (NCCL waits for graphs when it destroys a
    /// communicator).
    pub fn forget(&self) {
        let mut pieces = self.lock();
        pieces.queue.clear();
        (pieces.own, pieces.joint, pieces.joins) = (Known::default(), Known::default(), false);
    }
    /// Passes all deferred calls to the driver. The next call returns any error.
    pub fn cut(&self) {
        let mut pieces = self.lock();
        if let Err(e) = pieces.flush(&*self.driver) {
            pieces.failed.get_or_insert(e);
        }
    }

    fn lock(&self) -> MutexGuard<'_, Pieces> {
        self.pieces.lock().unwrap_or_else(PoisonError::into_inner)
    }
    fn ask(&self, ask: impl FnOnce(&mut Calls) -> Result<()>) -> Result<()> {
        let mut pieces = self.lock();
        pieces.failed.take().map_or(Ok(()), Err)?;
        pieces.tally.asked += 1;
        ask(&mut pieces.queue)?;
        if pieces.marks { pieces.flush(&*self.driver) } else { Ok(()) }
    }
    fn flush(&self) -> Result<()> {
        let mut pieces = self.lock();
        pieces.failed.take().map_or(Ok(()), Err)?;
        pieces.flush(&*self.driver)
    }
}

impl Pieces {
    fn defers(&self) -> bool {
        self.joins && !self.marks
    }
    fn flush(&mut self, driver: &dyn Driver) -> Result<()> {
        let done = self.give(driver);
        self.queue.clear();
        done
    }

    fn give(&mut self, driver: &dyn Driver) -> Result<()> {
        let (now, guests) = (self.tally.asked, self.queue.of_guests());
        let next = match guests {
            0 => self.own.next(&self.queue, now),
            _ => self.joint.next_of_all(&self.queue, now),
        };
        if guests > 0 {
            let word = guests as u64 * 3 + next.number();
            self.decided = (self.decided ^ word).wrapping_mul(0x9E37_79B9_7F4A_7C15).rotate_left(29);
        }
        match next {
            Next::Single => {
                self.tally.single += self.queue.len() as u64;
                run(driver, &mut self.queue)
            }
            Next::Replay(graph) => {
                self.tally.graphs += 1;
                driver.replay(graph)
            }
            Next::Capture => {
                let hash = self.queue.hash();
                let mut graph = driver.capture(std::mem::take(&mut self.queue))?;
                self.tally.captured += 1;
                self.tally.graphs += 1;
                let done = driver.replay(&mut graph);
                if guests > 0 { &mut self.joint } else { &mut self.own }.keep(hash, graph, now);
                done
            }
        }
    }
}

impl Next<'_> {
    fn number(&self) -> u64 {
        match self {
            Next::Single => 0,
            Next::Capture => 1,
            Next::Replay(_) => 2,
        }
    }
}

impl Known {
    fn next(&mut self, calls: &Calls, now: u64) -> Next<'_> {
        if !self.pieces.contains_key(&calls.hash()) && self.pieces.len() - self.graphs >= SEEN {
            self.pieces.retain(|_, known| matches!(known, GraphPiece::Graph(..)));
        }
        if self.graphs == MOST {
            let long = 64 * MOST as u64; // calls: many steps' worth
            self.pieces.retain(|_, known| !matches!(known, GraphPiece::Graph(_, used) if *used + long < now));
            self.graphs = self.pieces.values().filter(|known| matches!(known, GraphPiece::Graph(..))).count();
        }
        self.found(calls, now, MOST)
    }
    /// For a joint piece. Nothing is evicted, because ranks would evict at different times.
    fn next_of_all(&mut self, calls: &Calls, now: u64) -> Next<'_> {
        match self.pieces.len() < SEEN || self.pieces.contains_key(&calls.hash()) {
            true => self.found(calls, now, JOINT),
            false => Next::Single,
        }
    }
    fn found(&mut self, calls: &Calls, now: u64, most: usize) -> Next<'_> {
        // A graph with one call saves nothing.
        if calls.len() < 2 {
            return Next::Single;
        }
        let room = self.graphs < most;
        match self.pieces.entry(calls.hash()) {
            Entry::Vacant(new) => {
                new.insert(GraphPiece::Once);
                Next::Single
            }
            Entry::Occupied(known) => match known.into_mut() {
                GraphPiece::Once if room => Next::Capture,
                GraphPiece::Graph(graph, used) if graph.calls == *calls => {
                    *used = now;
                    Next::Replay(graph)
                }
                _ => Next::Single, // a hash collision, or full
            },
        }
    }
    fn keep(&mut self, hash: u64, graph: Graph, now: u64) {
        self.pieces.insert(hash, GraphPiece::Graph(graph, now));
        self.graphs += 1;
    }
}

impl Driver for Graphs {
    fn name(&self) -> String {
        format!("{}, CUDA graphs", self.driver.name())
    }
    fn arch(&self) -> u32 {
        self.driver.arch()
    }
    fn multiprocessors(&self) -> u32 {
        self.driver.multiprocessors()
    }
    fn avoids(&self, variant: &str) -> bool {
        self.driver.avoids(variant)
    }
    fn alloc(&self, dtype: DType, len: usize, category: Category, lease: Lease) -> Result<Buf> {
        self.driver.alloc(dtype, len, category, lease)
    }
    fn alloc_host(&self, dtype: DType, len: usize, lease: Lease) -> Result<Buf> {
        self.driver.alloc_host(dtype, len, lease)
    }
    fn upload(&self, src: &[u8], dst: ViewMut) -> Result<()> {
        self.flush()?;
        self.driver.upload(src, dst)
    }
    fn download(&self, parts: &mut [(View, &mut [u8])]) -> Result<()> {
        self.flush()?;
        self.driver.download(parts)
    }
    fn copy(&self, src: View, dst: ViewMut) -> Result<()> {
        self.ask(|calls| {
            calls.copy(src, dst);
            Ok(())
        })
    }
    fn zero(&self, x: ViewMut) -> Result<()> {
        self.ask(|calls| {
            calls.zero(x);
            Ok(())
        })
    }
    fn launch(&self, kernel: Kernel, shape: LaunchShape, args: &mut [Arg]) -> Result<()> {
        self.ask(|calls| calls.launch(kernel, shape, args))
    }
    fn gemm(&self, op: Gemm) -> Result<()> {
        self.ask(|calls| {
            calls.gemm(&op);
            Ok(())
        })
    }
    fn fuses(&self, op: &GemmThen) -> Result<bool> {
        self.driver.fuses(op)
    }
    fn gemm_then(&self, op: GemmThen) -> Result<()> {
        self.ask(|calls| {
            calls.gemm_then(&op);
            Ok(())
        })
    }
    fn multiplies_fp8(&self) -> bool {
        self.driver.multiplies_fp8()
    }
    fn fuses_scaled(&self, op: &ScaledGemm) -> Result<bool> {
        self.driver.fuses_scaled(op)
    }
    fn scaled_gemm(&self, op: ScaledGemm) -> Result<()> {
        self.ask(|calls| {
            calls.scaled_gemm(&op);
            Ok(())
        })
    }
    fn synchronize(&self) -> Result<()> {
        self.flush()?;
        self.driver.synchronize()
    }
    /// Executes calls one by one until marking ends: the parts of a replay cannot be timed.
    fn begin_marks(&self) -> Result<()> {
        self.flush()?;
        self.lock().marks = true;
        self.driver.begin_marks()
    }
    fn end_marks(&self) {
        self.lock().marks = false;
        self.driver.end_marks();
    }
    fn mark(&self) -> Result<Mark> {
        self.flush()?;
        self.driver.mark()
    }
    fn when(&self, mark: Mark) -> Result<Instant> {
        self.driver.when(mark)
    }
    fn capture(&self, calls: Calls) -> Result<Graph> {
        self.driver.capture(calls)
    }
    fn replay(&self, graph: &mut Graph) -> Result<()> {
        self.flush()?;
        self.driver.replay(graph)
    }
}
