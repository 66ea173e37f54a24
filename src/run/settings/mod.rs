//! Every setting, declared once: its flag, its key in a file (the same name with underscores, in the section named by the
//! field of [`Settings`]), its type and its line in `--help`. Never validates and never fills defaults: all is `Option`, so
//! that defaults < file < flags can be decided by laying one over the other ([`super::config`]).
pub mod args;
pub mod config;
pub mod deepspeed;
pub mod effect;
pub mod faults;
pub mod names;
pub mod sharding;
pub mod stages;
pub mod trace;
pub mod tune;
pub mod watch;
pub mod zero;

pub use crate::run::plan::precision::PrecisionArgs;
pub use crate::run::settings::names::*;
pub use crate::run::settings::zero::Zero;
pub use faults::Faults;
use serde::{Deserialize, Serialize};
pub use sharding::{Fsdp, Parallel};
use std::path::PathBuf;
pub use trace::Trace;
pub use tune::{LoraArgs, Optim, Tune};
pub use watch::WatchArgs;

#[derive(clap::Args, Serialize, Deserialize, Clone, Debug, Default)]
#[serde(default)]
pub struct Settings {
    #[command(flatten)]
    pub run: Run,
    #[command(flatten)]
    pub model: Model,
    #[command(flatten)]
    pub data: Data,
    #[command(flatten)]
    pub optim: Optim,
    #[command(flatten)]
    pub tune: Tune,
    #[command(flatten)]
    pub lora: LoraArgs,
    #[command(flatten)]
    pub batch: Batch,
    #[command(flatten)]
    pub fsdp: Fsdp,
    #[command(flatten)]
    pub zero: Zero,
    #[command(flatten)]
    pub precision: PrecisionArgs,
    #[command(flatten)]
    pub parallel: Parallel,
    #[command(flatten)]
    pub checkpoint: Checkpoint,
    #[command(flatten)]
    pub faults: Faults,
    #[command(flatten)]
    pub watch: WatchArgs,
    #[command(flatten)]
    pub trace: Trace,
    #[command(flatten)]
    pub generate: Generate,
}

