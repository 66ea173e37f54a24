//! Dropout that a `config.json` asks for. Never part of a trained [`crate::nn::Spec`]: a run has its own setting.
use crate::base::Result;
use std::path::Path;

/// The keys of all families, and whether the run's dropout replaces them. Dropout of attention probabilities is not
/// implemented.
const KEYS: [(&str, bool); 13] = [
    ("activation_dropout", false),
    ("attention_dropout", false),
    ("attention_probs_dropout_prob", false),
    ("attn_pdrop", false),
    ("dropout", false),
    ("embd_pdrop", true),
    ("embed_dropout", true),
    ("embedding_dropout", true),
    ("hidden_dropout", false),
    ("hidden_dropout_prob", true),
    ("resid_dropout", true),
    ("resid_pdrop", true),
    ("residual_dropout", true),
];

/// The dropout keys of `dir` that training with `dropout` does not apply, such as "attn_pdrop 0.1".
pub fn unused_dropout(dir: &Path, dropout: f32) -> Result<Vec<String>> {
    let map = super::flat(&super::map_in(dir)?);
    let asked = KEYS.iter().filter_map(|(key, ours)| Some((key, map.get(*key)?.as_f64()?, *ours)));
    let unused = asked.filter(|(_, p, ours)| *p > 0.0 && !(*ours && *p as f32 == dropout));
    Ok(unused.map(|(key, p, _)| format!("{key} {p}")).collect())
}
