//! Inflicts one fault after another on a run, and measures the time to recovery. Never chooses the faults, and never
//! judges the loss curve.
use super::course::Course;
use super::damage;
use super::draw::{DrawnFault, FaultKind, Moment};
use super::training::Process;
use flatshard::base::{Error, Result};
use rustix::process::Signal;
use serde::Serialize;
use std::time::{Duration, Instant};

/// Maximum wait for a checkpoint to start; then the fault hits anyway.
const MISSED: Duration = Duration::from_secs(2);

/// The longest stop that does not count as a failure, plus up to a tenth: less than any communication timeout allowed
/// here.
const BRIEF: Duration = Duration::from_millis(500);
/// A stalled rank is stopped three quarters of the time in pulses of this length, at most this often plus a tenth.
const PULSE: Duration = Duration::from_millis(15);
const STALLS: f64 = 50.0;

/// The effect of a fault.
#[derive(Serialize, Clone, Debug, Default)]
pub struct FaultRecord {
    pub kind: &'static str,
    pub rank: Option<usize>,
    /// The last completed step when it hit.
    pub step: u64,
    /// A checkpoint was being written.
    pub saving: bool,
    /// It hit twice, the second time while ranks were starting.
    pub twice: bool,
    /// Time until the launcher reported it or, if the launcher was killed, until all ranks were dead.
    pub noticed_s: Option<f64>,
    /// Time until the end of the first step, and of the first new step.
    pub first_step_s: f64,
    pub new_step_s: f64,
    /// Steps that were repeated.
    pub steps_lost: u64,
    /// Restarts of the ranks, by whom.
    pub restarts: u32,
    pub starts: u32,
}

impl Course {
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

    /// Waits for the moment, inflicts the fault, and returns once a new step is done.
    pub fn inflict(&mut self, fault: &DrawnFault) -> Result<FaultRecord> {
        self.wait_for_step(self.furthest + fault.after)?;
        if matches!(fault.kind, FaultKind::FlippedBit | FaultKind::HalfWritten) {
            while damage::checkpoints(&self.ckpt)?.len() < 2 {
                self.wait_for_step(self.furthest + 1)?;
            }
        }
        let ranks = loop {
            let failures = self.failures;
            let (ranks, _) = self.ranks(&[])?;
            self.wait_for(fault.moment)?;
            self.record_unplanned(failures);
            // The ranks are dead if the run has just failed by accident.
            if !ranks.iter().any(Process::is_dead) {
                break ranks;
            }
            self.observe()?;
        };
        let victim = fault.rank % ranks.len();
        // With --elastic a run may be down to one rank, which has no peer to notice a stop.
        let kind =
            if ranks.len() == 1 && fault.kind == FaultKind::StopLong { FaultKind::StopShort } else { fault.kind };
        let to_one = !matches!(
            kind,
            FaultKind::KillLauncher | FaultKind::KillAll | FaultKind::FlippedBit | FaultKind::HalfWritten
        );
        let rank = to_one.then_some(victim);
        let mut record = FaultRecord { kind: kind.name(), rank, saving: self.is_saving(), ..FaultRecord::default() };
        let mut hit = Instant::now();
        let killed = |line: &str| line.contains(&format!("rank {victim} was killed by signal 9"));
        match kind {
            FaultKind::KillRank => {
                ranks[victim].send(Signal::KILL);
                if let Moment::Starting(after) = fault.moment {
                    let (starting, restarts) = self.ranks(&ranks)?;
                    std::thread::sleep(Duration::from_secs_f64(after));
                    self.catch_up()?; // a killed start may have done steps
                    hit = Instant::now();
                    starting[victim].send(Signal::KILL);
                    (record.twice, record.restarts) = (true, restarts);
                }
                self.recover(hit, &mut record, Some(&killed))?;
            }
            FaultKind::KillLauncher => {
                self.training.send_launcher(Signal::KILL);
                self.recover(hit, &mut record, None)?;
            }
            FaultKind::KillAll => {
                self.training.send_launcher(Signal::KILL);
                ranks.iter().for_each(|rank| rank.send(Signal::KILL));
                self.recover(hit, &mut record, None)?;
            }
            FaultKind::StopLong => {
                ranks[victim].send(Signal::STOP);
                let named = |line: &str| line.contains("no answer within") && line.contains(&format!("rank {victim}"));
                self.recover(hit, &mut record, Some(&named))?;
            }
            FaultKind::StopShort | FaultKind::Stall => {
                let failures = self.failures;
                let pulses = if kind == FaultKind::Stall { (STALLS * (0.1 + fault.size)) as u32 } else { 1 };
                let stopped = if kind == FaultKind::Stall { PULSE } else { BRIEF.mul_f64(0.1 + fault.size) };
                for _ in 0..pulses {
                    ranks[victim].send(Signal::STOP);
                    std::thread::sleep(stopped);
                    ranks[victim].send(Signal::CONT);
                    std::thread::sleep(stopped / 3);
                }
                self.catch_up()?;
                self.record_unplanned(failures);
                record.step = self.furthest;
                self.wait_for_step(self.furthest + 1)?;
                (record.first_step_s, record.new_step_s) = (hit.elapsed().as_secs_f64(), hit.elapsed().as_secs_f64());
            }
            FaultKind::FullDisk => {
                let whole = damage::checkpoints(&self.ckpt)?.first().map_or(0, |newest| damage::bytes(newest));
                let room = (fault.size * whole as f64) as u64;
                let refusal = self.disk.refusal();
                let mut full = Some(FullDisk { room, victim: &ranks[victim] });
                self.recover_from(hit, &mut record, Some(&|line: &str| line.contains(refusal)), &mut full)?;
            }
            FaultKind::FlippedBit | FaultKind::HalfWritten => {
                // Nobody may save meanwhile.
                ranks.iter().for_each(|rank| rank.send(Signal::STOP));
                self.settle()?;
                let checkpoints = damage::checkpoints(&self.ckpt)?;
                let count = if checkpoints.len() > 2 && fault.dice & 4 != 0 { 2 } else { 1 };
                for checkpoint in &checkpoints[..count] {
                    match fault.kind {
                        FaultKind::FlippedBit => damage::flip(checkpoint, fault)?,
                        _ => damage::halve(checkpoint, fault)?,
                    }
                }
                if fault.dice & 2 != 0 {
                    self.training.send_launcher(Signal::KILL);
                }
                hit = Instant::now();
                ranks.iter().for_each(|rank| rank.send(Signal::KILL));
                let whole = damage::step(&checkpoints[count]);
                let reports = |line: &str| line.starts_with("warning: damaged checkpoint: ");
                let from = self.recover(hit, &mut record, Some(&reports))?;
                if from != whole {
                    let what = format!("after step {} it resumed from step {from}, not {whole}", record.step);
                    return Err(Error::Run(format!("{}: {what}", record.kind)));
                }
            }
        }
        Ok(record)
    }

