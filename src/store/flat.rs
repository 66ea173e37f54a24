//! From layers to units and from units to shards: arithmetic on the segment table. Never holds values.
//!
//! A *unit* is what is gathered together: the layouts of one or more layers, concatenated, then padded so that all
//! ranks' shards have the same length and start on [`ALIGN`] elements:
//!
//! ```text
//! unit    | layer 1              | layer 2         | padding |
//! shards  | rank 0      | rank 1      | rank 2      | rank 3  |     padded = ranks * shard, shard = ALIGN * k
//! ```
//!
//! A unit with frozen tensors has such a buffer for trainable and one for frozen tensors, and one of bytes for frozen
//! matrices in 4 bits. With several ranks, so have trainable matrices in FP8, which are gathered in 8 bits. Within a
//! [`UnitPart`] all bytes are treated alike; only trainable ones have gradients, which follow each other in one buffer.
//!
//! Shard boundaries ignore tensor boundaries: a shard may begin inside one tensor and end inside another, or hold only
//! padding. Padding is 0 in weights and gradients, and every optimizer maps (p, g, state) = 0 to 0. So padding needs no
//! special case: it is gathered, reduced, squared and updated like the rest, and stays 0.
use crate::device::ALIGN;
use crate::nn::{CodePlace, Layout, Pass, ROOT, Segment, Storage};
use std::ops::Range;

/// How layers are grouped into units.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Wrap {
    /// Each layer is its own unit.
    #[default]
    Transformer,
    /// The root alone; consecutive blocks together until a unit has at least this many parameters.
    Size(usize),
    /// The root alone; consecutive blocks together while a unit has at most this many trainable parameters, with at
    /// least one block per unit.
    AtMost(usize),
    /// The whole model in one unit.
    None,
}

/// How a tensor is stored by shards over `ranks`: matrices in FP8 are gathered as codes, if anything is gathered.
fn sharded(segment: &Segment, ranks: usize) -> Storage {
    match segment.storage {
        Storage::Trained if segment.fp8 && ranks > 1 => Storage::Coded(CodePlace::default()),
        storage => storage,
    }
}

/// The trainable, the coded, the frozen or the packed tensors of a unit: one flat buffer, sharded over the ranks.
#[derive(Clone, PartialEq, Debug)]
pub struct UnitPart {
    /// If any frozen tensor is saved, all of the part is.
    pub storage: Storage,
    pub layout: Layout,
    /// Elements of the flat buffer: the layout's length rounded up to a multiple of `ranks * ALIGN`.
    pub padded: usize,
    /// Elements per shard: `padded / ranks`.
    pub shard: usize,
    /// Where its gradient begins in that of the unit.
    pub first: usize,
}

impl UnitPart {
    /// The range of the flat buffer that `rank` owns.
    pub fn owned(&self, rank: usize) -> Range<usize> {
        rank * self.shard..(rank + 1) * self.shard
    }
}

/// A run of layers that are gathered, reduced and updated together.
#[derive(Clone, Debug)]
pub struct Unit {
    pub layers: Range<usize>,
    /// In the order of [`Storage::BUFFERS`], those that exist.
    pub parts: Vec<UnitPart>,
}

impl Unit {
    /// The part whose buffer `storage` belongs in.
    pub fn part(&self, storage: Storage) -> Option<&UnitPart> {
        self.parts.iter().find(|p| p.storage.buffer() == storage.buffer())
    }
    /// Elements in that buffer; 0 without it.
    pub fn padded(&self, storage: Storage) -> usize {
        self.part(storage).map_or(0, |p| p.padded)
    }
    /// Trainable parts.
    fn learning(&self) -> impl Iterator<Item = &UnitPart> {
        self.parts.iter().filter(|p| p.storage.is_trained())
    }
    /// Elements of the gradient; 0 if the unit is frozen.
    pub fn trained(&self) -> usize {
        self.learning().map(|p| p.padded).sum()
    }
    /// Trainable elements, the same number on every rank of tp.
    pub fn trained_extent(&self) -> usize {
        self.learning().map(|p| p.layout.extent()).sum()
    }
    /// Where the segments are in the gradient.
    fn gradients(&self) -> Vec<Range<usize>> {
        let place = |p: &UnitPart, s: &Segment| p.first + s.start..p.first + s.range().end;
        self.learning().flat_map(|p| p.layout.segments.iter().map(move |s| place(p, s))).collect()
    }
    /// Parameters, the same number on every rank of tp.
    pub fn elements(&self) -> usize {
        self.parts.iter().map(|p| p.layout.extent()).sum()
    }
}

/// A layer's position in its unit.
#[derive(Clone, Debug)]
pub struct Home {
    pub unit: usize,
    /// The layer's segments in their own order, each with its offset in its part of the unit.
    pub layout: Layout,
}

