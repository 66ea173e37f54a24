//! The prompts that the model in training continues at each evaluation, read before anything starts: those of
//! `--sample-prompts`, or of `--eval-dataset` in a run that learns from rewards, which judge them. Never runs a model.
use super::data;
use crate::base::{Error, Result};
use crate::comm::MeshSizes;
use crate::data::{JsonRow, Tokenizer};
use crate::engine::SamplerSize;
use crate::nn::Spec;
use crate::run::generate::prompts::{self, EncodedPrompt, PromptEncoder, PromptField, PromptRow, SkippedRows};
use crate::run::rollouts;
use crate::run::rollouts::rewards::Rewards;
use crate::run::settings::Settings;
use crate::run::settings::value::set;
use serde::{Deserialize, Serialize};
use std::path::PathBuf;
use xxhash_rust::xxh3::xxh3_64;

/// A row of the file.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct SamplePrompt {
    /// For people, without a template.
    pub shown: String,
    pub tokens: Vec<u32>,
    pub judged: Option<JudgedRow>,
}

/// What rewards read of a prompt's row, and where it is.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct JudgedRow {
    pub place: String,
    pub fields: JsonRow,
}

/// The prompts, and the maximum number of tokens that continue each.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct SamplePrompts {
    pub rows: Vec<SamplePrompt>,
    pub count: usize,
    /// Tokens of a prompt, as [`SamplerSize::fitted`] says.
    longest: usize,
    /// What was skipped.
    pub note: Option<String>,
}

impl SamplePrompts {
    /// Identifies the prompts by their tokens.
    pub fn fingerprint(&self) -> u64 {
        let words = |row: &SamplePrompt| [&[row.tokens.len() as u32], &row.tokens[..]].concat();
        xxh3_64(bytemuck::cast_slice(&self.rows.iter().flat_map(words).collect::<Vec<u32>>()))
    }
    /// None without the flag.
    pub fn read(s: &Settings, tokenizer: &Tokenizer, spec: &Spec) -> Result<Option<SamplePrompts>> {
        let rewards = s.objective.is_rewarded().then(|| Rewards::new(s)).transpose()?;
        let (flag, paths, field) = match (&s.run.sample_prompts, &s.data.eval_dataset, &rewards) {
            (Some(path), ..) => ("--sample-prompts", vec![path.clone()], PromptField::Known),
            (None, Some(paths), Some(_)) => {
                ("--eval-dataset", paths.iter().map(PathBuf::from).collect(), prompts::field(s)?)
            }
            _ => return Ok(None),
        };
        let named = |e| match e {
            Error::Input(text) if !text.starts_with(flag) => Error::Input(format!("{flag} {text}")),
            other => other,
        };
        let encoder = PromptEncoder::new(s, data::format(&s.data, tokenizer)?, tokenizer, spec);
        let (mut rows, mut skipped) = (Vec::new(), SkippedRows::default());
        let prompt = |row: PromptRow| {
            let EncodedPrompt { ids: tokens, answered } = encoder.encode(&row)?;
            let shown = row.shown(tokenizer, answered);
            let PromptRow { place, fields, .. } = row;
            let judged = |rewards: &Rewards| {
                rewards.check_row(&fields, &place)?;
                Ok(JudgedRow { fields: rewards.read_of(fields), place })
            };
            Ok(SamplePrompt { shown, tokens, judged: rewards.as_ref().map(judged).transpose()? })
        };
        let skip = s.run.sample_prompts.is_none() && s.data.skip_bad_rows == Some(true);
        let push = &mut |row: Result<PromptRow>| {
            rows.extend(skipped.unless(skip, row.and_then(prompt))?);
            Ok(true)
        };
        prompts::read(s, flag, &paths, field, push).map_err(named)?;
        if rows.is_empty() && skipped.count > 0 {
            return Err(skipped.all(flag));
        }
        let most = set(&s.generate.max_new_tokens, "generate.max_new_tokens")?;
        let lengths = rows.iter().map(|row: &SamplePrompt| row.tokens.len());
        let (longest, count) = SamplerSize::fitted(lengths, most, spec.max_len);
        Ok(Some(SamplePrompts { rows, longest, count, note: skipped.note(flag) }))
    }

    /// Their texts are judged.
    pub fn are_judged(&self) -> bool {
        self.rows.iter().any(|row| row.judged.is_some())
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
    let of_prompts = prompts.map(|prompts| prompts.size(mesh, most.unwrap_or(rollouts::TEXTS)));
    Ok(match (of_prompts, rollouts::size(s, most)?) {
        (Some(one), Some(other)) => Some(one.or_larger(other)),
        (one, other) => one.or(other),
    })
}
