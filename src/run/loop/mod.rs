//! One rank's run, top to bottom: build, resume, step after step, and the end. Never parses and never validates: the
//! [`Plan`] is right by the time it comes here.
pub mod agree;
pub mod generate;
pub mod load;
pub mod merge;
pub mod same;
pub mod shared;
pub mod verify;
use crate::base::timeline::Lane;
use crate::base::{Error, Result};
use crate::ckpt::{Checkpointer, TrainerState};
use crate::comm::env::RankEnv;
use crate::comm::flight::Flight;
use crate::comm::mesh::Mesh;
use crate::data::{Loader, Prefetch, StepData};
use crate::device::Device;
use crate::device::gpu::cuda::Cuda;
use crate::device::gpu::graphs::Graphs;
use crate::engine::{Engine, Sampling, Step};
use crate::run::launch;
use crate::run::launch::device;
use crate::run::launch::device::Seat;
use crate::run::r#loop::agree::Agreement;
use crate::run::r#loop::agree::Vote;
use crate::run::r#loop::load::Loaded;
use crate::run::r#loop::verify::Verify;
use crate::run::plan::Plan;
use crate::run::plan::resume::Resume;
use crate::run::settings::LogLevel;
use crate::run::trace::Tracer;
use crate::run::watch;
use crate::run::watch::Log;
use crate::run::watch::StepDone;
use crate::run::watch::Watch;
use signal_hook::consts::SIGTERM;
use signal_hook::iterator::Signals;
use std::io::{ErrorKind, Write};
use std::sync::Arc;
use std::time::Instant;

/// Tokens of the held-out text that the final sample goes on from.
const PROMPT: usize = 64;

/// Runs this process's rank. On failure the other ranks are told at once.
pub fn run(plan: &Plan, env: &RankEnv, log: &Log) -> Result<()> {
    let stops = Stops {
        signals: launch::catch(&plan.restarts.signals)?,
        // A parent of ours looks at the clock for all ranks, over restarts.
        deadline: plan.restarts.time_limit.filter(|_| env.parent_pid.is_none()).map(|limit| Instant::now() + limit),
    };
    let (starting, mut tracer) = (Instant::now(), Tracer::of(plan, env.rank));
    let wanted = plan.wanted();
    let env = &wanted.known(env);
    wanted.caution(env).iter().for_each(|caution| log.warn(caution));
    let Seat { device, member, gpu, graphs } = device::take(&wanted, env, tracer.meter())?;
    log.debug(format_args!("{} taken after {:.2}s", device.name(), starting.elapsed().as_secs_f64()));
    if let (Some(_), Some(_), 0) = (&graphs, &plan.profile, env.rank) {
        log.info(
            "profiled steps are given to the GPU call by call: a step that is replayed as a whole has no parts to time",
        );
    }
    let flight = Flight::default();
    let world = Mesh::world(&member)?;
    let agreed =
        same::check(plan, &env.host, &*device, &world).and_then(|()| shared::check(plan, &env.host, &*device, &world));
    if let Err(e) = agreed {
        if !matches!(e, Error::Input(_)) {
            member.abort(); // what all ranks refuse alike needs no word to the others
        }
        return Err(e);
    }
    let mesh = tracer.watch(flight.watch(Mesh::with_world(world, member, plan.mesh)?));
    let result = match &plan.settings.lora.merge {
        Some(adapter) => merge::run(plan, adapter, device, &mesh, log),
        None => {
            let recorders = Recorders { flight: &flight, tracer: &mut tracer, graphs: graphs.as_deref() };
            Trainer::new(plan, device, gpu.as_deref(), &mesh, recorders, stops, log)
                .and_then(|mut trainer| trainer.run())
        }
    };
    if let Err(e) = &result {
        if !matches!(e, Error::Signal(_)) {
            mesh.member.abort();
            leave_traces(plan, &flight, env.rank, e);
        }
        tracer.salvage();
        watch::failed(plan, env, e);
    }
    if let (Some(graphs), 0, Ok(())) = (&graphs, env.rank, &result) {
        log.info(graphs.given());
    }
    result
}

