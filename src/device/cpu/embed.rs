//! Embedding lookup and its scatter-add. Never skips an out-of-range token: all are checked before anything is written.
use super::operands::within;
use crate::ops::{Embed, EmbedBackward, EmbedShape};
use flatshard_base::{Result, dtype::Float};

/// Offset of `token`'s row in an operand of `len` elements; `None` if another rank has it.
#[inline(always)]
fn place(shape: &EmbedShape, token: u32, c: usize, len: usize) -> Option<usize> {
    (token as usize).checked_sub(shape.first).map(|row| row * c).filter(|&at| at < len)
}

#[inline(always)]
pub fn embed<T: Float>(op: Embed) -> Result<()> {
    const OP: &str = Embed::OP;
    let Some(c) = op.check()? else { return Ok(()) };
    let (tokens, w, shape, accumulate) = (op.tokens.host::<u32>(OP)?, op.w.host::<T>(OP)?, &op.shape, op.accumulate);
    within(OP, "token", tokens, shape.rows)?;
    let y = op.y.host::<T>(OP)?;
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
    Ok(())
}

#[inline(always)]
pub fn embed_backward<T: Float>(op: EmbedBackward) -> Result<()> {
    const OP: &str = EmbedBackward::OP;
    let Some(c) = op.check()? else { return Ok(()) };
    let (tokens, dy, shape) = (op.tokens.host::<u32>(OP)?, op.dy.host::<T>(OP)?, &op.shape);
    within(OP, "token", tokens, shape.rows)?;
    let dw = op.dw.host::<f32>(OP)?;
    for (dy, &token) in dy.chunks_exact(c).zip(tokens) {
        let Some(at) = place(shape, token, c, dw.len()) else { continue };
        for (dw, dy) in dw[at..][..c].iter_mut().zip(dy) {
            *dw = dy.to_f32().mul_add(shape.scale, *dw);
        }
    }
    Ok(())
}
