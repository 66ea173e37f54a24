//! SampledText generation: by a model that holds nothing but weights, and by one in training. Both sample alike
//! (`sampler`). Never trains.
use super::Engine;
use super::draw::Sampling;
use super::sampler::{Prompt, Sampled, SampledText, Sampler, SamplerSize};
use crate::base::{Error, Result};
use crate::comm::Mesh;
use crate::comm::mesh::{Coords, MeshSizes};
use crate::device::Device;
use crate::nn::{Cuts, Decoder, Layout, ParamStore, Slice, Spec, Split, Tuning};
use crate::store::{self, Store, Strategy};
use std::sync::Arc;

/// What a [`Generator`] is built from.
#[derive(Clone)]
pub struct GeneratorOptions {
    pub spec: Spec,
    /// How weights are stored.
    pub strategy: Arc<dyn Strategy>,
    /// Which tensors are split over tp.
    pub cuts: Cuts,
    pub size: SamplerSize,
}

impl GeneratorOptions {
    /// The part of the model on the rank at `at`: its share of tp and ep. Ranks of sp each process whole sequences.
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
    store: Box<dyn Store>,
    sampler: Sampler,
    layouts: Vec<Layout>,
}

impl Generator {
    /// Weights are zero until the store is filled.
    pub fn new(dev: Arc<dyn Device>, mesh: &Mesh, options: &GeneratorOptions) -> Result<Generator> {
        let decoder = options.decoder(&mesh.sizes, &mesh.coords)?;
        Ok(Generator {
            store: store::allocate(&*options.strategy, dev.clone(), mesh, &GeneratorOptions::frozen(&decoder))?,
            layouts: decoder.layouts().to_vec(),
            sampler: Sampler::new(&*dev, mesh, decoder, options.strategy.dtype(), &options.size)?,
            mesh: mesh.clone(),
            dev,
        })
    }
    pub fn layouts(&self) -> &[Layout] {
        &self.layouts
    }
    /// The store to load weights into.
    pub fn store(&mut self) -> &mut dyn Store {
        &mut *self.store
    }

    /// Samples texts of up to `count` tokens. Collective; returns the texts of all ranks.
    pub fn sample(
        &mut self,
        prompts: &[Prompt],
        count: usize,
        sampling: &Sampling,
        next: &mut dyn FnMut(&Sampled) -> bool,
    ) -> Result<Vec<SampledText>> {
        self.sampler.forget();
        let (dev, mesh) = (&*self.dev, &self.mesh);
        self.sampler.sample((dev, mesh, &mut *self.store as &mut dyn ParamStore), prompts, count, sampling, next)
    }
    /// Generates up to `count` tokens after `prompt`; `next` receives each on the rank that makes it, and returns
    /// whether to continue. What it has in common with the text before it is not computed again. Collective: all ranks
    /// get the tokens.
    pub fn generate(
        &mut self,
        prompt: &[u32],
        count: usize,
        sampling: &Sampling,
        next: &mut dyn FnMut(u32) -> bool,
    ) -> Result<Vec<u32>> {
        let (dev, mesh) = (&*self.dev, &self.mesh);
        let prompts = [Prompt::new(0, prompt.to_vec(), 1)];
        let next = &mut |of: &Sampled| of.ids.last().is_none_or(|&token| next(token));
        one(self.sampler.sample(
            (dev, mesh, &mut *self.store as &mut dyn ParamStore),
            &prompts,
            count,
            sampling,
            next,
        )?)
    }
}

/// The device, the mesh and the weights of a text.
type SampledFrom<'a> = (&'a dyn Device, &'a Mesh, &'a mut dyn ParamStore);

fn no_cache() -> Error {
    Error::op("sample", "the engine has no cache")
}

fn one(texts: Vec<SampledText>) -> Result<Vec<u32>> {
    let text = texts.into_iter().next().ok_or_else(|| Error::op("generate", "no text"))?;
    Ok(text.ids)
}

impl Engine {
    /// Generates up to `count` tokens after `prompt`, of which the end counts if both together are too long for the
    /// model. The cache is freed again. Collective.
    pub fn generate(&mut self, prompt: &[u32], count: usize, sampling: &Sampling) -> Result<Vec<u32>> {
        let longest = (prompt.len() + count).min(self.decoder.spec().max_len);
        let prompt = &prompt[prompt.len() - prompt.len().min(longest.saturating_sub(count).max(1))..];
        let size = SamplerSize::of_one(prompt.len(), longest - prompt.len());
        let mut sampler = Sampler::new(&*self.dev, &self.mesh, self.writer()?, self.workspace.dtype(), &size)?;
        let prompts = [Prompt::new(0, prompt.to_vec(), 1)];
        let sampling = self.of_decoder(sampling);
        let of = (&*self.dev, &self.mesh, &mut *self.store as &mut dyn ParamStore);
        let texts = sampler.sample(of, &prompts, count, &sampling, &mut |_| true)?;
        one(texts)
    }
    /// Samples texts of up to `count` tokens: of this rank's own prompts, which are those of all ranks of its tp group.
    /// Collective.
    pub fn sample(
        &mut self,
        prompts: &[Prompt],
        count: usize,
        sampling: &Sampling,
        next: &mut dyn FnMut(&Sampled) -> bool,
    ) -> Result<Vec<SampledText>> {
        let sampling = self.of_decoder(sampling);
        let (of, sampler) = self.sampled()?;
        sampler.sample_own(of, prompts, count, &sampling, next)
    }
    /// The same of prompts that all ranks pass: data-parallel ranks share them, and all get the texts of all.
    pub fn sample_shared(
        &mut self,
        prompts: &[Prompt],
        count: usize,
        sampling: &Sampling,
        next: &mut dyn FnMut(&Sampled) -> bool,
    ) -> Result<Vec<SampledText>> {
        let sampling = self.of_decoder(sampling);
        let (of, sampler) = self.sampled()?;
        sampler.sample(of, prompts, count, &sampling, next)
    }

    /// The sampler, with no text kept, and what it samples from.
    fn sampled(&mut self) -> Result<(SampledFrom<'_>, &mut Sampler)> {
        let Some(sampler) = &mut self.sampler else { return Err(no_cache()) };
        sampler.forget();
        Ok(((&*self.dev, &self.mesh, &mut *self.store), sampler))
    }
    /// How the decoder is sampled, whose logits are already divided by the temperature of the loss.
    fn of_decoder(&self, sampling: &Sampling) -> Sampling {
        Sampling { temperature: sampling.temperature / self.temperature, ..*sampling }
    }
}
