//! What an optimizer keeps of each tensor, and which elements of a shard it updates together. Never updates anything.
//!
//! [Note: blocks] State in 8 bits is one byte per element, and the largest magnitude of each block of [`BLOCK`]
//! elements. Blocks are counted from the start of each tensor (over tp, of a rank's part of it), and shards start
//! between them: so no block is shared by ranks, and its bits do not depend on the sharding. Tensors of less than
//! [`LEAST`] elements have f32 state, as in bitsandbytes, wherever they are sharded.
use super::owners;
use crate::base::dynamic8::{BLOCK, DynamicMap, SIGNED, UNSIGNED};
use crate::base::rng::Rng;
use crate::base::{Category, DType, Result};
use crate::device::ops::TensorPart;
use crate::device::{Buf, Device, Place, View, ViewMut};
use crate::nn::{Segment, Storage};
use crate::store::flat::{self, Run};
use crate::store::{self, Shard};
use std::ops::Range;

/// Elements of the smallest tensor with state in 8 bits: bitsandbytes' `min_8bit_size`.
const LEAST: usize = 4096;

/// The states of a rule.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Moments {
    /// Their names in checkpoints, where all are f32.
    pub names: &'static [&'static str],
    /// In memory. U8: in blocks.
    pub dtype: DType,
    /// The matrices that Muon updates have only the first.
    pub(super) without_matrices: bool,
}

impl Moments {
    /// A model that is not trained has none.
    pub const NONE: Moments = Moments { names: &[], dtype: DType::F32, without_matrices: false };

    /// Whether there is state number `moment` of a segment of layer `layer`.
    pub fn has(&self, moment: usize, layer: usize, segment: &Segment) -> bool {
        segment.is_trained() && !(self.without_matrices && moment > 0 && owners::updates(layer, segment))
    }
    /// Whether a tensor's state is in blocks.
    fn in_blocks(&self, segment: &Segment) -> bool {
        self.dtype == DType::U8 && segment.global_shape().iter().product::<usize>() >= LEAST
    }
    /// Where it is not.
    fn whole(&self) -> DType {
        if self.dtype == DType::U8 { DType::F32 } else { self.dtype }
    }
    /// Bytes of one state of this rank's part of a tensor.
    pub fn bytes(&self, segment: &Segment) -> usize {
        match self.in_blocks(segment) {
            true => segment.len() + segment.len().div_ceil(BLOCK) * DType::F32.size(),
            false => segment.len() * self.whole().size(),
        }
    }
}

/// A range of a shard that is updated by one call.
pub(super) struct UpdateRun {
    /// Relative to the start of the shard.
    pub range: Range<usize>,
    /// Where its elements are in states that leave out what is updated elsewhere; those in blocks have their own.
    pub state: Range<usize>,
    pub in_blocks: bool,
    /// The constants of its update.
    pub kind: usize,
    pub at: TensorPart,
}

impl UpdateRun {
    /// The moments of a trainable shard, without the segments that are updated `elsewhere`, and the lengths of the
    /// states of the longest such runs of any shard of the unit, without and with blocks: all ranks allocate the same.
    /// Where moments or masters are not f32, a run is a tensor, by whose name random numbers are drawn.
    pub fn all(
        shard: &Shard,
        moments: &Moments,
        seed: u64,
        kind: &dyn Fn(&Segment) -> usize,
        elsewhere: &dyn Fn(&Segment) -> bool,
    ) -> (Vec<UpdateRun>, [usize; 2]) {
        let (layout, len, segments) = (shard.layout, shard.master.len(), &shard.layout.segments);
        let rounds = moments.dtype != DType::F32 || shard.master.dtype() != DType::F32;
        let group = |i: usize| (!elsewhere(&segments[i])).then(|| (kind(&segments[i]), if rounds { i } else { 0 }));
        let blocks: Vec<bool> = segments.iter().map(|segment| moments.in_blocks(segment)).collect();
        let placed = |start: usize, runs: Vec<Run>| {
            let mut filled = [0; 2];
            let run = |Run { range, segment: i }: Run| {
                let (segment, in_blocks, place_of) = (&segments[i], blocks[i], &mut filled[usize::from(blocks[i])]);
                let first = *place_of;
                *place_of += range.len();
                // The bytes of padding in a last block are not those of zeros: it is left alone.
                let end = if in_blocks { segment.range().end.saturating_sub(start).min(range.end) } else { range.end };
                let range = range.start..end.max(range.start);
                let at = match rounds {
                    true => place(segment, seed, (start + range.start).saturating_sub(segment.start)),
                    false => TensorPart::default(),
                };
                UpdateRun { state: first..first + range.len(), in_blocks, kind: kind(segment), at, range }
            };
            let runs: Vec<_> = runs.into_iter().map(run).filter(|run| !run.range.is_empty()).collect();
            (runs, filled)
        };
        if len == 0 || moments.dtype != DType::U8 && !segments.iter().any(elsewhere) {
            let runs = flat::runs(layout, shard.start..shard.start + len, group);
            return (placed(shard.start, runs).0, [len, 0]);
        }
        // Padding at the end of a unit, of which ranks have different amounts, has no state.
        let of_shard =
            |start: usize| placed(start, flat::runs(layout, start..(start + len).min(layout.len.max(start)), group));
        let all = (0..layout.len.div_ceil(len)).map(|shard| of_shard(shard * len).1);
        let longest = all.fold([0; 2], |[a, b], [c, d]| [a.max(c), b.max(d)]);
        (of_shard(shard.start).0, longest)
    }
}

