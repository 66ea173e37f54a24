//! DDP, which is also NO_SHARD: every rank stores all weights, and gradients are all-reduced in buckets while backward
//! runs. Never gathers, never knows which layers a bucket holds.
//!
//! A bucket is a unit: consecutive blocks whose gradients fill `bucket_bytes`. The root has its own, because its
//! gradient is complete last. A bucket's all_reduce starts when its last layer is ready, at the accumulation boundary
//! only.
//!
//! Bytes per rank for P parameters in bf16 (f32 in parentheses): params 6P (4P), grads 4P, AdamW's moments 8P; no
//! slots, but 2P where gradients are reduced in 2 bytes. Frozen parameters cost only their params; with adapters, 2P
//! (4P).
use super::begun::Begun;
use super::flat::{Flat, Unit, UnitPart, Wrap};
use super::kept::{Kept, narrow};
use super::{Offload, PackedShard, Shard, Store, Strategy};
use crate::base::{Category, DType, Error, Result};
use crate::comm::{Axis, Collective, CommUse, Mesh, Reduce, Tag, Ticket};
use crate::device::{Buf, Device};
use crate::nn::{Grads, Layout, ParamStore, Pass, Storage, Weights};
use std::sync::Arc;

#[derive(Clone, PartialEq, Debug)]
pub struct ReplicatedOptions {
    /// Compute dtype: f32, bf16 or f16. Gradients are f32.
    pub dtype: DType,
    /// Dtype of master weights: f32; or bf16 if that is the compute dtype, and then they are what is gathered.
    pub masters: DType,
    /// Dtype of gradients in the all_reduce: f32, bf16 or f16. Each rank's gradient is rounded once, and so is the sum.
    pub reduce_dtype: DType,
    /// Bytes of gradient reduced together. PyTorch's default, 25 MiB, is [`ReplicatedOptions::BUCKET`].
    pub bucket_bytes: usize,
    /// At most [`Offload::Optimizer`]: layers compute with these weights, and peers reduce these gradients.
    pub offload: Offload,
}

/// f32, with buckets as large as PyTorch's.
impl Default for ReplicatedOptions {
    fn default() -> ReplicatedOptions {
        ReplicatedOptions {
            dtype: DType::F32,
            masters: DType::F32,
            reduce_dtype: DType::F32,
            bucket_bytes: ReplicatedOptions::BUCKET,
            offload: Offload::Nothing,
        }
    }
}

impl ReplicatedOptions {
    pub const BUCKET: usize = 25 << 20;

    fn flat(&self, layouts: &[Layout]) -> Flat {
        Flat::new(layouts, Wrap::Size(self.bucket_bytes.div_ceil(DType::F32.size())), 1)
    }
}

impl Strategy for ReplicatedOptions {
    fn name(&self) -> &'static str {
        "ddp"
    }
    fn dtype(&self) -> DType {
        self.dtype
    }
    fn masters(&self) -> DType {
        self.masters
    }
    fn offload(&self) -> Offload {
        self.offload
    }
    fn store(&self, dev: Arc<dyn Device>, mesh: &Mesh, layouts: &[Layout]) -> Result<Box<dyn Store>> {
        if mesh.sizes.ep > 1 {
            return Err(Error::input(format!(
                "ep {} with replicated parameters: every rank has all experts, and sums their gradients over all ranks; use \
                 ep 1, or shard the parameters",
                mesh.sizes.ep
            )));
        }
        Ok(Box::new(Replicated::new(dev, mesh.group(Axis::Loss).clone(), layouts, self)?))
    }
}

struct Bucket {
    /// One per part of the unit.
    parts: Vec<Kept>,
    /// Gradient of the trainable part.
    grad: Option<Buf>,
    /// The reduce buffer, where that is not `grad` itself.
    wire: Option<Buf>,
    reducing: Option<Ticket>,
}

pub struct Replicated {
    dev: Arc<dyn Device>,
    group: Arc<dyn Collective>,
    flat: Flat,
    buckets: Vec<Bucket>,
    begun: Begun,
    last: bool,
}

impl Replicated {
    pub fn new(
        dev: Arc<dyn Device>,
        group: Arc<dyn Collective>,
        layouts: &[Layout],
        options: &ReplicatedOptions,
    ) -> Result<Replicated> {
        let flat = options.flat(layouts);
        let kept = |part: &UnitPart| {
            Kept::new(&*dev, part.padded, part.storage, (options.dtype, options.masters), options.offload)
        };
        let wires = narrow(options.reduce_dtype, group.size());
        let travelling = |dtype, len, category| group.alloc(dtype, len, CommUse::Reduced, category);
        let grad = |part: &UnitPart| {
            let _for = dev.meter().purpose("gradient buckets");
            match wires {
                None => travelling(DType::F32, part.padded, Category::Grads),
                Some(_) => dev.alloc(DType::F32, part.padded, Category::Grads),
            }
        };
        let wire = |part: &UnitPart| wires.map(|dtype| travelling(dtype, part.padded, Category::Slots)).transpose();
        let bucket = |unit: &Unit| {
            Ok(Bucket {
                parts: unit.parts.iter().map(kept).collect::<Result<_>>()?,
                grad: unit.part(Storage::Trained).map(grad).transpose()?,
                wire: unit.part(Storage::Trained).map(wire).transpose()?.flatten(),
                reducing: None,
            })
        };
        let buckets = flat.units.iter().map(bucket).collect::<Result<_>>()?;
        Ok(Replicated { dev, group, flat, buckets, begun: Begun::new(layouts), last: true })
    }
}

