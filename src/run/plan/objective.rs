//! What a run minimizes, and the reference model. Never reads a weight.
use crate::base::{Error, Result, open};
use crate::ckpt;
use crate::data::{Format, LabelKeys, PairKeys, Preferences, RowNames};
use crate::engine::{Dpo, EngineOptions, Grpo, GrpoLoss, Kto, Objective, ReferenceModel, Rm, Teaching};
use crate::nn::{Arch, Decoder, Segment, Spec, is_adapter};
use crate::run::generate::prompts::{self, PromptField};
use crate::run::plan::resume::ResumeFrom;
use crate::run::rollouts;
use crate::run::settings::value::set;
use crate::run::settings::{LossName, ObjectiveName, Settings};
use serde::Deserialize;
use serde_json::{Map, Value};
use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use xxhash_rust::xxh3::Xxh3;

/// Key in `data` of the trainer state: what identifies the model that adapters are of.
const BASE: &str = "base_weights";

pub fn objective(s: &Settings) -> Result<Objective> {
    let o = &s.objective;
    Ok(match set(&o.objective, "objective.objective")? {
        ObjectiveName::Sft | ObjectiveName::Distill => Objective::Sft,
        ObjectiveName::Rm => Objective::Rm(Rm),
        ObjectiveName::Kto => Objective::Kto(Kto {
            beta: set(&o.beta, "objective.beta")?,
            desirable_weight: set(&o.desirable_weight, "objective.desirable_weight")?,
            undesirable_weight: set(&o.undesirable_weight, "objective.undesirable_weight")?,
        }),
        ObjectiveName::Grpo => Objective::Grpo(Grpo {
            loss: match set(&o.loss_type, "objective.loss_type")? {
                LossName::Grpo => GrpoLoss::Grpo,
                LossName::Dapo => GrpoLoss::Dapo,
                LossName::DrGrpo => GrpoLoss::DrGrpo { longest: longest(s)? },
            },
            beta: set(&o.beta, "objective.beta")?,
            clip_low: set(&o.clip_low, "objective.clip_low")?,
            clip_high: set(&o.clip_high, "objective.clip_high")?,
            temperature: match set(&s.generate.temperature, "generate.temperature")? as f32 {
                t if t > 0.0 => t,
                _ => {
                    return Err(Error::input(
                        "--temperature 0: the loss divides logits by it; use the temperature that the samples were drawn \
                         with, above 0",
                    ));
                }
            },
        }),
        ObjectiveName::Dpo => Objective::Dpo(Dpo {
            beta: set(&o.beta, "objective.beta")?,
            label_smoothing: set(&o.label_smoothing, "objective.label_smoothing")?,
            ipo: set(&o.ipo, "objective.ipo")?,
            nll_coef: set(&o.nll_loss_coef, "objective.nll_loss_coef")?,
        }),
    })
}

fn longest(s: &Settings) -> Result<u64> {
    let none = || {
        Error::input(
            "--loss-type dr_grpo divides by the most tokens that a sample could have: add --max-new-tokens N, the limit \
             that the rollouts were sampled with",
        )
    };
    s.generate.max_new_tokens.map(|longest| longest as u64).ok_or_else(none)
}

/// The recorded rollouts of GRPO.
pub fn rollouts(s: &Settings) -> Result<Option<Vec<PathBuf>>> {
    match &s.objective.rollouts {
        _ if !s.objective.is_grpo() || s.objective.samples() => Ok(None),
        Some(paths) => Ok(Some(paths.iter().map(PathBuf::from).collect())),
        None if s.data.dataset.is_some() => Err(Error::input(
            "--objective grpo: the samples of the prompts in --dataset need rewards: add --reward exact, number, \
             regex:PATTERN, json, json-schema:FILE, length:TOKENS or a command. To learn from recorded samples instead, \
             name them with --rollouts FILE in place of --dataset",
        )),
        None => Err(Error::input(
            "--objective grpo: there is nothing to learn from. Sample during training with --dataset PROMPTS and \
             --reward, or name a file of recorded samples with --rollouts FILE.jsonl",
        )),
    }
}

