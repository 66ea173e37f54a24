//! Prompts with the answers of other rows. Never knows what they are compared for.
//!
//! [Note: mismatched answers] KTO estimates the KL divergence of the policy from prompts with unrelated answers. Row r
//! of n gets the answer of row r + 0.618 n (mod n): never its own, and hardly one to a similar prompt, since related
//! rows are neighbors, or halves or thirds of a file apart. The choice is a property of the data, so neither the order
//! of rows nor the split of a step over ranks changes it. A sequence that gets too long is truncated.
use super::source::RowSource;
use super::words::TokenWords;
use crate::device::IGNORE;

/// A prompt, and another row's answer.
pub(super) struct Mismatched<'a> {
    prompt: TokenWords<'a>,
    answer: TokenWords<'a>,
    pub len: usize,
}

impl Mismatched<'_> {
    /// For `row` of the first `n` rows; None if rows have no labels.
    pub fn of(rows: &RowSource, row: u64, n: u64, max_len: usize) -> Option<Mismatched<'_>> {
        let shift = ((n as f64 * 0.618) as u64).clamp(1, n.max(2) - 1);
        let (ids, asked) = rows.answered(row)?;
        let (others, from) = rows.answered((row + shift) % n)?;
        let len = (asked + others.len() - from).min(max_len);
        Some(Mismatched { prompt: ids.first(asked), answer: others.slice(from..from + len - asked), len })
    }
    /// Like [`super::Dataset::fill`]; both are [`Mismatched::len`] long.
    pub fn fill(&self, tokens: &mut [u32], targets: &mut [i32]) {
        let asked = self.prompt.len();
        self.prompt.ids(&mut tokens[..asked]);
        self.answer.ids(&mut tokens[asked..]);
        targets.fill(IGNORE);
        self.answer.targets(&mut targets[asked - 1..self.len - 1]);
    }
}
