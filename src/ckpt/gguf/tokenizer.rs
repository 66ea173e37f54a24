//! A tokenizer as GGUF keys: tokens and their kinds, merges or scores, special tokens, the chat template. Reads the
//! files of a model directory with the rules of llama.cpp's converter. Never tokenizes.
use super::super::companions::Companions;
use super::family::{is_gemma, is_llama};
use super::gemma4;
use super::header::{GgufKeys, KeyValue};
use super::sentencepiece;
use super::special::SpecialTokens;
use super::splits::SplitRule;
use super::vocabulary::{CONTROL, NORMAL, TokenizerFiles, UNUSED, Vocabulary, refused};
use crate::base::{Result, quote};
use crate::data::tokenizer::later_tokens;
use crate::nn::{Arch, Spec};
use serde_json::{Map, Value};

/// Puts the tokenizer of `companions`, for a model like `spec` with this `config.json` and `generation_config.json`.
pub fn put(
    keys: &mut GgufKeys,
    spec: &Spec,
    config: &Map<String, Value>,
    generation: &Value,
    companions: &Companions,
) -> Result<()> {
    let files = TokenizerFiles::new(companions)?;
    let (gemma, llama) = (is_gemma(spec.arch), is_llama(spec.arch));
    let prefix = files.config["add_prefix_space"].as_bool();
    if let Some(prefix) = prefix.filter(|_| llama) {
        keys.put("tokenizer.ggml.add_space_prefix", KeyValue::Bool(prefix));
    }
    let mut special = match (companions.file("tokenizer.model"), files.json.is_object()) {
        (_, true) if spec.arch == Arch::Gemma4 => {
            let vocabulary = gemma4::vocabulary(&files, spec.vocab)?;
            keys.put("tokenizer.ggml.model", KeyValue::Text("gemma4"));
            keys.put("tokenizer.ggml.tokens", KeyValue::Texts(&vocabulary.tokens));
            keys.put("tokenizer.ggml.scores", KeyValue::F32s(&vec![sentencepiece::ADDED; spec.vocab]));
            keys.put("tokenizer.ggml.token_type", KeyValue::I32s(&vocabulary.kinds));
            keys.put("tokenizer.ggml.merges", KeyValue::Texts(&merges(&files.json["model"])?));
            SpecialTokens::new(&files, config, None)
        }
        (Some(model), _) => {
            let (vocabulary, scores) = sentencepiece::vocabulary(model, spec.vocab, &files)?;
            keys.put("tokenizer.ggml.model", KeyValue::Text("llama"));
            keys.put("tokenizer.ggml.pre", KeyValue::Text("default"));
            keys.put("tokenizer.ggml.tokens", KeyValue::Texts(&vocabulary.tokens));
            keys.put("tokenizer.ggml.scores", KeyValue::F32s(&scores));
            keys.put("tokenizer.ggml.token_type", KeyValue::I32s(&vocabulary.kinds));
            SpecialTokens::new(&files, config, Some(spec.vocab))
        }
        _ if gemma => return Err(refused("Gemma's needs the tokenizer.model next to it")),
        (None, true) => {
            let json = &files.json;
            let merges = merges(&json["model"])?;
            byte_pairs(keys, pre_tokenizer(json)?, &vocabulary(&files, spec.vocab)?, &merges);
            SpecialTokens::new(&files, config, None)
        }
        (None, false) if companions.are_bytes() => {
            let mut vocabulary = Vocabulary::unused(spec.vocab);
            (0..=255).for_each(|byte: u8| vocabulary.set(byte as usize, &spelled(byte).to_string(), NORMAL));
            vocabulary.set(256, "<|endoftext|>", CONTROL);
            byte_pairs(keys, "gpt-2", &vocabulary, &[]);
            keys.put("tokenizer.ggml.eos_token_id", KeyValue::U32(256));
            keys.put("tokenizer.ggml.add_bos_token", KeyValue::Bool(false));
            companions.template.iter().for_each(|text| keys.put("tokenizer.chat_template", KeyValue::Text(text)));
            return Ok(());
        }
        (None, false) => return Err(refused("there is none; give one with `tokenizer`")),
    };
    special.of_family(spec.arch, &files, config, generation);
    special.put(keys);
    // What the converter has of a family, whatever the files say.
    let (prefix, begins) = match spec.arch {
        Arch::Gemma4 => (Some(false), Some(true)),
        Arch::Ernie45 => (prefix, None),
        _ if gemma => (Some(false), None),
        _ if llama && spec.vocab == 49152 => (None, Some(false)), // SmolLM
        _ => (None, None),
    };
    for (key, value) in [("add_space_prefix", prefix), ("add_bos_token", begins)] {
        if let Some(value) = value {
            keys.put(&format!("tokenizer.ggml.{key}"), KeyValue::Bool(value));
        }
    }
    Ok(())
}

