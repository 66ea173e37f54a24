//! One rank's run, top to bottom: build, resume, step after step, and the end. Never parses and never validates: the
//! [`Plan`] is right by the time it comes here.
use super::agree::{Agreement, Vote};
use super::device::{self, Seat};
use super::launch;
use super::memory;
use super::merge;
use super::metrics::{Metrics, StepRecord, record_failure};
use super::peak;
use super::plan::Plan;
use super::report::{self, Progress};
use super::settings::DeviceName;
use crate::base::{Error, Meter, Result};
use crate::ckpt::{Checkpointer, Companions, Saved, TrainerState};
use crate::comm::CommStats;
use crate::comm::env::RankEnv;
use crate::comm::flight::Flight;
use crate::comm::mesh::Mesh;
use crate::data::{Loader, Prefetch, StepData};
use crate::device::Device;
use crate::device::gpu::cuda::Cuda;
use crate::device::gpu::telemetry::{self, Sample, Telemetry};
use crate::strategy::{Engine, Sampling, Step};
use serde_json::json;
use signal_hook::consts::SIGTERM;
use signal_hook::iterator::Signals;
use std::io::Write;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Instant;

/// Memory is sampled in the first steps and then in each so manieth: after the first step no buffer is allocated any more.
const MEMORY_EVERY: u64 = 16;
/// So many steps in a row without a finite gradient, where no loss scale is left to try, end the run.
const HOPELESS: u32 = 10;
/// Tokens of the held-out text that the final sample goes on from.
const PROMPT: usize = 64;

/// Runs this process's rank. On failure the other ranks are told at once.
pub fn run(plan: &Plan, env: &RankEnv) -> Result<()> {
    let stops = Stops {
        signals: launch::catch(&plan.restarts.signals)?,
        // A parent of ours looks at the clock for all ranks, over restarts.
        deadline: plan.restarts.time_limit.filter(|_| env.parent_pid.is_none()).map(|limit| Instant::now() + limit),
    };
    let meter = Meter::default();
    let Seat { device, member, gpu } = device::take(&plan.wanted(), env, meter)?;
    let flight = Flight::default();
    let mesh = flight.watch(Mesh::new(member, plan.mesh)?);
    let result = match &plan.settings.lora.merge {
        Some(adapter) => merge::run(plan, adapter, device, &mesh),
        None => Trainer::new(plan, device, gpu.as_deref(), &mesh, &flight, stops).and_then(|mut trainer| trainer.run()),
    };
    if let Err(e) = &result {
        if !matches!(e, Error::Signal(_)) {
            mesh.member.abort();
            leave_traces(plan, &flight, env.rank, e);
        }
        // A parent of ours writes it, who knows of all ranks and lives when rank 0 is dead.
        if env.rank == 0 && env.parent_pid.is_none() {
            record_failure(plan.settings.run.metrics_path.as_deref(), e);
        }
    }
    result
}

/// What this rank's recorder holds, where the run keeps such things. A run that fails for a full disk fails for that.
fn leave_traces(plan: &Plan, flight: &Flight, rank: usize, e: &Error) {
    if let Some(dir) = &plan.restarts.traces {
        let _ = flight.dump(dir, rank, e);
    }
}

/// What asks a run to end after the step at hand.
struct Stops {
    signals: Signals,
    deadline: Option<Instant>,
}
impl Stops {
    /// A signal that came; SIGTERM when time is up.
    fn pending(&mut self) -> Option<i32> {
        let late = || self.deadline.is_some_and(|deadline| Instant::now() > deadline).then_some(SIGTERM);
        self.signals.pending().next().or_else(late)
    }
}

