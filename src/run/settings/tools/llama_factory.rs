//! LLaMA-Factory's data sets: names in a `dataset_info.json`, as paths and fields. Its other keys are rows of
//! `synonyms.tsv`.
use super::entry::DataPlace;
use super::rewriting::{CHATML, FileTree, Rewriting};
use crate::base::{Result, open, quote};
use crate::run::settings::synonyms::nearest;
use crate::run::settings::value::strings;
use serde_json::{Value, json};
use std::path::{Path, PathBuf};

const INFO: &str = "dataset_info.json";
/// Its template `empty`: the texts of messages alone.
const EMPTY: &str = "{% for message in messages %}{{ message['content'] }}{% endfor %}";

pub(super) fn rewrite(tree: FileTree, out: &mut Rewriting) -> Result<()> {
    let sets = tree.get("dataset").and_then(strings).map_or(0, |names| split(&names).len());
    let goes_on = tree.get("adapter_name_or_path").is_some_and(|value| !value.is_null());
    for (key, value) in &tree {
        out.attempt(|out| {
            match key.as_str() {
                _ if value.is_null() => out.set(key, Value::Null, key)?,
                "dataset" | "eval_dataset" => {
                    // The first of each data set; of one that is trained on, it is our own setting.
                    let most = tree.get("max_samples").filter(|_| sets > 1 || key == "eval_dataset");
                    data_sets(&tree, key, value, most.and_then(Value::as_u64), out)?;
                }
                "dataset_dir" => {}
                "lora_rank" | "lora_alpha" | "lora_target" if goes_on => {
                    out.idle(&format!("{key}: {value}"), "the adapter of adapter_name_or_path has its own");
                }
                "template" if tree.get("stage") == Some(&json!("pt")) => {
                    out.idle(&format!("{key}: {value}"), "stage pt learns text as it is");
                }
                "template" if ["chatml", "empty"].iter().any(|name| value == name) => {
                    let text = if value == "empty" { EMPTY } else { CHATML };
                    out.set("tokenizer_chat_template", json!(text), key)?;
                    out.set("apply_chat_template", json!(true), key)?;
                }
                "max_samples" if sets > 1 && value.is_u64() => {}
                "val_size"
                    if value.as_f64() == Some(0.0) && tree.get("eval_dataset").is_some_and(|sets| !sets.is_null()) =>
                {
                    out.idle(&format!("{key}: {value}"), "the rows of eval_dataset are evaluated");
                }
                _ => out.set(key, value.clone(), key)?,
            }
            Ok(())
        });
    }
    // The stage alone is a training stage of our own files.
    let given = |key: &str| tree.get(key).filter(|value| !value.is_null());
    if given("finetuning_type").is_none() {
        out.set("finetuning_type", json!("lora"), "finetuning_type")?; // LLaMA-Factory's default
    }
    // So are these: twice the rank, adapters of all matrices, and a loss on every answer.
    let adapts = given("finetuning_type").is_none_or(|kind| kind == "lora") && !goes_on;
    if given("lora_target").is_none() && adapts {
        out.set("lora_target", json!("all"), "lora_target")?;
    }
    if given("lora_alpha").is_none() && adapts {
        let rank = given("lora_rank").and_then(Value::as_u64).unwrap_or(8);
        out.set("lora_alpha", json!(2 * rank), "lora_alpha")?;
    }
    // Unless it says otherwise, text is packed: joined, and cut at cutoff_len.
    if given("stage") == Some(&json!("pt")) {
        if given("packing") != Some(&json!(false)) {
            out.set("join_rows", json!(true), "stage")?;
        }
        out.tree.shift_remove("row_format"); // texts have no other fields
        ["packing", "neat_packing"].into_iter().for_each(|key| out.without_packing(key));
    }
    if given("packing") == Some(&json!(true)) && given("neat_packing").is_none_or(|neat| *neat == false) {
        out.idle("packing without neat_packing", "samples of a row never attend to each other (LLaMA-Factory)");
    }
    let learns_text = ["train_on_prompt", "mask_history"].into_iter().any(|key| given(key).is_some());
    if given("stage").is_none_or(|stage| stage == "sft") && !learns_text && given("template") != Some(&json!("empty")) {
        out.set("mask_history", json!(false), "mask_history")?;
    }
    Ok(())
}

