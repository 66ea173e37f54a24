//! Dropout from a counter: the mask is a pure function of (key, index), so recomputation and the backward pass see the
//! same one. Never holds state.
use crate::base::{dtype::Float, rng::philox};

/// Element i takes word i % 4 of philox(key, i / 4) and is kept where that word is at least p * 2^32.
#[inline(always)]
pub fn dropout<T: Float>(p: f32, key: u64, x: &mut [T]) {
    let threshold = (p as f64 * 4_294_967_296.0) as u32;
    let scale = 1.0 / (1.0 - p);
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
}
/// Counters drawn together: one vector of AVX-512.
const COUNTERS: usize = 16;
