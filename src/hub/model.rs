//! Which files of a repository make a model, or an adapter. Never downloads one.
use super::cache::RepoFile;
use crate::base::{quote, split_name};
use serde_json::Value;
use std::collections::BTreeSet;

pub(super) const CONFIG: &str = "config.json";
pub(super) const ADAPTER: &str = "adapter_config.json";
pub(super) const INDEX: &str = "model.safetensors.index.json";
const SINGLE: &str = "model.safetensors";
/// The folder of named chat templates.
const TEMPLATES: &str = "additional_chat_templates/";
/// Larger files are no settings and no cards.
pub(super) const MOST: u64 = 64 << 20;
/// Files of tokenizers that are not JSON.
const TOKENIZER: [&str; 5] = ["tokenizer.model", "spiece.model", "sentencepiece.bpe.model", "vocab.txt", "merges.txt"];

/// Files that describe the model: settings, tokenizer, chat templates. Not training logs, other formats or pictures.
pub(super) fn described(files: &[RepoFile]) -> Vec<String> {
    let small = |path: &str| match path.rsplit_once('.') {
        Some((_, "json")) => !path.ends_with(".index.json") && path != "trainer_state.json",
        Some((_, "jinja")) => true,
        _ => TOKENIZER.contains(&path),
    };
    let needed = |path: &str| match path.strip_prefix(TEMPLATES) {
        Some(name) => name.ends_with(".jinja") && !name.contains('/'),
        None => !path.contains('/') && small(path),
    };
    let known = |path: &str| path == CONFIG || path.starts_with("tokenizer");
    let sized = |file: &RepoFile| known(&file.path) || file.size.is_none_or(|size| size <= MOST);
    files.iter().filter(|file| needed(&file.path) && sized(file)).map(|file| file.path.clone()).collect()
}

/// A GGUF file, with all others that its model was split into: NAME-00001-of-00003.gguf and so on.
pub(super) fn parts(files: &[RepoFile], path: &str) -> Vec<String> {
    let all = split_name(path).map(|of_path| {
        let is_part = |file: &&RepoFile| split_name(&file.path) == Some(of_path);
        files.iter().filter(is_part).map(|file| file.path.clone()).collect::<Vec<_>>()
    });
    all.filter(|all| !all.is_empty()).unwrap_or_else(|| vec![path.to_string()])
}

/// The GGUF file of a quantization such as Q4_K_M, which its name has as a word, whatever the case; or why there is
/// none.
pub(super) fn quantized(files: &[RepoFile], tag: &str) -> Result<String, String> {
    let lower = |text: &str| text.to_ascii_lowercase();
    // A vision tower is no model.
    let is_model = |path: &&str| lower(path).ends_with(".gguf") && !lower(path).contains("mmproj");
    let all: Vec<&str> = files.iter().map(|file| &file.path[..]).filter(is_model).collect();
    let (tag, part) = (lower(tag), |c: char| c.is_ascii_alphanumeric() || c == '_');
    let tagged = |path: &&str| {
        let path = lower(path);
        path.match_indices(&tag).any(|(at, _)| !path[..at].ends_with(part) && !path[at + tag.len()..].starts_with(part))
    };
    let mut found: Vec<&str> = all.iter().copied().filter(tagged).collect();
    found.sort_unstable();
    let listed = |paths: &[&str]| paths.iter().map(|path| quote(path).to_string()).collect::<Vec<_>>().join(", ");
    match found.first() {
        None if all.is_empty() => Err("has no GGUF files".into()),
        None => Err(format!("has no GGUF file of {}; it has {}", quote(&tag), listed(&all))),
        Some(first) if parts(files, first).len() < found.len() => Err(format!(
            "has several GGUF files of {}: name one of {}, such as NAME/{first}",
            quote(&tag),
            listed(&found)
        )),
        Some(first) => Ok(first.to_string()),
    }
}

/// Where the weights are.
#[derive(Debug, PartialEq)]
pub(super) enum WeightFiles {
    These(Vec<String>),
    /// The files that the index names.
    Indexed,
}

