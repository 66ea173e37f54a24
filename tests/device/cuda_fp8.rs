//! `--precision fp8` with `--device cuda` on a mock driver (`ptx/driver`), whose cuBLASLt multiplies the bytes as its
//! documentation says: it trains as the CPU does, gathered bytes are multiplied as they are, and what the library does
//! not have is refused. What a GPU computes is checked by scripts/gpu_check.sh.
use crate::common::deep;
use crate::common::simcuda;
use serde_json::Value;
use std::path::Path;
use std::process::Output;

const MODEL: &str = "--dataset synthetic --embed-dim 160 --num-layers 3 --num-heads 5 --ff-hidden-dim 144 --vocab-size 64 \
                     --max-len 16 --batch-size 1 --max-steps 3 --warmup-steps 1 --no-eval --no-sample --no-measure-peak \
                     --precision fp8";
const ONE: &str = "--device cuda --nproc-per-node 1";
const TWO: &str = "--device cuda --nproc-per-node 2";

fn run(machine: &str, blas: &str, cache: &Path, args: &str) -> (Output, Vec<(f64, f64)>) {
    let dir = tempfile::tempdir().unwrap();
    let metrics = dir.path().join("metrics.jsonl");
    let mut command = simcuda::run(crate::common::binaries::FSDP, machine);
    command.env("FLATSHARD_SIMBLAS", blas).env("FLATSHARD_CACHE_DIR", cache).current_dir(dir.path());
    command.args(MODEL.split_whitespace()).args(args.split_whitespace()).arg("--metrics-path").arg(&metrics);
    let out = command.output().unwrap();
    let lines = std::fs::read_to_string(&metrics).unwrap_or_default();
    let events = lines.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
    let number = |value: &Value| value.as_f64().unwrap();
    let steps = events.filter(|e| e["event"] == "step").map(|e| (number(&e["loss"]), number(&e["grad_norm"])));
    let steps = steps.collect();
    (out, steps)
}
/// Losses and gradient norms of each step, and stderr.
#[track_caller]
fn trained(machine: &str, blas: &str, args: &str) -> (Vec<(f64, f64)>, String) {
    let cache = tempfile::tempdir().unwrap();
    let (out, steps) = run(machine, blas, cache.path(), args);
    let said = String::from_utf8_lossy(&out.stderr).into_owned();
    assert!(out.status.success(), "{machine} {args}: {said}");
    assert_eq!(steps.len(), 3, "{machine} {args}: {said}");
    (steps, said)
}
/// How often a kernel was launched.
fn launches(said: &str, entry: &str) -> usize {
    said.lines().filter(|line| line.contains("launch ") && line.contains(&format!(" of {entry} "))).count()
}

/// Sums are in another order, which rounds activations to bf16 elsewhere.
#[test]
fn it_trains_as_on_the_cpu_and_multiplies_bytes() {
    for family in deep::first(1, ["", "--arch gpt"]) {
        let (cpu, _) = trained("", "", &format!("{family} --device cpu --nproc-per-node 1"));
        let (gpu, said) = trained("arch=90,trace=1,seed=3", "", &format!("{family} {ONE}"));
        for ((loss, norm), (other, others)) in cpu.iter().zip(&gpu) {
            assert!((loss / other - 1.0).abs() < 4e-3 && (norm / others - 1.0).abs() < 4e-2, "{cpu:?} and {gpu:?}");
        }
        // One of the three blocks. Of its forward products or its input gradients, one kind has to transpose.
        assert!(launches(&said, "quantize") > 0 && launches(&said, "transpose_codes") > 0, "{said}");
        assert_eq!(launches(&said, "dequantize"), 0, "{said}");
        let (bf16, _) = trained("arch=90", "", &format!("{family} {ONE} --precision bf16"));
        assert_ne!(gpu, bf16);
        assert_eq!(trained("arch=90,seed=5", "", &format!("{family} {ONE} --compile")).0, gpu, "in graphs");
        // A library without epilogues.
        let (plain, _) = trained("arch=90", "plain", &format!("{family} {ONE}"));
        assert!((plain[2].0 / gpu[2].0 - 1.0).abs() < 4e-3, "{plain:?} and {gpu:?}");
    }
}

