//! Finds the files to train on and determines their kind from names, sizes and times. Never reads more than the
//! beginning of a `.json` file.
use super::array::{self, Holds};
use crate::base::{Error, Result};
use include_dir::{Dir, DirEntry, include_dir};
use std::collections::BTreeSet;
use std::fs::{self, Metadata};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use xxhash_rust::xxh3::xxh3_64;

/// The kind of a file, by its name; for `.json`, by its first element or line.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum CorpusKind {
    /// Concatenated, with an end-of-text token after each file.
    Text,
    /// `.jsonl`, and `.json` that is an array of objects or has one per line.
    Rows,
    /// `.parquet`: rows stored as columns.
    Parquet,
    /// `.npy`: token ids, concatenated without separators.
    Tokens,
}

impl CorpusKind {
    /// None: the content decides.
    fn by_name(path: &Path) -> Option<CorpusKind> {
        match path.extension().and_then(|e| e.to_str()) {
            Some("jsonl") => Some(CorpusKind::Rows),
            Some("parquet") => Some(CorpusKind::Parquet),
            Some("npy") => Some(CorpusKind::Tokens),
            Some("json") => None,
            _ => Some(CorpusKind::Text),
        }
    }
    /// The kind of each file. Objects in a directory that also holds text count as text, as in a source tree, unless
    /// they are clearly data rows: then the user must say which is meant.
    fn of(files: &[CorpusFile]) -> Result<Vec<CorpusKind>> {
        let text = files.iter().any(|file| CorpusKind::by_name(&file.path) == Some(CorpusKind::Text));
        let kind = |file: &CorpusFile| {
            let rows = |holds| match holds {
                Holds::Rows => true,
                Holds::Objects => file.named || !text,
                Holds::Text => false,
            };
            Ok(match CorpusKind::by_name(&file.path) {
                Some(kind) => kind,
                None if rows(array::holds(&file.path).map_err(|e| Error::io("read", &file.path, e))?) => {
                    CorpusKind::Rows
                }
                None => CorpusKind::Text,
            })
        };
        files.iter().map(kind).collect()
    }
    fn name(self) -> &'static str {
        match self {
            CorpusKind::Text => "text",
            CorpusKind::Rows => "rows (.jsonl, .json)",
            CorpusKind::Parquet => "rows (.parquet)",
            CorpusKind::Tokens => "token arrays (.npy)",
        }
    }
    /// Rows are individual samples, not slices of a stream.
    pub fn is_rows(self) -> bool {
        matches!(self, CorpusKind::Rows | CorpusKind::Parquet)
    }
}

#[derive(Clone, Debug)]
pub struct CorpusFile {
    pub path: PathBuf,
    pub size: u64,
    /// Nanoseconds since 1970; with path and size, detects that a file has changed.
    pub modified: i128,
    /// Named by the user, not found in a directory, so it must be readable.
    pub named: bool,
    /// The text itself if it is embedded in this program; `path` is then only a name.
    pub embedded: Option<&'static [u8]>,
}

impl CorpusFile {
    fn new(path: PathBuf, meta: &Metadata, named: bool) -> CorpusFile {
        let modified = meta.mtime() as i128 * 1_000_000_000 + meta.mtime_nsec() as i128;
        CorpusFile { path, size: meta.len(), modified, named, embedded: None }
    }
}

/// Files of one kind, in reading order.
#[derive(Clone, Debug)]
pub struct Corpus {
    pub kind: CorpusKind,
    pub files: Vec<CorpusFile>,
    /// A short description, for the log.
    pub what: String,
}

