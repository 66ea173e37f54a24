//! Meshes set by flags, end to end: HYBRID_SHARD with replicas, its checkpoints on other meshes, notes and errors.
use crate::common::runs::unlaunched;
use serde_json::Value;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Output;
use tempfile::TempDir;

use crate::common::binaries::{DDP, FSDP};

fn run(binary: &str, args: &str) -> Output {
    let tiny = "--dataset synthetic --embed-dim 64 --num-layers 2 --num-heads 2 --max-len 32 --lr 0.01 --log-every 1 \
                --no-sample --no-eval --max-steps 6";
    let mut command = unlaunched(binary);
    command.args(tiny.split_whitespace().chain(args.split_whitespace())).output().unwrap()
}
#[track_caller]
fn good(binary: &str, args: &str) -> Output {
    let out = run(binary, args);
    assert!(out.status.success(), "{args}: {}\n{}", out.status, String::from_utf8_lossy(&out.stderr));
    out
}
fn events(path: &Path, name: &str) -> Vec<Value> {
    let text = fs::read_to_string(path).unwrap();
    text.lines().map(|l| serde_json::from_str(l).unwrap()).filter(|e: &Value| e["event"] == name).collect()
}
fn losses(path: &Path) -> Vec<f64> {
    events(path, "step").iter().map(|e| e["loss"].as_f64().unwrap()).collect()
}
#[track_caller]
fn assert_close(a: &[f64], b: &[f64]) {
    assert_eq!(a.len(), b.len());
    a.iter().zip(b).for_each(|(x, y)| assert!((x - y).abs() < 1e-4 * x, "{a:?}\n{b:?}"));
}

/// Batch sizes with which all meshes train on the same sixteen samples per step.
const MESHES: [(&str, &str, [u64; 4]); 4] = [
    (FSDP, "--nproc-per-node 4 --batch-size 4", [1, 4, 1, 1]),
    (
        FSDP,
        "--sharding HYBRID_SHARD --dp-replicate-size 2 --nproc-per-node 4 --batch-size 2 --grad-accum 2",
        [2, 2, 1, 1],
    ),
    (FSDP, "--sharding SHARD_GRAD_OP --dp-replicate-size 4 --nproc-per-node 4 --batch-size 4", [4, 1, 1, 1]),
    (DDP, "--nproc-per-node 2 --batch-size 8", [2, 1, 1, 1]),
];

#[test]
fn hybrid_shard_matches_other_meshes_and_shares_their_checkpoints() {
    let dir = TempDir::new().unwrap();
    let path = |name: String| -> PathBuf { dir.path().join(name) };
    for (i, (binary, args, axes)) in MESHES.into_iter().enumerate() {
        let (metrics, ckpt) = (path(format!("{i}.jsonl")), path(format!("ckpt{i}")));
        let more = format!("{args} --metrics-path {} --ckpt-dir {} --save-every 3", metrics.display(), ckpt.display());
        good(binary, &more);
        let event = &events(&metrics, "run")[0];
        let found = ["dp_replicate", "dp_shard", "sp", "tp"].map(|axis| event["mesh"][axis].as_u64().unwrap());
        assert_eq!(found, axes, "{args}");
        let tokens: Vec<u64> = events(&metrics, "step").iter().map(|e| e["trained_tokens"].as_u64().unwrap()).collect();
        assert_eq!(
            tokens,
            events(&path("0.jsonl".into()), "step")
                .iter()
                .map(|e| e["trained_tokens"].as_u64().unwrap())
                .collect::<Vec<_>>()
        );
        assert_close(&losses(&path("0.jsonl".into())), &losses(&metrics));
        // Every rank receives: gathers and reductions within a replica, sums of shards across replicas.
        assert!(events(&metrics, "step").iter().all(|e| e["comm_bytes"].as_u64().unwrap() > 0));
    }
    // From the third step of each on the next.
    for (i, (binary, args, _)) in MESHES.into_iter().enumerate() {
        let (metrics, from) = (path(format!("again{i}.jsonl")), path(format!("ckpt{}/step-00000003", (i + 1) % 4)));
        good(binary, &format!("{args} --metrics-path {} --resume {}", metrics.display(), from.display()));
        assert_close(&losses(&path("0.jsonl".into()))[3..], &losses(&metrics));
    }
}

#[test]
fn on_one_host_hybrid_shard_reports_one_replica() {
    let said = |args: &str| String::from_utf8(good(FSDP, args).stderr).unwrap();
    let text = said("--sharding HYBRID_SHARD --nproc-per-node 2");
    assert!(text.contains("dp_replicate 1 x dp_shard 2") && text.contains("one replica per host"), "{text}");
    let text = said("--sharding HYBRID_SHARD --dp-replicate-size 2 --nproc-per-node 2");
    assert!(text.contains("dp_replicate 2 x dp_shard 1") && !text.contains("one replica"), "{text}");
}

#[test]
fn meshes_that_do_not_fit_the_ranks_are_refused_with_the_equation() {
    for (binary, args, says) in [
        (
            FSDP,
            "--dp-replicate-size 3 --nproc-per-node 4",
            "dp_replicate 3 x dp_shard 1 x sp 1 x tp 1 = 3, but there are 4",
        ),
        (
            DDP,
            "--dp-replicate-size 2 --nproc-per-node 4",
            "dp_replicate 2 x dp_shard 1 x sp 1 x tp 1 = 2, but there are 4",
        ),
        (DDP, "--sharding HYBRID_SHARD --nproc-per-node 2", "HYBRID_SHARD"),
    ] {
        let out = run(binary, args);
        let text = String::from_utf8_lossy(&out.stderr);
        assert_eq!(out.status.code(), Some(2), "{args}: {text}");
        assert!(text.contains(says), "{args}: {text}");
    }
}
