//! The data sets, and how rows are rendered and loaded. Never reads a row.
use crate::base::{Error, Result, quote};
use crate::comm::MeshSizes;
use crate::comm::env;
use crate::data::{
    Cache, ChatTemplate, DataOptions, Dataset, Format, InputLoss, LoaderOptions, Shape, Tokenizer, tokenizer,
};
use crate::nn::Spec;
use crate::run::generate::prompts::ANSWERED;
use crate::run::plan::model::ModelPlan;
use crate::run::plan::ranks::RankPlan;
use crate::run::plan::{engine, objective, tokens};
use crate::run::rollouts::{self, PromptFile};
use crate::run::settings::data::DataSettings;
use crate::run::settings::tasks::MAX_TEXT;
use crate::run::settings::value::set;
use crate::run::settings::{InputLossName, RowFormatName, Settings};
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// How rows are rendered, with the chat template in use, which rows of messages use without any flag.
pub fn format(d: &DataSettings, tokenizer: &Tokenizer) -> Result<Format> {
    expected(d, tokenizer)?;
    let on = |flag: Option<bool>| flag == Some(true);
    let needed = on(d.apply_chat_template) || on(d.multiturn);
    if needed {
        tokenizer.usable()?;
    }
    let new = |text: &str| {
        ChatTemplate::new(text, tokenizer.spellings()).map(|template| template.with_tokens(tokenizer.named_tokens()))
    };
    let chat = match (tokens::template(d, tokenizer)?, &d.tokenizer_chat_template) {
        (Some(text), Some(given)) => {
            Some(new(&text).map_err(|what| Error::input(format!("--tokenizer-chat-template {given}: {what}")))?)
        }
        (Some(text), None) if needed => {
            Some(new(&text).map_err(|what| Error::input(format!("--tokenizer {}: {what}", tokenizer.name())))?)
        }
        (Some(text), None) => new(&text).ok(),
        (None, _) if needed => {
            let names = tokenizer.template(tokenizer::DEFAULT).err().unwrap_or_default();
            return Err(Error::input(format!(
                "--tokenizer {} has no default chat template (its templates: {}): pass one with \
                 --tokenizer-chat-template",
                tokenizer.name(),
                tokens::listed(&names)
            )));
        }
        (None, _) => None,
    };
    let tool_use = match tokens::tool_use(d, tokenizer).map(new) {
        Some(Err(what)) if needed => {
            return Err(Error::input(format!(
                "--tokenizer {}: template {}: {what}",
                tokenizer.name(),
                tokens::TOOL_USE
            )));
        }
        other => other.and_then(|template| template.ok()),
    };
    Ok(Format {
        preferences: None,
        shape: d.row_format.map(|name| match name {
            RowFormatName::Messages => Shape::Messages,
            RowFormatName::Conversations => Shape::Conversations,
            RowFormatName::Alpaca => Shape::Instruction,
            RowFormatName::PromptCompletion => Shape::Completion,
            RowFormatName::Text => Shape::Text,
            RowFormatName::Tokens => Shape::Tokens,
        }),
        renames: d.renames()?,
        input_key: d.input_key.clone(),
        output_key: d.output_key.clone(),
        system_key: d.system_key.clone(),
        input_template: d.input_template.clone(),
        special_tokens: d.add_special_tokens,
        apply_chat_template: on(d.apply_chat_template),
        multiturn: on(d.multiturn),
        input_loss: match d.train_on_inputs {
            None | Some(InputLossName::Off) => InputLoss::None,
            Some(InputLossName::Conversations) => InputLoss::Conversations,
            Some(InputLossName::On) => InputLoss::All,
        },
        pretrain_mode: on(d.pretrain_mode),
        join_rows: on(d.join_rows),
        skip_bad_rows: on(d.skip_bad_rows),
        chat: chat.map(Arc::new),
        tool_use: tool_use.map(Arc::new),
    })
}

