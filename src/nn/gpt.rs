//! The GPT-2 family as data, under the names of `GPT2LMHeadModel` (Hugging Face): a checkpoint needs no conversion.
use super::attention::{AttentionBranch, Turn};
use super::block::Block;
use super::layout::{Init, Layout};
use super::linear::Linear;
use super::mlp::MlpBranch;
use super::norm::Norm;
use super::root::{Root, Words};
use super::spec::{Activation, NORMAL, ONES, Spec, ZEROS};
use crate::device::Attention;

pub fn root(spec: &Spec) -> (Layout, Root) {
    let &Spec { vocab, dim, max_len, .. } = spec;
    let mut layout = Layout::default();
    let tokens = layout.push("transformer.wte.weight", &[vocab, dim], true, NORMAL);
    let positions = Some((layout.push("transformer.wpe.weight", &[max_len, dim], true, NORMAL), max_len));
    let norm = norm(&mut layout, "transformer.ln_f".into(), spec);
    let head = if spec.tied { tokens } else { layout.push("lm_head.weight", &[vocab, dim], true, NORMAL) };
    let [tokens, words] = [tokens, head].map(Words::all);
    let head = Linear::new(head, vocab, dim);
    (layout, Root { tokens, positions, embed_scale: 1.0, norm, head, words, vocab, logit_cap: 0.0 })
}

pub fn block(spec: &Spec, i: usize) -> (Layout, Block) {
    let &Spec { dim, ff, heads, kv_heads, head_dim, .. } = spec;
    let name = |part: &str| format!("transformer.h.{i}.{part}");
    let mut layout = Layout::default();
    let attention = AttentionBranch {
        norm: norm(&mut layout, name("ln_1"), spec),
        qkv: vec![linear(&mut layout, name("attn.c_attn"), dim, 3 * dim, NORMAL)],
        bias: None,
        turn: Turn::None,
        cut: false,
        table: 0,
        shape: Attention {
            heads,
            kv_heads,
            head_dim,
            scale: (head_dim as f32).sqrt().recip(),
            window: 0,
            softcap: 0.0,
        },
        out: linear(&mut layout, name("attn.c_proj"), dim, dim, spec.residual_init()),
        post: None,
    };
    let mlp = MlpBranch {
        norm: norm(&mut layout, name("ln_2"), spec),
        cut: false,
        activation: Activation::Gelu,
        gate: None,
        up: linear(&mut layout, name("mlp.c_fc"), dim, ff, NORMAL),
        down: linear(&mut layout, name("mlp.c_proj"), ff, dim, spec.residual_init()),
        post: None,
    };
    (layout, Block { attention, mlp })
}

fn norm(layout: &mut Layout, name: String, spec: &Spec) -> Norm {
    let w = layout.push(format!("{name}.weight"), &[spec.dim], false, ONES);
    let b = layout.push(format!("{name}.bias"), &[spec.dim], false, ZEROS);
    Norm::Layer { w, b, eps: spec.norm_eps }
}

fn linear(layout: &mut Layout, name: String, inputs: usize, outputs: usize, init: Init) -> Linear {
    let weight = layout.push(format!("{name}.weight"), &[inputs, outputs], true, init);
    let bias = layout.push(format!("{name}.bias"), &[outputs], false, ZEROS);
    Linear::conv1d(weight, bias, inputs, outputs)
}
