//! Rows that files of other tools name: which columns, splits and prompts are theirs. Never looks at other keys.
use super::tool_files::{AXOLOTL, LLAMA_FACTORY, has, plan, ran, refused, work};
use crate::common::binaries::FLATSHARD;
use crate::common::runs::{Dir, FSDP};
use serde_json::{Value, json};
use std::fs;

/// The first sample of an Axolotl file with this data set, and other lines.
#[track_caller]
fn first_sample(dir: &Dir, entry: &str, more: &str) -> Value {
    let text = AXOLOTL.replace("- path: alpaca.jsonl\n    type: alpaca", entry) + more;
    fs::write(dir.path("f.yml"), &text).unwrap();
    let out = ran(dir, FLATSHARD, "train f.yml --print-samples 1 --max-len 512");
    assert!(out.status.success(), "{text}: {}", String::from_utf8_lossy(&out.stderr));
    let first = out.stdout.split(|&byte| byte == b'\n').next().unwrap();
    serde_json::from_slice(first).unwrap_or_else(|e| panic!("{text}: {e}: {out:?}"))
}

/// Columns, fields of messages and roles may have any names that a file tells.
#[test]
fn names_of_columns_and_roles_are_those_of_the_file() {
    let dir = work();
    let asked = json!({"q": "add", "context": "1 and 2", "a": "3", "before": [["hi", "ho"]], "note": "x"});
    let talk = json!({"talk": [{"who": "student", "said": "why?"}, {"who": "teacher", "said": "because"}]});
    for (name, row) in [("asked.jsonl", &asked), ("talk.jsonl", &talk)] {
        fs::write(dir.path(name), format!("{row}\n").repeat(12)).unwrap();
    }
    let columns = json!({"prompt": "q", "query": "context", "response": "a", "history": "before"});
    let tags = json!({"role_tag": "who", "content_tag": "said", "user_tag": "student", "assistant_tag": "teacher"});
    let info = json!({
        "asked": {"file_name": "asked.jsonl", "columns": columns},
        "talk": {"file_name": "talk.jsonl", "formatting": "sharegpt", "columns": {"messages": "talk"}, "tags": tags},
    });
    fs::write(dir.path("dataset_info.json"), info.to_string()).unwrap();
    let mapped =
        "message_property_mappings: {role: who, content: said}\n    roles: {user: [student], assistant: [teacher]}";
    let entry = format!("- path: talk.jsonl\n    type: chat_template\n    field_messages: talk\n    {mapped}");
    let of_axolotl = AXOLOTL.replace("- path: alpaca.jsonl\n    type: alpaca", &entry);
    let factory = |name: &str| LLAMA_FACTORY.replace("asks,more", name).replace("cutoff_len: 64", "cutoff_len: 512");
    let turn = |role: &str, text: &str| format!("<|im_start|>{role}\n{text}<|im_end|>\n");
    let whole =
        [turn("user", "hi"), turn("assistant", "ho"), turn("user", "add\n1 and 2"), turn("assistant", "3")].concat();
    let talked = [turn("user", "why?"), turn("assistant", "because")].concat();
    for (text, expected) in [(factory("asked"), &whole), (factory("talk"), &talked), (of_axolotl, &talked)] {
        fs::write(dir.path("f.yml"), &text).unwrap();
        let out = ran(&dir, FLATSHARD, "train f.yml --print-samples 1 --max-len 512");
        let stderr = String::from_utf8_lossy(&out.stderr);
        assert!(out.status.success(), "{text}: {stderr}");
        let line: Value = serde_json::from_slice(&out.stdout).unwrap_or_else(|e| panic!("{text}: {e}: {out:?}"));
        assert_eq!(line["text"].as_str().unwrap(), expected.trim_end(), "{text}");
        assert_eq!(stderr.contains("not read: `note`"), text.contains("asked"), "{stderr}");
    }
    // As flags: also prompts, and a name that is there twice.
    let flags = "--dataset asked.jsonl --rename-fields q=instruction context=input a=output --print-samples 1";
    let out = ran(&dir, FSDP, flags);
    assert!(out.status.success() && String::from_utf8_lossy(&out.stdout).contains("1 and 2"), "{out:?}");
    let out = ran(&dir, FSDP, &flags.replace("context=input", "note=output"));
    let stderr = String::from_utf8_lossy(&out.stderr);
    assert!(out.status.code() == Some(2) && stderr.contains("two fields for `output`"), "{stderr}");
    let out = ran(&dir, FSDP, &flags.replace("q=instruction", "instruction"));
    let stderr = String::from_utf8_lossy(&out.stderr);
    assert!(out.status.code() == Some(2) && stderr.contains("it must be OLD=NEW"), "{stderr}");
}