/// Refuses what an objective cannot do.
pub fn check(s: &Settings) -> Result<()> {
    rollouts(s)?;
    rollouts::check(s)?;
    match s.objective.objective {
        Some(ObjectiveName::Distill) if s.objective.teacher.is_none() => Err(Error::input(
            "--objective distill: there is no teacher to learn from; add --teacher MODEL, a model of the same vocabulary",
        )),
        _ => Ok(()),
    }
}

/// `format` with what the objective reads from rows.
pub fn rows(s: &Settings, format: Format) -> Result<Format> {
    let o = &s.objective;
    let prompt = || set(&o.prompt_key, "objective.prompt_key");
    let (preferences, output_key) = match set(&o.objective, "objective.objective")? {
        _ if o.samples() => {
            // The field of the prompt, whose ids are read in its place, and that of the answer, which rewards read.
            return Ok(Format {
                preferences: Some(Preferences::Prompts(rollouts::room(s)?)),
                renames: RowNames::default(), // as the prompts had
                input_key: None,
                output_key: None,
                ..format
            });
        }
        _ if o.has_groups() => (Some(Preferences::Rollouts), format.output_key),
        ObjectiveName::Sft | ObjectiveName::Distill | ObjectiveName::Grpo => (None, format.output_key),
        ObjectiveName::Dpo | ObjectiveName::Rm => {
            let keys = PairKeys {
                prompt: prompt()?,
                chosen: set(&o.chosen_key, "objective.chosen_key")?,
                rejected: set(&o.rejected_key, "objective.rejected_key")?,
                margin: o.margin_key.clone(),
                scored: o.scores(),
            };
            (Some(Preferences::Pairs(keys)), format.output_key)
        }
        ObjectiveName::Kto => {
            let completion = format.output_key.unwrap_or(LabelKeys::default().completion);
            let label = set(&o.label_key, "objective.label_key")?;
            let prompt = match prompts::field(s)? {
                PromptField::Named(key) => key.into(),
                _ => prompt()?,
            };
            let preferences = Some(Preferences::Labels(LabelKeys { prompt, completion, label }));
            return Ok(Format { preferences, input_key: None, output_key: None, ..format });
        }
    };
    Ok(Format { preferences, output_key, ..format })
}

/// What a run that trains `spec` compares with.
pub fn reference(s: &Settings, spec: &Spec) -> Result<ReferenceModel> {
    let own = s.objective.ref_pretrain.is_none() && s.lora.rank.is_some();
    if let Some(adapter) = s.lora.adapter.as_ref().filter(|_| own && s.objective.has_reference()) {
        return Err(Error::input(format!(
            "--lora-adapter {0}: the reference would be the base model, and not the one that training starts from: merge the \
             adapter (`flatshard merge {0} --save-hf DIR`), and name DIR as --ref-pretrain",
            adapter.display()
        )));
    }
    Ok(match (reference_model(s, spec)?, s.objective.precompute_ref_logps == Some(true)) {
        (None, _) => ReferenceModel::Base,
        (Some(_), true) => ReferenceModel::Given,
        (Some(_), false) if own => ReferenceModel::Base,
        (Some(spec), false) => ReferenceModel::Frozen(Box::new(spec)),
    })
}

/// The reference model of a run that trains `spec`: of --ref-pretrain, or the initial model. None: an objective without
/// a reference.
pub fn reference_model(s: &Settings, spec: &Spec) -> Result<Option<Spec>> {
    let Some(dir) = &s.objective.ref_pretrain else {
        return Ok(s.objective.has_reference().then(|| Spec { dropout: 0.0, ..spec.clone() }));
    };
    counterpart(s, "--ref-pretrain", dir, spec).map(Some)
}

