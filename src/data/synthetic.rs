//! A task whose best loss is known exactly, made on the fly for any vocabulary. Never stores tokens.
use super::permutation::Permutation;
use crate::base::rng::Rng;
use crate::base::{Error, Result};

/// A Markov chain over the first `min(vocab, 64)` ids: after `s` comes one of four tokens, with probabilities 1/2, 1/4,
/// 1/8, 1/8. The four are `(p(s) + j * stride) mod n` for a fixed random permutation `p`: distinct, and each j is a
/// bijection, so the chain is doubly stochastic and its tokens are uniform. Hence the loss of a model
/// - that knows nothing is `ln vocab`, and `ln n` once it knows which ids occur,
/// - that knows the chain is its entropy, 7/4 ln 2 = 1.2130 nats a token: the floor.
///
/// `seed` chooses the chain and the rows.
#[derive(Clone, Debug)]
pub struct Synthetic {
    states: u32,
    next: Vec<u32>,
    rows: Rng,
}

impl Synthetic {
    /// Mean loss of a perfect model, in nats a token: 7/4 ln 2.
    pub const FLOOR: f64 = 1.75 * std::f64::consts::LN_2;
    /// Rows of an epoch; no two share their random numbers.
    pub const ROWS: u64 = 1 << 20;

    pub fn new(vocab: usize, seed: u64) -> Result<Synthetic> {
        if vocab < 4 {
            return Err(Error::input(format!(
                "`dataset: synthetic` with vocab_size {vocab}: each token has 4 successors, so vocab_size is at least 4"
            )));
        }
        let states = vocab.min(64) as u32;
        let after = Permutation::new(states as u64, Rng::named(seed, "synthetic chain"));
        let next = (0..states as u64).map(|s| after.at(s) as u32).collect();
        Ok(Synthetic { states, next, rows: Rng::named(seed, "synthetic rows") })
    }
    /// The tokens of `row`: the first is uniform, each other follows from the one before it. Returns the one after the
    /// last.
    pub fn fill(&self, row: u64, tokens: &mut [u32]) -> u32 {
        let rng = Rng::new(self.rows.key(), row);
        let mut state = rng.words(u64::MAX)[0] % self.states;
        for (t, token) in tokens.iter_mut().enumerate() {
            *token = state;
            let word = rng.words(t as u64 / 4)[t % 4];
            // Leading zeros are geometric: 0 with 1/2, 1 with 1/4, 2 with 1/8, and 3 or more with the 1/8 that is left.
            state = self.successor(state, word.leading_zeros().min(3));
        }
        state
    }
    pub fn fingerprint(&self) -> u64 {
        self.rows.u64(u64::MAX)
    }
    /// The `j`-th of the four tokens that may follow `state`; j = 0 is the likeliest.
    pub fn successor(&self, state: u32, j: u32) -> u32 {
        (self.next[state as usize] + j * (self.states / 4)) % self.states
    }
}
