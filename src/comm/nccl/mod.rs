//! Groups of ranks over NCCL, one process a GPU, on one host or many. Never used by CPU ranks, and not needed by a rank that
//! is alone.
//!
//! | file | what |
//! | --- | --- |
//! | `library` | the functions, found in libnccl.so.2 when it is first needed |
//! | `rendezvous` | how ranks learn the id of their world |
//! | `comm` | one communicator: made, split, polled, aborted |
//! | `work` | what a group asks of NCCL, as a value |
//! | `slot` | memory that collectives use, registered |
//! | `group` | the `Collective` |
//! | `order` | its operations on their streams: begun, awaited, timed |
//! | `captured` | its operations as part of a graph |
//! | `watch` | the thread that ends what hangs |
//!
//! Sums run in NCCL's order, not in rank order: the same on every rank, and not the CPU's bits.
mod captured;
mod comm;
#[cfg(test)]
mod fake;
mod group;
mod library;
mod order;
pub mod rendezvous;
mod slot;
mod watch;
mod work;

use super::env::RankEnv;
use super::solo::Solo;
use super::{Axis, Collective, Member, Patience, shm};
use crate::base::{Error, Meter, Result};
use crate::device::Device;
use crate::device::gpu::cuda::Cuda;
use crate::device::gpu::graphs::Graphs;
use comm::Comm;
use group::{Channel, Group};
use library::Nccl;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;
use watch::Watch;

/// An input error where there is no usable NCCL.
pub fn present() -> Result<()> {
    Nccl::load().map(|_| ())
}

/// Variables for a rank that shares its GPU with another, for tests: NCCL refuses two ranks of one host on one GPU, and takes
/// ranks of hosts with different names, which then talk over sockets. Slow; correctness only.
pub fn shared_gpu(rank: usize) -> [(&'static str, String); 6] {
    [
        ("NCCL_HOSTID", format!("flatshard{rank}")),
        ("NCCL_SOCKET_IFNAME", "=lo".into()),
        ("NCCL_IB_DISABLE", "1".into()),
        ("NCCL_P2P_DISABLE", "1".into()),
        ("NCCL_SHM_DISABLE", "1".into()),
        ("NCCL_NVLS_ENABLE", "0".into()),
    ]
}

/// One rank's membership in a world of GPUs.
pub struct World {
    rank: usize,
    size: usize,
    cuda: Arc<Cuda>,
    /// Where steps are captured.
    graphs: Option<Arc<Graphs>>,
    device: Arc<dyn Device>,
    meter: Meter,
    /// `None`: alone.
    engine: Option<Engine>,
    /// On one host, started by our own launcher: where ranks tell each other that they failed.
    host: Option<Arc<shm::World>>,
}

struct Engine {
    /// Dropped first: nothing is watched while communicators end.
    watch: Watch,
    channels: Mutex<Vec<Arc<Channel>>>,
}

impl World {
    /// Returns when all ranks are there. `device` runs on `cuda`, by way of `graphs` where steps are captured.
    pub fn join(
        env: &RankEnv,
        cuda: Arc<Cuda>,
        graphs: Option<Arc<Graphs>>,
        device: Arc<dyn Device>,
        meter: Meter,
        timeout: Duration,
    ) -> Result<World> {
        let options = shm::Options { timeout };
        let host = match env.arena_fd {
            Some(_) if env.local_world == env.world => Some(shm::World::join(env, meter.clone(), &options)?),
            _ => None,
        };
        let host = host.map(Arc::new);
        let (rank, size) = (env.rank, env.world);
        let engine = match size {
            1 => None,
            _ => Some(Engine::start(env, &cuda, host.clone(), timeout)?),
        };
        Ok(World { rank, size, cuda, graphs, device, meter, engine, host })
    }
}

impl Engine {
    fn start(env: &RankEnv, cuda: &Arc<Cuda>, host: Option<Arc<shm::World>>, timeout: Duration) -> Result<Engine> {
        let nccl = Nccl::load()?;
        let id = rendezvous::exchange(env, timeout, || comm::unique_id(&nccl))?;
        cuda.context().bind_to_thread().map_err(|e| cuda.failed("bind", e))?;
        let stop = || failed_rank(host.as_deref());
        let comm = Arc::new(Comm::init(nccl, id, env.rank, env.world, timeout, &stop)?);
        let channel = Channel::new(comm, cuda.stream()?, (0..env.world).collect());
        let watch = Watch::start(cuda.clone(), host.clone(), timeout)?;
        Ok(Engine { watch, channels: Mutex::new(vec![Arc::new(channel)]) })
    }

    /// The communicator of `ranks`: one that there is, or split off the world's. Every rank of the world makes the same
    /// calls: which axes have equal groups follows from the sizes of the mesh alone.
    fn channel(&self, world: &World, ranks: Vec<usize>) -> Result<Arc<Channel>> {
        let mut channels = self.channels.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(known) = channels.iter().find(|c| c.ranks == ranks) {
            return Ok(known.clone());
        }
        let key = ranks.iter().position(|&r| r == world.rank);
        let (Some(key), Some(&color), Some(all)) = (key, ranks.first(), channels.first()) else {
            return Err(Error::op("group", format!("rank {} is not among {ranks:?}", world.rank)));
        };
        world.cuda.context().bind_to_thread().map_err(|e| world.cuda.failed("bind", e))?;
        let comm = Arc::new(all.comm.split(color, key, &|| failed_rank(world.host.as_deref()))?);
        let channel = Arc::new(Channel::new(comm, world.cuda.stream()?, ranks));
        channels.push(channel.clone());
        Ok(channel)
    }
}

impl World {
    /// See [Note: abort] in `comm`.
    fn forget_graphs(&self) {
        if let Some(graphs) = &self.graphs {
            graphs.forget();
        }
    }
}

/// "rank 3 failed", as far as this rank knows.
fn failed_rank(host: Option<&shm::World>) -> Option<String> {
    host.and_then(shm::World::failed).map(|rank| format!("rank {rank} failed"))
}

impl Member for World {
    fn rank(&self) -> usize {
        self.rank
    }
    fn size(&self) -> usize {
        self.size
    }
    fn group(&self, axis: Axis, ranks: Vec<usize>) -> Result<Arc<dyn Collective>> {
        let Some(engine) = self.engine.as_ref().filter(|_| ranks.len() > 1) else {
            return Ok(Arc::new(Solo::new(self.device.clone(), axis, self.rank)));
        };
        let channel = engine.channel(self, ranks)?;
        let graphs = self.graphs.clone();
        let group = Group::new(self.cuda.clone(), graphs, channel, axis, self.rank, self.meter.clone())?;
        engine.watch.add(&group);
        Ok(group)
    }
    fn set_timeout(&self, timeout: Duration) {
        if let Some(host) = &self.host {
            host.set_timeout(timeout);
        }
        if let Some(engine) = &self.engine {
            engine.watch.set_timeout(timeout);
        }
    }
    /// On one host the others learn it at once; elsewhere they see this rank's connections end, or wait out their timeout.
    fn abort(&self) {
        self.forget_graphs();
        if let Some(host) = &self.host {
            host.abort();
        }
        if let Some(engine) = &self.engine {
            engine.watch.end(&format!("rank {} failed", self.rank));
        }
    }
    fn failed(&self) -> Option<usize> {
        self.host.as_ref().and_then(|host| host.failed())
    }
}

impl Drop for World {
    fn drop(&mut self) {
        self.forget_graphs();
        if std::thread::panicking() {
            self.abort();
        }
    }
}
