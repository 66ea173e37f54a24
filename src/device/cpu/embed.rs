//! Table lookup and its scatter. Never skips a token that is outside the table: they are checked before anything is written.
use crate::base::{Error, Result, dtype::Float};
use crate::device::Embed;

pub fn check(op: &'static str, what: &str, indices: &[u32], rows: usize) -> Result<()> {
    match indices.iter().position(|&t| t as usize >= rows) {
        None => Ok(()),
        Some(i) => Err(Error::op(op, format!("{what} {} at row {i} is outside the table of {rows} rows", indices[i]))),
    }
}

/// Where the row of `token` begins in an operand of `len` elements; nothing where another one has it.
#[inline(always)]
fn place(shape: &Embed, token: u32, c: usize, len: usize) -> Option<usize> {
    (token as usize).checked_sub(shape.first).map(|row| row * c).filter(|&at| at < len)
}

#[inline(always)]
pub fn embed<T: Float>(shape: &Embed, tokens: &[u32], w: &[T], y: &mut [T], c: usize, accumulate: bool) {
    for (y, &token) in y.chunks_exact_mut(c).zip(tokens) {
        match place(shape, token, c, w.len()).map(|at| &w[at..][..c]) {
            Some(w) if accumulate => {
                for (y, w) in y.iter_mut().zip(w) {
                    *y = T::from_f32(w.to_f32().mul_add(shape.scale, y.to_f32()));
                }
            }
            Some(w) => {
                for (y, w) in y.iter_mut().zip(w) {
                    *y = T::from_f32(w.to_f32() * shape.scale);
                }
            }
            None if accumulate => {}
            None => y.fill(T::from_f32(0.0)),
        }
    }
}

#[inline(always)]
pub fn embed_backward<T: Float>(shape: &Embed, tokens: &[u32], dy: &[T], dw: &mut [f32], c: usize) {
    for (dy, &token) in dy.chunks_exact(c).zip(tokens) {
        let Some(at) = place(shape, token, c, dw.len()) else { continue };
        for (dw, dy) in dw[at..][..c].iter_mut().zip(dy) {
            *dw = dy.to_f32().mul_add(shape.scale, *dw);
        }
    }
}
