//! Engines selected by flags and by DeepSpeed's file, from outside: what each key becomes, which keys are refused with
//! which message, and that every engine reports the same numbers for the same run.
mod refused;

use crate::common::runs::unlaunched;
use flatshard::optim::ScalerOptions;
use serde_json::{Value, json};
use std::fs;
use std::path::Path;
use std::process::Output;
use tempfile::TempDir;

const TINY: [&str; 10] =
    ["--dataset", "synthetic", "--embed-dim", "32", "--num-layers", "2", "--max-len", "16", "--nproc-per-node", "2"];

fn run(program: &str, args: &[&str]) -> Output {
    let mut command = unlaunched(program);
    command.args(TINY).args(args).output().unwrap()
}
fn fsdp(args: &[&str]) -> Output {
    run(crate::common::binaries::FSDP, args)
}
/// `--print-config` with these arguments.
fn config(args: &[&str]) -> Value {
    let out = fsdp(&[args, &["--print-config"]].concat());
    assert!(out.status.success(), "{args:?}: {}", String::from_utf8_lossy(&out.stderr));
    serde_saphyr::from_str(&String::from_utf8(out.stdout).unwrap()).unwrap()
}
/// Asserts status 2 and a message that contains all of `parts`.
#[track_caller]
fn refused(args: &[&str], parts: &[&str]) {
    let out = fsdp(args);
    let text = String::from_utf8_lossy(&out.stderr).into_owned();
    assert_eq!(out.status.code(), Some(2), "{args:?}: {text}");
    for part in parts {
        assert!(text.contains(part), "{args:?}: no {part:?} in: {text}");
    }
}

/// A DeepSpeed file for the duration of a call.
fn with_file<T>(body: &Value, f: impl FnOnce(&str) -> T) -> T {
    let dir = TempDir::new().unwrap();
    let path = dir.path().join("ds.json");
    fs::write(&path, body.to_string()).unwrap();
    f(path.to_str().unwrap())
}
fn read(body: Value, more: &[&str]) -> Value {
    with_file(&body, |path| config(&[&["--deepspeed", path], more].concat()))
}
#[track_caller]
fn faulty(body: Value, more: &[&str], parts: &[&str]) {
    with_file(&body, |path| refused(&[&["--deepspeed", path], more].concat(), &[&["ds.json"], parts].concat()));
}
/// Stage 2 and the given keys.
fn two(more: Value) -> Value {
    let mut body = json!({"zero_optimization": {"stage": 2}});
    for (key, value) in more.as_object().unwrap() {
        match body[key].as_object_mut() {
            Some(block) => block.extend(value.as_object().unwrap().clone()),
            None => body[key] = value.clone(),
        }
    }
    body
}

#[test]
fn every_engine_reports_the_numbers_of_manual_fsdp() {
    let dir = TempDir::new().unwrap();
    let numbers = |name: &str, engine: &[&str]| -> Vec<(String, String)> {
        let path = dir.path().join(name);
        let common = ["--device", "cpu", "--max-steps", "3", "--batch-size", "2", "--no-sample", "--lr", "0.1"];
        let out = fsdp(&[&common, engine, &["--metrics-path", path.to_str().unwrap()]].concat());
        assert!(out.status.success(), "{engine:?}: {}", String::from_utf8_lossy(&out.stderr));
        steps(&path).into_iter().map(|s| (s["loss"].to_string(), s["grad_norm"].to_string())).collect()
    };
    let manual = numbers("manual", &[]);
    assert_eq!(manual.len(), 3);
    for engine in [
        &["--fsdp-impl", "reference"][..],
        &["--fsdp-impl", "reference", "--sharding", "SHARD_GRAD_OP"],
        &["--backend", "zero"],
        &["--backend", "deepspeed", "--zero-stage", "1"],
        &["--zero-stage", "3", "--stage3-max-live-parameters", "0", "--reduce-bucket-size", "auto"],
    ] {
        assert_eq!(numbers("other", engine), manual, "{engine:?}");
    }
}

fn steps(path: &Path) -> Vec<Value> {
    let text = fs::read_to_string(path).unwrap();
    let events = text.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
    events.filter(|e| e["event"] == "step").collect()
}

