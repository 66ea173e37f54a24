//! Names of the hub among the settings, and the files that they stand for. Never resolves one: `run/resolve.rs` does.
use crate::data::slice::RowSlice;
use crate::hub::HubCommits;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::path::{Path, PathBuf};

/// A name that was given where a path can be.
#[derive(Serialize, Deserialize, Clone, Debug, PartialEq)]
pub struct NamedFiles {
    /// The field.
    pub setting: String,
    /// What stands there.
    pub given: String,
    /// The name that always means the same files.
    pub pinned: String,
    pub path: PathBuf,
}

/// All names of a run.
#[derive(Serialize, Deserialize, Clone, Debug, Default, PartialEq)]
pub struct HubNames {
    pub all: Vec<NamedFiles>,
    /// What revisions were when the run began.
    pub commits: HubCommits,
    /// Models are there without their weights, which a plan does not need.
    pub without_weights: bool,
}

/// The base model of an adapter that `--generate` reads; `given` is the adapter.
pub const BASE: &str = "base_model_name_or_path";

/// The prompts that `--generate` names.
pub const PROMPTS: &str = "generate";

/// `NAME[FROM:TO]:WEIGHT` of a data set: what it is called, and what is read of it.
pub struct DataName<'a> {
    pub name: &'a str,
    pub weight: Option<&'a str>,
    /// Slice and weight as they were written.
    pub rest: &'a str,
}

impl DataName<'_> {
    pub fn of(text: &str) -> DataName<'_> {
        let weighted = text.rsplit_once(':').filter(|(_, weight)| weight.parse::<f64>().is_ok());
        let weighted = weighted.filter(|_| !Path::new(text).exists());
        let (name, weight) = weighted.map_or((text, None), |(name, weight)| (name, Some(weight)));
        let (name, rest) = text.split_at(RowSlice::cut(name).0.len());
        DataName { name, weight, rest }
    }
}

impl HubNames {
    /// The files of what `setting` names.
    pub fn files(&self, setting: &str) -> Option<&Path> {
        self.all.iter().find(|named| named.setting == setting).map(|named| named.path.as_path())
    }
    /// Puts the names in the place of the paths, so that settings mean the same files on another machine.
    pub fn restore(&self, settings: &mut Value) {
        match settings {
            Value::Object(map) => map.values_mut().for_each(|value| self.restore(value)),
            Value::Array(all) => all.iter_mut().for_each(|value| self.restore(value)),
            Value::String(text) => {
                let names = self.all.iter().filter(|named| named.setting != BASE);
                let named = names.map(|named| (named.path.display().to_string(), &named.pinned));
                for (path, pinned) in named {
                    match text.strip_prefix(&path) {
                        Some("") => return text.clone_from(pinned),
                        Some(rest) if rest.starts_with([':', '[']) => return *text = format!("{pinned}{rest}"),
                        _ => {}
                    }
                }
            }
            _ => {}
        }
    }
}
