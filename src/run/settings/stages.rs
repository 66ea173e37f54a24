//! `training_stages:` of a file: consecutive runs, each with its own data, optimizer, freezing and steps, each starting
//! from the previous stage's final weights. Never trains: a stage is an ordinary run whose checkpoints are in a
//! directory of its name under `--ckpt-dir`.
//!
//! ```yaml
//! training_stages:
//!   warm: {run: {max_steps: 100}, freeze: ["embed_tokens"]}
//!   full: {run: {max_steps: 500}, optim: {lr: 1.0e-4}}
//! ```
//!
//! A stage's sections, including `distributed`, override the file's, and flags override both. Optimizer state and
//! schedule start fresh. Only the first stage starts from the `pretrain` of the file or the flags.
use crate::base::{Error, Result};
use crate::ckpt;
use crate::run::settings::defaults::defaults;
use crate::run::settings::sections::Settings;
use crate::run::settings::synonyms::nearest;
use serde_json::{Map, Value};

/// Name and sections, in file order. A list of `{name: ..., ...}` is accepted too.
pub fn read(body: &Value) -> std::result::Result<Vec<(String, Value)>, String> {
    let stages: Vec<(String, Value)> = match body {
        Value::Null => Vec::new(),
        Value::Object(stages) => stages.iter().map(|(name, body)| (name.clone(), body.clone())).collect(),
        Value::Array(list) => list.iter().enumerate().map(named).collect::<std::result::Result<_, _>>()?,
        other => return Err(format!("training_stages: expected a mapping of named stages, found {other}")),
    };
    for (i, (name, _)) in stages.iter().enumerate() {
        let plain = !name.is_empty() && name.bytes().all(|b| b.is_ascii_alphanumeric() || b"_-.".contains(&b));
        if !plain || name.starts_with('.') || name.starts_with("step-") {
            return Err(format!(
                "training_stages: {name:?} cannot name a checkpoint directory: use letters, digits, - and _"
            ));
        }
        if stages[..i].iter().any(|(other, _)| other == name) {
            return Err(format!("training_stages: two stages are named {name}"));
        }
    }
    Ok(stages)
}

fn named((i, stage): (usize, &Value)) -> std::result::Result<(String, Value), String> {
    let mut body: Map<String, Value> = stage.as_object().cloned().unwrap_or_default();
    match body.remove("name") {
        Some(Value::String(name)) => Ok((name, Value::Object(body))),
        _ => Err(format!("training_stages: stage {} of the list has no name: add name: NAME", i + 1)),
    }
}

/// Checks the settings of a stage that starts from the weights of `before`, whose settings are `lower`: it must have
/// the same shapes. Clears its `pretrain`.
pub fn follow(at: &str, stage: &mut Value, before: &str, lower: &Value) -> std::result::Result<(), String> {
    let defaults = defaults();
    let model = |tree: &Value, key: &str| match &tree["model"][key] {
        Value::Null => defaults["model"][key].clone(),
        value => value.clone(),
    };
    for key in stage["model"].as_object().into_iter().flat_map(Map::keys) {
        let (has, wants) = (model(lower, key), model(stage, key));
        if !["pretrain", "dropout"].contains(&key.as_str()) && wants != has {
            return Err(format!(
                "{at}.model.{key} is {wants}, but the stage starts from the weights of {before}, where it is {has}: \
                 remove it here, or set model at the top level"
            ));
        }
    }
    if !lower["lora"]["rank"].is_null() {
        return Err(format!(
            "{at} starts from the weights of {before}, which saves only adapters (lora.rank): make {before} the last \
             stage, or set {at}.model.pretrain"
        ));
    }
    stage["model"]["pretrain"] = Value::Null;
    Ok(())
}

/// Adapts the flags to such a stage: `--pretrain` is only for the first one.
pub fn flags(stage: &str, alone: bool, flags: &mut Value, notes: &mut Vec<String>) -> Result<()> {
    let pretrain = std::mem::take(&mut flags["model"]["pretrain"]);
    if alone && !pretrain.is_null() {
        notes.push(format!("--pretrain has no effect here: stage {stage} starts from the previous stage's weights"));
    }
    match flags["lora"]["rank"] {
        Value::Null => Ok(()),
        _ => Err(Error::input(format!(
            "--lora-rank with training_stages: stage {stage} would start from a checkpoint that holds only adapters; \
            set \
             lora.rank in the last stage of the file instead"
        ))),
    }
}

