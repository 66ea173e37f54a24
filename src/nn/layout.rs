//! What stands where in a flat buffer: the ONE table that init, weight decay, clipping, checkpoints and tests read.
//! Never holds values.
use super::split::Slice;
use crate::device::ALIGN;
use std::ops::Range;

/// How a tensor starts.
#[derive(Clone, Copy, PartialEq, Debug)]
pub enum Init {
    /// Normal with mean 0 and this standard deviation.
    Normal(f32),
    /// Uniform between minus and plus this.
    Uniform(f32),
    Constant(f32),
}

impl Init {
    /// Standard deviation of fresh weights: `initializer_range` of all families' configurations.
    const DEVIATION: f32 = 0.02;
    pub(super) const NORMAL: Init = Init::Normal(Init::DEVIATION);
    pub(super) const ONES: Init = Init::Constant(1.0);
    pub(super) const ZEROS: Init = Init::Constant(0.0);

    /// How the projections that end a residual branch start: the deviation over the root of their number, two in each
    /// of `blocks` (Radford et al. 2019, "Language models are unsupervised multitask learners", section 2.3). In every
    /// family: transformers does so for GPT-2 and starts the others flat.
    pub(super) fn residual(blocks: usize) -> Init {
        Init::Normal(Init::DEVIATION / (2.0 * blocks as f32).sqrt())
    }
}

/// How a tensor stands to the ranks of tp.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Tp {
    /// Every rank has all of it and computes the same gradient.
    Same,
    /// Every rank has all of it; the gradient is the sum of what they compute.
    Summed,
    /// Every rank has its [`Slice::share`] of what is `whole` along `dim`.
    Cut { dim: usize, over: Slice, whole: usize },
}

/// A named tensor inside a layer's flat buffer.
#[derive(Clone, Debug, PartialEq)]
pub struct Segment {
    /// The Hugging Face name of the architecture: what checkpoints, metrics and errors say.
    pub name: String,
    /// This rank's.
    pub shape: Vec<usize>,
    pub tp: Tp,
    /// First element; a multiple of [`ALIGN`].
    pub start: usize,
    /// Whether weight decay applies (matrices, not norms and biases).
    pub decay: bool,
    /// A frozen tensor (false) has no gradient, no optimizer state and no reduction.
    pub trainable: bool,
    /// Multiplies the learning rate.
    pub lr_scale: f32,
    pub init: Init,
}

impl Segment {
    pub fn len(&self) -> usize {
        self.shape.iter().product()
    }
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
    pub fn range(&self) -> Range<usize> {
        self.start..self.start + self.len()
    }
    /// Of the whole tensor, over all ranks of tp.
    pub fn global_shape(&self) -> Vec<usize> {
        let mut shape = self.shape.clone();
        if let Tp::Cut { dim, whole, .. } = self.tp {
            shape[dim] = whole;
        }
        shape
    }
    /// Elements that it takes in a flat buffer: those of the largest part, so that whatever follows stands at the same
    /// place on every rank of tp. What this rank has less is padding.
    pub fn extent(&self) -> usize {
        let Tp::Cut { dim, over, whole } = self.tp else { return self.len() };
        self.shape.iter().enumerate().map(|(i, &n)| if i == dim { over.most(whole) } else { n }).product()
    }
    /// Cuts `range`, elements of this rank's part counted from its first, into stretches that are contiguous in the
    /// whole tensor too: each with the place of its first element there.
    pub fn stretches(&self, range: Range<usize>) -> impl Iterator<Item = (Range<usize>, usize)> {
        // Of a part cut along dim, `run` elements lie together, `before` in each `row` of the whole tensor.
        let (run, before, all) = match self.tp {
            Tp::Cut { dim, over, whole } => {
                let inner: usize = self.shape[dim + 1..].iter().product();
                ((self.shape[dim] * inner).max(1), over.share(whole).start * inner, whole * inner)
            }
            _ => (usize::MAX, 0, 0),
        };
        let mut at = range.start;
        std::iter::from_fn(move || {
            let (row, column) = (at / run, at % run);
            let end = range.end.min(at.saturating_add(run - column));
            let part = at..end;
            at = end;
            (!part.is_empty()).then(|| (part, row * all + before + column))
        })
    }
}

/// The segments of one layer, or of one unit. Gaps between segments are padding: zero, and zero in every gradient.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Layout {
    pub segments: Vec<Segment>,
    /// Up to the end of the last segment, rounded up to [`ALIGN`].
    pub len: usize,
}

impl Layout {
    /// Appends a segment and returns its index.
    pub fn push(&mut self, name: impl Into<String>, shape: &[usize], decay: bool, init: Init) -> usize {
        self.push_part(name, shape, Tp::Same, decay, init)
    }
    /// Appends a segment that stands so to tp; of what is cut, `shape` is this rank's.
    pub fn push_part(&mut self, name: impl Into<String>, shape: &[usize], tp: Tp, decay: bool, init: Init) -> usize {
        self.place(Segment {
            name: name.into(),
            shape: shape.to_vec(),
            tp,
            start: 0,
            decay,
            trainable: true,
            lr_scale: 1.0,
            init,
        })
    }
    /// Appends a segment of another layout, wherever it stood, and returns its index.
    pub fn place(&mut self, segment: Segment) -> usize {
        let start = self.len;
        self.len = (start + segment.extent()).next_multiple_of(ALIGN);
        self.segments.push(Segment { start, ..segment });
        self.segments.len() - 1
    }
    /// Parameters, without padding.
    pub fn params(&self) -> usize {
        self.segments.iter().map(Segment::len).sum()
    }
    /// Parameters of the longest parts: as many on every rank of tp.
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
        // Rank 1's columns 4..8: from the third element of its first row to the second of its third.
        let over = Slice { index: 1, of: 2 };
        let columns = part(&[6, 4], Tp::Cut { dim: 1, over, whole: 8 });
        assert_eq!(columns.stretches(2..10).collect::<Vec<_>>(), [(2..4, 6), (4..8, 12), (8..10, 20)]);
        assert_eq!(columns.stretches(3..3).count(), 0);
    }

    /// A reduction of what ranks of tp all have relies on it.
    #[test]
    fn what_follows_an_uneven_part_stands_at_the_same_place_on_every_rank() {
        let of = 3;
        let layouts = (0..of).map(|index| {
            let (mut layout, over) = (Layout::default(), Slice { index, of });
            let tp = Tp::Cut { dim: 0, over, whole: 257 };
            let parts = over.share(257).len();
            layout.push_part("words", &[parts, 3], tp, true, Init::Constant(0.0));
            layout.push("norm", &[5], false, Init::Constant(1.0));
            (parts, layout.params(), layout.segments[1].start, layout.len)
        });
        assert_eq!(layouts.collect::<Vec<_>>(), [(86, 263, 384, 512), (86, 263, 384, 512), (85, 260, 384, 512)]);
    }
}