/// Only the other operand of each product is cast then, and results are those of weights that each rank casts.
#[test]
fn gathered_bytes_are_multiplied_as_they_are() {
    let (gathered, said) = trained("arch=90,gpus=2,trace=1,seed=2", "", TWO);
    let (whole, other) = trained("arch=90,gpus=2,trace=1,seed=4", "", &format!("{TWO} --strategy ddp"));
    assert_eq!(gathered, whole);
    let [casts, both] = [&said, &other].map(|said| launches(said, "quantize"));
    assert!(casts > 0 && both == 2 * casts, "{casts} and {both}");
    assert_eq!(launches(&said, "dequantize"), 0, "{said}");
    // Ranks of tp have 80 of 160.
    let tp = format!("{TWO} --tp-size 2 --num-heads 10 --ff-hidden-dim 160");
    let (tp, said) = trained("arch=90,gpus=2,trace=1,seed=6", "", &tp);
    assert!(launches(&said, "transpose_codes") > 0 && tp[2].0.is_finite(), "{said}");
}

#[test]
fn algorithms_are_timed_and_kept() {
    let cache = tempfile::tempdir().unwrap();
    let args = format!("{ONE} --max-steps 3");
    let (_, tuned) = run("arch=90", "algorithms=3,fastest=2", cache.path(), &args);
    let files: Vec<_> = std::fs::read_dir(cache.path()).unwrap().map(|f| f.unwrap().path()).collect();
    let text = std::fs::read_to_string(&files[0]).unwrap();
    let named = |what: &str| text.lines().filter(|line| line.contains(what)).count();
    // Three forward shapes, and the gradients of their inputs.
    assert!(named(" u8 e4m3 ") >= 3 && named(" u8 e5m2 ") >= 3, "{text}");
    let (_, again) = run("arch=90", "algorithms=3,fastest=1", cache.path(), &args);
    assert_eq!((tuned.len(), &again), (3, &tuned));
    assert_ne!(trained("arch=90", "", &args).0, tuned, "another algorithm is not used");
}

#[test]
fn what_the_library_does_not_have_is_refused() {
    let refused = |machine: &str, blas: &str, args: &str, parts: &[&str]| {
        let dir = tempfile::tempdir().unwrap();
        let (out, steps) = run(machine, blas, dir.path(), args);
        let said = String::from_utf8_lossy(&out.stderr).into_owned();
        assert_eq!((out.status.code(), steps.len(), said.matches("error: ").count()), (Some(2), 0, 1), "{said}");
        parts.iter().for_each(|part| assert!(said.contains(part), "no {part:?} in: {said}"));
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0);
    };
    let old = ["GPU 0 (Simulated GPU)", "cuBLASLt 12.8.3", "CUDA 12.9 or newer", "--precision bf16"];
    refused("arch=90", "version=120803", ONE, &old);
    for arch in [80, 89, 100] {
        let this = format!("this is sm_{arch}");
        refused(&format!("arch={arch}"), "", ONE, &["only on sm_90 (H100, H200)", &this, "--precision bf16"]);
    }
    let odd = ["model.layers.1.mlp.gate_proj.weight", "[136, 160]", "multiples of 16", "--fp8-exclude"];
    refused("arch=90", "", &format!("{ONE} --ff-hidden-dim 136"), &odd);
    refused("arch=90,gpus=2", "", &format!("{TWO} --tp-size 2 --num-heads 10"), &["[72, 160]", "on a rank"]);
    trained("arch=90", "", &format!("{ONE} --ff-hidden-dim 136 --fp8-exclude mlp"));
}