/// A file that says which columns it reads is read so, whatever else its rows have; and TRL's have a loss on prompts.
#[test]
fn columns_of_a_file_win_over_other_columns() {
    let dir = work();
    let said = |role: &str, text: &str| json!({"role": role, "content": text});
    let row = json!({
        "messages": [said("user", "mq"), said("assistant", "m1"), said("user", "mr"), said("assistant", "m2")],
        "conversations": [{"from": "human", "value": "cq"}, {"from": "gpt", "value": "ca"}],
        "instruction": "iq", "input": "", "output": "ia",
    });
    fs::write(dir.path("all.jsonl"), format!("{row}\n").repeat(12)).unwrap();
    let info = json!({
        "asks": {"file_name": "all.jsonl"},
        "talks": {"file_name": "all.jsonl", "formatting": "sharegpt"},
        "chats": {"file_name": "all.jsonl", "formatting": "sharegpt", "columns": {"messages": "messages"}},
    });
    fs::write(dir.path("dataset_info.json"), info.to_string()).unwrap();
    let axolotl = |entry: &str| AXOLOTL.replace("- path: alpaca.jsonl\n    type: alpaca", entry);
    let factory = |name: &str| LLAMA_FACTORY.replace("asks,more", name).replace("cutoff_len: 64", "cutoff_len: 512");
    let trl = "model_name_or_path: model\ndataset_name: all.jsonl\nlearning_rate: 1.0e-4\n\
               per_device_train_batch_size: 2\noutput_dir: out\n";
    let [mq, m1, mr, m2] = [("user", "mq"), ("assistant", "m1"), ("user", "mr"), ("assistant", "m2")]
        .map(|(role, text)| format!("<|im_start|>{role}\n{text}<|im_end|>\n"));
    let chat = [mq, m1, mr, m2].concat();
    let answers = "m1<|im_end|>\nm2<|im_end|>";
    for (text, expected) in [
        (axolotl("- path: all.jsonl\n    type: alpaca"), "ia"),
        (axolotl("- path: all.jsonl\n    type: sharegpt\n    field_messages: conversations"), "ca<|im_end|>"),
        (axolotl("- path: all.jsonl\n    type: chat_template\n    field_messages: messages"), answers),
        (factory("asks"), "ia<|im_end|>"),
        (factory("talks"), "ca<|im_end|>"),
        (factory("chats"), answers),
        (factory("chats").replace("do_train: true", "train_on_prompt: true"), &chat),
        (trl.to_string(), &chat),
        (format!("{trl}assistant_only_loss: false\n"), &chat),
        (format!("{trl}assistant_only_loss: true\n"), answers),
    ] {
        fs::write(dir.path("f.yml"), &text).unwrap();
        let out = ran(&dir, FLATSHARD, "train f.yml --print-samples 1 --max-len 512");
        let stderr = String::from_utf8_lossy(&out.stderr);
        assert!(out.status.success(), "{text}: {stderr}");
        let line: Value = serde_json::from_slice(&out.stdout).unwrap_or_else(|e| panic!("{text}: {e}: {out:?}"));
        let learned = line["loss_text"].as_array().unwrap().iter().map(|text| text.as_str().unwrap());
        assert_eq!(learned.collect::<String>(), expected, "{text}: {line}");
    }
}

