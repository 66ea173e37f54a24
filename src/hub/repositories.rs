//! [`HubReader`]: from a name to files. Never asks twice what a revision is.
use super::cache::RepoFile;
use super::client::HubClient;
use super::dataset::{self, CONVERTED, FoundSplits};
use super::download::{self, FileFault};
use super::fault::{HubAsked, HubFault};
use super::listing::Listing;
use super::model::{self, WeightFiles};
use super::name::{HubName, MAIN};
use super::options::HubOptions;
use super::{HubCommits, HubFiles, ModelNeed};
use super::{card, splits};
use crate::base::{Error, Result, open, quote};
use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::rc::Rc;

pub struct HubReader {
    options: HubOptions,
    client: HubClient,
    /// By key and revision.
    known: Vec<((String, String), Rc<Listing>)>,
    pins: HubCommits,
    used: HubCommits,
    notes: Vec<String>,
}

impl HubReader {
    pub fn new(options: HubOptions) -> Result<HubReader> {
        let client = HubClient::new(&options)?;
        let (pins, used) = (HubCommits::new(), HubCommits::new());
        Ok(HubReader { options, client, known: Vec::new(), pins, used, notes: Vec::new() })
    }
    /// What revisions are, for those that an earlier run has used. Forgets which were used so far.
    pub fn pin(&mut self, commits: HubCommits) {
        (self.pins, self.used) = (commits, HubCommits::new());
    }
    /// The commits in use since then.
    pub fn commits(&self) -> HubCommits {
        self.used.clone()
    }
    /// What a user should know, once.
    pub fn notes(&mut self) -> Vec<String> {
        std::mem::take(&mut self.notes)
    }

    /// A model's directory, or its GGUF file.
    pub fn model(&mut self, name: &HubName, need: ModelNeed) -> Result<HubFiles> {
        let listing = self.listing(name)?;
        let pinned = name.at(&listing.commit);
        let says = |what: String| Error::input(what.replace("NAME/", &format!("{}/", name.repo)));
        let tagged = name.split.as_ref().map(|tag| model::quantized(&listing.files, tag)).transpose();
        let tagged = tagged.map_err(|why| says(format!("{} {why}", name.repo)))?;
        if let Some(path) = tagged.or(name.path.clone()) {
            self.fetch(&listing, &model::parts(&listing.files, &path))?;
            let file = listing.cache.file(&listing.commit, &path);
            return Ok(HubFiles { path: file, name: HubName { path: Some(path), split: None, ..pinned } });
        }
        let is_adapter = listing.has(model::ADAPTER);
        let mut wanted = match need {
            ModelNeed::Shapes => {
                [model::CONFIG].iter().filter(|file| listing.has(file)).map(|f| f.to_string()).collect()
            }
            ModelNeed::Config | ModelNeed::Weights => model::described(&listing.files),
        };
        if need == ModelNeed::Weights {
            match model::weights(&listing.files) {
                Ok(_) if !listing.has(model::CONFIG) && !is_adapter => {
                    return Err(says(format!("{}: {}", name.repo, self.not_a_model(&listing))));
                }
                Ok(WeightFiles::These(files)) => wanted.extend(files),
                Ok(WeightFiles::Indexed) => {
                    self.small(&listing, model::INDEX)?;
                    wanted.push(model::INDEX.into());
                    self.fetch(&listing, &wanted)?;
                    let path = listing.cache.file(&listing.commit, model::INDEX);
                    let index = open::read(&path).map_err(|e| Error::in_file(&path, e))?;
                    let files =
                        model::indexed(&index).ok_or_else(|| Error::in_file(&path, "is not an index of weights"))?;
                    wanted.extend(files);
                }
                Err(_) if listing.offline.is_some() => return Err(self.incomplete(&listing, "its weights")),
                Err(why) => return Err(says(format!("{} {why}", name.repo))),
            }
        }
        self.fetch(&listing, &wanted)?;
        Ok(HubFiles { path: listing.cache.snapshot(&listing.commit), name: pinned })
    }

