//! Configuration files from outside: shipped named blocks, keys without a section, files of other tools, the table of
//! defaults. No key of a file is silently ignored.
use crate::common::runs::unlaunched;
use serde_json::{Value, json};
use std::fs;
use std::path::Path;
use std::process::Output;
use tempfile::TempDir;

use crate::common::binaries::FSDP;

fn root(path: &str) -> String {
    fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join(path)).unwrap()
}

fn print(args: &[&str]) -> Output {
    let dir = TempDir::new().unwrap(); // a log file is opened even where nothing starts
    let mut command = unlaunched(FSDP);
    command.current_dir(dir.path());
    command.args(["--dataset", "synthetic", "--print-config"]).args(args).output().unwrap()
}

/// The resolved settings and the notes about them.
#[track_caller]
fn settings(args: &[&str]) -> (Value, String) {
    let Output { status, stdout, stderr } = print(args);
    let stderr = String::from_utf8(stderr).unwrap();
    assert!(status.success(), "{args:?}: {stderr}");
    (serde_saphyr::from_str(&String::from_utf8(stdout).unwrap()).unwrap(), stderr)
}

/// The settings of a file with this text.
#[track_caller]
fn file(text: &str) -> (Value, String) {
    let dir = TempDir::new().unwrap();
    let path = dir.path().join("run.yaml");
    fs::write(&path, text).unwrap();
    settings(&["--config", path.to_str().unwrap()])
}

#[track_caller]
fn refused(text: &str, words: &[&str]) {
    let dir = TempDir::new().unwrap();
    let path = dir.path().join("run.yaml");
    fs::write(&path, text).unwrap();
    let out = print(&["--config", path.to_str().unwrap()]);
    let stderr = String::from_utf8(out.stderr).unwrap();
    assert_eq!(out.status.code(), Some(2), "{text}: {stderr}");
    for word in words.iter().chain(&["run.yaml"]) {
        assert!(stderr.contains(word), "{text}: no {word:?} in: {stderr}");
    }
}

#[track_caller]
fn has(settings: &Value, expected: &[(&str, Value)]) {
    for (at, value) in expected {
        let (section, key) = at.split_once('.').unwrap();
        assert_eq!(settings[section][key], *value, "{at}");
    }
}

#[test]
fn named_models_have_the_sizes_in_their_comments() {
    let text = root("configs/distributed.yaml");
    let tree: Value = serde_saphyr::from_str(&text).unwrap();
    let models = tree["model_configs"].as_object().unwrap();
    assert!(models.len() > 12);
    for name in models.keys() {
        let line = text.lines().find(|line| line.trim_start().starts_with(&format!("{name}:"))).unwrap();
        let params: u64 = line.rsplit('#').next().unwrap().trim().replace(',', "").parse().unwrap();
        assert_eq!(settings(&["--model-config", name]).0["plan"]["params"], params, "{name}");
        assert!(root("docs/files.md").contains(&format!("`{name}`")), "docs/files.md has no {name}");
    }
    let text = String::from_utf8(print(&["--model-config", "gpt3"]).stderr).unwrap();
    assert!(text.contains("--model-config gpt3: no such block; built in: tiny, small,"), "{text}");
}

