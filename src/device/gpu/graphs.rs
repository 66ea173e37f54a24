//! A driver in front of a driver, which hands it a step in pieces: as graphs, where a piece is one that was asked for before. Never
//! changes what is done, nor its order.
//!
//! [Note: pieces] Calls are kept back up to the next point where somebody else is party to the order: an upload, a download, a
//! collective (they are told to [`Graphs::cut`] by `crate::comm::cuts`). What has gathered since the last such point is a *piece*.
//!
//! ```text
//! upload | embed block .. | gather ... wait | block .. | ... | reduce-scatter | adamw adamw | all-reduce wait | download
//!          piece                              piece                             piece
//! ```
//!
//! A piece that was never seen is run call by call; so matrix products choose their algorithms. The second time it is captured, and
//! from then on it is one launch of a graph instead of as many as it has calls. Whether it *is* the same piece is asked every time
//! and of everything: kernels, grids, addresses, lengths, numbers. So a replay does what the calls would have done, whatever the
//! model does from step to step, and an operand that is given again holds its memory: no graph can outlive what it points to. The
//! price of a piece that changes, a shape or a number among the arguments, is that it is run call by call. What does change from
//! step to step lies in memory ([`crate::device::Device`]), so in a step of static shapes nothing else changes.
use super::calls::Calls;
use super::driver::{Arg, Driver, Graph, Kernel, Shape};
use crate::base::meter::Lease;
use crate::base::timeline::Mark;
use crate::base::{Category, DType, Error, Result};
use crate::device::{Buf, Epilogue, Gemm, View, ViewMut};
use std::collections::HashMap;
use std::fmt::{Display, Formatter};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

/// Graphs at most: those of 1,000 layers, forward and backward, twice.
const MOST: usize = 4096;
/// Pieces that were seen once and are remembered, at most.
const SEEN: usize = 1 << 16;

pub struct Graphs {
    pieces: Mutex<Pieces>,
    driver: Arc<dyn Driver>,
}

#[derive(Default)]
struct Pieces {
    /// What was asked for since the last cut.
    queue: Calls,
    known: HashMap<u64, Known>,
    graphs: usize,
    tally: Given,
    /// Of a piece that nobody was there to be told of: the next call's.
    failed: Option<Error>,
}

enum Known {
    Once,
    /// With the piece in which it was used last.
    Graph(Graph, u64),
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
        ask(&mut pieces.queue)
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
        let (hash, now) = (self.queue.hash(), self.tally.asked);
        // A graph of one call saves nothing.
        if self.queue.len() > 1 {
            match self.known.get_mut(&hash) {
                Some(Known::Graph(graph, used)) if graph.calls == self.queue => {
                    *used = now;
                    self.tally.graphs += 1;
                    return driver.replay(graph);
                }
                Some(Known::Graph(..)) => {} // other calls of the same hash
                Some(Known::Once) => {
                    if self.room(now) {
                        return self.capture(driver, hash, now);
                    }
                }
                None => {
                    if self.known.len() - self.graphs >= SEEN {
                        self.known.retain(|_, known| matches!(known, Known::Graph(..)));
                    }
                    self.known.insert(hash, Known::Once);
                }
            }
        }
        self.tally.single += self.queue.len() as u64;
        self.queue.run(driver)
    }

    fn capture(&mut self, driver: &dyn Driver, hash: u64, now: u64) -> Result<()> {
        let mut graph = driver.capture(std::mem::take(&mut self.queue))?;
        self.tally.captured += 1;
        self.tally.graphs += 1;
        let done = driver.replay(&mut graph);
        self.known.insert(hash, Known::Graph(graph, now));
        self.graphs += 1;
        done
    }

    /// Whether there is room for a graph, once those are gone that were not used for long.
    fn room(&mut self, now: u64) -> bool {
        if self.graphs == MOST {
            let long = 64 * MOST as u64; // calls: many steps of as many graphs
            self.known.retain(|_, known| !matches!(known, Known::Graph(_, used) if *used + long < now));
            self.graphs = self.known.values().filter(|known| matches!(known, Known::Graph(..))).count();
        }
        self.graphs < MOST
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
    fn launch(&self, kernel: Kernel, shape: Shape, args: &mut [Arg]) -> Result<()> {
        self.ask(|calls| calls.launch(kernel, shape, args))
    }
    fn gemm(&self, shape: &Gemm, a: View, b: View, c: ViewMut) -> Result<()> {
        self.ask(|calls| {
            calls.gemm(shape, a, b, c);
            Ok(())
        })
    }
    /// Whether there is such a product only the driver knows: so it is asked at once, and the piece ends before it.
    fn gemm_then(&self, shape: &Gemm, a: View, b: View, c: ViewMut, then: &Epilogue) -> Result<bool> {
        self.flush()?;
        self.driver.gemm_then(shape, a, b, c, then)
    }
    fn synchronize(&self) -> Result<()> {
        self.flush()?;
        self.driver.synchronize()
    }
    fn begin_marks(&self) -> Result<()> {
        self.flush()?;
        self.driver.begin_marks()
    }
    fn end_marks(&self) {
        self.cut();
        self.driver.end_marks();
    }
    /// Of what was asked for: while marks are made, they end pieces.
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
