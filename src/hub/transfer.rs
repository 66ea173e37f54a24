//! The content of one file: in ranges over several connections, written in order, hashed on the way. What is on disk is
//! always a beginning of the file, so a broken or killed download goes on from there, by whichever program. Never gives
//! a file its name.
use super::client::{ATTEMPTS, HubClient, HubUrl};
use super::fault::{HubFault, of_file};
use super::progress::Downloading;
use crate::base::hex;
use sha1::Sha1;
use sha2::{Digest, Sha256};
use std::collections::BTreeMap;
use std::fs::{File, OpenOptions};
use std::io::{Read, Write};
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::mpsc::{SyncSender, sync_channel};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::{scope, sleep};

/// Ranges of a file that is worth several connections.
const SEVERAL: u64 = 4;
/// Ranges that are under way or wait for an earlier one, which bounds memory.
const WINDOW: u64 = 16;
/// Connections for one file.
const CONNECTIONS: usize = 8;
/// Bytes that are handed on at once.
const PIECE: usize = 256 << 10;

/// What a file is verified with.
pub(super) enum HubHash {
    Sha256(Sha256),
    /// Git's hash of a file: SHA-1 of its length and its content.
    Git(Sha1),
    /// The server says none: the size must do.
    Unknown,
}

impl HubHash {
    pub fn is_known(etag: &str) -> bool {
        !matches!(HubHash::of(etag, 0), HubHash::Unknown)
    }
    pub fn of(etag: &str, size: u64) -> HubHash {
        let hex = etag.bytes().all(|b| b.is_ascii_hexdigit());
        match etag.len() {
            64 if hex => HubHash::Sha256(Sha256::new()),
            40 if hex => HubHash::Git(Sha1::new().chain_update(format!("blob {size}\0"))),
            _ => HubHash::Unknown,
        }
    }
    fn add(&mut self, bytes: &[u8]) {
        match self {
            HubHash::Sha256(hash) => hash.update(bytes),
            HubHash::Git(hash) => hash.update(bytes),
            HubHash::Unknown => {}
        }
    }
    /// Nothing, if it is `etag`; else what it is.
    fn differs(self, etag: &str) -> Option<String> {
        let is = match self {
            HubHash::Sha256(hash) => hex(&hash.finalize()),
            HubHash::Git(hash) => hex(&hash.finalize()),
            HubHash::Unknown => return None,
        };
        (!is.eq_ignore_ascii_case(etag)).then_some(is)
    }
}

/// Whether a file is worth several connections.
pub(super) fn is_large(client: &HubClient, bytes: u64) -> bool {
    bytes > SEVERAL * client.range
}

/// A file to download.
#[derive(Clone, Debug)]
pub(super) struct Wanted {
    pub path: String,
    pub size: u64,
    /// What the cache calls the content.
    pub etag: String,
    /// The hash of the content: the listing's, or the hub's ETag. Empty where the server says none.
    pub hash: String,
    pub url: HubUrl,
}

/// Completes `partial` and verifies it. False: its content is not what the hub says, and it is empty now.
pub(super) fn complete(
    client: &HubClient,
    file: &Wanted,
    partial: &Path,
    progress: &Downloading,
    stop: &AtomicBool,
) -> Result<std::result::Result<(), String>, HubFault> {
    let failed = |e| HubFault::disk("write", partial, e);
    let mut out = OpenOptions::new().read(true).append(true).create(true).open(partial).map_err(failed)?;
    let mut there = out.metadata().map_err(failed)?.len();
    if there > file.size {
        out.set_len(0).map_err(failed)?;
        there = 0;
    }
    let mut hash = HubHash::of(&file.hash, file.size);
    read(&mut out, there, &mut hash).map_err(failed)?;
    progress.skip(there);
    if there < file.size {
        download(client, file, there, progress, stop, &mut |piece| {
            out.write_all(piece).map_err(failed)?;
            hash.add(piece);
            Ok(())
        })?;
    }
    match hash.differs(&file.hash) {
        None => out.sync_data().map_err(failed).map(Ok),
        Some(is) => {
            out.set_len(0).map_err(failed)?;
            progress.lose(file.size);
            Ok(Err(format!("{} has the hash {is}, but the hub says {}", file.path, file.hash)))
        }
    }
}

/// Hashes what an earlier download has left.
fn read(file: &mut File, bytes: u64, hash: &mut HubHash) -> std::io::Result<()> {
    let (mut left, mut piece) = (bytes, vec![0; PIECE]);
    while left > 0 {
        let most = (left as usize).min(PIECE);
        file.read_exact(&mut piece[..most])?;
        hash.add(&piece[..most]);
        left -= most as u64;
    }
    Ok(())
}

/// What the connections of a file share.
struct Ranges {
    /// The start of the next range, and of what is not written yet.
    next: u64,
    written: u64,
    /// Whether the server sends ranges; None: not known yet.
    ranged: Option<bool>,
    over: bool,
}