/// Of a directory, an entry's split is read, not the training split; its files are relative to it.
#[test]
fn splits_of_a_directory_are_those_that_an_entry_names() {
    let dir = work();
    ["rows", "cards"].iter().for_each(|at| fs::create_dir(dir.path(at)).unwrap());
    for (name, count) in [("train", 40), ("test", 9)] {
        let row = json!({"instruction": "a", "input": "", "output": name});
        let rows = format!("{row}\n").repeat(count);
        ["rows", "cards"].iter().for_each(|at| fs::write(dir.path(&format!("{at}/{name}.jsonl")), &rows).unwrap());
    }
    let files = "- split: train\n    path: train.jsonl\n  - split: test\n    path: test.jsonl";
    let card = format!("---\nconfigs:\n- config_name: some\n  data_files:\n  {files}\n---\n");
    fs::write(dir.path("cards/README.md"), card).unwrap();
    for (entry, expected) in [
        ("- path: rows\n    type: alpaca", "train"),
        ("- path: rows\n    split: train\n    type: alpaca", "train"),
        ("- path: rows\n    split: test\n    type: alpaca", "test"),
        ("- path: rows\n    data_files: test.jsonl\n    type: alpaca", "test"),
        ("- path: cards\n    name: some\n    type: alpaca", "train"),
        ("- path: cards\n    name: some\n    split: test\n    type: alpaca", "test"),
    ] {
        fs::write(dir.path("f.yml"), AXOLOTL.replace("- path: alpaca.jsonl\n    type: alpaca", entry)).unwrap();
        let out = ran(&dir, FLATSHARD, "train f.yml --print-samples 1 --max-len 512");
        assert!(out.status.success(), "{entry}: {}", String::from_utf8_lossy(&out.stderr));
        let line: Value = serde_json::from_slice(&out.stdout).unwrap();
        assert!(line["loss_text"][0].as_str().unwrap().starts_with(expected), "{entry}: {line}");
    }
    let no = |entry: &str, words: &[&str]| {
        refused(&dir, "f.yml", &AXOLOTL.replace("- path: alpaca.jsonl\n    type: alpaca", entry), words);
    };
    no("- path: rows\n    split: dev\n    type: alpaca", &["datasets[0].split is", "dev"]);
    no("- path: rows\n    name: main\n    type: alpaca", &["datasets[0].name is", "data_files"]);
}

