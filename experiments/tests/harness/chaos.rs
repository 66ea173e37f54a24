//! A short version of `experiments chaos`: what is claimed of 1,000 kills, in seconds.
use crate::common::{experiments, real_binaries};
use serde_json::Value;
use std::fs;
use tempfile::TempDir;

#[test]
fn a_run_that_is_killed_again_and_again_has_the_bits_of_one_left_in_peace() {
    let dir = TempDir::new().unwrap();
    let bin = real_binaries().display().to_string();
    // Three restarts at most: one of the kills after them ends the launcher, too.
    let flags =
        ["chaos", "--kills", "8", "--seed", "3", "--max-restarts", "3", "--bin-dir", &bin, "--output-dir", "out"];
    let ended = experiments(dir.path(), &flags);
    assert_eq!(ended.code, 0, "{}{}", ended.out, ended.err);
    assert!(ended.out.contains("bitwise: ") && ended.out.contains("nothing is left behind"), "{}", ended.out);
    let report: Value = serde_json::from_str(&fs::read_to_string(dir.path().join("out/chaos.json")).unwrap()).unwrap();
    assert_eq!(report["proof"]["wrong"], Value::Array(vec![]));
    let faults = report["faults"].as_array().unwrap();
    assert_eq!(faults.len(), 8);
    for fault in faults {
        let [first, new] = ["first_step_s", "new_step_s"].map(|key| fault[key].as_f64().unwrap());
        assert!(0.0 < first && first <= new, "{fault}");
        assert!(fault["noticed_s"].as_f64().unwrap() <= first, "{fault}");
        // A checkpoint every third step, the newest of which may have been under way.
        assert!(fault["steps_lost"].as_u64().unwrap() <= 6, "{fault}");
        assert!(fault["restarts"].as_u64().unwrap() + fault["starts"].as_u64().unwrap() > 0, "{fault}");
    }
    let sum = |key: &str| faults.iter().map(|f| f[key].as_u64().unwrap()).sum::<u64>();
    assert!(sum("restarts") > 0 && sum("starts") > 0, "both ways to start again: {faults:?}");
}

#[test]
fn bad_input_is_refused_before_anything_starts() {
    let dir = TempDir::new().unwrap();
    for flags in [&["--kills", "0"][..], &["--nproc-per-node", "0"], &["--save-every", "0"]] {
        let ended = experiments(dir.path(), &[&["chaos"], flags].concat());
        assert_eq!(ended.code, 2, "{}", ended.err);
        assert!(ended.err.contains(&format!("{} is 0: it must be at least 1", flags[0])), "{}", ended.err);
    }
}
