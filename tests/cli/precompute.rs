//! `--precompute-ref-logps` from the command line: a run with log-probabilities that were computed once is bitwise the
//! run with the model, and those of another model or of other data are never used.
use crate::common::runs::{Dir, FSDP, events, unlaunched};
use serde_json::Value;
use std::fs::{self, File};
use std::os::unix::fs::symlink;
use std::time::{Duration, SystemTime};

const TINY: &str = "--max-len 192 --nproc-per-node 2 --max-steps 3 --lr 0.05 --warmup-steps 0 --seed 5 --no-sample";

/// The losses and rewards of the steps and evaluations, bit for bit; the planned bytes; and what was said.
fn train(dir: &Dir, flags: &str) -> (Vec<Vec<Option<u64>>>, f64, String) {
    let mut command = unlaunched(FSDP);
    let (metrics, cache) = (dir.arg("m.jsonl"), dir.arg("cache"));
    let _ = std::fs::remove_file(&metrics);
    command.current_dir(env!("CARGO_MANIFEST_DIR")).args(TINY.split_whitespace()).args(flags.split_whitespace());
    let ended = command.args(["--metrics-path", &metrics, "--cache-dir", &cache]).output().unwrap();
    let said = String::from_utf8_lossy(&ended.stderr).into_owned();
    assert!(ended.status.success(), "{flags}: {said}");
    let keys = ["loss", "reward_chosen", "reward_rejected", "kl", "grad_norm"];
    let bits = |event: &Value| keys.iter().map(|key| event[key].as_f64().map(f64::to_bits)).collect::<Vec<_>>();
    let metrics = dir.path("m.jsonl");
    let all = [events(&metrics, "step"), events(&metrics, "eval")].concat();
    let planned = events(&metrics, "run")[0]["planned_bytes"]["total"].as_f64().unwrap();
    (all.iter().map(bits).collect(), planned, said)
}
fn computed(said: &str) -> usize {
    said.lines().filter(|line| line.contains("log-probabilities of") && line.ends_with(" s")).count()
}
fn kept(said: &str) -> usize {
    said.lines().filter(|line| line.contains("kept by an earlier run")).count()
}

fn model(dir: &Dir, name: &str, seed: &str) -> String {
    let path = dir.arg(name);
    let shape =
        "--dataset synthetic --no-eval --vocab-size 320 --embed-dim 32 --num-layers 2 --num-heads 2 --overwrite";
    train(dir, &format!("{shape} --seed {seed} --save-hf {path}"));
    path
}

/// How a ring cuts a document depends on those before it, and so does the rounding of its sums: log-probabilities of
/// some hundreds, of which a loss has small differences.
fn near(a: &[Vec<Option<u64>>], b: &[Vec<Option<u64>>], what: &str) {
    for (a, b) in a.concat().into_iter().zip(b.concat()) {
        let [a, b] = [a, b].map(|bits| bits.map_or(0.0, f64::from_bits));
        assert!((a - b).abs() < 3e-5 * b.abs().max(1.0), "{what}: {a} and {b}");
    }
}

/// Archives give all files one time, so a model that takes another's place may have the same.
#[test]
fn a_model_in_the_place_of_another_is_not_taken_for_it() {
    let dir = Dir::new();
    let policy = model(&dir, "policy", "1");
    for seed in ["2", "3"] {
        let other = model(&dir, &format!("other{seed}"), seed);
        for entry in fs::read_dir(&other).unwrap() {
            let file = File::options().write(true).open(entry.unwrap().path()).unwrap();
            file.set_modified(SystemTime::UNIX_EPOCH + Duration::from_secs(1)).unwrap();
        }
        let _ = fs::remove_file(dir.path("reference"));
        symlink(&other, dir.path("reference")).unwrap();
        let flags = format!(
            "--objective dpo --dataset configs/pairs.jsonl --no-eval --pretrain {policy} --ref-pretrain {} \
             --precompute-ref-logps --batch-size 2",
            dir.arg("reference")
        );
        let (first, again) = (train(&dir, &flags).2, train(&dir, &flags).2);
        assert_eq!([computed(&first), kept(&first), computed(&again), kept(&again)], [1, 0, 0, 1], "{first}{again}");
    }
}