    /// A file of a data set, or a directory of links to the files of a split.
    pub fn dataset(&mut self, name: &HubName) -> Result<HubFiles> {
        let mut listing = self.listing(name)?;
        let paths = |listing: &Listing| {
            let mut all: Vec<String> = listing.files.iter().map(|file| file.path.clone()).collect();
            all.sort();
            all
        };
        let all = paths(&listing);
        let mut pinned = name.at(&listing.commit);
        let split = name.split.clone().unwrap_or_else(|| "train".into());
        let card = match &name.path {
            Some(path) if listing.has(path) => String::new(),
            _ => self.card(&listing)?,
        };
        let config = name.path.as_ref().filter(|path| dataset::is_config(&card, path));
        let (files, view) = match &name.path {
            Some(path) if listing.has(path) && name.split.is_some() => {
                return Err(Error::input(format!("{} is a file, which has no splits: remove :{split}", quote(path))));
            }
            Some(path) if listing.has(path) => (vec![path.clone()], String::new()),
            Some(path) if config.is_none() && all.iter().any(|file| file.starts_with(&format!("{path}/"))) => {
                let files = dataset::of_folder(name, &all, path).map_err(Error::input)?;
                (files, format!("{}--{split}", path.replace('/', "--")))
            }
            Some(path) if config.is_none() => return Err(self.without(&listing, path, &all)),
            _ => match dataset::splits(name, &all, &card).map_err(Error::input)? {
                FoundSplits::Splits(splits) => {
                    let view = config.map_or(split.clone(), |config| format!("{}--{split}", config.replace('/', "--")));
                    (dataset::of_split(name, splits).map_err(Error::input)?, view)
                }
                FoundSplits::Unreadable(config) => {
                    listing = self.conversion(name, &listing)?;
                    let found = dataset::converted(name, &paths(&listing), config.as_deref());
                    let (config, splits) = found.map_err(Error::input)?;
                    let files = dataset::of_split(name, splits).map_err(Error::input)?;
                    let folder = files.first().and_then(|file| file.rsplit_once('/')).map(|(folder, _)| folder);
                    if folder.is_some_and(|folder| folder.contains("/partial-")) {
                        self.notes.push(format!("{name}: the hub has converted the first 5 GB of this split only"));
                    }
                    let path = folder.map(str::to_string);
                    pinned = HubName { path, split: None, ..name.at(&listing.commit) };
                    (files, format!("{config}--{split}"))
                }
            },
        };
        self.fetch(&listing, &files)?;
        let path = match &files[..] {
            [one] => listing.cache.file(&listing.commit, one),
            several => self.view(&listing, &view, several)?,
        };
        Ok(HubFiles { path, name: pinned })
    }

    /// Asks what a revision is, or takes what is known.
    fn listing(&mut self, name: &HubName) -> Result<Rc<Listing>> {
        let revision = self.pins.get(&name.key()).cloned().unwrap_or_else(|| name.revision().into());
        let key = (name.key(), revision.clone());
        if let Some((_, listing)) = self.known.iter().find(|(known, _)| *known == key) {
            self.used.insert(name.key(), listing.commit.clone());
            return Ok(listing.clone());
        }
        let listing = match self.options.offline {
            true => self.offline(name, &revision)?,
            false => match Listing::ask(&self.client, &self.options.cache, name, &revision) {
                Ok(listing) => listing,
                Err(fault) => self.fallback(name, &revision, &fault)?,
            },
        };
        if listing.current != listing.repo {
            self.notes.push(format!("{} is now called {}: use that name", listing.repo, listing.current));
        }
        self.used.insert(name.key(), listing.commit.clone());
        let listing = Rc::new(listing);
        self.known.push((key, listing.clone()));
        Ok(listing)
    }