fn split(names: &[String]) -> Vec<String> {
    names.iter().flat_map(|name| name.split(',')).map(|name| name.trim().to_string()).collect()
}

/// `most`: rows of each.
fn data_sets(tree: &FileTree, key: &str, value: &Value, most: Option<u64>, out: &mut Rewriting) -> Result<()> {
    let slice = most.map_or(String::new(), |most| format!("[:{most}]"));
    let names = strings(value).ok_or_else(|| out.refuse(key, value, "expected names of data sets"))?;
    let info = info(tree, out)?;
    let mut words = Vec::new();
    for name in split(&names) {
        let at = format!("{INFO}: {}", quote(&name));
        match &info {
            Some((dir, all)) if all[&name].is_object() => words.extend(entry(&at, dir, &all[&name], &slice, out)?),
            _ if PathBuf::from(&name).exists() || name.contains('/') => words.push(name + &slice),
            Some((dir, all)) => {
                let known = all.as_object().into_iter().flat_map(|all| all.keys().map(String::as_str));
                let near = nearest(&name, known);
                let file = dir.join(INFO);
                let what = format!("{key}: {} has no data set {}; the nearest is {near}", file.display(), quote(&name));
                return Err(out.fault(what));
            }
            None => {
                let why = format!("names of data sets are keys of {INFO}, and there is none: set dataset_dir");
                return Err(out.refuse(key, &json!(name), &why));
            }
        }
    }
    out.set(key, json!(words), key)
}

/// The directory of the descriptions, and these.
fn info(tree: &FileTree, out: &Rewriting) -> Result<Option<(PathBuf, Value)>> {
    let beside = out.path.parent().map(PathBuf::from).unwrap_or_default();
    let dirs = match tree.get("dataset_dir").and_then(Value::as_str) {
        Some(dir) => vec![PathBuf::from(dir), beside.join(dir)],
        None => vec![PathBuf::from("data"), beside.clone(), beside.join("data")],
    };
    let Some(dir) = dirs.into_iter().find(|dir| dir.join(INFO).is_file()) else { return Ok(None) };
    let file = dir.join(INFO);
    let text = open::read(&file).map_err(|e| out.fault(format!("{}: cannot read this file: {e}", file.display())))?;
    let tree =
        serde_json::from_slice(&text).map_err(|e| out.fault(format!("{}: not JSON: {}", file.display(), quote(e))))?;
    Ok(Some((dir, tree)))
}

/// The words of `--dataset` for one description; sets the fields of its rows.
fn entry(at: &str, dir: &Path, body: &Value, slice: &str, out: &mut Rewriting) -> Result<Vec<String>> {
    let text = |key: &str| body[key].as_str().map(String::from);
    let split = text("split").unwrap_or_else(|| "train".into()) + slice;
    let mut place = DataPlace { split: Some(split), ..DataPlace::default() };
    match (text("hf_hub_url"), text("file_name")) {
        (Some(name), _) => {
            place.path = name;
            place.subset = text("subset").or(text("folder"));
        }
        (None, Some(file)) => place.files = vec![dir.join(file).to_string_lossy().into_owned()],
        (None, None) => return Err(out.fault(format!("{at} has neither file_name nor hf_hub_url"))),
    }
    for (key, value) in body.as_object().into_iter().flatten() {
        let known = ["hf_hub_url", "ms_hub_url", "om_hub_url", "file_name", "split", "subset", "folder"];
        let read = ["formatting", "ranking", "columns", "tags"];
        let why = match (key.as_str(), value) {
            (_, Value::Null) => continue,
            ("formatting", Value::String(kind)) if !["alpaca", "sharegpt", "openai"].contains(&&**kind) => {
                "rows are read as alpaca, sharegpt or openai"
            }
            ("num_samples", _) => "rows are not drawn: file_name may end in [:500], for the first 500",
            (key, _) if known.iter().chain(&read).any(|known| *known == key) => continue,
            _ => "only files and repositories of the hub are read",
        };
        return Err(out.refuse(&format!("{at}.{}", quote(key)), value, why));
    }
    tags(at, &body["tags"], out)?;
    columns(at, body, out)?;
    place.words(at, out)
}

