//! What stands where in a flat buffer: the ONE table that init, weight decay, clipping, checkpoints and tests read.
//! Never holds values.
use crate::device::ALIGN;

/// How a tensor starts.
#[derive(Clone, Copy, PartialEq, Debug)]
pub enum Init {
    /// Normal with mean 0 and this standard deviation.
    Normal(f32),
    /// Uniform between minus and plus this.
    Uniform(f32),
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
        self.place(Segment {
            name: name.into(),
            shape: shape.to_vec(),
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