/// The tokenizer's special tokens are those that a file of another tool relies on.
fn expected(d: &DataSettings, tokenizer: &Tokenizer) -> Result<()> {
    for token in d.special_tokens.iter().flatten() {
        let fault = |what: String| Error::input(format!("--special-tokens {}: {what}", quote(token)));
        let (name, text) = token.split_once('=').ok_or_else(|| fault("it must be NAME=TOKEN".into()))?;
        let found = tokenizer.named_tokens().iter().find(|(known, _)| known == name);
        if found.is_none_or(|(_, own)| own != text) {
            let own = found.map_or("none".to_string(), |(_, own)| quote(own).to_string());
            let file = "put it into its tokenizer_config.json, or remove it here";
            return Err(fault(format!("the tokenizer {} has {own} as {name}: {file}", tokenizer.name())));
        }
    }
    Ok(())
}

/// The directory of caches: the settings', or the environment's.
pub fn cache_dir(d: &DataSettings) -> PathBuf {
    d.cache_dir.clone().unwrap_or_else(env::cache_dir)
}

/// The token cache.
pub fn cache(d: &DataSettings) -> Result<Cache> {
    let dir = cache_dir(d);
    Ok(Cache { dir: set(&d.cache, "data.cache")?.then_some(dir), limit: d.cache_bytes()?, scratch: env::scratch_dir() })
}

/// The training data, and the evaluation data if that is another data set.
#[derive(Clone)]
pub struct RunData {
    pub train: Arc<Dataset>,
    pub eval: Option<Arc<Dataset>>,
}

/// How [`RunData`] is opened.
pub struct RunDataOptions {
    /// Each data set to mix, with its weight.
    pub train: Vec<(DataOptions, f64)>,
    pub eval: Option<DataOptions>,
    /// The setting that names the training data.
    setting: &'static str,
    /// What is read in place of prompts.
    prompts: Option<PromptFile>,
}

impl RunDataOptions {
    /// The library's messages say `dataset` for any data set.
    pub fn of_training(&self, e: Error) -> Error {
        match (e, &self.prompts) {
            (Error::Input(text), Some(PromptFile { path, made, .. })) => {
                Error::Input(text.replace(&path.display().to_string(), &made.what))
            }
            (e, _) => in_setting(self.setting, e),
        }
    }
}

impl RunData {
    pub fn open(s: &Settings, tokenizer: &Tokenizer, spec: &Spec) -> Result<RunData> {
        let d = &s.data;
        let options = RunData::options(s, tokenizer, spec)?;
        let open = |part: &DataOptions| Dataset::open(part).map_err(|e| options.of_training(e));
        let parts = options.train.iter().map(|(part, weight)| Ok((open(part)?, *weight)));
        let train = Dataset::mix(parts.collect::<Result<_>>()?)?;
        let train = match &options.prompts {
            Some(PromptFile { made, skipped, answered, .. }) => {
                let unread = (*answered > 0).then(|| (ANSWERED.to_string(), *answered));
                train.made_from(made, (skipped.count, skipped.first.as_ref()), unread)
            }
            None => train,
        };
        let eval = options.eval.as_ref().map(Dataset::open).transpose().map_err(|e| in_setting("eval_dataset", e))?;
        train.check_row_settings(&[("packing_samples", d.packing_samples == Some(true))])?;
        let of_rows = eval.as_ref().filter(|eval| eval.has_rows_of_its_own()).unwrap_or(&train);
        of_rows.check_row_settings(&[("tokenizer_chat_template", d.tokenizer_chat_template.is_some())])?;
        Ok(RunData { train: Arc::new(train), eval: eval.map(Arc::new) })
    }

