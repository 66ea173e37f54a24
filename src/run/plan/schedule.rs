//! How long the run is, and its learning rate. Never takes a step.
use crate::base::Result;
use crate::data::{Dataset, Loader, LoaderOptions};
use crate::optim::{DecayShape, Schedule, Warmup};
use crate::run::settings::value::set;
use crate::run::settings::{SchedulerName, Settings, WarmupName};
use std::sync::Arc;

/// Steps of a run that says neither max-steps nor epochs: a few minutes of the default model on two cores.
const DEFAULT_STEPS: u64 = 600;

/// Fills in the steps of the whole run where the settings leave them to the data.
pub fn steps(s: &mut Settings, dataset: &Arc<Dataset>, loader: LoaderOptions) -> Result<()> {
    let mut loader = Loader::new(dataset.clone(), loader)?;
    let rows = loader.rows_per_epoch();
    // The step that holds the last row of the last epoch is taken whole: it goes on into the next epoch.
    let by_epochs = s.run.epochs.map(|epochs| loader.steps_until(epochs.saturating_mul(rows)));
    let steps = match (s.run.max_steps, by_epochs) {
        (Some(a), Some(b)) => a.min(b),
        (one, other) => one.or(other).unwrap_or(DEFAULT_STEPS),
    };
    s.run.max_steps = Some(steps);
    Ok(())
}

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
        total: set(&s.run.max_steps, "run.max_steps")?,
    })
}
