//! Every shipped kernel in every variant. Never launches anything.
use super::variant::{Variant, variant};
use super::{attention, attention_hopper, experts, probes};

/// A source's variants for each element type: `name_f32`, `name_bf16`, `name_f16`.
macro_rules! floats {
    ($name:literal, $file:literal $(, $key:literal = $value:literal)*) => {
        &[
            Variant { name: concat!($name, "_f32"), file: $file, given: &[("DTYPE", 0) $(, ($key, $value))*] },
            Variant { name: concat!($name, "_bf16"), file: $file, given: &[("DTYPE", 1) $(, ($key, $value))*] },
            Variant { name: concat!($name, "_f16"), file: $file, given: &[("DTYPE", 2) $(, ($key, $value))*] },
        ]
    };
}
/// Variants by family; attention and experts have their own lists.
const VARIANTS: &[&[Variant]] = &[
    floats!("add", "add.ptx"),
    &[
        variant("add_bf16_f32", "add.ptx", &[("DTYPE", 1), ("TO", 0)]),
        variant("add_f16_f32", "add.ptx", &[("DTYPE", 2), ("TO", 0)]),
        variant("adamw", "adamw.ptx", &[("OUT", 0)]),
        variant("adamw_bf16", "adamw.ptx", &[("OUT", 1)]),
        variant("adamw_f16", "adamw.ptx", &[("OUT", 3)]),
        variant("adamw_f32", "adamw.ptx", &[("OUT", 2)]),
        variant("adamw_moments", "adamw.ptx", &[("MOMENTS", 1), ("OUT", 0)]),
        variant("adamw_moments_bf16", "adamw.ptx", &[("MOMENTS", 1), ("OUT", 1)]),
        variant("adamw_moments_f16", "adamw.ptx", &[("MOMENTS", 1), ("OUT", 3)]),
        variant("adamw_moments_f32", "adamw.ptx", &[("MOMENTS", 1), ("OUT", 2)]),
        variant("adamw_master", "adamw.ptx", &[("MASTER", 1), ("OUT", 0)]),
        variant("adamw_master_bf16", "adamw.ptx", &[("MASTER", 1), ("OUT", 1)]),
        variant("adamw_both", "adamw.ptx", &[("MOMENTS", 1), ("MASTER", 1), ("OUT", 0)]),
        variant("adamw_both_bf16", "adamw.ptx", &[("MOMENTS", 1), ("MASTER", 1), ("OUT", 1)]),
        variant("adamw_blocks", "adamw_blocks.ptx", &[("OUT", 0)]),
        variant("adamw_blocks_bf16", "adamw_blocks.ptx", &[("OUT", 1)]),
        variant("adamw_blocks_f16", "adamw_blocks.ptx", &[("OUT", 3)]),
        variant("adamw_blocks_f32", "adamw_blocks.ptx", &[("OUT", 2)]),
        variant("adamw_blocks_master", "adamw_blocks.ptx", &[("MASTER", 1), ("OUT", 0)]),
        variant("adamw_blocks_master_bf16", "adamw_blocks.ptx", &[("MASTER", 1), ("OUT", 1)]),
        variant("cast_f32_bf16", "cast.ptx", &[("FROM", 0), ("TO", 1)]),
        variant("cast_f32_f16", "cast.ptx", &[("FROM", 0), ("TO", 2)]),
        variant("cast_bf16_f32", "cast.ptx", &[("FROM", 1), ("TO", 0)]),
        variant("cast_f16_f32", "cast.ptx", &[("FROM", 2), ("TO", 0)]),
        variant("check", "check.ptx", &[]),
        variant("clip_scale", "clip_scale.ptx", &[]),
        variant("dequantize_e4m3", "dequantize.ptx", &[("FORMAT", 0)]),
        variant("dequantize_e5m2", "dequantize.ptx", &[("FORMAT", 1)]),
        variant("embed_sort", "embed_sort.ptx", &[]),
        variant("encode_bf16", "encode.ptx", &[("DTYPE", 1)]),
        variant("encode_f32", "encode.ptx", &[("DTYPE", 0)]),
        variant("polynomial_bf16", "polynomial.ptx", &[("DTYPE", 1)]),
        variant("polynomial_f32", "polynomial.ptx", &[("DTYPE", 0)]),
        variant("qk_norm_rope_f32_512", "qk_norm_rope.ptx", &[("DTYPE", 0), ("V", 8)]),
        variant("qk_norm_rope_backward_f32_512", "qk_norm_rope_backward.ptx", &[("DTYPE", 0), ("V", 8)]),
        variant("quantize_e4m3", "quantize.ptx", &[("FORMAT", 0), ("TALL", 1)]),
        variant("quantize_e5m2", "quantize.ptx", &[("FORMAT", 1), ("TALL", 1)]),
        variant("quantize_weight", "quantize.ptx", &[("FORMAT", 0), ("TALL", 128)]),
        variant("raise_scales_bf16", "raise_scales.ptx", &[("DTYPE", 1)]),
        variant("raise_scales_f32", "raise_scales.ptx", &[("DTYPE", 0)]),
        variant("sgd", "sgd.ptx", &[("MOMENTUM", 0), ("OUT", 0)]),
        variant("sgd_bf16", "sgd.ptx", &[("MOMENTUM", 0), ("OUT", 1)]),
        variant("sgd_f16", "sgd.ptx", &[("MOMENTUM", 0), ("OUT", 3)]),
        variant("sgd_f32", "sgd.ptx", &[("MOMENTUM", 0), ("OUT", 2)]),
        variant("sgd_momentum", "sgd.ptx", &[("MOMENTUM", 1), ("OUT", 0)]),
        variant("sgd_momentum_bf16", "sgd.ptx", &[("MOMENTUM", 1), ("OUT", 1)]),
        variant("sgd_momentum_f16", "sgd.ptx", &[("MOMENTUM", 1), ("OUT", 3)]),
        variant("sgd_momentum_f32", "sgd.ptx", &[("MOMENTUM", 1), ("OUT", 2)]),
        variant("sum_losses", "sum_losses.ptx", &[]),
        variant("sum_ranks_bf16_f32", "sum_ranks.ptx", &[("DTYPE", 1), ("TO", 0)]),
        variant("sum_ranks_f16_f32", "sum_ranks.ptx", &[("DTYPE", 2), ("TO", 0)]),
        variant("sum_ranks_f64", "sum_ranks.ptx", &[("DTYPE", 3)]),
        variant("sum_rows", "sum_rows.ptx", &[]),
        variant("sum_squares", "sum_squares.ptx", &[]),
        variant("transpose_codes", "transpose_codes.ptx", &[]),
    ],
    floats!("bias", "bias.ptx"),
    floats!("bias_backward", "bias_backward.ptx"),
    floats!("clamp", "clamp.ptx"),
    floats!("clamp_backward", "clamp.ptx", "BACKWARD" = 1),
    floats!("clamped_glu", "clamped_glu.ptx", "BACKWARD" = 0),
    floats!("clamped_glu_backward", "clamped_glu.ptx", "BACKWARD" = 1),
    floats!("cross_entropy", "cross_entropy.ptx"),
    floats!("cross_entropy_cap", "cross_entropy.ptx", "CAP" = 1),
    floats!("cross_entropy_finish", "cross_entropy_finish.ptx"),
    floats!("cross_entropy_finish_cap", "cross_entropy_finish.ptx", "CAP" = 1),
    floats!("cross_entropy_part", "cross_entropy_part.ptx"),
    floats!("cross_entropy_part_cap", "cross_entropy_part.ptx", "CAP" = 1),
    floats!("delta_blocks", "delta_blocks.ptx"),
    floats!("delta_rule", "delta_rule.ptx"),
    floats!("delta_rule_wide", "delta_rule.ptx", "WIDE" = 1),
    floats!("distill_finish", "distill_finish.ptx"),
    floats!("distill_part", "distill_part.ptx"),
    floats!("dropout", "dropout.ptx"),
    floats!("dropout_rows", "dropout_rows.ptx"),
    floats!("embed", "embed.ptx"),
    floats!("embed_backward", "embed_backward.ptx"),
    floats!("expand", "expand.ptx"),
    floats!("geglu", "glu.ptx", "GELU" = 1),
    floats!("geglu_backward", "glu_backward.ptx", "GELU" = 1),
    floats!("gelu", "gelu.ptx"),
    floats!("gelu_backward", "gelu_backward.ptx"),
    floats!("gelu_exact", "gelu.ptx", "KIND" = 2),
    floats!("gelu_exact_backward", "gelu_backward.ptx", "KIND" = 2),
    floats!("layernorm", "norm.ptx", "LAYER" = 1),
    floats!("layernorm_plain", "norm.ptx", "LAYER" = 1, "BIASED" = 0),
    floats!("layernorm_backward", "norm_backward.ptx", "LAYER" = 1),
    floats!("layernorm_from_one", "norm.ptx", "LAYER" = 1, "FROM_ONE" = 1),
    floats!("layernorm_from_one_backward", "norm_backward.ptx", "LAYER" = 1, "FROM_ONE" = 1),
    floats!("mamba_blocks", "delta_blocks.ptx", "DECAY" = 1),
    floats!("mamba_rule", "delta_rule.ptx", "DECAY" = 1),
    floats!("mamba_rule_wide", "delta_rule.ptx", "DECAY" = 1, "WIDE" = 1),
    floats!("qk_norm_rope", "qk_norm_rope.ptx"),
    floats!("qk_norm_rope_backward", "qk_norm_rope_backward.ptx"),
    floats!("rmsnorm", "norm.ptx", "LAYER" = 0),
    floats!("rmsnorm_backward", "norm_backward.ptx", "LAYER" = 0),
    floats!("rope", "rope.ptx"),
    floats!("relu_squared", "gelu.ptx", "KIND" = 1),
    floats!("relu_squared_backward", "gelu_backward.ptx", "KIND" = 1),
    floats!("rope_adjacent", "rope.ptx", "ADJACENT" = 1),
    floats!("scale", "scale.ptx"),
    floats!("scale_by", "scale.ptx", "BY" = 1),
    floats!("short_conv", "short_conv.ptx"),
    floats!("short_conv_biased", "short_conv.ptx", "BIASED" = 1),
    floats!("short_conv_gated", "short_conv.ptx", "GATED" = 1),
    floats!("sigmoid_gate", "glu.ptx", "PLAIN" = 1),
    floats!("sigmoid_gate_backward", "glu_backward.ptx", "PLAIN" = 1),
    floats!("sink", "sink.ptx"),
    floats!("sum_ranks", "sum_ranks.ptx"),
    floats!("swiglu", "glu.ptx", "GELU" = 0),
    floats!("swiglu_backward", "glu_backward.ptx", "GELU" = 0),
    floats!("xielu", "xielu.ptx"),
    floats!("xielu_backward", "xielu.ptx", "KIND" = 1),
    floats!("xielu_grads", "xielu.ptx", "KIND" = 2),
];

