//! Reference FSDP, after PyTorch's FSDP2: each tensor is sharded along its first dimension, gathered when its layer is
//! acquired, dropped when the layer is released, and reduced when its gradient is complete. Collectives run one at a
//! time, each awaited immediately: no flat units, no prefetch, no rotating slots. The simplest code that is obviously
//! correct, and the oracle for the manual store.
//!
//! ```text
//! tensor (5, 3)  | row 0 | row 1 | row 2 | row 3 | row 4 | ----- |     3 ranks own ceil(5 / 3) = 2 rows each
//! ```
//!
//! Shards are rounded up to whole blocks of [`ALIGN`] elements, so that the gradient norm does not depend on the
//! sharding. They equal FSDP2's wherever a rank's rows are a multiple of 256 elements, as in every model of common
//! size. In tiny models later ranks own less.
//!
//! Besides the waiting, this costs one collective per tensor and extra copies: a gathered tensor ends in padding, so it
//! is gathered elsewhere and copied into the layer's buffer, and each gradient is copied out of it.
//!
//! A packed matrix is a row of bytes, gathered into bytes.
//!
//! Replicas of the shards (HYBRID_SHARD) sum their gradients at the end of the step.
//!
//! Bytes per rank for P parameters over N ranks, root R, largest block B, largest tensor T (bf16; f32 in brackets):
//! params, grads and AdamW's moments as in `sharded`; weight slots 2 (R + B) [4 (R + B)], or all weights with
//! SHARD_GRAD_OP; gradients 4 (R + B), or 4 P when accumulated; 2 T [4 T] and 4 T as gather and reduce buffers.
use super::begun::Begun;
use super::kept::{Kept, narrow};
use super::replicas::Replicas;
use super::{Offload, PackedShard, Shard, Store, Strategy};
use crate::base::{Category, DType, Error, Result};
use crate::comm::{Axis, Collective, CommUse, Mesh, Tag};
use crate::device::{ALIGN, Buf, Device};
use crate::nn::{Grads, Layout, ParamStore, Pass, ROOT, Segment, Weights};
use std::sync::Arc;

#[derive(Clone, PartialEq, Debug)]
pub struct ReferenceOptions {
    /// Compute dtype, in which weights are gathered: f32, bf16 or f16. Gradients are f32.
    pub dtype: DType,
    /// Dtype of master weights: f32; or bf16 if that is the compute dtype, and then they are what is gathered.
    pub masters: DType,
    /// Dtype of gradients in the reduce-scatter within a replica: f32, bf16 or f16, rounded once on each rank. Sums,
    /// and all_reduces between replicas, are always f32.
    pub reduce_dtype: DType,
    /// True (FULL_SHARD): gather a layer for forward and again for backward. False (SHARD_GRAD_OP): once per step.
    pub reshard: bool,
    /// Micro-batches per step.
    pub grad_accum: usize,
    /// Reduce after every micro-batch instead of accumulating full gradients and reducing once.
    pub sync_each_batch: bool,
    pub offload: Offload,
}

/// FULL_SHARD in f32 with one micro-batch per step.
impl Default for ReferenceOptions {
    fn default() -> ReferenceOptions {
        ReferenceOptions {
            dtype: DType::F32,
            masters: DType::F32,
            reduce_dtype: DType::F32,
            reshard: true,
            grad_accum: 1,
            sync_each_batch: false,
            offload: Offload::Nothing,
        }
    }
}

impl ReferenceOptions {
    /// The dtype in which a tensor's gradient is reduced.
    fn wire(&self, ranks: usize) -> DType {
        narrow(self.reduce_dtype, ranks).unwrap_or(DType::F32)
    }
    fn accumulates(&self) -> bool {
        self.grad_accum > 1 && !self.sync_each_batch
    }
    /// How many layers can be unsharded at once: the root and one block, or all.
    fn weights(&self, layers: usize) -> usize {
        if self.reshard { layers.min(2) } else { layers }
    }
    fn grads(&self, layers: usize) -> usize {
        if self.accumulates() { layers } else { layers.min(2) }
    }
}