#[test]
fn flags_select_an_engine_and_settings_it_does_not_have_are_refused() {
    for (args, name) in [
        (&[][..], "fsdp"),
        (&["--fsdp-impl", "reference"], "fsdp_reference"),
        (&["--backend", "zero"], "zero_2"),
        (&["--zero-stage", "1"], "zero_1"),
        (&["--zero-stage", "3"], "zero_3"),
    ] {
        assert_eq!(config(args)["plan"]["strategy"], name, "{args:?}");
    }
    // The printed configuration is resolved, and a valid settings file.
    let dir = TempDir::new().unwrap();
    for args in [&["--fsdp-impl", "reference"][..], &["--zero-stage", "3"]] {
        let out = fsdp(&[args, &["--print-config"]].concat());
        let path = dir.path().join("printed.yaml");
        fs::write(&path, &out.stdout).unwrap();
        let again = fsdp(&["--config", path.to_str().unwrap(), "--print-config"]);
        assert_eq!(String::from_utf8(again.stdout).unwrap(), String::from_utf8(out.stdout).unwrap(), "{args:?}");
    }
    config(&["--fsdp-impl", "reference", "--backward-prefetch", "NONE", "--no-forward-prefetch"]); // as it does
    for (args, parts) in [
        (&["--fsdp-impl", "reference", "--auto-wrap", "size"][..], ["--auto-wrap size", "reference"]),
        (&["--fsdp-impl", "reference", "--backward-prefetch", "BACKWARD_PRE"], ["BACKWARD_PRE", "--fsdp-impl manual"]),
        (&["--fsdp-impl", "reference", "--sharding", "NO_SHARD"], ["NO_SHARD", "reference"]),
        (&["--backend", "zero", "--sharding", "FULL_SHARD"], ["--sharding FULL_SHARD", "--backend zero"]),
        (&["--backend", "zero", "--forward-prefetch"], ["--forward-prefetch", "--backend zero"]),
        (&["--backend", "zero", "--fsdp-impl", "reference"], ["--fsdp-impl reference", "--backend zero"]),
        (&["--backend", "fsdp", "--zero-stage", "2"], ["--zero-stage 2", "--backend zero"]),
        (&["--overlap-comm"], ["--overlap-comm", "--backend zero"]),
        (&["--zero-stage", "0"], ["zero_stage is 0", "run_ddp"]),
        (&["--zero-stage", "2", "--stage3-max-live-parameters", "5e8"], ["--stage3-max-live-parameters", "stage 3"]),
        (&["--zero-stage", "3", "--allgather-bucket-size", "5e8"], ["--allgather-bucket-size", "stages 1 and 2"]),
        (&["--zero-stage", "2", "--reduce-bucket-size", "0.5"], ["--reduce-bucket-size", "0.5"]),
        (&["--zero-stage", "2", "--strategy", "ddp"], ["ddp", "keep all weights"]),
    ] {
        refused(args, &parts);
    }
    let out = run(crate::common::binaries::DDP, &["--zero-stage", "2", "--print-config"]);
    assert_eq!(out.status.code(), Some(2), "run_ddp does not do ZeRO");
}

