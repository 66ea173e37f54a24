//! Tensors of files that a model does not use: transformers loads none of them. Never reads one.
use super::naming::Naming;
use crate::nn::{Arch, Spec};

/// Whether the tensor is of a layer after the last, which predicts the token after the next (DeepSeek V3, GLM, ERNIE).
/// transformers loads none of them.
pub(super) fn predicts_later_tokens(name: &str, spec: &Spec) -> bool {
    let is_glm_ocr = spec.arch == Arch::Glm4 && name.starts_with("model.language_model.");
    let own = Naming::text_name(name);
    let layer = own.strip_prefix("model.layers.").and_then(|rest| rest.split('.').next()?.parse::<usize>().ok());
    let may_have = spec.experts.as_ref().is_some_and(|experts| experts.rule.is_some_and(|rule| rule.biased));
    // ERNIE's are not layers.
    (may_have || is_glm_ocr) && (layer.is_some_and(|layer| layer >= spec.layers) || name.starts_with("model.mtp_"))
}

/// Whether the tensor makes keys or values in a layer that uses those of another one. transformers loads none of them.
pub(super) fn is_unused_kv(name: &str, spec: &Spec) -> bool {
    let own = Naming::text_name(name);
    let Some((layer, rest)) = own.strip_prefix("model.layers.").and_then(|rest| rest.split_once(".self_attn.")) else {
        return false;
    };
    let takes = layer.parse().is_ok_and(|layer| layer < spec.layers && spec.kv_source(layer).is_some());
    takes && ["k_proj.", "v_proj.", "k_norm.", "v_norm."].iter().any(|module| rest.starts_with(module))
}

/// The layers of Qwen 3.5, Qwen3-Next and Nemotron 3 that predict several tokens, which transformers does not load.
pub(super) const PREDICTORS: &str = "mtp.";

/// Buffers that older versions of transformers saved with a model, although they follow from its config.
pub(super) fn is_buffer(name: &str) -> bool {
    const BUFFERS: [&str; 7] = [
        ".attn.bias",
        ".attn.masked_bias",
        ".attention.bias",
        ".attention.masked_bias",
        "rotary_emb.inv_freq",
        "rotary_emb.cos_cached",
        "rotary_emb.sin_cached",
    ];
    BUFFERS.iter().any(|b| name.ends_with(b))
}

#[cfg(test)]
mod tests {
    use super::{is_unused_kv, predicts_later_tokens};
    use crate::device::ops::RouteRule;
    use crate::nn::{Experts, Spec};

    #[test]
    fn keys_and_values_of_layers_that_use_others_are_unused() {
        let spec = Spec { layers: 4, shared_kv: 1, ..Spec::default() };
        assert!(is_unused_kv("model.language_model.layers.3.self_attn.k_proj.weight", &spec));
        assert!(is_unused_kv("model.layers.3.self_attn.v_norm.weight", &spec));
        assert!(!is_unused_kv("model.layers.3.self_attn.q_norm.weight", &spec));
        assert!(!is_unused_kv("model.layers.2.self_attn.k_proj.weight", &spec));
    }

    #[test]
    fn only_layers_after_the_last_of_a_model_that_may_have_some_predict_later_tokens() {
        let rule = RouteRule { sigmoid: true, biased: true, ..RouteRule::PLAIN };
        let with = |rule| Spec { layers: 47, experts: Some(Experts { rule, ..Experts::default() }), ..Spec::default() };
        let later = "model.layers.47.eh_proj.weight";
        assert!(predicts_later_tokens(later, &with(Some(rule))));
        assert!(!predicts_later_tokens("model.layers.46.eh_proj.weight", &with(Some(rule))));
        assert!(!predicts_later_tokens("lm_head.weight", &with(Some(rule))));
        assert!(predicts_later_tokens("model.mtp_emb_norm.0.weight", &with(Some(rule))));
        assert!(!predicts_later_tokens(later, &with(None)), "an extra layer of another model is an error");
    }
}
