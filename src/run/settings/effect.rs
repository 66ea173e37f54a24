//! What asked-for settings make of each other. Defaults that another setting takes away are taken away; what was asked
//! for and would come to nothing is refused, so that no run does something else than it was told. Never judges values
//! by themselves.
use crate::base::{Error, Result};
use crate::ckpt;
use crate::run::settings::defaults::defaults;
use crate::run::settings::model::ModelSettings;
use crate::run::settings::names::{BackendName, FsdpImpl, PrefetchName, ShardingName, StrategyName, WrapName};
use crate::run::settings::sections::Settings;
use serde_json::Value;
use std::path::Path;

/// An engine: `--fsdp-impl` of backend fsdp, or backend zero.
#[derive(Clone, Copy, PartialEq, Eq)]
enum EngineName {
    Manual,
    Reference,
    Zero,
}
use EngineName::*;

impl EngineName {
    fn of(settings: &Value) -> EngineName {
        let (backend, implementation) = (&settings["fsdp"]["backend"], &settings["fsdp"]["fsdp_impl"]);
        match (backend.as_str(), implementation.as_str()) {
            (Some("zero"), _) => Zero,
            (_, Some("reference")) => Reference,
            _ => Manual,
        }
    }
    fn flags(self) -> &'static str {
        match self {
            Manual => "--fsdp-impl manual",
            Reference => "--fsdp-impl reference",
            Zero => "--backend zero",
        }
    }
}

/// Keys of the section fsdp that not every engine has; and what others do anyway, if they do.
const KEYS: [(&str, &[EngineName], Option<&str>); 11] = [
    ("fsdp_impl", &[Manual, Reference], None),
    ("sharding", &[Manual, Reference], None),
    ("auto_wrap", &[Manual], None),
    ("wrap_min_params", &[Manual], None),
    ("backward_prefetch", &[Manual], Some("\"NONE\"")),
    ("forward_prefetch", &[Manual], Some("false")),
    ("limit_all_gathers", &[Manual], Some("true")),
    ("use_orig_params", &[Manual], Some("true")),
    ("sync_each_batch", &[Manual, Reference], None),
    ("zero_stage", &[Zero], None),
    ("deepspeed", &[Zero], None),
];

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

/// Takes out of `merged` what its engine does not have; an error where it was `asked` for.
pub fn check(asked: &Value, merged: &mut Value) -> Result<()> {
    let engine = EngineName::of(merged);
    for (key, engines, anyway) in KEYS.iter().filter(|(_, engines, _)| !engines.contains(&engine)) {
        let value = &asked["fsdp"][key];
        let text = value.to_string();
        if !value.is_null() && anyway.is_none_or(|anyway| text != anyway) {
            return Err(nothing(key, value, engine, engines[0]));
        }
        merged["fsdp"][key] = Value::Null;
    }
    let sizes = asked["zero"].as_object().into_iter().flatten().find(|(_, value)| !value.is_null());
    match sizes.filter(|_| engine != Zero) {
        Some((key, value)) => Err(nothing(key, value, engine, Zero)),
        None => Ok(()),
    }
}

/// Section and key of what others can make idle; the key of that other, and a value of it with which it is not.
const IDLE: [(&str, &str, &str, &str, &str); 8] = [
    ("optim", "momentum", "optim", "optimizer", "sgd"),
    ("optim", "min_lr_ratio", "optim", "lr_scheduler", "cosine_with_min_lr"),
    ("fsdp", "wrap_min_params", "fsdp", "auto_wrap", "size"),
    ("run", "sample_tokens", "run", "sample", "true"),
    ("run", "eval_every", "run", "eval", "true"),
    ("data", "eval_dataset", "run", "eval", "true"),
    ("data", "cache_dir", "data", "cache", "true"),
    ("data", "cache_limit", "data", "cache", "true"),
];

