//! The commit that a revision is, and the files there, from the hub or, offline, from the cache. Never downloads a
//! file.
use super::cache::{RepoCache, RepoFile};
use super::client::{HubClient, HubUrl, encoded};
use super::fault::HubFault;
use super::name::{HubKind, HubName, is_commit, is_repo, unsafe_name};
use crate::base::quote;
use serde_json::Value;
use std::path::Path;

/// A repository at a commit.
#[derive(Clone, Debug)]
pub(super) struct Listing {
    pub kind: HubKind,
    /// Its given name, and what the hub calls it now.
    pub repo: String,
    pub current: String,
    /// The revision that was asked for.
    pub revision: String,
    pub commit: String,
    pub files: Vec<RepoFile>,
    pub cache: RepoCache,
    /// Why the hub is not asked: the cache is all there is.
    pub offline: Option<String>,
}

/// A listing of more entries is asked for page by page, in case the server shortens it.
const WHOLE: usize = 1000;
const PAGES: usize = 10_000;
/// Most files of a repository.
const FILES: usize = 1_000_000;

impl Listing {
    pub fn has(&self, path: &str) -> bool {
        self.files.iter().any(|file| file.path == path)
    }
    /// The address of a file, or of the API where `path` is none.
    pub fn url(&self, client: &HubClient, path: &str) -> HubUrl {
        let folder = if self.kind == HubKind::Dataset { "/datasets" } else { "" };
        client.endpoint.with(&format!("{folder}/{}/resolve/{}/{}", self.current, self.commit, encoded(path, true)))
    }

    /// Asks the hub. A commit whose listing is in the cache needs no question.
    pub fn ask(client: &HubClient, cache: &Path, name: &HubName, revision: &str) -> Result<Listing, HubFault> {
        let cache = RepoCache::new(cache, name.kind, &name.repo);
        let mut listing = Listing {
            kind: name.kind,
            repo: name.repo.clone(),
            current: name.repo.clone(),
            revision: revision.into(),
            commit: revision.into(),
            files: Vec::new(),
            cache,
            offline: None,
        };
        if let Some(files) = is_commit(revision).then(|| listing.cache.listed(revision)).flatten() {
            listing.files = checked(files)?;
            return Ok(listing);
        }
        let api = |repo: &str| client.endpoint.with(&format!("/api/{}/{repo}", name.kind.plural()));
        let asked = api(&name.repo).with(&format!("/revision/{}", encoded(revision, false)));
        let reply = client.get(&HubUrl::parse(&format!("{asked}?blobs=true")).unwrap_or(asked), None)?;
        let moved = renamed(reply.url.path(), name.kind);
        let info: Value = parsed(&reply.bytes()?)?;
        let commit = info["sha"].as_str().filter(|sha| is_commit(sha));
        listing.commit = commit.ok_or_else(|| strange("a repository without a commit", &info["sha"]))?.into();
        if info["disabled"] == true {
            return Err(HubFault::Disabled);
        }
        if let Some(id) = info["id"].as_str().map(str::to_string).or(moved).filter(|id| is_repo(id)) {
            listing.current = id;
        }
        let siblings = info["siblings"].as_array().map(Vec::as_slice).unwrap_or_default();
        listing.files = siblings.iter().map(sibling).collect::<Result<_, _>>()?;
        let known = listing.cache.listed(&listing.commit);
        let whole = !siblings.is_empty() && siblings.len() < WHOLE;
        let sized = listing.files.iter().all(|file| file.size.is_some());
        if let Some(files) = known {
            listing.files = files;
        } else if !(whole && sized) {
            match tree(client, &api(&listing.current).with(&format!("/tree/{}", listing.commit))) {
                Ok(files) => listing.files = files,
                // A server without this part of the API: sizes are asked for file by file.
                Err(HubFault::Absent | HubFault::Missing | HubFault::File | HubFault::Strange(_))
                    if info["siblings"].is_array() => {}
                Err(fault) => return Err(fault),
            }
        }
        listing.files = checked(listing.files)?;
        listing.cache.remember(revision, &listing.commit);
        Ok(listing)
    }

    /// From the cache alone. None: it has nothing of this revision.
    pub fn cached(cache: &Path, name: &HubName, revision: &str, why: &str) -> Result<Option<Listing>, HubFault> {
        let cache = RepoCache::new(cache, name.kind, &name.repo);
        let Some(commit) = cache.commit(revision).filter(|commit| cache.snapshot(commit).is_dir()) else {
            return Ok(None);
        };
        let files = checked(cache.listed(&commit).unwrap_or_else(|| cache.present(&commit)))?;
        let (repo, current) = (name.repo.clone(), name.repo.clone());
        let (revision, offline) = (revision.into(), Some(why.into()));
        Ok(Some(Listing { kind: name.kind, repo, current, revision, commit, files, cache, offline }))
    }
}

