//! The cost of the runs of a directory: medians of their metrics, over steps and rounds. Never prints.
use crate::catalogue;
use crate::compare::judge;
use crate::curve::{Curve, METRICS, RunHeader, StepMetrics};
use crate::job::{End, Status};
use flatshard::base::{Error, Result};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

/// A run that ended well, all its rounds together.
#[derive(Debug)]
pub struct RunRow {
    pub name: String,
    pub rounds: usize,
    /// The speed of the whole job; each round's is the median over its steps.
    pub tokens_per_sec: Option<Spread>,
    /// Medians over steps and rounds, of rank 0.
    pub trained_tokens_per_sec: Option<f64>,
    pub step_time_s: Option<f64>,
    pub forward_time_s: Option<f64>,
    pub backward_time_s: Option<f64>,
    pub optimizer_time_s: Option<f64>,
    pub comm_time_s: Option<f64>,
    pub exposed_comm_s: Option<f64>,
    pub comm_bytes: Option<f64>,
    /// The most that any rank held in any round.
    pub peak_mem_bytes: Option<u64>,
    /// The first round's, as its file tells it.
    pub curve: Curve,
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Spread {
    pub median: f64,
    pub low: f64,
    pub high: f64,
}

impl RunRow {
    /// Another engine's losses are of other tokens.
    pub fn is_peer(&self) -> bool {
        self.curve.header.engine.is_some()
    }
    pub fn speed(&self) -> Option<f64> {
        self.tokens_per_sec.map(|s| s.median)
    }
    /// Part of a step that communication does not hide.
    pub fn exposed_share(&self) -> Option<f64> {
        Some(self.exposed_comm_s? / self.step_time_s.filter(|&t| t > 0.0)?)
    }
    /// Tokens of an optimizer step, all ranks together; the median step's.
    pub fn tokens_per_step(&self) -> Option<f64> {
        median(self.curve.steps.values().filter_map(|step| step.tokens).map(|tokens| tokens as f64).collect())
    }
    /// Whether a step is as much work as the baseline's: speeds of steps or models of other sizes say little of a
    /// strategy.
    pub fn is_comparable(&self, baseline: &RunRow) -> bool {
        const ALIKE: f64 = 0.1;
        let params = |row: &RunRow| row.curve.header.params.map(|params| params as f64);
        let both = [self.tokens_per_step().zip(baseline.tokens_per_step()), params(self).zip(params(baseline))];
        both.into_iter().flatten().all(|(own, base)| (own - base).abs() <= ALIKE * base)
    }
    /// What its losses are of: a number of another objective, or of another engine's tokens, says nothing next to it.
    pub fn losses_of(&self) -> Value {
        let RunHeader { engine, config, .. } = &self.curve.header;
        let objective = &config["objective"];
        json!([engine, objective["objective"], objective["teacher"], objective["loss_type"]])
    }
    pub fn first_loss(&self) -> Option<f64> {
        self.curve.loss(self.curve.first())
    }
    pub fn last_loss(&self) -> Option<f64> {
        self.curve.loss(self.curve.last())
    }
    /// The largest |loss - baseline's| / |baseline's| over the steps that both have; NaN where a loss is not finite.
    pub fn difference(&self, baseline: &RunRow) -> Option<f64> {
        if self.is_peer() || self.losses_of() != baseline.losses_of() {
            return None;
        }
        let judgment = judge(&baseline.curve, &self.curve, f64::INFINITY);
        let finite = |row: &RunRow| row.curve.steps.values().all(|s| s.loss.is_some());
        match finite(self) && finite(baseline) {
            true => judgment.largest().map(|(_, difference)| difference),
            false => Some(f64::NAN),
        }
    }
}

/// A run, or a round of one, that did not end well.
#[derive(Debug)]
pub struct Failed {
    pub name: String,
    pub message: String,
}

pub struct Found {
    pub rows: Vec<RunRow>,
    pub failed: Vec<Failed>,
}

impl Found {
    pub fn row(&self, name: &str) -> Option<&RunRow> {
        self.rows.iter().find(|row| row.name == name)
    }
}

/// Every run below `dir`. The first `warmup` steps of each are not timed.
pub fn read(dir: &Path, warmup: usize) -> Result<Found> {
    let entries = fs::read_dir(dir).map_err(|e| Error::input(format!("--output-dir {}: {e}", dir.display())))?;
    let mut rounds: BTreeMap<(usize, String), Vec<Curve>> = BTreeMap::new();
    let mut failed = BTreeMap::new();
    for entry in entries {
        let path = entry.map_err(|e| Error::io("read", dir, e))?.path();
        let directory = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        let name = directory.split('@').next().unwrap_or_default().to_string();
        let key = (place(&name), name);
        match one(&path)? {
            None => {}
            Some(Ok(curve)) if curve.earlier.is_empty() => rounds.entry(key).or_default().push(curve),
            Some(Ok(mut last)) => {
                let stages = std::mem::take(&mut last.earlier).into_iter().chain([last]);
                for (i, stage) in stages.enumerate().filter(|(_, stage)| !stage.steps.is_empty()) {
                    rounds.entry((key.0, format!("{}, stage {}", key.1, i + 1))).or_default().push(stage);
                }
            }
            Some(Err(message)) => drop(failed.insert((key.0, directory.clone()), Failed { name: directory, message })),
        }
    }
    let row = |((_, name), mut curves): (_, Vec<Curve>)| {
        curves.sort_by(|a, b| a.path.cmp(&b.path)); // NAME before NAME@2
        RunRow::of(name, curves, warmup)
    };
    Ok(Found { rows: rounds.into_iter().map(row).collect(), failed: failed.into_values().collect() })
}

/// Runs of the set stand in its order, others behind them.
fn place(name: &str) -> usize {
    let known: Vec<_> = catalogue::all().into_iter().chain(catalogue::peers()).collect();
    known.iter().position(|e| e.name == name).unwrap_or(known.len())
}

/// The run in a directory, or why it has no result; none where it holds no run that was started.
fn one(dir: &Path) -> Result<Option<std::result::Result<Curve, String>>> {
    let (status, metrics) = (Status::read(dir), dir.join(METRICS));
    if let Some(Status { ended: End::Failed, message, .. }) = status {
        return Ok(Some(Err(message)));
    }
    if !metrics.is_file() {
        return Ok(None);
    }
    let curve = Curve::read(&metrics)?;
    let told = curve.error.clone();
    Ok(Some(match (curve.steps.is_empty(), told, curve.ended || status.is_some()) {
        (_, Some(message), _) => Err(message),
        (_, None, false) => Err("did not end".into()),
        (true, None, true) => Err("made no step".into()),
        (false, None, true) => Ok(curve),
    }))
}

impl RunRow {
    /// `curves`: its rounds, one at least.
    pub fn of(name: String, curves: Vec<Curve>, warmup: usize) -> RunRow {
        let timed: Vec<Vec<&StepMetrics>> = curves.iter().map(|curve| curve.timed(warmup)).collect();
        let per_round = |field: &dyn Fn(&StepMetrics) -> Option<f64>| -> Vec<f64> {
            timed.iter().filter_map(|steps| median(steps.iter().filter_map(|s| field(s)).collect())).collect()
        };
        let speeds = per_round(&|s| s.tokens_per_sec);
        let spread = |values: Vec<f64>| {
            let (low, high) = values.iter().fold((f64::INFINITY, f64::NEG_INFINITY), |(l, h), &x| (l.min(x), h.max(x)));
            median(values).map(|median| Spread { median, low, high })
        };
        RunRow {
            name,
            rounds: curves.len(),
            tokens_per_sec: spread(speeds),
            trained_tokens_per_sec: median(per_round(&|s| s.trained_tokens_per_sec)),
            step_time_s: median(per_round(&|s| s.step_time_s)),
            forward_time_s: median(per_round(&|s| s.forward_time_s)),
            backward_time_s: median(per_round(&|s| s.backward_time_s)),
            optimizer_time_s: median(per_round(&|s| s.optimizer_time_s)),
            comm_time_s: median(per_round(&|s| s.comm_time_s)),
            exposed_comm_s: median(per_round(&|s| s.exposed_comm_s)),
            comm_bytes: median(per_round(&|s| s.comm_bytes.map(|n| n as f64))),
            peak_mem_bytes: curves.iter().flat_map(|c| c.steps.values()).filter_map(|s| s.peak_mem_bytes).max(),
            curve: curves.into_iter().next().unwrap_or_default(),
        }
    }
}

/// The mean of the middle two, where the count is even.
pub fn median(mut values: Vec<f64>) -> Option<f64> {
    values.sort_by(f64::total_cmp);
    let (n, half) = (values.len(), values.len() / 2);
    match n {
        0 => None,
        _ if n % 2 == 1 => Some(values[half]),
        _ => Some((values[half - 1] + values[half]) / 2.0),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn medians() {
        assert_eq!(median(vec![]), None);
        assert_eq!(median(vec![3.0, 1.0, 2.0]), Some(2.0));
        assert_eq!(median(vec![4.0, 1.0, 2.0, 3.0]), Some(2.5));
    }

    /// They are in one file, and each has steps from 1 on. A run that was resumed is one.
    #[test]
    fn each_training_stage_is_a_row() {
        let dir = tempfile::tempdir().unwrap();
        let stage = |resumed: &str, steps: std::ops::RangeInclusive<u64>, loss: f64| {
            let begin = format!("{{\"event\": \"run\", \"resumed_from_step\": {resumed}}}\n");
            let step = |step| format!("{{\"event\": \"step\", \"step\": {step}, \"loss\": {loss}}}\n");
            begin + &steps.map(step).collect::<String>()
        };
        let end = "{\"event\": \"end\"}\n";
        let first = [stage("null", 1..=3, 3.0), stage("2", 3..=4, 2.5), end.into()].concat();
        for (name, text) in [("one", first.clone()), ("two", [first, stage("null", 1..=2, 1.0), end.into()].concat())] {
            fs::create_dir(dir.path().join(name)).unwrap();
            fs::write(dir.path().join(name).join(METRICS), text).unwrap();
        }
        let found = read(dir.path(), 0).unwrap();
        let rows: Vec<_> = found.rows.iter().map(|row| (&*row.name, row.curve.last(), row.curve.loss(1))).collect();
        assert_eq!(rows, [("one", 4, Some(3.0)), ("two, stage 1", 4, Some(3.0)), ("two, stage 2", 2, Some(1.0))]);
    }
}