impl Corpus {
    /// The files of the `dataset` paths: files as named, directories recursively, sorted by path. Hidden names are
    /// skipped, and links to directories are not followed.
    pub fn find(paths: &[PathBuf]) -> Result<Corpus> {
        let mut files = Vec::new();
        for path in paths {
            let meta = fs::metadata(path).map_err(|e| missing(path, e))?;
            let path = fs::canonicalize(path).map_err(|e| Error::io("resolve", path, e))?;
            if meta.is_dir() {
                walk(&path, &mut files)?;
            } else if meta.is_file() {
                files.push(CorpusFile::new(path, &meta, true));
            } else {
                // Every rank reads it, and again after a restart: a pipe cannot be read twice.
                return Err(Error::input(format!(
                    "`dataset` {}: is neither a file nor a directory, and ranks must read it more than once: write its \
                     content to a file first",
                    path.display()
                )));
            }
        }
        let what = paths.iter().map(|p| p.display().to_string()).collect::<Vec<_>>().join(", ");
        let Some(first) = files.first() else {
            return Err(Error::input(format!(
                "`dataset` {what}: no files found. Name text, .jsonl, .json, .parquet or .npy files, directories of \
                 them, or `synthetic`"
            )));
        };
        let kinds = CorpusKind::of(&files)?;
        let kind = kinds[0];
        if let Some((other, its)) = files.iter().zip(&kinds).find(|(_, its)| **its != kind) {
            return Err(Error::input(format!(
                "`dataset` {what}: {} and {} cannot be mixed ({} and {}). Name files of one kind",
                kind.name(),
                its.name(),
                first.path.display(),
                other.path.display()
            )));
        }
        Ok(Corpus { kind, files, what })
    }

    /// The default data set: the Rust sources of the crates this program was built from, as cargo fetched them. A
    /// machine without them trains on flatshard's own sources, which are embedded in the program.
    ///
    /// Files are ordered by a hash of their name, so that the size cap keeps a fair sample, adjacent files come from
    /// different crates, and the held-out end resembles the rest. No crate contributes more than `PER_CRATE`: otherwise
    /// the bindings of every Linux target would be a quarter of the corpus, and the held-out text a near copy of the
    /// rest.
    pub fn default(cargo_home: Option<&Path>) -> Result<Corpus> {
        let crates = cargo_home.map(crates).unwrap_or_default();
        let (mut files, mut what) = (sample(&crates)?, format!("Rust sources of {} crates", crates.len()));
        if files.iter().map(|f| f.size).sum::<u64>() < ENOUGH {
            (files, what) = (own(), "flatshard's own sources (cargo's registry is not on this machine)".into());
        }
        Ok(Corpus { kind: CorpusKind::Text, files, what })
    }
}

static SOURCES: Dir = include_dir!("$CARGO_MANIFEST_DIR/src");

/// Flatshard's own sources, from the program itself.
fn own() -> Vec<CorpusFile> {
    let (mut dirs, mut files) = (vec![&SOURCES], Vec::new());
    while let Some(dir) = dirs.pop() {
        for entry in dir.entries() {
            match entry {
                DirEntry::Dir(dir) => dirs.push(dir),
                DirEntry::File(file) if file.path().extension().is_some_and(|e| e == "rs") => {
                    let (path, text) = (file.path().to_path_buf(), file.contents());
                    let (name, modified) = (xxh3_64(path.as_os_str().as_encoded_bytes()), xxh3_64(text).into());
                    let size = text.len() as u64;
                    files.push((name, CorpusFile { path, size, modified, named: false, embedded: Some(text) }));
                }
                DirEntry::File(_) => {}
            }
        }
    }
    fitting(files, CAP).into_iter().map(|(_, file)| file).collect()
}

/// Fewer bytes than this in cargo's registry are not enough to train on.
const ENOUGH: u64 = 1 << 19;
/// Maximum size of the default corpus, so that the first start takes about a second.
const CAP: u64 = 64 << 20;
const PER_CRATE: u64 = 1 << 20;
/// Larger source files are usually generated: Unicode tables, bindings.
const PER_FILE: u64 = 128 << 10;