#[test]
fn distributed_blocks_ship_and_a_files_own_take_precedence() {
    let tiny = ["--model-config", "tiny", "--devices", "2", "--num-nodes", "1"];
    for (name, hosts, offload, again) in [
        ("single_node_fsdp", 1, false, false),
        ("multi_node_fsdp", 2, false, true),
        ("large_scale_fsdp", 8, true, true),
    ] {
        let (plan, _) = settings(&[&tiny[..], &["--fsdp-config", name]].concat());
        let fsdp = [
            ("fsdp.sharding", Value::from("FULL_SHARD")),
            ("fsdp.backward_prefetch", "BACKWARD_PRE".into()),
            ("fsdp.forward_prefetch", true.into()),
            ("fsdp.limit_all_gathers", true.into()),
            ("fsdp.use_orig_params", true.into()),
            ("fsdp.cpu_offload", offload.into()),
            ("fsdp.activation_checkpoint", again.into()),
        ];
        has(&plan, &fsdp);
        let tree: Value = serde_saphyr::from_str(&root("configs/distributed.yaml")).unwrap();
        let block = &tree["distributed_examples"][name];
        assert_eq!((&block["num_nodes"], &block["devices"]), (&hosts.into(), &8.into()), "{name}");
        assert_eq!(block["fsdp"].as_object().unwrap().len(), 8, "{name}");
    }
    let (own, _) = file("model_configs: {tiny: {num_layers: 7}}\nmodel: {embed_dim: 32, num_heads: 2}");
    assert_eq!(own["model"]["num_layers"], 4, "not picked");
    let dir = TempDir::new().unwrap();
    let path = dir.path().join("run.yaml");
    fs::write(&path, "model_configs: {tiny: {num_layers: 7, embed_dim: 32}}").unwrap();
    let path = path.to_str().unwrap();
    let (own, _) = settings(&["--config", path, "--model-config", "tiny"]);
    assert_eq!((&own["model"]["num_layers"], &own["model"]["embed_dim"]), (&7.into(), &32.into()));
    assert_eq!(settings(&["--config", path, "--model-config", "gpt"]).0["model"]["arch"], "gpt", "ships");
}

#[test]
fn keys_without_a_section() {
    let (plain, _) = file(
        "{epochs: 3, seed: 7, batch_size: 4, lr: 0.01, lora_rank: 2, strategy: ddp, devices: 1, precision: bf16, betas: [0.8, 0.9]}",
    );
    let expected = [
        ("run.epochs", Value::from(3.0)),
        ("run.seed", 7.into()),
        ("batch.batch_size", 4.into()),
        ("optim.lr", 0.01.into()),
        ("lora.rank", 2.into()),
        ("plan.strategy", "ddp".into()),
        ("plan.world_size", 1.into()),
        ("precision.precision", "bf16".into()),
        ("optim.betas", vec![0.8, 0.9].into()),
    ];
    has(&plain, &expected);
    let (read, said) = file("learning_rate: 0.02\ntraining: {per_device_train_batch_size: 3, max_steps: 9}");
    has(&read, &[("optim.lr", 0.02.into()), ("batch.batch_size", 3.into()), ("run.max_steps", 9.into())]);
    assert!(said.contains("learning_rate") && said.contains("--lr"), "{said}");
    refused("epoch: 3", &["unknown key epoch", "epochs"]);
    refused("rank: 3", &["rank is ambiguous", "lora", "lora_rank"]);
    refused("epochs: many", &["epochs", "many", "a number"]);
    refused("training: {epochs: 3}\nrun: {epochs: 4}", &["training.epochs", "run.epochs", "different values"]);
    refused("learning_rate: 0.1\noptim: {lr: 0.2}", &["learning_rate", "lr"]);
    refused(
        "training_stages: {one: {}, two: {learning_rat: 1}}",
        &["training_stages.two.learning_rat", "learning_rate"],
    );
    refused("optim: {per_device_train_batch_size: 3}", &["optim.per_device_train_batch_size"]);
    refused("steps: 100", &["steps", "max_steps", "warmup_steps"]);
}

#[test]
fn two_sections_with_one_key_stay_apart() {
    let foreign = "learning_rate: 1e-3\n";
    for (text, model, lora) in [
        ("lora: {rank: 4, dropout: 0.25}\n", json!(0.0), json!(0.25)),
        ("lora: {rank: 4}\ndropout: 0.125\n", json!(0.125), Value::Null),
        ("lora: {rank: 4}\nlora_dropout: 0.25\nmodel: {dropout: 0.125}\n", json!(0.125), json!(0.25)),
    ] {
        for text in [text.to_string(), format!("{foreign}{text}")] {
            has(&file(&text).0, &[("model.dropout", model.clone()), ("lora.dropout", lora.clone())]);
        }
    }
}

