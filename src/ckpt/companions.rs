//! The files that make a directory of weights a usable model: the config, and the tokenizer's files. If the model came
//! with them, they are preserved. Never interprets a tokenizer.
pub mod template;

use super::adapter::{self, AdapterBase};
use super::hf;
use crate::base::{Error, Result, open};
use crate::nn::{Lora, Spec};
use safetensors::Dtype;
use serde_json::{Map, Value, json};
use std::io::ErrorKind;
use std::path::Path;

/// Files of a model directory that belong to the tokenizer.
const TOKENIZER: [&str; 12] = [
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "tokenizer.model",
    "spiece.model",
    "sentencepiece.bpe.model",
];
/// Files of a model directory that belong to the model itself: how it generates, and how it sees.
const MODEL: [&str; 4] =
    ["generation_config.json", "processor_config.json", "preprocessor_config.json", "video_preprocessor_config.json"];

/// Whether a directory written by us may contain a file of this name next to config and weights.
pub fn is_companion(name: &str) -> bool {
    MODEL.contains(&name) || name == adapter::FILE || TOKENIZER.contains(&name)
}

/// Read at the start of a run: the source directory may be a checkpoint, which is removed later.
#[derive(Clone, Debug, Default)]
pub struct Companions {
    /// The source's `config.json`, if it describes exactly the model being saved.
    config: Option<Map<String, Value>>,
    /// Ids of the tokens that begin and end a text, for a config written by us.
    ends: (Option<u32>, Option<u32>),
    /// The tokenizer is bytes, which needs no file.
    bytes: bool,
    /// The chat template of a model of bytes, which has no file.
    pub(super) template: Option<String>,
    /// (name, content)
    pub(super) files: template::CompanionFiles,
}

impl Companions {
    /// For a model like `spec` that came from the directory `model`. The tokenizer files come from `tokenizer` (a
    /// directory, or a file in one), otherwise from `model`.
    pub fn of(spec: &Spec, model: Option<&Path>, tokenizer: Option<&Path>) -> Result<Companions> {
        let mut companions = Companions::default();
        let directory = |path: &Path| if path.is_dir() { path.to_path_buf() } else { super::disk::parent(path).into() };
        let tokenizer = tokenizer.map(directory).or(model.map(directory));
        for (dir, names) in [(tokenizer.clone(), &TOKENIZER[..]), (model.map(directory), &MODEL)] {
            let Some(dir) = dir else { continue };
            for name in names {
                match open::read(&dir.join(name)) {
                    Ok(content) => companions.files.push((name.to_string(), content)),
                    Err(e) if e.kind() == ErrorKind::NotFound => {}
                    Err(e) => return Err(Error::in_file(&dir.join(name), e)),
                }
            }
        }
        let named = tokenizer.map_or(Ok(vec![]), |dir| template::read(&dir))?;
        companions.files.extend(named);
        if let Some(dir) = model {
            // The run has its own dropout setting, which is never part of comparing models.
            let then = Spec { dropout: spec.dropout, ..hf::read(dir)? };
            let path = dir.join(hf::FILE);
            // What the longest sequence is, which may differ, is not in a vision-language model's config.
            if then == *spec || hf::has_tower(dir)? {
                let text = open::read(&path).map_err(|e| Error::in_file(&path, e))?;
                let map = hf::map(&text).map_err(|what| Error::in_file(&path, what))?;
                companions.config = Some(map).filter(|map| !hf::is_rewritten(map));
            }
        }
        Ok(companions)
    }

    /// For saving the adapters `lora` of the model `base`.
    pub fn adapting(mut self, lora: &Lora, base: Option<AdapterBase>, spec: &Spec) -> Companions {
        let tower = self.config.as_ref().is_some_and(hf::is_tower);
        self.files.push((adapter::FILE.into(), adapter::config(lora, base.as_ref(), spec, tower).into_bytes()));
        self
    }

    /// For saving the model without its adapters.
    pub(super) fn without_adapter(mut self) -> Companions {
        self.files.retain(|(name, _)| name != adapter::FILE);
        self
    }

    /// Adds the tokenizer's (bos, eos) ids, for a config written by us.
    pub fn with_ends(self, ends: (Option<u32>, Option<u32>)) -> Companions {
        Companions { ends, ..self }
    }

    /// A model that is trained on bytes has no tokenizer's files.
    pub fn of_bytes(self, bytes: bool) -> Companions {
        Companions { bytes, ..self }
    }
    pub(super) fn are_bytes(&self) -> bool {
        self.bytes
    }
    /// With the chat template that the model was trained with as the default one.
    pub fn with_template(mut self, text: &str) -> Result<Companions> {
        match self.file("tokenizer.json") {
            Some(_) => template::make_default(&mut self.files, text)?,
            None if self.bytes => self.template = Some(text.into()),
            None => {}
        }
        Ok(self)
    }
    /// The file of this name.
    pub(super) fn file(&self, name: &str) -> Option<&[u8]> {
        self.files.iter().find(|(n, _)| n == name).map(|(_, content)| &content[..])
    }

    /// The text of `config.json` for weights in `dtype`.
    pub(super) fn config(&self, spec: &Spec, dtype: Dtype) -> String {
        let own = || {
            let mut own: Map<String, Value> = serde_json::from_str(&hf::config(spec)).unwrap_or_default();
            for (key, id) in [("bos_token_id", self.ends.0), ("eos_token_id", self.ends.1)] {
                own.insert(key.into(), json!(id.filter(|&id| (id as usize) < spec.vocab)));
            }
            own
        };
        let mut config = self.config.clone().unwrap_or_else(own);
        config.shift_remove("quantization_config"); // what was in 4 bits no longer is
        let name = match dtype {
            Dtype::BF16 => "bfloat16",
            Dtype::F16 => "float16",
            _ => "float32",
        };
        // transformers 4 writes torch_dtype, 5 writes dtype; each reads both.
        let (old, new) = (config.contains_key("torch_dtype"), config.contains_key("dtype"));
        if new {
            config.insert("dtype".into(), json!(name));
        }
        if old || !new {
            config.insert("torch_dtype".into(), json!(name));
        }
        hf::retype(&mut config, &json!(name));
        hf::text(&config)
    }
}
