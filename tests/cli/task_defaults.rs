//! Defaults of a run with a pretrained model: those of its task, named in the header, with an evaluation before the
//! first step; and signs of a run that goes wrong.
use crate::common::runs::{Dir, FSDP, Run, events, unlaunched};
use serde_json::{Value, json};
use std::fs;

const TINY: &str = "--embed-dim 16 --num-layers 1 --num-heads 2 --max-positions 512 --no-sample --no-measure-peak";

fn run(dir: &Dir, args: &str) -> (i32, String) {
    let mut command = unlaunched(FSDP);
    command.current_dir(dir.path("")).env("FLATSHARD_CACHE_DIR", dir.path("cache")).args(args.split_whitespace());
    command.stdout(std::process::Stdio::piped()).stderr(std::process::Stdio::piped());
    let ended = Run(command.spawn().unwrap()).end();
    (ended.status.code().unwrap_or(-1), ended.stderr)
}

fn chats(dir: &Dir, name: &str, rows: usize) {
    let row = |i: usize| {
        json!({"messages": [
            {"role": "user", "content": format!("{i}?")}, {"role": "assistant", "content": "yes ".repeat(1 + i % 9)},
        ]})
    };
    fs::write(dir.path(name), (0..rows).map(|i| format!("{}\n", row(i))).collect::<String>()).unwrap();
}

/// A directory with a model.
fn model() -> Dir {
    let dir = Dir::new();
    fs::write(dir.path("notes.txt"), "All that is written here is short. ".repeat(400)).unwrap();
    let (code, text) = run(&dir, &format!("{TINY} --dataset notes.txt --max-len 64 --max-steps 1 --save-hf model"));
    assert_eq!(code, 0, "{text}");
    dir
}

#[test]
fn a_fine_tune_has_its_own_defaults_and_names_them() {
    let dir = model();
    chats(&dir, "chats.jsonl", 20);
    let tune = "--pretrain model --dataset chats.jsonl --apply-chat-template --no-sample --no-measure-peak";
    let (code, text) = run(&dir, &format!("{tune} --metrics-path full.jsonl"));
    assert_eq!(code, 0, "{text}");
    let expected = "defaults of a full fine-tune: lr 0.00002, lr_scheduler cosine, weight_decay 0.0, warmup_ratio 0.03, \
                    eval_on_start true, max_len 112 (the longest row, up to 2048), epochs 3\n";
    assert!(text.contains(expected) && text.contains("tokens in 20 samples of up to 112; no padding\n"), "{text}");
    let evaluated: Vec<Value> = events(&dir.path("full.jsonl"), "eval").iter().map(|e| e["step"].clone()).collect();
    // 18 of 20 rows, three times, in steps of 16.
    assert_eq!(evaluated, [0, 4], "before the first step and at the end");
    let started = &events(&dir.path("full.jsonl"), "run")[0]["config"];
    assert_eq!((&started["data"]["max_len"], &started["optim"]["warmup_steps"]), (&json!(112), &json!(1)));
    assert_eq!(events(&dir.path("full.jsonl"), "end")[0]["warnings"], json!([]));

    let (code, text) = run(&dir, &format!("{tune} --lora-rank 2 --max-steps 2 --max-len 80 --metrics-path lora.jsonl"));
    assert_eq!(code, 0, "{text}");
    let expected = "defaults of a LoRA fine-tune: lr 0.0002, lr_scheduler cosine, weight_decay 0.0, warmup_ratio 0.03, \
                    eval_on_start true; given: max_len, max_steps\n";
    assert!(text.contains(expected), "{text}");
    assert!(text.contains("longer rows cut at 80 tokens"), "{text}");
}

/// One length for all of it.
#[test]
fn text_is_mixed_with_rows_or_evaluated_next_to_them() {
    let dir = model();
    chats(&dir, "chats.jsonl", 20);
    let tune = "--pretrain model --apply-chat-template --no-sample --no-measure-peak --max-steps 2";
    for data in [
        "--dataset chats.jsonl:0.5 notes.txt:0.5",
        "--dataset notes.txt:0.5 chats.jsonl:0.5",
        "--dataset chats.jsonl --eval-dataset notes.txt",
        "--dataset notes.txt --eval-dataset chats.jsonl",
    ] {
        let (code, text) = run(&dir, &format!("{tune} {data}"));
        assert!(code == 0 && !text.contains("rows cut"), "{data}: {text}");
    }
}

#[test]
fn a_learning_rate_far_from_the_tables_is_said_and_recorded() {
    let dir = model();
    chats(&dir, "chats.jsonl", 5);
    let (code, text) = run(
        &dir,
        "--pretrain model --dataset chats.jsonl --apply-chat-template --lr 1e-3 --no-sample --no-measure-peak \
         --metrics-path far.jsonl",
    );
    assert_eq!(code, 0, "{text}");
    let far = "lr 0.001 is 50.00 times the default of a full fine-tune, 0.00002";
    assert!(text.contains(far), "{text}");
    assert!(text.contains("eval     none: 5 rows are too few to hold some out"), "{text}");
    let warnings = events(&dir.path("far.jsonl"), "end")[0]["warnings"].clone();
    assert!(warnings[0].as_str().unwrap().starts_with(far), "{warnings}");
}
