//! Floor 5: from files to micro-batches. Never knows strategies, ranks beyond two numbers, or checkpoints' layout.
//!
//! One way through: [`corpus`] finds files, `reader` turns them into tokens once, [`cache`] keeps those as a mapped
//! file, [`Dataset`] cuts them into numbered rows of `max_len` tokens, and [`Loader`] hands each rank its rows. A row's
//! number decides everything about it and a sample's number decides its row, so the whole state of a run's data is one
//! number.
mod fields; // fields of a row, and what is wrong with one
mod shapes; // conversations and instructions, by their keys
mod array; // the elements of a JSON array, one by one
pub mod corpus; // which files there are
pub mod tokenizer; // from text to ids and back
mod template; // chat templates
mod format; // what settings say of rows
mod recipe; // from a row to tokens with labels
mod words; // tokens as a file holds them
mod sweep; // which token files go
pub mod token_file; // a corpus as numbers, written once
pub mod cache; // token files by key
mod place; // where a token was read
mod npy; // arrays of NumPy
mod text; // files of text
mod rows; // files of rows
mod reader; // from a corpus to a token file
mod permutation; // a shuffle without a table
mod synthetic; // a task with a known lowest loss
mod source; // rows as they are kept, or made
mod blend; // the sources of a mixture
mod report; // what was found
mod dataset; // numbered rows
mod order; // which row each sample is
mod packing; // whole samples into sequences
mod batch; // what a rank trains on at once
mod loader; // each rank's rows
mod prefetch; // the next step's rows, ahead of time
pub mod zigzag; // a sequence over the ranks of sp

pub use batch::MicroBatch;
pub use cache::Cache;
pub use dataset::{DataOptions, Dataset};
pub use format::Format;
pub use loader::{Loader, LoaderOptions, StepData, held_out, held_out_by_steps};
pub use permutation::Permutation;
pub use prefetch::{Fetched, Prefetch, PrefetchOptions};
pub use recipe::{Outcome, Recipe, TokenizedRow};
pub use report::Report;
pub use synthetic::Synthetic;
pub use template::ChatTemplate;
pub use tokenizer::Tokenizer;
