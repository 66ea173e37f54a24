//! What checkpoints, metrics and `--print-config` say of a plan. Never decides anything.
use super::training::Plan;
use super::{bytes, objective, resume, schedule, split};
use crate::base::{CATEGORIES, Category, DType, Error, Result};
use crate::ckpt::TrainerState;
use crate::comm::MeshSizes;
use crate::optim::Rule;
use crate::run::settings::defaults::defaults;
use crate::run::settings::{PrecisionName, Settings};
use serde_json::{Map, Value, json};

/// Key of the settings that decide what is learned, where they are not the defaults.
const SETTINGS: &str = "settings";

/// Such settings, by section. What follows from the data, the models and the schedule is recorded apart.
const LEARN: [(&str, &[&str]); 8] = [
    (
        "objective",
        &[
            "beta",
            "label_smoothing",
            "ipo",
            "nll_loss_coef",
            "desirable_weight",
            "undesirable_weight",
            "reward",
            "reward_weights",
            "loss_type",
            "clip_low",
            "clip_high",
            "updates_per_rollout",
            "distill_alpha",
            "distill_temperature",
        ],
    ),
    ("data", &["group_by_length"]),
    ("generate", &["temperature", "top_k", "top_p", "min_p", "stop", "group_size", "max_new_tokens"]),
    ("lora", &["dropout"]),
    ("model", &["dropout", "router_aux_loss_coef"]),
    ("optim", &["min_lr_ratio"]),
    ("precision", &["reduce_dtype", "fp8_exclude"]),
    ("tune", &["freeze", "unfreeze", "no_decay", "lr_scale"]),
];

impl Plan {
    /// The settings of [`LEARN`] that are not the defaults. None: all are.
    fn changed(&self) -> Option<Map<String, Value>> {
        let (all, defaults) = (serde_json::to_value(&self.settings).ok()?, defaults());
        let each = LEARN.iter().flat_map(|(section, keys)| keys.iter().map(move |key| (section, key)));
        let differ = each.filter(|(section, key)| {
            let value = &all[**section][**key];
            !value.is_null() && *value != defaults[**section][**key]
        });
        let changed: Map<String, Value> =
            differ.map(|(section, key)| (key.to_string(), all[*section][*key].clone())).collect();
        (!changed.is_empty()).then_some(changed)
    }

    /// The progress of the run, as recorded in checkpoints.
    pub fn trainer_state(&self, step: u64, samples_consumed: u64, trained_tokens: u64) -> TrainerState {
        let object = |value: Value| value.as_object().cloned().unwrap_or_default();
        let (o, s) = (&self.settings.optim, &self.schedule);
        let mut schedule = object(json!({
            "kind": o.lr_scheduler,
            "lr": s.peak,
            "warmup_steps": s.warmup,
            "warmup_type": o.warmup_type,
            "total_steps": s.total,
            "grad_clip": o.grad_clip,
        }));
        schedule.extend(s.decay.map(|steps| ("decay_steps".into(), steps.into())));
        schedule.extend(o.warmup_ratio.map(|ratio| (schedule::RATIO.into(), ratio.into())));
        let mut data = object(json!({
            "dataset": self.dataset.report().what,
            "rows": self.dataset.rows(),
            "max_len": self.dataset.max_len(),
            "fingerprint": self.dataset.fingerprint_text(),
            (split::HELD_OUT): self.split.recorded(),
            "shuffle": self.settings.data.shuffle,
            "packing_samples": self.settings.data.packing_samples,
            "batch_size": self.settings.batch.batch_size,
            "grad_accum": self.settings.batch.grad_accum,
        }));
        if self.dataset.kind().is_judged() {
            data.insert("objective".into(), json!(self.settings.objective.objective));
            data.insert("reference".into(), json!(objective::reference_dir(&self.settings)));
        }
        data.extend(self.changed().map(|changed| (SETTINGS.into(), changed.into())));
        if !self.settings.hub.commits.is_empty() {
            data.insert(resume::HUB.into(), json!(self.settings.hub.commits));
        }
        data.extend(self.models.clone());
        if self.settings.lora.load_in_4bit == Some(true) {
            data.insert("load_in_4bit".into(), true.into());
        }
        data.extend(self.dataset.shares().map(|shares| ("weights".into(), shares.into())));
        TrainerState {
            step,
            samples_consumed,
            trained_tokens,
            optimizer_steps: 0, // set by the checkpointer
            seed: self.engine.seed,
            rng: "philox4x32-10".into(),
            optimizer: object(match self.engine.rule {
                Rule::AdamW { moments, .. } => {
                    let mut all = json!({"kind": self.engine.rule.name(), "betas": o.betas, "eps": o.eps,
                        "weight_decay": o.weight_decay});
                    // Checkpoints are f32: a run that stores another dtype converts them, and reports the difference.
                    for (key, dtype) in [("moments_dtype", moments), ("master_dtype", self.engine.strategy.masters())] {
                        if dtype != DType::F32 {
                            all[key] = json!(if dtype == DType::U8 { "8bit" } else { dtype.name() });
                        }
                    }
                    all
                }
                Rule::Muon { .. } => {
                    json!({"kind": self.engine.rule.name(), "momentum": o.muon_momentum, "ns_steps": o.muon_ns_steps,
                        "betas": o.betas, "eps": o.eps, "weight_decay": o.weight_decay})
                }
                Rule::Sgd { .. } => {
                    json!({"kind": self.engine.rule.name(), "momentum": o.momentum, "weight_decay": o.weight_decay})
                }
            }),
            schedule,
            scaler: None, // set by the loop
            world: self.ranks.mesh.world(),
            strategy: self.engine.strategy.name().into(),
            precision: self.settings.precision.precision.map_or("", PrecisionName::name).into(),
            data,
            evaluations: None,
            rollouts: None, // set by the loop
            run: None,      // set by the checkpointer
        }
    }