/// Which of `buffers` layer-sized buffers a layer uses: its own, or the one that all blocks share.
fn buffer(layer: usize, buffers: usize) -> usize {
    layer.min(buffers - 1)
}

/// Elements of a tensor that each rank owns.
fn share(segment: &Segment, ranks: usize) -> usize {
    if segment.is_packed() {
        return segment.bytes().len().div_ceil(ranks).next_multiple_of(ALIGN);
    }
    let rows = segment.shape.first().copied().unwrap_or(1).max(1);
    (rows.div_ceil(ranks) * (segment.len() / rows)).next_multiple_of(ALIGN)
}

struct ShardedTensor {
    /// A layout with only this tensor.
    layout: Layout,
    /// The tensor's position in the layer.
    segment: Segment,
    index: usize,
    kept: Kept,
    /// `None` if frozen.
    grad: Option<Buf>,
}

impl Strategy for ReferenceOptions {
    fn name(&self) -> &'static str {
        "fsdp_reference"
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
        Ok(Box::new(Reference::new(dev, mesh, layouts, self)?))
    }
}

pub struct Reference {
    dev: Arc<dyn Device>,
    group: Arc<dyn Collective>,
    replicas: Replicas,
    options: ReferenceOptions,
    layouts: Vec<Layout>,
    /// Indexed by layer.
    tensors: Vec<Vec<ShardedTensor>>,
    /// Buffers for whole layers.
    weights: Vec<LayerWeights>,
    /// `None` where all tensors are frozen.
    grads: Vec<Option<Buf>>,
    /// A padded tensor, as gather output and reduce input; the first also for packed tensors.
    gathered: Buf,
    gathered_bytes: Option<Buf>,
    reduced: Buf,
    begun: Begun,
    first: bool,
    last: bool,
}

struct LayerWeights {
    full: Buf,
    packed: Buf,
    /// The layer it holds.
    holds: Option<usize>,
}

/// Lengths of all buffers except the tensors' own.
struct Lengths {
    /// Elements and packed bytes.
    weights: Vec<[usize; 2]>,
    grads: Vec<usize>,
    gathered: [usize; 2],
    reduced: usize,
}

impl Lengths {
    fn new(layouts: &[Layout], options: &ReferenceOptions, ranks: usize) -> Lengths {
        let learns = |layout: &Layout| layout.segments.iter().any(|s| s.is_trained());
        let (mut weights, mut grads) =
            (vec![[0; 2]; options.weights(layouts.len())], vec![0; options.grads(layouts.len())]);
        for (layer, layout) in layouts.iter().enumerate() {
            let longest = &mut weights[buffer(layer, options.weights(layouts.len()))];
            *longest = [layout.len.max(longest[0]), layout.packed.max(longest[1])];
            let longest = &mut grads[buffer(layer, options.grads(layouts.len()))];
            *longest = if learns(layout) { layout.len.max(*longest) } else { *longest };
        }
        let segments = || layouts.iter().flat_map(|l| &l.segments);
        let padded = |s: &Segment| ranks * share(s, ranks);
        let reduced = segments().filter(|s| s.is_trained()).map(padded).max().unwrap_or(0);
        let longest = |packed| segments().filter(|s| s.is_packed() == packed).map(padded).max().unwrap_or(0);
        Lengths { weights, grads, gathered: [longest(false), longest(true)], reduced }
    }
}

