//! What the evaluations of a run have come to: which step had the lowest loss, and how long ago. Kept in
//! `trainer_state.json`, so that a resumed run compares with what was before it. Never evaluates.
use serde::{Deserialize, Serialize};

/// Kept where the best checkpoint or early stopping is asked for.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Evaluations {
    /// What is evaluated: losses over other rows do not compare.
    pub rows: String,
    /// Step and loss of the newest evaluation; 0 before the first, null where the loss is not finite.
    pub step: u64,
    pub loss: Option<f64>,
    /// Of the lowest loss; 0 and null before the first.
    pub best_step: u64,
    pub best_loss: Option<f64>,
    /// The checkpoint of `best_step` is kept.
    pub best_saved: bool,
    /// Evaluations in a row without a lower loss.
    pub since_best: u64,
}

impl Evaluations {
    pub fn over(rows: String) -> Evaluations {
        Evaluations { rows, ..Evaluations::default() }
    }

    /// Counts the evaluation after `step`, whose checkpoint will be kept where it is the best and `saves`. A step that
    /// was the newest already is not counted again: a run that has ended evaluates once more when it is resumed.
    pub fn count(&mut self, step: u64, loss: f64, saves: bool) {
        if step == self.step {
            return;
        }
        (self.step, self.loss) = (step, Some(loss).filter(|loss| loss.is_finite()));
        match self.loss.filter(|&loss| self.best_loss.is_none_or(|best| loss < best)) {
            Some(loss) => {
                (self.best_step, self.best_loss) = (step, Some(loss));
                (self.best_saved, self.since_best) = (saves, 0);
            }
            None => self.since_best += 1,
        }
    }
    /// The newest evaluation has the lowest loss.
    pub fn newest_is_best(&self) -> bool {
        self.step > 0 && self.step == self.best_step
    }
    /// Step of the best checkpoint.
    pub fn best_checkpoint(&self) -> Option<u64> {
        (self.best_saved && self.best_step > 0).then_some(self.best_step)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_lower_finite_loss_is_better_and_each_step_counts_once() {
        let mut e = Evaluations::over("rows".into());
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
}
