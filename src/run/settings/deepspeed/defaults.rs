//! DeepSpeed's defaults for keys that its file omits. Never override the file, a flag or a configuration file.
//!
//! [Note: DeepSpeed's versions] The values are from 0.19.2, recorded by `tests/golden/deepspeed.py`. 0.19.8 differs in
//! one: since 0.19.3 a file without `gradient_clipping` clips at 1.
//!
//! Without an `optimizer` or `scheduler` block, DeepSpeed uses what the program passes: the values of the task if a
//! pretrained model is trained, as the Trainer would pass its own. From nothing the optimizer's defaults still apply,
//! and the learning rate is constant, as in DeepSpeed when the program passes no scheduler.
use serde_json::{Value, json};

/// A key of the file; section and name of the setting; its default.
type DefaultRow = (&'static str, &'static str, &'static str, Value);

/// Defaults of the keys that `file` omits, and of optimizer keys set to "auto", for which the Hugging Face Trainer has
/// the same values except lr. `optimizer`: the flag's value; `fp16`: whether it is enabled; `tuned`: a pretrained model
/// is trained.
pub(super) fn missing(file: &Value, optimizer: Option<&str>, fp16: bool, tuned: bool) -> Vec<DefaultRow> {
    let optimizer = file["optimizer"]["type"].as_str().or(optimizer).unwrap_or("AdamW");
    let mut rows = vec![("gradient_clipping", "optim", "grad_clip", json!(0))]; // runtime/constants.py
    match optimizer.to_lowercase().as_str() {
        "sgd" => rows.extend(sgd()),
        _ => rows.extend(adam(file["optimizer"]["params"]["torch_adam"] == true)),
    }
    match file["scheduler"]["type"].as_str() {
        None => rows.extend(unscheduled()),
        Some(kind) => rows.extend(warmup(kind)),
    }
    if fp16 {
        rows.extend(scaler());
    }
    let passed =
        |key: &str| ["optimizer", "scheduler"].iter().any(|block| key.starts_with(block) && file[*block].is_null());
    rows.retain(|(key, ..)| match file.pointer(&format!("/{}", key.replace('.', "/"))) {
        None | Some(Value::Null) => !(tuned && passed(key)),
        Some(value) => value == "auto" && key.starts_with("optimizer.") && !tuned,
    });
    rows
}

/// `ops/adam`: `FusedAdam` and `DeepSpeedCPUAdam`; with `torch_adam` `torch.optim.AdamW`.
fn adam(torch: bool) -> Vec<DefaultRow> {
    vec![
        ("optimizer.params.lr", "optim", "lr", json!(1e-3)),
        ("optimizer.params.betas", "optim", "betas", json!([0.9, 0.999])),
        ("optimizer.params.eps", "optim", "eps", json!(1e-8)),
        ("optimizer.params.weight_decay", "optim", "weight_decay", json!(if torch { 1e-2 } else { 0.0 })),
    ]
}

/// `torch.optim.SGD`.
fn sgd() -> Vec<DefaultRow> {
    vec![
        ("optimizer.params.lr", "optim", "lr", json!(1e-3)),
        ("optimizer.params.momentum", "optim", "momentum", json!(0)),
        ("optimizer.params.weight_decay", "optim", "weight_decay", json!(0)),
    ]
}

fn unscheduled() -> Vec<DefaultRow> {
    vec![
        ("scheduler.type", "optim", "lr_scheduler", json!("constant")),
        ("scheduler.params.warmup_num_steps", "optim", "warmup_steps", json!(0)),
    ]
}

/// `runtime/lr_schedules.py`: the classes `WarmupLR`, `WarmupDecayLR` and `WarmupCosineLR`.
fn warmup(kind: &str) -> Vec<DefaultRow> {
    let mut rows = vec![
        ("scheduler.params.warmup_num_steps", "optim", "warmup_steps", json!(1000)),
        ("scheduler.params.warmup_type", "optim", "warmup_type", json!("log")),
    ];
    if kind == "WarmupCosineLR" {
        rows.push(("scheduler.params.cos_min_ratio", "optim", "min_lr_ratio", json!(1e-4)));
    }
    rows
}
/// Also from `lr_schedules.py`: the peak of `WarmupDecayLR`, regardless of the optimizer's lr. The other two schedules
/// use the optimizer's.
pub(super) const DECAY_MAX_LR: f64 = 1e-3;

/// `runtime/precision_config.py`: `DeepSpeedFP16Config`, where its defaults differ from ours.
fn scaler() -> Vec<DefaultRow> {
    vec![
        ("fp16.loss_scale_window", "precision", "loss_scale_window", json!(1000)),
        ("fp16.hysteresis", "precision", "hysteresis", json!(2)),
    ]
}
