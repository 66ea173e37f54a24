//! A world of several hosts: joining, and creating groups. Never moves data.
use super::group::HostsGroup;
use super::link::Link;
use super::tcp;
use super::watch::HostsWatch;
use super::wire::Wire;
use crate::base::{Error, Meter, Result};
use crate::comm::env::RankEnv;
use crate::comm::{Axis, Collective, Member, Mesh, MeshSizes, shm};
use std::sync::Arc;
use std::time::Duration;

/// One rank's membership in a world of several hosts. If dropped by a panic, it notifies the other ranks.
pub struct HostsWorld {
    link: Arc<Link>,
    watch: Arc<HostsWatch>,
}

impl HostsWorld {
    /// Returns when all ranks have joined. `connect` joins the wire, once this host's ranks have met.
    pub fn join(
        env: &RankEnv,
        meter: Meter,
        options: &shm::ShmOptions,
        connect: impl FnOnce(&RankEnv, Duration) -> Result<Box<dyn Wire>>,
    ) -> Result<HostsWorld> {
        let local = shm::ShmWorld::join_host(env, meter, options)?;
        let wire = connect(env, options.timeout).inspect_err(|_| local.blame(env.rank))?;
        HostsWorld::new(env.rank, local, wire)
    }
    fn new(rank: usize, local: shm::ShmWorld, wire: Box<dyn Wire>) -> Result<HostsWorld> {
        let link = Arc::new(Link::new(rank, wire, local));
        let watch = Arc::new(HostsWatch::start(&link)?);
        Ok(HostsWorld { link, watch })
    }
    /// The transport between hosts: for measurements, on a channel of their own.
    pub fn wire(&self) -> &dyn Wire {
        &*self.link.wire
    }
}

impl Member for HostsWorld {
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
        Ok(Arc::new(HostsGroup::new(self.link.clone(), self.watch.clone(), axis, ranks)?))
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

impl Drop for HostsWorld {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.abort();
        }
    }
}

/// Runs the ranks of a world as threads of this process over TCP, `per_host` of them on each simulated host: for tests.
/// `meters` has one per rank.
pub fn threads(sizes: MeshSizes, per_host: usize, meters: &[Meter], options: &shm::ShmOptions) -> Result<Vec<Mesh>> {
    let world = sizes.world();
    let arenas = (0..world / per_host).map(|_| Ok(Arc::new(shm::Arena::create(per_host)?)));
    let arenas: Vec<_> = arenas.collect::<Result<_>>()?;
    let probe = std::net::TcpListener::bind(("127.0.0.1", 0)).and_then(|listener| listener.local_addr());
    let port = probe.map_err(|e| Error::Run(format!("cannot find a free port: {e}")))?.port();
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
            secret: None,
            mpi: false,
        };
        let meter = meters.get(rank).cloned().unwrap_or_default();
        let arena = arenas[rank / per_host].clone();
        let local = shm::ShmWorld::on_host(arena, env.local_rank, rank - env.local_rank, meter, options)?;
        let wire = Box::new(tcp::Tcp::join(&env, options.timeout)?);
        HostsWorld::new(rank, local, wire)
    };
    let members: Vec<HostsWorld> = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..world).map(|rank| scope.spawn(move || join(rank))).collect();
        let joined = threads.into_iter().map(|t| t.join().map_err(|_| Error::Run("a rank panicked".into()))?);
        joined.collect::<Result<_>>()
    })?;
    members.into_iter().map(|member| Mesh::new(member, sizes)).collect()
}
