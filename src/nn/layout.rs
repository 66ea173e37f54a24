//! What stands where in a flat buffer: the ONE table that init, weight decay, clipping, checkpoints and tests read.
//! Never holds values.
use crate::device::ALIGN;

/// How a tensor starts.
#[derive(Clone, Copy, PartialEq, Debug)]
pub enum Init {
    /// Normal with mean 0 and this standard deviation.
    Normal(f32),
    Constant(f32),
}

/// A named tensor inside a layer's flat buffer.
#[derive(Clone, Debug, PartialEq)]
pub struct Segment {
    /// The Hugging Face name of the architecture: what checkpoints, metrics and errors say.
    pub name: String,
    pub shape: Vec<usize>,
    /// First element; a multiple of [`ALIGN`].
    pub start: usize,
    /// Whether weight decay applies (matrices, not norms and biases).
    pub decay: bool,
    pub init: Init,
}

impl Segment {
    pub fn len(&self) -> usize {
        self.shape.iter().product()
    }
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
    pub fn range(&self) -> std::ops::Range<usize> {
        self.start..self.start + self.len()
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
        let segment = Segment { name: name.into(), shape: shape.to_vec(), start: self.len, decay, init };
        self.len = (self.len + segment.len()).next_multiple_of(ALIGN);
        self.segments.push(segment);
        self.segments.len() - 1
    }
    /// Appends another layout's segments (a unit of several layers); returns where they start.
    pub fn append(&mut self, other: &Layout) -> usize {
        let at = self.len;
        self.segments.extend(other.segments.iter().map(|s| Segment { start: s.start + at, ..s.clone() }));
        self.len += other.len;
        at
    }
    /// Parameters, without padding.
    pub fn params(&self) -> usize {
        self.segments.iter().map(Segment::len).sum()
    }
}
