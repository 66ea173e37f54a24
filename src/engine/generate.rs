//! Text generation with a key-value cache. The prompt goes through the decoder once, then each new token alone,
//! attending to the cached keys and values; rank 0 samples. Never trains.
use super::Engine;
use super::staging::BatchStaging;
use crate::base::rng::Rng;
use crate::base::{Category, DType, Error, Result};
use crate::comm::mesh::{Coords, MeshSizes};
use crate::comm::{Collective, CommUse, Mesh, Tag};
use crate::data::MicroBatch;
use crate::device::{Buf, Device};
use crate::nn::{
    Checkpointing, Cuts, Decoder, Groups, Layout, Slice, Spec, Split, Tuning, Workspace, WorkspaceOptions,
};
use crate::store::{self, Store, Strategy};
use std::sync::Arc;

/// How the next token is sampled: among the `top_k` most likely, the fewest whose probabilities sum to `top_p`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sampling {
    /// Divides the logits; 0 always takes the most likely token.
    pub temperature: f32,
    /// 0: no limit.
    pub top_k: usize,
    /// 1: no limit.
    pub top_p: f32,
    pub seed: u64,
}

impl Default for Sampling {
    /// Samples from the model's own distribution.
    fn default() -> Sampling {
        Sampling { temperature: 1.0, top_k: 0, top_p: 1.0, seed: 0 }
    }
}

/// What a [`Generator`] is built from.
#[derive(Clone)]
pub struct GeneratorOptions {
    pub spec: Spec,
    /// How weights are stored.
    pub strategy: Arc<dyn Strategy>,
    /// Which tensors are split over tp.
    pub cuts: Cuts,
    /// Maximum prompt length in tokens, and maximum number of new tokens.
    pub prompt: usize,
    pub count: usize,
}

impl GeneratorOptions {
    fn workspace(&self) -> WorkspaceOptions {
        let (tokens, dtype) = (self.pass(), self.strategy.dtype());
        WorkspaceOptions { tokens, dtype, checkpoint: Checkpointing::Off, train: false }
    }
    /// Tokens of a pass: of the prompt, or of a text that has just become a long one, whose rotations all change.
    fn pass(&self) -> usize {
        let turned = self.spec.long_from().map_or(0, |original| self.window().min(original + 1));
        self.prompt.max(turned)
    }
    /// Maximum sequence length.
    fn window(&self) -> usize {
        self.prompt + self.count
    }
    /// The part of the model on the rank at `at`: its share of tp and ep. Ranks of sp each process the whole sequence.
    pub fn decoder(&self, mesh: &MeshSizes, at: &Coords) -> Result<Decoder> {
        let tp = Slice { index: at.tp, of: mesh.tp };
        let ep = Slice { index: mesh.ep_index(at), of: mesh.ep };
        Decoder::split(self.spec.clone(), &Tuning::default(), &Split { tp, ep, cuts: self.cuts, ..Split::NONE })
    }
    /// The layouts with every tensor frozen.
    pub fn frozen(decoder: &Decoder) -> Vec<Layout> {
        decoder.frozen_layouts()
    }
}

/// A model for inference: weights only, without gradients, optimizer or space for a backward pass.
pub struct Generator {
    dev: Arc<dyn Device>,
    mesh: Mesh,
    decoder: Decoder,
    store: Box<dyn Store>,
    workspace: Workspace,
    staging: BatchStaging,
    window: usize,
}

impl Generator {
    /// Weights are zero until the store is filled.
    pub fn new(dev: Arc<dyn Device>, mesh: &Mesh, options: &GeneratorOptions) -> Result<Generator> {
        let decoder = options.decoder(&mesh.sizes, &mesh.coords)?;
        let mut workspace = decoder.workspace(&*dev, &Groups::of(mesh), &options.workspace())?;
        decoder.remember(&*dev, &mut workspace, options.window())?;
        Ok(Generator {
            store: store::allocate(&*options.strategy, dev.clone(), mesh, &GeneratorOptions::frozen(&decoder))?,
            workspace,
            staging: BatchStaging::new(&*dev, options.pass(), &decoder)?,
            window: options.window(),
            mesh: mesh.clone(),
            dev,
            decoder,
        })
    }
    pub fn decoder(&self) -> &Decoder {
        &self.decoder
    }
    /// The store to load weights into.
    pub fn store(&mut self) -> &mut dyn Store {
        &mut *self.store
    }

