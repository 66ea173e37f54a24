//! A data set of another tool's list, as what `--dataset` takes. Never opens it.
use super::rewriting::Rewriting;
use crate::base::{Result, quote};
use crate::data::corpus::{self, FolderSplit};
use crate::data::slice::RowSlice;
use serde_json::Value;
use std::path::Path;

/// Where the rows are.
#[derive(Default)]
pub(super) struct DataPlace {
    pub path: String,
    /// Files in place of the path.
    pub files: Vec<String>,
    /// Also with a slice.
    pub split: Option<String>,
    pub revision: Option<String>,
    /// Name of a configuration, or a folder of the repository.
    pub subset: Option<String>,
}

impl DataPlace {
    /// The words of `--dataset`; `at` is the entry's key in the file.
    pub fn words(self, at: &str, out: &Rewriting) -> Result<Vec<String>> {
        if let Some(split) = self.split.as_ref().filter(|split| split.contains('+')) {
            let why = "a sum of splits is not read: list each as a data set of its own";
            return Err(out.refuse(&format!("{at}.split"), &Value::from(split.as_str()), why));
        }
        let (split, slice) = self.split.as_deref().map_or(("train", ""), RowSlice::cut);
        let sliced = |files: Vec<String>| match files.len() > 1 && !slice.is_empty() {
            true => {
                let why = "the split has several files, and a slice is of one: put them in a directory";
                Err(out.refuse(&format!("{at}.split"), &Value::from(format!("{split}{slice}")), why))
            }
            false => Ok(files.into_iter().map(|file| file + slice).collect()),
        };
        let dir = Path::new(&self.path);
        if !self.files.is_empty() {
            // As in the library `datasets`, they are relative to the directory.
            let within = |file: String| match dir.join(&file) {
                path if !Path::new(&file).exists() && path.exists() => path.display().to_string(),
                _ => file,
            };
            return sliced(self.files.into_iter().map(within).collect());
        }
        let subset = self.subset.filter(|name| name != "default");
        if dir.exists() {
            let config = subset.as_deref();
            if let Some(subset) = config.filter(|config| !corpus::has_config(dir, config)) {
                let why = "no card names it there: name the files with data_files";
                return Err(out.refuse(&format!("{at}.name"), &Value::from(subset), why));
            }
            if config.is_none() && (split == "train" || !dir.is_dir()) {
                return Ok(vec![self.path + slice]);
            }
            let files = corpus::of_split(FolderSplit { folder: dir, config, split });
            let files = files.map_err(|e| out.fault(format!("{at}.split is {}: {e}", quote(split))))?;
            return sliced(files.iter().map(|file| file.display().to_string()).collect());
        }
        let (revision, split) = (self.revision, Some(split).filter(|split| *split != "train"));
        let mut name = self.path;
        name.extend(revision.iter().flat_map(|revision| ["@", revision]));
        name.extend(subset.iter().flat_map(|subset| ["/", subset]));
        name.extend(split.into_iter().flat_map(|split| [":", split]));
        Ok(vec![name + slice])
    }
}
