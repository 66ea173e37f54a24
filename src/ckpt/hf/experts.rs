//! The keys of experts that are chosen by their probabilities: one row per family. Never reads other keys.
use super::granite;
use super::keys::{ConfigKeys, decimal, object};
use super::lists::{dense_layers, listed_dense, types};
use super::{cohere, gemma, lfm2, llama4, nemotron_h, phimoe, scored};
use crate::base::{Error, Result};
use crate::device::ops::GluClamp;
use crate::nn::{Arch, Experts, Spec};
use serde_json::{Value, json};

/// A key, and its default.
type Size = (&'static str, usize);

/// How a family's config describes experts.
struct ExpertKeys {
    /// The key of their number that a written config has; files may have either of two.
    count: Size,
    /// The default of `num_experts_per_tok`.
    top_k: usize,
    /// The width of an expert, if it is not `intermediate_size`.
    ff: Option<Size>,
    shared: SharedWidth,
    /// The default of `norm_topk_prob`, if the family has the key; the others normalize.
    normalize: Option<bool>,
    dense: DenseKeys,
    aux_coef: f64,
    /// Activations are clamped.
    clamped: bool,
}

/// The width of the expert that every token uses.
enum SharedWidth {
    None,
    Key(Size),
    AsOthers,
}

/// Which keys say what layers have no experts.
#[derive(PartialEq)]
enum DenseKeys {
    None,
    /// `decoder_sparse_step` and `mlp_only_layers`.
    Steps,
    /// `mlp_layer_types`
    Types,
}

const LOCAL: ExpertKeys = ExpertKeys {
    count: ("num_local_experts", 8),
    top_k: 2,
    ff: None,
    shared: SharedWidth::None,
    normalize: None,
    dense: DenseKeys::None,
    aux_coef: 0.001,
    clamped: false,
};
const QWEN: ExpertKeys = ExpertKeys { dense: DenseKeys::Steps, ..LOCAL };
const SHARED: &str = "shared_expert_intermediate_size";
const WIDTH: &str = "moe_intermediate_size";

impl ExpertKeys {
    fn of(arch: Arch) -> Option<ExpertKeys> {
        let all = |count| ("num_experts", count);
        Some(match arch {
            Arch::Mixtral | Arch::GraniteMoe => LOCAL,
            Arch::GraniteMoeShared | Arch::GraniteMoeSwa => {
                ExpertKeys { shared: SharedWidth::Key(("shared_intermediate_size", 0)), ..LOCAL }
            }
            Arch::GraniteHybrid => ExpertKeys { shared: SharedWidth::Key(("shared_intermediate_size", 1024)), ..LOCAL },
            Arch::GptOss => ExpertKeys { count: ("num_local_experts", 128), top_k: 4, clamped: true, ..LOCAL },
            Arch::Olmoe => ExpertKeys { count: all(64), top_k: 8, normalize: Some(false), aux_coef: 0.01, ..LOCAL },
            Arch::FlexOlmo => ExpertKeys { count: all(7), top_k: 5, normalize: Some(false), aux_coef: 0.01, ..LOCAL },
            Arch::HunyuanMoe => ExpertKeys { count: all(1), top_k: 1, shared: SharedWidth::AsOthers, ..LOCAL },
            Arch::Qwen2Moe => ExpertKeys {
                count: all(60),
                top_k: 4,
                ff: Some((WIDTH, 1408)),
                shared: SharedWidth::Key((SHARED, 5632)),
                normalize: Some(false),
                ..QWEN
            },
            Arch::Qwen3Moe => {
                ExpertKeys { count: all(128), top_k: 8, ff: Some((WIDTH, 768)), normalize: Some(false), ..QWEN }
            }
            Arch::Qwen3VlMoe => ExpertKeys { count: all(60), top_k: 4, ff: Some((WIDTH, 1408)), ..QWEN },
            Arch::Qwen3Next => ExpertKeys {
                count: all(512),
                top_k: 10,
                ff: Some((WIDTH, 512)),
                shared: SharedWidth::Key((SHARED, 512)),
                normalize: Some(true),
                ..QWEN
            },
            Arch::Qwen35Moe => ExpertKeys {
                count: all(256),
                top_k: 8,
                ff: Some((WIDTH, 512)),
                shared: SharedWidth::Key((SHARED, 512)),
                ..LOCAL
            },
            Arch::Mellum => ExpertKeys {
                count: all(64),
                top_k: 8,
                ff: Some((WIDTH, 896)),
                normalize: Some(true),
                dense: DenseKeys::Types,
                ..LOCAL
            },
            _ => return None,
        })
    }

    fn read(&self, keys: &ConfigKeys, layers: usize, ff: usize) -> Result<Experts> {
        let size = |key: &str| keys.size(key, "num_experts");
        let width = |(key, default): Size| Ok::<_, Error>(keys.size(key, "ff_hidden_dim")?.unwrap_or(default));
        // Both names of the number of experts are in use, whatever the family.
        let given = match (size("num_experts")?, size("num_local_experts")?) {
            (Some(a), Some(b)) if a != b => {
                return Err(Error::input(format!("num_experts is {a} and num_local_experts is {b}: remove one")));
            }
            (a, b) => a.or(b),
        };
        keys.only("router_jitter_noise", &[json!(0), json!(0.0)])?;
        let aux_coef = keys.number("router_aux_loss_coef")?.unwrap_or(self.aux_coef);
        if !(aux_coef.is_finite() && aux_coef >= 0.0) {
            return Err(Error::input(format!("router_aux_loss_coef is {aux_coef}; it must be 0 or more")));
        }
        let ff = self.ff.map_or(Ok(ff), width)?;
        let clamp = || {
            Ok::<_, Error>(GluClamp {
                alpha: keys.positive("swiglu_alpha")?.unwrap_or(1.702) as f32,
                limit: keys.positive("swiglu_limit")?.unwrap_or(7.0) as f32,
            })
        };
        let normalize = keys.flag("norm_topk_prob")?;
        Ok(Experts {
            count: given.unwrap_or(self.count.1),
            top_k: size("num_experts_per_tok")?.unwrap_or(self.top_k),
            ff,
            shared_ff: match self.shared {
                SharedWidth::None => 0,
                SharedWidth::Key(key) => width(key)?,
                SharedWidth::AsOthers => ff,
            },
            normalize: self.normalize.is_none_or(|default| normalize.unwrap_or(default)),
            dense: match self.dense {
                DenseKeys::None => Vec::new(),
                DenseKeys::Steps => dense_layers(keys, layers)?,
                DenseKeys::Types => listed_dense(keys, layers)?.unwrap_or_default(),
            },
            aux_coef,
            aux_loss: keys.flag("output_router_logits")?.unwrap_or(false),
            clamp: self.clamped.then(clamp).transpose()?,
            ..Experts::default()
        })
    }

    fn json(&self, e: &Experts, layers: usize) -> Value {
        let mut map = object(json!({
            "num_experts_per_tok": e.top_k,
            "router_aux_loss_coef": e.aux_coef,
            "output_router_logits": e.aux_loss,
        }));
        map.insert(self.count.0.into(), json!(e.count));
        if let Some(GluClamp { alpha, limit }) = e.clamp {
            map.insert("swiglu_alpha".into(), json!(decimal(alpha)));
            map.insert("swiglu_limit".into(), json!(decimal(limit)));
        }
        if self.normalize.is_some() {
            map.insert("norm_topk_prob".into(), json!(e.normalize));
        }
        if let Some((key, _)) = self.ff {
            map.insert(key.into(), json!(e.ff));
        }
        if let SharedWidth::Key((key, _)) = self.shared {
            map.insert(key.into(), json!(e.shared_ff));
        }
        match self.dense {
            DenseKeys::None => {}
            DenseKeys::Steps => map.extend(object(json!({"decoder_sparse_step": 1, "mlp_only_layers": e.dense}))),
            DenseKeys::Types => drop(map.insert("mlp_layer_types".into(), types(&e.dense, layers))),
        }
        Value::Object(map)
    }
}

/// The experts of the families that have them.
pub fn read(keys: &ConfigKeys, arch: Arch, layers: usize, ff: usize) -> Result<Option<Experts>> {
    if arch == Arch::GraniteHybrid && granite::has_none(keys) {
        return Ok(None);
    }
    if let Some(of) = ExpertKeys::of(arch) {
        return of.read(keys, layers, ff).map(Some);
    }
    if let Some(of) = scored::ScoredExperts::of(arch) {
        return of.experts(keys, layers).map(Some);
    }
    match arch {
        Arch::Lfm2Moe => lfm2::experts(keys, layers).map(Some),
        Arch::Cohere2Moe => cohere::experts(keys, layers).map(Some),
        Arch::Llama4 => llama4::experts(keys, layers).map(Some),
        Arch::PhiMoe => phimoe::experts(keys, ff).map(Some),
        Arch::NemotronH => nemotron_h::experts(keys),
        Arch::Gemma4 => gemma::experts(keys),
        _ => scored::biased(keys, arch, layers, ff),
    }
}

/// The keys of a model's experts.
pub fn json(spec: &Spec) -> Option<Value> {
    let experts = spec.experts.as_ref()?;
    match (ExpertKeys::of(spec.arch), &experts.rule) {
        _ if spec.arch == Arch::Llama4 => Some(llama4::experts_json(spec, experts)),
        (None, Some(rule)) if spec.arch == Arch::PhiMoe => Some(phimoe::experts_json(experts, rule)),
        (Some(of), _) => Some(of.json(experts, spec.layers)),
        (None, Some(rule)) if spec.arch == Arch::NemotronH => Some(nemotron_h::experts_json(experts, rule)),
        (None, Some(rule)) if spec.arch == Arch::Cohere2Moe => Some(cohere::experts_json(spec, experts, rule)),
        (None, Some(rule)) if spec.arch == Arch::Lfm2Moe => Some(lfm2::experts_json(experts, rule)),
        _ => scored::experts_json(spec),
    }
}
