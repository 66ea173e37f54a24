//! What asked-for settings make of each other. Defaults that another setting takes away are taken away; what was asked for and
//! would come to nothing is refused, so that no run does something else than it was told. Never judges values by themselves.
use super::settings::Settings;
use crate::base::{Error, Result};
use serde_json::Value;

/// An engine: `--fsdp-impl` of backend fsdp, or backend zero.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Engine {
    Manual,
    Reference,
    Zero,
}
use Engine::*;

impl Engine {
    fn of(settings: &Value) -> Engine {
        let (backend, implementation) = (&settings["fsdp"]["backend"], &settings["fsdp"]["fsdp_impl"]);
        match (backend.as_str(), implementation.as_str()) {
            (Some("zero" | "deepspeed"), _) => Zero,
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
const KEYS: [(&str, &[Engine], Option<&str>); 11] = [
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

/// Defaults that `asked` changes.
pub fn imply(asked: &Value, defaults: &mut Value) {
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
    let engine = Engine::of(merged);
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

fn nothing(key: &str, value: &Value, engine: Engine, has: Engine) -> Error {
    let (flag, value) = (key.replace('_', "-"), value.to_string());
    let value = value.trim_matches('"');
    Error::input(format!(
        "--{flag} {value} is without effect with {}: leave it out, or use {}",
        engine.flags(),
        has.flags()
    ))
}

/// What only the manual engine can do.
pub fn engines(s: &Settings) -> Result<()> {
    use super::settings::{BackendName, FsdpImpl, StrategyName};
    let other = match (s.fsdp.backend, s.fsdp.fsdp_impl) {
        (Some(BackendName::Zero), _) => Zero,
        (_, Some(FsdpImpl::Reference)) => Reference,
        _ => return Ok(()),
    };
    let refused = |what: String, instead: &str| Err(Error::input(format!("{what} and {}: {instead}", other.flags())));
    if s.run.strategy == Some(StrategyName::Ddp) {
        return refused("every rank is to keep all weights (ddp, NO_SHARD)".into(), "use run_fsdp, or leave one out");
    }
    Ok(())
}
