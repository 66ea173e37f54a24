//! Restarts after a failure, time limit and stop signals. Never starts or stops anything.
use crate::base::Result;
use crate::run::settings::Settings;
use crate::run::settings::value::set;
use std::ops::RangeInclusive;
use std::path::PathBuf;
use std::time::Duration;

#[derive(Clone, Debug)]
pub struct Restarts {
    pub max: u32,
    /// World sizes that a restart may use.
    pub elastic: Option<RangeInclusive<usize>>,
    pub monitor_interval: Duration,
    /// Where ranks of a failed run write their last collectives: as given, or in the checkpoint directory.
    pub traces: Option<PathBuf>,
    pub time_limit: Option<Duration>,
    /// Signals that stop the run after the current step.
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
