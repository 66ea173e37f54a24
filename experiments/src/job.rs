//! One training run as a child process: its directory, command and exit status. A finished run is not repeated; a
//! failed one leaves its message and does not stop the others. Never judges metrics.
use crate::curve::METRICS;
use flatshard::base::{Error, Result};
use rustix::process::{Pid, Signal, kill_process};
use serde::{Deserialize, Serialize};
use signal_hook::consts::{SIGINT, SIGTERM};
use signal_hook::iterator::Signals;
use std::fs::{self, File};
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

const STATUS: &str = "status.json";
/// Time from SIGTERM to SIGKILL: a training run finishes its step first.
const GRACE: Duration = Duration::from_secs(20);

/// A run, possibly finished earlier.
pub struct Job {
    pub name: String,
    /// The run's own directory: configuration, log, metrics, status.
    pub dir: PathBuf,
    pub log: PathBuf,
    /// Program and arguments.
    pub command: Vec<String>,
    pub env: Vec<(String, String)>,
    /// Files written to `dir` that define the run together with the command: (name, text).
    pub files: Vec<(&'static str, String)>,
    pub timeout: Duration,
}

/// How a run ended, as stored in its directory.
#[derive(Serialize, Deserialize, Clone, Debug, PartialEq)]
pub struct Status {
    pub ended: End,
    /// On failure: the run's error message.
    #[serde(default)]
    pub message: String,
    #[serde(default)]
    pub seconds: f64,
    pub command: Vec<String>,
}

#[derive(Serialize, Deserialize, Clone, Copy, Debug, PartialEq, Eq)]
#[serde(rename_all = "snake_case")]
pub enum End {
    Done,
    Failed,
}

impl Status {
    /// The status of the run in this directory; None if it never ended.
    pub fn read(dir: &Path) -> Option<Status> {
        serde_json::from_str(&fs::read_to_string(dir.join(STATUS)).ok()?).ok()
    }
}

/// The result of running a job.
#[derive(Debug, PartialEq)]
pub enum JobOutcome {
    Done(Status),
    /// Finished earlier with the same settings.
    Before(Status),
    Failed(Status),
}

impl Job {
    /// The status of an earlier run with the same settings. Different settings are an error: the earlier results would
    /// be overwritten, or mistaken for these.
    pub fn before(&self) -> Result<Option<Status>> {
        let Some(status) = Status::read(&self.dir).filter(|s| s.ended == End::Done) else { return Ok(None) };
        let same = |(name, text): &(&str, String)| fs::read_to_string(self.dir.join(name)).is_ok_and(|t| t == *text);
        if status.command != self.command || !self.files.iter().all(same) {
            return Err(Error::input(format!(
                "{} contains a run of {} with other settings: use another --output-dir, or remove that directory",
                self.dir.display(),
                self.name
            )));
        }
        Ok(Some(status))
    }

    /// Writes the run's files without starting it.
    pub fn materialize(&self) -> Result<()> {
        fs::create_dir_all(&self.dir).map_err(|e| Error::io("create", &self.dir, e))?;
        for (name, text) in &self.files {
            let path = self.dir.join(name);
            fs::write(&path, text).map_err(|e| Error::io("write", &path, e))?;
        }
        Ok(())
    }

    /// Runs the job to its end, unless it is already done. Errors are those of this harness, not of the run. A signal
    /// in `signals` stops the run and is such an error; the run then counts as never started.
    pub fn run(&self, signals: &mut Signals) -> Result<JobOutcome> {
        if let Some(status) = self.before()? {
            return Ok(JobOutcome::Before(status));
        }
        // Remove what an interrupted run left, which would be mistaken for results of this one.
        for path in [self.dir.join(METRICS), self.dir.join(STATUS), self.log.clone()] {
            match fs::remove_file(&path) {
                Err(e) if e.kind() != std::io::ErrorKind::NotFound => return Err(Error::io("remove", &path, e)),
                _ => {}
            }
        }
        self.materialize()?;
        if let Some(dir) = self.log.parent() {
            fs::create_dir_all(dir).map_err(|e| Error::io("create", dir, e))?;
        }
        let log = File::create(&self.log).map_err(|e| Error::io("create", &self.log, e))?;
        let again = log.try_clone().map_err(|e| Error::io("open", &self.log, e))?;
        let started = Instant::now();
        let child = Command::new(&self.command[0])
            .args(&self.command[1..])
            .envs(self.env.iter().map(|(name, value)| (name, value)))
            .stdin(Stdio::null())
            .stdout(log)
            .stderr(again)
            .spawn();
        let failure = match child {
            Ok(mut child) => self.wait(&mut child, signals)?,
            Err(e) => Some(format!("cannot start {}: {e}", self.command[0])),
        };
        let ended = if failure.is_none() { End::Done } else { End::Failed };
        let (message, seconds) = (failure.unwrap_or_default(), started.elapsed().as_secs_f64());
        let status = Status { ended, message, seconds, command: self.command.clone() };
        let path = self.dir.join(STATUS);
        let text = serde_json::to_string_pretty(&status).map_err(|e| Error::op("status", e.to_string()))?;
        fs::write(&path, text + "\n").map_err(|e| Error::io("write", &path, e))?;
        Ok(if ended == End::Done { JobOutcome::Done(status) } else { JobOutcome::Failed(status) })
    }

