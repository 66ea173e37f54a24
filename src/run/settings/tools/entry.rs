//! A data set of another tool's list, as what `--dataset` takes. Never opens it.
use super::rewriting::Rewriting;
use crate::base::Result;
use serde_json::Value;
use std::path::Path;

/// Where the rows are.
#[derive(Default)]
pub(super) struct DataPlace {
    pub path: String,
    /// Files in place of the path.
    pub files: Vec<String>,
    pub split: Option<String>,
    pub revision: Option<String>,
    /// Name of a configuration, or a folder of the repository.
    pub subset: Option<String>,
}

impl DataPlace {
    /// The words of `--dataset`; `at` is the entry's key in the file.
    pub fn words(self, at: &str, out: &Rewriting) -> Result<Vec<String>> {
        if let Some(split) = self.split.as_ref().filter(|split| split.contains(['[', '+'])) {
            let why = "a split is read whole: set --max-samples, or write the rows to a file";
            return Err(out.refuse(&format!("{at}.split"), &Value::from(split.as_str()), why));
        }
        if !self.files.is_empty() {
            return Ok(self.files);
        }
        if Path::new(&self.path).exists() {
            return Ok(vec![self.path]);
        }
        let subset = self.subset.filter(|name| name != "default");
        let (revision, split) = (self.revision, self.split.filter(|split| split != "train"));
        let mut name = self.path;
        name.extend(revision.iter().flat_map(|revision| ["@", revision]));
        name.extend(subset.iter().flat_map(|subset| ["/", subset]));
        name.extend(split.iter().flat_map(|split| [":", split]));
        Ok(vec![name])
    }
}
