//! Training stages as processes: each starts from the previous stage's weights with its own settings, and a run that
//! was interrupted anywhere ends like an uninterrupted one.

use crate::common::agent::Agent;
use crate::common::runs::{launched, unlaunched};
use safetensors::SafeTensors;
use serde_json::Value;
use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::process::{Command, Output, Stdio};
use tempfile::TempDir;

use crate::common::binaries::FSDP;

/// Stage `warm` trains all but the embeddings; stage `head` only the head, on other rows with another optimizer.
const STAGES: &str = "
model: {embed_dim: 32, num_layers: 2, num_heads: 2}
data: {dataset: synthetic, max_len: 16}
batch: {batch_size: 2}
optim: {lr: 0.01, warmup_steps: 0}
run: {seed: 5, log_every: 1}
checkpoint: {save_every: 2}
training_stages:
  warm: {run: {max_steps: 4}, freeze: [embed_tokens]}
  head:
    run: {max_steps: 6, seed: 9}
    optim: {optimizer: sgd, lr: 0.1}
    tune: {freeze: [embed_tokens, layers, 'model.norm']}
";

struct Job {
    dir: TempDir,
}

impl Job {
    fn new(yaml: &str) -> Job {
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join("run.yaml"), yaml).unwrap();
        Job { dir }
    }
    fn command(&self, args: &[&str]) -> Command {
        let mut command = unlaunched(FSDP);
        command.current_dir(self.dir.path()).stdout(Stdio::piped()).stderr(Stdio::piped());
        command.args(["--config", "run.yaml", "--ckpt-dir", "ck", "--metrics-path", "m.jsonl"]).args(args);
        command
    }
    fn run(&self, args: &[&str]) {
        let Output { status, stderr, .. } = self.command(args).output().unwrap();
        assert!(status.success(), "{}", String::from_utf8_lossy(&stderr));
    }
    fn refused(&self, args: &[&str]) -> String {
        let Output { status, stderr, .. } = self.command(args).output().unwrap();
        let text = String::from_utf8_lossy(&stderr).into_owned();
        assert_eq!(status.code(), Some(2), "{text}");
        text
    }
    fn weights(&self, checkpoint: &str) -> BTreeMap<String, Vec<u8>> {
        weights(&self.dir.path().join("ck").join(checkpoint))
    }
    fn events(&self) -> Vec<Value> {
        let text = fs::read_to_string(self.dir.path().join("m.jsonl")).unwrap();
        text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
    }
}

fn weights(dir: &Path) -> BTreeMap<String, Vec<u8>> {
    let bytes = fs::read(dir.join("model.safetensors")).unwrap();
    let tensors = SafeTensors::deserialize(&bytes).unwrap();
    tensors.tensors().into_iter().map(|(name, view)| (name, view.data().to_vec())).collect()
}

/// Tensors that differ.
fn changed(a: &BTreeMap<String, Vec<u8>>, b: &BTreeMap<String, Vec<u8>>) -> Vec<String> {
    a.iter().filter(|(name, bytes)| b[*name] != **bytes).map(|(name, _)| name.clone()).collect()
}

#[test]
fn each_stage_starts_from_the_previous_one_and_a_run_can_stop_anywhere() {
    let whole = Job::new(STAGES);
    whole.run(&[]);
    let (warm, head) = (whole.weights("warm/step-00000004"), whole.weights("head/step-00000006"));
    assert_eq!(changed(&warm, &head), ["lm_head.weight"]);
    assert!(!changed(&whole.weights("warm/step-00000002"), &warm).contains(&"model.embed_tokens.weight".into()));

    let events = whole.events();
    let runs: Vec<&Value> = events.iter().filter(|e| e["event"] == "run").collect();
    let stages: Vec<&str> = runs.iter().map(|e| e["config"]["run"]["stage"].as_str().unwrap()).collect();
    assert_eq!(stages, ["warm", "head"]);
    assert!(runs[1]["trainable_params"].as_u64().unwrap() < runs[0]["trainable_params"].as_u64().unwrap());
    let steps: Vec<u64> = events.iter().filter_map(|e| (e["event"] == "step").then(|| e["step"].as_u64())?).collect();
    assert_eq!(steps, [1, 2, 3, 4, 1, 2, 3, 4, 5, 6]);

    // One stage at a time.
    let apart = Job::new(STAGES);
    assert!(apart.refused(&["--stage", "head"]).contains("run it first"));
    apart.run(&["--stage", "warm"]);
    assert!(apart.refused(&[]).contains("--resume auto"), "a finished stage must not be run over");
    apart.run(&["--stage", "head"]);
    assert_eq!(changed(&head, &apart.weights("head/step-00000006")), [""; 0]);

    // Interrupted in the second stage: completed work is not repeated.
    let again = apart.dir.path().join("ck/head");
    fs::remove_dir_all(again.join("step-00000006")).unwrap();
    fs::remove_file(again.join("latest")).unwrap();
    let before = apart.events().len();
    apart.run(&["--resume", "auto"]);
    assert_eq!(changed(&head, &apart.weights("head/step-00000006")), [""; 0]);
    let steps = |e: &Value| (e["event"] == "step").then(|| e["step"].as_u64())?;
    assert_eq!(apart.events()[before..].iter().filter_map(steps).collect::<Vec<_>>(), [5, 6]);
}

