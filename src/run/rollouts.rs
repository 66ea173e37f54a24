//! On-policy training: prompts instead of recorded samples. Never trains.
//!
//! [Note: prompts as groups] A run that samples reads a data set of groups like one that has recorded them, with the
//! prompts of its rows and samples of the greatest length: which prompts a step consumes, on which ranks, what buffers
//! hold and where a resumed run continues are then decided as for recorded groups. Before a step's first update its
//! samples are replaced by those of the policy. The data set is a file in the cache directory, named by its content.

/// Samples of a step, with their rewards.
pub mod sampling;
/// Rewards: built-in checkers, and their sums.
pub mod rewards;
mod kept; // samples between updates
mod program; // rewards of other programs
mod schema; // JSON schemas

use crate::base::{Error, Result};
use crate::data::{Format, Tokenizer};
use crate::engine::SamplerSize;
use crate::nn::Spec;
use crate::run::generate::prompts::{self, PromptEncoder};
use crate::run::settings::Settings;
use crate::run::settings::value::set;
use serde_json::json;
use std::fs;
use std::path::{Path, PathBuf};
use xxhash_rust::xxh3::xxh3_64;

/// Texts of a rank that are written at once, at most.
pub const TEXTS: usize = 64;

/// The files of prompts.
fn files(s: &Settings) -> Result<Vec<PathBuf>> {
    let paths = s.data.dataset.iter().flatten().map(PathBuf::from).collect::<Vec<_>>();
    let wrong = |path: &Path| {
        Error::input(format!(
            "--dataset {}: prompts to sample from are rows of a file of JSON lines, whose name ends with {}",
            path.display(),
            prompts::FILE
        ))
    };
    match paths.iter().find(|path| !path.to_string_lossy().ends_with(prompts::FILE)) {
        Some(path) => Err(wrong(path)),
        None if paths.is_empty() => Err(Error::input("there are no prompts to sample from: add --dataset FILE.jsonl")),
        None => Ok(paths),
    }
}

/// Refuses what sampling cannot do.
pub fn check(s: &Settings) -> Result<()> {
    if !s.objective.samples() {
        return Ok(());
    }
    if s.parallel.ring_attn_size.is_some_and(|ranks| ranks > 1) {
        return Err(Error::input(
            "--ring-attn-size: ranks that share sequences sum attention in another order than the sampler, so the samples \
             would be off-policy; remove it",
        ));
    }
    rewards::Rewards::check(s)?;
    files(s).map(|_| ())
}

/// How much a rank samples at once: as many texts as a step has, or `most`.
pub fn size(s: &Settings, most: Option<usize>) -> Result<Option<SamplerSize>> {
    if !s.objective.samples() {
        return Ok(None);
    }
    let (count, group) = (longest(s)?, set(&s.generate.group_size, "generate.group_size")?);
    let texts = set(&s.batch.batch_size, "batch.batch_size")? * set(&s.batch.grad_accum, "batch.grad_accum")? * group;
    let prompt = set(&s.data.max_len, "data.max_len")?.saturating_sub(count).max(1);
    Ok(Some(SamplerSize::of_many(prompt, count, texts.clamp(1, most.unwrap_or(TEXTS)))))
}

/// The most tokens of a sample.
pub fn longest(s: &Settings) -> Result<usize> {
    set(&s.generate.max_new_tokens, "generate.max_new_tokens")
}

/// The data set of a run that samples: see [Note: prompts as groups].
/// `dir`: of caches.
pub fn placeholders(
    s: &Settings,
    format: &Format,
    tokenizer: &Tokenizer,
    spec: &Spec,
    dir: &Path,
) -> Result<Option<Vec<PathBuf>>> {
    if !s.objective.samples() {
        return Ok(None);
    }
    let encoder = PromptEncoder::new(s, format.clone(), tokenizer, spec);
    let rewards = rewards::Rewards::new(s)?;
    let (count, group) = (longest(s)?, set(&s.generate.group_size, "generate.group_size")?);
    let mut text = String::new();
    let mut index = 0;
    let mut shortest = usize::MAX;
    for path in files(s)? {
        for (row, fields) in prompts::rows(&path)? {
            rewards.check_row(&fields, &row.place)?;
            let ids = encoder.encode(&row)?;
            shortest = shortest.min(ids.len());
            let sample = json!({"ids": vec![0; count], "logprobs": vec![0; count], "reward": index});
            text += &json!({"prompt_ids": ids, "samples": vec![sample; group]}).to_string();
            text.push('\n');
            index += 1;
        }
    }
    if let Some(most) = s.data.max_len.filter(|&most| shortest + count > most) {
        return Err(Error::input(format!(
            "--max-len {most} has no room for any prompt with its sample: the shortest prompt has {shortest} tokens, and a \
             sample up to {count}. Lower --max-new-tokens, or raise --max-len"
        )));
    }
    let path = dir.join(format!("prompts-{:016x}.jsonl", xxh3_64(text.as_bytes())));
    if !path.exists() {
        let io = |e| Error::io("write", &path, e);
        fs::create_dir_all(dir).map_err(|e| Error::io("create", dir, e))?;
        // Ranks that an external launcher started may write it at the same time.
        let own = path.with_extension(format!("{}", std::process::id()));
        fs::write(&own, &text).and_then(|()| fs::rename(&own, &path)).map_err(io)?;
    }
    Ok(Some(vec![path]))
}
