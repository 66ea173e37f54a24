//! The command line from outside: help, files, precedence, and errors reported before anything starts.
use crate::common::runs::unlaunched;
use serde_json::Value;
use std::fs;
use std::path::Path;
use std::process::{Command, Output};
use tempfile::TempDir;

use crate::common::binaries::{DDP, FSDP};
/// A data set without files and a model that trains fast.
const TINY: [&str; 8] = ["--dataset", "synthetic", "--embed-dim", "32", "--num-layers", "1", "--max-len", "16"];

fn output(program: &str, args: &[&str]) -> Output {
    let mut command = unlaunched(program);
    command.args(args).output().unwrap()
}
/// Standard output of a run that must succeed.
fn good(args: &[&str]) -> String {
    let out = output(FSDP, args);
    let (stdout, stderr) = (String::from_utf8_lossy(&out.stdout), String::from_utf8_lossy(&out.stderr));
    assert!(out.status.success(), "{args:?}: {}\n{stdout}\n{stderr}", out.status);
    stdout.into_owned()
}
/// The message of a run that must be refused: status 2, one `error:` line, no standard output.
fn refused(args: &[&str]) -> String {
    let out = output(FSDP, args);
    let stderr = String::from_utf8_lossy(&out.stderr).into_owned();
    assert_eq!(out.status.code(), Some(2), "{args:?}: {}\n{stderr}", out.status);
    assert!(out.stdout.is_empty(), "{args:?} printed {}", String::from_utf8_lossy(&out.stdout));
    assert_eq!(stderr.matches("error: ").count(), 1, "{args:?}: {stderr}");
    assert!(stderr.starts_with("error: "), "{args:?}: {stderr}");
    stderr
}
/// `refused`, and the message contains all of `parts`.
#[track_caller]
fn refused_with(args: &[&str], parts: &[&str]) {
    let message = refused(args);
    for part in parts {
        assert!(message.contains(part), "{args:?}: no {part:?} in: {message}");
    }
}
fn tiny(more: &[&str]) -> Vec<String> {
    TINY.iter().chain(more).map(|s| s.to_string()).collect()
}
fn refused_tiny(more: &[&str], parts: &[&str]) {
    let args = tiny(more);
    refused_with(&args.iter().map(String::as_str).collect::<Vec<_>>(), parts);
}
/// `--print-config` with these arguments, read back.
fn config(more: &[&str]) -> Value {
    let args = tiny(more);
    let mut args: Vec<&str> = args.iter().map(String::as_str).collect();
    args.push("--print-config");
    serde_saphyr::from_str(&good(&args)).unwrap()
}
fn file(dir: &TempDir, name: &str, text: &str) -> String {
    let path = dir.path().join(name);
    fs::write(&path, text).unwrap();
    path.to_str().unwrap().to_string()
}

/// Every flag of CONTRACT's table.
const FLAGS: &str = "nproc-per-node device seed epochs max-steps log-every metrics-path [no-]compile pretrain arch \
embed-dim \
     num-layers num-heads num-kv-heads ff-hidden-dim num-experts num-experts-per-tok vocab-size dropout dataset dataset-weights eval-dataset tokenizer \
     input-key output-key \
     [no-]apply-chat-template [no-]multiturn tokenizer-chat-template [no-]pretrain-mode [no-]skip-bad-rows \
     input-template [no-]packing-samples [no-]group-by-length max-len max-samples [no-]shuffle [no-]cache cache-dir \
     cache-limit optimizer lr betas eps \
     weight-decay warmup-steps warmup-type lr-scheduler grad-clip batch-size grad-accum train-batch-size backend \
     fsdp-impl sharding auto-wrap \
     backward-prefetch [no-]forward-prefetch [no-]limit-all-gathers [no-]use-orig-params [no-]activation-checkpoint memory-budget \
     activation-checkpoint-every \
     [no-]cpu-offload [no-]sync-each-batch zero-stage deepspeed reduce-bucket-size [no-]overlap-comm \
     allgather-bucket-size stage3-prefetch-bucket-size stage3-max-live-parameters stage3-max-reuse-distance precision \
     reduce-dtype loss-scale initial-scale-power loss-scale-window hysteresis \
     [no-]consecutive-hysteresis min-loss-scale tp-size ep-size [no-]moe-overlap [no-]use-hf-tp-plan \
     ring-attn-size sp-impl ring-impl [no-]sequence-parallel dp-replicate-size ckpt-dir save-every keep resume save-hf \
     [no-]overwrite [no-]async-save max-shard-size save-dtype \
     log-level log-file tensorboard max-new-tokens temperature top-k top-p generate config \
     model-config fsdp-config print-config";

