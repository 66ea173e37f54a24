//! Which files to train on, and what they are. Names, sizes and times say it; never reads more than the beginning of a
//! `.json` file.
use super::array::{self, Holds};
use crate::base::{Error, Result};
use std::collections::BTreeSet;
use std::fs::{self, Metadata};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use xxhash_rust::xxh3::xxh3_64;

/// What a file is, by its name; `.json` by its first element or line.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum CorpusKind {
    /// Concatenated, an end-of-text token after each file.
    Text,
    /// `.jsonl`, and `.json` that is an array of objects or has one in each line.
    Rows,
    /// `.parquet`: rows in columns.
    Parquet,
    /// `.npy`: token ids, concatenated as they are.
    Tokens,
}

impl CorpusKind {
    /// None: the content says.
    fn by_name(path: &Path) -> Option<CorpusKind> {
        match path.extension().and_then(|e| e.to_str()) {
            Some("jsonl") => Some(CorpusKind::Rows),
            Some("parquet") => Some(CorpusKind::Parquet),
            Some("npy") => Some(CorpusKind::Tokens),
            Some("json") => None,
            _ => Some(CorpusKind::Text),
        }
    }
    /// Of each file. Objects that a directory has besides text are text too, as in a directory of sources, unless they
    /// are clearly rows: then somebody is to say which is meant.
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
    /// Rows are given one by one, not cut out of a stream.
    pub fn is_rows(self) -> bool {
        matches!(self, CorpusKind::Rows | CorpusKind::Parquet)
    }
}

#[derive(Clone, Debug)]
pub struct CorpusFile {
    pub path: PathBuf,
    pub size: u64,
    /// Nanoseconds since 1970: with path and size, what tells that a file has changed.
    pub modified: i128,
    /// Named by the user, not found in a directory: then it must be readable.
    pub named: bool,
}

impl CorpusFile {
    fn new(path: PathBuf, meta: &Metadata, named: bool) -> CorpusFile {
        let modified = meta.mtime() as i128 * 1_000_000_000 + meta.mtime_nsec() as i128;
        CorpusFile { path, size: meta.len(), modified, named }
    }
}

/// Files of one kind in the order in which they are read.
#[derive(Clone, Debug)]
pub struct Corpus {
    pub kind: CorpusKind,
    pub files: Vec<CorpusFile>,
    /// A few words for people.
    pub what: String,
}

impl Corpus {
    /// The paths of `--dataset`: files as named, directories with all that is under them, sorted by path. Hidden names
    /// are left out, links to directories are not followed.
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
                // Several ranks read it, again after a restart.
                return Err(Error::input(format!(
                    "`dataset` {}: is neither a file nor a directory; write what comes out of it to a file first",
                    path.display()
                )));
            }
        }
        let what = paths.iter().map(|p| p.display().to_string()).collect::<Vec<_>>().join(", ");
        let Some(first) = files.first() else {
            return Err(Error::input(format!(
                "`dataset` {what}: no files there. Pass text files, directories of them, .jsonl, .json, .parquet or .npy \
                 files, or `synthetic`"
            )));
        };
        let kinds = CorpusKind::of(&files)?;
        let kind = kinds[0];
        if let Some((other, its)) = files.iter().zip(&kinds).find(|(_, its)| **its != kind) {
            return Err(Error::input(format!(
                "`dataset` {what}: {} and {} do not mix ({} and {}). Name files of one kind",
                kind.name(),
                its.name(),
                first.path.display(),
                other.path.display()
            )));
        }
        Ok(Corpus { kind, files, what })
    }

    /// What to train on when nobody says: the Rust sources of the crates that this program was built from, as cargo
    /// fetched them; where there are none, other text that machines have: this project's own sources, Python's library,
    /// licences and documentation.
    ///
    /// Files come in the order of a hash of their name: then the cap keeps a fair sample, neighbours come from
    /// different crates, and the held-out end is of the same kind as the rest. No crate gives more than `PER_CRATE`,
    /// or the bindings of every Linux target would be a quarter of it all and the held-out text a near copy of the
    /// rest.
    pub fn default(cargo_home: Option<&Path>) -> Result<Corpus> {
        let mut found = Corpus { kind: CorpusKind::Text, files: Vec::new(), what: String::new() };
        let crates = cargo_home.map(crates).unwrap_or_default();
        let project = PathBuf::from(env!("CARGO_MANIFEST_DIR"));
        let system = Path::new("/usr");
        let places = [
            (format!("Rust sources of {} crates", crates.len()), crates, PER_CRATE, vec!["rs"]),
            ("this project's sources".into(), vec![project.join("src"), project.join("tests")], CAP, vec!["rs"]),
            ("Python's library".into(), starting(&system.join("lib"), "python3"), CAP, vec!["py"]),
            ("licences".into(), vec![system.join("share/common-licenses")], CAP, vec![""]),
            ("documentation".into(), vec![system.join("share/doc")], CAP, vec!["", "txt", "md", "html"]),
        ];
        for (what, roots, per_root, extensions) in places {
            let files = sample(&roots, per_root, &extensions)?;
            if !files.is_empty() {
                found.what += if found.what.is_empty() { "" } else { " and " };
                found.what += &what;
                found.files.extend(files);
            }
            if found.files.iter().map(|f| f.size).sum::<u64>() >= ENOUGH {
                return Ok(found);
            }
        }
        match found.files.is_empty() {
            false => Ok(found),
            true => Err(Error::input(
                "no text to train on was found: cargo's registry, this project's sources, Python's library and \
                 /usr/share/doc are all missing. Pass `dataset` PATH (text files, a directory, .jsonl or .npy), or \
                 `dataset: synthetic`",
            )),
        }
    }
}

/// The default corpus: at least this much, or the next place is read too.
const ENOUGH: u64 = 1 << 20;
/// The default corpus: at most this much, so that the first start takes a second.
const CAP: u64 = 64 << 20;
const PER_CRATE: u64 = 1 << 20;
/// Larger source files are generated: Unicode tables, bindings.
const PER_FILE: u64 = 128 << 10;

/// Files under `roots` in the order of their names' hashes: at most `per_root` bytes of each root, [`CAP`] of all.
fn sample(roots: &[PathBuf], per_root: u64, extensions: &[&str]) -> Result<Vec<CorpusFile>> {
    let mut all = Vec::new();
    for root in roots.iter().filter(|root| root.is_dir()) {
        let mut files = Vec::new();
        walk(root, &mut files)?;
        files.retain(|file| {
            let extension = file.path.extension().and_then(|e| e.to_str()).unwrap_or("");
            file.size > 0 && file.size <= PER_FILE && extensions.contains(&extension)
        });
        let named = files.into_iter().map(|file| {
            // From the crate's name on: the same order on every machine.
            let name = file.path.strip_prefix(root.parent().unwrap_or(root)).unwrap_or(&file.path);
            (xxh3_64(name.as_os_str().as_encoded_bytes()), file)
        });
        all.extend(fitting(named.collect(), per_root));
    }
    Ok(fitting(all, CAP).into_iter().map(|(_, file)| file).collect())
}

/// Sorted by hash, without those that would make it more than `cap` bytes.
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

/// Directories of the crates in the lock file of this build, as cargo unpacked them.
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

/// Entries of `dir` whose name starts with `prefix`, sorted; none where it cannot be read.
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
        // A link that leads nowhere, or a file that went away meanwhile, is not there.
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

/// The message for a path that is not there: what is, nearby.
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
        "`dataset` {}: no such file or directory. In {} there is: {near}",
        path.display(),
        there.display()
    ))
}