/// The stages after the first, each with a `pretrain` as if it ran first: planning these finds errors in their settings
/// before the first stage starts.
pub fn alone(runs: &[Settings]) -> Vec<Settings> {
    let mut later = runs.to_vec();
    for i in 1..later.len() {
        let before = later[i - 1].model.pretrain.clone();
        if later[i].run.after.take().is_some() && later[i].model.pretrain.is_none() {
            later[i].model.pretrain = before;
        }
    }
    later.split_off(1.min(later.len()))
}

/// The index of `stage` in `names`.
pub fn find(names: &[String], stage: &str) -> Result<usize> {
    names.iter().position(|n| n == stage).ok_or_else(|| {
        let known = names.iter().map(String::as_str);
        match names {
            [] => Error::input(format!(
                "--stage {stage}: there are no training_stages; pass a file that has them with --config"
            )),
            _ => Error::input(format!(
                "--stage {stage}: the file has no such stage; the nearest known one is {} (stages: {})",
                nearest(stage, known),
                names.join(", ")
            )),
        }
    })
}

/// Sets the directories of stage `index` of `names`, and where it starts from.
pub fn place(s: &mut Settings, names: &[String], index: usize) -> Result<()> {
    let name = &names[index];
    let dir = s.checkpoint.ckpt_dir.clone().ok_or_else(|| {
        Error::input("training_stages: each stage starts from the previous stage's checkpoint: add --ckpt-dir DIR")
    })?;
    s.checkpoint.ckpt_dir = Some(dir.join(name));
    s.run.stage = Some(name.clone());
    s.watch.tensorboard = s.watch.tensorboard.take().map(|dir| dir.join(name)); // each stage counts its steps from 1
    if index + 1 < names.len() {
        // The final model is the last stage's.
        (s.checkpoint.save_hf, s.checkpoint.save_adapter, s.checkpoint.save_gguf) = (None, None, None);
    }
    if index > 0 {
        s.run.after = Some(dir.join(&names[index - 1]));
    }
    Ok(())
}

/// A stage without a model of its own starts from the newest complete checkpoint of the previous stage.
pub fn start(s: &mut Settings) -> Result<()> {
    let (Some(before), None) = (&s.run.after, &s.model.pretrain) else { return Ok(()) };
    s.model.pretrain = ckpt::newest(before)?;
    match s.model.pretrain {
        Some(_) => Ok(()),
        None => Err(Error::input(format!(
            "{}: the previous stage has no checkpoint here; run it first, or remove --stage to run all",
            before.display()
        ))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn stages_keep_their_order_in_either_form() {
        let map = read(&json!({"b": {"optim": {"lr": 1}}, "a": null})).unwrap();
        let list = read(&json!([{"name": "b", "optim": {"lr": 1}}, {"name": "a"}])).unwrap();
        assert_eq!(map.iter().map(|s| s.0.as_str()).collect::<Vec<_>>(), ["b", "a"]);
        assert_eq!(map[0], list[0]);
        assert_eq!(list[1].0, "a");
    }

    #[test]
    fn names_must_serve_as_directories() {
        for (body, what) in [
            (json!({"../up": {}}), "../up"),
            (json!({"step-00000001": {}}), "step-00000001"),
            (json!([{"optim": {}}]), "no name"),
            (json!([{"name": "a"}, {"name": "a"}]), "two stages"),
            (json!(3), "found 3"),
        ] {
            assert!(read(&body).unwrap_err().contains(what), "{body}");
        }
    }

    #[test]
    fn a_later_stage_keeps_the_shapes_and_starts_from_the_previous_weights() {
        let lower = json!({"model": {"pretrain": "gpt2"}, "optim": {"lr": 1}});
        let mut same = json!({"model": {"pretrain": "gpt2", "num_layers": 4, "dropout": 0.1}}); // 4 is the default
        follow("training_stages.b", &mut same, "a", &lower).unwrap();
        assert!(same["model"]["pretrain"].is_null());
        let mut deeper = json!({"model": {"num_layers": 8}});
        let text = follow("training_stages.b", &mut deeper, "a", &lower).unwrap_err();
        assert!(text.contains("training_stages.b.model.num_layers is 8") && text.contains("where it is 4"), "{text}");
        let lower = json!({"lora": {"rank": 4}});
        assert!(follow("training_stages.b", &mut json!({}), "a", &lower).unwrap_err().contains("adapters"));
    }
}
