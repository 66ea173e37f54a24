//! Llama and its descendants as data, under the names of transformers' `...ForCausalLM`: a checkpoint needs no conversion.
//! Which parts there are is read off the [`Spec`], never off the family's name.
use super::attention::{AttentionBranch, RowBias, Turn};
use super::block::Block;
use super::layout::{Init, Layout};
use super::linear::Linear;
use super::mlp::MlpBranch;
use super::norm::Norm;
use super::root::Root;
use super::spec::{NORMAL, ONES, Spec, ZEROS};
use crate::device::{Attention, QkNormRope, RmsNorm, Rope};

pub fn root(spec: &Spec) -> (Layout, Root) {
    let &Spec { vocab, dim, .. } = spec;
    let mut names = Names { prefix: "model.".into(), layout: Layout::default(), spec };
    let tokens = names.weight("embed_tokens", &[vocab, dim], NORMAL);
    let norm = names.norm("norm", dim);
    let mut layout = names.layout;
    let head = if spec.tied { tokens } else { layout.push("lm_head.weight", &[vocab, dim], true, NORMAL) };
    let embed_scale = if spec.scaled_embedding { (dim as f64).sqrt() as f32 } else { 1.0 };
    let head = Linear::new(head, vocab, dim);
    (layout, Root { tokens, positions: None, embed_scale, norm, head, vocab, logit_cap: spec.logit_cap })
}

pub fn block(spec: &Spec, i: usize) -> (Layout, Block) {
    let &Spec { dim, ff, heads, kv_heads, head_dim, .. } = spec;
    let (row, q, kv) = (spec.qkv(), heads * head_dim, kv_heads * head_dim);
    let mut names = Names { prefix: format!("model.layers.{i}."), layout: Layout::default(), spec };

    let norm = names.norm("input_layernorm", dim);
    let (mut qkv, mut biases, mut column) = (Vec::new(), Vec::new(), 0);
    for (name, width) in [("self_attn.q_proj", q), ("self_attn.k_proj", kv), ("self_attn.v_proj", kv)] {
        qkv.push(Linear::new(names.weight(name, &[width, dim], NORMAL), width, dim).within(row, column));
        if spec.qkv_bias {
            biases.push(names.bias(name, width));
        }
        column += width;
    }
    let turn = if spec.qk_norm {
        let wq = names.scale("self_attn.q_norm", head_dim);
        let wk = names.scale("self_attn.k_norm", head_dim);
        Turn::NormRope { shape: QkNormRope { heads, kv_heads, head_dim, norm: names.rms() }, wq, wk }
    } else {
        Turn::Rope(Rope { heads: heads + kv_heads, head_dim, row })
    };
    let scale = spec.query_scalar.unwrap_or(head_dim as f64).sqrt().recip() as f32;
    let (window, softcap) = (spec.window_of(i), spec.score_cap);
    let attention = AttentionBranch {
        norm,
        qkv,
        bias: spec.qkv_bias.then_some(RowBias(biases)),
        turn,
        table: spec.turns_locally(i) as usize,
        shape: Attention { heads, kv_heads, head_dim, scale, window, softcap },
        out: names.linear("self_attn.o_proj", q, dim, spec.residual_init(), spec.out_bias),
        post: spec.post_norms.then(|| names.norm("post_attention_layernorm", dim)),
    };
    let mlp = MlpBranch {
        norm: names.norm(if spec.post_norms { "pre_feedforward_layernorm" } else { "post_attention_layernorm" }, dim),
        activation: spec.activation,
        gate: Some(names.linear("mlp.gate_proj", dim, ff, NORMAL, spec.mlp_bias)),
        up: names.linear("mlp.up_proj", dim, ff, NORMAL, spec.mlp_bias),
        down: names.linear("mlp.down_proj", ff, dim, spec.residual_init(), spec.mlp_bias),
        post: spec.post_norms.then(|| names.norm("post_feedforward_layernorm", dim)),
    };
    (names.layout, Block { attention, mlp })
}

/// A layout that grows by the names under `prefix`.
struct Names<'a> {
    prefix: String,
    layout: Layout,
    spec: &'a Spec,
}

impl Names<'_> {
    fn weight(&mut self, name: &str, shape: &[usize], init: Init) -> usize {
        self.layout.push(format!("{}{name}.weight", self.prefix), shape, shape.len() > 1, init)
    }
    fn bias(&mut self, name: &str, width: usize) -> usize {
        self.layout.push(format!("{}{name}.bias", self.prefix), &[width], false, ZEROS)
    }
    fn linear(&mut self, name: &str, inputs: usize, outputs: usize, init: Init, bias: bool) -> Linear {
        let linear = Linear::new(self.weight(name, &[outputs, inputs], init), outputs, inputs);
        if bias { linear.bias(self.bias(name, outputs)) } else { linear }
    }
    /// The weights of a norm: they start so that it multiplies by 1.
    fn scale(&mut self, name: &str, width: usize) -> usize {
        self.weight(name, &[width], if self.spec.norm_from_one { ZEROS } else { ONES })
    }
    fn rms(&self) -> RmsNorm {
        RmsNorm { eps: self.spec.norm_eps, offset: if self.spec.norm_from_one { 1.0 } else { 0.0 } }
    }
    fn norm(&mut self, name: &str, width: usize) -> Norm {
        Norm::Rms { w: self.scale(name, width), norm: self.rms() }
    }
}
