//! The page of `experiments analyze` for runs that are about their models: what it leads with, and which run is best.
use super::common::{experiments, view};
use serde_json::{Value, json};
use std::fs;
use std::path::Path;
use tempfile::TempDir;

/// Settings of a run, `changes` merged over those of a fine-tune.
fn config(changes: Value) -> Value {
    let mut config = json!({
        "model": {"pretrain": "hub/tiny"},
        "objective": {"objective": "sft", "beta": 0.1},
        "data": {"dataset": ["chats.jsonl"]},
        "batch": {"batch_size": 8, "grad_accum": 1},
        "optim": {"lr": 0.001},
        "fsdp": {"sharding": "FULL_SHARD"},
        "precision": {"precision": "fp32"},
        "watch": {"log_file": "a"},
    });
    for (section, body) in changes.as_object().unwrap() {
        for (key, value) in body.as_object().unwrap() {
            config[section][key] = value.clone();
        }
    }
    config
}

/// A run of three steps of 100 tokens, and evaluations before and after them.
fn run(dir: &Path, name: &str, config: Value, step: Value, evals: [Value; 2]) {
    let line = |event: &str, n: u64, more: &Value| {
        let mut line = json!({"event": event, "step": n});
        line.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        line.to_string() + "\n"
    };
    let mesh = json!({"dp_replicate": 1, "dp_shard": 4 / config["parallel"]["tp_size"].as_u64().unwrap_or(1)});
    let mut text = line("run", 0, &json!({"world_size": 4, "params": 1000, "mesh": mesh, "config": config}));
    text += &line("eval", 0, &evals[0]);
    for n in 1..=3 {
        let mut all =
            json!({"loss": 2.0, "tokens": 100, "tokens_per_sec": 50, "step_time_s": 2, "peak_mem_bytes": 1 << 20});
        all.as_object_mut().unwrap().extend(step.as_object().unwrap().clone());
        text += &line("step", n, &all);
    }
    text += &line("eval", 3, &evals[1]);
    fs::create_dir(dir.join(name)).unwrap();
    fs::write(dir.join(name).join("metrics.jsonl"), text + "{\"event\":\"end\"}\n").unwrap();
}

fn losses(before: f64, after: f64) -> [Value; 2] {
    [before, after].map(|loss| json!({"loss": loss, "tokens": 40}))
}

fn page(dir: &Path) -> Value {
    let ended = experiments(dir, &["analyze", "--output-dir", "."]);
    assert_eq!(ended.code, 0, "{}", ended.err);
    view(dir)
}

#[test]
fn a_single_run_is_about_its_model() {
    let dir = TempDir::new().unwrap();
    let path = dir.path().join("mine");
    fs::create_dir_all(&path).unwrap();
    let config = "{\"model\":{\"pretrain\":\"hub/tiny\"},\"objective\":{\"objective\":\"sft\"},\"lora\":{\"rank\":4},\"run\":{\"max_steps\":2}}";
    let text = format!(
        "{{\"event\":\"run\",\"config\":{config}}}\n{{\"event\":\"eval\",\"step\":0,\"loss\":2.0}}\n\
         {{\"event\":\"step\",\"step\":1,\"loss\":2.0,\"tokens\":30,\"reward_margin\":0.25,\"reward_accuracy\":0.5}}\n\
         {{\"event\":\"step\",\"step\":2,\"loss\":1.0,\"tokens\":12,\"reward_margin\":0.5,\"reward_accuracy\":1.0}}\n\
         {{\"event\":\"eval\",\"step\":2,\"loss\":1.0}}\n{{\"event\":\"end\"}}\n"
    );
    fs::write(path.join("metrics.jsonl"), text).unwrap();
    assert_eq!(experiments(dir.path(), &["analyze", "--output-dir", "."]).code, 0);
    let view = view(dir.path());
    assert_eq!(view["title"], "mine: LoRA fine-tune of tiny");
    let cards = view["cards"].to_string();
    for part in ["2.0000 → 1.0000", "7.39 → 2.72", "perplexity", "\"42\",\"tokens seen\""] {
        assert!(cards.contains(part), "no {part} in {cards}");
    }
    assert_eq!(view["runs"][0]["columns"]["reward_margin"], serde_json::json!([0.25, 0.5]));
    assert!(view["settings"]["rows"].to_string().contains("[\"lora.rank\",\"4\"]"), "{}", view["settings"]);
}

