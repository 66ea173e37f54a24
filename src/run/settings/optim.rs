//! The optimizer, its learning rate and clipping. Never updates anything.
use super::names::{OptimizerName, SchedulerName, WarmupName};
use super::value::{StepInterval, number, number32};
use crate::base::{Error, Result};
use serde::{Deserialize, Serialize};

#[derive(clap::Args, Serialize, Deserialize, Clone, Debug, Default)]
#[serde(default)]
#[command(next_help_heading = "Optim")]
pub struct OptimSettings {
    /// Optimizer
    #[arg(long)]
    pub optimizer: Option<OptimizerName>,
    /// Peak learning rate, reached after warmup
    #[arg(long)]
    pub lr: Option<f64>,
    /// AdamW: decay rates of the first and second moment, each in [0, 1)
    #[arg(long, num_args = 2, value_names = ["B1", "B2"])]
    pub betas: Option<Vec<f64>>,
    /// AdamW: term added to the denominator, for numerical stability
    #[arg(long)]
    pub eps: Option<f64>,
    /// Muon: momentum (Nesterov), in [0, 1)
    #[arg(long, value_name = "MU")]
    pub muon_momentum: Option<f64>,
    /// Muon: Newton-Schulz iterations, 1 to 20
    #[arg(long, value_name = "N")]
    pub muon_ns_steps: Option<usize>,
    /// SGD: momentum, in [0, 1)
    #[arg(long)]
    pub momentum: Option<f64>,
    /// Weight decay of matrices and embeddings, decoupled, but with sgd a part of the gradient; norms and biases have
    /// none
    #[arg(long)]
    pub weight_decay: Option<f64>,
    /// Warmup steps; with linear warmup the first step trains at lr / warmup-steps
    #[arg(long, value_name = "STEPS")]
    pub warmup_steps: Option<u64>,
    /// Warmup as a fraction of the run's steps, in [0, 1], instead of warmup-steps; rounded up to whole steps [default:
    /// none]
    #[arg(long, value_name = "RATIO")]
    pub warmup_ratio: Option<f64>,
    /// Warmup shape; log: as DeepSpeed's WarmupLR, with a learning rate of 0 in the first step
    #[arg(long)]
    pub warmup_type: Option<WarmupName>,
    /// Learning-rate decay after warmup, to 0 at max-steps (cosine_with_min_lr: to min-lr-ratio * lr)
    #[arg(long)]
    pub lr_scheduler: Option<SchedulerName>,
    /// Stay at lr after warmup, and decay in the last steps alone: their number, or a share of all steps below 1
    /// [default: all steps after warmup]
    #[arg(long, value_name = "STEPS")]
    pub lr_decay_steps: Option<StepInterval>,
    /// cosine_with_min_lr: final learning rate as a fraction of lr [default: 0.1]
    #[arg(long, value_name = "RATIO")]
    pub min_lr_ratio: Option<f64>,
    /// Clip the global gradient norm to this value; 0: no clipping
    #[arg(long, value_name = "NORM")]
    pub grad_clip: Option<f64>,
}

impl OptimSettings {
    pub fn check(&self) -> Result<()> {
        number32("lr", self.lr, |x| x >= 0.0, "0 or more")?;
        for beta in self.betas.iter().flatten() {
            number32("betas", Some(*beta), |x| (0.0..1.0).contains(&x), "in [0, 1)")?;
        }
        if let Some(betas) = self.betas.as_ref().filter(|b| b.len() != 2) {
            return Err(Error::input(format!("betas has {} values: it must have 2", betas.len())));
        }
        number32("eps", self.eps, |x| x > 0.0, "above 0")?;
        number32("momentum", self.momentum, |x| (0.0..1.0).contains(&x), "in [0, 1)")?;
        number32("muon_momentum", self.muon_momentum, |x| (0.0..1.0).contains(&x), "in [0, 1)")?;
        number("muon_ns_steps", self.muon_ns_steps.map(|n| n as f64), |x| (1.0..=20.0).contains(&x), "from 1 to 20")?;
        number32("weight_decay", self.weight_decay, |x| x >= 0.0, "0 or more")?;
        number("warmup_ratio", self.warmup_ratio, |x| (0.0..=1.0).contains(&x), "in [0, 1]")?;
        if let Some(span @ (StepInterval::Epoch(_) | StepInterval::Steps(0))) = self.lr_decay_steps {
            let span = serde_json::to_value(span).unwrap_or_default();
            return Err(Error::input(format!(
                "lr_decay_steps is {span}: it must be a number of steps, 1 or more, or a share of all steps below 1"
            )));
        }
        number("min_lr_ratio", self.min_lr_ratio, |x| (0.0..=1.0).contains(&x), "in [0, 1]")?;
        number32("grad_clip", self.grad_clip, |x| x >= 0.0, "0 (no clipping) or more")
    }
}
