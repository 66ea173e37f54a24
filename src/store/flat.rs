//! From layers to units, and from units to shards: pure arithmetic on the segment table. Never holds values.
//!
//! A *unit* is what is gathered together: the layouts of one or more layers, appended, then padded so that every rank's
//! shard has the same length and starts on [`ALIGN`] elements:
//!
//! ```text
//! unit    | layer 1              | layer 2         | padding |
//! shards  | rank 0      | rank 1      | rank 2      | rank 3  |     padded = ranks * shard, shard = ALIGN * k
//! ```
//!
//! Cuts ignore the segments' borders: a shard may begin inside one tensor and end inside another, or hold padding only.
//! Padding is 0 in weights and 0 in every gradient, and every optimizer maps (p, g, state) = 0 to 0. So nothing needs to
//! step around it: it is gathered, reduced, squared and updated like the rest, and stays 0.
use crate::device::ALIGN;
use crate::nn::{Layout, ROOT};
use std::ops::Range;

/// How layers are grouped in units.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Wrap {
    /// Every layer its own unit.
    Transformer,
    /// The root alone; consecutive blocks together until a unit has at least so many parameters.
    Size(usize),
    /// Everything one unit.
    None,
}

/// A run of layers that is gathered, reduced and updated as one flat buffer.
#[derive(Clone, Debug)]
pub struct Unit {
    pub layers: Range<usize>,
    /// All segments of its layers.
    pub layout: Layout,
    /// Elements of the flat buffer: `layout.len` rounded up to a multiple of `ranks * ALIGN`.
    pub padded: usize,
    /// Elements that each rank owns: `padded / ranks`.
    pub shard: usize,
}

impl Unit {
    /// The part that `rank` owns.
    pub fn owned(&self, rank: usize) -> Range<usize> {
        rank * self.shard..(rank + 1) * self.shard
    }
}

/// Where a layer lives.
#[derive(Clone, Debug)]
pub struct Home {
    pub unit: usize,
    /// Its range in the unit's flat buffer.
    pub range: Range<usize>,
    /// The layer's own segments, counted from the start of `range`.
    pub layout: Layout,
}

/// All units of a model and the way from a layer to its unit. Unit 0 holds the root.
#[derive(Clone, Debug)]
pub struct Flat {
    pub units: Vec<Unit>,
    homes: Vec<Home>,
}

impl Flat {
    pub fn new(layouts: &[Layout], wrap: Wrap, ranks: usize) -> Flat {
        let mut flat = Flat { units: Vec::new(), homes: Vec::new() };
        for (layer, layout) in layouts.iter().enumerate() {
            let joins = match (wrap, flat.units.last()) {
                (_, None) | (Wrap::Transformer, _) => false,
                (Wrap::None, _) => true,
                (Wrap::Size(min), Some(unit)) => unit.layers.start != ROOT && unit.layout.params() < min,
            };
            if !joins {
                let layers = layer..layer;
                flat.units.push(Unit { layers, layout: Layout::default(), padded: 0, shard: 0 });
            }
            let index = flat.units.len() - 1;
            let unit = &mut flat.units[index];
            let at = unit.layout.append(layout);
            unit.layers.end = layer + 1;
            unit.padded = unit.layout.len.next_multiple_of(ranks * ALIGN);
            unit.shard = unit.padded / ranks;
            flat.homes.push(Home { unit: index, range: at..at + layout.len, layout: layout.clone() });
        }
        flat
    }
    pub fn home(&self, layer: usize) -> &Home {
        &self.homes[layer]
    }
    /// Elements that one rank owns, over all units.
    pub fn shard(&self) -> usize {
        self.units.iter().map(|u| u.shard).sum()
    }
    /// Lengths of the staging slots when the units other than the root take turns in `cycle` of them: each slot holds the
    /// largest of its units. See [`slot`].
    pub fn slots(&self, cycle: usize) -> Vec<usize> {
        let mut lens = vec![0; self.units.len().min(cycle + 1)];
        for (unit, u) in self.units.iter().enumerate() {
            let len = &mut lens[slot(unit, cycle)];
            *len = u.padded.max(*len);
        }
        lens
    }
}

/// Which staging slot a unit uses. The root has its own (slot 0), the others take turns in `cycle` slots, so that any
/// `cycle` consecutive units can be staged at once. The assignment is fixed: nothing is searched while training.
pub fn slot(unit: usize, cycle: usize) -> usize {
    if unit == 0 { 0 } else { 1 + (unit - 1) % cycle }
}

