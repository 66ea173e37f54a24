//! Reports a run: the loop says what happened, and the metrics file, TensorBoard, the log and the progress bar each get
//! it. Also measures what is only reported: time between steps, communication, memory, the GPU. Never changes what the
//! loop does.
use super::evaluated::{Evaluated, PreferenceRecord, PromptSample};
use super::gpu::GpuWatch;
use super::health::Health;
use super::log::RunLog;
use super::metrics::Event;
use super::metrics::Metrics;
use super::metrics::SCHEMA;
use super::metrics::Sink;
use super::metrics::StepRecord;
use super::metrics::record_failure;
use super::progress::{Progress, duration};
use super::report;
use super::sol::{Ratios, SpeedOfLight};
use super::tensorboard::TensorBoard;
use crate::base::{DType, Error, Result, printable};
use crate::ckpt::{Evaluations, SavedCheckpoint};
use crate::comm::env::RankEnv;
use crate::comm::mesh::Mesh;
use crate::comm::{Axis, CommStats};
use crate::data::StepData;
use crate::device::Device;
use crate::device::gpu::cuda::Cuda;
use crate::engine::{PassTimes, StepReport};
use crate::run::plan::memory;
use crate::run::plan::resume::ResumeFrom;
use crate::run::plan::{Plan, record};
use crate::run::rollouts::measured::{RewardMeans, SampleMeans};
use crate::run::settings::DeviceName;
use crate::run::settings::LogLevel;
use crate::run::settings::OptimizerName;
use crate::run::trace::ProfileReport;
use crate::run::trace::summary::Summary;
use serde_json::{Value, json};
use std::fmt::Display;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Instant;

/// Steps between samples of memory after the first two: no buffer is allocated after the first step.
const MEMORY_EVERY: u64 = 16;
/// The first steps of a start have their timings in each rank's log file, the others only with --log-level debug.
const FIRST_STEPS: u32 = 2;

/// Samples of an evaluation that have a line each, and characters of them there.
const SAMPLES: usize = 4;
const SAMPLE: usize = 72;

/// What the loop knows of a step that is done.
pub struct StepDone<'r> {
    pub number: u64,
    pub lr: f32,
    pub report: &'r StepReport,
    /// This rank's.
    pub data: &'r StepData,
    /// Spent on waiting for them.
    pub data_time_s: f64,
    /// Where this rank's time went, where that is known.
    pub passes: Option<PassTimes>,
    /// Loss tokens, and the largest [`Reporter::bytes`] before this step: of all ranks.
    pub trained_tokens: u64,
    pub bytes: HeldBytes,
    /// Steps so far that changed weights.
    pub updates: u64,
    /// Means over the step's samples, if it drew them.
    pub sampled: Option<&'r SampleMeans>,
}

/// What a rank holds: of its GPU where it has one, else of its host.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct HeldBytes {
    /// When it was last looked at.
    pub now: u64,
    /// The most that was seen so far; of a GPU what was ever allocated at a time.
    pub peak: u64,
}

impl HeldBytes {
    /// The larger of each.
    fn max(self, other: HeldBytes) -> HeldBytes {
        HeldBytes { now: self.now.max(other.now), peak: self.peak.max(other.peak) }
    }
}

pub struct Reporter<'a> {
    plan: &'a Plan,
    log: &'a RunLog,
    mesh: &'a Mesh,
    device: Arc<dyn Device>,
    gpu: GpuWatch,
    /// Only rank 0 has some.
    sinks: Vec<Box<dyn Sink>>,
    /// On rank 0, which reports for all ranks; the others report for themselves.
    progress: Option<Progress>,
    bytes: HeldBytes,
    /// Samples of each data set of a mixture so far, where this start took a step.
    by_source: Vec<u64>,
    /// Steps of this start.
    steps: u32,
    light: SpeedOfLight,
    health: Health,
    tokens_per_step: u64,
    /// The model that was saved at the end.
    exported: Option<PathBuf>,
    /// What failed first of that which only watches.
    unrecorded: Option<Error>,
    started: Instant,
    /// End of the last step, evaluation or checkpoint; what communication had come to by then.
    clock: Instant,
    comm: CommStats,
}