impl Reference {
    pub fn new(dev: Arc<dyn Device>, mesh: &Mesh, layouts: &[Layout], options: &ReferenceOptions) -> Result<Reference> {
        let group = mesh.group(Axis::Fsdp).clone();
        let replicas = Replicas::new(mesh, layouts.iter().map(|l| l.segments.len()).sum());
        let mut indices = 0..;
        let mut tensor = |segment: &Segment| {
            let len = share(segment, group.size());
            let mut layout = Layout::default();
            layout.place(segment.clone());
            Ok(ShardedTensor {
                layout,
                segment: segment.clone(),
                index: indices.next().unwrap_or_default(),
                kept: Kept::new(&*dev, len, segment.storage, (options.dtype, options.masters), options.offload)?,
                grad: segment.is_trained().then(|| replicas.grad(&*dev, options.offload, len)).transpose()?,
            })
        };
        let mut tensors =
            |layout: &Layout| layout.segments.iter().map(&mut tensor).collect::<Result<Vec<ShardedTensor>>>();
        let tensors = layouts.iter().map(&mut tensors).collect::<Result<_>>()?;
        let Lengths { weights, grads, gathered, reduced } = Lengths::new(layouts, options, group.size());
        let full = |[len, bytes]: [usize; 2]| {
            let alloc = |dtype, len| dev.alloc(dtype, len, Category::Slots);
            Ok(LayerWeights { full: alloc(options.dtype, len)?, packed: alloc(DType::U8, bytes)?, holds: None })
        };
        let travelling = |dtype, len| group.alloc(dtype, len, CommUse::Gathered, Category::Slots);
        let grad = |len| (len > 0).then(|| dev.alloc(DType::F32, len, Category::Slots)).transpose();
        Ok(Reference {
            weights: weights.into_iter().map(full).collect::<Result<_>>()?,
            grads: grads.into_iter().map(grad).collect::<Result<_>>()?,
            gathered: travelling(options.dtype, gathered[0])?,
            gathered_bytes: (gathered[1] > 0).then(|| travelling(DType::U8, gathered[1])).transpose()?,
            reduced: group.alloc(options.wire(group.size()), reduced, CommUse::Reduced, Category::Slots)?,
            options: options.clone(),
            layouts: layouts.to_vec(),
            tensors,
            begun: Begun::new(layouts),
            first: true,
            last: true,
            dev,
            group,
            replicas,
        })
    }
}

fn weights<'a>(buffers: &'a [LayerWeights], layouts: &'a [Layout], layer: usize) -> Result<Weights<'a>> {
    match &buffers[buffer(layer, buffers.len())] {
        LayerWeights { full, packed, holds } if *holds == Some(layer) => {
            let full = Some(full.view());
            Weights::new([full, None, full, Some(packed.view())], None, &layouts[layer])
        }
        _ => Err(Error::op("weights", format!("layer {layer} is not acquired"))),
    }
}