fn byte_pairs(keys: &mut GgufKeys, pre: &str, vocabulary: &Vocabulary, merges: &[Vec<u8>]) {
    keys.put("tokenizer.ggml.model", KeyValue::Text("gpt2"));
    keys.put("tokenizer.ggml.pre", KeyValue::Text(pre));
    keys.put("tokenizer.ggml.tokens", KeyValue::Texts(&vocabulary.tokens));
    keys.put("tokenizer.ggml.token_type", KeyValue::I32s(&vocabulary.kinds));
    keys.put("tokenizer.ggml.merges", KeyValue::Texts(merges));
}

/// llama.cpp's name of the pre-tokenizer.
fn pre_tokenizer(json: &Value) -> Result<&'static str> {
    let model = &json["model"];
    if model["type"] != "BPE" || model["byte_fallback"] == true {
        let what = match model["byte_fallback"] == true {
            true => "pairs with bytes to fall back on need the tokenizer.model next to tokenizer.json".into(),
            false => format!("tokenizer.json is of type {}; llama.cpp runs byte-level BPE", quote(&model["type"])),
        };
        return Err(refused(&what));
    }
    let normalizer = &json["normalizer"];
    let none = normalizer["normalizers"].as_array().is_some_and(Vec::is_empty);
    if !none && ![&Value::Null, &"NFC".into()].contains(&&normalizer["type"]) {
        return Err(refused(&format!("llama.cpp does not run its normalizer {}", quote(normalizer))));
    }
    let unnamed = || refused(&format!("llama.cpp has no name for its pre_tokenizer {}", quote(&json["pre_tokenizer"])));
    Ok(SplitRule::of(json).ok_or_else(unnamed)?.names[0])
}

/// Tokens of a byte-level `tokenizer.json`, and those that the files next to it add.
fn vocabulary(files: &TokenizerFiles, size: usize) -> Result<Vocabulary> {
    let json = &files.json;
    let mut vocabulary = Vocabulary::unused(size);
    for (token, id) in json["model"]["vocab"].as_object().into_iter().flatten() {
        let id = id.as_u64().ok_or_else(|| refused(&format!("token {} has no id", quote(token))))?;
        vocabulary.set(id as usize, token, NORMAL);
    }
    for token in json["added_tokens"].as_array().into_iter().flatten() {
        if let (Some(id), Some(text)) = (token["id"].as_u64(), token["content"].as_str()) {
            vocabulary.add(id as usize, text, token["special"] == true);
        }
    }
    let [config, map, added] = [&files.config, &files.map, &files.added];
    let [config, map, added] = [config, map, added].map(|file| file.as_object().cloned().unwrap_or_default());
    let later = later_tokens(&config, &map, &added, |_| false).map_err(|what| refused(&what))?;
    for (id, token) in later {
        if vocabulary.kinds.get(id as usize) == Some(&UNUSED) {
            vocabulary.add(id as usize, &token.content, token.special);
        }
    }
    Ok(vocabulary)
}

/// "a b" for each pair. tokenizer.json has two spellings of this list.
fn merges(model: &Value) -> Result<Vec<Vec<u8>>> {
    let part = |part: &Value| Some(part.as_str()?.replace(' ', "\u{120}"));
    let merge = |merge: &Value| match merge {
        Value::String(pair) => Some(pair.clone().into_bytes()),
        pair => Some(format!("{} {}", part(&pair[0])?, part(&pair[1])?).into_bytes()),
    };
    let list = model["merges"].as_array().into_iter().flatten().map(merge);
    list.collect::<Option<_>>().ok_or_else(|| refused("its merges are not all pairs"))
}

/// The character that stands for a byte in byte-level vocabularies (GPT-2's).
fn spelled(byte: u8) -> char {
    let plain = |b: u8| matches!(b, b'!'..=b'~' | 0xa1..=0xac | 0xae..=0xff);
    match plain(byte) {
        true => byte as char,
        // The others in order, from 256 on.
        false => char::from_u32(256 + (0..byte).filter(|b| !plain(*b)).count() as u32).unwrap_or_default(),
    }
}
