//! The one place where a rank's device and its world come from: names in the settings, `auto` resolved, become a [`Seat`].
//! Never computes. The plan calls [`choose`] before any rank starts, the launching process [`prepare`], each rank [`take`].
use crate::base::{Error, Meter, Result};
use crate::comm::cuts::Cutting;
use crate::comm::env::{RankEnv, names_nccl_host};
use crate::comm::hosts::{self, wire::Wire};
use crate::comm::secret::Secret;
use crate::comm::{Member, nccl, shm};
use crate::device::Device;
use crate::device::cpu::CpuDevice;
use crate::device::gpu::cuda::{self, Cuda, Machine};
use crate::device::gpu::graphs::Graphs;
use crate::device::gpu::sim::Sim;
use crate::device::gpu::{Driver, GpuDevice};
use crate::run::plan::Plan;
use crate::run::plan::carrier::Carrier;
use crate::run::settings::DeviceName;
use std::sync::Arc;
use std::time::Duration;

/// What every rank of a run asks for.
pub struct Wanted {
    /// Never `auto`.
    pub device: DeviceName,
    pub carrier: Carrier,
    /// Of --job-secret-file.
    pub secret: Option<Secret>,
    pub ranks_per_gpu: usize,
    pub tf32: bool,
    /// Steps are captured as graphs.
    pub graphs: bool,
    /// Bytes of a rank, as far as they are known before it starts.
    pub planned: usize,
    /// Longest wait for other ranks.
    pub timeout: Duration,
}

impl Wanted {
    /// `env` with the job's secret: a file that was named comes before the environment.
    pub fn known(&self, env: &RankEnv) -> RankEnv {
        RankEnv { secret: self.secret.clone().or(env.secret.clone()), ..env.clone() }
    }
    /// What rank 0 has to say of a job that lets strangers in.
    pub fn caution(&self, env: &RankEnv) -> Option<&'static str> {
        let open = env.rank == 0 && env.world > env.local_world && env.secret.is_none() && self.carrier != Carrier::Mpi;
        open.then_some(
            "no job secret: who reaches the ports of this job can pass for one of its ranks. Give all ranks FLATSHARD_JOB_SECRET or \
             --job-secret-file (docs/hosts.md)",
        )
    }
}

/// Where a rank computes, and how it reaches the others.
pub struct Seat {
    pub device: Arc<dyn Device>,
    pub member: Box<dyn Member>,
    /// Where the device is a real GPU.
    pub gpu: Option<Arc<Cuda>>,
    /// Where steps are captured.
    pub graphs: Option<Arc<Graphs>>,
}

/// What `auto` means on this machine: its GPUs where they can run this build, else the CPU. Any other name as it is.
pub fn choose(name: DeviceName) -> DeviceName {
    let usable = || Machine::probe().and_then(|machine| machine.choose(0, 1).map(|_| ())).is_ok() && cuda::has_blas();
    match name {
        DeviceName::Auto if usable() => DeviceName::Cuda,
        DeviceName::Auto => DeviceName::Cpu,
        name => name,
    }
}

/// Ranks that a host runs when nobody says how many.
pub fn ranks(name: DeviceName, ranks_per_gpu: usize) -> Result<usize> {
    match name {
        DeviceName::Cuda => Ok(Machine::probe()?.gpus.len().max(1) * ranks_per_gpu),
        _ => Ok(2),
    }
}

/// Once on a host, before any rank starts: every local rank has its GPU, and would fit if nothing else were on it.
pub fn prepare(plan: &Plan) -> Result<()> {
    if plan.device != DeviceName::Cuda {
        return Ok(());
    }
    let machine = Machine::probe()?;
    if !cuda::has_blas() {
        return Err(cuda::no_blas());
    }
    for local_rank in 0..plan.nproc {
        let (index, gpu) = machine.choose(local_rank, plan.ranks_per_gpu)?;
        let name = format!("GPU {index} ({})", gpu.name);
        cuda::fits(&name, plan.planned_total(), plan.ranks_per_gpu, gpu.bytes, gpu.bytes)?;
    }
    match plan.mesh.world() {
        1 => Ok(()),
        _ => nccl::present(),
    }
}

