//! The learning rate as a function of the step. Never holds a position: a resumed run passes its step.
//!
//! With steps s = 1..=total and w warmup steps:
//!
//! ```text
//! warmup   s <= w    lr * s / w,  or logarithmic: lr * ln(s) / ln(max(2, w))
//! after    s >  w    lr * f(p),  p = (s - 1 - w) / (total - w), held at 1 past the end
//! ```
//!
//! With linear warmup the first step already has a nonzero rate, lr is reached at s = w, and the last step is one
//! increment above the final value (as in llm.c and nanoGPT; Hugging Face counts from 0, so its first step has lr = 0).
//! Logarithmic warmup is DeepSpeed's function of its own counter, which starts at s = 1 here.
use std::f64::consts::PI;

/// The shape of f(p), for p in [0, 1].
#[derive(Clone, Copy, PartialEq, Debug)]
pub enum DecayShape {
    /// 1
    Constant,
    /// 1 - p
    Linear,
    /// (1 + cos(pi p)) / 2 (Loshchilov & Hutter 2017)
    Cosine,
    /// min + (1 - min) (1 + cos(pi p)) / 2, with `min` a fraction of the peak
    CosineWithMin(f64),
}

impl DecayShape {
    /// Default final fraction of the peak for `cosine_with_min_lr`.
    pub const MIN_RATIO: f64 = 0.1;
}

/// How the learning rate rises to the peak.
#[derive(Clone, Copy, PartialEq, Debug)]
pub enum Warmup {
    Linear,
    /// DeepSpeed's default: steep at first, and 0 in the first step.
    Log,
}

#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Schedule {
    pub shape: DecayShape,
    /// The peak learning rate.
    pub peak: f64,
    pub rise: Warmup,
    pub warmup: u64,
    /// The last steps of the run, which decay; those before stay at the peak. None: all steps after warmup decay.
    pub decay: Option<u64>,
    /// Total steps of the run, warmup included.
    pub total: u64,
}

impl Schedule {
    /// `step` counts from 1.
    pub fn lr(&self, step: u64) -> f32 {
        if step <= self.warmup {
            let (s, w) = (step as f64, self.warmup as f64);
            return match self.rise {
                Warmup::Linear => (self.peak * s / w) as f32,
                Warmup::Log => (self.peak * s.ln() / w.max(2.0).ln()) as f32,
            };
        }
        let span = self.total.saturating_sub(self.warmup);
        let span = self.decay.map_or(span, |decay| decay.min(span));
        let done = (step - 1).saturating_sub(self.total.max(self.warmup) - span);
        let p = if done < span { done as f64 / span as f64 } else { 1.0 };
        let cosine = 0.5 * (1.0 + (PI * p).cos());
        let fraction = match self.shape {
            DecayShape::Constant => 1.0,
            DecayShape::Linear => 1.0 - p,
            DecayShape::Cosine => cosine,
            DecayShape::CosineWithMin(min) => min + (1.0 - min) * cosine,
        };
        (self.peak * fraction) as f32
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lrs(shape: DecayShape, warmup: u64, total: u64, steps: &[u64]) -> Vec<f32> {
        let schedule = Schedule { shape, peak: 1.0, rise: Warmup::Linear, warmup, decay: None, total };
        steps.iter().map(|&s| schedule.lr(s)).collect()
    }

    #[test]
    fn warmup_ends_at_the_peak() {
        for shape in [DecayShape::Constant, DecayShape::Linear, DecayShape::Cosine, DecayShape::CosineWithMin(0.5)] {
            assert_eq!(lrs(shape, 4, 12, &[1, 2, 3, 4, 5]), [0.25, 0.5, 0.75, 1.0, 1.0], "{shape:?}");
        }
    }

    #[test]
    fn each_shape_at_its_quarters() {
        // Four warmup steps, eight after: step 9 is half way, step 12 the last, 13 and later past the end.
        let steps = [9, 13, 100];
        assert_eq!(lrs(DecayShape::Constant, 4, 12, &steps), [1.0, 1.0, 1.0]);
        assert_eq!(lrs(DecayShape::Linear, 4, 12, &steps), [0.5, 0.0, 0.0]);
        assert_eq!(lrs(DecayShape::Linear, 4, 12, &[12]), [0.125]);
        assert_eq!(lrs(DecayShape::Cosine, 4, 12, &steps), [0.5, 0.0, 0.0]);
        assert_eq!(lrs(DecayShape::CosineWithMin(0.25), 4, 12, &steps), [0.625, 0.25, 0.25]);
        // A quarter of the way, cos(pi / 4) = sqrt(1/2).
        assert_eq!(lrs(DecayShape::Cosine, 4, 12, &[7]), [(0.5 + 0.5 * 0.5f64.sqrt()) as f32]);
    }

    #[test]
    fn no_warmup_and_short_runs() {
        assert_eq!(lrs(DecayShape::Linear, 0, 4, &[1, 2, 3, 4]), [1.0, 0.75, 0.5, 0.25]);
        // A run shorter than its warmup stays in warmup; past the end it holds the final rate.
        assert_eq!(lrs(DecayShape::Cosine, 10, 5, &[5, 10, 11]), [0.5, 1.0, 0.0]);
    }

    #[test]
    fn logarithmic_warmup_starts_at_0_and_ends_at_the_peak() {
        let lrs = |warmup: u64, steps: &[u64]| -> Vec<f32> {
            let (shape, rise) = (DecayShape::Constant, Warmup::Log);
            let schedule = Schedule { shape, peak: 0.5, rise, warmup, decay: None, total: 20 };
            steps.iter().map(|&s| schedule.lr(s)).collect()
        };
        // The 4th of 16 steps is half way: 2 of 4 doublings.
        assert_eq!(lrs(16, &[1, 2, 4, 8, 16, 17]), [0.0, 0.125, 0.25, 0.375, 0.5, 0.5]);
        assert_eq!(lrs(1, &[1, 2]), [0.0, 0.5]);
        assert_eq!(lrs(0, &[1]), [0.5]);
    }

    /// As get_wsd_schedule of transformers has it: warmup, then the peak, then the decay.
    #[test]
    fn the_last_steps_alone_may_decay() {
        let lrs = |shape, decay, steps: &[u64]| -> Vec<f32> {
            let schedule =
                Schedule { shape, peak: 1.0, rise: Warmup::Linear, warmup: 2, decay: Some(decay), total: 10 };
            steps.iter().map(|&s| schedule.lr(s)).collect()
        };
        let steps = [1, 2, 3, 6, 7, 8, 9, 10, 11];
        assert_eq!(lrs(DecayShape::Linear, 4, &steps), [0.5, 1.0, 1.0, 1.0, 1.0, 0.75, 0.5, 0.25, 0.0]);
        assert_eq!(lrs(DecayShape::CosineWithMin(0.25), 4, &[6, 7, 9, 11]), [1.0, 1.0, 0.625, 0.25]);
        // Warmup is never cut.
        assert_eq!(lrs(DecayShape::Linear, 99, &[1, 2, 3, 7, 11]), [0.5, 1.0, 1.0, 0.5, 0.0]);
    }

    #[test]
    fn the_peak_scales_it() {
        let shape = DecayShape::CosineWithMin(DecayShape::MIN_RATIO);
        let schedule = Schedule { shape, peak: 3e-4, rise: Warmup::Linear, warmup: 0, decay: None, total: 10 };
        assert_eq!(schedule.lr(1), 3e-4);
        assert_eq!(schedule.lr(11), (3e-4 * DecayShape::MIN_RATIO) as f32);
    }
}
