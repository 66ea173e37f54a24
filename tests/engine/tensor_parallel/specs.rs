//! The models that tensor parallelism is tried with: one of each form that it cuts. Never runs one.
use crate::common::worlds::with_mamba;
use flatshard::device::ops::{DeltaShape, RotaryPairs, RouteRule, StateRule};
use flatshard::nn::{
    Activation, Arch, Branch, DeltaForm, DeltaNet, Experts, HeadSizes, Recurrence, Rotary, RowNorm, Scaling, Spec,
};

/// Neither vocabulary nor columns divide by 2, 3 or 4.
pub fn llama() -> Spec {
    Spec {
        arch: Arch::Llama,
        vocab: 97,
        dim: 20,
        layers: 2,
        heads: 4,
        kv_heads: 4,
        head_dim: 6,
        ff: 37,
        max_len: 300,
        ..Spec::default()
    }
}
/// Biases everywhere, also where partial products are summed over ranks.
pub fn qwen2() -> Spec {
    let (qkv_bias, out_bias, mlp_bias) = (true, true, true);
    let (window, windowed) = (5, vec![false, true]);
    Spec { arch: Arch::Qwen2, kv_heads: 2, qkv_bias, out_bias, mlp_bias, window, windowed, ..llama() }
}
/// Norms of heads; fewer key/value heads than four ranks.
pub fn qwen3() -> Spec {
    Spec { arch: Arch::Qwen3, kv_heads: 2, qk_norm: true, tied: true, ..llama() }
}
/// One key/value head for all ranks; norms of heads and after the branches, a logit softcap, a scaled embedding.
pub fn gemma3() -> Spec {
    Spec {
        arch: Arch::Gemma3,
        activation: Activation::GeGlu,
        kv_heads: 1,
        local_rope: Some(Rotary::new(30.0)),
        window: 4,
        windowed: vec![true, false],
        query_scalar: Some(9.0),
        logit_cap: 3.0,
        qk_norm: true,
        post_norms: true,
        norm_from_one: true,
        scaled_embedding: true,
        tied: true,
        ..llama()
    }
}

/// Heads of two sizes, one key/value head for all ranks where they are wider; the last layer uses an earlier one's keys
/// and values; norms of values, which are keys in one layer.
pub fn gemma4() -> Spec {
    let scaling = Scaling::Proportional { part: 0.5, factor: 1.0 };
    Spec {
        arch: Arch::Gemma4,
        layers: 3,
        kv_heads: 2,
        global_heads: Some(HeadSizes { kv_heads: 1, head_dim: 10 }),
        rope: Some(Rotary { theta: 50.0, scaling }),
        windowed: vec![true, false, true],
        query_scalar: None,
        score_scale: Some(0.3),
        norm_from_one: false,
        value_norm: true,
        keys_are_values: true,
        shared_kv: 1,
        wide_shared: true,
        layer_scalar: true,
        ..gemma3()
    }
}

/// Matrices of parts of different lengths and of uneven shares; a part of a head is rotated.
pub fn phi3() -> Spec {
    Spec {
        arch: Arch::Phi3,
        heads: 8,
        fused_qkv: true,
        fused_gate_up: true,
        rotary_dim: Some(4),
        window: 5,
        windowed: vec![true; 2],
        ..llama()
    }
}
/// Parallel branches with a factor each, one LayerNorm without biases, adjacent pairs; one layer is not rotated.
pub fn cohere2() -> Spec {
    Spec {
        arch: Arch::Cohere2,
        parallel: true,
        layer_norm: true,
        rotary_pairs: RotaryPairs::Adjacent,
        rotated: vec![true, false],
        residual_multiplier: 0.7,
        logit_scale: 0.3,
        embed_multiplier: 1.5,
        tied: true,
        ..llama()
    }
}
/// Norms of heads after their rotation, and after the branches only; GELU without a gate, with biases.
pub fn others() -> Spec {
    Spec {
        arch: Arch::Starcoder2,
        activation: Activation::Gelu,
        mlp_bias: true,
        qk_norm: true,
        norm_after_rope: true,
        pre_norms: false,
        post_norms: true,
        layer_norm: true,
        norm_bias: true,
        ..llama()
    }
}