#[test]
fn help_all_lists_every_flag_with_its_default() {
    for program in [FSDP, DDP] {
        let out = output(program, &["--help-all"]);
        assert!(out.status.success());
        let help = String::from_utf8(out.stdout).unwrap();
        let line = |flag: &str| {
            let found = help.lines().find(|l| l.trim_start().split(' ').any(|w| w == format!("--{flag}")));
            found.unwrap_or_else(|| panic!("--{flag} is not in the help of {program}"))
        };
        for flag in FLAGS.split_whitespace() {
            line(flag);
        }
        // Every setting shows its default; files and actions have none.
        let settings = help.split("Run:").nth(1).unwrap();
        for line in settings.lines().filter(|l| l.trim_start().starts_with("--")) {
            assert!(line.contains("[default: "), "no default: {line}");
        }
        assert!(line("lr").contains("0.001") && line("betas").contains("0.9 0.95"));
        assert!(line("max-len").contains("<TOKENS>") && line("comm-timeout").contains("<SECONDS>"));
    }
}

#[test]
fn unknown_flags_and_values_are_named_with_the_nearest() {
    refused_with(&["--bacth-size", "8"], &["--bacth-size", "--batch-size"]);
    refused_with(&["--grad_acum", "8"], &["--grad-acum", "--grad-accum"]);
    refused_with(&["--no-shufle"], &["--no-shufle", "--shuffle"]);
    refused_with(&["--arch", "lama"], &["lama", "llama"]);
    refused_with(&["--lr", "fast"], &["fast", "--lr"]);
    refused_with(&["--batch-size", "2.5"], &["2.5", "--batch-size"]);
    refused_with(&["--betas", "0.9"], &["--betas"]);
    refused_with(&["train"], &["train"]);
}

#[test]
fn dashes_underscores_and_off_switches() {
    let with = config(&[
        "--grad_accum",
        "3",
        "--batch_size=5",
        "--no-shuffle",
        "--activation_checkpoint",
        "--local_rank",
        "0",
    ]);
    assert_eq!((&with["batch"]["grad_accum"], &with["batch"]["batch_size"]), (&3.into(), &5.into()));
    assert_eq!((&with["data"]["shuffle"], &with["fsdp"]["activation_checkpoint"]), (&false.into(), &true.into()));
    let twice = config(&["--shuffle", "--no-shuffle", "--shuffle", "--lr", "1", "--lr", "0.5", "--devices", "3"]);
    assert_eq!((&twice["data"]["shuffle"], &twice["optim"]["lr"]), (&true.into(), &0.5.into()));
    assert_eq!(twice["plan"]["world_size"], 3);
}

#[test]
fn a_printed_configuration_is_a_configuration() {
    let dir = TempDir::new().unwrap();
    let args = tiny(&["--lr", "0.02", "--betas", "0.8", "0.9", "--grad-accum", "2", "--print-config"]);
    let printed = good(&args.iter().map(String::as_str).collect::<Vec<_>>());
    let path = file(&dir, "printed.yaml", &printed);
    assert_eq!(good(&["--config", &path, "--print-config"]), printed);
}