#[test]
fn logging_and_wandb_are_sections() {
    let text = "
logging: {log_every_n_steps: 5, level: INFO, metrics_path: m.jsonl, tensorboard_dir: tb, log_file: l.txt}
wandb: {project: demo, run_name: first, tags: [a, b], entity: team, enabled: false}
";
    let (read, _) = file(text);
    let expected = [
        ("run.log_every", Value::from(5)),
        ("watch.log_level", "info".into()),
        ("run.metrics_path", "m.jsonl".into()),
        ("watch.tensorboard", "tb".into()),
        ("watch.log_file", "l.txt".into()),
    ];
    has(&read, &expected);
    assert!(read["wandb"]["wandb_project"] == "demo" && read["wandb"]["wandb_mode"] == "disabled", "{read}");
    assert_eq!(read["wandb"]["wandb_tags"].as_array().unwrap().len(), 2);
    assert_eq!(file("wandb: {project: demo, mode: offline}").0["wandb"]["wandb_mode"], "offline");
    refused("wandb: {projekt: demo}", &["wandb.projekt", "wandb.project"]);
}

#[test]
fn precisions_of_other_tools() {
    for (name, means) in [
        ("bf16-mixed", "bf16"),
        ("16-mixed", "fp16"),
        ("32-true", "fp32"),
        ("32", "fp32"),
        ("16", "fp16"),
        ("float32", "fp32"),
        ("bfloat16", "bf16"),
        ("float16", "fp16"),
    ] {
        assert_eq!(file(&format!("precision: {name}")).0["precision"]["precision"], means, "{name}");
        assert_eq!(file(&format!("runtime: {{mixed_precision: {name}}}")).0["precision"]["precision"], means, "{name}");
        assert_eq!(settings(&["--precision", name]).0["precision"]["precision"], means, "{name}");
    }
    for name in ["bf16-true", "16-true", "64-true"] {
        for place in ["precision: ", "trainer: {precision: ", "precision: {precision: ", "runtime: {mixed_precision: "]
        {
            let close = if place.contains('{') { "}" } else { "" };
            refused(&format!("{place}{name}{close}"), &[name, "fp32"]);
        }
    }
}

/// Lightning's Trainer, its FSDP strategy and named blocks, in one file.
const LIGHTNING: &str = "
trainer:
  accelerator: auto
  max_epochs: 2
  precision: bf16-mixed
  accumulate_grad_batches: 2
  gradient_clip_val: 0.5
  log_every_n_steps: 7
  sync_batchnorm: false
  num_sanity_val_steps: 0
  benchmark: true
  deterministic: true
  enable_checkpointing: true
  enable_progress_bar: true
  callbacks: []
distributed:
  strategy: fsdp
  num_nodes: 1
  devices: auto
  sync_batchnorm: false
  find_unused_parameters: false
  fsdp:
    enabled: true
    sharding_strategy: FULL_SHARD
    state_dict_type: sharded
    sync_module_states: true
    cpu_ram_efficient_loading: true
    backward_prefetch: BACKWARD_PRE
dataloader: {num_workers: 4, pin_memory: true}
optimizer: {type: AdamW, lr: 2.0e-4, weight_decay: 0.01}
scheduler: {type: cosine, warmup_steps: 5}
";

/// What `accelerate config` writes.
const ACCELERATE: &str = "
compute_environment: LOCAL_MACHINE
debug: false
distributed_type: FSDP
downcast_bf16: 'no'
enable_cpu_affinity: false
fsdp_config:
  fsdp_activation_checkpointing: true
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_backward_prefetch: BACKWARD_POST
  fsdp_cpu_ram_efficient_loading: true
  fsdp_forward_prefetch: false
  fsdp_offload_params: false
  fsdp_sharding_strategy: SHARD_GRAD_OP
  fsdp_state_dict_type: SHARDED_STATE_DICT
  fsdp_sync_module_states: true
  fsdp_transformer_layer_cls_to_wrap: LlamaDecoderLayer
  fsdp_use_orig_params: true
  fsdp_version: 1
machine_rank: 0
main_training_function: main
mixed_precision: bf16
num_machines: 1
num_processes: 2
rdzv_backend: static
same_network: true
tpu_env: []
tpu_use_cluster: false
tpu_use_sudo: false
use_cpu: false
";