#[test]
fn keys_of_the_file_become_settings() {
    let body = json!({
        "train_batch_size": 24, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 3,
        "gradient_clipping": 0.5, "steps_per_print": 7, "communication_data_type": "fp32",
        "prescale_gradients": false, "gradient_predivide_factor": 1.0, "wall_clock_breakdown": false, "dump_state": false,
        "bf16": {"enabled": true, "bf16_master_weights_and_grads": false},
        "fp16": {"enabled": false, "loss_scale": 0, "initial_scale_power": 16, "hysteresis": 2},
        "optimizer": {"type": "AdamW", "params": {"lr": 3e-4, "betas": [0.8, 0.99], "eps": 1e-7, "weight_decay": 0.2}},
        "scheduler": {"type": "WarmupDecayLR", "params": {
            "warmup_type": "linear", "warmup_min_lr": 0, "warmup_max_lr": 3e-4, "warmup_num_steps": 5, "total_num_steps": 50
        }},
        "zero_optimization": {
            "stage": 3, "reduce_bucket_size": 2e8, "overlap_comm": false, "contiguous_gradients": true,
            "reduce_scatter": true, "allgather_partitions": true, "round_robin_gradients": true, "sub_group_size": 1e9,
            "stage3_prefetch_bucket_size": 1e6, "stage3_max_live_parameters": 1e9, "stage3_max_reuse_distance": 2e7,
            "stage3_param_persistence_threshold": 0, "stage3_gather_16bit_weights_on_model_save": true,
            "offload_param": {"device": "none"}, "offload_optimizer": {"device": "none", "pin_memory": true},
            "cpu_offload": false, "zero_hpz_partition_size": 1, "zero_quantized_weights": false, "zero_quantized_gradients": false
        },
        "tensor_parallel": {"autotp_size": 1}, "checkpoint": {"load_universal": true},
        "data_types": {"grad_accum_dtype": "fp32"}, "amp": {"enabled": false}, "torch_autocast": {"enabled": false},
        "tensorboard": {"enabled": true, "output_path": "boards", "job_name": "first"}, "wandb": {"enabled": false}, "zero_allow_untested_optimizer": true
    });
    let read = read(body, &[]);
    for (section, key, value) in [
        ("batch", "batch_size", json!(4)),
        ("batch", "grad_accum", json!(3)),
        ("optim", "grad_clip", json!(0.5)),
        ("run", "log_every", json!(7)),
        ("precision", "precision", json!("bf16")),
        ("precision", "reduce_dtype", json!("fp32")),
        ("optim", "optimizer", json!("adamw")),
        ("optim", "lr", json!(3e-4)),
        ("optim", "betas", json!([0.8, 0.99])),
        ("optim", "eps", json!(1e-7)),
        ("optim", "weight_decay", json!(0.2)),
        ("optim", "lr_scheduler", json!("linear")),
        ("optim", "warmup_steps", json!(5)),
        ("run", "max_steps", json!(50)),
        ("fsdp", "backend", json!("zero")),
        ("fsdp", "zero_stage", json!(3)),
        ("zero", "reduce_bucket_size", json!(200_000_000)),
        ("zero", "overlap_comm", json!(false)),
        ("zero", "stage3_prefetch_bucket_size", json!(1_000_000)),
        ("zero", "stage3_max_live_parameters", json!(1_000_000_000)),
        ("zero", "stage3_max_reuse_distance", json!(20_000_000)),
        ("checkpoint", "save_dtype", json!("bf16")),
        ("parallel", "tp_size", json!(1)),
        ("watch", "tensorboard", json!("boards/first")),
        ("plan", "strategy", json!("zero_3")),
    ] {
        let found = &read[section][key];
        let same = found == &value || found.as_f64().zip(value.as_f64()).is_some_and(|(a, b)| a == b);
        assert!(same, "{section}.{key} is {found}, not {value}");
    }
}

#[test]
fn auto_leaves_a_key_to_flags_and_sizes_to_the_width() {
    // The file of Hugging Face's documentation, stage 3.
    let body = json!({
        "bf16": {"enabled": "auto"}, "fp16": {"enabled": "auto", "loss_scale": 0, "loss_scale_window": 1000},
        "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"}},
        "zero_optimization": {
            "stage": 3, "overlap_comm": true, "contiguous_gradients": true, "sub_group_size": 1e9,
            "reduce_bucket_size": "auto", "stage3_prefetch_bucket_size": "auto",
            "stage3_param_persistence_threshold": "auto", "stage3_max_live_parameters": 1e9,
            "stage3_max_reuse_distance": 1e9, "stage3_gather_16bit_weights_on_model_save": true
        },
        "gradient_accumulation_steps": "auto", "gradient_clipping": "auto", "steps_per_print": 2000,
        "train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto", "wall_clock_breakdown": false
    });
    let flags = ["--lr", "0.5", "--grad-accum", "2", "--precision", "bf16"];
    let read = read(body, &flags);
    assert_eq!((&read["optim"]["lr"], &read["batch"]["grad_accum"]), (&json!(0.5), &json!(2)));
    assert_eq!((&read["batch"]["batch_size"], &read["precision"]["precision"]), (&json!(8), &json!("bf16")));
    assert_eq!(read["zero"]["reduce_bucket_size"], "auto");
    // Slots of gradients: a bucket of 32 x 32 holds a block at a time, the default both.
    let slots = |plan: &Value| plan["plan"]["planned_bytes"]["slots"].as_u64().unwrap();
    let automatic = config(&["--zero-stage", "2", "--reduce-bucket-size", "auto"]);
    let whole = config(&["--zero-stage", "2"]);
    assert!(slots(&automatic) < slots(&whole), "{automatic} {whole}");
}

