//! A world of GPUs: its channels, its groups, and aborting them when a rank fails. Never enqueues an operation.
use super::comm::{self, Comm};
use super::group::{NcclChannel, NcclGroup};
use super::library::{Nccl, NcclOptions};
use super::rendezvous;
use super::transport::{NcclTransport, Transport};
use super::watch::{NcclWatch, failed_rank};
use crate::base::{Error, Meter, Result};
use crate::comm::env::RankEnv;
use crate::comm::ipc::link::IpcLink;
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
    /// On one host with our own launcher, or over IPC: where ranks report that they failed.
    host: Option<Arc<shm::ShmWorld>>,
}

struct Communicators {
    /// Dropped first: nothing is monitored while communicators shut down.
    watch: NcclWatch,
    channels: Mutex<Vec<Arc<NcclChannel>>>,
    kind: TransportKind,
}

/// How further channels are made.
enum TransportKind {
    /// Split off the world's communicator.
    Nccl(Arc<Comm>),
    Ipc(Arc<shm::ShmWorld>),
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
        nccl: NcclOptions,
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
            _ => Some(Communicators::start(env, &cuda, host.clone(), timeout, nccl)?),
        };
        Ok(NcclWorld { rank, size, cuda, graphs, device, meter, communicators, host })
    }
    /// Like [`NcclWorld::join`], of ranks of one host whose groups copy between their GPUs' memory, without NCCL.
    /// Nothing of theirs is captured.
    pub fn join_by_ipc(
        env: &RankEnv,
        cuda: Arc<Cuda>,
        device: Arc<dyn Device>,
        meter: Meter,
        timeout: Duration,
    ) -> Result<NcclWorld> {
        let host = Arc::new(shm::ShmWorld::join(env, meter.clone(), &shm::ShmOptions { timeout })?);
        let communicators = match env.world {
            1 => None,
            _ => {
                let watch = NcclWatch::start(cuda.clone(), Some(host.clone()), timeout)?;
                Some(Communicators { watch, channels: Mutex::default(), kind: TransportKind::Ipc(host.clone()) })
            }
        };
        let (rank, size) = (env.rank, env.world);
        Ok(NcclWorld { rank, size, cuda, graphs: None, device, meter, communicators, host: Some(host) })
    }
}

impl Communicators {
    fn start(
        env: &RankEnv,
        cuda: &Arc<Cuda>,
        host: Option<Arc<shm::ShmWorld>>,
        timeout: Duration,
        options: NcclOptions,
    ) -> Result<Communicators> {
        let nccl = Nccl::load()?;
        nccl.provides(&options)?;
        let id = rendezvous::exchange(env, timeout, || comm::unique_id(&nccl))?;
        cuda.context().bind_to_thread().map_err(|e| cuda.failed("bind", e))?;
        let stop = || failed_rank(host.as_deref());
        let comm = Arc::new(Comm::init(nccl, options, id, (env.rank, env.world), timeout, &stop)?);
        let transport = Arc::new(NcclTransport { comm: comm.clone(), cuda: cuda.clone(), index: env.rank });
        let channel = NcclChannel::new(transport, cuda.stream()?, (0..env.world).collect());
        let watch = NcclWatch::start(cuda.clone(), host.clone(), timeout)?;
        Ok(Communicators { watch, channels: Mutex::new(vec![Arc::new(channel)]), kind: TransportKind::Nccl(comm) })
    }

    /// The channel of `ranks`: an existing one, or a new one. Every rank of the world makes the same calls: the mesh
    /// sizes alone determine which axes have equal groups.
    fn channel(&self, world: &NcclWorld, axis: Axis, ranks: Vec<usize>) -> Result<Arc<NcclChannel>> {
        let mut channels = self.channels.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(known) = channels.iter().find(|c| c.ranks == ranks) {
            return Ok(known.clone());
        }
        let key = ranks.iter().position(|&r| r == world.rank);
        let (Some(index), Some(&color)) = (key, ranks.first()) else {
            return Err(Error::op("group", format!("rank {} is not in {ranks:?}", world.rank)));
        };
        world.cuda.context().bind_to_thread().map_err(|e| world.cuda.failed("bind", e))?;
        let (cuda, stream) = (world.cuda.clone(), world.cuda.stream()?);
        let transport: Arc<dyn Transport> = match &self.kind {
            TransportKind::Nccl(all) => {
                let comm = Arc::new(all.split(color, index, &|| failed_rank(world.host.as_deref()))?);
                Arc::new(NcclTransport { comm, cuda, index })
            }
            TransportKind::Ipc(host) => {
                let control = host.group(axis, ranks.clone())?;
                Arc::new(IpcLink::join(control, cuda, stream.clone(), &world.meter, ranks.clone())?)
            }
        };
        let channel = Arc::new(NcclChannel::new(transport, stream, ranks));
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
        let channel = communicators.channel(self, axis, ranks)?;
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
