//! What an optimizer keeps of each tensor, and which elements of a shard it updates together. Never updates anything.
use super::owners;
use crate::base::rng::Rng;
use crate::base::{Category, DType, Result};
use crate::device::ops::TensorPart;
use crate::device::{Buf, Device, Place, ViewMut};
use crate::nn::Segment;
use crate::store::Shard;
use crate::store::flat::{self, Run};
use std::ops::Range;

/// The states of a rule.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Moments {
    /// As in checkpoints, where all are f32.
    pub names: &'static [&'static str],
    /// In memory.
    pub dtype: DType,
    /// The matrices that Muon updates have only the first.
    pub(super) without_matrices: bool,
}

impl Moments {
    /// Of a model that is not trained.
    pub const NONE: Moments = Moments { names: &[], dtype: DType::F32, without_matrices: false };

    /// Whether there is state number `moment` of a segment of layer `layer`.
    pub fn has(&self, moment: usize, layer: usize, segment: &Segment) -> bool {
        segment.trainable && !(self.without_matrices && moment > 0 && owners::updates(layer, segment))
    }
}

/// A range of a shard that is updated by one call.
pub(super) struct UpdateRun {
    /// Relative to the start of the shard.
    pub range: Range<usize>,
    /// Where its elements are in states that leave out what is updated elsewhere.
    pub state: Range<usize>,
    /// The constants of its update.
    pub kind: usize,
    pub at: TensorPart,
}

impl UpdateRun {
    /// Of a trainable shard, without the segments that are updated `elsewhere`, and the length of the states of the
    /// longest such runs of any shard of the unit: all ranks allocate the same. Where state in `dtype` or masters are
    /// rounded, a run is a tensor, by whose name random numbers are drawn.
    pub fn all(
        shard: &Shard,
        dtype: DType,
        seed: u64,
        kind: &dyn Fn(&Segment) -> usize,
        elsewhere: &dyn Fn(&Segment) -> bool,
    ) -> (Vec<UpdateRun>, usize) {
        let (layout, len) = (shard.layout, shard.master.len());
        let (rounds, segments) = (dtype != DType::F32 || shard.master.dtype() != DType::F32, &layout.segments);
        let group = |i: usize| (!elsewhere(&segments[i])).then(|| (kind(&segments[i]), if rounds { i } else { 0 }));
        if !segments.iter().any(elsewhere) {
            let runs = flat::runs(layout, shard.start..shard.start + len, group);
            return (UpdateRun::placed(shard, runs, rounds, seed, kind), len);
        }
        // Padding at the end of a unit, of which ranks have different amounts, has no state.
        let runs = |start: usize| flat::runs(layout, start..(start + len).min(layout.len.max(start)), group);
        let of_shard = |shard: usize| runs(shard * len).iter().map(|run| run.range.len()).sum();
        let longest = (0..layout.len.div_ceil(len)).map(of_shard).max().unwrap_or(0);
        (UpdateRun::placed(shard, runs(shard.start), rounds, seed, kind), longest)
    }
    fn placed(
        shard: &Shard,
        runs: Vec<Run>,
        rounds: bool,
        seed: u64,
        kind: &dyn Fn(&Segment) -> usize,
    ) -> Vec<UpdateRun> {
        let mut filled = 0;
        let run = |Run { range, segment }: Run| {
            let segment = &shard.layout.segments[segment];
            let (first, len) = ((shard.start + range.start).saturating_sub(segment.start), range.len());
            filled += len;
            let at = if rounds { place(segment, seed, first) } else { TensorPart::default() };
            UpdateRun { state: filled - len..filled, kind: kind(segment), at, range }
        };
        runs.into_iter().map(run).collect()
    }
}

/// Element `first` of this rank's part of a tensor, in the whole tensor.
fn place(segment: &Segment, seed: u64, first: usize) -> TensorPart {
    let key = Rng::named(seed, &format!("rounding of {}", segment.name)).key();
    let (row, before, whole) = segment.rows();
    let is_cut = row < segment.len();
    let (row, skip) = if is_cut { (row, whole - row) } else { (0, 0) };
    TensorPart { key, first: first as u64, before: before as u64, row: row as u64, skip: skip as u64 }
}

/// The states of a unit's trainable shard.
#[derive(Default)]
pub(super) struct UnitMoments {
    /// One per name.
    pub bufs: Vec<Buf>,
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
        (runs, of_runs): (Vec<UpdateRun>, usize),
    ) -> Result<UnitMoments> {
        let all = shard.master.len();
        let whole_first = moments.without_matrices;
        let buf = |(i, name): (usize, &&'static str)| {
            let _for = dev.meter().purpose(name);
            let len = if whole_first && i == 0 { all } else { of_runs };
            match shard.master.place() {
                Place::Mapped => dev.alloc_host(moments.dtype, len),
                _ => dev.alloc(moments.dtype, len, Category::Optimizer),
            }
        };
        let bufs = moments.names.iter().enumerate().map(buf).collect::<Result<_>>()?;
        Ok(UnitMoments { bufs, runs, whole_first })
    }
    /// The states of elements `range` of the shard, all of one tensor, each with its index.
    pub fn of(&mut self, range: Range<usize>) -> impl Iterator<Item = (usize, ViewMut<'_>)> {
        let run = self.runs.iter().find(|run| run.range.start <= range.start && range.end <= run.range.end);
        let of_run = run.map(|run| {
            let start = run.state.start + range.start - run.range.start;
            start..start + range.len()
        });
        let first = if self.whole_first { Some(range) } else { of_run.clone() };
        let places = std::iter::once(first).chain(std::iter::repeat(of_run));
        let states = self.bufs.iter_mut().zip(places).enumerate();
        states.filter_map(|(i, (buf, place))| Some((i, buf.view_mut().slice(place?))))
    }
}
