//! The interface between the model and sharding: four verbs. The layer loop is written once against this trait; DDP,
//! manual FSDP and the other stores implement it. Never says how parameters are stored.
use super::layout::{CodePlace, Layout, Storage};
use crate::base::{Error, Result};
use crate::device::ops::{Coded, Fp8Values, Fp8Weight, Nf4Matrix};
use crate::device::{Device, View, ViewMut};
use std::ops::Range;

/// Layer 0 is the root (embeddings, final norm, head); block i is layer i + 1; the experts of the sparse blocks follow.
/// Grouping layers into *units*, which are gathered together, is up to the store.
pub const ROOT: usize = 0;

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Pass {
    Forward,
    Backward,
    /// Forward without backward: nothing is kept for one.
    Evaluate,
}

/// Segments of a kind, one per expert: `first`, `first + step`, ...
#[derive(Clone, Copy, Debug)]
pub struct Stride {
    pub first: usize,
    pub step: usize,
    pub count: usize,
}

impl Stride {
    pub fn segment(&self, e: usize) -> usize {
        self.first + e * self.step
    }
    /// The elements from the first segment to the last, and how far apart they are.
    fn place(&self, layout: &Layout) -> Result<(Range<usize>, usize)> {
        let start = |e: usize| layout.segments[self.segment(e)].start;
        let stride = if self.count > 1 { start(1) - start(0) } else { 0 };
        let last = self.count - 1;
        match start(last) == start(0) + last * stride {
            true => Ok((start(0)..layout.segments[self.segment(last)].range().end, stride)),
            false => Err(Error::op("experts", "their tensors are not at equal distances")),
        }
    }
}

/// Unsharded weights of one layer in the compute dtype.
#[derive(Clone, Copy)]
pub struct Weights<'a> {
    /// The buffers of the layer's unit, by [`Storage::buffer`]; empty where it has none.
    buffers: [View<'a>; Storage::BUFFERS.len()],
    /// The scales of all codes.
    scales: Option<View<'a>>,
    /// The layer's segments in the order of [`super::Decoder::layouts`], each with its place in its buffer.
    pub layout: &'a Layout,
}

/// A matrix as an operand of products.
pub enum WeightMatrix<'a> {
    Plain(View<'a>),
    Nf4(Nf4Matrix<'a>),
    Fp8(Fp8Weight<'a>),
}

impl<'a> Weights<'a> {
    /// The weights of a store that keeps every tensor of a layer in the compute dtype, in one buffer.
    pub fn plain(all: View<'a>, layout: &'a Layout) -> Weights<'a> {
        let none = all.slice(0..0);
        Weights { buffers: [all, none, all, none], scales: None, layout }
    }
    /// The weights of a store with a buffer for each storage. `scales`: of the codes of all units.
    pub fn new(
        buffers: [Option<View<'a>>; Storage::BUFFERS.len()],
        scales: Option<View<'a>>,
        layout: &'a Layout,
    ) -> Result<Weights<'a>> {
        let Some(any) = buffers.iter().flatten().next() else {
            return Err(Error::op("weights", "the layer's unit has no tensors"));
        };
        Ok(Weights { buffers: buffers.map(|buffer| buffer.unwrap_or(any.slice(0..0))), scales, layout })
    }
    /// Segment `i` of the layer's layout, which is stored as it is computed with.
    pub fn get(&self, i: usize) -> View<'a> {
        let segment = &self.layout.segments[i];
        self.buffers[segment.storage.buffer()].slice(segment.range())
    }
    /// The address and the bytes of all that is stored as it is computed with.
    pub fn place(&self) -> (usize, usize) {
        let [trained, _, frozen, _] = self.buffers;
        let place = if trained.is_empty() { frozen } else { trained };
        let apart = trained.address() != frozen.address();
        (place.address(), trained.bytes() + if apart { frozen.bytes() } else { 0 })
    }
    /// Whether segment `i` is expanded for products.
    pub(super) fn is_packed(&self, i: usize) -> bool {
        self.layout.segments[i].is_packed()
    }
    /// The matrix in segment `i`, of which a product uses the elements `held`.
    pub fn matrix(&self, i: usize, held: Range<usize>) -> WeightMatrix<'a> {
        let segment = &self.layout.segments[i];
        let buffer = self.buffers[segment.storage.buffer()];
        if segment.is_packed() {
            let (bytes, shape) = (buffer.slice(segment.bytes()), segment.packing());
            return WeightMatrix::Nf4(Nf4Matrix { bytes, shape, width: segment.shape[1] });
        }
        if !segment.fp8 {
            return WeightMatrix::Plain(buffer.slice(segment.range()).slice(held));
        }
        let shape = segment.fp8_shape();
        let values = match (segment.storage, self.scales) {
            (Storage::Coded(CodePlace { codes, scales: first }), Some(scales)) => Fp8Values::Coded(Coded {
                bytes: buffer.slice(codes..codes + shape.len()),
                scales: scales.slice(first..first + shape.scales()),
            }),
            _ => Fp8Values::Whole(buffer.slice(segment.range())),
        };
        let rows = held.start / shape.columns.max(1)..held.end / shape.columns.max(1);
        WeightMatrix::Fp8(Fp8Weight { shape, values, rows })
    }
    /// The tensors of all experts, and how far apart they start.
    pub fn strided(&self, of: &Stride) -> Result<(View<'a>, usize)> {
        let (range, stride) = of.place(self.layout)?;
        let storage = self.layout.segments[of.first].storage;
        Ok((self.buffers[storage.buffer()].slice(range), stride))
    }
}

