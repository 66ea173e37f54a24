//! The keys of latent attention, and of experts that are chosen by scores: DeepSeek V2 and V3 and their descendants.
//! Never reads other keys.
use super::keys::{ConfigKeys, decimal, object};
use super::lists::{listed_dense, types};
use crate::base::{Error, Result};
use crate::device::ops::{RotaryPairs, RouteRule};
use crate::nn::{Arch, Experts, Latent, Scaling, Spec};
use serde_json::{Map, Value, json};

/// The defaults of latent attention, if the family has it.
fn latent_defaults(arch: Arch) -> Option<Latent> {
    match arch {
        Arch::DeepseekV2 | Arch::DeepseekV3 | Arch::Axk1 => {
            Some(Latent { q_rank: 1536, kv_rank: 512, nope: 128, rope: 64, value: 128 })
        }
        Arch::Youtu => latent_defaults(Arch::DeepseekV3),
        Arch::MiniCpm3 => Some(Latent { q_rank: 768, kv_rank: 256, nope: 64, rope: 32, value: 0 }),
        Arch::Glm4MoeLite => Some(Latent { q_rank: 768, kv_rank: 512, nope: 192, rope: 64, value: 256 }),
        _ => None,
    }
}

/// The sizes of latent attention, if the family has it.
pub fn latent(keys: &ConfigKeys, arch: Arch) -> Result<Option<Latent>> {
    let Some(of) = latent_defaults(arch) else { return Ok(None) };
    let width = |key: &str, default: usize| Ok::<_, Error>(keys.size(key, "head_dim")?.unwrap_or(default));
    let rope = width("qk_rope_head_dim", of.rope)?;
    // Another name of it, which these classes rotate by; and the width of queries and keys.
    if !matches!(arch, Arch::DeepseekV2 | Arch::MiniCpm3) {
        keys.only("head_dim", &[json!(rope)])?;
    }
    keys.known(["head_dim", "qk_head_dim"]);
    Ok(Some(Latent {
        q_rank: keys.or("q_lora_rank", of.q_rank, |keys, key| keys.size(key, "embed_dim"))?.unwrap_or(0),
        kv_rank: keys.size("kv_lora_rank", "embed_dim")?.unwrap_or(of.kv_rank),
        nope: width("qk_nope_head_dim", of.nope)?,
        rope,
        value: match keys.size("v_head_dim", "head_dim")? {
            None if of.value == 0 => {
                let (dim, heads) = (keys.whole("hidden_size")?, keys.whole("num_attention_heads")?);
                dim.unwrap_or(0) / heads.unwrap_or(1).max(1)
            }
            given => given.unwrap_or(of.value),
        },
    }))
}

/// What latent attention takes from keys of others.
pub fn special(keys: &ConfigKeys, spec: Spec) -> Result<Spec> {
    let Some(Latent { nope, rope, .. }) = spec.latent else { return Ok(spec) };
    let is_interleaved = match spec.arch {
        Arch::DeepseekV2 => true,
        Arch::MiniCpm3 => false,
        _ => keys.flag("rope_interleave")?.unwrap_or(true),
    };
    let rotary_pairs = if is_interleaved { RotaryPairs::Adjacent } else { RotaryPairs::Halves };
    let scale = ((nope + rope) as f64).sqrt().recip() * score_factor(keys)?;
    Ok(Spec { rotary_pairs, score_scale: Some(scale), ..spec })
}

/// The factor of scores in long contexts.
fn score_factor(keys: &ConfigKeys) -> Result<f64> {
    let scaling = keys.object("rope_scaling")?.or(keys.object("rope_parameters")?);
    let Some(scaling) = scaling else { return Ok(1.0) };
    let kind = scaling.text("rope_type")?.or(scaling.text("type")?).unwrap_or("default");
    let (mscale, factor) = (scaling.number("mscale_all_dim")?.unwrap_or(0.0), scaling.number("factor")?.unwrap_or(1.0));
    let all = if kind == "default" || mscale == 0.0 || factor <= 1.0 { 1.0 } else { 0.1 * mscale * factor.ln() + 1.0 };
    Ok(all * all)
}

