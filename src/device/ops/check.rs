//! Checks of operands for every device: floating dtype, whole rows, matching lengths. Never computes.
use crate::{View, ViewMut};
use flatshard_base::{DType, Error, Result};

/// The dtype of an operation's main operand, which the others must share.
pub fn float(op: &'static str, dtype: DType) -> Result<DType> {
    match dtype {
        DType::F32 | DType::Bf16 | DType::F16 => Ok(dtype),
        other => Err(Error::op(op, format!("computes in f32, bf16 or f16, got {other}"))),
    }
}

/// Number of rows of `width` elements in `len`.
pub fn rows(op: &'static str, name: &str, len: usize, width: usize) -> Result<usize> {
    match len.checked_div(width) {
        Some(rows) if rows * width == len => Ok(rows),
        _ => Err(Error::op(op, format!("{name} holds {len} elements, not whole rows of {width}"))),
    }
}

/// [`View::fits`] for each operand: its name, required dtype and required length.
pub fn read(op: &'static str, operands: &[(&str, &View, DType, usize)]) -> Result<()> {
    operands.iter().try_for_each(|(name, view, dtype, len)| view.fits(op, name, *dtype, *len))
}
/// The same for outputs.
pub fn written(op: &'static str, operands: &[(&str, &ViewMut, DType, usize)]) -> Result<()> {
    operands.iter().try_for_each(|(name, view, dtype, len)| view.fits(op, name, *dtype, *len))
}
