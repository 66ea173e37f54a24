//! Bad input about GPUs, from outside: `--device cuda` where it cannot run, and conflicting settings. Each is one
//! message with exit status 2, and nothing is started. On a machine with a driver the first test asks for more GPUs
//! than exist.
use crate::common::runs::unlaunched;
use flatshard::device::gpu::cuda::Machine;
use flatshard::run::settings::args::with_flags;
use serde_json::Value;
use std::process::Output;

fn run(args: &[&str]) -> Output {
    let mut command = unlaunched(crate::common::binaries::FSDP);
    let tiny = "--dataset synthetic --embed-dim 64 --num-layers 1 --num-heads 1 --ff-hidden-dim 128 --max-len 32 \
                --batch-size 1 --max-steps 1 --no-eval --no-sample";
    command.args(tiny.split_whitespace()).args(args).output().unwrap()
}
#[track_caller]
fn refused(args: &[&str], parts: &[&str]) {
    let out = run(args);
    let stderr = String::from_utf8_lossy(&out.stderr).into_owned();
    assert_eq!(out.status.code(), Some(2), "{args:?}: {stderr}");
    assert!(out.stdout.is_empty(), "{args:?} printed {}", String::from_utf8_lossy(&out.stdout));
    assert_eq!((stderr.matches("error: ").count(), stderr.matches("panicked").count()), (1, 0), "{args:?}: {stderr}");
    for part in parts {
        assert!(stderr.contains(part), "{args:?}: no {part:?} in: {stderr}");
    }
}

#[test]
fn a_missing_gpu_is_one_clear_message() {
    match Machine::probe() {
        Err(e) => {
            let expected = with_flags(&e.to_string());
            refused(&["--device", "cuda"], &[&expected, "--device cpu"]);
            refused(&["--device", "cuda", "--nproc-per-node", "2"], &[&expected]);
        }
        Ok(machine) => {
            let one_more = (machine.gpus.len() + 1).to_string();
            refused(&["--device", "cuda", "--nproc-per-node", &one_more], &["CUDA_VISIBLE_DEVICES"]);
        }
    }
}

#[test]
fn comm_backends_that_do_not_fit_the_device_are_refused() {
    refused(&["--device", "cpu", "--comm", "nccl"], &["--comm nccl", "--device cuda"]);
    refused(&["--device", "cuda", "--comm", "shm"], &["--comm shm", "NCCL"]);
    refused(&["--ranks-per-gpu", "0"], &["ranks_per_gpu is 0"]);
}

/// A plan for GPUs can be printed on machines without any; GPU ranks do not share gathered weights.
#[test]
fn the_plan_of_gpu_ranks_counts_whole_slots() {
    let plan = |device: &str, ranks: &str| -> Value {
        let out = run(&["--device", device, "--nproc-per-node", ranks, "--print-config"]);
        assert!(out.status.success(), "{}", String::from_utf8_lossy(&out.stderr));
        serde_saphyr::from_str(&String::from_utf8_lossy(&out.stdout)).unwrap()
    };
    let slots = |config: &Value| config["plan"]["planned_bytes"]["slots"].as_u64().unwrap();
    let (cpu, gpu) = (plan("cpu", "4"), plan("cuda", "4"));
    // f32 gradients take the same on both; of the gathered weights a CPU rank counts a quarter.
    let grads = slots(&gpu) / 2;
    assert_eq!(slots(&cpu), grads + grads / 4);
    assert_eq!(slots(&plan("cpu", "1")), slots(&plan("cuda", "1")));
    assert_eq!(gpu["run"]["device"], "cuda");
}
