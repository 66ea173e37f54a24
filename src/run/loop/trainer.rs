//! The training loop of one rank: next batch, agree, train step, report. Never parses and never validates.
mod evaluating; // what evaluations decide
mod finishing; // what comes after the last step

use super::agree::{Agreement, Vote};
use super::context::RankContext;
use super::evaluation::{self, HeldOut, PromptSampler};
use super::load::{self, LoadedRun};
use super::reference;
use super::stops::Stops;
use super::tune;
use super::verify::Verify;
use crate::base::timeline::Lane;
use crate::base::{Error, Result};
use crate::ckpt::{self, Checkpointer, Evaluations, TrainerState};
use crate::comm::Axis;
use crate::data::{Epochs, Fetched, Loader, Prefetch, PrefetchOptions, StepData};
use crate::device::gpu::graphs::Graphs;
use crate::engine::{Engine, Step, StepCounts, StepReport};
use crate::run::rollouts::sampling::StepSampler;
use crate::run::settings::LogLevel;
use crate::run::settings::value::StepInterval;
use crate::run::trace::Tracer;
use crate::run::watch::sol::SpeedOfLight;
use crate::run::watch::{PromptSample, Reporter, StepDone};
use std::io::{ErrorKind, Write};

/// The run's progress.
#[derive(Clone, Copy, Default)]
struct Position {
    /// Steps done; samples and loss tokens consumed by all ranks.
    step: u64,
    samples: u64,
    trained_tokens: u64,
    /// Steps that changed weights.
    updates: u64,
}

pub struct Trainer<'a> {
    rank: &'a RankContext<'a>,
    engine: Engine,
    batches: Prefetch,
    epochs: Epochs,
    /// Draws what the run learns from.
    sampler: Option<StepSampler>,
    agreement: Agreement,
    stops: Stops,
    held_out: Option<HeldOut>,
    prompts: Option<PromptSampler<'a>>,
    /// What the last evaluation made of the prompts.
    samples: Vec<PromptSample>,
    /// Evaluations of the run so far, including those of earlier starts.
    evaluations: Option<Evaluations>,
    /// Step of this start's last evaluation, and the loss of its rows, if it had any.
    evaluated: Option<(u64, Option<f64>)>,
    checkpointer: Checkpointer,
    verify: Option<Verify>,
    tracer: &'a mut Tracer,
    watch: Reporter<'a>,
    /// The current position, and the one this start began at.
    position: Position,
    began: Position,
    /// Step of the newest checkpoint of this run.
    saved: Option<u64>,
    bad_in_a_row: u32,
}

