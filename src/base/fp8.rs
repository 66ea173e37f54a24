//! FP8 (Micikevicius et al. 2022, "FP8 formats for deep learning"): casts in the bits of PyTorch's `float8_e4m3fn` and
//! `float8_e5m2`, and how a matrix is divided into blocks that share a scale. Never touches buffers.
//!
//! A block's elements are divided by its scale and rounded to nearest, ties to even. The scale is the least power of
//! two that brings the largest magnitude to at most 448 (E4M3) or 57,344 (E5M2). So dividing is exact, an 8-bit value
//! times its scale is a bf16 number, and products of values in bf16 are those of the 8-bit values: a device without FP8
//! emulates one exactly. Scales between powers of two would gain up to one bit of range and none of precision.
use std::ops::Range;

/// Columns of a block; and its rows, in a matrix of weights.
pub const BLOCK: usize = 128;

#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash)]
pub enum Fp8 {
    /// 4 bits of exponent, 3 of mantissa, no infinity: for weights and activations.
    E4m3,
    /// 5 bits of exponent, 2 of mantissa: for gradients.
    E5m2,
}

const E4M3: [f32; 256] = values(Fp8::E4m3);
const E5M2: [f32; 256] = values(Fp8::E5m2);

impl Fp8 {
    const fn mantissa_bits(self) -> u32 {
        if matches!(self, Fp8::E4m3) { 3 } else { 2 }
    }
    const fn bias(self) -> u32 {
        if matches!(self, Fp8::E4m3) { 7 } else { 15 }
    }
    /// Exponent of the largest number, 1.75 times this power of two.
    const fn top(self) -> i32 {
        if matches!(self, Fp8::E4m3) { 8 } else { 15 }
    }
    /// Rounds to nearest, ties to even. Beyond the largest number, E4M3 is that number, as in PyTorch 2.15 (older ones
    /// make it NaN), and E5M2 is infinite; a NaN stays one. Branch-free, so that loops over it vectorize. Adding 2^23
    /// times the least number rounds to the subnormals.
    #[inline(always)]
    pub fn encode(self, x: f32) -> u8 {
        let (dropped, bits) = (23 - self.mantissa_bits(), x.to_bits());
        let (magnitude, least) = (bits & 0x7fff_ffff, (128 - self.bias()) << 23);
        let denormal = (150 - self.bias() + 1 - self.mantissa_bits()) << 23;
        let subnormal = (f32::from_bits(magnitude) + f32::from_bits(denormal)).to_bits().wrapping_sub(denormal);
        let half = (1 << (dropped - 1)) - 1 + (magnitude >> dropped & 1);
        let normal = magnitude.wrapping_sub((127 - self.bias()) << 23).wrapping_add(half) >> dropped;
        let finite = if magnitude < least { subnormal } else { normal };
        let beyond = if matches!(self, Fp8::E4m3) { 0x7e } else { 0x7c };
        let code = if magnitude > 0x7f80_0000 { 0x7f } else { finite.min(beyond) };
        (code | bits >> 24 & 0x80) as u8
    }
    /// The numbers that codes stand for.
    pub const fn values(self) -> &'static [f32; 256] {
        if matches!(self, Fp8::E4m3) { &E4M3 } else { &E5M2 }
    }
    /// The scale of a block whose largest magnitude, of f32, has these bits. At least 2^-110, so that every value times
    /// its scale is a normal number. Infinite if the block is not finite: then all of its values become NaN. It grows
    /// with the magnitude, so a block's scale is the largest of those of its parts.
    #[inline(always)]
    pub fn scale(self, magnitude: u32) -> f32 {
        const MANTISSA: u32 = 0x7f_ffff;
        const THREE_QUARTERS: u32 = 0x60_0000;
        let above = (magnitude & MANTISSA > THREE_QUARTERS) as i32;
        let exponent = ((magnitude >> 23) as i32 - 127 - self.top() + above).max(-110);
        if magnitude < 0x7f80_0000 { f32::from_bits(((exponent + 127) as u32) << 23) } else { f32::INFINITY }
    }
}