/// The defaults of a family's experts.
pub struct ScoredExperts {
    arch: Arch,
    count: usize,
    top_k: usize,
    ff: usize,
    shared: usize,
    dense: usize,
    normalize: bool,
    groups: [usize; 2],
    scale: f64,
}

impl ScoredExperts {
    /// None of a family whose experts are chosen by their probabilities.
    pub fn of(arch: Arch) -> Option<ScoredExperts> {
        let v3 = ScoredExperts {
            arch,
            count: 256,
            top_k: 8,
            ff: 2048,
            shared: 1,
            dense: 3,
            normalize: true,
            groups: [8, 4],
            scale: 2.5,
        };
        let plain = |scored: ScoredExperts| ScoredExperts { groups: [1, 1], ..scored };
        Some(match arch {
            Arch::DeepseekV3 => v3,
            Arch::Axk1 => ScoredExperts { count: 192, dense: 1, ..v3 },
            // Its names of some keys are others, and it has none of groups.
            Arch::HyV3 => plain(ScoredExperts { count: 192, ff: 1536, dense: 1, scale: 2.826, ..v3 }),
            Arch::DeepseekV2 => plain(ScoredExperts {
                count: 64,
                top_k: 0,
                ff: 1407,
                shared: 2,
                dense: 0,
                normalize: false,
                scale: 1.0,
                ..v3
            }),
            Arch::Glm4MoeLite => plain(ScoredExperts { count: 64, top_k: 4, ff: 1536, dense: 1, scale: 1.8, ..v3 }),
            Arch::Glm4Moe => plain(ScoredExperts { count: 128, ff: 1408, dense: 1, scale: 1.0, ..v3 }),
            Arch::ExaoneMoe => plain(ScoredExperts { count: 64, ff: 1024, dense: 1, ..v3 }),
            Arch::SolarOpen => plain(ScoredExperts { count: 128, ff: 1280, dense: 0, scale: 1.0, ..v3 }),
            Arch::Dots1 => plain(ScoredExperts {
                count: 0,
                top_k: 0,
                ff: 1408,
                shared: 0,
                dense: 0,
                normalize: false,
                scale: 1.0,
                ..v3
            }),
            _ => return None,
        })
    }

    pub fn experts(&self, keys: &ConfigKeys, layers: usize) -> Result<Experts> {
        let size = |key: &str| keys.size(key, "num_experts");
        let count = size("n_routed_experts")?.or(size("num_local_experts")?).or(size("num_experts")?);
        let ff = keys.size("moe_intermediate_size", "ff_hidden_dim")?.unwrap_or(self.ff);
        let shared = keys.whole("n_shared_experts")?.map_or(self.shared, |n| n);
        // Layers that predict later tokens, of which transformers loads none; and a loss that it does not have.
        keys.known(["num_mtp_layers"]);
        keys.flag("output_router_logits")?;
        if self.arch == Arch::DeepseekV2 {
            keys.only("mlp_bias", &[json!(false)])?;
        }
        let normalize = keys.flag("norm_topk_prob")?.unwrap_or(self.normalize);
        let is_v2 = self.arch == Arch::DeepseekV2;
        let [groups, top_groups] = self.groups;
        let group = |key: &str, default: usize| Ok::<_, Error>(keys.whole(key)?.unwrap_or(default));
        let (groups, top_groups) = (group("n_group", groups)?, group("topk_group", top_groups)?);
        let grouped = match is_v2.then(|| keys.text("topk_method")).transpose()?.flatten() {
            Some("group_limited_greedy") => true,
            Some("greedy") | None => !is_v2,
            Some(_) => {
                let known = [json!("greedy"), json!("group_limited_greedy")];
                return Err(keys.unsupported("topk_method", &known));
            }
        };
        Ok(Experts {
            count: count.unwrap_or(self.count),
            top_k: size("num_experts_per_tok")?.unwrap_or(self.top_k),
            ff,
            shared_ff: shared * ff,
            // The class of V2 ignores the key.
            normalize: normalize && !is_v2,
            dense: self.dense_layers(keys, layers)?,
            rule: Some(RouteRule {
                sigmoid: !is_v2,
                biased: !is_v2,
                groups: if grouped { groups } else { 1 },
                top_groups: if grouped { top_groups } else { 1 },
                scale: keys.positive("routed_scaling_factor")?.unwrap_or(self.scale) as f32,
                mixer: None,
            }),
            ..Experts::default()
        })
    }

