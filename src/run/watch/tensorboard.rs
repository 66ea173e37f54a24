//! `--tensorboard DIR`: the run's metrics as TensorBoard event files. One directory is one run, over all its starts.
//! Never reads what it wrote.
use super::event_file::{EventFile, PREFIX};
use super::scalars::Scalars;
use crate::base::{Error, Result};
use crate::run::watch::metrics::Event;
use crate::run::watch::metrics::Sink;
use std::path::Path;

pub struct TensorBoard {
    file: EventFile,
    scalars: Scalars,
}

impl TensorBoard {
    /// `go_on`: continues the run in `dir` after `done` steps. Otherwise the files of an earlier run move to
    /// `DIR/run-1`, or the next free number, which TensorBoard shows as a separate run.
    pub fn open(dir: &Path, go_on: bool, done: u64, ranks: usize, config: &str) -> Result<TensorBoard> {
        std::fs::create_dir_all(dir).map_err(|e| Error::io("create", dir, e))?;
        if !go_on {
            keep_earlier(dir)?;
        }
        let mut file = EventFile::create(dir, done + 1)?;
        file.text(done, "config", &format!("```yaml\n{config}```\n"))?;
        Ok(TensorBoard { file, scalars: Scalars::new(ranks) })
    }
}

impl Sink for TensorBoard {
    fn event(&mut self, event: &Event) -> Result<()> {
        let event = serde_json::to_value(event).map_err(|e| Error::op("tensorboard", e.to_string()))?;
        let Some(step) = event["step"].as_u64() else { return Ok(()) };
        self.file.scalars(step, self.scalars.of(&event))
    }
}

fn keep_earlier(dir: &Path) -> Result<()> {
    let listing = std::fs::read_dir(dir).map_err(|e| Error::io("list", dir, e))?;
    let earlier: Vec<_> = listing
        .filter_map(|entry| entry.ok().map(|entry| entry.file_name()))
        .filter(|name| name.to_string_lossy().starts_with(PREFIX))
        .collect();
    if earlier.is_empty() {
        return Ok(());
    }
    let numbered = |n: u32| dir.join(format!("run-{n}"));
    let kept = (1..).map(numbered).find(|kept| !kept.exists()).unwrap_or_else(|| numbered(0));
    std::fs::create_dir(&kept).map_err(|e| Error::io("create", &kept, e))?;
    for name in earlier {
        std::fs::rename(dir.join(&name), kept.join(&name)).map_err(|e| Error::io("move", dir.join(&name), e))?;
    }
    Ok(())
}
