//! Groups of ranks on one host over shared memory: processes, or threads in tests, by the same code. Never starts a
//! thread and never spins for longer than about 100 microseconds.
//!
//! | file | what |
//! | --- | --- |
//! | `arena` | the shared file and its mappings |
//! | `words` | the words that order all accesses to it, and the memory orderings |
//! | `seat` | one rank: its bell (futex), the abort word, its live buffers |
//! | `record` | what ranks publish about an operation, and the mailboxes |
//! | `op` | the steps of each kind of operation |
//! | `mail` | the steps that go through mailboxes |
//! | `sum` | reductions in rank order |
//! | `buffer` | what `alloc` gives: who still reads it, when its memory goes back |
//! | `group` | progress, starts and waits |
//! | `calls` | the `Collective` |
//! | `part` | what a group over several hosts does on each of them |
//! | `rendezvous` | how ranks of other launchers find the arena |
mod arena;
mod buffer;
mod calls;
mod group;
mod mail;
mod op;
mod part;
mod record;
mod rendezvous;
mod seat;
mod sum;
mod words;

pub use arena::Arena;
pub(in crate::comm) use buffer::Shared;
pub use group::Group;
pub(in crate::comm) use part::Passed;
pub(in crate::comm) use record::{Desc, Kind};
pub(in crate::comm) use sum::{Fold, Sources};

use super::env::RankEnv;
use super::mesh::{Mesh, MeshSizes};
use super::{Axis, Collective, Member, Waiting};
use crate::base::{Error, Meter, Result};
use group::LOOK;
use seat::Seat;
use std::sync::Arc;
use std::time::{Duration, Instant};

#[derive(Clone, Debug)]
pub struct Options {
    /// How long a call into a group may block before it fails.
    pub timeout: Duration,
}
impl Default for Options {
    fn default() -> Options {
        Options { timeout: Duration::from_secs(600) }
    }
}

/// One rank's membership in the world. Dropped by a panic, it tells the other ranks.
pub struct World {
    seat: Arc<Seat>,
}

