//! The interface of a store for the optimizer, clipping and checkpoints: shards in a fixed order, with gradients that
//! are ready at defined points. Never says how parameters are stored.
use super::offload::Offload;
use crate::base::{DType, Result};
use crate::comm::Mesh;
use crate::device::{Device, ViewMut};
use crate::nn::{Layout, ParamStore};
use std::ops::Range;
use std::sync::Arc;

/// A part of a unit: its tensors in one of the buffers of [`crate::nn::Storage::BUFFERS`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct PartId {
    pub unit: usize,
    pub buffer: usize,
}

/// What this rank owns of a unit's trainable or frozen tensors, except packed ones: a contiguous range of their flat
/// buffer, possibly ending in padding.
pub struct Shard<'a> {
    pub unit: usize,
    /// Segments of the whole flat buffer.
    pub layout: &'a Layout,
    /// Offset of the shard in the flat buffer, a multiple of [`crate::device::ALIGN`]. Its length is `master.len()`.
    pub start: usize,
    /// Master weights; for weights frozen beneath adapters, the compute-dtype weights. [`super::assign`] writes and
    /// [`super::values`] reads any.
    pub master: ViewMut<'a>,
    /// The compute-dtype copy that gathers read or codes are made of, if separate from the master.
    pub param: Option<ViewMut<'a>>,
    /// The step's reduced gradient (f32, summed over ranks); `None` if the shard is frozen.
    pub grad: Option<ViewMut<'a>>,
}

impl Shard<'_> {
    pub fn part(&self) -> PartId {
        let buffer = self.layout.segments.first().map_or(0, |segment| segment.storage.buffer());
        PartId { unit: self.unit, buffer }
    }
    /// The intersection of `range` (in the flat buffer) with this shard, relative to the shard's start.
    pub fn owned(&self, range: Range<usize>) -> Option<Range<usize>> {
        let (from, to) = (range.start.max(self.start), range.end.min(self.start + self.master.len()));
        (from < to).then(|| from - self.start..to - self.start)
    }
}

/// What this rank owns of a unit's packed matrices ([`crate::base::nf4`]): a contiguous range of their bytes.
pub struct PackedShard<'a> {
    /// Segments of the whole buffer.
    pub layout: &'a Layout,
    /// Offset of the shard in it, a multiple of [`crate::device::ALIGN`].
    pub start: usize,
    pub bytes: ViewMut<'a>,
}

/// How parameters, gradients and optimizer state are spread over the ranks of a mesh: the options of a store.
pub trait Strategy: Send + Sync {
    fn name(&self) -> &'static str;
    /// The compute dtype.
    fn dtype(&self) -> DType;
    /// The dtype of master weights: f32, or bf16 if that is the compute dtype.
    fn masters(&self) -> DType {
        DType::F32
    }
    /// What is offloaded to host memory.
    fn offload(&self) -> Offload;
    /// Allocates all buffers for parameters and gradients. Collective: every rank of the mesh calls it alike. `layouts`
    /// describe this rank's pieces of the tensors.
    fn store(&self, dev: Arc<dyn Device>, mesh: &Mesh, layouts: &[Layout]) -> Result<Box<dyn Store>>;
}

/// Owns the parameters. Every call visits shards in the same order.
pub trait Store: ParamStore {
    fn units(&self) -> usize;
    /// Whether every rank of the group owns everything (DDP). Norms are then not summed over ranks, and only one rank
    /// writes.
    fn replicated(&self) -> bool;
    /// Call before each micro-batch of a training step. `first` marks the step's first micro-batch, `last` the
    /// accumulation boundary.
    fn begin_micro_batch(&mut self, first: bool, last: bool) -> Result<()>;
    /// Call after the last backward. On return every reduction has reached the shards.
    fn finish_grads(&mut self) -> Result<()>;
    /// Visits every shard in unit order, the trainable part of a unit before its frozen part.
    fn for_each_shard(&mut self, f: &mut dyn FnMut(Shard<'_>) -> Result<()>) -> Result<()>;
    /// Visits the packed shards, which no other visit shows: they are written once, when weights are loaded.
    /// A store without any leaves it out.
    fn for_each_packed(&mut self, _: &mut dyn FnMut(PackedShard<'_>) -> Result<()>) -> Result<()> {
        Ok(())
    }
    /// Call after masters (and params) changed: gathered weights are stale.
    fn weights_changed(&mut self) -> Result<()>;
    /// Call after an optimizer update: only trainable weights are stale.
    fn weights_updated(&mut self) -> Result<()> {
        self.weights_changed()
    }
}
