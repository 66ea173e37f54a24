//! What comes after the last step: the last checkpoint, evaluation, export and sample, and whether the run has
//! succeeded. Never trains.
use super::super::export;
use super::Trainer;
use crate::base::{Error, Result};
use crate::run::plan::evaluations;

impl Trainer<'_> {
    /// Saves and exports what was trained. Returns an error if the model is lost, or may be: the loss of the last step
    /// or evaluation is not finite. A model that is lost is not saved.
    pub(super) fn finish(&mut self) -> Result<()> {
        let plan = self.rank.plan;
        if !self.has_learned() {
            let skipped = self.position.step - self.began.step;
            return Err(Error::Run(format!(
                "all {skipped} steps were skipped because their gradients were not finite: the model is unchanged and \
                 is not saved. Lower --lr, check the data, or train longer if the loss scale is still falling"
            )));
        }
        // The last checkpoint records whether it is the best, and a lost model has none.
        if evaluations::are_counted(&plan.settings) || self.bad_in_a_row > 0 {
            self.evaluate()?;
        }
        if self.bad_in_a_row > 0 && self.final_loss().is_some_and(|loss| !loss.is_finite()) && !self.has_best() {
            return Err(self.unsound("is not saved"));
        }
        // The checkpoint comes before anything that could fail.
        self.save(false)?;
        self.trace_up_to(self.position.step + 1)?;
        self.evaluate()?;
        self.load_best()?;
        self.say_if_only_worse();
        let exported = export::trained(plan, self.rank.mesh, &mut self.checkpointer, self.engine.state().0)?;
        self.watch.trained(&exported);
        self.tracer.phase(self.position.step, "sample");
        self.sample()?;
        self.tracer.end(self.rank.mesh)?;
        let is_sound = self.final_loss().map_or(self.bad_in_a_row == 0, f64::is_finite);
        if !is_sound && !self.has_best() {
            return Err(self.unsound("may be lost, and was saved"));
        }
        let stopped = self.is_stopped() && self.position.step < plan.steps();
        self.watch.end(self.position.step, self.evaluations.as_ref().filter(|_| stopped))
    }

    /// The loss of the evaluation after the last step, if there was one.
    fn final_loss(&self) -> Option<f64> {
        self.evaluated.filter(|(step, _)| *step == self.position.step).and_then(|(_, loss)| loss)
    }

    /// With --load-best, a better model is what the run has made.
    fn has_best(&self) -> bool {
        let best = self.evaluations.as_ref().and_then(|evaluations| evaluations.best_checkpoint());
        self.rank.plan.loads_best().is_some() && best.is_some()
    }

    /// Why the run has failed, although all its steps are done. All ranks come to the same.
    fn unsound(&self, model: &str) -> Error {
        let skipped = match self.bad_in_a_row {
            0 => None,
            1 => Some("the last step was skipped because its gradient was not finite".to_string()),
            n => Some(format!("the last {n} steps were skipped because their gradients were not finite")),
        };
        let loss = self.final_loss().map(|loss| format!("the loss of the last evaluation is {loss:.4}"));
        let why: Vec<String> = skipped.into_iter().chain(loss).collect();
        Error::Agreed(format!(
            "step {}: {}: the model {model}. Lower --lr, check the data of these steps, or resume from an earlier \
             checkpoint",
            self.position.step,
            why.join(", and ")
        ))
    }
}