/// The repository in an address of the API, which a redirect may have changed.
fn renamed(path: &str, kind: HubKind) -> Option<String> {
    let rest = path.split_once(&format!("/api/{}/", kind.plural()))?.1;
    rest.split_once("/revision/").map(|(repo, _)| repo.to_string())
}

fn parsed(bytes: &[u8]) -> Result<Value, HubFault> {
    serde_json::from_slice(bytes).map_err(|_| strange("no JSON", &String::from_utf8_lossy(bytes)))
}
fn strange(what: &str, got: &dyn std::fmt::Display) -> HubFault {
    HubFault::Strange(format!("{what} ({})", quote(got)))
}

fn text(value: &Value) -> Option<String> {
    value.as_str().map(str::to_string)
}

/// An entry of `siblings`.
fn sibling(entry: &Value) -> Result<RepoFile, HubFault> {
    let path = text(&entry["rfilename"]).ok_or_else(|| strange("a file without a name", entry))?;
    let size = entry["lfs"]["size"].as_u64().or(entry["size"].as_u64());
    Ok(RepoFile { path, size, blob: text(&entry["blobId"]), sha256: text(&entry["lfs"]["sha256"]) })
}

/// The files below a folder of the API, page by page.
fn tree(client: &HubClient, url: &HubUrl) -> Result<Vec<RepoFile>, HubFault> {
    let mut files = Vec::new();
    let mut next = HubUrl::parse(&format!("{url}?recursive=true"));
    for _ in 0..PAGES {
        let Some(url) = next else { return Ok(files) };
        let reply = client.get(&url, None)?;
        let link = reply.header("link").and_then(following).map(str::to_string);
        next = link.and_then(|link| url.join(&link));
        if next.as_ref() == Some(&url) {
            return Err(HubFault::Strange("a page of files that follows itself".into()));
        }
        let page = parsed(&reply.bytes()?)?;
        if files.len() > FILES {
            return Err(HubFault::Strange(format!("more than {FILES} files")));
        }
        let entries = page.as_array().ok_or_else(|| strange("no list of files", &page))?;
        for entry in entries.iter().filter(|entry| entry["type"] == "file") {
            let path = text(&entry["path"]).ok_or_else(|| strange("a file without a name", entry))?;
            let size = entry["lfs"]["size"].as_u64().or(entry["size"].as_u64());
            files.push(RepoFile { path, size, blob: text(&entry["oid"]), sha256: text(&entry["lfs"]["oid"]) });
        }
    }
    Err(HubFault::Strange(format!("more than {PAGES} pages of files")))
}

/// The address of the next page in a header `Link: <address>; rel="next"`.
fn following(link: &str) -> Option<&str> {
    let next = link.split(',').find(|part| part.contains("rel=\"next\"") || part.contains("rel=next"))?;
    next.split_once('<')?.1.split_once('>').map(|(address, _)| address)
}

/// Names that could leave the cache are refused with the whole repository: no hub lists them. A backslash is a
/// character of some real names, and is refused where such a file is needed.
fn checked(files: Vec<RepoFile>) -> Result<Vec<RepoFile>, HubFault> {
    let bad = files.iter().find_map(|file| Some((file, unsafe_name(&file.path.replace('\\', "/"))?)));
    match bad {
        Some((file, why)) => Err(refused(&file.path, why)),
        None => Ok(files),
    }
}

/// The fault of a file that may not enter the cache.
pub(super) fn refused(path: &str, why: &str) -> HubFault {
    HubFault::Disk(format!("the repository has a file \"{}\", whose name {why}: it is not downloaded", quote(path)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pages_follow_links_and_hostile_names_are_refused() {
        assert_eq!(following("<https://h/x?cursor=2>; rel=\"next\", <y>; rel=\"last\""), Some("https://h/x?cursor=2"));
        assert_eq!(following("<y>; rel=\"last\""), None);
        let file = |path: &str| RepoFile { path: path.into(), ..RepoFile::default() };
        for bad in ["../x", "/x", "a/../../b", ".git/hooks/x", "", "a\\..\\..\\b", "a\0"] {
            assert!(checked(vec![file("fine"), file(bad)]).is_err(), "{bad}");
        }
        assert!(checked(vec![file("a\\b"), file(".gitattributes")]).is_ok());
    }
}