    /// Why it failed; None on success.
    fn wait(&self, child: &mut Child, signals: &mut Signals) -> Result<Option<String>> {
        let started = Instant::now();
        let mut asked: Option<(Instant, Option<i32>)> = None; // asked to end: when, and by which signal
        loop {
            match (child.try_wait().map_err(|e| Error::io("wait for", &self.command[0], e))?, asked) {
                (Some(_), Some((_, Some(signal)))) => return Err(Error::Signal(signal)),
                (Some(_), Some((_, None))) => {
                    return Ok(Some(format!("took longer than {} s (--timeout)", self.timeout.as_secs_f64())));
                }
                (Some(status), None) if status.success() => return Ok(None),
                (Some(status), None) => return Ok(Some(failure(status, &self.log))),
                (None, None) => {
                    let signal = signals.pending().next();
                    if signal.is_some() || started.elapsed() > self.timeout {
                        asked = Some((Instant::now(), signal));
                        // it may just have exited
                        let _ = kill_process(Pid::from_child(child), Signal::TERM);
                    }
                }
                (None, Some((at, _))) if at.elapsed() > GRACE => drop(child.kill()), // it may just have exited
                (None, Some(_)) => {}
            }
            std::thread::sleep(Duration::from_millis(10));
        }
    }
}

/// The signals that end the harness and the run it waits for.
pub fn stop_signals() -> Result<Signals> {
    Signals::new([SIGINT, SIGTERM]).map_err(|e| Error::io("listen for signals", "SIGINT, SIGTERM", e))
}

/// The error message of a failed run: its error line, else its last line.
fn failure(status: ExitStatus, log: &Path) -> String {
    let how = match (status.code(), status.signal()) {
        (Some(code), _) => format!("exit status {code}"),
        (None, signal) => format!("signal {}", signal.unwrap_or(0)),
    };
    let text = fs::read(log).map(|bytes| String::from_utf8_lossy(&bytes).into_owned()).unwrap_or_default();
    match reason(&text) {
        Some(words) => format!("{how}: {}", words.trim()),
        None => how,
    }
}

/// The first error in a log: of a training binary, of a script's flags, or of Python; else the last line.
fn reason(text: &str) -> Option<&str> {
    let error = text.lines().find_map(|line| line.strip_prefix("error: "));
    let flags = || text.lines().find_map(|line| line.split_once(".py: error: ").map(|(_, words)| words));
    let of_a_rank = |line| match str::split_once(line, "]: ") {
        Some((rank, words)) if rank.starts_with("[rank") => words,
        _ => line,
    };
    let is_exception = |line: &&str| line.split_once("Error: ").is_some_and(|(name, _)| !name.contains(' '));
    let python = || text.lines().map(of_a_rank).find(is_exception);
    error.or_else(flags).or_else(python).or(text.lines().rev().find(|line| !line.trim().is_empty()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_error_is_found_in_the_log() {
        assert_eq!(reason("step 1/2\nerror: lr is -1\nbye\n"), Some("lr is -1"));
        assert_eq!(
            reason("usage: x\npeer.py: error: fsdp2 has no a\nChildFailedError:\n====\n"),
            Some("fsdp2 has no a")
        );
        let python = "Traceback:\n[rank0]: RuntimeError: CUDA: out of memory\nchild failed\n====\n";
        assert_eq!(reason(python), Some("RuntimeError: CUDA: out of memory"));
        assert_eq!(reason("one\ntwo\n\n"), Some("two"));
        assert_eq!(reason(""), None);
    }
}