struct Trainer<'a> {
    plan: &'a Plan,
    mesh: &'a Mesh,
    flight: &'a Flight,
    engine: Engine,
    checkpointer: Checkpointer,
    agreement: Agreement,
    prefetch: Prefetch,
    held_out: Option<Loader>,
    /// This rank's micro-batches of the step at hand; those of evaluation.
    data: StepData,
    held_out_data: StepData,
    stops: Stops,
    metrics: Metrics,
    /// Of this rank's GPU, where it has one.
    telemetry: Option<Telemetry>,
    progress: Progress,
    /// Steps done; samples and loss tokens consumed by all ranks.
    done: u64,
    samples: u64,
    trained_tokens: u64,
    /// That it took to read weights, where they were read.
    load_seconds: Option<f64>,
    /// Step of the newest checkpoint of this run.
    saved: Option<u64>,
    stuck_in_a_row: u32,
    held_bytes: u64,
    /// MFU of one token a second: the definition of [`crate::nn::Spec::flops_per_token`] over the peak of all ranks, measured
    /// or by the GPU's data sheet.
    mfu_of_a_token: Option<f64>,
    /// End of the last step, evaluation or checkpoint.
    clock: Instant,
    comm: CommStats,
}

impl<'a> Trainer<'a> {
    fn new(
        plan: &'a Plan,
        device: Arc<dyn Device>,
        gpu: Option<&Cuda>,
        mesh: &'a Mesh,
        flight: &'a Flight,
        stops: Stops,
    ) -> Result<Trainer<'a>> {
        let mut engine = Engine::new(device.clone(), mesh, &plan.engine)?;
        let layouts = engine.decoder().layouts().to_vec();
        let moments = plan.engine.rule.state();
        let (spec, max) = (&plan.engine.spec, plan.save.max_file_bytes);
        let mut checkpointer = Checkpointer::with_files_of(max, device.clone(), mesh, spec, &layouts, moments)?;
        let source = plan.resume.as_ref().map(|r| &r.0).or(plan.settings.model.pretrain.as_ref());
        if mesh.rank() == 0 {
            let (source, tokenizer) = (source.map(PathBuf::as_path), plan.tokenizer.files());
            let ends = (plan.tokenizer.bos(), plan.tokenizer.eos());
            let mut companions = Companions::of(spec, source, tokenizer.first().map(PathBuf::as_path))?.with_ends(ends);
            if let Some(lora) = &plan.engine.tuning.lora {
                companions = companions.adapting(lora, plan.settings.model.pretrain.as_deref());
            }
            checkpointer.accompany(companions);
        }
        let mut loader = Loader::new(plan.dataset.clone(), plan.loader(mesh.dp.rank())?)?;
        let held_out = loader.held_out().filter(|_| plan.settings.run.eval == Some(true));

        let (mut done, mut samples, mut trained_tokens) = (0, 0, 0);
        let loading = Instant::now();
        let adapted = plan.engine.tuning.lora.is_some();
        if let Some(dir) = plan.settings.model.pretrain.as_ref().filter(|_| adapted || plan.resume.is_none()) {
            checkpointer.load_model(dir, engine.state().0)?;
        }
        if let Some((dir, _)) = &plan.resume {
            let (store, optimizer) = engine.state();
            let state = checkpointer.load(dir, store, optimizer)?;
            (done, samples, trained_tokens) = (state.step, state.samples_consumed, state.trained_tokens);
            if let (Some(scaler), Some(state)) = (engine.scaler(), &state.scaler) {
                scaler.resume(state)?;
            }
            loader.seek(samples);
        }
        let load_seconds = source.map(|_| loading.elapsed().as_secs_f64());

