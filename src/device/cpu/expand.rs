//! Expands 4-bit weights. Never divides a block over threads in a way that changes a bit: every element is computed
//! alone.
use crate::ops::{Expand, Nf4Matrix};
use flatshard_base::Result;
use flatshard_base::dtype::Float;
use flatshard_base::nf4::{BLOCK, GROUP, NF4, SCALES};

pub(super) fn expand<T: Float>(op: Expand) -> Result<()> {
    op.check()?;
    let Expand { from: Nf4Matrix { bytes, shape, width }, rows, columns, y } = op;
    let (bytes, y) = (bytes.host::<u8>(Expand::OP)?, y.host::<T>(Expand::OP)?);
    let (codes, scales) = (&bytes[shape.codes()], &bytes[shape.scales()]);
    let float = |at: usize| f32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]]);
    let (factors, mean) = (shape.factors().start, float(shape.mean().start));
    for (row, y) in rows.zip(y.chunks_exact_mut(columns.len().max(1))) {
        let (mut at, mut y) = (row * width + columns.start, y);
        while !y.is_empty() {
            let block = at / BLOCK;
            let (part, rest) = y.split_at_mut(y.len().min((block + 1) * BLOCK - at));
            let factor = float(factors + 4 * (shape.block(block) / GROUP));
            let magnitude = SCALES[scales[block] as usize] * factor + mean;
            let values = NF4.map(|value| T::from_f32(value * magnitude));
            let from = &codes[at / 2..(at + part.len()) / 2];
            for (to, code) in part.as_chunks_mut::<2>().0.iter_mut().zip(from) {
                *to = [values[(code >> 4) as usize], values[(code & 15) as usize]];
            }
            (at, y) = (at + part.len(), rest);
        }
    }
    Ok(())
}
