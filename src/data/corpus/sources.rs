//! The default data set: Rust sources, of the machine or of the program. Never reads a file of the user.
use super::{Corpus, CorpusFile, CorpusKind, starting, walk};
use crate::base::Result;
use crate::data::kind::FileForm;
use include_dir::{Dir, DirEntry, include_dir};
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use xxhash_rust::xxh3::xxh3_64;

impl Corpus {
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
        Ok(Corpus { kind: CorpusKind::Text, files, what, unread: Vec::new(), doubt: None })
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
                    let (name, version) =
                        (xxh3_64(path.as_os_str().as_encoded_bytes()), [xxh3_64(text) as i64, 0, 0, 0, 0]);
                    let size = text.len() as u64;
                    files.push((
                        name,
                        CorpusFile {
                            path,
                            size,
                            version,
                            named: false,
                            embedded: Some(text),
                            form: FileForm::Text,
                            slice: None,
                        },
                    ));
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
        walk(root, &mut files, &mut Vec::new())?;
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
    for line in include_str!("../../../Cargo.lock").lines() {
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