    /// Generates up to `count` tokens after `prompt`; `next` receives each and returns whether to continue. Collective:
    /// all ranks pass the same arguments and get the same tokens.
    pub fn generate(
        &mut self,
        prompt: &[u32],
        count: usize,
        sampling: &Sampling,
        next: &mut dyn FnMut(u32) -> bool,
    ) -> Result<Vec<u32>> {
        let Generator { dev, mesh, decoder, store, workspace, staging, window } = self;
        let (dev, world, store) = (&**dev, &*mesh.world, &mut **store);
        if prompt.len() > staging.capacity() || prompt.len() + count > *window {
            let what = format!(
                "a prompt of {} tokens and {count} more exceed the maximum of {} and {window} in total",
                prompt.len(),
                staging.capacity()
            );
            return Err(Error::op("generate", what));
        }
        Writer { dev, world, decoder, store, workspace, staging, window: *window, remembers: true }
            .write(prompt, count, sampling, next)
    }
}

impl Engine {
    /// Generates `count` tokens after `prompt`, like [`Generator::generate`]. A context longer than the model's or the
    /// engine's window is truncated to its end. With sp, ranks split the context, and nothing is cached.
    pub fn generate(&mut self, prompt: &[u32], count: usize, sampling: &Sampling) -> Result<Vec<u32>> {
        let Engine { dev, mesh, decoder, store, workspace, staging, .. } = self;
        let (dev, world, store) = (&**dev, &*mesh.world, &mut **store);
        let window = staging.capacity().min(decoder.spec().max_len);
        let remembers = mesh.sizes.sp == 1;
        let longest = if remembers { window.min(prompt.len() + count) } else { 0 };
        decoder.remember(dev, workspace, longest)?;
        let writer = Writer { dev, world, decoder, store, workspace, staging, window, remembers };
        let written = writer.write(prompt, count, sampling, &mut |_| true)?;
        decoder.remember(dev, workspace, 0)?;
        Ok(written)
    }
}

struct Writer<'a> {
    dev: &'a dyn Device,
    world: &'a dyn Collective,
    decoder: &'a Decoder,
    store: &'a mut dyn Store,
    workspace: &'a mut Workspace,
    staging: &'a mut BatchStaging,
    /// Maximum context length.
    window: usize,
    /// The workspace has a key-value cache of that length.
    remembers: bool,
}

impl Writer<'_> {
    fn write(
        mut self,
        prompt: &[u32],
        count: usize,
        sampling: &Sampling,
        next: &mut dyn FnMut(u32) -> bool,
    ) -> Result<Vec<u32>> {
        if prompt.is_empty() {
            return Err(Error::op("generate", "the prompt is empty; it needs at least one token"));
        }
        let rng = Rng::named(sampling.seed, "generate");
        let mut logits = vec![0f32; self.decoder.spec().vocab];
        let mut picked = self.world.alloc(DType::U32, 1, CommUse::Reduced, Category::Other)?;
        let mut context = prompt.to_vec();
        let mut batch = MicroBatch::default();
        // Cached tokens of the context.
        let mut past = 0;
        for i in 0..count {
            let start = context.len().saturating_sub(self.window);
            let length = context.len() - start;
            let turned = |original: usize| past <= original && original < length;
            if start > 0 || self.decoder.spec().long_from().is_some_and(turned) {
                past = 0; // the window moved, or the text became a long one: all rotations changed
            }
            self.next_logits(&context[start..], past, &mut batch, &mut logits)?;
            if self.remembers {
                past = length;
            }
            let token = match self.world.rank() {
                0 => pick(&logits, sampling, rng.uniform(i as u64)),
                _ => 0,
            };
            let token = self.broadcast_token(token, &mut picked)?;
            context.push(token);
            if !next(token) {
                break;
            }
        }
        Ok(context.split_off(prompt.len()))
    }

    /// Logits of the token after `context`, whose first `past` tokens are cached.
    fn next_logits(&mut self, context: &[u32], past: usize, batch: &mut MicroBatch, logits: &mut [f32]) -> Result<()> {
        let Writer { dev, decoder, store, workspace, staging, .. } = self;
        let n = context.len() - past;
        batch.tokens.clear();
        batch.tokens.extend_from_slice(&context[past..]);
        batch.positions.clear();
        batch.positions.extend(past as u32..context.len() as u32);
        batch.cu_seqlens = vec![0, n as u32];
        let staged = staging.upload(*dev, batch)?.batch;
        match self.remembers {
            true => decoder.go_on(*dev, *store, &staged, workspace, past, logits),
            false => decoder.next_token_logits(*dev, *store, &staged, workspace, n - 1, logits),
        }
    }

    /// The token that rank 0 sampled. Ranks may run on different hardware, and must all continue with the same token.
    fn broadcast_token(&self, token: u32, buf: &mut Buf) -> Result<u32> {
        if self.world.size() == 1 {
            return Ok(token);
        }
        let mut token = [token];
        self.dev.upload(bytemuck::cast_slice(&token), buf.view_mut())?;
        let ticket = self.world.broadcast(Tag::new("next token", 0), buf.view_mut(), 0)?;
        self.world.wait(ticket)?;
        self.dev.download(buf.view(), bytemuck::cast_slice_mut(&mut token))?;
        self.world.wait_sent(ticket)?;
        Ok(token[0])
    }
}

