//! Text from a model: the context goes through the decoder once a token, without a cache of keys and values, because samples
//! are short. Never trains.
use super::staging::Staging;
use super::{Engine, Strategy};
use crate::base::rng::Rng;
use crate::base::{Error, Result};
use crate::comm::Mesh;
use crate::data::MicroBatch;
use crate::device::Device;
use crate::nn::{Checkpointing, Decoder, Groups, Slice, Spec, Workspace, WorkspaceOptions};
use crate::store::Store;
use std::sync::Arc;

/// How the next token is picked: of the `top_k` likeliest, the fewest whose shares add up to `top_p`, by their shares.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sampling {
    /// Divides the logits; 0 always picks the likeliest.
    pub temperature: f32,
    /// 0: of all.
    pub top_k: usize,
    /// 1: of all.
    pub top_p: f32,
    pub seed: u64,
}

impl Default for Sampling {
    /// By the shares as the model gives them.
    fn default() -> Sampling {
        Sampling { temperature: 1.0, top_k: 0, top_p: 1.0, seed: 0 }
    }
}

/// A model that writes and does not learn: weights alone, without gradients, optimizer or room for a backward pass.
pub struct Generator {
    dev: Arc<dyn Device>,
    decoder: Decoder,
    store: Box<dyn Store>,
    workspace: Workspace,
    staging: Staging,
}

impl Generator {
    /// Weights are zero until the store is filled. `window`: the longest context, in tokens.
    pub fn new(
        dev: Arc<dyn Device>,
        mesh: &Mesh,
        strategy: &dyn Strategy,
        spec: &Spec,
        window: usize,
    ) -> Result<Generator> {
        let decoder = Decoder::new(spec.clone())?;
        let mut frozen = decoder.layouts().to_vec();
        frozen.iter_mut().flat_map(|l| &mut l.segments).for_each(|s| s.trainable = false);
        let options =
            WorkspaceOptions { tokens: window, dtype: strategy.dtype(), checkpoint: Checkpointing::Off, train: false };
        Ok(Generator {
            store: strategy.store(dev.clone(), mesh, &frozen)?,
            workspace: decoder.workspace(&*dev, &Groups::of(mesh), &options)?,
            staging: Staging::new(&*dev, window, Slice::WHOLE, 0)?,
            dev,
            decoder,
        })
    }
    pub fn decoder(&self) -> &Decoder {
        &self.decoder
    }
    /// What a checkpoint is read into.
    pub fn store(&mut self) -> &mut dyn Store {
        &mut *self.store
    }

    /// Up to `count` tokens after `prompt`; `next` sees each and says whether to go on. All ranks call it together with the
    /// same arguments and get the same tokens.
    pub fn generate(
        &mut self,
        prompt: &[u32],
        count: usize,
        sampling: &Sampling,
        next: &mut dyn FnMut(u32) -> bool,
    ) -> Result<Vec<u32>> {
        let Generator { dev, decoder, store, workspace, staging } = self;
        write(&**dev, decoder, &mut **store, workspace, staging, prompt, count, sampling, next)
    }
}

impl Engine {
    /// `count` tokens after `prompt`, as [`Generator::generate`]; of a context longer than the model's or the engine's
    /// window, the end is used.
    pub fn generate(&mut self, prompt: &[u32], count: usize, sampling: &Sampling) -> Result<Vec<u32>> {
        let Engine { dev, decoder, store, workspace, staging, .. } = self;
        write(&**dev, decoder, &mut **store, workspace, staging, prompt, count, sampling, &mut |_| true)
    }
}

#[allow(clippy::too_many_arguments)]
fn write(
    dev: &dyn Device,
    decoder: &Decoder,
    store: &mut dyn Store,
    workspace: &mut Workspace,
    staging: &mut Staging,
    prompt: &[u32],
    count: usize,
    sampling: &Sampling,
    next: &mut dyn FnMut(u32) -> bool,
) -> Result<Vec<u32>> {
    if prompt.is_empty() {
        return Err(Error::op("generate", "the prompt is empty: it must have at least one token"));
    }
    let window = staging.capacity().min(decoder.spec().max_len);
    let rng = Rng::named(sampling.seed, "generate");
    let mut logits = vec![0f32; decoder.spec().vocab];
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
        let (staged, _) = staging.upload(dev, &batch)?;
        decoder.next_token_logits(dev, store, &staged, workspace, n - 1, &mut logits)?;
        let token = pick(&logits, sampling, rng.uniform(i as u64));
        context.push(token);
        if !next(token) {
            break;
        }
    }
    Ok(context.split_off(prompt.len()))
}

