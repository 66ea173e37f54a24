//! Missing files of a repository: what they are, whether they fit, then several at a time. Never starts a download that
//! the disk has no room for.
use super::cache::{RepoCache, RepoFile, is_etag};
use super::client::{HubClient, HubReply};
use super::fault::{HubFault, of_file};
use super::listing::{Listing, refused};
use super::name::unsafe_name;
use super::progress::{Downloading, size};
use super::transfer::{HubHash, Wanted, complete, is_large};
use crate::base::{hex, quote};
use sha1::{Digest, Sha1};
use std::fs;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed};
use std::sync::{Mutex, PoisonError};
use std::thread::scope;

/// Files at a time. Larger ones come one after the other, each over several connections.
const FILES: usize = 8;

/// A fault, and the file that has it.
pub(super) type FileFault = (HubFault, Option<String>);

/// Makes these files of the listing present in its snapshot.
pub(super) fn fetch(client: &HubClient, listing: &Listing, paths: &[String]) -> Result<(), FileFault> {
    let mut missing = Vec::new();
    for path in paths {
        if let Some(why) = unsafe_name(path) {
            return Err((refused(path, why), None));
        }
        if !listing.cache.file(&listing.commit, path).exists() {
            missing.push(
                listing.files.iter().find(|file| file.path == *path).ok_or((HubFault::File, Some(path.clone())))?,
            );
        }
    }
    if missing.is_empty() {
        return Ok(());
    }
    let asked = at_once(&missing, FILES, &|file, _| describe(client, listing, file))?;
    let cache = &listing.cache;
    let new: Vec<&Wanted> = asked.iter().filter(|file| !cache.blob(&file.etag).exists()).collect();
    let needed = new.iter().map(|file| file.size - there(cache, file)).fold(0, u64::saturating_add);
    if let Some((free, place)) = cache.room().filter(|(free, _)| *free < needed) {
        let (needed, free, place) = (size(needed), size(free), place.display());
        let what = format!(
            "{} needs {needed}, and {free} are free in {place}: make room there, or set HF_HUB_CACHE to a directory \
             with more",
            listing.repo
        );
        return Err((HubFault::Disk(what), None));
    }
    if !new.is_empty() {
        fs::create_dir_all(cache.dir.join("blobs")).map_err(|e| (HubFault::disk("make", &cache.dir, e), None))?;
        let total = new.iter().map(|file| file.size).sum();
        let progress = Downloading::new(listing.repo.clone(), new.len(), total, client.quiet);
        let (large, small): (Vec<&Wanted>, Vec<&Wanted>) = new.iter().partition(|file| is_large(client, file.size));
        for (files, at_a_time) in [(small, FILES), (large, 1)] {
            at_once(&files, at_a_time, &|file, stop| one(client, cache, file, &progress, stop))?;
        }
        progress.finish();
    }
    for file in &asked {
        cache.link(&listing.commit, &file.path, &file.etag).map_err(|fault| (fault, Some(file.path.clone())))?;
    }
    cache.keep_listing(&listing.commit, &listing.files);
    Ok(())
}

/// What files are called in messages.
trait Named: Sync {
    fn name(&self) -> &str;
}
impl Named for RepoFile {
    fn name(&self) -> &str {
        &self.path
    }
}
impl Named for Wanted {
    fn name(&self) -> &str {
        &self.path
    }
}

/// The results of `work` for all files, in their order, or the first fault, which stops the others.
fn at_once<F: Named, T: Send>(
    files: &[&F],
    at_a_time: usize,
    work: &(impl Fn(&F, &AtomicBool) -> Result<T, HubFault> + Sync),
) -> Result<Vec<T>, FileFault> {
    let (next, stop) = (AtomicUsize::new(0), AtomicBool::new(false));
    let done: Mutex<Vec<(usize, T)>> = Mutex::default();
    let failed: Mutex<Option<FileFault>> = Mutex::default();
    scope(|scope| {
        for _ in 0..at_a_time.min(files.len()) {
            scope.spawn(|| {
                while !stop.load(Relaxed) {
                    let number = next.fetch_add(1, Relaxed);
                    let Some(file) = files.get(number) else { return };
                    match work(file, &stop) {
                        Ok(value) => done.lock().unwrap_or_else(PoisonError::into_inner).push((number, value)),
                        Err(fault) => {
                            stop.store(true, Relaxed);
                            let mut failed = failed.lock().unwrap_or_else(PoisonError::into_inner);
                            failed.get_or_insert((fault, Some(file.name().to_string())));
                        }
                    }
                }
            });
        }
    });
    let mut done = done.into_inner().unwrap_or_else(PoisonError::into_inner);
    done.sort_by_key(|(number, _)| *number);
    match failed.into_inner().unwrap_or_else(PoisonError::into_inner) {
        Some(fault) => Err(fault),
        None => Ok(done.into_iter().map(|(_, value)| value).collect()),
    }
}