/// Axolotl's prompt_strategies: user_defined.py, and those of judged answers.
#[test]
fn axolotls_own_prompts_and_pairs_are_read() {
    let dir = work();
    let rows = |name: &str, row: Value| fs::write(dir.path(name), format!("{row}\n").repeat(40)).unwrap();
    rows("qa.jsonl", json!({"q": "why?", "a": "so\n", "hint": "h"}));
    let own =
        |more: &str| format!("- path: qa.jsonl\n    type:\n      field_instruction: q\n      field_output: a\n{more}");
    let system = "      system_prompt: Be brief.\n      system_format: \"<{system}>\"\n";
    for (more, text) in [
        ("", "why?so\n"),
        ("      format: \"[INST] {instruction} [/INST]\"\n", "[INST] why? [/INST]so\n"),
        (
            "      format: \"x {instruction} {input}\"\n      no_input_format: \"Q: {instruction}\\nA: \"\n",
            "Q: why?\nA: so\n",
        ),
        (&format!("{system}      format: \" {{instruction}}: \"\n"), "<Be brief.> why?: so\n"),
    ] {
        let line = first_sample(&dir, &own(more), "");
        assert!(line["text"].as_str().unwrap().starts_with(text), "{more}: {line}");
        assert!(line["loss_text"][0].as_str().unwrap().starts_with("so\n"), "{more}: {line}");
    }
    let no = |more: &str, words: &[&str]| {
        refused(&dir, "f.yml", &AXOLOTL.replace("- path: alpaca.jsonl\n    type: alpaca", &own(more)), words);
    };
    no("      field_input: hint\n", &["datasets[0].type.field_input is", "one field"]);
    no("      format: \"{instruction} {input}\"\n", &["datasets[0].type is", "other braces"]);
    let rendered = |user: &str| {
        format!("<|im_start|>system\ns<|im_end|>\n<|im_start|>user\n{user}<|im_end|>\n<|im_start|>assistant\n")
    };
    let said = |role: &str, text: &str| json!({"role": role, "content": text});
    let talk = |answer: &str| json!([said("user", "q"), said("assistant", answer)]);
    for (kind, key, row) in [
        ("chatml.intel", "question", json!({"system": "s", "question": "q", "chosen": "b", "rejected": "c"})),
        ("chatml.icr", "input", json!({"system": "s", "input": "q", "chosen": "b", "rejected": "c"})),
        ("chatml.prompt_pairs", "prompt", json!({"system": "s", "prompt": "q", "chosen": "b", "rejected": "c"})),
        ("chatml.ultra", "prompt", json!({"system": "s", "prompt": "q", "chosen": talk("b"), "rejected": talk("c")})),
    ] {
        rows("pairs.jsonl", row);
        let line = first_sample(&dir, &format!("- path: pairs.jsonl\n    type: {kind}"), "rl: dpo\n");
        let text = line.to_string();
        let shown = Value::String(rendered("q")).to_string();
        assert!(text.contains(shown.trim_matches('"')) && text.contains("b<|im_end|>"), "{kind} ({key}): {line}");
    }
}

/// A recipe that goes on with an adapter has its rank, whatever its tool's own default is.
#[test]
fn recipes_go_on_with_an_adapter() {
    let dir = work();
    let made = "--pretrain model --dataset synthetic --nproc-per-node 1 --lora-rank 4 --max-steps 1 --max-len 16 \
                --batch-size 1 --no-eval --no-sample --save-adapter adapter";
    let out = ran(&dir, FSDP, made);
    assert!(out.status.success(), "{}", String::from_utf8_lossy(&out.stderr));
    let rank = |file: &str, text: &str| {
        let (read, said) = plan(&dir, file, text, "--verbose");
        has(&read, &[("lora.adapter", json!("adapter")), ("lora.rank", json!(4))]);
        said
    };
    let row = json!({"instruction": "a", "input": "", "output": "b"});
    fs::write(dir.path("rows.jsonl"), format!("{row}\n").repeat(40)).unwrap();
    let factory = LLAMA_FACTORY.replace("asks,more", "rows.jsonl").replace("lora_rank: 4\n", "");
    let factory = factory.replace("template: llama3\n", "") + "adapter_name_or_path: adapter\n";
    let said = rank("lf.yaml", &factory.replace("lora_target: all\n", "lora_rank: 64\nlora_target: all\n"));
    assert!(said.contains("lora_rank: 64 has no effect here"), "{said}");
    rank("lf.yaml", &factory.replace("finetuning_type: lora\n", ""));
    let axolotl: String =
        AXOLOTL.lines().filter(|line| !line.starts_with("lora_")).map(|line| format!("{line}\n")).collect();
    let axolotl =
        axolotl.replace("adapter: qlora", "adapter: lora").replace("load_in_4bit: true", "load_in_4bit: false")
            + "lora_model_dir: adapter\n";
    rank("ax.yml", &axolotl);
    let out =
        ran(&dir, FSDP, "--pretrain model --adapters adapter --train_type lora --dataset rows.jsonl --print-config");
    assert!(String::from_utf8_lossy(&out.stdout).contains("rank: 4"), "{out:?}");
}