#[test]
fn fine_tunes_with_other_settings_are_compared_by_their_models() {
    let dir = TempDir::new().unwrap();
    let slow = config(json!({"optim": {"lr": 0.0001}, "batch": {"batch_size": 4}, "watch": {"log_file": "b"}}));
    run(dir.path(), "a", config(json!({})), json!({}), losses(3.0, 1.5));
    run(dir.path(), "b", slow, json!({"tokens": 50}), losses(3.0, 1.75));
    let view = page(dir.path());
    assert_eq!(view["title"], "a, b: fine-tunes of tiny");
    assert_eq!(view["lead"], "2 runs, a model of 1,000 parameters, 4 ranks, 3 steps.");
    let cards = [
        ["a", "lowest evaluation loss"],
        ["3.0000 → 1.5000", "a: evaluation loss before training and of step 3"],
        ["3.0000 → 1.7500", "b: evaluation loss before training and of step 3"],
    ];
    assert_eq!(view["cards"], json!(cards));
    assert_eq!(view["head"].as_array().unwrap()[..3], ["run", "eval loss", "eval perplexity"]);
    let cells = ["b", "3.0000 → 1.7500", "20.09 → 5.75", "2.0000 → 2.0000", "150", "3", "50", "1"];
    assert_eq!(view["runs"][1]["cells"], json!(cells));
    assert_eq!(view["runs"][1]["evals"]["loss"], json!([[0, 3.0], [3, 1.75]]));
    let settings = [["batch.batch_size", "8", "4"], ["optim.lr", "0.001", "0.0001"]];
    assert_eq!(view["settings"]["rows"], json!(settings));
    let note = view["note"].as_str().unwrap();
    assert!(note.contains("saw from 150 to 300 tokens") && !note.contains("anked"), "{note}");
}

/// The same training under other strategies, in batches of the same size, is compared by its cost.
#[test]
fn strategies_of_a_fine_tune_are_compared_by_cost() {
    let dir = TempDir::new().unwrap();
    let tp = json!({"parallel": {"tp_size": 2}, "batch": {"batch_size": 16}, "watch": {"log_file": "b"}});
    run(dir.path(), "a", config(json!({})), json!({}), losses(3.0, 1.5));
    run(dir.path(), "b", config(tp), json!({}), losses(3.0, 1.5));
    run(dir.path(), "c", config(json!({"fsdp": {"sharding": "NO_SHARD"}})), json!({}), losses(3.0, 1.5));
    run(dir.path(), "d", config(json!({"precision": {"precision": "bf16"}})), json!({}), losses(3.0, 1.5));
    let strategies = page(dir.path());
    assert_eq!((&strategies["title"], &strategies["head"][2]), (&json!("Strategies side by side"), &json!("tokens/s")));
    assert!(strategies["cards"].to_string().contains("fastest"), "{}", strategies["cards"]);
    // Without another strategy, precision is a setting like others.
    ["b", "c"].iter().for_each(|name| fs::remove_dir_all(dir.path().join(name)).unwrap());
    let view = page(dir.path());
    assert_eq!(view["title"], "a, d: fine-tunes of tiny");
    assert_eq!(view["cards"][0], json!(["a, d", "share the lowest evaluation loss"]));
}

