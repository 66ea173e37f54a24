//! What `--wandb-project` requires: a metrics file for the follower to read. Never starts the follower.
use crate::base::{Error, Result};
use crate::run::settings::Settings;
use std::path::Path;

/// Chooses the metrics file if none is given.
pub fn settle(s: &mut Settings) -> Result<()> {
    if s.wandb.wandb_project.is_none() {
        return Ok(());
    }
    if s.wandb.project().is_none() {
        s.notes.push("--wandb-mode disabled: nothing is logged to W&B".into());
        return Ok(());
    }
    match &s.run.metrics_path {
        Some(path) if path.exists() && !path.is_file() => Err(Error::input(format!(
            "--metrics-path {}: --wandb-project reads the metrics from a regular file, which this is not; give another \
             path",
            path.display()
        ))),
        Some(_) => Ok(()),
        None => {
            // Only one run at a time uses a checkpoint directory; elsewhere each process gets its own file.
            let own = || s.wandb.wandb_dir.as_deref().unwrap_or(Path::new("")).join("wandb");
            let path = match &s.checkpoint.ckpt_dir {
                Some(dir) => dir.join("metrics.jsonl"),
                None => own().join(format!("metrics-{}.jsonl", std::process::id())),
            };
            s.notes.push(format!("--wandb-project: metrics go to {}", path.display()));
            s.run.metrics_path = Some(path);
            Ok(())
        }
    }
}
