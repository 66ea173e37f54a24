//! The ranks of a run: their devices, their mesh and what moves data between them. Never starts one.
use super::carrier::Carrier;
use super::{device, mesh};
use crate::base::Result;
use crate::comm::MeshSizes;
use crate::comm::env::{RankEnv, UNKNOWN};
use crate::comm::hosts::census;
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
    /// Ranks of this host.
    pub nproc: usize,
    pub ranks_per_gpu: usize,
    pub tf32: bool,
    /// Steps are captured as graphs.
    pub graphs: bool,
    /// Bytes of a rank on its device, as far as they are known before it starts.
    pub planned: usize,
    /// Longest wait for other ranks until the first step is done, and after it.
    pub init_timeout: Duration,
    pub comm_timeout: Duration,
    /// How often the launcher has started the ranks before.
    pub attempt: u32,
    /// Of --job-secret-file. Ranks that this process starts have a secret of their own.
    #[serde(skip)]
    pub secret: Option<Secret>,
}

/// `env` with its place on its host: the launcher's word, or else that of the ranks, which meet to tell each other.
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

impl RankPlan {
    /// `launched`: this process's rank, where a launcher has started it.
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
            ranks_per_gpu: set(&s.run.ranks_per_gpu, "run.ranks_per_gpu")?,
            tf32: set(&s.precision.tf32, "precision.tf32")?,
            graphs: s.run.compile == Some(true),
            planned: 0,
            init_timeout: Duration::from_secs_f64(set(&s.faults.init_timeout, "faults.init_timeout")?),
            comm_timeout: Duration::from_secs_f64(set(&s.run.comm_timeout, "run.comm_timeout")?),
            attempt: 0,
            secret,
        })
    }
    /// Hosts of the job.
    pub fn hosts(&self) -> usize {
        self.mesh.world() / self.nproc
    }
    /// `env` with the job's secret: a file that was named comes before the environment.
    pub fn with_secret(&self, env: &RankEnv) -> RankEnv {
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
