//! The tensors in a flat buffer: the ONE table that init, weight decay, clipping, checkpoints and tests read. Never
//! holds values.
use super::split::Slice;
use crate::base::DType;
use crate::base::fp8::Fp8Shape;
use crate::base::nf4::Nf4Shape;
use crate::device::ALIGN;
use std::ops::Range;

/// Initial values of a tensor.
#[derive(Clone, Copy, PartialEq, Debug)]
pub enum Init {
    /// Normal with mean 0 and the given standard deviation.
    Normal(f32),
    /// Uniform in plus or minus the given bound.
    Uniform(f32),
    Constant(f32),
}

impl Init {
    /// Standard deviation of initial weights: `initializer_range` of all families' configs.
    const DEVIATION: f32 = 0.02;
    pub(super) const NORMAL: Init = Init::Normal(Init::DEVIATION);
    pub(super) const ONES: Init = Init::Constant(1.0);
    pub(super) const ZEROS: Init = Init::Constant(0.0);

    /// Init of the projections that end a residual branch: the deviation divided by the square root of their number,
    /// two per block (Radford et al. 2019, "Language models are unsupervised multitask learners", section 2.3). Applied
    /// to every family, although transformers scales only GPT-2's.
    pub(super) fn residual(blocks: usize) -> Init {
        Init::Normal(Init::DEVIATION / (2.0 * blocks as f32).sqrt())
    }
}

/// The name of slice `e` of tensor `whole` along its first dimension: a segment that files store within that tensor.
pub fn slice_name(whole: &str, e: usize) -> String {
    format!("{whole}[{e}]")
}
/// The same for the upper (0) or the lower (1) half of the rows of the slice.
pub fn half_name(whole: &str, e: usize, half: usize) -> String {
    format!("{whole}[{e}.{half}]")
}
/// The same for the left (0) or the right (1) half of its columns.
pub fn columns_name(whole: &str, e: usize, half: usize) -> String {
    format!("{whole}[{e}:{half}]")
}

/// What of a slice a segment is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum SlicePart {
    Whole,
    /// A half of its rows.
    Rows,
    /// A half of its columns: the left (0) or the right (1) one.
    Columns(usize),
}

impl SlicePart {
    /// How many of such are a slice.
    pub fn count(self) -> usize {
        if self == SlicePart::Whole { 1 } else { 2 }
    }
}

/// The tensor that a name of [`slice_name`], [`half_name`] or [`columns_name`] is within, the place of what it names
/// among such of all slices, and what that is.
pub fn sliced(name: &str) -> Option<(&str, usize, SlicePart)> {
    let (whole, part) = name.strip_suffix(']')?.rsplit_once('[')?;
    let half = |half: &str| half.parse::<usize>().ok().filter(|half| *half < 2);
    let (e, half, part) = match (part.split_once('.'), part.split_once(':')) {
        (Some((e, upper)), _) => (e, half(upper)?, SlicePart::Rows),
        (_, Some((e, left))) => (e, half(left)?, SlicePart::Columns(half(left)?)),
        _ => (part, 0, SlicePart::Whole),
    };
    Some((whole, e.parse::<usize>().ok()? * part.count() + half, part))
}

/// How a tensor is distributed over tp ranks.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Tp {
    /// Replicated; every rank computes the same gradient.
    Same,
    /// Replicated; the gradient is the sum of the ranks' gradients.
    Summed,
    /// Sharded: every rank has its [`Slice::share`] of `whole` along `dim`.
    Cut { dim: usize, over: Slice, whole: usize },
    /// Sharded by rows, as several matrices of `rows` each, one below the other (0: none): a rank has its share of
    /// each.
    Parts { over: Slice, rows: [usize; 5] },
}

impl Tp {
    /// Whether ranks have different elements.
    pub fn is_cut(&self) -> bool {
        matches!(self, Tp::Cut { .. } | Tp::Parts { .. })
    }
    /// The same for the slice `index`.
    fn at(self, index: usize) -> Tp {
        match self {
            Tp::Cut { dim, over, whole } => Tp::Cut { dim, over: Slice { index, ..over }, whole },
            Tp::Parts { over, rows } => Tp::Parts { over: Slice { index, ..over }, rows },
            other => other,
        }
    }
    /// For a sharded tensor: the dimension, the number of ranks, and the length along it on this rank, on the rank with
    /// most, and of the whole.
    fn along(&self) -> Option<(usize, usize, [usize; 3])> {
        match *self {
            Tp::Cut { dim, over, whole } => Some((dim, over.of, [over.share(whole).len(), over.most(whole), whole])),
            Tp::Parts { over, rows } => {
                let own = rows.map(|n| over.share(n).len()).iter().sum();
                let most = rows.map(|n| over.most(n)).iter().sum();
                Some((0, over.of, [own, most, rows.iter().sum()]))
            }
            Tp::Same | Tp::Summed => None,
        }
    }
}

