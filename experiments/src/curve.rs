//! A metrics file as the training binaries write it (`src/run/watch/metrics.rs`), read back; or the losses of a log.
//! Never judges.
use crate::text_log;
use flatshard::base::{Error, Result};
use flatshard::run::watch::metrics::SCHEMA;
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
    Eval(EvalMetrics),
    Samples {
        step: u64,
        samples: Vec<PromptText>,
    },
    Trace {
        path: PathBuf,
    },
    #[serde(other)]
    Other,
}

/// What the run says of itself before its first step.
#[derive(Deserialize, Clone, Debug, Default)]
#[serde(default)]
pub struct RunHeader {
    /// Version of the file's format; None in those of version 1.
    pub schema: Option<u32>,
    /// Who trained, where it is not flatshard.
    pub engine: Option<String>,
    pub world_size: Option<u64>,
    pub mesh: BTreeMap<String, u64>,
    pub params: Option<u64>,
    pub device: serde_json::Value,
    pub config: serde_json::Value,
    pub planned_bytes: BTreeMap<String, u64>,
    pub resumed_from_step: Option<u64>,
}

/// One optimizer step. Times in seconds; what a writer does not know is absent or null.
#[derive(Deserialize, Clone, Debug, Default)]
pub struct StepMetrics {
    pub step: u64,
    /// None where it was not finite.
    #[serde(default)]
    pub loss: Option<f64>,
    #[serde(default)]
    pub lr: Option<f64>,
    #[serde(default)]
    pub grad_norm: Option<f64>,
    #[serde(default)]
    pub mfu: Option<f64>,
    #[serde(default)]
    pub sol: Option<f64>,
    #[serde(default)]
    pub data_time_s: Option<f64>,
    // The rest is there with objectives other than fine-tuning.
    #[serde(default)]
    pub reward_chosen: Option<f64>,
    #[serde(default)]
    pub reward_rejected: Option<f64>,
    #[serde(default)]
    pub reward_margin: Option<f64>,
    #[serde(default)]
    pub reward_accuracy: Option<f64>,
    #[serde(default)]
    pub accuracy: Option<f64>,
    #[serde(default)]
    pub reward_mean: Option<f64>,
    #[serde(default)]
    pub kl: Option<f64>,
    #[serde(default)]
    pub reverse_kl: Option<f64>,
    #[serde(default)]
    pub entropy: Option<f64>,
    #[serde(default)]
    pub completion_tokens: Option<f64>,
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
    /// The tokens of all ranks.
    #[serde(default)]
    pub tokens: Option<u64>,
}

/// An evaluation on held-out rows. What its objective does not have is absent or null.
#[derive(Deserialize, Clone, Debug)]
pub struct EvalMetrics {
    pub step: u64,
    pub loss: Option<f64>,
    pub reward_margin: Option<f64>,
    pub reward_accuracy: Option<f64>,
    pub accuracy: Option<f64>,
    pub reward_mean: Option<f64>,
    // Its size, by what the objective counts.
    pub tokens: Option<u64>,
    pub pairs: Option<u64>,
    pub samples: Option<u64>,
    pub prompts: Option<u64>,
}

/// What the model wrote after a prompt of `--sample-prompts`.
#[derive(Deserialize, Clone, Debug)]
pub struct PromptText {
    pub prompt: String,
    pub text: String,
    /// `length` if a limit cut it.
    pub finish: String,
}

/// What a metrics file tells.
#[derive(Clone, Debug, Default)]
pub struct Curve {
    pub path: PathBuf,
    pub header: RunHeader,
    /// Rising by step. Where a resumed run did a step again, its later line.
    pub steps: BTreeMap<u64, StepMetrics>,
    /// By step.
    pub evals: BTreeMap<u64, EvalMetrics>,
    /// Texts of the evaluations, by step and prompt.
    pub samples: BTreeMap<u64, Vec<PromptText>>,
    /// Files of `--profile-steps`, as the run names them.
    pub traces: Vec<PathBuf>,
    pub ended: bool,
    pub error: Option<String>,
    /// The training stages before this one in the same file, which end before it begins.
    pub earlier: Vec<Curve>,
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
            match curve.feed(line) {
                Ok(()) if curve.header.schema > Some(SCHEMA) => {
                    return Err(Error::input(format!(
                        "{}: metrics of schema {}, and this program reads up to {SCHEMA}. Use the `experiments` of the \
                         flatshard that wrote them",
                        curve.path.display(),
                        curve.header.schema.unwrap_or_default()
                    )));
                }
                Ok(()) => {}
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

    /// One line of a metrics file.
    pub fn feed(&mut self, line: &str) -> serde_json::Result<()> {
        match serde_json::from_str(line)? {
            MetricsEvent::Run(header) => {
                if self.ended && header.resumed_from_step.is_none() {
                    let mut before = Curve { path: self.path.clone(), ..std::mem::take(self) };
                    (self.path, self.earlier) = (before.path.clone(), std::mem::take(&mut before.earlier));
                    self.earlier.push(before);
                }
                // A resumed run does the steps after its checkpoint again.
                let again = header.resumed_from_step.unwrap_or(0) + 1;
                self.steps.split_off(&again);
                self.evals.split_off(&again);
                self.samples.split_off(&again);
                (self.header, self.ended, self.error) = (header, false, None);
            }
            MetricsEvent::Step(step) => drop(self.steps.insert(step.step, step)),
            MetricsEvent::Eval(eval) => drop(self.evals.insert(eval.step, eval)),
            MetricsEvent::Samples { step, samples } => drop(self.samples.insert(step, samples)),
            MetricsEvent::Trace { path } => {
                self.traces.retain(|known| *known != path);
                self.traces.push(path);
            }
            MetricsEvent::Error { message } => self.error = Some(message),
            MetricsEvent::End {} => self.ended = true,
            MetricsEvent::Other => {}
        }
        Ok(())
    }

    /// Like [`Curve::read`], and there is a step at least.
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
