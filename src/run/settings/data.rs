//! Which samples a run reads, and how it makes sequences of them. Never opens a data set.
use super::value::{bytes, count, one_or_many, set};
use crate::base::Result;
use serde::{Deserialize, Serialize};
use std::path::PathBuf;

#[derive(clap::Args, Serialize, Deserialize, Clone, Debug, Default)]
#[serde(default)]
#[command(next_help_heading = "Data")]
pub struct DataSettings {
    /// Text, .jsonl, .json, .parquet, .npy: files or directories; or `synthetic` [default: Rust sources of cargo's
    /// registry]
    #[arg(long, num_args = 1.., value_name = "PATH")]
    #[serde(deserialize_with = "one_or_many")]
    pub dataset: Option<Vec<String>>,
    /// `bytes`, a tokenizer.json, or a directory that holds one [default: that of pretrain, or bytes]
    #[arg(long, value_name = "PATH|bytes")]
    pub tokenizer: Option<String>,
    /// Field of a row that holds the prompt, or with a chat template the messages [default: messages or conversations]
    #[arg(long, value_name = "KEY")]
    pub input_key: Option<String>,
    /// Field of a row that holds the answer [default: the last message]
    #[arg(long, value_name = "KEY")]
    pub output_key: Option<String>,
    /// Render messages with the tokenizer's chat template; of Alpaca's rows, instruction and input are the user's
    /// message
    #[arg(long)]
    pub apply_chat_template: Option<bool>,
    /// Loss on every message of the assistant, not on the last only; renders with the chat template
    #[arg(long)]
    pub multiturn: Option<bool>,
    /// Jinja text, or a file of it, in place of the tokenizer's chat template [default: none]
    #[arg(long, value_name = "TEXT|FILE")]
    pub tokenizer_chat_template: Option<String>,
    /// Loss on all of input-key's text, cut at max-len, without an end of text
    #[arg(long)]
    pub pretrain_mode: Option<bool>,
    /// Leave out rows that are malformed, and count them
    #[arg(long)]
    pub skip_bad_rows: Option<bool>,
    /// Text around the prompt; {} stands for it [default: none]
    #[arg(long, value_name = "TEXT")]
    pub input_template: Option<String>,
    /// As many samples in a sequence as fit into max-len, whole, without seeing each other
    #[arg(long)]
    pub packing_samples: Option<bool>,
    /// Tokens in a sequence
    #[arg(long, value_name = "TOKENS")]
    pub max_len: Option<usize>,
    /// Without packing: samples of a step dealt so that micro-batches of all ranks are of like lengths
    #[arg(long)]
    pub group_by_length: Option<bool>,
    /// Use only the first samples of the data set [default: all]
    #[arg(long, value_name = "N")]
    pub max_samples: Option<usize>,
    /// A new order of samples each epoch, from the seed
    #[arg(long)]
    pub shuffle: Option<bool>,
    /// Keep the tokens of data sets on disk for later runs; off: each process tokenizes for itself, into a temporary
    /// file
    #[arg(long)]
    pub cache: Option<bool>,
    /// Directory of the token cache [default: $FLATSHARD_CACHE_DIR, or flatshard in $XDG_CACHE_HOME or ~/.cache]
    #[arg(long, value_name = "DIR")]
    pub cache_dir: Option<PathBuf>,
    /// Size of the token cache, as 10GB or 500MB: beyond it, the least recently used data sets that no run is reading
    /// are removed
    #[arg(long, value_name = "SIZE")]
    pub cache_limit: Option<String>,
}

impl DataSettings {
    pub fn check(&self) -> Result<()> {
        self.cache_bytes()?;
        count("max_len", self.max_len)
    }
    pub fn cache_bytes(&self) -> Result<u64> {
        bytes("cache_limit", &set(&self.cache_limit, "data.cache_limit")?)
    }
}
