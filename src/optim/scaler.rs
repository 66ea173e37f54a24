//! The loss scale of f16: the gradient of a scaled loss keeps what f16 would round to zero. Never touches a gradient:
//! the scale multiplies the loss's factor, its inverse goes into the clip factor, and the exact norm, which is the same
//! on every rank, says whether anything overflowed. So all ranks skip the same steps and hold the same scale.
//!
//! The rule is that of PyTorch's `GradScaler` (defaults: 65536, times 2 after 2000 good steps in a row, halved after a
//! bad one), with what DeepSpeed adds: `hysteresis` bad steps before the scale falls, counted since it last rose (or,
//! with `consecutive_hysteresis`, since the last good step), and a floor.
//!
//! As a power of two the scale changes the exponents of the gradient only: where nothing over- or underflows, the
//! update has the same bits as without it.
use crate::base::{Error, Result};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};

#[derive(Clone, Copy, PartialEq, Debug)]
pub struct ScalerOptions {
    /// The first scale; or the only one, where it is not `dynamic`.
    pub initial: f32,
    pub dynamic: bool,
    /// Good steps in a row until the scale doubles.
    pub window: u64,
    /// Bad steps until it is halved: 1 is at once.
    pub hysteresis: u32,
    /// A good step forgives the bad ones before it.
    pub consecutive_hysteresis: bool,
    /// It falls no further.
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

/// What a checkpoint keeps.
#[derive(Clone, Copy, PartialEq, Debug, Serialize, Deserialize)]
struct ScalerState {
    scale: f32,
    /// Since the scale last changed or a step was bad.
    good_steps: u64,
    /// Bad steps that are still forgiven, and one.
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
    /// What the loss of the next step is multiplied by.
    pub fn scale(&self) -> f32 {
        self.state.scale
    }
    /// A bad step would leave the scale as it is, now and for ever.
    pub fn exhausted(&self) -> bool {
        !self.options.dynamic || self.state.scale <= self.options.min
    }

    /// After a step: whether its gradient was finite.
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

    /// For the checkpoint.
    pub fn state(&self) -> Map<String, Value> {
        json!(self.state).as_object().cloned().unwrap_or_default()
    }
    /// Continues from what [`LossScaler::state`] said.
    pub fn resume(&mut self, state: &Map<String, Value>) -> Result<()> {
        let read = serde_json::from_value::<ScalerState>(Value::Object(state.clone()));
        self.state = read.map_err(|e| Error::input(format!("the checkpoint's loss scaler cannot be read: {e}")))?;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The scales after each step: `+` is a good one, `-` a bad one.
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
