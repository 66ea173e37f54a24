//! Observes the disturbed run from outside (steps, starts, log) and restarts it when it ends. Never harms it.
use super::disk::ChaosDisk;
use super::follow::{FollowedEvent, Sighting};
use super::training::{Process, Training};
use flatshard::base::{Error, Result};
use rustix::process::Signal;
use signal_hook::iterator::Signals;
use std::path::PathBuf;
use std::time::{Duration, Instant};

/// Poll interval.
const POLL: Duration = Duration::from_micros(500);
/// A run without progress for this long hangs. Far longer than any timeout within it, on any machine.
const HANGS: Duration = Duration::from_secs(180);

/// A run in progress, and what was observed of it.
pub struct Course {
    pub training: Training,
    pub ckpt: PathBuf,
    pub disk: ChaosDisk,
    /// Signals that end this program.
    signals: Signals,
    /// The highest step so far.
    pub furthest: u64,
    /// Messages of failures that were not inflicted.
    pub unplanned: Vec<String>,
    /// Running mean over the last steps.
    pub step_time: Duration,
    last_step: Option<Instant>,
    /// Restarts after a failure, by the launcher or by this process, and the launcher's last message about one.
    pub failures: u32,
    pub failure: String,
}

/// The result of one observation.
#[derive(Default)]
pub struct Observation {
    /// The ranks restarted from this step.
    pub began: Option<(Instant, u64)>,
    /// New steps before the restart (empty without one), and after it.
    pub steps_before: Vec<(Instant, u64)>,
    pub steps: Vec<(Instant, u64)>,
    pub log_lines: Vec<(Instant, String)>,
    /// Restarts by the launcher, and whether the launcher itself was restarted.
    pub restarts: u32,
    pub started: bool,
}

impl Course {
    pub fn new(training: Training, disk: ChaosDisk, ckpt: PathBuf, signals: Signals) -> Course {
        let step_time = Duration::from_millis(3);
        Course {
            training,
            ckpt,
            disk,
            signals,
            furthest: 0,
            unplanned: Vec::new(),
            step_time,
            last_step: None,
            failures: 0,
            failure: String::new(),
        }
    }

    /// Reads what the run has written since the last call, and restarts the launcher if it has ended.
    pub fn observe(&mut self) -> Result<Observation> {
        let mut observed = Observation::default();
        if let Some(signal) = self.signals.pending().next() {
            return Err(Error::Signal(signal));
        }
        if let Some(status) = self.training.ended()? {
            if status.success() || status.code() == Some(2) {
                return Err(Error::Run(format!("the run ended with {status} on its own: {}", self.last_words())));
            }
            // First read what it wrote before it ended.
            self.read_new(&mut observed)?;
            self.wait_for_the_dead()?;
            self.training.start()?;
            self.failures += 1;
            observed.started = true;
            return Ok(observed);
        }
        self.read_new(&mut observed)?;
        if observed.steps.is_empty() && observed.began.is_none() {
            std::thread::sleep(POLL);
        }
        Ok(observed)
    }

    fn read_new(&mut self, observed: &mut Observation) -> Result<()> {
        for (at, seen) in self.training.follow.read_new()? {
            match seen {
                Sighting::Event(FollowedEvent::Run { resumed_from_step, .. }) => {
                    observed.began = Some((at, resumed_from_step.unwrap_or(0)));
                    observed.steps_before.append(&mut observed.steps);
                }
                Sighting::Event(FollowedEvent::Step(step)) => {
                    observed.steps.push((at, step.step));
                    if let Some(last) = self.last_step.replace(at) {
                        // A running mean: half of its weight is on about the last 20 steps.
                        self.step_time = (self.step_time * 15 + (at - last).min(self.step_time * 4)) / 16;
                    }
                }
                Sighting::Event(FollowedEvent::Other) => {}
                Sighting::LogLine(line) => {
                    if line.starts_with("restart ") {
                        (observed.restarts, self.failures) = (observed.restarts + 1, self.failures + 1);
                    }
                    if line.starts_with("rank ") || line.starts_with("error: ") {
                        self.failure = line.clone();
                    }
                    observed.log_lines.push((at, line));
                }
            }
        }
        if let Some((_, step)) = observed.steps.iter().chain(&observed.steps_before).max_by_key(|(_, step)| *step) {
            self.furthest = self.furthest.max(*step);
        }
        Ok(())
    }

