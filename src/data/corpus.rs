//! Finds the files to train on, and decides what they are together. Never reads more than the beginning of a file.
mod sources; // the default data set
mod splits; // of a folder of rows

pub use splits::{FolderSplit, has_config};

use super::kind::{self, FileForm, Look};
use super::slice::RowSlice;
use crate::base::{Error, Result};
use std::collections::HashMap;
use std::fs::{self, Metadata};
use std::mem;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

/// What files are read as.
pub(super) const READ: &str = "text, .jsonl, .json, .csv, .parquet or .npy";

/// The kind of a file; those of a data set are of one kind.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum CorpusKind {
    /// Concatenated, with an end-of-text token after each file.
    Text,
    /// JSON: an object per line, an array of objects, or an object around one.
    Rows,
    /// CSV and TSV: rows after a header.
    Table,
    /// Parquet: rows stored as columns.
    Parquet,
    /// `.npy`: token ids, concatenated without separators.
    Tokens,
}

impl CorpusKind {
    fn of(form: FileForm) -> CorpusKind {
        match form {
            FileForm::Text | FileForm::Unread => CorpusKind::Text,
            FileForm::Lines | FileForm::Array | FileForm::Wrapped => CorpusKind::Rows,
            FileForm::Table(_) => CorpusKind::Table,
            FileForm::Parquet => CorpusKind::Parquet,
            FileForm::Tokens => CorpusKind::Tokens,
        }
    }
    pub fn name(self) -> &'static str {
        match self {
            CorpusKind::Text => "text",
            CorpusKind::Rows => "rows (.jsonl, .json)",
            CorpusKind::Table => "rows (.csv, .tsv)",
            CorpusKind::Parquet => "rows (.parquet)",
            CorpusKind::Tokens => "token arrays (.npy)",
        }
    }
    /// Rows are individual samples, not slices of a stream.
    pub fn is_rows(self) -> bool {
        matches!(self, CorpusKind::Rows | CorpusKind::Table | CorpusKind::Parquet)
    }
}

#[derive(Clone, Debug)]
pub struct CorpusFile {
    /// The path as named or found: links are not resolved.
    pub path: PathBuf,
    pub size: u64,
    /// With path and size, detects that a file has changed: when its content and its inode were modified (seconds and
    /// nanoseconds), and which inode it is. Copies keep the first, and links may be retargeted.
    pub version: [i64; 5],
    /// Named by the user, not found in a directory, so it must be readable.
    pub named: bool,
    /// The text itself if it is embedded in this program; `path` is then only a name.
    pub embedded: Option<&'static [u8]>,
    pub form: FileForm,
    /// Some rows of the files at a path are read: which path of all, and which rows.
    pub slice: Option<(usize, RowSlice)>,
}

impl CorpusFile {
    fn new(path: PathBuf, meta: &Metadata, named: bool) -> CorpusFile {
        let version = [meta.mtime(), meta.mtime_nsec(), meta.ctime(), meta.ctime_nsec(), meta.ino() as i64];
        CorpusFile { path, size: meta.len(), version, named, embedded: None, form: FileForm::Text, slice: None }
    }
}

/// Files of one kind, in reading order.
#[derive(Clone, Debug)]
pub struct Corpus {
    pub kind: CorpusKind,
    pub files: Vec<CorpusFile>,
    /// A short description, for the log.
    pub what: String,
    /// Files of the same directories that are not read.
    pub unread: Vec<PathBuf>,
    /// Why this is not trained on as text, unless `pretrain_mode` says so.
    pub doubt: Option<String>,
}

