//! Opens a rank's device and joins its world group, as the plan says. Never computes.
use crate::base::{Error, Meter, Result};
use crate::comm::cuts::Cutting;
use crate::comm::env::{RankEnv, names_nccl_host};
use crate::comm::hosts::{self, wire::Wire};
use crate::comm::{Member, nccl, shm};
use crate::device::Device;
use crate::device::cpu::CpuDevice;
use crate::device::gpu::cuda::{self, Cuda, Machine};
use crate::device::gpu::graphs::Graphs;
use crate::device::gpu::sim::Sim;
use crate::device::gpu::{Driver, GpuDevice};
use crate::run::plan::carrier::Carrier;
use crate::run::plan::ranks::RankPlan;
use crate::run::settings::DeviceName;
use std::sync::Arc;
use std::time::Duration;

/// A rank's device and its membership in the world group.
pub struct RankDevice {
    pub device: Arc<dyn Device>,
    pub member: Arc<dyn Member>,
    /// Set on a real GPU.
    pub gpu: Option<Arc<Cuda>>,
    /// Set if steps are captured as CUDA graphs.
    pub graphs: Option<Arc<Graphs>>,
}

/// The driver, wrapped in one that captures graphs if `wanted`.
fn capturing(driver: Arc<dyn Driver>, wanted: bool) -> (Arc<dyn Driver>, Option<Arc<Graphs>>) {
    match wanted {
        true => {
            let graphs = Arc::new(Graphs::new(driver));
            (graphs.clone(), Some(graphs))
        }
        false => (driver, None),
    }
}

/// The device of this rank, and its membership. Returns when all ranks have joined.
pub fn take(plan: &RankPlan, env: &RankEnv, meter: Meter) -> Result<RankDevice> {
    let timeout = plan.init_timeout;
    let (device, graphs): (Arc<dyn Device>, _) = match plan.device {
        DeviceName::Auto | DeviceName::Cpu => {
            (Arc::new(CpuDevice::new(meter.clone()).with_threads(plan.threads)?), None)
        }
        DeviceName::Sim => {
            let (driver, graphs) = capturing(Arc::new(Sim::new()), plan.graphs);
            (Arc::new(GpuDevice::new(driver, meter.clone())?.with_host_threads(plan.threads)), graphs)
        }
        DeviceName::Cuda => {
            let (local_rank, ranks_per_gpu) = (env.local_rank, plan.ranks_per_gpu);
            let by_ipc = plan.carrier == Carrier::Ipc;
            if ranks_per_gpu > 1 && env.local_world > 1 && !by_ipc && !names_nccl_host() {
                return Err(Error::input(format!(
                    "--ranks-per-gpu {ranks_per_gpu}: NCCL needs a distinct NCCL_HOSTID for each rank that shares a \
                    GPU. Start the ranks \
                     with --nproc-per-node, which sets it, or set it for each rank"
                )));
            }
            let options = cuda::CudaOptions { local_rank, ranks_per_gpu, tf32: plan.tf32 };
            let gpu = Arc::new(Cuda::open(&Machine::probe()?, &options, &meter)?);
            // Ranks that share the GPU and started earlier already hold their memory.
            gpu.require(plan.planned, 1)?;
            let (driver, graphs) = capturing(gpu.clone(), plan.graphs);
            let device: Arc<dyn Device> =
                Arc::new(GpuDevice::new(driver, meter.clone())?.with_host_threads(plan.threads));
            let member: Arc<dyn Member> = match by_ipc {
                true => {
                    let member = nccl::NcclWorld::join_by_ipc(env, gpu.clone(), device.clone(), meter, timeout)?;
                    cutting(Arc::new(member), &graphs)
                }
                false => {
                    let graphs = graphs.clone();
                    Arc::new(nccl::NcclWorld::join(
                        env,
                        gpu.clone(),
                        graphs,
                        device.clone(),
                        meter,
                        timeout,
                        plan.nccl,
                    )?)
                }
            };
            return Ok(RankDevice { device, member, gpu: Some(gpu), graphs });
        }
    };
    let options = shm::ShmOptions { timeout };
    let member: Arc<dyn Member> = match plan.carrier {
        Carrier::Shm | Carrier::Nccl | Carrier::Ipc => Arc::new(shm::ShmWorld::join(env, meter, &options)?),
        Carrier::Tcp => Arc::new(hosts::HostsWorld::join(env, meter, &options, tcp)?),
        Carrier::Mpi => Arc::new(hosts::HostsWorld::join(env, meter, &options, mpi)?),
    };
    Ok(RankDevice { device, member: cutting(member, &graphs), gpu: None, graphs })
}

/// With groups that end the part of a step that is captured.
fn cutting(member: Arc<dyn Member>, graphs: &Option<Arc<Graphs>>) -> Arc<dyn Member> {
    match graphs {
        Some(graphs) => Arc::new(Cutting { member, graphs: graphs.clone() }),
        None => member,
    }
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
    Err(Error::Run(format!("rank {}: this build has no MPI", env.rank))) // the plan refuses this earlier
}
