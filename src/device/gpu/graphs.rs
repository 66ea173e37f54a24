//! A driver in front of a driver, which hands it a step in pieces: as graphs, where a piece is one that was asked for
//! before. Never changes what is done, nor its order.
//!
//! [Note: pieces] Calls are kept back up to the next point where somebody else is party to the order: an upload, a
//! download, and a collective that cannot be kept back itself. What has gathered since the last such point is a
//! *piece*.
//!
//! ```text
//! upload | embed block .. | gather .. wait | block .. | .. | reduce-scatter | adamw adamw | all-reduce wait | download
//!          piece                             piece                            piece
//! upload | embed gather block .. wait block .. reduce-scatter .. adamw all-reduce wait | download
//!          piece                                                                    [Note: joint pieces]
//! ```
//!
//! A piece that was never seen is run call by call; so matrix products choose their algorithms. The second time it is
//! captured, and from then on it is one launch of a graph instead of as many as it has calls. Whether it *is* the same
//! piece is asked every time and of everything: kernels, grids, addresses, lengths, numbers. So a replay does what the
//! calls would have done, whatever the model does from step to step, and an operand that is given again holds its
//! memory: no graph can outlive what it points to. The price of a piece that changes, a shape or a number among the
//! arguments, is that it is run call by call. What does change from step to step lies in memory
//! ([`crate::device::Device`]), so in a step of static shapes nothing else changes.
//!
//! [Note: joint pieces] NCCL's collectives are calls of a piece ([`Guest`]) in steps of static shapes
//! ([`Graphs::join_in`]), so that a micro-batch is one graph. NCCL asks that a collective be captured on all of its
//! ranks or on none, and that a graph of it be launched by all of them (User Guide, "Using NCCL with CUDA Graphs").
//! Nobody is asked for that: ranks run the same schedule, so where shapes are static a piece is new, known or changed
//! on all of them at once. Which shapes are static follows from the settings alone, which the ranks have compared. What
//! each decided is hashed ([`Graphs::decided`]) and compared before each step: ranks that ever differ are told so, by
//! name. Elsewhere, and with groups in shared memory, where a wait is the host's own, collectives end pieces.
//!
//! [Note: static shapes] Rows cut out of a stream are of one length. Packed sequences lack less than 3 % of theirs
//! (tests/data/packing.rs): they are filled up with documents without loss, for as much more work. Rows of lengths of
//! their own that are not packed may lack most of it, and are given call by call. By arithmetic: a launch takes the
//! host some 5 us, so 1,500 of them 8 ms, which a GPU with 100 ms of work in the step does not notice; a third more
//! rows would be 33 ms.
use super::calls::Calls;
use super::driver::{Arg, Driver, Graph, Kernel, LaunchShape, run};
use super::guest::{Asked, Guest};
use crate::base::meter::Lease;
use crate::base::timeline::Mark;
use crate::base::{Category, DType, Error, Result};
use crate::device::ops::{Gemm, GemmThen};
use crate::device::{Buf, View, ViewMut};
use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::fmt::{Display, Formatter};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

/// Graphs at most: those of 1,000 layers, forward and backward, twice.
const MOST: usize = 4096;
/// Pieces that were seen once and are remembered, at most.
const SEEN: usize = 1 << 16;
/// Joint pieces at most: first and later micro-batches, the end of a step, those after an evaluation.
const JOINT: usize = 64;

pub struct Graphs {
    pieces: Mutex<Pieces>,
    driver: Arc<dyn Driver>,
}

#[derive(Default)]
struct Pieces {
    /// What was asked for since the last cut.
    queue: Calls,
    own: Known,
    joint: Known,
    /// Guests are kept back.
    joins: bool,
    /// Nothing is: points in time are marked between calls.
    marks: bool,
    /// Of what became of joint pieces.
    decided: u64,
    tally: Given,
    /// Of a piece that nobody was there to be told of: the next call's.
    failed: Option<Error>,
}

