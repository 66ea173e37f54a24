//! How a run starts, how long it is and what it reports. Never starts anything.
use super::names::{CommName, DeviceName, StrategyName};
use super::value::{at_least_one, count, number, size};
use crate::base::Result;
use serde::{Deserialize, Serialize};
use std::path::PathBuf;

#[derive(clap::Args, Serialize, Deserialize, Clone, Debug, Default)]
#[serde(default)]
#[command(next_help_heading = "Run")]
pub struct RunSettings {
    /// Ranks (processes) started on this host [default: 2 on the CPU]
    #[arg(long, value_name = "N")]
    pub nproc_per_node: Option<usize>,
    /// Hosts of the job; more than one is started by torchrun, srun or mpirun
    #[arg(long, value_name = "N")]
    pub num_nodes: Option<usize>,
    /// How parameters are kept: sharded, replicated, or what the binary is for
    #[arg(long)]
    pub strategy: Option<StrategyName>,
    /// Where ranks compute; sim: the GPU kernels in an emulator, for tests; auto: cuda where there is a GPU, else cpu
    #[arg(long)]
    pub device: Option<DeviceName>,
    /// Seed of initial weights, data order and dropout
    #[arg(long, value_name = "N")]
    pub seed: Option<u64>,
    /// Passes over the training split; ignored where max-steps ends the run earlier [default: as max-steps needs]
    #[arg(long, value_name = "N")]
    pub epochs: Option<u64>,
    /// Optimizer steps of the run [default: 600, or what epochs gives]
    #[arg(long, value_name = "N")]
    pub max_steps: Option<u64>,
    /// Steps between progress lines where stderr is not a terminal
    #[arg(long, value_name = "STEPS")]
    pub log_every: Option<u64>,
    /// Evaluate the held-out rows, at the end at least
    #[arg(long)]
    pub eval: Option<bool>,
    /// Steps between evaluations of the held-out split; 0: at the end only
    #[arg(long, value_name = "STEPS")]
    pub eval_every: Option<u64>,
    /// JSON lines, one an event, written by rank 0 [default: none]
    #[arg(long, value_name = "FILE")]
    pub metrics_path: Option<PathBuf>,
    /// Measure the peak of a matrix product at start, so that metrics can say mfu
    #[arg(long)]
    pub measure_peak: Option<bool>,
    /// Let the trained model write some text at the end
    #[arg(long)]
    pub sample: Option<bool>,
    /// Length of that text in tokens
    #[arg(long, value_name = "TOKENS")]
    pub sample_tokens: Option<usize>,
    /// What moves data between ranks: NCCL for GPUs; for the rest shared memory, between hosts TCP, or MPI (feature
    /// mpi) under mpirun
    #[arg(long)]
    pub comm: Option<CommName>,
    /// File with the secret by which ranks of a job over several hosts know each other: at least 16 bytes, the same for
    /// all ranks, closed to other users [default: that of FLATSHARD_JOB_SECRET]
    #[arg(long, value_name = "FILE")]
    pub job_secret_file: Option<PathBuf>,
    /// Ranks that share a GPU, for tests with fewer GPUs than ranks; slow
    #[arg(long, value_name = "N")]
    pub ranks_per_gpu: Option<usize>,
    /// Longest wait of a rank for its peers in a step before the run fails
    #[arg(long, value_name = "SECONDS")]
    pub comm_timeout: Option<f64>,
    /// GPUs: steps of static shapes are captured as CUDA graphs and replayed; the CPU has nothing to compile
    #[arg(long)]
    pub compile: Option<bool>,
    /// Which of the file's stages this run is, and where the one before it has its checkpoints: derived.
    #[arg(skip)]
    pub stage: Option<String>,
    #[arg(skip)]
    pub after: Option<PathBuf>,
}

impl RunSettings {
    pub fn check(&self) -> Result<()> {
        count("nproc_per_node", self.nproc_per_node)?;
        count("num_nodes", self.num_nodes)?;
        at_least_one("max_steps", self.max_steps)?;
        at_least_one("epochs", self.epochs)?;
        count("ranks_per_gpu", self.ranks_per_gpu)?;
        at_least_one("log_every", self.log_every)?;
        size("sample_tokens", self.sample_tokens)?;
        number("comm_timeout", self.comm_timeout, |x| x > 0.0 && x <= 1e6, "above 0, at most a million seconds")
    }
}