#[test]
fn an_external_launcher_runs_all_stages_in_its_ranks() {
    let whole = Job::new(STAGES);
    whole.run(&[]);
    let job = Job::new(STAGES);
    let agent = Agent::new();
    let ranks = [0, 1].map(|rank| {
        let mut command = job.command(&[]);
        launched(&mut command, rank, 2, agent.port).spawn().unwrap()
    });
    for rank in ranks {
        let Output { status, stderr, .. } = rank.wait_with_output().unwrap();
        assert!(status.success(), "{}", String::from_utf8_lossy(&stderr));
    }
    let last = "head/step-00000006";
    assert_eq!(changed(&whole.weights(last), &job.weights(last)), [""; 0]);
}

#[test]
fn errors_in_any_stage_are_reported_before_the_first_starts() {
    for (yaml, words) in [
        (STAGES.replace("seed: 9", "sede: 9"), vec!["run.sede", "run.seed"]),
        (STAGES.replace("optimizer: sgd", "optimizer: sdg"), vec!["sdg"]),
        (STAGES.replace("  head:", "  step-00000007:"), vec!["step-00000007"]),
    ] {
        let job = Job::new(&yaml);
        let text = job.refused(&[]);
        assert!(words.iter().all(|word| text.contains(word)), "{text}");
        assert!(!job.dir.path().join("ck").exists(), "something was started");
    }
    let job = Job::new(STAGES);
    let nowhere = Command::new(FSDP).args(["--config", "run.yaml"]).current_dir(job.dir.path()).output().unwrap();
    let text = String::from_utf8_lossy(&nowhere.stderr);
    assert!(nowhere.status.code() == Some(2) && text.contains("--ckpt-dir"), "{text}");
    let text = Job::new(STAGES).refused(&["--stage", "haed"]);
    assert!(text.contains("haed") && text.contains("head"), "{text}");
    let text = Job::new(&STAGES.replace("embed_tokens]}", "embed_token_]}")).refused(&[]);
    assert!(text.contains("embed_token_") && text.contains("model.embed_tokens.weight"), "{text}");
}

/// A stage's `distributed` block, and what it overrides.
const DISTRIBUTED: &str = "
model: {embed_dim: 32, num_layers: 2, num_heads: 2}
data: {dataset: synthetic, max_len: 16}
batch: {batch_size: 2}
optim: {warmup_steps: 0}
run: {max_steps: 2, eval: false, sample: false}
distributed: {strategy: fsdp, devices: 2, fsdp: {sharding_strategy: SHARD_GRAD_OP}}
distributed_examples:
  one: {run: {seed: 7}, distributed: {strategy: fsdp, devices: 1, fsdp: {forward_prefetch: true}}}
training_stages:
  warm: {distributed: {strategy: ddp, devices: 3, fsdp: {sharding_strategy: FULL_SHARD, activation_checkpointing: true}}}
  full: {model: {dropout: 0.1}, precision: bf16, distributed: {devices: auto, fsdp: {enabled: true}}}
";

#[test]
fn a_stage_follows_its_own_distributed_block() {
    let job = Job::new(DISTRIBUTED);
    job.run(&[]);
    let events = job.events();
    let runs: Vec<&Value> = events.iter().filter(|e| e["event"] == "run").collect();
    let is = |run: &Value, world: u64, strategy: &str, again: bool, precision: &str| {
        let config = &run["config"];
        assert_eq!(run["world_size"], world);
        assert_eq!(config["run"]["strategy"], strategy);
        assert_eq!(config["fsdp"]["activation_checkpoint"], again);
        assert_eq!(config["precision"]["precision"], precision);
    };
    is(runs[0], 3, "ddp", true, "fp32");
    assert_eq!(runs[0]["mesh"]["dp_replicate"], 3);
    is(runs[1], 2, "fsdp", false, "bf16");
    assert_eq!(runs[1]["config"]["fsdp"]["sharding"], "SHARD_GRAD_OP");

    // Top level < the block that --fsdp-config picks < the stage < flags.
    let printed = |args: &[&str]| -> Value {
        let dir = tempfile::tempdir().unwrap();
        let ckpt = dir.path().to_str().unwrap();
        let out = job.command(&[args, &["--ckpt-dir", ckpt, "--print-config"]].concat()).output().unwrap();
        assert!(out.status.success(), "{}", String::from_utf8_lossy(&out.stderr));
        serde_saphyr::from_str(&String::from_utf8(out.stdout).unwrap()).unwrap()
    };
    let warm = printed(&["--stage", "warm", "--fsdp-config", "one"]);
    assert_eq!((&warm["plan"]["world_size"], &warm["plan"]["strategy"]), (&3.into(), &"ddp".into()));
    assert_eq!(warm["run"]["seed"], 7, "the picked block");
    assert_eq!(printed(&["--stage", "warm", "--devices", "1", "--fsdp-config", "one"])["plan"]["world_size"], 1);
}

