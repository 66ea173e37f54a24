//! `flatshard generate` with a file of prompts: JSON lines, whose texts are those of each prompt alone.
use crate::common::binaries::{FLATSHARD, FSDP};
use crate::common::runs::{Dir, Run, unlaunched};
use serde_json::{Value, json};
use std::fs;
use std::io::Write;
use std::process::Stdio;

/// Exit status, stdout and stderr.
fn run(dir: &Dir, program: &str, args: &[&str]) -> (i32, String, String) {
    let mut command = unlaunched(program);
    command.current_dir(dir.path("")).args(args).stdout(Stdio::piped()).stderr(Stdio::piped());
    let ended = Run(command.spawn().unwrap()).end();
    (ended.status.code().unwrap_or(-1), ended.stdout, ended.stderr)
}
#[track_caller]
fn good(dir: &Dir, program: &str, args: &[&str]) -> String {
    let (code, out, text) = run(dir, program, args);
    assert_eq!(code, 0, "{args:?}: {text}");
    out
}

/// A model of bytes.
fn model() -> Dir {
    let dir = Dir::new();
    fs::write(dir.path("text.txt"), "the quick brown fox jumps over the lazy dog. ".repeat(40)).unwrap();
    let new = "--dataset text.txt --embed-dim 32 --num-layers 2 --num-heads 4 --num-kv-heads 2 --max-len 64 --max-steps 2 \
               --save-hf model --no-eval";
    good(&dir, FSDP, &new.split_whitespace().collect::<Vec<_>>());
    dir
}

#[test]
fn texts_of_a_file_are_those_of_each_prompt_alone() {
    let dir = model();
    let rows = [json!({"prompt": "the quick"}), json!({"text": "a", "answer": 3}), json!({"prompt_ids": [5, 6, 7]})];
    fs::write(dir.path("p.jsonl"), rows.map(|row| row.to_string()).join("\n")).unwrap();
    let flags = ["--max-new-tokens", "8", "--seed", "4"];
    let lines = |out: String| -> Vec<Value> { out.lines().map(|line| serde_json::from_str(line).unwrap()).collect() };
    let all = good(&dir, FLATSHARD, &[&["generate", "model", "p.jsonl", "--group-size", "2"], &flags[..]].concat());
    let all = lines(all);
    let places: Vec<_> =
        all.iter().map(|line| (line["prompt"].as_u64().unwrap(), line["sample"].as_u64().unwrap())).collect();
    assert_eq!(places, [(0, 0), (0, 1), (1, 0), (1, 1), (2, 0), (2, 1)]);
    for line in &all {
        let [ids, logprobs] = ["ids", "logprobs"].map(|key| line[key].as_array().unwrap());
        assert!(ids.len() == logprobs.len() && ids.len() <= 8 && !ids.is_empty(), "{line}");
        assert_eq!(line["finish"], if ids.len() == 8 { "length" } else { "stop" }, "{line}");
    }
    assert_ne!(all[0]["ids"], all[1]["ids"]);
    let single = [&["--pretrain", "model", "--generate", "the quick"], &flags[..]].concat();
    assert_eq!(good(&dir, FSDP, &single), format!("{}\n", all[0]["text"].as_str().unwrap()));
    let ranks = [&["generate", "model", "p.jsonl", "--group-size", "2", "--nproc-per-node", "2"], &flags[..]].concat();
    assert_eq!(lines(good(&dir, FLATSHARD, &ranks)), all);
    // A character of the first text ends it, and is left out.
    let text = all[0]["text"].as_str().unwrap();
    let stop = text.chars().nth(3).unwrap().to_string();
    let cut = good(&dir, FSDP, &[&single[..], &["--stop", &stop]].concat());
    assert_eq!(cut, format!("{}\n", text.split(&stop).next().unwrap()));
}

/// What is piped is the text, though a file has its name.
#[test]
fn a_piped_prompt_is_no_name() {
    let dir = model();
    let mut command = unlaunched(FSDP);
    let words = "--pretrain model --generate - --max-new-tokens 4 --seed 4";
    command.current_dir(dir.path("")).args(words.split_whitespace());
    let mut run = command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    run.stdin.take().unwrap().write_all(b"text.txt\n").unwrap();
    let ended = Run(run).end();
    assert!(ended.status.success() && ended.stderr.contains("4 tokens"), "{}", ended.stderr);
}