    pub fn options(s: &Settings, tokenizer: &Tokenizer, spec: &Spec) -> Result<RunDataOptions> {
        let d = &s.data;
        let format = objective::rows(s, format(d, tokenizer)?)?;
        let recorded = objective::rollouts(s)?;
        let prompts = rollouts::prompt_file(s, &format, tokenizer, spec, &cache_dir(d))?;
        let setting = if recorded.is_some() { "rollouts" } else { "dataset" };
        let rollouts = prompts.as_ref().map(|prompts| vec![prompts.path.clone()]).or(recorded);
        let sources = rollouts.map_or_else(|| sources(d), |paths| Ok(vec![(paths, 1.0)]))?;
        // Where samples are judged, these are prompts (`SamplePrompts`).
        let eval = d.eval_dataset.as_ref().filter(|_| !s.objective.is_rewarded());
        let eval: Option<Vec<PathBuf>> = eval.map(|paths| paths.iter().map(PathBuf::from).collect());
        if eval.iter().flatten().any(|path| path == Path::new("synthetic")) {
            return Err(Error::input(
                "`eval_dataset: synthetic`: its rows would be those of training; remove it, and the run evaluates \
                 held-out rows of `dataset: synthetic`",
            ));
        }
        // Row settings must apply to some of the data, not to all of it.
        let all: Vec<&[PathBuf]> = sources.iter().map(|s| &s.0[..]).chain(eval.as_deref()).collect();
        // Finding out reads the beginning of every file.
        let matters = all.len() > 1 || s.task.as_ref().is_some_and(|task| task.max_len.is_some());
        let rows: Vec<bool> = all.iter().map(|paths| matters && Dataset::holds_rows(paths)).collect();
        let any = rows.contains(&true);
        let options = |paths: &[PathBuf], rows: bool, max_samples: Option<usize>| {
            let without_effect = all.len() > 1 && any && !rows;
            Ok(DataOptions {
                paths: paths.to_vec(),
                tokenizer: tokenizer.clone(),
                format: match without_effect {
                    true => Format {
                        preferences: format.preferences.clone(),
                        pretrain_mode: format.pretrain_mode && Dataset::looks_like_data(paths),
                        ..Format::default()
                    },
                    false => format.clone(),
                },
                vocab: spec.vocab,
                // One length for all: rows are cut no shorter because text is mixed in.
                max_len: longest(s, spec, any && !format.join_rows)?,
                max_samples: max_samples.map(|n| n as u64),
                seed: set(&s.run.seed, "run.seed")?,
                cache: cache(d)?,
                cargo_home: env::cargo_home(),
            })
        };
        let train = sources.iter().zip(&rows);
        let train = train.map(|((paths, weight), &rows)| Ok((options(paths, rows, d.max_samples)?, *weight)));
        let eval = eval.as_deref().zip(rows.last()).map(|(paths, &rows)| options(paths, rows, None));
        Ok(RunDataOptions { train: train.collect::<Result<_>>()?, eval: eval.transpose()?, setting, prompts })
    }
}

fn in_setting(setting: &str, e: Error) -> Error {
    match e {
        Error::Input(text) => Error::Input(text.replace("`dataset`", &format!("`{setting}`"))),
        other => other,
    }
}

/// The length that rows are cut at: the given one, or the longest that the task and the model allow.
fn longest(s: &Settings, spec: &Spec, rows: bool) -> Result<usize> {
    match s.task.as_ref().and_then(|task| task.max_len) {
        Some(limit) => Ok(if rows { limit } else { MAX_TEXT }.min(spec.max_len)),
        None => set(&s.data.max_len, "data.max_len"),
    }
}

/// The data set of a run whose buffers depend on it: its longest row, or its largest group of rollouts. `s` gets these
/// lengths. What the model or the machine cannot do is refused before a row is read.
pub fn before_sizes(
    s: &mut Settings,
    ranks: &RankPlan,
    ModelPlan { spec, tokenizer }: &ModelPlan,
    data: Option<RunData>,
) -> Result<RunData> {
    let mut trial = s.clone();
    trial.data.max_len = trial.data.max_len.or(Some(1));
    engine::options(&trial, ranks.device, &ranks.mesh, spec.clone())?;
    let mut data = data.map_or_else(|| RunData::open(s, tokenizer, spec), Ok)?;
    fit(s, spec, &mut data, ranks.mesh.dp_replicate * ranks.mesh.dp_shard)?;
    s.largest_group = data.train.largest_group();
    Ok(data)
}

