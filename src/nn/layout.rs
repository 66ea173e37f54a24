//! What stands where in a flat buffer: the ONE table that init, weight decay, clipping, checkpoints and tests read.
//! Never holds values.
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

/// How a tensor stands to the ranks of tp.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Tp {
    /// Every rank has all of it and computes the same gradient.
    Same,
    /// Every rank has all of it; the gradient is the sum of what they compute.
    Summed,
    /// Every rank has part `index` of `of` equal ones along `dim`.
    Cut { dim: usize, index: usize, of: usize },
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
        if let Tp::Cut { dim, of, .. } = self.tp {
            shape[dim] *= of;
        }
        shape
    }
    /// Cuts `range`, elements of this rank's part counted from its first, into stretches that are contiguous in the whole
    /// tensor too: each with the place of its first element there.
    pub fn stretches(&self, range: Range<usize>) -> impl Iterator<Item = (Range<usize>, usize)> {
        // Of a part cut along dim, `run` elements lie together, then those of the other ranks follow.
        let (run, index, of) = match self.tp {
            Tp::Cut { dim, index, of } => (self.shape[dim..].iter().product::<usize>().max(1), index, of),
            _ => (usize::MAX, 0, 1),
        };
        let mut at = range.start;
        std::iter::from_fn(move || {
            let (row, column) = (at / run, at % run);
            let end = range.end.min(at.saturating_add(run - column));
            let part = at..end;
            at = end;
            (!part.is_empty()).then(|| (part, (row * of + index) * run + column))
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
        self.place(Segment {
            name: name.into(),
            shape: shape.to_vec(),
            tp: Tp::Same,
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
        self.len = (start + segment.len()).next_multiple_of(ALIGN);
        self.segments.push(Segment { start, ..segment });
        self.segments.len() - 1
    }
    /// Parameters, without padding.
    pub fn params(&self) -> usize {
        self.segments.iter().map(Segment::len).sum()
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
        for (dim, shape) in [(0, [3, 8]), (1, [6, 4])] {
            let mut seen = [0; 48];
            for index in 0..2 {
                let part = part(&shape, Tp::Cut { dim, index, of: 2 });
                assert_eq!(part.global_shape(), [6, 8]);
                for (local, global) in part.stretches(0..24) {
                    seen[global..global + local.len()].iter_mut().for_each(|n| *n += 1);
                }
            }
            assert_eq!(seen, [1; 48], "dim {dim}");
        }
        // Rank 1's columns 4..8: from the third element of its first row to the second of its third.
        let columns = part(&[6, 4], Tp::Cut { dim: 1, index: 1, of: 2 });
        assert_eq!(columns.stretches(2..10).collect::<Vec<_>>(), [(2..4, 6), (4..8, 12), (8..10, 20)]);
        assert_eq!(columns.stretches(3..3).count(), 0);
    }
}
