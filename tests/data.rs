//! The data floor from outside: what is found, how rows are cut, who gets which, what is kept, and every message for bad
//! input.
use flatshard::base::Error;
use flatshard::base::rng::Rng;
use flatshard::data::corpus::Corpus;
use flatshard::data::{DataOptions, Dataset, Loader, LoaderOptions, MicroBatch, Permutation, Synthetic, Tokenizer};
use flatshard::device::IGNORE;
use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Barrier};
use tempfile::TempDir;

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
    /// The one token file in the cache.
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
            vocab: 257,
            max_len,
            max_samples: None,
            seed: 1,
            cache_dir: self.cache(),
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
    LoaderOptions { batch_size, grad_accum, dp_rank, dp_size, shuffle, seed: 7 }
}

fn next(loader: &mut Loader) -> MicroBatch {
    let mut batch = MicroBatch::default();
    loader.next(&mut batch);
    batch
}

/// Every row of `data`: tokens, targets, length.
fn rows(data: &Dataset) -> Vec<(Vec<u32>, Vec<i32>, usize)> {
    (0..data.rows())
        .map(|r| {
            let (mut tokens, mut targets) = (vec![9; data.max_len()], vec![9; data.max_len()]);
            let len = data.fill(r, &mut tokens, &mut targets);
            (tokens, targets, len)
        })
        .collect()
}

/// The message of an error that is the user's to mend, which holds every one of `parts`.
fn refused<T>(result: Result<T, Error>, parts: &[&str]) -> String {
    let error = result.err().expect("this input should have been refused");
    assert_eq!(error.exit_status(), 2, "{error}");
    let message = error.to_string();
    for part in parts {
        assert!(message.contains(part), "{part:?} is not in: {message}");
    }
    message
}

// --- tokens -----------------------------------------------------------------------------------------------------------

#[test]
fn bytes_there_and_back() {
    let t = Tokenizer::from_name("bytes").unwrap();
    let mut ids = Vec::new();
    t.encode("héllo 漢\u{1F600}\0".as_bytes(), &mut ids);
    assert_eq!(t.decode(&ids), "héllo 漢\u{1F600}\0");
    assert!(ids.iter().all(|&id| id < 256));
    // What a model may write: half a character, an end of text, ids that no text has.
    assert_eq!(t.decode(&[b'a' as u32, 0xe6, 0xbc, b'b' as u32, t.end_of_text(), 300]), "a\u{fffd}b\u{fffd}");
    refused(Tokenizer::from_name("gpt2"), &["gpt2", "bytes"]);
}

// --- rows of a stream -------------------------------------------------------------------------------------------------

#[test]
fn text_files_are_joined_in_sorted_order_by_end_of_text_tokens() {
    let files = Files::with("b.txt", "BBB");
    files.put("a/z.md", "é"); // 2 bytes
    files.put("a.txt", "AA");
    files.put(".hidden", "no");
    files.put("c.bin", b"text\0binary");
    files.put("latin1", b"caf\xe9 au lait");
    files.put("empty", "");
    let data = files.open("", 1);
    // The entries of a directory by name: `a` (and all in it), `a.txt`, `b.txt`.
    let stream: Vec<u32> = [&[0xc3, 0xa9, END][..], &[65, 65, END], &[66, 66, 66, END]].concat();
    let rows = rows(&data);
    assert_eq!(rows.iter().map(|r| r.0[0]).collect::<Vec<_>>(), stream[..stream.len() - 1]);
    assert_eq!(rows.iter().map(|r| r.1[0] as u32).collect::<Vec<_>>(), stream[1..]);
    let report = data.report();
    assert_eq!((report.files, report.skipped, report.bytes, report.tokens), (3, 3, 7, 10));
    let line = report.to_string();
    assert!(
        line.contains("3 files") && line.contains("10 tokens in 9 rows of 1") && line.contains("3 skipped"),
        "{line}"
    );
}

#[test]
fn windows_share_one_token_and_the_last_part_that_is_too_short_is_left() {
    let text: String = ('a'..='z').collect();
    let data = Files::with("t.txt", &text).open("t.txt", 8);
    // 27 tokens: (27 - 1) / 8 = 3 rows.
    let rows = rows(&data);
    assert_eq!(rows.len(), 3);
    for (r, (tokens, targets, len)) in rows.iter().enumerate() {
        let at = |i: usize| text.as_bytes()[r * 8 + i] as u32;
        assert_eq!(*len, 8);
        assert_eq!(*tokens, (0..8).map(at).collect::<Vec<_>>());
        assert_eq!(*targets, (1..9).map(|i| at(i) as i32).collect::<Vec<_>>());
    }
}

