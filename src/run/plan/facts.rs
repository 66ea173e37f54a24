//! Facts of a plan that `idle.tsv` refers to by name. Never judges a setting.
use crate::base::Result;
use crate::comm::env::RankEnv;
use crate::data::Dataset;
use crate::nn::{Decoder, Tuning};
use crate::run::plan::engine;
use crate::run::plan::ranks::RankPlan;
use crate::run::plan::sized::SizedEngine;
use crate::run::settings::{FsdpImpl, Settings, StrategyName, idle};
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

/// What the facts of a training run are about.
pub struct RunFacts<'a> {
    pub settings: &'a Settings,
    /// `max_steps` as the user gave it.
    pub asked: Option<u64>,
    pub ranks: &'a RankPlan,
    /// This process's rank, if an external launcher started it.
    pub launched: Option<&'a RankEnv>,
    pub dataset: &'a Dataset,
    pub sized: &'a SizedEngine,
}

impl RunFacts<'_> {
    /// What to say of settings without effect; those that must have one are refused.
    pub fn idle(&self) -> Result<Vec<String>> {
        let mut as_asked = self.settings.clone();
        as_asked.run.max_steps = self.asked;
        let mut facts = of_ranks(self.settings, self.ranks, self.launched);
        self.of_data(&mut facts);
        self.of_tuning(&mut facts)?;
        self.of_units(&mut facts)?;
        idle::plan(&as_asked, &facts)
    }

    /// Facts of the data and the run's length.
    fn of_data(&self, facts: &mut Value) {
        let (run, dataset) = (&self.settings.run, self.dataset);
        facts["data"] = match (dataset.has_rows_of_its_own(), dataset.last_of_a_stream(), dataset.loss_floor()) {
            (true, None, _) => "rows",
            (true, Some(_), _) => "mixed",
            (_, _, Some(_)) => "synthetic",
            _ => "text",
        }
        .into();
        facts["sources"] = if dataset.shares().is_none() { "one" } else { "several" }.into();
        facts["steps"] = json!(run.max_steps);
        if self.asked.is_some() && run.epochs.is_some() {
            facts["ends"] = if self.asked == run.max_steps { "max_steps" } else { "epochs" }.into();
        }
    }

    /// Whether max-live-parameters keeps units of a rank's part of the model unsharded for backward.
    fn of_units(&self, facts: &mut Value) -> Result<()> {
        let fsdp = &self.settings.fsdp;
        let Some(max_live) = fsdp.max_live_parameters else { return Ok(()) };
        let (wrap, limit_all_gathers) = (engine::wrap(fsdp)?, fsdp.limit_all_gathers != Some(false));
        let sharded = ShardedOptions { max_live, wrap, limit_all_gathers, ..ShardedOptions::default() };
        facts["kept"] = if sharded.keeps_more(self.sized.of_rank.layouts()) { "more" } else { "none" }.into();
        Ok(())
    }

    /// Whether the model would be trained the same without one list of its tuning.
    fn of_tuning(&self, facts: &mut Value) -> Result<()> {
        let (decoder, tuning) = (&self.sized.decoder, &self.sized.options.tuning);
        let learns = |decoder: &Decoder| -> Vec<_> {
            let segments = decoder.layouts().iter().flat_map(|layout| &layout.segments);
            segments.map(|s| s.is_trained().then_some((s.decay, s.lr_scale))).collect()
        };
        let all = learns(decoder);
        let Tuning { freeze, unfreeze, no_decay, lr_scale, .. } = tuning;
        for (name, is_empty, without) in [
            ("freeze", freeze.is_empty(), Tuning { freeze: Vec::new(), ..tuning.clone() }),
            ("unfreeze", unfreeze.is_empty(), Tuning { unfreeze: Vec::new(), ..tuning.clone() }),
            ("no_decay", no_decay.is_empty(), Tuning { no_decay: Vec::new(), ..tuning.clone() }),
            ("lr_scale", lr_scale.is_empty(), Tuning { lr_scale: Vec::new(), ..tuning.clone() }),
        ] {
            let same = is_empty || learns(&Decoder::tuned(decoder.spec().clone(), &without)?) == all;
            facts[name] = if same { "same" } else { "other" }.into();
        }
        Ok(())
    }
}