/// Element `first` of this rank's part of a tensor, in the whole tensor; or in this rank's part, if that is at uneven
/// distances.
fn place(segment: &Segment, seed: u64, first: usize) -> TensorPart {
    let key = Rng::named(seed, &format!("rounding of {}", segment.name)).key();
    let (row, before, whole) = segment.evenly().unwrap_or((usize::MAX, 0, 0));
    let is_cut = row < segment.len();
    let (row, skip) = if is_cut { (row, whole - row) } else { (0, 0) };
    TensorPart { key, first: first as u64, before: before as u64, row: row as u64, skip: skip as u64 }
}

/// A state, in memory.
pub(super) struct StateBuf {
    pub values: Buf,
    /// The largest magnitude of each block, if values are in blocks, and what their bytes mean.
    absmax: Option<(Buf, &'static DynamicMap)>,
}

impl StateBuf {
    /// The state of `range`, which starts with a block.
    pub fn slice(&mut self, range: Range<usize>) -> StoredSlice<'_> {
        let blocks = StoredSlice::blocks(&range);
        let absmax = self.absmax.as_mut().map(|(absmax, map)| (absmax.view_mut().slice(blocks), *map));
        StoredSlice { values: self.values.view_mut().slice(range), absmax }
    }
}

/// The states of a unit's shards, by [`crate::store::PartId::buffer`].
pub(super) type States = [UnitMoments; Storage::BUFFERS.len()];

/// The states of a trainable shard.
#[derive(Default)]
pub(super) struct UnitMoments {
    /// One per name.
    pub bufs: Vec<StateBuf>,
    /// The same of tensors whose state is in blocks.
    pub in_blocks: Vec<StateBuf>,
    pub runs: Vec<UpdateRun>,
    /// The first state is of the whole shard, the others of the runs.
    pub whole_first: bool,
}

impl UnitMoments {
    /// Zeros, in the same memory as the shard's masters.
    pub fn new(
        dev: &dyn Device,
        moments: &Moments,
        shard: &Shard,
        (runs, [of_runs, of_blocks]): (Vec<UpdateRun>, [usize; 2]),
    ) -> Result<UnitMoments> {
        let all = shard.master.len();
        let whole_first = moments.without_matrices;
        let alloc = |dtype: DType, len: usize| match shard.master.place() {
            Place::Mapped => dev.alloc_host(dtype, len),
            _ => dev.alloc(dtype, len, Category::Optimizer),
        };
        let buf = |(i, name): (usize, &&'static str)| {
            let _for = dev.meter().purpose(name);
            let len = if whole_first && i == 0 { all } else { of_runs };
            Ok(StateBuf { values: alloc(moments.whole(), len)?, absmax: None })
        };
        let blocks = |(name, map): (&&'static str, &'static DynamicMap)| {
            let _for = dev.meter().purpose(name);
            let (values, absmax) = (alloc(DType::U8, of_blocks)?, alloc(DType::F32, of_blocks.div_ceil(BLOCK))?);
            Ok(StateBuf { values, absmax: Some((absmax, map)) })
        };
        let bufs = moments.names.iter().enumerate().map(buf).collect::<Result<_>>()?;
        let maps: [&'static DynamicMap; 2] = [&SIGNED, &UNSIGNED];
        let names = moments.names.iter().filter(|_| moments.dtype == DType::U8);
        let in_blocks = names.zip(maps).map(blocks).collect::<Result<_>>()?;
        Ok(UnitMoments { bufs, in_blocks, runs, whole_first })
    }
    /// The states of elements `range` of the shard, all of one tensor, each with its index.
    pub fn of(&mut self, range: Range<usize>) -> impl Iterator<Item = (usize, StoredSlice<'_>)> {
        let run = self.runs.iter().find(|run| run.range.start <= range.start && range.end <= run.range.end);
        let of_run = run.map(|run| {
            let start = run.state.start + range.start - run.range.start;
            start..start + range.len()
        });
        let bufs = if run.is_some_and(|run| run.in_blocks) { &mut self.in_blocks } else { &mut self.bufs };
        let first = if self.whole_first { Some(range) } else { of_run.clone() };
        let places = std::iter::once(first).chain(std::iter::repeat(of_run));
        let states = bufs.iter_mut().zip(places).enumerate();
        states.filter_map(|(i, (buf, place))| Some((i, buf.slice(place?))))
    }
    /// All of them.
    pub fn views(&mut self) -> impl Iterator<Item = ViewMut<'_>> {
        let bufs = self.bufs.iter_mut().chain(&mut self.in_blocks);
        bufs.flat_map(|StateBuf { values, absmax }| {
            [Some(values.view_mut()), absmax.as_mut().map(|(absmax, _)| absmax.view_mut())].into_iter().flatten()
        })
    }
}