/// A stretch of a piece to which weight decay applies, or does not, throughout.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Run {
    /// Counted from the start of the piece.
    pub range: Range<usize>,
    pub decay: bool,
}

/// Cuts `owned`, a range of a unit, in as few runs as its segments allow. The runs cover all of it: padding goes with
/// the segment before it.
pub fn runs(layout: &Layout, owned: Range<usize>) -> Vec<Run> {
    let mut runs: Vec<Run> = Vec::new();
    let mut cut = |from: usize, to: usize, decay: bool| {
        let (from, to) = (from.max(owned.start), to.min(owned.end));
        if from >= to {
            return;
        }
        let range = from - owned.start..to - owned.start;
        match runs.last_mut() {
            Some(last) if last.decay == decay => last.range.end = range.end,
            _ => runs.push(Run { range, decay }),
        }
    };
    for (i, segment) in layout.segments.iter().enumerate() {
        let end = layout.segments.get(i + 1).map_or(usize::MAX, |next| next.start);
        cut(segment.start, end, segment.decay);
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
        vec![layer(&[(1000, true)]), layer(&[(130, true), (5, false)]), layer(&[(300, true)]), layer(&[(70, true)])]
    }
    fn layers(wrap: Wrap) -> Vec<Range<usize>> {
        Flat::new(&model(), wrap, 3).units.into_iter().map(|u| u.layers).collect()
    }

    #[test]
    fn wraps_group_layers() {
        assert_eq!(layers(Wrap::Transformer), [0..1, 1..2, 2..3, 3..4]);
        assert_eq!(layers(Wrap::Size(0)), [0..1, 1..2, 2..3, 3..4]);
        assert_eq!(layers(Wrap::Size(136)), [0..1, 1..3, 3..4]);
        assert_eq!(layers(Wrap::Size(1 << 30)), [0..1, 1..4]);
        assert_eq!(layers(Wrap::None).as_slice(), std::slice::from_ref(&(0..4)));
    }

    #[test]
    fn shards_cover_the_unit_and_stay_aligned() {
        for ranks in 1..=5 {
            for unit in Flat::new(&model(), Wrap::Size(136), ranks).units {
                assert_eq!(unit.owned(0).start, 0);
                assert_eq!(unit.owned(ranks - 1).end, unit.padded);
                assert_eq!(unit.shard % ALIGN, 0);
                assert!(unit.padded >= unit.layout.len && unit.padded - unit.layout.len < ranks * ALIGN);
            }
        }
        // 128 elements over 4 ranks: three shards hold padding only.
        let unit = &Flat::new(&[layer(&[(128, true)])], Wrap::None, 4).units[0];
        assert_eq!((unit.shard, unit.padded), (128, 512));
    }

    #[test]
    fn layers_keep_their_place_in_a_unit() {
        let flat = Flat::new(&model(), Wrap::Size(136), 2);
        let home = flat.home(2);
        assert_eq!((home.unit, home.range.clone()), (1, 384..768)); // after 130 -> 256 and 5 -> 128
        assert_eq!(home.layout, model()[2]);
        assert_eq!(flat.units[1].layout.segments[2].start, 384);
    }

    #[test]
    fn slots_take_turns() {
        let flat = Flat::new(&model(), Wrap::Transformer, 1);
        assert_eq!(flat.slots(2), [1024, 384, 384]); // units 1 and 3 share slot 1, unit 2 has slot 2
        assert_eq!(flat.slots(3), [1024, 384, 384, 128]);
        assert_eq!(Flat::new(&model(), Wrap::None, 1).slots(2), [1024 + 384 + 384 + 128]);
    }

    #[test]
    fn runs_are_cut_at_changes_of_decay_only() {
        let layout = layer(&[(130, true), (128, true), (5, false), (7, false), (100, true)]);
        assert_eq!(layout.len, 256 + 128 + 128 + 128 + 128);
        let run = |range, decay| Run { range, decay };
        assert_eq!(runs(&layout, 0..1024), [run(0..384, true), run(384..640, false), run(640..1024, true)]);
        assert_eq!(runs(&layout, 256..512), [run(0..128, true), run(128..256, false)]);
        assert_eq!(runs(&layout, 896..1024), [run(0..128, true)]); // padding only: goes with the last segment
    }
}
