//! The largest value of each size that a flag, a config key or a model's config may give, in one table. Code that uses
//! these sizes can multiply without overflow checks. Never decides whether a run fits: the plan does.
use super::{Error, Result};

/// Ranks, hosts, heads.
const MANY: u64 = 1 << 16;
/// Blocks: planning takes about a millisecond for each.
const DEEP: u64 = 1 << 12;
/// Threads of a rank.
const CORES: u64 = 1 << 10;
/// Channels of NCCL (`MAXCHANNELS`), which lowers a larger number without a word.
const CHANNELS: u64 = 64;
/// Model sizes, sequence lengths and tokens to generate: ids and lengths are 32 bits wide.
const LARGE: u64 = 1 << 31;
/// Sequences: batch x accumulation x ranks must fit in a machine word.
const LONG: u64 = 10_000_000;

/// Limits by setting name.
const MOST: [(&str, u64); 28] = [
    ("nproc_per_node", MANY),
    ("threads_per_rank", CORES),
    ("num_nodes", MANY),
    ("ranks_per_gpu", MANY),
    ("nccl_max_ctas", CHANNELS),
    ("tp_size", MANY),
    ("ep_size", MANY),
    ("ring_attn_size", MANY),
    ("dp_replicate_size", MANY),
    ("num_layers", DEEP),
    ("num_heads", MANY),
    ("num_experts", MANY),
    ("num_experts_per_tok", MANY),
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
    ("updates_per_rollout", LONG),
    ("group_size", MANY),
    ("train_batch_size", LARGE),
];

/// Checks `value` against the limit of `setting`. `name` is what the file or flag calls it.
pub fn check(setting: &str, name: &str, value: u64) -> Result<()> {
    match MOST.iter().find(|(known, _)| *known == setting) {
        Some(&(_, most)) if value > most => Err(Error::input(format!("{name} is {value}: it must be at most {most}"))),
        Some(_) => Ok(()),
        None => Err(Error::op("limits", format!("{setting} has no limit"))),
    }
}
