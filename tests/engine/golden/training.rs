//! Runs of the binary compared with PyTorch's, with unusual values of every setting, and how flags become a plan. All
//! other engine tests compare runs that share a plan, so only this one notices a number lost on its way to the
//! optimizer. The files are made by `training.py`.
use crate::common::runs::unlaunched;
use flatshard::base::DType;
use flatshard::optim::{DecayShape, Rule, Warmup};
use flatshard::run::plan::Plan;
use flatshard::run::settings::args;
use flatshard::run::settings::config;
use flatshard::run::{HelpPage, StrategyName};
use serde_json::Value;
use std::fs;
use std::path::{Path, PathBuf};

fn golden(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden").join(name)
}
fn numbers(values: &Value) -> Vec<f64> {
    values.as_array().unwrap().iter().map(|v| v.as_f64().unwrap()).collect()
}

/// A run in `dir` on its file of rows: the step events, and stderr.
fn train(dir: &Path, model: &Path, args: &[&str]) -> (Vec<Value>, String) {
    let mut command = unlaunched(crate::common::binaries::FSDP);
    // Fewer tokens than the model's vocabulary, which the program checks; the rows are already tokenized.
    let tokenizer =
        r#"{"version": "1.0", "model": {"type": "WordLevel", "vocab": {"a": 0, "b": 1}, "unk_token": "a"}}"#;
    fs::write(dir.join("tokenizer.json"), tokenizer).unwrap();
    let rest = "--device cpu --dataset rows.jsonl --tokenizer tokenizer.json --no-shuffle --no-eval --no-sample \
                --metrics-path m.jsonl";
    command.current_dir(dir).env("FLATSHARD_CACHE_DIR", dir.join("cache"));
    let out = command.args(rest.split_whitespace()).arg("--pretrain").arg(model).args(args).output().unwrap();
    let stderr = String::from_utf8_lossy(&out.stderr).into_owned();
    assert!(out.status.success(), "{args:?}: {stderr}");
    let text = fs::read_to_string(dir.join("m.jsonl")).unwrap();
    let events = text.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
    (events.filter(|e| e["event"] == "step").collect(), stderr)
}

fn write_rows(dir: &Path, rows: &Value) {
    let lines = rows.as_array().unwrap().iter().map(|row| format!("{{\"input_ids\": {row}}}\n"));
    fs::write(dir.join("rows.jsonl"), lines.collect::<String>()).unwrap();
}

/// Learning rates in closed form (measured error: 6e-8 relative), losses (2e-7) and gradient norms (2e-7) of two ranks
/// with three micro-batches each.
#[test]
fn a_run_with_unusual_settings_matches_pytorch() {
    let golden_runs: Value = serde_json::from_slice(&fs::read(golden("training.json")).unwrap()).unwrap();
    let cases = golden_runs["cases"].as_object().unwrap();
    assert_eq!(cases.len(), 4);
    for (name, case) in cases {
        let dir = tempfile::tempdir().unwrap();
        write_rows(dir.path(), &golden_runs["rows"]);
        let args: Vec<&str> = case["args"].as_array().unwrap().iter().map(|a| a.as_str().unwrap()).collect();
        let model = golden("pretrained").join(case["model"].as_str().unwrap());
        let (steps, _) = train(dir.path(), &model, &args);
        for (key, golden, most) in [("lr", "lrs", 1e-6), ("loss", "losses", 1e-5), ("grad_norm", "norms", 1e-4)] {
            let want = numbers(&case[golden]);
            assert_eq!(steps.len(), want.len(), "{name}");
            let mut worst = 0f64;
            for (step, want) in steps.iter().zip(want) {
                let got = step[key].as_f64().unwrap_or(f64::NAN);
                let error = if want == 0.0 { got.abs() } else { (got / want - 1.0).abs() };
                assert!(error < most, "{name}: step {}: {key} is {got}, not {want}", step["step"]);
                worst = worst.max(error);
            }
            println!("{name}: {key}: relative error {worst:.1e}");
        }
    }
}

