//! The run's length and its learning-rate schedule. Never takes a step.
use crate::base::{Error, Result};
use crate::ckpt::TrainerState;
use crate::data::{Dataset, Loader, LoaderOptions};
use crate::optim::{DecayShape, Schedule, Warmup};
use crate::run::settings::value::{StepInterval, set};
use crate::run::settings::{SchedulerName, Settings, WarmupName};
use std::sync::Arc;

/// Steps without max-steps or epochs: a few minutes of the default model on two cores.
const DEFAULT_STEPS: u64 = 600;

/// Fills in the steps of the run, and numbers of steps that are shares of it.
pub fn steps(s: &mut Settings, dataset: &Arc<Dataset>, loader: LoaderOptions) -> Result<()> {
    let mut from_start = Loader::new(dataset.clone(), loader)?;
    let rows = from_start.rows_per_epoch();
    // The step with the last row of the last epoch is a full one: it continues into the next epoch.
    let default = s.task.as_ref().filter(|_| dataset.has_rows_of_its_own()).and_then(|task| task.epochs);
    s.run.epochs = s.run.epochs.or(default);
    let most = s.run.max_steps.unwrap_or(u64::MAX);
    let by_epochs = s.run.epochs.map(|epochs| from_start.steps_until((epochs * rows as f64).ceil() as u64, most));
    let steps = by_epochs.or(s.run.max_steps).unwrap_or(DEFAULT_STEPS);
    s.run.max_steps = Some(steps);
    for every in [&mut s.run.eval_every, &mut s.checkpoint.save_every, &mut s.optim.lr_decay_steps] {
        // As in transformers' Trainer.
        if let Some(StepInterval::Share(share)) = *every {
            *every = Some(StepInterval::Steps((steps as f64 * share).ceil() as u64));
        }
    }
    Ok(())
}

/// Fills in `warmup_steps` from a ratio: `ceil(ratio * steps)`, as in transformers' Trainer. A run that resumes with
/// the same ratio keeps the checkpoint's warmup steps, so that extending a run does not warm up again. Of two, one of 0
/// asks for nothing.
pub fn warmup(s: &mut Settings, resumed: Option<&TrainerState>) -> Result<()> {
    let Some(ratio) = s.optim.warmup_ratio else { return Ok(()) };
    if ratio == 0.0 && s.optim.warmup_steps.is_some() {
        return Ok(());
    }
    let total = set(&s.run.max_steps, "run.max_steps")?;
    let then = resumed.map(|state| &state.schedule).filter(|then| then.get(RATIO) == Some(&ratio.into()));
    let kept = then.and_then(|then| then.get("warmup_steps")?.as_u64());
    let steps = kept.unwrap_or((total as f64 * ratio).ceil() as u64);
    match s.optim.warmup_steps.replace(steps).filter(|&given| given > 0 && given != steps) {
        None => Ok(()),
        Some(given) => Err(Error::input(format!(
            "warmup_ratio {ratio} of {total} steps is {steps} steps, but warmup_steps is {given}: remove one of them"
        ))),
    }
}
/// Key in a checkpoint's schedule.
pub const RATIO: &str = "warmup_ratio";

pub fn schedule(s: &Settings) -> Result<Schedule> {
    let o = &s.optim;
    Ok(Schedule {
        shape: match set(&o.lr_scheduler, "optim.lr_scheduler")? {
            SchedulerName::Constant => DecayShape::Constant,
            SchedulerName::Linear => DecayShape::Linear,
            SchedulerName::Cosine => DecayShape::Cosine,
            SchedulerName::CosineWithMinLr => DecayShape::CosineWithMin(set(&o.min_lr_ratio, "optim.min_lr_ratio")?),
        },
        peak: set(&o.lr, "optim.lr")?,
        rise: match set(&o.warmup_type, "optim.warmup_type")? {
            WarmupName::Linear => Warmup::Linear,
            WarmupName::Log => Warmup::Log,
        },
        warmup: set(&o.warmup_steps, "optim.warmup_steps")?,
        decay: match o.lr_decay_steps {
            Some(StepInterval::Steps(n)) => Some(n),
            _ => None, // a share has become a number
        },
        total: set(&s.run.max_steps, "run.max_steps")?,
    })
}
