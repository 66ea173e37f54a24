//! The largest value of each size that a flag, a key of a file or a key of a model's config may give: one table for
//! all. Everything behind it computes with plain products. Never judges what a run needs: the plan does.
use super::{Error, Result};

/// Ranks, hosts, heads.
const MANY: u64 = 1 << 16;
/// Blocks: each takes a millisecond of planning.
const DEEP: u64 = 1 << 12;
/// Sizes of a model and of a sequence, text to write: ids and lengths are 32 bits wide.
const LARGE: u64 = 1 << 31;
/// Sequences: batch x accumulation x ranks is a word.
const LONG: u64 = 10_000_000;

/// By the setting's name.
const MOST: [(&str, u64); 21] = [
    ("nproc_per_node", MANY),
    ("num_nodes", MANY),
    ("ranks_per_gpu", MANY),
    ("tp_size", MANY),
    ("ring_attn_size", MANY),
    ("dp_replicate_size", MANY),
    ("num_layers", DEEP),
    ("num_heads", MANY),
    ("num_kv_heads", MANY),
    ("head_dim", MANY),
    ("embed_dim", LARGE),
    ("ff_hidden_dim", LARGE),
    ("vocab_size", LARGE),
    ("max_positions", LARGE),
    ("lora_rank", LARGE),
    ("max_len", LARGE),
    ("sample_tokens", LONG),
    ("max_new_tokens", LONG),
    ("batch_size", LONG),
    ("grad_accum", LONG),
    ("train_batch_size", LARGE),
];

/// `value`, which the file or the flag calls `name`, is no larger than the setting `setting` may be.
pub fn check(setting: &str, name: &str, value: u64) -> Result<()> {
    match MOST.iter().find(|(known, _)| *known == setting) {
        Some(&(_, most)) if value > most => Err(Error::input(format!("{name} is {value}: it must be at most {most}"))),
        Some(_) => Ok(()),
        None => Err(Error::op("limits", format!("{setting} has no limit"))),
    }
}
