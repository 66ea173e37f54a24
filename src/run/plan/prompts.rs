//! `--sample-prompts`: the prompts that the model in training continues at each evaluation, read before anything
//! starts. Never runs a model.
use super::data;
use crate::base::{Error, Result};
use crate::comm::MeshSizes;
use crate::data::Tokenizer;
use crate::engine::SamplerSize;
use crate::nn::Spec;
use crate::run::generate::prompts::{self, PromptEncoder, PromptField, PromptRow};
use crate::run::rollouts;
use crate::run::settings::Settings;
use crate::run::settings::value::set;
use serde::{Deserialize, Serialize};

const FLAG: &str = "--sample-prompts";

/// A row of the file.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct SamplePrompt {
    /// For people, without a template.
    pub shown: String,
    pub tokens: Vec<u32>,
}

/// The prompts, and the maximum number of tokens that continue each.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct SamplePrompts {
    pub rows: Vec<SamplePrompt>,
    pub count: usize,
    /// Tokens of a prompt, as [`SamplerSize::fitted`] says.
    longest: usize,
}

impl SamplePrompts {
    /// None without the flag.
    pub fn read(s: &Settings, tokenizer: &Tokenizer, spec: &Spec) -> Result<Option<SamplePrompts>> {
        let Some(path) = &s.run.sample_prompts else { return Ok(None) };
        let named = |e| match e {
            Error::Input(text) if !text.starts_with(FLAG) => Error::Input(format!("{FLAG} {text}")),
            other => other,
        };
        let encoder = PromptEncoder::new(s, data::format(&s.data, tokenizer)?, tokenizer, spec);
        let mut rows = Vec::new();
        let push = &mut |row: Result<PromptRow>| {
            let row = row?;
            rows.push(SamplePrompt { shown: row.shown(tokenizer), tokens: encoder.encode(&row)? });
            Ok(true)
        };
        prompts::read(FLAG, path, PromptField::Known, push).map_err(named)?;
        let most = set(&s.generate.max_new_tokens, "generate.max_new_tokens")?;
        let lengths = rows.iter().map(|row: &SamplePrompt| row.tokens.len());
        let (longest, count) = SamplerSize::fitted(lengths, most, spec.max_len);
        Ok(Some(SamplePrompts { rows, longest, count }))
    }

    /// How much a rank samples at once: its share of the prompts, or `most` texts.
    fn size(&self, mesh: &MeshSizes, most: usize) -> SamplerSize {
        let own = self.rows.len().div_ceil(mesh.dp_replicate * mesh.dp_shard);
        SamplerSize::of_many(self.longest, self.count, own.clamp(1, most))
    }
}

/// How much a rank samples at once: of these prompts, or of the data set's; at most `most` texts. None if the run
/// samples nothing.
pub fn sampler_size(
    s: &Settings,
    prompts: Option<&SamplePrompts>,
    mesh: &MeshSizes,
    most: Option<usize>,
) -> Result<Option<SamplerSize>> {
    match prompts {
        Some(prompts) => Ok(Some(prompts.size(mesh, most.unwrap_or(rollouts::TEXTS)))),
        None => rollouts::size(s, most),
    }
}
