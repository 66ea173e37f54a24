//! A short version of `experiments chaos`: the claims about 1,000 kills, in seconds.
use super::common::{experiments, real_binaries};
use crate::time::scaled;
use serde_json::Value;
use std::fs;
use tempfile::TempDir;

fn chaos(flags: &[&str]) -> (String, Value) {
    let dir = TempDir::new().unwrap();
    let bin = real_binaries().display().to_string();
    let ended = experiments(dir.path(), &[&["chaos", "--bin-dir", &bin, "--output-dir", "out"], flags].concat());
    assert_eq!(ended.code, 0, "{}{}", ended.out, ended.err);
    assert!(ended.out.contains("no leftover files"), "{}", ended.out);
    let report: Value = serde_json::from_str(&fs::read_to_string(dir.path().join("out/chaos.json")).unwrap()).unwrap();
    assert_eq!(report["proof"]["wrong"], Value::Array(vec![]));
    (ended.out, report)
}

#[test]
fn a_run_under_every_fault_is_bitwise_equal_to_an_undisturbed_one() {
    // At most two restarts: after them, killing a rank ends the launcher too.
    let timeout = scaled(2_000).as_secs_f64();
    let flags = format!("--kills 6 --others 6 --seed 3 --max-restarts 2 --comm-timeout {timeout}");
    let (out, report) = chaos(&flags.split(' ').collect::<Vec<_>>());
    assert!(out.contains("bitwise: "), "{out}");
    let faults = report["faults"].as_array().unwrap();
    assert_eq!(faults.len(), 12);
    let seconds = |fault: &Value, key: &str| fault[key].as_f64().unwrap();
    for fault in faults {
        let kind = fault["kind"].as_str().unwrap();
        let (first, new) = (seconds(fault, "first_step_s"), seconds(fault, "new_step_s"));
        assert!(0.0 < first && first <= new, "{fault}");
        // A checkpoint every third step: the newest may have been in flight, and up to two may be damaged.
        assert!(fault["steps_lost"].as_u64().unwrap() <= 12, "{fault}");
        let again = fault["restarts"].as_u64().unwrap() + fault["starts"].as_u64().unwrap();
        match kind {
            "stop a rank, briefly" | "stall a rank" => assert!(again == 0 && fault["steps_lost"] == 0, "{fault}"),
            _ => assert!(again > 0 && seconds(fault, "noticed_s") <= first, "{fault}"),
        }
        if kind == "stop a rank" {
            assert!(seconds(fault, "noticed_s") >= timeout, "not before --comm-timeout: {fault}");
        }
    }
    for row in report["by_kind"].as_array().unwrap() {
        assert!(out.contains(row["kind"].as_str().unwrap()), "{out}");
    }
    assert_eq!(report["by_kind"].as_array().unwrap().len(), 9, "every kind: {out}");
    let sum = |key: &str| faults.iter().map(|f| f[key].as_u64().unwrap()).sum::<u64>();
    assert!(sum("restarts") > 0 && sum("starts") > 0, "both ways to start again: {faults:?}");
}

/// Without the right to mount a disk, and with async checkpoints.
#[test]
fn a_file_size_limit_simulates_a_full_disk() {
    let flags = "--kills 1 --others 4 --seed 1 --disk file-sizes --comm-timeout 2 -- --async-save";
    let (out, report) = chaos(&flags.split(' ').collect::<Vec<_>>());
    assert!(out.contains("bitwise: ") && out.contains("full disk: a file-size limit on one rank"), "{out}");
    assert!(report["faults"].as_array().unwrap().iter().any(|f| f["kind"] == "full disk"));
}

#[test]
fn bad_input_is_refused_before_anything_starts() {
    let dir = TempDir::new().unwrap();
    for (flags, expected) in [
        (["--kills", "0"], "--kills is 0; it must be at least 1"),
        (["--nproc-per-node", "0"], "--nproc-per-node is 0; it must be at least 1"),
        (["--save-every", "0"], "--save-every is 0; it must be at least 1"),
        (["--comm-timeout", "1"], "--comm-timeout is 1; it must be from 2 to 600"),
    ] {
        let ended = experiments(dir.path(), &[&["chaos"][..], &flags].concat());
        assert_eq!(ended.code, 2, "{}", ended.err);
        assert!(ended.err.contains(expected), "{}", ended.err);
    }
}