/// The layer's unreduced gradient, f32, in which backward sums its contributions. Frozen segments have none.
pub struct Grads<'a> {
    /// Laid out as what is [`Storage::Trained`]; none if the whole unit is frozen.
    pub flat: Option<ViewMut<'a>>,
    pub layout: &'a Layout,
    /// Per segment: it holds part of the current sum. Any other holds stale values. Without it, all segments hold zeros
    /// or part of the sum.
    begun: Option<(&'a dyn Device, &'a mut [bool])>,
}
impl<'a> Grads<'a> {
    /// A buffer that holds zeros, or the sum of the step's earlier micro-batches.
    pub fn new(flat: Option<ViewMut<'a>>, layout: &'a Layout) -> Grads<'a> {
        Grads { flat, layout, begun: None }
    }
    /// A buffer whose segments hold part of the sum only where `begun` says so. The first contribution to any other
    /// assigns it if that is one product, and otherwise adds to zeros; both set `begun`.
    pub fn begun(
        dev: &'a dyn Device,
        flat: Option<ViewMut<'a>>,
        layout: &'a Layout,
        begun: &'a mut [bool],
    ) -> Grads<'a> {
        Grads { flat, layout, begun: Some((dev, begun)) }
    }
    /// Begins the sum of segment `i` with zeros, unless it has begun.
    fn begin(&mut self, i: usize) -> Result<()> {
        let segment = &self.layout.segments[i];
        let (Some(flat), Some((dev, begun))) = (&mut self.flat, &mut self.begun) else { return Ok(()) };
        match std::mem::replace(&mut begun[i], true) || !segment.is_trained() || segment.is_empty() {
            true => Ok(()),
            false => dev.zero(flat.reborrow().slice(segment.range())),
        }
    }
    /// Ends the sum: zeroes segments without a contribution. The next contribution begins another.
    pub fn complete(mut self) -> Result<()> {
        (0..self.layout.segments.len()).try_for_each(|i| self.begin(i))?;
        if let Some((_, begun)) = self.begun {
            begun.fill(false);
        }
        Ok(())
    }
    /// The gradient of segment `i`, to add to, unless it is frozen.
    pub fn get(&mut self, i: usize) -> Result<Option<ViewMut<'_>>> {
        self.begin(i)?;
        let segment = &self.layout.segments[i];
        let flat = self.flat.as_mut().filter(|_| segment.is_trained());
        Ok(flat.map(|flat| flat.reborrow().slice(segment.range())))
    }
    /// The range `held` of segment `i`'s gradient for a product that covers the range, and whether the product adds to
    /// it. Otherwise it assigns.
    pub fn product(&mut self, i: usize, held: Range<usize>) -> Result<Option<(ViewMut<'_>, bool)>> {
        let whole = held == (0..self.layout.segments[i].len());
        let assigns = match &mut self.begun {
            Some((_, begun)) if whole => !std::mem::replace(&mut begun[i], true),
            _ => false,
        };
        Ok(self.get(i)?.map(|grad| (grad.slice(held), !assigns)))
    }
    /// The gradients of all experts' tensors for one product each, how far apart they start, and whether the products
    /// add to them. Otherwise they assign.
    pub fn strided(&mut self, of: &Stride) -> Result<Option<(ViewMut<'_>, usize, bool)>> {
        let (range, stride) = of.place(self.layout)?;
        let accumulate = match &mut self.begun {
            Some((_, begun)) if (0..of.count).all(|e| !begun[of.segment(e)]) => {
                (0..of.count).for_each(|e| begun[of.segment(e)] = true);
                false
            }
            _ => true,
        };
        if accumulate {
            (0..of.count).try_for_each(|e| self.begin(of.segment(e)))?;
        }
        let trainable = self.layout.segments[of.first].is_trained();
        let flat = self.flat.as_mut().filter(|_| trainable);
        Ok(flat.map(|flat| (flat.reborrow().slice(range), stride, accumulate)))
    }
    /// The gradients of segments `i` and `j`, for an operation that always adds to both. For a frozen segment, one half
    /// of `unused`.
    pub fn pair<'b>(&'b mut self, i: usize, j: usize, unused: ViewMut<'b>) -> Result<(ViewMut<'b>, ViewMut<'b>)> {
        self.begin(i)?;
        self.begin(j)?;
        let (a, b) = (&self.layout.segments[i], &self.layout.segments[j]);
        let middle = unused.len() / 2;
        let (spare, other) = unused.split_at(middle);
        let (spare, other) = (spare.slice(0..a.len()), other.slice(0..b.len()));
        let Some(flat) = &mut self.flat else { return Ok((spare, other)) };
        let flat = flat.reborrow();
        Ok(match (a.is_trained(), b.is_trained()) {
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
        })
    }
}

/// Order of calls in a micro-batch: `acquire(ROOT)`; acquire and release for each block in order; `acquire(ROOT)` again
/// for the head (cheap, as it was not released). In training, then acquire, grads, grads_ready, release with
/// [`Pass::Backward`] for the blocks in reverse, the root last. `grads(ROOT)` is called twice, by the head and by the
/// embedding, which add to one sum. All calls for the experts of a sparse block are between `acquire` and `release` of
/// the block. A layer that is acquired may be acquired again, and `grads` be called again.
pub trait ParamStore: Send {
    /// Makes the layer's weights readable and prefetches the next unit of this pass.
    fn acquire(&mut self, layer: usize, pass: Pass) -> Result<Weights<'_>>;
    /// This rank no longer reads the weights in this pass: reshard them, or keep them if backward needs them next.
    fn release(&mut self, layer: usize, pass: Pass) -> Result<()>;
    /// An acquired layer's weights with its gradient buffer, in which the step's micro-batches are summed.
    fn grads(&mut self, layer: usize) -> Result<(Weights<'_>, Grads<'_>)>;
    /// The layer's gradient of this micro-batch is complete: reduce it now or at the accumulation boundary.
    fn grads_ready(&mut self, layer: usize) -> Result<()>;
}
