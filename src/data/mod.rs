//! Floor 5: from files to micro-batches. Never knows strategies, ranks beyond two numbers, or checkpoints' layout.
//!
//! One way through: [`corpus`] finds files, `reader` turns them into tokens once, [`cache`] keeps those as a mapped
//! file, [`Dataset`] cuts them into numbered rows of `max_len` tokens, and [`Loader`] hands each rank its rows. A row's
//! number decides everything about it and a sample's number decides its row, so the whole state of a run's data is one
//! number.
mod array;
pub mod cache;
pub mod corpus;
mod dataset;
mod format;
mod loader;
mod npy;
mod packing;
mod permutation;
mod prefetch;
mod reader;
mod recipe;
mod rows;
mod shapes;
mod sweep;
mod synthetic;
mod template;
mod text;
pub mod tokenizer;
mod words;
pub mod zigzag;

pub use cache::Cache;
pub use dataset::{DataOptions, Dataset, Report, no_rows};
pub use format::Format;
pub use loader::{Loader, LoaderOptions, StepData, held_out, held_out_by_steps};
pub use permutation::Permutation;
pub use prefetch::{Fetched, Prefetch, PrefetchOptions};
pub use recipe::{Outcome, Recipe, Row};
pub use synthetic::Synthetic;
pub use template::ChatTemplate;
pub use tokenizer::Tokenizer;

use crate::device::IGNORE;

/// What one data-parallel rank trains on at once: `batch_size` sequences of at most `max_len` tokens one after the
/// other (N in all). A sequence is a row, or with packing several; there is no padding.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct MicroBatch {
    /// (N)
    pub tokens: Vec<u32>,
    /// (N) what each position predicts, already shifted; [`IGNORE`] where there is no loss.
    pub targets: Vec<i32>,
    /// (N) counted from the start of the document.
    pub positions: Vec<u32>,
    /// (S + 1) where documents start, then N. A row is a document, which sees no other: S is `batch_size`, or with
    /// packing as many as there are rows.
    pub cu_seqlens: Vec<u32>,
}

impl MicroBatch {
    /// Positions that carry loss.
    pub fn loss_tokens(&self) -> u64 {
        self.targets.iter().filter(|&&t| t != IGNORE).count() as u64
    }
    /// Adds documents without loss, of at most `longest` tokens, up to `most` tokens, and empty ones up to `most`
    /// documents: whatever was packed, the shape is the same.
    pub fn fill_up(&mut self, most: usize, longest: usize) {
        let mut at = self.tokens.len();
        while at < most {
            let len = longest.clamp(1, most - at);
            self.positions.extend(0..len as u32);
            at += len;
            self.cu_seqlens.push(at as u32);
        }
        self.tokens.resize(at, 0);
        self.targets.resize(at, IGNORE);
        self.cu_seqlens.resize(self.cu_seqlens.len().max(at + 1), at as u32);
    }
}