/// The room of each prompt, whatever others there are; and of a chat, what ends a turn ends the text.
#[test]
fn texts_end_by_their_own_prompts() {
    let dir = model();
    let texts = |rows: &[Value], flags: &str| -> Vec<Value> {
        fs::write(dir.path("p.jsonl"), rows.iter().map(|row| format!("{row}\n")).collect::<String>()).unwrap();
        let words = format!("generate model p.jsonl --seed 4 {flags}");
        let out = good(&dir, FLATSHARD, &words.split_whitespace().collect::<Vec<_>>());
        out.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
    };
    let row = |tokens: usize| json!({"prompt_ids": vec![7; tokens]});
    let mixed = texts(&[row(3), row(60), row(63)], "--max-new-tokens 8 --temperature 0");
    let alone = texts(&[row(3)], "--max-new-tokens 8 --temperature 0");
    let new = |line: &Value| line["ids"].as_array().unwrap().len();
    assert_eq!((mixed.iter().map(new).collect::<Vec<_>>(), &mixed[0]["ids"]), (vec![8, 4, 1], &alone[0]["ids"]));

    let asked = json!({"messages": [{"role": "user", "content": "a"}]});
    let text = texts(&[json!({"prompt": "<u>a<a>"})], "--max-new-tokens 32 --temperature 1");
    let ids: Vec<u64> = text[0]["ids"].as_array().unwrap().iter().map(|id| id.as_u64().unwrap()).collect();
    let is_end =
        |&at: &usize| ids[at] < 128 && (ids[at] as u8 as char).is_ascii_alphanumeric() && ids[at] != b'a' as u64;
    let at = (0..ids.len()).find(is_end).expect("a letter among random bytes");
    let end = ids[at] as u8 as char;
    let template = format!(
        "{{% for m in messages %}}<{{{{ m.role[0] }}}}>{{{{ m.content }}}}{{% if m.role == 'assistant' %}}{end}{{% endif %}}{{% endfor %}}\
         {{% if add_generation_prompt %}}<a>{{% endif %}}"
    );
    fs::write(dir.path("chat.jinja"), template).unwrap();
    let chat = "--max-new-tokens 32 --temperature 1 --tokenizer-chat-template chat.jinja";
    let ended = &texts(&[asked], chat)[0];
    assert_eq!((&ended["ids"], &ended["finish"]), (&json!(ids[..=at]), &json!("stop")), "{end}");
}

/// The answer that ends a conversation is no part of its prompt, and that is said.
#[test]
fn answers_of_a_data_set_are_left_out_of_prompts() {
    let dir = model();
    let chat = "{% for m in messages %}<{{ m.role[0] }}>{{ m.content }}{% endfor %}{% if add_generation_prompt %}<a>{% endif %}";
    fs::write(dir.path("chat.jinja"), chat).unwrap();
    let write = |row: &Value| fs::write(dir.path("p.jsonl"), format!("{row}\n").repeat(2)).unwrap();
    let texts = |row: &Value| {
        write(row);
        let flags = "generate model p.jsonl --max-new-tokens 6 --temperature 0 --tokenizer-chat-template chat.jinja";
        run(&dir, FLATSHARD, &flags.split_whitespace().collect::<Vec<_>>())
    };
    let message = |role: &str, content: &str| json!({"role": role, "content": content});
    let (user, answer) = (message("user", "2+3?"), message("assistant", "5"));
    let (code, asked, said) = texts(&json!({"messages": [user]}));
    assert!(code == 0 && asked.contains("logprobs") && !said.contains("not read"), "{said}");
    let note = "not read: answers that end conversations (what comes before is the prompt) in 2 rows";
    let told = |from: &str, value: &str| json!({"from": from, "value": value});
    let whole = json!({"messages": [user, answer], "answer": "5"});
    for row in [&whole, &json!({"conversations": [told("human", "2+3?"), told("gpt", "5")]})] {
        let (code, out, said) = texts(row);
        assert!(code == 0 && out == asked && said.contains(note), "{row}: {said}");
    }
    for (row, says) in [
        (json!({"prompt": [user, answer]}), "p.jsonl: line 1 has a prompt that ends with an assistant message"),
        (json!({"messages": [answer]}), "p.jsonl: line 1 has no messages that ask"),
        (json!({"instruction": "a", "output": "b", "text": "a b"}), "line 1 has `text` next to `instruction`"),
    ] {
        let (code, out, said) = texts(&row);
        assert!(code == 2 && out.is_empty() && said.contains(says), "{row}: {code} {said}");
    }
    write(&whole);
    let grpo = "grpo model p.jsonl --reward length:3 --group-size 2 --max-new-tokens 4 --batch-size 2 --max-steps 1 --max-len 40 \
                --nproc-per-node 1 --tokenizer-chat-template chat.jinja";
    let (code, _, said) = run(&dir, FLATSHARD, &grpo.split_whitespace().collect::<Vec<_>>());
    assert!(code == 0 && said.contains(note), "{said}");
}