/// DeepSpeed's own defaults and learning rates, from `tests/golden/deepspeed.py`.
fn golden(version: &str) -> Value {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/deepspeed.json");
    serde_json::from_slice::<Value>(&fs::read(path).unwrap()).unwrap()[version].clone()
}

/// `found` has the golden `defaults`, under our names.
#[track_caller]
fn has(found: &Value, defaults: &Value, names: &[(&str, &str)]) {
    for (key, name) in names {
        let (want, got) = (&defaults[key], &found[name]);
        let same = got == want || got.as_f64().zip(want.as_f64()).is_some_and(|(a, b)| a == b);
        assert!(same && !want.is_null(), "{name} is {got}; DeepSpeed's {key} is {want}");
    }
}

#[test]
fn a_missing_key_has_deepspeeds_default() {
    let defaults = golden("0.19.2")["defaults"].clone();
    let optim = |more: Value, flags: &[&str]| read(two(more), flags)["optim"].clone();
    let adam = [("lr", "lr"), ("betas", "betas"), ("eps", "eps"), ("weight_decay", "weight_decay")];
    let clip = [("gradient_clipping", "grad_clip")];
    for (more, block) in [
        (json!({}), "AdamW"),
        (json!({"optimizer": {"type": "Adam"}}), "AdamW"),
        (json!({"optimizer": {"type": "AdamW", "params": {}}}), "AdamW"),
        (json!({"optimizer": {"type": "AdamW", "params": {"torch_adam": true}}}), "torch_adam"),
    ] {
        let found = optim(more, &[]);
        has(&found, &defaults[block], &adam);
        has(&found, &defaults, &clip);
        assert_eq!((&found["lr_scheduler"], &found["warmup_steps"]), (&json!("constant"), &json!(0)));
    }
    let sgd = [("lr", "lr"), ("momentum", "momentum"), ("weight_decay", "weight_decay")];
    has(&optim(json!({"optimizer": {"type": "SGD"}}), &[]), &defaults["SGD"], &sgd);
    has(&optim(json!({}), &["--optimizer", "sgd"]), &defaults["SGD"], &sgd);
    for (kind, shape) in
        [("WarmupLR", "constant"), ("WarmupDecayLR", "linear"), ("WarmupCosineLR", "cosine_with_min_lr")]
    {
        let found = optim(json!({"scheduler": {"type": kind}}), &[]);
        has(&found, &defaults[kind], &[("warmup_num_steps", "warmup_steps"), ("warmup_type", "warmup_type")]);
        assert_eq!(found["lr_scheduler"], shape);
    }
    let cosine = optim(json!({"scheduler": {"type": "WarmupCosineLR"}}), &[]);
    has(&cosine, &defaults["WarmupCosineLR"], &[("cos_min_ratio", "min_lr_ratio")]);
    let scaler = [("loss_scale_window", "loss_scale_window"), ("hysteresis", "hysteresis")];
    for (more, flags) in [(json!({"fp16": {"enabled": true}}), &[][..]), (json!({}), &["--precision", "fp16"])] {
        has(&read(two(more), flags)["precision"], &defaults["fp16"], &scaler);
    }
    let ours = ScalerOptions::default();
    let same = json!({"initial_scale_power": ours.initial.log2() as u32, "min_loss_scale": ours.min as u32,
                      "consecutive_hysteresis": ours.consecutive_hysteresis});
    same.as_object().unwrap().iter().for_each(|(key, value)| assert_eq!(&defaults["fp16"][key], value, "{key}"));

    // The page's table.
    let page = fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("docs/deepspeed.md")).unwrap();
    let rows = page.lines().filter(|line| line.starts_with('|')).skip(2);
    let rows: Vec<Vec<&str>> =
        rows.map(|row| row.split('|').map(|cell| cell.trim().trim_matches('`')).collect()).collect();
    for row in &rows {
        let block = if row[1].is_empty() { &defaults } else { &defaults[row[1]] };
        let shown: Value = serde_json::from_str(row[3]).unwrap();
        has(&json!({row[2]: shown}), block, &[(row[2], row[2])]);
    }
    assert_eq!(rows.len(), 25);

    // A newer version differs only in clipping, which the run logs.
    let mut newer = golden("0.19.8");
    assert_eq!(newer["defaults"]["gradient_clipping"], 1.0);
    newer["defaults"]["gradient_clipping"] = json!(0.0);
    assert_eq!(newer, golden("0.19.2"));
    for (more, said) in [(json!({}), true), (json!({"gradient_clipping": 0}), false)] {
        let flags = ["--max-steps", "1", "--batch-size", "1", "--no-sample", "--no-eval"];
        let out = with_file(&two(more), |path| fsdp(&[&["--deepspeed", path], &flags[..]].concat()));
        let text = String::from_utf8_lossy(&out.stderr).into_owned();
        assert!(out.status.success(), "{text}");
        assert_eq!(text.contains("ds.json has no gradient_clipping: gradients are not clipped"), said, "{text}");
    }
}

