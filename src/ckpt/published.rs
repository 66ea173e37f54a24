//! Files whose tensors have other names than those of transformers' class, which renames them when it loads them:
//! EXAONE 3's, Sarvam's and LFM 3's. Never reads, and never writes such names.
use super::layout::FileTensor;
use crate::nn::{Arch, Spec};
use std::collections::BTreeMap;

/// A file's parts of names and ours; the first replaces every occurrence by the second, one after the other.
type Renames = &'static [(&'static str, &'static str)];

/// Each arch's; files that have the first part are such files.
const FAMILIES: [(Arch, Renames); 3] = [
    (
        Arch::Llama,
        &[
            ("transformer.wte.", "model.embed_tokens."),
            ("transformer.h.", "model.layers."),
            ("transformer.ln_f.", "model.norm."),
            (".attn.attention.out_proj.", ".self_attn.o_proj."),
            (".attn.attention.", ".self_attn."),
            (".ln_1.", ".input_layernorm."),
            (".ln_2.", ".post_attention_layernorm."),
            (".mlp.c_fc_0.", ".mlp.gate_proj."),
            (".mlp.c_fc_1.", ".mlp.up_proj."),
            (".mlp.c_proj.", ".mlp.down_proj."),
        ],
    ),
    (
        Arch::Glm4Moe,
        &[
            ("model.word_embeddings.", "model.embed_tokens."),
            (".attention.dense.", ".self_attn.o_proj."),
            (".attention.query_layernorm.", ".self_attn.q_norm."),
            (".attention.key_layernorm.", ".self_attn.k_norm."),
            (".attention.", ".self_attn."),
            (".mlp.gate.expert_bias", ".mlp.gate.e_score_correction_bias"),
        ],
    ),
    (Arch::Lfm3, &[(".self_attn.gate_proj.", ".self_attn.g_proj.")]),
];
/// Rows of queries, keys and values as one tensor.
const FUSED: &str = "query_key_value.";

/// Gives the tensors of such files our names.
pub(super) fn rename(found: &mut BTreeMap<String, FileTensor>, spec: &Spec) {
    let Some((_, renames)) = FAMILIES.into_iter().find(|(arch, _)| *arch == spec.arch) else { return };
    if !found.keys().any(|name| name.contains(renames[0].0)) {
        return;
    }
    for (name, tensor) in std::mem::take(found) {
        let name = renames.iter().fold(name, |name, (theirs, ours)| name.replace(theirs, ours));
        let parts = [("q_proj.", spec.heads), ("k_proj.", spec.kv_heads), ("v_proj.", spec.kv_heads)];
        // With another number of rows, it is refused under its own name.
        if !name.contains(FUSED) || tensor.shape.first() != Some(&spec.qkv()) {
            found.insert(name, tensor);
            continue;
        }
        let row = tensor.bytes() / spec.qkv() as u64;
        let mut offset = tensor.offset;
        for (part, heads) in parts {
            let mut shape = tensor.shape.clone();
            shape[0] = heads * spec.head_dim;
            let bytes = shape[0] as u64 * row;
            found.insert(name.replace(FUSED, part), FileTensor { shape, offset, ..tensor.clone() });
            offset += bytes;
        }
    }
}