/// All units of a model, and the map from layers to units. Unit 0 holds the root.
#[derive(Clone, Debug)]
pub struct Flat {
    pub units: Vec<Unit>,
    homes: Vec<Home>,
    /// The number of scales of all that is gathered in 8 bits.
    pub scales: usize,
}

impl Flat {
    pub fn new(layouts: &[Layout], wrap: Wrap, ranks: usize) -> Flat {
        let mut flat = Flat { units: Vec::new(), homes: Vec::new(), scales: 0 };
        for layers in grouped(layouts, wrap) {
            flat.push(&layouts[layers.clone()], layers, ranks);
        }
        flat
    }
    /// Appends the unit of `layers`.
    fn push(&mut self, layouts: &[Layout], layers: Range<usize>, ranks: usize) {
        let (unit, first) = (self.units.len(), self.homes.len());
        self.homes.extend(layouts.iter().map(|l| Home { unit, layout: l.clone() }));
        let (mut parts, mut learning) = (Vec::new(), 0);
        for buffer in Storage::BUFFERS {
            let (mut layout, mut storage) = (Layout::default(), buffer);
            let segments = self.homes[first..].iter_mut().flat_map(|h| &mut h.layout.segments);
            for segment in segments.filter(|s| sharded(s, ranks).buffer() == buffer.buffer()) {
                let placed = layout.place(segment.clone());
                let placed = &mut layout.segments[placed];
                segment.start = placed.start;
                if let Storage::Coded(_) = buffer {
                    placed.storage = Storage::Coded(CodePlace { codes: placed.start, scales: self.scales });
                    self.scales += placed.fp8_shape().scales();
                    segment.storage = placed.storage;
                    segment.start += learning;
                }
                storage = if storage == Storage::Frozen { segment.storage } else { storage };
            }
            let len = if buffer == Storage::Nf4 { layout.packed } else { layout.len };
            if len > 0 {
                let padded = len.next_multiple_of(ranks * ALIGN);
                parts.push(UnitPart { storage, layout, padded, shard: padded / ranks, first: learning });
                learning += if storage.is_trained() { padded } else { 0 };
            }
        }
        self.units.push(Unit { layers, parts });
    }
    /// The unit that a pass uses after `unit`.
    pub fn next(&self, unit: usize, pass: Pass) -> Option<usize> {
        match pass {
            Pass::Backward => unit.checked_sub(1),
            Pass::Forward | Pass::Evaluate => Some(unit + 1).filter(|&next| next < self.units.len()),
        }
    }
    /// Whether releasing `layer` ends the pass for its unit. The root's unit is still needed by the head and, in
    /// training, by the embedding's gradient, so only the root itself closes it.
    pub fn closes(&self, layer: usize, pass: Pass) -> bool {
        let unit = self.home(layer).unit;
        let layers = &self.units[unit].layers;
        match pass {
            _ if unit == 0 => layer == ROOT && pass != Pass::Forward,
            Pass::Backward => layer == layers.start,
            Pass::Forward | Pass::Evaluate => layer + 1 == layers.end,
        }
    }
    pub fn home(&self, layer: usize) -> &Home {
        &self.homes[layer]
    }
    /// How many units of the largest size fit in `live` parameters next to the root.
    pub fn fitting(&self, live: usize) -> usize {
        live.saturating_sub(self.units[0].elements()) / self.largest().max(1)
    }
    /// Parameters of the root and of this many units of the largest size.
    pub fn live(&self, units: usize) -> usize {
        self.units[0].elements() + units * self.largest()
    }
    fn largest(&self) -> usize {
        self.units[1..].iter().map(Unit::elements).max().unwrap_or(0)
    }
    pub fn layouts(&self) -> impl Iterator<Item = &Layout> {
        self.homes.iter().map(|home| &home.layout)
    }
    /// Ranges of each unit's gradient that no segment covers but another unit of its staging slot may have
    /// written, when the non-root units rotate through `cycle` slots.
    pub fn gaps(&self, cycle: usize) -> Vec<Vec<Range<usize>>> {
        let all: Vec<_> = self.units.iter().map(Unit::gradients).collect();
        let gaps = |(unit, own): (usize, &Vec<Range<usize>>)| {
            let mut sharing = (0..all.len()).filter(|&other| slot(other, cycle) == slot(unit, cycle));
            if sharing.all(|other| all[other] == *own) {
                return vec![]; // never written
            }
            let ends = own.iter().map(|range| range.start).skip(1).chain([self.units[unit].trained()]);
            own.iter().zip(ends).map(|(range, end)| range.end..end).filter(|gap| !gap.is_empty()).collect()
        };
        all.iter().enumerate().map(gaps).collect()
    }
    /// Trainable elements that one rank owns, over all units.
    pub fn trained_shard(&self) -> usize {
        self.units.iter().flat_map(Unit::learning).map(|p| p.shard).sum()
    }
    /// Lengths of the staging slots when the non-root units rotate through `cycle` slots. Each slot fits the largest of
    /// its units, measured by `len`. See [`slot`].
    pub fn slots(&self, cycle: usize, len: impl Fn(&Unit) -> usize) -> Vec<usize> {
        let mut lens = vec![0; self.units.len().min(cycle + 1)];
        for (unit, u) in self.units.iter().enumerate() {
            let longest = &mut lens[slot(unit, cycle)];
            *longest = len(u).max(*longest);
        }
        lens
    }
}

