//! Defaults of runs that start from a pretrained model, by task: what applies where neither a flag nor a file says
//! otherwise. Never applies to training from nothing, whose defaults are `defaults.yaml`.
//!
//! [Note: defaults by task] A pretrained model is damaged by a learning rate for training from nothing. The values are
//! those that other trainers use for the task (docs/finetune.md names them); adapters learn at ten times the rate of
//! the model, as their authors found, and those of DPO and KTO, whose runs are one pass, at a hundred times. Warmup is
//! a fraction of the run, because small data sets make short runs. The length of sequences follows from the longest
//! row of the data, up to `TaskDefaults::max_len` and the model's positions; a micro-batch then holds as many sequences
//! as `MICRO_BATCH` allows, and gradient accumulation makes up the step. Rows are not packed: sequences are
//! concatenated without padding, so packing would only make steps larger.
use super::effect;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

/// The defaults of a task.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct TaskDefaults {
    pub name: &'static str,
    pub lr: f64,
    pub warmup_ratio: f64,
    /// Passes over rows. Text has no rows: its runs have the steps of a run from nothing.
    pub epochs: f64,
    /// The longest sequence.
    pub max_len: usize,
}

const SFT: TaskDefaults =
    TaskDefaults { name: "full fine-tune", lr: 2e-5, warmup_ratio: 0.03, epochs: 3.0, max_len: 2048 };
const DPO: TaskDefaults = TaskDefaults { name: "DPO", lr: 5e-7, warmup_ratio: 0.1, epochs: 1.0, ..SFT };

/// Objective, or `distill`; the defaults of training the whole model, and of adapters.
pub const TASKS: [(&str, TaskDefaults, TaskDefaults); 6] = [
    ("sft", SFT, TaskDefaults { name: "LoRA fine-tune", lr: 2e-4, ..SFT }),
    (
        "distill",
        TaskDefaults { name: "distillation", ..SFT },
        TaskDefaults { name: "distillation with LoRA", lr: 2e-4, ..SFT },
    ),
    ("dpo", DPO, TaskDefaults { name: "DPO with LoRA", lr: 5e-5, ..DPO }),
    ("kto", TaskDefaults { name: "KTO", ..DPO }, TaskDefaults { name: "KTO with LoRA", lr: 5e-5, ..DPO }),
    (
        "grpo",
        TaskDefaults { name: "GRPO", lr: 1e-6, warmup_ratio: 0.0, ..DPO },
        TaskDefaults { name: "GRPO with LoRA", lr: 5e-5, warmup_ratio: 0.0, ..DPO },
    ),
    (
        "rm",
        TaskDefaults { name: "reward model", lr: 9e-6, warmup_ratio: 0.03, ..DPO },
        TaskDefaults { name: "reward model with LoRA", lr: 1e-4, warmup_ratio: 0.03, ..DPO },
    ),
];

/// Sequences of a step on each data-parallel rank.
pub const SEQUENCES: usize = 8;
/// Tokens of a micro-batch.
pub const MICRO_BATCH: usize = 4096;

/// The longest sequence of text, which has no rows.
pub const MAX_TEXT: usize = 1024;

/// The task of a run, and what it decided.
#[derive(Serialize, Deserialize, Clone, Debug, PartialEq)]
pub struct RunTask {
    pub name: String,
    /// The default learning rate.
    pub lr: f64,
    /// Settings that have the task's default, as `name value`.
    pub taken: Vec<String>,
    /// Settings of the table that were given.
    pub given: Vec<String>,
    /// The length of sequences follows from the data, up to this.
    pub max_len: Option<usize>,
    /// The number of steps follows from these passes over rows.
    pub epochs: Option<f64>,
    /// The batch follows from the length of sequences.
    pub batch: bool,
}