#[test]
fn defaults_then_file_then_flags() {
    let dir = TempDir::new().unwrap();
    let yaml = file(&dir, "a.yaml", "optim: {lr: 0.5, warmup_steps: 7}\nbatch: {batch_size: 3}\n");
    let config = config(&["--config", &yaml, "--lr", "0.25"]);
    assert_eq!(config["optim"]["lr"], 0.25);
    assert_eq!(config["optim"]["warmup_steps"], 7);
    assert_eq!(config["optim"]["weight_decay"], 0.1);
    assert_eq!(config["batch"]["batch_size"], 3);
    let json = file(&dir, "a.json", r#"{"optim": {"lr": 3e-4}, "precision": "bf16"}"#);
    let config = self::config(&["--config", &json]);
    assert_eq!(config["optim"]["lr"], 3e-4);
    assert_eq!(config["precision"]["precision"], "bf16");
}

#[test]
fn fuller_names_and_the_distributed_block() {
    let dir = TempDir::new().unwrap();
    let text = "
runtime: {mixed_precision: bf16, log_every: 5, seed: 9, metrics_path: m.jsonl}
fsdp: {sharding_strategy: SHARD_GRAD_OP, auto_wrap_policy: size, activation_checkpointing: true}
training: {gradient_accumulation_steps: 2, batch_size: 3}
distributed:
  strategy: auto
  num_nodes: 1
  devices: 3
  fsdp: {enabled: true, cpu_offload: false, backward_prefetch: BACKWARD_POST, forward_prefetch: false,
         limit_all_gathers: true, use_orig_params: true}
";
    let config = config(&["--config", &file(&dir, "a.yaml", text)]);
    let expected = [
        ("precision", "precision", Value::from("bf16")),
        ("run", "log_every", 5.into()),
        ("run", "seed", 9.into()),
        ("run", "metrics_path", "m.jsonl".into()),
        ("fsdp", "sharding", "SHARD_GRAD_OP".into()),
        ("fsdp", "auto_wrap", "size".into()),
        ("fsdp", "activation_checkpoint", true.into()),
        ("fsdp", "backward_prefetch", "BACKWARD_POST".into()),
        ("fsdp", "forward_prefetch", false.into()),
        ("batch", "grad_accum", 2.into()),
        ("batch", "batch_size", 3.into()),
        ("plan", "world_size", 3.into()),
        ("plan", "strategy", "fsdp".into()),
    ];
    for (section, key, value) in expected {
        assert_eq!(config[section][key], value, "{section}.{key}");
    }
    let off = file(&dir, "off.yaml", "distributed: {strategy: auto, fsdp: {enabled: false}}");
    assert_eq!(self::config(&["--config", &off])["plan"]["strategy"], "ddp");
    let torn = file(&dir, "torn.yaml", "distributed: {strategy: fsdp, fsdp: {enabled: false}}");
    refused_with(&["--config", &torn], &["torn.yaml", "strategy", "enabled"]);
}

/// The file that must run unchanged (CONTRACT.md).
const CONTRACT: &str = "
model: {embed_dim: 768, num_layers: 6, num_heads: 12, ff_hidden_dim: 3072, dropout: 0.1}
runtime: {mixed_precision: bf16, log_every: 5}
fsdp: {sharding_strategy: FULL_SHARD, auto_wrap_policy: transformer, activation_checkpointing: true}
optim: {lr: 3.0e-4, warmup_steps: 200}
";

#[test]
fn shipped_files_are_read() {
    let dir = TempDir::new().unwrap();
    let contract = file(&dir, "contract.yaml", CONTRACT);
    let read = |path: &str, more: &[&str]| -> Value {
        let args = [&["--config", path, "--dataset", "synthetic", "--print-config"], more].concat();
        serde_saphyr::from_str(&good(&args)).unwrap()
    };
    let plan = read(&contract, &[]);
    assert_eq!(plan["optim"]["lr"], 3e-4);
    assert_eq!(plan["precision"]["precision"], "bf16");
    let configs = Path::new(env!("CARGO_MANIFEST_DIR")).join("configs");
    let shipped = |name: &str| configs.join(name).to_str().unwrap().to_string();
    assert_eq!(read(&shipped("fsdp_bf16.yaml"), &[]), plan);
    assert_eq!(read(&shipped("quickstart.yaml"), &[])["checkpoint"]["resume"], "auto");

    let distributed = shipped("distributed.yaml");
    let tiny = ["--model-config", "tiny"];
    let plan = read(&distributed, &[&tiny[..], &["--fsdp-config", "single_node_fsdp", "--num-heads", "2"]].concat());
    assert_eq!((&plan["model"]["embed_dim"], &plan["model"]["num_heads"]), (&64.into(), &2.into()));
    assert_eq!(plan["plan"]["world_size"], 8);
    let large = [&tiny[..], &["--fsdp-config", "large_scale_fsdp"]].concat();
    let plan = read(&distributed, &[&large[..], &["--num-nodes", "1", "--devices", "3"]].concat());
    assert_eq!(plan["plan"]["world_size"], 3);
    assert_eq!(plan["fsdp"]["cpu_offload"], true);
    let base = [&["--config", &distributed, "--dataset", "synthetic"], &large[..]].concat();
    refused_with(&base, &["num_nodes 8", "torchrun --nnodes 8 --nproc-per-node 8"]);
    refused_with(&["--config", &distributed, "--model-config", "tyni"], &["tyni", "tiny"]);
}

#[test]
fn errors_in_files_name_the_file_and_the_key() {
    let dir = TempDir::new().unwrap();
    let faults = [
        ("model: {embed_dimm: 8}", vec!["model.embed_dimm", "model.embed_dim"]),
        ("modle: {embed_dim: 8}", vec!["modle", "model"]),
        ("model: {embed_dim: wide}", vec!["model.embed_dim", "wide", "whole number"]),
        ("model: {embed_dim: -8}", vec!["model.embed_dim", "-8"]),
        ("optim: {lr: [1, 2]}", vec!["optim.lr", "number"]),
        ("optim: {betas: 0.9}", vec!["optim.betas"]),
        ("data: {shuffle: 3}", vec!["data.shuffle", "one of true, false"]),
        ("fsdp: {sharding_strategy: FULLSHARD}", vec!["fsdp.sharding", "FULLSHARD", "FULL_SHARD"]),
        ("runtime: {lr: 1}", vec!["runtime.lr", "optim"]),
        ("distributed: {nodes: 2}", vec!["distributed.nodes", "num_nodes"]),
        ("distributed: {fsdp: {shardin: x}}", vec!["shardin", "sharding"]),
        ("model: 3", vec!["model", "3"]),
        ("- a\n- b", vec!["sections"]),
        ("model: {embed_dim: 8", vec!["YAML"]),
        ("training_stages: {one: {}, two: {optim: {rl: 1}}}", vec!["optim.rl", "optim.lr"]),
    ];
    for (i, (text, parts)) in faults.iter().enumerate() {
        let name = format!("fault{i}.yaml");
        let path = file(&dir, &name, text);
        refused_with(&["--config", &path], &[&[name.as_str()], &parts[..]].concat());
    }
    refused_with(&["--config", "/no/such.yaml"], &["/no/such.yaml"]);
    let path = file(&dir, "a.json", "{\"model\": }");
    refused_with(&["--config", &path], &["a.json", "JSON"]);
}

#[test]
fn sizes_that_do_not_fit_together() {
    refused_tiny(&["--embed-dim", "100", "--num-heads", "3"], &["embed_dim 100", "num_heads 3"]);
    refused_tiny(&["--num-heads", "4", "--num-kv-heads", "3"], &["num_heads 4", "num_kv_heads 3"]);
    refused_tiny(&["--num-heads", "0"], &["num_heads is 0"]);
    refused_tiny(&["--arch", "gpt", "--num-kv-heads", "2"], &["gpt", "num_kv_heads 2"]);
    refused_tiny(&["--max-len", "64", "--max-positions", "32"], &["max_len 64", "max_positions 32"]);
    refused_tiny(&["--batch-size", "0"], &["batch_size is 0"]);
    refused_tiny(&["--grad-accum", "0"], &["grad_accum is 0"]);
    refused_tiny(&["--max-steps", "0"], &["max_steps is 0"]);
    refused_tiny(&["--max-samples", "7"], &["7 rows", "16"]);
    refused_tiny(&["--max-samples", "0"], &["max_samples is 0"]);
    refused_tiny(&["--lr", "-1"], &["lr is -1"]);
    refused_tiny(&["--betas", "0.9", "1.0"], &["betas is 1"]);
    for (flag, value, rounded) in [
        ("--betas 0.9", "0.99999999", "betas is 0.99999999, which is 1 in float32: it must be in [0, 1)"),
        ("--eps", "1e-50", "eps is 1e-50, which is 0 in float32: it must be above 0"),
        ("--lr", "1e39", "lr is 1e39, which is inf in float32"),
        ("--weight-decay", "1e39", "weight_decay is 1e39, which is inf in float32"),
        ("--grad-clip", "1e-46", "grad_clip is 1e-46, which is 0 in float32"),
    ] {
        let flags: Vec<&str> = flag.split(' ').chain([value]).collect();
        refused_tiny(&flags, &[rounded]);
    }
    refused_tiny(&["--dropout", "1"], &["dropout is 1"]);
    refused_tiny(&["--grad-clip", "-1"], &["grad_clip is -1"]);
    refused_tiny(&["--activation-checkpoint-every", "2"], &["--activation-checkpoint is off"]);
    let second = ["--activation-checkpoint", "full", "--num-layers", "3", "--activation-checkpoint-every", "2"];
    refused_tiny(&second, &["none of the 3 blocks would be recomputed", "choose 1, or --no-activation-checkpoint"]);
    refused_tiny(&["--nproc-per-node", "0"], &["nproc_per_node is 0"]);
    refused_tiny(&["--num-nodes", "2"], &["num_nodes 2", "torchrun --nnodes 2"]);
    refused_tiny(&["--strategy", "ddp", "--dp-replicate-size", "3"], &["dp_replicate 3", "2 ranks"]);
    refused_tiny(&["--embed-dim", "1048576", "--ff-hidden-dim", "1048576"], &["GiB", "--batch-size"]);
}

#[test]
fn worlds_of_the_wrong_size() {
    let launched = |variables: &[(&str, &str)], more: &[&str]| {
        let mut command = Command::new(FSDP);
        let out = command.args(tiny(more)).envs(variables.iter().copied()).output().unwrap();
        (out.status.code(), String::from_utf8_lossy(&out.stderr).into_owned())
    };
    let torchrun = [("RANK", "0"), ("WORLD_SIZE", "4"), ("LOCAL_RANK", "0"), ("LOCAL_WORLD_SIZE", "4")];
    let (code, text) = launched(&torchrun, &["--nproc-per-node", "2"]);
    assert_eq!(code, Some(2), "{text}");
    assert!(text.contains("nproc_per_node 2") && text.contains('4'), "{text}");
    let two_hosts = [("RANK", "0"), ("WORLD_SIZE", "4"), ("LOCAL_RANK", "0"), ("LOCAL_WORLD_SIZE", "2")];
    let (code, text) = launched(&two_hosts, &["--num-nodes", "3"]);
    assert_eq!(code, Some(2), "{text}");
    assert!(text.contains("num_nodes 3") && text.contains("4 ranks on 2 hosts (2 on each)"), "{text}");
    // They can be planned on one host, which has no rank of theirs.
    let out = unlaunched(FSDP).args(tiny(&["--num-nodes", "3", "--nproc-per-node", "2", "--print-config"])).output();
    let out = out.unwrap();
    let plan: Value = serde_saphyr::from_str(&String::from_utf8_lossy(&out.stdout)).unwrap();
    assert_eq!((&plan["plan"]["world_size"], &plan["run"]["num_nodes"]), (&6.into(), &3.into()), "{plan}");
    let (code, text) = launched(&[("RANK", "5"), ("WORLD_SIZE", "4"), ("LOCAL_RANK", "0")], &[]);
    assert_eq!(code, Some(2), "{text}");
}

#[test]
fn missing_or_empty_data_and_data_of_another_tokenizer() {
    let dir = TempDir::new().unwrap();
    let empty = file(&dir, "empty.txt", "");
    let short = file(&dir, "short.txt", "too short");
    let rows = file(&dir, "rows.jsonl", "{\"input_ids\": [1, 2, 3, 900]}\n");
    refused_with(&["--dataset", "/no/such/corpus"], &["/no/such/corpus"]);
    refused_with(&["--dataset", &empty], &["empty.txt"]);
    refused_with(&["--dataset", &short], &["short.txt", "--max-len"]);
    refused_with(&["--dataset", &rows, "--vocab-size", "500"], &["rows.jsonl", "900", "500"]);
    refused_with(&["--dataset", &short, "--vocab-size", "100"], &["vocab_size 100", "257"]);
    refused_with(&["--dataset", "synthetic", "--tokenizer", "no.json"], &["--tokenizer no.json"]);
}

#[test]
fn outputs_that_cannot_be_written() {
    let dir = TempDir::new().unwrap();
    let taken = file(&dir, "taken", "mine");
    let below = format!("{taken}/below");
    refused_tiny(&["--ckpt-dir", &taken], &["--ckpt-dir", "taken"]);
    refused_tiny(&["--ckpt-dir", &below], &["--ckpt-dir", "below"]);
    refused_tiny(&["--save-hf", &taken], &["--save-hf", "taken"]);
    refused_tiny(&["--save-hf", dir.path().to_str().unwrap()], &["--save-hf", "taken"]);
    refused_tiny(&["--metrics-path", dir.path().to_str().unwrap()], &["--metrics-path", "directory"]);
    refused_tiny(&["--metrics-path", &below], &["--metrics-path", "below"]);
    refused_tiny(&["--save-every", "5"], &["--save-every", "--ckpt-dir"]);
    refused_tiny(&["--resume", "auto"], &["--resume auto", "--ckpt-dir"]);
    refused_tiny(&["--resume", dir.path().to_str().unwrap()], &["--resume"]);
    refused_tiny(&["--pretrain", dir.path().to_str().unwrap()], &[dir.path().to_str().unwrap()]);
    refused_tiny(
        &["--pretrain", "./meta-llama/Llama-3.2-1B"],
        &["no such file or directory, and not a name of the hub", "OWNER/NAME@REVISION"],
    );
    assert_eq!(fs::read_to_string(taken).unwrap(), "mine", "nothing is overwritten");
    // A file that opens but cannot be written, and one that cannot be created in a writable directory.
    let long = dir.path().join("x".repeat(300));
    for (path, why) in [("/dev/full", "No space left"), (long.to_str().unwrap(), "File name too long")] {
        refused_tiny(&["--max-steps", "1", "--metrics-path", path], &["--metrics-path", path, why]);
        refused_tiny(&["--max-steps", "1", "--log-file", path], &["--log-file", path, why]);
    }
    refused_tiny(&["--max-steps", "1", "--tensorboard", long.to_str().unwrap()], &["--tensorboard", "too long"]);
    assert!(!Path::new("/dev/comm_traces").exists());
}

#[test]
fn neutral_values_pass() {
    config(&[
        "--device",
        "cpu",
        "--backend",
        "fsdp2",
        "--fsdp-impl",
        "manual",
        "--no-cpu-offload",
        "--tp-size",
        "1",
        "--ring-attn-size",
        "1",
        "--dp-replicate-size",
        "1",
        "--no-sequence-parallel",
        "--no-async-save",
        "--compile",
        "--reduce-dtype",
        "fp32",
        "--limit-all-gathers",
        "--use-orig-params",
    ]);
}

#[test]
fn loss_scaling_is_checked_and_needs_fp16() {
    refused_tiny(&["--loss-scale", "128"], &["--loss-scale", "--precision fp16"]);
    refused_tiny(&["--precision", "bf16", "--no-consecutive-hysteresis"], &["--no-consecutive-hysteresis", "fp16"]);
    let fp16 = |args: &[&str], parts: &[&str]| refused_tiny(&[&["--precision", "fp16"], args].concat(), parts);
    fp16(&["--loss-scale=-1"], &["--loss-scale -1", "above 0"]);
    fp16(&["--initial-scale-power", "127"], &["127", "at most 126"]);
    fp16(&["--loss-scale-window", "0"], &["--loss-scale-window 0", "at least 1"]);
    fp16(&["--hysteresis", "0"], &["--hysteresis 0"]);
    fp16(&["--initial-scale-power", "3", "--min-loss-scale", "16"], &["--min-loss-scale 16", "2^3 = 8"]);
    // With fp16 for reduction only, too.
    let plan = config(&["--reduce-dtype", "fp16", "--loss-scale-window", "100", "--hysteresis", "2"]);
    assert_eq!(plan["precision"]["loss_scale_window"], 100);
}

#[test]
fn the_plan_has_the_bytes_of_a_rank() {
    let fp32 = config(&[]);
    let planned = &fp32["plan"]["planned_bytes"];
    let parts = planned.as_object().unwrap().iter().filter(|(name, _)| !matches!(name.as_str(), "total" | "host"));
    let sum: u64 = parts.map(|(_, bytes)| bytes.as_u64().unwrap()).sum();
    assert_eq!(planned["total"].as_u64(), Some(sum));
    // 32 x 320 twice, 4 x 32 x 32 + 3 x 32 x 128 + 2 x 32 in the block, 32 in the last norm.
    assert_eq!(fp32["plan"]["params"], 2 * 32 * 320 + 4 * 32 * 32 + 3 * 32 * 128 + 3 * 32);
    // One rank holds as much as two together.
    let alone = config(&["--nproc-per-node", "1"]);
    let optimizer = |plan: &Value| plan["plan"]["planned_bytes"]["optimizer"].as_u64().unwrap();
    assert!(optimizer(&alone) > 19 * optimizer(&fp32) / 10);
    assert_eq!(config(&["--sharding", "NO_SHARD"])["plan"]["mesh"]["dp_replicate"], 2);
}

#[test]
fn the_token_cache_is_in_its_directory_and_a_run_works_without_one() {
    let dir = TempDir::new().unwrap();
    let text = file(&dir, "t.txt", &"some text to train on\n".repeat(100));
    let run = |more: &[&str]| {
        let tiny = "--embed-dim 32 --num-layers 1 --max-len 16 --batch-size 2 --max-steps 1 --no-sample --no-eval";
        let mut command = Command::new(FSDP);
        command.args(tiny.split(' ')).args(["--dataset", &text]).args(more);
        command.env("FLATSHARD_CACHE_DIR", dir.path().join("env")).env("TMPDIR", dir.path());
        let out = command.output().unwrap();
        let text = String::from_utf8_lossy(&out.stderr).into_owned();
        assert!(out.status.success(), "{more:?}: {text}");
        text
    };
    let files = |name: &str| fs::read_dir(dir.path().join(name)).map_or(0, |entries| entries.count());
    assert!(!run(&["--no-cache"]).contains("warning"));
    assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1, "nothing but the data is left");
    let own = dir.path().join("own").display().to_string();
    run(&["--cache-dir", &own]);
    assert_eq!((files("own"), files("env")), (1, 0));
    run(&[]);
    assert_eq!((files("own"), files("env")), (1, 1));
    // Two ranks and their launcher give one warning.
    let blocked = file(&dir, "blocked", "not a directory");
    let said = run(&["--cache-dir", &blocked]);
    assert_eq!(said.matches("warning: the token cache cannot be written: ").count(), 1, "{said}");
    assert!(said.contains(&blocked) && said.contains("--cache-dir"), "{said}");
    refused_tiny(&["--cache-limit", "0"], &["cache_limit", "\"0\"", "10GB"]);
    refused_tiny(&["--no-cache", "--cache-dir", &own], &["--cache-dir", "no effect here"]);
}