/// The layer range of each unit.
fn grouped(layouts: &[Layout], wrap: Wrap) -> Vec<Range<usize>> {
    let mut units: Vec<Range<usize>> = Vec::new();
    // Under tensor parallelism the ranks' pieces of a tensor can differ in length. Counting the longest gives every
    // rank the same units.
    let count = |layers: Range<usize>, of: &dyn Fn(&Segment) -> bool| -> usize {
        layouts[layers].iter().flat_map(|l| &l.segments).filter(|s| of(s)).map(Segment::extent).sum()
    };
    for layer in 0..layouts.len() {
        let joins = match (wrap, units.last()) {
            (_, None) | (Wrap::Transformer, _) => false,
            (Wrap::None, _) => true,
            (_, Some(unit)) if unit.start == ROOT => false,
            (Wrap::Size(min), Some(unit)) => count(unit.clone(), &|_| true) < min,
            (Wrap::AtMost(max), Some(unit)) => count(unit.start..layer + 1, &|s| s.is_trained()) <= max,
        };
        match units.last_mut().filter(|_| joins) {
            Some(unit) => unit.end = layer + 1,
            None => units.push(layer..layer + 1),
        }
    }
    units
}

/// The staging slot of a unit. The root has slot 0 to itself; the others rotate through `cycle` slots, so any `cycle`
/// consecutive units can be staged at once. The assignment is static, with no search during training.
pub fn slot(unit: usize, cycle: usize) -> usize {
    if unit == 0 { 0 } else { 1 + (unit - 1) % cycle }
}

/// A range of a shard, of one segment or of successive ones that belong together.
#[derive(Clone, PartialEq, Debug)]
pub struct Run {
    /// Relative to the start of the shard.
    pub range: Range<usize>,
    /// Index of the first segment.
    pub segment: usize,
}

