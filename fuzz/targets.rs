//! What each fuzz target does with its input, and the properties that must hold for any input.
//! `tests/data/fuzz_corpora.rs` replays the corpora through the same functions.
use flatshard::ckpt::{gguf, header, hf};
use flatshard::comm::frame::{HEADER, Inbox};
use flatshard::comm::handshake::{self, Hello};
use flatshard::comm::hosts::messages;
use flatshard::comm::hosts::roster::{RankPlace, Roster};
use flatshard::data::{ChatTemplate, Format, Outcome, Recipe, TokenizedRow, Tokenizer};
use flatshard::run::settings::config;
use flatshard::run::settings::deepspeed;
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

/// Accepted tensors are contiguous up to the end of the file.
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

/// No file of an index is outside its directory.
pub fn index(bytes: &[u8]) {
    for file in header::index(bytes).iter().flat_map(|map| map.values()) {
        let mut parts = Path::new(file).components();
        assert!(matches!((parts.next(), parts.next()), (Some(Component::Normal(_)), None)), "{file:?}");
    }
}

/// What a GGUF file says becomes the files of a directory, or an error; its tensors are within it.
pub fn gguf(bytes: &[u8]) {
    let Ok(files) = gguf::described(bytes) else { return };
    for (name, content) in files.iter().filter(|(name, _)| name.ends_with(".json")) {
        assert!(serde_json::from_slice::<serde_json::Value>(content).is_ok(), "{name}");
    }
}

/// Writing and reading back an accepted config gives the same model.
pub fn config(bytes: &[u8]) {
    let Ok(spec) = hf::parse(bytes) else { return };
    let again = hf::parse(hf::config(&spec).as_bytes()).expect("what we write, we read");
    let differences = hf::differences(&spec, &again);
    assert!(differences.is_empty(), "{differences:?}");
}

/// Every line, read as each kind of row, becomes tokens within the vocabulary and as many labels, or an error.
pub fn jsonl(bytes: &[u8]) {
    const CHAT: &str =
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{% if add_generation_prompt %}<a>{% endif %}";
    let chat = Some(Arc::new(ChatTemplate::new(CHAT, ("", "")).expect("a template")));
    let keys = Format { input_key: Some("text".into()), output_key: Some("labels".into()), ..Format::default() };
    let formats = [Format { chat, multiturn: true, ..Format::default() }, keys, Format::default()];
    let mut row = TokenizedRow::default();
    for format in formats {
        let recipe = Recipe { format, tokenizer: Tokenizer::Bytes, bound: 300, max_len: 64 };
        for line in bytes.split(|&b| b == b'\n') {
            match recipe.line(line, &mut row) {
                Ok(Outcome::Kept) => {
                    assert!(!row.ids.is_empty() && row.ids.len() == row.labels.len());
                    assert!(row.ids.iter().all(|&id| id < 300) && row.labels.iter().all(|l| (-100..300).contains(l)));
                }
                Ok(Outcome::Dropped(_) | Outcome::Text) => {}
                Err(fault) => assert!(!fault.is_empty()),
            }
        }
    }
}

/// A configuration file becomes settings or a short message, both as YAML and as JSON.
pub fn yaml(bytes: &[u8]) {
    for path in ["run.yaml", "run.json"] {
        short(config::parse(bytes, Path::new(path)).map(drop));
    }
}

/// So does a DeepSpeed config, whatever the flags.
pub fn deepspeed(bytes: &[u8]) {
    let flags = serde_json::json!({"precision": {"precision": "fp16"}, "optim": {"lr": 0.001}});
    for asked in [serde_json::json!({}), flags] {
        short(deepspeed::parse(bytes, Path::new("ds.json"), &asked).map(drop));
    }
}

