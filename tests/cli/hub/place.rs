//! A cache and a hub on loopback, and the files of its repositories.
use super::server::{Files, HubServer, files};
use crate::common::runs::Dir;
use flatshard::base::Result;
use flatshard::hub::{HubFiles, HubName, HubOptions, HubReader, HubToken, ModelNeed};
use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

pub const TOKEN: &str = "hf_abcdefghijklmnop";

/// Bytes of a range in these tests.
pub const RANGE: u64 = 4096;

/// A cache and a hub.
pub struct Place {
    pub dir: Dir,
    pub server: HubServer,
    pub token: Option<&'static str>,
    pub offline: bool,
}

impl Place {
    pub fn new() -> Place {
        Place { dir: Dir::new(), server: HubServer::start(), token: None, offline: false }
    }
    pub fn hub(&self) -> HubReader {
        HubReader::new(HubOptions {
            endpoint: self.server.address.clone(),
            token: self.token.and_then(HubToken::new),
            cache: self.cache(),
            views: self.dir.path("views"),
            offline: self.offline,
            quiet: true,
            pause: Duration::from_millis(1),
            range: RANGE,
        })
        .unwrap()
    }
    pub fn cache(&self) -> PathBuf {
        self.dir.path("cache")
    }
    pub fn model(&self, name: &str) -> Result<HubFiles> {
        self.hub().model(&HubName::model(name).unwrap(), ModelNeed::Weights)
    }
    pub fn data(&self, name: &str) -> Result<HubFiles> {
        self.hub().dataset(&HubName::dataset(name).unwrap())
    }
    #[track_caller]
    pub fn refuses(&self, name: &str, parts: &[&str]) {
        refusal(self.model(name), parts);
    }
    #[track_caller]
    pub fn refuses_data(&self, name: &str, parts: &[&str]) {
        refusal(self.data(name), parts);
    }
    pub fn gets(&self) -> usize {
        self.server.seen().iter().filter(|request| request.method == "GET").count()
    }
}

#[track_caller]
pub fn refusal(result: Result<HubFiles>, parts: &[&str]) {
    let error = result.unwrap_err();
    assert_eq!(error.exit_status(), 2);
    let text = error.to_string();
    assert!(parts.iter().all(|part| text.contains(part)), "{text}");
    assert!(!text.contains(TOKEN), "{text}");
}

/// Bytes without a pattern.
pub fn noise(len: usize) -> Vec<u8> {
    (0..len as u32).map(|i| (i.wrapping_mul(2_654_435_761) >> 13) as u8).collect()
}

pub fn model(weights: &[u8]) -> Files {
    files(&[
        ("config.json", b"{}"),
        ("tokenizer.json", b"{ }"),
        ("model.safetensors", weights),
        ("x.gguf", b"GGUF"),
        ("original/params.json", b"{}"),
        ("pytorch_model.bin", b"no"),
    ])
}

/// Files of a directory, with what links lead to.
pub fn tree(dir: &Path) -> Vec<String> {
    fn walk(dir: &Path, below: &str, found: &mut Vec<String>) {
        let mut entries: Vec<_> = fs::read_dir(dir).unwrap().map(|e| e.unwrap()).collect();
        entries.sort_by_key(|e| e.file_name());
        for entry in entries {
            let name = format!("{below}{}", entry.file_name().to_string_lossy());
            match fs::read_link(entry.path()) {
                Ok(to) => found.push(format!("{name} -> {}", to.display())),
                Err(_) if entry.path().is_dir() => walk(&entry.path(), &format!("{name}/"), found),
                Err(_) => found.push(name),
            }
        }
    }
    let mut found = Vec::new();
    walk(dir, "", &mut found);
    found
}
