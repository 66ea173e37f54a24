//! Compares the metrics files of two runs, and computes the rate of one. Needs no GPU. Never trains.
use crate::report::PartReport;
use flatshard::base::{Error, Result};
use serde_json::{Value, json};

fn steps(path: &str) -> Result<Vec<Value>> {
    let text = std::fs::read_to_string(path).map_err(|e| Error::io("read", path, e))?;
    let lines = text.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok());
    let steps: Vec<Value> = lines.filter(|v| v["event"] == "step").collect();
    match steps.is_empty() {
        true => Err(Error::Run(format!("{path}: no steps"))),
        false => Ok(steps),
    }
}
fn number(step: &Value, key: &str) -> f64 {
    step[key].as_f64().unwrap_or(f64::NAN)
}

/// Losses and gradient norms of two runs of one configuration have a relative difference of at most `tolerance`.
pub fn parity(a: &str, b: &str, tolerance: &str) -> Result<PartReport> {
    let tolerance: f64 = tolerance.parse().map_err(|_| Error::input(format!("{tolerance} is not a number")))?;
    let (first, second) = (steps(a)?, steps(b)?);
    if first.len() != second.len() {
        return Err(Error::Run(format!("{a} has {} steps, {b} {}", first.len(), second.len())));
    }
    let (mut worst, mut wrong) = (0f64, Vec::new());
    for (i, (x, y)) in first.iter().zip(&second).enumerate() {
        for key in ["loss", "grad_norm"] {
            let (x, y) = (number(x, key), number(y, key));
            let difference = (x - y).abs() / x.abs().max(1e-9);
            let close = difference <= tolerance; // a NaN is not
            if !close {
                wrong.push(format!("step {}: {key}: {x} and {y}, more than {tolerance} apart", i + 1));
            }
            worst = worst.max(difference);
        }
    }
    let of = |steps: &[Value], key: &str| steps.iter().map(|s| number(s, key)).collect::<Vec<_>>();
    let [losses, norms] = ["loss", "grad_norm"].map(|key| [of(&first, key), of(&second, key)]);
    let measured = json!({"steps": first.len(), "largest_difference": worst, "losses": losses, "grad_norms": norms});
    Ok(PartReport { measured, wrong })
}

/// Medians over the second half of a run's steps.
pub fn rate(path: &str) -> Result<Value> {
    let steps = steps(path)?;
    let late = &steps[steps.len() / 2..];
    let median = |key: &str| {
        let mut values: Vec<f64> = late.iter().map(|s| number(s, key)).filter(|x| x.is_finite()).collect();
        values.sort_by(f64::total_cmp);
        values.get(values.len() / 2).copied()
    };
    Ok(json!({
        "steps": steps.len(),
        "tokens_per_sec": median("tokens_per_sec"),
        "step_time_s": median("step_time_s"),
        "exposed_comm_s": median("exposed_comm_s"),
        "mfu": median("mfu"),
        "mfu_llm_foundry": median("mfu_llm_foundry"),
        "sol": median("sol"),
        "peak_mem_bytes": median("peak_mem_bytes"),
        "last_loss": steps.last().map(|s| number(s, "loss")),
    }))
}

/// What a row of the benchmarks should reach on an H100: in TFLOP/s, FlashAttention-3's rates (FlashAttention-2's for
/// the kernels of older GPUs); in GB/s, 90 % of the measured copy for memory-bound operations.
fn goal(name: &str, row: &Value, bench: &Value) -> Option<f64> {
    match name {
        "attention forward causal 128 x 8192" => Some(600.0),
        "attention backward causal 128 x 8192" => Some(550.0),
        "attention forward causal 128 x 8192, sm_80 kernels" => Some(330.0),
        "attention backward causal 128 x 8192, sm_80 kernels" => Some(300.0),
        COPY => None,
        _ => row["gb_per_s"].as_f64().and(bench[COPY]["gb_per_s"].as_f64()).map(|copy| 0.9 * copy),
    }
}
/// The row that others are compared with.
const COPY: &str = "copy bf16";

