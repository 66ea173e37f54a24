//! Settings of runs for the page: a single run's hyperparameters, or what differs between several. Never judges them.
use crate::summary::RunRow;
use serde_json::{Value, json};

/// Sections and keys that make a run what it is.
const MAIN: [(&str, &str); 20] = [
    ("model", "pretrain"),
    ("objective", "objective"),
    ("data", "dataset"),
    ("data", "max_len"),
    ("data", "packing_samples"),
    ("run", "epochs"),
    ("run", "max_steps"),
    ("run", "seed"),
    ("batch", "batch_size"),
    ("batch", "grad_accum"),
    ("optim", "optimizer"),
    ("optim", "lr"),
    ("optim", "lr_scheduler"),
    ("optim", "warmup_steps"),
    ("optim", "weight_decay"),
    ("optim", "grad_clip"),
    ("precision", "precision"),
    ("lora", "rank"),
    ("lora", "alpha"),
    ("lora", "target_modules"),
];
/// Places of outputs, which differ between any two runs.
const OUTPUTS: [&str; 7] =
    ["metrics_path", "ckpt_dir", "save_hf", "save_adapter", "save_gguf", "log_file", "tensorboard"];
const MOST: usize = 40;

/// Names of the runs, and rows of a setting and its value in each.
pub fn table(rows: &[&RunRow]) -> Value {
    let keys: Vec<(String, String)> = match rows {
        [] => vec![],
        [_] => MAIN.iter().map(|(section, key)| (section.to_string(), key.to_string())).collect(),
        rows => differing(rows),
    };
    let of = |row: &RunRow, (section, key): &(String, String)| text(&row.curve.header.config[section][key]);
    let line = |at: &(String, String)| {
        let values: Vec<String> = rows.iter().map(|row| of(row, at)).collect();
        let known = values.iter().any(|value| !value.is_empty());
        known.then(|| std::iter::once(format!("{}.{}", at.0, at.1)).chain(values).collect::<Vec<_>>())
    };
    let names: Vec<&str> = rows.iter().map(|row| row.name.as_str()).collect();
    json!({"runs": names, "rows": keys.iter().filter_map(line).take(MOST).collect::<Vec<_>>()})
}

/// Whether runs differ in what or how they learn, and not only in how the work is shared. Precision is part of a
/// strategy where strategies differ too.
pub fn learn_differently(rows: &[&RunRow]) -> bool {
    let config = &rows[0].curve.header.config;
    let samples = config["objective"]["objective"] == "grpo" || config["objective"]["on_policy"] == true;
    let global_batch = |row: &RunRow| {
        let (batch, mesh) = (&row.curve.header.config["batch"], &row.curve.header.mesh);
        let size = |axis: &str| mesh.get(axis).copied().unwrap_or(1);
        let rows = batch["batch_size"].as_u64()? * batch["grad_accum"].as_u64().unwrap_or(1);
        Some(rows * size("dp_replicate") * size("dp_shard"))
    };
    let learns = |section: &str, key: &str| match section {
        "model" | "objective" | "optim" | "tune" | "lora" => true,
        "data" => !key.starts_with("cache"),
        "run" => ["seed", "epochs", "max_steps"].contains(&key),
        // Ranks that share samples have larger batches in steps of the same size.
        "batch" => rows.iter().any(|row| global_batch(row) != global_batch(rows[0])),
        "generate" => samples,
        _ => false,
    };
    let strategy = |section: &str, key: &str| match section {
        "fsdp" | "zero" | "parallel" => true,
        "run" => ["strategy", "nproc_per_node", "num_nodes", "device"].contains(&key),
        _ => false,
    };
    let keys = differing(rows);
    let any = |of: &dyn Fn(&str, &str) -> bool| keys.iter().any(|(section, key)| of(section, key));
    any(&learns) || any(&|section, _| section == "precision") && !any(&strategy)
}

fn differing(rows: &[&RunRow]) -> Vec<(String, String)> {
    let mut keys: Vec<(String, String)> = vec![];
    for row in rows {
        for (section, body) in row.curve.header.config.as_object().into_iter().flatten() {
            for key in body.as_object().into_iter().flatten().map(|(key, _)| key) {
                let at = (section.clone(), key.clone());
                if !OUTPUTS.contains(&key.as_str()) && !keys.contains(&at) {
                    keys.push(at);
                }
            }
        }
    }
    let value = |row: &RunRow, (section, key): &(String, String)| row.curve.header.config[section][key].clone();
    keys.retain(|at| rows.iter().any(|row| value(row, at) != value(rows[0], at)));
    keys
}

/// The value as in a settings file; empty for null.
fn text(value: &Value) -> String {
    match value {
        Value::Null => String::new(),
        Value::String(text) => text.clone(),
        Value::Array(items) => items.iter().map(text).collect::<Vec<_>>().join(" "),
        other => other.to_string(),
    }
}