/// The weights that a layer computes with.
fn weights<'a>(flat: &'a Flat, layer: usize, parts: &'a [Kept]) -> Result<Weights<'a>> {
    let home = flat.home(layer);
    let mut buffers = [None; Storage::BUFFERS.len()];
    let units = flat.units[home.unit].parts.iter().zip(parts);
    units.for_each(|(part, kept)| buffers[part.storage.buffer()] = Some(kept.compute()));
    Weights::new(buffers, None, &home.layout)
}

impl ParamStore for Replicated {
    fn acquire(&mut self, layer: usize, _: Pass) -> Result<Weights<'_>> {
        weights(&self.flat, layer, &self.buckets[self.flat.home(layer).unit].parts)
    }

    fn release(&mut self, _: usize, _: Pass) -> Result<()> {
        Ok(())
    }

    fn grads(&mut self, layer: usize) -> Result<(Weights<'_>, Grads<'_>)> {
        let home = self.flat.home(layer);
        let Bucket { parts, grad, .. } = &mut self.buckets[home.unit];
        let weights = weights(&self.flat, layer, parts)?;
        let layers = self.flat.units[home.unit].layers.clone();
        if let Some(grad) = grad {
            self.begun.clear(&*self.dev, layers, grad.view_mut())?;
        }
        let flat = grad.as_mut().map(Buf::view_mut);
        Ok((weights, self.begun.grads(&*self.dev, layer, flat, &home.layout)))
    }

    fn grads_ready(&mut self, layer: usize) -> Result<()> {
        let unit = self.flat.home(layer).unit;
        let complete = layer == self.flat.units[unit].layers.start; // the last of the unit that backward visits
        if complete && self.last {
            let bucket = &mut self.buckets[unit];
            if let Some(grad) = &mut bucket.grad {
                let layers = self.flat.units[unit].layers.clone();
                self.begun.complete(&*self.dev, layers, grad.view_mut(), |layer| &self.flat.home(layer).layout)?;
                let travels = match &mut bucket.wire {
                    None => grad,
                    Some(wire) => {
                        self.dev.copy(grad.view(), wire.view_mut())?;
                        wire
                    }
                };
                let ticket = self.group.all_reduce(Tag::new("reduce", unit), travels.view_mut(), Reduce::Sum)?;
                bucket.reducing = Some(ticket);
            }
        }
        Ok(())
    }
}

impl Store for Replicated {
    fn units(&self) -> usize {
        self.flat.units.len()
    }
    fn replicated(&self) -> bool {
        true
    }
    fn begin_micro_batch(&mut self, first: bool, last: bool) -> Result<()> {
        self.last = last;
        if first {
            self.begun.reset();
        }
        Ok(())
    }
    fn finish_grads(&mut self) -> Result<()> {
        for bucket in &mut self.buckets {
            if let Some(ticket) = bucket.reducing.take() {
                self.group.wait(ticket)?;
                if let (Some(wire), Some(grad)) = (&bucket.wire, &mut bucket.grad) {
                    self.dev.copy(wire.view(), grad.view_mut())?;
                }
            }
        }
        Ok(())
    }
    fn for_each_shard(&mut self, f: &mut dyn FnMut(Shard<'_>) -> Result<()>) -> Result<()> {
        for (unit, (flat, bucket)) in self.flat.units.iter().zip(&mut self.buckets).enumerate() {
            let parts = flat.parts.iter().zip(&mut bucket.parts);
            for (part, kept) in parts.filter(|(part, _)| part.storage != Storage::Nf4) {
                f(Shard {
                    unit,
                    layout: &part.layout,
                    start: 0,
                    master: kept.master.view_mut(),
                    param: kept.param.as_mut().map(Buf::view_mut),
                    grad: bucket.grad.as_mut().filter(|_| part.storage == Storage::Trained).map(Buf::view_mut),
                })?;
            }
        }
        Ok(())
    }
    fn for_each_packed(&mut self, f: &mut dyn FnMut(PackedShard<'_>) -> Result<()>) -> Result<()> {
        let units = self.flat.units.iter().zip(&mut self.buckets);
        let parts = units.flat_map(|(flat, bucket)| flat.parts.iter().zip(&mut bucket.parts));
        parts.filter(|(part, _)| part.storage == Storage::Nf4).try_for_each(|(part, kept)| {
            f(PackedShard { layout: &part.layout, start: 0, bytes: kept.master.view_mut() })
        })
    }
    fn weights_changed(&mut self) -> Result<()> {
        Ok(())
    }
}
