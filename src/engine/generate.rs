//! Text from a model. A context goes through the decoder once, and then each new token by itself, attending to the keys
//! and values of those before it; rank 0 picks it. Never trains.
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
use crate::store::{Store, Strategy};
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

/// What a [`Generator`] is made of.
#[derive(Clone)]
pub struct GeneratorOptions {
    pub spec: Spec,
    /// How weights are kept.
    pub strategy: Arc<dyn Strategy>,
    /// What the ranks of tp have parts of.
    pub cuts: Cuts,
    /// Tokens of the longest prompt, and how many may come after it.
    pub prompt: usize,
    pub count: usize,
}

impl GeneratorOptions {
    fn workspace(&self) -> WorkspaceOptions {
        let (tokens, dtype) = (self.prompt, self.strategy.dtype());
        WorkspaceOptions { tokens, dtype, checkpoint: Checkpointing::Off, train: false }
    }
    /// The longest sequence.
    fn window(&self) -> usize {
        self.prompt + self.count
    }
    /// The part of the model that the rank at `at` computes: its own of tp; ranks of sp all have the whole sequence.
    pub fn decoder(&self, mesh: &MeshSizes, at: &Coords) -> Result<Decoder> {
        let tp = Slice { index: at.tp, of: mesh.tp };
        Decoder::split(self.spec.clone(), &Tuning::default(), &Split { tp, cuts: self.cuts, ..Split::NONE })
    }
    /// What nothing learns of.
    pub fn frozen(decoder: &Decoder) -> Vec<Layout> {
        let mut layouts = decoder.layouts().to_vec();
        layouts.iter_mut().flat_map(|l| &mut l.segments).for_each(|s| s.trainable = false);
        layouts
    }
}

/// A model that writes and does not learn: weights alone, without gradients, optimizer or room for a backward pass.
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
            store: options.strategy.store(dev.clone(), mesh, &GeneratorOptions::frozen(&decoder))?,
            workspace,
            staging: BatchStaging::new(&*dev, options.prompt, Slice::WHOLE, 0)?,
            window: options.window(),
            mesh: mesh.clone(),
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

    /// Up to `count` tokens after `prompt`; `next` sees each and says whether to go on. All ranks call it together with
    /// the same arguments and get the same tokens.
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
                "{} tokens and {count} more, with room for {} and {window} in all",
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
    /// `count` tokens after `prompt`, as [`Generator::generate`]; of a context longer than the model's or the engine's
    /// window, the end is used. Ranks of sp have a part of the context each and remember nothing of it.
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
    /// The longest context.
    window: usize,
    /// The workspace has room for the keys and values of such a context.
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
            return Err(Error::op("generate", "the prompt is empty: it must have at least one token"));
        }
        let rng = Rng::named(sampling.seed, "generate");
        let mut logits = vec![0f32; self.decoder.spec().vocab];
        let mut picked = self.world.alloc(DType::U32, 1, CommUse::Reduced, Category::Other)?;
        let mut context = prompt.to_vec();
        let mut batch = MicroBatch::default();
        // Tokens of the context that the workspace remembers.
        let mut past = 0;
        for i in 0..count {
            let start = context.len().saturating_sub(self.window);
            if start > 0 {
                past = 0; // the context has moved on: every token is at another position, and sees others
            }
            self.next_logits(&context[start..], past, &mut batch, &mut logits)?;
            if self.remembers {
                past = context.len() - start;
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

    /// The logits of what follows `context`, of which the first `past` tokens are remembered.
    fn next_logits(&mut self, context: &[u32], past: usize, batch: &mut MicroBatch, logits: &mut [f32]) -> Result<()> {
        let Writer { dev, decoder, store, workspace, staging, .. } = self;
        let n = context.len() - past;
        batch.tokens.clear();
        batch.tokens.extend_from_slice(&context[past..]);
        batch.positions.clear();
        batch.positions.extend(past as u32..context.len() as u32);
        batch.cu_seqlens = vec![0, n as u32];
        let (staged, _) = staging.upload(*dev, batch)?;
        match self.remembers {
            true => decoder.go_on(*dev, *store, &staged, workspace, past, logits),
            false => decoder.next_token_logits(*dev, *store, &staged, workspace, n - 1, logits),
        }
    }

    /// The token that rank 0 picked. Ranks may compute on unlike machines, and a token is followed by all or by none.
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
