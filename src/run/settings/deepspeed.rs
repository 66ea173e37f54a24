//! `--deepspeed ds_config.json`, read as settings. Every key is honored, or refused with the reason; an unknown key is
//! reported with the nearest known one. Never decides what a run does: its settings are checked like all others.
//!
//! As in Hugging Face's integration, `"auto"` leaves a key to flags and files, and a key that contradicts one of those
//! is refused. A missing key has DeepSpeed's default ([`defaults`]). Keys: `docs/_pages/config-json.md` of DeepSpeed.
mod reader;
mod defaults;
mod keys;

use crate::base::{Error, Result, open, quote};
use reader::{DeepSpeedFile, same};
use serde_json::{Value, json};
use std::path::Path;

/// Trees of settings.
pub struct Read {
    /// Settings of the file.
    pub given: Value,
    /// DeepSpeed's defaults for keys that the file omits.
    pub defaults: Value,
}

/// The settings of the file at `path`. `requested`: the settings of flags and configuration files.
pub fn read(path: &Path, requested: &Value) -> Result<Read> {
    parse(&text(path)?, path, requested)
}

/// [`read`] for the file's bytes.
pub fn parse(text: &[u8], path: &Path, requested: &Value) -> Result<Read> {
    let mut file =
        DeepSpeedFile { path, requested, out: json!({}), half: None, exports_half: false, offloaded: Vec::new() };
    let tree = tree(text).map_err(|what| file.fault(what))?;
    file.keys("", &tree, keys::top())?;
    if tree["zero_optimization"].is_null() && requested["fsdp"]["zero_stage"].is_null() {
        return Err(file.fault("zero_optimization.stage is missing: set it to 1, 2 or 3, or pass --zero-stage".into()));
    }
    file.put("zero_optimization", "fsdp", "backend", json!("zero"))?;
    let offloaded = |key: &str| file.offloaded.iter().find(|at| at.ends_with(key)).cloned();
    match (offloaded("offload_optimizer"), offloaded("offload_param")) {
        (None, None) => {}
        (Some(at), None) => file.put(&at, "fsdp", "cpu_offload", json!("optimizer"))?,
        (Some(_), Some(at)) => file.put(&at, "fsdp", "cpu_offload", json!(true))?,
        (None, Some(at)) => {
            let why =
                "parameters are offloaded with the optimizer: set \"offload_optimizer\": {\"device\": \"cpu\"} too";
            return Err(file.refuse(&format!("{at}.device"), &json!("cpu"), why));
        }
    }
    if let (true, Some(half)) = (file.exports_half, file.half) {
        let key = "zero_optimization.stage3_gather_16bit_weights_on_model_save";
        file.put(key, "checkpoint", "save_dtype", json!(half))?;
    }
    peak_of_decay(&file, &tree)?;
    let precision = file.half.or(requested["precision"]["precision"].as_str());
    let mut defaults = json!({});
    let (optimizer, tuned) = (requested["optim"]["optimizer"].as_str(), !requested["model"]["pretrain"].is_null());
    for (key, section, name, value) in defaults::missing(&tree, optimizer, precision == Some("fp16"), tuned) {
        defaults[section][name] = value;
        if key == "gradient_clipping" {
            defaults["fsdp"]["deepspeed_unclipped"] = true.into(); // see [Note: DeepSpeed's versions]
        }
    }
    Ok(Read { given: file.out, defaults })
}

fn text(path: &Path) -> Result<Vec<u8>> {
    open::read(path).map_err(|e| Error::input(format!("{}: cannot read this file: {e}", path.display())))
}

fn tree(text: &[u8]) -> std::result::Result<Value, String> {
    let text = text.strip_prefix("\u{feff}".as_bytes()).unwrap_or(text);
    serde_json::from_slice(text).map_err(|e| format!("not JSON: {}", quote(e)))
}

/// DeepSpeed's default of this one key overrides another key, so it must be set explicitly.
fn peak_of_decay(file: &DeepSpeedFile, tree: &Value) -> Result<()> {
    let scheduler = &tree["scheduler"];
    let (lr, default) = (&file.out["optim"]["lr"], json!(defaults::DECAY_MAX_LR));
    let silent = scheduler["type"] == "WarmupDecayLR" && scheduler["params"]["warmup_max_lr"].is_null();
    match silent && file.requested["optim"]["lr"].is_null() && !lr.is_null() && !same(lr, &default) {
        false => Ok(()),
        true => Err(file.fault(format!(
            "scheduler.params.warmup_max_lr is missing: DeepSpeed would use {default} and ignore the optimizer's lr \
            {lr}; \
             set it to a number or to \"auto\""
        ))),
    }
}