struct FileTransfer<'a> {
    client: &'a HubClient,
    file: &'a Wanted,
    stop: &'a AtomicBool,
    ranges: Mutex<Ranges>,
    changed: Condvar,
    several: bool,
}

type FilePiece = Result<(u64, Vec<u8>), HubFault>;

fn download(
    client: &HubClient,
    file: &Wanted,
    start: u64,
    progress: &Downloading,
    stop: &AtomicBool,
    write: &mut dyn FnMut(&[u8]) -> Result<(), HubFault>,
) -> Result<(), HubFault> {
    let several = is_large(client, file.size - start);
    let ranges = Mutex::new(Ranges { next: start, written: start, ranged: None, over: false });
    let shared = &FileTransfer { client, file, stop, ranges, changed: Condvar::new(), several };
    let (send, receive) = sync_channel::<FilePiece>(CONNECTIONS * 4);
    scope(|scope| {
        for connection in 0..if several { CONNECTIONS } else { 1 } {
            let send = send.clone();
            scope.spawn(move || {
                if let Err(fault) = shared.work(connection == 0, &send) {
                    let _ = send.send(Err(fault));
                }
            });
        }
        drop(send);
        let write_all = || {
            let (mut at, mut early) = (start, BTreeMap::new());
            for piece in receive {
                let (offset, piece) = piece?;
                early.insert(offset, piece);
                while let Some(piece) = early.remove(&at) {
                    write(&piece)?;
                    at += piece.len() as u64;
                    progress.add(piece.len() as u64);
                }
                shared.lock().written = at;
                shared.changed.notify_all();
                if at == file.size {
                    return Ok(());
                }
            }
            Err(HubFault::Network("the download was stopped".into()))
        };
        let result = write_all();
        shared.lock().over = true;
        shared.changed.notify_all();
        result
    })
}

impl FileTransfer<'_> {
    fn lock(&self) -> MutexGuard<'_, Ranges> {
        self.ranges.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Downloads ranges until there are none. The first connection finds out whether the server has ranges.
    fn work(&self, first: bool, send: &SyncSender<FilePiece>) -> Result<(), HubFault> {
        loop {
            let mut ranges = self.lock();
            while !ranges.over
                && (ranges.ranged.is_none() && !first
                    || ranges.next < self.file.size && ranges.next >= ranges.written + WINDOW * self.client.range)
            {
                ranges = self.changed.wait(ranges).unwrap_or_else(PoisonError::into_inner);
            }
            if ranges.over || ranges.next >= self.file.size {
                return Ok(());
            }
            let start = ranges.next;
            let end = if self.several { (start + self.client.range).min(self.file.size) } else { self.file.size };
            ranges.next = end;
            drop(ranges);
            self.range(start, end, send)?;
        }
    }

    /// One range, from where each broken connection ends.
    fn range(&self, start: u64, mut end: u64, send: &SyncSender<FilePiece>) -> Result<(), HubFault> {
        let (mut at, mut failures, mut buffer) = (start, 0, vec![0; PIECE]);
        loop {
            let whole = at == 0 && end == self.file.size;
            let reply = self
                .client
                .get(&self.file.url, (!whole).then_some((at, end)))
                .map_err(|fault| of_file(fault, &self.file.path))?;
            let mut before = match reply.status {
                206 => {
                    let range = reply.header("content-range").unwrap_or_default();
                    let begins = range.strip_prefix("bytes ").and_then(|range| range.split('-').next()?.parse().ok());
                    if begins != Some(at) {
                        return Err(HubFault::Strange(format!(
                            "other bytes of {} than were asked for",
                            self.file.path
                        )));
                    }
                    0
                }
                200 => at, // the server knows no ranges
                status => return Err(HubFault::Strange(format!("status {status} for {}", self.file.path))),
            };
            if self.lock().ranged.is_none() {
                let ranged = reply.status == 206;
                let mut ranges = self.lock();
                ranges.ranged = Some(ranged);
                if !ranged {
                    end = self.file.size;
                    ranges.next = end;
                }
                drop(ranges);
                self.changed.notify_all();
            }
            let mut reader = reply.reader();
            let why = loop {
                if self.lock().over || self.stop.load(Relaxed) {
                    return Ok(());
                }
                let read = match reader.read(&mut buffer) {
                    Ok(0) => break "the connection ended early".to_string(),
                    Ok(n) => n,
                    Err(e) => break e.to_string(),
                };
                let skipped = before.min(read as u64);
                before -= skipped;
                let piece = &buffer[skipped as usize..read];
                let piece = &piece[..piece.len().min((end - at) as usize)];
                if piece.is_empty() {
                    continue;
                }
                if send.send(Ok((at, piece.to_vec()))).is_err() {
                    return Ok(());
                }
                at += piece.len() as u64;
                failures = 0;
                if at == end {
                    return Ok(());
                }
            };
            failures += 1;
            if failures == ATTEMPTS {
                return Err(HubFault::Network(format!("{}: {why}", self.file.path)));
            }
            sleep(self.client.pause(failures));
        }
    }
}
