//! A tokenizer's words: most pipelines split a text into words, and what a word's tokens are depends on nothing else.
//! The library tokenizes each word once; from then on its tokens are remembered. Never guesses: where the library
//! could see more than one word at a time, there is no [`Words`], or it leaves the text to the library.
mod split;

use ahash::AHashMap;
use aho_corasick::{AhoCorasick, MatchKind};
use serde_json::Value;
use split::{Learned, Splitter};
use std::collections::HashSet;
use std::ops::Range;
use std::sync::{Mutex, PoisonError};
use tokenizers::models::ModelWrapper;
use tokenizers::normalizers::NFC;
use tokenizers::pre_tokenizers::byte_level::ByteLevel;
use tokenizers::tokenizer::{
    Model, NormalizedString, Normalizer, OffsetType, PreTokenizedString, PreTokenizer, Result, Tokenizer as Pipeline,
};

/// Maximum bytes of a word that is remembered, and number of words that a thread remembers: some 10 MB.
const LONGEST: usize = 128;
const WORDS: usize = 1 << 17;

/// What SentencePiece models have instead of a space.
const SPACE: char = '\u{2581}';

/// Words of a pipeline that is known to see them one by one.
pub(super) struct Words {
    /// Tokens matched before normalization, then tokens matched after it.
    added: Vec<AddedTokens>,
    kind: Kind,
    /// The normalizer is NFC.
    nfc: bool,
    /// Places are those of the library, too.
    places: bool,
    /// The memories of threads that tokenize nothing now.
    free: Mutex<Vec<WordMemory>>,
}

enum Kind {
    /// The pre-tokenizer splits, and each byte of a word is a character of the model.
    Bytes(Splitter),
    /// The model merges characters of a whole text, but no token of its vocabulary has a space behind another
    /// character, so that no merge crosses the place before a space; `joined` are the characters of exceptions.
    Spaces { joined: HashSet<char>, prefix: bool },
}

struct AddedTokens {
    finder: AhoCorasick,
    /// The id of each, and whether it takes no spaces or words next to it into account.
    ids: Vec<(u32, bool)>,
}

/// What one thread remembers.
#[derive(Default)]
struct WordMemory {
    caches: Learned,
    /// The range of a word's tokens.
    known: AHashMap<Box<str>, Range<u32>>,
    ids: Vec<u32>,
    /// Start and end of each in its word, in bytes.
    places: Vec<(u8, u8)>,
}

/// Tokens and, if asked for, the bytes of the text that each stands for.
pub(super) struct Tokens<'o> {
    pub ids: &'o mut Vec<u32>,
    pub places: Option<&'o mut Vec<Range<usize>>>,
}

impl Tokens<'_> {
    /// Appends tokens whose places are relative to `at`.
    pub fn extend(&mut self, at: usize, ids: &[u32], offsets: impl Iterator<Item = (usize, usize)>) {
        self.ids.extend_from_slice(ids);
        if let Some(places) = &mut self.places {
            places.extend(offsets.map(|(start, end)| at + start..at + end));
        }
    }
}

impl Words {
    /// None if the parts of this pipeline are not known to work word by word.
    pub fn new(pipeline: &Pipeline) -> Option<Words> {
        let normalizer = serde_json::to_value(pipeline.get_normalizer()).ok()?;
        let pre_tokenizer = serde_json::to_value(pipeline.get_pre_tokenizer()).ok()?;
        let post_processor = serde_json::to_value(pipeline.get_post_processor()).ok()?;
        let model = pipeline.get_model();
        if matches!(model, ModelWrapper::BPE(bpe) if bpe.dropout.is_some()) {
            return None;
        }
        let nfc = normalizer["type"] == "NFC";
        let kind = if nfc || is_empty(&normalizer) {
            Kind::Bytes(Splitter::new(&pre_tokenizer)?)
        } else {
            spaces(model, &normalizer, &pre_tokenizer)?
        };
        let mut tokens = [vec![], vec![]];
        for (&id, token) in pipeline.get_added_vocabulary().get_added_tokens_decoder() {
            let plain = !token.lstrip && !token.rstrip && !token.single_word;
            tokens[token.normalized as usize].push((token.content.clone(), (id, plain)));
        }
        // Normalization must leave alone what is matched after it.
        let kept = |(text, _): &(String, _)| matches!(kind, Kind::Bytes(_)) && (!nfc || nfc_keeps(text));
        if !tokens[1].iter().all(kept) || pipeline.get_encode_special_tokens() {
            return None;
        }
        let some = tokens.into_iter().filter(|tokens| !tokens.is_empty());
        let added = some.map(AddedTokens::new).collect::<Option<_>>()?;
        let places = keeps_places(&post_processor)?;
        Some(Words { added, kind, nfc, places, free: Mutex::default() })
    }

