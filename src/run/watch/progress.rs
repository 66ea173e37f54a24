//! How far the run is: a bar where stderr is a terminal, else one line every `log_every` steps. The log file has the
//! lines in either case. Never measures.
use super::log::RunLog;
use super::style;
use crate::run::settings::LogLevel;
use crate::run::watch::metrics::StepRecord;
use crate::run::watch::report::count;
use indicatif::{ProgressBar, ProgressStyle};
use std::fmt::Display;
use std::io::{IsTerminal, Write};
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
            // The time left first: a narrow terminal shows the beginning of the message only.
            let template = match style::on_stderr() {
                true => "{bar:10.green} {prefix}  {wide_msg}",
                false => "{bar:10} {prefix}  {wide_msg}",
            };
            bar.set_style(ProgressStyle::with_template(template).unwrap_or_else(|_| ProgressStyle::default_bar()));
            bar
        });
        Progress { bar, log_every, first: done + 1, total, started: Instant::now() }
    }

    pub fn step(&self, log: &RunLog, r: &StepRecord) {
        let logged = r.step.is_multiple_of(self.log_every) || r.step == self.first || r.step == self.total;
        if !logged && self.bar.is_none() {
            return;
        }
        let done = r.step + 1 - self.first;
        let eta = self.started.elapsed().as_secs_f64() / done as f64 * (self.total - r.step) as f64;
        let ([line, sol], eta) = (line(r, self.total), duration(eta));
        match &self.bar {
            Some(bar) => {
                let fields = format!("{line}{sol}");
                bar.set_message(if style::on_stderr() { style::fields(&fields) } else { fields });
                bar.set_prefix(format!("eta {eta}"));
                bar.set_position(r.step);
                if logged {
                    log.note(LogLevel::Info, format_args!("{line}  eta {eta}{sol}"));
                }
            }
            None => log.info(format_args!("{line}  eta {eta}{sol}")),
        }
    }

    /// A line of its own, above the bar.
    pub fn say(&self, log: &RunLog, level: LogLevel, text: impl Display) {
        match &self.bar {
            Some(bar) => bar.suspend(|| log.say(level, text)),
            None => log.say(level, text),
        }
    }
    /// Leaves the bar where it is, as a run may stop before its last step; what follows stands below it.
    pub fn finish(&mut self) {
        if let Some(bar) = self.bar.take() {
            bar.abandon();
            let _ = std::io::stderr().write_all(b"\n");
        }
    }
}
impl Drop for Progress {
    fn drop(&mut self) {
        self.finish();
    }
}

/// `step 100/600  loss 2.341  grad_norm 0.79  lr 9.6e-4  15,578 tok/s  mem 0.17 GiB  eta 2m15s  61% of peak`:
/// what is before the eta and after it, because a bar has it elsewhere.
fn line(r: &StepRecord, total: u64) -> [String; 2] {
    let (step, loss, norm, lr) = (r.step, short(r.loss, 3), short(r.grad_norm, 2), r.lr);
    let (speed, gib) = (count(r.tokens_per_sec as u64), r.peak_mem_bytes as f64 / (1u64 << 30) as f64);
    let sol = r.sol.map_or(String::new(), |sol| format!("  {:.0}% of peak", 100.0 * sol));
    let line =
        format!("step {step}/{total}  loss {loss}  grad_norm {norm}  lr {lr:.1e}  {speed} tok/s  mem {gib:.2} GiB");
    [line, sol]
}

/// With this many decimals, or as 4.2e-5 where they show less than two digits of it or the number is long.
fn short(x: impl Into<f64>, decimals: usize) -> String {
    let x = x.into();
    let (small, large) = (10f64.powi(1 - decimals as i32), 1e6);
    match x == 0.0 || !x.is_finite() || (small..large).contains(&x.abs()) {
        true => format!("{x:.decimals$}"),
        false => format!("{x:.1e}"),
    }
}

/// 45s, 2m15s, 1h02m, 3d04h
pub fn duration(seconds: f64) -> String {
    let s = seconds.round() as u64;
    match s {
        0..60 => format!("{s}s"),
        60..3_600 => format!("{}m{:02}s", s / 60, s % 60),
        3_600..86_400 => format!("{}h{:02}m", s / 3_600, s / 60 % 60),
        _ => format!("{}d{:02}h", s / 86_400, s / 3_600 % 24),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_of_a_step() {
        let record = StepRecord {
            step: 100,
            loss: 2.3412,
            grad_norm: 0.7941,
            lr: 9.643e-4,
            tokens_per_sec: 15_578.9,
            peak_mem_bytes: 182_536_110,
            ..StepRecord::default()
        };
        let expected = "step 100/600  loss 2.341  grad_norm 0.79  lr 9.6e-4  15,578 tok/s  mem 0.17 GiB";
        assert_eq!(line(&record, 600), [expected, ""]);
        let bad = StepRecord { step: 1, loss: f64::NAN, sol: Some(0.6123), ..record };
        let expected = "step 1/2  loss NaN  grad_norm 0.79  lr 9.6e-4  15,578 tok/s  mem 0.17 GiB";
        assert_eq!(line(&bad, 2), [expected, "  61% of peak"]);
    }

    #[test]
    fn numbers_and_times() {
        assert_eq!(
            [short(0.0, 3), short(0.01, 3), short(0.0042, 3), short(16.01, 2)],
            ["0.000", "0.010", "4.2e-3", "16.01"]
        );
        assert_eq!([59.6, 3_599.0, 3_725.0, 273_600.0].map(duration), ["1m00s", "59m59s", "1h02m", "3d04h"]);
    }
}
