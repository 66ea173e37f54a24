//! Inflicts one fault after the other on a run, and measures how long it takes to recover. Never chooses the faults,
//! and never judges the curve.
use super::course::Course;
use super::damage;
use super::draw::{DrawnFault, FaultKind, Moment};
use super::training::Process;
use flatshard::base::{Error, Result};
use rustix::process::Signal;
use serde::Serialize;
use std::time::{Duration, Instant};

/// A checkpoint that is not begun by then was missed: the fault comes nevertheless.
const MISSED: Duration = Duration::from_secs(2);

/// The longest stop that is no failure, before a tenth is added: less than any timeout of communication that is allowed
/// here.
const BRIEF: Duration = Duration::from_millis(500);
/// A stalled rank is stopped again and again, three quarters of the time; so often at most, but for a tenth.
const PULSE: Duration = Duration::from_millis(15);
const STALLS: f64 = 50.0;

/// What a fault did.
#[derive(Serialize, Clone, Debug, Default)]
pub struct FaultRecord {
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

    /// Waits for the moment, does it, and returns when a step is done that had never been done before.
    pub fn inflict(&mut self, fault: &DrawnFault) -> Result<FaultRecord> {
        self.get_on(self.furthest + fault.after)?;
        if matches!(fault.kind, FaultKind::FlippedBit | FaultKind::HalfWritten) {
            while damage::checkpoints(&self.ckpt)?.len() < 2 {
                self.get_on(self.furthest + 1)?;
            }
        }
        let ranks = loop {
            let failures = self.failures;
            let (ranks, _) = self.ranks(&[])?;
            self.wait_for(fault.moment)?;
            self.nobodys(failures);
            // They are no longer there where the run has just failed on its own.
            if !ranks.iter().any(Process::is_dead) {
                break ranks;
            }
            self.observe()?;
        };
        let victim = fault.rank % ranks.len();
        // Nobody waits for the only rank of a run that --elastic has brought down to one.
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
                    self.catch_up()?; // a start that is killed may have done steps
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
                self.nobodys(failures);
                record.step = self.furthest;
                self.get_on(self.furthest + 1)?;
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
                // Nobody saves meanwhile.
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
                let said = |line: &str| line.starts_with("warning: damaged checkpoint: ");
                let from = self.recover(hit, &mut record, Some(&said))?;
                if from != whole {
                    let what = format!("after step {} it went on from step {from}, not {whole}", record.step);
                    return Err(Error::Run(format!("{}: {what}", record.kind)));
                }
            }
        }
        Ok(record)
    }

    /// After a signal that stops ranks: they have stopped, and what they did before is there.
    fn settle(&mut self) -> Result<()> {
        std::thread::sleep(PULSE);
        self.catch_up()
    }

    fn recover(&mut self, hit: Instant, record: &mut FaultRecord, told: Option<&dyn Fn(&str) -> bool>) -> Result<u64> {
        self.recover_from(hit, record, told, &mut None)
    }

    /// Looks at the run until a step is done that had never been done before. `told`: the line by which the fault is
    /// noticed. `full`: the disk, until then. Returns the step that the run went on from.
    fn recover_from(
        &mut self,
        hit: Instant,
        record: &mut FaultRecord,
        told: Option<&dyn Fn(&str) -> bool>,
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
            let said = told.and_then(|told| observed.log_lines.iter().find(|(_, line)| told(line)));
            record.noticed_s = record.noticed_s.or(said.map(|(at, _)| seconds(*at)));
            if told.is_none() && observed.started && record.noticed_s.is_none() {
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
                        "{} (rank {:?}) after step {}: the run never said so, but: {}",
                        record.kind, record.rank, record.step, self.failure
                    ))),
                    Some(_) => Ok(from),
                };
            }
            self.hangs(hit, "new step")?;
        }
    }
}

/// How much room is left on it, and who finds out.
struct FullDisk<'a> {
    room: u64,
    victim: &'a Process,
}
