//! Reads and writes `adapter_config.json`, the PEFT library's LoRA config. Never reads weights.
use super::hf::decimal;
use super::layout::pretty;
use crate::base::{Error, Result, open};
use crate::nn::{Arch, Lora, Spec};
use serde_json::{Map, Value, json};
use std::path::Path;

pub const FILE: &str = "adapter_config.json";
/// PEFT's name of a reward model's head.
const SCORE_MODULE: &str = "score";
/// The file next to it, whose tensors have the model's names under [`ADAPTER_PREFIX`](super::layout::ADAPTER_PREFIX).
pub(super) const WEIGHTS: &str = "adapter_model.safetensors";

/// The text of `adapter_config.json`. `base` is the directory of the adapted model. A reward model's head is stored
/// whole.
pub fn config(lora: &Lora, base: Option<&Path>, spec: &Spec) -> String {
    let score = spec.score;
    let targets: Value = match &lora.targets[..] {
        [one] if one == "all-linear" => json!(one),
        names => json!(names),
    };
    let mut config = json!({
        "peft_type": "LORA",
        "task_type": if score { "SEQ_CLS" } else { "CAUSAL_LM" },
        "base_model_name_or_path": base,
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
    if spec.arch == Arch::Qwen2Moe {
        FUSED.into_iter().zip(fused(lora)).for_each(|(key, value)| config[key] = value);
    }
    pretty(&config)
}

/// Keys of parameters that are not modules.
const FUSED: [&str; 3] = ["target_parameters", "rank_pattern", "alpha_pattern"];

/// [`FUSED`] for experts of Qwen2-MoE. Transformers 5 holds those of a block as two parameters, and PEFT 0.21 derives
/// these keys from the targets for every family of that kind but Qwen2-MoE itself, whose experts would have no
/// adapters. PEFT with transformers 4, which has no such parameters, warns of them and ignores them.
fn fused(lora: &Lora) -> [Value; 3] {
    let has = |module: &str| lora.targets.iter().any(|target| target == module);
    let (gated, down) = (has("gate_proj") && has("up_proj"), has("down_proj"));
    let parameters = [(gated, "mlp.experts.gate_up_proj"), (down, "mlp.experts.down_proj")];
    let parameters: Vec<_> = parameters.into_iter().filter(|(there, _)| *there).map(|(_, name)| name).collect();
    // Two adapters become one, of both ranks.
    let both = |value: Value| if gated { json!({r".*\.gate_up_proj": value}) } else { json!({}) };
    [json!(parameters), both(json!(2 * lora.rank)), both(json!(2.0 * lora.alpha))]
}

/// The base model of the adapter in `dir`, as its config names it.
pub fn base(dir: &Path) -> Option<String> {
    let config: Value = serde_json::from_slice(&open::read(&dir.join(FILE)).ok()?).ok()?;
    config["base_model_name_or_path"].as_str().map(str::to_owned)
}

/// Reads `dir/adapter_config.json`. The error for an unsupported key names it. `score`: of a reward model, whose head
/// is stored whole.
pub fn read(dir: &Path, score: bool) -> Result<Lora> {
    let path = dir.join(FILE);
    let text = open::read(&path)
        .map_err(|e| Error::in_file(&path, format!("{e}: an adapter directory must have this file")))?;
    let config: Map<String, Value> =
        serde_json::from_slice(&text).map_err(|e| Error::in_file(&path, format!("not JSON: {e}")))?;
    let is_set = |key: &str| match config.get(key) {
        None | Some(Value::Null | Value::Bool(false)) => false,
        Some(Value::Object(map)) => !map.is_empty(),
        Some(Value::Array(list)) => !list.is_empty(),
        Some(_) => true,
    };
    const UNKNOWN: [&str; 10] = [
        "use_rslora",
        "use_dora",
        "fan_in_fan_out",
        "modules_to_save",
        "rank_pattern",
        "alpha_pattern",
        "lora_bias",
        "target_parameters",
        "megatron_config",
        "trainable_token_indices",
    ];
    let expect = |key: &str, value: &str| match config.get(key).and_then(Value::as_str) {
        Some(found) if found != value => {
            Err(Error::in_file(&path, format!("{key} is {found:?}; only {value:?} is supported")))
        }
        _ => Ok(()),
    };
    expect("peft_type", "LORA")?;
    expect("bias", "none")?;
    let number = |key: &str| {
        let found = config.get(key).and_then(Value::as_f64).filter(|x| x.is_finite() && *x > 0.0);
        found.ok_or_else(|| Error::in_file(&path, format!("{key} is not a number above 0")))
    };
    let targets = match config.get("target_modules") {
        Some(Value::String(one)) => vec![one.clone()],
        Some(Value::Array(list)) => list.iter().filter_map(|t| t.as_str().map(str::to_string)).collect(),
        _ => Vec::new(),
    };
    // Dropout matters in training only, where the run's own setting applies.
    let dropout = config.get("lora_dropout").and_then(Value::as_f64).unwrap_or(0.0) as f32;
    let lora = Lora { rank: number("r")? as usize, alpha: number("lora_alpha")? as f32, dropout, targets };
    let fused = fused(&lora);
    let is_known = |key: &str| match FUSED.into_iter().position(|fused| fused == key) {
        Some(at) => config[key] == fused[at],
        None => score && key == "modules_to_save" && config[key] == json!([SCORE_MODULE]),
    };
    match UNKNOWN.into_iter().find(|key| is_set(key) && !is_known(key)) {
        Some(key) => Err(Error::in_file(&path, format!("{key} is {}: only plain LoRA is supported", config[key]))),
        None => Ok(lora),
    }
}

/// An adapter can only be resumed with the same rank, alpha and modules.
pub fn same(dir: &Path, now: &Lora, score: bool) -> Result<()> {
    let then = read(dir, score)?;
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
