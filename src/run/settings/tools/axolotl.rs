//! Axolotl's lists of data sets and its chat template, as keys of ours. Its other keys are rows of `synonyms.tsv`.
use super::entry::DataPlace;
use super::rewriting::{CHATML, FileTree, Rewriting};
use crate::base::{Result, quote};
use crate::run::settings::value::strings;
use serde_json::{Value, json};

/// Formats of prompts that the rows of a data set are read in.
#[derive(PartialEq)]
enum RowKind {
    Alpaca,
    Chat,
    Completion,
    /// A prompt of the file's own, with its fields.
    Own,
    /// Judged answers of which the prompt is in this field, rendered by this template or the tokenizer's.
    Judged {
        prompt: &'static str,
        template: Option<&'static str>,
    },
}

/// Tokens that end a turn in the templates of models.
const ENDS: [&str; 7] = ["<|im_end|>", "<end_of_turn>", "<turn|>", "<|end|>", "<|eot_id|>", "<|eot|>", "<|return|>"];

/// Its prompt_strategies/dpo/llama3.py.
const LLAMA3: &str = "{% for message in messages %}{{ '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' \
    + message['content'] + '<|eot_id|>' }}{% endfor %}{% if add_generation_prompt %}{{ \
    '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}";

pub(super) fn rewrite(mut tree: FileTree, out: &mut Rewriting) -> Result<()> {
    let sets = tree.iter_mut().filter(|(key, _)| ["datasets", "test_datasets"].contains(&key.as_str()));
    let sets = sets.filter_map(|(_, sets)| sets.as_array_mut()).flatten().filter_map(Value::as_object_mut);
    sets.for_each(name_template);
    name_template(&mut tree);
    same_template(&tree, out)?;
    let pairs = tree.get("rl").is_some_and(|rl| !rl.is_null()) || tree.get("reward_model") == Some(&json!(true));
    let ends_above_0 = tree.get("cosine_min_lr_ratio").is_some_and(|ratio| !ratio.is_null());
    let scheduler = tree.get("lr_scheduler").unwrap_or(&Value::Null);
    if ends_above_0 && (scheduler.is_null() || scheduler == "cosine") {
        out.set("lr_scheduler", json!("cosine_with_min_lr"), "cosine_min_lr_ratio")?;
    }
    let fsdp = tree.get("fsdp_config").unwrap_or(&Value::Null);
    let recomputes = ["activation_checkpointing", "fsdp_activation_checkpointing"].iter().any(|key| fsdp[key] == true);
    for (key, value) in &tree {
        out.attempt(|out| {
            match key.as_str() {
                "lr_scheduler" if value.is_null() => {}
                _ if value.is_null() => out.set(key, Value::Null, key)?,
                "datasets" => data_sets(key, value, "dataset", pairs, out)?,
                "pretraining_dataset" => data_sets(key, value, "dataset", pairs, out)?,
                "test_datasets" => data_sets(key, value, "eval_dataset", pairs, out)?,
                "chat_template" => template(&tree, value, out)?,
                "chat_template_jinja" => unnamed(&tree, key, out),
                "special_tokens" => special_tokens(value, out)?,
                "adapter"
                    if value == "lora"
                        && ["lora_r", "lora_model_dir"].iter().all(|key| tree.get(*key).is_none_or(Value::is_null)) =>
                {
                    return Err(out.refuse(key, value, "without lora_r, the rank of the adapters; add lora_r"));
                }
                // transformers' name of it, whose constant rate has no warmup; a cosine ends where its ratio says.
                "lr_scheduler" if !ends_above_0 || value != "cosine" => {
                    out.set("lr_scheduler_type", value.clone(), key)?
                }
                "lr_scheduler" => {}
                // FSDP recomputes in its place.
                "gradient_checkpointing" if *value == json!(false) && recomputes => {
                    out.idle(&format!("{key}: false"), "activation_checkpointing of fsdp_config is on");
                }
                // In addition to all linear layers.
                "lora_target_modules" if tree.get("lora_target_linear") == Some(&json!(true)) && are_linear(value) => {
                    out.idle(key, "lora_target_linear adapts all linear layers");
                }
                "plugins" => plugins(value, out)?,
                "eot_tokens"
                    if strings(value).is_some_and(|all| all.iter().all(|one| ENDS.contains(&one.as_str()))) =>
                {
                    out.idle(key, "a turn ends where the chat template ends it, and that token has a loss");
                }
                "val_set_size"
                    if value.as_f64() == Some(0.0) && tree.get("test_datasets").is_some_and(|sets| !sets.is_null()) =>
                {
                    out.idle(&format!("{key}: {value}"), "the rows of test_datasets are evaluated");
                }
                _ => out.set(key, value.clone(), key)?,
            }
            Ok(())
        });
    }
    if out.tree.contains_key("join_rows") {
        out.without_packing("sample_packing");
    }
    Ok(())
}

