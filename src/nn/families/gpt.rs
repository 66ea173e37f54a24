//! The GPT-2 family as data, with the tensor names of Hugging Face's `GPT2LMHeadModel`, so checkpoints need no
//! conversion.
use crate::device::ops::AttentionShape;
use crate::nn::attention::{AttentionBranch, HeadTransform, QkvOrder};
use crate::nn::block::{DecoderBlock, FeedForward, Mixer};
use crate::nn::cache::cached_before;
use crate::nn::context::TurnTable;
use crate::nn::layout::{Init, Layout};
use crate::nn::linear::Linear;
use crate::nn::mlp::MlpBranch;
use crate::nn::norm::Norm;
use crate::nn::root::{LearnedPositions, Root, VocabRows};
use crate::nn::shared_kv::KvSharing;
use crate::nn::spec::Spec;

pub fn root(spec: &Spec) -> (Layout, Root) {
    let &Spec { vocab, dim, max_len, .. } = spec;
    let mut layout = Layout::default();
    let tokens = layout.push("transformer.wte.weight", &[vocab, dim], true, Init::NORMAL);
    let segment = layout.push("transformer.wpe.weight", &[max_len, dim], true, Init::NORMAL);
    let positions = Some(LearnedPositions { segment, rows: max_len, first: 0 });
    let norm = norm(&mut layout, "transformer.ln_f".into(), spec);
    let head = match (spec.score, spec.tied) {
        (true, _) => layout.push("score.weight", &[1, dim], true, Init::NORMAL),
        (_, true) => tokens,
        _ => layout.push("lm_head.weight", &[vocab, dim], true, Init::NORMAL),
    };
    let [tokens, words] = [tokens, head].map(VocabRows::all);
    let (head, score) = (Linear::new(head, spec.outputs(), dim), spec.score);
    (
        layout,
        Root {
            tokens,
            per_layer: None,
            positions,
            embed_scale: 1.0,
            embed_norm: None,
            norm,
            head,
            words,
            vocab,
            score,
            logit_scale: 1.0,
            logit_cap: 0.0,
        },
    )
}

pub fn block(spec: &Spec, i: usize) -> (Layout, DecoderBlock) {
    let &Spec { dim, ff, heads, kv_heads, head_dim, .. } = spec;
    let name = |part: &str| format!("transformer.h.{i}.{part}");
    let mut layout = Layout::default();
    let attention = AttentionBranch {
        norm: norm(&mut layout, name("ln_1"), spec),
        qkv: vec![linear(&mut layout, name("attn.c_attn"), dim, 3 * dim, Init::NORMAL)],
        bias: None,
        order: QkvOrder::Same,
        output_gate: None,
        gate: None,
        transform: HeadTransform::None,
        cut: false,
        turns: TurnTable::None,
        growth: None,
        parallel: false,
        shape: AttentionShape {
            heads,
            kv_heads,
            head_dim,
            scale: (head_dim as f32).sqrt().recip(),
            window: 0,
            softcap: 0.0,
        },
        sharing: KvSharing::Own,
        cached_before: cached_before(spec, i),
        latent: None,
        sinks: None,
        out: linear(&mut layout, name("attn.c_proj"), dim, dim, Init::residual(spec.layers)),
        post: None,
    };
    let mlp = MlpBranch {
        norm: norm(&mut layout, name("ln_2"), spec),
        cut: false,
        activation: spec.activation,
        gate: None,
        gate_factor: 1.0,
        up: linear(&mut layout, name("mlp.c_fc"), dim, ff, Init::NORMAL),
        down: linear(&mut layout, name("mlp.c_proj"), ff, dim, Init::residual(spec.layers)),
        post: None,
        summed: false,
        curve: None,
    };
    let (mixer, mlp) = (Mixer::Attention(attention), FeedForward::Dense(mlp));
    (layout, DecoderBlock { mixer, mlp, per_layer: None, scalar: None, parallel: false, mlp_factor: 1.0 })
}

fn norm(layout: &mut Layout, name: String, spec: &Spec) -> Norm {
    let w = layout.push(format!("{name}.weight"), &[spec.dim], false, Init::ONES);
    let b = layout.push(format!("{name}.bias"), &[spec.dim], false, Init::ZEROS);
    Norm::Layer { w, b: Some(b), eps: spec.norm_eps, from_one: false }
}

fn linear(layout: &mut Layout, name: String, inputs: usize, outputs: usize, init: Init) -> Linear {
    let weight = layout.push(format!("{name}.weight"), &[inputs, outputs], true, init);
    let bias = layout.push(format!("{name}.bias"), &[outputs], false, Init::ZEROS);
    Linear::conv1d(weight, bias, inputs, outputs)
}
