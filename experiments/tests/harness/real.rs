//! The harness with the real training binaries on tiny models: run and analyze, suite, smoke.
use super::common::{experiments, experiments_with, real_binaries, script};
use std::fs;
use tempfile::TempDir;

/// A model with steps of a few milliseconds.
const TINY: &str =
    "--embed-dim 32 --num-layers 1 --num-heads 4 --num-kv-heads 2 --vocab-size 64 --max-len 32 --lr 0.01";

#[test]
fn a_set_is_run_and_analyzed() {
    let dir = TempDir::new().unwrap();
    let bin = real_binaries().display().to_string();
    let base = ["run", "--bin-dir", &bin, "--output-dir", "out", "--execute", "--steps", "6", "--nproc-per-node", "2"];
    let chosen = ["--only", "ddp_fp32,fsdp_manual,fsdp_manual_ac,fsdp_manual_no_shard", "--"];
    let tiny: Vec<&str> = TINY.split(' ').collect();
    let ended = experiments(dir.path(), &[&base[..], &chosen, &tiny].concat());
    assert_eq!(ended.code, 0, "{}{}", ended.out, ended.err);
    let ended = experiments(dir.path(), &["analyze", "--output-dir", "out"]);
    assert_eq!(ended.code, 0, "{}", ended.err);
    assert_eq!(ended.out.matches("same bits").count(), 3, "{}", ended.out);
    assert!(!ended.out.contains("failed"), "{}", ended.out);
    // The binary's own message for bad input reaches the user.
    let bad = ["run", "--bin-dir", &bin, "--output-dir", "bad", "--execute", "--only", "ddp_fp32", "--", "--lr", "-1"];
    let ended = experiments(dir.path(), &bad);
    assert_eq!(ended.code, 1);
    assert!(ended.out.contains("exit status 2: lr is -1"), "{}", ended.out);
}

/// With a mock Python that claims to have torch: it gets the sizes and settings derived by run_fsdp.
#[test]
fn the_set_includes_pytorchs_fsdp_if_torch_is_installed() {
    let dir = TempDir::new().unwrap();
    let bin = real_binaries().display().to_string();
    let python = "[ \"$1\" != -c ] || exit 0\necho \"$*\" >> words\n\
                  while [ $# != 0 ]; do [ \"$1\" != --metrics-path ] || metrics=$2; shift; done\n\
                  { echo '{\"event\":\"run\",\"engine\":\"torch\",\"world_size\":2}'\n\
                  echo '{\"event\":\"step\",\"step\":1,\"loss\":4,\"tokens_per_sec\":1000}'\n\
                  echo '{\"event\":\"end\"}'; } > \"$metrics\"";
    let python = script(&dir.path().join("bin"), "python", python);
    let base = ["run", "--bin-dir", &bin, "--python", &python, "--output-dir", "out", "--execute", "--steps", "2"];
    let chosen = ["--nproc-per-node", "2", "--only", "ddp_fp32,fsdp_off*,fsdp_official_no_prefetch,torch_ddp", "--"];
    let tiny: Vec<&str> = TINY.split(' ').collect();
    let run = [&base[..], &chosen, &tiny].concat();
    let ended = experiments(dir.path(), &run);
    assert_eq!(ended.code, 0, "{}{}", ended.out, ended.err);
    assert!(ended.out.contains("4 done, 0 failed"), "a pattern does not choose those of --peers: {}", ended.out);
    let words = fs::read_to_string(dir.path().join("words")).unwrap();
    let words: Vec<&str> = words.lines().collect();
    for (line, says) in [
        (0, "-m torch.distributed.run --standalone --nproc_per_node 2 "),
        (0, "--impl fsdp1 "),
        (0, " --embed-dim 32 --num-layers 1 "),
        (0, " --max-len 32 --batch-size 2 --grad-accum 1 --max-steps 2"),
        (0, " --no-activation-checkpoint --forward-prefetch --limit-all-gathers --backward-prefetch BACKWARD_PRE"),
        (0, " --sharding FULL_SHARD"),
        (1, " --no-forward-prefetch --limit-all-gathers --backward-prefetch NONE"),
        (2, "--impl ddp "),
    ] {
        assert!(words[line].contains(says), "{says}: {}", words[line]);
    }
    assert!(words[2].ends_with(" --no-activation-checkpoint"), "{}", words[2]);
    let ended = experiments(dir.path(), &["analyze", "--experiment-dir", "out"]);
    assert!(ended.code == 0 && ended.out.contains("fsdp_official  "), "{}{}", ended.out, ended.err);
    let ended = experiments(dir.path(), &["compare", "out/ddp_fp32", "out/fsdp_official"]);
    assert!(ended.out.contains("note: B is torch, which trains on different tokens"), "{}", ended.out);
}

#[test]
fn the_suite_takes_its_variables_and_judges() {
    let dir = TempDir::new().unwrap();
    let bin = real_binaries().display().to_string();
    let variables = [
        ("NUM_GPUS", "2"),
        ("MAX_SAMPLES", "64"),
        ("DATASET", "synthetic"),
        ("OUTPUT_DIR", "out"),
        ("LOG_DIR", "logs"),
        ("MODEL", ""),
        ("SKIP_ZERO", "1"),
        ("SKIP_TP", "true"),
        ("SKIP_RING", "yes"),
    ];
    let tiny: Vec<&str> = TINY.split(' ').collect();
    let suite = [&["suite", "--bin-dir", &bin, "--"], &tiny[..]].concat();
    let ended = experiments_with(dir.path(), &suite, &variables);
    assert_eq!(ended.code, 0, "{}{}", ended.out, ended.err);
    assert!(
        ended.out.contains("1 done, 0 failed") && ended.out.contains("the losses fall and agree within 5 %"),
        "{}",
        ended.out
    );
    assert!(dir.path().join("logs/02_fsdp.log").is_file() && dir.path().join("out/fsdp/metrics.jsonl").is_file());
    // 64 samples in steps of 2 ranks x 2: too few to hold any out.
    let metrics = fs::read_to_string(dir.path().join("out/fsdp/metrics.jsonl")).unwrap();
    assert_eq!(metrics.matches("\"event\":\"step\"").count(), 16);

    // A learning rate of 0 does not learn; all steps have the same rows, so that none is easier than the others.
    let still = [&suite[..], &["--lr", "0", "--no-shuffle", "--epochs", "8"]].concat();
    let same_rows = [("OUTPUT_DIR", "still"), ("MAX_SAMPLES", "4")];
    let ended = experiments_with(dir.path(), &still, &[&variables[..], &same_rows].concat());
    assert_eq!(ended.code, 1, "{}", ended.out);
    assert!(ended.out.contains("does not learn"), "{}", ended.out);
}

#[test]
fn smoke_reports_each_check() {
    let dir = TempDir::new().unwrap();
    let bin = real_binaries().display().to_string();
    let ended = experiments(dir.path(), &["smoke", "--bin-dir", &bin, "--output-dir", "out"]);
    assert_eq!(ended.code, 0, "{}{}", ended.out, ended.err);
    for line in ["ddp: loss", "manual FSDP resumes from its checkpoint, bit for bit", "collectives"] {
        assert!(ended.out.lines().any(|l| l.starts_with("ok ") && l.contains(line)), "{line}: {}", ended.out);
    }
    assert!(ended.out.contains("passed in "), "{}", ended.out);
}
