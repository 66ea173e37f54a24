//! Training with the real `--device cuda` on a mock driver (`ptx/driver`): arguments, tensor maps, pinned and mapped
//! memory, graphs, traces, and how every error reaches the user; for several ranks see cuda_ranks.rs. What a GPU
//! computes, and how fast, is checked by scripts/gpu_check.sh.

use crate::common::simcuda;
use serde_json::Value;
use std::process::Output;

const TINY: &str = "--dataset synthetic --embed-dim 32 --num-layers 2 --num-heads 4 --num-kv-heads 2 --ff-hidden-dim \
64 --vocab-size 64 \
                    --max-len 32 --batch-size 1 --max-steps 2 --warmup-steps 1 --no-eval --no-sample --no-measure-peak";
/// 64 values per head: a size for which sm_90 has its own attention kernels.
const WIDE: &str = "--embed-dim 128 --num-heads 2 --precision bf16";

/// Losses and gradient norms of each step.
type Steps = Vec<(f64, f64)>;

fn run(machine: &str, args: &str) -> (Output, Steps) {
    let dir = tempfile::tempdir().unwrap();
    let metrics = dir.path().join("metrics.jsonl");
    let mut command = simcuda::run(crate::common::binaries::FSDP, machine);
    command.args(TINY.split_whitespace()).args(args.split_whitespace()).current_dir(dir.path());
    let out = command.arg("--metrics-path").arg(&metrics).output().unwrap();
    let lines = std::fs::read_to_string(&metrics).unwrap_or_default();
    let events = lines.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
    let steps = events.filter(|e| e["event"] == "step");
    let number = |value: &Value| value.as_f64().unwrap();
    (out, steps.map(|e| (number(&e["loss"]), number(&e["grad_norm"]))).collect())
}
#[track_caller]
fn trained(machine: &str, args: &str) -> (String, Steps) {
    let (out, steps) = run(machine, args);
    let said = String::from_utf8_lossy(&out.stderr).into_owned();
    assert!(out.status.success(), "{machine} {args}: {said}");
    assert!(steps.len() >= 2, "{machine} {args}: {steps:?}");
    (said, steps)
}
#[track_caller]
fn cuda(machine: &str, args: &str) -> Steps {
    trained(machine, &format!("--device cuda {args}")).1
}
#[track_caller]
fn near(a: &Steps, b: &Steps, within: f64) {
    for ((loss, norm), (other, others)) in a.iter().zip(b) {
        assert!((loss / other - 1.0).abs() <= within && (norm / others - 1.0).abs() <= 10.0 * within, "{a:?}, {b:?}");
    }
}

/// f32: the order of sums in products differs, and expf; bf16: roundings of activations.
#[test]
fn a_gpu_trains_like_the_simulated_device_and_the_cpu() {
    let on = |device: &str, args: &str| trained("", &format!("--nproc-per-node 1 --device {device} {args}")).1;
    let gpu = cuda("arch=80", "--nproc-per-node 1");
    near(&gpu, &on("sim", ""), 1e-7);
    near(&gpu, &on("cpu", ""), 1e-6);
    let sparse = cuda("arch=80,seed=3", "--nproc-per-node 1 --num-experts 4");
    near(&sparse, &on("sim", "--num-experts 4"), 1e-7);
    near(&sparse, &on("cpu", "--num-experts 4"), 1e-6);
    let (said, hopper) = trained("arch=90,trace=1,seed=2", &format!("--nproc-per-node 1 --device cuda {WIDE}"));
    // Queries, keys and values are loaded by tensor maps: the sm_90a kernels.
    assert!(said.contains("of attention_forward with 3 tensor maps"), "{said}");
    assert!(said.contains("cuda:0 (Simulated GPU, sm_90"), "{said}");
    near(&hopper, &on("cpu", WIDE), 4e-3);
}

/// The compiler of a driver before CUDA 12.4 serializes the backward kernel for sm_90a: then the one for sm_80 runs.
#[test]
fn a_kernel_that_the_driver_serializes_is_replaced() {
    let on = |cuda: u32| {
        trained(&format!("arch=90,trace=1,cuda={cuda}"), &format!("--nproc-per-node 1 --device cuda {WIDE}"))
    };
    let (old, slower) = on(12_030);
    let (new, steps) = on(12_080);
    let warning = "attention_hopper_backward_bf16_64, ";
    assert!(old.contains("serializes the tensor-core products") && old.contains(warning), "{old}");
    assert!(old.contains("CUDA 12.8 or newer") && old.contains("(C7512)"), "{old}");
    assert!(!new.contains("serializes"), "{new}");
    // The forward pass is unaffected.
    for (said, fused) in [(&old, false), (&new, true)] {
        assert!(said.contains("of attention_forward with 3 tensor maps"), "{said}");
        assert_eq!(said.contains("of attention_backward with "), fused, "{said}");
    }
    near(&slower, &steps, 4e-3);
}

