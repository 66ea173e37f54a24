//! Facts of a plan that `idle.tsv` refers to by name. Never judges a setting.
use crate::base::Result;
use crate::comm::env::RankEnv;
use crate::data::Dataset;
use crate::nn::{Decoder, Tuning};
use crate::run::plan::engine;
use crate::run::plan::ranks::RankPlan;
use crate::run::settings::{FsdpImpl, Settings, StrategyName};
use crate::store::{Offload, ShardedOptions};
use serde_json::{Value, json};
use std::io::IsTerminal;

/// Facts of the machine and its ranks. `launched`: this process's rank, if an external launcher started it.
pub fn of_ranks(s: &Settings, ranks: &RankPlan, launched: Option<&RankEnv>) -> Value {
    let (mesh, word) = (&ranks.mesh, |yes: bool, a: &'static str, b: &'static str| if yes { a } else { b });
    let replicated = s.run.strategy == Some(StrategyName::Ddp);
    let sharded = !replicated && s.fsdp.fsdp_impl != Some(FsdpImpl::Reference);
    let slots = mesh.fsdp() * mesh.dp_replicate > 1 || engine::offload(&s.fsdp, ranks.device) >= Offload::Gradients;
    let copies = mesh.dp_replicate > 1 || mesh.tp > 1 || replicated && mesh.world() > 1;
    json!({
        "device": ranks.device,
        "hosts": word(ranks.hosts() == 1, "one", "several"),
        "ranks": word(mesh.world() == 1, "one", "several"),
        "slots": word(sharded && !slots, "none", "some"),
        "gradients": word(mesh.world() == mesh.tp, "own", "summed"),
        "copies": word(copies, "some", "none"),
        "launcher": word(launched.is_none(), "own", "theirs"),
        "stderr": word(std::io::stderr().is_terminal(), "terminal", "lines"),
    })
}

/// Facts of a training run's data and length. `max_steps`: as given by the user.
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

/// Whether max-live-parameters keeps units of a rank's part of the model, `decoder`, unsharded for backward.
pub fn of_units(facts: &mut Value, s: &Settings, decoder: &Decoder) -> Result<()> {
    let Some(max_live) = s.fsdp.max_live_parameters else { return Ok(()) };
    let (wrap, limit_all_gathers) = (engine::wrap(&s.fsdp)?, s.fsdp.limit_all_gathers != Some(false));
    let sharded = ShardedOptions { max_live, wrap, limit_all_gathers, ..ShardedOptions::default() };
    facts["kept"] = if sharded.keeps_more(decoder.layouts()) { "more" } else { "none" }.into();
    Ok(())
}

/// Whether `decoder`, made with `tuning`, would train the same without one list of it.
pub fn of_tuning(facts: &mut Value, decoder: &Decoder, tuning: &Tuning) -> Result<()> {
    let learns = |decoder: &Decoder| -> Vec<_> {
        let segments = decoder.layouts().iter().flat_map(|layout| &layout.segments);
        segments.map(|s| s.is_trained().then_some((s.decay, s.lr_scale))).collect()
    };
    let all = learns(decoder);
    let (freeze, no_decay, lr_scale) = (&tuning.freeze, &tuning.no_decay, &tuning.lr_scale);
    for (name, is_empty, without) in [
        ("freeze", freeze.is_empty(), Tuning { freeze: Vec::new(), ..tuning.clone() }),
        ("no_decay", no_decay.is_empty(), Tuning { no_decay: Vec::new(), ..tuning.clone() }),
        ("lr_scale", lr_scale.is_empty(), Tuning { lr_scale: Vec::new(), ..tuning.clone() }),
    ] {
        let same = is_empty || learns(&Decoder::tuned(decoder.spec().clone(), &without)?) == all;
        facts[name] = if same { "same" } else { "other" }.into();
    }
    Ok(())
}