/// Where a matrix's codes begin in the buffer of its unit, and its scales among those of all units.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct CodePlace {
    pub codes: usize,
    pub scales: usize,
}

/// How a tensor, or all of a flat buffer, is stored.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Storage {
    /// Master weights, a gradient and optimizer state.
    Trained,
    /// The same, and what is gathered are codes of FP8. Only stores decide so.
    Coded(CodePlace),
    /// Frozen, with master weights, because checkpoints store it.
    Saved,
    /// Frozen, in the compute dtype only: checkpoints leave it out.
    Frozen,
    /// A frozen matrix in 4 bits ([`crate::base::nf4`]), as bytes.
    Nf4,
}

impl Storage {
    /// One for each kind of buffer that a unit can have, in the order of [`Storage::buffer`].
    pub const BUFFERS: [Storage; 4] =
        [Storage::Trained, Storage::Coded(CodePlace { codes: 0, scales: 0 }), Storage::Frozen, Storage::Nf4];

    /// The kind of buffer that it is in.
    pub fn buffer(self) -> usize {
        match self {
            Storage::Trained => 0,
            Storage::Coded(_) => 1,
            Storage::Saved | Storage::Frozen => 2,
            Storage::Nf4 => 3,
        }
    }
    /// Otherwise it is frozen: without a gradient, optimizer state and reduction.
    pub fn is_trained(self) -> bool {
        matches!(self, Storage::Trained | Storage::Coded(_))
    }
    /// What is gathered, when layers compute in `dtype`.
    pub fn dtype(self, dtype: DType) -> DType {
        if matches!(self, Storage::Coded(_) | Storage::Nf4) { DType::U8 } else { dtype }
    }
}

/// A named tensor inside a layer's flat buffer.
#[derive(Clone, Debug, PartialEq)]
pub struct Segment {
    /// The Hugging Face name, as used in checkpoints, metrics and errors.
    pub name: String,
    /// Shape on this rank, if it is held.
    pub shape: Vec<usize>,
    /// Whether this rank has the tensor. False for experts of other ranks of ep: then it has no elements here.
    pub held: bool,
    /// Which ranks of ep have the tensor; none: all.
    pub ep: Option<usize>,
    pub tp: Tp,
    /// First element in its buffer, or byte in that of [`Storage::Nf4`]; a multiple of [`ALIGN`].
    pub start: usize,
    pub storage: Storage,
    /// A matrix whose forward product and input gradient are computed from operands in [`crate::base::fp8`].
    pub fp8: bool,
    /// Whether weight decay applies (matrices, not norms and biases).
    pub decay: bool,
    /// Whether PEFT loads an adapter of the matrix.
    pub adaptable: bool,
    /// Factor of the learning rate.
    pub lr_scale: f32,
    pub init: Init,
}