impl ParamStore for Reference {
    fn acquire(&mut self, layer: usize, _: Pass) -> Result<Weights<'_>> {
        let slot = buffer(layer, self.weights.len());
        let LayerWeights { full, packed, holds } = &mut self.weights[slot];
        if *holds != Some(layer) {
            for ShardedTensor { segment, index, kept, .. } in &self.tensors[layer] {
                let shard = kept.compute();
                let padded = 0..shard.len() * self.group.size();
                let (gathered, full) = match &mut self.gathered_bytes {
                    Some(gathered) if segment.is_packed() => (gathered, &mut *packed),
                    _ => (&mut self.gathered, &mut *full),
                };
                let into = gathered.view_mut().slice(padded);
                let ticket = self.group.all_gather(Tag::new("gather", *index), shard, into)?;
                self.group.wait(ticket)?;
                let to = if segment.is_packed() { segment.bytes() } else { segment.range() };
                self.dev.copy(gathered.view().slice(0..to.len()), full.view_mut().slice(to))?;
                self.group.release(ticket)?;
            }
            *holds = Some(layer);
        }
        weights(&self.weights, &self.layouts, layer)
    }

    fn release(&mut self, layer: usize, pass: Pass) -> Result<()> {
        let slot = buffer(layer, self.weights.len());
        // The head and the embedding's gradient still need the root.
        if self.options.reshard && (layer != ROOT || pass != Pass::Forward) {
            self.weights[slot].holds = None;
        }
        Ok(())
    }

    fn grads(&mut self, layer: usize) -> Result<(Weights<'_>, Grads<'_>)> {
        let slot = buffer(layer, self.grads.len());
        if let Some(full) = &mut self.grads[slot] {
            self.begun.clear(&*self.dev, layer..layer + 1, full.view_mut())?;
        }
        let flat = self.grads[slot].as_mut().map(Buf::view_mut);
        let grads = self.begun.grads(&*self.dev, layer, flat, &self.layouts[layer]);
        Ok((weights(&self.weights, &self.layouts, layer)?, grads))
    }

    fn grads_ready(&mut self, layer: usize) -> Result<()> {
        if self.options.accumulates() && !self.last {
            return Ok(());
        }
        let accumulate = !self.options.accumulates() && !self.first;
        let slot = buffer(layer, self.grads.len());
        if let Some(full) = &mut self.grads[slot] {
            self.begun.complete(&*self.dev, layer..layer + 1, full.view_mut(), |layer| &self.layouts[layer])?;
        }
        for ShardedTensor { segment, index, grad, .. } in &mut self.tensors[layer] {
            let (Some(full), Some(shard)) = (&self.grads[slot], grad) else { continue };
            let padded = 0..shard.len() * self.group.size();
            let (own, padding) = self.reduced.view_mut().slice(padded.clone()).split_at(segment.len());
            self.dev.copy(full.view().slice(segment.range()), own)?;
            if !padding.is_empty() {
                self.dev.zero(padding)?;
            }
            let from = self.reduced.view_mut().slice(padded);
            let tag = Tag::new("reduce", *index);
            let ticket = self.group.reduce_scatter(tag, from, shard.view_mut(), accumulate)?;
            self.group.wait(ticket)?;
            self.group.wait_sent(ticket)?;
        }
        Ok(())
    }
}

impl Store for Reference {
    /// Each tensor counts as a unit.
    fn units(&self) -> usize {
        self.tensors.iter().map(Vec::len).sum()
    }
    fn replicated(&self) -> bool {
        false
    }
    fn begin_micro_batch(&mut self, first: bool, last: bool) -> Result<()> {
        (self.first, self.last) = (first, last);
        if first {
            self.begun.reset();
        }
        Ok(())
    }
    fn finish_grads(&mut self) -> Result<()> {
        for ShardedTensor { index, grad, .. } in self.tensors.iter_mut().flatten() {
            grad.as_mut().map_or(Ok(()), |grad| self.replicas.sum(*index, grad.view_mut()))?;
            self.replicas.finish()?;
        }
        Ok(())
    }
    fn for_each_shard(&mut self, f: &mut dyn FnMut(Shard<'_>) -> Result<()>) -> Result<()> {
        let rank = self.group.rank();
        let tensors = self.tensors.iter_mut().flatten().filter(|tensor| !tensor.segment.is_packed());
        for ShardedTensor { layout, index, kept, grad, .. } in tensors {
            f(Shard {
                unit: *index,
                layout,
                start: rank * kept.master.len(),
                master: kept.master.view_mut(),
                param: kept.param.as_mut().map(Buf::view_mut),
                grad: grad.as_mut().map(Buf::view_mut),
            })?;
        }
        Ok(())
    }
    fn for_each_packed(&mut self, f: &mut dyn FnMut(PackedShard<'_>) -> Result<()>) -> Result<()> {
        let rank = self.group.rank();
        let mut packed = self.tensors.iter_mut().flatten().filter(|tensor| tensor.segment.is_packed());
        packed.try_for_each(|ShardedTensor { layout, kept, .. }| {
            f(PackedShard { layout, start: rank * kept.master.len(), bytes: kept.master.view_mut() })
        })
    }
    fn weights_changed(&mut self) -> Result<()> {
        self.weights.iter_mut().for_each(|weights| weights.holds = None);
        Ok(())
    }
}