/// As Axolotl's `check_chat_template_config`: the text of a template is used unless another template is named.
fn name_template(keys: &mut FileTree) {
    let given = |key: &str| keys.get(key).is_some_and(|value| !value.is_null() && value != "");
    if given("chat_template_jinja") && !given("chat_template") {
        keys.insert("chat_template".into(), json!("jinja"));
    }
}

/// Its tokens must be those of the tokenizer, but for the one that pads.
fn special_tokens(value: &Value, out: &mut Rewriting) -> Result<()> {
    let Some(tokens) = value.as_object() else {
        return Err(out.refuse("special_tokens", value, "expected names with their tokens"));
    };
    let mut expected = Vec::new();
    for (name, token) in tokens.iter().filter(|(_, token)| !token.is_null()) {
        let at = format!("special_tokens.{}", quote(name));
        match token.as_str() {
            Some(_) if name == "pad_token" => out.set(&at, token.clone(), &at)?, // a row of `synonyms.tsv`
            Some(token) => expected.push(format!("{name}={token}")),
            None => return Err(out.refuse(&at, token, "expected a token")),
        }
    }
    out.set("special_tokens", if expected.is_empty() { Value::Null } else { json!(expected) }, "special_tokens")
}

/// These modules are linear layers of blocks.
fn are_linear(modules: &Value) -> bool {
    let linear = |name: &String| name.ends_with("_proj");
    strings(modules).is_some_and(|names| names.iter().all(linear))
}

/// Plugins of Axolotl's that replace kernels mean nothing here.
fn plugins(value: &Value, out: &mut Rewriting) -> Result<()> {
    for name in strings(value).ok_or_else(|| out.refuse("plugins", value, "expected names of Python classes"))? {
        let at = format!("plugins: {}", quote(&name));
        match ["axolotl.integrations.cut_cross_entropy.", "axolotl.integrations.liger."]
            .iter()
            .any(|kernels| name.starts_with(kernels))
        {
            true => out.idle(&at, "kernels are already fused (Axolotl)"),
            false => return Err(out.refuse("plugins", &json!(name), "there are no Python classes to call")),
        }
    }
    Ok(())
}

fn template(tree: &FileTree, value: &Value, out: &mut Rewriting) -> Result<()> {
    let own = "the template is that of the model's tokenizer; --tokenizer-chat-template FILE replaces it";
    match value.as_str() {
        Some("jinja") => match tree.get("chat_template_jinja").filter(|text| !text.is_null()) {
            Some(text) => out.set("tokenizer_chat_template", text.clone(), "chat_template_jinja"),
            None => Err(out.refuse("chat_template", value, "chat_template_jinja, its text, is missing")),
        },
        Some(name) if name.contains(['/', '.', '{']) => {
            out.set("tokenizer_chat_template", value.clone(), "chat_template")
        }
        Some("chatml") if tree.get("datasets").is_none_or(has_chats) => {
            out.set("tokenizer_chat_template", json!(CHATML), "chat_template")
        }
        Some("alpaca") => Err(out.refuse("chat_template", value, "rows of `type: alpaca` have Alpaca's prompt")),
        Some(name) => {
            out.idle(&format!("chat_template: {}", quote(name)), own);
            Ok(())
        }
        None => Err(out.refuse("chat_template", value, own)),
    }
}

/// The text of a template where another one is named.
fn unnamed(keys: &FileTree, at: &str, out: &mut Rewriting) {
    if keys.get("chat_template").is_some_and(|name| name != "jinja") {
        out.idle(at, "chat_template names another template (Axolotl)");
    }
}

