//! Text from the model at hand: the window goes through the decoder once a token, without a cache of keys and values,
//! because samples of a training run are short. Never trains.
use super::Engine;
use crate::base::rng::Rng;
use crate::base::{Error, Result};
use crate::data::MicroBatch;

/// How the next token is picked.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sampling {
    /// Divides the logits; 0 always picks the likeliest.
    pub temperature: f32,
    pub seed: u64,
}

impl Engine {
    /// `count` tokens after `prompt`. All ranks call it together with the same arguments and get the same tokens; of a
    /// context longer than the model's or the engine's window, the end is used.
    pub fn generate(&mut self, prompt: &[u32], count: usize, sampling: &Sampling) -> Result<Vec<u32>> {
        if prompt.is_empty() {
            return Err(Error::op("generate", "the prompt is empty: it must have at least one token"));
        }
        let window = self.staging.capacity().min(self.decoder.spec().max_len);
        let rng = Rng::named(sampling.seed, "generate");
        let mut logits = vec![0f32; self.decoder.spec().vocab];
        let mut context = prompt.to_vec();
        let mut batch = MicroBatch::default();
        for i in 0..count {
            let tokens = &context[context.len().saturating_sub(window)..];
            let n = tokens.len();
            batch.tokens.clear();
            batch.tokens.extend_from_slice(tokens);
            batch.positions.clear();
            batch.positions.extend(0..n as u32);
            batch.cu_seqlens = vec![0, n as u32];
            let staged = self.staging.upload(&*self.dev, &batch)?;
            let (dev, store) = (&*self.dev, &mut *self.store);
            self.decoder.next_token_logits(dev, store, &staged, &mut self.workspace, n - 1, &mut logits)?;
            context.push(pick(&mut logits, sampling.temperature, rng.uniform(i as u64)));
        }
        Ok(context.split_off(prompt.len()))
    }
}

/// The token whose share of softmax(logits / temperature), laid end to end, holds `u` in [0, 1). Overwrites the logits.
fn pick(logits: &mut [f32], temperature: f32, u: f64) -> u32 {
    let (likeliest, top) =
        logits.iter().enumerate().fold((0, f32::NEG_INFINITY), |best, (i, &x)| if x > best.1 { (i, x) } else { best });
    if temperature <= 0.0 {
        return likeliest as u32;
    }
    let mut total = 0.0f64;
    for x in logits.iter_mut() {
        *x = ((*x - top) / temperature).exp();
        total += *x as f64;
    }
    let mut left = u * total;
    for (i, &x) in logits.iter().enumerate() {
        left -= x as f64;
        if left < 0.0 {
            return i as u32;
        }
    }
    likeliest as u32 // rounding ate the last crumb, or the logits are not numbers
}

#[cfg(test)]
mod tests {
    use super::pick;

    #[test]
    fn temperature_zero_picks_the_first_likeliest() {
        assert_eq!(pick(&mut [0.0, 3.0, 1.0, 3.0], 0.0, 0.9), 1);
    }

    #[test]
    fn shares_are_those_of_softmax() {
        // exp: 1, 2, 1 -> shares 1/4, 1/2, 1/4.
        let logits = [0.0, 2f32.ln(), 0.0];
        for (u, token) in [(0.0, 0), (0.24, 0), (0.26, 1), (0.74, 1), (0.76, 2), (0.999_999, 2)] {
            assert_eq!(pick(&mut logits.clone(), 1.0, u), token, "u = {u}");
        }
        // At a temperature of one half the shares are 1/6, 4/6, 1/6.
        assert_eq!(pick(&mut logits.clone(), 0.5, 0.2), 1);
        assert_eq!(pick(&mut logits.clone(), 0.5, 0.84), 2);
    }

    #[test]
    fn not_a_number_is_still_a_token() {
        assert_eq!(pick(&mut [f32::NAN, f32::NAN], 1.0, 0.5), 0);
    }
}
