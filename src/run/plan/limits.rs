//! Numbers so large that sums of ranks, tokens or bytes would leave a machine word, or that planning alone would take all memory.
//! Everything behind this computes with plain products; the table is [`crate::base::limits`]. Never judges what a run needs: the plan does.
use crate::base::{Error, Result, limits};
use crate::engine::EngineOptions;
use crate::run::settings::Settings;

/// Bytes of a rank: far above any machine, far below a word.
const BYTES: f64 = (1u64 << 60) as f64;

/// Each number by itself.
pub fn single(s: &Settings) -> Result<()> {
    let Settings { run, model: m, data, batch, parallel, lora, generate, .. } = s;
    let all = [
        ("nproc_per_node", run.nproc_per_node),
        ("num_nodes", run.num_nodes),
        ("ranks_per_gpu", run.ranks_per_gpu),
        ("tp_size", parallel.tp_size),
        ("ring_attn_size", parallel.ring_attn_size),
        ("dp_replicate_size", parallel.dp_replicate_size),
        ("num_layers", m.num_layers),
        ("num_heads", m.num_heads),
        ("num_kv_heads", m.num_kv_heads),
        ("embed_dim", m.embed_dim),
        ("ff_hidden_dim", m.ff_hidden_dim),
        ("vocab_size", m.vocab_size),
        ("max_positions", m.max_positions),
        ("lora_rank", lora.rank),
        ("max_len", data.max_len),
        ("sample_tokens", run.sample_tokens),
        ("max_new_tokens", generate.max_new_tokens),
        ("batch_size", batch.batch_size),
        ("grad_accum", batch.grad_accum),
        ("train_batch_size", batch.train_batch_size),
    ];
    all.into_iter().try_for_each(|(name, value)| value.map_or(Ok(()), |n| limits::check(name, name, n as u64)))
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
