//! What asked-for settings make of each other: defaults that follow from another setting, sharded or replicated, shapes
//! that a model directory has. What has no effect is the matter of `idle.rs`. Never judges values by themselves.
use crate::base::{Error, Result};
use crate::ckpt;
use crate::nn::Arch;
use crate::run::settings::model::ModelSettings;
use crate::run::settings::names::{ArchName, StrategyName};
use serde_json::{Value, json};
use std::path::Path;

/// Section and two keys that say the same thing in two ways.
const EITHER: [(&str, &str, &str); 1] = [("optim", "warmup_steps", "warmup_ratio")];

/// What `upper` says in one of two ways no longer stands in the other way in `lower`.
pub fn supersede(lower: &mut Value, upper: &Value) {
    for (section, one, other) in EITHER {
        for (said, unsaid) in [(one, other), (other, one)] {
            let upper = &upper[section];
            if !upper[said].is_null() && upper[unsaid].is_null() && !lower[section][unsaid].is_null() {
                lower[section][unsaid] = Value::Null;
            }
        }
    }
}

/// Defaults that `asked` changes.
pub fn imply(asked: &Value, defaults: &mut Value) {
    supersede(defaults, asked);
    if ["zero_stage", "deepspeed"].iter().any(|key| !asked["fsdp"][key].is_null()) {
        defaults["fsdp"]["backend"] = "zero".into();
    }
    if !asked["batch"]["train_batch_size"].is_null() {
        defaults["batch"]["batch_size"] = Value::Null;
        defaults["batch"]["grad_accum"] = Value::Null;
    }
}

/// Sharded or replicated, decided here for all that follows: what is asked for, or what the binary is for (`default`).
/// NO_SHARD is what DDP does. The name of the engine: ddp, zero, manual or reference.
pub fn engine(merged: &mut Value, default: StrategyName) -> &'static str {
    let (run, f) = (&merged["run"]["strategy"], &merged["fsdp"]);
    let asked = if run.is_null() || run == "auto" { json!(default) } else { run.clone() };
    let ddp = f["sharding"] == "NO_SHARD" || asked == "ddp";
    let engine = match (ddp, f["backend"] == "zero", f["fsdp_impl"] == "reference") {
        (true, ..) => "ddp",
        (_, true, _) => "zero",
        (_, _, true) => "reference",
        _ => "manual",
    };
    merged["run"]["strategy"] = json!(if ddp { StrategyName::Ddp } else { StrategyName::Fsdp });
    engine
}

/// A model directory says how its model is built: flags beside it may say the same, and nothing else. (Those of a file
/// stand back behind it, so that one file serves both.)
pub fn shapes(flags: &ModelSettings, dir: &Path) -> Result<()> {
    let Ok(spec) = ckpt::hf::read(dir) else { return Ok(()) }; // the plan says what is wrong with it
    let arch = if spec.arch == Arch::Gpt { ArchName::Gpt } else { ArchName::Llama };
    let both = [
        ("arch", json!(flags.arch), json!(arch)),
        ("embed-dim", json!(flags.embed_dim), json!(spec.dim)),
        ("num-layers", json!(flags.num_layers), json!(spec.layers)),
        ("num-heads", json!(flags.num_heads), json!(spec.heads)),
        ("num-kv-heads", json!(flags.num_kv_heads), json!(spec.kv_heads)),
        ("ff-hidden-dim", json!(flags.ff_hidden_dim), json!(spec.ff)),
        ("vocab-size", json!(flags.vocab_size), json!(spec.vocab)),
        ("max-positions", json!(flags.max_positions), json!(spec.max_len)),
        ("tie-embeddings", json!(flags.tie_embeddings), json!(spec.tied)),
    ];
    match both.into_iter().find(|(_, asked, is)| !asked.is_null() && asked != is) {
        None => Ok(()),
        Some((flag, asked, is)) => Err(Error::input(format!(
            "--{flag} {}, but the model in {} has {}: its config.json gives the shapes, leave the flag out",
            asked.to_string().trim_matches('"'),
            dir.display(),
            is.to_string().trim_matches('"')
        ))),
    }
}

/// `flag` asks for something else than the other settings.
pub fn contradiction(flag: &str, reason: &str) -> Error {
    Error::input(format!("--{flag} contradicts the other settings: {reason}"))
}
