//! Which samples a run reads, and how they become sequences. Never opens a data set.
use super::names::{InputLossName, RowFormatName};
use super::value::{bytes, count, number, numbers, one_or_many, set};
use crate::base::Result;
use crate::data::RowNames;
use serde::{Deserialize, Serialize};
use std::path::PathBuf;

#[derive(clap::Args, Serialize, Deserialize, Clone, Debug, Default)]
#[serde(default)]
#[command(next_help_heading = "Data")]
pub struct DataSettings {
    /// Text, .jsonl, .json, .csv, .parquet or .npy (tokens) files or directories, names of the hub (OWNER/NAME,
    /// OWNER/NAME@REVISION, OWNER/NAME:SPLIT, OWNER/NAME/FILE), or `synthetic`; `NAME[:500]` is some rows [default:
    /// Rust sources in cargo's registry]
    #[arg(long, num_args = 1.., value_name = "PATH|NAME")]
    #[serde(deserialize_with = "one_or_many")]
    pub dataset: Option<Vec<String>>,
    /// Split of the directories and of the hub's data sets in --dataset, such as train_sft [default: the one in the
    /// name, else train]
    #[arg(long, value_name = "SPLIT")]
    pub split: Option<String>,
    /// Sampling weight of each --dataset path, which can also be written there as PATH:WEIGHT [default: all paths are
    /// one data set]
    #[arg(long, num_args = 1.., value_delimiter = ',', value_name = "W")]
    #[serde(deserialize_with = "numbers")]
    pub dataset_weights: Option<Vec<f64>>,
    /// Evaluate on all rows of these files, directories or names of the hub, instead of on rows held out of --dataset
    /// [default: none]
    #[arg(long, num_args = 1.., value_name = "PATH")]
    #[serde(deserialize_with = "one_or_many")]
    pub eval_dataset: Option<Vec<String>>,
    /// Split of the directories and of the hub's data sets in --eval-dataset, or, without that, in --dataset, such as
    /// test [default: the one in the name, else train]
    #[arg(long, value_name = "SPLIT")]
    pub eval_split: Option<String>,
    /// Rows to hold out for evaluation: a fraction below 1, or a number of rows, of each data set [default: 1 %, from 8
    /// to 256 rows; with --no-eval none]
    #[arg(long, value_name = "FRACTION|ROWS")]
    pub held_out: Option<f64>,
    /// Tokenizer: a tokenizer.json, a directory or a name of the hub that holds one, or `bytes`; token ids need none
    /// [default: the one in pretrain, else bytes]
    #[arg(long, value_name = "PATH|bytes")]
    pub tokenizer: Option<String>,
    /// Which fields are read where a row has those of several formats [default: tokens, then prompt and completion,
    /// messages, conversations, Alpaca's, text]
    #[arg(long)]
    pub row_format: Option<RowFormatName>,
    /// Fields of rows and of their messages that have other names than here, such as question=instruction
    /// [default: none]
    #[arg(long, num_args = 1.., value_name = "OLD=NEW")]
    #[serde(deserialize_with = "one_or_many")]
    pub rename_fields: Option<Vec<String>>,
    /// Roles of messages that have other names than here, such as student=user [default: none]
    #[arg(long, num_args = 1.., value_name = "OLD=NEW")]
    #[serde(deserialize_with = "one_or_many")]
    pub rename_roles: Option<Vec<String>>,
    /// Row field with the prompt, or with the messages when using a chat template [default: messages or conversations]
    #[arg(long, value_name = "KEY")]
    pub input_key: Option<String>,
    /// Row field with the answer [default: the last message]
    #[arg(long, value_name = "KEY")]
    pub output_key: Option<String>,
    /// Row field with the system prompt of a chat template [default: system]
    #[arg(long, value_name = "KEY")]
    pub system_key: Option<String>,
    /// Render messages with the tokenizer's chat template. Alpaca rows: instruction and input become the user message
    #[arg(long)]
    pub apply_chat_template: Option<bool>,
    /// Train on every assistant message instead of only the last; implies the chat template
    #[arg(long)]
    pub multiturn: Option<bool>,
    /// Loss on every token of a row, not on answers alone; conversations: of rows with messages, as in TRL
    #[arg(long)]
    pub train_on_inputs: Option<InputLossName>,
    /// Chat template: the name of one of the tokenizer's, a file, or Jinja text; saved models hold it
    /// [default: the tokenizer's]
    #[arg(long, value_name = "NAME|FILE|TEXT")]
    pub tokenizer_chat_template: Option<String>,
    /// Tokens that the tokenizer must have as eos_token, bos_token and so on, or is refused [default: any]
    #[arg(long, num_args = 1.., value_name = "NAME=TOKEN")]
    #[serde(deserialize_with = "one_or_many")]
    pub special_tokens: Option<Vec<String>>,
    /// Train on every token of the input-key text, truncated at max-len, with no end-of-text token; on files that look
    /// like data under the name of text, as text
    #[arg(long)]
    pub pretrain_mode: Option<bool>,
    /// With --pretrain-mode: join the texts of rows to one stream, each with an end of text, that is cut into sequences
    /// of max-len; without it each row is a sequence
    #[arg(long)]
    pub join_rows: Option<bool>,
    /// Skip malformed rows and count them
    #[arg(long)]
    pub skip_bad_rows: Option<bool>,
    /// Prompt template; {} stands for the prompt [default: none]
    #[arg(long, value_name = "TEXT")]
    pub input_template: Option<String>,
    /// Prompts that no template renders begin with what the tokenizer adds before a text, and the end of text follows
    /// their answers at once, as in TRL and Axolotl; off: nothing, and a space, as in OpenRLHF [default: on, off for
    /// rows with --input-key]
    #[arg(long)]
    pub add_special_tokens: Option<bool>,
    /// Pack whole samples into each sequence; samples do not attend to one another
    #[arg(long)]
    pub packing_samples: Option<bool>,
    /// Sequence length, in tokens
    #[arg(long, value_name = "TOKENS")]
    pub max_len: Option<usize>,
    /// Balance sample lengths across ranks (ignored with packing)
    #[arg(long)]
    pub group_by_length: Option<bool>,
    /// Use only the first N samples of the data [default: all]
    #[arg(long, value_name = "N")]
    pub max_samples: Option<usize>,
    /// Reshuffle the samples every epoch, by the seed
    #[arg(long)]
    pub shuffle: Option<bool>,
    /// Cache tokenized data on disk for later runs; off: each process tokenizes into a temporary file
    #[arg(long)]
    pub cache: Option<bool>,
    /// Directory for tokenized data and for the configs and tokenizers of GGUF files [default: $FLATSHARD_CACHE_DIR, or
    /// flatshard in $XDG_CACHE_HOME or ~/.cache]
    #[arg(long, value_name = "DIR")]
    pub cache_dir: Option<PathBuf>,
    /// Size limit of the token cache, such as 10GB or 500MB; evicts the least recently used data that no run is reading
    #[arg(long, value_name = "SIZE")]
    pub cache_limit: Option<String>,
}

impl DataSettings {
    pub fn check(&self) -> Result<()> {
        self.cache_bytes()?;
        self.renames()?;
        let weights = self.dataset_weights.iter().flatten();
        weights.copied().try_for_each(|w| number("dataset_weights", Some(w), |w| w > 0.0, "above 0"))?;
        let whole = |x: f64| x >= 0.0 && (x < 1.0 || x.fract() == 0.0);
        number("held_out", self.held_out, whole, "a fraction of the rows below 1, or a number of them")?;
        count("max_len", self.max_len)
    }
    /// What fields and roles of the data are called here.
    pub fn renames(&self) -> Result<RowNames> {
        RowNames::new(self.rename_fields.as_deref(), self.rename_roles.as_deref())
    }
    pub fn cache_bytes(&self) -> Result<u64> {
        bytes("cache_limit", &set(&self.cache_limit, "data.cache_limit")?)
    }
}
