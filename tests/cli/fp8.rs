//! `--precision fp8` as a process: it learns as bf16 does, on the CPU and the simulated GPU, and says what it cannot
//! do.
use crate::common::runs::{FSDP, losses, unlaunched};
use std::path::Path;
use std::process::{Command, Output};

const MODEL: &str = "--dataset synthetic --embed-dim 64 --num-layers 4 --num-heads 2 --max-len 16 --batch-size 4 --seed 7 \
                     --warmup-steps 0 --lr 0.003 --sample-tokens 0 --no-eval --metrics-path metrics";

fn command(dir: &Path, args: &str) -> Command {
    let mut command = unlaunched(FSDP);
    command.current_dir(dir).args(MODEL.split_whitespace().chain(args.split_whitespace()));
    command
}
fn text(out: &Output) -> String {
    String::from_utf8_lossy(&out.stderr).into_owned()
}
/// The losses of each step.
fn trained(args: &str) -> Vec<f64> {
    let dir = tempfile::tempdir().unwrap();
    let out = command(dir.path(), args).output().unwrap();
    assert!(out.status.success(), "{args}: {}", text(&out));
    losses(&dir.path().join("metrics")).iter().map(|(_, loss, _)| loss.parse().unwrap()).collect()
}

#[test]
fn fp8_learns_as_bf16_does_on_cpu_and_simulated_gpu() {
    let run = |args: &str| trained(&format!("--max-steps 40 --nproc-per-node 2 {args}"));
    let (bf16, fp8) = (run("--precision bf16"), run("--precision fp8"));
    assert!(fp8[39] < fp8[0] - 0.5, "{fp8:?}");
    let [a, b] = [&bf16, &fp8].map(|losses| losses[30..].iter().sum::<f64>());
    assert!(a != b && (a / b - 1.0).abs() < 0.005, "{bf16:?} and {fp8:?}");
    let most = run("--precision fp8 --fp8-exclude mlp k_proj");
    assert!(most != fp8 && most != bf16);
    assert_eq!(run("--precision fp8 --strategy ddp"), fp8);
    // One rank rounds its weights, two gather them in 8 bits.
    for ranks in [1, 2] {
        let run = |device: &str| {
            trained(&format!("--max-steps 3 --nproc-per-node {ranks} --precision fp8 --device {device}"))
        };
        for (a, b) in run("sim").iter().zip(&run("cpu")) {
            assert!((a - b).abs() < 1e-2 * b, "{a} on the simulated GPU, {b} on the CPU");
        }
    }
}

#[test]
fn what_fp8_cannot_do_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    for (args, words) in [
        ("--precision bf16 --fp8-exclude mlp", "no product is in FP8; remove it, or use --precision fp8"),
        ("--precision fp8 --fp8-exclude (", "unclosed group"),
        ("--precision fp8 --fp8-exclude embed", "matches no matrix in FP8"),
        ("--precision fp8 --num-layers 2", "2 blocks have none"),
        ("--precision fp8 --lora-rank 2 --load-in-4bit", "4 bits"),
        ("--precision fp8 --master-dtype bf16", "--precision bf16"),
        ("--precision bf16 --reduce-dtype fp8", "fp8"),
    ] {
        let out = command(dir.path(), args).output().unwrap();
        assert_eq!(out.status.code(), Some(2), "{args}: {}", text(&out));
        assert!(text(&out).contains(words), "{args}: {}", text(&out));
    }
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0);
}
