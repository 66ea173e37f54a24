//! Labeled answers from the command line: the shipped example learns, rows are read in all their forms, a step does not
//! depend on how it is split, and bad rows are refused with one message.
use crate::common::runs::{Dir, FSDP, events, unlaunched};
use serde_json::{Value, json};
use std::process::Output;

fn run(args: &[&str]) -> Output {
    let mut command = unlaunched(FSDP);
    command.current_dir(env!("CARGO_MANIFEST_DIR")).args(args).output().unwrap()
}
fn stderr(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}
fn number(event: &Value, key: &str) -> f64 {
    event[key].as_f64().unwrap_or_else(|| panic!("{key} of {event}"))
}

/// Held-out answers of the two kinds are told apart, in seconds.
#[test]
fn the_shipped_example_learns_what_is_desirable() {
    let dir = Dir::new();
    let ended = run(&["--config", "configs/kto.yaml", "--eval-every", "epoch", "--metrics-path", &dir.arg("m.jsonl")]);
    assert!(ended.status.success(), "{}", stderr(&ended));
    let (steps, evaluations) = (events(&dir.path("m.jsonl"), "step"), events(&dir.path("m.jsonl"), "eval"));
    // The policy starts as the reference: neither is there a divergence, nor is any answer better than it was.
    assert!((number(&steps[0], "loss") - 0.5).abs() < 1e-9, "{}", steps[0]);
    assert_eq!(["kl", "reward_chosen", "reward_rejected"].map(|key| number(&steps[0], key)), [0.0; 3]);
    assert!(steps[0].get("reward_accuracy").is_none(), "{}", steps[0]);
    let last = evaluations.last().unwrap();
    assert_eq!(number(last, "samples"), 64.0);
    assert!(number(last, "reward_chosen") > number(last, "reward_rejected") + 1.0, "{last}");
    assert!(number(last, "loss") < 0.4, "{last}");
}

/// Four answers in a step, on one rank or two, at once or accumulated: the same losses, rewards and divergence.
#[test]
fn a_step_does_not_depend_on_its_split() {
    let dir = Dir::new();
    let steps = |name: &str, split: &str| {
        let metrics = dir.arg(name);
        let tiny = "--objective kto --dataset configs/labels.jsonl --eval-dataset configs/labels_eval.jsonl --tokenizer bytes \
                    --embed-dim 16 --num-layers 1 --num-heads 2 --max-len 192 --max-steps 3 --lr 0.05 --warmup-steps 0 \
                    --undesirable-weight 0.5";
        let args: Vec<&str> = tiny.split_whitespace().chain(split.split_whitespace()).collect();
        let ended = run(&[&args[..], &["--metrics-path", &metrics]].concat());
        assert!(ended.status.success(), "{split}: {}", stderr(&ended));
        let (mut all, evaluations) = (events(&dir.path(name), "step"), events(&dir.path(name), "eval"));
        all.extend(evaluations);
        all
    };
    let alone = steps("alone", "--nproc-per-node 1 --batch-size 4");
    assert!(alone.iter().any(|event| number(event, "kl") > 0.0), "{alone:?}");
    for split in [
        "--nproc-per-node 2 --batch-size 2",
        "--nproc-per-node 2 --batch-size 1 --grad-accum 2",
        "--nproc-per-node 1 --batch-size 1 --grad-accum 4 --no-group-by-length",
        "--nproc-per-node 2 --batch-size 4 --ring-attn-size 2",
        "--nproc-per-node 2 --batch-size 4 --tp-size 2",
    ] {
        for (a, b) in alone.iter().zip(steps("split", split)) {
            for key in ["loss", "reward_chosen", "reward_rejected", "kl"] {
                let (a, b) = (a[key].as_f64(), b[key].as_f64());
                let near = a.zip(b).map_or(a == b, |(a, b)| (a - b).abs() < 2e-5 * a.abs().max(0.1));
                assert!(near, "{split}: {key} {a:?} and {b:?}");
            }
        }
    }
}

