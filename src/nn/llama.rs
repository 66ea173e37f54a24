//! The Llama family as data, under the names of `LlamaForCausalLM` (Hugging Face): a checkpoint needs no conversion.
use super::attention::AttentionBranch;
use super::block::Block;
use super::layout::Layout;
use super::linear::Linear;
use super::mlp::MlpBranch;
use super::norm::Norm;
use super::root::Root;
use super::spec::{NORMAL, ONES, Spec};
use crate::device::{Attention, RmsNorm, Rope};

pub fn root(spec: &Spec) -> (Layout, Root) {
    let &Spec { vocab, dim, norm_eps: eps, .. } = spec;
    let mut layout = Layout::default();
    let tokens = layout.push("model.embed_tokens.weight", &[vocab, dim], true, NORMAL);
    let norm = RmsNorm { eps, offset: 0.0 };
    let norm = Norm::Rms { w: layout.push("model.norm.weight", &[dim], false, ONES), norm };
    let head = if spec.tied { tokens } else { layout.push("lm_head.weight", &[vocab, dim], true, NORMAL) };
    let root = Root { tokens, positions: None, norm, head: Linear::new(head, vocab, dim), vocab };
    (layout, root)
}

pub fn block(spec: &Spec, i: usize) -> (Layout, Block) {
    let &Spec { dim, ff, heads, kv_heads, head_dim, norm_eps: eps, .. } = spec;
    let (row, q, kv) = (spec.qkv(), heads * head_dim, kv_heads * head_dim);
    let mut layout = Layout::default();
    let norm = RmsNorm { eps, offset: 0.0 };
    let mut push = |name: &str, shape: &[usize], init| {
        layout.push(format!("model.layers.{i}.{name}.weight"), shape, shape.len() > 1, init)
    };
    let attention = AttentionBranch {
        norm: Norm::Rms { w: push("input_layernorm", &[dim], ONES), norm },
        qkv: vec![
            Linear::new(push("self_attn.q_proj", &[q, dim], NORMAL), q, dim).within(row, 0),
            Linear::new(push("self_attn.k_proj", &[kv, dim], NORMAL), kv, dim).within(row, q),
            Linear::new(push("self_attn.v_proj", &[kv, dim], NORMAL), kv, dim).within(row, q + kv),
        ],
        rope: Some(Rope { heads: heads + kv_heads, head_dim, row }),
        shape: Attention {
            heads,
            kv_heads,
            head_dim,
            scale: (head_dim as f32).sqrt().recip(),
            window: 0,
            softcap: 0.0,
        },
        out: Linear::new(push("self_attn.o_proj", &[dim, q], spec.residual_init()), dim, q),
    };
    let mlp = MlpBranch {
        norm: Norm::Rms { w: push("post_attention_layernorm", &[dim], ONES), norm },
        gate: Some(Linear::new(push("mlp.gate_proj", &[ff, dim], NORMAL), ff, dim)),
        up: Linear::new(push("mlp.up_proj", &[ff, dim], NORMAL), ff, dim),
        down: Linear::new(push("mlp.down_proj", &[dim, ff], spec.residual_init()), dim, ff),
    };
    (layout, Block { attention, mlp })
}

/// (max_len, head_dim): for each position head_dim/2 cosines, then as many sines, of position * theta^(-2i / head_dim)
/// (Su et al. 2021). Computed in f64, so that far positions keep their digits.
pub fn rotations(spec: &Spec) -> Vec<f32> {
    let half = spec.head_dim / 2;
    let angle =
        |position: usize, i: usize| position as f64 * spec.rope_theta.powf(-2.0 * i as f64 / spec.head_dim as f64);
    (0..spec.max_len)
        .flat_map(|p| (0..2 * half).map(move |i| (p, i)))
        .map(|(p, i)| if i < half { angle(p, i).cos() } else { angle(p, i - half).sin() } as f32)
        .collect()
}