/// All conversations are rendered by one template: Axolotl has one for each data set, where it says so.
fn same_template(tree: &FileTree, out: &Rewriting) -> Result<()> {
    let lists = ["datasets", "test_datasets"].into_iter().filter_map(|list| Some((list, tree.get(list)?.as_array()?)));
    let sets =
        lists.flat_map(|(list, sets)| sets.iter().enumerate().map(move |(i, set)| (format!("{list}[{i}]"), set)));
    let template = |set: &Value| {
        let of = |from: &dyn Fn(&str) -> Value| {
            let name = from("chat_template");
            let text = if name == "jinja" { from("chat_template_jinja") } else { Value::Null };
            (!name.is_null() && name != "tokenizer_default").then_some((name, text))
        };
        of(&|key| set[key].clone()).or_else(|| of(&|key| tree.get(key).cloned().unwrap_or_default()))
    };
    let mut chats = sets.filter(|(_, set)| has_chats(set)).map(|(at, set)| (at, template(set)));
    let Some((first, one)) = chats.next() else { return Ok(()) };
    match chats.find(|(_, other)| *other != one) {
        Some((at, _)) => Err(out.fault(format!(
            "{first} and {at} have different values of chat_template: all data sets are rendered by one template"
        ))),
        None => Ok(()),
    }
}

/// Some rows are conversations.
fn has_chats(sets: &Value) -> bool {
    let is_chat = |set: &Value| set["type"].as_str().is_some_and(|kind| kind.contains("chat") || kind == "sharegpt");
    sets.as_array().map_or_else(|| is_chat(sets), |sets| sets.iter().any(is_chat))
}

/// The entries of `list`, as the paths of `key` and how their rows are read.
fn data_sets(list: &str, value: &Value, key: &str, pairs: bool, out: &mut Rewriting) -> Result<()> {
    let entries = match value {
        Value::Array(entries) => entries.iter().collect(),
        one => vec![one],
    };
    let mut words = Vec::new();
    for (i, entry) in entries.into_iter().enumerate() {
        let at = format!("{list}[{i}]");
        let default = if list == "pretraining_dataset" { Some(RowKind::Completion) } else { None };
        words.extend(match entry {
            Value::String(path) => {
                rows(&at, default, &json!({}), pairs, out)?;
                vec![path.clone()]
            }
            Value::Object(body) => entry_words(&at, body, default, pairs, out)?,
            other => return Err(out.refuse(&at, other, "expected the keys of a data set")),
        });
    }
    let all = out.tree.get(key).and_then(strings).unwrap_or_default();
    out.tree.insert(key.into(), json!([all, words].concat()));
    Ok(())
}

