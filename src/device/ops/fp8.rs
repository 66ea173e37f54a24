//! Operands of casts to and from FP8, and of products in it.
use super::{Epilogue, GemmShape};
use crate::{View, ViewMut};
use flatshard_base::fp8::{Fp8, Fp8Shape};
use flatshard_base::{DType, Error, Result};
use std::ops::Range;

/// Each block's scale, and its elements divided by it: [`flatshard_base::fp8`]. Assigns.
pub struct Quantize<'a> {
    pub shape: Fp8Shape,
    /// bf16: rows of `shape.columns` elements, `ld` apart.
    pub x: View<'a>,
    pub ld: usize,
    /// u8 (rows, columns)
    pub bytes: ViewMut<'a>,
    /// f32, one for each block.
    pub scales: ViewMut<'a>,
}

impl Quantize<'_> {
    pub const OP: &'static str = "quantize";
    pub fn check(&self) -> Result<()> {
        let Quantize { shape, x, ld, bytes, scales } = self;
        bytes.fits(Self::OP, "bytes", DType::U8, shape.len())?;
        scales.fits(Self::OP, "scales", DType::F32, shape.scales())?;
        let need = shape.rows.checked_sub(1).map_or(0, |rows| rows * ld + shape.columns);
        if x.dtype() != DType::Bf16 || *ld < shape.columns || x.len() < need {
            let (dtype, len) = (x.dtype(), x.len());
            return Err(Error::op(
                Self::OP,
                format!("{shape:?} needs {need} of bf16, rows {ld} apart: {len} of {dtype}"),
            ));
        }
        Ok(())
    }
}

/// `y` = value times the block's scale, which bf16 has exactly. Assigns.
pub struct Dequantize<'a> {
    pub shape: Fp8Shape,
    /// See [`Quantize`].
    pub bytes: View<'a>,
    pub scales: View<'a>,
    /// bf16 (rows, columns)
    pub y: ViewMut<'a>,
}

/// Raises the scales of a weight's blocks to what some of its elements need: [`flatshard_base::fp8`].
pub struct RaiseScales<'a> {
    pub shape: Fp8Shape,
    /// The first of them, by rows.
    pub at: usize,
    /// f32, which is rounded to bf16 first, or bf16.
    pub x: View<'a>,
    /// f32, one for each block of the weight.
    pub scales: ViewMut<'a>,
}

/// The elements refer to a weight.
fn part_of_weight(op: &'static str, shape: &Fp8Shape, at: usize, x: &View) -> Result<()> {
    match matches!(x.dtype(), DType::F32 | DType::Bf16) && at + x.len() <= shape.len() {
        true => Ok(()),
        false => {
            let (dtype, len) = (x.dtype(), x.len());
            Err(Error::op(op, format!("elements {at}..{} of {shape:?} in f32 or bf16: {len} of {dtype}", at + len)))
        }
    }
}

impl RaiseScales<'_> {
    pub const OP: &'static str = "raise_scales";
    pub fn check(&self) -> Result<()> {
        part_of_weight(Self::OP, &self.shape, self.at, &self.x)?;
        self.scales.fits(Self::OP, "scales", DType::F32, self.shape.scales())
    }
}

/// Some elements of a weight, divided by the scales of their blocks: [`flatshard_base::fp8`]. Assigns.
pub struct Encode<'a> {
    /// See [`RaiseScales`].
    pub shape: Fp8Shape,
    pub at: usize,
    pub x: View<'a>,
    pub scales: View<'a>,
    /// u8, as many as `x`.
    pub bytes: ViewMut<'a>,
}

impl Encode<'_> {
    pub const OP: &'static str = "encode";
    pub fn check(&self) -> Result<()> {
        part_of_weight(Self::OP, &self.shape, self.at, &self.x)?;
        self.scales.fits(Self::OP, "scales", DType::F32, self.shape.scales())?;
        self.bytes.fits(Self::OP, "bytes", DType::U8, self.x.len())
    }
}

impl Dequantize<'_> {
    pub const OP: &'static str = "dequantize";
    pub fn check(&self) -> Result<()> {
        let Dequantize { shape, bytes, scales, y } = self;
        bytes.fits(Self::OP, "bytes", DType::U8, shape.len())?;
        scales.fits(Self::OP, "scales", DType::F32, shape.scales())?;
        y.fits(Self::OP, "y", DType::Bf16, shape.len())
    }
}

/// Codes of FP8, and the scales of their blocks.
#[derive(Clone, Copy)]
pub struct Coded<'a> {
    pub bytes: View<'a>,
    pub scales: View<'a>,
}

