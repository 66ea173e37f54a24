//! DeepSpeed's keys, block by block, and how each is handled. Never reads a file.
use super::reader::DeepSpeedFile;
use super::reader::DeepSpeedKey::{self, *};
use crate::base::Result;
use serde_json::{Value, json};
use std::path::Path;

pub(super) fn top() -> Vec<(&'static str, DeepSpeedKey)> {
    let sums = "gradients are summed in fp32 and divided once, by the loss tokens of the step";
    let metrics = "metrics go to --metrics-path as JSON lines; for W&B set --wandb-project";
    vec![
        ("train_batch_size", Set("batch", "train_batch_size")),
        ("train_micro_batch_size_per_gpu", Set("batch", "batch_size")),
        ("gradient_accumulation_steps", Set("batch", "grad_accum")),
        ("optimizer", By(optimizer)),
        ("scheduler", By(scheduler)),
        ("communication_data_type", Set("precision", "reduce_dtype")),
        ("gradient_allreduce_op", Never(sums)),
        ("prescale_gradients", Is(json!(false), sums)),
        ("gradient_predivide_factor", Is(json!(1), sums)),
        ("gradient_clipping", Set("optim", "grad_clip")),
        ("steps_per_print", Set("run", "log_every")),
        ("wall_clock_breakdown", Is(json!(false), "--metrics-path records the times of each step")),
        ("dump_state", Is(json!(false), "--print-config prints the settings")),
        ("fp16", By(precision)),
        ("bf16", By(precision)),
        ("torch_autocast", Off("matrix products use the precision of the bf16 or the fp16 block")),
        ("amp", Off("use the bf16 or the fp16 block")),
        ("zero_optimization", Block(zero)),
        ("zero_allow_untested_optimizer", Any),
        ("zero_force_ds_cpu_optimizer", Any),
        ("tensor_parallel", Block(|| vec![("autotp_size", By(tensor_parallel))])),
        ("aio", Never("NVMe offload is not supported")),
        // Every checkpoint loads with every strategy.
        ("checkpoint", Block(|| vec![("load_universal", Any)])),
        ("data_types", Block(|| vec![("grad_accum_dtype", Is(json!("fp32"), "gradients are accumulated in fp32"))])),
        ("tensorboard", By(tensorboard)),
        ("wandb", Off(metrics)),
        ("comet", Off(metrics)),
        ("csv_monitor", Off(metrics)),
    ]
}

fn zero() -> Vec<(&'static str, DeepSpeedKey)> {
    let persistence = "a layer's small tensors are gathered with its large ones in one collective, so keeping them \
                       unsharded would save no collective";
    let ranks = "there are no secondary shards within a host";
    vec![
        ("stage", By(stage)),
        ("reduce_bucket_size", Size("zero", "reduce_bucket_size")),
        ("allgather_bucket_size", Size("zero", "allgather_bucket_size")),
        ("overlap_comm", Set("zero", "overlap_comm")),
        ("allgather_partitions", Is(json!(true), "weights are gathered by all-gathers, never broadcast")),
        ("reduce_scatter", Is(json!(true), "an all-reduce would move twice the bytes")),
        ("contiguous_gradients", Is(json!(true), "gradients are always written into contiguous buckets")),
        // Assigns gradients to ranks; the result is the same.
        ("round_robin_gradients", Any),
        ("offload_param", By(offload)),
        ("offload_optimizer", By(offload)),
        // What offload_optimizer and offload_param were once.
        ("cpu_offload", Is(json!(false), "it is the block offload_optimizer now: {\"device\": \"cpu\"}")),
        ("cpu_offload_params", Is(json!(false), "it is the block offload_param now: {\"device\": \"cpu\"}")),
        // The optimizer takes one shard of a layer at a time.
        ("sub_group_size", Any),
        ("stage3_max_live_parameters", Size("zero", "stage3_max_live_parameters")),
        ("stage3_max_reuse_distance", Size("zero", "stage3_max_reuse_distance")),
        ("stage3_prefetch_bucket_size", Size("zero", "stage3_prefetch_bucket_size")),
        ("stage3_param_persistence_threshold", Is(json!(0), persistence)),
        ("stage3_model_persistence_threshold", Is(json!(0), persistence)),
        ("stage3_gather_16bit_weights_on_model_save", By(|file, at, value| file.half_export(at, value))),
        ("zero_hpz_partition_size", Is(json!(1), ranks)),
        (
            "zero_quantized_weights",
            Is(json!(false), "weights are gathered in the compute dtype, or by --precision fp8 in 8 bits"),
        ),
        ("zero_quantized_gradients", Is(json!(false), "gradients are reduced in fp32")),
    ]
}

