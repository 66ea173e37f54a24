//! Dropout from a counter: the mask is a pure function of (key, index), so recomputation and the backward pass see the
//! same one. Never holds state.
use crate::base::{Result, dtype::Float, rng::philox};
use crate::device::ops::Dropout;

/// Element i takes word i % 4 of philox(key, i / 4) and is kept where that word is at least p * 2^32.
/// `key` is that of [`key`], read before: loads next to the loops keep the compiler from vectorizing them.
#[inline(always)]
pub fn dropout<T: Float>(op: Dropout, key: u64) -> Result<()> {
    let (threshold, scale) = (op.threshold(), op.scale());
    let x = op.x.host::<T>(Dropout::OP)?;
    for (block, x) in x.chunks_mut(4 * COUNTERS).enumerate() {
        let mut words = [[0; 4]; COUNTERS];
        for (c, words) in words.iter_mut().enumerate() {
            let counter = (block * COUNTERS + c) as u64;
            *words = philox(key, [counter as u32, (counter >> 32) as u32, 0, 0]);
        }
        for (x, &word) in x.iter_mut().zip(words.as_flattened()) {
            *x = T::from_f32(if word >= threshold { x.to_f32() * scale } else { 0.0 });
        }
    }
    Ok(())
}
/// The key in memory, of an operation that fits.
pub fn key(op: &Dropout) -> Result<u64> {
    op.check()?;
    let key = op.key.host::<u32>(Dropout::OP)?;
    Ok(u64::from(key[0]) | u64::from(key[1]) << 32)
}

/// Counters drawn together: one vector of AVX-512.
const COUNTERS: usize = 16;