#[test]
fn a_text_longer_than_the_chunks_it_is_read_in_is_whole() {
    // 4-byte characters shifted by one byte: every cut of a power of two falls within a character.
    let text = format!("x{}", "\u{1F600}".repeat(200_000));
    let files = Files::with("t.txt", &text);
    files.put("u.txt", "end");
    let data = files.open("", 1000);
    let stream: Vec<u32> = rows(&data).iter().flat_map(|r| r.0.clone()).collect();
    let whole: Vec<u32> =
        text.bytes().map(u32::from).chain([END]).chain("end".bytes().map(u32::from)).chain([END]).collect();
    assert_eq!(data.report().tokens as usize, whole.len());
    assert_eq!(stream, whole[..stream.len()]);
}

// --- arrays of tokens -------------------------------------------------------------------------------------------------

fn npy(descr: &str, shape: &str, elements: &[u8]) -> Vec<u8> {
    let mut header = format!("{{'descr': '{descr}', 'fortran_order': False, 'shape': {shape}, }}");
    header += &" ".repeat(63 - (10 + header.len()) % 64);
    header += "\n";
    [b"\x93NUMPY\x01\x00", &(header.len() as u16).to_le_bytes()[..], header.as_bytes(), elements].concat()
}

#[test]
fn npy_arrays_of_every_integer_type_are_streams() {
    let ids = [3u32, 1, 4, 1, 5, 9, 2, 6];
    let bytes =
        |n: usize| ids.iter().flat_map(|id| id.to_le_bytes().into_iter().chain([0; 4]).take(n)).collect::<Vec<_>>();
    for (descr, n) in [("|u1", 1), ("|i1", 1), ("<u2", 2), ("<i2", 2), ("<u4", 4), ("<i4", 4), ("<u8", 8), ("<i8", 8)] {
        let files = Files::with("t.npy", npy(descr, "(8,)", &bytes(n)));
        let data = Dataset::open(&DataOptions { vocab: 10, ..files.options("t.npy", 7) }).unwrap();
        assert_eq!(rows(&data), [(ids[..7].to_vec(), ids[1..].iter().map(|&i| i as i32).collect(), 7)], "{descr}");
    }
    // Ids that need more than 16 bits.
    let wide: Vec<u8> = [70_000u32, 65_535, 65_536].iter().flat_map(|id| id.to_le_bytes()).collect();
    let files = Files::with("t.npy", npy("<u4", "(3,)", &wide));
    let data = Dataset::open(&DataOptions { vocab: 100_000, ..files.options("t.npy", 2) }).unwrap();
    assert_eq!(rows(&data), [(vec![70_000, 65_535], vec![65_535, 65_536], 2)]);
}

#[test]
fn npy_arrays_that_are_no_streams_are_refused() {
    let open = |content: Vec<u8>, vocab| {
        let files = Files::with("t.npy", content);
        Dataset::open(&DataOptions { vocab, ..files.options("t.npy", 2) })
    };
    refused(open(npy("<f4", "(4,)", &[0; 16]), 9), &["t.npy", "<f4", "astype"]);
    refused(open(npy(">u2", "(4,)", &[0; 8]), 9), &["t.npy", ">u2"]);
    refused(open(npy("<u2", "(2, 2)", &[0; 8]), 9), &["t.npy", "(2, 2)", "1-D"]);
    refused(open(npy("<u2", "()", &[0; 8]), 9), &["t.npy", "1-D"]);
    refused(open(npy("<u2", "(5,)", &[0; 8]), 9), &["t.npy", "truncated", "5 elements"]);
    refused(open(npy("<u2", "(4,)", &[0; 8])[..50].to_vec(), 9), &["t.npy", "header"]);
    refused(open(b"not numpy at all".to_vec(), 9), &["t.npy", "NUMPY"]);
    refused(open(npy("<u2", "(4,)", &[1, 0, 2, 0, 9, 0, 3, 0]), 9), &["t.npy", "element 2", "id 9", "vocab_size is 9"]);
    refused(open(npy("<i4", "(4,)", &[0xff; 16]), 9), &["t.npy", "element 0", "id -1"]);
    refused(open(npy("<u8", "(1,)", &[0xff; 8]), 9), &["t.npy", "element 0"]);
}

// --- rows of JSONL ----------------------------------------------------------------------------------------------------

