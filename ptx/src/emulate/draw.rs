//! Pseudo-random numbers for schedules and for errors of approximate instructions: SplitMix64 (Steele et al. 2014).

#[derive(Clone)]
pub struct SplitMix64(pub u64);

impl SplitMix64 {
    pub fn below(&mut self, n: usize) -> usize {
        self.0 = self.0.wrapping_add(GAMMA);
        (finalize(self.0) % n.max(1) as u64) as usize
    }
}

pub const GAMMA: u64 = 0x9E37_79B9_7F4A_7C15;

pub fn finalize(mut z: u64) -> u64 {
    z = (z ^ z >> 30).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    z = (z ^ z >> 27).wrapping_mul(0x94D0_49BB_1331_11EB);
    z ^ z >> 31
}
