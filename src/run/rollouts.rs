//! On-policy training: prompts instead of recorded samples. Never trains.
//!
//! A run that samples reads a data set of prompts, each with room for its samples (`src/data/rollouts.rs`,
//! [Note: prompts]), which are those of the policy before a step's first update. The data set is a file in the cache
//! directory, named by its content: the prompts' ids, with the numbers of their rows.

/// Samples of a step, with their rewards.
pub mod sampling;
/// Rewards: built-in checkers, and their sums.
pub mod rewards;
/// What is known of a step's samples.
pub mod measured;
mod kept; // samples between updates
/// Rewards of other programs.
pub mod program;
mod schema; // JSON schemas
mod number; // the last number of a text

use crate::base::{Error, Result};
use crate::data::{Format, PROMPTS, RowFiles, SampleRoom, Tokenizer, create_held, open_held};
use crate::engine::SamplerSize;
use crate::nn::Spec;
use crate::run::generate::prompts::{self, EncodedPrompt, PromptEncoder, SkippedRows};
use crate::run::settings::Settings;
use crate::run::settings::hub::DataName;
use crate::run::settings::value::set;
use std::fs::{self, File};
use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};
use xxhash_rust::xxh3::Xxh3;

/// Texts of a rank that are written at once, at most.
pub const TEXTS: usize = 64;

/// The files and directories of prompts.
fn files(s: &Settings) -> Result<Vec<PathBuf>> {
    let given = s.data.dataset.as_deref().unwrap_or_default();
    if let Some((path, weight)) = given.iter().find_map(|path| Some((path, DataName::of(path).weight?))) {
        return Err(Error::input(format!(
            "--dataset {path}: prompts are read one path after another, without weights; remove :{weight}"
        )));
    }
    match given {
        [] => Err(Error::input("there are no prompts to sample from: add --dataset FILE")),
        given => Ok(given.iter().map(PathBuf::from).collect()),
    }
}

/// The data set of ids that a run reads in place of its prompts.
pub struct PromptFile {
    pub path: PathBuf,
    /// Locked, so that nobody removes it from the cache.
    _held: File,
    /// The files of the prompts.
    pub made: RowFiles,
    pub skipped: SkippedRows,
    /// Rows with an answer that is no part of the prompt.
    pub answered: u64,
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
    prompts::field(s)?;
    let prompts = files(s)?;
    if s.objective.is_grpo() {
        learns(s)?;
    }
    s.objective.record_rollouts.as_deref().map_or(Ok(()), |path| can_record(path, &prompts))
}

/// Refuses samples of which none can be better than the others of its prompt.
fn learns(s: &Settings) -> Result<()> {
    let g = &s.generate;
    let why = match (g.group_size, g.temperature, g.top_k) {
        (Some(1), ..) => "--group-size 1: a sample is compared with the others of its prompt, of which there are none",
        (_, Some(0.0), _) => "--temperature 0: all samples of a prompt are the same, so none is better",
        (.., Some(1)) => "--top-k 1: all samples of a prompt are the same, so none is better",
        _ => return Ok(()),
    };
    Err(Error::input(format!("{why}, and nothing would be learned; use another value")))
}

/// Refuses a file of rollouts that cannot be written, or that would become a file of prompts.
fn can_record(path: &Path, prompts: &[PathBuf]) -> Result<()> {
    let whole = |path: &Path| fs::canonicalize(path).ok();
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let place = whole(path).or_else(|| Some(whole(folder)?.join(path.file_name()?)));
    let is_prompts =
        |given: &PathBuf| place.as_ref().zip(whole(given)).is_some_and(|(place, at)| place.starts_with(at));
    let why = match () {
        () if path.is_dir() => "is a directory; name a file",
        () if !folder.is_dir() => "its directory does not exist; create it, or name another",
        () if prompts.iter().any(is_prompts) => {
            "is among the prompts, to which rollouts would be added; name another file"
        }
        () => return Ok(()),
    };
    Err(Error::input(format!("--record-rollouts {}: {why}", path.display())))
}