#[test]
fn jsonl_rows_shift_cut_and_pad() {
    let lines = r#"
{"input_ids": [1, 2, 3], "labels": [-100, -100, 3]}
{"input_ids": [1, 2, 3, 4], "attention_mask": [1, 1, 1, 1]}

{"input_ids": [5, 6, 7, 8, 9, 10], "labels": [-100, 6, 7, 8, 11, 10]}
{"text": "hé"}
{"input_ids": [7]}"#;
    let files = Files::with("t.jsonl", lines);
    let data = files.open("t.jsonl", 4);
    const X: i32 = IGNORE;
    assert_eq!(
        rows(&data),
        [
            (vec![1, 2, 3, 0], vec![X, 3, X, X], 3),
            (vec![1, 2, 3, 4], vec![2, 3, 4, X], 4),
            (vec![5, 6, 7, 8], vec![6, 7, 8, X], 4), // cut: the label of position 4 is of a token that is not there
            (vec![104, 0xc3, 0xa9, END], vec![0xc3, 0xa9, END as i32, X], 4),
            (vec![7, 0, 0, 0], vec![X, X, X, X], 1),
        ]
    );
    let report = data.report();
    assert_eq!((report.rows, report.cut, report.tokens), (5, 1, 18));
    assert!(report.to_string().contains("1 rows are longer and were cut"), "{report}");

    let mut loader = Loader::new(data.clone(), load(5, 1, 0, 1, false)).unwrap();
    let batch = next(&mut loader);
    assert_eq!(batch.cu_seqlens, [0, 3, 4, 8, 12, 16, 17, 20], "a row's padding is a document of its own");
    assert_eq!(batch.positions, [0, 1, 2, 0, 0, 1, 2, 3, 0, 1, 2, 3, 0, 1, 2, 3, 0, 0, 1, 2]);
    assert_eq!(batch.loss_tokens(), 1 + 3 + 3 + 3);
}

