//! A store that keeps every layer whole on one rank, for tests of the model. It also checks the order of calls.
use flatshard::base::rng::Rng;
use flatshard::base::{Category, DType, Meter, Result};
use flatshard::device::cpu::CpuDevice;
use flatshard::device::ops::documents_of_rows;
use flatshard::device::{Buf, Device};
use flatshard::nn::rotary::rows_of_forms;
use flatshard::nn::{Batch, Decoder, Grads, Groups, Init, Layout, Micro, ParamStore, Pass, Segment, Spec, Weights};
use std::sync::Arc;

#[path = "cpu.rs"]
#[allow(clippy::duplicate_mod)] // benches include this file alone
mod chosen;
use chosen::cpu;

pub fn device() -> CpuDevice {
    cpu(Meter::default())
}
/// Of a rank by itself.
pub fn groups() -> Groups {
    let dev: Arc<dyn Device> = Arc::new(device());
    Groups::solo(&dev)
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Call {
    Acquire(usize, Pass),
    Release(usize, Pass),
    Grads(usize),
    Ready(usize),
}

pub struct Plain {
    pub layouts: Vec<Layout>,
    /// f32, and what the layers read: the same, or a copy in bf16.
    pub master: Vec<Buf>,
    pub compute: Vec<Buf>,
    pub grads: Vec<Buf>,
    pub calls: Vec<Call>,
    held: Vec<bool>,
}

impl Plain {
    /// Weights from `value(segment, index)`.
    pub fn new(dev: &dyn Device, decoder: &Decoder, dtype: DType, value: impl Fn(&Segment, usize) -> f32) -> Plain {
        let layouts = decoder.layouts().to_vec();
        let alloc = |dtype, category| -> Vec<Buf> {
            layouts.iter().map(|layout| dev.alloc(dtype, layout.len, category).unwrap()).collect()
        };
        let mut store = Plain {
            master: alloc(DType::F32, Category::Params),
            compute: alloc(dtype, Category::Params),
            grads: alloc(DType::F32, Category::Grads),
            calls: Vec::new(),
            held: vec![false; layouts.len()],
            layouts,
        };
        for (layout, master) in store.layouts.iter().zip(&mut store.master) {
            let master = master.view_mut().host::<f32>("fill").unwrap();
            for segment in &layout.segments {
                for (i, w) in master[segment.range()].iter_mut().enumerate() {
                    *w = value(segment, i);
                }
            }
        }
        store.publish(dev);
        store
    }
    /// Large enough that every gradient matters: norms near 1, biases near 0, matrices of deviation `size`.
    pub fn random(dev: &dyn Device, decoder: &Decoder, dtype: DType, size: f32) -> Plain {
        Plain::new(dev, decoder, dtype, |segment, i| {
            let normal = Rng::named(7, &segment.name).normal(i as u64);
            match segment.init {
                Init::Normal(_) | Init::Uniform(_) => size * normal,
                Init::Constant(c) => c + 0.2 * normal,
            }
        })
    }
    /// Masters have changed.
    pub fn publish(&mut self, dev: &dyn Device) {
        for (master, compute) in self.master.iter().zip(&mut self.compute) {
            dev.copy(master.view(), compute.view_mut()).unwrap();
        }
    }
    pub fn zero_grads(&mut self, dev: &dyn Device) {
        self.grads.iter_mut().for_each(|g| dev.zero(g.view_mut()).unwrap());
    }
    /// Every (layer, segment).
    pub fn segments(&self) -> impl Iterator<Item = (usize, &Segment)> {
        self.layouts.iter().enumerate().flat_map(|(layer, layout)| layout.segments.iter().map(move |s| (layer, s)))
    }
    pub fn grad(&self, layer: usize, segment: &Segment) -> &[f32] {
        &self.grads[layer].view().host::<f32>("grad").unwrap()[segment.range()]
    }
    pub fn weights(&mut self, layer: usize, segment: &Segment) -> &mut [f32] {
        &mut self.master[layer].view_mut().host::<f32>("weights").unwrap()[segment.range()]
    }
    /// Every gradient, padding included.
    pub fn all_grads(&self) -> Vec<f32> {
        self.grads.iter().flat_map(|g| g.view().host::<f32>("grads").unwrap().to_vec()).collect()
    }
}

impl ParamStore for Plain {
    fn acquire(&mut self, layer: usize, pass: Pass) -> Result<Weights<'_>> {
        self.calls.push(Call::Acquire(layer, pass));
        self.held[layer] = true;
        Ok(Weights::plain(self.compute[layer].view(), &self.layouts[layer]))
    }
    fn release(&mut self, layer: usize, pass: Pass) -> Result<()> {
        self.calls.push(Call::Release(layer, pass));
        assert!(std::mem::take(&mut self.held[layer]), "layer {layer} is released but not held");
        Ok(())
    }
    fn grads(&mut self, layer: usize) -> Result<(Weights<'_>, Grads<'_>)> {
        self.calls.push(Call::Grads(layer));
        assert!(self.held[layer], "gradient of layer {layer}, which is not held");
        let layout = &self.layouts[layer];
        let weights = Weights::plain(self.compute[layer].view(), layout);
        Ok((weights, Grads::new(Some(self.grads[layer].view_mut()), layout)))
    }
    fn grads_ready(&mut self, layer: usize) -> Result<()> {
        self.calls.push(Call::Ready(layer));
        Ok(())
    }
}

