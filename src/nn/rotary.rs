//! Rotary position embeddings as data: the base, the scaling of positions, the resulting table of cosines and sines,
//! and which of its rows a token reads. Never runs on a device.
//!
//! The scalings and their names are those of transformers (`modeling_rope_utils.py`).
use std::f64::consts::TAU;

#[derive(Clone, PartialEq, Debug)]
pub struct Rotary {
    pub theta: f64,
    pub scaling: Scaling,
}

/// How the frequencies theta^(-2i / head_dim) are scaled for sequences longer than in training. `original` is the
/// length the model was trained with.
#[derive(Clone, PartialEq, Debug)]
pub enum Scaling {
    /// Unchanged.
    None,
    /// All divided by `factor` (Chen et al. 2023, position interpolation).
    Linear { factor: f64 },
    /// In documents longer than `original` the base grows with the longest sequence ("dynamic NTK"). transformers uses
    /// the longest so far; here it is the longest possible one, the same for all of them.
    Dynamic { factor: f64, original: usize },
    /// Long wavelengths divided by `factor`, short ones kept, with a blend between `low` and `high` waves in `original`
    /// (Llama 3.1).
    Llama3 { factor: f64, low: f64, high: f64, original: usize },
    /// A linear ramp over the index between `beta_fast` and `beta_slow` rotations in `original`; cosines and sines are
    /// multiplied by `attention` (Peng et al. 2023, YaRN).
    Yarn { factor: f64, original: usize, attention: f64, beta_fast: f64, beta_slow: f64, truncate: bool },
    /// Only the first `part` of the pairs of a head rotate, all `factor` times slower (Gemma 4).
    Proportional { part: f64, factor: f64 },
    /// Each frequency divided by a factor of its own, from one list in documents of up to `original` tokens and from
    /// another in longer ones; cosines and sines are multiplied by `attention` (Ding et al. 2024, LongRoPE).
    Long { short: Vec<f64>, long: Vec<f64>, original: usize, attention: f64 },
}

/// Queries grow with their position, so that attention stays sharp over long distances (Llama 4, Ministral 3): they are
/// multiplied by 1 + beta ln(1 + floor(position / original)) after their rotation.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct QueryGrowth {
    pub beta: f64,
    pub original: usize,
    /// Only in layers without rotary positions, and with positions from 1 on (Llama 4).
    pub unrotated: bool,
}

impl QueryGrowth {
    /// (rows, head_dim): a table like [`Rotary::table`], with one form, that multiplies and does not rotate.
    pub fn table(&self, head_dim: usize, rows: usize) -> Vec<f32> {
        let mut table = vec![0.0; rows * head_dim];
        for (position, row) in table.chunks_exact_mut(head_dim).enumerate() {
            let position = position + usize::from(self.unrotated);
            let factor = 1.0 + self.beta * ((position / self.original) as f64).ln_1p();
            row[..head_dim / 2].fill(factor as f32);
        }
        table
    }
}

impl Scaling {
    /// YaRN's `attention` of a model that is extended by `factor`, where its config names none.
    pub fn yarn_attention(factor: f64) -> f64 {
        if factor <= 1.0 { 1.0 } else { 0.1 * factor.ln() + 1.0 }
    }
}

impl Rotary {
    pub fn new(theta: f64) -> Rotary {
        Rotary { theta, scaling: Scaling::None }
    }

    /// (positions forms, dim): for each position, and each of the model's forms ([`super::Spec::forms`]), dim/2
    /// cosines, then dim/2 sines (Su et al. 2021). Angles are computed in f64, so that large positions stay accurate.
    /// `longest` is the longest sequence possible.
    pub fn table(&self, dim: usize, positions: usize, longest: usize, forms: usize) -> Vec<f32> {
        let forms: Vec<Vec<f64>> = (0..forms).map(|form| self.frequencies(dim, longest, form)).collect();
        let size = match self.scaling {
            Scaling::Yarn { attention, .. } | Scaling::Long { attention, .. } => attention,
            _ => 1.0,
        };
        let mut table = Vec::with_capacity(positions * forms.len() * dim);
        for (position, frequencies) in (0..positions).flat_map(|position| forms.iter().map(move |f| (position, f))) {
            let angles = frequencies.iter().map(|f| position as f64 * f);
            table.extend(angles.clone().map(|angle| (size * angle.cos()) as f32));
            table.extend(angles.map(|angle| (size * angle.sin()) as f32));
        }
        table
    }

    /// The length from which on documents rotate differently.
    pub fn original_if_long(&self) -> Option<usize> {
        match self.scaling {
            Scaling::Long { original, .. } | Scaling::Dynamic { original, .. } => Some(original),
            _ => None,
        }
    }

    /// dim/2 frequencies, in radians per position. `form`: 1 in long documents.
    fn frequencies(&self, dim: usize, longest: usize, form: usize) -> Vec<f64> {
        let (half, d) = (dim / 2, dim as f64);
        let plain = |theta: f64| move |i: usize| theta.powf(-2.0 * i as f64 / d);
        let base = plain(self.theta);
        match self.scaling {
            Scaling::None => (0..half).map(base).collect(),
            Scaling::Long { ref short, ref long, .. } => {
                let factors = if form == 0 { short } else { long };
                factors.iter().enumerate().map(|(i, factor)| base(i) / factor).collect()
            }
            Scaling::Proportional { part, factor } => {
                let turned = (part * d / 2.0) as usize;
                (0..half).map(|i| if i < turned { base(i) / factor } else { 0.0 }).collect()
            }
            Scaling::Linear { factor } => (0..half).map(|i| base(i) / factor).collect(),
            Scaling::Dynamic { factor, original } => {
                let longest = if form == 0 { original } else { longest.max(original) };
                let stretch = factor * longest as f64 / original as f64 - (factor - 1.0);
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

/// Replaces the positions of packed documents by the rows of a table with two forms ([`super::Spec::forms`]): of short
/// documents, and of those longer than `original`. A document of which earlier tokens are cached counts them.
pub fn rows_of_forms(positions: &mut [u32], cu_seqlens: &[u32], original: usize) {
    for document in cu_seqlens.windows(2) {
        let document = &mut positions[document[0] as usize..document[1] as usize];
        let last = document.iter().max().copied().unwrap_or(0);
        let form = (last as usize >= original) as u32;
        document.iter_mut().for_each(|position| *position = 2 * *position + form);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The length of other sequences changes nothing of a short one.
    #[test]
    fn short_documents_rotate_as_they_did_in_training() {
        let dynamic = Rotary { theta: 1e4, scaling: Scaling::Dynamic { factor: 2.0, original: 8 } };
        let forms = dynamic.table(4, 8, 64, 2);
        let of = |form: usize| forms.chunks(4).skip(form).step_by(2).flatten().copied().collect::<Vec<f32>>();
        assert_eq!(of(0), Rotary::new(1e4).table(4, 8, 64, 1));
        assert_ne!(of(1), of(0));
        assert_eq!(dynamic.original_if_long(), Some(8));
    }
}