#[test]
fn files_of_other_tools_are_read_whole() {
    let (lightning, said) = file(LIGHTNING);
    assert!(said.contains("keys of") && said.contains("--verbose lists them"), "{said}");
    let (_, said) = file(&format!("{LIGHTNING}\nverbose: true"));
    let expected = [
        ("run.epochs", Value::from(2.0)),
        ("precision.precision", "bf16".into()),
        ("batch.grad_accum", 2.into()),
        ("optim.grad_clip", 0.5.into()),
        ("run.log_every", 7.into()),
        ("optim.optimizer", "adamw".into()),
        ("optim.weight_decay", 0.01.into()),
        ("optim.lr_scheduler", "cosine".into()),
        ("optim.warmup_steps", 5.into()),
        ("plan.strategy", "fsdp".into()),
    ];
    has(&lightning, &expected);
    assert!(said.contains("num_workers") && said.contains("has no effect here"), "{said}");
    for (from, to, words) in [
        (
            "  sync_batchnorm: false\n  num_san",
            "  sync_batchnorm: true\n  num_san",
            ["sync_batchnorm", "batch normalization"],
        ),
        ("find_unused_parameters: false", "find_unused_parameters: true", ["find_unused_parameters", "gradient"]),
        (
            "num_sanity_val_steps: 0",
            "num_sanity_val_steps: 2",
            ["num_sanity_val_steps", "evaluation runs only after a step"],
        ),
        ("callbacks: []", "callbacks: [{class: X}]", ["trainer.callbacks", "a value or a list"]),
        ("callbacks: []", "kallbacks: []", ["trainer.kallbacks", "unknown key"]),
        ("pin_memory", "pinn_memory", ["dataloader.pinn_memory", "unknown key"]),
    ] {
        refused(&LIGHTNING.replace(from, to), &words);
    }

    let (accelerate, _) = file(ACCELERATE);
    let expected = [
        ("fsdp.sharding", Value::from("SHARD_GRAD_OP")),
        ("fsdp.auto_wrap", "transformer".into()),
        ("fsdp.backward_prefetch", "BACKWARD_POST".into()),
        ("fsdp.forward_prefetch", false.into()),
        ("fsdp.activation_checkpoint", true.into()),
        ("precision.precision", "bf16".into()),
        ("plan.world_size", 2.into()),
    ];
    has(&accelerate, &expected);
    refused(&ACCELERATE.replace("fsdp_version: 1", "fsdp_verzion: 1"), &["fsdp_config.fsdp_verzion"]);
    refused(&ACCELERATE.replace("LOCAL_MACHINE", "AMAZON_SAGEMAKER"), &["compute_environment"]);
}

/// The first columns of the table in docs/differences.md.
#[test]
fn the_table_of_defaults_is_right() {
    let defaults: Value = serde_saphyr::from_str(&root("src/run/settings/defaults.yaml")).unwrap();
    let page = root("docs/differences.md");
    let table = page.split("\n## Defaults\n").nth(1).unwrap().split("\n## ").next().unwrap();
    let rows = table.lines().filter_map(|line| line.strip_prefix("| `")?.split_once("` | "));
    let mut count = 0;
    for (setting, rest) in rows {
        let (section, key) = setting.split_once('.').unwrap();
        let (ours, value) = (rest.split(" |").next().unwrap(), &defaults[section][key]);
        let agree = match value {
            Value::Bool(on) => ours == if *on { "on" } else { "off" },
            Value::Number(x) => ours.parse() == Ok(x.as_f64().unwrap()),
            Value::Array(items) => ours == items.iter().map(Value::to_string).collect::<Vec<_>>().join(" "),
            other => other.as_str() == Some(ours),
        };
        assert!(agree, "docs/differences.md: {setting} is {ours}, defaults.yaml has {value}");
        assert_eq!(rest.matches(" |").count() + 1, 9, "columns of {setting}");
        count += 1;
    }
    assert!(count > 20);
}