/// The same answers as text, messages, conversations, instructions and tokens give the same run.
#[test]
fn every_form_of_a_labeled_answer_is_read() {
    let dir = Dir::new();
    let texts = [("ab", "cd", true), ("a", "bcd", false), ("abc", "d", true), ("b", "aa", false)];
    let turn = |role: &str, text: &str| json!({"role": role, "content": text});
    let ids = |text: &str| text.bytes().map(u32::from).collect::<Vec<_>>();
    let write = |name: &str, row: &dyn Fn(&str, &str, bool) -> Value| {
        let rows: Vec<String> = texts.iter().map(|&(p, c, l)| row(p, c, l).to_string() + "\n").collect();
        std::fs::write(dir.path(name), rows.concat().repeat(4)).unwrap();
    };
    write("text.jsonl", &|p, c, l| json!({"prompt": p, "completion": c, "label": l}));
    write("tokens.jsonl", &|p, c, l| {
        let answer = [ids(c), vec![256]].concat();
        json!({"prompt_input_ids": ids(p), "completion_input_ids": answer, "label": l})
    });
    write(
        "messages.jsonl",
        &|p, c, l| json!({"prompt": [turn("user", p)], "completion": [turn("assistant", c)], "label": l}),
    );
    write("whole.jsonl", &|p, c, l| json!({"messages": [turn("user", p), turn("assistant", c)], "label": u8::from(l)}));
    write(
        "sharegpt.jsonl",
        &|p, c, l| json!({"conversations": [{"from": "human", "value": p}, {"from": "gpt", "value": c}], "kto_tag": l}),
    );
    write("instructions.jsonl", &|p, c, l| json!({"instruction": p, "input": "", "output": c, "kto_tag": l}));
    write("openrlhf.jsonl", &|p, c, l| json!({"instruction": p, "response": c, "score": u8::from(l)}));
    let losses = |name: &str, more: &[&str]| {
        let (data, metrics) = (dir.arg(name), dir.arg(&format!("{name}.metrics")));
        let tiny = "--objective kto --tokenizer bytes --vocab-size 320 --embed-dim 16 --num-layers 1 --num-heads 2 \
                    --nproc-per-node 1 --max-len 16 --batch-size 4 --max-steps 3 --lr 0.1 --warmup-steps 0 --no-shuffle";
        let args: Vec<&str> = tiny.split_whitespace().chain(["--dataset", &data, "--metrics-path", &metrics]).collect();
        let ended = run(&[&args[..], more].concat());
        assert!(ended.status.success(), "{name}: {}", stderr(&ended));
        let steps = events(&dir.path(&format!("{name}.metrics")), "step");
        steps.iter().map(|step| number(step, "loss")).collect::<Vec<_>>()
    };
    // The template adds nothing, so that all forms are the same text.
    let plain = ["--tokenizer-chat-template", "{% for m in messages %}{{ m.content }}{% endfor %}"];
    let tag = [&plain[..], &["--label-key", "kto_tag"]].concat();
    let text = losses("text.jsonl", &[]);
    assert!(text[2] < text[0], "{text:?}");
    let keys = ["--prompt-key", "instruction", "--output-key", "response", "--label-key", "score"];
    for (name, more) in [
        ("tokens.jsonl", &[][..]),
        ("messages.jsonl", &plain),
        ("whole.jsonl", &plain),
        ("sharegpt.jsonl", &tag),
        ("instructions.jsonl", &[&tag[..], &["--apply-chat-template"]].concat()),
        ("openrlhf.jsonl", &keys),
        ("openrlhf.jsonl", &["--input_key", "instruction", "--output_key", "response", "--label_key", "score"]),
    ] {
        assert_eq!(losses(name, more), text, "{name}");
    }
    // Pairs are two rows each, as in TRL, whatever their form.
    let answer = |completion: &str, label: bool| json!({"prompt": "why?", "completion": completion, "label": label});
    let two = format!("{}\n{}\n", answer(" so", true), answer(" no", false));
    let pair = |row: Value| format!("{row}\n").repeat(8);
    std::fs::write(dir.path("two.jsonl"), two.repeat(8)).unwrap();
    std::fs::write(dir.path("pair.jsonl"), pair(json!({"prompt": "why?", "chosen": " so", "rejected": " no"})))
        .unwrap();
    std::fs::write(dir.path("joined.jsonl"), pair(json!({"chosen": "why? so", "rejected": "why? no"}))).unwrap();
    let ids = |text: &str| text.bytes().map(u32::from).chain([256]).collect::<Vec<_>>();
    let asked: Vec<u32> = "why?".bytes().map(u32::from).collect();
    let tokens = json!({"prompt_ids": asked, "chosen_ids": ids(" so"), "rejected_ids": ids(" no")});
    std::fs::write(dir.path("ids.jsonl"), pair(tokens)).unwrap();
    for name in ["pair.jsonl", "joined.jsonl", "ids.jsonl"] {
        assert_eq!(losses(name, &[]), losses("two.jsonl", &[]), "{name}");
    }
}

#[test]
fn bad_labels_are_refused_with_one_message() {
    let dir = Dir::new();
    let tiny =
        "--objective kto --embed-dim 16 --num-layers 1 --num-heads 2 --nproc-per-node 1 --max-len 64 --batch-size 1";
    let refused = |name: &str, rows: usize, row: Value, says: &[&str]| {
        std::fs::write(dir.path(name), format!("{row}\n").repeat(rows)).unwrap();
        let data = dir.arg(name);
        let args: Vec<&str> = tiny.split_whitespace().chain(["--dataset", &data]).collect();
        let ended = run(&args);
        let said = stderr(&ended);
        assert_eq!((ended.status.code(), said.lines().count()), (Some(2), 1), "{row}: {said}");
        says.iter().for_each(|text| assert!(said.contains(text), "{row}: {text} is not in {said}"));
    };
    let answer = |prompt: &str, completion: &str, label: Value| json!({"prompt": prompt, "completion": completion, "label": label});
    refused("empty.jsonl", 4, answer("a", "", json!(true)), &["line 1", "empty answer", "`completion`"]);
    refused("mute.jsonl", 4, answer("", "b", json!(true)), &["line 1", "empty prompt"]);
    refused("words.jsonl", 4, answer("a", "b", json!("yes")), &["line 1", "\"yes\" as label", "true or false"]);
    refused("half.jsonl", 4, answer("a", "b", json!(0.5)), &["line 1", "0.5 as label"]);
    refused("missing.jsonl", 4, json!({"prompt": "a", "completion": "b"}), &["line 1", "no `label`"]);
    refused(
        "pair.jsonl",
        4,
        json!({"prompt": "a", "chosen": "b", "rejected": "c", "label": true}),
        &["no `completion`"],
    );
    refused("alone.jsonl", 1, answer("a", "b", json!(true)), &["one row", "answers of other rows"]);
    refused("long.jsonl", 4, answer("a", &"c".repeat(80), json!(true)), &["max_len 64", "Increase"]);
    let talk = json!({"messages": [{"role": "user", "content": "a"}], "label": true});
    refused("unanswered.jsonl", 4, talk, &["line 1", "only one message"]);
}