fn entry_words(
    at: &str,
    body: &FileTree,
    default: Option<RowKind>,
    pairs: bool,
    out: &mut Rewriting,
) -> Result<Vec<String>> {
    let mut place = DataPlace::default();
    let mut kind = default;
    let mut roles_of = None;
    let mut mapped = MessageFields { role: "role".into(), content: "content".into() };
    for (key, value) in body.iter().filter(|(_, value)| !value.is_null()) {
        let at_key = format!("{at}.{}", quote(key));
        let text = || value.as_str().map(String::from);
        let need = |found: Option<String>| found.ok_or_else(|| out.refuse(&at_key, value, "expected a text"));
        let is = |only: &[Value]| only.contains(value);
        match key.as_str() {
            "path" => place.path = need(text())?,
            "data_files" => {
                place.files = strings(value).ok_or_else(|| out.refuse(&at_key, value, "expected paths"))?;
            }
            "split" => place.split = Some(need(text())?),
            "revision" => place.revision = Some(need(text())?),
            "name" => place.subset = Some(need(text())?),
            "ds_type" if is(&[json!("json"), json!("parquet"), json!("text"), json!("csv")]) => {}
            "ds_type" => return Err(out.refuse(&at_key, value, "files are text, JSON, CSV, Parquet or tokens")),
            "type" => kind = Some(kind_of(&at_key, value, pairs, out)?),
            // Read with the type, below.
            "field" | "text_column" | "field_messages" | "field_chosen" | "field_rejected" => {}
            "message_field_role" => mapped.role = need(text())?,
            "message_field_content" => mapped.content = need(text())?,
            "message_property_mappings" => mapped.read(&at_key, value, out)?,
            "roles" => roles_of = Some((at_key, value)),
            "roles_to_train" if is(&[json!(["assistant"]), json!(["gpt", "assistant"]), json!(["gpt"])]) => {}
            "roles_to_train" => return Err(out.refuse(&at_key, value, "only answers of the assistant have a loss")),
            "train_on_eos" | "train_on_eot" if is(&[json!("turn")]) => {}
            "train_on_eos" | "train_on_eot" => {
                return Err(out.refuse(&at_key, value, "the end of each trained answer has a loss"));
            }
            "chat_template" => template(body, value, out)?,
            "chat_template_jinja" => unnamed(body, &at_key, out),
            "trust_remote_code" => out.idle(&at_key, "no code of a data set is executed (Axolotl)"),
            _ => {
                return Err(
                    out.fault(format!("{at_key} has no equivalent: --dataset takes a path or a name of the hub"))
                );
            }
        }
    }
    out.message_fields(&mapped.role, &mapped.content);
    if let Some((at, value)) = roles_of {
        roles(&at, value, mapped.role == "role", out)?;
    }
    rows(at, kind, &Value::Object(body.clone()), pairs, out)?;
    if place.path.is_empty() && place.files.is_empty() {
        return Err(out.fault(format!("{at}.path is missing: set it to a path or a name of the hub")));
    }
    place.words(at, out)
}

/// Fields of a data set's messages.
struct MessageFields {
    role: String,
    content: String,
}

impl MessageFields {
    /// `message_property_mappings`.
    fn read(&mut self, at: &str, value: &Value, out: &mut Rewriting) -> Result<()> {
        for (ours, field) in value.as_object().into_iter().flatten() {
            let field = field.as_str().ok_or_else(|| out.refuse(at, value, "expected names of fields"))?;
            match ours.as_str() {
                "role" => self.role = field.into(),
                "content" => self.content = field.into(),
                ours => out.rename("rename_fields", field, ours),
            }
        }
        Ok(())
    }
}

/// Names of roles in the data, by role. Those of ShareGPT need none where its field `from` has them.
fn roles(at: &str, value: &Value, has_roles: bool, out: &mut Rewriting) -> Result<()> {
    for (role, names) in value.as_object().into_iter().flatten() {
        let names = strings(names).filter(|_| ["user", "assistant", "system", "tool"].contains(&role.as_str()));
        let names =
            names.ok_or_else(|| out.refuse(at, value, "expected user, assistant, system or tool with names"))?;
        names.iter().for_each(|name| out.rename_role(name, role, has_roles));
    }
    Ok(())
}

fn kind_of(at: &str, value: &Value, pairs: bool, out: &Rewriting) -> Result<RowKind> {
    match value.as_str() {
        Some("alpaca") => Ok(RowKind::Alpaca),
        Some("completion" | "pretrain") => Ok(RowKind::Completion),
        Some("chat_template" | "sharegpt") => Ok(RowKind::Chat),
        Some("chat_template.default" | "chat_template.argilla") if pairs => Ok(RowKind::Chat),
        Some(name) if pairs && let Some(kind) = judged(name) => Ok(kind),
        Some(_) if pairs => Err(out.refuse(
            at,
            value,
            "pairs are rows of prompt, chosen and rejected, or of messages: chat_template.default",
        )),
        Some(_) => Err(out.refuse(at, value, "rows are read as alpaca, chat_template or completion")),
        None if value.is_object() && !pairs => Ok(RowKind::Own),
        None => Err(out.refuse(at, value, "expected the name of a type")),
    }
}

/// Axolotl's prompt_strategies/dpo, kto and bradley_terry.
fn judged(name: &str) -> Option<RowKind> {
    let (template, fields) = name.split_once('.')?;
    let prompt = match fields {
        "chat_template" if template == "bradley_terry" => {
            return Some(RowKind::Judged { prompt: "input", template: None });
        }
        "intel" => "question",
        "icr" => "input",
        "prompt_pairs" | "ultra" => "prompt",
        _ => return None,
    };
    let template = [("chatml", CHATML), ("llama3", LLAMA3)].into_iter().find(|(name, _)| *name == template)?.1;
    Some(RowKind::Judged { prompt, template: Some(template) })
}

