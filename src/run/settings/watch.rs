//! Settings of what people see of a run. Never writes anything.
use super::names::LogLevel;
use serde::{Deserialize, Serialize};
use std::path::PathBuf;

#[derive(clap::Args, Serialize, Deserialize, Clone, Debug, Default)]
#[serde(default)]
#[command(next_help_heading = "Watch")]
pub struct WatchSettings {
    /// The least that is said on stderr and in log-file; below info there is no progress either
    #[arg(long)]
    pub log_level: Option<LogLevel>,
    /// What is said, with times, added to this file; rank 3 writes to FILE.rank-3, or where {rank} stands in the name
    /// to that [default: none]
    #[arg(long, value_name = "FILE")]
    pub log_file: Option<PathBuf>,
    /// Event files for TensorBoard, one run a directory, with torchtitan's names (loss_metrics/global_avg_loss,
    /// throughput(tps)) and the HF Trainer's (train/loss, eval/loss) [default: none]
    #[arg(long, value_name = "DIR")]
    pub tensorboard: Option<PathBuf>,
}

impl WatchSettings {
    /// The file of one rank.
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
