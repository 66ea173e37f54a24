//! Which files of a folder of rows are trained on: those of its split `train`, as in `datasets`. Never looks into a
//! file but the folder's card.
use crate::base::{Error, Result, open};
use crate::hub::not_train;
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

/// Those of `files`, found below `folder`, that belong to other splits.
pub(super) fn not_of_train<'a>(folder: &Path, files: impl Iterator<Item = &'a Path>) -> Result<BTreeSet<PathBuf>> {
    let root = std::path::absolute(folder).map_err(|e| Error::io("resolve", folder, e))?;
    let below: Vec<String> =
        files.filter_map(|path| Some(path.strip_prefix(&root).ok()?.to_str()?.to_string())).collect();
    let card = open::read(&folder.join("README.md")).unwrap_or_default();
    let name = folder.display().to_string();
    let out = not_train(&name, &below, &String::from_utf8_lossy(&card));
    let out = out.map_err(|what| Error::input(format!("`dataset` {what}")))?;
    Ok(out.into_iter().map(|path| root.join(path)).collect())
}