pub enum Fp8Values<'a> {
    /// bf16, to be rounded.
    Whole(View<'a>),
    Coded(Coded<'a>),
}

/// A weight of a product in FP8.
pub struct Fp8Weight<'a> {
    pub shape: Fp8Shape,
    pub values: Fp8Values<'a>,
    /// The rows that the product uses; the blocks are those of all rows.
    pub rows: Range<usize>,
}

/// Scratch of a product in FP8, of any contents. A device uses what it needs.
pub struct Fp8Work<'a> {
    /// u8: of either operand.
    pub bytes: ViewMut<'a>,
    /// f32: A's, and [`Fp8Work::scales`].
    pub scales: ViewMut<'a>,
    /// bf16: of A, without gaps, and of the whole weight.
    pub rows: ViewMut<'a>,
    pub weight: ViewMut<'a>,
}

impl Fp8Work<'_> {
    /// Scales of a weight, and again with rows at multiples of 16 bytes, of the weight or its transpose.
    pub fn scales(weight: &Fp8Shape) -> usize {
        weight.pitched().max(weight.transposed().pitched()) + weight.scales()
    }
}

/// `C (m, n) (+)= A op(B)` with operands in FP8, B a weight: A is rounded, row by row, and so is B unless it has codes.
/// Accumulates in f32. Assigns, or adds with [`GemmShape::accumulate`].
pub struct Fp8Gemm<'a> {
    /// The shape of the product in bf16; B has no gaps.
    pub shape: GemmShape,
    /// In which A is rounded.
    pub format: Fp8,
    /// bf16
    pub a: View<'a>,
    pub b: Fp8Weight<'a>,
    /// bf16 or f32
    pub c: ViewMut<'a>,
    /// See [`super::GemmThen`].
    pub then: Option<Epilogue<'a>>,
    pub work: Fp8Work<'a>,
}

impl Fp8Gemm<'_> {
    pub const OP: &'static str = "fp8_gemm";
    /// A, rounded.
    pub fn tokens(&self) -> Fp8Shape {
        Fp8Shape::tokens(self.format, self.shape.m, self.shape.k)
    }
    /// See [`super::Gemm`] and [`super::GemmThen`]; and the scratch.
    pub fn check(&self) -> Result<()> {
        let Fp8Gemm { shape, a, b, c, then, work, .. } = self;
        let (tokens, stored) = (self.tokens(), if shape.tb { [shape.n, shape.k] } else { [shape.k, shape.n] });
        if shape.ta || [b.rows.len(), b.shape.columns] != stored || b.rows.end > b.shape.rows {
            let rows = &b.rows;
            return Err(Error::op(Self::OP, format!("rows {rows:?} of {:?} in a product of {shape:?}", b.shape)));
        }
        let of_both = tokens.len().max(b.shape.len());
        let need = [of_both, tokens.scales() + Fp8Work::scales(&b.shape), tokens.len(), b.shape.len()];
        let work = [&work.bytes, &work.scales, &work.rows, &work.weight];
        let have = work.map(|x| (x.dtype(), x.len()));
        let dtypes = [DType::U8, DType::F32, DType::Bf16, DType::Bf16];
        let enough = |i: usize| have[i].0 == dtypes[i] && have[i].1 >= need[i];
        let [.., of_c] = shape.extents();
        if !matches!(c.dtype(), DType::Bf16 | DType::F32) || shape.ldc < shape.n || c.len() < of_c {
            return Err(Error::op(Self::OP, format!("{} {} as C of {shape:?}", c.len(), c.dtype())));
        }
        then.as_ref().map_or(Ok(()), |then| then.check(Self::OP, shape, c))?;
        let extent = shape.m.checked_sub(1).map_or(0, |rows| rows * shape.lda + shape.k);
        if a.dtype() != DType::Bf16 || shape.lda < shape.k || a.len() < extent || !(0..4).all(enough) {
            let a = (a.dtype(), a.len());
            return Err(Error::op(Self::OP, format!("{shape:?} with A {a:?} and scratch {have:?}, of {need:?}")));
        }
        match &b.values {
            Fp8Values::Whole(x) => x.fits(Self::OP, "b", DType::Bf16, b.shape.len()),
            Fp8Values::Coded(Coded { bytes, scales }) => {
                bytes.fits(Self::OP, "b", DType::U8, b.shape.len())?;
                scales.fits(Self::OP, "scales of b", DType::F32, b.shape.scales())
            }
        }
    }
}
