//! Whether a directory is a model's. Never reads a tensor.
use super::hf;
use crate::base::{Error, Result, open};
use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

/// Whether `dir` looks like a model directory. Common mistakes get their own message: a hub name, the hub's cache,
/// weights in a format that can execute code when read.
pub fn is_model(dir: &Path) -> Result<()> {
    let refuse = |what: String| Err(Error::in_file(dir, what));
    let list = match fs::read_dir(dir) {
        Ok(list) => list,
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => {
            return refuse(
                "no such file or directory, and not a name of the hub (OWNER/NAME or OWNER/NAME@REVISION)".into(),
            );
        }
        Err(e) => return refuse(format!("cannot be listed ({e}): name a model directory")),
    };
    let names: BTreeSet<String> = list.flatten().map(|e| e.file_name().to_string_lossy().into_owned()).collect();
    let any = |fits: &dyn Fn(&str) -> bool| names.iter().any(|n| fits(n));
    if any(&|n| n == "model.safetensors" || n == "model.safetensors.index.json") {
        return Ok(());
    }
    if let Some(file) = names.iter().find(|name| name.ends_with(".gguf")) {
        return match names.contains(hf::FILE) {
            true => Ok(()),
            false => {
                refuse(format!("has GGUF files, and no {}: name one of them: {}", hf::FILE, dir.join(file).display()))
            }
        };
    }
    if names.contains("snapshots") {
        let head = open::read(&dir.join("refs/main")).unwrap_or_default();
        let head = String::from_utf8_lossy(&head);
        let snapshot = dir.join("snapshots").join(if head.trim().is_empty() { "REVISION" } else { head.trim() });
        return refuse(format!("is the hub's cache of a model: use {}", snapshot.display()));
    }
    if any(&|n| n.starts_with("pytorch_model") && n.contains(".bin")) {
        return refuse(
            "has only pytorch_model*.bin, a pickle file, which can execute code and is not supported. If you trust it, \
             convert it in Python: AutoModelForCausalLM.from_pretrained(DIR).save_pretrained(NEW_DIR)"
                .into(),
        );
    }
    if names.contains("adapter_config.json") {
        let base = super::adapter::base(dir).unwrap_or("MODEL".into());
        return refuse(format!(
            "is a LoRA adapter, not a model. Go on training it with `pretrain: {base}` `lora_adapter: {0}`; or merge it with \
             `pretrain: {base}` `lora_merge: {0}` `save_hf: MERGED`, then use MERGED",
            dir.display()
        ));
    }
    refuse(
        "is not a model directory: it has neither model.safetensors nor model.safetensors.index.json. In a checkpoint \
         directory, the models are in step-*"
            .into(),
    )
}
