//! Follows a running job: new lines of its metrics file and its log, with the time each was read. Never judges them.
use crate::tail::Tail;
use flatshard::base::{Error, Result};
use serde::Deserialize;
use std::path::{Path, PathBuf};
use std::time::Instant;

/// A line of the metrics file, reduced to what is needed here.
#[derive(Deserialize, Clone, Debug, PartialEq)]
#[serde(tag = "event", rename_all = "snake_case")]
pub enum FollowedEvent {
    /// The ranks start, after this step of a checkpoint.
    Run {
        resumed_from_step: Option<u64>,
        world_size: u64,
    },
    Step(FollowedStep),
    #[serde(other)]
    Other,
}

/// Compared bit for bit, so nothing is rounded here.
#[derive(Deserialize, Clone, Copy, Debug, PartialEq)]
pub struct FollowedStep {
    pub step: u64,
    pub loss: Option<f64>,
    pub grad_norm: Option<f64>,
}

/// A new line, with the time it was seen.
#[derive(Clone, Debug, PartialEq)]
pub enum Sighting {
    Event(FollowedEvent),
    LogLine(String),
}

/// The metrics file and the log of a run.
pub struct Follow {
    metrics: Tail,
    log: Tail,
}

impl Follow {
    pub fn new(metrics: PathBuf, log: PathBuf) -> Follow {
        Follow { metrics: Tail::new(metrics), log: Tail::new(log) }
    }
    /// New lines since the last call. The log comes first: it says why the run restarts.
    pub fn read_new(&mut self) -> Result<Vec<(Instant, Sighting)>> {
        let now = Instant::now();
        let mut seen: Vec<Sighting> = self.log.lines()?.into_iter().map(Sighting::LogLine).collect();
        for line in self.metrics.lines()? {
            seen.push(Sighting::Event(event(&line, self.metrics.path())?));
        }
        Ok(seen.into_iter().map(|seen| (now, seen)).collect())
    }
}

fn event(line: &str, path: &Path) -> Result<FollowedEvent> {
    let bad = |e| Error::Run(format!("{}: not a metrics event ({e}): {line}", path.display()));
    serde_json::from_str(line).map_err(bad)
}

/// Every event of a metrics file; any other line is an error.
pub fn events(path: &Path) -> Result<Vec<FollowedEvent>> {
    let text = std::fs::read_to_string(path).map_err(|e| Error::io("read", path, e))?;
    text.lines().filter(|line| !line.is_empty()).map(|line| event(line, path)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn floats_are_read_exactly() {
        let line = r#"{"event":"step","step":3,"loss":0.12345678901234567,"grad_norm":null,"lr":1.0}"#;
        let step = FollowedStep { step: 3, loss: Some(0.12345678901234567), grad_norm: None };
        assert_eq!(event(line, Path::new("m")).unwrap(), FollowedEvent::Step(step));
        assert!(
            event("{\"event\":\"step\",\"step\":3,\"lo", Path::new("m")).unwrap_err().to_string().contains("m: not a")
        );
    }
}