impl<'a> Trainer<'a> {
    /// Builds the engine, loads weights or a checkpoint, and starts prefetching data. Collective.
    pub fn new(rank: &'a RankContext<'a>, tracer: &'a mut Tracer, stops: Stops) -> Result<Trainer<'a>> {
        let RankContext { plan, mesh, log, .. } = *rank;
        let compared = reference::logps(rank, &plan.dataset)?;
        let evaluated = plan.eval.as_ref().map(|eval| reference::logps(rank, eval)).transpose()?.flatten();
        // Measures with buffers of its own, which are free again before the engine allocates.
        let light = SpeedOfLight::new(plan, &*rank.device, rank.gpu.as_deref(), mesh)?;
        let mut engine = Engine::unfilled(rank.device.clone(), mesh, &plan.engine)?;
        let mut loader =
            Loader::new(plan.dataset.clone(), plan.loader(mesh.group(Axis::Dp).rank())?)?.compare(compared);
        let held_out = HeldOut::of(plan, &loader, mesh.group(Axis::Dp).rank(), evaluated)?;

        tracer.phase(0, "load");
        let LoadedRun { mut checkpointer, resumed, seconds } =
            load::load(plan, rank.device.clone(), mesh, &mut engine, log)?;
        let mut position = Position { updates: engine.updates(), ..Position::default() };
        if let Some(state) = resumed.as_ref().map(|resume| &resume.state) {
            (position.step, position.samples) = (state.step, state.samples_consumed);
            position.trained_tokens = state.trained_tokens;
        }
        let evaluations = plan.evaluations(resumed.as_ref());
        if let (Some(best), Some(dir)) =
            (evaluations.as_ref().and_then(Evaluations::best_checkpoint), plan.saves_best())
            && mesh.rank() == 0
        {
            ckpt::mark_best(dir, best)?;
        }
        loader.seek(position.samples);
        let epochs = loader.epochs();
        let mut sampler = StepSampler::new(plan, mesh)?;
        let samples = resumed.as_ref().and_then(|resume| resume.state.rollouts.as_ref());
        sampler.iter_mut().try_for_each(|sampler| sampler.resume(position.step, samples))?;
        tracer.attach(&mut engine, &mut checkpointer)?;

        let mut watch = Reporter::new(plan, log, rank.device.clone(), rank.gpu.as_deref(), mesh, light, position.step)?;
        let every = plan.settings.faults.verify_every.filter(|&every| every > 0);
        let verify = |every| Verify::new(rank.device.clone(), mesh, engine.state().0, every);
        let verify = every.map(verify).transpose()?;
        let agreement = Agreement::new(mesh)?;
        let fill_up = match plan.fills_up() {
            true => Some((plan.loader(0)?.batch_size, plan.dataset.max_len())),
            false => None,
        };
        let timeline = tracer.timeline().clone();
        let batches = Prefetch::start(loader, PrefetchOptions { first_step: position.step + 1, fill_up, timeline })?;
        watch.begin(resumed.as_ref(), seconds)?;
        verify.iter().for_each(|verify| watch.say(LogLevel::Info, format_args!("{verify}")));
        let saved = resumed.map(|_| position.step);
        Ok(Trainer {
            rank,
            engine,
            batches,
            epochs,
            sampler,
            agreement,
            stops,
            held_out,
            prompts: PromptSampler::of(plan)?,
            samples: Vec::new(),
            evaluations,
            evaluated: None,
            checkpointer,
            verify,
            tracer,
            watch,
            position,
            began: position,
            saved,
            bad_in_a_row: 0,
        })
    }

    /// Runs all steps, then the last checkpoint, evaluation, export and sample.
    pub fn run(&mut self) -> Result<()> {
        if self.position.step < self.rank.plan.steps() {
            tune::tune(self.rank, &self.batches.peek()?.data.batches)?;
        }
        self.evaluate_first()?;
        self.trace_up_to(self.position.step + 1)?;
        while self.position.step < self.rank.plan.steps() && !self.is_stopped() {
            let next = self.position.step + 1;
            self.step().map_err(|e| at_step(next, e))?;
        }
        self.finish()
    }

    fn step(&mut self) -> Result<()> {
        let mut batch = self.batches.next_step()?;
        if let Some(sampler) = &mut self.sampler {
            self.tracer.phase(batch.step, "sample");
            let stops = &mut self.stops;
            if let Err(e) = sampler.sample(&mut self.engine, &mut batch, &mut || stops.pending())? {
                return self.stop_unjudged(batch.step, e);
            }
            self.watch.repeated(batch.step, &sampler.take_repeated());
        }
        let (step, agreed) = self.agree(&batch)?;
        let report = self.train_step(&batch, &step)?;
        self.report(batch, &step, &report, &agreed)
    }

    /// Saves what was learned before the samples of `step` that have no reward, and returns why. Collective.
    fn stop_unjudged(&mut self, step: u64, why: Error) -> Result<()> {
        let done = self.position.step;
        if let Error::Signal(signal) = why {
            self.watch.say(LogLevel::Info, format_args!("signal {signal}: stopping after step {done}"));
        }
        if done > self.began.step {
            self.save(false)?;
        }
        Err(match at_step(step, why) {
            Error::Run(text) => Error::Agreed(text),
            other => other,
        })
    }

    /// The vote of all ranks on the step of `batch`. Returns [`Error::Signal`], after saving a checkpoint, if any rank
    /// is to stop.
    fn agree(&mut self, batch: &Fetched) -> Result<(Step, Vote)> {
        let tokens = batch.data.loss_tokens();
        let device = &*self.rank.device;
        let mine = || vote(tokens, self.rank, &mut self.stops, &self.checkpointer, &self.watch);
        let agreed = self.agreement.next(device, mine)?;
        if let Some(signal) = agreed.stop {
            let done = self.position.step;
            self.watch.say(LogLevel::Info, format_args!("signal {signal}: stopping after step {done}"));
            self.save(false)?;
            return Err(Error::Signal(signal));
        }
        if agreed.saved {
            self.checkpointer.advance()?;
        }
        let published = self.checkpointer.published()?;
        self.watch.checkpoint(published);
        let lr = self.rank.plan.schedule.lr(batch.step);
        let StepData { samples: rows, sequences, .. } = batch.data;
        let tokens = self.rank.plan.engine.objective.divisor(&StepCounts { rows, sequences, tokens: agreed.tokens });
        Ok((Step { number: batch.step, lr, tokens }, agreed))
    }

    /// One optimizer step. While the device works on it, the ranks vote on the next one.
    fn train_step(&mut self, batch: &Fetched, step: &Step) -> Result<StepReport> {
        let device = &*self.rank.device;
        let graphs = self.rank.graphs.as_deref().filter(|_| self.rank.plan.static_shapes());
        graphs.map_or(Ok(()), |graphs| graphs.join_in(true))?;
        self.engine.begin_step(&batch.data.batches, step)?;
        graphs.map_or(Ok(()), |graphs| graphs.join_in(false))?;
        // What the next step has is not known before it is sampled.
        if step.number == self.rank.plan.steps() || self.sampler.is_some() {
            return self.engine.end_step(step, None);
        }
        let tokens = self.batches.peek()?.data.loss_tokens();
        let mine = vote(tokens, self.rank, &mut self.stops, &self.checkpointer, &self.watch);
        self.agreement.start(device, mine)?;
        let report = self.engine.end_step(step, Some(self.agreement.answer()))?;
        self.agreement.settle()?;
        Ok(report)
    }

    /// Reports a step, and does what is due after it: verification, evaluation, checkpoint, trace.
    fn report(&mut self, batch: Fetched, step: &Step, report: &StepReport, agreed: &Vote) -> Result<()> {
        let plan = self.rank.plan;
        let data = batch.data;
        self.tracer.done(step.number);
        self.watch.step(&StepDone {
            number: step.number,
            lr: step.lr,
            report,
            data: &data,
            data_time_s: self.batches.take_waited().as_secs_f64(),
            passes: self.engine.pass_times(),
            trained_tokens: agreed.tokens,
            bytes: agreed.bytes,
            updates: self.engine.updates(),
            sampled: self.sampler.as_ref().and_then(StepSampler::means),
        })?;
        self.check(step.number, report)?;
        self.rank.mesh.member.set_timeout(plan.ranks.comm_timeout); // all ranks have started by now
        let Position { trained_tokens, samples, .. } = self.position;
        self.position = Position {
            step: step.number,
            samples: data.position,
            trained_tokens: trained_tokens + agreed.tokens,
            updates: self.engine.updates(),
        };
        self.batches.give_back(data);
        if step.number < plan.steps() {
            let (epochs, samples) = (self.epochs, samples..self.position.samples);
            let due = |every: Option<StepInterval>| match every {
                Some(StepInterval::Epoch(parts)) => epochs.end(parts, samples.clone()),
                Some(StepInterval::Steps(n)) => n > 0 && step.number.is_multiple_of(n),
                Some(StepInterval::Share(_)) | None => false, // the plan has made steps of a share
            };
            let is_best = due(plan.settings.run.eval_every) && self.evaluate()?;
            if self.is_stopped() {
                return Ok(());
            }
            if due(plan.settings.checkpoint.save_every) || is_best && plan.saves_best().is_some() {
                self.save_good(plan.save.background)?;
            }
            self.trace_up_to(step.number + 1)?;
        }
        Ok(())
    }

    /// Too many consecutive non-finite steps end the run; so do replicas that differ.
    fn check(&mut self, step: u64, report: &StepReport) -> Result<()> {
        // A lower loss scale does not help if the loss itself is not finite.
        let bad = report.stuck || !report.loss.is_finite();
        self.bad_in_a_row = if bad { self.bad_in_a_row + 1 } else { 0 };
        let most = self.rank.plan.settings.faults.max_bad_steps.unwrap_or(0);
        if self.bad_in_a_row > most {
            return Err(Error::Run(format!(
                "loss {:.4}, gradient norm {}: {} consecutive non-finite steps, more than --max-bad-steps {most}. \
                Lower --lr, check the \
                 data of these steps, or resume from an earlier checkpoint",
                report.loss, report.grad_norm, self.bad_in_a_row
            )));
        }
        if let Some(verify) = &mut self.verify {
            let (store, optimizer) = self.engine.state();
            verify.after(step, store, optimizer)?;
        }
        Ok(())
    }

    /// Collects the trace of the steps before `next`, if they are traced.
    fn trace_up_to(&mut self, next: u64) -> Result<()> {
        if self.tracer.is_waiting() {
            match self.tracer.next(next, self.rank.mesh, &*self.rank.device) {
                Ok(report) => self.watch.traced(report),
                // The ranks have met again since.
                Err(e @ Error::Io { .. }) => self.watch.unrecorded(e),
                Err(e) => return Err(at_step(next, e)),
            }
        }
        Ok(())
    }

    /// A step of this start updated weights, or there was no step.
    fn has_learned(&self) -> bool {
        self.position.step == self.began.step || self.position.updates > self.began.updates
    }

    /// Like [`Trainer::save`], but not after a step whose loss was not finite: a model that is lost would take the
    /// place of checkpoints that are not.
    fn save_good(&mut self, in_background: bool) -> Result<()> {
        if self.bad_in_a_row == 0 || !self.has_learned() {
            return self.save(in_background);
        }
        let (step, why) = (self.position.step, "the gradient of this step is not finite");
        self.watch.say(LogLevel::Warn, format_args!("no checkpoint after step {step}: {why}"));
        Ok(())
    }

    /// Saves a checkpoint of the last step, unless there is one, checkpoints are off, or every step was skipped. With
    /// `in_background` returns before it is written; otherwise no save is in flight on return.
    fn save(&mut self, in_background: bool) -> Result<()> {
        let (plan, step) = (self.rank.plan, self.position.step);
        let Some(dir) = &plan.settings.checkpoint.ckpt_dir else { return Ok(()) };
        if !self.has_learned() {
            let why = "every step so far was skipped";
            self.watch.say(LogLevel::Warn, format_args!("no checkpoint after step {step}: {why}"));
            return Ok(());
        }
        // A model that may be lost takes no other's place.
        let keep = plan.settings.checkpoint.keep.filter(|&n| n > 0 && self.bad_in_a_row == 0).unwrap_or(usize::MAX);
        let failed = |e| at_step(step, e);
        let earlier = if in_background { None } else { self.checkpointer.settle().map_err(failed)? };
        let mut saved = None;
        self.tracer.phase(step, "save");
        if self.saved != Some(step) {
            // The vote in flight may report the previous save, which ends now.
            self.agreement.forget_save();
            let Position { samples, trained_tokens, .. } = self.position;
            let (device, mesh) = (&*self.rank.device, &self.rank.mesh);
            let rollouts = self.sampler.as_ref().map(|sampler| sampler.state(device, mesh, step)).transpose()?;
            let state = TrainerState {
                rollouts: rollouts.flatten(),
                scaler: self.engine.scaler().map(|scaler| scaler.state()),
                evaluations: self.evaluations.clone(),
                ..plan.trainer_state(step, samples, trained_tokens)
            };
            let (store, optimizer) = self.engine.state();
            let checkpointer = &mut self.checkpointer;
            let save = || match in_background {
                true => checkpointer.save_async(dir, keep, store, optimizer, &state),
                false => checkpointer.save(dir, keep, store, optimizer, &state).map(Some),
            };
            let what = if in_background { "copy" } else { "save" };
            saved = self.tracer.timeline().host(Lane::Checkpoint, what, Some(step), save).map_err(failed)?;
            self.saved = Some(step);
        }
        self.watch.checkpoint(earlier);
        self.watch.checkpoint(saved);
        self.watch.restart_clock();
        Ok(())
    }

    /// Prints a sample from the trained model on stdout. All ranks compute, rank 0 prints.
    fn sample(&mut self) -> Result<()> {
        let sample = evaluation::sample(self.rank.plan, &mut self.engine, &self.samples)?;
        if let Some(sample) = sample.filter(|_| self.rank.mesh.rank() == 0) {
            // Failing to print does not fail the run, and a closed pipe is not a failure.
            let failed = std::io::stdout().write_all(sample.as_bytes()).err();
            let failed = failed.filter(|e| e.kind() != ErrorKind::BrokenPipe);
            failed.iter().for_each(|e| self.watch.say(LogLevel::Warn, format_args!("cannot print the sample: {e}")));
        }
        Ok(())
    }
}

/// This rank's vote before a step of `tokens` loss tokens.
fn vote(tokens: u64, rank: &RankContext, stops: &mut Stops, checkpointer: &Checkpointer, watch: &Reporter) -> Vote {
    let schedule = rank.flight.schedule() ^ rank.graphs.as_deref().map_or(0, Graphs::decided);
    Vote { tokens, stop: stops.pending(), bytes: watch.bytes(), saved: checkpointer.ended(), schedule }
}

/// Prefixes the error with the step, once, so that its message has rank, step and operation.
fn at_step(step: u64, e: Error) -> Error {
    match e {
        Error::Input(_) | Error::Signal(_) | Error::Agreed(_) => e,
        Error::Run(text) if text.starts_with("step ") => Error::Run(text),
        e => Error::Run(format!("step {step}: {e}")),
    }
}