/// What this rank's recorder holds, where the run keeps such things. A run that fails for a full disk fails for that.
fn leave_traces(plan: &Plan, flight: &Flight, rank: usize, e: &Error) {
    // Nothing was computed of bad input.
    if let Some(dir) = plan.restarts.traces.as_ref().filter(|_| !matches!(e, Error::Input(_))) {
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

/// What records a run beside its metrics.
struct Recorders<'a> {
    flight: &'a Flight,
    tracer: &'a mut Tracer,
    /// Where steps are captured.
    graphs: Option<&'a Graphs>,
}

struct Trainer<'a> {
    plan: &'a Plan,
    mesh: &'a Mesh,
    flight: &'a Flight,
    tracer: &'a mut Tracer,
    graphs: Option<&'a Graphs>,
    engine: Engine,
    checkpointer: Checkpointer,
    agreement: Agreement,
    prefetch: Prefetch,
    held_out: Option<Loader>,
    /// This rank's micro-batches of the step at hand; those of evaluation.
    data: StepData,
    /// Those of the next one, how long they were waited for, and what ranks agreed on before it.
    next: StepData,
    next_time_s: f64,
    agreed: Option<Vote>,
    held_out_data: StepData,
    stops: Stops,
    watch: Watch<'a>,
    /// Steps done; samples and loss tokens consumed by all ranks.
    done: u64,
    samples: u64,
    trained_tokens: u64,
    /// That it took to read weights, where they were read.
    load_seconds: Option<f64>,
    /// The checkpoint that was gone on from.
    resumed: Option<Resume>,
    /// Step of the newest checkpoint of this run.
    saved: Option<u64>,
    /// Steps, and updates of the weights, that lie behind this start.
    before: (u64, u64),
    bad_in_a_row: u32,
    verify: Option<Verify>,
}

impl<'a> Trainer<'a> {
    fn new(
        plan: &'a Plan,
        device: Arc<dyn Device>,
        gpu: Option<&Cuda>,
        mesh: &'a Mesh,
        Recorders { flight, tracer, graphs }: Recorders<'a>,
        stops: Stops,
        log: &'a Log,
    ) -> Result<Trainer<'a>> {
        let mut engine = Engine::new(device.clone(), mesh, &plan.engine)?;
        let mut loader = Loader::new(plan.dataset.clone(), plan.loader(mesh.dp.rank())?)?;
        let held_out = loader.held_out().filter(|_| plan.settings.run.eval == Some(true));

        tracer.phase(0, "load");
        let Loaded { mut checkpointer, resumed, seconds: load_seconds } =
            load::load(plan, device.clone(), mesh, &mut engine, log)?;
        let state = resumed.as_ref().map(|Resume { state, .. }| state);
        let (done, samples, trained_tokens) =
            state.map_or((0, 0, 0), |s| (s.step, s.samples_consumed, s.trained_tokens));
        loader.seek(samples);
        tracer.attach(&mut engine, &mut checkpointer)?;

