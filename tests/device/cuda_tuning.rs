//! The choice of cuBLASLt's algorithms on a mock driver (`ptx/driver`) whose library has several for each product, with
//! different times and orders of sums: the fastest is used, kept for later runs, and the same on all ranks.

use crate::common::simcuda;
use serde_json::Value;
use std::fs;
use std::path::Path;

const TINY: &str = "--dataset synthetic --embed-dim 32 --num-layers 2 --num-heads 4 --num-kv-heads 2 --ff-hidden-dim \
64 --vocab-size 64 --max-len 32 --batch-size 1 --max-steps 3 --warmup-steps 1 --no-eval --no-sample \
--no-measure-peak --device cuda";
const ONE: &str = "--nproc-per-node 1";

/// Losses and gradient norms, and stderr.
fn train(cache: &Path, blas: &str, args: &str) -> (Vec<(f64, f64)>, String) {
    let dir = tempfile::tempdir().unwrap();
    let metrics = dir.path().join("metrics.jsonl");
    let mut command = simcuda::run(crate::common::binaries::FSDP, "gpus=2,seed=3");
    command.env("FLATSHARD_SIMBLAS", blas).env("FLATSHARD_CACHE_DIR", cache).current_dir(dir.path());
    command.args(TINY.split_whitespace()).args(args.split_whitespace()).arg("--metrics-path").arg(&metrics);
    let out = command.output().unwrap();
    let said = String::from_utf8_lossy(&out.stderr).into_owned();
    assert!(out.status.success(), "{blas} {args}: {said}");
    let lines = fs::read_to_string(&metrics).unwrap();
    let events = lines.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
    let number = |value: &Value| value.as_f64().unwrap();
    let steps: Vec<_> =
        events.filter(|e| e["event"] == "step").map(|e| (number(&e["loss"]), number(&e["grad_norm"]))).collect();
    assert_eq!(steps.len(), 3, "{said}");
    (steps, said)
}
/// Counts of products: timed, and known from earlier runs.
fn counts(said: &str) -> (usize, usize) {
    let line = said.lines().find(|line| line.contains("matrix products:")).unwrap_or_else(|| panic!("{said}"));
    let before = |word: &str| {
        let words: Vec<&str> = line.split_whitespace().collect();
        words[words.iter().position(|w| w.starts_with(word)).unwrap() - 1].parse().unwrap()
    };
    (before("timed"), before("known"))
}
fn file(cache: &Path) -> std::path::PathBuf {
    let mut files: Vec<_> = fs::read_dir(cache).unwrap().map(|entry| entry.unwrap().path()).collect();
    assert_eq!(files.len(), 1, "{files:?}");
    files.remove(0)
}

#[test]
fn the_fastest_algorithm_is_used_and_kept_for_later_runs() {
    let (dir, other) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let (tuned, said) = train(dir.path(), "algorithms=3,fastest=2", ONE);
    let (timed, known) = counts(&said);
    assert!(timed >= 10 && known == 0, "{said}");
    assert!(said.contains(&format!("{timed} use another algorithm")), "{said}");
    let (first, said) = train(other.path(), "algorithms=3", ONE);
    assert!(said.contains("0 use another algorithm"), "{said}");
    assert_ne!(tuned, first, "the same bits: another algorithm is not used");
    // Another algorithm has become the fastest, but the choice is kept.
    let (again, said) = train(dir.path(), "algorithms=3,fastest=1", ONE);
    assert_eq!((again, counts(&said)), (tuned.clone(), (0, timed)));
    // Products that are not in the file are timed and added; in graphs too.
    let (_, said) = train(dir.path(), "algorithms=3,fastest=2", &format!("{ONE} --ff-hidden-dim 96 --compile"));
    let (more, known) = counts(&said);
    assert!(more > 0 && known > 0, "{said}");
    let (compiled, said) = train(dir.path(), "algorithms=3,fastest=1", &format!("{ONE} --compile"));
    assert_eq!((compiled, counts(&said)), (tuned, (0, timed)));
}

#[test]
fn without_tuning_the_first_algorithm_is_used_and_nothing_is_kept() {
    let dir = tempfile::tempdir().unwrap();
    let run = |blas| train(dir.path(), blas, &format!("{ONE} --no-tune"));
    let ((steps, said), (others, _)) = (run("algorithms=3,fastest=2"), run("algorithms=3"));
    assert_eq!(steps, others);
    assert!(!said.contains("matrix products:") && fs::read_dir(dir.path()).unwrap().next().is_none(), "{said}");
    // A single algorithm leaves nothing to choose.
    assert!(!train(dir.path(), "", ONE).1.contains("matrix products:"));
    assert!(fs::read_dir(dir.path()).unwrap().next().is_none());
}

#[test]
fn a_file_that_cannot_be_used_is_one_message_and_is_replaced() {
    let dir = tempfile::tempdir().unwrap();
    let two = "--nproc-per-node 2";
    let (tuned, said) = train(dir.path(), "algorithms=2,fastest=1", two);
    let timed = counts(&said).0;
    let path = file(dir.path());
    let whole = fs::read_to_string(&path).unwrap();
    for (damage, word) in [
        (whole[..whole.len() / 3].to_string(), "is damaged"),
        (whole.replacen("Simulated GPU", "Another GPU", 1), "is for another machine: Another GPU"),
        (
            whole.replacen(": \"5", ": \"6", 1).replacen("= bf16", "= f32", 1).replacen("32x", "33x", 1),
            "its checksum is wrong",
        ),
    ] {
        fs::write(&path, damage).unwrap();
        let (steps, said) = train(dir.path(), "algorithms=2,fastest=1", two);
        assert_eq!(said.matches("timed again").count(), 1, "{said}");
        assert!(said.contains(word) && said.contains("products-"), "{word}: {said}");
        assert_eq!((steps, counts(&said)), (tuned.clone(), (timed, 0)));
        assert_eq!(fs::read_to_string(&path).unwrap(), whole, "{word}");
    }
}

/// Ranks of tp compute the same values outside of the layers that they share: each finds another algorithm fastest,
/// and all use that of rank 0.
#[test]
fn all_ranks_use_the_same_algorithms() {
    for args in ["--nproc-per-node 2 --tp-size 2", "--nproc-per-node 2 --grad-accum 2"] {
        let (one, all) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let (alike, _) = train(all.path(), "algorithms=3,fastest=1", args);
        let (differing, _) = train(one.path(), "algorithms=3,fastest=rank", args);
        assert_eq!(alike, differing, "{args}");
        assert_eq!(fs::read(file(one.path())).unwrap(), fs::read(file(all.path())).unwrap(), "{args}");
    }
}
