//! 8-bit blocks of the optimizer's state (Dettmers et al. 2022): each value is the nearest of 256 fractions of the
//! block's largest magnitude. Never decides what a block is.
//!
//! The fractions are those of bitsandbytes' `create_dynamic_map`: seven decades, each with twice as many as the one
//! below it, and 0. The least signed one is -1, as in bitsandbytes' CPU kernel until 0.45, instead of -0.993.
//!
//! [Note: positive] A positive second moment stays positive: it is at least the least positive fraction. The nearest
//! fraction of a small one is 0. Where the first moment is not, AdamW would divide by epsilon alone: weights without a
//! gradient in the next steps, such as the embeddings of rare tokens, would move by hundreds of learning rates.
//!
//! [Note: same block again] Checkpoints hold a block's values in f32, and from these the same block is made. The
//! element of largest magnitude is that magnitude exactly, since 1 and -1 are fractions. Any other value is rounded to
//! f32 by multiplying and normalizing: an error of 3 units in 2^24, or of half the least f32 over the magnitude, less
//! than 2^-24 as that is a normal number. Fractions are 0.7 % apart, and at least 4.5e-7. Hence it is nearest to its
//! own.
use std::sync::LazyLock;

/// Elements of a block.
pub const BLOCK: usize = 256;

pub struct DynamicMap {
    /// The fractions, sorted.
    pub values: [f32; 256],
    /// Halfway to the next fraction, but for the first of the unsigned ones, 0.
    pub bounds: [f32; 255],
    /// Indexed by the upper half of a magnitude up to 1: the least fraction that may be nearest, to positive values,
    /// then to negative ones.
    first: [Vec<u8>; 2],
}

/// bitsandbytes' `create_dynamic_map`, sorted: in seven decades 1, 2, 4, ... 64 evenly spaced values of either sign, or
/// twice as many positive ones; 0 and 1.
pub const fn fractions(signed: bool) -> [f32; 256] {
    const DECADES: [f32; 7] = [1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1, 1.0];
    let (mut map, mut decade) = ([0.0; 256], 0);
    let zero = if signed { 127 } else { 0 };
    let mut next = zero + 1;
    map[255] = 1.0;
    while decade < DECADES.len() {
        let n = if signed { 1 << decade } else { 2 << decade };
        let mut k = 0;
        while k < n {
            map[next] = (edge(k, n) + edge(k + 1, n)) / 2.0 * DECADES[decade];
            if signed {
                map[2 * zero - next] = -map[next];
            }
            (next, k) = (next + 1, k + 1);
        }
        decade += 1;
    }
    map
}

/// Point k of n + 1 from 0.1 to 1, as torch.linspace computes it: from the nearer end, rounded once (in f64, the
/// operations are exact).
const fn edge(k: usize, n: usize) -> f32 {
    let step = (0.9 / n as f32) as f64;
    match k < n.div_ceil(2) {
        true => (0.1f32 as f64 + step * k as f64) as f32,
        false => (1.0 - step * (n - k) as f64) as f32,
    }
}

/// Upper halves of 0 to 1.
const STEPS: usize = 0x3f80 + 1;

/// For the first moment.
pub static SIGNED: LazyLock<DynamicMap> = LazyLock::new(|| DynamicMap::new(true));
/// For the second, which is not negative.
pub static UNSIGNED: LazyLock<DynamicMap> = LazyLock::new(|| DynamicMap::new(false));

impl DynamicMap {
    fn new(signed: bool) -> DynamicMap {
        let mut values = fractions(signed);
        if signed {
            values[0] = -1.0;
        }
        let mut map = DynamicMap { values, bounds: [0.0; 255], first: [Vec::new(), Vec::new()] };
        map.bounds.iter_mut().zip(values.windows(2)).for_each(|(bound, w)| *bound = (w[0] + w[1]) / 2.0);
        if !signed {
            map.bounds[0] = 0.0; // see [Note: positive]
        }
        let below = |x: f32| map.bounds.partition_point(|bound| *bound < x) as u8;
        let magnitude = |step: usize| f32::from_bits((step as u32) << 16);
        let positive = (0..STEPS).map(|step| below(magnitude(step))).collect();
        // The magnitude is the upper end of a negative step.
        let negative = (0..STEPS).map(|step| below(-f32::from_bits((step as u32) << 16 | 0xffff))).collect();
        map.first = [positive, negative];
        map
    }
    /// The nearest fraction, or the least positive one; of two, the lower one. `x` is in [-1, 1].
    #[inline(always)]
    fn code(&self, x: f32) -> u8 {
        let bits = x.to_bits();
        let step = ((bits >> 16 & 0x7fff) as usize).min(STEPS - 1);
        let code = self.first[(bits >> 31) as usize][step];
        // A step holds at most one bound.
        if code < 255 && self.bounds[code as usize] < x { code + 1 } else { code }
    }

