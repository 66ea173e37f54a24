//! Signs that a run goes wrong though no step fails. Never changes a run: it says each sign once.
use crate::run::settings::tasks::RunTask;

/// Steps in a row without a gradient, after which nothing is learned.
const STUCK: u32 = 20;
/// A gradient norm below it is none.
const NO_GRADIENT: f64 = 1e-3;
/// Steps whose mean loss is compared with that of the first ones.
const WINDOW: usize = 10;
/// A loss this many times the first ones', and this much above them, is far above.
const RISEN: (f64, f64) = (1.5, 0.5);
/// A learning rate this many times the task's default, or this small a part of it, is far from it.
const FAR: f64 = 10.0;

/// Log-probabilities of the policy that sampled them differ by rounding alone: by less than this, in any engine.
const OTHER_POLICY: f64 = 1.0;

#[derive(Clone, Copy, PartialEq, Eq)]
enum Sign {
    Rate,
    Policy,
    Uniform,
    Risen,
}

/// Watches the losses of a run.
pub struct Health {
    /// The loss of a uniform guess.
    uniform: f64,
    /// Steps in a row at that loss without a gradient.
    stuck: u32,
    /// Sum of the first losses, at most [`WINDOW`].
    first: f64,
    last: [f64; WINDOW],
    /// Finite losses so far.
    steps: usize,
    said: Vec<(Sign, String)>,
}

impl Health {
    pub fn new(uniform: f64) -> Health {
        Health { uniform, stuck: 0, first: 0.0, last: [0.0; WINDOW], steps: 0, said: Vec::new() }
    }

    /// What was said.
    pub fn warnings(&self) -> Vec<&str> {
        self.said.iter().map(|(_, text)| &text[..]).collect()
    }

    /// Compares the peak learning rate with the task's default.
    pub fn rate(&mut self, task: &RunTask, lr: f64) -> Option<&str> {
        let times = lr / task.lr;
        let far = match times {
            _ if times > FAR => "a pretrained model is damaged by large steps",
            _ if lr == 0.0 => return self.say(Sign::Rate, || "lr is 0: nothing is trained".to_string()),
            _ if times < 1.0 / FAR => "such small steps teach little",
            _ => return None,
        };
        let text = || format!("lr {lr} is {times:.2} times the default of a {}, {}: {far}", task.name, task.lr);
        self.say(Sign::Rate, text)
    }

    /// Compares log-probabilities of recorded rollouts, at the first step, with this model's: the largest difference.
    pub fn recorded(&mut self, mismatch: f64) -> Option<&str> {
        let differs = mismatch > OTHER_POLICY;
        let text = || {
            format!(
                "log-probabilities in the rollouts differ by up to {mismatch:.2} from this model's: another model \
                 sampled them, or this one at another --temperature"
            )
        };
        if differs { self.say(Sign::Policy, text) } else { None }
    }

    /// A step was taken.
    pub fn step(&mut self, loss: f64, grad_norm: f64) -> Option<&str> {
        let uniform = self.uniform;
        let flat = (loss - uniform).abs() < 0.01 * uniform && grad_norm < NO_GRADIENT;
        self.stuck = if flat { self.stuck + 1 } else { 0 };
        if self.stuck == STUCK {
            return self.say(Sign::Uniform, || {
                format!(
                    "the loss has been that of a uniform guess ({uniform:.2}) for {STUCK} steps, with gradients near \
                     0: nothing is learned. Check the weights that the run started from"
                )
            });
        }
        if !loss.is_finite() {
            return None;
        }
        self.first += if self.steps < WINDOW { loss } else { 0.0 };
        self.last[self.steps % WINDOW] = loss;
        self.steps += 1;
        // A loss that rises at once is far above a guess, and not above its first steps.
        let began = (self.first / WINDOW as f64).min(self.uniform);
        let now = self.last.iter().sum::<f64>() / WINDOW as f64;
        if self.steps < 2 * WINDOW || now < began * RISEN.0 || now < began + RISEN.1 {
            return None;
        }
        self.say(Sign::Risen, || {
            format!(
                "the loss of the last {WINDOW} steps, {now:.2}, is far above {}, {began:.2}: lower the learning rate, or \
                 check the data",
                if began < uniform { format!("that of the first {WINDOW}") } else { "a uniform guess".into() }
            )
        })
    }

    /// Once for each sign.
    fn say(&mut self, sign: Sign, text: impl FnOnce() -> String) -> Option<&str> {
        if self.said.iter().any(|(said, _)| *said == sign) {
            return None;
        }
        self.said.push((sign, text()));
        self.said.last().map(|(_, text)| &text[..])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_uniform_guess_without_gradients_is_said_once() {
        let mut health = Health::new(5.5);
        (1..STUCK).for_each(|_| assert_eq!(health.step(5.51, 1e-6), None));
        assert!(health.step(5.51, 1e-6).unwrap().contains("uniform guess (5.50) for 20 steps"));
        (0..3 * STUCK).for_each(|_| assert_eq!(health.step(5.51, 1e-6), None));
        assert_eq!(health.warnings().len(), 1);
        let mut learning = Health::new(5.5);
        (0..3 * STUCK).for_each(|_| assert_eq!(learning.step(5.51, 0.3), None));
    }

    #[test]
    fn rollouts_of_another_policy_are_said_once() {
        let mut health = Health::new(5.5);
        assert_eq!(health.recorded(0.3), None);
        assert!(health.recorded(2.76).unwrap().contains("differ by up to 2.76"));
        assert_eq!(health.recorded(2.76), None);
    }

    #[test]
    fn a_loss_that_rises_far_above_its_start_is_said_once() {
        let mut health = Health::new(10.8);
        let losses = (0..100).map(|step| 3.0 + 0.05 * step as f64);
        let said: Vec<bool> = losses.map(|loss| health.step(loss, 1.0).is_some()).collect();
        assert_eq!(said.iter().filter(|said| **said).count(), 1);
        assert!(health.warnings()[0].contains("far above"), "{}", health.warnings()[0]);
        let mut falling = Health::new(10.8);
        (0..100).for_each(|step| assert_eq!(falling.step(5.0 - 0.01 * step as f64, 1.0), None));
        assert_eq!(falling.step(f64::NAN, f64::NAN), None);
        // Within the first steps.
        let mut burst = Health::new(5.5);
        let losses = [6.1, 419.0, 350.0, 280.0, 200.0].into_iter().chain((0..40).map(|step| 120.0 - step as f64));
        let said: Vec<bool> = losses.map(|loss| burst.step(loss, 1.0).is_some()).collect();
        assert_eq!(said.iter().filter(|said| **said).count(), 1);
        assert!(burst.warnings()[0].contains("far above a uniform guess, 5.50"), "{}", burst.warnings()[0]);
    }
}
