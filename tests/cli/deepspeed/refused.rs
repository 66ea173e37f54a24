//! What is refused of DeepSpeed's file: contradictions with flags, keys without a counterpart, malformed files.
use super::*;

#[test]
fn contradictions_are_refused_with_both_values() {
    faulty(
        two(json!({"gradient_accumulation_steps": 4})),
        &["--grad-accum", "2"],
        &["gradient_accumulation_steps is 4", "--grad-accum 2", "auto"],
    );
    faulty(two(json!({})), &["--zero-stage", "3"], &["zero_optimization.stage is 2", "--zero-stage 3"]);
    faulty(two(json!({})), &["--backend", "fsdp"], &["--backend", "fsdp"]);
    faulty(
        two(json!({"bf16": {"enabled": false}})),
        &["--precision", "bf16"],
        &["bf16.enabled is false", "--precision"],
    );
    faulty(two(json!({"bf16": {"enabled": true}})), &["--precision", "fp32"], &["bf16.enabled", "fp32"]);
    let adam = json!({"type": "Adam", "params": {"lr": 0.1}});
    let warmup = json!({"type": "WarmupLR", "params": {"warmup_max_lr": 0.2, "warmup_type": "linear"}});
    faulty(two(json!({"optimizer": adam, "scheduler": warmup})), &[], &["warmup_max_lr is 0.2", "lr 0.1"]);
    faulty(two(json!({"bf16": {"enabled": true}, "fp16": {"enabled": true}})), &[], &["fp16.enabled", "bf16"]);
    let scaled = json!({"fp16": {"enabled": true, "initial_scale_power": 12, "hysteresis": 3, "loss_scale": 0}});
    let read_of = |flags: &[&str]| read(two(scaled.clone()), flags)["precision"].clone();
    assert_eq!(read_of(&[])["precision"], "fp16");
    assert_eq!((&read_of(&[])["initial_scale_power"], &read_of(&[])["hysteresis"]), (&json!(12), &json!(3)));
    // DeepSpeed's default, unless a flag overrides it.
    assert_eq!(read_of(&[])["loss_scale_window"], 1000);
    assert_eq!(read_of(&["--loss-scale-window", "50"])["loss_scale_window"], 50);
    faulty(two(scaled.clone()), &["--hysteresis", "1"], &["fp16.hysteresis is 3", "--hysteresis 1"]);
    // The same value twice is not a contradiction.
    read(two(json!({"gradient_accumulation_steps": 4})), &["--grad-accum", "4"]);
}

#[test]
fn unsupported_keys_are_refused_by_name() {
    let zero = |key: &str, value: Value| two(json!({"zero_optimization": {key: value}}));
    for (key, value) in [
        ("allgather_partitions", json!(false)),
        ("reduce_scatter", json!(false)),
        ("contiguous_gradients", json!(false)),
        ("offload_param", json!({"device": "cpu", "nvme_path": "/tmp"})),
        ("cpu_offload", json!(true)),
        ("offload_optimizer", json!({"device": "nvme", "nvme_path": "/tmp"})),
        ("stage3_param_persistence_threshold", json!(1e5)),
        ("zero_hpz_partition_size", json!(8)),
        ("zero_quantized_weights", json!(true)),
        ("zero_quantized_gradients", json!(true)),
    ] {
        faulty(zero(key, value), &[], &[&format!("zero_optimization.{key}")]);
    }
    for (key, value) in [
        ("gradient_allreduce_op", json!("avg")),
        ("prescale_gradients", json!(true)),
        ("gradient_predivide_factor", json!(2.0)),
        ("wall_clock_breakdown", json!(true)),
        ("dump_state", json!(true)),
        ("torch_autocast", json!({"enabled": true})),
        ("amp", json!({"enabled": true, "opt_level": "O1"})),
        ("aio", json!({"block_size": 1_048_576})),
        ("tensorboard", json!({"enabled": true})),
        ("wandb", json!({"enabled": true})),
        ("comet", json!({"enabled": true})),
        ("csv_monitor", json!({"enabled": true})),
        ("data_types", json!({"grad_accum_dtype": "bf16"})),
        ("optimizer", json!({"type": "Lamb"})),
        ("optimizer", json!({"type": "Adam", "params": {"adam_w_mode": false}})),
        ("scheduler", json!({"type": "OneCycle"})),
        ("scheduler", json!({"type": "WarmupLR", "params": {"warmup_min_lr": 1e-5}})),
        ("scheduler", json!({"type": "WarmupCosineLR", "params": {"warmup_min_ratio": 0.1}})),
        ("scheduler", json!({"type": "WarmupLR", "params": {"warmup_type": "cubic"}})),
        ("bf16", json!({"enabled": true, "bf16_optimizer_states": true})),
    ] {
        faulty(two(json!({key: value})), &[], &[key]);
    }
}

#[test]
fn unknown_keys_wrong_types_and_malformed_files() {
    faulty(two(json!({"gradient_cliping": 1.0})), &[], &["unknown key gradient_cliping", "gradient_clipping"]);
    faulty(two(json!({"zero_optimization": {"reduce_bucket": 1}})), &[], &["zero_optimization.reduce_bucket", "_size"]);
    faulty(two(json!({"optimizer": {"type": "AdamW", "params": {"rl": 1}}})), &[], &["optimizer.params.rl"]);
    faulty(two(json!({"optimizer": {"kind": "AdamW"}})), &[], &["optimizer.kind", "optimizer.type"]);
    faulty(two(json!({"train_micro_batch_size_per_gpu": "four"})), &[], &["train_micro_batch_size_per_gpu", "four"]);
    faulty(json!({"zero_optimization": {"stage": 0}}), &[], &[]);
    faulty(json!({"zero_optimization": 2}), &[], &["zero_optimization"]);
    faulty(json!({"gradient_clipping": 1.0}), &[], &["zero_optimization.stage is missing", "--zero-stage"]);
    refused(&["--deepspeed", "/no/such.json"], &["/no/such.json"]);
    let dir = TempDir::new().unwrap();
    let path = dir.path().join("ds.json");
    fs::write(&path, "{\"zero_optimization\": }").unwrap();
    refused(&["--deepspeed", path.to_str().unwrap()], &["ds.json", "not JSON"]);
}
