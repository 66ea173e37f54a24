//! NF4 with double quantization (Dettmers et al. 2023, "QLoRA"), in the bits of the bitsandbytes library: constants,
//! the conversion of a matrix, and where its parts are stored. Never touches buffers.
//!
//! A matrix is cut into blocks of 64 adjacent elements. A block's elements are divided by its largest magnitude and
//! rounded to 16 values, two to a byte, the first in the upper half. The magnitudes less their mean are divided by the
//! largest in 256 blocks and rounded to 256 values: 4 + 8 / 64 + 32 / 16384 = 4.127 bits per element.
//!
//! ```text
//! elements / 2 bytes | elements / 64 bytes | padding | 4 bytes for each 256 blocks | 4 bytes
//! codes              | scales              |         | factors of the scales       | mean of the magnitudes
//! ```
//!
//! A rank of tp stores its own codes and scales, and the factors of the whole matrix. So no number depends on the mesh.
//!
//! The mean is the exact sum's, rounded once. bitsandbytes sums in f32, in an order that depends on the machine, so its
//! mean may differ in the last bit. Its CPU library looks the 8-bit codes up in a table of 65536 places, and is off by
//! one where a magnitude is next to the middle of two values; ours are the nearest, as those of its default backend.
use super::dynamic8::fractions;
use std::ops::Range;

/// Elements that share a scale.
pub const BLOCK: usize = 64;
/// Blocks whose scales share a factor.
pub const GROUP: usize = 256;

/// The values of the 4-bit codes: quantiles of a normal distribution, scaled to [-1, 1].
pub const NF4: [f32; 16] = [
    -1.0,
    -0.696_192_8,
    -0.525_073_05,
    -0.394_917_5,
    -0.284_441_38,
    -0.184_773_43,
    -0.091_050_036,
    0.0,
    0.079_580_3,
    0.160_930_2,
    0.246_112_3,
    0.337_915_24,
    0.440_709_83,
    0.562_617,
    0.722_956_84,
    1.0,
];

/// The values of the 8-bit codes.
pub const SCALES: [f32; 256] = fractions(true);

/// Where this rank's part of a matrix is stored, and which blocks of the whole matrix it has. All counts are of
/// elements, and multiples of [`BLOCK`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Nf4Shape {
    /// Elements of this rank's part.
    pub len: usize,
    /// Elements that are adjacent in the whole matrix, those before the first of them, and the distance from one such
    /// run to the next.
    pub run: usize,
    pub before: usize,
    pub stride: usize,
    /// Elements of the whole matrix.
    pub whole: usize,
}

impl Nf4Shape {
    /// A matrix that is not divided.
    pub fn new(len: usize) -> Nf4Shape {
        Nf4Shape { len, run: len, before: 0, stride: len, whole: len }
    }
    /// Whether blocks are not divided over ranks.
    pub fn is_whole_blocks(&self) -> bool {
        [self.len, self.run, self.before, self.stride, self.whole].iter().all(|n| n.is_multiple_of(BLOCK))
    }
    pub fn codes(&self) -> Range<usize> {
        0..self.len / 2
    }
    pub fn scales(&self) -> Range<usize> {
        self.codes().end..self.codes().end + self.len / BLOCK
    }
    /// The factors of all groups, f32.
    pub fn factors(&self) -> Range<usize> {
        let start = self.scales().end.next_multiple_of(4);
        start..start + 4 * self.groups()
    }
    /// f32.
    pub fn mean(&self) -> Range<usize> {
        let start = self.factors().end;
        start..start + 4
    }
    pub fn bytes(&self) -> usize {
        self.mean().end
    }
    fn groups(&self) -> usize {
        (self.whole / BLOCK).div_ceil(GROUP)
    }
    /// The number in the whole matrix of block `block` of this part.
    pub fn block(&self, block: usize) -> usize {
        let at = block * BLOCK;
        (at / self.run * self.stride + self.before + at % self.run) / BLOCK
    }
}

/// Magnitudes of all blocks, quantized.
pub struct Nf4Scales<'a> {
    magnitudes: &'a [f32],
    pub mean: f32,
    pub factors: Vec<f32>,
}

impl<'a> Nf4Scales<'a> {
    pub fn new(magnitudes: &'a [f32]) -> Nf4Scales<'a> {
        let sum: f64 = magnitudes.iter().map(|&x| x as f64).sum();
        Nf4Scales::with_mean(magnitudes, (sum / magnitudes.len().max(1) as f64) as f32)
    }
    /// With a given mean.
    pub fn with_mean(magnitudes: &'a [f32], mean: f32) -> Nf4Scales<'a> {
        let most = |group: &[f32]| group.iter().fold(0.0, |most: f32, x| most.max((x - mean).abs()));
        Nf4Scales { magnitudes, mean, factors: magnitudes.chunks(GROUP).map(most).collect() }
    }
    /// The code of a block's magnitude: the nearest value, of two equally near ones the smaller.
    pub fn code(&self, block: usize) -> u8 {
        let inverse = 1.0 / self.factors[block / GROUP].max(1e-38);
        let x = ((self.magnitudes[block] - self.mean) * inverse).clamp(-1.0, 1.0);
        let right = SCALES.partition_point(|value| *value < x).min(255);
        let left = right.saturating_sub(1);
        (if x > (SCALES[left] + SCALES[right]) / 2.0 { right } else { left }) as u8
    }
}

/// The largest magnitude of a block.
pub fn magnitude(block: &[f32]) -> f32 {
    block.iter().fold(0.0, |most: f32, x| most.max(x.abs()))
}

/// The codes of a block, whose largest magnitude is `magnitude`.
pub fn encode(block: &[f32], magnitude: f32, codes: &mut [u8]) {
    let (inverse, mut found) = (1.0 / magnitude.max(1e-38), [0u8; BLOCK]);
    // One bound at a time, so that the loop over elements vectorizes.
    for pair in NF4.windows(2) {
        let bound = (pair[0] + pair[1]) / 2.0;
        found.iter_mut().zip(block).for_each(|(n, x)| *n += ((x * inverse).clamp(-1.0, 1.0) > bound) as u8);
    }
    codes.iter_mut().zip(found.as_chunks::<2>().0).for_each(|(to, [a, b])| *to = a << 4 | b);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_of_codes_ascend() {
        assert!(NF4.is_sorted() && SCALES.is_sorted() && SCALES[127] == 0.0 && SCALES[126] == -SCALES[128]);
    }

    /// Over two ranks, columns and rows: blocks keep their number in the whole matrix.
    #[test]
    fn parts_know_their_blocks() {
        let columns = Nf4Shape { len: 3 * 128, run: 128, before: 128, stride: 256, whole: 3 * 256 };
        assert_eq!((0..6).map(|b| columns.block(b)).collect::<Vec<_>>(), [2, 3, 6, 7, 10, 11]);
        let rows = Nf4Shape { len: 256, run: 256, before: 512, stride: 768, whole: 768 };
        assert_eq!((0..4).map(|b| rows.block(b)).collect::<Vec<_>>(), [8, 9, 10, 11]);
        assert_eq!((rows.scales(), rows.factors(), rows.bytes()), (128..132, 132..136, 140));
        assert_eq!(Nf4Shape::new(1 << 24).bytes() * 8, (1 << 24) * 4 + (1 << 21) + (1 << 15) + 32);
    }
}
