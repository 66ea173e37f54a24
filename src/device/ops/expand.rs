//! Operands of expanding 4-bit weights.
use super::check::float;
use crate::{View, ViewMut};
use flatshard_base::nf4::Nf4Shape;
use flatshard_base::{DType, Error, Result};
use std::ops::Range;

/// A matrix in 4 bits: [`flatshard_base::nf4`].
#[derive(Clone, Copy)]
pub struct Nf4Matrix<'a> {
    /// u8
    pub bytes: View<'a>,
    pub shape: Nf4Shape,
    /// Elements of a row of this rank's part.
    pub width: usize,
}

/// `y (rows, columns)` = a part of the matrix: value of the code times the block's magnitude, in f32, rounded once to
/// the dtype of y. Magnitude: value of its code times the group's factor, plus the mean, each rounded to f32. Assigns.
pub struct Expand<'a> {
    pub from: Nf4Matrix<'a>,
    pub rows: Range<usize>,
    pub columns: Range<usize>,
    pub y: ViewMut<'a>,
}

impl Expand<'_> {
    pub const OP: &'static str = "expand";
    /// Checks that the part is within the matrix.
    pub fn check(&self) -> Result<()> {
        let Expand { from: Nf4Matrix { bytes, shape, width }, rows, columns, y } = self;
        let dtype = float(Self::OP, y.dtype())?;
        bytes.fits(Self::OP, "bytes", DType::U8, shape.bytes())?;
        y.fits(Self::OP, "y", dtype, rows.len() * columns.len())?;
        let within = columns.end <= *width && rows.end * width <= shape.len && shape.is_whole_blocks();
        // An odd row would start in the middle of a byte.
        if within && [width, &columns.start, &columns.end].iter().all(|n| n.is_multiple_of(2)) {
            return Ok(());
        }
        Err(Error::op(Self::OP, format!("no rows {rows:?} of columns {columns:?} in {shape:?} of width {width}")))
    }
}