/// How much a rank samples at once: as many texts as a step has, or `most`.
pub fn size(s: &Settings, most: Option<usize>) -> Result<Option<SamplerSize>> {
    if !s.objective.samples() {
        return Ok(None);
    }
    let SampleRoom { samples: group, longest: count } = room(s)?;
    let texts = set(&s.batch.batch_size, "batch.batch_size")? * set(&s.batch.grad_accum, "batch.grad_accum")? * group;
    let prompt = set(&s.data.max_len, "data.max_len")?.saturating_sub(count).max(1);
    Ok(Some(SamplerSize::of_many(prompt, count, texts.clamp(1, most.unwrap_or(TEXTS)))))
}

/// The most tokens of a sample.
pub fn longest(s: &Settings) -> Result<usize> {
    set(&s.generate.max_new_tokens, "generate.max_new_tokens")
}

/// How many samples a prompt has, and their most tokens.
pub fn room(s: &Settings) -> Result<SampleRoom> {
    Ok(SampleRoom { samples: set(&s.generate.group_size, "generate.group_size")?, longest: longest(s)? })
}

/// The data set of a run that samples. `dir`: of caches.
pub fn prompt_file(
    s: &Settings,
    format: &Format,
    tokenizer: &Tokenizer,
    spec: &Spec,
    dir: &Path,
) -> Result<Option<PromptFile>> {
    if !s.objective.samples() {
        return Ok(None);
    }
    fs::create_dir_all(dir).map_err(|e| Error::io("create", dir, e))?;
    // Ranks that an external launcher started may write it at the same time.
    let own = dir.join(format!("{PROMPTS}{:016x}.partial", std::process::id()));
    let written = write(s, &PromptEncoder::new(s, format.clone(), tokenizer, spec), spec.max_len, dir, &own);
    if written.is_err() {
        let _ = fs::remove_file(&own); // the error is reported
    }
    written.map(Some)
}

/// Writes the data set to `own`, and renames that.
fn write(s: &Settings, encoder: &PromptEncoder, max_positions: usize, dir: &Path, own: &Path) -> Result<PromptFile> {
    let rewards = rewards::Rewards::new(s)?;
    let count = longest(s)?;
    let io = |e| Error::io("write", own, e);
    let mut held = create_held(own).map_err(io)?;
    let mut out = BufWriter::new(&held);
    let mut hash = Xxh3::new();
    let (mut index, mut shortest, mut skipped, mut answered) = (0, usize::MAX, SkippedRows::default(), 0);
    let made = prompts::each(s, &files(s)?, prompts::field(s)?, &mut |row| {
        let ids = row.and_then(|row| {
            rewards.check_row(&row.fields, &row.place)?;
            encoder.encode(&row)
        });
        let row = index;
        index += 1;
        let ids = skipped.unless(s.data.skip_bad_rows == Some(true), ids)?;
        let Some(EncodedPrompt { ids, answered: has_answer }) = ids else { return Ok(()) };
        answered += u64::from(has_answer);
        shortest = shortest.min(ids.len());
        let line = format!("{{\"prompt_ids\": {ids:?}, \"row\": {row}}}\n");
        hash.update(line.as_bytes());
        out.write_all(line.as_bytes()).map_err(io)
    })?;
    out.flush().map_err(io)?;
    drop(out);
    if skipped.first.is_some() && skipped.count == index {
        return Err(skipped.all(&format!("`dataset` {}", made.what)));
    }
    let most = s.data.max_len.unwrap_or(max_positions);
    if shortest + count > most {
        let (what, other) = match s.data.max_len {
            Some(_) if most < max_positions => ("--max-len", ", or raise --max-len"),
            Some(_) => ("--max-len", ""),
            None => ("the model's max_positions", ""),
        };
        return Err(Error::input(format!(
            "{what} {most} has no room for any prompt with its sample: the shortest prompt has {shortest} tokens, and a \
             sample up to {count}. Lower --max-new-tokens{other}"
        )));
    }
    let path = dir.join(format!("{PROMPTS}{:016x}.jsonl", hash.digest()));
    // Its tokens are cached by when it was written.
    let kept = match open_held(&path) {
        Some(file) => {
            let removed = fs::remove_file(own); // nobody else does while it is held
            held = file;
            removed
        }
        None => fs::rename(own, &path),
    };
    kept.map_err(|e| Error::io("write", &path, e))?;
    Ok(PromptFile { path, _held: held, made, skipped, answered })
}
