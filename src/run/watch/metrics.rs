//! The metrics file: JSON lines, one an event, each flushed at once, so that a killed run leaves whole lines. Never
//! computes what it writes; a float that is not finite becomes null.
use super::evaluated::PreferenceRecord;
use crate::base::{Error, Result, open};
use crate::device::gpu::telemetry::Sample;
use crate::engine::{RolloutMeans, StudentMeans};
use crate::run::rollouts::measured::SampleMeans;
use serde::Serialize;
use serde_json::{Value, json};
use std::fs::{File, OpenOptions};
use std::io::Write;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

/// Version of the format, in the `run` event: docs/metrics.schema.json describes it. A new key or event keeps the
/// version; a key that goes away or changes its meaning raises it. Files without `schema` are version 1, where `mfu`
/// was what is now `mfu_llm_foundry`.
pub const SCHEMA: u32 = 2;

/// One optimizer step. Times and bytes are those of rank 0 unless a line says otherwise; communication is that of all
/// groups that it belongs to.
#[derive(Serialize, Clone, Debug, Default)]
pub struct StepRecord {
    /// From 1.
    pub step: u64,
    /// Mean over all loss tokens of the step, or over its pairs or labeled answers, or that of GRPO's loss type, over
    /// all ranks, before the update.
    pub loss: f64,
    pub lr: f32,
    /// The norm of the whole unsharded gradient, before clipping, without the loss scale.
    pub grad_norm: f32,
    /// The load-balancing loss of a mixture of experts without its factor, the mean of the micro-batches.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub aux_loss: Option<f64>,
    /// The largest share of any expert over the mean share.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub expert_load_max: Option<f64>,
    /// What the step's loss was multiplied by; null where nothing is in fp16.
    pub loss_scale: Option<f32>,
    /// Steps of the run so far, this one among them, whose gradient was not finite: they changed no weight.
    pub skipped_steps: u64,
    /// Rows that all ranks trained on in this step.
    pub samples: u64,
    /// Rows of each data set of a mixture that the run has trained on so far, this step's among them.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub source_samples: Vec<u64>,
    /// Positions that all ranks processed in this step; none of them is padding.
    pub tokens: u64,
    /// `tokens` over the room of the step's sequences: batch_size * max_len * grad_accum * data-parallel ranks.
    pub fill: f64,
    /// How many of them carried loss.
    pub trained_tokens: u64,
    /// `tokens / step_time_s`: of the whole job.
    pub tokens_per_sec: f64,
    /// `trained_tokens / step_time_s`: of the whole job.
    pub trained_tokens_per_sec: f64,
    /// From the end of the last step to the end of this one; evaluation and checkpoints are not in it.
    pub step_time_s: f64,
    /// Times of all micro-batches, communication that they wait for included: to the loss, whose gradient is computed
    /// with it; from there to reduced gradients, recomputation included. The norm and the update. Null on GPUs, which
    /// compute while the host goes on.
    pub forward_time_s: Option<f64>,
    pub backward_time_s: Option<f64>,
    pub optimizer_time_s: Option<f64>,
    /// While at least one collective of a group was in flight, summed over groups.
    pub comm_time_s: f64,
    /// That the computing thread spent in collectives: copies, reductions, waits.
    pub exposed_comm_s: f64,
    /// Received from peers.
    pub comm_bytes: u64,
    /// Means over the step's pairs or labeled answers, of a preference objective.
    #[serde(flatten)]
    pub preference: Option<PreferenceRecord>,
    /// Means over the step's rollouts.
    #[serde(flatten)]
    pub rollouts: Option<RolloutMeans>,
    /// Means over the step's samples, if it drew them.
    #[serde(flatten)]
    pub sampled: Option<SampleMeans>,
    /// Means over the step's samples, with a teacher.
    #[serde(flatten)]
    pub student: Option<StudentMeans>,
    /// Spent on waiting for micro-batches, which a thread fills ahead.
    pub data_time_s: f64,
    /// The largest of any rank, when it was last looked at: in the first two steps and each sixteenth.
    pub mem_bytes: u64,
    /// The largest of any rank so far: private memory plus the rank's share of shared memory (see
    /// [`crate::run::plan::memory::held`]). Other ranks tell theirs a step later, so the first line knows rank 0 only.
    pub peak_mem_bytes: u64,
    /// The time of the step's matrix products and attention at the device's peak over `step_time_s`, on rank 0. The
    /// FLOPs are those of [`crate::engine::StepWork`]. Null where the peak is unknown, like the next two.
    pub mfu: Option<f64>,
    /// By the definition of MosaicML's llm-foundry: 6 FLOPs per parameter and token, embeddings included, and 12
    /// layers * width * sequence of attention, over the peak of all ranks.
    pub mfu_llm_foundry: Option<f64>,
    /// Speed of light: the shortest time that the step could take over `step_time_s`, on rank 0.
    pub sol: Option<f64>,
    /// Rank 0's, at steps that are logged; null where there is none, or no NVML.
    pub gpu: Option<Sample>,
}

