//! Which files of a folder of rows are read: those of its split `train`, or of the one that is asked for, as in
//! `datasets`. Never looks into a file but the folder's card.
use crate::base::{Error, Result, open};
use crate::hub::{self, VIEW_CARD, split_files};
use std::path::{Path, PathBuf};

/// The `files`, found below `folder`, that are read, in order.
pub(super) fn reading_order(folder: &Path, files: &[&Path]) -> Result<Vec<PathBuf>> {
    let root = absolute(folder)?;
    let named = below(&root, files.iter().copied());
    let read = hub::reading_order(&folder.display().to_string(), &named, &card(folder));
    let read = read.map_err(|what| Error::input(format!("`dataset` {what}")))?;
    // No card names what is not UTF-8.
    let others = files.iter().filter(|path| path.strip_prefix(&root).is_ok_and(|inner| inner.to_str().is_none()));
    Ok(read.into_iter().map(|path| root.join(path)).chain(others.map(|path| path.to_path_buf())).collect())
}

/// A split of a folder of rows, or of one configuration of its card.
#[derive(Clone, Copy)]
pub struct FolderSplit<'a> {
    pub folder: &'a Path,
    pub config: Option<&'a str>,
    pub split: &'a str,
}

impl FolderSplit<'_> {
    /// The `files`, found below the folder, that are the split.
    pub(super) fn of<'a>(&self, files: impl Iterator<Item = &'a Path>) -> Result<Vec<PathBuf>> {
        let FolderSplit { folder, config, split } = *self;
        let below = below(&absolute(folder)?, files);
        let found = split_files(&folder.display().to_string(), &below, &card(folder), config, split);
        Ok(found.map_err(Error::input)?.into_iter().map(|path| folder.join(path)).collect())
    }
}

/// Whether the card of `folder` has a configuration of this name.
pub fn has_config(folder: &Path, name: &str) -> bool {
    hub::is_config(&card(folder), name)
}

pub(super) fn absolute(folder: &Path) -> Result<PathBuf> {
    std::path::absolute(folder).map_err(|e| Error::io("resolve", folder, e))
}

/// Names of `files` relative to `root`.
fn below<'a>(root: &Path, files: impl Iterator<Item = &'a Path>) -> Vec<String> {
    files.filter_map(|path| Some(path.strip_prefix(root).ok()?.to_str()?.to_string())).collect()
}

fn card(folder: &Path) -> String {
    let read = open::read(&folder.join(VIEW_CARD)).or_else(|_| open::read(&folder.join("README.md")));
    String::from_utf8_lossy(&read.unwrap_or_default()).into_owned()
}
