//! Settings that determine other settings: implied defaults, the engine, shapes from a model directory. Never checks
//! values on their own; settings without effect are left to `idle.rs`.
use crate::base::{Error, Result};
use crate::ckpt;
use crate::nn::Arch;
use crate::optim::DecayShape;
use crate::run::settings::hub::DataName;
use crate::run::settings::model::ModelSettings;
use crate::run::settings::names::{ArchName, StrategyName};
use crate::run::settings::value::strings;
use serde_json::{Value, json};
use std::path::Path;

/// A section and two of its keys that are alternatives.
const EITHER: [(&str, &str, &str); 1] = [("optim", "warmup_steps", "warmup_ratio")];

/// GRPO samples this many texts of a prompt by default.
pub const GROUP: usize = 8;

/// Where `upper` sets one of two alternatives, removes the other from `lower`.
pub fn supersede(lower: &mut Value, upper: &Value) {
    for (section, one, other) in EITHER {
        for (set, unset) in [(one, other), (other, one)] {
            let upper = &upper[section];
            if !upper[set].is_null() && upper[unset].is_null() && !lower[section][unset].is_null() {
                lower[section][unset] = Value::Null;
            }
        }
    }
}

/// A split that is evaluated is one of the data set, where no other data is named.
pub fn evaluated(requested: &mut Value) {
    let data = &requested["data"];
    let without_split = |text: &String| {
        let name = DataName::of(text).name;
        let split = name.rsplit_once(':').filter(|(_, split)| !split.contains('/') && !Path::new(name).exists());
        let name = split.map_or(name, |(name, _)| name);
        (!Path::new(name).is_file() && name != "synthetic").then(|| name.to_string())
    };
    let names = strings(&data["dataset"]).and_then(|all| all.iter().map(without_split).collect::<Option<Vec<_>>>());
    if let (false, true, Some(names)) = (data["eval_split"].is_null(), data["eval_dataset"].is_null(), names)
        && !names.is_empty()
    {
        requested["data"]["eval_dataset"] = json!(names);
    }
}

/// Changes the defaults that depend on `requested`, the settings of files and flags.
pub fn imply(requested: &Value, defaults: &mut Value) {
    supersede(defaults, requested);
    // Without a schedule that ends above 0 there is none, so that any that is given is refused.
    if (requested["optim"]["lr_scheduler"].as_str().or(defaults["optim"]["lr_scheduler"].as_str()))
        == Some("cosine_with_min_lr")
        && defaults["optim"]["min_lr_ratio"].is_null()
    {
        defaults["optim"]["min_lr_ratio"] = json!(DecayShape::MIN_RATIO);
    }
    if ["zero_stage", "deepspeed"].iter().any(|key| !requested["fsdp"][key].is_null()) {
        defaults["fsdp"]["backend"] = "zero".into();
    }
    if requested["objective"]["objective"] == "grpo" {
        defaults["objective"]["beta"] = json!(0.0);
        defaults["generate"]["temperature"] = json!(1.0);
        if requested["objective"]["reward"].is_null() {
            // What dr_grpo divides by is a choice.
            defaults["generate"]["max_new_tokens"] = Value::Null;
        } else {
            defaults["generate"]["group_size"] = json!(GROUP);
        }
    }
    if requested["objective"]["on_policy"] == true {
        defaults["generate"]["temperature"] = json!(1.0);
        // A sample is all that the teacher corrects: there are no labels.
        defaults["objective"]["distill_alpha"] = json!(1.0);
    }
    if !requested["batch"]["train_batch_size"].is_null() {
        defaults["batch"]["batch_size"] = Value::Null;
        defaults["batch"]["grad_accum"] = Value::Null;
    }
}

/// Resolves `run.strategy` and returns the engine: ddp, zero, manual or reference. `default` is the binary's strategy;
/// NO_SHARD is ddp.
pub fn engine(merged: &mut Value, default: StrategyName) -> &'static str {
    let (run, f) = (&merged["run"]["strategy"], &merged["fsdp"]);
    let requested = if run.is_null() || run == "auto" { json!(default) } else { run.clone() };
    let ddp = f["sharding"] == "NO_SHARD" || requested == "ddp";
    let engine = match (ddp, f["backend"] == "zero", f["fsdp_impl"] == "reference") {
        (true, ..) => "ddp",
        (_, true, _) => "zero",
        (_, _, true) => "reference",
        _ => "manual",
    };
    merged["run"]["strategy"] = json!(if ddp { StrategyName::Ddp } else { StrategyName::Fsdp });
    engine
}

/// Refuses flags that contradict the shapes of the model directory. Keys of a file yield to the directory instead, so
/// that one file serves training from scratch and from a model.
pub fn shapes(flags: &ModelSettings, dir: &Path) -> Result<()> {
    let Ok(spec) = ckpt::hf::read(dir) else { return Ok(()) }; // the plan reports the error
    let arch = if spec.arch == Arch::Gpt { ArchName::Gpt } else { ArchName::Llama };
    let experts = spec.experts.as_ref().map_or((0, 0), |e| (e.count, e.top_k));
    let both = [
        ("arch", json!(flags.arch), json!(arch)),
        ("embed-dim", json!(flags.embed_dim), json!(spec.dim)),
        ("num-layers", json!(flags.num_layers), json!(spec.layers)),
        ("num-heads", json!(flags.num_heads), json!(spec.heads)),
        ("num-kv-heads", json!(flags.num_kv_heads), json!(spec.kv_heads)),
        ("ff-hidden-dim", json!(flags.ff_hidden_dim), json!(spec.ff)),
        ("num-experts", json!(flags.num_experts), json!(experts.0)),
        ("num-experts-per-tok", json!(flags.num_experts_per_tok), json!(experts.1)),
        ("vocab-size", json!(flags.vocab_size), json!(spec.vocab)),
        ("max-positions", json!(flags.max_positions), json!(spec.max_len)),
        ("tie-embeddings", json!(flags.tie_embeddings), json!(spec.tied)),
    ];
    match both.into_iter().find(|(_, requested, is)| !requested.is_null() && requested != is) {
        None => Ok(()),
        Some((flag, requested, is)) => Err(Error::input(format!(
            "--{flag} {}, but the model in {} has {}: remove the flag, its config.json sets the shapes",
            requested.to_string().trim_matches('"'),
            dir.display(),
            is.to_string().trim_matches('"')
        ))),
    }
}

/// The error of a flag that contradicts other settings.
pub fn contradiction(flag: &str, reason: &str) -> Error {
    Error::input(format!("--{flag} contradicts the other settings: {reason}"))
}
