//! The directory that stands for a GGUF file: which files it is made of. Never reads one.
use crate::base::{Error, Result, open};
use std::fs;
use std::path::{Path, PathBuf};

/// How the names of directories end that [`super::as_directory`] makes.
pub const MADE: &str = ".gguf-model";

/// The GGUF files in the directory of a model: those that it was made of, or whatever somebody put there. Sorted.
pub fn within(dir: &Path) -> Result<Vec<PathBuf>> {
    let mut files = open::listed(dir).map_err(|e| Error::in_file(dir, e))?;
    files.retain(|path| path.extension().is_some_and(|e| e.eq_ignore_ascii_case("gguf")));
    Ok(files)
}

/// The file that `dir` was made of by [`super::as_directory`], or `dir` itself.
pub fn origin(dir: &Path) -> PathBuf {
    let made = dir.file_name().is_some_and(|name| name.to_string_lossy().ends_with(MADE));
    let first = within(dir).ok().and_then(|files| files.into_iter().next()).filter(|_| made);
    first.and_then(|link| fs::canonicalize(link).ok()).unwrap_or(dir.to_path_buf())
}
