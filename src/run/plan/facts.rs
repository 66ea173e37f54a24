//! What a plan knows and settings do not, by the names that `idle.tsv` has for it. Never judges a setting.
use crate::base::Result;
use crate::comm::env::RankEnv;
use crate::data::Dataset;
use crate::nn::{Decoder, Spec, Tuning};
use crate::run::plan::ranks::RankPlan;
use crate::run::settings::{Settings, StrategyName};
use serde_json::{Value, json};
use std::io::IsTerminal;

/// The machine and its ranks. `launched`: this process's rank, where another launcher started it.
pub fn of_ranks(s: &Settings, ranks: &RankPlan, launched: Option<&RankEnv>) -> Value {
    let (mesh, word) = (&ranks.mesh, |yes: bool, a: &'static str, b: &'static str| if yes { a } else { b });
    let replicated = s.run.strategy == Some(StrategyName::Ddp);
    let copies = mesh.dp_replicate > 1 || mesh.tp > 1 || replicated && mesh.world() > 1;
    json!({
        "device": ranks.device,
        "hosts": word(ranks.hosts() == 1, "one", "several"),
        "ranks": word(mesh.world() == 1, "one", "several"),
        "gradients": word(mesh.world() == mesh.tp, "own", "summed"),
        "copies": word(copies, "some", "none"),
        "launcher": word(launched.is_none(), "own", "theirs"),
        "stderr": word(std::io::stderr().is_terminal(), "terminal", "lines"),
    })
}

/// A training run's data and length. `max_steps`: what was asked for.
pub fn of_data(facts: &mut Value, s: &Settings, dataset: &Dataset, max_steps: Option<u64>) {
    facts["data"] = match (dataset.has_rows_of_its_own(), dataset.last_of_a_stream(), dataset.loss_floor()) {
        (true, None, _) => "rows",
        (true, Some(_), _) => "mixed",
        (_, _, Some(_)) => "synthetic",
        _ => "text",
    }
    .into();
    facts["sources"] = if dataset.shares().is_none() { "one" } else { "several" }.into();
    facts["steps"] = json!(s.run.max_steps);
    if max_steps.is_some() && s.run.epochs.is_some() {
        facts["ends"] = if max_steps == s.run.max_steps { "max_steps" } else { "epochs" }.into();
    }
}

/// What tuning does to a model: whether it would learn alike without a part of it.
pub fn of_tuning(facts: &mut Value, spec: &Spec, tuning: &Tuning) -> Result<()> {
    let learns = |tuning: &Tuning| -> Result<Vec<_>> {
        let decoder = Decoder::tuned(spec.clone(), tuning)?;
        let segments = decoder.layouts().iter().flat_map(|layout| &layout.segments);
        Ok(segments.map(|s| s.trainable.then_some((s.decay, s.lr_scale))).collect())
    };
    let all = learns(tuning)?;
    for (name, without) in [
        ("freeze", Tuning { freeze: Vec::new(), ..tuning.clone() }),
        ("no_decay", Tuning { no_decay: Vec::new(), ..tuning.clone() }),
        ("lr_scale", Tuning { lr_scale: Vec::new(), ..tuning.clone() }),
    ] {
        facts[name] = if learns(&without)? == all { "same" } else { "other" }.into();
    }
    Ok(())
}