#[test]
fn explicit_values_override_deepspeeds_defaults_and_auto_overrides_none() {
    let blocks = |value: Value| {
        json!({
            "gradient_clipping": value,
            "optimizer": {"type": "AdamW", "params": {"lr": value, "betas": value, "eps": value, "weight_decay": value}},
            "scheduler": {"type": "WarmupCosineLR", "params": {
                "warmup_num_steps": value, "warmup_type": value, "cos_min_ratio": value, "total_num_steps": value
            }}
        })
    };
    let flags = "--grad-clip 0.75 --lr 0.5 --betas 0.8 0.7 --eps 0.25 --weight-decay 0.3 --warmup-steps 3 \
                 --warmup-type linear --min-lr-ratio 0.2";
    let flags: Vec<&str> = flags.split_whitespace().collect();
    for value in [Value::Null, json!("auto")] {
        let found = &read(two(blocks(value)), &flags)["optim"];
        let want = json!({"grad_clip": 0.75, "lr": 0.5, "betas": [0.8, 0.7], "eps": 0.25, "weight_decay": 0.3,
                          "warmup_steps": 3, "warmup_type": "linear", "min_lr_ratio": 0.2});
        want.as_object().unwrap().iter().for_each(|(key, value)| assert_eq!(&found[key], value, "{key}"));
    }
    // "auto" without a flag: optimizer values are DeepSpeed's and Hugging Face's, the rest are ours.
    let (auto, ours) = (&read(two(blocks(json!("auto"))), &[])["optim"], &config(&[])["optim"]);
    let adam = ["lr", "betas", "eps", "weight_decay"];
    has(auto, &golden("0.19.2")["defaults"]["AdamW"], &adam.map(|key| (key, key)));
    for key in ["grad_clip", "warmup_steps", "warmup_type"] {
        assert_eq!(auto[key], ours[key], "{key}");
    }
    assert_eq!(auto["min_lr_ratio"], 0.1);
    // A fine-tune has the values of its task, where DeepSpeed leaves them to the program.
    let model = format!("{}/tests/golden/pretrained/llama", env!("CARGO_MANIFEST_DIR"));
    let tuned = |blocks: Value| {
        let pretrained = |path: &str| {
            let mut command = unlaunched(crate::common::binaries::FSDP);
            command.args(["--pretrain", &model, "--dataset", "synthetic", "--print-config", "--deepspeed", path]);
            let out = command.output().unwrap();
            assert!(out.status.success(), "{}", String::from_utf8_lossy(&out.stderr));
            serde_saphyr::from_str::<Value>(&String::from_utf8(out.stdout).unwrap()).unwrap()
        };
        let optim = &with_file(&two(blocks), pretrained)["optim"];
        [optim["lr"].clone(), optim["lr_scheduler"].clone()]
    };
    let task = [json!(2e-5), json!("cosine")];
    assert_eq!(tuned(json!({})), task);
    assert_eq!(tuned(json!({"optimizer": {"type": "AdamW", "params": {"lr": "auto"}}})), task);
    assert_eq!(tuned(json!({"optimizer": {"type": "AdamW", "params": {}}})), [json!(1e-3), json!("cosine")]);
    // A configuration file sets values too.
    let dir = TempDir::new().unwrap();
    let yaml = dir.path().join("a.yaml");
    fs::write(&yaml, "optim: {weight_decay: 0.4}\n").unwrap();
    assert_eq!(read(two(json!({})), &["--config", yaml.to_str().unwrap()])["optim"]["weight_decay"], 0.4);
    // DeepSpeed's peak of this one schedule overrides the optimizer's rate.
    let decay = |params: Value| json!({"optimizer": {"type": "AdamW", "params": {"lr": 0.25}}, "scheduler": {"type": "WarmupDecayLR", "params": params}});
    faulty(two(decay(json!({}))), &[], &["warmup_max_lr is missing", "0.001", "0.25", "auto"]);
    assert_eq!(read(two(decay(json!({"warmup_max_lr": "auto"}))), &[])["optim"]["lr"], 0.25);
    assert_eq!(read(two(decay(json!({}))), &["--lr", "0.25"])["optim"]["lr"], 0.25);
}

