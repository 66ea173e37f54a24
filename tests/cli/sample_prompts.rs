//! `--sample-prompts`: at each evaluation the model in training writes what `flatshard generate` would, and training
//! has the same bits without it.
use crate::common::binaries::{FLATSHARD, FSDP};
use crate::common::runs::{Dir, Run, events, losses, unlaunched};
use crate::common::simcuda;
use serde_json::{Value, json};
use std::fs;
use std::process::Stdio;

/// Exit status, stdout and stderr.
fn run(dir: &Dir, program: &str, args: &str) -> (i32, String, String) {
    let mut command = unlaunched(program);
    command.current_dir(dir.path("")).env("FLATSHARD_CACHE_DIR", dir.path("cache")).args(args.split_whitespace());
    let ended = Run(command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()).end();
    (ended.status.code().unwrap_or(-1), ended.stdout, ended.stderr)
}
#[track_caller]
fn good(dir: &Dir, program: &str, args: &str) -> (String, String) {
    let (code, out, text) = run(dir, program, args);
    assert_eq!(code, 0, "{args}: {text}");
    (out, text)
}

/// A model of bytes, prompts p.jsonl, and text.txt.
fn model() -> Dir {
    let dir = Dir::new();
    fs::write(dir.path("text.txt"), "the quick brown fox jumps over the lazy dog. ".repeat(80)).unwrap();
    let rows = [json!({"prompt": "the quick"}), json!({"text": "a\u{1b}[1m"}), json!({"prompt_ids": [5, 6, 7]})];
    fs::write(dir.path("p.jsonl"), rows.map(|row| row.to_string()).join("\n")).unwrap();
    let new = "--embed-dim 32 --num-layers 2 --num-heads 4 --num-kv-heads 2 --max-positions 512 --max-len 64";
    good(&dir, FSDP, &format!("--dataset text.txt {new} --max-steps 2 --save-hf model --no-eval --no-sample"));
    dir
}

/// Texts of a step, and how they end.
fn texts(dir: &Dir, file: &str, step: u64) -> Vec<(String, String)> {
    let all = events(&dir.path(file), "samples");
    let of = all.iter().find(|event| event["step"] == step).unwrap_or_else(|| panic!("no samples of step {step}"));
    pairs(of["samples"].as_array().unwrap())
}
fn pairs(lines: &[Value]) -> Vec<(String, String)> {
    let text = |line: &Value, key: &str| line[key].as_str().unwrap().to_string();
    lines.iter().map(|line| (text(line, "text"), text(line, "finish"))).collect()
}
fn generated(dir: &Dir, model: &str, flags: &str) -> Vec<(String, String)> {
    let (out, _) = good(dir, FLATSHARD, &format!("generate {model} p.jsonl {flags}"));
    pairs(&out.lines().map(|line| serde_json::from_str(line).unwrap()).collect::<Vec<Value>>())
}

const DRAWN: &str = "--max-new-tokens 12 --seed 4";
const TRAIN: &str = "--pretrain model --dataset text.txt --max-len 64 --batch-size 2 --max-steps 4 --lr 0.01 \
                     --warmup-steps 0 --eval-every 2 --seed 4";

#[test]
fn texts_are_those_of_the_model_before_and_after_and_training_is_the_same() {
    let dir = model();
    let sampled = format!("{TRAIN} --nproc-per-node 2 --max-new-tokens 12 --sample-prompts p.jsonl");
    let (out, text) = good(&dir, FSDP, &format!("{sampled} --metrics-path with.jsonl --save-hf tuned"));
    good(&dir, FSDP, &format!("{TRAIN} --nproc-per-node 2 --no-sample --metrics-path without.jsonl"));

    let steps: Vec<Value> = events(&dir.path("with.jsonl"), "samples").iter().map(|e| e["step"].clone()).collect();
    assert_eq!(steps, [0, 2, 4], "with each evaluation, once");
    let (before, after) = (texts(&dir, "with.jsonl", 0), texts(&dir, "with.jsonl", 4));
    assert_eq!(before, generated(&dir, "model", DRAWN));
    assert_eq!(after, generated(&dir, "tuned", DRAWN));
    assert_ne!(before, after);

    // Losses, gradient norms and evaluations.
    assert_eq!(losses(&dir.path("with.jsonl")), losses(&dir.path("without.jsonl")));
    let evaluated = |file: &str| -> Vec<Value> {
        events(&dir.path(file), "eval").iter().map(|event| event["loss"].clone()).collect()
    };
    assert_eq!(evaluated("with.jsonl"), evaluated("without.jsonl"));
    // The sampler is part of the plan.
    let planned = |file: &str| events(&dir.path(file), "run")[0]["planned_bytes"]["total"].as_u64().unwrap();
    assert!(planned("with.jsonl") > planned("without.jsonl"));

    // A line each on stderr, and all of the last texts on stdout; nothing that a terminal obeys.
    let shown: Vec<&str> = text.lines().filter(|line| line.starts_with("sample  step ")).collect();
    assert_eq!(shown.len(), 9, "{text}");
    assert!(shown[0].starts_with("sample  step 0  prompt 1: "), "{}", shown[0]);
    let blocks = ["--- prompt ---\nthe quick\n--- generated ---\n", "--- prompt ---\na.[1m\n--- generated ---\n"];
    assert!(blocks.iter().all(|block| out.contains(block)) && !out.contains('\u{1b}'), "{out}");
    assert!(out.matches("--- prompt ---").count() == 3 && !out.contains("held-out"), "{out}");
    let (quiet, _) = good(&dir, FSDP, &format!("{sampled} --no-sample"));
    assert_eq!(quiet, "", "--no-sample prints nothing on stdout");
}

