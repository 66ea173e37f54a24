//! When a run ends early, and what follows a failure. Never starts or ends anything.
use crate::base::Result;
use crate::run::settings::Settings;
use crate::run::settings::value::set;
use std::ops::RangeInclusive;
use std::path::PathBuf;
use std::time::Duration;

#[derive(Clone, Debug)]
pub struct Restarts {
    pub max: u32,
    /// Ranks of the job, where that may change.
    pub elastic: Option<RangeInclusive<usize>>,
    pub monitor_interval: Duration,
    /// Where ranks of a failed run write their last collectives: the place that was given, or one in the directory of
    /// checkpoints.
    pub traces: Option<PathBuf>,
    pub time_limit: Option<Duration>,
    /// That end the run after the step at hand.
    pub signals: Vec<i32>,
}

impl Restarts {
    pub fn new(s: &Settings) -> Result<Restarts> {
        let f = &s.faults;
        let near = || s.checkpoint.ckpt_dir.as_ref().map(|dir| dir.join("comm_traces"));
        Ok(Restarts {
            max: set(&f.max_restarts, "faults.max_restarts")?,
            elastic: f.elastic_ranks()?,
            monitor_interval: Duration::from_secs_f64(set(&f.monitor_interval, "faults.monitor_interval")?),
            traces: f.save_traces_folder.clone().or_else(near),
            time_limit: f.time_limit()?,
            signals: f.signals()?,
        })
    }
}