    /// Layers without experts: the first ones, or those that a list says.
    fn dense_layers(&self, keys: &ConfigKeys, layers: usize) -> Result<Vec<usize>> {
        if self.arch == Arch::SolarOpen {
            keys.known(["first_k_dense_replace"]);
            return Ok(Vec::new());
        }
        // The list takes precedence; a family has one or both.
        let listed = match self.arch {
            Arch::Glm4MoeLite | Arch::ExaoneMoe | Arch::Axk1 | Arch::HyV3 => listed_dense(keys, layers)?,
            _ => None,
        };
        let first = match self.arch {
            Arch::Glm4MoeLite | Arch::HyV3 => None,
            _ => keys.whole("first_k_dense_replace")?,
        };
        Ok(listed.unwrap_or_else(|| (0..first.unwrap_or(self.dense).min(layers)).collect()))
    }
}

/// Experts that a bias helps to choose, in other families than DeepSeek's.
pub fn biased(keys: &ConfigKeys, arch: Arch, layers: usize, ff: usize) -> Result<Option<Experts>> {
    let sigmoid = match arch {
        Arch::Ernie45Moe => false,
        Arch::MiniMaxM2 | Arch::Afmoe => true,
        _ => return Ok(None),
    };
    let size = |key: &str, default: usize| Ok::<_, Error>(keys.size(key, "num_experts")?.unwrap_or(default));
    // There is no load-balancing loss of them here.
    keys.only("output_router_logits", &[json!(false)])?;
    keys.known(["router_aux_loss_coef"]);
    let rule = RouteRule { sigmoid, biased: true, ..RouteRule::PLAIN };
    let experts = Experts { normalize: true, rule: Some(rule), ..Experts::default() };
    if arch == Arch::MiniMaxM2 {
        keys.only("router_jitter_noise", &[json!(0), json!(0.0)])?;
        let (count, top_k) = (size("num_local_experts", 256)?, size("num_experts_per_tok", 8)?);
        return Ok(Some(Experts { count, top_k, ff, ..experts }));
    }
    if arch == Arch::Afmoe {
        let ff = keys.size("moe_intermediate_size", "ff_hidden_dim")?.unwrap_or(1408);
        let scale = keys.positive("route_scale")?.unwrap_or(1.0) as f32;
        return Ok(Some(Experts {
            count: size("num_experts", 64)?,
            top_k: size("num_experts_per_tok", 6)?,
            ff,
            shared_ff: ff * keys.whole("num_shared_experts")?.unwrap_or(2),
            dense: (0..keys.whole("num_dense_layers")?.unwrap_or(1).min(layers)).collect(),
            rule: Some(RouteRule { scale, ..rule }),
            ..experts
        }));
    }
    keys.only("use_bias", &[json!(false)])?;
    // A bound of the sum of weights, which no sum of probabilities reaches.
    keys.number("moe_norm_min")?;
    let ff = keys.size("moe_intermediate_size", "ff_hidden_dim")?.unwrap_or(1536);
    let (first, step) = (keys.whole("moe_layer_start_index")?.unwrap_or(1), keys.whole("moe_layer_interval")?);
    let last = keys.number("moe_layer_end_index")?.filter(|last| *last >= 0.0).map_or(layers, |last| last as usize);
    let is_sparse = |i: usize| (i + 1).is_multiple_of(step.unwrap_or(1).max(1)) && (first..=last).contains(&i);
    Ok(Some(Experts {
        count: size("num_experts", 64)?,
        top_k: size("num_experts_per_tok", 6)?,
        ff,
        shared_ff: ff * keys.whole("n_shared_experts")?.unwrap_or(2),
        dense: (0..layers).filter(|&i| !is_sparse(i)).collect(),
        ..experts
    }))
}