/// Rust files under `roots` in the order of their names' hashes: at most [`PER_CRATE`] bytes of each, [`CAP`] in all.
fn sample(roots: &[PathBuf]) -> Result<Vec<CorpusFile>> {
    let mut all = Vec::new();
    for root in roots.iter().filter(|root| root.is_dir()) {
        let mut files = Vec::new();
        walk(root, &mut files)?;
        files.retain(|file| file.size > 0 && file.size <= PER_FILE && file.path.extension().is_some_and(|e| e == "rs"));
        let named = files.into_iter().map(|file| {
            // Hash the path from the crate's name on: the same order on every machine.
            let name = file.path.strip_prefix(root.parent().unwrap_or(root)).unwrap_or(&file.path);
            (xxh3_64(name.as_os_str().as_encoded_bytes()), file)
        });
        all.extend(fitting(named.collect(), PER_CRATE));
    }
    Ok(fitting(all, CAP).into_iter().map(|(_, file)| file).collect())
}

/// The files in hash order, skipping those that would exceed `cap` bytes in total.
fn fitting(mut files: Vec<(u64, CorpusFile)>, cap: u64) -> Vec<(u64, CorpusFile)> {
    files.sort_by_key(|(hash, _)| *hash);
    let mut total = 0;
    files.retain(|(_, file)| {
        let fits = total + file.size <= cap;
        total += if fits { file.size } else { 0 };
        fits
    });
    files
}

/// Source directories of the crates in this build's lock file, as cargo unpacked them.
fn crates(cargo_home: &Path) -> Vec<PathBuf> {
    let mut names = BTreeSet::new();
    let mut name = "";
    for line in include_str!("../../Cargo.lock").lines() {
        let value = |key: &str| line.strip_prefix(key)?.strip_prefix(" = \"")?.strip_suffix('"');
        if let Some(found) = value("name") {
            name = found;
        } else if let Some(version) = value("version") {
            names.insert(format!("{name}-{version}"));
        }
    }
    let registries = starting(&cargo_home.join("registry/src"), "");
    let all = names.iter().filter_map(|name| registries.iter().map(|r| r.join(name)).find(|dir| dir.is_dir()));
    all.collect()
}

/// Entries of `dir` whose name starts with `prefix`, sorted; empty if it cannot be read.
fn starting(dir: &Path, prefix: &str) -> Vec<PathBuf> {
    let mut all: Vec<PathBuf> = fs::read_dir(dir)
        .into_iter()
        .flatten()
        .flatten()
        .filter(|e| e.file_name().to_string_lossy().starts_with(prefix))
        .map(|e| e.path())
        .collect();
    all.sort();
    all
}

/// Appends the files under `dir`, sorted by path.
fn walk(dir: &Path, files: &mut Vec<CorpusFile>) -> Result<()> {
    fs::read_dir(dir).map_err(|e| Error::input(format!("`dataset`: {} cannot be listed ({e})", dir.display())))?;
    for path in starting(dir, "") {
        let name = path.file_name().unwrap_or_default().as_encoded_bytes();
        // Skip broken links and files that have just been deleted.
        let Ok(meta) = fs::metadata(&path) else { continue };
        if name.starts_with(b".") {
            continue;
        }
        if meta.is_file() {
            files.push(CorpusFile::new(path, &meta, false));
        } else if meta.is_dir() && !path.is_symlink() {
            walk(&path, files)?;
        }
    }
    Ok(())
}

/// The error for a missing path: lists what is nearby.
fn missing(path: &Path, e: std::io::Error) -> Error {
    if e.kind() != std::io::ErrorKind::NotFound {
        return Error::io("open the dataset", path, e);
    }
    let parent = path.ancestors().skip(1).map(|p| if p.as_os_str().is_empty() { Path::new(".") } else { p });
    let there = parent.into_iter().find(|p| p.is_dir()).unwrap_or(Path::new("/"));
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    let mut near: Vec<String> = starting(there, "")
        .iter()
        .filter_map(|p| p.file_name())
        .map(|n| n.to_string_lossy().into_owned())
        .filter(|n| !n.starts_with('.'))
        .collect();
    near.sort_by_cached_key(|n| strsim::damerau_levenshtein(n, &name));
    let count = near.len();
    near.truncate(8);
    let near = match count {
        0 => "nothing".to_string(),
        1..=8 => near.join(", "),
        _ => format!("{} and {} more", near.join(", "), count - 8),
    };
    Error::input(format!(
        "`dataset` {}: no such file or directory. {} contains: {near}",
        path.display(),
        there.display()
    ))
}