#[test]
fn texts_do_not_depend_on_ranks_or_adapters_that_learned_nothing() {
    let dir = model();
    let expected = generated(&dir, "model", DRAWN);
    for (name, flags) in [
        ("ring", "--nproc-per-node 2 --ring-attn-size 2"),
        ("lora", "--nproc-per-node 2 --lora-rank 2 --activation-checkpoint"),
        ("ddp", "--nproc-per-node 3 --strategy ddp"),
        ("zero", "--nproc-per-node 2 --backend zero --zero-stage 3"),
    ] {
        let run = format!("{TRAIN} {flags} --max-steps 1 --max-new-tokens 12 --sample-prompts p.jsonl");
        good(&dir, FSDP, &format!("{run} --metrics-path {name}.jsonl"));
        assert_eq!(texts(&dir, &format!("{name}.jsonl"), 0), expected, "{name}");
    }
}

#[test]
fn conversations_are_continued_in_their_template() {
    let dir = model();
    let message = |role: &str, content: &str| json!({"role": role, "content": content});
    let chat = json!({"messages": [message("user", "1?"), message("assistant", "yes")]});
    fs::write(dir.path("chats.jsonl"), format!("{chat}\n").repeat(20)).unwrap();
    let asked = [
        json!({"messages": [message("user", "1?")]}),
        json!({"prompt": [message("system", "Be brief."), message("user", "2?")]}),
    ];
    fs::write(dir.path("p.jsonl"), asked.map(|row| row.to_string()).join("\n")).unwrap();
    let tune = "--pretrain model --dataset chats.jsonl --apply-chat-template --lr 0.01 --warmup-steps 0 --epochs 60 \
                --nproc-per-node 2 --max-new-tokens 24 --temperature 0 --sample-prompts p.jsonl --metrics-path m.jsonl";
    good(&dir, FSDP, tune);
    let last = events(&dir.path("m.jsonl"), "samples").pop().unwrap()["samples"].clone();
    assert_eq!((&last[0]["prompt"], &last[1]["prompt"]), (&json!("1?"), &json!("system: Be brief.\nuser: 2?")));
    assert!(last[0]["text"].as_str().unwrap().starts_with("yes<|im_end|>"), "{last}");
}

#[test]
fn the_sampler_of_a_gpu_is_within_the_plan() {
    let dir = model();
    let bytes = |name: &str, flags: &str| {
        let mut gpu = simcuda::run(FSDP, "arch=80");
        let tiny = "--device cuda --nproc-per-node 1 --max-steps 2 --batch-size 1 --max-len 16 --metrics-path";
        gpu.current_dir(dir.path("")).args(TRAIN.split_whitespace()).args(tiny.split_whitespace());
        let output = gpu.arg(name).args(flags.split_whitespace()).output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        let planned = events(&dir.path(name), "run")[0]["planned_bytes"]["total"].as_u64().unwrap();
        let peak = events(&dir.path(name), "step")[1]["peak_mem_bytes"].as_u64().unwrap();
        [planned, peak]
    };
    let with = bytes("with.jsonl", "--max-new-tokens 3 --sample-prompts p.jsonl");
    let without = bytes("without.jsonl", "--no-sample");
    // The peak is all that was ever allocated, with samples before the first step. Both have the device's own buffers.
    let more = [0, 1].map(|i| with[i] - without[i]);
    assert!(more[0] > 0 && more[0] == more[1], "{more:?} bytes planned and allocated");
}

#[test]
fn bad_files_are_refused_by_line_before_anything_starts() {
    let dir = model();
    for (file, content, says) in [
        ("none.jsonl", None, "--sample-prompts none.jsonl: no such file"),
        ("empty.jsonl", Some("\n"), "--sample-prompts empty.jsonl: no rows"),
        (
            "bad.jsonl",
            Some("{\"prompt\": \"a\"}\n{}\n"),
            "bad.jsonl: line 2 has no prompt in `prompt`, `messages`, `conversations`, `text` or `prompt_ids`; its keys are: \n",
        ),
        ("bad.jsonl", Some("{\"prompt\": \"a\"}\n{\"prompt_ids\": [9999]}\n"), "bad.jsonl: line 2 has token id"),
        ("bad.jsonl", Some("{\"prompt\": \"a\", \"tools\": []}\n"), "bad.jsonl: line 1 has tools, which text"),
    ] {
        if let Some(content) = content {
            fs::write(dir.path(file), content).unwrap();
        }
        let (code, out, text) = run(&dir, FSDP, &format!("{TRAIN} --sample-prompts {file} --metrics-path m.jsonl"));
        assert!(code == 2 && out.is_empty() && text.contains(says), "{file}: {code} {text}");
        assert!(!dir.path("m.jsonl").exists(), "nothing was started");
    }
}