/// Masters or a state of successive elements of a tensor, in any dtype, which checkpoints read and write as f32.
pub struct StoredSlice<'a> {
    pub values: ViewMut<'a>,
    /// With u8 values, the largest magnitude of each block; the first block starts with the values.
    pub absmax: Option<(ViewMut<'a>, &'static DynamicMap)>,
}

/// Host memory between dtypes.
#[derive(Default)]
pub struct Converted {
    halves: Vec<u16>,
    codes: Vec<u8>,
    absmax: Vec<f32>,
}

impl<'a> StoredSlice<'a> {
    /// Values without blocks, as masters are.
    pub fn plain(values: ViewMut<'a>) -> StoredSlice<'a> {
        StoredSlice { values, absmax: None }
    }
    pub fn len(&self) -> usize {
        self.values.len()
    }
    pub fn is_empty(&self) -> bool {
        self.values.is_empty()
    }
    /// What it takes in memory: the values, and the largest magnitudes.
    pub fn views(&self) -> impl Iterator<Item = View<'_>> {
        let absmax = self.absmax.as_ref().map(|(absmax, _)| absmax.as_view());
        std::iter::once(self.values.as_view()).chain(absmax)
    }
    fn blocks(range: &Range<usize>) -> Range<usize> {
        range.start / BLOCK..range.end.div_ceil(BLOCK)
    }
    /// Reads from element `from` on, which starts a block.
    pub fn read(&self, dev: &dyn Device, from: usize, converted: &mut Converted, to: &mut [f32]) -> Result<()> {
        let range = from..from + to.len();
        let values = self.values.as_view().slice(range.clone());
        let Some((absmax, map)) = &self.absmax else {
            return store::values(dev, values, &mut converted.halves, to);
        };
        let Converted { codes, absmax: largest, .. } = converted;
        let blocks = StoredSlice::blocks(&range);
        codes.resize(range.len(), 0);
        largest.resize(blocks.len(), 0.0);
        dev.download(values, codes)?;
        dev.download(absmax.as_view().slice(blocks), bytemuck::cast_slice_mut(largest))?;
        map.dequantize_all(codes, largest.iter().copied(), to);
        Ok(())
    }
    /// Assigns from element `from` on, which starts a block.
    pub fn write(&mut self, dev: &dyn Device, from: usize, converted: &mut Converted, values: &[f32]) -> Result<()> {
        let range = from..from + values.len();
        let to = self.values.reborrow().slice(range.clone());
        let Some((absmax, map)) = &mut self.absmax else {
            return store::assign(dev, values, &mut converted.halves, to);
        };
        let Converted { codes, absmax: largest, .. } = converted;
        let blocks = StoredSlice::blocks(&range);
        codes.resize(range.len(), 0);
        largest.resize(blocks.len(), 0.0);
        map.quantize_all(values, codes, largest);
        dev.upload(codes, to)?;
        dev.upload(bytemuck::cast_slice(largest), absmax.reborrow().slice(blocks))
    }
}
