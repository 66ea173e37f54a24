//! Reads and writes `adapter_config.json`, the PEFT library's LoRA config. Never writes weights.
mod config;
mod low_rank;
mod stacked;
mod targets;
mod tensors;

pub use config::{AdapterConfig, FILE, read};
pub(super) use low_rank::LowRank;
pub use targets::targets;
pub(super) use tensors::{AdapterTensors, BASE_LAYER, Change};

use self::config::FusedExperts;
use super::gguf::links::origin;
use super::hf::decimal;
use super::layout::pretty;
use crate::base::{Error, Result, open};
use crate::nn::{ALL_LINEAR, Arch, Lora, Spec};
use serde_json::{Value, json};
use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

/// PEFT's name of a reward model's head.
const SCORE_MODULE: &str = "score";

/// The model that an adapter is of, as its config names it.
#[derive(Clone, Debug, PartialEq)]
pub struct AdapterBase {
    /// A path, or a name of the hub.
    pub name: String,
    /// The revision of a name of the hub.
    pub revision: Option<String>,
}

impl AdapterBase {
    /// The base in a directory, or of the file that it was made from. A relative path would be resolved against the
    /// directory that the adapter is loaded from.
    pub fn of_path(base: &Path) -> AdapterBase {
        let base = origin(&fs::canonicalize(base).unwrap_or(base.to_path_buf()));
        AdapterBase { name: base.display().to_string(), revision: None }
    }
}

/// The text of `adapter_config.json` of adapters of the model `base`. A reward model's head is stored whole. `tower`:
/// modules of the same names next to the text model have no adapters.
pub fn config(lora: &Lora, base: Option<&AdapterBase>, spec: &Spec, tower: bool) -> String {
    let score = spec.score;
    let targets: Value = match &lora.targets[..] {
        [one] if one == "all-linear" => json!(one),
        names => json!(names),
    };
    let mut config = json!({
        "peft_type": "LORA",
        "task_type": if score { "SEQ_CLS" } else { "CAUSAL_LM" },
        "base_model_name_or_path": base.map(|base| &base.name),
        "revision": base.and_then(|base| base.revision.as_ref()),
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "target_modules": targets,
        "lora_dropout": decimal(lora.dropout),
        "bias": "none",
        "fan_in_fan_out": false,
        "init_lora_weights": true,
        "inference_mode": true,
        "modules_to_save": score.then_some([SCORE_MODULE]),
        "use_rslora": false,
        "use_dora": false,
    });
    if let Some(experts) = FusedExperts::of(spec.arch) {
        FUSED.into_iter().zip(experts.keys(lora)).for_each(|(key, value)| config[key] = value);
    }
    let beside = beside_experts(lora, spec);
    if !beside.is_empty() {
        config[FUSED[0]] = json!(beside);
    }
    if tower {
        config["exclude_modules"] = json!(r"(?!model\.language_model\.).*");
    }
    pretty(&config)
}

/// Families whose experts transformers 5 holds like Qwen2-MoE's. For those PEFT 0.21 takes the names of the modules of
/// experts out of `target_modules`, and with them other modules of the same names.
const LIKE_QWEN2: [Arch; 16] = [
    Arch::Cohere2Moe,
    Arch::FlexOlmo,
    Arch::Afmoe,
    Arch::Qwen3Moe,
    Arch::Qwen3Next,
    Arch::Olmoe,
    Arch::DeepseekV2,
    Arch::DeepseekV3,
    Arch::Dots1,
    Arch::Glm4Moe,
    Arch::Glm4MoeLite,
    Arch::SolarOpen,
    Arch::Ernie45Moe,
    Arch::HunyuanMoe,
    Arch::ExaoneMoe,
    Arch::Mellum,
];

/// Weights of adapted shared experts and dense layers, which PEFT finds as parameters where it loses the modules.
fn beside_experts(lora: &Lora, spec: &Spec) -> BTreeSet<String> {
    let layouts = if LIKE_QWEN2.contains(&spec.arch) { spec.layouts() } else { Vec::new() };
    let segments = layouts.iter().filter(|layout| !layout.experts).flat_map(|layout| &layout.segments);
    let adapted = segments.filter_map(|segment| {
        let within = segment.name.strip_prefix("model.layers.")?.split_once('.')?.1;
        let module = within.strip_suffix(".weight")?.rsplit('.').next()?;
        let fused = ["gate_proj", "up_proj", "down_proj"].contains(&module);
        (fused && lora.targets.iter().any(|target| target == module || target == ALL_LINEAR))
            .then(|| within.to_string())
    });
    adapted.collect()
}