    /// Records what the run has written.
    pub fn catch_up(&mut self) -> Result<()> {
        self.read_new(&mut Observation::default())
    }

    /// Ranks outlive their launcher until the kernel has killed them.
    fn wait_for_the_dead(&mut self) -> Result<()> {
        let since = Instant::now();
        loop {
            match self.training.alive() {
                none if none.is_empty() => return Ok(()),
                some if since.elapsed() > HANGS => {
                    return Err(Error::Run(format!("processes {some:?} outlive their launcher")));
                }
                _ => std::thread::sleep(POLL),
            }
        }
    }

    /// Waits until step `furthest` is reached; a failure meanwhile counts as unplanned.
    pub fn wait_for_step(&mut self, furthest: u64) -> Result<()> {
        let mut since = Instant::now();
        while self.furthest < furthest {
            let (before, failures) = (self.furthest, self.failures);
            self.observe()?;
            self.record_unplanned(failures);
            if self.furthest > before {
                since = Instant::now();
            }
            self.hangs(since, &format!("step {furthest}"))?;
        }
        Ok(())
    }

    /// Records failures after the first `before` as unplanned.
    pub fn record_unplanned(&mut self, before: u32) {
        if self.failures > before {
            self.unplanned.push(format!("after step {}: {}", self.furthest, self.failure));
        }
    }

    pub fn hangs(&self, since: Instant, wanted: &str) -> Result<()> {
        match since.elapsed() > HANGS {
            false => Ok(()),
            true => Err(Error::Run(format!(
                "no {wanted} within {} s after step {}: {}",
                HANGS.as_secs(),
                self.furthest,
                self.last_words()
            ))),
        }
    }
    fn last_words(&self) -> String {
        let text = std::fs::read_to_string(&self.training.log).unwrap_or_default();
        text.lines().rev().find(|line| !line.trim().is_empty()).unwrap_or("(no output)").to_string()
    }

    /// All ranks, once they run and none of them is in `old`, and how often the launcher restarted them meanwhile.
    pub fn ranks(&mut self, old: &[Process]) -> Result<(Vec<Process>, u32)> {
        let (since, mut restarts) = (Instant::now(), 0);
        loop {
            let is_old = |process: &Process| old.iter().any(|o| o.pid == process.pid);
            if let Some(ranks) = self.training.all_ranks().filter(|ranks| !ranks.iter().any(is_old)) {
                return Ok((ranks, restarts));
            }
            restarts += self.observe()?.restarts;
            self.hangs(since, "full number of ranks")?;
        }
    }

    pub fn is_saving(&self) -> bool {
        let list = std::fs::read_dir(&self.ckpt).into_iter().flatten().flatten();
        list.into_iter().any(|entry| entry.file_name().to_string_lossy().starts_with(".tmp-step-"))
    }

    /// Asks the run to stop; returns the number of steps done.
    pub fn stop(&mut self) -> Result<u64> {
        self.training.send_launcher(Signal::TERM);
        let asked = Instant::now();
        loop {
            let ended = self.training.ended()?;
            self.catch_up()?;
            match ended {
                Some(status) if status.code() == Some(143) => return Ok(self.furthest),
                Some(status) => return Err(Error::Run(format!("after SIGTERM the run ended with {status}"))),
                None if asked.elapsed() > HANGS => {
                    return Err(Error::Run("SIGTERM did not end the run".into()));
                }
                None => std::thread::sleep(POLL),
            }
        }
    }
}
