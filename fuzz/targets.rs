//! What the fuzz targets do with their bytes, and what must hold whatever these are. `tests/corpora.rs` replays the corpora
//! through the same functions.
use flatshard::ckpt::{header, hf};
use flatshard::data::{ChatTemplate, Format, Outcome, Recipe, Row, Tokenizer};
use std::path::{Component, Path};
use std::sync::Arc;

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

/// Every line, read as each kind of row, becomes tokens below the bound and as many labels, or words about what is wrong.
pub fn jsonl(bytes: &[u8]) {
    const CHAT: &str =
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{% if add_generation_prompt %}<a>{% endif %}";
    let chat = Some(Arc::new(ChatTemplate::new(CHAT, ("", "")).expect("a template")));
    let keys = Format { input_key: Some("text".into()), output_key: Some("labels".into()), ..Format::default() };
    let formats = [Format { chat, multiturn: true, ..Format::default() }, keys, Format::default()];
    let mut row = Row::default();
    for format in formats {
        let recipe = Recipe { format, tokenizer: Tokenizer::Bytes, bound: 300, max_len: 64 };
        for line in bytes.split(|&b| b == b'\n') {
            match recipe.line(line, &mut row) {
                Ok(Outcome::Kept) => {
                    assert!(!row.ids.is_empty() && row.ids.len() == row.labels.len());
                    assert!(row.ids.iter().all(|&id| id < 300) && row.labels.iter().all(|l| (-100..300).contains(l)));
                }
                Ok(Outcome::Dropped) => {}
                Err(fault) => assert!(!fault.is_empty()),
            }
        }
    }
}