/// Inverse-transform sampling: the token whose interval of the cumulative distribution contains `u` in [0, 1). Filters
/// apply in the order of transformers: temperature, `top_k`, `top_p`.
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
        shares.sort_by(|a, b| b.1.total_cmp(&a.1)); // stable: the first of equals
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
    likeliest as u32 // rounding left a gap at the end, or the logits are NaN
}

#[cfg(test)]
mod tests {
    use super::{Sampling, pick};

    fn at(temperature: f32) -> Sampling {
        Sampling { temperature, ..Sampling::default() }
    }

    #[test]
    fn temperature_zero_picks_the_first_most_likely() {
        assert_eq!(pick(&[0.0, 3.0, 1.0, 3.0], &at(0.0), 0.9), 1);
    }

    #[test]
    fn probabilities_are_those_of_softmax() {
        // exp: 1, 2, 1 -> probabilities 1/4, 1/2, 1/4.
        let logits = [0.0, 2f32.ln(), 0.0];
        for (u, token) in [(0.0, 0), (0.24, 0), (0.26, 1), (0.74, 1), (0.76, 2), (0.999_999, 2)] {
            assert_eq!(pick(&logits, &at(1.0), u), token, "u = {u}");
        }
        // At temperature 0.5 the probabilities are 1/6, 4/6, 1/6.
        assert_eq!(pick(&logits, &at(0.5), 0.2), 1);
        assert_eq!(pick(&logits, &at(0.5), 0.84), 2);
    }

    #[test]
    fn top_k_and_top_p_keep_the_most_likely() {
        // Probabilities 1/10, 4/10, 2/10, 3/10.
        let logits: Vec<f32> = [1f32, 4.0, 2.0, 3.0].into_iter().map(f32::ln).collect();
        let seen = |top_k: usize, top_p: f32| {
            let sampling = Sampling { top_k, top_p, ..at(1.0) };
            let mut seen: Vec<u32> = (0..100).map(|i| pick(&logits, &sampling, i as f64 / 100.0)).collect();
            seen.dedup();
            seen
        };
        assert_eq!(seen(0, 1.0), [0, 1, 2, 3]);
        assert_eq!(seen(3, 1.0), [1, 3, 2]); // ordered by probability
        assert_eq!(seen(1, 1.0), [1]);
        assert_eq!(seen(99, 0.65), [1, 3]);
        assert_eq!(seen(0, 0.75), [1, 3, 2]); // 7/10 is not enough
        assert_eq!(seen(0, 1e-9), [1]);
        assert_eq!(seen(2, 0.5), [1]); // of the two that top_k keeps, one has 4/7
        // The remaining two are sampled with probabilities 4/7 and 3/7.
        let sampling = Sampling { top_k: 2, ..at(1.0) };
        assert_eq!((pick(&logits, &sampling, 0.57), pick(&logits, &sampling, 0.58)), (1, 3));
    }

    #[test]
    fn nan_logits_still_give_a_token() {
        assert_eq!(pick(&[f32::NAN, f32::NAN], &at(1.0), 0.5), 0);
        assert!(pick(&[f32::NAN, f32::NAN], &Sampling { top_k: 1, top_p: 0.5, ..at(1.0) }, 0.5) < 2);
    }
}
