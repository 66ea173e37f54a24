//! Floor 5: from files to micro-batches. Never knows strategies, ranks beyond two numbers, or checkpoints' layout.
//!
//! One way through: [`corpus`] finds files, `reader` turns them into tokens once, [`cache`] keeps those as a mapped file,
//! [`Dataset`] cuts them into numbered rows of `max_len` tokens, and [`Loader`] hands each rank its rows. A row's number
//! decides everything about it and a sample's number decides its row, so the whole state of a run's data is one number.
pub mod cache;
pub mod corpus;
mod dataset;
mod jsonl;
mod loader;
mod npy;
mod permutation;
mod reader;
mod synthetic;
pub mod tokenizer;

pub use dataset::{DataOptions, Dataset, Report};
pub use loader::{Loader, LoaderOptions};
pub use permutation::Permutation;
pub use synthetic::Synthetic;
pub use tokenizer::Tokenizer;

use crate::device::IGNORE;

/// What one data-parallel rank trains on at once: `batch_size` rows of `max_len` tokens, one after the other (N in all).
#[derive(Clone, Debug, Default, PartialEq)]
pub struct MicroBatch {
    /// (N)
    pub tokens: Vec<u32>,
    /// (N) what each position predicts, already shifted; [`IGNORE`] where there is no loss.
    pub targets: Vec<i32>,
    /// (N) counted from the start of the document.
    pub positions: Vec<u32>,
    /// (S + 1) where documents start, then N. A row is a document, and so is its padding: S is in
    /// `batch_size..=2 * batch_size` and may differ between micro-batches.
    pub cu_seqlens: Vec<u32>,
}

impl MicroBatch {
    /// Positions that carry loss.
    pub fn loss_tokens(&self) -> u64 {
        self.targets.iter().filter(|&&t| t != IGNORE).count() as u64
    }
}
