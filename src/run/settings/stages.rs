//! `training_stages:` of a file: runs one after the other, each with its own data, optimizer, freezing and steps, each
//! starting from the weights that the one before it left. Never trains: a stage is a run like any other, whose
//! checkpoints are in a directory of its name under `--ckpt-dir`.
//!
//! ```yaml
//! training_stages:
//!   warm: {run: {max_steps: 100}, freeze: ["embed_tokens"]}
//!   full: {run: {max_steps: 500}, optim: {lr: 1.0e-4}}
//! ```
//!
//! A stage's sections, `distributed` too, are laid over the file's, as flags are over both. Optimizer state and
//! schedule begin anew. Only the first stage starts from the `pretrain` of the file or of the flags.
use crate::base::{Error, Result};
use crate::ckpt;
use crate::run::settings::defaults::defaults;
use crate::run::settings::sections::Settings;
use crate::run::settings::synonyms::nearest;
use serde_json::{Map, Value};
use std::path::{Path, PathBuf};

/// Name and sections, in the file's order. A list of `{name: ..., ...}` is understood too.
pub fn read(body: &Value) -> std::result::Result<Vec<(String, Value)>, String> {
    let stages: Vec<(String, Value)> = match body {
        Value::Null => Vec::new(),
        Value::Object(stages) => stages.iter().map(|(name, body)| (name.clone(), body.clone())).collect(),
        Value::Array(list) => list.iter().enumerate().map(named).collect::<std::result::Result<_, _>>()?,
        other => return Err(format!("training_stages: stages by name are expected, found {other}")),
    };
    for (i, (name, _)) in stages.iter().enumerate() {
        let plain = !name.is_empty() && name.bytes().all(|b| b.is_ascii_alphanumeric() || b"_-.".contains(&b));
        if !plain || name.starts_with('.') || name.starts_with("step-") {
            return Err(format!(
                "training_stages: {name:?} cannot be the name of a directory of checkpoints: use letters, digits, - and _"
            ));
        }
        if stages[..i].iter().any(|(other, _)| other == name) {
            return Err(format!("training_stages: two stages are called {name}"));
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

/// The settings of a stage that starts from the weights of `before`, whose settings are `lower`: the same shapes, and
/// no model of its own to start from.
pub fn follow(at: &str, stage: &mut Value, before: &str, lower: &Value) -> std::result::Result<(), String> {
    let defaults = defaults();
    let model = |tree: &Value, key: &str| match &tree["model"][key] {
        Value::Null => defaults["model"][key].clone(),
        value => value.clone(),
    };
    for key in stage["model"].as_object().into_iter().flat_map(Map::keys) {
        let (has, asked) = (model(lower, key), model(stage, key));
        if !["pretrain", "dropout"].contains(&key.as_str()) && asked != has {
            return Err(format!(
                "{at}.model.{key} is {asked}, but the stage starts from the weights of {before}, where it is {has}: \
                 remove it here, or set model at the top level"
            ));
        }
    }
    if !lower["lora"]["rank"].is_null() {
        return Err(format!(
            "{at} starts from the weights of {before}, which trains adapters alone (lora.rank): make {before} the last \
             stage, or give {at} a model.pretrain of its own"
        ));
    }
    stage["model"]["pretrain"] = Value::Null;
    Ok(())
}

/// What flags say to such a stage: `--pretrain` is where the first one starts.
pub fn flags(stage: &str, alone: bool, flags: &mut Value, notes: &mut Vec<String>) -> Result<()> {
    let pretrain = std::mem::take(&mut flags["model"]["pretrain"]);
    if alone && !pretrain.is_null() {
        notes
            .push(format!("--pretrain has no effect here: stage {stage} starts from the weights of the one before it"));
    }
    match flags["lora"]["rank"] {
        Value::Null => Ok(()),
        _ => Err(Error::input(format!(
            "--lora-rank with training_stages: stage {stage} would start from a checkpoint that holds adapters alone; set \
             lora.rank in the last stage of the file instead"
        ))),
    }
}

/// The stages that come after the first, as if each had to begin: a fault in their settings is then known before the
/// first one starts.
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

/// Where `stage` is among `names`.
pub fn find(names: &[String], stage: &str) -> Result<usize> {
    names.iter().position(|n| n == stage).ok_or_else(|| {
        let known = names.iter().map(String::as_str);
        match names {
            [] => Error::input(format!(
                "--stage {stage}: there are no training_stages; give a file that has some with --config"
            )),
            _ => Error::input(format!(
                "--stage {stage}: the file has no such stage; the nearest known one is {} (of {})",
                nearest(stage, known),
                names.join(", ")
            )),
        }
    })
}

/// Settings of stage `index` of `names`: its directory, and what it starts from.
pub fn place(s: &mut Settings, names: &[String], index: usize) -> Result<()> {
    let name = &names[index];
    let dir = s.checkpoint.ckpt_dir.clone().ok_or_else(|| {
        Error::input("training_stages: each stage starts from what the one before it has saved: add --ckpt-dir DIR")
    })?;
    s.checkpoint.ckpt_dir = Some(dir.join(name));
    s.run.stage = Some(name.clone());
    s.watch.tensorboard = s.watch.tensorboard.take().map(|dir| dir.join(name)); // each stage counts its steps from 1
    if index + 1 < names.len() {
        s.checkpoint.save_hf = None; // the final model is the last stage's
    }
    if index > 0 {
        s.run.after = Some(dir.join(&names[index - 1]));
    }
    Ok(())
}

/// The weights that a stage starts from: the newest checkpoint of the stage before it, which is complete.
pub fn weights(before: &Path) -> Result<PathBuf> {
    ckpt::newest(before)?.ok_or_else(|| {
        Error::input(format!(
            "{}: the stage before this one has no checkpoint there; run it first, or leave out --stage to run all",
            before.display()
        ))
    })
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
    fn a_later_stage_keeps_the_shapes_and_starts_where_the_one_before_it_ended() {
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