        let first = mesh.rank() == 0;
        let dtype = plan.engine.strategy.dtype();
        let peak = match (plan.settings.run.measure_peak, gpu) {
            (Some(true), _) => Some(peak::flops(&*device, dtype, &mesh.world)?),
            (_, Some(gpu)) => telemetry::peak(&gpu.model()?).map(|peak| peak.of(dtype)),
            _ => None,
        };
        let flops_of_a_token = plan.engine.spec.flops_per_token(plan.dataset.max_len()) as f64;
        let mfu_of_a_token = peak.map(|peak| flops_of_a_token / (peak * mesh.world.size() as f64));
        let telemetry = gpu.filter(|_| first).map(|gpu| gpu.pci_bus_id().map(Telemetry::new)).transpose()?;
        let metrics = match &plan.settings.run.metrics_path {
            Some(path) if first => {
                Metrics::open(path, done > 0 || plan.attempt > 0 || plan.settings.run.after.is_some())?
            }
            _ => Metrics::none(),
        };
        let progress = match first {
            true => Progress::new(done, plan.steps(), plan.settings.run.log_every.unwrap_or(1)),
            false => Progress::silent(),
        };
        Ok(Trainer {
            agreement: Agreement::new(mesh)?,
            prefetch: Prefetch::start(loader)?,
            data: StepData::default(),
            held_out_data: StepData::default(),
            comm: mesh.stats(),
            load_seconds,
            saved: plan.resume.as_ref().map(|_| done),
            stuck_in_a_row: 0,
            held_bytes: 0,
            clock: Instant::now(),
            plan,
            mesh,
            flight,
            engine,
            checkpointer,
            held_out,
            stops,
            metrics,
            telemetry,
            progress,
            done,
            samples,
            trained_tokens,
            mfu_of_a_token,
        })
    }

    fn run(&mut self) -> Result<()> {
        let started = Instant::now();
        self.begin()?;
        let (eval_every, save_every) = (self.plan.settings.run.eval_every, self.plan.settings.checkpoint.save_every);
        let due = |every: Option<u64>, step: u64| every.is_some_and(|n| n > 0 && step.is_multiple_of(n));
        while self.done < self.plan.steps() {
            if let Some(signal) = self.step().map_err(|e| at_step(self.done + 1, e))? {
                self.progress.say(&format!("signal {signal}: stopping after step {}", self.done));
                self.save(false)?;
                return Err(Error::Signal(signal));
            }
            if self.done < self.plan.steps() {
                if due(eval_every, self.done) {
                    self.evaluate()?;
                }
                if due(save_every, self.done) {
                    self.save(self.plan.save.behind)?;
                }
            }
        }
        // First what must not be lost.
        self.save(false)?;
        self.evaluate()?;
        self.progress.finish();
        if let Some(dir) = &self.plan.settings.checkpoint.save_hf {
            let saved = self.checkpointer.save_hf(dir, self.plan.save.dtype, self.engine.state().0)?;
            self.progress.say(&format!("model in {}, {}", saved.path.display(), report::mib(saved.bytes)));
        }
        self.sample()?;
        self.metrics.event("end", json!({"steps": self.done, "seconds": started.elapsed().as_secs_f64()}))
    }

    fn begin(&mut self) -> Result<()> {
        let device = self.engine.device().name();
        self.progress.say(&report::header(self.plan, &device)?);
        self.metrics.event(
            "run",
            json!({
                "config": self.plan.config_json(),
                "world_size": self.mesh.world.size(),
                "mesh": self.plan.mesh_json(),
                "device": device,
                "params": self.plan.params,
                "trainable_params": self.plan.trainable,
                "planned_bytes": self.plan.planned_json(),
                "data": self.plan.dataset.report().to_string(),
                "gpu": self.telemetry.as_ref().and_then(Telemetry::sample),
                "resumed_from_step": self.plan.resume.as_ref().map(|_| self.done),
                "load_seconds": self.load_seconds,
            }),
        )?;
        self.restart_clock();
        Ok(())
    }

    /// What was done since the last step belongs to no step.
    fn restart_clock(&mut self) {
        self.comm = self.mesh.stats();
        self.clock = Instant::now();
    }

    /// One optimizer step; or, where a rank was asked to stop, nothing but the signal that asked.
    fn step(&mut self) -> Result<Option<i32>> {
        let number = self.done + 1;
        let filling = Instant::now();
        self.prefetch.next(&mut self.data)?;
        let data_time_s = filling.elapsed().as_secs_f64();

        let stop = self.stops.pending();
        let tokens = self.data.loss_tokens();
        let (schedule, saved) = (self.flight.schedule(), self.checkpointer.ended());
        let mine = Vote { tokens, stop, held_bytes: self.held_bytes, saved, schedule };
        let all = self.agreement.reach(&**self.engine.device(), mine)?;
        if all.stop.is_some() {
            return Ok(all.stop);
        }
        if all.saved {
            self.checkpointer.advance()?;
        }
        let saved = self.checkpointer.published()?;
        self.tell(saved)?;

        let lr = self.plan.schedule.lr(number);
        let report = self.engine.train_step(&self.data.batches, &Step { number, lr, tokens: all.tokens })?;
        if number <= 2 || number.is_multiple_of(MEMORY_EVERY) {
            self.held_bytes = self.held_bytes.max(self.held());
        }
        self.stuck_in_a_row = if report.stuck { self.stuck_in_a_row + 1 } else { 0 };

        let (step_time_s, comm) = (self.clock.elapsed().as_secs_f64(), self.mesh.stats());
        self.clock = Instant::now();
        let StepData { samples, tokens, .. } = self.data;
        let tokens_per_sec = tokens as f64 / step_time_s;
        let record = StepRecord {
            step: number,
            loss: report.loss,
            lr,
            grad_norm: report.grad_norm,
            loss_scale: report.loss_scale,
            skipped_steps: number - self.engine.updates(),
            samples,
            tokens,
            fill: tokens as f64 / self.plan.tokens_per_step()? as f64,
            trained_tokens: all.tokens,
            tokens_per_sec,
            step_time_s,
            comm_time_s: comm.in_flight_s - self.comm.in_flight_s,
            exposed_comm_s: comm.exposed_s - self.comm.exposed_s,
            comm_bytes: comm.bytes - self.comm.bytes,
            data_time_s,
            peak_mem_bytes: all.held_bytes.max(self.held_bytes),
            mfu: self.mfu_of_a_token.map(|mfu| tokens_per_sec * mfu),
            gpu: self.sample_gpu(number),
        };
        self.comm = comm;
        self.metrics.event("step", &record)?;
        self.progress.step(&record);
        if self.stuck_in_a_row == HOPELESS {
            return Err(Error::Run(format!(
                "train_step: {HOPELESS} steps in a row without a finite gradient (loss {}); lower --lr, or resume from a \
                 checkpoint before it",
                report.loss
            )));
        }
        if report.skipped {
            let scale = report.loss_scale.map_or(String::new(), |scale| format!(" (loss scale {scale})"));
            self.progress.say(&format!("step {number}: the gradient is not finite{scale}; no weight was changed"));
        }
        self.mesh.member.set_timeout(self.plan.comm_timeout); // no rank is starting any more
        self.done = number;
        self.samples = self.data.position;
        self.trained_tokens += all.tokens;
        Ok(None)
    }

    /// Bytes of this rank: of its GPU where it has one, what was ever allocated there at a time; else of the host.
    fn held(&self) -> u64 {
        match self.plan.device {
            DeviceName::Cuda => self.engine.device().meter().peak() as u64,
            _ => memory::held().unwrap_or(0) as u64,
        }
    }
    /// What the GPU tells at steps that are logged.
    fn sample_gpu(&self, number: u64) -> Option<Sample> {
        let logged = number == 1 || number.is_multiple_of(self.plan.settings.run.log_every.unwrap_or(1));
        self.telemetry.as_ref().filter(|_| logged)?.sample()
    }

    /// The held-out rows, once.
    fn evaluate(&mut self) -> Result<()> {
        let Some(loader) = &mut self.held_out else { return Ok(()) };
        let started = Instant::now();
        loader.seek(0);
        let options = self.plan.loader(0)?;
        let rows = loader.rows_per_epoch();
        let (mut loss, mut tokens) = (0.0, 0);
        for _ in 0..rows / options.global_batch() {
            loader.next(&mut self.held_out_data);
            let (sum, count) = self.engine.evaluate(&self.held_out_data.batches).map_err(|e| at_step(self.done, e))?;
            loss += sum;
            tokens += count;
        }
        if tokens > 0 {
            let (loss, seconds) = (loss / tokens as f64, started.elapsed().as_secs_f64());
            self.progress.say(&format!(
                "eval: {} loss: {loss:.4} perplexity: {:.4} over {} held-out tokens",
                self.done,
                loss.exp(),
                report::count(tokens)
            ));
            self.metrics
                .event("eval", json!({"step": self.done, "loss": loss, "perplexity": loss.exp(), "tokens": tokens, "seconds": seconds}))?;
        }
        self.restart_clock();
        Ok(())
    }

    /// A checkpoint of the last step, unless there is one or nobody asked. `behind`: written while training goes on;
    /// otherwise nothing is under way any more when this returns.
    fn save(&mut self, behind: bool) -> Result<()> {
        let Some(dir) = &self.plan.settings.checkpoint.ckpt_dir else { return Ok(()) };
        let keep = self.plan.settings.checkpoint.keep.filter(|&n| n > 0).unwrap_or(usize::MAX);
        let failed = |e| at_step(self.done, e);
        let earlier = if behind { None } else { self.checkpointer.settle().map_err(failed)? };
        let mut saved = None;
        if self.saved != Some(self.done) {
            let state = TrainerState {
                scaler: self.engine.scaler().map(|scaler| scaler.state()),
                ..self.plan.trainer_state(self.done, self.samples, self.trained_tokens)
            };
            let (store, optimizer) = self.engine.state();
            let checkpointer = &mut self.checkpointer;
            saved = match behind {
                true => checkpointer.save_behind(dir, keep, store, optimizer, &state).map_err(failed)?,
                false => Some(checkpointer.save(dir, keep, store, optimizer, &state).map_err(failed)?),
            };
            self.saved = Some(self.done);
        }
        self.tell(earlier)?;
        self.tell(saved)?;
        self.restart_clock();
        Ok(())
    }

    /// That a checkpoint is complete.
    fn tell(&mut self, saved: Option<Saved>) -> Result<()> {
        let Some(saved) = saved else { return Ok(()) };
        let path = saved.path.display();
        self.progress.say(&format!("checkpoint: {path}, {} in {:.2}s", report::mib(saved.bytes), saved.seconds));
        if let Some(note) = &saved.note {
            self.progress.say(note);
        }
        self.metrics.event(
            "checkpoint",
            json!({"step": saved.step, "path": saved.path, "bytes": saved.bytes, "seconds": saved.seconds}),
        )
    }

    /// Some text by the trained model, on stdout. All ranks compute, rank 0 prints.
    fn sample(&mut self) -> Result<()> {
        let run = &self.plan.settings.run;
        let count = run.sample_tokens.unwrap_or(0);
        if run.sample != Some(true) || count == 0 || !self.plan.is_text() {
            return Ok(());
        }
        let len = self.plan.dataset.max_len();
        let (mut tokens, mut targets) = (vec![0; len], vec![0; len]);
        self.plan.dataset.fill(self.plan.dataset.rows() - 1, &mut tokens, &mut targets);
        let prompt = &tokens[..PROMPT.min(len)];
        let sampling = Sampling { temperature: 0.8, seed: self.plan.engine.seed, ..Sampling::default() };
        let written = self.engine.generate(prompt, count, &sampling)?;
        if self.mesh.rank() == 0 {
            let text = |tokens: &[u32]| self.plan.tokenizer.decode(tokens);
            let sample =
                format!("--- held-out text ---\n{}\n--- as the model goes on ---\n{}\n", text(prompt), text(&written));
            let _ = std::io::stdout().write_all(sample.as_bytes()); // nobody reading is no failure of the run
        }
        Ok(())
    }
}

/// The error with the step in front, so that its message says rank, step and operation.
fn at_step(step: u64, e: Error) -> Error {
    match e {
        Error::Input(_) | Error::Signal(_) => e,
        e => Error::Run(format!("step {step}: {e}")),
    }
}