/// A gated delta net with fused matrices, then attention with an output gate.
pub fn qwen3_next() -> Spec {
    let rule = StateRule::Delta { doubled: false };
    let shape = DeltaShape { key_heads: 4, value_heads: 8, key_dim: 5, value_dim: 6, rule };
    Spec {
        arch: Arch::Qwen3Next,
        norm_eps: 1e-2,
        qk_norm: true,
        norm_from_one: true,
        output_gate: true,
        rotary_dim: Some(4),
        recurrence: Some(Recurrence::Delta(DeltaNet { shape, taps: 4, form: DeltaForm::Fused })),
        recurrent: vec![true, false],
        ..llama()
    }
}
/// The same with matrices of other forms.
pub fn formed(arch: Arch, form: DeltaForm) -> Spec {
    let other = |mixer| match mixer {
        Recurrence::Delta(net) => Recurrence::Delta(DeltaNet { form, ..net }),
        other => other,
    };
    let recurrence = qwen3_next().recurrence.map(other);
    Spec { arch, recurrence, ..qwen3_next() }
}
pub fn qwen35() -> Spec {
    formed(Arch::Qwen35, DeltaForm::Joined)
}
pub fn olmo_hybrid() -> Spec {
    formed(Arch::OlmoHybrid, DeltaForm::Apart)
}
/// Mamba with four groups of heads, then attention without rotary positions.
pub fn granite_hybrid() -> Spec {
    with_mamba(llama(), [4, 8])
}
/// A gated short convolution, whose channels do not divide evenly by 4, then attention.
pub fn lfm2() -> Spec {
    Spec {
        arch: Arch::Lfm2,
        recurrence: Some(Recurrence::Conv { channels: llama().dim, taps: 3 }),
        recurrent: vec![true, false],
        ..llama()
    }
}
/// The same with norms after the branches, and a gate for each head. The convolution's outputs are small where a
/// document starts, which such norms undo: the epsilon is large.
pub fn lfm3() -> Spec {
    let gated = Spec { output_gate: true, gate_apart: true, gate_by_heads: true, ..lfm2() };
    Spec { arch: Arch::Lfm3, norm_eps: 1e-2, post_norms: true, qk_norm: true, ..gated }
}

/// Two experts more than a token uses, a shared one, and a dense block; no width divides by 2 or 4.
pub fn mixture() -> Spec {
    let experts =
        Experts { count: 5, top_k: 3, ff: 13, shared_ff: 11, normalize: true, dense: vec![0], ..Experts::default() };
    Spec { arch: Arch::Qwen2Moe, qkv_bias: true, experts: Some(experts), ..llama() }
}
/// Experts in parallel branches, which half of their sum is added from.
pub fn cohere2_moe() -> Spec {
    let experts = mixture().experts.map(|e| Experts { averaged: true, ..e });
    Spec { arch: Arch::Cohere2Moe, experts, ..cohere2() }
}
/// Experts next to a dense layer.
pub fn gemma4_experts() -> Spec {
    let experts = Experts { count: 5, top_k: 3, ff: 13, normalize: true, beside: true, ..Experts::default() };
    Spec { experts: Some(experts), ..gemma4() }
}
/// Sinks, windows, biases, and experts whose gate and up are one matrix.
pub fn gpt_oss() -> Spec {
    crate::common::gpt_oss(Spec { layers: 2, ..llama() })
}
/// With few experts, so that each gets rows.
pub fn few(spec: Spec) -> Spec {
    let experts = spec.experts.clone().map(|e| Experts { count: 3, ..e });
    Spec { experts, ..spec }
}
/// Experts whose inputs are weighted, and norms of heads without weights.
pub fn llama4() -> Spec {
    few(crate::common::llama4(Spec { layers: 2, ..llama() }))
}
/// Experts chosen one after the other, and a bias of the head.
pub fn phimoe() -> Spec {
    few(crate::common::phimoe(Spec { layers: 2, ..llama() }))
}
/// Latent attention, and experts chosen by scores.
pub fn deepseek() -> Spec {
    crate::common::deepseek(Spec { layers: 2, ..llama() })
}
/// Blocks of one branch each: Mamba, experts of two matrices, attention, two matrices.
pub fn nemotron_h() -> Spec {
    use Branch::{FeedForward, Mixer};
    let rule = RouteRule { sigmoid: true, biased: true, scale: 2.5, ..RouteRule::PLAIN };
    let experts = Experts { dense: vec![3], rule: Some(rule), ..mixture().experts.unwrap() };
    Spec {
        arch: Arch::NemotronH,
        layers: 4,
        activation: Activation::ReluSquared,
        fused_gate_up: false,
        rotated: vec![false; 4],
        recurrent: vec![true, false, false, false],
        single: vec![Mixer, FeedForward, Mixer, FeedForward],
        experts: Some(experts),
        ..granite_hybrid()
    }
}
/// No shared expert, weights as they are; norms of whole rows, so attention is replicated.
pub fn olmoe() -> Spec {
    let experts = mixture().experts.map(|e| Experts { shared_ff: 0, normalize: false, dense: Vec::new(), ..e });
    Spec { arch: Arch::Olmoe, row_norm: Some(RowNorm::All), experts, ..llama() }
}