/// The learning rates of a run with a file's schedule.
fn rates(body: &Value, flags: &[&str]) -> Vec<f64> {
    let dir = TempDir::new().unwrap();
    let metrics = dir.path().join("m.jsonl");
    let common = "--device cpu --batch-size 1 --no-sample --no-eval --embed-dim 16 --num-layers 1 --metrics-path";
    let common: Vec<&str> = common.split(' ').chain([metrics.to_str().unwrap()]).collect();
    let out = with_file(body, |path| fsdp(&[&["--deepspeed", path], &common[..], flags].concat()));
    assert!(out.status.success(), "{body}: {}", String::from_utf8_lossy(&out.stderr));
    steps(&metrics).iter().map(|step| step["lr"].as_f64().unwrap()).collect()
}
#[track_caller]
fn close(found: &[f64], want: &[f64]) {
    assert_eq!(found.len(), want.len());
    let near = |(a, b): (&f64, &f64)| (a - b).abs() <= 1e-6 * b.abs();
    assert!(found.iter().zip(want).all(near), "{found:?} is not {want:?}");
}

/// DeepSpeed's scheduler counts from 0, where our steps count from 1. (Its engine stays at 0 for one more step: it
/// takes the first before the scheduler has started.)
#[test]
fn schedules_have_deepspeeds_learning_rates() {
    for schedule in golden("0.19.2")["schedules"].as_array().unwrap() {
        let (kind, params) = (schedule["type"].as_str().unwrap(), &schedule["params"]);
        let mut want: Vec<f64> = schedule["lrs"].as_array().unwrap().iter().map(|lr| lr.as_f64().unwrap()).collect();
        if kind == "WarmupCosineLR" {
            let peak = params["warmup_num_steps"].as_u64().unwrap() as usize - 1;
            want.insert(peak, want[peak]); // its cosine is one step ahead of ours
            want.pop();
        }
        let adamw = json!({"type": "AdamW", "params": {"lr": if kind == "WarmupCosineLR" { json!(0.02) } else { json!("auto") }}});
        let body = two(json!({"optimizer": adamw, "scheduler": {"type": kind, "params": params}}));
        close(&rates(&body, if kind == "WarmupLR" { &["--max-steps", "12"] } else { &[] }), &want);
    }
}