impl<'a> Reporter<'a> {
    /// Collective: ranks measure their limits together. `done` steps are behind.
    pub fn new(
        plan: &'a Plan,
        log: &'a RunLog,
        device: Arc<dyn Device>,
        gpu: Option<&Cuda>,
        mesh: &'a Mesh,
        light: SpeedOfLight,
        done: u64,
    ) -> Result<Reporter<'a>> {
        let (run, first) = (&plan.settings.run, mesh.rank() == 0);
        let mut sinks: Vec<Box<dyn Sink>> = Vec::new();
        let go_on = done > 0 || plan.ranks.attempt > 0;
        if let Some(path) = run.metrics_path.as_ref().filter(|_| first) {
            sinks.push(Box::new(Metrics::open(path, go_on || run.after.is_some())?));
        }
        if let Some(dir) = plan.settings.watch.tensorboard.as_ref().filter(|_| first) {
            sinks.push(Box::new(TensorBoard::open(dir, go_on, done, mesh.group(Axis::World).size(), &plan.print()?)?));
        }
        Ok(Reporter {
            sinks,
            progress: first.then(|| Progress::new(log, done, plan.steps(), run.log_every.unwrap_or(1))),
            gpu: GpuWatch::new(gpu)?,
            bytes: HeldBytes::default(),
            by_source: Vec::new(),
            steps: 0,
            light,
            unrecorded: None,
            // The loss is that of a token, or of the better one of two answers.
            health: Health::new(
                (if plan.dataset.kind().is_judged() { 2.0 } else { plan.engine.spec.vocab as f64 }).ln(),
            ),
            tokens_per_step: plan.tokens_per_step()?,
            exported: None,
            started: Instant::now(),
            clock: Instant::now(),
            comm: mesh.stats(),
            plan,
            log,
            mesh,
            device,
        })
    }

    fn tell_sinks(&mut self, event: &Event) {
        let mut failures = Vec::new();
        self.sinks.retain_mut(|sink| sink.event(event).map_err(|e| failures.push(e)).is_ok());
        failures.into_iter().for_each(|e| self.unrecorded(e));
    }
    /// Something that only watches has failed. What it watches goes on, and the run ends with this error once
    /// everything is saved.
    pub fn unrecorded(&mut self, e: Error) {
        self.tell(LogLevel::Warn, format_args!("{e}; the run goes on without it, and fails at its end"));
        self.unrecorded.get_or_insert(e);
    }

    /// For all ranks, by rank 0.
    pub fn say(&self, level: LogLevel, text: impl Display) {
        if let Some(progress) = &self.progress {
            progress.say(self.log, level, text);
        }
    }
    /// For this rank: on stderr if it is a warning, and in its file.
    fn tell(&self, level: LogLevel, text: impl Display) {
        match &self.progress {
            _ if level > LogLevel::Warn => self.log.note(level, text),
            Some(progress) => progress.say(self.log, level, text),
            None => self.log.say(level, text),
        }
    }

    /// The run begins, where `resumed` stands. `load_seconds`: that it took to read weights, where they were read.
    pub fn begin(&mut self, resumed: Option<&ResumeFrom>, load_seconds: Option<f64>) -> Result<()> {
        self.started = Instant::now();
        let device = self.device.name();
        self.say(LogLevel::Info, report::header(self.plan, resumed, &device)?);
        let data = [Some(&self.plan.dataset), self.plan.eval.as_ref()];
        if let Some(unkept) = data.into_iter().flatten().find_map(|data| data.report().unkept.as_ref()) {
            self.say(
                LogLevel::Warn,
                format_args!(
                    "the token cache cannot be written: {unkept}. Each process tokenizes for itself; set --cache-dir to another \
                     directory"
                ),
            );
        }
        self.plan.split.warning.iter().for_each(|text| self.say(LogLevel::Warn, text));
        // The task's learning rate is an adaptive optimizer's.
        let adaptive = self.plan.settings.optim.optimizer != Some(OptimizerName::Sgd);
        let task = self.plan.settings.task.as_ref().filter(|_| adaptive);
        let far = task.and_then(|task| self.health.rate(task, self.plan.schedule.peak).map(str::to_string));
        far.iter().for_each(|text| self.say(LogLevel::Warn, text));
        load_seconds.iter().for_each(|s| self.tell(LogLevel::Debug, format_args!("load  {s:.2} s")));
        let (gpu, warnings) = self.gpu.sample();
        warnings.iter().for_each(|text| self.tell(LogLevel::Warn, text));
        self.tell_sinks(&Event::Run(&json!({
            "schema": SCHEMA,
            "config": record::config(&self.plan.settings),
            "world_size": self.mesh.group(Axis::World).size(),
            "mesh": record::mesh(&self.plan.ranks.mesh),
            "device": device,
            "params": self.plan.size.params,
            "trainable_params": self.plan.size.trainable,
            "planned_bytes": record::planned(&self.plan.size.planned),
            "data": self.plan.dataset.report().to_string(),
            "sources": report::sources(self.plan, &[]),
            "eval_data": self.plan.eval.as_ref().map(|eval| eval.report().to_string()),
            "gpu": gpu,
            "resumed_from_step": resumed.map(|resume| resume.state.step),
            "load_seconds": load_seconds,
            "work": self.light.work_json(),
            "limits": self.light.limits_json(),
        })));
        for (what, from) in resumed.iter().flat_map(|resume| resume.damaged.iter().map(|what| (what, &resume.dir))) {
            self.tell_sinks(&Event::Damaged(&json!({"message": what, "from": from})));
        }
        self.restart_clock();
        // Nothing is lost yet.
        self.unrecorded.take().map_or(Ok(()), Err)
    }

    /// What was done since the last step belongs to no step.
    pub fn restart_clock(&mut self) {
        self.comm = self.mesh.stats();
        self.clock = Instant::now();
    }

    pub fn bytes(&self) -> HeldBytes {
        self.bytes
    }
    fn look_at_memory(&mut self) {
        self.bytes = match self.plan.ranks.device {
            DeviceName::Cuda => {
                let meter = self.device.meter();
                HeldBytes { now: meter.total() as u64, peak: meter.peak() as u64 }
            }
            _ => {
                let now = memory::held().unwrap_or(0) as u64;
                HeldBytes { now, peak: self.bytes.peak.max(now) }
            }
        };
    }

    /// One optimizer step.
    pub fn step(&mut self, done: &StepDone) -> Result<()> {
        let &StepDone { number, report, data, .. } = done;
        if self.steps < 2 || number.is_multiple_of(MEMORY_EVERY) {
            self.look_at_memory();
        }
        let (step_time_s, comm) = (self.clock.elapsed().as_secs_f64(), self.mesh.stats());
        self.clock = Instant::now();
        let logged = number == 1 || number.is_multiple_of(self.plan.settings.run.log_every.unwrap_or(1));
        let (gpu, warnings) = if logged { self.gpu.sample() } else { Default::default() };
        let tokens_per_sec = data.tokens as f64 / step_time_s;
        let bytes = done.bytes.max(self.bytes);
        let light =
            if self.progress.is_some() { self.light.of(&data.batches, data.tokens, step_time_s)? } else { None };
        let ratio = |of: fn(Ratios) -> f64| light.map(of);
        let record = StepRecord {
            step: number,
            loss: report.loss,
            lr: done.lr,
            grad_norm: report.grad_norm,
            aux_loss: report.experts.map(|load| load.aux_loss),
            expert_load_max: report.experts.map(|load| load.max),
            loss_scale: report.loss_scale,
            skipped_steps: number - done.updates,
            samples: data.samples,
            source_samples: data.by_source.clone(),
            tokens: data.tokens,
            fill: data.tokens as f64 / self.tokens_per_step as f64,
            trained_tokens: done.trained_tokens,
            tokens_per_sec,
            trained_tokens_per_sec: done.trained_tokens as f64 / step_time_s,
            step_time_s,
            forward_time_s: done.passes.map(|passes| passes.forward.as_secs_f64()),
            backward_time_s: done.passes.map(|passes| passes.backward.as_secs_f64()),
            optimizer_time_s: done.passes.map(|passes| passes.optimizer.as_secs_f64()),
            comm_time_s: comm.in_flight_s - self.comm.in_flight_s,
            exposed_comm_s: comm.exposed_s - self.comm.exposed_s,
            comm_bytes: comm.bytes - self.comm.bytes,
            rollouts: report.rollouts,
            sampled: done.sampled.cloned(),
            student: report.student,
            preference: report.preference.map(|means| PreferenceRecord::new(&means, &self.plan.engine.objective)),
            data_time_s: done.data_time_s,
            mem_bytes: bytes.now,
            peak_mem_bytes: bytes.peak,
            mfu: ratio(|light| light.mfu),
            mfu_llm_foundry: ratio(|light| light.mfu_llm_foundry),
            sol: ratio(|light| light.sol),
            gpu,
        };
        self.comm = comm;
        self.by_source.clone_from(&data.by_source);
        self.tell_sinks(&Event::Step(&record));
        self.progress.iter().for_each(|progress| progress.step(self.log, &record));
        self.tell_own(&record);
        warnings.iter().for_each(|text| self.tell(LogLevel::Warn, format_args!("step {number}: {text}")));
        // Losses of rollouts are about 0, however well the policy does.
        let sign = match &report.rollouts {
            Some(means) if number == 1 => self.health.recorded(means.logprob_mismatch),
            Some(_) => None,
            None => self.health.step(report.loss, report.grad_norm.into()),
        };
        let sign = sign.map(str::to_string);
        if let Some(sign) = sign {
            self.say(LogLevel::Warn, format_args!("step {number}: {sign}"));
        }
        if report.skipped {
            let scale = report.loss_scale.map_or(String::new(), |scale| format!(" (loss scale {scale})"));
            let text = format_args!("step {number}: the gradient is not finite{scale}; the update was skipped");
            self.say(LogLevel::Warn, text);
        }
        Ok(())
    }
    /// This rank's timings of a step: what it waited for.
    fn tell_own(&mut self, r: &StepRecord) {
        let level = if self.steps < FIRST_STEPS { LogLevel::Info } else { LogLevel::Debug };
        self.steps += 1;
        let (step, whole, data) = (r.step, r.step_time_s, r.data_time_s);
        let (comm, exposed, held) = (r.comm_time_s, r.exposed_comm_s, report::mib(self.bytes.now));
        self.tell(
            level,
            format_args!(
                "timing  step {step}  {whole:.3} s  data {data:.3} s  comm {comm:.3} s  exposed {exposed:.3} s  mem {held}"
            ),
        );
    }

    /// The held-out rows were evaluated. `is_best`: no loss of the run was lower, where that is known.
    pub fn evaluated(&mut self, step: u64, evaluated: &Evaluated, seconds: f64, is_best: Option<bool>) {
        if evaluated.count > 0 {
            let best = if is_best == Some(true) { "  best so far" } else { "" };
            self.say(LogLevel::Info, format_args!("eval  step {step}  {evaluated}{best}"));
            let mut event = evaluated.json(step, &self.plan.engine.objective);
            (event["seconds"], event["best"]) = (json!(seconds), json!(is_best));
            self.tell_sinks(&Event::Eval(&event));
        }
        self.restart_clock();
    }

    /// This went wrong with rewards of samples of `step`, and was repeated.
    pub fn repeated(&mut self, step: u64, failures: &[String]) {
        for what in failures {
            self.say(LogLevel::Warn, format_args!("step {step}: {what}; it was started again"));
        }
    }

    /// The prompts of --eval-dataset were continued by the model after `step`, and their texts judged.
    /// `is_best`: no mean reward of the run was higher, where that is known.
    pub fn rewarded(&mut self, step: u64, means: &RewardMeans, prompts: usize, seconds: f64, is_best: Option<bool>) {
        let each = means.rewards.iter().filter(|_| means.rewards.len() > 1);
        let each: String = each.map(|(name, mean)| format!("  {name} {mean:.4}")).collect();
        let (reward, tokens) = (means.reward_mean, means.completion_mean);
        let best = if is_best == Some(true) { "  best so far" } else { "" };
        let line =
            format_args!("eval  step {step}  reward {reward:.4}{each}  tokens {tokens:.1}  prompts {prompts}{best}");
        self.say(LogLevel::Info, line);
        let mut event = json!({"step": step, "loss": null, "perplexity": null, "tokens": null, "prompts": prompts});
        if let (Some(event), Value::Object(means)) = (event.as_object_mut(), json!(means)) {
            event.extend(means);
        }
        (event["seconds"], event["best"]) = (json!(seconds), json!(is_best));
        self.tell_sinks(&Event::Eval(&event));
    }

    /// The prompts of --sample-prompts were continued, by the model after `step`.
    pub fn sampled(&mut self, step: u64, samples: &[PromptSample], seconds: f64) {
        for (i, of) in samples.iter().enumerate().take(SAMPLES) {
            let (n, text) = (i + 1, printable(of.text.trim(), SAMPLE));
            self.say(LogLevel::Info, format_args!("sample  step {step}  prompt {n}: {text}"));
        }
        if samples.len() > SAMPLES {
            let more = samples.len() - SAMPLES;
            self.say(LogLevel::Info, format_args!("sample  step {step}  and {more} more (--metrics-path has all)"));
        }
        self.tell_sinks(&Event::Samples(&json!({"step": step, "seconds": seconds, "samples": samples})));
        self.restart_clock();
    }

    /// A checkpoint is complete.
    pub fn checkpoint(&mut self, saved: Option<SavedCheckpoint>) {
        let Some(saved) = saved else { return };
        let (path, size) = (saved.path.display(), report::mib(saved.bytes));
        let step = saved.step.map_or(String::new(), |step| format!("step {step}  "));
        self.say(LogLevel::Info, format_args!("checkpoint  {step}{size}  {:.2} s  {path}", saved.seconds));
        if let Some(note) = &saved.note {
            self.say(LogLevel::Warn, note);
        }
        let (value, best) = saved.evaluation.unzip();
        let mut event = json!({
            "step": saved.step, "path": saved.path, "bytes": saved.bytes, "seconds": saved.seconds,
            "eval_loss": value, "best": best,
        });
        if self.plan.settings.objective.is_grpo() {
            (event["eval_reward"], event["eval_loss"]) = (json!(value), Value::Null);
        }
        self.tell_sinks(&Event::Checkpoint(&event));
    }

    /// The trace of profiled steps, when it is written.
    pub fn traced(&mut self, report: Option<ProfileReport>) {
        if let Some(ProfileReport { path, steps, ranks }) = report {
            let which = format_args!("trace  steps {}:{}  {}", steps.start(), steps.end(), path.display());
            self.say(LogLevel::Info, which);
            ranks.iter().flat_map(Summary::lines).for_each(|line| self.say(LogLevel::Info, line));
            let steps = [steps.start(), steps.end()];
            self.tell_sinks(&Event::Trace(&json!({"steps": steps, "path": path, "ranks": ranks})));
        }
        self.restart_clock();
    }

    /// All steps are done, and the model is in `exported`, as far as that was asked for.
    pub fn trained(&mut self, exported: &[SavedCheckpoint]) {
        self.progress.iter_mut().for_each(Progress::finish);
        let settings = &self.plan.settings;
        let merged = match (self.plan.engine.tuning.lora.is_some(), self.plan.engine.strategy.dtype()) {
            (false, _) => String::new(),
            _ if settings.lora.load_in_4bit == Some(true) => {
                "  (adapters merged into the 4-bit weights they were trained on)".into()
            }
            (true, DType::F32) => "  (adapters merged)".into(),
            // Which may be a rounding of what --pretrain holds.
            (true, dtype) => format!("  (adapters merged into the {} weights they were trained on)", dtype.name()),
        };
        self.exported = exported.first().map(|saved| saved.path.clone());
        for (i, saved) in exported.iter().enumerate() {
            let (path, size) = (saved.path.display(), report::mib(saved.bytes));
            let is_adapter = i == 0 && settings.checkpoint.save_adapter.is_some();
            let merged = if is_adapter { "" } else { &merged };
            self.say(LogLevel::Info, format_args!("export  {size}  {path}{merged}"));
            saved.note.iter().for_each(|note| self.say(LogLevel::Warn, note));
        }
    }

    /// The last lines of a run that succeeds. `stopped`: its evaluations, where `--patience` ended it.
    pub fn end(&mut self, steps: u64, stopped: Option<&Evaluations>) -> Result<()> {
        if let (Some(evaluations), Some(patience)) = (stopped, self.plan.settings.run.patience) {
            let best = evaluations
                .best_loss
                .map_or("any before".into(), |loss| format!("{loss:.4} of step {}", evaluations.best_step));
            let better = if evaluations.rewards { "a mean reward above" } else { "a loss below" };
            self.say(
                LogLevel::Info,
                format_args!(
                    "stopped after step {steps}: --patience {patience}, and none of the last {} evaluations had {better} {best}",
                    evaluations.since_best
                ),
            );
        }
        let (seconds, held) = (self.started.elapsed().as_secs_f64(), report::mib(self.bytes.peak));
        self.tell(LogLevel::Info, format_args!("done  step {steps}  {}  peak mem {held}", duration(seconds)));
        let sources = report::sources(self.plan, &self.by_source).filter(|_| !self.by_source.is_empty());
        let consumed = report::consumed(sources.as_deref().unwrap_or_default());
        consumed.for_each(|line| self.say(LogLevel::Info, line));
        report::next(self.plan, steps, stopped.is_some(), self.exported.as_deref())
            .iter()
            .for_each(|text| self.say(LogLevel::Info, text));
        self.tell_sinks(&Event::End(&json!({
            "steps": steps, "seconds": seconds, "stopped": stopped.map(|_| "patience"), "sources": sources,
            "warnings": self.health.warnings(),
        })));
        self.unrecorded.take().map_or(Ok(()), Err)
    }
}

/// This rank failed.
pub fn failed(plan: &Plan, env: &RankEnv, e: &Error) {
    // A parent of ours writes it: it knows of all ranks, and it lives when rank 0 is dead.
    if env.rank == 0 && env.parent_pid.is_none() {
        record_failure(plan.settings.run.metrics_path.as_deref(), e);
    }
}