/// cuBLASLt adds the residual to a product before it rounds, but not where the matrix has an adapter, which the
/// reference's pass leaves out.
#[test]
fn a_policy_starts_at_its_reference() {
    let dir = tempfile::tempdir().unwrap();
    let (rows, metrics) = (dir.path().join("pairs.jsonl"), dir.path().join("metrics.jsonl"));
    let row = |i: usize| format!(r#"{{"prompt": "What is {i}?", "chosen": "A number.", "rejected": "It is{i}."}}"#);
    std::fs::write(&rows, (0..4).map(row).collect::<Vec<_>>().join("\n")).unwrap();
    let args = "--device cuda --nproc-per-node 1 --objective dpo --tokenizer bytes --embed-dim 32 --num-layers 2 \
                --num-heads 2 --max-len 32 --batch-size 2 --max-steps 1 --warmup-steps 0 --no-eval --no-sample \
                --no-measure-peak --precision bf16 --lora-rank 2 --lora-target-modules o_proj down_proj";
    let mut command = simcuda::run(crate::common::binaries::FSDP, "arch=80");
    command.args(args.split_whitespace()).arg("--dataset").arg(&rows).arg("--metrics-path").arg(&metrics);
    let out = command.current_dir(dir.path()).output().unwrap();
    assert!(out.status.success(), "{}", String::from_utf8_lossy(&out.stderr));
    let step = &crate::common::runs::events(&metrics, "step")[0];
    assert_eq!(step["loss"].as_f64().map(|loss| loss as f32), Some(std::f32::consts::LN_2), "{step}");
    assert_eq!((&step["reward_chosen"], &step["reward_rejected"]), (&0.0.into(), &0.0.into()), "{step}");
}

/// A single rank has one stream, and copies to and from pinned and mapped memory; masks and accumulation change with
/// each step.
#[test]
fn one_rank_is_bitwise_equal_in_any_order_with_and_without_graphs() {
    let args = "--nproc-per-node 1 --dropout 0.1 --grad-accum 2 --max-steps 3";
    let once = cuda("", args);
    assert_eq!(cuda("seed=4", &format!("{args} --compile")), once);
    let offloaded = cuda("seed=1", &format!("{args} --cpu-offload"));
    near(&offloaded, &once, 1e-6);
    assert_eq!(cuda("seed=5", &format!("{args} --cpu-offload")), offloaded);
}

/// Trace spans are in the streams of groups too, even after the last wait.
#[test]
fn a_trace_has_spans_of_both_streams() {
    let dir = tempfile::tempdir().unwrap();
    let args = format!("--nproc-per-node 2 --profile-steps 2:2 --trace-folder {}", dir.path().display());
    cuda("gpus=2,seed=2", &args);
    let text = std::fs::read_to_string(dir.path().join("steps-2-2.json")).unwrap();
    for name in ["gather 2", "wait gather 1", "reduce 0", "norm", "update"] {
        assert!(text.contains(&format!("\"name\":\"{name}\"")), "no {name} in the trace");
    }
}

#[track_caller]
fn fails(machine: &str, args: &str, status: i32, parts: &[&str]) {
    let (out, _) = run(machine, &format!("--device cuda {args}"));
    let said = String::from_utf8_lossy(&out.stderr).into_owned();
    assert_eq!(out.status.code(), Some(status), "{machine}: {said}");
    assert_eq!((said.matches("error: ").count(), said.matches("panicked").count()), (1, 0), "{machine}: {said}");
    for part in parts {
        assert!(said.contains(part), "{machine}: no {part:?} in: {said}");
    }
    assert!(!said.contains("no answer within"), "{machine}: ranks have waited for a timeout: {said}");
}

#[test]
fn a_kernel_fault_is_one_message_with_device_kernel_and_remedy() {
    let alone =
        ["planted fault", "step 1: cuda:0 (Simulated GPU", "CUDA_ERROR_ILLEGAL_ADDRESS", "adamw", "--resume auto"];
    fails("fault=40", "--nproc-per-node 1", 1, &alone);
    // In a graph too: the second step is captured.
    fails(
        "fault=90",
        "--nproc-per-node 1 --compile",
        1,
        &["step 2: cuda:0", "CUDA_ERROR_ILLEGAL_ADDRESS", "newest first"],
    );
}

#[test]
fn running_out_of_memory_is_one_message_that_says_what_holds_it() {
    let parts =
        ["out of memory during allocation of ", "of 80.00 GiB are free", "largest first", "--activation-checkpoint"];
    fails("oom=20", "--nproc-per-node 1", 1, &parts);
    fails("gpus=2,oom=20,rank=1", "--nproc-per-node 2", 1, &[&["rank 1 failed", "cuda:1"], &parts[..]].concat());
    // Enough for the workspace of products but not for the plan.
    fails("bytes=33900000", "--nproc-per-node 1", 2, &["this run needs", "are free", "nvidia-smi"]);
}