/// The file of Hugging Face's documentation for stage 2, whose schedule rises logarithmically since it does not say
/// how.
#[test]
fn the_standard_file_of_hugging_face_works_with_either_schedule() {
    let body = |scheduler: Value| {
        json!({
            "fp16": {"enabled": "auto", "loss_scale": 0, "loss_scale_window": 1000, "initial_scale_power": 16,
                     "hysteresis": 2, "min_loss_scale": 1},
            "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"}},
            "scheduler": scheduler,
            "zero_optimization": {
                "stage": 2, "offload_optimizer": {"device": "cpu", "pin_memory": true}, "allgather_partitions": true,
                "allgather_bucket_size": 2e8, "overlap_comm": true, "reduce_scatter": true, "reduce_bucket_size": 2e8,
                "contiguous_gradients": true, "round_robin_gradients": true
            },
            "gradient_accumulation_steps": "auto", "gradient_clipping": "auto", "steps_per_print": 2000,
            "train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto", "wall_clock_breakdown": false
        })
    };
    let warmup = |more: Value| {
        let mut params = json!({"warmup_min_lr": "auto", "warmup_max_lr": "auto", "warmup_num_steps": "auto"});
        params.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        params
    };
    let flags = ["--lr", "0.02", "--warmup-steps", "4", "--max-steps", "8"];
    let rise = [0.0, 0.01, 0.02 * 3f64.ln() / 4f64.ln(), 0.02];
    let constant = rates(&body(json!({"type": "WarmupLR", "params": warmup(json!({}))})), &flags);
    close(&constant, &[&rise[..], &[0.02; 4]].concat());
    let decay = json!({"type": "WarmupDecayLR", "params": warmup(json!({"total_num_steps": "auto"}))});
    close(&rates(&body(decay), &flags), &[&rise[..], &[0.02, 0.015, 0.01, 0.005]].concat());
}

#[test]
fn the_batch_equation_is_solved_or_shown_with_its_numbers() {
    let solved = |body: Value, more: &[&str]| {
        let read = read(two(body), more);
        [&read["batch"]["batch_size"], &read["batch"]["grad_accum"]].map(|n| n.as_u64().unwrap())
    };
    assert_eq!(solved(json!({"train_batch_size": 12}), &[]), [6, 1]);
    assert_eq!(solved(json!({"train_batch_size": 12, "train_micro_batch_size_per_gpu": 2}), &[]), [2, 3]);
    assert_eq!(solved(json!({"train_batch_size": 12, "gradient_accumulation_steps": 2}), &[]), [3, 2]);
    assert_eq!(solved(json!({"train_batch_size": 12}), &["--batch-size", "3"]), [3, 2]);
    assert_eq!(solved(json!({"train_micro_batch_size_per_gpu": 5}), &[]), [5, 1]);
    let all = |train: u64| json!({"train_batch_size": train, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 3});
    let equation = "train_batch_size 13 must be batch_size x grad_accum x data-parallel ranks";
    with_file(&two(all(13)), |path| refused(&["--deepspeed", path], &[equation, "2 x 3 x 2 = 12"]));
    refused(&["--train-batch-size", "13"], &[equation, "? x ? x 2 has no integer solution"]);
    refused(&["--train-batch-size", "13", "--batch-size", "4"], &[equation, "4 x ? x 2"]);
}

#[test]
fn offload_blocks_become_a_mode_of_cpu_offload() {
    let cpu = || json!({"device": "cpu", "pin_memory": true});
    let offloaded = |block: Value| {
        let mut body = json!({"zero_optimization": {"stage": 3}});
        body["zero_optimization"].as_object_mut().unwrap().extend(block.as_object().unwrap().clone());
        body
    };
    let mode = |block: Value| read(offloaded(block), &["--device", "cpu"])["fsdp"]["cpu_offload"].clone();
    assert_eq!(mode(json!({"offload_optimizer": cpu()})), "optimizer");
    assert_eq!(mode(json!({"offload_optimizer": cpu(), "offload_param": cpu()})), true);
    assert_eq!(mode(json!({"offload_optimizer": {"device": "none"}})), false);
    faulty(offloaded(json!({"offload_param": cpu()})), &[], &["offload_param.device", "offload_optimizer"]);
    let half = json!({"offload_optimizer": {"device": "cpu", "ratio": 0.5}});
    faulty(offloaded(half), &[], &["offload_optimizer.ratio is 0.5"]);
    let given = json!({"offload_optimizer": cpu()});
    faulty(offloaded(given), &["--cpu-offload", "gradients"], &["offload_optimizer", "--cpu-offload"]);
}
