//! What stands next to the weights so that a directory is a model to others: the config, and the tokenizer's files.
//! Kept as they were where a model came with them. Never interprets a tokenizer.
use super::layout::pretty;
use super::{adapter, hf};
use crate::base::{Error, Result, open};
use crate::nn::{Lora, Spec};
use safetensors::Dtype;
use serde_json::{Map, Value, json};
use std::fs;
use std::io::ErrorKind;
use std::path::Path;

/// Files of a model directory that belong to its tokenizer or say how to generate with it.
const TOKENIZER: [&str; 14] = [
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
    "processor_config.json",
    "preprocessor_config.json",
];
const GENERATION: &str = "generation_config.json";

/// Whether a directory that we wrote may hold a file of this name next to config and weights.
pub fn is_companion(name: &str) -> bool {
    name == GENERATION || name == adapter::FILE || TOKENIZER.contains(&name)
}

/// Held from the start of a run: the directory that they come from may be a checkpoint, which is removed in time.
#[derive(Clone, Debug, Default)]
pub struct Companions {
    /// The source's `config.json`, where it describes the very model that is saved.
    config: Option<Map<String, Value>>,
    /// Ids of the tokens that begin and end a text, for a config of our own.
    ends: (Option<u32>, Option<u32>),
    /// Name and content.
    pub(super) files: Vec<(String, Vec<u8>)>,
}

impl Companions {
    /// Of a model like `spec` that came from the directory `model`, with the tokenizer of `tokenizer` (a directory, or
    /// a file in one), else of `model`.
    pub fn of(spec: &Spec, model: Option<&Path>, tokenizer: Option<&Path>) -> Result<Companions> {
        let mut companions = Companions::default();
        let directory = |path: &Path| if path.is_dir() { path.to_path_buf() } else { super::disk::parent(path).into() };
        let tokenizer = tokenizer.map(directory).or(model.map(directory));
        for (dir, names) in [(tokenizer, &TOKENIZER[..]), (model.map(directory), &[GENERATION])] {
            let Some(dir) = dir else { continue };
            for name in names {
                match open::read(&dir.join(name)) {
                    Ok(content) => companions.files.push((name.to_string(), content)),
                    Err(e) if e.kind() == ErrorKind::NotFound => {}
                    Err(e) => return Err(Error::in_file(&dir.join(name), e)),
                }
            }
        }
        if let Some(dir) = model {
            // Its dropout is the run's own affair, as in every comparison of models.
            let then = Spec { dropout: spec.dropout, ..hf::read(dir)? };
            let path = dir.join(hf::FILE);
            if then == *spec {
                let text = open::read(&path).map_err(|e| Error::in_file(&path, e))?;
                companions.config = Some(serde_json::from_slice(&text).map_err(|e| Error::in_file(&path, e))?);
            }
        }
        Ok(companions)
    }

    /// What is saved are the adapters `lora` of the model in the directory `base`.
    pub fn adapting(mut self, lora: &Lora, base: Option<&Path>) -> Companions {
        // A relative name would be read from wherever the adapter is loaded.
        let base = base.map(|base| fs::canonicalize(base).unwrap_or(base.to_path_buf()));
        self.files.push((adapter::FILE.into(), adapter::config(lora, base.as_deref()).into_bytes()));
        self
    }

    /// With the ids of the tokenizer's (bos, eos), which a config says that came with no model.
    pub fn with_ends(self, ends: (Option<u32>, Option<u32>)) -> Companions {
        Companions { ends, ..self }
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
        let name = match dtype {
            Dtype::BF16 => "bfloat16",
            Dtype::F16 => "float16",
            _ => "float32",
        };
        // transformers 4 says torch_dtype, 5 says dtype; either reads the other's.
        let (old, new) = (config.contains_key("torch_dtype"), config.contains_key("dtype"));
        if new {
            config.insert("dtype".into(), json!(name));
        }
        if old || !new {
            config.insert("torch_dtype".into(), json!(name));
        }
        pretty(&Value::Object(config))
    }
}