/// A tokenizer that loads (panics of the library are caught: see `fuzz_targets/tokenizer.rs`) makes ids within its
/// vocabulary from any text, and text from any ids.
pub fn tokenizer(bytes: &[u8]) {
    let dir = tempfile::tempdir().expect("a directory");
    let path = dir.path().join("tokenizer.json");
    std::fs::write(&path, bytes).expect("a file");
    let Ok(tokenizer) = Tokenizer::load(&path).map_err(|e| short(Err(e))) else { return };
    for text in ["", "a", "Hello, world!  \u{1f600} e\u{301}\n\0", "aaaa bbbb <s> ["] {
        let mut ids = Vec::new();
        match tokenizer.encode(text, &mut ids) {
            Ok(()) => assert!(ids.iter().all(|&id| (id as usize) < tokenizer.vocab())),
            Err(e) => short(Err(e)),
        }
        tokenizer.decode(&ids);
    }
}

/// A template renders a conversation or returns an error, in bounded time and memory.
pub fn template(bytes: &[u8]) {
    let Ok(text) = std::str::from_utf8(bytes) else { return };
    let message = |role, content| minijinja::context! { role, content };
    let talk = [message("system", "Be brief."), message("user", " Hi\nthere "), message("assistant", "Hello.")];
    let result = ChatTemplate::new(text, ("<s>", "</s>")).and_then(|t| {
        t.render(&talk[1..], true)?;
        t.render(&talk, false)
    });
    if let Err(text) = result {
        assert!(!text.is_empty() && text.chars().count() < 500, "{text}");
    }
}

/// Messages of ranks before authentication: a greeting, or rank 0's table, has the requested length, and none of it
/// reaches a terminal unescaped.
pub fn rendezvous(bytes: &[u8]) {
    if handshake::challenge(bytes).is_some() {
        assert_eq!(bytes.len(), 40);
    }
    for record in [0, 2, 74] {
        if let Some(hello) = Hello::parse(bytes, record) {
            assert_eq!((hello.record.len(), bytes.len()), (record, Hello::bytes(record)));
        }
    }
    let plain = |text: &str| assert!(!text.contains(char::is_control), "{text:?}");
    plain(&messages::refusal(bytes));
    let Some((&world, rest)) = bytes.split_first() else { return };
    let world = world as usize % 9;
    if let Some(lost) = messages::lost(rest, world) {
        assert!(lost.rank < world);
        plain(&lost.why);
    }
    if let Some(table) = messages::table(rest, world) {
        assert_eq!(table.len(), world);
        let places: Vec<RankPlace> = table.into_iter().map(|entry| entry.place).collect();
        places.iter().for_each(|place| plain(&place.host));
        match Roster::new(&places) {
            Ok(roster) => assert!(roster.ranks() == world || world == 0),
            Err(e) => short(Err(e)),
        }
    }
}

/// Messages of a connection, however they are split: each has the length allowed for its kind, and together they have
/// the length of the input.
pub fn frame(bytes: &[u8]) {
    struct Pieces<'a>(&'a [u8], usize);
    impl std::io::Read for Pieces<'_> {
        fn read(&mut self, to: &mut [u8]) -> std::io::Result<usize> {
            let n = self.1.min(to.len()).min(self.0.len());
            to[..n].copy_from_slice(&self.0[..n]);
            self.0 = &self.0[n..];
            if n == 0 { Err(std::io::ErrorKind::WouldBlock.into()) } else { Ok(n) }
        }
    }
    let Some((&step, bytes)) = bytes.split_first() else { return };
    let answers = messages::answers(3);
    let mosts: [&dyn Fn(u32) -> Option<usize>; 2] = [&answers, &messages::max_len];
    for most in mosts {
        let (mut from, mut inbox, mut sum) = (Pieces(bytes, 1 + step as usize), Inbox::default(), 0);
        while let Ok(Some((kind, body))) = inbox.read(&mut from, most) {
            assert!(most(kind).is_some_and(|most| body.len() <= most));
            sum += HEADER + body.len();
            assert!(sum <= bytes.len());
        }
    }
}

/// A message is a few sentences, however much it could quote.
fn short(result: flatshard::base::Result<()>) {
    if let Err(e) = result {
        assert!(e.to_string().chars().count() < 1500, "{e}");
    }
}
