//! A corpus larger than the memory limit is built and read in constant memory. In its own process, so that the
//! process's peak memory is this test's.
use crate::common::alone::alone;
use flatshard::data::{Cache, DataOptions, Dataset, Format, Loader, LoaderOptions, StepData, Tokenizer};
use std::io::Write;
use std::sync::Arc;

/// Peak resident memory of this process in bytes.
fn peak() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find(|l| l.starts_with("VmHWM:")).unwrap();
    line.split_whitespace().nth(1).unwrap().parse::<u64>().unwrap() * 1024
}

#[test]
fn a_corpus_larger_than_memory_builds_in_constant_memory() {
    if !alone(module_path!(), "a_corpus_larger_than_memory_builds_in_constant_memory") {
        return;
    }
    const SIZE: u64 = 200 << 20;
    const ALLOWED: u64 = 16 << 20;
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("large.txt");
    let line = b"the quick brown fox jumps over the lazy dog, and then once more, until the file is full.\n";
    let block = line.repeat(10_000);
    let mut file = std::fs::File::create(&path).unwrap();
    let mut written = 0;
    while written < SIZE {
        file.write_all(&block).unwrap();
        written += block.len() as u64;
    }
    let before = peak();
    let options = DataOptions {
        paths: vec![path],
        tokenizer: Tokenizer::Bytes,
        format: Format::default(),
        vocab: 257,
        max_len: 256,
        max_samples: None,
        seed: 1,
        cache: Cache::at(dir.path().join("cache")),
        cargo_home: None,
    };
    let data = Dataset::open(&options).unwrap();
    assert!(data.report().built);
    assert_eq!(data.report().tokens, written + 1);
    let grown = peak() - before;
    assert!(grown < ALLOWED, "building a corpus of {written} bytes took {grown} bytes of memory");

    // The last rows are readable, and reading a few does not load the rest.
    let (packing, by_length, held_out) = (false, false, None);
    let load = LoaderOptions {
        batch_size: 4,
        grad_accum: 1,
        dp_rank: 0,
        dp_size: 1,
        shuffle: false,
        seed: 1,
        packing,
        by_length,
        passes: 1,
        held_out,
    };
    let mut loader = Loader::new(Arc::new(data), load).unwrap();
    let mut data = StepData::default();
    loader.seek(loader.rows_per_epoch() - 4);
    loader.next(&mut data);
    let text = Tokenizer::Bytes.decode(&data.batches[0].tokens);
    assert!(text.contains("the quick brown fox jumps over the lazy dog"), "{text}");
    let grown = peak() - before;
    assert!(grown < ALLOWED, "reading rows took {grown} bytes of memory");

    // Rows of a JSON array with large ignored fields: the array is read element by element.
    let path = dir.path().join("large.json");
    let row = format!("\n{{\"meta\": \"{}\", \"input_ids\": [1, 2, 3]}},", "x".repeat(20_000));
    let mut file = std::io::BufWriter::new(std::fs::File::create(&path).unwrap());
    let count = SIZE / row.len() as u64;
    file.write_all(b"[").unwrap();
    (0..count).for_each(|_| file.write_all(row.as_bytes()).unwrap());
    file.write_all(b"{\"input_ids\": [4, 5]}]").unwrap();
    file.into_inner().unwrap();
    let before = peak();
    let data = Dataset::open(&DataOptions { paths: vec![path], ..options }).unwrap();
    assert_eq!((data.rows(), data.report().tokens), (count + 1, 3 * count + 2));
    let grown = peak() - before;
    assert!(grown < ALLOWED, "building an array of {SIZE} bytes took {grown} bytes of memory");
}
