//! CPU ranks on several hosts: shared memory inside a host, a wire between them. Never used where all ranks are on one host.
//!
//! | file | what |
//! | --- | --- |
//! | `wire` | what carries bytes between hosts, as traits |
//! | `tcp`, `control` | the wire over TCP; word of lost ranks |
//! | `messages` | what is said over TCP, as values |
//! | `roster` | which rank is on which host |
//! | `mpi` | the wire of MPI, with the cargo feature `mpi` |
//! | `link` | what a rank's groups share |
//! | `group` | the `Collective`: checks, starts, waits |
//! | `worker`, `job` | the thread that runs the operations |
//! | `post` | one rank's place in a group: columns, messages, meetings |
//! | `steps` | gathers, broadcasts, pairs |
//! | `chain` | sums in rank order |
mod chain;
mod control;
mod group;
mod job;
mod link;
pub mod messages;
#[cfg(feature = "mpi")]
pub mod mpi;
mod post;
pub mod roster;
mod steps;
pub mod tcp;
pub mod wire;
mod worker;

use super::env::RankEnv;
use super::{Axis, Collective, Member, Mesh, MeshSizes, shm};
use crate::base::{Error, Meter, Result};
use group::Group;
use link::Link;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::thread::JoinHandle;
use std::time::Duration;
use wire::{LOOK, Wire};

/// One rank's membership in a world of several hosts. Dropped by a panic, it tells the other ranks.
pub struct World {
    link: Arc<Link>,
    watch: Arc<Watch>,
}

/// The thread that hears of lost ranks and lets peers connect, for as long as there is a member or a group.
struct Watch {
    ended: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Watch {
    fn start(link: &Arc<Link>) -> Result<Watch> {
        let ended = Arc::new(AtomicBool::new(false));
        let watched = (link.clone(), ended.clone());
        let watch = move || {
            let (link, ended) = watched;
            while !ended.load(Relaxed) {
                if let Some(lost) = link.wire.listen(LOOK) {
                    return link.learn(lost);
                }
            }
        };
        let thread = std::thread::Builder::new().name("hosts watch".into()).spawn(watch);
        let thread = thread.map_err(|e| Error::Run(format!("cannot start a thread: {e}")))?;
        Ok(Watch { ended, thread: Some(thread) })
    }
}
impl Drop for Watch {
    fn drop(&mut self) {
        self.ended.store(true, Relaxed);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join(); // a watcher that panicked has nothing to add
        }
    }
}

impl World {
    /// Returns when all ranks are there. `connect` joins the wire, once this host's ranks have met.
    pub fn join(
        env: &RankEnv,
        meter: Meter,
        options: &shm::Options,
        connect: impl FnOnce(&RankEnv, Duration) -> Result<Box<dyn Wire>>,
    ) -> Result<World> {
        let local = shm::World::join_host(env, meter, options)?;
        let wire = connect(env, options.timeout).inspect_err(|_| local.blame(env.rank))?;
        World::new(env.rank, local, wire)
    }
    fn new(rank: usize, local: shm::World, wire: Box<dyn Wire>) -> Result<World> {
        let link = Arc::new(Link::new(rank, wire, local));
        let watch = Arc::new(Watch::start(&link)?);
        Ok(World { link, watch })
    }
    /// What goes between the hosts: for measurements, which use a channel of their own.
    pub fn wire(&self) -> &dyn Wire {
        &*self.link.wire
    }
}

impl Member for World {
    fn rank(&self) -> usize {
        self.link.rank
    }
    fn size(&self) -> usize {
        self.link.wire.roster().ranks()
    }
    fn group(&self, axis: Axis, ranks: Vec<usize>) -> Result<Arc<dyn Collective>> {
        let roster = self.link.wire.roster();
        let here = roster.host(self.link.rank);
        if ranks.iter().all(|&rank| roster.host(rank) == here) {
            let seats = ranks.into_iter().map(|rank| self.link.seat(rank)).collect();
            return Ok(self.link.local.group(axis, seats)?);
        }
        Ok(Arc::new(Group::new(self.link.clone(), self.watch.clone(), axis, ranks)?))
    }
    fn set_timeout(&self, timeout: Duration) {
        self.link.local.set_timeout(timeout);
    }
    fn abort(&self) {
        self.link.abort();
    }
    fn failed(&self) -> Option<usize> {
        self.link.local.failed()
    }
}

impl Drop for World {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.abort();
        }
    }
}

/// The ranks of a world as threads of this process, `per_host` of them on each pretended host, over TCP: for tests. `meters` has
/// one for each rank.
pub fn threads(sizes: MeshSizes, per_host: usize, meters: &[Meter], options: &shm::Options) -> Result<Vec<Mesh>> {
    let world = sizes.world();
    let arenas = (0..world / per_host).map(|_| Ok(Arc::new(shm::Arena::create(per_host)?)));
    let arenas: Vec<_> = arenas.collect::<Result<_>>()?;
    let probe = std::net::TcpListener::bind(("127.0.0.1", 0)).and_then(|listener| listener.local_addr());
    let port = probe.map_err(|e| Error::Run(format!("no free port: {e}")))?.port();
    let join = |rank: usize| {
        let env = RankEnv {
            rank,
            world,
            local_rank: rank % per_host,
            local_world: per_host,
            host: format!("host{}", rank / per_host),
            master_addr: "127.0.0.1".into(),
            master_port: port,
            run_id: format!("threads {}", std::process::id()),
            arena_fd: None,
            parent_pid: None,
            restart: None,
            secret: None,
            mpi: false,
        };
        let meter = meters.get(rank).cloned().unwrap_or_default();
        let arena = arenas[rank / per_host].clone();
        let local = shm::World::on_host(arena, env.local_rank, rank - env.local_rank, meter, options)?;
        let wire = Box::new(tcp::Tcp::join(&env, options.timeout)?);
        World::new(rank, local, wire)
    };
    let members: Vec<World> = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..world).map(|rank| scope.spawn(move || join(rank))).collect();
        let joined = threads.into_iter().map(|t| t.join().map_err(|_| Error::Run("a rank panicked".into()))?);
        joined.collect::<Result<_>>()
    })?;
    members.into_iter().map(|member| Mesh::new(member, sizes)).collect()
}