    fn offline(&self, name: &HubName, revision: &str) -> Result<Listing> {
        let found = Listing::cached(&self.options.cache, name, revision, "HF_HUB_OFFLINE is set");
        let found = found.map_err(|fault| self.explained(name, revision, &fault, None))?;
        found.ok_or_else(|| {
            Error::input(format!(
                "no such file or directory, and HF_HUB_OFFLINE is set and the cache ({}) has no {} {} at revision \
                 {revision}: unset it once to download it",
                self.options.cache.display(),
                name.kind.word(),
                name.repo
            ))
        })
    }
    /// The cache's copy, if the hub cannot be reached.
    fn fallback(&mut self, name: &HubName, revision: &str, fault: &HubFault) -> Result<Listing> {
        let error = self.explained(name, revision, fault, None);
        if !fault.is_of_network() {
            return Err(error);
        }
        match Listing::cached(&self.options.cache, name, revision, &error.to_string()) {
            Ok(Some(listing)) => {
                let (repo, commit) = (&name.repo, &listing.commit);
                self.notes.push(format!("{error}. Using the cache's copy of {repo}, commit {commit}"));
                Ok(listing)
            }
            _ => Err(error),
        }
    }

    fn explained(&self, name: &HubName, revision: &str, fault: &HubFault, file: Option<&str>) -> Error {
        let (kind, repo, endpoint) = (name.kind, &name.repo[..], self.client.endpoint.to_string());
        let endpoint = endpoint.trim_end_matches('/');
        HubAsked { kind, repo, revision, file, endpoint, token: self.client.token.as_ref() }.explain(fault)
    }

    fn fetch(&self, listing: &Listing, paths: &[String]) -> Result<()> {
        if listing.offline.is_some() {
            let missing = paths.iter().find(|path| !listing.cache.file(&listing.commit, path).exists());
            return missing.map_or(Ok(()), |path| Err(self.incomplete(listing, path)));
        }
        download::fetch(&self.client, listing, paths).map_err(|(fault, file): FileFault| {
            let revision = if listing.revision == listing.commit { &listing.commit } else { &listing.revision };
            let (kind, repo) = (listing.kind, listing.repo.clone());
            let name = HubName { kind, repo, revision: None, path: None, split: None };
            self.explained(&name, revision, &fault, file.as_deref())
        })
    }

    /// The error of a snapshot that lacks `what`, without a hub to get it from.
    fn incomplete(&self, listing: &Listing, what: &str) -> Error {
        let why = listing.offline.as_deref().unwrap_or_default();
        let none = if listing.cache.is_known_missing(&listing.commit, what) { " (the hub has none)" } else { "" };
        Error::input(format!(
            "{}: {} is not in the cache{none} ({}), and {why}: get online once to download it",
            listing.repo,
            quote(what),
            listing.cache.snapshot(&listing.commit).display()
        ))
    }

    fn not_a_model(&self, listing: &Listing) -> String {
        match &listing.offline {
            Some(_) => self.incomplete(listing, model::CONFIG).to_string(),
            None => "is not a model: it has no config.json".into(),
        }
    }

    fn without(&self, listing: &Listing, path: &str, all: &[String]) -> Error {
        let mut near: Vec<&str> = all.iter().filter(|file| splits::is_readable(file)).map(|file| &file[..]).collect();
        near.sort_by_cached_key(|file| strsim::damerau_levenshtein(file, path));
        Error::input(format!(
            "no such file or directory, and the data set {} has no file or folder {} at revision {}; it has {}",
            listing.repo,
            quote(path),
            listing.revision,
            dataset::listed(near.into_iter())
        ))
    }

    /// Fails if a file that is read into memory is larger than such files are.
    fn small(&self, listing: &Listing, path: &str) -> Result<()> {
        let size = listing.files.iter().find(|file| file.path == path).and_then(|file| file.size);
        match size.filter(|size| *size > model::MOST) {
            Some(size) => Err(Error::input(format!(
                "{}: {path} has {size} bytes, more than such a file can have ({})",
                listing.repo,
                model::MOST
            ))),
            None => Ok(()),
        }
    }