/// Axolotl's prompt_strategies/user_defined.py, of a single field and a constant system prompt.
fn own_prompt(at: &str, kind: &Value, out: &mut Rewriting) -> Result<()> {
    const KEYS: [&str; 6] =
        ["field_instruction", "field_output", "format", "no_input_format", "system_prompt", "system_format"];
    let given = kind.as_object().into_iter().flatten().filter(|(_, value)| !value.is_null() && *value != "");
    for (key, value) in given {
        let at = format!("{at}.{}", quote(key));
        if !KEYS.contains(&key.as_str()) {
            return Err(out.refuse(&at, value, "a prompt is made of one field: join them in the rows"));
        }
        if !value.is_string() {
            return Err(out.refuse(&at, value, "expected a text"));
        }
    }
    let text = |key: &str| kind[key].as_str();
    let (Some(asked), Some(answer)) = (text("field_instruction"), text("field_output")) else {
        return Err(out.refuse(at, kind, "field_instruction and field_output are missing"));
    };
    // `format` is that of prompts with an input.
    let format = text("no_input_format").or(text("format")).unwrap_or("{instruction}");
    let system = match text("system_prompt") {
        Some(system) => text("system_format").unwrap_or("{system}").replace("{system}", system),
        None => String::new(),
    };
    let plain = format.replacen("{instruction}", "", 1);
    if plain.len() == format.len() || [&plain, &system].iter().any(|text| text.contains(['{', '}'])) {
        return Err(out.refuse(at, kind, "its format holds more than one {instruction}, or other braces"));
    }
    let template = format!("{system}{}", format.replacen("{instruction}", "{}", 1));
    out.set("input_key", json!(asked), &format!("{at}.field_instruction"))?;
    out.set("output_key", json!(answer), &format!("{at}.field_output"))?;
    out.set("input_template", json!(template), &format!("{at}.format"))?;
    out.set("add_special_tokens", json!(true), at)
}

/// How rows are read, as keys of ours.
fn rows(at: &str, kind: Option<RowKind>, body: &Value, pairs: bool, out: &mut Rewriting) -> Result<()> {
    let field = |key: &str| body[key].as_str();
    match kind {
        None => Ok(()),
        Some(RowKind::Alpaca) => {
            out.agree("row_format", json!("alpaca"));
            out.set("apply_chat_template", json!(false), &format!("{at}.type"))
        }
        Some(RowKind::Own) => own_prompt(&format!("{at}.type"), &body["type"], out),
        Some(RowKind::Judged { prompt, template }) => {
            let at = format!("{at}.type");
            if let Some(template) = template {
                out.set("tokenizer_chat_template", json!(template), &at)?;
            }
            out.set("prompt_key", json!(prompt), &at)?;
            out.set("apply_chat_template", json!(true), &at)
        }
        Some(RowKind::Completion) => {
            out.set("pretrain_mode", json!(true), &format!("{at}.type"))?;
            out.set("join_rows", json!(true), &format!("{at}.type"))?;
            let text = field("field").or(field("text_column")).unwrap_or("text");
            out.set("input_key", json!(text), &format!("{at}.field"))
        }
        Some(RowKind::Chat) => {
            out.set("apply_chat_template", json!(true), &format!("{at}.type"))?;
            let messages = field("field_messages").unwrap_or("messages");
            if pairs {
                out.set("prompt_key", json!(messages), &format!("{at}.field_messages"))?;
                out.set("chosen_key", json!(field("field_chosen").unwrap_or("chosen")), at)?;
                return out.set("rejected_key", json!(field("field_rejected").unwrap_or("rejected")), at);
            }
            out.set("multiturn", json!(true), &format!("{at}.type"))?;
            match messages {
                "messages" if field("field_messages").is_none() => Ok(()),
                "messages" | "conversations" => {
                    out.agree("row_format", json!(messages));
                    Ok(())
                }
                other => out.set("input_key", json!(other), &format!("{at}.field_messages")),
            }
        }
    }
}