/// The variants with a line in `tests/budget.txt`.
pub fn budgeted() -> impl Iterator<Item = &'static Variant> {
    VARIANTS.iter().chain(&experts::VARIANTS).copied().flatten()
}
/// All of them.
pub fn variants() -> impl Iterator<Item = &'static Variant> {
    let attention = attention::variants().chain(attention_hopper::variants());
    budgeted().chain(attention).chain(probes::VARIANTS)
}

impl Variant {
    pub fn by_name(name: &str) -> Option<&'static Variant> {
        variants().find(|v| v.name == name)
    }
}

#[cfg(test)]
mod tests {
    use super::super::variant::{entries, target};
    use super::*;

    #[test]
    fn every_variant_has_a_target_and_entry_points() {
        assert_eq!(target("// a\n.version 8.0\n.target sm_90a\n"), "sm_90a");
        assert_eq!(target(".target sm_80, texmode_independent"), "sm_80");
        for variant in variants() {
            let text = variant.expand().unwrap();
            let found: Vec<&str> = entries(&text).collect();
            assert!(!found.is_empty() && found.iter().all(|e| !e.is_empty()), "{}: {found:?}", variant.name);
            // Attention's kernels of tiles have variants with softcap, and no code for it without.
            let any = ["attention_plain.ptx", "attention_paged.ptx"].contains(&variant.file);
            let capped = variant.name.ends_with("_cap") || any;
            assert_eq!(text.contains("[p_softcap]"), capped, "{}", variant.name);
            assert!(text.contains(&format!(".target {}", target(&text))), "{}: {}", variant.name, target(&text));
        }
    }
}