/// Documents on the device.
pub struct Docs {
    tokens: Buf,
    targets: Buf,
    positions: Buf,
    cu_seqlens: Buf,
    documents: Buf,
}

impl Docs {
    pub fn new(dev: &dyn Device, tokens: &[u32], targets: &[i32], lengths: &[usize]) -> Docs {
        let mut cu_seqlens = vec![0u32];
        cu_seqlens.extend(lengths.iter().scan(0, |end, &n| {
            *end += n as u32;
            Some(*end)
        }));
        let positions: Vec<u32> = lengths.iter().flat_map(|&n| 0..n as u32).collect();
        assert_eq!(positions.len(), tokens.len());
        let buf = |dtype, bytes: &[u8]| {
            let mut buf = dev.alloc(dtype, bytes.len() / 4, Category::Other).unwrap();
            dev.upload(bytes, buf.view_mut()).unwrap();
            buf
        };
        Docs {
            tokens: buf(DType::U32, bytemuck::cast_slice(tokens)),
            targets: buf(DType::I32, bytemuck::cast_slice(targets)),
            positions: buf(DType::U32, bytemuck::cast_slice(&positions)),
            cu_seqlens: buf(DType::U32, bytemuck::cast_slice(&cu_seqlens)),
            documents: buf(DType::U32, bytemuck::cast_slice(&documents_of_rows(&cu_seqlens).collect::<Vec<_>>())),
        }
    }
    /// With the rows of the rotation table of `spec` as positions, if short and long documents rotate differently.
    pub fn turned(mut self, dev: &dyn Device, spec: &Spec) -> Docs {
        let Some(original) = spec.long_from() else { return self };
        let words = |buf: &Buf| {
            let mut words = vec![0u32; buf.view().len()];
            dev.download(buf.view(), bytemuck::cast_slice_mut(&mut words)).unwrap();
            words
        };
        let (mut positions, borders) = (words(&self.positions), words(&self.cu_seqlens));
        rows_of_forms(&mut positions, &borders, original);
        dev.upload(bytemuck::cast_slice(&positions), self.positions.view_mut()).unwrap();
        self
    }
    /// Random tokens and targets; every `ignore`-th target carries no loss (0: all do).
    pub fn random(dev: &dyn Device, seed: u64, vocab: usize, lengths: &[usize], ignore: usize) -> Docs {
        let n: usize = lengths.iter().sum();
        let rng = Rng::new(seed, 0);
        let draw = |i: usize| (rng.u64(i as u64) % vocab as u64) as u32;
        let tokens: Vec<u32> = (0..n).map(draw).collect();
        let target = |i: usize| if ignore > 0 && i % ignore == 1 { -100 } else { draw(n + i) as i32 };
        Docs::new(dev, &tokens, &(0..n).map(target).collect::<Vec<_>>(), lengths)
    }
    pub fn batch(&self) -> Batch<'_> {
        Batch {
            tokens: self.tokens.view(),
            targets: self.targets.view(),
            positions: self.positions.view(),
            cu_seqlens: self.cu_seqlens.view(),
            documents: self.documents.view(),
            rows: None,
            padding: 0,
            labeled: None,
        }
    }
    pub fn targets(&self) -> &[i32] {
        self.targets.view().host("targets").unwrap()
    }
}

pub fn dot(a: &[f32], b: &[f32]) -> f64 {
    a.iter().zip(b).map(|(&a, &b)| a as f64 * b as f64).sum()
}
/// Relative distance in the Euclidean norm.
pub fn distance(got: &[f32], want: &[f32]) -> f64 {
    let difference: Vec<f32> = got.iter().zip(want).map(|(g, w)| g - w).collect();
    (dot(&difference, &difference) / dot(want, want)).sqrt()
}

/// The decoder's input for a step besides the data.
pub struct Told {
    pub loss_scale: f32,
    scale: Buf,
    keys: Buf,
    aux: Buf,
}
impl Told {
    /// Without dropout.
    pub fn new(dev: &dyn Device, loss_scale: f32) -> Told {
        let mut scale = dev.alloc(DType::F32, 1, Category::Other).unwrap();
        dev.upload(bytemuck::cast_slice(&[loss_scale]), scale.view_mut()).unwrap();
        let aux = dev.alloc(DType::F32, 1, Category::Other).unwrap();
        Told { loss_scale, scale, keys: dev.alloc(DType::U32, 0, Category::Other).unwrap(), aux }
    }
    pub fn dropping(dev: &dyn Device, decoder: &Decoder, loss_scale: f32, key: u64) -> Told {
        let mut words = vec![0u32; decoder.dropout_words()];
        if !words.is_empty() {
            decoder.dropout_keys(key, key, &mut words);
        }
        let mut keys = dev.alloc(DType::U32, words.len(), Category::Other).unwrap();
        dev.upload(bytemuck::cast_slice(&words), keys.view_mut()).unwrap();
        Told { keys, ..Told::new(dev, loss_scale) }
    }
    /// With this factor of the load-balancing loss.
    pub fn aux(mut self, dev: &dyn Device, factor: f32) -> Told {
        dev.upload(bytemuck::cast_slice(&[factor]), self.aux.view_mut()).unwrap();
        self
    }
    pub fn micro(&self) -> Micro<'_> {
        Micro { loss_scale: self.scale.view(), dropout_keys: self.keys.view(), aux_scale: self.aux.view() }
    }
}
