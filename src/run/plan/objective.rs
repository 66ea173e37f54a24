//! What a run minimizes, and the reference model. Never reads a weight.
use crate::base::{Error, Result};
use crate::ckpt;
use crate::data::PairKeys;
use crate::engine::{Dpo, EngineOptions, Objective, Rm};
use crate::nn::{Decoder, Spec};
use crate::run::settings::objective::ObjectiveSettings;
use crate::run::settings::value::set;
use crate::run::settings::{ObjectiveName, Settings};
use std::path::Path;

pub fn objective(o: &ObjectiveSettings) -> Result<Objective> {
    Ok(match set(&o.objective, "objective.objective")? {
        ObjectiveName::Sft => Objective::Sft,
        ObjectiveName::Rm => Objective::Rm(Rm),
        ObjectiveName::Dpo => Objective::Dpo(Dpo {
            beta: set(&o.beta, "objective.beta")?,
            label_smoothing: set(&o.label_smoothing, "objective.label_smoothing")?,
            ipo: set(&o.ipo, "objective.ipo")?,
            nll_coef: set(&o.nll_loss_coef, "objective.nll_loss_coef")?,
        }),
    })
}

/// Refuses what a reward model cannot do.
pub fn check(s: &Settings) -> Result<()> {
    if !s.objective.scores() {
        return Ok(());
    }
    let adapters = s.lora.rank.is_some().then_some("--lora-rank: adapters would be saved without the score head");
    let sequence = s.parallel.sequence_parallel == Some(true);
    let sequence = sequence.then_some("--sequence-parallel: the score head needs all rows on each rank of tp");
    let gguf = s.checkpoint.save_gguf.is_some().then_some("--save-gguf: GGUF files hold language models");
    match adapters.or(sequence).or(gguf) {
        Some(what) => Err(Error::input(format!("--objective rm does not support {what}; remove it"))),
        None => Ok(()),
    }
}

/// The fields of pairs, if rows are pairs.
pub fn pairs(o: &ObjectiveSettings) -> Result<Option<PairKeys>> {
    if !o.has_pairs() {
        return Ok(None);
    }
    Ok(Some(PairKeys {
        prompt: set(&o.prompt_key, "objective.prompt_key")?,
        chosen: set(&o.chosen_key, "objective.chosen_key")?,
        rejected: set(&o.rejected_key, "objective.rejected_key")?,
        margin: o.margin_key.clone(),
        bare: o.scores(),
    }))
}

/// The reference model of a run that trains `spec`: of --ref-pretrain, or the initial model. None: the model without
/// its adapters, or an objective without a reference.
pub fn reference(s: &Settings, spec: &Spec) -> Result<Option<Spec>> {
    let Some(dir) = &s.objective.ref_pretrain else {
        let frozen = s.objective.objective == Some(ObjectiveName::Dpo) && s.lora.rank.is_none();
        return Ok(frozen.then(|| spec.clone()));
    };
    let wrong = |what: String| Error::input(format!("--ref-pretrain {}: {what}", dir.display()));
    ckpt::is_model(dir)?;
    let reference = ckpt::hf::read(dir)?;
    if reference.vocab != spec.vocab {
        return Err(wrong(format!(
            "its vocabulary has {} tokens, and the trained model's {}: both models score the same tokens, so name a \
             reference with the trained model's tokenizer",
            reference.vocab, spec.vocab
        )));
    }
    let max_len = set(&s.data.max_len, "data.max_len")?;
    if reference.max_len < max_len {
        return Err(wrong(format!("it has {} positions, fewer than --max-len {max_len}", reference.max_len)));
    }
    reference.validate()?;
    Ok(Some(reference))
}

/// The directory that the reference model is read from; none: it has the initial weights.
pub fn reference_dir(s: &Settings) -> Option<&Path> {
    s.objective.ref_pretrain.as_deref().or(s.model.pretrain.as_deref())
}

/// Checks the files of the reference model.
pub fn inspect(s: &Settings, engine: &EngineOptions) -> Result<()> {
    match (&engine.reference, reference_dir(s)) {
        (Some(spec), Some(dir)) => ckpt::inspect_model(dir, spec, Decoder::new(spec.clone())?.layouts()),
        _ => Ok(()),
    }
}
