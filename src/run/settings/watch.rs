//! Log level, log file and TensorBoard. Never writes anything.
use super::names::LogLevel;
use serde::{Deserialize, Serialize};
use std::path::PathBuf;

#[derive(clap::Args, Serialize, Deserialize, Clone, Debug, Default)]
#[serde(default)]
#[command(next_help_heading = "Watch")]
pub struct WatchSettings {
    /// Minimum log level for stderr and --log-file; warn and error also hide the progress bar
    #[arg(long)]
    pub log_level: Option<LogLevel>,
    /// Append log lines with timestamps to this file; rank N > 0 writes FILE.rank-N, unless the name contains {rank}
    /// [default: none]
    #[arg(long, value_name = "FILE")]
    pub log_file: Option<PathBuf>,
    /// Write TensorBoard event files to this directory, under the tag names of torchtitan and the Hugging Face Trainer
    /// [default: none]
    #[arg(long, value_name = "DIR")]
    pub tensorboard: Option<PathBuf>,
}

impl WatchSettings {
    /// The log file of `rank`.
    pub fn log_file_of(&self, rank: usize) -> Option<PathBuf> {
        let file = self.log_file.as_ref()?;
        let text = file.to_string_lossy();
        Some(match (text.contains("{rank}"), rank) {
            (true, _) => text.replace("{rank}", &rank.to_string()).into(),
            (false, 0) => file.clone(),
            (false, _) => {
                let mut name = file.clone().into_os_string();
                name.push(format!(".rank-{rank}"));
                name.into()
            }
        })
    }
}
