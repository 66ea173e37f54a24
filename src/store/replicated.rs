//! DDP, which is also NO_SHARD: every rank keeps all weights; gradients are all-reduced in buckets while backward goes
//! on. Never gathers, never knows which layer a bucket holds.
//!
//! A bucket is a unit: consecutive blocks until their gradients fill `bucket_bytes`, the root by itself because its
//! gradient is complete last. Its all-reduce starts when its last layer is ready, at the accumulation boundary only.
//!
//! Bytes of a rank for P parameters in bf16, and in f32 in parentheses: params 6P (4P), grads 4P, AdamW's moments 8P;
//! no slots, but 2P where gradients travel in 2 bytes. Frozen parameters cost their params only; beside adapters 2P
//! (4P).
use super::flat::{Flat, Unit, UnitPart, Wrap};
use super::kept::{self, Kept, narrow};
use super::{Offload, Shard, Store, Strategy};
use crate::base::{Category, DType, Result};
use crate::comm::{Collective, CommUse, Mesh, Reduce, Tag, Ticket};
use crate::device::{Buf, Device};
use crate::nn::{Grads, Layout, ParamStore, Pass, Weights};
use std::sync::Arc;

#[derive(Clone, PartialEq, Debug)]
pub struct ReplicatedOptions {
    /// What is computed with: f32, bf16 or f16. Masters and gradients are f32.
    pub dtype: DType,
    /// What gradients travel in between ranks: f32, or bf16 or f16, each rank's rounded once and so is their sum.
    pub reduce_dtype: DType,
    /// Gradients reduced together. PyTorch's default, 25 MiB, is [`ReplicatedOptions::BUCKET`].
    pub bucket_bytes: usize,
    /// [`Offload::Optimizer`] at most: layers compute with these weights, and peers reduce these gradients.
    pub offload: Offload,
}

/// f32, in buckets as large as PyTorch's.
impl Default for ReplicatedOptions {
    fn default() -> ReplicatedOptions {
        ReplicatedOptions {
            dtype: DType::F32,
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
    fn offload(&self) -> Offload {
        self.offload
    }
    fn store(&self, dev: Arc<dyn Device>, mesh: &Mesh, layouts: &[Layout]) -> Result<Box<dyn Store>> {
        Ok(Box::new(Replicated::new(dev, mesh.loss.clone(), layouts, self)?))
    }
}

struct Bucket {
    /// One a part of the unit.
    parts: Vec<Kept>,
    /// Of the trainable part.
    grad: Option<Buf>,
    /// What travels, where that is not `grad` itself.
    wire: Option<Buf>,
    /// `grad` was zeroed for the step's sum.
    collecting: bool,
    reducing: Option<Ticket>,
}

pub struct Replicated {
    dev: Arc<dyn Device>,
    group: Arc<dyn Collective>,
    flat: Flat,
    buckets: Vec<Bucket>,
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
        let kept = |part: &UnitPart| Kept::new(&*dev, part.padded, part.keep, options.dtype, options.offload);
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
                grad: unit.part(true).map(grad).transpose()?,
                wire: unit.part(true).map(wire).transpose()?.flatten(),
                collecting: false,
                reducing: None,
            })
        };
        let buckets = flat.units.iter().map(bucket).collect::<Result<_>>()?;
        Ok(Replicated { dev, group, flat, buckets, last: true })
    }

    /// Zeroes the bucket's gradient at its first use in a step.
    fn collect(&mut self, unit: usize) -> Result<()> {
        let bucket = &mut self.buckets[unit];
        match &mut bucket.grad {
            Some(grad) if !bucket.collecting => {
                bucket.collecting = true;
                self.dev.zero(grad.view_mut())
            }
            _ => Ok(()),
        }
    }
}

/// What a layer computes with.
fn weights<'a>(flat: &'a Flat, layer: usize, parts: &'a [Kept]) -> Result<Weights<'a>> {
    let home = flat.home(layer);
    let of = |trainable| flat.units[home.unit].parts.iter().position(|p| p.trainable == trainable);
    kept::weights(home.unit, [true, false].map(|trainable| Some(parts[of(trainable)?].compute())), &home.layout)
}

impl ParamStore for Replicated {
    fn acquire(&mut self, layer: usize, _: Pass) -> Result<Weights<'_>> {
        weights(&self.flat, layer, &self.buckets[self.flat.home(layer).unit].parts)
    }

    fn release(&mut self, _: usize, _: Pass) -> Result<()> {
        Ok(())
    }

    fn grads(&mut self, layer: usize) -> Result<(Weights<'_>, Grads<'_>)> {
        self.collect(self.flat.home(layer).unit)?;
        let home = self.flat.home(layer);
        let Bucket { parts, grad, .. } = &mut self.buckets[home.unit];
        let weights = weights(&self.flat, layer, parts)?;
        Ok((weights, Grads { flat: grad.as_mut().map(Buf::view_mut), layout: &home.layout }))
    }

    fn grads_ready(&mut self, layer: usize) -> Result<()> {
        let unit = self.flat.home(layer).unit;
        let complete = layer == self.flat.units[unit].layers.start; // backward visits it last
        if complete && self.last {
            self.collect(unit)?; // a bucket without gradient in this step counts as zero
            let bucket = &mut self.buckets[unit];
            bucket.collecting = false;
            if let Some(grad) = &mut bucket.grad {
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
    fn name(&self) -> &'static str {
        "ddp"
    }
    fn units(&self) -> usize {
        self.flat.units.len()
    }
    fn replicated(&self) -> bool {
        true
    }
    fn begin_micro_batch(&mut self, first: bool, last: bool) -> Result<()> {
        self.last = last;
        if first {
            self.buckets.iter_mut().for_each(|b| b.collecting = false);
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
            for (part, kept) in flat.parts.iter().zip(&mut bucket.parts) {
                f(Shard {
                    unit,
                    layout: &part.layout,
                    start: 0,
                    master: kept.master.view_mut(),
                    param: kept.param.as_mut().map(Buf::view_mut),
                    grad: bucket.grad.as_mut().filter(|_| part.trainable).map(Buf::view_mut),
                })?;
            }
        }
        Ok(())
    }
    fn weights_changed(&mut self) -> Result<()> {
        Ok(())
    }
}
