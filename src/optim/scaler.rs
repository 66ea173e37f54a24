//! f16 loss scaling: scaling the loss keeps small gradients from rounding to zero in f16. Never touches a gradient: the
//! scale multiplies the loss's factor, its inverse goes into the clip factor, and the exact norm, equal on every rank,
//! shows whether anything overflowed. So all ranks skip the same steps and hold the same scale.
//!
//! The rule is PyTorch's `GradScaler` (defaults: 65536, doubled after 2000 good steps in a row, halved after a bad one)
//! with DeepSpeed's additions: a floor, and `hysteresis`, the bad steps before the scale falls, counted since it last
//! rose (or, with `consecutive_hysteresis`, since the last good step).
//!
//! The scale is a power of two, so it changes only the gradient's exponents: without overflow or underflow, the update
//! has the same bits as without scaling.
use crate::base::{Error, Result};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};

#[derive(Clone, Copy, PartialEq, Debug)]
pub struct ScalerOptions {
    /// The initial scale; the constant scale if not `dynamic`.
    pub initial: f32,
    pub dynamic: bool,
    /// Good steps in a row before the scale doubles.
    pub window: u64,
    /// Number of bad steps that halve the scale; 1 halves it at the first one.
    pub hysteresis: u32,
    /// Whether a good step resets the count of bad steps.
    pub consecutive_hysteresis: bool,
    /// Lower bound of the scale.
    pub min: f32,
}

impl Default for ScalerOptions {
    fn default() -> ScalerOptions {
        ScalerOptions {
            initial: 65536.0,
            dynamic: true,
            window: 2000,
            hysteresis: 1,
            consecutive_hysteresis: false,
            min: 1.0,
        }
    }
}

const GROWTH: f32 = 2.0;
const BACKOFF: f32 = 0.5;

/// The state saved in a checkpoint.
#[derive(Clone, Copy, PartialEq, Debug, Serialize, Deserialize)]
struct ScalerState {
    scale: f32,
    /// Good steps since the scale last changed or a step was bad.
    good_steps: u64,
    /// Bad steps left until the scale halves.
    hysteresis: u32,
}

#[derive(Clone, Debug)]
pub struct LossScaler {
    options: ScalerOptions,
    state: ScalerState,
}

impl LossScaler {
    pub fn new(options: ScalerOptions) -> LossScaler {
        let state = ScalerState { scale: options.initial, good_steps: 0, hysteresis: options.hysteresis };
        LossScaler { options, state }
    }
    /// The factor of the next step's loss.
    pub fn scale(&self) -> f32 {
        self.state.scale
    }
    /// Whether bad steps can no longer lower the scale: it is static or at its floor.
    pub fn exhausted(&self) -> bool {
        !self.options.dynamic || self.state.scale <= self.options.min
    }

    /// Call after each step with whether its gradient was finite.
    pub fn update(&mut self, finite: bool) {
        let (options, state) = (&self.options, &mut self.state);
        if !options.dynamic {
            return;
        }
        if !finite {
            state.good_steps = 0;
            if state.hysteresis > 1 {
                state.hysteresis -= 1;
            } else {
                state.scale = (state.scale * BACKOFF).max(options.min);
            }
            return;
        }
        state.good_steps += 1;
        if options.consecutive_hysteresis {
            state.hysteresis = options.hysteresis;
        }
        if state.good_steps == options.window {
            state.good_steps = 0;
            state.hysteresis = options.hysteresis;
            let grown = state.scale * GROWTH;
            state.scale = if grown.is_finite() { grown } else { state.scale };
        }
    }

    /// The state to save in a checkpoint.
    pub fn state(&self) -> Map<String, Value> {
        json!(self.state).as_object().cloned().unwrap_or_default()
    }
    /// Restores what [`LossScaler::state`] returned.
    pub fn resume(&mut self, state: &Map<String, Value>) -> Result<()> {
        let read = serde_json::from_value::<ScalerState>(Value::Object(state.clone()));
        self.state = read.map_err(|e| Error::input(format!("cannot read the checkpoint's loss scaler: {e}")))?;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The scale after each step: `+` is a good step, `-` a bad one.
    fn scales(options: ScalerOptions, steps: &str) -> Vec<f32> {
        let mut scaler = LossScaler::new(options);
        let after = |step: char| {
            scaler.update(step == '+');
            scaler.scale()
        };
        steps.chars().map(after).collect()
    }
    fn short() -> ScalerOptions {
        ScalerOptions { initial: 16.0, window: 3, ..ScalerOptions::default() }
    }

    #[test]
    fn grows_after_good_steps_in_a_row_and_halves_at_once() {
        assert_eq!(scales(short(), "+++++++"), [16.0, 16.0, 32.0, 32.0, 32.0, 64.0, 64.0]);
        assert_eq!(scales(short(), "++-++-+++"), [16.0, 16.0, 8.0, 8.0, 8.0, 4.0, 4.0, 4.0, 8.0]);
    }

    /// `torch.amp.GradScaler`: 2000 good steps, one bad, 2000 good.
    #[test]
    fn the_defaults_are_those_of_pytorch() {
        let mut scaler = LossScaler::new(ScalerOptions::default());
        assert_eq!(scaler.scale(), 65536.0);
        (0..1999).for_each(|_| scaler.update(true));
        assert_eq!(scaler.scale(), 65536.0);
        scaler.update(true);
        assert_eq!(scaler.scale(), 131_072.0);
        scaler.update(false);
        assert_eq!(scaler.scale(), 65536.0);
        (0..2000).for_each(|_| scaler.update(true));
        assert_eq!(scaler.scale(), 131_072.0);
    }

    #[test]
    fn hysteresis_forgives_until_the_scale_rises_or_a_step_is_good() {
        let twice = ScalerOptions { hysteresis: 2, ..short() };
        // The first bad step is forgiven; the next ones are not, until the scale has grown.
        assert_eq!(scales(twice, "--+-+++--"), [16.0, 8.0, 8.0, 4.0, 4.0, 4.0, 8.0, 8.0, 4.0]);
        let again = ScalerOptions { consecutive_hysteresis: true, ..twice };
        assert_eq!(scales(again, "-+-+--"), [16.0, 16.0, 16.0, 16.0, 16.0, 8.0]);
    }

    #[test]
    fn stays_within_its_floor_and_what_f32_holds() {
        let floored = ScalerOptions { min: 8.0, ..short() };
        assert_eq!(scales(floored, "---"), [8.0, 8.0, 8.0]);
        let huge = ScalerOptions { initial: 2f32.powi(127), ..short() };
        assert_eq!(scales(huge, "+++"), [2f32.powi(127); 3]);
        let fixed = ScalerOptions { dynamic: false, ..short() };
        assert_eq!(scales(fixed, "-++++"), [16.0; 5]);
        assert!(LossScaler::new(fixed).exhausted() && !LossScaler::new(short()).exhausted());
    }

    #[test]
    fn goes_on_from_its_state_and_refuses_another() {
        let mut scaler = LossScaler::new(ScalerOptions { hysteresis: 2, ..short() });
        "++-+".chars().for_each(|step| scaler.update(step == '+'));
        let mut resumed = LossScaler::new(ScalerOptions { hysteresis: 2, ..short() });
        resumed.resume(&scaler.state()).unwrap();
        for step in "-++++-".chars() {
            scaler.update(step == '+');
            resumed.update(step == '+');
            assert_eq!(scaler.state, resumed.state);
        }
        assert_eq!(resumed.resume(&Map::new()).unwrap_err().exit_status(), 2);
    }
}
