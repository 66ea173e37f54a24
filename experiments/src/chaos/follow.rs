//! Follows a running job: new lines of its metrics file and of its log, with the time each was read. Never judges them.
use flatshard::base::{Error, Result};
use serde::Deserialize;
use std::fs::File;
use std::io::{ErrorKind, Read};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::Instant;

/// A line of the metrics file, as far as it is of interest here.
#[derive(Deserialize, Clone, Debug, PartialEq)]
#[serde(tag = "event", rename_all = "snake_case")]
pub enum FollowedEvent {
    /// The ranks begin, after this step of a checkpoint.
    Run {
        resumed_from_step: Option<u64>,
        world_size: u64,
    },
    Step(FollowedStep),
    #[serde(other)]
    Other,
}

/// Bits are compared, so nothing is rounded here.
#[derive(Deserialize, Clone, Copy, Debug, PartialEq)]
pub struct FollowedStep {
    pub step: u64,
    pub loss: Option<f64>,
    pub grad_norm: Option<f64>,
}

/// Something new, with the time at which it was seen.
#[derive(Clone, Debug, PartialEq)]
pub enum Sighting {
    Event(FollowedEvent),
    LogLine(String),
}

/// Both files of a run.
pub struct Follow {
    metrics: Tail,
    log: Tail,
}

impl Follow {
    pub fn new(metrics: PathBuf, log: PathBuf) -> Follow {
        Follow { metrics: Tail::new(metrics), log: Tail::new(log) }
    }
    /// What came since the last call. The run's words first: they say why it begins again.
    pub fn read_new(&mut self) -> Result<Vec<(Instant, Sighting)>> {
        let now = Instant::now();
        let mut seen: Vec<Sighting> = self.log.lines()?.into_iter().map(Sighting::LogLine).collect();
        for line in self.metrics.lines()? {
            seen.push(Sighting::Event(event(&line, &self.metrics.path)?));
        }
        Ok(seen.into_iter().map(|seen| (now, seen)).collect())
    }
}

fn event(line: &str, path: &Path) -> Result<FollowedEvent> {
    let bad = |e| Error::Run(format!("{}: not a metrics event ({e}): {line}", path.display()));
    serde_json::from_str(line).map_err(bad)
}

/// Every event of a metrics file; a line that is not one is an error.
pub fn events(path: &Path) -> Result<Vec<FollowedEvent>> {
    let text = std::fs::read_to_string(path).map_err(|e| Error::io("read", path, e))?;
    text.lines().filter(|line| !line.is_empty()).map(|line| event(line, path)).collect()
}

/// The end of a file that grows.
struct Tail {
    path: PathBuf,
    file: Option<File>,
    /// The beginning of a line whose end has not come yet.
    begun: Vec<u8>,
}

impl Tail {
    fn new(path: PathBuf) -> Tail {
        Tail { path, file: None, begun: Vec::new() }
    }
    /// Whole lines that came since the last call. A file that takes the place of the one that was read is read from its
    /// start.
    fn lines(&mut self) -> Result<Vec<String>> {
        let failed = |e| Error::io("read", &self.path, e);
        let mut bytes = std::mem::take(&mut self.begun);
        if let Some(file) = &mut self.file {
            file.read_to_end(&mut bytes).map_err(failed)?;
        }
        let there = match self.path.metadata() {
            Err(e) if e.kind() == ErrorKind::NotFound => None,
            there => Some(there.map_err(failed)?.ino()),
        };
        let open = self.file.as_ref().map(|file| file.metadata()).transpose().map_err(failed)?.map(|m| m.ino());
        if there.is_some() && there != open {
            let mut file = File::open(&self.path).map_err(failed)?;
            file.read_to_end(&mut bytes).map_err(failed)?;
            self.file = Some(file);
        }
        let whole = bytes.iter().rposition(|&b| b == b'\n').map_or(0, |at| at + 1);
        self.begun = bytes.split_off(whole);
        Ok(String::from_utf8_lossy(&bytes).lines().map(String::from).collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;

    #[test]
    fn lines_come_once_and_whole_and_a_new_file_is_followed() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("file");
        let mut tail = Tail::new(path.clone());
        assert!(tail.lines().unwrap().is_empty());
        let mut file = File::create(&path).unwrap();
        file.write_all(b"one\ntw").unwrap();
        assert_eq!(tail.lines().unwrap(), ["one"]);
        assert!(tail.lines().unwrap().is_empty());
        file.write_all(b"o\nthree\n").unwrap();
        assert_eq!(tail.lines().unwrap(), ["two", "three"]);
        std::fs::rename(&path, dir.path().join("file.1")).unwrap();
        assert!(tail.lines().unwrap().is_empty());
        std::fs::write(&path, "four\n").unwrap();
        assert_eq!(tail.lines().unwrap(), ["four"]);
    }

    #[test]
    fn a_float_is_read_to_its_bits() {
        let line = r#"{"event":"step","step":3,"loss":0.12345678901234567,"grad_norm":null,"lr":1.0}"#;
        let step = FollowedStep { step: 3, loss: Some(0.12345678901234567), grad_norm: None };
        assert_eq!(event(line, Path::new("m")).unwrap(), FollowedEvent::Step(step));
        assert!(
            event("{\"event\":\"step\",\"step\":3,\"lo", Path::new("m")).unwrap_err().to_string().contains("m: not a")
        );
    }
}