#[derive(clap::Args, Serialize, Deserialize, Clone, Debug, Default)]
#[serde(default)]
#[command(next_help_heading = "Run")]
pub struct Run {
    /// Ranks (processes) started on this host [default: 2 on the CPU]
    #[arg(long, visible_alias = "devices", value_name = "N")]
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
    /// What moves data between ranks: NCCL for GPUs; for the rest shared memory, between hosts TCP, or MPI (feature mpi)
    /// under mpirun
    #[arg(long)]
    pub comm: Option<CommName>,
    /// File with the secret by which ranks of a job over several hosts know each other: at least 16 bytes, the same for all ranks,
    /// closed to other users [default: that of FLATSHARD_JOB_SECRET]
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

#[derive(clap::Args, Serialize, Deserialize, Clone, Debug, Default)]
#[serde(default)]
#[command(next_help_heading = "Model")]
pub struct Model {
    /// Hugging Face model directory to start from; shapes come from its config.json [default: none]
    #[arg(long, value_name = "DIR")]
    pub pretrain: Option<PathBuf>,
    /// llama: RMSNorm, RoPE, SwiGLU; gpt: LayerNorm, learned positions, GELU, biases
    #[arg(long)]
    pub arch: Option<ArchName>,
    /// Width of the residual stream
    #[arg(long, value_name = "N")]
    pub embed_dim: Option<usize>,
    /// Decoder blocks
    #[arg(long, value_name = "N")]
    pub num_layers: Option<usize>,
    /// Query heads
    #[arg(long, value_name = "N")]
    pub num_heads: Option<usize>,
    /// Key and value heads (grouped-query attention) [default: num-heads]
    #[arg(long, value_name = "N")]
    pub num_kv_heads: Option<usize>,
    /// Width inside the MLP [default: llama 8/3 embed-dim rounded up to a multiple of 64, gpt 4 embed-dim]
    #[arg(long, value_name = "N")]
    pub ff_hidden_dim: Option<usize>,
    /// Rows of the token table [default: the tokenizer's, rounded up to a multiple of 64]
    #[arg(long, value_name = "TOKENS")]
    pub vocab_size: Option<usize>,
    /// Longest sequence of the model [default: max-len]
    #[arg(long, value_name = "TOKENS")]
    pub max_positions: Option<usize>,
    /// After the embeddings and each residual branch, 0 to 1
    #[arg(long, value_name = "P")]
    pub dropout: Option<f64>,
    /// Head and token table are one tensor [default: llama no, gpt yes]
    #[arg(long)]
    pub tie_embeddings: Option<bool>,
}

#[derive(clap::Args, Serialize, Deserialize, Clone, Debug, Default)]
#[serde(default)]
#[command(next_help_heading = "Data")]
pub struct Data {
    /// Text, .jsonl, .json, .parquet, .npy: files or directories; or `synthetic` [default: Rust sources of cargo's registry]
    #[arg(long, num_args = 1.., value_name = "PATH")]
    #[serde(deserialize_with = "one_or_many")]
    pub dataset: Option<Vec<String>>,
    /// `bytes`, a tokenizer.json, or a directory that holds one [default: that of pretrain, or bytes]
    #[arg(long, value_name = "PATH|bytes")]
    pub tokenizer: Option<String>,
    /// Field of a row that holds the prompt, or with a chat template the messages [default: messages or conversations]
    #[arg(long, value_name = "KEY")]
    pub input_key: Option<String>,
    /// Field of a row that holds the answer [default: the last message]
    #[arg(long, value_name = "KEY")]
    pub output_key: Option<String>,
    /// Render messages with the tokenizer's chat template; of Alpaca's rows, instruction and input are the user's message
    #[arg(long)]
    pub apply_chat_template: Option<bool>,
    /// Loss on every message of the assistant, not on the last only; renders with the chat template
    #[arg(long)]
    pub multiturn: Option<bool>,
    /// Jinja text, or a file of it, in place of the tokenizer's chat template [default: none]
    #[arg(long, value_name = "TEXT|FILE")]
    pub tokenizer_chat_template: Option<String>,
    /// Loss on all of input-key's text, cut at max-len, without an end of text
    #[arg(long)]
    pub pretrain_mode: Option<bool>,
    /// Leave out rows that are malformed, and count them
    #[arg(long)]
    pub skip_bad_rows: Option<bool>,
    /// Text around the prompt; {} stands for it [default: none]
    #[arg(long, value_name = "TEXT")]
    pub input_template: Option<String>,
    /// As many samples in a sequence as fit into max-len, whole, without seeing each other
    #[arg(long)]
    pub packing_samples: Option<bool>,
    /// Tokens in a sequence
    #[arg(long, value_name = "TOKENS")]
    pub max_len: Option<usize>,
    /// Without packing: samples of a step dealt so that micro-batches of all ranks are of like lengths
    #[arg(long)]
    pub group_by_length: Option<bool>,
    /// Use only the first samples of the data set [default: all]
    #[arg(long, value_name = "N")]
    pub max_samples: Option<usize>,
    /// A new order of samples each epoch, from the seed
    #[arg(long)]
    pub shuffle: Option<bool>,
    /// Keep the tokens of data sets on disk for later runs; off: each process tokenizes for itself, into a temporary file
    #[arg(long)]
    pub cache: Option<bool>,
    /// Directory of the token cache [default: $FLATSHARD_CACHE_DIR, or flatshard in $XDG_CACHE_HOME or ~/.cache]
    #[arg(long, value_name = "DIR")]
    pub cache_dir: Option<PathBuf>,
    /// Size of the token cache, as 10GB or 500MB: beyond it, the least recently used data sets that no run is reading are removed
    #[arg(long, value_name = "SIZE")]
    pub cache_limit: Option<String>,
}

#[derive(clap::Args, Serialize, Deserialize, Clone, Debug, Default)]
#[serde(default)]
#[command(next_help_heading = "Batch")]
pub struct Batch {
    /// Sequences in a micro-batch of a data-parallel rank
    #[arg(long, value_name = "SEQUENCES")]
    pub batch_size: Option<usize>,
    /// Micro-batches of a rank in an optimizer step
    #[arg(long, value_name = "N")]
    pub grad_accum: Option<usize>,
    /// Sequences in an optimizer step of all ranks: gives batch-size or grad-accum where one is left out [default: none]
    #[arg(long, value_name = "SEQUENCES")]
    pub train_batch_size: Option<usize>,
}

#[derive(clap::Args, Serialize, Deserialize, Clone, Debug, Default)]
#[serde(default)]
#[command(next_help_heading = "Checkpoint")]
pub struct Checkpoint {
    /// Where checkpoints go: DIR/step-00000100, and DIR/latest names the newest [default: none]
    #[arg(long, value_name = "DIR")]
    pub ckpt_dir: Option<PathBuf>,
    /// Steps between checkpoints; 0: at the end only
    #[arg(long, value_name = "STEPS")]
    pub save_every: Option<u64>,
    /// Newest checkpoints to keep; 0: all
    #[arg(long, value_name = "N")]
    pub keep: Option<usize>,
    /// Go on from the newest checkpoint of ckpt-dir where there is one, or from this one [default: none]
    #[arg(long, value_name = "auto|DIR")]
    pub resume: Option<String>,
    /// Write the final model alone, as a Hugging Face directory [default: none]
    #[arg(long, value_name = "DIR")]
    pub save_hf: Option<PathBuf>,
    /// Let save-hf replace a model that this run did not write; never the one that it starts from
    #[arg(long)]
    pub overwrite: Option<bool>,
    /// Write the checkpoints between steps while training goes on, from a copy in memory
    #[arg(long)]
    pub async_save: Option<bool>,
    /// Largest file of a model or an optimizer, as 5GB or 200MB (one tensor at least)
    #[arg(long, value_name = "SIZE")]
    pub max_shard_size: Option<String>,
    /// What save-hf writes; checkpoints are always fp32
    #[arg(long)]
    pub save_dtype: Option<PrecisionName>,
}

/// How `--generate` picks tokens.
#[derive(clap::Args, Serialize, Deserialize, Clone, Debug, Default)]
#[serde(default)]
#[command(next_help_heading = "Generate")]
pub struct Generate {
    /// Tokens to write at most; an end-of-text token ends earlier
    #[arg(long, value_name = "TOKENS")]
    pub max_new_tokens: Option<usize>,
    /// Divides the logits; 0: always the likeliest token
    #[arg(long, value_name = "T")]
    pub temperature: Option<f64>,
    /// Pick among so many likeliest tokens; 0: all
    #[arg(long, value_name = "N")]
    pub top_k: Option<usize>,
    /// Pick among the fewest tokens whose probabilities add up to this; 1: all
    #[arg(long, value_name = "P")]
    pub top_p: Option<f64>,
}

/// `dataset: x` is `dataset: [x]`.
fn one_or_many<'de, D: serde::Deserializer<'de>>(d: D) -> std::result::Result<Option<Vec<String>>, D::Error> {
    #[derive(Deserialize)]
    #[serde(untagged, expecting = "a path or a list of paths")]
    enum OneOrMany {
        One(String),
        Many(Vec<String>),
    }
    Ok(Option::<OneOrMany>::deserialize(d)?.map(|x| match x {
        OneOrMany::One(path) => vec![path],
        OneOrMany::Many(paths) => paths,
    }))
}
