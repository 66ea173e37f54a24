//! Which project of Weights & Biases the run is logged to, and under which names. Never starts anything.
use super::names::WandbMode;
use super::value::one_or_many;
use crate::base::{Error, Result, quote};
use serde::{Deserialize, Serialize};
use std::path::PathBuf;

/// What W&B's projects cannot have in their names, and how long those may be.
const RESERVED: &str = "/\\#?%:";
const LONGEST: usize = 128;

#[derive(clap::Args, Serialize, Deserialize, Clone, Debug, Default)]
#[serde(default)]
#[command(next_help_heading = "Weights & Biases")]
pub struct WandbSettings {
    /// Log the run to this project, through the wandb package of python3 (pip install wandb) [default: none]
    #[arg(long, value_name = "NAME")]
    pub wandb_project: Option<String>,
    /// User or team that the project belongs to [default: WANDB_ENTITY, or W&B's own]
    #[arg(long, value_name = "NAME")]
    pub wandb_entity: Option<String>,
    /// Name of the run [default: WANDB_NAME, or one that W&B makes up]
    #[arg(long, value_name = "NAME")]
    pub wandb_name: Option<String>,
    /// Group of runs that this one belongs to [default: WANDB_RUN_GROUP, or none]
    #[arg(long, value_name = "NAME")]
    pub wandb_group: Option<String>,
    /// Tags of the run [default: WANDB_TAGS, or none]
    #[arg(long, num_args = 1.., value_name = "TAG")]
    #[serde(deserialize_with = "one_or_many")]
    pub wandb_tags: Option<Vec<String>>,
    /// Send as the run goes on, keep for `wandb sync`, or neither [default: WANDB_MODE, or online]
    #[arg(long)]
    pub wandb_mode: Option<WandbMode>,
    /// Directory in which W&B makes its directory wandb [default: WANDB_DIR, or the current one]
    #[arg(long, value_name = "DIR")]
    pub wandb_dir: Option<PathBuf>,
}

impl WandbSettings {
    pub fn check(&self) -> Result<()> {
        match &self.wandb_project {
            Some(name) if name.is_empty() || name.len() > LONGEST || name.contains(|c| RESERVED.contains(c)) => {
                Err(Error::input(format!(
                    "wandb_project is {:?}: it must be a name of at most {LONGEST} characters without any of {RESERVED}",
                    quote(name).to_string()
                )))
            }
            _ => Ok(()),
        }
    }
    /// The project to log to.
    pub fn project(&self) -> Option<&str> {
        self.wandb_project.as_deref().filter(|_| self.wandb_mode != Some(WandbMode::Disabled))
    }
}