    /// Appends the tokens of `text`. None, with any part of them appended, if this text is the library's.
    pub fn encode(&self, pipeline: &Pipeline, text: &str, out: &mut Tokens) -> Option<()> {
        if out.places.is_some() && !self.places || self.nfc && !nfc_keeps(text) {
            return None;
        }
        let mut free = self.free.lock().unwrap_or_else(PoisonError::into_inner);
        let mut memory = free.pop().unwrap_or_default();
        drop(free);
        let done = self.between(pipeline, 0, 0, text, &mut memory, out);
        self.free.lock().unwrap_or_else(PoisonError::into_inner).push(memory);
        done
    }

    /// Splits a text that begins at `at` at added tokens: those matched before normalization, then the others.
    fn between(
        &self,
        pipeline: &Pipeline,
        level: usize,
        at: usize,
        text: &str,
        memory: &mut WordMemory,
        out: &mut Tokens,
    ) -> Option<()> {
        if text.is_empty() {
            return Some(());
        }
        let Some(added) = self.added.get(level) else { return self.words(pipeline, at, text, memory, out) };
        let mut from = 0;
        for found in added.finder.find_iter(text) {
            let (id, plain) = added.ids[found.pattern().as_usize()];
            if !plain {
                return None;
            }
            self.between(pipeline, level + 1, at + from, &text[from..found.start()], memory, out)?;
            out.extend(at, &[id], std::iter::once((found.start(), found.end())));
            from = found.end();
        }
        self.between(pipeline, level + 1, at + from, &text[from..], memory, out)
    }

    /// Appends the tokens of a text without added tokens.
    fn words(
        &self,
        pipeline: &Pipeline,
        at: usize,
        text: &str,
        memory: &mut WordMemory,
        out: &mut Tokens,
    ) -> Option<()> {
        let WordMemory { caches, known, ids, places } = memory;
        let mut word = |range: Range<usize>| -> Option<()> {
            let (start, word) = (at + range.start, &text[range.clone()]);
            // A prefix is part of the first word only.
            let first = range.start == 0 && matches!(self.kind, Kind::Spaces { prefix: true, .. });
            if let Some(Range { start: from, end }) = known.get(word).filter(|_| !first).cloned() {
                let range = from as usize..end as usize;
                let offsets = places[range.clone()].iter().map(|&(start, end)| (start.into(), end.into()));
                out.extend(start, &ids[range], offsets);
                return Some(());
            }
            let tokens = self.tokenize(pipeline, word, first).ok()?;
            out.extend(start, tokens.get_ids(), tokens.get_offsets().iter().copied());
            if !first && word.len() <= LONGEST && known.len() < WORDS {
                let from = ids.len() as u32;
                ids.extend_from_slice(tokens.get_ids());
                places.extend(tokens.get_offsets().iter().map(|&(start, end)| (start as u8, end as u8)));
                known.insert(word.into(), from..ids.len() as u32);
            }
            Some(())
        };
        match &self.kind {
            Kind::Bytes(splitter) => splitter.split(caches, text, &mut word),
            Kind::Spaces { joined, .. } => {
                let is_space = |c| c == ' ' || c == SPACE;
                let (mut from, mut last) = (0, SPACE);
                for (here, c) in text.char_indices() {
                    if is_space(c) && !is_space(last) && !joined.contains(&last) && here > 0 {
                        word(from..here)?;
                        from = here;
                    }
                    last = c;
                }
                word(from..text.len())
            }
        }
    }

