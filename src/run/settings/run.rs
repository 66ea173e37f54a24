//! How a run starts, how long it is and what it reports. Never starts anything.
use super::names::{CommName, DeviceName, StrategyName};
use super::value::{StepInterval, at_least_one, count, number, size};
use crate::base::Result;
use serde::{Deserialize, Serialize};
use std::path::PathBuf;

#[derive(clap::Args, Serialize, Deserialize, Clone, Debug, Default)]
#[serde(default)]
#[command(next_help_heading = "Run")]
pub struct RunSettings {
    /// Ranks (processes) to start on this host [default: 2 on the CPU, one per GPU]
    #[arg(long, value_name = "N")]
    pub nproc_per_node: Option<usize>,
    /// Threads of each rank for its work on the CPU; results do not depend on their number [default: cores / ranks on
    /// the host]
    #[arg(long, value_name = "N")]
    pub threads_per_rank: Option<usize>,
    /// Hosts in the job; for more than one, start with torchrun, srun or mpirun
    #[arg(long, value_name = "N")]
    pub num_nodes: Option<usize>,
    /// Shard the model (fsdp) or replicate it (ddp); auto: set by the binary
    #[arg(long)]
    pub strategy: Option<StrategyName>,
    /// Device of the ranks; auto: cuda if there is a GPU, else cpu; sim: the GPU kernels in an emulator, for tests
    #[arg(long)]
    pub device: Option<DeviceName>,
    /// Random seed for initial weights, data order and dropout
    #[arg(long, value_name = "N")]
    pub seed: Option<u64>,
    /// Passes over the training data, such as 3 or 0.5; the run ends earlier if it reaches max-steps [default: set by
    /// max-steps; with --pretrain and rows, by the task]
    #[arg(long, value_name = "N")]
    pub epochs: Option<f64>,
    /// Optimizer steps in the run [default: 600, or set by epochs]
    #[arg(long, value_name = "N")]
    pub max_steps: Option<u64>,
    /// Steps between progress lines when stderr is not a terminal
    #[arg(long, value_name = "STEPS")]
    pub log_every: Option<u64>,
    /// Evaluate on held-out rows, always once at the end
    #[arg(long)]
    pub eval: Option<bool>,
    /// Evaluate before the first step, too [default: with --pretrain]
    #[arg(long)]
    pub eval_on_start: Option<bool>,
    /// Steps between evaluations, or below 1 this share of all steps; 0: only at the end; epoch: once per pass over the
    /// training split; epoch/4: four times
    #[arg(long, value_name = "STEPS|epoch")]
    pub eval_every: Option<StepInterval>,
    /// Early stopping: end the run after N evaluations in a row without a lower loss [default: none]
    #[arg(long, value_name = "N")]
    pub patience: Option<u64>,
    /// Write metrics to this file as JSON lines [default: none]
    #[arg(long, value_name = "FILE")]
    pub metrics_path: Option<PathBuf>,
    /// Measure peak rates at startup, for mfu and sol; those of known GPUs are from their data sheets
    #[arg(long)]
    pub measure_peak: Option<bool>,
    /// Print a sample from the trained model at the end
    #[arg(long)]
    pub sample: Option<bool>,
    /// Length of the sample, in tokens
    #[arg(long, value_name = "TOKENS")]
    pub sample_tokens: Option<usize>,
    /// Sample these prompts instead, at every evaluation: rows of JSON lines, as --generate reads and continues them.
    /// The texts go to --metrics-path [default: none]
    #[arg(long, value_name = "FILE")]
    pub sample_prompts: Option<PathBuf>,
    /// Collective backend; auto: NCCL for GPUs, shared memory within a host, TCP between hosts, MPI under mpirun (cargo
    /// feature mpi). ipc: GPUs of one host copy from each other's memory, without NCCL; sums in rank order
    #[arg(long)]
    pub comm: Option<CommName>,
    /// GPU only: most CTAs (multiprocessors) that an NCCL collective occupies, at most 64: fewer leave more to kernels
    /// that run at the same time [default: NCCL's choice, or NCCL_MAX_CTAS]
    #[arg(long, value_name = "N")]
    pub nccl_max_ctas: Option<usize>,
    /// GPU only: register buffers of collectives as symmetric windows of NCCL (2.27 or newer, GPUs joined by NVLink);
    /// sums may then be in another order
    #[arg(long)]
    pub nccl_windows: Option<bool>,
    /// File with the secret that the ranks of a multi-host job share: at least 16 bytes, the same on every rank,
    /// readable only by you [default: FLATSHARD_JOB_SECRET]
    #[arg(long, value_name = "FILE")]
    pub job_secret_file: Option<PathBuf>,
    /// Ranks that share one GPU, for tests; slow
    #[arg(long, value_name = "N")]
    pub ranks_per_gpu: Option<usize>,
    /// Fail the run after waiting this long for other ranks within a step, in seconds
    #[arg(long, value_name = "SECONDS")]
    pub comm_timeout: Option<f64>,
    /// GPU only: capture steps with static shapes as CUDA graphs and replay them
    #[arg(long)]
    pub compile: Option<bool>,
    /// GPU only: before the first step, time cuBLASLt's algorithms for its matrix products and use the fastest. The
    /// choices are cached; off: the library's first choice, for reproducible results
    #[arg(long = "tune")]
    pub tune_products: Option<bool>,
    /// Derived: the training stage that this run is.
    #[arg(skip)]
    pub stage: Option<String>,
    /// Derived: the checkpoint directory of the previous stage.
    #[arg(skip)]
    pub after: Option<PathBuf>,
}

impl RunSettings {
    pub fn check(&self) -> Result<()> {
        count("nproc_per_node", self.nproc_per_node)?;
        count("threads_per_rank", self.threads_per_rank)?;
        count("num_nodes", self.num_nodes)?;
        at_least_one("max_steps", self.max_steps)?;
        number("epochs", self.epochs, |x| x > 0.0, "above 0")?;
        at_least_one("patience", self.patience)?;
        count("nccl_max_ctas", self.nccl_max_ctas)?;
        count("ranks_per_gpu", self.ranks_per_gpu)?;
        at_least_one("log_every", self.log_every)?;
        size("sample_tokens", self.sample_tokens)?;
        number("comm_timeout", self.comm_timeout, |x| x > 0.0 && x <= 1e9, "above 0, at most a billion seconds")
    }
}