/// The keys of experts; None of a family whose experts are chosen by their probabilities.
pub fn experts_json(spec: &Spec) -> Option<Value> {
    let (e, rule) = (spec.experts.as_ref()?, spec.experts.as_ref()?.rule?);
    match spec.arch {
        Arch::MiniMaxM2 => return Some(json!({"num_local_experts": e.count, "num_experts_per_tok": e.top_k})),
        Arch::Afmoe => {
            return Some(json!({
                "num_experts": e.count,
                "num_experts_per_tok": e.top_k,
                "num_shared_experts": e.shared_ff.checked_div(e.ff).unwrap_or(0),
                "moe_intermediate_size": e.ff,
                "num_dense_layers": e.dense.len(),
                "route_scale": decimal(rule.scale),
            }));
        }
        Arch::Ernie45Moe => {
            let sparse: Vec<usize> = (0..spec.layers).filter(|&i| spec.experts_of(i).is_some()).collect();
            let step = sparse.windows(2).map(|pair| pair[1] - pair[0]).min().unwrap_or(1);
            return Some(json!({
                "num_experts": e.count,
                "num_experts_per_tok": e.top_k,
                "n_shared_experts": e.shared_ff.checked_div(e.ff).unwrap_or(0),
                "moe_intermediate_size": e.ff,
                "moe_layer_start_index": sparse.first().copied().unwrap_or(spec.layers),
                "moe_layer_end_index": sparse.last().copied().unwrap_or(spec.layers),
                "moe_layer_interval": step,
                "use_bias": false,
            }));
        }
        _ => {}
    }
    let mut map = json!({
        "n_routed_experts": e.count,
        "num_experts_per_tok": e.top_k,
        "moe_intermediate_size": e.ff,
        "n_shared_experts": e.shared_ff.checked_div(e.ff).unwrap_or(0),
        "norm_topk_prob": e.normalize,
        "n_group": rule.groups,
        "topk_group": rule.top_groups,
        "routed_scaling_factor": decimal(rule.scale),
    });
    match spec.arch {
        Arch::Glm4MoeLite | Arch::ExaoneMoe | Arch::Axk1 | Arch::HyV3 => {
            map["mlp_layer_types"] = types(&e.dense, spec.layers)
        }
        Arch::SolarOpen => {}
        _ => map["first_k_dense_replace"] = json!(e.dense.len()),
    }
    match spec.arch {
        Arch::DeepseekV2 => {
            map["topk_method"] = json!(if rule.groups > 1 { "group_limited_greedy" } else { "greedy" });
        }
        Arch::HyV3 => {
            let own = |(key, _): &(String, Value)| !["norm_topk_prob", "n_group", "topk_group"].contains(&key.as_str());
            map = object(map).into_iter().filter(own).collect();
        }
        Arch::Dots1 => map["max_window_layers"] = json!(spec.layers),
        _ => {}
    }
    Some(map)
}

/// Adds the keys of latent attention, if there is one.
pub fn write_latent(spec: &Spec, map: &mut Map<String, Value>) {
    let Some(Latent { q_rank, kv_rank, nope, rope, value }) = spec.latent else { return };
    map.extend(object(json!({
        "head_dim": rope,
        "q_lora_rank": if q_rank > 0 { json!(q_rank) } else { Value::Null },
        "kv_lora_rank": kv_rank,
        "qk_nope_head_dim": nope,
        "qk_rope_head_dim": rope,
        "v_head_dim": value,
    })));
    if !matches!(spec.arch, Arch::DeepseekV2 | Arch::MiniCpm3) {
        map.insert("rope_interleave".into(), json!(spec.rotary_pairs == RotaryPairs::Adjacent));
    }
    // The key from which `score_factor` follows, to as many digits as a file has.
    let Some(Scaling::Yarn { factor, .. }) = spec.rope.as_ref().map(|rope| &rope.scaling) else { return };
    let scale = spec.score_scale.map_or(1.0, |scale| scale * ((nope + rope) as f64).sqrt());
    let mscale = ((scale.sqrt() - 1.0) / (0.1 * factor.ln()) * 1e9).round() / 1e9;
    if let Some(scaling) = map.get_mut("rope_scaling").filter(|_| mscale != 0.0 && *factor > 1.0) {
        scaling["mscale_all_dim"] = json!(mscale);
    }
}
