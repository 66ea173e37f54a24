//! What learns, and how fast: the optimizer, tensors by name, adapters.
use super::one_or_many;
use crate::run::settings::names::OptimizerName;
use crate::run::settings::names::SchedulerName;
use crate::run::settings::names::WarmupName;
use serde::{Deserialize, Serialize};
use std::path::PathBuf;

#[derive(clap::Args, Serialize, Deserialize, Clone, Debug, Default)]
#[serde(default)]
#[command(next_help_heading = "Optim")]
pub struct Optim {
    /// What turns gradients into updates
    #[arg(long)]
    pub optimizer: Option<OptimizerName>,
    /// Peak learning rate, after warmup
    #[arg(long)]
    pub lr: Option<f64>,
    /// AdamW: decay of the two moments, each in [0, 1)
    #[arg(long, num_args = 2, value_names = ["B1", "B2"])]
    pub betas: Option<Vec<f64>>,
    /// AdamW: added to the root of the second moment
    #[arg(long)]
    pub eps: Option<f64>,
    /// SGD: momentum, in [0, 1)
    #[arg(long)]
    pub momentum: Option<f64>,
    /// Decoupled decay of matrices (not of norms and biases)
    #[arg(long)]
    pub weight_decay: Option<f64>,
    /// Steps of warmup; with linear warmup the first step trains at lr / warmup-steps
    #[arg(long, value_name = "STEPS")]
    pub warmup_steps: Option<u64>,
    /// How the learning rate rises during warmup; log: as in DeepSpeed's WarmupLR, 0 in the first step
    #[arg(long)]
    pub warmup_type: Option<WarmupName>,
    /// After warmup, down to 0 at max-steps (cosine_with_min_lr: to min-lr-ratio)
    #[arg(long)]
    pub lr_scheduler: Option<SchedulerName>,
    /// cosine_with_min_lr: the last learning rate as a part of lr
    #[arg(long, value_name = "RATIO")]
    pub min_lr_ratio: Option<f64>,
    /// Largest norm of the whole gradient; 0: no clipping
    #[arg(long, value_name = "NORM")]
    pub grad_clip: Option<f64>,
}

/// Which tensors learn, and how fast. In a file these keys may also stand at the top.
#[derive(clap::Args, Serialize, Deserialize, Clone, Debug, Default)]
#[serde(default)]
#[command(next_help_heading = "Tune")]
pub struct Tune {
    /// Regular expressions, searched for in tensor names: what does not learn [default: none]
    #[arg(long, num_args = 1.., value_name = "PATTERN")]
    #[serde(deserialize_with = "one_or_many")]
    pub freeze: Option<Vec<String>>,
    /// Tensors without weight decay, besides norms and biases [default: none]
    #[arg(long, num_args = 1.., value_name = "PATTERN")]
    #[serde(deserialize_with = "one_or_many")]
    pub no_decay: Option<Vec<String>>,
    /// Factor of the learning rate for tensors of these names [default: none]
    #[arg(long, num_args = 1.., value_name = "PATTERN=FACTOR")]
    #[serde(deserialize_with = "pairs")]
    pub lr_scale: Option<Vec<String>>,
}

#[derive(clap::Args, Serialize, Deserialize, Clone, Debug, Default)]
#[serde(default)]
#[command(next_help_heading = "LoRA")]
pub struct LoraArgs {
    /// Train adapters of this rank beside frozen matrices [default: none, train the model itself]
    #[arg(long = "lora-rank", value_name = "N")]
    pub rank: Option<usize>,
    /// Adapters are scaled by alpha / rank [default: lora-rank]
    #[arg(long = "lora-alpha", value_name = "ALPHA")]
    pub alpha: Option<f64>,
    /// Modules that are adapted: last parts of their names, or all-linear [default: q_proj v_proj]
    #[arg(long = "lora-target-modules", num_args = 1.., value_name = "MODULE")]
    #[serde(deserialize_with = "one_or_many")]
    pub target_modules: Option<Vec<String>>,
    /// Add the adapter in this directory to the model of pretrain, write it to save-hf and end [default: none]
    #[arg(long = "lora-merge", value_name = "DIR")]
    pub merge: Option<PathBuf>,
}

/// `lr_scale: {PATTERN: FACTOR}` is `lr_scale: [PATTERN=FACTOR]`.
fn pairs<'de, D: serde::Deserializer<'de>>(d: D) -> std::result::Result<Option<Vec<String>>, D::Error> {
    #[derive(Deserialize)]
    #[serde(untagged, expecting = "a mapping of patterns to factors, or a list of PATTERN=FACTOR")]
    enum Pairs {
        Map(serde_json::Map<String, serde_json::Value>),
        List(Vec<String>),
    }
    Ok(Option::<Pairs>::deserialize(d)?.map(|x| match x {
        Pairs::Map(map) => map.into_iter().map(|(pattern, factor)| format!("{pattern}={factor}")).collect(),
        Pairs::List(list) => list,
    }))
}