/// A table of the results of `rates`, `rates_before`, `bench`, `step_1b` and `peer` in a directory.
pub fn table(dir: &str) -> Result<String> {
    let read = |name: &str| -> Option<Value> {
        serde_json::from_str(&std::fs::read_to_string(format!("{dir}/{name}.json")).ok()?).ok()
    };
    let (bench, rates) = (read("bench"), read("rates"));
    if bench.is_none() && rates.is_none() {
        return Err(Error::input("neither rates.json nor bench.json: the benchmarks did not run"));
    }
    let (bench, rates) = (bench.unwrap_or_default(), rates.unwrap_or_default());
    let (before, again) = (read("rates_before").unwrap_or_default(), read("rates_again").unwrap_or_default());
    let peer = read("peer").unwrap_or_default();
    let figure = |row: &Value| {
        let show = |key: &str, unit: &str| row[key].as_f64().map(|x| format!("{x:.0} {unit}"));
        show("tflops", "TFLOP/s").or_else(|| show("gb_per_s", "GB/s")).or_else(|| show("tokens_per_sec", "tokens/s"))
    };
    let mut lines = vec![format!("{:<44} {:>16} {:>16}  PyTorch", "on this GPU", "flatshard", "H100 goal")];
    let mut line = |name: &str, ours: &Value, goal: Option<f64>, theirs: Vec<String>| {
        let ours = figure(ours).unwrap_or_else(|| "failed".into());
        let goal = goal.map(|goal| format!("{goal:.0}")).unwrap_or_default();
        lines.push(format!("{name:<44} {ours:>16} {goal:>16}  {}", theirs.join(", ")));
    };
    for (name, row) in rates.as_object().into_iter().flatten() {
        let others = [("with the kernels before", &before[name]), ("again", &again[name])];
        let others = others.iter().filter_map(|(which, row)| Some(format!("{} {which}", figure(row)?)));
        line(name, row, None, others.collect());
    }
    for (name, row) in bench.as_object().into_iter().flatten() {
        // PyTorch has several attentions: the name, then which.
        let alike = peer.as_object().into_iter().flatten().filter(|(other, _)| other.starts_with(name.as_str()));
        let theirs = alike.filter_map(|(other, row)| Some(format!("{}{}", figure(row)?, &other[name.len()..])));
        line(name, row, goal(name, row, &bench), theirs.collect());
    }
    if let Some(step) = read("step_1b") {
        let variants = [("step 1b", "eager"), ("step 1b, torch.compile", "compiled")];
        let theirs = variants.iter().filter_map(|(key, how)| Some(format!("{} {how}", figure(&peer[*key])?)));
        let goal = peer["step 1b, torch.compile"]["tokens_per_sec"].as_f64().map(|theirs| 1.1 * theirs);
        line("step of a 1B LLaMA, bf16", &step, goal, theirs.collect());
        if let Some(mfu) = step["mfu_llm_foundry"].as_f64() {
            lines.push(format!("{:<44} {:>15.1}% {:>15}%", "MFU (llm-foundry)", mfu * 100.0, 50));
        }
    }
    if let Some(step) = read("step_1b_compile") {
        let ours = figure(&step).unwrap_or_else(|| "failed".into());
        lines.push(format!("{:<44} {ours:>16}", "with --compile"));
    }
    Ok(lines.join("\n"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn file(dir: &tempfile::TempDir, name: &str, losses: &[f64]) -> String {
        let line =
            |l: &f64| json!({"event": "step", "loss": l, "grad_norm": 1.0, "tokens_per_sec": 10.0 * l}).to_string();
        let path = dir.path().join(name);
        std::fs::write(&path, losses.iter().map(line).collect::<Vec<_>>().join("\n")).unwrap();
        path.display().to_string()
    }

    #[test]
    fn differing_runs_are_distinguished_from_agreeing_ones() {
        let dir = tempfile::tempdir().unwrap();
        let a = file(&dir, "a", &[5.0, 4.0]);
        let close = parity(&a, &file(&dir, "b", &[5.0, 4.004]), "0.01").unwrap();
        assert!(close.measured["steps"] == 2 && close.wrong.is_empty());
        let apart = parity(&a, &file(&dir, "c", &[5.0, 4.5]), "0.01").unwrap();
        assert!(apart.measured["losses"][1][1] == 4.5 && apart.wrong[0].contains("step 2: loss: 4 and 4.5"));
        assert!(parity(&a, &file(&dir, "d", &[5.0]), "0.01").is_err());
        assert!(parity(&a, &file(&dir, "e", &[]), "0.01").is_err());
        assert_eq!(rate(&a).unwrap()["tokens_per_sec"], 40.0);
    }

    #[test]
    fn figures_stand_side_by_side() {
        let dir = tempfile::tempdir().unwrap();
        let write = |name: &str, value: Value| std::fs::write(dir.path().join(name), value.to_string()).unwrap();
        assert!(table(dir.path().to_str().unwrap()).is_err());
        write("rates.json", json!({"attention backward, 8 kv heads": {"tflops": 500.0}}));
        write("rates_before.json", json!({"attention backward, 8 kv heads": {"tflops": 410.0}}));
        let text = table(dir.path().to_str().unwrap()).unwrap();
        assert!(text.contains("500 TFLOP/s") && text.contains("410 TFLOP/s with the kernels before"), "{text}");
        write(
            "bench.json",
            json!({"attention forward": {"tflops": 400.4}, "copy bf16": {"gb_per_s": 3000.0}, "add": {"error": "x"}, "sum": {"gb_per_s": 2500.0},
                   "attention backward causal 128 x 8192": {"tflops": 555.0}}),
        );
        write(
            "peer.json",
            json!({"attention forward (flash)": {"tflops": 350.0}, "step 1b": {"tokens_per_sec": 9.0},
                   "step 1b, torch.compile": {"tokens_per_sec": 20.0}}),
        );
        write("step_1b.json", json!({"tokens_per_sec": 10.0, "mfu_llm_foundry": 0.5}));
        write("step_1b_compile.json", json!({"tokens_per_sec": 11.0}));
        let text = table(dir.path().to_str().unwrap()).unwrap();
        let has = |parts: &[&str]| text.lines().any(|line| parts.iter().all(|part| line.contains(part)));
        assert!(has(&["attention forward", "400 TFLOP/s", "350 TFLOP/s (flash)"]), "{text}");
        assert!(has(&["copy", "3000 GB/s"]) && has(&["add", "failed"]), "{text}");
        assert!(has(&["sum", "2500 GB/s", "2700"]) && has(&["backward causal 128", "555 TFLOP/s", "550"]), "{text}");
        assert!(has(&["1B LLaMA", " 22 "]), "{text}");
        assert!(has(&["--compile", "11 tokens/s"]), "{text}");
        assert!(has(&["1B LLaMA", "10 tokens/s", "9 tokens/s eager"]) && has(&["MFU", "50.0%"]), "{text}");
    }
}