/// What was asked for and is not the default must not be idle. A default, as in a file of all settings, may stand
/// anywhere.
pub fn idle(asked: &Value, merged: &Value) -> Result<()> {
    let defaults = defaults();
    for (section, key, by, other, value) in IDLE {
        let (asked, chosen) = (&asked[section][key], &merged[by][other]);
        let on = chosen.as_str().map_or(chosen == true && value == "true", |name| name == value);
        if !asked.is_null() && *asked != defaults[section][key] && !on {
            let flag = |key: &str| key.replace('_', "-");
            let instead = if value == "true" { String::new() } else { format!(" {value}") };
            return Err(Error::input(format!(
                "--{} {asked} is without effect: leave it out, or use --{}{instead}",
                flag(key),
                flag(other)
            )));
        }
    }
    Ok(())
}

/// A model directory says how its model is built: flags beside it may say the same, and nothing else. (Those of a file
/// stand back behind it, so that one file serves both.)
pub fn shapes(flags: &ModelSettings, dir: &Path) -> Result<()> {
    let Ok(spec) = ckpt::hf::read(dir) else { return Ok(()) }; // the plan says what is wrong with it
    let both = [
        ("embed-dim", flags.embed_dim, spec.dim),
        ("num-layers", flags.num_layers, spec.layers),
        ("num-heads", flags.num_heads, spec.heads),
        ("num-kv-heads", flags.num_kv_heads, spec.kv_heads),
        ("ff-hidden-dim", flags.ff_hidden_dim, spec.ff),
        ("vocab-size", flags.vocab_size, spec.vocab),
        ("max-positions", flags.max_positions, spec.max_len),
    ];
    match both.into_iter().find_map(|(flag, asked, is)| Some((flag, asked.filter(|&n| n != is)?, is))) {
        None => Ok(()),
        Some((flag, asked, is)) => Err(Error::input(format!(
            "--{flag} {asked}, but the model in {} has {is}: its config.json gives the shapes, leave the flag out",
            dir.display()
        ))),
    }
}

fn nothing(key: &str, value: &Value, engine: EngineName, has: EngineName) -> Error {
    let (flag, value) = (key.replace('_', "-"), value.to_string());
    let value = value.trim_matches('"');
    Error::input(format!(
        "--{flag} {value} is without effect with {}: leave it out, or use {}",
        engine.flags(),
        has.flags()
    ))
}

/// Sharded or replicated, decided here for all that follows: what is asked for, or what the binary is for (`default`).
/// NO_SHARD is what DDP does.
pub fn strategy(s: &mut Settings, default: StrategyName) -> Result<()> {
    let f = &s.fsdp;
    let unsharded = f.sharding == Some(ShardingName::NoShard);
    let asked = s.run.strategy.filter(|&x| x != StrategyName::Auto).unwrap_or(default);
    let strategy = if unsharded { StrategyName::Ddp } else { asked };
    s.run.strategy = Some(strategy);
    if strategy == StrategyName::Fsdp {
        return Ok(());
    }
    let engine = match (f.backend, f.fsdp_impl) {
        (Some(BackendName::Zero), _) => Zero,
        (_, Some(FsdpImpl::Reference)) => Reference,
        _ => Manual,
    };
    if engine != Manual {
        return Err(Error::input(format!(
            "every rank is to keep all weights (ddp, NO_SHARD) and {}: use run_fsdp, or leave one out",
            engine.flags()
        )));
    }
    let kept = "NO_SHARD keeps all weights on every rank: nothing is gathered";
    let buckets = "NO_SHARD has no units: gradients are reduced in buckets of 25 MiB";
    for (contradicts, flag, reason) in [
        (f.backward_prefetch == Some(PrefetchName::BackwardPost), "backward-prefetch BACKWARD_POST", kept),
        (f.limit_all_gathers == Some(false), "no-limit-all-gathers", kept),
        (f.auto_wrap != Some(WrapName::Transformer), "auto-wrap", buckets),
    ] {
        if unsharded && contradicts {
            return Err(contradiction(flag, reason));
        }
    }
    match f.sharding {
        Some(ShardingName::HybridShard) => Err(Error::input(
            "--sharding HYBRID_SHARD cuts parameters over ranks, which DDP does not: use run_fsdp, or leave the flag out",
        )),
        _ => Ok(()),
    }
}

/// `flag` could have no effect here, or another than it says.
pub fn contradiction(flag: &str, reason: &str) -> Error {
    Error::input(format!("--{flag} contradicts the other settings: {reason}"))
}
