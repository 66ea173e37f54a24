//! Settings of step traces and the memory timeline. Never records anything.
use crate::base::{Error, Result};
use serde::{Deserialize, Serialize};
use std::ops::RangeInclusive;
use std::path::PathBuf;

#[derive(clap::Args, Serialize, Deserialize, Clone, Debug, Default)]
#[serde(default)]
#[command(next_help_heading = "Trace")]
pub struct TraceSettings {
    /// Trace steps A to B (inclusive) for ui.perfetto.dev: compute, collectives, optimizer, data and checkpoints of
    /// each rank, with exposed communication [default: none]
    #[arg(long, value_name = "A:B")]
    pub profile_steps: Option<String>,
    /// Directory for traces [default: traces in ckpt-dir, or next to the metrics file]
    #[arg(long, value_name = "DIR")]
    pub trace_folder: Option<PathBuf>,
    /// Write the memory of all ranks over time as CSV, by category; detailed in the profiled steps, or else in the
    /// first two [default: none]
    #[arg(long, value_name = "FILE.csv")]
    pub memory_timeline: Option<PathBuf>,
}

impl TraceSettings {
    pub fn check(&self) -> Result<()> {
        self.steps().map(drop)
    }
    /// Steps to profile; one number is a single step.
    pub fn steps(&self) -> Result<Option<RangeInclusive<u64>>> {
        let Some(text) = &self.profile_steps else { return Ok(None) };
        let (first, last) = text.split_once(':').unwrap_or((text, text));
        match (first.trim().parse(), last.trim().parse()) {
            (Ok(first), Ok(last)) if 1 <= first && first <= last => Ok(Some(first..=last)),
            _ => Err(Error::input(format!(
                "--profile-steps {text}: it must be A:B, the first and the last step to profile, such as 10:12; steps count from 1"
            ))),
        }
    }
}
