//! How far the run is: a bar where stderr is a terminal, else one readable line a step. The log file has the lines in
//! either case. Never measures.
use super::log::RunLog;
use crate::run::settings::LogLevel;
use crate::run::watch::metrics::StepRecord;
use crate::run::watch::report::count;
use indicatif::{ProgressBar, ProgressStyle};
use std::fmt::Display;
use std::io::IsTerminal;
use std::time::Instant;

pub struct Progress {
    /// None where stderr is no terminal, or progress is not asked for.
    bar: Option<ProgressBar>,
    log_every: u64,
    first: u64,
    total: u64,
    started: Instant,
}

impl Progress {
    /// Steps `done + 1..=total` are to come.
    pub fn new(log: &RunLog, done: u64, total: u64, log_every: u64) -> Progress {
        let bar = (log.shows(LogLevel::Info) && std::io::stderr().is_terminal()).then(|| {
            let bar = ProgressBar::new(total).with_position(done);
            let style = ProgressStyle::with_template("{bar:30} {pos}/{len} {msg} {eta} left");
            bar.set_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()));
            bar.reset_eta();
            bar
        });
        Progress { bar, log_every, first: done + 1, total, started: Instant::now() }
    }

    pub fn step(&self, log: &RunLog, r: &StepRecord) {
        let tps = count(r.tokens_per_sec as u64);
        if let Some(bar) = &self.bar {
            bar.set_message(format!("loss {:.4} {tps} tokens/s", r.loss));
            bar.set_position(r.step);
        }
        if r.step.is_multiple_of(self.log_every) || r.step == self.first || r.step == self.total {
            let done = r.step + 1 - self.first;
            let left = self.started.elapsed().as_secs_f64() / done as f64 * (self.total - r.step) as f64;
            let (step, loss, norm, lr) = (r.step, r.loss, r.grad_norm, r.lr);
            let gib = r.peak_mem_bytes as f64 / (1u64 << 30) as f64;
            let line = format!(
                "step: {step} loss: {loss:.4} grad_norm: {norm:.4} lr: {lr:.3e} memory: {gib:.2}GiB tps: {tps} left: {left:.0}s"
            );
            match self.bar {
                Some(_) => log.note(LogLevel::Info, line),
                None => log.info(line),
            }
        }
    }

    /// A line of its own, above the bar.
    pub fn say(&self, log: &RunLog, level: LogLevel, text: impl Display) {
        match &self.bar {
            Some(bar) => bar.suspend(|| log.say(level, text)),
            None => log.say(level, text),
        }
    }
    pub fn finish(&self) {
        if let Some(bar) = &self.bar {
            bar.abandon(); // where it stands: a run may stop before its last step
        }
    }
}