        let watch = Watch::new(plan, log, device.clone(), gpu, mesh, done)?;
        let every = plan.settings.faults.verify_every.filter(|&every| every > 0);
        let verify = every.map(|every| Verify::new(device, mesh, engine.state().0, every)).transpose()?;
        Ok(Trainer {
            agreement: Agreement::new(mesh)?,
            prefetch: Prefetch::start(loader)?,
            data: StepData::default(),
            next: StepData::default(),
            next_time_s: 0.0,
            agreed: None,
            held_out_data: StepData::default(),
            load_seconds,
            before: (done, engine.updates()),
            saved: resumed.as_ref().map(|_| done),
            resumed,
            bad_in_a_row: 0,
            verify,
            plan,
            mesh,
            flight,
            tracer,
            graphs,
            engine,
            checkpointer,
            held_out,
            stops,
            watch,
            done,
            samples,
            trained_tokens,
        })
    }

    fn run(&mut self) -> Result<()> {
        self.watch.begin(self.resumed.as_ref(), self.load_seconds)?;
        self.verify.iter().for_each(|verify| self.watch.say(LogLevel::Info, format_args!("{verify}")));
        let (eval_every, save_every) = (self.plan.settings.run.eval_every, self.plan.settings.checkpoint.save_every);
        let due = |every: Option<u64>, step: u64| every.is_some_and(|n| n > 0 && step.is_multiple_of(n));
        while self.done < self.plan.steps() {
            if let Some(signal) = self.step().map_err(|e| at_step(self.done + 1, e))? {
                self.watch.say(LogLevel::Info, format_args!("signal {signal}: stopping after step {}", self.done));
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
        if !self.has_something_new() {
            let skipped = self.done - self.before.0;
            return Err(Error::Run(format!(
                "all {skipped} steps were skipped, since their gradients were not finite: the model has learned nothing and is \
                 not saved. Lower --lr, check the data, or train longer where a loss scale is still falling"
            )));
        }
        // First what must not be lost.
        self.save(false)?;
        self.trace_up_to(self.done + 1)?;
        self.evaluate()?;
        let (dir, dtype) = (&self.plan.settings.checkpoint.save_hf, self.plan.save.dtype);
        let exported =
            dir.as_ref().map(|dir| self.checkpointer.save_hf(dir, dtype, self.engine.state().0)).transpose()?;
        self.watch.trained(exported.as_ref());
        self.tracer.phase(self.done, "sample");
        self.sample()?;
        self.tracer.end(self.mesh)?;
        self.watch.end(self.done)
    }

    /// Step `next` is the next: those before it are traced, where they were to be.
    fn trace_up_to(&mut self, next: u64) -> Result<()> {
        if self.tracer.is_waiting() {
            let report = self.tracer.next(next, self.mesh, &**self.engine.device())?;
            self.watch.traced(report)?;
        }
        Ok(())
    }

    /// One optimizer step; or, where a rank was asked to stop, nothing but the signal that asked.
    fn step(&mut self) -> Result<Option<i32>> {
        let number = self.done + 1;
        self.trace_up_to(number)?;
        let all = match self.agreed.take() {
            Some(all) => all,
            None => {
                let mine = self.prepare(number)?;
                self.agreement.reach(&**self.engine.device(), mine)?
            }
        };
        if all.stop.is_some() {
            return Ok(all.stop);
        }
        if all.saved {
            self.checkpointer.advance()?;
        }
        let saved = self.checkpointer.published()?;
        self.watch.checkpoint(saved)?;

        std::mem::swap(&mut self.data, &mut self.next);
        let (lr, data_time_s) = (self.plan.schedule.lr(number), self.next_time_s);
        let step = Step { number, lr, tokens: all.tokens };
        let joint = self.graphs.filter(|_| self.plan.static_shapes());
        joint.map_or(Ok(()), |graphs| graphs.join_in(true))?;
        self.engine.begin_step(&self.data.batches, &step)?;
        joint.map_or(Ok(()), |graphs| graphs.join_in(false))?;
        // While a GPU works: the next step's data, and what ranks must know of each other before it.
        let report = if number < self.plan.steps() {
            let mine = self.prepare(number + 1)?;
            self.agreement.ask(&**self.engine.device(), mine)?;
            let report = self.engine.end_step(&step, Some(self.agreement.answer()))?;
            self.agreed = Some(self.agreement.reached()?);
            report
        } else {
            self.engine.end_step(&step, None)?
        };
        // No loss scale helps a loss that is not finite itself.
        let bad = report.stuck || !report.loss.is_finite();
        self.bad_in_a_row = if bad { self.bad_in_a_row + 1 } else { 0 };

        self.tracer.done(number);
        self.watch.step(&StepDone {
            number,
            lr,
            report: &report,
            data: &self.data,
            data_time_s,
            trained_tokens: all.tokens,
            held_bytes: all.held_bytes,
            updates: self.engine.updates(),
        })?;
        let most = self.plan.settings.faults.max_bad_steps.unwrap_or(0);
        if self.bad_in_a_row > most {
            return Err(Error::Run(format!(
                "loss {:.4}, gradient norm {}: step {} in a row that is not finite, where --max-bad-steps is {most}; lower --lr, look \
                 at the data of these steps, or resume from a checkpoint before them",
                report.loss, report.grad_norm, self.bad_in_a_row
            )));
        }
        if let Some(verify) = &mut self.verify {
            let (store, optimizer) = self.engine.state();
            verify.after(number, store, optimizer)?;
        }
        self.mesh.member.set_timeout(self.plan.comm_timeout); // no rank is starting any more
        self.done = number;
        self.samples = self.data.position;
        self.trained_tokens += all.tokens;
        Ok(None)
    }

    /// Takes the micro-batches of step `number` from the loader; what this rank has to say before it.
    fn prepare(&mut self, number: u64) -> Result<Vote> {
        let filling = Instant::now();
        let timeline = self.tracer.timeline();
        timeline.host(Lane::Data, "wait for micro-batches", Some(number), || self.prefetch.next(&mut self.next))?;
        self.next_time_s = filling.elapsed().as_secs_f64();
        let tokens = self.next.loss_tokens();
        if self.plan.fills_up() {
            let (rows, len) = (self.plan.loader(0)?.batch_size, self.plan.dataset.max_len());
            self.next.batches.iter_mut().for_each(|batch| batch.fill_up(rows * len, len));
        }
        let schedule = self.flight.schedule() ^ self.graphs.map_or(0, Graphs::decided);
        let (stop, saved) = (self.stops.pending(), self.checkpointer.ended());
        Ok(Vote { tokens, stop, held_bytes: self.watch.held_bytes(), saved, schedule })
    }

    /// The held-out rows, once.
    fn evaluate(&mut self) -> Result<()> {
        let Some(loader) = &mut self.held_out else { return Ok(()) };
        let started = Instant::now();
        self.tracer.phase(self.done, "evaluate");
        loader.seek(0);
        let options = self.plan.loader(0)?;
        let rows = loader.rows_per_epoch();
        let (mut loss, mut tokens) = (0.0, 0);
        for _ in 0..rows.div_ceil(options.global_batch()) {
            loader.next(&mut self.held_out_data);
            let (sum, count) = self.engine.evaluate(&self.held_out_data.batches).map_err(|e| at_step(self.done, e))?;
            loss += sum;
            tokens += count;
        }
        self.watch.evaluated(self.done, loss, tokens, started.elapsed().as_secs_f64())
    }

    /// Not every step of this start was skipped.
    fn has_something_new(&self) -> bool {
        let (done, updates) = self.before;
        self.done == done || self.engine.updates() > updates
    }

    /// A checkpoint of the last step, unless there is one, nobody asked or every step was skipped. `behind`: written while
    /// training goes on; otherwise nothing is under way any more when this returns.
    fn save(&mut self, behind: bool) -> Result<()> {
        let Some(dir) = &self.plan.settings.checkpoint.ckpt_dir else { return Ok(()) };
        if !self.has_something_new() {
            let why = "every step so far was skipped";
            self.watch.say(LogLevel::Warn, format_args!("no checkpoint after step {}: {why}", self.done));
            return Ok(());
        }
        let keep = self.plan.settings.checkpoint.keep.filter(|&n| n > 0).unwrap_or(usize::MAX);
        let failed = |e| at_step(self.done, e);
        let earlier = if behind { None } else { self.checkpointer.settle().map_err(failed)? };
        let mut saved = None;
        self.tracer.phase(self.done, "save");
        if self.saved != Some(self.done) {
            // What was agreed on of a save is of the one before, which ends now.
            self.agreed.iter_mut().for_each(|agreed| agreed.saved = false);
            let state = TrainerState {
                scaler: self.engine.scaler().map(|scaler| scaler.state()),
                ..self.plan.trainer_state(self.done, self.samples, self.trained_tokens)
            };
            let (store, optimizer) = self.engine.state();
            let checkpointer = &mut self.checkpointer;
            let save = || match behind {
                true => checkpointer.save_async(dir, keep, store, optimizer, &state),
                false => checkpointer.save(dir, keep, store, optimizer, &state).map(Some),
            };
            let what = if behind { "copy" } else { "save" };
            saved = self.tracer.timeline().host(Lane::Checkpoint, what, Some(self.done), save).map_err(failed)?;
            self.saved = Some(self.done);
        }
        self.watch.checkpoint(earlier)?;
        self.watch.checkpoint(saved)?;
        self.watch.restart_clock();
        Ok(())
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
            // No failure of the run, and none at all where nobody reads.
            let failed =
                std::io::stdout().write_all(sample.as_bytes()).err().filter(|e| e.kind() != ErrorKind::BrokenPipe);
            failed.iter().for_each(|e| self.watch.say(LogLevel::Warn, format_args!("the sample is lost: {e}")));
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