/// The token whose share, laid end to end with those of the others, holds `u` in [0, 1). Cuts come in the order of
/// transformers: temperature, `top_k`, `top_p`.
fn pick(logits: &[f32], sampling: &Sampling, u: f64) -> u32 {
    let (likeliest, top) =
        logits.iter().enumerate().fold((0, f32::NEG_INFINITY), |best, (i, &x)| if x > best.1 { (i, x) } else { best });
    let Sampling { temperature, top_k, top_p, .. } = *sampling;
    if temperature <= 0.0 {
        return likeliest as u32;
    }
    let share = |&x: &f32| ((x - top) / temperature).exp() as f64;
    let mut shares: Vec<(usize, f64)> = logits.iter().map(share).enumerate().collect();
    if top_k > 0 || top_p < 1.0 {
        shares.sort_by(|a, b| b.1.total_cmp(&a.1)); // stable: of equals, the first
        if top_k > 0 {
            shares.truncate(top_k);
        }
        let enough = top_p as f64 * shares.iter().map(|s| s.1).sum::<f64>();
        let mut sum = 0.0;
        let mut more = |&(_, share): &(usize, f64)| {
            let more = sum < enough;
            sum += share;
            more
        };
        let kept = shares.iter().take_while(|s| more(s)).count();
        shares.truncate(kept.max(1));
    }
    let mut left = u * shares.iter().map(|s| s.1).sum::<f64>();
    for &(token, share) in &shares {
        left -= share;
        if left < 0.0 {
            return token as u32;
        }
    }
    likeliest as u32 // rounding ate the last crumb, or the logits are not numbers
}

#[cfg(test)]
mod tests {
    use super::{Sampling, pick};

    fn at(temperature: f32) -> Sampling {
        Sampling { temperature, ..Sampling::default() }
    }

    #[test]
    fn temperature_zero_picks_the_first_likeliest() {
        assert_eq!(pick(&[0.0, 3.0, 1.0, 3.0], &at(0.0), 0.9), 1);
    }

    #[test]
    fn shares_are_those_of_softmax() {
        // exp: 1, 2, 1 -> shares 1/4, 1/2, 1/4.
        let logits = [0.0, 2f32.ln(), 0.0];
        for (u, token) in [(0.0, 0), (0.24, 0), (0.26, 1), (0.74, 1), (0.76, 2), (0.999_999, 2)] {
            assert_eq!(pick(&logits, &at(1.0), u), token, "u = {u}");
        }
        // At a temperature of one half the shares are 1/6, 4/6, 1/6.
        assert_eq!(pick(&logits, &at(0.5), 0.2), 1);
        assert_eq!(pick(&logits, &at(0.5), 0.84), 2);
    }

    #[test]
    fn cuts_leave_the_likeliest() {
        // Shares 1/10, 4/10, 2/10, 3/10.
        let logits: Vec<f32> = [1f32, 4.0, 2.0, 3.0].into_iter().map(f32::ln).collect();
        let seen = |top_k: usize, top_p: f32| {
            let sampling = Sampling { top_k, top_p, ..at(1.0) };
            let mut seen: Vec<u32> = (0..100).map(|i| pick(&logits, &sampling, i as f64 / 100.0)).collect();
            seen.dedup();
            seen
        };
        assert_eq!(seen(0, 1.0), [0, 1, 2, 3]);
        assert_eq!(seen(3, 1.0), [1, 3, 2]); // by their shares
        assert_eq!(seen(1, 1.0), [1]);
        assert_eq!(seen(99, 0.65), [1, 3]);
        assert_eq!(seen(0, 0.75), [1, 3, 2]); // 7/10 are not enough
        assert_eq!(seen(0, 1e-9), [1]);
        assert_eq!(seen(2, 0.5), [1]); // of the two that top_k leaves, one has 4/7
        // What is left is picked by its shares: 4/7 and 3/7.
        let sampling = Sampling { top_k: 2, ..at(1.0) };
        assert_eq!((pick(&logits, &sampling, 0.57), pick(&logits, &sampling, 0.58)), (1, 3));
    }

    #[test]
    fn not_a_number_is_still_a_token() {
        assert_eq!(pick(&[f32::NAN, f32::NAN], &at(1.0), 0.5), 0);
        assert!(pick(&[f32::NAN, f32::NAN], &Sampling { top_k: 1, top_p: 0.5, ..at(1.0) }, 0.5) < 2);
    }
}