/// The model in `dir`, which scores the tokens of a run that trains `spec`.
fn counterpart(s: &Settings, flag: &str, dir: &Path, spec: &Spec) -> Result<Spec> {
    let wrong = |what: String| Error::input(format!("{flag} {}: {what}", dir.display()));
    ckpt::is_model(dir)?;
    let other = ckpt::hf::read(dir)?;
    if other.score {
        return Err(wrong("is a reward model, which has no logits; name a language model".into()));
    }
    if other.vocab != spec.vocab {
        return Err(wrong(format!(
            "its vocabulary has {} tokens, and the trained model's {}: both models score the same tokens, so name a \
             model with the trained model's tokenizer",
            other.vocab, spec.vocab
        )));
    }
    if let Some((id, [theirs, ours])) = s.model.pretrain.as_ref().and_then(|own| other_token(dir, own)) {
        return Err(wrong(format!(
            "its token {id} is {theirs:?}, and the trained model's {ours:?}: both models score the same tokens, so name a \
             model with the trained model's tokenizer"
        )));
    }
    let max_len = set(&s.data.max_len, "data.max_len")?;
    if other.max_len < max_len {
        return Err(wrong(format!("it has {} positions, fewer than --max-len {max_len}", other.max_len)));
    }
    if other.long_from() != spec.long_from() {
        return Err(wrong(
            "it and the trained model rotate long documents differently, from different lengths on: use a model of the \
             same family"
                .into(),
        ));
    }
    other.validate()?;
    Ok(other)
}

/// The first token that two models spell differently, by their tokenizers' vocabularies, if both have one. Added tokens
/// may be more in one of them.
fn other_token(a: &Path, b: &Path) -> Option<(u64, [String; 2])> {
    #[derive(Deserialize)]
    struct TokenizerFile {
        model: TokenIds,
    }
    #[derive(Deserialize)]
    struct TokenIds {
        vocab: Value,
    }
    let [a, b] = [a, b].map(|dir| open::read(&dir.join("tokenizer.json")).ok());
    let (a, b) = a.zip(b).filter(|(a, b)| a != b)?;
    let vocabulary = |text: &[u8]| -> Option<BTreeMap<u64, String>> {
        let file: TokenizerFile = serde_json::from_slice(text).ok()?;
        match file.model.vocab {
            Value::Object(of) => of.into_iter().map(|(token, id)| Some((id.as_u64()?, token))).collect(),
            Value::Array(of) => (0..).zip(of).map(|(id, of)| Some((id, of.get(0)?.as_str()?.to_string()))).collect(),
            _ => None,
        }
    };
    let (a, mut b) = (vocabulary(&a)?, vocabulary(&b)?);
    let other = |(id, theirs): (u64, String)| Some((id, [theirs, b.remove(&id)?]));
    a.into_iter().filter_map(other).find(|(_, [theirs, ours])| theirs != ours)
}

/// The teacher of a run that trains `spec`.
pub fn teacher(s: &Settings, spec: &Spec) -> Result<Option<Teaching>> {
    let Some(dir) = &s.objective.teacher else { return Ok(None) };
    let teacher = counterpart(s, "--teacher", dir, spec)?;
    let alpha = set(&s.objective.distill_alpha, "objective.distill_alpha")?;
    let temperature = set(&s.objective.distill_temperature, "objective.distill_temperature")?;
    Ok(Some(Teaching { spec: teacher, alpha, temperature, on_policy: s.objective.on_policy == Some(true) }))
}

/// The directory that the reference model is read from; none: it has the initial weights.
pub fn reference_dir(s: &Settings) -> Option<&Path> {
    s.objective.ref_pretrain.as_deref().or(s.model.pretrain.as_deref())
}

/// Checks the files of the reference model and of the teacher.
pub fn inspect(s: &Settings, engine: &EngineOptions) -> Result<()> {
    match (reference_model(s, &engine.spec)?, reference_dir(s)) {
        (Some(spec), Some(dir)) if engine.reference != ReferenceModel::Base => {
            ckpt::inspect_model(dir, &spec, Decoder::new(spec.clone())?.layouts())
        }
        _ => Ok(()),
    }?;
    match (&engine.teacher, &s.objective.teacher) {
        (Some(Teaching { spec, .. }), Some(dir)) => {
            ckpt::inspect_model(dir, spec, Decoder::new(spec.clone())?.layouts())
        }
        _ => Ok(()),
    }
}