/// The driver, or one in front of it that captures.
fn capturing(driver: Arc<dyn Driver>, wanted: bool) -> (Arc<dyn Driver>, Option<Arc<Graphs>>) {
    match wanted {
        true => {
            let graphs = Arc::new(Graphs::new(driver));
            (graphs.clone(), Some(graphs))
        }
        false => (driver, None),
    }
}

/// The device of this rank, and its membership. Returns when all ranks are there.
pub fn take(wanted: &Wanted, env: &RankEnv, meter: Meter) -> Result<Seat> {
    let timeout = wanted.timeout;
    let (device, graphs): (Arc<dyn Device>, _) = match wanted.device {
        DeviceName::Auto | DeviceName::Cpu => (Arc::new(CpuDevice::new(meter.clone())), None),
        DeviceName::Sim => {
            let (driver, graphs) = capturing(Arc::new(Sim::new()), wanted.graphs);
            (Arc::new(GpuDevice::new(driver, meter.clone())?), graphs)
        }
        DeviceName::Cuda => {
            let (local_rank, ranks_per_gpu) = (env.local_rank, wanted.ranks_per_gpu);
            if ranks_per_gpu > 1 && env.local_world > 1 && !names_nccl_host() {
                return Err(Error::input(format!(
                    "--ranks-per-gpu {ranks_per_gpu}: NCCL lets ranks share a GPU where each has a NCCL_HOSTID of its own; start them with \
                     --nproc-per-node, which sets it, or set it for each rank"
                )));
            }
            let options = cuda::CudaOptions { local_rank, ranks_per_gpu, tf32: wanted.tf32 };
            let gpu = Arc::new(Cuda::open(&Machine::probe()?, &options, &meter)?);
            // Of the ranks that share a GPU, those that came before have what they need.
            gpu.require(wanted.planned, 1)?;
            let (driver, graphs) = capturing(gpu.clone(), wanted.graphs);
            let device: Arc<dyn Device> = Arc::new(GpuDevice::new(driver, meter.clone())?);
            let member = nccl::NcclWorld::join(env, gpu.clone(), graphs.clone(), device.clone(), meter, timeout)?;
            return Ok(Seat { device, member: Box::new(member), gpu: Some(gpu), graphs });
        }
    };
    let options = shm::ShmOptions { timeout };
    let member: Box<dyn Member> = match wanted.carrier {
        Carrier::Shm | Carrier::Nccl => Box::new(shm::ShmWorld::join(env, meter, &options)?),
        Carrier::Tcp => Box::new(hosts::HostsWorld::join(env, meter, &options, tcp)?),
        Carrier::Mpi => Box::new(hosts::HostsWorld::join(env, meter, &options, mpi)?),
    };
    let member = match &graphs {
        Some(graphs) => Box::new(Cutting { member, graphs: graphs.clone() }),
        None => member,
    };
    Ok(Seat { device, member, gpu: None, graphs })
}

fn tcp(env: &RankEnv, timeout: Duration) -> Result<Box<dyn Wire>> {
    Ok(Box::new(hosts::tcp::Tcp::join(env, timeout)?))
}
#[cfg(feature = "mpi")]
fn mpi(env: &RankEnv, timeout: Duration) -> Result<Box<dyn Wire>> {
    Ok(Box::new(hosts::mpi::MpiWire::join(env, timeout)?))
}
#[cfg(not(feature = "mpi"))]
fn mpi(env: &RankEnv, _: Duration) -> Result<Box<dyn Wire>> {
    Err(Error::Run(format!("rank {}: this build has no MPI", env.rank))) // the plan has refused it
}