const fn values(format: Fp8) -> [f32; 256] {
    let (mut values, mut code) = ([0.0; 256], 0);
    while code < 256 {
        let magnitude = code as u32 & 0x7f;
        let (exponent, mantissa) =
            (magnitude >> format.mantissa_bits(), magnitude & ((1 << format.mantissa_bits()) - 1));
        let subnormal = exponent == 0;
        let whole = mantissa + if subnormal { 0 } else { 1 << format.mantissa_bits() };
        let power = if subnormal { 1 } else { exponent } + 127 - format.bias() - format.mantissa_bits();
        let finite = whole as f32 * f32::from_bits(power << 23);
        let value = match format {
            Fp8::E4m3 if magnitude == 0x7f => f32::NAN,
            Fp8::E5m2 if magnitude == 0x7c => f32::INFINITY,
            Fp8::E5m2 if magnitude > 0x7c => f32::NAN,
            _ => finite,
        };
        values[code] = if code < 128 { value } else { -value };
        code += 1;
    }
    values
}

/// A matrix in 8 bits: bytes (rows, columns), and a scale for each block, by rows.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash)]
pub struct Fp8Shape {
    pub format: Fp8,
    pub rows: usize,
    pub columns: usize,
    /// Rows of a block: 1 for activations, whose scales must not depend on other tokens, or [`BLOCK`].
    pub tall: usize,
}

impl Fp8Shape {
    /// Activations, or their gradients.
    pub fn tokens(format: Fp8, rows: usize, columns: usize) -> Fp8Shape {
        Fp8Shape { format, rows, columns, tall: 1 }
    }
    /// A weight. Its blocks are square, so that they are the same for the weight and its transpose: one copy serves the
    /// forward product and the input gradient, which sum over different sides.
    pub fn weight(rows: usize, columns: usize) -> Fp8Shape {
        Fp8Shape { format: Fp8::E4m3, rows, columns, tall: BLOCK }
    }
    pub fn len(&self) -> usize {
        self.rows * self.columns
    }
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
    /// Blocks in a row of blocks.
    pub fn across(&self) -> usize {
        self.columns.div_ceil(BLOCK)
    }
    /// Blocks.
    pub fn scales(&self) -> usize {
        self.rows.div_ceil(self.tall) * self.across()
    }
    /// Scales from one row of blocks to the next where each row starts at a multiple of 16 bytes.
    pub fn pitch(&self) -> usize {
        self.across().next_multiple_of(4)
    }
    /// Scales of such rows.
    pub fn pitched(&self) -> usize {
        self.rows.div_ceil(self.tall) * self.pitch()
    }
    /// The transpose of a weight.
    pub fn transposed(&self) -> Fp8Shape {
        Fp8Shape { rows: self.columns, columns: self.rows, ..*self }
    }
    /// Some of the rows, from a multiple of `tall` on, and the blocks that they are in.
    pub fn part(&self, rows: &Range<usize>) -> (Fp8Shape, Range<usize>) {
        let scales = rows.start / self.tall * self.across()..rows.end.div_ceil(self.tall) * self.across();
        (Fp8Shape { rows: rows.len(), ..*self }, scales)
    }
    /// The rows of blocks that some elements are in, as by [`Fp8Shape::part`], and the first element there.
    pub fn bands(&self, elements: &Range<usize>) -> (Fp8Shape, Range<usize>, usize) {
        let columns = self.columns.max(1);
        let start = elements.start / columns / self.tall * self.tall;
        let end = elements.end.div_ceil(columns).next_multiple_of(self.tall).min(self.rows);
        let (part, scales) = self.part(&(start..end));
        (part, scales, start * self.columns)
    }
    /// The pieces of some elements that are in one row and one block: the block, and where among them they are.
    pub fn pieces(&self, elements: Range<usize>) -> impl Iterator<Item = (usize, Range<usize>)> {
        let (shape, mut at) = (*self, elements.start);
        std::iter::from_fn(move || {
            let (row, column) = (at / shape.columns.max(1), at % shape.columns.max(1));
            let end = elements.end.min(at + (BLOCK - column % BLOCK).min(shape.columns - column));
            let piece = at - elements.start..end - elements.start;
            at = end;
            (!piece.is_empty()).then(|| (row / shape.tall * shape.across() + column / BLOCK, piece))
        })
    }
}