#[test]
fn jsonl_rows_with_ids_above_16_bits() {
    let files = Files::with("t.jsonl", r#"{"input_ids": [65535, 70000, 3], "labels": [1, -100, 65535]}"#);
    let data = Dataset::open(&DataOptions { vocab: 100_000, ..files.options("t.jsonl", 3) }).unwrap();
    assert_eq!(rows(&data), [(vec![65_535, 70_000, 3], vec![IGNORE, 65_535, IGNORE], 3)]);
    // The largest vocabularies of 16 bits, on either side of the switch.
    for vocab in [65_535, 65_536, 65_537] {
        let top = vocab as u32 - 1;
        let files = Files::with("t.jsonl", format!(r#"{{"input_ids": [0, {top}]}}"#));
        let data = Dataset::open(&DataOptions { vocab, ..files.options("t.jsonl", 2) }).unwrap();
        assert_eq!(rows(&data), [(vec![0, top], vec![top as i32, IGNORE], 2)], "{vocab}");
    }
}

#[test]
fn malformed_jsonl_rows_are_named() {
    let good = r#"{"input_ids": [1, 2]}"#;
    let open = |line: &str| {
        let files = Files::with("t.jsonl", format!("{good}\n{good}\n{line}\n{good}\n"));
        Dataset::open(&files.options("t.jsonl", 4))
    };
    refused(open(r#"{"input_ids": [1, 2"#), &["t.jsonl", "line 3", "{\"input_ids\": [1, 2"]);
    refused(open(r#"{"input_ids": "one"}"#), &["t.jsonl", "line 3"]);
    refused(open(r#"{"input_ids": [1.5]}"#), &["t.jsonl", "line 3"]);
    refused(open(r#"{"prompt": "a", "answer": "b"}"#), &["line 3", "input_ids", "prompt, answer"]);
    refused(open(r#"{"input_ids": []}"#), &["line 3", "no tokens"]);
    refused(
        open(r#"{"input_ids": [1, 257]}"#),
        &["t.jsonl", "line 3", "id 257", "vocab_size is 257", "tokenizer mismatch"],
    );
    refused(open(r#"{"input_ids": [1, -1]}"#), &["line 3", "id -1"]);
    refused(open(r#"{"input_ids": [1, 2], "labels": [1, 2, 3]}"#), &["line 3", "3 labels for 2 input_ids"]);
    refused(open(r#"{"input_ids": [1, 2], "labels": [-1, 2]}"#), &["line 3", "label -1", "-100"]);
    refused(open(r#"{"input_ids": [1, 2], "labels": [1, 257]}"#), &["line 3", "label 257"]);
    let files = Files::with("t.jsonl", b"{\"text\": \"caf\xe9\"}");
    refused(Dataset::open(&files.options("t.jsonl", 4)), &["t.jsonl", "line 1", "UTF-8"]);
    // Nothing half-built is left where the next run would look.
    assert!(fs::read_dir(files.cache()).unwrap().all(|e| e.unwrap().path().extension().unwrap() == "lock"));
}

// --- what cannot be trained on ----------------------------------------------------------------------------------------

#[test]
fn bad_datasets_are_refused_with_the_remedy() {
    let files = Files::with("novel.txt", "Call me Ishmael.");
    files.put("rows.jsonl", "");
    files.put("binary/x.bin", b"\0\0");
    files.put("nothing", "");
    let open = |name: &str, max_len| Dataset::open(&files.options(name, max_len));
    let message = refused(open("novl.txt", 4), &["novl.txt", "no such file", "novel.txt"]);
    assert!(message.find("novel.txt") < message.find("rows.jsonl"), "the nearest name comes first: {message}");
    refused(open("gone/deeper/x.txt", 4), &["gone/deeper/x.txt", "novel.txt"]);
    refused(open("rows.jsonl", 4), &["rows.jsonl", "no rows"]);
    refused(open("binary", 4), &["binary", "no readable text in 1 files"]);
    refused(open("binary/x.bin", 4), &["x.bin", "not a text file"]);
    refused(open("nothing", 4), &["nothing", "empty"]);
    refused(open("", 4), &["text and rows (.jsonl) do not mix", "x.bin", "rows.jsonl"]);
    refused(open("novel.txt", 17), &["17 tokens", "max_len 17", "18"]);
    assert_eq!(open("novel.txt", 16).unwrap().rows(), 1);
    refused(open("novel.txt", 0), &["max_len"]);
    fs::create_dir(files.path("bare")).unwrap();
    refused(open("bare", 4), &["bare", "no files"]);
    refused(Dataset::open(&DataOptions { vocab: 256, ..files.options("novel.txt", 4) }), &["256", "257", "bytes"]);
    refused(Dataset::open(&DataOptions { max_samples: Some(0), ..files.options("novel.txt", 4) }), &["max_samples"]);
    refused(Dataset::open(&DataOptions { vocab: 3, ..synthetic(4, 1) }), &["synthetic", "vocab_size 3"]);
    let mut mixed = synthetic(4, 1);
    mixed.paths.push(files.path("novel.txt"));
    refused(Dataset::open(&mixed), &["synthetic", "alone"]);
}

#[test]
fn a_step_of_more_rows_than_there_are_is_refused_with_the_equation() {
    let data = Files::with("t.txt", "0123456789").open("t.txt", 1); // 10 rows
    refused(
        Loader::new(data.clone(), load(2, 3, 0, 2, true)),
        &["10 rows", "12 = batch_size 2 * grad_accum 3 *", "ranks 2"],
    );
    refused(Loader::new(data.clone(), load(0, 3, 0, 2, true)), &["batch_size is 0"]);
    assert!(Loader::new(data, load(5, 1, 0, 2, true)).is_ok());
}

// --- who gets which rows ----------------------------------------------------------------------------------------------

#[test]
fn permutations_are_bijections() {
    let sizes = (0..70).chain([255, 256, 257, 1000, 1023, 1024, 1025, 4095, 4097, 65_537, 100_003]);
    for n in sizes {
        let p = Permutation::new(n, Rng::new(n, 3));
        let mut seen = vec![false; n as usize];
        for i in 0..n {
            assert!(!std::mem::replace(&mut seen[p.at(i) as usize], true), "{n}: {} twice", p.at(i));
        }
    }
    // Too large to try: distinct and below n on a sample.
    let n = (1 << 40) + 7;
    let p = Permutation::new(n, Rng::new(1, 3));
    let images: BTreeSet<u64> = (0..10_000).chain(n - 10_000..n).map(|i| p.at(i)).collect();
    assert_eq!(images.len(), 20_000);
    assert!(*images.last().unwrap() < n);
}

#[test]
fn permutations_look_random() {
    // Each of 10 things lands on each place about equally often over many seeds.
    let (n, trials) = (10u64, 20_000u64);
    let mut counts = vec![0f64; 100];
    for seed in 0..trials {
        let p = Permutation::new(n, Rng::new(seed, 0));
        (0..n).for_each(|i| counts[(i * n + p.at(i)) as usize] += 1.0);
    }
    let expected = (trials / n) as f64;
    let chi: f64 = counts.iter().map(|c| (c - expected).powi(2) / expected).sum();
    // 81 degrees of freedom: mean 81, sd 12.7.
    assert!(chi < 81.0 + 5.0 * 12.7, "chi squared {chi}");
    // Neighbours do not stay neighbours.
    let p = Permutation::new(100_000, Rng::new(5, 0));
    let close = (1..100_000).filter(|&i| p.at(i).abs_diff(p.at(i - 1)) < 100).count();
    assert!(close < 400, "{close} of 100000 neighbours are within 100: about 200 would be chance");
}

/// A dataset whose row r is the one token r (and a second, so that there is loss).
fn numbered(n: u64) -> (Files, Arc<Dataset>) {
    let lines: String = (0..n).map(|r| format!("{{\"input_ids\": [{r}, 1]}}\n")).collect();
    let files = Files::with("t.jsonl", lines);
    let data = Dataset::open(&DataOptions { vocab: 1 << 20, ..files.options("t.jsonl", 2) }).unwrap();
    (files, Arc::new(data))
}

/// The rows of `steps` optimizer steps of all ranks: by step, then in the order of micro-batch, rank, row.
fn consumed(data: &Arc<Dataset>, batch: usize, accum: usize, dp: usize, shuffle: bool, steps: usize) -> Vec<Vec<u32>> {
    let ranks = (0..dp).map(|rank| Loader::new(data.clone(), load(batch, accum, rank, dp, shuffle)).unwrap());
    let mut ranks: Vec<Loader> = ranks.collect();
    let mut step = || {
        let mut rows = Vec::new();
        for _ in 0..accum {
            for loader in &mut ranks {
                rows.extend(next(loader).tokens.iter().step_by(2));
            }
        }
        rows
    };
    (0..steps).map(|_| step()).collect()
}

#[test]
fn without_shuffle_step_s_takes_rows_s_times_g_and_all_of_them_are_trained_on() {
    let (_files, data) = numbered(64);
    let steps = consumed(&data, 2, 2, 2, false, 9);
    for (s, rows) in steps.iter().enumerate() {
        let expected: Vec<u32> = (0..8).map(|i| (s as u32 * 8 + i) % 64).collect();
        assert_eq!(*rows, expected, "step {s}");
    }
}

#[test]
fn the_rows_of_a_step_do_not_depend_on_how_it_is_split() {
    let (_files, data) = numbered(1003); // 1003 - 10 held out: an epoch is no whole number of steps
    for shuffle in [false, true] {
        let whole = consumed(&data, 8, 1, 1, shuffle, 300);
        for (batch, accum, dp) in [(4, 1, 2), (2, 1, 4), (2, 2, 2), (1, 2, 4), (1, 8, 1)] {
            assert_eq!(consumed(&data, batch, accum, dp, shuffle, 300), whole, "{batch} x {accum} x {dp}");
        }
    }
}

#[test]
fn each_epoch_has_every_train_row_once_in_an_order_of_its_own() {
    let (_files, data) = numbered(1000);
    let stream: Vec<u32> = consumed(&data, 4, 1, 2, true, 500).concat();
    let epoch = Loader::new(data.clone(), load(4, 1, 0, 2, true)).unwrap().rows_per_epoch() as usize;
    assert_eq!(epoch, 992); // 1 % of 1000 rows is one global batch of 8
    let epochs: Vec<&[u32]> = stream.chunks_exact(epoch).collect();
    assert_eq!(epochs.len(), 4);
    for epoch in &epochs {
        let rows: BTreeSet<u32> = epoch.iter().copied().collect();
        assert!(rows.into_iter().eq(0..992));
    }
    assert!(epochs.iter().collect::<BTreeSet<_>>().len() == 4, "orders repeat");
    let other = LoaderOptions { seed: 8, ..load(4, 1, 0, 2, true) };
    let mut other = Loader::new(data, other).unwrap();
    assert_ne!((0..992).map(|n| other.row(n) as u32).collect::<Vec<_>>(), epochs[0], "the seed changes nothing");
}

#[test]
fn a_loader_set_to_a_position_goes_on_as_if_it_had_been_there() {
    let (_files, data) = numbered(101);
    let mut one = Loader::new(data.clone(), load(8, 1, 0, 1, true)).unwrap();
    for step in 0..40 {
        assert_eq!(one.position(), step * 8);
        // Another world: 2 ranks, 2 micro-batches.
        let mut ranks = [0, 1].map(|rank| Loader::new(data.clone(), load(2, 2, rank, 2, true)).unwrap());
        ranks.iter_mut().for_each(|loader| loader.seek(step * 8));
        let rows: Vec<u32> = (0..4).flat_map(|i| next(&mut ranks[i % 2]).tokens).collect();
        assert_eq!(ranks.map(|l| l.position()), [(step + 1) * 8; 2]);
        assert_eq!(rows, next(&mut one).tokens, "step {step}");
    }
}

#[test]
fn held_out_rows_and_train_rows_are_all_rows_and_disjoint() {
    for (n, batch, held) in
        [(1000, 4, 8), (5000, 4, 48), (100_000, 4, 256), (100_000, 300, 600), (81, 4, 8), (79, 4, 0)]
    {
        let data = Arc::new(Dataset::open(&DataOptions { max_samples: Some(n), ..synthetic(2, 1) }).unwrap());
        let train = Loader::new(data.clone(), load(batch, 1, 0, 2, true)).unwrap();
        assert_eq!(train.rows_per_epoch(), n - held, "{n} rows");
        let Some(mut rest) = train.held_out() else {
            assert_eq!(held, 0, "{n} rows");
            continue;
        };
        assert_eq!(rest.rows_per_epoch(), held);
        assert!((0..held).map(|i| rest.row(i)).eq(n - held..n), "{n} rows");
        assert!(rest.held_out().is_none());
    }
    // The evaluation of all ranks together sees each held-out row once.
    let (_files, data) = numbered(1000);
    let mut seen = BTreeMap::<u32, u32>::new();
    for rank in 0..2 {
        let mut held = Loader::new(data.clone(), load(2, 2, rank, 2, true)).unwrap().held_out().unwrap();
        while held.position() < held.rows_per_epoch() {
            next(&mut held).tokens.iter().step_by(2).for_each(|&row| *seen.entry(row).or_default() += 1);
        }
    }
    assert!(seen.into_iter().eq((992..1000).map(|row| (row, 1))));
}

#[test]
fn max_samples_is_the_first_rows() {
    let (files, _data) = numbered(50);
    let options = DataOptions { vocab: 1 << 20, max_samples: Some(7), ..files.options("t.jsonl", 2) };
    let data = Arc::new(Dataset::open(&options).unwrap());
    assert_eq!(consumed(&data, 7, 1, 1, false, 2), [[0, 1, 2, 3, 4, 5, 6]; 2]);
}

#[test]
fn a_micro_batch_is_filled_in_place() {
    let (_files, data) = numbered(1000);
    let mut loader = Loader::new(data, load(4, 1, 0, 2, true)).unwrap();
    let mut batch = next(&mut loader);
    let place = |b: &MicroBatch| {
        (b.tokens.as_ptr(), b.targets.as_ptr(), b.positions.as_ptr(), b.cu_seqlens.as_ptr(), b.cu_seqlens.capacity())
    };
    let (first, tokens) = (place(&batch), batch.tokens.clone());
    for _ in 0..300 {
        loader.next(&mut batch);
        assert_eq!(place(&batch), first);
    }
    assert_ne!(batch.tokens, tokens);
}

// --- the cache --------------------------------------------------------------------------------------------------------

#[test]
fn a_token_file_is_built_once_and_again_when_its_source_changes() {
    let files = Files::with("t.txt", "one two three");
    let first = files.open("t.txt", 4);
    assert!(first.report().built);
    let second = files.open("t.txt", 3); // another max_len: the same tokens
    assert!(!second.report().built);
    assert_eq!(first.fingerprint(), second.fingerprint());
    files.put("t.txt", "one two four!"); // the same length
    let third = files.open("t.txt", 4);
    assert!(third.report().built);
    assert_ne!(first.fingerprint(), third.fingerprint());
    assert_eq!(Tokenizer::Bytes.decode(&rows(&third)[2].0), "four");
    // The first is still mapped and whole.
    assert_eq!(Tokenizer::Bytes.decode(&rows(&first)[2].0), "thre");
}

#[test]
fn a_token_file_that_is_not_whole_is_built_again() {
    let text = "all happy families are alike; ".repeat(400);
    let lines = "{\"input_ids\": [1, 2, 3, 4, 5, 6]}\n".repeat(400);
    type Damage = fn(&Path);
    let damages: [(&str, Damage); 6] = [
        ("empty", |p| fs::write(p, b"").unwrap()),
        ("within the header", |p| fs::File::options().write(true).open(p).unwrap().set_len(1000).unwrap()),
        ("one byte short", |p| {
            let file = fs::File::options().write(true).open(p).unwrap();
            file.set_len(file.metadata().unwrap().len() - 1).unwrap();
        }),
        ("longer", |p| fs::write(p, [fs::read(p).unwrap(), vec![0; 8]].concat()).unwrap()),
        ("a bit of the header", |p| flip(p, 33)),
        ("a bit of a token", |p| flip(p, 4096 + 1001)),
    ];
    for (name, content) in [("t.txt", &text), ("t.jsonl", &lines)] {
        for (what, damage) in damages {
            let files = Files::with(name, content);
            let whole = rows(&files.open(name, 16));
            damage(&files.token_file());
            let again = files.open(name, 16);
            assert!(again.report().built, "{name}: {what}");
            assert_eq!(rows(&again), whole, "{name}: {what}");
            assert!(!files.open(name, 16).report().built, "{name}: {what}");
        }
    }
}

fn flip(path: &Path, at: usize) {
    let mut bytes = fs::read(path).unwrap();
    bytes[at] ^= 4;
    fs::write(path, bytes).unwrap();
}

#[test]
fn a_cache_that_cannot_be_written_is_the_users_to_mend() {
    let files = Files::with("t.txt", "some text");
    fs::write(files.cache(), "a file where the directory should be").unwrap();
    refused(Dataset::open(&files.options("t.txt", 4)), &["cache", "XDG_CACHE_HOME"]);
}

#[test]
fn what_a_killed_builder_left_behind_is_overwritten() {
    let files = Files::with("t.txt", "some text that is long enough");
    files.open("t.txt", 4);
    let path = files.token_file();
    let whole = fs::read(&path).unwrap();
    fs::remove_file(&path).unwrap();
    fs::write(path.with_extension("partial"), vec![7; 100_000]).unwrap();
    assert!(files.open("t.txt", 4).report().built);
    assert_eq!(fs::read(&path).unwrap(), whole);
    assert!(!path.with_extension("partial").exists());
}

#[test]
fn of_concurrent_openers_one_builds_and_the_others_wait() {
    let files = Files::with("t.txt", "to be, or not to be. ".repeat(500_000));
    let barrier = Barrier::new(8);
    let data: Vec<Dataset> = std::thread::scope(|scope| {
        let open = || {
            barrier.wait();
            Dataset::open(&files.options("t.txt", 64)).unwrap()
        };
        let threads: Vec<_> = (0..8).map(|_| scope.spawn(open)).collect();
        threads.into_iter().map(|t| t.join().unwrap()).collect()
    });
    assert_eq!(data.iter().filter(|d| d.report().built).count(), 1);
    assert!(data.iter().all(|d| d.fingerprint() == data[0].fingerprint() && d.rows() == data[0].rows()));
}

/// Run by the test below in processes of its own; by itself it opens a small corpus.
#[test]
fn opener() {
    let given = std::env::var_os("FLATSHARD_TEST_CORPUS").map(PathBuf::from);
    let own = Files::with("t.txt", "a small corpus");
    let mut options = own.options("t.txt", 4);
    if let Some(dir) = given {
        options = DataOptions { paths: vec![dir.join("data")], cache_dir: dir.join("cache"), ..options };
    }
    let data = Dataset::open(&options).unwrap();
    assert!(data.rows() > 0);
    println!("built={} fingerprint={:016x}", data.report().built, data.fingerprint());
}

#[test]
fn processes_share_one_token_file_and_survive_the_death_of_its_builder() {
    let files = Files::with("t.txt", "to be, or not to be. ".repeat(1_000_000));
    let spawn = || {
        std::process::Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "opener", "--nocapture"])
            .env("FLATSHARD_TEST_CORPUS", files.0.path())
            .stdout(std::process::Stdio::piped())
            .spawn()
            .unwrap()
    };
    // Killed while it holds the lock and writes: as soon as there is a partial file. Too late on a busy machine: again.
    let exists = |extension: &str| {
        let mut entries = fs::read_dir(files.cache()).into_iter().flatten().flatten();
        entries.any(|e| e.path().extension().is_some_and(|x| x == extension))
    };
    let killed_in_time = (0..20).any(|_| {
        let _ = fs::remove_dir_all(files.cache());
        let mut child = spawn();
        while !exists("partial") && child.try_wait().unwrap().is_none() {
            std::thread::yield_now();
        }
        child.kill().unwrap();
        child.wait().unwrap();
        exists("partial") && !exists("tokens")
    });
    assert!(killed_in_time);
    let others: Vec<_> = (0..3).map(|_| spawn()).collect();
    let said: Vec<String> =
        others.into_iter().map(|c| String::from_utf8(c.wait_with_output().unwrap().stdout).unwrap()).collect();
    let count = |what: &str| said.iter().filter(|s| s.contains(what)).count();
    assert_eq!((count("built=true"), count("built=false")), (1, 2), "{said:?}");
    let mine = files.open("", 4);
    assert_eq!(count(&format!("fingerprint={:016x}", mine.fingerprint())), 3);
}

// --- the synthetic task -----------------------------------------------------------------------------------------------

#[test]
fn the_synthetic_task_has_the_loss_floor_that_it_says() {
    let data = Dataset::open(&DataOptions { vocab: 1000, max_samples: Some(2000), ..synthetic(128, 3) }).unwrap();
    let (mut ones, mut pairs) = (vec![0f64; 64], BTreeMap::<(u32, i32), f64>::new());
    let all = rows(&data);
    for (tokens, targets, _) in &all {
        for (&token, &target) in tokens.iter().zip(targets) {
            ones[token as usize] += 1.0;
            *pairs.entry((token, target)).or_default() += 1.0;
        }
        assert!(tokens[1..].iter().zip(targets).all(|(&next, &target)| next as i32 == target));
    }
    let n: f64 = ones.iter().sum();
    // Tokens are uniform over 64 ids (each 4000 of 256000 times, sd 63 were they independent), which a model must learn first,
    assert!(ones.iter().all(|&c| (c / n * 64.0 - 1.0).abs() < 0.15), "{ones:?}");
    // each has 4 successors, and what is left is their entropy (measured on the counts, which underestimates by 1e-3).
    assert_eq!(pairs.len(), 64 * 4);
    let entropy: f64 = pairs.iter().map(|((token, _), c)| -c / n * (c / ones[*token as usize]).ln()).sum();
    let floor = data.loss_floor().unwrap();
    assert!((floor - 1.21301).abs() < 1e-5);
    assert!((entropy - floor).abs() < 0.01, "{entropy} is not {floor}");

    let same = Dataset::open(&DataOptions { vocab: 1000, max_samples: Some(2000), ..synthetic(128, 3) }).unwrap();
    assert!(rows(&same) == all && same.fingerprint() == data.fingerprint());
    let other = Dataset::open(&DataOptions { vocab: 1000, max_samples: Some(2000), ..synthetic(128, 4) }).unwrap();
    assert!(rows(&other) != all && other.fingerprint() != data.fingerprint());
    assert_eq!(all.iter().map(|r| &r.0).collect::<BTreeSet<_>>().len(), 2000, "rows repeat");
    for vocab in [4, 5, 7, 63] {
        let task = Synthetic::new(vocab, 1).unwrap();
        for s in 0..vocab as u32 {
            let next: BTreeSet<u32> = (0..4).map(|j| task.successor(s, j)).collect();
            assert!(next.len() == 4 && next.iter().all(|&t| t < vocab as u32), "{vocab}: {next:?}");
        }
    }
}

// --- the default corpus -----------------------------------------------------------------------------------------------

/// A cargo home that holds `half` with a small and a large file, and a crate that this build does not use.
fn cargo_home(root: &Path) {
    let lock = include_str!("../Cargo.lock");
    let at = lock.find("name = \"half\"").unwrap();
    let version = lock[at..].lines().nth(1).unwrap().split('"').nth(1).unwrap();
    let put = |name: &str, content: String| {
        let path = root.join("registry/src/index-123").join(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, content).unwrap();
    };
    let line = "fn same() {} // the same line again\n";
    for i in 0..20 {
        put(&format!("half-{version}/src/part{i}.rs"), line.repeat(100_000 / line.len()));
    }
    put(&format!("half-{version}/src/generated.rs"), line.repeat(10_000));
    put(&format!("half-{version}/README.md"), "not Rust".into());
    put("half-0.0.1/src/lib.rs", "another version".into());
    put("unrelated-1.0.0/src/lib.rs", "another crate".into());
}

#[test]
fn the_default_corpus_is_the_sources_of_this_builds_crates() {
    let dir = tempfile::tempdir().unwrap();
    cargo_home(dir.path());
    let corpus = Corpus::default(Some(dir.path())).unwrap();
    let crate_files = |c: &Corpus, root: &Path| {
        let ours = c.files.iter().filter(|f| f.path.starts_with(root));
        ours.map(|f| f.path.strip_prefix(root).unwrap().to_path_buf()).collect::<Vec<_>>()
    };
    let found = crate_files(&corpus, dir.path());
    // At most 1 MiB of a crate: 10 of the 20 parts of 100 kB, of every part of the crate; nothing else.
    assert_eq!(found.len(), 10);
    assert!(found.iter().all(|f| f.to_string_lossy().contains("src/part")), "{found:?}");
    assert!(found.iter().any(|f| f.to_string_lossy().contains("part1")), "{found:?}");
    assert!(corpus.what.starts_with("Rust sources of 1 crates"), "{}", corpus.what);
    // The order is that of the names, not of the place.
    let elsewhere = tempfile::tempdir().unwrap();
    cargo_home(elsewhere.path());
    let again = Corpus::default(Some(elsewhere.path())).unwrap();
    assert_eq!(crate_files(&again, elsewhere.path()), found);
    assert!(!found.is_sorted(), "{found:?}");
}

#[test]
fn without_cargo_the_default_corpus_is_other_text() {
    let nowhere = tempfile::tempdir().unwrap();
    for home in [None, Some(nowhere.path())] {
        let corpus = Corpus::default(home).unwrap();
        assert!(corpus.what.starts_with("this project's sources"), "{}", corpus.what);
        assert!(corpus.files.iter().any(|f| f.path.ends_with("src/data/corpus.rs")));
    }
}