impl Segment {
    pub fn len(&self) -> usize {
        if self.held { self.shape.iter().product() } else { 0 }
    }
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
    /// Its elements in its buffer.
    pub fn range(&self) -> Range<usize> {
        self.start..self.start + self.len()
    }
    /// Its bytes in the buffer of [`Storage::Nf4`].
    pub fn bytes(&self) -> Range<usize> {
        self.start..self.start + self.packing().bytes()
    }
    pub fn is_trained(&self) -> bool {
        self.storage.is_trained()
    }
    pub fn is_packed(&self) -> bool {
        self.storage == Storage::Nf4
    }
    /// The shape of this rank's part as a weight of products in FP8.
    pub fn fp8_shape(&self) -> Fp8Shape {
        Fp8Shape::weight(self.shape[0], self.shape[1])
    }
    /// How it is packed, or would be.
    pub fn packing(&self) -> Nf4Shape {
        let whole = self.global_shape().iter().product();
        match self.evenly() {
            Some((run, before, stride)) if self.tp.is_cut() => Nf4Shape { len: self.len(), run, before, stride, whole },
            _ => Nf4Shape::new(whole),
        }
    }
    /// Whether it can be packed: no block is divided over ranks of tp, and its parts are alike.
    pub(super) fn is_packable(&self) -> bool {
        let Some((dim, of, _)) = self.tp.along() else { return self.packing().is_whole_blocks() };
        (0..of).all(|index| {
            let mut part = Segment { tp: self.tp.at(index), ..self.clone() };
            part.shape[dim] = part.tp.along().map_or(0, |(_, _, [own, ..])| own);
            part.evenly().is_some() && part.packing().is_whole_blocks()
        })
    }
    /// Elements, or bytes if packed, reserved in its buffer.
    fn room(&self) -> usize {
        if self.is_packed() { Nf4Shape { len: self.extent(), ..self.packing() }.bytes() } else { self.extent() }
    }
    /// Shape of the whole tensor, over all tp ranks.
    pub fn global_shape(&self) -> Vec<usize> {
        let mut shape = self.shape.clone();
        if let Some((dim, _, [.., whole])) = self.tp.along() {
            shape[dim] = whole;
        }
        shape
    }
    /// Elements of the largest shard, which a flat buffer reserves, so that later segments have the same offset on
    /// every tp rank. The difference to this rank's shard is padding.
    pub fn extent(&self) -> usize {
        let Some((dim, _, [_, most, _])) = self.tp.along() else { return self.len() };
        if !self.held {
            return 0;
        }
        self.shape.iter().enumerate().map(|(i, &n)| if i == dim { most } else { n }).product()
    }
    /// This rank's part in the whole tensor, if it is at equal distances there: elements that are contiguous, those
    /// before the first of them, and the elements between two such beginnings. For a tensor that is not sharded, any
    /// number is contiguous.
    pub fn evenly(&self) -> Option<(usize, usize, usize)> {
        match self.tp {
            Tp::Cut { dim, over, whole } => {
                let inner: usize = self.shape[dim + 1..].iter().product();
                Some(((self.shape[dim] * inner).max(1), over.share(whole).start * inner, whole * inner))
            }
            Tp::Parts { over, rows: [first, others @ ..] } => {
                let inner: usize = self.shape[1..].iter().product();
                let share = over.share(first);
                let alike = others.iter().all(|&rows| rows == first || rows == 0);
                alike.then_some(((share.len() * inner).max(1), share.start * inner, first * inner))
            }
            Tp::Same | Tp::Summed => Some((usize::MAX, 0, 0)),
        }
    }
    /// The element of the whole tensor at `at` of this rank's shard, and the number of elements from there on that are
    /// contiguous in both.
    fn place(&self, at: usize) -> (usize, usize) {
        if let Some((run, before, all)) = self.evenly() {
            let (row, column) = (at / run, at % run);
            return (row * all + before + column, run - column);
        }
        let Tp::Parts { over, rows } = self.tp else { return (at, usize::MAX - at) };
        let inner: usize = self.shape[1..].iter().product();
        // Elements of the earlier parts, on this rank and in all.
        let (mut own, mut all) = (0, 0);
        for rows in rows {
            let share = over.share(rows);
            let end = own + share.len() * inner;
            if at < end {
                return (all + share.start * inner + at - own, end - at);
            }
            own = end;
            all += rows * inner;
        }
        (all, usize::MAX)
    }
    /// Splits `range`, relative to the start of this rank's shard, into stretches that are also contiguous in the whole
    /// tensor. Yields each with its offset there.
    pub fn stretches(&self, range: Range<usize>) -> impl Iterator<Item = (Range<usize>, usize)> {
        let mut at = range.start;
        std::iter::from_fn(move || {
            if at >= range.end {
                return None;
            }
            let (place, run) = self.place(at);
            let end = range.end.min(at.saturating_add(run));
            let part = at..end;
            at = end;
            Some((part, place))
        })
    }
}

/// The segments of one layer or unit. Gaps between segments are padding, with zero weights and gradients.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Layout {
    pub segments: Vec<Segment>,
    /// End of the last segment, rounded up to [`ALIGN`].
    pub len: usize,
    /// The same in the buffer of packed segments.
    pub packed: usize,
    /// Whether this is the layer of a block's experts.
    pub experts: bool,
}