    fn card(&self, listing: &Listing) -> Result<String> {
        if !listing.has(card::CARD) {
            return Ok(String::new());
        }
        let path = listing.cache.file(&listing.commit, card::CARD);
        // Another program may have downloaded the data without its card.
        if listing.offline.is_some() && !path.exists() {
            return Ok(String::new());
        }
        self.small(listing, card::CARD)?;
        self.fetch(listing, &[card::CARD.into()])?;
        let text = open::read(&path).map_err(|e| Error::in_file(&path, e))?;
        Ok(String::from_utf8_lossy(&text).into_owned())
    }

    /// What the hub has made of a data set that our readers cannot read.
    fn conversion(&mut self, name: &HubName, of: &Listing) -> Result<Rc<Listing>> {
        let unreadable = |why: &str| {
            let files: Vec<&RepoFile> = of.files.iter().filter(|file| !file.path.starts_with('.')).collect();
            Error::input(format!(
                "{} has no files that are read (JSON, JSONL, CSV, TSV, Parquet, text, .npy) but {}, and {why}: load it \
                 with `datasets` in Python, write it with to_json or to_parquet, and name the file",
                name.repo,
                dataset::listed(files.iter().map(|file| &file.path[..]))
            ))
        };
        if name.revision.as_deref().is_some_and(|revision| revision != MAIN) {
            return Err(unreadable("the hub converts the newest revision only"));
        }
        let converted = HubName { revision: Some(CONVERTED.into()), ..name.clone() };
        let revision = self.pins.get(&converted.key()).cloned().unwrap_or_else(|| CONVERTED.into());
        if !self.options.offline {
            let asked = Listing::ask(&self.client, &self.options.cache, &converted, &revision);
            if matches!(asked, Err(HubFault::Revision | HubFault::Absent | HubFault::Missing | HubFault::File)) {
                return Err(unreadable("the hub has made no Parquet of it"));
            }
        }
        self.listing(&converted)
    }

    /// A directory of links to several files, and a card with their order, which readers take for the whole data set.
    fn view(&self, listing: &Listing, view: &str, files: &[String]) -> Result<PathBuf> {
        let repo = format!("{}--{}", listing.kind.plural(), listing.repo.replace('/', "--"));
        let dir = self.options.views.join(repo).join(&listing.commit).join(view);
        let links: Vec<(PathBuf, PathBuf)> =
            files.iter().map(|file| (dir.join(file), listing.cache.file(&listing.commit, file))).collect();
        let card = dataset::card_of(files);
        let same = links.iter().all(|(at, to)| fs::read_link(at).is_ok_and(|there| there == *to))
            && open::read(&dir.join(dataset::VIEW_CARD)).is_ok_and(|there| there == card.as_bytes());
        if same && links_below(&dir) == files.len() {
            return Ok(dir);
        }
        let made = dir.with_file_name(format!("{view}.{}", std::process::id()));
        let make = || {
            for (file, (_, to)) in files.iter().zip(&links) {
                let at = made.join(file);
                at.parent().map_or(Ok(()), fs::create_dir_all)?;
                symlink(to, &at)?;
            }
            fs::write(made.join(dataset::VIEW_CARD), &card)?;
            if dir.exists() {
                fs::remove_dir_all(&dir)?;
            }
            fs::rename(&made, &dir)
        };
        let result = make();
        let _ = fs::remove_dir_all(&made); // gone, unless another process was first
        match result {
            Err(_) if links.iter().all(|(at, to)| fs::read_link(at).is_ok_and(|there| there == *to)) => Ok(dir),
            other => other.map(|()| dir.clone()).map_err(|e| {
                Error::input(format!("cannot make links in {} ({e}): set FLATSHARD_CACHE_DIR", dir.display()))
            }),
        }
    }
}

fn links_below(dir: &Path) -> usize {
    let below = |path: PathBuf| if path.is_symlink() { 1 } else { links_below(&path) };
    open::listed(dir).unwrap_or_default().into_iter().map(below).sum()
}
