//! `--print-samples` and `--preview`: what a run would train on, printed before anything starts.
use crate::common::runs::{Dir, FSDP, unlaunched};
use serde_json::{Value, json};
use std::fs;
use std::process::Output;

fn run(dir: &Dir, args: &str) -> Output {
    let mut command = unlaunched(FSDP);
    command.current_dir(dir.path("")).env("FLATSHARD_CACHE_DIR", dir.path("cache"));
    command.args(args.split_whitespace()).output().unwrap()
}

/// The lines that are printed.
fn printed(dir: &Dir, args: &str) -> Vec<Value> {
    let out = run(dir, args);
    assert!(out.status.success(), "{args}: {}", String::from_utf8_lossy(&out.stderr));
    let text = String::from_utf8(out.stdout).unwrap();
    text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

fn talk(asked: &str, said: &str) -> Value {
    json!({"messages": [{"role": "user", "content": asked}, {"role": "assistant", "content": said}]})
}

fn put(dir: &Dir, name: &str, rows: &[Value]) {
    fs::write(dir.path(name), rows.iter().map(|row| format!("{row}\n")).collect::<String>()).unwrap();
}

#[test]
fn samples_are_printed_with_their_loss_and_dropped_rows_with_the_reason() {
    let dir = Dir::new();
    put(&dir, "chats.jsonl", &[talk("a", "b"), talk("c", ""), talk("d", &"long ".repeat(20)), talk("e", "f")]);
    let lines = printed(&dir, "--dataset chats.jsonl --apply-chat-template --max-len 64 --print-samples 2");
    let text = "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\nb<|im_end|>";
    assert_eq!(lines.len(), 3, "two samples, and the row between them");
    assert_eq!((&lines[0]["row"], &lines[0]["text"], &lines[0]["cut"]), (&json!(0), &json!(text), &json!(false)));
    assert_eq!(lines[0]["loss_text"], json!(["b<|im_end|>"]));
    let (tokens, labels) = (lines[0]["tokens"].as_array().unwrap(), lines[0]["labels"].as_array().unwrap());
    assert_eq!((tokens.len(), labels.len()), (text.len() + 1, text.len() + 1), "and the end of text");
    assert!(labels[..text.len() - 11].iter().all(|label| *label == -100), "{labels:?}");
    assert_eq!(labels[text.len() - 11..], tokens[text.len() - 11..]);
    assert_eq!(lines[1], json!({"row": 1, "dropped": "the prompt or the answer is empty"}));
    assert_eq!((&lines[2]["row"], &lines[2]["cut"]), (&json!(2), &json!(true)));
    assert!(lines[2]["text"].as_str().unwrap().ends_with("long lon"), "{}", lines[2]);
    assert!(!dir.path("cache").exists(), "nothing is kept");

    let out = run(&dir, "--dataset chats.jsonl --apply-chat-template --max-len 64 --preview 1");
    let shown = String::from_utf8(out.stdout).unwrap();
    let expected =
        "-- row 0: 63 tokens, 12 with loss\n<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n[[b<|im_end|>]]\n";
    assert_eq!((shown.as_str(), out.status.success()), (expected, true));
}

#[test]
fn pairs_print_a_line_per_side_and_text_its_slices() {
    let dir = Dir::new();
    put(&dir, "pairs.jsonl", &[json!({"prompt": "1+1=", "chosen": "2", "rejected": "3", "id": 7})]);
    let lines = printed(&dir, "--dataset pairs.jsonl --objective dpo --max-len 32 --print-samples 5");
    let seen: Vec<_> = lines.iter().map(|line| (&line["side"], &line["text"], &line["loss_text"])).collect();
    let (chosen, rejected) = (json!("chosen"), json!("rejected"));
    assert_eq!(seen, [(&chosen, &json!("1+1=2"), &json!(["2"])), (&rejected, &json!("1+1=3"), &json!(["3"]))]);
    put(&dir, "kto.jsonl", &[json!({"prompt": "1+1=", "completion": "2", "label": true})]);
    let lines = printed(&dir, "--dataset kto.jsonl --objective kto --max-len 32 --print-samples 1");
    assert_eq!((&lines[0]["label"], &lines[0]["loss_text"]), (&json!(true), &json!(["2"])));
    fs::write(dir.path("notes.txt"), "It is all there. ".repeat(9)).unwrap();
    // Checkpoints of an earlier run are not in the way of what writes nothing.
    fs::create_dir_all(dir.path("ck/step-00000003")).unwrap();
    fs::write(dir.path("ck/step-00000003/trainer_state.json"), "{}").unwrap();
    let lines = printed(&dir, "--dataset notes.txt --max-len 16 --ckpt-dir ck --print-samples 2");
    assert_eq!(lines[1]["text"], " It is all there");
    assert_eq!(lines[1]["loss_text"], json!([" It is all there"]));
}

/// Of a directory with files of several kinds, the files of one kind are read.
#[test]
fn files_that_are_not_read_are_named() {
    let dir = Dir::new();
    fs::create_dir(dir.path("mixed")).unwrap();
    put(&dir, "mixed/a.jsonl", &[json!({"text": "a"}), json!({"text": "b"})]);
    fs::write(dir.path("mixed/b.csv"), "text\nc\n").unwrap();
    let out = run(&dir, "--dataset mixed --max-len 32 --print-samples 1");
    let said = String::from_utf8_lossy(&out.stderr).into_owned();
    assert!(out.status.success() && said.starts_with("not read: ") && said.contains("mixed/b.csv"), "{said}");
}

#[test]
fn bad_rows_end_it_with_status_2_and_nothing_on_stdout() {
    let dir = Dir::new();
    put(&dir, "chats.jsonl", &[json!({"messages": 1})]);
    let out = run(&dir, "--dataset chats.jsonl --apply-chat-template --print-samples 1");
    assert_eq!((out.status.code(), out.stdout.len()), (Some(2), 0));
    let lines = printed(&dir, "--dataset chats.jsonl --apply-chat-template --skip-bad-rows --print-samples 1");
    assert!(lines[0]["dropped"].as_str().unwrap().contains("line 1 has a number as messages"), "{}", lines[0]);
}

/// Of what is sampled there are only prompts; recorded samples are all there.
#[test]
fn prompts_are_printed_without_samples_and_rollouts_with_theirs() {
    let dir = Dir::new();
    put(&dir, "p.jsonl", &[json!({"q": "x"}), json!({"prompt": "1+1=", "answer": 2}), json!({"prompt": "2+2="})]);
    let flags = "--dataset p.jsonl --objective grpo --reward number --skip-bad-rows --max-len 300 --print-samples 5";
    let lines = printed(&dir, &flags.replace("number", "length:9"));
    let seen: Vec<_> = lines.iter().map(|line| (&line["row"], &line["text"], &line["loss_text"])).collect();
    let (one, two, none) = (json!(1), json!(2), json!([]));
    assert_eq!(seen, [(&one, &json!("1+1="), &none), (&two, &json!("2+2="), &none)]);
    assert!(lines[0].get("reward").is_none(), "{}", lines[0]);
    let shown = run(&dir, &flags.replace("number", "length:9").replace("print-samples 5", "preview 1"));
    assert_eq!(String::from_utf8(shown.stdout).unwrap(), "-- row 1: 4 tokens, 0 with loss\n1+1=\n");
    let sample = |reward: i32| json!({"ids": [98], "logprobs": [-1.0], "reward": reward});
    put(&dir, "r.jsonl", &[json!({"prompt_ids": [97], "samples": [sample(0), sample(1)]})]);
    let mut command = unlaunched(crate::common::binaries::FLATSHARD);
    command.current_dir(dir.path("")).args(["samples", "--rollouts", "r.jsonl", "--tokenizer", "bytes"]);
    let out = command.output().unwrap();
    let text = String::from_utf8(out.stdout).unwrap();
    assert!(text.contains("\"reward\":1.0") && text.contains("\"loss_text\":[\"b\"]"), "{text}");
}

/// A clone of a data set whose card has several configurations: each has a name, with its split or without.
#[test]
fn configurations_of_a_directory_are_named_as_on_the_hub() {
    let dir = Dir::new();
    let config = |name: &str| {
        format!(
            "- config_name: {name}\n  data_files:\n  - split: train\n    path: data/{name}/train*\n  - split: test\n    \
             path: data/{name}/test*\n"
        )
    };
    for name in ["all", "some"] {
        fs::create_dir_all(dir.path(&format!("set/data/{name}"))).unwrap();
        for split in ["train", "test"] {
            put(&dir, &format!("set/data/{name}/{split}.jsonl"), &[json!({"text": format!("{name} {split}")})]);
            put(&dir, &format!("set/data/{name}/{split}.bak"), &[json!({"text": "a leftover"})]);
        }
    }
    fs::write(dir.path("set/README.md"), format!("---\nconfigs:\n{}{}---\n", config("all"), config("some"))).unwrap();
    let text =
        |name: &str| printed(&dir, &format!("--dataset {name} --max-len 32 --print-samples 1"))[0]["text"].clone();
    assert_eq!(
        [text("set/all"), text("set/some:test"), text("set/all:train")],
        ["all train", "some test", "all train"]
    );
    for (name, says) in [
        ("set", "several configurations, and none is the default: all, some. Name one, such as set/all"),
        ("set/all:none", "set has no split none; it has train, test"),
        ("set/none", "set/none"),
    ] {
        let out = run(&dir, &format!("--dataset {name} --max-len 32 --print-samples 1"));
        let said = String::from_utf8_lossy(&out.stderr).into_owned();
        assert!(out.status.code() == Some(2) && said.contains(says), "{name}: {said}");
    }
    let more = [json!({"text": "a", "system_prompt": "s"}), json!({"text": "b", "score": 1})];
    put(&dir, "more.jsonl", &more);
    let said = |count: u64| {
        let out = run(&dir, &format!("--dataset more.jsonl --max-len 32 --print-samples {count}"));
        String::from_utf8_lossy(&out.stderr).into_owned()
    };
    assert!(said(1).contains("not read: `system_prompt`") && !said(1).contains("score"), "{}", said(1));
    assert!(said(2).contains("not read: `score`, `system_prompt`"), "{}", said(2));
}
