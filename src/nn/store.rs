//! The seam between the model and sharding: four verbs. The layer loop is written once against this trait; DDP, manual
//! FSDP and every other store implement it. Never says how parameters are kept.
use super::layout::Layout;
use crate::base::Result;
use crate::device::{View, ViewMut};

/// Layer 0 is the root (embeddings, final norm, head); block i is layer i + 1. A store may hold several layers in one
/// *unit* (what is gathered together): that is its own business.
pub const ROOT: usize = 0;

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Pass {
    Forward,
    Backward,
    /// Forward without a backward to follow: nothing is kept for one.
    Evaluate,
}

/// Gathered weights of one layer in the compute dtype.
#[derive(Clone, Copy)]
pub struct Weights<'a> {
    /// What the layer's unit has of trainable tensors, and of frozen ones.
    pub trained: View<'a>,
    pub frozen: View<'a>,
    /// The layer's segments in the order of [`super::Decoder::layouts`], each where it stands in one of the two.
    pub layout: &'a Layout,
}
impl<'a> Weights<'a> {
    /// Segment `i` of the layer's layout.
    pub fn get(&self, i: usize) -> View<'a> {
        let segment = &self.layout.segments[i];
        if segment.trainable { self.trained } else { self.frozen }.slice(segment.range())
    }
}

/// The layer's unreduced gradient, f32. Backward *adds* into it. Frozen segments have none.
pub struct Grads<'a> {
    /// Laid out as [`Weights::trained`]; none where the whole unit is frozen.
    pub flat: Option<ViewMut<'a>>,
    pub layout: &'a Layout,
}
impl Grads<'_> {
    /// Segment `i`'s, unless it is frozen.
    pub fn get(&mut self, i: usize) -> Option<ViewMut<'_>> {
        let segment = &self.layout.segments[i];
        let flat = self.flat.as_mut().filter(|_| segment.trainable)?;
        Some(flat.reborrow().slice(segment.range()))
    }
    /// The gradients of segments `i` and `j`, or else what an operation that always writes both may write to in place
    /// of a frozen one's: the halves of `unused`.
    pub fn pair<'b>(&'b mut self, i: usize, j: usize, unused: ViewMut<'b>) -> (ViewMut<'b>, ViewMut<'b>) {
        let (a, b) = (&self.layout.segments[i], &self.layout.segments[j]);
        let middle = unused.len() / 2;
        let (spare, other) = unused.split_at(middle);
        let (spare, other) = (spare.slice(0..a.len()), other.slice(0..b.len()));
        let Some(flat) = &mut self.flat else { return (spare, other) };
        let flat = flat.reborrow();
        match (a.trainable, b.trainable) {
            (true, true) if a.start < b.start => {
                let (low, high) = flat.split_at(b.start);
                (low.slice(a.range()), high.slice(0..b.len()))
            }
            (true, true) => {
                let (low, high) = flat.split_at(a.start);
                (high.slice(0..a.len()), low.slice(b.range()))
            }
            (true, false) => (flat.slice(a.range()), other),
            (false, true) => (spare, flat.slice(b.range())),
            (false, false) => (spare, other),
        }
    }
}

/// Order of calls in a micro-batch: `acquire(ROOT)`; for each block in order acquire, release; `acquire(ROOT)` again
/// for the head (it was never released; the call is cheap); then, training, blocks in reverse with [`Pass::Backward`]:
/// acquire, grads, grads_ready, release; the root last. `grads(ROOT)` is called twice, by the head and by the
/// embedding: zeroed once.
pub trait ParamStore: Send {
    /// Gathered and readable; prefetches what comes next in this pass.
    fn acquire(&mut self, layer: usize, pass: Pass) -> Result<Weights<'_>>;
    /// This rank is done with the weights in this pass: reshard, or keep where backward wants them next.
    fn release(&mut self, layer: usize, pass: Pass) -> Result<()>;
    /// Weights of an acquired layer together with its gradient buffer, which holds zero, or what earlier micro-batches
    /// of the step added.
    fn grads(&mut self, layer: usize) -> Result<(Weights<'_>, Grads<'_>)>;
    /// The layer's gradient of this micro-batch is complete: reduce it now, or at the accumulation boundary.
    fn grads_ready(&mut self, layer: usize) -> Result<()>;
}