#[test]
fn a_run_with_kept_log_probabilities_is_bitwise_the_run_with_the_model() {
    let dir = Dir::new();
    let (policy, other) = (model(&dir, "policy", "1"), model(&dir, "other", "2"));
    let third = model(&dir, "third", "3"); // what one run keeps serves others, on any mesh of data parallelism
    let (pairs, labels) = (
        "--objective dpo --dataset configs/pairs.jsonl --eval-dataset configs/pairs_eval.jsonl",
        "--objective kto --dataset configs/labels.jsonl --eval-dataset configs/labels_eval.jsonl",
    );
    for flags in [
        format!("{pairs} --pretrain {policy} --ref-pretrain {other} --batch-size 3 --grad-accum 2"),
        format!("{pairs} --pretrain {policy} --ref-pretrain {other} --packing-samples --precision bf16"),
        format!("{labels} --pretrain {policy} --ref-pretrain {other} --packing-samples --batch-size 2"),
        format!("{labels} --pretrain {policy} --precision bf16 --batch-size 5"),
        format!("{labels} --tokenizer bytes --embed-dim 16 --num-layers 1 --num-heads 2 --batch-size 2"),
        format!("{pairs} --pretrain {policy} --lora-rank 2 --batch-size 2"),
        format!(
            "{pairs} --pretrain {policy} --lora-rank 2 --lora-target-modules all-linear --precision bf16 --packing-samples"
        ),
        format!(
            "{labels} --pretrain {policy} --lora-rank 2 --lora-target-modules o_proj --load-in-4bit --precision bf16 --batch-size 2"
        ),
        format!(
            "{pairs} --pretrain {policy} --ref-pretrain {policy} --lora-rank 2 --lora-target-modules down_proj --precision fp16 --batch-size 2"
        ),
        format!("{pairs} --pretrain {policy} --ring-attn-size 2 --batch-size 2"),
        format!("{pairs} --pretrain {policy} --tp-size 2 --batch-size 2"),
        format!("{pairs} --pretrain {policy} --ref-pretrain {other} --precision fp16 --batch-size 3 --packing-samples"),
        format!("{labels} --pretrain {policy} --ref-pretrain {other} --precision fp16 --batch-size 2"),
        format!(
            "{pairs} --pretrain {policy} --ref-pretrain {third} --nproc-per-node 4 --sharding HYBRID_SHARD \
             --dp-replicate-size 2 --batch-size 2"
        ),
    ] {
        let (online, with_model, said) = train(&dir, &flags);
        assert_eq!(computed(&said) + kept(&said), 0, "{said}");
        let flags = format!("{flags} --precompute-ref-logps");
        let (first, without, said) = train(&dir, &flags);
        assert_eq!((computed(&said), kept(&said)), (2, 0), "{flags}: {said}");
        let (again, _, said) = train(&dir, &flags);
        assert_eq!((computed(&said), kept(&said)), (0, 2), "{flags}: {said}");
        assert_eq!(again, first, "{flags}");
        if flags.contains("--lora-rank") {
            let rewards = online[0][1..4].iter().flatten();
            assert!(rewards.clone().count() > 0 && rewards.copied().all(|bits| f64::from_bits(bits) == 0.0), "{flags}");
        }
        if flags.contains("--ring-attn-size") {
            near(&first, &online, &flags);
        } else {
            assert_eq!(first, online, "{flags}");
        }
        assert!(
            without < with_model || flags.contains("lora"),
            "{flags}: {without} bytes, {with_model} with the model"
        );
    }
}

#[test]
fn those_of_another_model_or_other_data_are_not_used() {
    let dir = Dir::new();
    let (policy, other) = (model(&dir, "policy", "1"), model(&dir, "other", "2"));
    let data = dir.path("pairs.jsonl");
    std::fs::copy(concat!(env!("CARGO_MANIFEST_DIR"), "/configs/pairs.jsonl"), &data).unwrap();
    let flags = format!(
        "--objective dpo --dataset {} --pretrain {policy} --ref-pretrain {other} --batch-size 2 --no-eval",
        data.display()
    );
    let cached = format!("{flags} --precompute-ref-logps");
    let (old, _, said) = train(&dir, &cached);
    assert_eq!(computed(&said), 1, "{said}");
    // The directory of the reference holds another model of the same size.
    model(&dir, "other", "3");
    let (new, _, said) = train(&dir, &cached);
    assert_eq!((computed(&said), kept(&said)), (1, 0), "{said}");
    assert_eq!(new, train(&dir, &flags).0);
    assert_ne!(new, old);
    // Another row.
    let text = std::fs::read_to_string(&data).unwrap();
    std::fs::write(&data, text.replacen("Happy to help", "Happy to hear", 1)).unwrap();
    let (newest, _, said) = train(&dir, &cached);
    assert_eq!((computed(&said), kept(&said)), (1, 0), "{said}");
    assert_eq!(newest, train(&dir, &flags).0);
    // Other answers for KTO's divergence, and fewer rows.
    let (_, _, said) = train(&dir, &format!("{cached} --max-samples 100"));
    assert_eq!((computed(&said), kept(&said)), (1, 0), "{said}");
}