#[test]
fn runs_that_are_judged_on_other_rows_are_not_ranked() {
    let dir = TempDir::new().unwrap();
    let other = [json!({"loss": 3.0, "tokens": 41}), json!({"loss": 0.5, "tokens": 41})];
    run(dir.path(), "a", config(json!({})), json!({}), losses(3.0, 1.5));
    run(dir.path(), "b", config(json!({"data": {"max_len": 64}})), json!({}), other);
    let view_of_two = page(dir.path());
    assert!(view_of_two["note"].as_str().unwrap().contains("No run is best"), "{}", view_of_two["note"]);
    assert!(view_of_two["cards"][0][1].as_str().unwrap().starts_with("a: evaluation loss"), "{}", view_of_two["cards"]);
    run(dir.path(), "c", config(json!({"optim": {"lr": 0.1}})), json!({}), losses(3.0, 1.25));
    let dpo = json!({"objective": {"objective": "dpo"}});
    let pairs = [0.0, 1.0].map(|share| json!({"loss": 0.6, "pairs": 9, "reward_accuracy": share}));
    run(dir.path(), "d", config(dpo), json!({}), pairs);
    let view = page(dir.path());
    assert_eq!(view["title"], "a, b, c, d: fine-tunes and DPO of tiny");
    assert_eq!(view["cards"][0], json!(["c", "lowest evaluation loss"]));
    assert!(view["note"].as_str().unwrap().contains("the same settings: b, d."), "{}", view["note"]);
    assert_eq!(view["loss_over"], Value::Null);
    assert_eq!(view["runs"][3]["cells"][2], "–"); // perplexity
}

#[test]
fn preferences_and_rewards_lead_with_their_own_numbers() {
    let cases = [
        ("dpo", "reward_accuracy", "mean over pairs", ["evaluation accuracy", "25.0 % → 75.0 %"]),
        ("rm", "accuracy", "mean over pairs", ["evaluation accuracy", "25.0 % → 75.0 %"]),
        ("kto", "kl", "mean over answers", ["evaluation reward margin", "0.2500 → 0.7500"]),
    ];
    for (objective, key, over, [title, change]) in cases {
        let dir = TempDir::new().unwrap();
        let eval = |x: f64| json!({"loss": 0.6, "reward_margin": x, key: x});
        let settings = config(json!({"objective": {"objective": objective}}));
        run(dir.path(), "mine", settings, json!({}), [eval(0.25), eval(0.75)]);
        let view = page(dir.path());
        let card = json!([change, format!("{title} before training and of step 3")]);
        assert_eq!((&view["cards"][0], view["loss_over"].as_str()), (&card, Some(over)), "{objective}");
        let cards = view["cards"].to_string();
        assert!(cards.contains("reward margin before") && cards.contains("evaluation loss before"), "{cards}");
        let picture = fs::read_to_string(dir.path().join("analysis/loss.svg")).unwrap();
        assert!(picture.contains(&format!("loss ({over})")), "{objective}: {picture}");
    }
    let dir = TempDir::new().unwrap();
    let grpo = |temperature: f64| {
        config(
            json!({"objective": {"objective": "grpo", "reward": ["json"]}, "generate": {"temperature": temperature}}),
        )
    };
    let evals = |after: f64| [0.0, after].map(|mean| json!({"loss": null, "reward_mean": mean, "prompts": 9}));
    run(dir.path(), "a", grpo(1.0), json!({"loss": 0.0, "reward_mean": 0.5}), evals(0.5));
    let single = page(dir.path());
    assert_eq!(single["cards"][0], json!(["0.0000 → 0.5000", "evaluation reward before training and of step 3"]));
    assert_eq!(single["cards"][1], json!(["0.5000 → 0.5000", "reward of the samples of steps 1 and 3"]));
    assert_eq!((&single["main"], &single["runs"][0]["cells"][2]), (&json!("reward_mean"), &json!("0.5000 → 0.5000")));
    assert!(!single["cards"].to_string().contains("loss"), "{}", single["cards"]);
    // Texts that are drawn otherwise have other rewards.
    run(dir.path(), "b", grpo(0.5), json!({"loss": 0.0, "reward_mean": 0.5}), evals(0.75));
    assert!(page(dir.path())["note"].as_str().unwrap().contains("No run is best"));
}