impl Layout {
    /// Appends a segment and returns its index.
    pub fn push(&mut self, name: impl Into<String>, shape: &[usize], decay: bool, init: Init) -> usize {
        self.push_part(name, shape, Tp::Same, decay, init)
    }
    /// Appends a segment with distribution `tp`; for a sharded tensor, `shape` is this rank's.
    pub fn push_part(&mut self, name: impl Into<String>, shape: &[usize], tp: Tp, decay: bool, init: Init) -> usize {
        self.place(Segment {
            name: name.into(),
            shape: shape.to_vec(),
            held: true,
            ep: None,
            tp,
            start: 0,
            storage: Storage::Trained,
            fp8: false,
            decay,
            adaptable: true,
            lr_scale: 1.0,
            init,
        })
    }
    /// Gives segments from `first` on, which are the last, to the ranks with index `ep` of ep. `held`: this is one.
    pub fn give(&mut self, first: usize, ep: usize, held: bool) {
        if !held {
            self.len = self.segments.get(first).map_or(self.len, |segment| segment.start);
        }
        for segment in &mut self.segments[first..] {
            segment.ep = Some(ep);
            if !held {
                (segment.held, segment.start) = (false, self.len);
            }
        }
    }
    /// Appends a segment of another layout at a new offset and returns its index.
    pub fn place(&mut self, segment: Segment) -> usize {
        let end = if segment.is_packed() { &mut self.packed } else { &mut self.len };
        let start = *end;
        *end = (start + segment.room()).next_multiple_of(ALIGN);
        self.segments.push(Segment { start, ..segment });
        self.segments.len() - 1
    }
    /// Places all segments again, after some were marked as packed.
    pub(super) fn place_again(&mut self) {
        (self.len, self.packed) = (0, 0);
        for segment in std::mem::take(&mut self.segments) {
            self.place(segment);
        }
    }
    /// Number of parameters, without padding.
    pub fn params(&self) -> usize {
        self.segments.iter().map(Segment::len).sum()
    }
    /// Number of parameters counting the largest shards: the same on every tp rank.
    pub fn extent(&self) -> usize {
        self.segments.iter().map(Segment::extent).sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn part(shape: &[usize], tp: Tp) -> Segment {
        let mut layout = Layout::default();
        layout.push("w", shape, true, Init::Constant(0.0));
        Segment { tp, ..layout.segments.remove(0) }
    }

    #[test]
    fn parts_of_all_ranks_make_the_tensor() {
        let whole = part(&[6, 8], Tp::Same);
        assert_eq!((whole.global_shape(), whole.stretches(5..40).collect::<Vec<_>>()), (vec![6, 8], vec![(5..40, 5)]));
        for (dim, of) in [(0, 2), (1, 2), (0, 4), (1, 3), (1, 8)] {
            let (mut seen, whole) = ([0; 48], [6, 8]);
            for over in (0..of).map(|index| Slice { index, of }) {
                let mut shape = whole;
                shape[dim] = over.share(whole[dim]).len();
                let part = part(&shape, Tp::Cut { dim, over, whole: whole[dim] });
                assert_eq!((part.global_shape(), part.extent()), (vec![6, 8], 48 / whole[dim] * over.most(whole[dim])));
                for (local, global) in part.stretches(0..part.len()) {
                    seen[global..global + local.len()].iter_mut().for_each(|n| *n += 1);
                }
            }
            assert_eq!(seen, [1; 48], "dim {dim} over {of}");
        }
        // Parts of different lengths, and of equal ones: each rank has its share of each.
        for (rows, of) in [
            ([3, 2, 1, 0, 0], 2),
            ([2, 2, 2, 0, 0], 2),
            ([4, 2, 0, 0, 0], 3),
            ([3, 3, 0, 0, 0], 2),
            ([1, 2, 1, 1, 1], 2),
        ] {
            let mut seen = [0; 48];
            for over in (0..of).map(|index| Slice { index, of }) {
                let own: usize = rows.map(|n| over.share(n).len()).iter().sum();
                let part = part(&[own, 8], Tp::Parts { over, rows });
                assert_eq!(part.global_shape(), [6, 8]);
                for (local, global) in (0..own * 8).step_by(5).flat_map(|at| part.stretches(at..(at + 5).min(own * 8)))
                {
                    let rank = |row: usize| {
                        let mut row = row;
                        rows.iter()
                            .position(|&n| {
                                row < n || {
                                    row -= n;
                                    false
                                }
                            })
                            .map(|p| (p, row))
                            .unwrap()
                    };
                    let (p, row) = rank(global / 8);
                    assert!(over.share(rows[p]).contains(&row), "{rows:?} {over:?}: {global}");
                    seen[global..global + local.len()].iter_mut().for_each(|n| *n += 1);
                }
            }
            assert_eq!(seen, [1; 48], "{rows:?} over {of}");
        }
        // Rank 1's columns 4..8: from the third element of its first row to the second of its third.
        let over = Slice { index: 1, of: 2 };
        let columns = part(&[6, 4], Tp::Cut { dim: 1, over, whole: 8 });
        assert_eq!(columns.stretches(2..10).collect::<Vec<_>>(), [(2..4, 6), (4..8, 12), (8..10, 20)]);
        assert_eq!(columns.stretches(3..3).count(), 0);
    }

    /// Reductions of tensors replicated over tp rely on this.
    #[test]
    fn what_follows_an_uneven_part_stands_at_the_same_place_on_every_rank() {
        let of = 3;
        let layouts = (0..of).map(|index| {
            let (mut layout, over) = (Layout::default(), Slice { index, of });
            let tp = Tp::Cut { dim: 0, over, whole: 514 };
            let parts = over.share(514).len();
            layout.push_part("words", &[parts, 3], tp, true, Init::Constant(0.0));
            layout.push("norm", &[5], false, Init::Constant(1.0));
            (parts, layout.params(), layout.segments[1].start, layout.len)
        });
        assert_eq!(layouts.collect::<Vec<_>>(), [(172, 521, 768, 1024), (171, 518, 768, 1024), (171, 518, 768, 1024)]);
    }
}
