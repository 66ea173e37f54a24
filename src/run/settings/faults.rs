//! Restarts, timeouts, stop signals, time limits and non-finite steps. Never acts on them.
use super::value::{number, set};
use crate::base::{Error, Result};
use serde::{Deserialize, Serialize};
use signal_hook::consts::{SIGHUP, SIGINT, SIGQUIT, SIGTERM, SIGUSR1, SIGUSR2};
use std::ops::RangeInclusive;
use std::path::PathBuf;
use std::time::Duration;

#[derive(clap::Args, Serialize, Deserialize, Clone, Debug, Default)]
#[serde(default)]
#[command(next_help_heading = "Faults")]
pub struct FaultSettings {
    /// Restart the ranks after up to N failures, from the last complete checkpoint in ckpt-dir
    #[arg(long, value_name = "N")]
    pub max_restarts: Option<u32>,
    /// Interval at which the launcher polls its ranks, in seconds
    #[arg(long, value_name = "SECONDS")]
    pub monitor_interval: Option<f64>,
    /// Allow restarts on fewer ranks, down to MIN, when a restart failed before its first checkpoint; the global batch
    /// stays the same [default: same number of ranks]
    #[arg(long, value_name = "MIN:MAX")]
    pub elastic: Option<String>,
    /// Stop after this time: finish the step, save, and exit with status 143, as on SIGTERM [default: none]
    #[arg(long, value_name = "SECONDS|H:M:S")]
    pub time_limit: Option<String>,
    /// Fail the run after waiting this long for other ranks before the first step is done, in seconds
    #[arg(long, value_name = "SECONDS")]
    pub init_timeout: Option<f64>,
    /// Directory for the flight-recorder dumps of a failed run and their comparison [default: comm_traces in ckpt-dir,
    /// else none]
    #[arg(long, value_name = "DIR")]
    pub save_traces_folder: Option<PathBuf>,
    /// Signals that stop the run: finish the step, save, and exit with status 128 + n
    #[arg(long, value_name = "NAME", num_args = 1..)]
    pub signals: Option<Vec<String>>,
    /// Abort after more than N consecutive skipped (non-finite) steps, not counting fp16 overflows that can still lower
    /// the loss scale
    #[arg(long, value_name = "N")]
    pub max_bad_steps: Option<u32>,
    /// Steps between bitwise checks that ranks agree on replicated parameters and optimizer states; 0: never
    #[arg(long, value_name = "STEPS")]
    pub verify_every: Option<u64>,
}

impl FaultSettings {
    pub fn check(&self) -> Result<()> {
        number("monitor_interval", self.monitor_interval, |x| x > 0.0 && x <= 3600.0, "above 0, at most 3600 seconds")?;
        number("init_timeout", self.init_timeout, |x| x > 0.0 && x <= 1e9, "above 0, at most a billion seconds")?;
        self.elastic_ranks()?;
        self.time_limit()?;
        self.signals().map(drop)
    }
    /// World sizes that a restart may use.
    pub fn elastic_ranks(&self) -> Result<Option<RangeInclusive<usize>>> {
        self.elastic.as_deref().map(range).transpose()
    }
    pub fn time_limit(&self) -> Result<Option<Duration>> {
        self.time_limit.as_deref().map(duration).transpose()
    }
    /// Signal numbers.
    pub fn signals(&self) -> Result<Vec<i32>> {
        set(&self.signals, "faults.signals")?.iter().map(|name| signal(name)).collect()
    }
}

/// Signals that can stop a run after the current step. Others kill the process at once or have another meaning.
const SIGNALS: [(&str, i32); 6] =
    [("TERM", SIGTERM), ("INT", SIGINT), ("HUP", SIGHUP), ("USR1", SIGUSR1), ("USR2", SIGUSR2), ("QUIT", SIGQUIT)];

/// The signal called `name`, with or without SIG.
fn signal(name: &str) -> Result<i32> {
    let upper = name.to_uppercase();
    let found = SIGNALS.iter().find(|(known, _)| *known == upper.trim_start_matches("SIG"));
    found.map(|&(_, signal)| signal).ok_or_else(|| {
        Error::input(format!("--signals {name}: it must be one of {}", SIGNALS.map(|(known, _)| known).join(", ")))
    })
}

/// "MIN:MAX", or one number for both.
fn range(text: &str) -> Result<RangeInclusive<usize>> {
    let (min, max) = text.split_once(':').unwrap_or((text, text));
    match (min.trim().parse(), max.trim().parse()) {
        (Ok(min), Ok(max)) if 1 <= min && min <= max => Ok(min..=max),
        _ => Err(Error::input(format!("--elastic {text}: it must be MIN:MAX ranks, such as 2:8"))),
    }
}

/// Seconds, M:S or H:M:S.
fn duration(text: &str) -> Result<Duration> {
    let parts: Option<Vec<f64>> = text.split(':').map(|part| part.trim().parse().ok()).collect();
    let parts = parts.filter(|p| p.len() <= 3 && p.iter().all(|x| *x >= 0.0));
    let seconds = parts.map(|p| p.iter().fold(0.0, |sum, part| 60.0 * sum + part)).filter(|&s| s > 0.0 && s < 1e9);
    seconds.map(Duration::from_secs_f64).ok_or_else(|| {
        Error::input(format!("--time-limit {text}: it must be seconds or H:M:S, above 0, such as 3600 or 23:50:00"))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn limits_and_ranges_are_read_or_refused() {
        let seconds = |text: &str| duration(text).map(|d| d.as_secs_f64()).map_err(|e| e.to_string());
        assert_eq!(seconds("90"), Ok(90.0));
        assert_eq!(seconds("1:30"), Ok(90.0));
        assert_eq!(seconds("23:50:00"), Ok(85_800.0));
        for bad in ["", "0", "-5", "1:2:3:4", "soon", "1e300"] {
            assert!(seconds(bad).unwrap_err().contains(&format!("--time-limit {bad}: it must be")), "{bad}");
        }
        assert_eq!(range("2:8").unwrap(), 2..=8);
        assert_eq!(range("3").unwrap(), 3..=3);
        for bad in ["8:2", "0:4", "a:b", "2:"] {
            assert_eq!(range(bad).unwrap_err().exit_status(), 2, "{bad}");
        }
    }
}
