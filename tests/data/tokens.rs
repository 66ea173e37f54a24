//! Tokenizers compared with transformers (the goldens of make.py), also in text streams, and errors in their files.
use super::*;
use flatshard::data::tokenizer;
use serde_json::{Value, json};

pub(crate) fn golden(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/golden").join(name)
}

pub(crate) fn load(name: &str) -> Tokenizer {
    Tokenizer::from_name(golden(name).to_str().unwrap()).unwrap()
}

fn encode(t: &Tokenizer, text: &str) -> Vec<u32> {
    let mut ids = Vec::new();
    t.encode(text, &mut ids).unwrap();
    ids
}

#[test]
fn byte_tokens_round_trip() {
    let t = Tokenizer::from_name("bytes").unwrap();
    let ids = encode(&t, "héllo 漢\u{1F600}\0");
    assert_eq!(t.decode(&ids), "héllo 漢\u{1F600}\0");
    assert!(ids.iter().all(|&id| id < 256));
    // What a model may generate: half a character, an end of text, ids outside the vocabulary.
    assert_eq!(t.decode(&[b'a' as u32, 0xe6, 0xbc, b'b' as u32, t.eos().unwrap(), 300]), "a\u{fffd}b\u{fffd}");
    refused(Tokenizer::from_name("gpt2"), &["gpt2", "bytes"]);
}

#[test]
fn tokens_are_those_of_transformers() {
    for name in ["byte_level", "sentencepiece"] {
        let (t, golden) = (load(name), golden(name).join("golden.json"));
        let golden: Value = serde_json::from_slice(&fs::read(golden).unwrap()).unwrap();
        assert_eq!(json!({"vocab": t.vocab(), "bos": t.bos(), "eos": t.eos()})["vocab"], golden["vocab"]);
        assert_eq!((json!(t.bos()), json!(t.eos())), (golden["bos"].clone(), golden["eos"].clone()));
        let (before, behind) = t.affixes();
        for case in golden["cases"].as_array().unwrap() {
            let bare = encode(&t, case["text"].as_str().unwrap());
            assert_eq!(json!(bare), case["bare"], "{name}: {}", case["text"]);
            assert_eq!(json!([before, &bare, behind].concat()), case["whole"], "{name}: {}", case["text"]);
            assert_eq!(t.decode(&bare), case["decoded"], "{name}: {}", case["text"]);
        }
    }
}

/// The files of a golden tokenizer in a separate directory, with a modified config.
fn changed(name: &str, change: impl Fn(&mut Value)) -> (TempDir, Result<Tokenizer, Error>) {
    let dir = tempfile::tempdir().unwrap();
    fs::copy(golden(name).join("tokenizer.json"), dir.path().join("tokenizer.json")).unwrap();
    let mut config: Value =
        serde_json::from_slice(&fs::read(golden(name).join("tokenizer_config.json")).unwrap()).unwrap();
    change(&mut config);
    fs::write(dir.path().join("tokenizer_config.json"), config.to_string()).unwrap();
    let t = Tokenizer::from_name(dir.path().to_str().unwrap());
    (dir, t)
}

#[test]
fn the_post_processor_decides_the_tokens_added_to_a_text() {
    let around = |flags: Value| {
        let change = |config: &mut Value| {
            for (key, value) in flags.as_object().unwrap() {
                config[key] = value.clone();
            }
        };
        let t = changed("sentencepiece", change).1.unwrap();
        (t.affixes().0.to_vec(), t.affixes().1.to_vec())
    };
    // transformers 5.24 drops both flags where there is a tokenizer.json.
    for flags in [json!({}), json!({"add_bos_token": true, "add_eos_token": true}), json!({"add_bos_token": false})] {
        assert_eq!(around(flags), (vec![1], vec![]));
    }
}

