//! Which steps are profiled, and where their traces go. Never records anything.
use crate::base::{Error, Result};
use crate::run::settings::Settings;
use crate::run::settings::value::set;
use std::ops::RangeInclusive;
use std::path::PathBuf;

#[derive(Clone, Debug)]
pub struct Profile {
    pub steps: RangeInclusive<u64>,
    pub folder: PathBuf,
}

impl Profile {
    pub fn new(s: &Settings) -> Result<Option<Profile>> {
        let Some(steps) = s.trace.steps()? else { return Ok(None) };
        let last = set(&s.run.max_steps, "run.max_steps")?;
        if *steps.end() > last {
            return Err(Error::input(format!(
                "--profile-steps {}:{}: the run ends at step {last}",
                steps.start(),
                steps.end()
            )));
        }
        let metrics_dir = s.run.metrics_path.as_ref().and_then(|path| path.parent());
        let default = || s.checkpoint.ckpt_dir.as_deref().or(metrics_dir).map(|dir| dir.join("traces"));
        match s.trace.trace_folder.clone().or_else(default) {
            Some(folder) => Ok(Some(Profile { steps, folder })),
            None => Err(Error::input("--profile-steps needs a directory for its traces: add --trace-folder DIR")),
        }
    }
    /// The trace file of one rank, or the merged one.
    pub fn path(&self, rank: Option<usize>) -> PathBuf {
        let rank = rank.map_or(String::new(), |rank| format!("-rank-{rank}"));
        self.folder.join(format!("steps-{}-{}{rank}.json", self.steps.start(), self.steps.end()))
    }
}
