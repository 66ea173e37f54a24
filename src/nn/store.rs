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
    pub flat: View<'a>,
    pub layout: &'a Layout,
}
impl<'a> Weights<'a> {
    /// Segment `i` of the layer's layout.
    pub fn get(&self, i: usize) -> View<'a> {
        self.flat.slice(self.layout.segments[i].range())
    }
}

/// The layer's unreduced gradient, f32. Backward *adds* into it.
pub struct Grads<'a> {
    pub flat: ViewMut<'a>,
    pub layout: &'a Layout,
}
impl Grads<'_> {
    pub fn get(&mut self, i: usize) -> ViewMut<'_> {
        let range = self.layout.segments[i].range();
        self.flat.reborrow().slice(range)
    }
    /// Segments `i` and `j` at once; `i < j`.
    pub fn pair(&mut self, i: usize, j: usize) -> (ViewMut<'_>, ViewMut<'_>) {
        let (a, b) = (self.layout.segments[i].range(), self.layout.segments[j].range());
        let (low, high) = self.flat.reborrow().split_at(b.start);
        (low.slice(a), high.slice(0..b.len()))
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