    /// After SIGSTOP: waits until the ranks have stopped, so that everything they did before is visible.
    fn settle(&mut self) -> Result<()> {
        std::thread::sleep(PULSE);
        self.catch_up()
    }

    fn recover(
        &mut self,
        hit: Instant,
        record: &mut FaultRecord,
        reports: Option<&dyn Fn(&str) -> bool>,
    ) -> Result<u64> {
        self.recover_from(hit, record, reports, &mut None)
    }

    /// Observes the run until a new step is done. `reports` recognizes the log line about the fault; `full` is the
    /// full disk, freed then. Returns the step the run resumed from.
    fn recover_from(
        &mut self,
        hit: Instant,
        record: &mut FaultRecord,
        reports: Option<&dyn Fn(&str) -> bool>,
        full: &mut Option<FullDisk>,
    ) -> Result<u64> {
        let seconds = |at: Instant| at.saturating_duration_since(hit).as_secs_f64();
        record.step = self.furthest;
        let (mut began, mut first) = (None, None);
        loop {
            if let Some(FullDisk { room, victim }) = full {
                self.disk.fill(*room, victim)?;
            }
            let observed = self.observe()?;
            record.restarts += observed.restarts;
            record.starts += observed.started as u32;
            let report = reports.and_then(|reports| observed.log_lines.iter().find(|(_, line)| reports(line)));
            record.noticed_s = record.noticed_s.or(report.map(|(at, _)| seconds(*at)));
            if reports.is_none() && observed.started && record.noticed_s.is_none() {
                record.noticed_s = Some(hit.elapsed().as_secs_f64());
            }
            if record.noticed_s.is_some() && full.take().is_some() {
                self.disk.free()?;
            }
            if began.is_none() {
                let old = if observed.began.is_none() { &observed.steps } else { &observed.steps_before };
                record.step = old.iter().map(|(_, step)| *step).max().unwrap_or(0).max(record.step);
            }
            began = observed.began.map(|(_, from)| from).or(began);
            let Some(from) = began else {
                self.hangs(hit, "new start")?;
                continue;
            };
            if first.is_none() {
                first = observed.steps.first().map(|(at, _)| seconds(*at));
            }
            if let Some((at, _)) = observed.steps.iter().find(|(_, step)| *step > record.step) {
                (record.first_step_s, record.new_step_s) = (first.unwrap_or(seconds(*at)), seconds(*at));
                record.steps_lost = record.step.saturating_sub(from);
                return match record.noticed_s {
                    None => Err(Error::Run(format!(
                        "{} (rank {:?}) after step {}: the run did not report it. Its last message: {}",
                        record.kind, record.rank, record.step, self.failure
                    ))),
                    Some(_) => Ok(from),
                };
            }
            self.hangs(hit, "new step")?;
        }
    }
}

/// How much space is left on the disk, and which rank runs into it.
struct FullDisk<'a> {
    room: u64,
    victim: &'a Process,
}