/// Pieces by their hash. What is remembered of joint ones follows from them alone.
#[derive(Default)]
struct Known {
    pieces: HashMap<u64, GraphPiece>,
    graphs: usize,
}
enum GraphPiece {
    Once,
    /// With the call at which it was used last.
    Graph(Graph, u64),
}

/// What is to be done with a piece.
enum Next<'a> {
    Single,
    Capture,
    Replay(&'a mut Graph),
}

/// How often this driver was called, and how often it called.
#[derive(Clone, Copy, Default, Debug, PartialEq)]
pub struct Given {
    /// Launches, products and copies that were asked for.
    pub asked: u64,
    /// Of the driver behind: single calls, and graphs.
    pub single: u64,
    pub graphs: u64,
    /// Graphs that were made.
    pub captured: u64,
}

impl Display for Given {
    fn fmt(&self, f: &mut Formatter) -> std::fmt::Result {
        let Given { asked, single, graphs, captured } = self;
        let share = 100.0 * (asked - single) as f64 / (*asked).max(1) as f64;
        write!(f, "compile: {share:.0} % of {asked} calls of the GPU came in {graphs} launches of {captured} graphs")?;
        if share < 50.0 {
            write!(f, ": shapes differ from step to step, or there were few steps")?;
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
    /// From now on shapes are the same in each step and on each rank, or they no longer are: see [Note: joint pieces].
    pub fn join_in(&self, joins: bool) -> Result<()> {
        let mut pieces = self.lock();
        if std::mem::replace(&mut pieces.joins, joins) && !joins {
            return pieces.flush(&*self.driver);
        }
        Ok(())
    }
    /// Keeps this call of a guest back; or false, and then everything that was asked for is with the driver, and the
    /// guest's turn is now.
    pub fn guest(&self, guest: &Arc<dyn Guest>, asked: Asked, operands: &[Arg]) -> Result<bool> {
        let mut pieces = self.lock();
        pieces.failed.take().map_or(Ok(()), Err)?;
        if !pieces.joins || pieces.marks {
            return pieces.flush(&*self.driver).map(|()| false);
        }
        pieces.tally.asked += 1;
        pieces.queue.guest(guest, asked, operands);
        Ok(true)
    }
    /// A hash of what became of each joint piece so far: the same on all ranks, or the run is lost.
    pub fn decided(&self) -> u64 {
        self.lock().decided
    }
    /// Lets go of all graphs: before what they were captured from ends (NCCL waits for them when a communicator is
    /// destroyed).
    pub fn forget(&self) {
        let mut pieces = self.lock();
        pieces.queue.clear();
        (pieces.own, pieces.joint, pieces.joins) = (Known::default(), Known::default(), false);
    }
    /// Everything that was asked for is with the driver when this returns. What goes wrong is the next call's error.
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
            let long = 64 * MOST as u64; // calls: many steps of as many graphs
            self.pieces.retain(|_, known| !matches!(known, GraphPiece::Graph(_, used) if *used + long < now));
            self.graphs = self.pieces.values().filter(|known| matches!(known, GraphPiece::Graph(..))).count();
        }
        self.found(calls, now, MOST)
    }
    /// Of a joint piece: nothing is forgotten, at no rank's own time.
    fn next_of_all(&mut self, calls: &Calls, now: u64) -> Next<'_> {
        match self.pieces.len() < SEEN || self.pieces.contains_key(&calls.hash()) {
            true => self.found(calls, now, JOINT),
            false => Next::Single,
        }
    }
    fn found(&mut self, calls: &Calls, now: u64, most: usize) -> Next<'_> {
        // A graph of one call saves nothing.
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
                _ => Next::Single, // other calls of the same hash, or no room
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
        format!("{}, steps as graphs", self.driver.name())
    }
    fn arch(&self) -> u32 {
        self.driver.arch()
    }
    fn multiprocessors(&self) -> u32 {
        self.driver.multiprocessors()
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
    fn synchronize(&self) -> Result<()> {
        self.flush()?;
        self.driver.synchronize()
    }
    /// Until they end, calls are given one by one: a replay has no parts to time.
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