#[test]
fn no_key_of_a_stage_is_silently_ignored() {
    let with = |stage: &str| DISTRIBUTED.replace("devices: auto, ", stage);
    for (yaml, words) in [
        (with("devces: 3, "), vec!["run.yaml", "training_stages.full.distributed.devces", "distributed.devices"]),
        (with("devices: many, "), vec!["training_stages.full.distributed.devices", "many"]),
        (with("strategy: dpp, "), vec!["training_stages.full.distributed.strategy", "dpp", "ddp"]),
        (with("strategy: ddp, "), vec!["training_stages.full.distributed", "strategy is ddp", "fsdp.enabled is true"]),
        (
            with("").replace("enabled: true", "shard: 1"),
            vec!["training_stages.full.distributed.fsdp.shard", "sharding"],
        ),
        (with("").replace("precision: bf16", "plan: {}"), vec!["training_stages.full.plan", "top level"]),
        (with("").replace("precision: bf16", "model_configs: {}"), vec!["training_stages.full.model_configs"]),
        (with("").replace("precision: bf16", "distributed_examples: {}"), vec!["full.distributed_examples"]),
        (with("").replace("precision: bf16", "training_stages: {}"), vec!["training_stages.full.training_stages"]),
        (with("").replace("dropout: 0.1", "num_layers: 3"), vec!["training_stages.full.model.num_layers is 3", "warm"]),
        (with("").replace("precision: bf16", "parallel: {tp_size: 3}"), vec!["tp"]),
        (
            with("").replace("forward_prefetch", "forward_prefech"),
            vec!["distributed_examples.one.distributed.fsdp.forward_prefech"],
        ),
        (
            with("strategy: fsdp, ").replace("precision: bf16", "run: {strategy: ddp}"),
            vec!["run.strategy and", "different values"],
        ),
    ] {
        let job = Job::new(&yaml);
        let text = job.refused(&[]);
        assert!(words.iter().all(|word| text.contains(word)), "{words:?}: {text}");
        assert!(!job.dir.path().join("ck").exists(), "something was started: {text}");
    }
}

/// The model of a command that trains nothing is the one that it names.
#[test]
fn a_stage_keeps_the_model_of_what_trains_nothing() {
    let model = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/pretrained/llama");
    let job = Job::new("training_stages:\n  first: {run: {max_steps: 1}}\n  last: {run: {max_steps: 1}}\n");
    let words = "--config run.yaml --stage last --ckpt-dir ck --export --save-hf out --pretrain";
    let mut export = unlaunched(FSDP);
    export.current_dir(job.dir.path()).args(words.split(' ')).arg(model);
    let Output { status, stderr, .. } = export.output().unwrap();
    assert!(status.success(), "{}", String::from_utf8_lossy(&stderr));
    assert!(job.dir.path().join("out/model.safetensors").exists());
}

/// A stage after the first is a fine-tune too: it starts from weights, although it names no model.
#[test]
fn later_stages_of_a_fine_tune_have_its_defaults() {
    let model = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/pretrained/llama");
    let stages = "run: {max_steps: 1}\ntraining_stages:\n  first: {data: {dataset: synthetic, max_len: 16}}\n  pairs: \
                  {objective: {objective: dpo}, data: {dataset: pairs.jsonl}}\n  last: {data: {dataset: synthetic, \
                  max_len: 16}}\n";
    let pretrain = format!("model: {{pretrain: {}}}\n{stages}", model.display());
    let flag = ["--pretrain", model.to_str().unwrap()];
    for (text, args) in [(pretrain.as_str(), &[][..]), (stages, &flag[..])] {
        let (job, pair) =
            (Job::new(text), r#"{"prompt_input_ids": [1], "chosen_input_ids": [2], "rejected_input_ids": [3]}"#);
        fs::write(job.dir.path().join("pairs.jsonl"), format!("{pair}\n").repeat(9)).unwrap();
        job.run(args);
        let events = job.events();
        let runs = events.iter().filter(|event| event["event"] == "run");
        let peaks: Vec<f64> = runs.map(|run| run["config"]["optim"]["lr"].as_f64().unwrap()).collect();
        assert_eq!(peaks, [2e-5, 5e-7, 2e-5], "{text}");
    }
}

/// Only the last stage exports, and an export that it may not write ends the run before the first one starts.
#[test]
fn an_invalid_export_is_refused_before_the_first_stage() {
    let job = Job::new(STAGES);
    let model = job.dir.path().join("model");
    fs::create_dir(&model).unwrap();
    fs::write(model.join("config.json"), "{}").unwrap();
    let text = job.refused(&["--save-hf", "model"]);
    assert!(text.contains("--save-hf model: contains a model that this run did not write"), "{text}");
    assert!(!job.dir.path().join("ck").exists());
}
