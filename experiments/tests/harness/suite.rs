//! `experiments suite` with mock training binaries: its set, its variables, and that it never reports a failure as a
//! success.
use super::common::{Ended, calls, experiments, experiments_with, pretenders};
use std::fs;
use tempfile::TempDir;

/// The suite with these variables, on mock binaries that do `more`.
fn suite(more: &str, args: &[&str], variables: &[(&str, &str)]) -> (Ended, TempDir) {
    let dir = TempDir::new().unwrap();
    pretenders(dir.path(), more);
    let ended = experiments_with(
        dir.path(),
        &[&["suite", "--bin-dir", "bin", "--output-dir", "out"], args].concat(),
        variables,
    );
    (ended, dir)
}

#[test]
fn five_runs_and_their_settings() {
    let (ended, dir) = suite("", &["--max-samples", "96"], &[("TP_SIZE", "4"), ("RING_SIZE", "2"), ("NUM_GPUS", "8")]);
    assert_eq!(ended.code, 0, "{}{}", ended.out, ended.err);
    for name in ["01_zero2", "02_fsdp", "03_fsdp_tp", "04_fsdp_ring", "05_fsdp_tp_ring"] {
        assert!(dir.path().join(format!("out/logs/{name}.log")).is_file(), "{name}");
    }
    let config = fs::read_to_string(dir.path().join("out/fsdp_tp_ring/config.yaml")).unwrap();
    for line in ["tp_size: 4", "ring_attn_size: 2", "nproc_per_node: 8", "max_samples: 96", "batch_size: 16"] {
        assert!(config.contains(line), "{line}: {config}");
    }
}

#[test]
fn variables_skip_runs() {
    let left = |variables: &[(&str, &str)]| {
        let (ended, dir) = suite("", &[], variables);
        assert_eq!(ended.code, 0, "{}", ended.err);
        assert!(ended.err.is_empty(), "{}", ended.err);
        let names =
            fs::read_dir(dir.path().join("out")).unwrap().map(|e| e.unwrap().file_name().into_string().unwrap());
        let mut names: Vec<String> = names.filter(|n| n != "logs").collect();
        names.sort();
        names.join(" ")
    };
    assert_eq!(left(&[("SKIP_ZERO", "1")]), "fsdp fsdp_ring fsdp_tp fsdp_tp_ring");
    assert_eq!(left(&[("SKIP_TP", "1"), ("SKIP_ZERO", "0")]), "fsdp fsdp_ring zero2");
    assert_eq!(left(&[("SKIP_RING", "true"), ("SKIP_TP", "")]), "fsdp fsdp_tp zero2");
    assert_eq!(left(&[("SKIP_DEEPSPEED", "1"), ("SKIP_FSDP2_TP", "1")]), "fsdp fsdp_ring fsdp_tp_ring");
    assert_eq!(left(&[("SKIP_FSDP2_RING", "1"), ("SKIP_FSDP2_TP_RING", "1")]), "fsdp fsdp_tp zero2");

    // Without fsdp the first run is the baseline; logs keep their numbers.
    let (ended, dir) = suite("", &["--skip", "fsdp2,tp"], &[]);
    assert_eq!(ended.code, 0, "{}", ended.err);
    assert!(ended.out.contains("fsdp_ring     loss 9.0000 to 6.0000  ok, at most 0.000 % from zero2"), "{}", ended.out);
    assert!(dir.path().join("out/logs/04_fsdp_ring.log").is_file());
    let (ended, _) = suite("sed -i 's/\"loss\":6/\"loss\":null/' \"$metrics\"", &[], &[("SKIP_COMPARE", "1")]);
    assert!(ended.code == 0 && !ended.out.contains("agree"), "{}", ended.out);

    let (ended, _) = suite("", &["--skip-tp"], &[("SKIP_MEGATRON", "1")]);
    assert_eq!(ended.code, 0, "{}", ended.out);
    assert!(ended.err.contains("warning: SKIP_MEGATRON has no effect here; known: SKIP_ZERO,"), "{}", ended.err);
    let (ended, _) = suite("", &["--skip", "megatron"], &[]);
    assert!(ended.code == 2 && ended.err.contains("--skip megatron: not one of zero,"), "{}", ended.err);
    let (ended, dir) = suite("", &["--skip", "zero,fsdp,tp,ring"], &[]);
    assert!(ended.code == 2 && ended.err.contains("every run is skipped"), "{}", ended.err);
    assert_eq!(calls(dir.path()), 0);
}

#[test]
fn a_failed_or_diverging_run_fails_the_suite() {
    let tp = |what: &str| format!("if grep -q tp_size \"$2\"; then {what}; fi");
    let (ended, _) = suite(&tp("echo 'error: not here' >&2; exit 2"), &[], &[("SKIP_RING", "1")]);
    assert_eq!(ended.code, 1, "{}", ended.out);
    assert!(ended.out.contains("failed: exit status 2: not here"), "{}", ended.out);
    assert!(ended.out.contains("zero2         loss 9.0000 to 6.0000  ok"), "{}", ended.out);

    let (ended, _) = suite(&tp("sed -i 's/\"loss\":8/\"loss\":8.5/' \"$metrics\""), &[], &[("SKIP_RING", "1")]);
    assert_eq!(ended.code, 1, "{}", ended.out);
    assert!(ended.out.contains("diverges from fsdp at step 2: loss 8.000000 vs 8.500000"), "{}", ended.out);
    let (ended, _) =
        suite(&tp("sed -i 's/\"loss\":8/\"loss\":8.5/' \"$metrics\""), &["--threshold", "0.1"], &[("SKIP_RING", "1")]);
    assert_eq!(ended.code, 0, "{}", ended.out);

    let (ended, _) = suite(&tp("sed -i 's/\"loss\":6/\"loss\":null/' \"$metrics\""), &[], &[("SKIP_RING", "1")]);
    assert_eq!(ended.code, 1, "{}", ended.out);
    let (ended, _) = suite("exit 1", &[], &[]);
    assert_eq!(ended.code, 1, "{}", ended.out);
    assert!(ended.out.contains("fsdp did not finish"), "{}", ended.out);
}

#[test]
fn bad_input_is_named() {
    let dir = TempDir::new().unwrap();
    pretenders(dir.path(), "");
    for (args, says) in [
        (["--max-samples", "0"], "--max-samples is 0"),
        (["--tp-size", "0"], "--tp-size is 0"),
        (["--threshold", "nan"], "--threshold is NaN"),
        (["--ring-size", "two"], "two"),
    ] {
        let ended = experiments(dir.path(), &[&["suite", "--bin-dir", "bin"], &args[..]].concat());
        assert_eq!(ended.code, 2, "{args:?}: {}", ended.out);
        assert!(ended.err.contains(says), "{args:?}: {}", ended.err);
    }
    let ended = experiments_with(dir.path(), &["suite", "--bin-dir", "bin"], &[("NUM_GPUS", "many")]);
    assert_eq!(ended.code, 2);
    assert!(ended.err.contains("many"), "{}", ended.err);
}
