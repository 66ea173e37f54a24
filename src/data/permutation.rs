//! A pseudorandom permutation of n items in constant memory: any position can be computed directly. Never draws from
//! shared state, so ranks agree without communication.
use crate::base::rng::Rng;

/// A bijection of `0..n`: a balanced Feistel network over the next power of four with cycle walking (Black & Rogaway,
/// "Ciphers with arbitrary finite domains", 2002): a value that falls outside is enciphered again until it falls
/// inside. The domain is smaller than 4n, so this takes under 4 iterations on average.
#[derive(Clone, Debug)]
pub struct Permutation {
    n: u64,
    half: u32,
    rng: Rng,
}

/// Luby and Rackoff prove 4 rounds enough for large halves; small halves need a few more to look random.
const ROUNDS: u64 = 8;

impl Permutation {
    /// `n` is below 2^62. The same `rng` gives the same order.
    pub fn new(n: u64, rng: Rng) -> Permutation {
        let bits = u64::BITS - n.saturating_sub(1).leading_zeros();
        Permutation { n, half: bits.div_ceil(2), rng }
    }
    pub fn len(&self) -> u64 {
        self.n
    }
    pub fn is_empty(&self) -> bool {
        self.n == 0
    }
    /// The image of `i`, which is below `n`.
    pub fn at(&self, i: u64) -> u64 {
        debug_assert!(i < self.n, "{i} is not below {}", self.n);
        let mut x = i;
        loop {
            x = self.encipher(x);
            if x < self.n {
                return x;
            }
        }
    }
    fn encipher(&self, x: u64) -> u64 {
        let mask = (1u64 << self.half) - 1;
        let (mut left, mut right) = (x >> self.half, x & mask);
        for round in 0..ROUNDS {
            // A half has at most 31 bits, so the round number fits above it.
            (left, right) = (right, left ^ self.rng.words(round << 32 | right)[0] as u64 & mask);
        }
        left << self.half | right
    }
}
