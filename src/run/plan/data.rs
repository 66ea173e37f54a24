//! The tokenizer, the data set, how its rows are rendered and loaded. Never reads a row.
use crate::base::{Error, Result, open};
use crate::comm::MeshSizes;
use crate::comm::env;
use crate::data::{Cache, ChatTemplate, DataOptions, Dataset, Format, LoaderOptions, Tokenizer, tokenizer};
use crate::nn::Spec;
use crate::run::settings::Settings;
use crate::run::settings::data::DataSettings;
use crate::run::settings::value::set;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// The one that was asked for, or that of the model directory, or bytes. One that cannot be read is none until a text
/// is to be tokenized.
pub fn tokenizer(s: &mut Settings) -> Tokenizer {
    let beside = s.model.pretrain.as_ref().filter(|dir| dir.join(tokenizer::FILES[0]).is_file());
    let beside = beside.map(|dir| dir.display().to_string());
    let name = s.data.tokenizer.get_or_insert(beside.unwrap_or_else(|| "bytes".into()));
    Tokenizer::from_name(name).unwrap_or_else(|why| Tokenizer::none(&why))
}

/// What the flags say of rows, and the chat template: the flag's, or the tokenizer's, also of rows that no flag speaks
/// of.
pub fn format(d: &DataSettings, tokenizer: &Tokenizer) -> Result<Format> {
    let on = |flag: Option<bool>| flag == Some(true);
    let needed = on(d.apply_chat_template) || on(d.multiturn);
    if needed {
        tokenizer.usable()?;
    }
    let new = |text: &str| ChatTemplate::new(text, tokenizer.spellings());
    let chat = match (&d.tokenizer_chat_template, tokenizer.template(tokenizer::DEFAULT)) {
        (Some(given), _) => {
            let bad = |what: String| Error::input(format!("--tokenizer-chat-template {given}: {what}"));
            let text = match Path::new(given).is_file() {
                true => {
                    let text = open::read(Path::new(given)).map_err(|e| bad(e.to_string()))?;
                    String::from_utf8(text).map_err(|_| bad("is not UTF-8".into()))?
                }
                false if given.contains('{') => given.clone(),
                false => return Err(bad("is no file, and no Jinja text either".into())),
            };
            Some(new(&text).map_err(bad)?)
        }
        (None, Ok(text)) if needed => {
            Some(new(text).map_err(|what| Error::input(format!("--tokenizer {}: {what}", tokenizer.name())))?)
        }
        (None, Ok(text)) => new(text).ok(),
        (None, Err(names)) if needed => {
            let names = if names.is_empty() { "none".into() } else { names.join(", ") };
            return Err(Error::input(format!(
                "--tokenizer {} has no default chat template (it has {names}): pass one with --tokenizer-chat-template",
                tokenizer.name()
            )));
        }
        (None, Err(_)) => None,
    };
    Ok(Format {
        input_key: d.input_key.clone(),
        output_key: d.output_key.clone(),
        input_template: d.input_template.clone(),
        apply_chat_template: on(d.apply_chat_template),
        multiturn: on(d.multiturn),
        pretrain_mode: on(d.pretrain_mode),
        skip_bad_rows: on(d.skip_bad_rows),
        chat: chat.map(Arc::new),
    })
}

/// Where token files are kept: the settings' directory, or the environment's.
fn cache(d: &DataSettings) -> Result<Cache> {
    let dir = d.cache_dir.clone().unwrap_or_else(env::cache_dir);
    Ok(Cache { dir: set(&d.cache, "data.cache")?.then_some(dir), limit: d.cache_bytes()?, scratch: env::scratch_dir() })
}

pub fn dataset(s: &Settings, tokenizer: &Tokenizer, spec: &Spec) -> Result<Dataset> {
    let merges = s.lora.merge.is_some(); // reads no data
    let dataset = Dataset::open(&DataOptions {
        paths: s.data.dataset.iter().flatten().map(PathBuf::from).collect(),
        tokenizer: tokenizer.clone(),
        format: if merges { Format::default() } else { format(&s.data, tokenizer)? },
        vocab: spec.vocab,
        max_len: set(&s.data.max_len, "data.max_len")?,
        max_samples: s.data.max_samples.map(|n| n as u64),
        seed: set(&s.run.seed, "run.seed")?,
        cache: cache(&s.data)?,
        cargo_home: env::cargo_home(),
    })?;
    if !merges {
        dataset.check_row_settings(&[
            ("packing_samples", s.data.packing_samples == Some(true)),
            ("tokenizer_chat_template", s.data.tokenizer_chat_template.is_some()),
        ])?;
    }
    Ok(dataset)
}

pub fn loader(s: &Settings, mesh: &MeshSizes, dp_rank: usize, held_out: u64) -> Result<LoaderOptions> {
    Ok(LoaderOptions {
        batch_size: set(&s.batch.batch_size, "batch.batch_size")?,
        grad_accum: set(&s.batch.grad_accum, "batch.grad_accum")?,
        dp_rank,
        dp_size: mesh.dp_replicate * mesh.dp_shard,
        shuffle: set(&s.data.shuffle, "data.shuffle")?,
        seed: set(&s.run.seed, "run.seed")?,
        packing: set(&s.data.packing_samples, "data.packing_samples")?,
        by_length: set(&s.data.group_by_length, "data.group_by_length")?,
        held_out: Some(held_out),
    })
}
