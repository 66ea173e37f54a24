//! Floor 5: from files to micro-batches. Never knows sharding strategies, ranks beyond two numbers, or checkpoint
//! layouts.
//!
//! The pipeline: [`corpus`] finds files, `reader` tokenizes them once, [`cache`] keeps the tokens as a memory-mapped
//! file, [`Dataset`] slices them into numbered rows of `max_len` tokens, and [`Loader`] assigns rows to ranks. A row's
//! number determines its content and a sample's number determines its row, so the state of a run's data is a single
//! number.
mod fields; // fields of a row, and their errors
mod shapes; // conversations and instructions, recognized by their keys
mod message; // their messages
mod array; // elements of a JSON array, streamed
mod json; // rows of JSON, also as Python writes them
mod row_names; // fields and roles of other names
pub mod slice; // some rows of a data set
mod content; // decompressed files in UTF-8
mod foreign; // files of other tools
pub mod kind; // what a file is
pub mod corpus; // finding files
pub mod tokenizer; // text to ids and back
mod template; // chat templates
mod format; // settings that describe rows
mod talk; // rows as a chat template has them
mod recipe; // rows to tokens and labels
mod unread; // what a row holds and nothing reads
mod answers; // answers in a rendered conversation
mod pair_shapes; // pairs as other tools write them
mod pairs; // prompts with two answers
mod labeled; // prompts with a labeled answer
mod rollouts; // prompts with samples and their rewards
mod groups; // these as they are stored
mod words; // token words, u16 or u32
mod sweep; // evicting token files
pub mod token_file;
mod token_row; // a tokenized corpus, memory-mapped
pub mod cache; // token files by key
mod place; // positions for error messages
mod npy; // NumPy arrays
mod text; // text files
mod rows; // files of rows
mod reader; // corpus to token file
mod permutation; // shuffling without a table
mod synthetic; // a task with a known minimum loss
mod source; // stored or generated rows
mod mismatched; // prompts with answers of other rows
mod blend; // the sources of a mixture
mod report; // summary of a data set
mod dataset; // numbered rows
mod preview; // the first samples, to look at
mod order; // sample number to row
mod packing; // whole samples into sequences
mod batch; // micro-batches
mod loader; // rows of each rank
mod prefetch; // loading ahead on a thread
pub mod zigzag; // splitting sequences over the ranks of sp

pub use batch::{MicroBatch, Recorded, SampleRow};
pub use cache::Cache;
pub use dataset::{DataOptions, Dataset};
pub(crate) use fields::number_in;
pub use fields::{JsonRow, RowResult, in_json};
pub use format::{Format, InputLoss, LabelKeys, PairKeys, Preferences, SampleKind, SampleRoom};
pub(crate) use json::object as json_object;
pub use loader::{Epochs, Loader, LoaderOptions, StepData, held_out, held_out_by_steps, held_out_share};
pub use permutation::Permutation;
pub use prefetch::{Fetched, Prefetch, PrefetchOptions};
pub use preview::{PreviewRow, PreviewSequence};
pub use reader::{RowFiles, each_row};
pub use recipe::{Drop, Outcome, Recipe, TokenizedRow};
pub use report::Report;
pub use row_names::RowNames;
pub use shapes::Shape;
pub use sweep::{PROMPTS, create_held, open_held};
pub use synthetic::Synthetic;
pub use template::{ChatTemplate, Conversation, Rendered};
pub use tokenizer::Tokenizer;
