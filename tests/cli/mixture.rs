//! Weighted data mixtures and a separate evaluation data set, by flags: the same run after an interruption and on other
//! meshes, sample counts, and messages.
use crate::common::runs::{DDP, Dir, FSDP, Run, events, losses, unlaunched};
use serde_json::{Value, json};
use std::fs;

/// Rows of ids below 60 in which one follows from another, and as many of another kind; text of 60 characters; the
/// first rows again, to evaluate.
fn files() -> Dir {
    let dir = Dir::new();
    let rows = |n: u64, by: u64| -> String {
        let ids = |i: u64| (0..6 + i % 9).map(|t| by * (i + t) % 60).collect::<Vec<_>>();
        (0..n).map(|i| json!({"input_ids": ids(i)}).to_string() + "\n").collect()
    };
    fs::write(dir.path("a.jsonl"), rows(90, 7)).unwrap();
    fs::write(dir.path("b.jsonl"), rows(30, 11)).unwrap();
    fs::write(dir.path("eval.jsonl"), rows(23, 13)).unwrap();
    fs::write(dir.path("c.txt"), "The quick brown fox jumps over the lazy dog. ".repeat(40)).unwrap();
    dir
}

/// Exit status and stderr of a small run in `dir`.
fn run(program: &str, dir: &Dir, args: &str) -> (i32, String) {
    let tiny = "--vocab-size 320 --embed-dim 32 --num-layers 1 --num-heads 2 --warmup-steps 0 --lr 0.01 --max-len 16 \
                --no-sample --batch-size 2";
    let mut command = unlaunched(program);
    command.current_dir(dir.path("")).env("FLATSHARD_CACHE_DIR", dir.path("cache"));
    command.args(tiny.split_whitespace()).args(args.split_whitespace());
    command.stdout(std::process::Stdio::piped()).stderr(std::process::Stdio::piped());
    let ended = Run(command.spawn().unwrap()).end();
    (ended.status.code().unwrap_or(-1), ended.stderr)
}
#[track_caller]
fn good(dir: &Dir, args: &str) -> String {
    let (code, text) = run(FSDP, dir, args);
    assert_eq!(code, 0, "{args}: {text}");
    text
}
#[track_caller]
fn refused(dir: &Dir, args: &str, parts: &[&str]) {
    let (code, text) = run(FSDP, dir, args);
    assert_eq!(code, 2, "{args}: {text}");
    parts.iter().for_each(|part| assert!(text.contains(part), "{part:?} is not in: {text}"));
}
/// Sample counts of the sources after each step; the last ones of a repeated step.
fn counts(dir: &Dir, name: &str) -> Vec<Value> {
    events(&dir.path(name), "step").into_iter().map(|step| step["source_samples"].clone()).collect()
}

#[test]
fn a_mixture_resumes_bitwise_and_counts_exactly() {
    let dir = files();
    for (name, more) in [("plain", ""), ("packed", "--packing-samples --grad-accum 2")] {
        let [whole, parts, one, ck] = ["whole", "parts", "one", "ck"].map(|file| format!("{name}.{file}"));
        let mixed = format!("--dataset a.jsonl:0.7 b.jsonl:0.2 c.txt:0.1 {more} --max-steps 12");
        let text = good(&dir, &format!("{mixed} --metrics-path {whole}"));
        assert!(text.contains("data     mixture of 70 % a.jsonl, 20 % b.jsonl, 10 % c.txt: "), "{text}");
        good(&dir, &format!("{mixed} --metrics-path {parts} --ckpt-dir {ck} --max-steps 5"));
        let rest = format!("{mixed} --batch-size 4 --nproc-per-node 1 --resume {ck}/step-00000005");
        good(&dir, &format!("{rest} --metrics-path {one}"));
        good(&dir, &format!("{mixed} --metrics-path {parts} --ckpt-dir {ck} --resume auto"));
        let steps = counts(&dir, &whole);
        assert_eq!(counts(&dir, &parts), steps);
        assert_eq!(counts(&dir, &one), steps[5..], "on another mesh");
        let end = &events(&dir.path(&parts), "end")[1]["sources"];
        let by_source: Vec<u64> = end.as_array().unwrap().iter().map(|s| s["samples"].as_u64().unwrap()).collect();
        assert_eq!(json!(by_source), steps[11]);
        let samples: u64 = events(&dir.path(&whole), "step").iter().map(|step| step["samples"].as_u64().unwrap()).sum();
        assert_eq!(by_source.iter().sum::<u64>(), samples);
        if more.is_empty() {
            assert_eq!(by_source, [34, 10, 4], "of 48");
            assert_eq!((end[0]["held_out"].as_u64(), end[1]["epochs"].as_f64()), (Some(8), Some(10.0 / 30.0)));
            assert!(text.contains("mixture  b.jsonl: 10 of 48 samples, 0.33 epochs"), "{text}");
        }
    }
}

#[test]
fn the_losses_of_a_resumed_mixture_equal_the_uninterrupted_runs() {
    let dir = files();
    let mixed = "--dataset a.jsonl b.jsonl c.txt --dataset-weights 7,2,1 --lr-scheduler constant --seed 3";
    good(&dir, &format!("{mixed} --max-steps 11 --metrics-path whole"));
    good(&dir, &format!("{mixed} --max-steps 4 --metrics-path parts --ckpt-dir ck"));
    good(&dir, &format!("{mixed} --max-steps 11 --metrics-path parts --ckpt-dir ck --resume auto"));
    assert_eq!(losses(&dir.path("parts")), losses(&dir.path("whole")));
    // Weights in any unit, given either way, are the same mixture.
    let other = "--dataset a.jsonl:3.5 b.jsonl:1 c.txt:0.5 --lr-scheduler constant --seed 3";
    good(&dir, &format!("{other} --max-steps 11 --metrics-path other"));
    assert_eq!(losses(&dir.path("other")), losses(&dir.path("whole")));
    // A run that resumes with other weights reports them.
    let changed =
        String::from("--dataset a.jsonl:1 b.jsonl:1 c.txt:1 --max-steps 12 --ckpt-dir ck --resume auto --seed 3");
    let text = good(&dir, &changed);
    assert!(text.contains("data.weights: [7,2,1] in the checkpoint, [1,1,1] now"), "{text}");
}