/// transformers 5.24: AutoTokenizer.from_pretrained(dir)(text, add_special_tokens=False).input_ids
#[test]
fn tokens_of_the_files_next_to_a_tokenizer_are_added_to_it() {
    let texts = ["hi<late>", "a <mid> b", "<late><late> x"];
    let ids = |t: &Tokenizer| texts.map(|text| encode(t, text));
    let late = json!({"content": "<late>", "special": true});
    let mid = json!({"content": "<mid>", "lstrip": true, "rstrip": true, "normalized": false});
    let with = |decoder: Value| changed("byte_level", |config| config["added_tokens_decoder"] = decoder.clone()).1;
    let (dir, bare) = changed("byte_level", |_| {});
    assert_eq!(ids(&bare.unwrap())[0], [75, 76, 31, 79, 276, 72, 33]);
    let both = with(json!({"361": mid, "360": late})).unwrap();
    let expected = [vec![75, 76, 360], vec![68, 361, 69], vec![360, 360, 224, 91]];
    assert_eq!((ids(&both), both.vocab(), both.decode(&[75, 360])), (expected, 362, "h".into()));
    fs::write(dir.path().join("added_tokens.json"), r#"{"<mid>": 361, "<late>": 360}"#).unwrap();
    let legacy = Tokenizer::from_name(dir.path().to_str().unwrap()).unwrap();
    assert_eq!(ids(&legacy), [vec![75, 76, 360], vec![68, 224, 361, 271], vec![360, 360, 224, 91]]);
    assert_ne!(legacy.fingerprint(), both.fingerprint());
    // Of a token that the file has, the other attributes count.
    let start = with(json!({"1": {"content": "<|im_start|>", "special": true, "lstrip": true}})).unwrap();
    assert_eq!(encode(&start, "a  <|im_start|>b"), [68, 1, 69]);
    // transformers gives these the id 360.
    for (decoder, words) in [
        (json!({"400": late}), ["\"<late>\" has id 400", "next free id is 360"]),
        (json!({"7": late}), ["\"<late>\" has id 7", "next free id is 360"]),
        (json!({"360": "<late>"}), ["added_tokens_decoder", "360"]),
    ] {
        let error = with(decoder).unwrap_err().to_string();
        assert!(words.iter().all(|word| error.contains(word)), "{error}");
    }
}

#[test]
fn a_text_in_pieces_has_the_tokens_of_the_whole() {
    // About three pieces of 256 KiB. The long line and the blank ones leave few places to split; the first text has
    // none.
    let line = "it won't be the 1,000,000th time, naïve 漢字\n\n    print(f'{i} of {argc}')\nThe fox\n";
    let texts = [line.repeat(9000), format!("{}\n{}", "lazy dog ".repeat(40_000), line.repeat(4000))];
    for name in ["byte_level", "sentencepiece"] {
        let t = load(name);
        for text in &texts {
            let files = Files::with("t.txt", text);
            let data = Dataset::open(&DataOptions { tokenizer: t.clone(), vocab: 1000, ..files.options("t.txt", 64) });
            let data = data.unwrap();
            let whole = [t.affixes().0, &encode(&t, text), &[t.eos().unwrap()]].concat();
            assert_eq!(data.report().tokens as usize, whole.len(), "{name}");
            let stream: Vec<u32> = rows(&data).into_iter().flat_map(|r| r.0).collect();
            assert!(stream == whole[..stream.len()], "{name}");
        }
    }
}

#[test]
fn token_files_are_kept_apart_by_tokenizer() {
    let files = Files::with("t.txt", "The fox jumps over the lazy dog ".repeat(20));
    let with = |tokenizer| DataOptions { tokenizer, vocab: 1000, ..files.options("t.txt", 8) };
    let first = Dataset::open(&with(load("byte_level"))).unwrap();
    let second = Dataset::open(&with(load("sentencepiece"))).unwrap();
    assert!(first.report().built && second.report().built);
    assert_ne!(first.fingerprint(), second.fingerprint());
    // The same files in another directory are the same tokenizer.
    let (_dir, copy) = changed("byte_level", |_| {});
    assert_eq!(copy.unwrap().vocab(), load("byte_level").vocab());
    assert!(!Dataset::open(&with(load("byte_level"))).unwrap().report().built);
}

#[test]
fn only_existing_tokenizer_files_are_listed() {
    let names = |t: &Tokenizer| -> Vec<String> {
        t.files().iter().map(|p| p.file_name().unwrap().to_str().unwrap().to_string()).collect()
    };
    assert_eq!(names(&load("byte_level")), ["tokenizer.json", "tokenizer_config.json"]);
    assert!(names(&Tokenizer::Bytes).is_empty());
    assert!(tokenizer::FILES.contains(&"chat_template.jinja"));
}

#[test]
fn unusable_tokenizers_are_refused() {
    let files = Files::with("t.txt", "some text");
    let dir = files.path("");
    let from = |name: &str| Tokenizer::from_name(dir.join(name).to_str().unwrap());
    refused(from("no.json"), &["no.json", "no such file", "bytes"]);
    refused(from(""), &["tokenizer.json", "not found"]);
    files.put("tokenizer.json", "{\"version\": \"1.0\"}");
    refused(from("tokenizer.json"), &["tokenizer.json", "is not a tokenizer"]);
    refused(changed("byte_level", |c| c["eos_token"] = json!("<end>")).1, &["<end>", "eos_token"]);
    refused(
        changed("byte_level", |c| c["chat_template"] = json!(3)).1,
        &["tokenizer_config.json", "chat_template", "3"],
    );
    let (dir, t) = changed("byte_level", |c| c["eos_token"] = Value::Null);
    let without_end = DataOptions { tokenizer: t.unwrap(), vocab: 1000, ..files.options("t.txt", 2) };
    refused(Dataset::open(&without_end), &["eos_token", "tokenizer_config.json"]);
    fs::write(dir.path().join("tokenizer_config.json"), "[").unwrap();
    refused(Tokenizer::from_name(dir.path().to_str().unwrap()), &["tokenizer_config.json", "not a JSON object"]);
    // More ids than the model: both numbers are named.
    let large = DataOptions { tokenizer: load("sentencepiece"), vocab: 400, ..files.options("t.txt", 2) };
    refused(Dataset::open(&large), &["400", "420", "sentencepiece"]);
}

/// A tokenizer may have added tokens that a model has no row for, as Gemma 3's does: only a text that has one is
/// refused.
#[test]
fn added_tokens_beyond_the_model_are_refused_where_they_occur() {
    let files = Files::new();
    let tokenizer = json!({
        "version": "1.0", "truncation": null, "padding": null, "normalizer": null, "post_processor": null,
        "added_tokens": [{"id": 4, "content": "<picture>", "single_word": false, "lstrip": false, "rstrip": false,
                          "normalized": false, "special": true}],
        "pre_tokenizer": {"type": "Whitespace"}, "decoder": null,
        "model": {"type": "WordLevel", "vocab": {"<unk>": 0, "a": 1, "b": 2, "end": 3}, "unk_token": "<unk>"},
    });
    let path = files.put("tokenizer/tokenizer.json", tokenizer.to_string());
    files.put("tokenizer/tokenizer_config.json", r#"{"eos_token": "end"}"#);
    let tokenizer = Tokenizer::load(&path).unwrap();
    assert_eq!(tokenizer.vocab(), 5);
    let open = |name: &str, content: &str, vocab| {
        files.put(name, content);
        Dataset::open(&DataOptions { tokenizer: tokenizer.clone(), vocab, ..files.options(name, 2) })
    };
    let row = "{\"text\": \"a b\"}\n";
    assert_eq!(rows(&open("rows.jsonl", row, 4).unwrap()).len(), 1);
    assert_eq!(open("t.txt", "a b a b", 4).unwrap().rows(), 2);
    let says = ["token \"<picture>\" with id 4", "vocab_size is 4"];
    let bad = format!("{row}{}", row.replace('b', "<picture>"));
    refused(open("rows.jsonl", &bad, 4), &[&["rows.jsonl", "line 2"], &says[..]].concat());
    refused(open("t.txt", "a b <picture>", 4), &[&["t.txt"], &says[..]].concat());
    assert_eq!(open("t.txt", "a b <picture> a", 5).unwrap().rows(), 2);
    // Without a row for the end of text, or for ordinary tokens, it is another model's.
    for vocab in [2, 3] {
        refused(open("t.txt", "a b", vocab), &["tokenizer mismatch", "the 5 ids"]);
    }
}
