//! A task with a known minimum loss, generated on the fly for any vocabulary. Never stores tokens.
use super::permutation::Permutation;
use crate::base::rng::Rng;
use crate::base::{Error, Result};

/// A Markov chain over the first `min(vocab, 64)` ids: `s` is followed by one of four tokens, with probabilities 1/2,
/// 1/4, 1/8, 1/8. The four are `(p(s) + j * stride) mod n` for a fixed random permutation `p`: distinct, and each j is
/// a bijection, so the chain is doubly stochastic and its tokens are uniform. Hence the loss is
/// - `ln vocab` for a model that knows nothing, and `ln n` once it knows which ids occur,
/// - the chain's entropy, 7/4 ln 2 = 1.2130 nats per token, for a model that knows the chain: the floor.
///
/// `seed` selects the chain and the rows.
#[derive(Clone, Debug)]
pub struct Synthetic {
    states: u32,
    next: Vec<u32>,
    rows: Rng,
}

impl Synthetic {
    /// Mean loss of a perfect model, in nats per token: 7/4 ln 2.
    pub const FLOOR: f64 = 1.75 * std::f64::consts::LN_2;
    /// Rows per epoch; no two share their random numbers.
    pub const ROWS: u64 = 1 << 20;

    pub fn new(vocab: usize, seed: u64) -> Result<Synthetic> {
        if vocab < 4 {
            return Err(Error::input(format!(
                "`dataset: synthetic` with vocab_size {vocab}: each token has 4 successors; set vocab_size to 4 or more"
            )));
        }
        let states = vocab.min(64) as u32;
        let after = Permutation::new(states as u64, Rng::named(seed, "synthetic chain"));
        let next = (0..states as u64).map(|s| after.at(s) as u32).collect();
        Ok(Synthetic { states, next, rows: Rng::named(seed, "synthetic rows") })
    }
    /// Writes the tokens of `row`: the first is uniform, each other follows from its predecessor. Returns the token
    /// after the last.
    pub fn fill(&self, row: u64, tokens: &mut [u32]) -> u32 {
        let rng = Rng::new(self.rows.key(), row);
        let mut state = rng.words(u64::MAX)[0] % self.states;
        for (t, token) in tokens.iter_mut().enumerate() {
            *token = state;
            let word = rng.words(t as u64 / 4)[t % 4];
            // The number of leading zeros is geometric: 0 has probability 1/2, 1 has 1/4, 2 has 1/8, and 3 or more the
            // remaining 1/8.
            state = self.successor(state, word.leading_zeros().min(3));
        }
        state
    }
    pub fn fingerprint(&self) -> u64 {
        self.rows.u64(u64::MAX)
    }
    /// The `j`-th of the four tokens that may follow `state`; j = 0 is the most likely.
    pub fn successor(&self, state: u32, j: u32) -> u32 {
        (self.next[state as usize] + j * (self.states / 4)) % self.states
    }
}