/// Each flag of the optimizer and the schedule, with values that differ from every default.
#[test]
fn flags_of_optimizer_and_schedule_reach_the_plan() {
    let plan = |text: &str| -> Plan {
        let words = format!("--dataset synthetic --device cpu --embed-dim 32 --num-layers 1 --max-len 16 {text}");
        let parsed =
            args::parse::<args::Cli>(&HelpPage::training("run_fsdp", ""), words.split(' ').map(str::to_string))
                .unwrap();
        let args::Parsed::Run(cli) = parsed else { panic!("{text} is help") };
        Plan::new(config::resolve(&cli, None, StrategyName::Fsdp).unwrap(), None).unwrap()
    };
    let adamw = plan("--optimizer adamw --betas 0.7 0.6 --eps 0.5 --weight-decay 0.3 --grad-clip 0.75");
    assert_eq!(
        adamw.engine.rule,
        Rule::AdamW { beta1: 0.7, beta2: 0.6, eps: 0.5, weight_decay: 0.3, moments: DType::F32 }
    );
    assert_eq!(adamw.engine.grad_clip, 0.75);
    let sgd = plan("--optimizer sgd --momentum 0.65 --weight-decay 0.35 --grad-clip 0");
    assert_eq!(sgd.engine.rule, Rule::Sgd { momentum: 0.65, weight_decay: 0.35 });
    assert_eq!(sgd.engine.grad_clip, 0.0);
    for (flags, shape, rise) in [
        ("constant", DecayShape::Constant, Warmup::Linear),
        ("linear", DecayShape::Linear, Warmup::Linear),
        ("cosine --warmup-type log", DecayShape::Cosine, Warmup::Log),
        (
            "cosine_with_min_lr --min-lr-ratio 0.15 --warmup-type linear",
            DecayShape::CosineWithMin(0.15),
            Warmup::Linear,
        ),
    ] {
        let schedule = plan(&format!("--lr 0.0625 --warmup-steps 7 --max-steps 19 --lr-scheduler {flags}")).schedule;
        let found = (schedule.shape, schedule.rise, schedule.peak, schedule.warmup, schedule.total);
        assert_eq!(found, (shape, rise, 0.0625, 7, 19), "{flags}");
    }
}

/// transformers' models apply the dropout in their config; a run here applies that of its flag, and says so.
#[test]
fn unapplied_dropout_of_a_config_is_reported() {
    let said = |model: &str, key: &str, value: f64, args: &[&str]| -> Option<String> {
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join("rows.jsonl"), "{\"input_ids\": [5, 3, 8, 1]}\n".repeat(40)).unwrap();
        let model = golden("pretrained").join(model);
        let mut config: Value = serde_json::from_slice(&fs::read(model.join("config.json")).unwrap()).unwrap();
        config[key] = value.into();
        fs::write(dir.path().join("config.json"), config.to_string()).unwrap();
        fs::copy(model.join("model.safetensors"), dir.path().join("model.safetensors")).unwrap();
        let args = [&["--max-len", "8", "--max-steps", "1", "--batch-size", "1"], args].concat();
        let (_, stderr) = train(dir.path(), Path::new("."), &args);
        stderr.lines().find(|line| line.starts_with("dropout ")).map(str::to_string)
    };
    for (model, key) in
        [("gpt", "attn_pdrop"), ("gpt", "embd_pdrop"), ("gpt", "resid_pdrop"), ("llama", "attention_dropout")]
    {
        let line = said(model, key, 0.125, &[]).unwrap_or_else(|| panic!("nothing is said of {key}"));
        assert!(line.contains(&format!("not applied: {key} 0.125 of")) && line.contains("--dropout P"), "{line}");
        assert_eq!(said(model, key, 0.0, &[]), None, "{key}");
    }
    // The run's own dropout applies to residual branches, never to attention.
    assert_eq!(said("gpt", "resid_pdrop", 0.125, &["--dropout", "0.125"]), None);
    assert!(said("gpt", "attn_pdrop", 0.125, &["--dropout", "0.125"]).is_some());
}
