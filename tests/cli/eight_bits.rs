//! `--optimizer adamw8bit` as a process: it plans fewer bytes, resumes bitwise, and converts the moments of other runs.
use crate::common::runs::{FSDP, losses, unlaunched};
use serde_json::Value;
use std::process::Output;
use tempfile::TempDir;

const MODEL: &str = "--nproc-per-node 2 --dataset synthetic --embed-dim 64 --num-layers 1 --num-heads 2 --max-len 16 \
                     --batch-size 2 --seed 7 --lr-scheduler constant --warmup-steps 0 --sample-tokens 0";

/// What it says.
fn run(dir: &TempDir, args: &str) -> Output {
    let words = MODEL.split_whitespace().chain(args.split_whitespace());
    let out = unlaunched(FSDP).current_dir(dir.path()).args(words).output().unwrap();
    assert!(out.status.success(), "{args}: {}", String::from_utf8_lossy(&out.stderr));
    out
}

#[test]
fn moments_in_8_bits_are_planned_resumed_and_converted() {
    let dir = tempfile::tempdir().unwrap();
    let planned = |args: &str| -> u64 {
        let out = run(&dir, &format!("{args} --print-config"));
        let config: Value = serde_saphyr::from_str(&String::from_utf8(out.stdout).unwrap()).unwrap();
        config["plan"]["planned_bytes"]["optimizer"].as_u64().unwrap()
    };
    let (plain, small) = (planned("--optimizer adamw"), planned("--optim adamw_bnb_8bit"));
    assert!(small < plain * 3 / 10, "{small} of {plain} bytes");
    // Without checkpoints, and with one in between.
    run(&dir, "--optimizer adamw8bit --max-steps 6 --metrics-path whole");
    run(&dir, "--optimizer adamw8bit --max-steps 3 --metrics-path parts --ckpt-dir ck --async-save");
    run(&dir, "--optimizer adamw8bit --max-steps 6 --metrics-path parts --ckpt-dir ck --resume auto");
    assert_eq!(losses(&dir.path().join("parts")), losses(&dir.path().join("whole")));
    let said =
        |args: &str| String::from_utf8(run(&dir, &format!("{args} --ckpt-dir ck --resume auto")).stderr).unwrap();
    let text = said("--optimizer adamw --max-steps 7");
    assert!(text.contains("moments are converted from 8bit to fp32"), "{text}");
    let text = said("--optimizer adamw8bit --max-steps 8");
    assert!(text.contains("moments are converted from fp32 to 8bit"), "{text}");
    let text = said("--optimizer adamw8bit --max-steps 9");
    assert!(!text.contains("converted"), "{text}");
}