#[test]
fn rows_that_are_no_prompts_are_refused_by_line() {
    let dir = model();
    for (row, says) in [
        ("{}", "p.jsonl: line 2 has no prompt"),
        ("[1]", "p.jsonl: line 2 is not a JSON object"),
        (r#"{"prompt": NaN}"#, "p.jsonl: line 2 holds NaN"),
        (r#"{"prompt": 3}"#, "p.jsonl: line 2 has prompt 3; text, or a list of messages, is expected"),
        (r#"{"prompt_ids": [9999]}"#, "p.jsonl: line 2 has token id 9999"),
        (r#"{"prompt_ids": []}"#, "p.jsonl: line 2 is empty"),
        (r#"{"messages": [{"role": "user"}]}"#, "p.jsonl: line 2 has a message 0 without `content`"),
        (r#"{"prompt": "a", "system": "b"}"#, "p.jsonl: line 2 has a system, which text without a chat template"),
        (r#"{"prompt": "a", "tools": []}"#, "p.jsonl: line 2 has tools, which text without a chat template"),
    ] {
        fs::write(dir.path("p.jsonl"), format!("{{\"prompt\": \"a\"}}\n{row}\n")).unwrap();
        let (code, out, text) = run(&dir, FLATSHARD, &["generate", "model", "p.jsonl"]);
        assert!(code == 2 && out.is_empty() && text.contains(says), "{row}: {code} {text}");
    }
    for (word, says) in [
        ("none.jsonl", "none.jsonl: no such file or directory"),
        ("none.parquet", "none.parquet: no such file or directory"),
        ("text.txt", "--generate text.txt: holds text, not rows"),
        ("model/model.safetensors", "--generate"),
    ] {
        let (code, out, text) = run(&dir, FLATSHARD, &["generate", "model", word]);
        assert!(code == 2 && out.is_empty() && text.contains(says), "{word}: {code} {text}");
    }
}

/// Bad rows are skipped and named, and the others keep their numbers; a prompt may come from standard input.
#[test]
fn bad_rows_are_skipped_and_a_prompt_is_piped() {
    let dir = model();
    let rows = [json!({"prompt": "the quick"}), json!({"prompt": 7}), json!({"none": 1}), json!({"prompt": "a"})];
    fs::write(dir.path("p.jsonl"), rows.map(|row| row.to_string()).join("\n")).unwrap();
    let flags = ["generate", "model", "p.jsonl", "--max-new-tokens", "3", "--skip-bad-rows"];
    let (code, out, text) = run(&dir, FLATSHARD, &flags);
    assert_eq!(code, 0, "{text}");
    let numbers: Vec<Value> =
        out.lines().map(|line| serde_json::from_str::<Value>(line).unwrap()["prompt"].clone()).collect();
    assert_eq!(numbers, [0, 3]);
    assert!(
        text.contains("p.jsonl: 2 bad rows skipped (the first: ") && text.contains("p.jsonl: line 2 has prompt 7"),
        "{text}"
    );
    let two = good(&dir, FLATSHARD, &[&flags[..], &["--max-samples", "1"]].concat());
    assert_eq!(two.lines().count(), 1);
    fs::write(dir.path("bad.jsonl"), "{\"none\": 1}").unwrap();
    let (code, _, text) = run(&dir, FLATSHARD, &["generate", "model", "bad.jsonl", "--skip-bad-rows"]);
    assert!(code == 2 && text.contains("none of its 1 rows has a prompt"), "{text}");

    let piped = |input: &str| {
        let mut command = unlaunched(FLATSHARD);
        command.current_dir(dir.path("")).args(["generate", "model", "-", "--max-new-tokens", "4", "--seed", "4"]);
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = command.spawn().unwrap();
        child.stdin.take().unwrap().write_all(input.as_bytes()).unwrap();
        let ended = Run(child).end();
        (ended.status.code(), ended.stdout, ended.stderr)
    };
    let typed = good(&dir, FLATSHARD, &["generate", "model", "the quick", "--max-new-tokens", "4", "--seed", "4"]);
    assert_eq!(piped("the quick\n").1, typed);
    for (input, says) in [("", "standard input is empty"), ("{\"prompt\": \"a\"}\n", "begins like rows")] {
        let (code, _, text) = piped(input);
        assert!(code == Some(2) && text.contains(says), "{text}");
    }
}

#[test]
fn what_a_row_gives_its_chat_template_is_in_its_prompt() {
    let dir = model();
    let template = "{% for t in tools or [] %}[{{ t.name }}]{% endfor %}{% for m in messages %}<{{ m.role[0] }}>{{ m.content or m.tool_calls[0].name }}\
                    {% endfor %}{% if add_generation_prompt %}<a>{% endif %}";
    fs::write(dir.path("chat.jinja"), template).unwrap();
    let texts = |rows: &[Value], flags: &[&str]| {
        fs::write(dir.path("p.jsonl"), rows.iter().map(|row| format!("{row}\n")).collect::<String>()).unwrap();
        let chat = ["--tokenizer-chat-template", "chat.jinja", "--max-new-tokens", "6"];
        let out = good(&dir, FLATSHARD, &[&["generate", "model", "p.jsonl"], &chat[..], flags].concat());
        let ids = |line: &str| serde_json::from_str::<Value>(line).unwrap()["ids"].clone();
        out.lines().map(ids).collect::<Vec<_>>()
    };
    let verbatim = ["[f]<s>be<u>a<a>", "<u>a<a><a>f<t>3<a>", "<s>no<u>a<a>"].map(|text| json!({"prompt": text}));
    fs::write(dir.path("v.jsonl"), verbatim.map(|row| format!("{row}\n")).concat()).unwrap();
    let want = good(&dir, FLATSHARD, &["generate", "model", "v.jsonl", "--max-new-tokens", "6"]);
    let want: Vec<Value> =
        want.lines().map(|line| serde_json::from_str::<Value>(line).unwrap()["ids"].clone()).collect();
    let user = json!({"role": "user", "content": "a"});
    let calls = json!({"role": "assistant", "tool_calls": [{"name": "f"}]});
    let rows = [
        json!({"messages": [user], "system": "be", "tools": [{"name": "f"}]}),
        json!({"prompt": [user, calls, {"role": "tool", "content": "3"}]}),
        json!({"prompt": user, "system": "no"}),
    ];
    assert_eq!(texts(&rows, &[]), want);
    // The row's own system message stays.
    assert_eq!(texts(&rows[..1], &["--system-prompt", "other"]), want[..1]);
}

/// Every file of rows that data sets have, with the field that is named; and the first rows only.
#[test]
fn prompts_are_read_like_data_sets() {
    let dir = model();
    let rows: Vec<Value> = (0..3).map(|i| json!({"question": format!("fox {i}"), "prompt": "wrong"})).collect();
    fs::write(dir.path("p.jsonl"), rows.iter().map(|row| format!("{row}\n")).collect::<String>()).unwrap();
    fs::write(dir.path("p.json"), json!(rows).to_string()).unwrap();
    fs::write(dir.path("p.csv"), "question,prompt\nfox 0,wrong\nfox 1,wrong\nfox 2,wrong\n").unwrap();
    fs::create_dir(dir.path("folder")).unwrap();
    fs::copy(dir.path("p.jsonl"), dir.path("folder/rows.jsonl")).unwrap();
    fs::write(dir.path("plain.jsonl"), (0..3).map(|i| format!("{{\"text\": \"fox {i}\"}}\n")).collect::<String>())
        .unwrap();
    let flags = ["--max-new-tokens", "4", "--temperature", "0"];
    let plain = good(&dir, FLATSHARD, &[&["generate", "model", "plain.jsonl"], &flags[..]].concat());
    assert_eq!(plain.lines().count(), 3);
    for (file, key) in
        [("p.jsonl", "--input-key"), ("p.json", "--prompt-key"), ("p.csv", "--input-key"), ("folder", "--input-key")]
    {
        let out = good(&dir, FLATSHARD, &[&["generate", "model", file, key, "question"], &flags[..]].concat());
        assert_eq!(out, plain, "{file}");
    }
    let first =
        good(&dir, FLATSHARD, &[&["generate", "model", "plain.jsonl", "--max-samples", "2"], &flags[..]].concat());
    assert_eq!(first, plain.lines().take(2).map(|line| format!("{line}\n")).collect::<String>());
    // Of a single text nothing is ignored in silence.
    let (code, _, text) = run(
        &dir,
        FLATSHARD,
        &[&["generate", "model", "fox", "--max-samples", "2", "--input-key", "q"], &flags[..]].concat(),
    );
    assert!(code == 0 && text.contains("--max-samples 2 has no effect here: there are no rows"), "{text}");
    assert!(text.contains("--input-key q has no effect here: there are no rows"), "{text}");
}
