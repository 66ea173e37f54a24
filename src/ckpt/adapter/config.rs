//! Every key of an `adapter_config.json` that PEFT 0.21 writes: used, without effect on a merge, or refused by name.
//! Never ignores a key that is not listed here.
use crate::base::{Error, Result, open, quote};
use crate::nn::{Arch, Lora, is_path_end};
use regex::Regex;
use serde_json::{Map, Value, json};
use std::path::Path;

pub const FILE: &str = "adapter_config.json";
/// The file next to it, whose tensors have the model's names after PEFT's prefix.
pub(super) const WEIGHTS: &str = "adapter_model.safetensors";

/// Experts whose adapters need `target_parameters`, `rank_pattern` and `alpha_pattern`. Transformers 5 holds the
/// experts of a block as two parameters, and PEFT 0.21 derives these keys from the targets for the families in its
/// table; those of other families would have no adapters. PEFT with transformers 4, which has no such parameters, warns
/// of them and ignores them.
pub(super) struct FusedExperts {
    /// The branch in transformers 5.
    branch: &'static str,
    /// What the gate, up and down matrices are called.
    targets: [&'static str; 3],
}

const QWEN2: FusedExperts = FusedExperts { branch: "mlp", targets: ["gate_proj", "up_proj", "down_proj"] };
const PHI: FusedExperts = FusedExperts { branch: "mlp", targets: ["w1", "w3", "w2"] };
const LFM2: FusedExperts = FusedExperts { branch: "feed_forward", ..PHI };

impl FusedExperts {
    pub fn of(arch: Arch) -> Option<FusedExperts> {
        match arch {
            Arch::Qwen2Moe | Arch::Qwen35Moe | Arch::HyV3 | Arch::Axk1 => Some(QWEN2),
            Arch::PhiMoe => Some(PHI),
            Arch::Lfm2Moe => Some(LFM2),
            _ => None,
        }
    }
    /// The three keys, in that order.
    pub fn keys(&self, lora: &Lora) -> [Value; 3] {
        let [gate, up, down] = self.targets.map(|module| lora.targets.iter().any(|target| target == module));
        let gated = gate && up;
        let parameters = [(gated, "gate_up_proj"), (down, "down_proj")].into_iter().filter(|(there, _)| *there);
        let parameters: Vec<_> = parameters.map(|(_, name)| format!("{}.experts.{name}", self.branch)).collect();
        // Two adapters become one, of both ranks.
        let both = |value: Value| if gated { json!({r".*\.gate_up_proj": value}) } else { json!({}) };
        [json!(parameters), both(json!(2 * lora.rank)), both(json!(2.0 * lora.alpha))]
    }
}

/// What a merge depends on.
#[derive(Debug)]
pub struct AdapterConfig {
    pub lora: Lora,
    /// The output is scaled by alpha / sqrt(rank).
    rank_stabilized: bool,
    /// DoRA: every adapted matrix is also scaled to rows of learned norms.
    pub(super) dora: bool,
    /// Modules with a rank or an alpha of their own; the first pattern that matches applies.
    ranks: Vec<(Regex, f64)>,
    alphas: Vec<(Regex, f64)>,
    /// Tokens with embeddings of their own, in the order of the rows that are stored: of the module with this name, or
    /// of any.
    tokens: Vec<(Option<String>, Vec<usize>)>,
    /// A key by which it has other tensors than adapters of all targets.
    partial: Option<&'static str>,
}

/// Keys that do not change the merged weights. What an adapter adapts is in the names of its tensors, all of which are
/// used or refused: `bias` and `modules_to_save`, for instance, say which tensors are stored whole. PEFT itself follows
/// the module's class and not `fan_in_fan_out`. Configs of initializations matter only with `init_lora_weights`.
const INERT: [&str; 24] = [
    "auto_mapping",
    "base_model_name_or_path",
    "bias",
    "corda_config",
    "ensure_weight_tying",
    "eva_config",
    "exclude_modules",
    "fan_in_fan_out",
    "inference_mode",
    "layers_pattern",
    "layers_to_transform",
    "loftq_config",
    "lora_bias",
    "lora_dropout",
    "lora_ga_config",
    "megatron_core",
    "merge_weights",
    "modules_to_save",
    "peft_version",
    "qalora_group_size",
    "revision",
    "runtime_config",
    "target_modules",
    "task_type",
];

/// Keys that are read below.
const READ: [&str; 10] = [
    "alpha_pattern",
    "init_lora_weights",
    "lora_alpha",
    "peft_type",
    "r",
    "rank_pattern",
    "target_parameters",
    "trainable_token_indices",
    "use_dora",
    "use_rslora",
];

/// Keys that change what an adapter computes, and how. Of these, PEFT cannot merge those of [`UNMERGED`] either.
const REFUSED: [(&str, &str); 9] = [
    ("alora_invocation_tokens", "adapters that begin to act at a token"),
    ("arrow_config", "adapters that are chosen for each token"),
    ("kasa_config", "adapters that also remove components of the base model"),
    ("layer_replication", "adapters of repeated layers"),
    ("megatron_config", "adapters of Megatron's layers"),
    ("monteclora_config", "adapters with sampled weights"),
    ("use_bdlora", "block-diagonal adapters"),
    ("use_qalora", "adapters of groups of inputs (QA-LoRA)"),
    ("velora_config", "adapters with compressed activations (VeLoRA)"),
];
pub(super) const UNMERGEABLE: &str = "such adapters cannot be merged into a model, so use PEFT itself";
const UNMERGED: [&str; 2] = ["alora_invocation_tokens", "arrow_config"];

/// The remedy for what only PEFT can merge.
pub(super) const MERGE: &str =
    "merge it in Python, with PeftModel.from_pretrained(base, adapter).merge_and_unload().save_pretrained(merged)";

/// Reads `dir/adapter_config.json`. The error for an unsupported key names it.
pub fn read(dir: &Path) -> Result<AdapterConfig> {
    let path = dir.join(FILE);
    let text = open::read(&path)
        .map_err(|e| Error::in_file(&path, format!("{e}: an adapter directory must have this file")))?;
    let config: Map<String, Value> =
        serde_json::from_slice(&text).map_err(|e| Error::in_file(&path, format!("not JSON: {}", quote(e))))?;
    let adapter = parse(&config).map_err(|what| Error::in_file(&path, what))?;
    let pickled = dir.join("adapter_model.bin");
    match pickled.exists() && !dir.join(WEIGHTS).exists() {
        true => Err(Error::in_file(
            &pickled,
            format!("can execute code when it is read, and is not supported. Save the adapter again, as {WEIGHTS}"),
        )),
        false => Ok(adapter),
    }
}

fn parse(config: &Map<String, Value>) -> std::result::Result<AdapterConfig, String> {
    let found = |key: &str| format!("\"{key}\" is {}", quote(config.get(key).unwrap_or(&Value::Null)));
    if config.get("peft_type").is_none_or(|kind| kind != "LORA") {
        let name = config.get("peft_type").and_then(Value::as_str).unwrap_or_default();
        let instead = match name {
            "" => "it is not an adapter that PEFT saved: convert it",
            // Tokens that are put before the prompt, or adapters that are chosen as they run.
            prompt if prompt.contains("PROMPT") || prompt.ends_with("P_TUNING") || prompt == "PREFIX_TUNING" => {
                UNMERGEABLE
            }
            "CARTRIDGE" | "CPT" | "LILY" | "POLY" | "XLORA" => UNMERGEABLE,
            _ => MERGE,
        };
        return Err(format!("{}; only \"LORA\" is supported: {instead}", found("peft_type")));
    }
    initial(config.get("init_lora_weights").unwrap_or(&Value::Null))?;
    let number = |key: &str| {
        let number = config.get(key).and_then(Value::as_f64).filter(|x| x.is_finite() && *x > 0.0);
        number.ok_or_else(|| format!("{}; it must be a number above 0", found(key)))
    };
    let targets = match config.get("target_modules") {
        Some(Value::String(one)) => vec![one.clone()],
        Some(Value::Array(list)) => list.iter().filter_map(|t| t.as_str().map(str::to_string)).collect(),
        _ => Vec::new(),
    };
    // Dropout matters in training only.
    let dropout = config.get("lora_dropout").and_then(Value::as_f64).unwrap_or(0.0) as f32;
    let lora = Lora { rank: number("r")? as usize, alpha: number("lora_alpha")? as f32, dropout, targets };
    // Weights of modules have the tensors of modules, and experts of transformers 5 are two parameters (stacked.rs).
    let parameters = config.get("target_parameters").filter(|value| is_set(value));
    let of = |known: &[&str]| {
        let ends = |one: &Value| one.as_str().is_some_and(|one| known.iter().any(|end| is_path_end(end, one)));
        parameters.is_none_or(|value| value.as_array().is_some_and(|all| all.iter().all(ends)))
    };
    let modules_alone = of(&["weight"]);
    if !of(&["weight", "gate_up_proj", "down_proj"]) {
        let what = "adapters of other parameters than those of experts are not supported";
        return Err(format!("{}: {what}: {MERGE}", found("target_parameters")));
    }
    let own = |value: &Value| [QWEN2, PHI, LFM2].iter().any(|experts| *value == experts.keys(&lora)[0]);
    let stacked = !modules_alone && parameters.is_some_and(|value| !own(value));
    if let Some((key, what)) = REFUSED.iter().find(|(key, _)| config.get(*key).is_some_and(is_set)) {
        let instead = if UNMERGED.contains(key) { "they cannot be merged" } else { MERGE };
        return Err(format!("{}: {what} are not supported; {instead}", found(key)));
    }
    let known =
        |key: &str| INERT.contains(&key) || READ.contains(&key) || REFUSED.iter().any(|(known, _)| *known == key);
    if let Some((key, _)) = config.iter().find(|(key, value)| !known(key) && is_set(value)) {
        return Err(format!(
            "{}: unknown key, which may change what the adapter computes. If it does not, remove it; otherwise {MERGE}",
            found(key)
        ));
    }
    let flag = |key: &str| match config.get(key) {
        None | Some(Value::Null) => Ok(false),
        Some(Value::Bool(flag)) => Ok(*flag),
        Some(_) => Err(format!("{}; it must be true or false", found(key))),
    };
    let (rank_stabilized, dora) = (flag("use_rslora")?, flag("use_dora")?);
    let (ranks, alphas) = (patterns(config, "rank_pattern")?, patterns(config, "alpha_pattern")?);
    let tokens = tokens(config.get("trainable_token_indices").unwrap_or(&Value::Null));
    let tokens = tokens.ok_or_else(|| {
        let found = found("trainable_token_indices");
        format!("{found}; it must be a list of token ids, or an object of such lists by module")
    })?;
    // A bias is trained with "all" and "lora_only". Excluded modules, such as a tower's, change nothing if they have no
    // target's name, and lack their tensors if they do.
    let partial = ["bias", "layers_to_transform", "lora_bias", "modules_to_save"];
    let partial =
        partial.into_iter().find(|key| config.get(*key).is_some_and(|value| is_set(value) && value != "none"));
    let partial = partial.or(stacked.then_some("target_parameters"));
    Ok(AdapterConfig { lora, rank_stabilized, dora, ranks, alphas, tokens, partial })
}

fn tokens(value: &Value) -> Option<Vec<(Option<String>, Vec<usize>)>> {
    let id = |id: &Value| usize::try_from(id.as_u64()?).ok();
    let ids = |list: &Value| list.as_array()?.iter().map(id).collect::<Option<Vec<usize>>>();
    match value {
        Value::Null => Some(Vec::new()),
        Value::Object(map) => map.iter().map(|(name, list)| Some((Some(name.clone()), ids(list)?))).collect(),
        list => Some(vec![(None, ids(list)?)]),
    }
}

/// Not null, false or empty.
fn is_set(value: &Value) -> bool {
    match value {
        Value::Null | Value::Bool(false) => false,
        Value::Object(map) => !map.is_empty(),
        Value::Array(list) => !list.is_empty(),
        Value::String(text) => !text.is_empty(),
        _ => true,
    }
}

/// Refuses initializations with which PEFT also changes the base model's weights, so that the original ones and the
/// adapter make another model. The others only choose the values that training starts from.
fn initial(value: &Value) -> std::result::Result<(), String> {
    const CONVERT: &str =
        "convert it in Python, with save_pretrained(DIR, path_initial_model_for_weight_conversion=...)";
    let name = match value {
        Value::Null | Value::Bool(_) => return Ok(()),
        Value::String(name) => name.to_lowercase(),
        _ => String::new(),
    };
    let instead = match &name[..] {
        "gaussian" | "eva" | "orthogonal" | "mica" => return Ok(()),
        // PEFT computes their change again when it loads the adapter.
        "pissa" | "olora" | "loftq" => MERGE,
        "corda" | "lora_ga" => CONVERT,
        fast if fast.starts_with("pissa_niter_") => CONVERT,
        _ => return Err(format!("\"init_lora_weights\" is {}, which is unknown: {MERGE}", quote(value))),
    };
    Err(format!(
        "\"init_lora_weights\" is {}: such an adapter belongs to a base model that PEFT changed before training, and not \
         to the original one. To use it, {instead}",
        quote(value)
    ))
}

/// PEFT's `{pattern: number}`, in order. A pattern matches the end of a module's name, from a dot on.
fn patterns(config: &Map<String, Value>, key: &str) -> std::result::Result<Vec<(Regex, f64)>, String> {
    let map = match config.get(key) {
        None | Some(Value::Null) => return Ok(Vec::new()),
        Some(Value::Object(map)) => map,
        Some(other) => return Err(format!("\"{key}\" is {}; it must be an object of numbers", quote(other))),
    };
    let read = |(pattern, value): (&String, &Value)| {
        let number = value.as_f64().filter(|x| x.is_finite() && *x > 0.0);
        let number = number.ok_or_else(|| {
            format!("\"{key}\" has {} for \"{}\"; it must be a number above 0", quote(value), quote(pattern))
        })?;
        let regex = Regex::new(&format!(r"^(?:.*\.)?(?:{pattern})$")).map_err(|_| {
            format!("\"{key}\" has \"{}\", which is not a pattern that is supported: {MERGE}", quote(pattern))
        })?;
        Ok((regex, number))
    };
    map.iter().map(read).collect()
}

impl AdapterConfig {
    /// The adapters of a run that goes on training this one, in `dir`. What it learns besides, its tensors show.
    pub fn trainable(self, dir: &Path) -> Result<Lora> {
        let other = [
            self.dora.then_some("use_dora"),
            (!self.ranks.is_empty()).then_some("rank_pattern"),
            (!self.alphas.is_empty()).then_some("alpha_pattern"),
            (!self.tokens.is_empty()).then_some("trainable_token_indices"),
            self.partial,
        ];
        if let Some(key) = other.into_iter().flatten().next() {
            let what = format!(
                "\"{key}\" is set; such adapters are not trained on. Merge this one, and train a new one on the model that results"
            );
            return Err(Error::in_file(&dir.join(FILE), what));
        }
        let (rank, scale) = self.of("");
        Ok(Lora { alpha: scale * rank as f32, ..self.lora })
    }
    /// The tokens of `module` that have embeddings of their own.
    pub fn tokens(&self, module: &str) -> &[usize] {
        let of = self.tokens.iter().find(|(name, _)| name.as_deref().is_none_or(|name| is_path_end(name, module)));
        of.map_or(&[], |(_, ids)| ids)
    }
    /// Rank and scale of the adapter of `module`.
    pub fn of(&self, module: &str) -> (usize, f32) {
        let own =
            |patterns: &[(Regex, f64)]| patterns.iter().find(|(p, _)| p.is_match(module)).map(|(_, value)| *value);
        let rank = own(&self.ranks).unwrap_or(self.lora.rank as f64);
        let alpha = own(&self.alphas).unwrap_or(f64::from(self.lora.alpha));
        let by = if self.rank_stabilized { rank.sqrt() } else { rank };
        (rank as usize, (alpha / by) as f32)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// All keys, as PEFT 0.21.2 writes them.
    fn written() -> Map<String, Value> {
        let config = json!({
            "alora_invocation_tokens": null, "alpha_pattern": {}, "arrow_config": null, "auto_mapping": null,
            "base_model_name_or_path": "base", "bias": "none", "corda_config": null, "ensure_weight_tying": false,
            "eva_config": null, "exclude_modules": null, "fan_in_fan_out": false, "inference_mode": true,
            "init_lora_weights": true, "kasa_config": null, "layer_replication": null, "layers_pattern": null,
            "layers_to_transform": null, "loftq_config": {}, "lora_alpha": 4, "lora_bias": false, "lora_dropout": 0.0,
            "lora_ga_config": null, "megatron_config": null, "megatron_core": "megatron.core", "modules_to_save": null,
            "monteclora_config": null, "peft_type": "LORA", "peft_version": "0.21.2", "qalora_group_size": 16, "r": 4,
            "rank_pattern": {}, "revision": null, "target_modules": ["v_proj", "q_proj"], "target_parameters": null,
            "task_type": "CAUSAL_LM", "trainable_token_indices": null, "use_bdlora": null, "use_dora": false,
            "use_qalora": false, "use_rslora": false, "velora_config": null,
        });
        config.as_object().unwrap().clone()
    }
    fn with(key: &str, value: Value) -> std::result::Result<AdapterConfig, String> {
        let mut config = written();
        config.insert(key.into(), value);
        parse(&config)
    }

    #[test]
    fn each_key_is_used_inert_or_refused_by_name() {
        parse(&written()).unwrap();
        for (key, value) in [
            ("bias", json!("all")),
            ("ensure_weight_tying", json!(true)),
            ("eva_config", json!({"rho": 2.0})),
            ("exclude_modules", json!("lm_head")),
            ("fan_in_fan_out", json!(true)),
            ("init_lora_weights", json!("gaussian")),
            ("init_lora_weights", json!("eva")),
            ("init_lora_weights", json!("orthogonal")),
            ("init_lora_weights", json!("mica")),
            ("init_lora_weights", json!(false)),
            ("layers_to_transform", json!([0, 1])),
            ("lora_bias", json!(true)),
            ("modules_to_save", json!(["embed_tokens"])),
            ("merge_weights", json!(true)),
            ("revision", json!("main")),
            ("runtime_config", json!({"ephemeral_gpu_offload": false})),
            ("trainable_token_indices", json!({"embed_tokens": [1]})),
            ("target_modules", json!(r".*\.q_proj")),
            ("use_dora", json!(true)),
            ("strange", json!(null)),
            ("strange", json!({})),
        ] {
            assert!(with(key, value.clone()).is_ok(), "{key}: {value}");
        }
        for (key, value) in [
            ("alora_invocation_tokens", json!([1, 2])),
            ("alpha_pattern", json!({"q_proj": "8"})),
            ("alpha_pattern", json!({"(?=q_proj)": 8})),
            ("arrow_config", json!({"top_k": 3})),
            ("init_lora_weights", json!("pissa")),
            ("init_lora_weights", json!("pissa_niter_16")),
            ("init_lora_weights", json!("olora")),
            ("init_lora_weights", json!("corda")),
            ("init_lora_weights", json!("loftq")),
            ("init_lora_weights", json!("lora_ga")),
            ("init_lora_weights", json!("newest")),
            ("kasa_config", json!({"beta": 1.0})),
            ("layer_replication", json!([[0, 1], [0, 1]])),
            ("lora_alpha", json!(0)),
            ("megatron_config", json!({"a": 1})),
            ("monteclora_config", json!({"num_samples": 2})),
            ("peft_type", json!("LOHA")),
            ("peft_type", json!("PREFIX_TUNING")),
            ("r", json!("4")),
            ("rank_pattern", json!([8])),
            ("target_parameters", json!(["mlp.experts.gate_up_proj_bias"])),
            ("trainable_token_indices", json!(["a"])),
            ("trainable_token_indices", json!({"lm_head": 3})),
            ("use_bdlora", json!({"nblocks": 2})),
            ("use_dora", json!(1)),
            ("use_qalora", json!(true)),
            ("use_rslora", json!("yes")),
            ("velora_config", json!({"num_groups": 2})),
            ("strange", json!(1)),
        ] {
            let error = with(key, value.clone()).unwrap_err();
            assert!(error.contains(&format!("\"{key}\"")), "{key}: {value}: {error}");
        }
    }

    /// PEFT: `re.match(rf"(.*\.)?({key})$", module)`, and the first key that matches.
    #[test]
    fn patterns_match_as_peft_matches() {
        let mut config = written();
        config.insert("rank_pattern".into(), json!({"v_proj": 16, r"^model\.layers\.1\..*": 2}));
        config.insert("alpha_pattern".into(), json!({"layers.0.self_attn.q_proj|up_proj": 9, ".*": 8}));
        let of = |config: &Map<String, Value>, module| parse(config).unwrap().of(module);
        assert_eq!(of(&config, "model.layers.0.self_attn.q_proj"), (4, 9.0 / 4.0));
        assert_eq!(of(&config, "model.layers.10.self_attn.q_proj"), (4, 2.0));
        assert_eq!(of(&config, "model.layers.1.self_attn.v_proj"), (16, 0.5));
        assert_eq!(of(&config, "model.layers.1.mlp.up_proj"), (2, 4.5));
        config.insert("use_rslora".into(), json!(true));
        assert_eq!(of(&config, "model.layers.1.self_attn.v_proj"), (16, 2.0));
    }
}