    /// What the library makes of a word.
    fn tokenize(&self, pipeline: &Pipeline, word: &str, first: bool) -> Result<tokenizers::Encoding> {
        let mut normalized = NormalizedString::from(word);
        if let Kind::Spaces { .. } = self.kind {
            if first {
                normalized.prepend(SPACE.encode_utf8(&mut [0; 4]));
            }
            normalized.replace(' ', SPACE.encode_utf8(&mut [0; 4]))?;
        }
        let mut words = PreTokenizedString::from(normalized);
        if let Kind::Bytes(_) = self.kind {
            ByteLevel::new(false, false, false).pre_tokenize(&mut words)?;
        }
        words.tokenize(|word| pipeline.get_model().tokenize(word.get()))?;
        pipeline.post_process(words.into_encoding(None, 0, OffsetType::Byte)?, None, false)
    }
}

impl AddedTokens {
    /// None if the finder cannot be made.
    fn new(tokens: Vec<(String, (u32, bool))>) -> Option<AddedTokens> {
        let (texts, ids): (Vec<_>, _) = tokens.into_iter().unzip();
        let finder = AhoCorasick::builder().match_kind(MatchKind::LeftmostLongest).build(texts).ok()?;
        Some(AddedTokens { finder, ids })
    }
}

/// No part, or a sequence of none.
fn is_empty(part: &Value) -> bool {
    part.is_null() || part["type"] == "Sequence" && part["normalizers"].as_array().is_some_and(Vec::is_empty)
}

/// The parts of a SentencePiece model that was converted to this library: spaces become [`SPACE`], and a byte-pair
/// model merges the whole text.
fn spaces(model: &ModelWrapper, normalizer: &Value, pre_tokenizer: &Value) -> Option<Kind> {
    let replaces = |part: &Value| {
        part["type"] == "Replace" && part["pattern"]["String"] == " " && part["content"] == SPACE.to_string()
    };
    let prefix = match normalizer["normalizers"].as_array().map(Vec::as_slice) {
        None if replaces(normalizer) => false,
        Some([one]) if replaces(one) => false,
        Some([one, two]) if one["type"] == "Prepend" && one["prepend"] == SPACE.to_string() && replaces(two) => true,
        _ => return None,
    };
    // A split at spaces finds none after the replacement.
    let whole =
        pre_tokenizer.is_null() || pre_tokenizer["type"] == "Split" && pre_tokenizer["pattern"]["String"] == " ";
    let ModelWrapper::BPE(bpe) = model else { return None };
    let affix = |text: &Option<String>| text.as_ref().is_some_and(|text| !text.is_empty());
    // Unknown characters next to each other may become one token, even over spaces.
    let has = |token: String| bpe.token_to_id(&token).is_some();
    let known = |byte: u8| has(format!("<0x{byte:02X}>")) || byte.is_ascii() && has(char::from(byte).into());
    let bytes = bpe.byte_fallback && (0..=255).all(known);
    let fuses = bpe.fuse_unk && bpe.unk_token.is_some() && !bytes;
    let affixes = affix(&bpe.continuing_subword_prefix) || affix(&bpe.end_of_word_suffix);
    if !whole || bpe.ignore_merges || fuses || affixes {
        return None;
    }
    let mut joined = HashSet::new();
    for token in bpe.get_vocab().into_keys() {
        let pairs = token.chars().zip(token.chars().skip(1));
        joined.extend(pairs.filter(|&(before, c)| c == SPACE && before != SPACE).map(|(before, _)| before));
    }
    Some(Kind::Spaces { joined, prefix })
}