impl Corpus {
    /// The files of the `dataset` paths, each with its slice if it has one: files as named, directories recursively,
    /// sorted by path. Hidden names are skipped, and links to directories are not followed.
    pub fn find(paths: &[PathBuf]) -> Result<Corpus> {
        let (mut files, mut dangling) = (Vec::new(), Vec::new());
        let mut roots = Vec::new();
        for (number, path) in paths.iter().enumerate() {
            let (path, slice) = RowSlice::of(path)?;
            let (slice, before) = (slice.map(|slice| (number, slice)), files.len());
            let meta = fs::metadata(path).map_err(|e| missing(path, e))?;
            let named = splits::absolute(path)?;
            if meta.is_dir() {
                walk(&named, &mut files, &mut dangling)?;
            } else if meta.is_file() {
                files.push(CorpusFile::new(named, &meta, true));
            } else {
                // Every rank reads it, and again after a restart: a pipe cannot be read twice.
                return Err(Error::input(format!(
                    "`dataset` {}: is neither a file nor a directory, and ranks must read it more than once: write its \
                     content to a file first",
                    path.display()
                )));
            }
            files[before..].iter_mut().for_each(|file| file.slice = slice);
            roots.extend(meta.is_dir().then_some((path, slice)));
        }
        none_dangles(&dangling)?;
        let (doubt, mut unread) = decide(&mut files)?;
        if files.iter().any(|file| CorpusKind::of(file.form).is_rows()) {
            for (path, slice) in roots {
                let root = splits::absolute(path)?;
                let inside = |file: &CorpusFile| !file.named && file.slice == slice && file.path.starts_with(&root);
                let at = files.iter().position(inside).unwrap_or(0);
                let (here, mut others): (Vec<_>, Vec<_>) = files.into_iter().partition(inside);
                let order = splits::reading_order(path, &here.iter().map(|f| f.path.as_path()).collect::<Vec<_>>())?;
                let order: HashMap<PathBuf, usize> = order.into_iter().zip(0..).collect();
                let (mut read, out): (Vec<_>, Vec<_>) =
                    here.into_iter().partition(|file| order.contains_key(&file.path));
                unread.extend(out.into_iter().map(|file| file.path));
                read.sort_by_key(|file| order[&file.path]);
                others.splice(at..at, read);
                files = others;
            }
        }
        let mut what = some_of(paths, 3);
        if !unread.is_empty() {
            what += &format!(" (not read: {})", some_of(&unread, 1));
        }
        let Some(first) = files.first() else {
            return Err(Error::input(format!(
                "`dataset` {what}: no files found. Name {READ} files, directories of them, or `synthetic`"
            )));
        };
        let kind = CorpusKind::of(first.form);
        if let Some(other) = files.iter().find(|file| CorpusKind::of(file.form) != kind) {
            return Err(Error::input(format!(
                "`dataset` {what}: {} and {} cannot be mixed ({} and {}). Name files of one kind",
                kind.name(),
                CorpusKind::of(other.form).name(),
                first.path.display(),
                other.path.display()
            )));
        }
        if !kind.is_rows() && files.iter().any(|file| file.slice.is_some()) {
            return Err(Error::input(format!(
                "`dataset` {what}: a slice is of rows, and these files are {}",
                kind.name()
            )));
        }
        Ok(Corpus { kind, files, what, unread, doubt })
    }
}

/// Names up to `most` of these paths, and says how many others there are.
fn some_of(paths: &[PathBuf], most: usize) -> String {
    let (named, others) = paths.split_at(most.min(paths.len()));
    let names: Vec<String> = named.iter().map(|path| path.display().to_string()).collect();
    let others = if others.is_empty() { String::new() } else { format!(" and {} more", others.len()) };
    names.join(", ") + &others
}

/// The files of a split below a folder.
pub fn of_split(split: FolderSplit) -> Result<Vec<PathBuf>> {
    let (root, mut files, mut dangling) = (splits::absolute(split.folder)?, Vec::new(), Vec::new());
    walk(&root, &mut files, &mut dangling)?;
    none_dangles(&dangling)?;
    files.retain(|file| !kind::is_leftover(&file.path));
    split.of(files.iter().map(|file| file.path.as_path()))
}

/// Refuses links to nothing.
fn none_dangles(links: &[PathBuf]) -> Result<()> {
    let Some(link) = links.first() else { return Ok(()) };
    let (target, why) = (fs::read_link(link).unwrap_or_default(), fs::metadata(link).err());
    Err(Error::input(format!(
        "`dataset`: {} links to {}, which cannot be opened ({}): restore that file (of a hub's cache: download it \
         again), or remove the link",
        link.display(),
        target.display(),
        why.map_or_else(|| "it is new".into(), |why| why.to_string())
    )))
}