/// 0 is off.
fn tensor_parallel(file: &mut DeepSpeedFile, at: &str, value: &Value) -> Result<()> {
    if value == 0 { Ok(()) } else { file.key(at, value, &Set("parallel", "tp_size")) }
}

fn stage(file: &mut DeepSpeedFile, at: &str, value: &Value) -> Result<()> {
    match value.as_u64() {
        Some(0) => Err(file.refuse(at, value, "stage 0 is plain data parallelism: use run_ddp")),
        _ => file.key(at, value, &Set("fsdp", "zero_stage")),
    }
}

/// `--tensorboard output_path/job_name`.
fn tensorboard(file: &mut DeepSpeedFile, at: &str, body: &Value) -> Result<()> {
    file.keys(at, body, vec![("enabled", Any), ("output_path", Any), ("job_name", Any)])?;
    let text = |key: &str| body[key].as_str().filter(|text| !text.is_empty());
    match (body["enabled"] == true, text("output_path")) {
        (false, _) => Ok(()),
        (true, Some(path)) => {
            let dir = Path::new(path).join(text("job_name").unwrap_or("DeepSpeedJobName")); // DeepSpeed's default
            file.put(at, "watch", "tensorboard", json!(dir))
        }
        (true, None) => {
            Err(file.refuse(&format!("{at}.output_path"), &body["output_path"], "set the directory of the event files"))
        }
    }
}

/// `offload_optimizer` and `offload_param`: `--cpu-offload`.
fn offload(file: &mut DeepSpeedFile, at: &str, body: &Value) -> Result<()> {
    let nvme = "only cpu is supported";
    let keys = || {
        vec![
            ("device", Any),
            ("nvme_path", Never(nvme)),
            ("pin_memory", Any),
            ("buffer_count", Any),
            ("buffer_size", Any),
            ("max_in_cpu", Any),
            ("fast_init", Any),
            ("ratio", Is(json!(1), "offloading is all or nothing")),
        ]
    };
    match body["device"].as_str() {
        None | Some("none" | "auto") => Ok(()),
        Some("cpu") => {
            file.offloaded.push(at.to_string());
            file.keys(at, body, keys())
        }
        Some(_) => Err(file.refuse(&format!("{at}.device"), &body["device"], nvme)),
    }
}

fn bf16() -> Vec<(&'static str, DeepSpeedKey)> {
    let masters = "master weights, gradients and optimizer states are fp32";
    vec![
        ("enabled", Any),
        ("bf16_master_weights_and_grads", Is(json!(false), masters)),
        ("bf16_optimizer_states", Is(json!(false), masters)),
    ]
}

/// While fp16 is off, the loss scaler's keys have no effect.
fn fp16(on: bool) -> Vec<(&'static str, DeepSpeedKey)> {
    let mut keys = vec![
        ("enabled", Any),
        ("auto_cast", Is(json!(false), "inputs are token ids")),
        ("fp16_master_weights_and_grads", Is(json!(false), "master weights, gradients and optimizer states are fp32")),
    ];
    let scaler = [
        "loss_scale",
        "initial_scale_power",
        "loss_scale_window",
        "hysteresis",
        "consecutive_hysteresis",
        "min_loss_scale",
    ];
    keys.extend(scaler.map(|key| (key, if on { Set("precision", key) } else { Any })));
    keys
}