/// What identifies the models that a checkpoint of the run does not hold, for its trainer state.
pub fn models(s: &Settings) -> Result<Map<String, Value>> {
    let base = s.model.pretrain.as_deref().filter(|_| s.lora.rank.is_some());
    let reference = reference_dir(s).filter(|_| s.objective.has_reference());
    let all = [(BASE, base), ("reference_weights", reference), ("teacher_weights", s.objective.teacher.as_deref())];
    let given = all.into_iter().filter_map(|(name, dir)| Some((name, dir?)));
    given.map(|(name, dir)| Ok((name.into(), ckpt::weights_hash(dir)?.into()))).collect()
}

/// The last part of the name of the module that an adapter's matrix is of.
fn adapted_module(segment: &Segment) -> Option<&str> {
    segment.name.rsplit('.').nth(2)
}

/// What a run that resumes removes of its record of samples.
pub fn drawn_again(s: &Settings, state: Option<&ckpt::TrainerState>) -> Option<String> {
    let (record, step) = (s.objective.record_rollouts.as_ref().filter(|path| path.exists())?, state?.step);
    let again = "are removed, since this run draws them again";
    Some(format!("`record_rollouts` {}: groups at its end of steps after {step} {again}", record.display()))
}

/// What a person who shares the run's adapters should know.
pub fn unread_by_peft(decoder: &Decoder) -> Option<String> {
    let experts = decoder.layouts().iter().filter(|layout| layout.experts).flat_map(|layout| &layout.segments);
    let adapted: BTreeSet<&str> = experts.filter(|segment| is_adapter(segment)).filter_map(adapted_module).collect();
    let [.., down] = decoder.spec().arch.family().modules.sparse.expert;
    let but = match decoder.spec().arch {
        _ if adapted.is_empty() => return None,
        Arch::NemotronH => "nemotron_h's experts: PEFT 0.21 leaves them out without a word when it loads them; ".into(),
        _ if adapted.contains(down) => return None,
        _ => format!(
            "experts' {} without {down}: PEFT 0.21 leaves them out when it loads them with transformers 5, or refuses \
             them; add {down} to --lora-target-modules, or merge them: ",
            Vec::from_iter(adapted).join(" and ")
        ),
    };
    Some(format!("adapters of {but}`flatshard merge` and --save-hf merge them"))
}

/// Refuses adapters in the checkpoint of `resume` that were trained on other weights.
pub fn same_base(s: &Settings, resume: &ResumeFrom, models: &Map<String, Value>) -> Result<()> {
    let [then, now] = [&resume.state.data, models].map(|of| of.get(BASE).and_then(Value::as_str));
    match (&s.model.pretrain, then.zip(now)) {
        (Some(dir), Some((then, now))) if !ckpt::same_weights(then, now) => Err(Error::input(format!(
            "{}: holds adapters of another model than --pretrain {}, whose weights differ: give the model that they were \
             trained on, or another --ckpt-dir",
            resume.dir.display(),
            dir.display()
        ))),
        _ => Ok(()),
    }
}

/// Identifies the weights of the reference model `spec`: the files of its directory, or what they are drawn from.
pub fn fingerprint(s: &Settings, spec: &Spec) -> Result<u64> {
    let mut hash = Xxh3::new();
    hash.update(format!("{spec:?}\n").as_bytes());
    match reference_dir(s) {
        None => hash.update(format!("{:?}", s.run.seed).as_bytes()),
        Some(dir) => {
            let io = |e| Error::io("list", dir, e);
            let mut files: Vec<PathBuf> = fs::read_dir(dir)
                .map_err(io)?
                .map(|entry| entry.map(|e| e.path()))
                .collect::<std::io::Result<_>>()
                .map_err(io)?;
            files.sort();
            for file in files {
                let meta = fs::metadata(&file).map_err(|e| Error::io("read", &file, e))?;
                // The time of the last change of the inode is not what archives and `touch` set.
                let when = [meta.mtime(), meta.mtime_nsec(), meta.ctime(), meta.ctime_nsec(), meta.ino() as i64];
                hash.update(file.as_os_str().as_encoded_bytes());
                hash.update(format!("\0{} {when:?}\n", meta.len()).as_bytes());
            }
        }
    }
    Ok(hash.digest())
}
