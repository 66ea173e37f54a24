//! Files of other tools, recognized by their keys. Most keys are flags that `synonyms.tsv` knows; what a flag cannot
//! say (lists of data sets, files next to the file) is rewritten here as keys of ours. Never reads a row of data.
use crate::base::Result;
pub use rewriting::FileTree;
use rewriting::Rewriting;
use serde_json::{Value, json};
use std::path::Path;

mod axolotl;
mod entry;
mod llama_factory;
mod rewriting;

/// Whose file it is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum FileTool {
    /// Ours, or one whose keys are all named like flags.
    #[default]
    Own,
    Axolotl,
    LlamaFactory,
    /// The configuration of `--deepspeed`.
    DeepSpeed,
}

impl FileTool {
    fn of(tree: &FileTree) -> FileTool {
        let has = |keys: &[&str]| keys.iter().any(|key| tree.contains_key(*key));
        let names = |key: &str| tree.get(key).is_some_and(|value| value.is_string() || value.is_null());
        if names("base_model")
            && has(&["datasets", "pretraining_dataset", "adapter", "micro_batch_size", "sequence_len"])
        {
            FileTool::Axolotl
        } else if names("model_name_or_path") && has(&["stage", "finetuning_type", "cutoff_len", "template"]) {
            FileTool::LlamaFactory
        } else if has(&["zero_optimization", "train_micro_batch_size_per_gpu"]) {
            FileTool::DeepSpeed
        } else {
            FileTool::Own
        }
    }
    /// The section of `synonyms.tsv` whose rows are for keys of this tool alone.
    pub fn section(self) -> &'static str {
        match self {
            FileTool::Axolotl => "axolotl",
            _ => "",
        }
    }
}

/// What a file is of a tool whose files are not read.
fn unread(tree: &FileTree) -> Option<&'static str> {
    if tree.get("actor_rollout_ref").is_some_and(Value::is_object) {
        Some("is a file of verl, which is not read: its keys are flags here, such as actor_rollout_ref.model.path=M")
    } else if tree.values().any(|value| value.get("_component_").is_some()) {
        Some("is a recipe of torchtune, which is not read: `flatshard sft MODEL DATA` takes what it says as flags")
    } else {
        None
    }
}

/// A file's tree, rewritten.
pub struct Translated {
    pub tool: FileTool,
    pub tree: FileTree,
    pub notes: Vec<String>,
    /// What is wrong with its keys, each with the path of the file.
    pub faults: Vec<String>,
}

/// `tree` with keys that this program has, for the file at `path`.
pub fn translate(tree: FileTree, path: &Path) -> Result<Translated> {
    let tool = FileTool::of(&tree);
    let mut out = Rewriting::new(path);
    match tool {
        FileTool::Own => match unread(&tree) {
            Some(what) => return Err(out.fault(what.into())),
            None => out.tree = tree,
        },
        FileTool::DeepSpeed => out.set("deepspeed", json!(path), "deepspeed")?,
        FileTool::Axolotl => axolotl::rewrite(tree, &mut out)?,
        FileTool::LlamaFactory => llama_factory::rewrite(tree, &mut out)?,
    }
    Ok(Translated { tool, tree: out.tree, notes: out.notes, faults: out.faults })
}
