//! The data pipeline from outside: finding files, slicing rows, assigning them to ranks, caching, and every message for
//! bad input.
use flatshard::base::Error;
use flatshard::base::rng::Rng;
use flatshard::data::corpus::Corpus;
use flatshard::data::{
    Cache, DataOptions, Dataset, Format, Loader, LoaderOptions, MicroBatch, Permutation, StepData, Synthetic, Tokenizer,
};
use flatshard::device::IGNORE;
use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Barrier};
use tempfile::TempDir;

mod answers;
mod cache;
mod checks;
mod columns;
#[path = "../common/mod.rs"]
mod common;
mod constant_memory;
mod corpora;
mod fields;
mod files;
mod fuzz_corpora;
mod mixture;
mod order;
mod packing;
mod sft;
mod shapes;
mod slices;
mod streams;
mod templates;
mod tokens;

const END: u32 = 256;

/// A directory with files, and its own cache.
struct Files(TempDir);

impl Files {
    fn new() -> Files {
        Files(tempfile::tempdir().unwrap())
    }
    fn with(name: &str, content: impl AsRef<[u8]>) -> Files {
        let files = Files::new();
        files.put(name, content);
        files
    }
    fn path(&self, name: &str) -> PathBuf {
        self.0.path().join("data").join(name)
    }
    fn put(&self, name: &str, content: impl AsRef<[u8]>) -> PathBuf {
        let path = self.path(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(&path, content).unwrap();
        path
    }
    fn cache(&self) -> PathBuf {
        self.0.path().join("cache")
    }
    /// The only token file in the cache.
    fn token_file(&self) -> PathBuf {
        let all: Vec<PathBuf> = fs::read_dir(self.cache()).unwrap().map(|e| e.unwrap().path()).collect();
        let mut tokens = all.into_iter().filter(|p| p.extension().is_some_and(|e| e == "tokens"));
        let first = tokens.next().unwrap();
        assert_eq!(tokens.next(), None);
        first
    }
    fn options(&self, name: &str, max_len: usize) -> DataOptions {
        DataOptions {
            paths: vec![self.path(name)],
            tokenizer: Tokenizer::Bytes,
            format: Format::default(),
            vocab: 257,
            max_len,
            max_samples: None,
            seed: 1,
            cache: Cache::at(self.cache()),
            cargo_home: None,
        }
    }
    fn open(&self, name: &str, max_len: usize) -> Arc<Dataset> {
        Arc::new(Dataset::open(&self.options(name, max_len)).unwrap())
    }
}

fn synthetic(max_len: usize, seed: u64) -> DataOptions {
    DataOptions { paths: vec!["synthetic".into()], seed, ..Files::new().options("", max_len) }
}

fn load(batch_size: usize, grad_accum: usize, dp_rank: usize, dp_size: usize, shuffle: bool) -> LoaderOptions {
    let (packing, by_length, held_out) = (false, false, None);
    LoaderOptions {
        batch_size,
        grad_accum,
        dp_rank,
        dp_size,
        shuffle,
        seed: 7,
        packing,
        by_length,
        passes: 1,
        held_out,
    }
}

fn step(loader: &mut Loader) -> StepData {
    let mut step = StepData::default();
    loader.next(&mut step);
    step
}
/// The next step of a loader whose steps have one micro-batch.
fn next(loader: &mut Loader) -> MicroBatch {
    let mut step = step(loader);
    assert_eq!(step.batches.len(), 1);
    step.batches.remove(0)
}

/// Every row of `data`: tokens and targets.
fn rows(data: &Dataset) -> Vec<(Vec<u32>, Vec<i32>)> {
    (0..data.rows())
        .map(|r| {
            let len = data.row_len(r);
            let (mut tokens, mut targets) = (vec![9; len], vec![9; len]);
            data.fill(r, &mut tokens, &mut targets);
            (tokens, targets)
        })
        .collect()
}

/// The message of an input error, which must contain all of `parts`.
fn refused<T>(result: Result<T, Error>, parts: &[&str]) -> String {
    let error = result.err().expect("this input should have been refused");
    assert_eq!(error.exit_status(), 2, "{error}");
    let message = error.to_string();
    for part in parts {
        assert!(message.contains(part), "{part:?} is not in: {message}");
    }
    message
}