    /// The output of `--print-config`.
    pub fn print(&self) -> Result<String> {
        let plan = json!({
            "strategy": self.engine.strategy.name(),
            "world_size": self.ranks.mesh.world(),
            "mesh": mesh(&self.ranks.mesh),
            "params": self.size.params,
            "trainable_params": self.size.trainable,
            "steps": self.steps(),
            "tokens_per_step": self.tokens_per_step()?,
            "dataset": self.dataset.report().to_string(),
            "eval_dataset": self.eval.as_ref().map(|eval| eval.report().to_string()),
            "resume": self.resume.as_ref().map(|r| &r.dir),
            "max_live_parameters": self.live,
            "texts_at_once": self.engine.samples.map(|size| size.texts),
            "planned_bytes": planned(&self.size.planned),
        });
        printed(&self.settings, plan)
    }
}

pub fn mesh(sizes: &MeshSizes) -> Value {
    let MeshSizes { dp_replicate, dp_shard, sp, tp, ep } = sizes;
    let mut mesh = json!({"dp_replicate": dp_replicate, "dp_shard": dp_shard, "sp": sp, "tp": tp});
    if *ep > 1 {
        mesh["ep"] = json!(ep);
    }
    mesh
}

/// Bytes of a rank, by the names of the categories.
pub fn planned(bytes: &[(Category, usize)]) -> Value {
    let by_name = CATEGORIES.iter().filter_map(|(category, name)| {
        let (_, bytes) = bytes.iter().find(|(c, _)| c == category)?;
        Some((name.to_string(), json!(bytes)))
    });
    let mut map: serde_json::Map<String, Value> = by_name.collect();
    map.insert("total".into(), json!(bytes::on_device(bytes)));
    Value::Object(map)
}

/// The resolved settings, without null values; names of the hub have their commit.
pub fn config(s: &Settings) -> Value {
    let mut config = json!(s);
    for section in config.as_object_mut().into_iter().flat_map(|c| c.values_mut()) {
        if let Some(section) = section.as_object_mut() {
            section.retain(|_, value| !value.is_null());
        }
    }
    s.hub.restore(&mut config);
    config
}

/// A file that `--config` accepts, with what is planned next to the settings.
pub fn printed(s: &Settings, plan: Value) -> Result<String> {
    let mut config = config(s);
    config["plan"] = plan;
    serde_saphyr::to_string(&config).map_err(|e| Error::Run(format!("print-config: {e}")))
}