/// What happens in a run, in the order in which it does. A line of the metrics file is one of these: its name in the
/// key `event`, then its fields.
#[derive(Serialize)]
#[serde(tag = "event", rename_all = "lowercase")]
pub enum Event<'r> {
    Run(&'r Value),
    Step(&'r StepRecord),
    Eval(&'r Value),
    Samples(&'r Value),
    Checkpoint(&'r Value),
    Damaged(&'r Value),
    Trace(&'r Value),
    End(&'r Value),
}

/// Who is told of a run.
pub trait Sink {
    fn event(&mut self, event: &Event) -> Result<()>;
}

pub struct Metrics {
    file: File,
    path: PathBuf,
}

impl Metrics {
    /// A new file, or with `go_on` the end of the one that is there (a resumed run). A file of an earlier run that is
    /// not gone on with is kept beside the new one, as `FILE.1` or the next free number.
    pub fn open(path: &Path, go_on: bool) -> Result<Metrics> {
        let failed = |e| Error::io("open metrics", path, e);
        // Only a plain file with something in it is moved: /dev/null and pipes are written to as they are.
        if !go_on && path.metadata().is_ok_and(|m| m.is_file() && m.len() > 0) {
            let numbered = |n: u32| PathBuf::from(format!("{}.{n}", path.display()));
            let free = (1..).map(numbered).find(|kept| !kept.exists()).unwrap_or_else(|| numbered(0));
            std::fs::rename(path, free).map_err(failed)?;
        }
        let mut file = open::append(path).map_err(failed)?;
        file.write_all(end_of_line(path).as_bytes()).map_err(failed)?;
        Ok(Metrics { file, path: path.to_path_buf() })
    }
}

impl Sink for Metrics {
    /// One line.
    fn event(&mut self, event: &Event) -> Result<()> {
        // Not through a tree, where an f32 would become the f64 next to it: 0.0003 would read 0.0003000000142492354.
        let line = serde_json::to_string(event).map_err(|e| Error::op("metrics", e.to_string()))? + "\n";
        self.file.write_all(line.as_bytes()).map_err(|e| Error::io("write metrics", &self.path, e))
    }
}

/// For whoever is left: ends the file with an error event. Not for bad input, with which no run began, and not for a
/// run that ended as it was asked to.
pub fn record_failure(path: Option<&Path>, e: &Error) {
    let path = path.filter(|_| !matches!(e, Error::Input(_) | Error::Signal(_)));
    append(path, "error", json!({"message": e.to_string()}));
}

/// Adds an event to a file that a run has begun, for whoever is left of it.
pub fn append(path: Option<&Path>, event: &str, mut fields: Value) {
    let Some(path) = path else { return };
    if !path.exists() {
        return;
    }
    let mut line = json!({"event": event});
    if let (Some(line), Some(fields)) = (line.as_object_mut(), fields.as_object_mut()) {
        line.append(fields);
    }
    let line = format!("{}{line}\n", end_of_line(path));
    if let Ok(mut file) = OpenOptions::new().append(true).open(path) {
        // The run has failed already, and what is written here goes to stderr too.
        let _ = file.write_all(line.as_bytes());
    }
}

/// What ends a line that a run left unfinished when it was killed, or when the disk was full.
fn end_of_line(path: &Path) -> &'static str {
    let last = || -> Option<u8> {
        let file = path.metadata().ok().filter(|m| m.is_file() && m.len() > 0)?;
        let mut last = [0];
        File::open(path).ok()?.read_exact_at(&mut last, file.len() - 1).ok()?;
        Some(last[0])
    };
    if last().is_none_or(|last| last == b'\n') { "" } else { "\n" }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_whole_and_a_failure_ends_them() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("deep/metrics.jsonl");
        let mut metrics = Metrics::open(&path, false).unwrap();
        metrics.event(&Event::Eval(&json!({"step": 1, "loss": f64::NAN}))).unwrap();
        record_failure(Some(&path), &Error::Run("rank 1 was lost".into()));
        record_failure(Some(&path), &Error::Signal(15));
        let text = std::fs::read_to_string(&path).unwrap();
        assert_eq!(
            text,
            "{\"event\":\"eval\",\"step\":1,\"loss\":null}\n{\"event\":\"error\",\"message\":\"rank 1 was lost\"}\n"
        );
        Metrics::open(&path, true).unwrap().event(&Event::Run(&json!({}))).unwrap();
        assert_eq!(std::fs::read_to_string(&path).unwrap(), text.clone() + "{\"event\":\"run\"}\n");
        // A line that was cut off is a line of its own.
        for (begun, expected) in
            [("{\"event\":\"st", "{\"event\":\"st\n{\"event\":\"run\"}\n"), ("", "{\"event\":\"run\"}\n")]
        {
            let cut = dir.path().join("cut.jsonl");
            std::fs::write(&cut, begun).unwrap();
            Metrics::open(&cut, true).unwrap().event(&Event::Run(&json!({}))).unwrap();
            assert_eq!(std::fs::read_to_string(&cut).unwrap(), expected);
            std::fs::write(&cut, begun).unwrap();
            append(Some(&cut), "run", json!({}));
            assert_eq!(std::fs::read_to_string(&cut).unwrap(), expected);
        }
        Metrics::open(&path, false).unwrap();
        assert_eq!(std::fs::read_to_string(&path).unwrap(), "");
        let kept = std::fs::read_to_string(dir.path().join("deep/metrics.jsonl.1")).unwrap();
        assert_eq!(kept, text + "{\"event\":\"run\"}\n");
    }
}