/// Hash and size of a file, from the hub; or from the listing, if the cache has its content already.
fn describe(client: &HubClient, listing: &Listing, file: &RepoFile) -> Result<Wanted, HubFault> {
    let url = listing.url(client, &file.path);
    if let (Some(size), Some(etag)) = (file.size, file.sha256.as_ref().or(file.blob.as_ref()))
        && is_etag(etag)
        && fs::metadata(listing.cache.blob(etag)).is_ok_and(|meta| meta.len() == size)
    {
        return Ok(Wanted { path: file.path.clone(), size, etag: etag.clone(), hash: etag.clone(), url });
    }
    let reply = client.head(&url).map_err(|fault| of_file(fault, &file.path))?;
    // The ETag of a mirror or a cache is a name that it made up: two files may share it, and it is a hash of neither.
    let of_hub = ["x-linked-etag", "x-repo-commit"].iter().any(|name| reply.header(name).is_some());
    let etag = reply.header("x-linked-etag").or(reply.header("etag")).filter(|_| of_hub);
    let etag = etag.map(|etag| etag.trim_start_matches("W/").trim_matches('"').to_string());
    if let Some(etag) = etag.as_ref().filter(|etag| !is_etag(etag)) {
        return Err(HubFault::Strange(format!("a hash of {} that is none ({})", file.path, quote(etag))));
    }
    // The blob of a listing without large storage may be that of a pointer, which the hub's own header tells apart.
    let large = etag.as_ref().filter(|_| reply.header("x-linked-etag").is_some());
    let hashes = [file.sha256.as_ref(), large, file.blob.as_ref(), etag.as_ref()];
    let hash = hashes.into_iter().flatten().find(|hash| HubHash::is_known(hash)).cloned();
    let etag = etag.or(hash.clone());
    let etag = etag.unwrap_or_else(|| format!("{}-{}", listing.commit, hex(&Sha1::digest(&file.path))));
    let size = length(&reply).or(file.size).ok_or_else(|| HubFault::Strange(format!("no size of {}", file.path)))?;
    if file.size.is_some_and(|listed| listed != size) {
        return Err(HubFault::Hash(format!(
            "{} has {size} bytes, but {} in the listing of its commit",
            file.path,
            file.size.unwrap_or_default()
        )));
    }
    Ok(Wanted { path: file.path.clone(), size, etag, hash: hash.unwrap_or_default(), url })
}

/// The size that a HEAD reply gives; that of a redirect is not the file's.
fn length(reply: &HubReply) -> Option<u64> {
    let number = |name: &str| reply.header(name)?.trim().parse().ok();
    number("x-linked-size").or_else(|| number("content-length").filter(|_| reply.status < 300))
}

fn partial(cache: &RepoCache, etag: &str) -> PathBuf {
    cache.blob(&format!("{etag}.incomplete"))
}
fn there(cache: &RepoCache, file: &Wanted) -> u64 {
    fs::metadata(partial(cache, &file.etag)).map_or(0, |meta| meta.len().min(file.size))
}

/// Downloads one blob, unless another process does so first.
fn one(
    client: &HubClient,
    cache: &RepoCache,
    file: &Wanted,
    progress: &Downloading,
    stop: &AtomicBool,
) -> Result<(), HubFault> {
    let (blob, lock) = (cache.blob(&file.etag), cache.lock(&file.etag, &file.path, client.quiet)?);
    if blob.exists() {
        progress.skip(file.size);
        return Ok(());
    }
    // Without locks two processes must not write to one file.
    let partial = match &lock {
        Some(_) => partial(cache, &file.etag),
        None => cache.blob(&format!("{}.{}.incomplete", file.etag, std::process::id())),
    };
    let mut wrong = String::new();
    // What an earlier program left may be wrong; so may a transfer, once.
    for _ in 0..2 {
        match complete(client, file, &partial, progress, stop)? {
            Ok(()) => return fs::rename(&partial, &blob).map_err(|e| HubFault::disk("rename", &partial, e)),
            Err(what) => wrong = what,
        }
    }
    let _ = fs::remove_file(&partial); // it is empty
    Err(HubFault::Hash(wrong))
}