/// Replaces the defaults that depend on the task of `requested`, the settings of files and flags. `tunes`: a stage
/// before was a fine-tune. None: the run is no fine-tune.
pub fn imply(requested: &Value, tunes: bool, defaults: &mut Value) -> Option<RunTask> {
    let adapts = &requested["lora"]["adapter"]; // and names the model, unless a flag does
    if !tunes && requested["model"]["pretrain"].is_null() && adapts.is_null() {
        return None;
    }
    let objective = requested["objective"]["objective"].as_str().unwrap_or("sft");
    let objective = if requested["objective"]["teacher"].is_null() { objective } else { "distill" };
    let (_, full, adapters) = TASKS.into_iter().find(|(name, ..)| *name == objective)?;
    let task = if requested["lora"]["rank"].is_null() && adapts.is_null() { full } else { adapters };
    let given = |section: &str, key: &str| !requested[section][key].is_null();
    let values = [
        ("optim", "lr", json!(task.lr)),
        ("optim", "lr_scheduler", json!("cosine")),
        ("optim", "weight_decay", json!(0.0)),
        ("optim", "warmup_ratio", json!(task.warmup_ratio)),
        ("run", "eval_on_start", json!(true)),
    ];
    let (mut taken, mut kept) = (Vec::new(), Vec::new());
    let (warms, adaptive) = (given("optim", "warmup_steps"), requested["optim"]["optimizer"] != "sgd");
    let evaluates = objective != "grpo" || given("data", "eval_dataset");
    let applies = |key: &str| match key {
        "warmup_ratio" => !warms,
        "lr" => adaptive,
        "eval_on_start" => evaluates,
        _ => true,
    };
    for (section, key, value) in values.into_iter().filter(|(_, key, _)| applies(key)) {
        if given(section, key) {
            kept.push(key.to_string());
            continue;
        }
        taken.push(format!("{key} {}", value.to_string().trim_matches('"')));
        effect::supersede(defaults, &json!({ section: { key: value } }));
        defaults[section][key] = value;
    }
    let other = [("optim", "warmup_steps"), ("data", "max_len"), ("run", "epochs"), ("run", "max_steps")];
    kept.extend(other.into_iter().filter(|(section, key)| given(section, key)).map(|(_, key)| key.to_string()));
    let max_len = (!given("data", "max_len")).then_some(task.max_len);
    if max_len.is_some() {
        defaults["data"]["max_len"] = Value::Null;
    }
    let epochs = (!given("run", "epochs") && !given("run", "max_steps")).then_some(task.epochs);
    let batch = ["batch_size", "grad_accum", "train_batch_size"].iter().all(|key| !given("batch", key));
    Some(RunTask { name: task.name.into(), lr: task.lr, taken, given: kept, max_len, epochs, batch })
}

impl RunTask {
    /// Sequences of a micro-batch, and micro-batches of a step, for `rows` of at most `max_len` tokens on `ranks`.
    pub fn batch(&self, max_len: usize, rows: u64, ranks: usize) -> (usize, usize) {
        let all = SEQUENCES.min(rows as usize / ranks.max(1)).max(1);
        let micro = (MICRO_BATCH / max_len.max(1)).clamp(1, all);
        (micro, all / micro)
    }
}

#[cfg(test)]
mod tests {
    use super::super::defaults::defaults;
    use super::*;

    fn implied(requested: Value) -> (Option<RunTask>, Value) {
        let mut defaults = defaults().clone();
        let task = imply(&requested, false, &mut defaults);
        (task, defaults)
    }

    #[test]
    fn a_task_changes_what_was_not_given() {
        let (none, unchanged) = implied(json!({}));
        assert_eq!((none, unchanged), (None, defaults().clone()));
        let (task, made) = implied(json!({"model": {"pretrain": "m"}, "lora": {"rank": 8}}));
        let task = task.unwrap();
        assert_eq!(task.name, "LoRA fine-tune");
        assert_eq!((task.max_len, task.epochs, task.batch, task.given.len()), (Some(2048), Some(3.0), true, 0));
        assert_eq!((&made["optim"]["lr"], &made["optim"]["warmup_steps"]), (&json!(2e-4), &Value::Null));
        assert_eq!((&made["optim"]["warmup_ratio"], &made["data"]["max_len"]), (&json!(0.03), &Value::Null));
        let given = json!({
            "model": {"pretrain": "m"}, "objective": {"objective": "dpo"}, "optim": {"lr": 1.0, "warmup_steps": 3},
            "data": {"max_len": 9}, "run": {"max_steps": 5}, "batch": {"grad_accum": 2},
        });
        let (task, made) = implied(given);
        let task = task.unwrap();
        assert_eq!((task.name.as_str(), task.max_len, task.epochs, task.batch), ("DPO", None, None, false));
        assert_eq!(task.given, ["lr", "warmup_steps", "max_len", "max_steps"]);
        assert_eq!(
            (&made["optim"]["lr"], &made["data"]["max_len"]),
            (&json!(0.001), &json!(256)),
            "flags replace them"
        );
        assert_eq!(made["optim"]["warmup_ratio"], Value::Null);
        assert_eq!(implied(json!({"lora": {"adapter": "a"}})).0.unwrap().name, "LoRA fine-tune");
        let distill = json!({"model": {"pretrain": "m"}, "objective": {"teacher": "t"}});
        assert_eq!(implied(distill).0.unwrap().name, "distillation");
    }

    #[test]
    fn batches_fit_the_length_of_sequences_and_the_rows() {
        let task = implied(json!({"model": {"pretrain": "m"}})).0.unwrap();
        assert_eq!(task.batch(200, 1000, 2), (8, 1));
        assert_eq!(task.batch(2048, 1000, 2), (2, 4));
        assert_eq!(task.batch(9000, 1000, 2), (1, 8));
        assert_eq!(task.batch(200, 6, 2), (3, 1));
        assert_eq!(task.batch(200, 1, 2), (1, 1));
    }
}
