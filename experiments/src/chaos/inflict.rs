//! Carries out one fault after the other on a run, and takes the time until it goes on. Never draws what happens, and never
//! judges the curve.
use super::draw::{Fault, Kind, Moment};
use super::follow::{Event, Seen};
use super::training::{Process, Training};
use flatshard::base::{Error, Result};
use rustix::process::Signal;
use serde::Serialize;
use std::path::PathBuf;
use std::time::{Duration, Instant};

/// Between two looks at the run.
const LOOK: Duration = Duration::from_micros(500);
/// A run that does not get on for so long hangs. Far longer than any timeout within it, on any machine.
pub const HANGS: Duration = Duration::from_secs(180);
/// A checkpoint that is not begun by then was missed: the fault comes nevertheless.
const MISSED: Duration = Duration::from_secs(2);

/// What a fault did.
#[derive(Serialize, Clone, Debug, Default)]
pub struct Record {
    pub kind: &'static str,
    pub rank: Option<usize>,
    /// The last step that was done when it hit.
    pub step: u64,
    /// A checkpoint was being written.
    pub saving: bool,
    /// It came twice, the second time while ranks were starting.
    pub twice: bool,
    /// From the fault until the launcher named it; where the launcher is dead, until all its ranks were.
    pub noticed_s: Option<f64>,
    /// Until the end of the first step after it, and of the first that had never been done.
    pub first_step_s: f64,
    pub new_step_s: f64,
    /// Steps that were done once more.
    pub steps_lost: u64,
    /// By whom the ranks were started again.
    pub restarts: u32,
    pub starts: u32,
}

/// A run under way, and what was seen of it.
pub struct Chaos {
    pub training: Training,
    pub ckpt: PathBuf,
    /// The highest step so far.
    pub furthest: u64,
    /// Failures that nobody here caused, as the run told them.
    pub unplanned: Vec<String>,
    /// Of the last steps.
    step_time: Duration,
    last_step: Option<Instant>,
    /// The last line that the launcher said about a failure.
    failure: String,
}

/// What one turn saw.
#[derive(Default)]
struct Turn {
    began: Option<(Instant, u64)>,
    /// Before the ranks began anew, and after.
    steps_before: Vec<(Instant, u64)>,
    steps: Vec<(Instant, u64)>,
    said: Vec<(Instant, String)>,
    restarts: u32,
    started: bool,
}

impl Chaos {
    pub fn new(training: Training, ckpt: PathBuf) -> Chaos {
        let step_time = Duration::from_millis(3);
        Chaos { training, ckpt, furthest: 0, unplanned: Vec::new(), step_time, last_step: None, failure: String::new() }
    }

    /// Looks at the run once; a launcher that has ended is started again.
    fn turn(&mut self) -> Result<Turn> {
        let mut turn = Turn::default();
        if let Some(status) = self.training.ended()? {
            if status.success() || status.code() == Some(2) {
                return Err(Error::Run(format!("the run ended with {status} on its own: {}", self.last_words())));
            }
            // What it wrote before it ended comes first.
            self.look(&mut turn)?;
            self.wait_for_the_dead()?;
            self.training.start()?;
            turn.started = true;
            return Ok(turn);
        }
        self.look(&mut turn)?;
        if turn.steps.is_empty() && turn.began.is_none() {
            std::thread::sleep(LOOK);
        }
        Ok(turn)
    }

    fn look(&mut self, turn: &mut Turn) -> Result<()> {
        for (at, seen) in self.training.follow.look()? {
            match seen {
                Seen::Event(Event::Run { resumed_from_step, .. }) => {
                    turn.began = Some((at, resumed_from_step.unwrap_or(0)));
                    turn.steps_before.append(&mut turn.steps);
                }
                Seen::Event(Event::Step(step)) => {
                    turn.steps.push((at, step.step));
                    if let Some(last) = self.last_step.replace(at) {
                        // A running mean: half of it is some 20 steps old at most.
                        self.step_time = (self.step_time * 15 + (at - last).min(self.step_time * 4)) / 16;
                    }
                }
                Seen::Event(Event::Other) => {}
                Seen::Said(line) => {
                    turn.restarts += line.starts_with("restart ") as u32;
                    if line.starts_with("rank ") || line.starts_with("error: ") {
                        self.failure = line.clone();
                    }
                    turn.said.push((at, line));
                }
            }
        }
        if let Some((_, step)) = turn.steps.iter().chain(&turn.steps_before).max_by_key(|(_, step)| *step) {
            self.furthest = self.furthest.max(*step);
        }
        Ok(())
    }