#[test]
fn invalid_weights_are_refused() {
    let dir = files();
    fs::write(dir.path("odd:0.5"), "text that is named so ".repeat(20)).unwrap();
    refused(&dir, "--dataset a.jsonl:0.7 b.jsonl", &["--dataset b.jsonl: has no weight", "b.jsonl:WEIGHT"]);
    refused(&dir, "--dataset a.jsonl:0.7 b.jsonl:0", &["weight 0 is not a number above 0"]);
    refused(&dir, "--dataset a.jsonl b.jsonl --dataset-weights 0.5,-1", &["dataset_weights is -1", "above 0"]);
    refused(&dir, "--dataset a.jsonl b.jsonl --dataset-weights 0.5", &["--dataset-weights has 1 weights", "2 paths"]);
    refused(
        &dir,
        "--dataset a.jsonl:1 b.jsonl:2 --dataset-weights 1 2",
        &["--dataset-weights and weights in the paths"],
    );
    refused(&dir, "--dataset no.jsonl:1 b.jsonl:2", &["--dataset no.jsonl: no such file"]);
    refused(&dir, "--dataset synthetic a.jsonl --dataset-weights 1 x", &["--dataset-weights"]);
    let text = good(&dir, "--dataset odd:0.5 --max-steps 1");
    assert!(text.contains("odd:0.5: 1 file"), "a file of that name: {text}");
    let text = good(&dir, "--dataset a.jsonl --dataset-weights 0.5 --max-steps 1");
    assert!(text.contains("--dataset-weights 0.5 has no effect here"), "{text}");
}

#[test]
fn an_evaluation_data_set_has_one_loss_on_every_mesh_and_does_not_change_training() {
    let dir = files();
    let train = "--dataset a.jsonl --lr-scheduler constant";
    let eval = format!("{train} --eval-dataset eval.jsonl c.txt");
    refused(&dir, &eval, &["--eval-dataset", "cannot be mixed"]);
    let eval = format!("{train} --eval-dataset eval.jsonl");
    let text = good(&dir, &format!("{eval} --ckpt-dir ck --max-steps 4 --eval-every 2 --metrics-path first"));
    assert!(text.contains("\neval     eval.jsonl: 1 file") && text.contains("eval  step 2  loss "), "{text}");
    let evals = events(&dir.path("first"), "eval");
    assert_eq!(evals.iter().map(|e| e["step"].as_u64().unwrap()).collect::<Vec<_>>(), [2, 4]);
    // Every row: the tokens of each but its last.
    let rows: u64 = (0..23).map(|i| 5 + i % 9).sum();
    assert!(evals.iter().all(|e| e["tokens"] == rows), "{evals:?}");
    let loss = evals[1]["loss"].as_f64().unwrap();
    let meshes = [
        (FSDP, "--nproc-per-node 1 --batch-size 4"),
        (FSDP, "--nproc-per-node 4 --batch-size 1 --packing-samples"),
        (DDP, "--grad-accum 3"),
        (FSDP, "--nproc-per-node 2 --tp-size 2"),
        (FSDP, "--nproc-per-node 4 --ring-attn-size 2 --packing-samples"),
    ];
    for (i, (program, mesh)) in meshes.into_iter().enumerate() {
        let again = format!("{eval} --ckpt-dir ck --resume ck/step-00000004 --max-steps 4 --metrics-path m{i} {mesh}");
        let (code, text) = run(program, &dir, &again);
        assert_eq!(code, 0, "{mesh}: {text}");
        let there = &events(&dir.path(&format!("m{i}")), "eval")[0];
        assert_eq!(there["tokens"], rows, "{mesh}");
        let there = there["loss"].as_f64().unwrap();
        assert!((there - loss).abs() < 1e-5 * loss, "{mesh}: {there}, not {loss}");
    }
    // Resuming without it, or with another, holds out nothing either.
    for (name, more) in [("with", "--eval-dataset eval.jsonl"), ("without", ""), ("other", "--eval-dataset c.txt")] {
        let again = format!("{train} {more} --resume ck/step-00000004 --max-steps 30 --metrics-path {name}");
        let text = good(&dir, &again);
        assert_eq!(text.contains("there is nothing to evaluate"), more.is_empty(), "{text}");
    }
    assert_eq!(losses(&dir.path("with")), losses(&dir.path("without")));
    assert_eq!(losses(&dir.path("with")), losses(&dir.path("other")));
    assert_eq!(events(&dir.path("without"), "eval").len(), 0);

    // Row flags may apply to one of the two; errors come before the start and name the flag.
    let chat = "{\"instruction\": \"say a\", \"output\": \"a\"}\n";
    fs::write(dir.path("chat.jsonl"), chat.repeat(20)).unwrap();
    good(&dir, "--dataset c.txt --eval-dataset chat.jsonl --apply-chat-template --max-len 64 --max-steps 1");
    refused(&dir, "--dataset c.txt --eval-dataset c.txt --apply-chat-template", &["--apply-chat-template"]);
    refused(&dir, "--dataset c.txt --eval-dataset no.txt", &["--eval-dataset no.txt: no such file"]);
    refused(&dir, "--dataset c.txt --eval-dataset c.txt --no-eval", &["--eval-dataset", "--eval"]);
}
