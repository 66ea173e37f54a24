//! What the fuzz targets do with their bytes, and what must hold whatever these are. `tests/corpora.rs` replays the corpora
//! through the same functions.
use flatshard::ckpt::{header, hf};
use flatshard::data::{DataOptions, Dataset, Tokenizer};
use std::path::{Component, Path};

/// Two bytes of length for the tensors, then the JSON of a safetensors header; and the same bytes as a whole file.
pub fn header(bytes: &[u8]) {
    if let Some((size, json)) = bytes.split_first_chunk::<2>() {
        covered(json, 8 + json.len() as u64 + u16::from_le_bytes(*size) as u64);
    }
    if let Some((prefix, rest)) = bytes.split_first_chunk::<8>() {
        let file = bytes.len() as u64;
        if let Ok(length) = header::length(*prefix, file) {
            covered(&rest[..length as usize], file);
        }
    }
}

/// The tensors, where they are accepted, lie one behind the other up to the end of the file.
fn covered(json: &[u8], file: u64) {
    let Ok(tensors) = header::tensors(json, file) else { return };
    let mut end = 8 + json.len() as u64;
    for t in tensors {
        assert_eq!(t.offset, end, "{t:?}");
        let elements = t.shape.iter().try_fold(1u64, |n, &d| n.checked_mul(d as u64)).expect("fits the file");
        end += elements * t.dtype.bitsize() as u64 / 8;
    }
    assert_eq!(end, file);
}

/// No file of an index leads out of its directory.
pub fn index(bytes: &[u8]) {
    for file in header::index(bytes).iter().flat_map(|map| map.values()) {
        let mut parts = Path::new(file).components();
        assert!(matches!((parts.next(), parts.next()), (Some(Component::Normal(_)), None)), "{file:?}");
    }
}

/// A config that is accepted describes a model that the config which we write describes too.
pub fn config(bytes: &[u8]) {
    let Ok(spec) = hf::parse(bytes) else { return };
    let again = hf::parse(hf::config(&spec).as_bytes()).expect("what we write, we read");
    let differences = hf::differences(&spec, &again);
    assert!(differences.is_empty(), "{differences:?}");
}

/// Rows of a JSONL file become tokens below the bound, or one error that is the user's.
pub fn jsonl(bytes: &[u8]) {
    let dir = tempfile::tempdir().expect("a temporary directory");
    let path = dir.path().join("rows.jsonl");
    std::fs::write(&path, bytes).expect("a file in it");
    let options = DataOptions {
        paths: vec![path],
        tokenizer: Tokenizer::Bytes,
        vocab: 300,
        max_len: 8,
        max_samples: None,
        seed: 1,
        cache_dir: dir.path().join("cache"),
        cargo_home: None,
    };
    match Dataset::open(&options) {
        Ok(data) => {
            let (mut tokens, mut targets) = ([0; 8], [0; 8]);
            for row in 0..data.rows() {
                data.fill(row, &mut tokens, &mut targets);
                assert!(tokens.iter().all(|&t| t < 300) && targets.iter().all(|t| (-100..300).contains(t)));
            }
        }
        Err(e) => assert_eq!(e.exit_status(), 2, "{e}"),
    }
}
