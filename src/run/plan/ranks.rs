//! The ranks of a run: their devices, mesh and transport. Never starts one.
use super::carrier::Carrier;
use super::{device, mesh};
use crate::base::Result;
use crate::comm::MeshSizes;
use crate::comm::env::{RankEnv, SlurmShell, UNKNOWN};
use crate::comm::hosts::census;
use crate::comm::nccl::NcclOptions;
use crate::comm::secret::Secret;
use crate::run::settings::value::set;
use crate::run::settings::{DeviceName, Settings};
use serde::{Deserialize, Serialize};
use std::time::Duration;

#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct RankPlan {
    /// Never `auto`.
    pub device: DeviceName,
    pub carrier: Carrier,
    pub mesh: MeshSizes,
    /// Ranks on this host.
    pub nproc: usize,
    /// Threads of each rank.
    pub threads: usize,
    pub ranks_per_gpu: usize,
    pub tf32: bool,
    pub nccl: NcclOptions,
    /// Steps are captured as CUDA graphs.
    pub graphs: bool,
    /// Planned bytes of a rank on its device.
    pub planned: usize,
    /// Longest wait for other ranks until the first step is done.
    pub init_timeout: Duration,
    /// Longest wait for other ranks after that.
    pub comm_timeout: Duration,
    /// Restarts so far.
    pub attempt: u32,
    /// From --job-secret-file. Ranks that this process starts share a generated one.
    #[serde(skip)]
    pub secret: Option<Secret>,
}

/// `env` with its local rank and local world size: from the launcher, or else from a census of the ranks.
pub fn place(env: &RankEnv, s: &Settings) -> Result<RankEnv> {
    if env.local_world != UNKNOWN {
        return Ok(env.clone());
    }
    let secret = s.run.job_secret_file.as_deref().map(Secret::read).transpose()?;
    let with_secret = RankEnv { secret: secret.or(env.secret.clone()), ..env.clone() };
    let placed =
        census::place(&with_secret, Duration::from_secs_f64(set(&s.faults.init_timeout, "faults.init_timeout")?))?;
    Ok(RankEnv { secret: env.secret.clone(), ..placed })
}

/// The first rank of a run that its settings spread over several hosts, which nobody has started.
pub fn planned(s: &Settings) -> Result<Option<RankEnv>> {
    let hosts = s.run.num_nodes.unwrap_or(1);
    if hosts < 2 {
        return Ok(None);
    }
    let device = device::choose(set(&s.run.device, "run.device")?);
    let here = || device::ranks(device, set(&s.run.ranks_per_gpu, "run.ranks_per_gpu")?);
    Ok(Some(RankEnv::first(hosts, s.run.nproc_per_node.map_or_else(here, Ok)?)))
}

/// CPUs that this process may use.
fn cores() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from)
}

impl RankPlan {
    /// `launched`: this process's rank, if a launcher started it.
    pub fn new(s: &mut Settings, launched: Option<&RankEnv>) -> Result<RankPlan> {
        let device = device::choose(set(&s.run.device, "run.device")?);
        let carrier = Carrier::choose(set(&s.run.comm, "run.comm")?, device, launched)?;
        let secret = s.run.job_secret_file.as_deref().map(Secret::read).transpose()?;
        let (mesh, nproc) = mesh::sizes(s, device, launched.map(|env| (env.world, env.local_world)))?;
        Ok(RankPlan {
            device,
            carrier,
            mesh,
            nproc,
            threads: s.run.threads_per_rank.unwrap_or(cores() / nproc).max(1),
            ranks_per_gpu: set(&s.run.ranks_per_gpu, "run.ranks_per_gpu")?,
            tf32: set(&s.precision.tf32, "precision.tf32")?,
            nccl: NcclOptions { max_ctas: s.run.nccl_max_ctas, windows: s.run.nccl_windows == Some(true) },
            graphs: s.run.compile == Some(true),
            planned: 0,
            init_timeout: Duration::from_secs_f64(set(&s.faults.init_timeout, "faults.init_timeout")?),
            comm_timeout: Duration::from_secs_f64(set(&s.run.comm_timeout, "run.comm_timeout")?),
            attempt: 0,
            secret,
        })
    }
    /// Why a command in a shell of a Slurm job does not use all of the job.
    pub fn in_a_shell(&self, shell: SlurmShell) -> Option<String> {
        let (nproc, SlurmShell { tasks, hosts }) = (self.nproc, shell);
        let many = |n: usize, what: &str| format!("{n} {what}{}", if n == 1 { "" } else { "s" });
        (tasks != nproc || hosts > 1).then(|| {
            format!(
                "inside a Slurm job of {tasks} tasks on {}, but not started by srun: starting {} on this host. For a rank \
                 per task, put srun before this command",
                many(hosts, "host"),
                many(nproc, "rank")
            )
        })
    }
    /// Rank 0's warning about more threads than cores.
    pub fn crowded(&self, env: &RankEnv) -> Option<String> {
        let (cores, all) = (cores(), self.threads * self.nproc);
        (env.rank == 0 && self.threads > 1 && all > cores).then(|| {
            format!(
                "threads_per_rank {}: the {all} threads of this host share {cores} cores, which is slower than {} per rank",
                self.threads,
                (cores / self.nproc).max(1)
            )
        })
    }
    /// Hosts of the job.
    pub fn hosts(&self) -> usize {
        self.mesh.world() / self.nproc
    }
    /// `env` with the job's secret: the file's takes precedence over the environment's.
    pub fn with_secret(&self, env: &RankEnv) -> RankEnv {
        RankEnv { secret: self.secret.clone().or(env.secret.clone()), ..env.clone() }
    }
    /// Rank 0's warning about a multi-host job without a secret.
    pub fn caution(&self, env: &RankEnv) -> Option<&'static str> {
        let open = env.rank == 0 && env.world > env.local_world && env.secret.is_none() && self.carrier != Carrier::Mpi;
        open.then_some(
            "no job secret: anyone who can reach this job's ports can impersonate a rank. Set FLATSHARD_JOB_SECRET or \
             --job-secret-file on all ranks (docs/hosts.md)",
        )
    }
}
