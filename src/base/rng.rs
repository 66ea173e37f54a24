//! Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC'11): a random number is a pure
//! function of (key, counter). Never holds state, so recomputation, resharding and any world size draw the same
//! numbers.

/// Four random words for a 64-bit key and a 128-bit counter.
#[inline(always)]
pub fn philox(key: u64, counter: [u32; 4]) -> [u32; 4] {
    const M: [u32; 2] = [0xD251_1F53, 0xCD9E_8D57];
    const W: [u32; 2] = [0x9E37_79B9, 0xBB67_AE85];
    let (mut k0, mut k1) = (key as u32, (key >> 32) as u32);
    let [mut c0, mut c1, mut c2, mut c3] = counter;
    for _ in 0..10 {
        let (p0, p1) = (M[0] as u64 * c0 as u64, M[1] as u64 * c2 as u64);
        (c0, c1, c2, c3) = ((p1 >> 32) as u32 ^ c1 ^ k0, p1 as u32, (p0 >> 32) as u32 ^ c3 ^ k1, p0 as u32);
        (k0, k1) = (k0.wrapping_add(W[0]), k1.wrapping_add(W[1]));
    }
    [c0, c1, c2, c3]
}

/// A stream of random numbers addressed by index. `seed` selects the run, `stream` the purpose (a tensor's name, an
/// epoch).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rng {
    key: u64,
}

impl Rng {
    pub fn new(seed: u64, stream: u64) -> Rng {
        // Mixing makes (1, 2) and (2, 1) unrelated.
        let [a, b, ..] = philox(seed, [stream as u32, (stream >> 32) as u32, 0x5eed, 0]);
        Rng { key: a as u64 | (b as u64) << 32 }
    }
    /// A stream named by a string such as a tensor's name.
    pub fn named(seed: u64, name: &str) -> Rng {
        Rng::new(seed, xxhash_rust::xxh3::xxh3_64(name.as_bytes()))
    }
    pub fn key(&self) -> u64 {
        self.key
    }
    #[inline(always)]
    pub fn words(&self, i: u64) -> [u32; 4] {
        philox(self.key, [i as u32, (i >> 32) as u32, 0, 0])
    }
    pub fn u64(&self, i: u64) -> u64 {
        let [a, b, ..] = self.words(i);
        a as u64 | (b as u64) << 32
    }
    /// Uniform in [0, 1) with 53 random bits.
    pub fn uniform(&self, i: u64) -> f64 {
        (self.u64(i) >> 11) as f64 / (1u64 << 53) as f64
    }
    /// Standard normal (Box-Muller). Each pair of indices shares one Philox call; a single index costs one call.
    pub fn normal(&self, i: u64) -> f32 {
        let (r, t) = self.polar(i / 2);
        (r * if i.is_multiple_of(2) { t.cos() } else { t.sin() }) as f32
    }
    /// `out[i] = normal(start + i)` at half the cost, because both values of a pair are used.
    pub fn normals(&self, start: u64, out: &mut [f32]) {
        let (odd, rest) = out.split_at_mut(out.len().min(start as usize % 2));
        odd.fill_with(|| self.normal(start));
        for (pair, out) in (start.div_ceil(2)..).zip(rest.chunks_mut(2)) {
            let (r, t) = self.polar(pair);
            let both = [(r * t.cos()) as f32, (r * t.sin()) as f32];
            out.copy_from_slice(&both[..out.len()]);
        }
    }
    /// Radius and angle of a pair of normal samples.
    fn polar(&self, pair: u64) -> (f64, f64) {
        let [a, b, c, d] = self.words(pair);
        let unit = |hi: u32, lo: u32| (((hi as u64) << 21 | lo as u64 >> 11) as f64 + 0.5) / (1u64 << 53) as f64;
        ((-2.0 * unit(a, b).ln()).sqrt(), std::f64::consts::TAU * unit(c, d))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Known-answer vectors of the Random123 distribution (kat_vectors, philox4x32 10).
    #[test]
    fn philox_known_answers() {
        assert_eq!(philox(0, [0; 4]), [0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8]);
        assert_eq!(philox(u64::MAX, [u32::MAX; 4]), [0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd]);
        assert_eq!(
            philox(0x299f31d0_a4093822, [0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344]),
            [0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1]
        );
    }

    #[test]
    fn many_normals_are_those_of_their_indices() {
        let rng = Rng::new(1, 2);
        for (start, len) in [(0, 7), (5, 4), (9, 1), (9, 0), (1 << 40, 3)] {
            let mut out = vec![0.0; len];
            rng.normals(start, &mut out);
            let expected: Vec<f32> = (start..start + len as u64).map(|i| rng.normal(i)).collect();
            assert_eq!(out, expected);
        }
    }

    #[test]
    fn normal_has_the_right_moments() {
        let rng = Rng::new(1, 2);
        let n = 100_000;
        let (mut sum, mut squares) = (0.0, 0.0);
        for i in 0..n {
            let x = rng.normal(i) as f64;
            sum += x;
            squares += x * x;
        }
        assert!((sum / n as f64).abs() < 0.01, "mean {}", sum / n as f64);
        assert!((squares / n as f64 - 1.0).abs() < 0.02, "variance {}", squares / n as f64);
    }
}
