//! What a store is to the optimizer, clipping and checkpoints: shards in one order, and when their gradients are there.
//! Never says how parameters are kept.
use super::offload::Offload;
use crate::base::{DType, Result};
use crate::comm::Mesh;
use crate::device::{Device, ViewMut};
use crate::nn::{Layout, ParamStore};
use std::ops::Range;
use std::sync::Arc;

/// What this rank owns of a unit's trainable tensors, or of its frozen ones: a contiguous range of their flat buffer.
/// Its end may reach into padding.
pub struct Shard<'a> {
    pub unit: usize,
    /// The segments of the whole buffer.
    pub layout: &'a Layout,
    /// Where the shard starts in the buffer; a multiple of [`crate::device::ALIGN`]. It is `master.len()` long.
    pub start: usize,
    /// f32 master weights; frozen ones beside adapters in what is computed with. [`super::assign`] writes either.
    pub master: ViewMut<'a>,
    /// The copy in the compute dtype that is gathered, where it is not the master itself.
    pub param: Option<ViewMut<'a>>,
    /// The reduced gradient of the step (f32, summed over ranks); none where the shard is frozen.
    pub grad: Option<ViewMut<'a>>,
}

impl Shard<'_> {
    /// What of `range`, elements of the whole buffer, this shard has: counted from its own start.
    pub fn owned(&self, range: Range<usize>) -> Option<Range<usize>> {
        let (from, to) = (range.start.max(self.start), range.end.min(self.start + self.master.len()));
        (from < to).then(|| from - self.start..to - self.start)
    }
}

/// How parameters, gradients and optimizer state are spread over the ranks of a mesh: the options of a store.
pub trait Strategy: Send + Sync {
    fn name(&self) -> &'static str;
    /// The compute dtype.
    fn dtype(&self) -> DType;
    /// What is in host memory.
    fn offload(&self) -> Offload;
    /// Allocates everything that holds parameters and gradients. Every rank of the mesh calls it alike. `layouts`: this
    /// rank's part of the tensors.
    fn store(&self, dev: Arc<dyn Device>, mesh: &Mesh, layouts: &[Layout]) -> Result<Box<dyn Store>>;
}

/// What owns parameters. The same shard order on every call.
pub trait Store: ParamStore {
    fn name(&self) -> &'static str;
    fn units(&self) -> usize;
    /// Whether every rank of the group owns everything (DDP): then a norm is not summed over ranks, and one rank
    /// writes.
    fn replicated(&self) -> bool;
    /// Before each micro-batch of a training step; `last` marks the accumulation boundary, `first` the step's
    /// beginning.
    fn begin_micro_batch(&mut self, first: bool, last: bool) -> Result<()>;
    /// After the last backward: every reduction has landed in the shards.
    fn finish_grads(&mut self) -> Result<()>;
    /// Visits every shard, in unit order; of a unit, the trainable one first.
    fn for_each_shard(&mut self, f: &mut dyn FnMut(Shard<'_>) -> Result<()>) -> Result<()>;
    /// Masters (and params) have changed: what is gathered is stale.
    fn weights_changed(&mut self) -> Result<()>;
    /// The same, but for frozen ones: the optimizer has updated what learns.
    fn weights_updated(&mut self) -> Result<()> {
        self.weights_changed()
    }
}
