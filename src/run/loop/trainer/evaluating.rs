//! Evaluations of the model in training, and what becomes of them: the best step, its checkpoint, and an early end.
//! Never trains.
use super::super::evaluation::PromptSamples;
use super::{Trainer, at_step};
use crate::base::Result;
use crate::ckpt;
use crate::run::plan::evaluations;
use crate::run::settings::LogLevel;
use std::time::Instant;

impl Trainer<'_> {
    /// With --eval-on-start, evaluates the model that the run starts from.
    pub(super) fn evaluate_first(&mut self) -> Result<()> {
        if self.rank.plan.settings.run.eval_on_start == Some(true) && self.position.step == 0 {
            self.evaluate_rows()?;
            self.sample_prompts()?;
        }
        Ok(())
    }

    /// Evaluates the held-out rows and samples the prompts, at most once per step, and returns whether the model is the
    /// best so far.
    pub(super) fn evaluate(&mut self) -> Result<bool> {
        let step = self.position.step;
        if self.evaluated.is_some_and(|(evaluated, _)| evaluated == step) {
            return Ok(false);
        }
        self.evaluated = Some((step, None));
        let by_loss = self.evaluate_rows()?;
        Ok(self.sample_prompts()? || by_loss)
    }

    /// Whether the held-out loss is the lowest so far. All ranks have the same sum, so they decide alike.
    fn evaluate_rows(&mut self) -> Result<bool> {
        let step = self.position.step;
        let Some(held_out) = self.held_out.as_mut() else { return Ok(false) };
        let started = Instant::now();
        self.tracer.phase(step, "evaluate");
        let evaluated = held_out.evaluate(&mut self.engine).map_err(|e| at_step(step, e))?;
        let loss = Some(evaluated.loss()).filter(|_| evaluated.count > 0);
        self.evaluated = Some((step, loss));
        let is_best = self.counted(loss);
        self.watch.evaluated(step, &evaluated, started.elapsed().as_secs_f64(), is_best);
        Ok(is_best == Some(true))
    }

    /// Records the loss or the mean reward of an evaluation, if evaluations are compared. Returns whether it is the
    /// best of those after a step.
    fn counted(&mut self, value: Option<f64>) -> Option<bool> {
        let (learned, plan, step) = (self.has_learned(), self.rank.plan, self.position.step);
        let counts = learned && evaluations::are_counted(&plan.settings);
        let (evaluations, value) = self.evaluations.as_mut().filter(|_| counts).zip(value)?;
        if step == 0 {
            evaluations.before = Some(value).filter(|value| value.is_finite());
            return None;
        }
        let is_new = evaluations.step != step;
        evaluations.count(step, value, plan.saves_best().is_some());
        let is_best = evaluations.newest_is_best();
        if is_new && is_best && plan.saves_best().is_some() {
            self.saved = None; // a checkpoint of this step from an earlier start does not record this
        }
        Some(is_best)
    }

    /// Continues the prompts of --sample-prompts, or those of --eval-dataset, and judges the texts of these. Returns
    /// whether their mean reward is the highest so far.
    fn sample_prompts(&mut self) -> Result<bool> {
        let (step, Some(prompts)) = (self.position.step, &mut self.prompts) else { return Ok(false) };
        let started = Instant::now();
        self.tracer.phase(step, "sample");
        let stops = &mut self.stops;
        let sampled = prompts.sample(&mut self.engine, step, &mut || stops.pending()).map_err(|e| at_step(step, e))?;
        let PromptSamples { texts, rewards, repeated } = match sampled {
            Ok(sampled) => sampled,
            Err(e) => return self.stop_unjudged(step, e).map(|()| false),
        };
        let seconds = started.elapsed().as_secs_f64();
        self.watch.repeated(step, &repeated);
        let mut is_best = None;
        if let Some(means) = rewards {
            is_best = self.counted(Some(means.reward_mean));
            self.watch.rewarded(step, &means, texts.len(), seconds, is_best);
        }
        self.samples = texts;
        self.watch.sampled(step, &self.samples, seconds);
        Ok(is_best == Some(true))
    }

    /// `--patience` is over.
    pub(super) fn is_stopped(&self) -> bool {
        evaluations::is_patience_over(&self.rank.plan.settings, self.evaluations.as_ref())
    }

    /// With --load-best, the model of the best evaluation takes the place of the last one. Collective.
    pub(super) fn load_best(&mut self) -> Result<()> {
        let best = self.evaluations.as_ref().and_then(|e| Some((e.best_checkpoint()?, e.measure())));
        let (Some(dir), Some((best, measure))) = (self.rank.plan.loads_best(), best) else { return Ok(()) };
        if best != self.position.step {
            let (store, optimizer) = self.engine.state();
            self.checkpointer.load(&ckpt::of_step(dir, best), store, optimizer)?;
            self.watch.say(
                LogLevel::Info,
                format_args!("best  step {best} had the best {measure} of all steps: it is loaded"),
            );
        }
        Ok(())
    }

    /// Says so if the model was better before the first step than after any.
    pub(super) fn say_if_only_worse(&self) {
        if let Some((evaluations, [before, best])) = self.evaluations.as_ref().and_then(|e| Some((e, e.only_worse()?)))
        {
            let what = format!("the model before training had a better {} than any step", evaluations.measure());
            self.watch.say(LogLevel::Warn, format_args!("best  {what}: {before:.4}, and {best:.4}"));
        }
    }
}
