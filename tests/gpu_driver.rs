//! `--device cuda` over a driver that is pretended (fake_driver/libcuda.rs): too old, unusable, without a GPU that serves, or with too
//! little memory. Each is one message that names what is there and what to do, exit status 2, nothing started.
use std::path::Path;
use std::process::{Command, Output};
use std::sync::OnceLock;
use tempfile::TempDir;

/// A directory for LD_LIBRARY_PATH: the driver, and under the name of cuBLASLt something that can be loaded.
fn libraries() -> &'static Path {
    static MADE: OnceLock<TempDir> = OnceLock::new();
    let made = MADE.get_or_init(|| {
        let dir = tempfile::tempdir().unwrap();
        let source = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fake_driver/libcuda.rs");
        let driver = dir.path().join("libcuda.so");
        let rustc = std::env::var("RUSTC").unwrap_or_else(|_| "rustc".into());
        let done = Command::new(rustc).args(["--edition", "2024", source, "-o"]).arg(&driver).output().unwrap();
        assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
        std::fs::copy(&driver, dir.path().join("libcublasLt.so")).unwrap();
        dir
    });
    made.path()
}

/// CUDA's version, the result of cuInit, how many GPUs, their architecture, their bytes.
fn run(driver: &str, args: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_run_fsdp"));
    for variable in ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"] {
        command.env_remove(variable);
    }
    command.env("FAKE_CUDA", driver).env("LD_LIBRARY_PATH", libraries());
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
fn a_driver_that_cannot_serve_is_one_clear_message() {
    refused("11080,0,1,90,85899345920", ONE, &["serves CUDA 11.8", "need 12.0", "branch 525", "--device cpu"]);
    // Old and unusable: what is said is that it is old.
    refused("11080,999,0,0,0", ONE, &["serves CUDA 11.8"]);
    refused("12080,100,0,0,0", ONE, &["CUDA_ERROR_NO_DEVICE", "CUDA_VISIBLE_DEVICES", "--device cpu"]);
    refused("12080,34,0,0,0", ONE, &["toolkit's stub", "LD_LIBRARY_PATH"]);
    refused("12080,803,0,0,0", ONE, &["CUDA_ERROR_SYSTEM_DRIVER_MISMATCH", "reboot"]);
}

#[test]
fn a_gpu_that_cannot_serve_is_one_clear_message() {
    refused("12080,0,0,0,0", ONE, &["no GPU", "--device cpu"]);
    refused("12080,0,1,75,85899345920", ONE, &["Pretended GPU (sm_75)", "sm_80 or newer", "--device cpu"]);
    refused("12080,0,1,90,85899345920", TWO, &["local rank 1 needs GPU 1", "one GPU", "--nproc-per-node 1"]);
}

/// The planned bytes say so before anything is started.
#[test]
fn a_gpu_with_too_little_memory_is_one_clear_message() {
    let remedies = ["--activation-checkpoint", "--precision bf16", "nvidia-smi"];
    let small = ["GPU 0 (Pretended GPU)", "8.00 GiB of 8.00 GiB are free"];
    refused("12080,0,1,90,8589934592", ONE, &[&small[..], &remedies].concat());
    // Two ranks share the GPU.
    refused("12080,0,1,90,8589934592", &["--nproc-per-node", "2", "--ranks-per-gpu", "2"], &["2 ranks of", "8.00 GiB"]);
}
