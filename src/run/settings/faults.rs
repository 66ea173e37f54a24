//! Settings of what happens when something goes wrong, or when time is up. Never acts on them.
use serde::{Deserialize, Serialize};
use std::path::PathBuf;

#[derive(clap::Args, Serialize, Deserialize, Clone, Debug, Default)]
#[serde(default)]
#[command(next_help_heading = "Faults")]
pub struct Faults {
    /// Failures after which ranks are started again, from the last complete checkpoint of ckpt-dir
    #[arg(long, value_name = "N")]
    pub max_restarts: Option<u32>,
    /// Time between looks at the ranks that this process started
    #[arg(long, value_name = "SECONDS")]
    pub monitor_interval: Option<f64>,
    /// A restart that follows a failure without a checkpoint in between takes fewer ranks, down to MIN; the batch of a step
    /// stays as it is [default: as many as before]
    #[arg(long, value_name = "MIN:MAX")]
    pub elastic: Option<String>,
    /// Ends the run as SIGTERM does: saved, after the step at hand, with status 143 [default: none]
    #[arg(long, value_name = "SECONDS|H:M:S")]
    pub time_limit: Option<String>,
    /// Longest wait of a rank for its peers until the first step is done; comm-timeout is that of the steps after it
    #[arg(long, value_name = "SECONDS")]
    pub init_timeout: Option<f64>,
    /// Where ranks of a failed run leave their last collectives, and where they are compared [default: comm_traces in
    /// ckpt-dir; without ckpt-dir: none]
    #[arg(long, value_name = "DIR")]
    pub save_traces_folder: Option<PathBuf>,
    /// Signals that end the run after the step at hand, saved, with status 128 + n
    #[arg(long, value_name = "NAME", num_args = 1..)]
    pub signals: Option<Vec<String>>,
    /// Most steps in a row that are left out since their loss or gradient is not finite; one more ends the run. A loss scale
    /// that can still fall is given the time to
    #[arg(long, value_name = "N")]
    pub max_bad_steps: Option<u32>,
    /// Steps between comparisons, bit by bit, of what several ranks hold alike: parameters and optimizer states of replicas,
    /// and what ranks of tp have whole; 0: never
    #[arg(long, value_name = "STEPS")]
    pub verify_every: Option<u64>,
}