/// Decides what each file is among the others, and removes descriptions of rows. Returns why the first file that is
/// text by its name only should not be read as text, and the files that are no data, which are removed: leftovers,
/// binary files next to rows, and rows without a name of rows next to those that have one.
fn decide(files: &mut Vec<CorpusFile>) -> Result<(Option<String>, Vec<PathBuf>)> {
    let (mut unread, left): (Vec<_>, Vec<_>) =
        mem::take(files).into_iter().partition(|file| !file.named && kind::is_leftover(&file.path));
    let looks = left.iter().map(|file| kind::inspect(&file.path)).collect::<Result<Vec<_>>>()?;
    let is_rows = |look: &Look| match look {
        Look::Is(form) => CorpusKind::of(*form).is_rows(),
        Look::Rows { .. } => true,
        _ => false,
    };
    let is_named = |file: &CorpusFile| file.named || kind::is_named_rows(&file.path);
    let by_name = left.iter().zip(&looks).any(|(file, look)| is_named(file) && is_rows(look));
    let (others, read): (Vec<_>, Vec<_>) =
        left.into_iter().zip(looks).partition(|(file, look)| by_name && is_rows(look) && !is_named(file));
    unread.extend(others.into_iter().map(|(file, _)| file));
    let mut unread: Vec<PathBuf> = unread.into_iter().map(|file| file.path).collect();
    let looks: Vec<Look>;
    (*files, looks) = read.into_iter().unzip();
    let is_card = |file: &CorpusFile, look: &Look| {
        let describes = match look {
            Look::Rows { known, .. } | Look::Doubtful { known, .. } => !known,
            Look::Foreign(_) | Look::Binary => false,
            Look::Is(_) | Look::Empty => true,
        };
        !file.named && describes && kind::is_card(&file.path)
    };
    let cards: Vec<bool> = files.iter().zip(&looks).map(|(file, look)| is_card(file, look)).collect();
    let mut each = looks.iter().zip(&cards);
    let text = each.any(|(look, card)| matches!(look, Look::Is(FileForm::Text)) && !card);
    let binary: Vec<bool> =
        files.iter().zip(&looks).map(|(f, look)| !f.named && matches!(look, Look::Binary)).collect();
    let mut doubts = Vec::new();
    for (i, (file, look)) in files.iter_mut().zip(looks).enumerate() {
        let refused = |what: &str| Error::input(format!("`dataset`: {} {what}", file.path.display()));
        let mut doubt = |what: &str| {
            doubts.push((i, what.to_string()));
            FileForm::Text
        };
        let aside = text && !file.named;
        file.form = match look {
            Look::Is(FileForm::Text) | Look::Binary => FileForm::Text,
            Look::Is(_) if cards[i] => FileForm::Unread,
            Look::Is(form) => form,
            Look::Rows { known: false, .. } | Look::Doubtful { known: false, .. } if aside => FileForm::Text,
            Look::Rows { .. } if cards[i] => doubt("the description of a data set"),
            Look::Rows { form, .. } => form,
            Look::Doubtful { what, .. } => doubt(what),
            Look::Foreign(_) if aside => FileForm::Unread,
            Look::Foreign(what) => return Err(refused(&what)),
            Look::Empty => FileForm::Text,
        };
    }
    let rows = files.iter().any(|file| CorpusKind::of(file.form) != CorpusKind::Text);
    let skipped = |i: usize| {
        let empty = files[i].size == 0 && files[i].form == FileForm::Text;
        rows && !files[i].named && (cards[i] || empty || binary[i])
    };
    unread.extend((0..files.len()).filter(|&i| rows && binary[i]).map(|i| files[i].path.clone()));
    let keep: Vec<bool> = (0..files.len()).map(|i| !skipped(i)).collect();
    let doubt = doubts.into_iter().find(|(i, _)| keep[*i]).map(|(i, looks)| {
        format!(
            "`dataset`: {} is not plain text but {looks}. Name rows .jsonl or .json (an object per line, or an array), or \
             set `pretrain_mode` to train on it as text",
            files[i].path.display()
        )
    });
    let mut keep = keep.into_iter();
    files.retain(|_| keep.next() == Some(true));
    Ok((doubt, unread))
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

/// Appends the files under `dir`, sorted by path, and links to nothing.
fn walk(dir: &Path, files: &mut Vec<CorpusFile>, dangling: &mut Vec<PathBuf>) -> Result<()> {
    fs::read_dir(dir).map_err(|e| Error::input(format!("`dataset`: {} cannot be listed ({e})", dir.display())))?;
    for path in starting(dir, "") {
        let name = path.file_name().unwrap_or_default().as_encoded_bytes();
        if name.starts_with(b".") {
            continue;
        }
        let Ok(meta) = fs::metadata(&path) else {
            if path.is_symlink() {
                dangling.push(path);
            } // else it has just been deleted
            continue;
        };
        if meta.is_file() {
            files.push(CorpusFile::new(path, &meta, false));
        } else if meta.is_dir() && !path.is_symlink() {
            walk(&path, files, dangling)?;
        }
    }
    Ok(())
}

/// The error for a missing path: lists what is nearby.
fn missing(path: &Path, e: std::io::Error) -> Error {
    if e.kind() != std::io::ErrorKind::NotFound {
        return Error::io("open the dataset", path, e);
    }
    let text = path.to_string_lossy();
    let hint = if text.contains("://") {
        "; files are read from disk or from the hub: download it, or give its path"
    } else if text.contains(',') {
        "; several paths are separated by spaces, not by commas"
    } else if text.contains('#') {
        "; the first rows of a data set are NAME[:ROWS]"
    } else if text.contains(['*', '?']) {
        "; a pattern in quotes is not expanded: leave the quotes out, or name the directory"
    } else {
        ""
    };
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
        "`dataset` {}: no such file or directory, and not a name of the hub (OWNER/NAME){hint}. {} contains: {near}",
        path.display(),
        there.display()
    ))
}
