//! Numbers so large that sums of ranks, tokens or bytes would leave a machine word, or that planning alone would take all memory.
//! Everything behind this computes with plain products. Never judges what a run needs: the plan does.
use super::settings::Settings;
use crate::base::{Error, Result};
use crate::strategy::EngineOptions;

/// Ranks, hosts, heads.
const MANY: u64 = 1 << 16;
/// Blocks: each takes a millisecond of planning.
const DEEP: u64 = 1 << 12;
/// Sizes of a model and of a sequence, text to write: ids and lengths are 32 bits wide.
const LARGE: u64 = 1 << 31;
/// Sequences: batch x accumulation x ranks is a word.
const LONG: u64 = 10_000_000;
/// Bytes of a rank: far above any machine, far below a word.
const BYTES: f64 = (1u64 << 60) as f64;

/// Each number by itself.
pub fn single(s: &Settings) -> Result<()> {
    let Settings { run, model: m, data, batch, parallel, lora, generate, .. } = s;
    let all = [
        ("nproc_per_node", run.nproc_per_node, MANY),
        ("num_nodes", run.num_nodes, MANY),
        ("ranks_per_gpu", run.ranks_per_gpu, MANY),
        ("tp_size", parallel.tp_size, MANY),
        ("ring_attn_size", parallel.ring_attn_size, MANY),
        ("dp_replicate_size", parallel.dp_replicate_size, MANY),
        ("num_layers", m.num_layers, DEEP),
        ("num_heads", m.num_heads, MANY),
        ("num_kv_heads", m.num_kv_heads, MANY),
        ("embed_dim", m.embed_dim, LARGE),
        ("ff_hidden_dim", m.ff_hidden_dim, LARGE),
        ("vocab_size", m.vocab_size, LARGE),
        ("max_positions", m.max_positions, LARGE),
        ("lora_rank", lora.rank, LARGE),
        ("max_len", data.max_len, LARGE),
        ("sample_tokens", run.sample_tokens, LONG),
        ("max_new_tokens", generate.max_new_tokens, LONG),
        ("batch_size", batch.batch_size, LONG),
        ("grad_accum", batch.grad_accum, LONG),
        ("train_batch_size", batch.train_batch_size, LARGE),
    ];
    match all.into_iter().find_map(|(name, value, most)| Some((name, value.filter(|&n| n as u64 > most)?, most))) {
        Some((name, value, most)) => Err(Error::input(format!("{name} is {value}: it must be at most {most}"))),
        None => Ok(()),
    }
}

/// Their products: parameters with gradients and moments, and what a micro-batch leaves behind, each generously.
pub fn together(e: &EngineOptions) -> Result<()> {
    let (s, tokens) = (&e.spec, e.tokens as f64);
    let [layers, dim, ff, vocab, positions] = [s.layers, s.dim, s.ff, s.vocab, s.max_len].map(|n| n as f64);
    let heads = (s.heads * s.head_dim) as f64;
    let adapters = e.tuning.lora.as_ref().map_or(0.0, |lora| lora.rank as f64 * 7.0 * (dim + heads + ff));
    let params = layers * (dim * (4.0 * heads + 3.0 * ff) + adapters) + dim * (2.0 * vocab + positions);
    let activations = tokens * (layers * (8.0 * dim + 8.0 * heads + 3.0 * ff) + vocab + dim);
    if 32.0 * (params + activations) <= BYTES {
        return Ok(());
    }
    Err(Error::input(format!(
        "a model of {} layers, width {}, ff {}, vocabulary {} and {} tokens in a micro-batch is larger than any machine; make \
         some of these numbers smaller",
        s.layers, s.dim, s.ff, s.vocab, e.tokens
    )))
}
