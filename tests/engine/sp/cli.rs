//! `run_fsdp` with ring attention and Ulysses, from the command line.
use serde_json::Value;
use std::process::{Command, Output};

fn run(args: &[&str]) -> Output {
    let tiny = "--device cpu --dataset synthetic --embed-dim 32 --num-layers 2 --num-heads 4 --num-kv-heads 2 \
    --max-steps 4 \
                --batch-size 2 --lr 0.01";
    let mut command = Command::new(crate::common::binaries::FSDP);
    command.args(tiny.split_whitespace()).args(args).output().unwrap()
}

/// Losses and norms of the steps, then the evaluation loss.
fn losses(args: &[&str]) -> Vec<f64> {
    let file = tempfile::NamedTempFile::new().unwrap();
    let path = file.path().to_str().unwrap().to_string();
    let out = run(&[args, &["--metrics-path", &path]].concat());
    assert!(out.status.success(), "{args:?}: {}", String::from_utf8_lossy(&out.stderr));
    let lines = std::fs::read_to_string(path).unwrap();
    let lines: Vec<Value> = lines.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let number = |line: &Value, key: &str| line.get(key).and_then(Value::as_f64);
    let of =
        |line: &Value| [number(line, "loss"), number(line, "grad_norm")].into_iter().flatten().collect::<Vec<f64>>();
    lines.iter().flat_map(of).collect()
}

#[test]
fn a_run_that_shares_sequences_equals_a_single_rank_run() {
    // 63 tokens per sequence: 2 and 4 ranks divide neither it nor the micro-batch of 2.
    let args = |ranks, ring: &'static [&'static str]| {
        [&["--max-len", "63", "--grad-accum", "2", "--nproc-per-node", ranks], ring].concat()
    };
    let one = losses(&args("1", &[]));
    assert!(one.len() >= 9, "{one:?}");
    for ring in [
        args("2", &["--ring-attn-size", "2"]),
        args("3", &["--ring-attn-size", "3", "--ring-impl", "allgather", "--activation-checkpoint"]),
        args("2", &["--ring-attn-size", "2", "--sp-impl", "ulysses"]),
        args("3", &["--sp-size", "3", "--sp-impl", "ulysses", "--activation-checkpoint"]),
        args("4", &["--sequence-parallel-size", "4", "--cpu-offload"]),
        // Two such rings have twice the samples, which is another run: only its mesh is checked.
        args("4", &["--ring-attn-size", "2", "--precision", "bf16"]),
    ] {
        let made = losses(&ring);
        assert_eq!(made.len(), one.len(), "{ring:?}");
        if !ring.contains(&"bf16") {
            let far = one.iter().zip(&made).map(|(a, b)| (a - b).abs() / a).fold(0.0, f64::max);
            assert!(far < 1e-4, "{ring:?}: {one:?} and {made:?}");
        }
    }
}

#[test]
fn a_ring_that_does_not_divide_the_ranks_is_refused_with_the_equation() {
    let out = run(&["--nproc-per-node", "4", "--ring-attn-size", "3"]);
    let said = String::from_utf8_lossy(&out.stderr);
    assert_eq!(out.status.code(), Some(2), "{said}");
    assert!(said.contains("sp 3") && said.contains("there are 4 ranks"), "{said}");
    let out = run(&["--nproc-per-node", "2", "--ring-attn-size", "0"]);
    assert_eq!(out.status.code(), Some(2));
    let out = run(&["--ring-impl", "rings"]);
    assert_eq!(out.status.code(), Some(2));
}

#[test]
fn what_ulysses_cannot_divide_is_refused_with_the_remedy() {
    for (args, says) in [
        (
            "--nproc-per-node 7 --ring-attn-size 7 --sp-impl ulysses",
            "at least one of the 4 heads (num_heads 4 / tp-size 1)",
        ),
        (
            "--nproc-per-node 4 --ring-attn-size 2 --tp-size 2 --num-heads 2 --sp-impl ulysses",
            "at least one of the 1 heads (num_heads 2 / tp-size 2); choose another ring-attn-size, or sp-impl ring",
        ),
        ("--nproc-per-node 2 --sp-impl ulysses", "--sp-impl ulysses has no effect"),
        (
            "--nproc-per-node 2 --ring-attn-size 2 --sp-impl ulysses --ring-impl allgather",
            "--ring-impl allgather has no effect",
        ),
        ("--nproc-per-node 2 --ring-attn-size 2 --sp-impl ulises", "it must be one of ring, ulysses"),
    ] {
        let out = run(&args.split_whitespace().collect::<Vec<_>>());
        let said = String::from_utf8_lossy(&out.stderr);
        assert_eq!(out.status.code(), Some(2), "{args}: {said}");
        assert!(said.contains(says), "{args}: {said}");
    }
}
