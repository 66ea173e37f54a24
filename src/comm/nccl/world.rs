//! A world of GPUs: its communicators, its groups, and aborting them when a rank fails. Never enqueues an operation.
use super::comm::{self, Comm};
use super::group::{NcclChannel, NcclGroup};
use super::library::Nccl;
use super::rendezvous;
use super::watch::{NcclWatch, failed_rank};
use crate::base::{Error, Meter, Result};
use crate::comm::env::RankEnv;
use crate::comm::solo::Solo;
use crate::comm::{Axis, Collective, Member, shm};
use crate::device::Device;
use crate::device::gpu::cuda::Cuda;
use crate::device::gpu::graphs::Graphs;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

/// Environment for tests in which ranks share a GPU. NCCL refuses two ranks of one host on one GPU, but accepts ranks
/// whose hosts have different names, which then communicate over sockets. Slow; for correctness only.
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
pub struct NcclWorld {
    rank: usize,
    size: usize,
    cuda: Arc<Cuda>,
    /// Set if steps are captured.
    graphs: Option<Arc<Graphs>>,
    device: Arc<dyn Device>,
    meter: Meter,
    /// `None` for a single rank.
    communicators: Option<Communicators>,
    /// On one host with our own launcher: where ranks report that they failed.
    host: Option<Arc<shm::ShmWorld>>,
}

struct Communicators {
    /// Dropped first: nothing is monitored while communicators shut down.
    watch: NcclWatch,
    channels: Mutex<Vec<Arc<NcclChannel>>>,
}

impl NcclWorld {
    /// Returns when all ranks have joined. `device` runs on `cuda`, through `graphs` if steps are captured.
    pub fn join(
        env: &RankEnv,
        cuda: Arc<Cuda>,
        graphs: Option<Arc<Graphs>>,
        device: Arc<dyn Device>,
        meter: Meter,
        timeout: Duration,
    ) -> Result<NcclWorld> {
        let options = shm::ShmOptions { timeout };
        let host = match env.arena_fd {
            Some(_) if env.local_world == env.world => Some(shm::ShmWorld::join(env, meter.clone(), &options)?),
            _ => None,
        };
        let host = host.map(Arc::new);
        let (rank, size) = (env.rank, env.world);
        let communicators = match size {
            1 => None,
            _ => Some(Communicators::start(env, &cuda, host.clone(), timeout)?),
        };
        Ok(NcclWorld { rank, size, cuda, graphs, device, meter, communicators, host })
    }
}

impl Communicators {
    fn start(
        env: &RankEnv,
        cuda: &Arc<Cuda>,
        host: Option<Arc<shm::ShmWorld>>,
        timeout: Duration,
    ) -> Result<Communicators> {
        let nccl = Nccl::load()?;
        let id = rendezvous::exchange(env, timeout, || comm::unique_id(&nccl))?;
        cuda.context().bind_to_thread().map_err(|e| cuda.failed("bind", e))?;
        let stop = || failed_rank(host.as_deref());
        let comm = Arc::new(Comm::init(nccl, id, env.rank, env.world, timeout, &stop)?);
        let channel = NcclChannel::new(comm, cuda.stream()?, (0..env.world).collect());
        let watch = NcclWatch::start(cuda.clone(), host.clone(), timeout)?;
        Ok(Communicators { watch, channels: Mutex::new(vec![Arc::new(channel)]) })
    }

    /// The communicator of `ranks`: an existing one, or one split off the world's. Every rank of the world makes the
    /// same calls: the mesh sizes alone determine which axes have equal groups.
    fn channel(&self, world: &NcclWorld, ranks: Vec<usize>) -> Result<Arc<NcclChannel>> {
        let mut channels = self.channels.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(known) = channels.iter().find(|c| c.ranks == ranks) {
            return Ok(known.clone());
        }
        let key = ranks.iter().position(|&r| r == world.rank);
        let (Some(key), Some(&color), Some(all)) = (key, ranks.first(), channels.first()) else {
            return Err(Error::op("group", format!("rank {} is not in {ranks:?}", world.rank)));
        };
        world.cuda.context().bind_to_thread().map_err(|e| world.cuda.failed("bind", e))?;
        let comm = Arc::new(all.comm.split(color, key, &|| failed_rank(world.host.as_deref()))?);
        let channel = Arc::new(NcclChannel::new(comm, world.cuda.stream()?, ranks));
        channels.push(channel.clone());
        Ok(channel)
    }
}

impl NcclWorld {
    /// See [Note: abort] in `comm`.
    fn forget_graphs(&self) {
        if let Some(graphs) = &self.graphs {
            graphs.forget();
        }
    }
}

impl Member for NcclWorld {
    fn rank(&self) -> usize {
        self.rank
    }
    fn size(&self) -> usize {
        self.size
    }
    fn group(&self, axis: Axis, ranks: Vec<usize>) -> Result<Arc<dyn Collective>> {
        let Some(communicators) = self.communicators.as_ref().filter(|_| ranks.len() > 1) else {
            return Ok(Arc::new(Solo::new(self.device.clone(), axis, self.rank)));
        };
        let channel = communicators.channel(self, ranks)?;
        let graphs = self.graphs.clone();
        let group = NcclGroup::new(self.cuda.clone(), graphs, channel, axis, self.rank, self.meter.clone())?;
        communicators.watch.add(&group);
        Ok(group)
    }
    fn set_timeout(&self, timeout: Duration) {
        if let Some(host) = &self.host {
            host.set_timeout(timeout);
        }
        if let Some(communicators) = &self.communicators {
            communicators.watch.set_timeout(timeout);
        }
    }
    /// On one host the other ranks learn of it at once. Elsewhere they see this rank's connections close, or time out.
    fn abort(&self) {
        self.forget_graphs();
        if let Some(host) = &self.host {
            host.abort();
        }
        if let Some(communicators) = &self.communicators {
            communicators.watch.end(&format!("rank {} failed", self.rank));
        }
    }
    fn failed(&self) -> Option<usize> {
        self.host.as_ref().and_then(|host| host.failed())
    }
}

impl Drop for NcclWorld {
    fn drop(&mut self) {
        self.forget_graphs();
        if std::thread::panicking() {
            self.abort();
        }
    }
}
