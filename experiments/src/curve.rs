//! A metrics file as the training binaries write it (`src/run/watch/metrics.rs`), read back; or the losses of a log.
//! Never judges.
use crate::text_log;
use flatshard::base::{Error, Result};
use serde::Deserialize;
use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

/// The name of the metrics file in a run's directory.
pub const METRICS: &str = "metrics.jsonl";

#[derive(Deserialize)]
#[serde(tag = "event", rename_all = "snake_case")]
enum MetricsEvent {
    Run(RunHeader),
    Step(StepMetrics),
    Error {
        message: String,
    },
    End {},
    #[serde(other)]
    Other,
}

/// What the run says of itself before its first step.
#[derive(Deserialize, Clone, Debug, Default)]
#[serde(default)]
pub struct RunHeader {
    /// Who trained, where it is not flatshard.
    pub engine: Option<String>,
    pub world_size: Option<u64>,
    pub mesh: BTreeMap<String, u64>,
    pub params: Option<u64>,
    pub device: serde_json::Value,
    pub config: serde_json::Value,
    pub planned_bytes: BTreeMap<String, u64>,
}

/// One optimizer step. Times in seconds; what a writer does not know is absent or null.
#[derive(Deserialize, Clone, Debug, Default)]
pub struct StepMetrics {
    pub step: u64,
    /// None where it was not finite.
    #[serde(default)]
    pub loss: Option<f64>,
    #[serde(default)]
    pub tokens_per_sec: Option<f64>,
    #[serde(default)]
    pub trained_tokens_per_sec: Option<f64>,
    #[serde(default)]
    pub step_time_s: Option<f64>,
    #[serde(default)]
    pub forward_time_s: Option<f64>,
    #[serde(default)]
    pub backward_time_s: Option<f64>,
    #[serde(default)]
    pub optimizer_time_s: Option<f64>,
    #[serde(default)]
    pub comm_time_s: Option<f64>,
    #[serde(default)]
    pub exposed_comm_s: Option<f64>,
    #[serde(default)]
    pub comm_bytes: Option<u64>,
    #[serde(default)]
    pub peak_mem_bytes: Option<u64>,
    /// Of all ranks.
    #[serde(default)]
    pub tokens: Option<u64>,
}

/// What a metrics file tells.
#[derive(Clone, Debug, Default)]
pub struct Curve {
    pub path: PathBuf,
    pub header: RunHeader,
    /// Rising by step. Where a resumed run did a step again, its later line.
    pub steps: BTreeMap<u64, StepMetrics>,
    pub ended: bool,
    pub error: Option<String>,
}

impl Curve {
    /// `path`: the file, or the directory of a run; or a log, which has steps and losses only.
    pub fn read(path: &Path) -> Result<Curve> {
        let path = if path.is_dir() { path.join(METRICS) } else { path.to_path_buf() };
        let text = fs::read_to_string(&path).map_err(|e| {
            Error::input(format!(
                "{}: {e}; expected a metrics file (--metrics-path of a run), its directory, or a log",
                path.display()
            ))
        })?;
        let mut curve = Curve { path, ..Curve::default() };
        for (n, line) in text.lines().enumerate().filter(|(_, line)| !line.trim().is_empty()) {
            match serde_json::from_str(line) {
                Ok(MetricsEvent::Run(header)) => (curve.header, curve.ended, curve.error) = (header, false, None),
                Ok(MetricsEvent::Step(step)) => drop(curve.steps.insert(step.step, step)),
                Ok(MetricsEvent::Error { message }) => curve.error = Some(message),
                Ok(MetricsEvent::End {}) => curve.ended = true,
                Ok(MetricsEvent::Other) => {}
                // A rank that was killed may leave half a line; the launcher's error event then follows on a line of
                // its own.
                Err(e) if e.is_eof() => {}
                Err(_) if curve.is_empty() && !text_log::losses(&text).is_empty() => {
                    let step = |(step, loss): (u64, f64)| {
                        (
                            step,
                            StepMetrics { step, loss: Some(loss).filter(|x| x.is_finite()), ..StepMetrics::default() },
                        )
                    };
                    curve.steps = text_log::losses(&text).into_iter().map(step).collect();
                    return Ok(curve);
                }
                Err(e) => {
                    return Err(Error::input(format!(
                        "{}, line {}: not a metrics event: {e}",
                        curve.path.display(),
                        n + 1
                    )));
                }
            }
        }
        Ok(curve)
    }

    /// As [`Curve::read`], and there is a step at least.
    pub fn with_steps(path: &Path) -> Result<Curve> {
        let curve = Curve::read(path)?;
        match curve.steps.is_empty() {
            true => Err(Error::input(format!("{}: holds no step", curve.path.display()))),
            false => Ok(curve),
        }
    }

    /// No event was read yet.
    fn is_empty(&self) -> bool {
        self.steps.is_empty() && self.header.world_size.is_none()
    }

    /// The loss of a step; None where the step is missing, NaN where it was not finite.
    pub fn loss(&self, step: u64) -> Option<f64> {
        self.steps.get(&step).map(|s| s.loss.unwrap_or(f64::NAN))
    }
    /// All steps and losses, NaN where one was not finite.
    pub fn points(&self) -> Vec<(f64, f64)> {
        self.steps.iter().map(|(&step, s)| (step as f64, s.loss.unwrap_or(f64::NAN))).collect()
    }
    /// Without the first `warmup` steps, where there are more.
    pub fn timed(&self, warmup: usize) -> Vec<&StepMetrics> {
        let skipped = if self.steps.len() > warmup { warmup } else { 0 };
        self.steps.values().skip(skipped).collect()
    }
    pub fn first(&self) -> u64 {
        self.steps.first_key_value().map_or(0, |s| *s.0)
    }
    pub fn last(&self) -> u64 {
        self.steps.last_key_value().map_or(0, |s| *s.0)
    }
}