/// Fills in what a task takes from the data: the length of sequences, that of the longest row; and the batch, `ranks`
/// of which read different rows.
pub fn fit(s: &mut Settings, spec: &Spec, data: &mut RunData, ranks: usize) -> Result<()> {
    let Some(task) = s.task.clone() else { return Ok(()) };
    if let Some(limit) = task.max_len {
        let all = || [Some(&data.train), data.eval.as_ref()].into_iter().flatten();
        let needed = || all().map(|data| data.longest_sequence()).max().unwrap_or(1);
        let fitting = || needed().next_multiple_of(16).min(limit).min(spec.max_len);
        let max_len = s.data.max_len.unwrap_or_else(fitting);
        [Some(&mut data.train), data.eval.as_mut()].into_iter().flatten().try_for_each(|data| shrink(data, max_len))?;
        s.data.max_len = Some(max_len);
    }
    if task.batch {
        let longest = set(&s.data.max_len, "data.max_len")?.max(data.train.largest_group());
        let (micro, accum) = task.batch(longest, data.train.rows(), ranks);
        (s.batch.batch_size, s.batch.grad_accum) = (Some(micro), Some(accum));
    }
    Ok(())
}

fn shrink(data: &mut Arc<Dataset>, max_len: usize) -> Result<()> {
    if data.max_sequence() == max_len {
        return Ok(());
    }
    let own = Arc::get_mut(data).ok_or_else(|| Error::op("data", "the data set is in use"))?;
    own.shrink(max_len);
    Ok(())
}

/// Paths and weight of each data set to mix; without weights, one data set of all paths.
fn sources(d: &DataSettings) -> Result<Vec<(Vec<PathBuf>, f64)>> {
    let given = d.dataset.as_deref().unwrap_or_default();
    let split = |name: &String| match name.rsplit_once(':') {
        // A file name may contain a colon.
        Some((path, weight)) if !path.is_empty() && !Path::new(name).exists() => match weight.parse::<f64>() {
            Ok(weight) => (path.to_string(), Some(weight)),
            Err(_) => (name.clone(), None),
        },
        _ => (name.clone(), None),
    };
    let mut named: Vec<(String, Option<f64>)> = given.iter().map(split).collect();
    let weighted = named.iter().filter(|(_, weight)| weight.is_some()).count();
    if let Some(weights) = &d.dataset_weights {
        if weighted > 0 {
            return Err(Error::input(
                "`dataset_weights` and weights in the paths of `dataset` (PATH:WEIGHT) are both given: remove one",
            ));
        }
        if weights.len() != named.len() {
            return Err(Error::input(format!(
                "`dataset_weights` has {} weights, but `dataset` has {} paths: give one weight per path",
                weights.len(),
                named.len()
            )));
        }
        named.iter_mut().zip(weights).for_each(|(named, weight)| named.1 = Some(*weight));
    }
    if let (true, Some((path, _))) = (weighted > 0, named.iter().find(|(_, weight)| weight.is_none())) {
        return Err(Error::input(format!("`dataset` {path}: has no weight, but other paths do; write {path}:WEIGHT")));
    }
    match named.iter().all(|(_, weight)| weight.is_some()) && !named.is_empty() {
        true => Ok(named.into_iter().map(|(path, weight)| (vec![path.into()], weight.unwrap_or(1.0))).collect()),
        false => Ok(vec![(given.iter().map(PathBuf::from).collect(), 1.0)]),
    }
}

pub fn loader(s: &Settings, mesh: &MeshSizes, dp_rank: usize, held_out: &[u64]) -> Result<LoaderOptions> {
    Ok(LoaderOptions {
        batch_size: set(&s.batch.batch_size, "batch.batch_size")?,
        grad_accum: set(&s.batch.grad_accum, "batch.grad_accum")?,
        dp_rank,
        dp_size: mesh.dp_replicate * mesh.dp_shard,
        shuffle: set(&s.data.shuffle, "data.shuffle")?,
        seed: set(&s.run.seed, "run.seed")?,
        packing: set(&s.data.packing_samples, "data.packing_samples")?,
        by_length: set(&s.data.group_by_length, "data.group_by_length")?,
        passes: if s.objective.has_groups() {
            set(&s.objective.updates_per_rollout, "objective.updates_per_rollout")?
        } else {
            1
        },
        held_out: Some(held_out.to_vec()),
    })
}
