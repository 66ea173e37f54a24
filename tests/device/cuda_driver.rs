//! `--device cuda` on a mock driver (`ptx/driver`) that is too old, unusable, has no suitable GPU or too little memory.
//! Each case is one message that names the problem and the remedy, with exit status 2, and nothing is started.

use crate::common::simcuda;
use std::process::Output;

fn run(driver: &str, args: &[&str]) -> Output {
    let mut command = simcuda::run(crate::common::binaries::FSDP, driver);
    let model = "--dataset synthetic --embed-dim 2048 --num-layers 24 --num-heads 16 --ff-hidden-dim 8192 --max-len 32 \
                 --batch-size 1 --max-steps 1 --no-eval --no-sample --device cuda";
    command.args(model.split_whitespace()).args(args).output().unwrap()
}
#[track_caller]
fn refused(driver: &str, args: &[&str], parts: &[&str]) {
    let out = run(driver, args);
    let stderr = String::from_utf8_lossy(&out.stderr).into_owned();
    assert_eq!(out.status.code(), Some(2), "{driver}: {stderr}");
    assert!(out.stdout.is_empty(), "{driver} printed {}", String::from_utf8_lossy(&out.stdout));
    assert_eq!((stderr.matches("error: ").count(), stderr.matches("panicked").count()), (1, 0), "{driver}: {stderr}");
    for part in parts {
        assert!(stderr.contains(part), "{driver}: no {part:?} in: {stderr}");
    }
}

const ONE: &[&str] = &["--nproc-per-node", "1"];
const TWO: &[&str] = &["--nproc-per-node", "2"];

#[test]
fn an_unusable_driver_is_one_clear_message() {
    refused("cuda=11080", ONE, &["supports CUDA 11.8", "need 12.0", "branch 525", "--device cpu"]);
    // Old and unusable: reported as old.
    refused("cuda=11080,init=999", ONE, &["supports CUDA 11.8"]);
    refused("init=100", ONE, &["CUDA_ERROR_NO_DEVICE", "CUDA_VISIBLE_DEVICES", "--device cpu"]);
    refused("init=34", ONE, &["toolkit's stub", "LD_LIBRARY_PATH"]);
    refused("init=803", ONE, &["CUDA_ERROR_SYSTEM_DRIVER_MISMATCH", "reboot"]);
}

#[test]
fn an_unsuitable_gpu_is_one_clear_message() {
    refused("gpus=0", ONE, &["no GPU", "--device cpu"]);
    refused("arch=75", ONE, &["Simulated GPU (sm_75)", "sm_80 or newer", "--device cpu"]);
    refused("", TWO, &["local rank 1 needs GPU 1", "one GPU", "--nproc-per-node 1"]);
}

/// The planned bytes show it before anything is started.
#[test]
fn a_gpu_with_too_little_memory_is_one_clear_message() {
    let remedies = ["--activation-checkpoint", "--precision bf16", "nvidia-smi"];
    let small = ["GPU 0 (Simulated GPU)", "8.00 GiB of 8.00 GiB are free"];
    refused("bytes=8589934592", ONE, &[&small[..], &remedies].concat());
    // Two ranks share the GPU.
    refused("bytes=8589934592", &["--nproc-per-node", "2", "--ranks-per-gpu", "2"], &["2 ranks of", "8.00 GiB"]);
}
