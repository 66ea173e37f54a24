//! Rotary position embeddings as data: the base, the scaling of positions, and the resulting table of cosines and
//! sines. Never runs on a device.
//!
//! The scalings and their names are those of transformers (`modeling_rope_utils.py`).
use std::f64::consts::TAU;

#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Rotary {
    pub theta: f64,
    pub scaling: Scaling,
}

/// How the frequencies theta^(-2i / head_dim) are scaled for sequences longer than in training. `original` is the
/// length the model was trained with.
#[derive(Clone, Copy, PartialEq, Debug)]
pub enum Scaling {
    /// Unchanged.
    None,
    /// All divided by `factor` (Chen et al. 2023, position interpolation).
    Linear { factor: f64 },
    /// The base grows with the longest sequence ("dynamic NTK"). transformers uses the longest so far; here it is the
    /// longest possible one, the same for every sequence.
    Dynamic { factor: f64, original: usize },
    /// Long wavelengths divided by `factor`, short ones kept, with a blend between `low` and `high` waves in `original`
    /// (Llama 3.1).
    Llama3 { factor: f64, low: f64, high: f64, original: usize },
    /// A linear ramp over the index between `beta_fast` and `beta_slow` rotations in `original`; cosines and sines are
    /// multiplied by `attention` (Peng et al. 2023, YaRN).
    Yarn { factor: f64, original: usize, attention: f64, beta_fast: f64, beta_slow: f64, truncate: bool },
}

impl Rotary {
    pub fn new(theta: f64) -> Rotary {
        Rotary { theta, scaling: Scaling::None }
    }

    /// (rows, head_dim): for each position head_dim/2 cosines, then head_dim/2 sines (Su et al. 2021). Angles are
    /// computed in f64, so that large positions stay accurate. `longest` is the longest sequence possible.
    pub fn table(&self, head_dim: usize, rows: usize, longest: usize) -> Vec<f32> {
        let frequencies = self.frequencies(head_dim, longest);
        let size = if let Scaling::Yarn { attention, .. } = self.scaling { attention } else { 1.0 };
        let mut table = Vec::with_capacity(rows * head_dim);
        for position in 0..rows {
            let angles = frequencies.iter().map(|f| position as f64 * f);
            table.extend(angles.clone().map(|angle| (size * angle.cos()) as f32));
            table.extend(angles.map(|angle| (size * angle.sin()) as f32));
        }
        table
    }

    /// head_dim/2 frequencies, in radians per position.
    fn frequencies(&self, head_dim: usize, longest: usize) -> Vec<f64> {
        let (half, d) = (head_dim / 2, head_dim as f64);
        let plain = |theta: f64| move |i: usize| theta.powf(-2.0 * i as f64 / d);
        let base = plain(self.theta);
        match self.scaling {
            Scaling::None => (0..half).map(base).collect(),
            Scaling::Linear { factor } => (0..half).map(|i| base(i) / factor).collect(),
            Scaling::Dynamic { factor, original } => {
                let stretch = factor * longest.max(original) as f64 / original as f64 - (factor - 1.0);
                (0..half).map(plain(self.theta * stretch.powf(d / (d - 2.0)))).collect()
            }
            Scaling::Llama3 { factor, low, high, original } => {
                let blend = |f: f64| {
                    // By waves in the original length: 1 from `high` up, 0 up to `low`.
                    let kept = ((original as f64 * f / TAU - low) / (high - low)).clamp(0.0, 1.0);
                    (1.0 - kept) * f / factor + kept * f
                };
                (0..half).map(|i| blend(base(i))).collect()
            }
            Scaling::Yarn { factor, original, beta_fast, beta_slow, truncate, .. } => {
                // The index whose wave rotates this often in the original length.
                let index = |turns: f64| d * (original as f64 / (turns * TAU)).ln() / (2.0 * self.theta.ln());
                let (mut low, mut high) = (index(beta_fast), index(beta_slow));
                if truncate {
                    (low, high) = (low.floor(), high.ceil());
                }
                (low, high) = (low.max(0.0), high.min(d - 1.0));
                if low == high {
                    high += 0.001; // as in transformers: avoids division by zero
                }
                let blend = |i: usize| {
                    let stretched = ((i as f64 - low) / (high - low)).clamp(0.0, 1.0);
                    base(i) * (stretched / factor + (1.0 - stretched))
                };
                (0..half).map(blend).collect()
            }
        }
    }
}
