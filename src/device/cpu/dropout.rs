//! Counter-based dropout: the mask is a pure function of (key, row, index), so recomputation, backward and ranks with
//! slices of a row use the same one. Never holds state.
use crate::View;
use crate::ops::{Dropout, DropoutRows};
use flatshard_base::{Result, dtype::Float, rng::philox};

/// Element i uses word i % 4 of philox(key, i / 4) and is kept if that word is at least p * 2^32. `key` comes from
/// [`key`], read beforehand: a load next to the loops would prevent vectorization. `first` is the number of the first
/// element, a multiple of 4.
#[inline(always)]
pub fn dropout<T: Float>(op: Dropout, key: u64, first: usize) -> Result<()> {
    let (threshold, scale) = (op.threshold(), op.scale());
    let x = op.x.host::<T>(Dropout::OP)?;
    for (block, x) in x.chunks_mut(4 * COUNTERS).enumerate() {
        let words = draw(key, (first / 4 + block * COUNTERS) as u64, 0);
        for (x, &word) in x.iter_mut().zip(words.as_flattened()) {
            *x = T::from_f32(if word >= threshold { x.to_f32() * scale } else { 0.0 });
        }
    }
    Ok(())
}
/// See [`DropoutRows`]; `key` is that of [`rows_key`], and `first` the number of the first row.
#[inline(always)]
pub fn dropout_rows<T: Float>(op: DropoutRows, key: u64, first: usize) -> Result<()> {
    const OP: &str = DropoutRows::OP;
    let (threshold, scale, accumulate) = (op.threshold(), op.scale(), op.accumulate);
    let tokens = op.rows.map(|rows| rows.host::<u32>(OP)).transpose()?;
    let (x, y) = (op.x.host::<T>(OP)?, op.y.host::<T>(OP)?);
    for (i, (x, y)) in x.chunks_exact(op.width).zip(y.chunks_exact_mut(op.width)).enumerate() {
        let token = tokens.map_or((first + i) as u32, |tokens| tokens[i]);
        // The words of the first counter before `skip` belong to another rank.
        let (mut at, mut counter, mut skip) = (0, (op.first / 4) as u64, op.first % 4);
        while at < op.width {
            let words = draw(key, counter, token);
            let words = &words.as_flattened()[skip..];
            let n = words.len().min(op.width - at);
            let (x, y) = (&x[at..at + n], &mut y[at..at + n]);
            for ((y, x), &word) in y.iter_mut().zip(x).zip(words) {
                let kept = if word >= threshold { x.to_f32() * scale } else { 0.0 };
                *y = T::from_f32(if accumulate { y.to_f32() + kept } else { kept });
            }
            (at, counter, skip) = (at + n, counter + COUNTERS as u64, 0);
        }
    }
    Ok(())
}
/// Words of [`COUNTERS`] counters of a row, from `first` on.
#[inline(always)]
fn draw(key: u64, first: u64, row: u32) -> [[u32; 4]; COUNTERS] {
    let mut words = [[0; 4]; COUNTERS];
    for (c, words) in words.iter_mut().enumerate() {
        let counter = first + c as u64;
        *words = philox(key, [counter as u32, (counter >> 32) as u32, row, 0]);
    }
    words
}
/// Reads the key from memory after checking the operation.
pub fn key(op: &Dropout) -> Result<u64> {
    op.check()?;
    of_words(Dropout::OP, op.key)
}
pub fn rows_key(op: &DropoutRows) -> Result<u64> {
    op.check()?;
    of_words(DropoutRows::OP, op.key)
}
fn of_words(op: &'static str, key: View) -> Result<u64> {
    let key = key.host::<u32>(op)?;
    Ok(u64::from(key[0]) | u64::from(key[1]) << 32)
}

/// Counters computed together: one AVX-512 vector.
const COUNTERS: usize = 16;
