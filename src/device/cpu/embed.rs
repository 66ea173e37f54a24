//! Table lookup and its scatter. Never skips a token: they are checked before anything is written.
use crate::base::{Error, Result, dtype::Float};

pub fn check(op: &'static str, what: &str, indices: &[u32], rows: usize) -> Result<()> {
    match indices.iter().position(|&t| t as usize >= rows) {
        None => Ok(()),
        Some(i) => Err(Error::op(op, format!("{what} {} at row {i} is outside the table of {rows} rows", indices[i]))),
    }
}

/// Columns of a table of `table` elements whose rows fill `out` elements, one a token; nothing where there is no token.
pub fn width(op: &'static str, tokens: &[u32], out: usize, table: usize) -> Result<Option<usize>> {
    if tokens.is_empty() && out == 0 {
        return Ok(None);
    }
    let c = out.checked_div(tokens.len()).unwrap_or(0);
    if c == 0 || c * tokens.len() != out || !table.is_multiple_of(c) {
        let what = format!("{} tokens, {out} elements and a table of {table} do not agree on columns", tokens.len());
        return Err(Error::op(op, what));
    }
    check(op, "token", tokens, table / c)?;
    Ok(Some(c))
}

#[inline(always)]
pub fn embed<T: Float>(tokens: &[u32], w: &[T], scale: f32, y: &mut [T], c: usize, accumulate: bool) {
    for (y, &token) in y.chunks_exact_mut(c).zip(tokens) {
        let w = &w[token as usize * c..][..c];
        if accumulate {
            for (y, w) in y.iter_mut().zip(w) {
                *y = T::from_f32(w.to_f32().mul_add(scale, y.to_f32()));
            }
        } else {
            for (y, w) in y.iter_mut().zip(w) {
                *y = T::from_f32(w.to_f32() * scale);
            }
        }
    }
}

#[inline(always)]
pub fn embed_backward<T: Float>(tokens: &[u32], dy: &[T], scale: f32, dw: &mut [f32], c: usize) {
    for (dy, &token) in dy.chunks_exact(c).zip(tokens) {
        for (dw, dy) in dw[token as usize * c..][..c].iter_mut().zip(dy) {
            *dw = dy.to_f32().mul_add(scale, *dw);
        }
    }
}