/// `fp16` or `bf16`.
fn precision(file: &mut DeepSpeedFile, at: &str, body: &Value) -> Result<()> {
    let name = if at == "fp16" { "fp16" } else { "bf16" };
    let (enabled, requested) = (&body["enabled"], file.requested["precision"]["precision"] == name);
    let on = enabled == true || enabled == "auto" && requested;
    file.keys(at, body, if name == "fp16" { fp16(on) } else { bf16() })?;
    match enabled {
        Value::Bool(true) => file.put(&format!("{at}.enabled"), "precision", "precision", json!(name))?,
        Value::Bool(false) | Value::Null if requested => {
            return Err(file.fault(format!(
                "{at}.enabled is false, but --precision is {name}: remove the block, or set it to \"auto\""
            )));
        }
        Value::Bool(false) | Value::Null => {}
        auto if auto == "auto" => {}
        other => return Err(file.refuse(&format!("{at}.enabled"), other, "expected true, false or auto")),
    }
    if on {
        file.half = Some(name);
    }
    Ok(())
}

fn optimizer(file: &mut DeepSpeedFile, at: &str, body: &Value) -> Result<()> {
    let decoupled = "weight decay is decoupled (AdamW)";
    let adamw = || {
        vec![
            ("lr", Set("optim", "lr")),
            ("betas", Set("optim", "betas")),
            ("eps", Set("optim", "eps")),
            ("weight_decay", Set("optim", "weight_decay")),
            ("adam_w_mode", Is(json!(true), decoupled)),
            ("bias_correction", Is(json!(true), "bias correction is always on")),
            ("amsgrad", Is(json!(false), "AMSGrad is not supported")),
            ("torch_adam", Any),
            ("fused", Any),
        ]
    };
    let sgd = || {
        vec![
            ("lr", Set("optim", "lr")),
            ("momentum", Set("optim", "momentum")),
            ("weight_decay", Set("optim", "weight_decay")),
            ("dampening", Is(json!(0), "dampening is not supported")),
            ("nesterov", Is(json!(false), "Nesterov momentum is not supported")),
        ]
    };
    let (kind, params) = file.kind(at, body)?;
    match kind.to_lowercase().as_str() {
        "adam" | "adamw" => {
            file.put(&format!("{at}.type"), "optim", "optimizer", json!("adamw"))?;
            file.keys(&format!("{at}.params"), params, adamw())
        }
        "sgd" => {
            file.put(&format!("{at}.type"), "optim", "optimizer", json!("sgd"))?;
            file.keys(&format!("{at}.params"), params, sgd())
        }
        _ => Err(file.refuse(&format!("{at}.type"), &json!(kind), "expected AdamW, Adam (read as AdamW) or SGD")),
    }
}

fn scheduler(file: &mut DeepSpeedFile, at: &str, body: &Value) -> Result<()> {
    let mut warmup = vec![
        ("warmup_num_steps", Set("optim", "warmup_steps")),
        ("warmup_min_lr", Is(json!(0), "warmup starts at 0")),
        ("warmup_min_ratio", Is(json!(0), "warmup starts at 0")),
        ("warmup_max_lr", Set("optim", "lr")),
        ("warmup_type", Set("optim", "warmup_type")),
    ];
    let (kind, params) = file.kind(at, body)?;
    let shape = match kind {
        "WarmupLR" => "constant",
        "WarmupDecayLR" => "linear",
        "WarmupCosineLR" => "cosine_with_min_lr",
        _ => {
            let why = "expected WarmupLR, WarmupDecayLR or WarmupCosineLR; for others set --lr-scheduler";
            return Err(file.refuse(&format!("{at}.type"), &json!(kind), why));
        }
    };
    if kind != "WarmupLR" {
        warmup.push(("total_num_steps", Set("run", "max_steps")));
    }
    if kind == "WarmupCosineLR" {
        warmup.push(("cos_min_ratio", Set("optim", "min_lr_ratio")));
    }
    file.put(&format!("{at}.type"), "optim", "lr_scheduler", json!(shape))?;
    file.keys(&format!("{at}.params"), params, warmup)
}
