//! The disturbed run as observed from outside: its steps, its starts, its log; restarted when it ends. Never harms it.
use super::disk::ChaosDisk;
use super::follow::{FollowedEvent, Sighting};
use super::training::{Process, Training};
use flatshard::base::{Error, Result};
use rustix::process::Signal;
use signal_hook::iterator::Signals;
use std::path::PathBuf;
use std::time::{Duration, Instant};

/// How often the run is polled.
const POLL: Duration = Duration::from_micros(500);
/// A run that does not get on for so long hangs. Far longer than any timeout within it, on any machine.
const HANGS: Duration = Duration::from_secs(180);

/// A run under way, and what was seen of it.
pub struct Course {
    pub training: Training,
    pub ckpt: PathBuf,
    pub disk: ChaosDisk,
    /// That end all this.
    signals: Signals,
    /// The highest step so far.
    pub furthest: u64,
    /// Failures that nobody here caused, as the run told them.
    pub unplanned: Vec<String>,
    /// Of the last steps.
    pub step_time: Duration,
    last_step: Option<Instant>,
    /// Starts after a failure, by the launcher or by this process; and the last line that the launcher said about one.
    pub failures: u32,
    pub failure: String,
}

/// What one observation saw.
#[derive(Default)]
pub struct Observation {
    /// The ranks began anew, after this step.
    pub began: Option<(Instant, u64)>,
    /// Steps before that and, where there is no such thing, none; and steps since.
    pub steps_before: Vec<(Instant, u64)>,
    pub steps: Vec<(Instant, u64)>,
    pub log_lines: Vec<(Instant, String)>,
    /// Restarts by the launcher, and whether that was started.
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

    /// Reads once what the run has written; a launcher that has ended is started again.
    pub fn observe(&mut self) -> Result<Observation> {
        let mut observed = Observation::default();
        if let Some(signal) = self.signals.pending().next() {
            return Err(Error::Signal(signal));
        }
        if let Some(status) = self.training.ended()? {
            if status.success() || status.code() == Some(2) {
                return Err(Error::Run(format!("the run ended with {status} on its own: {}", self.last_words())));
            }
            // What it wrote before it ended comes first.
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
                        // A running mean: half of it is some 20 steps old at most.
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

    /// Takes note of what the run has told.
    pub fn catch_up(&mut self) -> Result<()> {
        self.read_new(&mut Observation::default())
    }

    /// Ranks outlive their launcher by the time that the kernel takes to kill them.
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

    /// Steps go on until `furthest` is reached; a failure meanwhile is nobody's here.
    pub fn get_on(&mut self, furthest: u64) -> Result<()> {
        let mut since = Instant::now();
        while self.furthest < furthest {
            let (before, failures) = (self.furthest, self.failures);
            self.observe()?;
            self.nobodys(failures);
            if self.furthest > before {
                since = Instant::now();
            }
            self.hangs(since, &format!("step {furthest}"))?;
        }
        Ok(())
    }

    /// Takes note of failures that came after the first `before`.
    pub fn nobodys(&mut self, before: u32) {
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
        text.lines().rev().find(|line| !line.trim().is_empty()).unwrap_or("it said nothing").to_string()
    }

    /// All ranks, when they are there and none of them is among `old`; and how often the launcher started them
    /// meanwhile.
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

    /// Asks the run to end; returns the number of steps done.
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
                    return Err(Error::Run("SIGTERM does not end the run".into()));
                }
                None => std::thread::sleep(POLL),
            }
        }
    }
}