/// Whether a post-processor that adds no special token handles the places of each token by itself. None if it might
/// change the tokens.
fn keeps_places(part: &Value) -> Option<bool> {
    match part["type"].as_str() {
        None if part.is_null() => Some(true),
        // It exempts the first token of a text from trimming.
        Some("ByteLevel") => Some(part["trim_offsets"] != true || part["add_prefix_space"] != true),
        Some("TemplateProcessing") => {
            let single = part["single"].as_array()?;
            let texts = single.iter().filter(|piece| piece.get("Sequence").is_some());
            (texts.count() == 1).then_some(true)
        }
        Some("Sequence") => {
            let parts = part["processors"].as_array()?.iter().map(keeps_places).collect::<Option<Vec<bool>>>()?;
            Some(parts.into_iter().all(|keeps| keeps))
        }
        _ => None,
    }
}

/// Whether NFC leaves this text alone, and with it each part of it.
fn nfc_keeps(text: &str) -> bool {
    let kept = || {
        let mut normalized = NormalizedString::from(text);
        NFC.normalize(&mut normalized).is_ok() && normalized.get() == text
    };
    text.chars().all(is_nfc) || kept()
}

/// Characters that NFC leaves alone whatever stands next to them: common ones, not all.
fn is_nfc(c: char) -> bool {
    matches!(c,
        '\0'..='\u{2ff}' // Latin
        | '\u{400}'..='\u{482}' | '\u{48a}'..='\u{52f}' // Cyrillic
        | '\u{2002}'..='\u{20cf}' // punctuation, currencies
        | '\u{2190}'..='\u{2328}' | '\u{232b}'..='\u{2adb}' // arrows, mathematics, boxes
        | '\u{3000}'..='\u{3029}' | '\u{3041}'..='\u{3096}' | '\u{30a1}'..='\u{30fa}' | '\u{30fc}'..='\u{30fe}' // kana
        | '\u{4e00}'..='\u{9fff}' | '\u{ac00}'..='\u{d7a3}' // ideographs, Hangul
        | '\u{ff01}'..='\u{ff5e}' | '\u{1f300}'..='\u{1faff}') // wide forms, emoji
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    /// Pre-tokenizers and normalizers of the models that people train, over a small vocabulary.
    fn pipelines() -> Vec<(&'static str, Pipeline)> {
        let golden = |name| {
            let path = format!("{}/tests/data/golden/{name}/tokenizer.json", env!("CARGO_MANIFEST_DIR"));
            serde_json::from_slice::<Value>(&std::fs::read(path).unwrap()).unwrap()
        };
        let byte_level =
            json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": false});
        let split = |regex: &str, behavior: &str, invert: bool| json!({"type": "Split", "pattern": {"Regex": regex}, "behavior": behavior, "invert": invert});
        let sequence = |mut parts: Vec<Value>| {
            parts.push(byte_level.clone());
            json!({"type": "Sequence", "pretokenizers": parts})
        };
        let llama = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
        let upper = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+";
        let deepseek = [
            r"\p{N}{1,3}",
            r"[一-龥぀-ゟ゠-ヿ]+",
            r"[!-/:-~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
        ];
        let gpt2 = json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true});
        let bytes = [
            ("gpt2", Value::Null, gpt2.clone(), gpt2.clone()),
            (
                "smollm",
                Value::Null,
                json!({"type": "Sequence", "pretokenizers": [{"type": "Digits", "individual_digits": true}, gpt2]}),
                Value::Null,
            ),
            (
                "numbers",
                Value::Null,
                sequence(vec![json!({"type": "Digits", "individual_digits": false})]),
                byte_level.clone(),
            ),
            ("llama", Value::Null, sequence(vec![split(llama, "Isolated", false)]), Value::Null),
            ("qwen", json!({"type": "NFC"}), sequence(vec![split(llama, "Isolated", false)]), byte_level.clone()),
            ("tiktoken", Value::Null, sequence(vec![split(upper, "Removed", true)]), Value::Null),
            ("letters", Value::Null, sequence(vec![split(r"\p{L}+", "Removed", true)]), Value::Null),
            (
                "deepseek",
                Value::Null,
                sequence(deepseek.map(|regex| split(regex, "Isolated", false)).to_vec()),
                Value::Null,
            ),
        ];
        let mut all = Vec::new();
        for (name, normalizer, pre_tokenizer, post_processor) in bytes {
            let mut file = golden("byte_level");
            file["normalizer"] = normalizer;
            file["pre_tokenizer"] = pre_tokenizer;
            file["post_processor"] = post_processor;
            all.push((name, file));
        }
        let replace = json!({"type": "Replace", "pattern": {"String": " "}, "content": "▁"});
        let prepend = json!({"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": "▁"}, replace]});
        for (name, normalizer) in [("gemma", replace.clone()), ("llama2", prepend)] {
            let mut file = golden("sentencepiece");
            file["normalizer"] = normalizer;
            file["pre_tokenizer"] = Value::Null;
            all.push((name, file));
        }
        let load = |mut file: Value| {
            file["truncation"] = Value::Null;
            serde_json::to_vec(&file).map(|bytes| Pipeline::from_bytes(bytes).unwrap()).unwrap()
        };
        all.into_iter().map(|(name, file)| (name, load(file))).collect()
    }

    /// Ids and places, also of texts that are tokenized again, with what was remembered.
    #[test]
    fn tokens_are_those_of_the_library() {
        const PIECES: [&str; 35] = [
            " ",
            "  ",
            "\n",
            "\n\n",
            "\r\n",
            "\t",
            "a",
            "the",
            " The",
            "It's",
            "'LL",
            "won't",
            "7",
            "1234567",
            "½",
            "٣",
            "é",
            "e\u{301}",
            "naïve",
            "漢字",
            "かな",
            "ハ",
            "한국",
            "😀",
            "👩\u{200d}🔬",
            "\u{a0}",
            "\u{3000}",
            "▁",
            "_x",
            "!?",
            "/",
            "...\n",
            "<s>",
            "</s>",
            "<|endoftext|>",
        ];
        for (name, pipeline) in pipelines() {
            let words = Words::new(&pipeline).unwrap_or_else(|| panic!("{name} is not known"));
            let mut random = 1u64;
            let mut by_words = 0;
            for round in 0..400 {
                let mut text = String::new();
                for _ in 0..round % 23 {
                    random = random.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
                    text.push_str(PIECES[(random >> 33) as usize % PIECES.len()]);
                }
                let right = pipeline.encode(text.as_str(), false).unwrap();
                let (mut ids, mut places) = (vec![], vec![]);
                let mut tokens = Tokens { ids: &mut ids, places: Some(&mut places) };
                if words.encode(&pipeline, &text, &mut tokens).is_none() {
                    continue;
                }
                by_words += 1;
                assert_eq!(ids, right.get_ids(), "{name}: {text:?}");
                let places: Vec<_> = places.iter().map(|place| (place.start, place.end)).collect();
                assert_eq!(places, right.get_offsets(), "{name}: {text:?}");
            }
            assert!(by_words > 150, "{name}: {by_words}");
        }
    }

    /// Alone, and between characters that compose with many others.
    #[test]
    fn nfc_leaves_its_own_characters_alone() {
        let changed = |text: &str| {
            let mut normalized = NormalizedString::from(text);
            NFC.normalize(&mut normalized).unwrap();
            normalized.get() != text
        };
        for c in (0..=u32::from(char::MAX)).filter_map(char::from_u32).filter(|&c| is_nfc(c)) {
            assert!(!changed(&format!("a{c}e{c}\u{ac00}{c}\u{304b}{c}<{c}")), "{c:?}");
        }
        assert!(changed("e\u{301}") && !nfc_keeps("e\u{301}"));
        assert!(!is_nfc('\u{1e69}') && nfc_keeps("\u{1e69}"));
    }
}