/// Splits `owned`, a range of a unit, into the fewest runs of segments of the same `group`, without those that have
/// none. Padding belongs to the segment before it.
pub fn runs<G: PartialEq>(layout: &Layout, owned: Range<usize>, group: impl Fn(usize) -> Option<G>) -> Vec<Run> {
    let mut runs: Vec<Run> = Vec::new();
    for (i, segment) in layout.segments.iter().enumerate() {
        let end = layout.segments.get(i + 1).map_or(usize::MAX, |next| next.start);
        let (from, to) = (segment.start.max(owned.start), end.min(owned.end));
        let Some(own) = group(i).filter(|_| from < to) else { continue };
        let range = from - owned.start..to - owned.start;
        match runs.last_mut() {
            Some(last) if last.range.end == range.start && group(last.segment) == Some(own) => {
                last.range.end = range.end
            }
            _ => runs.push(Run { range, segment: i }),
        }
    }
    runs
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::nn::Init;

    fn layer(sizes: &[(usize, bool)]) -> Layout {
        let mut layout = Layout::default();
        for (i, &(len, decay)) in sizes.iter().enumerate() {
            layout.push(format!("t{i}"), &[len], decay, Init::Constant(0.0));
        }
        layout
    }
    fn model() -> Vec<Layout> {
        vec![layer(&[(2000, true)]), layer(&[(260, true), (10, false)]), layer(&[(600, true)]), layer(&[(140, true)])]
    }
    fn layers(wrap: Wrap) -> Vec<Range<usize>> {
        Flat::new(&model(), wrap, 3).units.into_iter().map(|u| u.layers).collect()
    }

    #[test]
    fn wraps_group_layers() {
        assert_eq!(layers(Wrap::Transformer), [0..1, 1..2, 2..3, 3..4]);
        assert_eq!(layers(Wrap::Size(0)), [0..1, 1..2, 2..3, 3..4]);
        assert_eq!(layers(Wrap::Size(272)), [0..1, 1..3, 3..4]);
        assert_eq!(layers(Wrap::Size(1 << 30)), [0..1, 1..4]);
        assert_eq!(layers(Wrap::AtMost(0)), [0..1, 1..2, 2..3, 3..4]);
        assert_eq!(layers(Wrap::AtMost(869)), [0..1, 1..2, 2..4]);
        assert_eq!(layers(Wrap::AtMost(870)), [0..1, 1..3, 3..4]);
        assert_eq!(layers(Wrap::None).as_slice(), std::slice::from_ref(&(0..4)));
    }

    #[test]
    fn shards_cover_the_unit_and_stay_aligned() {
        for ranks in 1..=5 {
            for unit in Flat::new(&model(), Wrap::Size(272), ranks).units {
                let [part] = &unit.parts[..] else { panic!("{:?}", unit.parts) };
                assert_eq!(part.owned(0).start, 0);
                assert_eq!(part.owned(ranks - 1).end, part.padded);
                assert_eq!(part.shard % ALIGN, 0);
                assert!(part.padded >= part.layout.len && part.padded - part.layout.len < ranks * ALIGN);
            }
        }
        // 256 elements over 4 ranks: three shards hold padding only.
        let unit = &Flat::new(&[layer(&[(256, true)])], Wrap::None, 4).units[0];
        assert_eq!((unit.parts[0].shard, unit.parts[0].padded), (256, 1024));
    }

    #[test]
    fn layers_keep_their_place_in_a_unit() {
        let flat = Flat::new(&model(), Wrap::Size(272), 2);
        let home = flat.home(2);
        assert_eq!((home.unit, home.layout.segments[0].range()), (1, 768..1368)); // after 260 -> 512 and 10 -> 256
        assert_eq!(flat.units[1].parts[0].layout.segments[2].start, 768);
    }

    /// Both parts are sharded over all ranks, and a layer's segments keep their order.
    #[test]
    fn frozen_segments_stand_apart() {
        let mut model = model();
        model[1].segments[0].storage = Storage::Frozen;
        model[3].segments[0].storage = Storage::Frozen;
        let flat = Flat::new(&model, Wrap::Size(272), 2);
        let [_, mixed, frozen] = &flat.units[..] else { panic!("{} units", flat.units.len()) };
        let sizes = |u: &Unit| {
            u.parts.iter().map(|p| (p.storage == Storage::Trained, p.layout.len, p.padded, p.shard)).collect::<Vec<_>>()
        };
        // Trainable: 10 -> 256 and 600 -> 768; frozen 260 -> 512; each to a multiple of 2 * 256.
        assert_eq!(sizes(mixed), [(true, 1024, 1024, 512), (false, 512, 512, 256)]);
        let frozen_in = |u: &Unit| u.padded(Storage::Frozen);
        assert_eq!((mixed.trained(), frozen_in(mixed)), (1024, 512));
        assert_eq!(sizes(frozen), [(false, 256, 512, 256)]);
        assert_eq!((frozen.trained(), frozen_in(frozen)), (0, 512));
        let starts: Vec<usize> = flat.home(1).layout.segments.iter().map(|s| s.start).collect();
        assert_eq!(starts, [0, 0]);
        assert_eq!(flat.home(2).layout.segments[0].start, 256);
        assert_eq!(flat.trained_shard(), 1024 + 512);
        assert_eq!(flat.slots(2, Unit::trained), [2048, 1024, 0]);
        assert_eq!(flat.slots(2, frozen_in), [0, 512, 512]);
    }

    #[test]
    fn slots_rotate() {
        let flat = Flat::new(&model(), Wrap::Transformer, 1);
        assert_eq!(flat.slots(2, Unit::trained), [2048, 768, 768]); // units 1 and 3 share slot 1, unit 2 has slot 2
        assert_eq!(flat.slots(3, Unit::trained), [2048, 768, 768, 256]);
        assert_eq!(Flat::new(&model(), Wrap::None, 1).slots(2, Unit::trained), [2048 + 768 + 768 + 256]);
    }

    #[test]
    fn runs_are_cut_at_changes_of_group_only() {
        let layout = layer(&[(260, true), (256, true), (10, false), (14, false), (200, true)]);
        assert_eq!(layout.len, 512 + 256 + 256 + 256 + 256);
        let run = |range, segment| Run { range, segment };
        let of = |owned| runs(&layout, owned, |i| Some(layout.segments[i].decay));
        assert_eq!(of(0..2048), [run(0..768, 0), run(768..1280, 2), run(1280..2048, 4)]);
        assert_eq!(of(512..1024), [run(0..256, 1), run(256..512, 2)]);
        assert_eq!(of(1792..2048), [run(0..256, 4)]); // padding only: goes with the last segment
        let without = runs(&layout, 0..2048, |i| (i != 1).then_some(()));
        assert_eq!(without, [run(0..512, 0), run(768..2048, 2)]);
    }
}