/// The weights, or why there are none that can be read.
pub(super) fn weights(files: &[RepoFile]) -> Result<WeightFiles, String> {
    let has = |name: &str| files.iter().any(|file| file.path == name);
    let any = |fits: &dyn Fn(&str) -> bool| files.iter().any(|file| fits(&file.path));
    if has(SINGLE) {
        return Ok(WeightFiles::These(vec![SINGLE.into()]));
    }
    if has(INDEX) {
        return Ok(WeightFiles::Indexed);
    }
    if has(ADAPTER) {
        if has("adapter_model.safetensors") {
            return Ok(WeightFiles::These(vec!["adapter_model.safetensors".into()]));
        }
        return Err(
            "the adapter has no adapter_model.safetensors; a pickle (.bin) can execute code and is not read. Save \
                    it again with PEFT"
                .into(),
        );
    }
    let gguf: Vec<&str> = files.iter().map(|file| &file.path[..]).filter(|path| path.ends_with(".gguf")).collect();
    Err(match gguf.first() {
        _ if any(&|path| path.ends_with(".bin") && !path.contains('/')) => {
            "has its weights only in .bin files, which are pickles: they can execute code and are not read. Look for a \
             revision with safetensors (refs/pr/N), or convert it in Python with save_pretrained"
                .into()
        }
        Some(first) => format!("has GGUF files only: name one of them, such as NAME/{}", quote(first)),
        None => "has no weights: neither model.safetensors nor model.safetensors.index.json".into(),
    })
}

/// The files that an index names.
pub(super) fn indexed(index: &[u8]) -> Option<Vec<String>> {
    let index: Value = serde_json::from_slice(index).ok()?;
    let names = index["weight_map"].as_object()?.values().map(|name| name.as_str().map(str::to_string));
    Some(names.collect::<Option<BTreeSet<String>>>()?.into_iter().collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn file(path: &str) -> RepoFile {
        RepoFile { path: path.into(), ..RepoFile::default() }
    }

    #[test]
    fn a_quantization_names_one_gguf_file() {
        let paths = "README.md m-Q4_K_M.gguf m-Q4_K_S.gguf m.q8_0.gguf mmproj-m-F16.gguf m-UD-Q2_K_XL.gguf \
                     BF16/m-BF16-00001-of-00002.gguf BF16/m-BF16-00002-of-00002.gguf";
        let files: Vec<RepoFile> = paths.split(' ').map(file).collect();
        for (tag, path) in [
            ("Q4_K_M", "m-Q4_K_M.gguf"),
            ("q8_0", "m.q8_0.gguf"),
            ("UD-Q2_K_XL", "m-UD-Q2_K_XL.gguf"),
            ("BF16", "BF16/m-BF16-00001-of-00002.gguf"),
        ] {
            assert_eq!(quantized(&files, tag).as_deref(), Ok(path));
        }
        for (tag, why) in [("F16", "m-Q4_K_M.gguf"), ("Q4_K", "no GGUF file of"), ("m", "several")] {
            assert!(quantized(&files, tag).unwrap_err().contains(why), "{tag}");
        }
        assert_eq!(quantized(&files[..1], "Q4_K_M").unwrap_err(), "has no GGUF files");
    }

    #[test]
    fn only_what_is_needed() {
        let all = [
            ".gitattributes",
            "README.md",
            "config.json",
            "generation_config.json",
            "tokenizer.json",
            "chat_template.jinja",
            "preprocessor_config.json",
            "model.safetensors.index.json",
            "model-00001-of-00002.safetensors",
            "model-00002-of-00002.safetensors",
            "pytorch_model.bin",
            "pytorch_model.bin.index.json",
            "original/params.json",
            "original/consolidated.00.pth",
            "onnx/model.onnx",
            "x.gguf",
            "picture.png",
            "merges.txt",
            "additional_chat_templates/tools.jinja",
            "trainer_state.json",
        ]
        .map(file);
        let expected = [
            "config.json",
            "generation_config.json",
            "tokenizer.json",
            "chat_template.jinja",
            "preprocessor_config.json",
            "merges.txt",
            "additional_chat_templates/tools.jinja",
        ];
        assert_eq!(described(&all), expected);
        assert_eq!(weights(&all), Ok(WeightFiles::Indexed));
        let of = |paths: &[&str]| weights(&paths.iter().map(|path| file(path)).collect::<Vec<_>>());
        assert!(of(&["config.json", "pytorch_model.bin"]).unwrap_err().contains(".bin"));
        assert!(of(&["config.json", "a.gguf"]).unwrap_err().contains("NAME/a.gguf"));
        assert_eq!(of(&[SINGLE, INDEX]), Ok(WeightFiles::These(vec![SINGLE.into()])));
        let index = br#"{"weight_map": {"a": "2", "b": "1", "c": "2"}}"#;
        assert_eq!(indexed(index), Some(vec!["1".into(), "2".into()]));
        assert_eq!(indexed(b"{}"), None);
    }
}
