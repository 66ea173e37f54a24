//! A world on one host: its seats, its groups, and detecting failed ranks. Never moves data.
use super::arena::Arena;
use super::group::{POLL_INTERVAL, RankGroups, ShmGroup};
use super::rendezvous;
use super::seat::Seat;
use crate::base::{Error, Meter, Result};
use crate::comm::env::RankEnv;
use crate::comm::mesh::{Mesh, MeshSizes};
use crate::comm::{Axis, Collective, Member, Waiting};
use std::sync::Arc;
use std::time::{Duration, Instant};

#[derive(Clone, Debug)]
pub struct ShmOptions {
    /// How long a call into a group may block before it fails.
    pub timeout: Duration,
}
impl Default for ShmOptions {
    fn default() -> ShmOptions {
        ShmOptions { timeout: Duration::from_secs(600) }
    }
}

/// One rank's membership in the world. If dropped by a panic, it notifies the other ranks.
pub struct ShmWorld {
    seat: Arc<Seat>,
    groups: Arc<RankGroups>,
}

impl ShmWorld {
    fn seated(seat: Seat) -> ShmWorld {
        ShmWorld { seat: Arc::new(seat), groups: Arc::default() }
    }
    /// Joins as `rank`. Does not wait for the others.
    pub fn new(arena: Arc<Arena>, rank: usize, meter: Meter, options: &ShmOptions) -> Result<ShmWorld> {
        if rank >= arena.world() {
            return Err(Error::input(format!("rank {rank} is not in a world of {} ranks", arena.world())));
        }
        Ok(ShmWorld::seated(Seat::take(arena, rank, 0, meter, options.timeout)?))
    }
    /// Joins the world of a process that a launcher started, all on this host. Returns when all its ranks have joined.
    pub fn join(env: &RankEnv, meter: Meter, options: &ShmOptions) -> Result<ShmWorld> {
        if env.local_world != env.world {
            return Err(Error::input(format!(
                "only {} of {} ranks are on this host: `comm: shm` works within one host; remove `comm`",
                env.local_world, env.world
            )));
        }
        let Some(fd) = env.arena_fd else { return ShmWorld::join_host(env, meter, options) };
        let world = ShmWorld::new(Arc::new(Arena::open(fd, env.world)?), env.rank, meter, options)?;
        world.seat.assemble(Instant::now() + options.timeout)?;
        Ok(world)
    }
    /// Like [`ShmWorld::join`], for only the ranks on this host: this world's ranks are local ranks.
    pub(in crate::comm) fn join_host(env: &RankEnv, meter: Meter, options: &ShmOptions) -> Result<ShmWorld> {
        Ok(ShmWorld::seated(rendezvous::meet(env, meter, options.timeout)?))
    }
    /// Like [`ShmWorld::new`]; messages name the ranks from `first` on.
    pub(in crate::comm) fn on_host(
        arena: Arc<Arena>,
        rank: usize,
        first: usize,
        meter: Meter,
        options: &ShmOptions,
    ) -> Result<ShmWorld> {
        Ok(ShmWorld::seated(Seat::take(arena, rank, first, meter, options.timeout)?))
    }
    pub fn rank(&self) -> usize {
        self.seat.rank
    }
    pub fn size(&self) -> usize {
        self.seat.arena.world()
    }
    /// The group of `ranks` (world ranks in group order, including this one). Every member creates it once per axis.
    pub fn group(&self, axis: Axis, ranks: Vec<usize>) -> Result<Arc<ShmGroup>> {
        ShmGroup::new(self.seat.clone(), self.groups.clone(), axis, ranks, None)
    }
    /// Like [`ShmWorld::group`], for a thread that uses it on behalf of its rank, which waits while `waiting` says so.
    pub(in crate::comm) fn group_for(
        &self,
        axis: Axis,
        ranks: Vec<usize>,
        waiting: Arc<Waiting>,
    ) -> Result<Arc<ShmGroup>> {
        ShmGroup::new(self.seat.clone(), self.groups.clone(), axis, ranks, Some(waiting))
    }
    /// Blocks until the condition holds. Checks it when this rank's bell rings, and meanwhile makes progress in its
    /// groups.
    pub(in crate::comm) fn rest_until(&self, is_so: &mut dyn FnMut() -> bool) {
        loop {
            let heard = self.seat.bell_count();
            if is_so() {
                return;
            }
            self.groups.progress(None);
            self.seat.listen(heard, POLL_INTERVAL);
        }
    }
    /// Rings this rank's own bell, to wake its other threads.
    pub(in crate::comm) fn ring(&self) {
        self.seat.ring(self.seat.rank);
    }
    pub(in crate::comm) fn timeout(&self) -> Duration {
        self.seat.timeout.get()
    }
    /// Reports that this rank failed: other ranks' calls into any group end at once with "rank N failed".
    pub fn abort(&self) {
        self.blame(self.seat.name(self.seat.rank));
    }
    /// Like [`ShmWorld::abort`], for a world rank on this host or another.
    pub(in crate::comm) fn blame(&self, rank: usize) {
        self.seat.abort(rank);
    }
    /// The world rank that failed first, if any.
    pub fn failed(&self) -> Option<usize> {
        self.seat.failed()
    }
}
impl Member for ShmWorld {
    fn rank(&self) -> usize {
        ShmWorld::rank(self)
    }
    fn size(&self) -> usize {
        ShmWorld::size(self)
    }
    fn group(&self, axis: Axis, ranks: Vec<usize>) -> Result<Arc<dyn Collective>> {
        Ok(ShmWorld::group(self, axis, ranks)?)
    }
    fn set_timeout(&self, timeout: Duration) {
        self.seat.timeout.set(timeout);
    }
    fn abort(&self) {
        ShmWorld::abort(self);
    }
    fn failed(&self) -> Option<usize> {
        ShmWorld::failed(self)
    }
}
impl Drop for ShmWorld {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.abort();
        }
    }
}

/// The launcher's view of a world whose ranks it started.
pub struct ShmWatch {
    words: Seat,
}

impl ShmWatch {
    pub fn new(arena: Arc<Arena>) -> Result<ShmWatch> {
        Ok(ShmWatch { words: Seat::view(arena, 0, Meter::default(), ShmOptions::default().timeout)? })
    }
    /// Aborts on behalf of `rank`, which died.
    pub fn abort(&self, rank: usize) {
        self.words.abort(rank);
    }
    /// Like [`ShmWorld::failed`].
    pub fn failed(&self) -> Option<usize> {
        self.words.failed()
    }
}

/// Runs the ranks of a world as threads of this process, for tests. `meters` has one per rank.
pub fn threads(sizes: MeshSizes, meters: &[Meter]) -> Result<Vec<Mesh>> {
    threads_with(sizes, meters, &ShmOptions { timeout: Duration::from_secs(60) })
}
pub fn threads_with(sizes: MeshSizes, meters: &[Meter], options: &ShmOptions) -> Result<Vec<Mesh>> {
    let arena = Arc::new(Arena::create(sizes.world())?);
    if meters.len() != sizes.world() {
        return Err(Error::op("threads", format!("{} meters for {} ranks", meters.len(), sizes.world())));
    }
    let mesh =
        |(rank, meter): (usize, &Meter)| Mesh::new(ShmWorld::new(arena.clone(), rank, meter.clone(), options)?, sizes);
    meters.iter().enumerate().map(mesh).collect()
}