    /// Quantizes a block; returns its largest magnitude. A block below the least normal f32 becomes zero.
    #[inline(always)]
    #[allow(clippy::manual_clamp)] // a NaN becomes -1, as in the kernel
    pub fn quantize(&self, x: &[f32], codes: &mut [u8]) -> f32 {
        let absmax = x.iter().fold(0f32, |most, x| most.max(x.abs()));
        let absmax = if absmax < f32::MIN_POSITIVE { 0.0 } else { absmax };
        let inverse = if absmax > 0.0 { 1.0 / absmax } else { 0.0 };
        for (code, x) in codes.iter_mut().zip(x) {
            *code = self.code((x * inverse).max(-1.0).min(1.0));
        }
        absmax
    }
    #[inline(always)]
    pub fn dequantize(&self, codes: &[u8], absmax: f32, x: &mut [f32]) {
        for (x, code) in x.iter_mut().zip(codes) {
            *x = self.values[*code as usize] * absmax;
        }
    }
    /// Any number of blocks; the last may be short.
    pub fn quantize_all(&self, x: &[f32], codes: &mut [u8], absmax: &mut [f32]) {
        let blocks = x.chunks(BLOCK).zip(codes.chunks_mut(BLOCK));
        absmax.iter_mut().zip(blocks).for_each(|(absmax, (x, codes))| *absmax = self.quantize(x, codes));
    }
    /// Takes one of `absmax` for each block.
    pub fn dequantize_all(&self, codes: &[u8], absmax: impl Iterator<Item = f32>, x: &mut [f32]) {
        let blocks = codes.chunks(BLOCK).zip(x.chunks_mut(BLOCK));
        blocks.zip(absmax).for_each(|((codes, x), absmax)| self.dequantize(codes, absmax, x));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rng::Rng;

    /// The table finds what a search finds, at every bound and at its neighbors.
    #[test]
    fn codes_are_those_of_a_search() {
        for map in [&*SIGNED, &*UNSIGNED] {
            let near = map.bounds.iter().flat_map(|b| [b.next_down(), *b, b.next_up()]);
            let rng = Rng::new(1, 2);
            let drawn = (0..100_000).map(|i| (2.0 * rng.uniform(i) - 1.0) as f32 * 0.1f32.powi((i % 9) as i32));
            for x in near.chain(drawn).chain(map.values).chain([-1.0, -0.0, f32::MIN_POSITIVE, 1e-40]) {
                let expected = map.bounds.partition_point(|bound| *bound < x);
                assert_eq!(map.code(x) as usize, expected, "{x:e}");
            }
        }
    }
    /// Checkpoints hold the f32 values: the same codes are made from them again.
    #[test]
    fn values_of_a_block_become_the_same_block() {
        let rng = Rng::new(3, 4);
        for (block, map) in (0..2000).flat_map(|i| [(i, &*SIGNED), (i, &*UNSIGNED)]) {
            let at = |i: usize| rng.normal((block * BLOCK + i) as u64) * 10f32.powi(block as i32 % 60 - 44);
            let x: [f32; BLOCK] = std::array::from_fn(|i| if map.values[0] < 0.0 { at(i) } else { at(i).abs() });
            let (mut codes, mut again) = ([0; BLOCK], [0; BLOCK]);
            let mut values = [0.0; BLOCK];
            let absmax = map.quantize(&x, &mut codes);
            map.dequantize(&codes, absmax, &mut values);
            assert_eq!((map.quantize(&values, &mut again).to_bits(), again), (absmax.to_bits(), codes), "{absmax:e}");
        }
        let (mut codes, mut values) = ([9; 4], [7.0; 4]);
        assert_eq!(SIGNED.quantize(&[0.0; 4], &mut codes), 0.0);
        SIGNED.dequantize(&codes, 0.0, &mut values);
        assert_eq!(values, [0.0; 4]);
    }
}