    /// Takes note of what the run has told.
    pub fn catch_up(&mut self) -> Result<()> {
        self.look(&mut Turn::default())
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
                _ => std::thread::sleep(LOOK),
            }
        }
    }

    /// Steps go on until `furthest` is reached; a failure meanwhile is nobody's here.
    fn get_on(&mut self, furthest: u64) -> Result<()> {
        let mut since = Instant::now();
        while self.furthest < furthest {
            let before = self.furthest;
            let turn = self.turn()?;
            if turn.started || turn.restarts > 0 {
                self.unplanned.push(format!("after step {before}: {}", self.failure));
            }
            if self.furthest > before {
                since = Instant::now();
            }
            self.hangs(since, &format!("step {furthest}"))?;
        }
        Ok(())
    }

    fn hangs(&self, since: Instant, wanted: &str) -> Result<()> {
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

    /// All ranks, when they are there and none of them is among `old`; and how often the launcher started them meanwhile.
    fn ranks(&mut self, old: &[Process]) -> Result<(Vec<Process>, u32)> {
        let (since, mut restarts) = (Instant::now(), 0);
        loop {
            let is_old = |process: &Process| old.iter().any(|o| o.pid == process.pid);
            if let Some(ranks) = self.training.all_ranks().filter(|ranks| !ranks.iter().any(is_old)) {
                return Ok((ranks, restarts));
            }
            restarts += self.turn()?.restarts;
            self.hangs(since, "full number of ranks")?;
        }
    }

    fn is_saving(&self) -> bool {
        let list = std::fs::read_dir(&self.ckpt).into_iter().flatten().flatten();
        list.into_iter().any(|entry| entry.file_name().to_string_lossy().starts_with(".tmp-step-"))
    }

    fn wait_for(&mut self, moment: Moment) -> Result<()> {
        match moment {
            Moment::Step(part) => std::thread::sleep(self.step_time.mul_f64(part)),
            Moment::Saving => {
                let since = Instant::now();
                while !self.is_saving() && since.elapsed() < MISSED {
                    self.catch_up()?;
                }
            }
            Moment::Starting(_) => {}
        }
        Ok(())
    }

    /// Waits for the moment, does it, and returns when a step is done that had never been done before.
    pub fn inflict(&mut self, fault: &Fault) -> Result<Record> {
        self.get_on(self.furthest + fault.after)?;
        let (ranks, _) = self.ranks(&[])?;
        let victim = fault.rank % ranks.len();
        self.wait_for(fault.moment)?;
        let rank = matches!(fault.kind, Kind::KillRank).then_some(victim);
        let mut record = Record { kind: fault.kind.name(), rank, saving: self.is_saving(), ..Record::default() };
        let mut hit = Instant::now();
        match fault.kind {
            Kind::KillRank => {
                ranks[victim].send(Signal::KILL);
                if let Moment::Starting(after) = fault.moment {
                    let (starting, restarts) = self.ranks(&ranks)?;
                    std::thread::sleep(Duration::from_secs_f64(after));
                    hit = Instant::now();
                    starting[victim].send(Signal::KILL);
                    (record.twice, record.restarts) = (true, restarts);
                }
            }
            Kind::KillLauncher => self.training.send_launcher(Signal::KILL),
            Kind::KillAll => {
                self.training.send_launcher(Signal::KILL);
                ranks.iter().for_each(|rank| rank.send(Signal::KILL));
            }
        }
        let told = rank.map(|rank| format!("rank {rank} was killed by signal 9"));
        self.recover(hit, &mut record, told.as_deref())?;
        Ok(record)
    }

    fn recover(&mut self, hit: Instant, record: &mut Record, told: Option<&str>) -> Result<()> {
        let seconds = |at: Instant| at.saturating_duration_since(hit).as_secs_f64();
        record.step = self.furthest;
        let (mut began, mut first) = (None, None);
        loop {
            let turn = self.turn()?;
            record.restarts += turn.restarts;
            record.starts += turn.started as u32;
            let said = told.and_then(|told| turn.said.iter().find(|(_, line)| line.contains(told)));
            record.noticed_s = record.noticed_s.or(said.map(|(at, _)| seconds(*at)));
            if told.is_none() && turn.started && record.noticed_s.is_none() {
                record.noticed_s = Some(hit.elapsed().as_secs_f64());
            }
            let old = if began.is_none() && turn.began.is_none() { &turn.steps } else { &turn.steps_before };
            if began.is_none()
                && let Some(furthest) = old.iter().map(|(_, step)| *step).max()
            {
                record.step = record.step.max(furthest);
            }
            began = turn.began.map(|(_, from)| from).or(began);
            let Some(from) = began else {
                self.hangs(hit, "new start")?;
                continue;
            };
            if first.is_none() {
                first = turn.steps.first().map(|(at, _)| seconds(*at));
            }
            if let Some((at, _)) = turn.steps.iter().find(|(_, step)| *step > record.step) {
                (record.first_step_s, record.new_step_s) = (first.unwrap_or(seconds(*at)), seconds(*at));
                record.steps_lost = record.step.saturating_sub(from);
                return match (told, record.noticed_s) {
                    (Some(told), None) => Err(Error::Run(format!(
                        "{} after step {}: the launcher never said \"{told}\", but: {}",
                        record.kind, record.step, self.failure
                    ))),
                    _ => Ok(()),
                };
            }
            self.hangs(hit, "new step")?;
        }
    }
}