/// Names of roles and fields in conversations: those of ShareGPT or of OpenAI, or they are renamed.
fn tags(at: &str, tags: &Value, out: &mut Rewriting) -> Result<()> {
    let has_roles = tags["role_tag"] == "role"; // which are not ShareGPT's
    for (key, value) in tags.as_object().into_iter().flatten() {
        let role = match key.as_str() {
            "role_tag" | "content_tag" => None,
            "user_tag" => Some("user"),
            "assistant_tag" => Some("assistant"),
            "system_tag" => Some("system"),
            "observation_tag" => Some("tool"),
            "function_tag" => Some("function_call"),
            _ => return Err(out.refuse(&format!("{at}.tags.{}", quote(key)), value, "there is no such tag")),
        };
        match (value.as_str(), role) {
            (Some(name), Some(role)) => out.rename_role(name, role, has_roles),
            (Some(_), None) => {}
            (None, _) => return Err(out.refuse(&format!("{at}.tags.{}", quote(key)), value, "expected a name")),
        }
    }
    let tag = |key: &str, usual| tags[key].as_str().unwrap_or(usual);
    if tags.is_object() {
        out.message_fields(tag("role_tag", "from"), tag("content_tag", "value"));
    }
    Ok(())
}

fn columns(at: &str, body: &Value, out: &mut Rewriting) -> Result<()> {
    let columns = &body["columns"];
    let column = |key: &str| columns[key].as_str().filter(|name| !name.is_empty());
    let talks = ["sharegpt", "openai"].iter().any(|kind| body["formatting"] == *kind);
    for (key, value) in columns.as_object().into_iter().flatten().filter(|(_, value)| !value.is_null()) {
        let fits = match key.as_str() {
            "query" | "history" | "tools" | "system" => value.is_string(),
            "prompt" | "response" | "messages" | "chosen" | "rejected" | "kto_tag" => true,
            _ => false,
        };
        if !fits {
            let why = "only columns of text are read";
            return Err(out.refuse(&format!("{at}.columns.{}", quote(key)), value, why));
        }
    }
    if let Some(system) = column("system").filter(|name| *name != "system") {
        out.set("system_key", json!(system), at)?;
    }
    if let Some(label) = column("kto_tag").filter(|name| *name != "label") {
        out.set("label_key", json!(label), at)?;
    }
    for key in ["history", "tools"] {
        column(key).into_iter().for_each(|name| out.rename("rename_fields", name, key));
    }
    // Alpaca's fields are read together: the instruction, then the input, after the history.
    let together = !talks && ["query", "history"].iter().any(|key| column(key).is_some());
    for (key, field) in [("prompt", "instruction"), ("query", "input"), ("response", "output")] {
        column(key).filter(|_| together).into_iter().for_each(|name| out.rename("rename_fields", name, field));
    }
    let column = |key: &str| column(key).filter(|_| !together || !["prompt", "query", "response"].contains(&key));
    let alpaca = !talks && column("prompt").is_none_or(|name| name == "instruction");
    let prompt = if talks { column("messages").or(Some("conversations")) } else { column("prompt") };
    if body["ranking"] == true {
        if !alpaca {
            out.set("prompt_key", json!(prompt.unwrap_or("instruction")), at)?;
        }
        out.set("chosen_key", json!(column("chosen").unwrap_or("chosen")), at)?;
        return out.set("rejected_key", json!(column("rejected").unwrap_or("rejected")), at);
    }
    match (talks, prompt, column("response")) {
        (true, Some(messages @ ("messages" | "conversations")), _) => {
            out.agree("row_format", json!(messages));
            Ok(())
        }
        (false, None, None) => {
            out.agree("row_format", json!("alpaca"));
            Ok(())
        }
        (true, Some(messages), _) => out.set("input_key", json!(messages), at),
        (false, prompt, response) => {
            out.set("input_key", json!(prompt.unwrap_or("instruction")), at)?;
            response.map_or(Ok(()), |response| out.set("output_key", json!(response), at))
        }
        (true, None, _) => Ok(()),
    }
}