impl World {
    /// Takes the seat of `rank`. Does not wait for the others.
    pub fn new(arena: Arc<Arena>, rank: usize, meter: Meter, options: &Options) -> Result<World> {
        if rank >= arena.world() {
            return Err(Error::input(format!("rank {rank} of a world of {} ranks", arena.world())));
        }
        Ok(World { seat: Arc::new(Seat::take(arena, rank, 0, meter, options.timeout)?) })
    }
    /// The world of a process that a launcher started, all on this host. Returns when all its ranks are there.
    pub fn join(env: &RankEnv, meter: Meter, options: &Options) -> Result<World> {
        if env.local_world != env.world {
            return Err(Error::input(format!(
                "{} of {} ranks are on this host: --comm shm moves data in one host's memory; leave --comm out",
                env.local_world, env.world
            )));
        }
        let Some(fd) = env.arena_fd else { return World::join_host(env, meter, options) };
        let world = World::new(Arc::new(Arena::open(fd, env.world)?), env.rank, meter, options)?;
        world.seat.assemble(Instant::now() + options.timeout)?;
        Ok(world)
    }
    /// As [`World::join`], of the ranks that are on this host: the only ones of this world, whose ranks are local ranks.
    pub(in crate::comm) fn join_host(env: &RankEnv, meter: Meter, options: &Options) -> Result<World> {
        Ok(World { seat: Arc::new(rendezvous::meet(env, meter, options)?) })
    }
    /// As [`World::new`]; messages name the ranks from `first` on.
    pub(in crate::comm) fn on_host(
        arena: Arc<Arena>,
        rank: usize,
        first: usize,
        meter: Meter,
        options: &Options,
    ) -> Result<World> {
        Ok(World { seat: Arc::new(Seat::take(arena, rank, first, meter, options.timeout)?) })
    }
    pub fn rank(&self) -> usize {
        self.seat.rank
    }
    pub fn size(&self) -> usize {
        self.seat.arena.world()
    }
    /// The group of `ranks` (world ranks in group order, this one among them). Made once per axis by every member.
    pub fn group(&self, axis: Axis, ranks: Vec<usize>) -> Result<Arc<Group>> {
        Group::new(self.seat.clone(), axis, ranks, None)
    }
    /// As [`World::group`], for a thread that uses it while `waiting` says whether the rank waits.
    pub(in crate::comm) fn group_for(
        &self,
        axis: Axis,
        ranks: Vec<usize>,
        waiting: Arc<Waiting>,
    ) -> Result<Arc<Group>> {
        Group::new(self.seat.clone(), axis, ranks, Some(waiting))
    }
    /// Blocks until it is so. Looks when this rank's bell rings, and meanwhile moves on what its groups have pending.
    pub(in crate::comm) fn rest_until(&self, is_so: &mut dyn FnMut() -> bool) {
        loop {
            let heard = self.seat.bell_count();
            if is_so() {
                return;
            }
            self.seat.progress_others(None);
            self.seat.listen(heard, LOOK);
        }
    }
    /// Rings this rank's own bell, for its other threads.
    pub(in crate::comm) fn ring(&self) {
        self.seat.ring(self.seat.rank);
    }
    pub(in crate::comm) fn timeout(&self) -> Duration {
        self.seat.timeout.get()
    }
    /// This rank failed: calls of the others into any group end at once with "rank N failed".
    pub fn abort(&self) {
        self.blame(self.seat.name(self.seat.rank));
    }
    /// As [`World::abort`] by a world rank, of this host or another.
    pub(in crate::comm) fn blame(&self, rank: usize) {
        self.seat.abort(rank);
    }
    /// The first rank that called [`World::abort`], if any did; a world rank.
    pub fn failed(&self) -> Option<usize> {
        self.seat.failed()
    }
}
impl Member for World {
    fn rank(&self) -> usize {
        World::rank(self)
    }
    fn size(&self) -> usize {
        World::size(self)
    }
    fn group(&self, axis: Axis, ranks: Vec<usize>) -> Result<Arc<dyn Collective>> {
        Ok(World::group(self, axis, ranks)?)
    }
    fn set_timeout(&self, timeout: Duration) {
        self.seat.timeout.set(timeout);
    }
    fn abort(&self) {
        World::abort(self);
    }
    fn failed(&self) -> Option<usize> {
        World::failed(self)
    }
}
impl Drop for World {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.abort();
        }
    }
}

/// What the process that started the ranks sees of their world: it is none of them.
pub struct Watch {
    words: Seat,
}

impl Watch {
    pub fn new(arena: Arc<Arena>) -> Result<Watch> {
        Ok(Watch { words: Seat::view(arena, 0, Meter::default(), Options::default().timeout)? })
    }
    /// `rank` is dead and cannot say so itself: as [`World::abort`] by that rank.
    pub fn abort(&self, rank: usize) {
        self.words.abort(rank);
    }
    /// As [`World::failed`].
    pub fn failed(&self) -> Option<usize> {
        self.words.failed()
    }
}

/// The ranks of a world as threads of this process: for tests. `meters` has one for each rank.
pub fn threads(sizes: MeshSizes, meters: &[Meter]) -> Result<Vec<Mesh>> {
    threads_with(sizes, meters, &Options { timeout: Duration::from_secs(60) })
}
pub fn threads_with(sizes: MeshSizes, meters: &[Meter], options: &Options) -> Result<Vec<Mesh>> {
    let arena = Arc::new(Arena::create(sizes.world())?);
    if meters.len() != sizes.world() {
        return Err(Error::op("threads", format!("{} meters for {} ranks", meters.len(), sizes.world())));
    }
    let mesh =
        |(rank, meter): (usize, &Meter)| Mesh::new(World::new(arena.clone(), rank, meter.clone(), options)?, sizes);
    meters.iter().enumerate().map(mesh).collect()
}
