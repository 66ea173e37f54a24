//! Which files of a folder of rows are read: those of its split `train`, or of the one that is asked for, as in
//! `datasets`. Never looks into a file but the folder's card.
use crate::base::{Error, Result, open};
use crate::hub::{not_train, split_files};
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

/// Those of `files`, found below `folder`, that belong to other splits than `train`.
pub(super) fn not_of_train<'a>(folder: &Path, files: impl Iterator<Item = &'a Path>) -> Result<BTreeSet<PathBuf>> {
    let root = absolute(folder)?;
    let out = not_train(&folder.display().to_string(), &below(&root, files), &card(folder));
    let out = out.map_err(|what| Error::input(format!("`dataset` {what}")))?;
    Ok(out.into_iter().map(|path| root.join(path)).collect())
}

/// Those of `files`, found below `folder`, that are the split `split`.
pub(super) fn of_split<'a>(folder: &Path, split: &str, files: impl Iterator<Item = &'a Path>) -> Result<Vec<PathBuf>> {
    let below = below(&absolute(folder)?, files);
    let found = split_files(&folder.display().to_string(), &below, &card(folder), split).map_err(Error::input)?;
    Ok(found.into_iter().map(|path| folder.join(path)).collect())
}

fn absolute(folder: &Path) -> Result<PathBuf> {
    std::path::absolute(folder).map_err(|e| Error::io("resolve", folder, e))
}

/// Names of `files` relative to `root`.
fn below<'a>(root: &Path, files: impl Iterator<Item = &'a Path>) -> Vec<String> {
    files.filter_map(|path| Some(path.strip_prefix(root).ok()?.to_str()?.to_string())).collect()
}

fn card(folder: &Path) -> String {
    String::from_utf8_lossy(&open::read(&folder.join("README.md")).unwrap_or_default()).into_owned()
}
