//! The history of a run's evaluations, by loss or by reward: the best step, and how long ago it was. Stored in
//! `trainer_state.json`, so that a resumed run continues it. Never evaluates.
use serde::{Deserialize, Serialize};

/// Kept with `save_on_best` or early stopping.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Evaluations {
    /// Identifies the evaluated rows: losses over other rows are not comparable.
    pub rows: String,
    /// They are compared by their mean rewards, which stand where losses do: the highest is the best.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub rewards: bool,
    /// Step and loss of the newest evaluation; 0 before the first, null if the loss is not finite.
    pub step: u64,
    pub loss: Option<f64>,
    /// Step and loss of the best evaluation; 0 and null before the first.
    pub best_step: u64,
    pub best_loss: Option<f64>,
    /// The checkpoint of `best_step` was saved.
    pub best_saved: bool,
    /// Consecutive evaluations without a better one.
    pub since_best: u64,
    /// The loss before the first step, which is no step's: it is never the best.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub before: Option<f64>,
}

impl Evaluations {
    pub fn over(rows: String, rewards: bool) -> Evaluations {
        Evaluations { rows, rewards, ..Evaluations::default() }
    }
    /// What is compared.
    pub fn measure(&self) -> &'static str {
        if self.rewards { "mean reward" } else { "evaluation loss" }
    }
    fn is_better(&self, a: f64, b: f64) -> bool {
        if self.rewards { a > b } else { a < b }
    }

    /// Records the evaluation after `step`; `saves`: its checkpoint will be kept if it is the best. A step that was
    /// already recorded is ignored, because a finished run evaluates again when it is resumed.
    pub fn count(&mut self, step: u64, loss: f64, saves: bool) {
        if step == self.step {
            return;
        }
        (self.step, self.loss) = (step, Some(loss).filter(|loss| loss.is_finite()));
        match self.loss.filter(|&loss| self.best_loss.is_none_or(|best| self.is_better(loss, best))) {
            Some(loss) => {
                (self.best_step, self.best_loss) = (step, Some(loss));
                (self.best_saved, self.since_best) = (saves, 0);
            }
            None => self.since_best += 1,
        }
    }
    /// The newest evaluation is the best.
    pub fn newest_is_best(&self) -> bool {
        self.step > 0 && self.step == self.best_step
    }
    /// What there was before the first step and the best since, if the former is better.
    pub fn only_worse(&self) -> Option<[f64; 2]> {
        let both = self.before.zip(self.best_loss);
        both.filter(|(before, best)| self.is_better(*before, *best)).map(|(before, best)| [before, best])
    }
    /// The step of the best checkpoint, if it was saved.
    pub fn best_checkpoint(&self) -> Option<u64> {
        (self.best_saved && self.best_step > 0).then_some(self.best_step)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_lower_finite_losses_are_better_and_each_step_counts_once() {
        let mut e = Evaluations::over("rows".into(), false);
        let mut seen = Vec::new();
        for (step, loss) in [(2, f64::NAN), (4, 3.0), (6, 3.0), (8, f64::INFINITY), (8, 1.0), (10, 2.0), (12, 2.5)] {
            e.count(step, loss, true);
            seen.push((e.newest_is_best(), e.best_checkpoint(), e.since_best));
        }
        let expected = [
            (false, None, 1),
            (true, Some(4), 0),
            (false, Some(4), 1),
            (false, Some(4), 2),
            (false, Some(4), 2),
            (true, Some(10), 0),
            (false, Some(10), 1),
        ];
        assert_eq!(seen, expected);
        let text = serde_json::to_string(&e).unwrap();
        assert_eq!(serde_json::from_str::<Evaluations>(&text).unwrap(), e);
        assert!(!Evaluations::default().newest_is_best());
    }

    #[test]
    fn higher_rewards_are_better() {
        let mut e = Evaluations { before: Some(0.75), ..Evaluations::over("prompts".into(), true) };
        let mut best = |step, reward| {
            e.count(step, reward, true);
            (e.best_checkpoint(), e.only_worse().is_some())
        };
        assert_eq!(
            [best(1, 0.5), best(2, 0.25), best(3, 0.7), best(4, 0.8)],
            [(Some(1), true), (Some(1), true), (Some(3), true), (Some(4), false)]
        );
    }
}