/// Keys of parameters that are not modules.
const FUSED: [&str; 3] = ["target_parameters", "rank_pattern", "alpha_pattern"];

/// The base model of the adapter in `dir`, as its config names it: a path, or a name of the hub with its revision.
pub fn base(dir: &Path) -> Option<String> {
    let config: Value = serde_json::from_slice(&open::read(&dir.join(FILE)).ok()?).ok()?;
    let name = config["base_model_name_or_path"].as_str()?;
    Some(match config["revision"].as_str() {
        Some(revision) if !Path::new(name).exists() && !name.contains('@') => format!("{name}@{revision}"),
        _ => name.to_owned(),
    })
}

/// An adapter can only be resumed with the same rank, alpha and modules.
pub fn same(dir: &Path, now: &Lora) -> Result<()> {
    let then = read(dir)?.lora;
    let sorted = |lora: &Lora| {
        let mut targets = lora.targets.clone();
        targets.sort();
        targets
    };
    match (then.rank, then.alpha, sorted(&then)) == (now.rank, now.alpha, sorted(now)) {
        true => Ok(()),
        false => Err(Error::input(format!(
            "{}: rank {}, alpha {} and target_modules {:?} differ from this run's {}, {} and {:?}: use the LoRA \
             settings it was saved with",
            dir.join(FILE).display(),
            then.rank,
            then.alpha,
            then.targets,
            now.rank,
            now.alpha,
            now.targets
        ))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::nn::Experts;

    /// PEFT would lose the adapters of dense blocks and of shared experts.
    #[test]
    fn modules_beside_experts_are_named_as_parameters() {
        let lora = |targets: &[&str]| {
            let targets = targets.iter().map(|target| target.to_string()).collect();
            Lora { rank: 2, alpha: 4.0, dropout: 0.0, targets }
        };
        let experts = Experts { count: 4, top_k: 2, ff: 16, normalize: true, dense: vec![0], ..Experts::default() };
        let spec = Spec { arch: Arch::Qwen3Moe, layers: 2, experts: Some(experts), ..Spec::default() };
        let named = |lora: &Lora, spec: &Spec| {
            let config: Value = serde_json::from_str(&config(lora, None, spec, false)).unwrap();
            config.get("target_parameters").cloned().unwrap_or_default()
        };
        let mlp = json!(["mlp.down_proj.weight", "mlp.gate_proj.weight", "mlp.up_proj.weight"]);
        assert_eq!(named(&lora(&["q_proj", "gate_proj", "up_proj", "down_proj"]), &spec), mlp);
        assert_eq!(named(&lora(&["q_proj"]), &spec), Value::Null);
        let dense = Spec { arch: Arch::Qwen3, layers: 2, ..Spec::default() };
        assert_eq!(named(&lora(&["gate_proj", "up_proj", "down_proj"]), &dense), Value::Null);
    }

    /// PEFT would lose the adapters of experts of these families, which its table lacks.
    #[test]
    fn experts_that_peft_does_not_know_are_named_as_parameters() {
        let dir = tempfile::tempdir().unwrap();
        for (arch, targets, parameters) in [
            (Arch::Qwen2Moe, ["up_proj", "gate_proj", "down_proj"], "mlp.experts"),
            (Arch::HyV3, ["up_proj", "gate_proj", "down_proj"], "mlp.experts"),
            (Arch::PhiMoe, ["w1", "w3", "w2"], "mlp.experts"),
            (Arch::Lfm2Moe, ["w1", "w3", "w2"], "feed_forward.experts"),
        ] {
            let targets = targets.map(String::from).to_vec();
            let lora = Lora { rank: 2, alpha: 4.0, dropout: 0.0, targets };
            let experts = Experts { count: 4, top_k: 2, ff: 16, dense: vec![0], ..Experts::default() };
            let spec = Spec { arch, layers: 2, experts: Some(experts), ..Spec::default() };
            let text = config(&lora, None, &spec, false);
            let found: Value = serde_json::from_str(&text).unwrap();
            let both = ["gate_up_proj", "down_proj"].map(|name| format!("{parameters}.{name}"));
            assert_eq!(found["target_parameters"], json!(both), "{arch:?}");
            assert_eq!(found["rank_pattern"], json!({r".*\.gate_up_proj": 4}), "{arch:?}");
            // Its tensors are still those of modules.
            fs::write(dir.path().join(FILE), text).unwrap();
            assert!(!format!("{:?}", read(dir.path()).unwrap()).contains("target_parameters"), "{arch:?}");
        }
    }
}
