//! Bad input: numbers that are malformed or larger than any machine, contradicting flags, files of the wrong kind,
//! closed pipes. Each gives one message, status 2 and no panic, before anything starts.
use crate::common::runs::*;
use std::ffi::OsStr;
use std::fs::{self, File};
use std::os::unix::ffi::OsStrExt;
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

fn output(args: &[&str]) -> Output {
    command(FSDP, args).output().unwrap()
}
/// Asserts status 2, one message that contains all of `parts`, and nothing on standard output.
#[track_caller]
fn refused(args: &[&str], parts: &[&str]) {
    let out = output(args);
    let stderr = String::from_utf8_lossy(&out.stderr);
    assert_eq!(out.status.code(), Some(2), "{args:?}: {stderr}");
    assert!(out.stdout.is_empty() && !stderr.contains("panicked"), "{args:?}: {stderr}");
    assert!(stderr.starts_with("error: ") && stderr.lines().count() == 1, "{args:?} says more than one line: {stderr}");
    for part in parts {
        assert!(stderr.contains(part), "{args:?}: no {part:?} in: {stderr}");
    }
}

#[test]
fn malformed_numbers() {
    for flag in
        ["--lr", "--eps", "--dropout", "--weight-decay", "--grad-clip", "--comm-timeout", "--lora-alpha", "--epochs"]
    {
        for value in ["nan", "inf", "1e400", "fast"] {
            refused(&[flag, value], &[&format!("'{value}'"), flag, "a number is expected"]);
        }
    }
    refused(&["--precision", "fp16", "--loss-scale", "nan"], &["--loss-scale", "a number is expected"]);
    for flag in ["--batch-size", "--grad-accum", "--seed", "--max-bad-steps"] {
        for value in ["-1", "2.5", "1e3", "two", "nan"] {
            refused(&[flag, value], &[&format!("'{value}'"), flag, "a whole number, 0 or more, is expected"]);
        }
        refused(&[flag, "99999999999999999999"], &[flag, "the number is too large"]);
    }
}

#[test]
fn sizes_larger_than_any_machine() {
    const WORD: &str = "18446744073709551615";
    for key in [
        "batch_size",
        "grad_accum",
        "max_len",
        "embed_dim",
        "ff_hidden_dim",
        "vocab_size",
        "num_layers",
        "nproc_per_node",
        "threads_per_rank",
        "tp_size",
        "sample_tokens",
    ] {
        refused(&[&format!("--{key}"), WORD], &[&format!("{key} is {WORD}: it must be at most ")]);
    }
    // Each alone may pass; their products would overflow 64 bits.
    let large = ["--embed-dim", "2147483648", "--ff-hidden-dim", "2147483648", "--num-layers", "4096"];
    refused(&large, &["4096 layers, width 2147483648", "too large for any machine"]);
    refused(
        &["--tp-size", "65536", "--ring-attn-size", "65536"],
        &["sp 65536 x tp 65536 = 4294967296, but there are 2"],
    );
    // These are only too large for this machine.
    refused(&["--num-layers", "100", "--embed-dim", "65536"], &["this run needs", "GiB"]);
}

#[test]
fn flags_without_effect() {
    refused(&["--momentum", "0.5"], &["--momentum 0.5 has no effect here", "--optimizer sgd"]);
    refused(&["--min-lr-ratio", "0.2"], &["--min-lr-ratio 0.2", "--lr-scheduler cosine_with_min_lr"]);
    // That is also the value which cosine_with_min_lr has by default.
    refused(
        &["--min-lr-ratio", "0.1"],
        &["--min-lr-ratio 0.1 has no effect here", "--lr-scheduler cosine_with_min_lr"],
    );
    refused(&["--wrap-min-params", "5"], &["--wrap-min-params 5", "--auto-wrap size"]);
    refused(&["--no-eval", "--eval-every", "5"], &["--eval-every 5", "or use --eval"]);
    refused(&["--no-sample", "--sample-tokens", "5"], &["--sample-tokens 5", "or use --sample"]);
    let (dir, defaults) = (Dir::new(), ["--momentum", "0.9", "--no-eval", "--eval-every", "0"]);
    let mut print = defaults.to_vec();
    print.push("--print-config"); // a file with all settings
    assert!(output(&print).status.success());

    // A model directory sets the shapes: flags may only repeat them.
    let model = dir.arg("model");
    good(FSDP, &["--max-steps", "1", "--no-sample", "--save-hf", &model]);
    let same = ["--pretrain", &model, "--print-config", "--num-layers", "2"];
    assert!(output(&same).status.success()); // and so do the other flags of `command`
    refused(&["--pretrain", &model, "--num-layers", "3"], &["--num-layers 3, but the model in", "has 2"]);
}

#[test]
fn files_of_the_wrong_kind() {
    let dir = Dir::new();
    let write = |name: &str, text: &[u8]| {
        fs::write(dir.path(name), text).unwrap();
        dir.arg(name)
    };
    let pipe = dir.arg("pipe");
    rustix::fs::mknodat(rustix::fs::CWD, &pipe, rustix::fs::FileType::Fifo, 0o600.into(), 0).unwrap();
    refused(&["--dataset", &pipe], &["pipe: is neither a file nor a directory"]);
    refused(&["--dataset", "/dev/zero"], &["/dev/zero: is neither"]);
    let text = write("text.txt", b"some words");
    for flag in ["--resume", "--save-traces-folder", "--ckpt-dir", "--save-hf", "--tensorboard"] {
        refused(&[flag, &text], &[flag, "text.txt: is a file"]);
    }
    refused(&["--profile-steps", "1:1", "--trace-folder", &text], &["--trace-folder", "is a file, not a directory"]);
    let data = write("rows.txt", b"{\"text\": \"some words\"}\n");
    refused(&["--dataset", &data], &["rows.txt is not plain text", "a JSON object per line", "set --pretrain-mode"]);
    let pickle = write("rows.pkl", b"\x80\x04\x95\x00");
    refused(&["--dataset", &pickle, "--pretrain-mode"], &["rows.pkl is a pickle", ".jsonl or Parquet"]);
    // A BOM is not part of the first row, nor of a configuration.
    let row = b"\xef\xbb\xbf{\"text\": \"hello to all who read this\"}\r\n\r\n".to_vec();
    let rows = [row, b"{\"text\": \"hello to all who read this\"}\r\n  \r\n".repeat(40)].concat();
    let (rows, config) = (write("rows.jsonl", &rows), write("c.json", b"\xef\xbb\xbf{\"optim\": {\"lr\": 0.25}}"));
    let out = output(&["--dataset", &rows, "--config", &config, "--print-config"]);
    let stdout = String::from_utf8_lossy(&out.stdout);
    assert!(out.status.success() && stdout.contains("41 samples"), "{stdout}{}", String::from_utf8_lossy(&out.stderr));
}

/// [`refused`] within a minute, with a message of at most a few sentences.
#[track_caller]
fn refused_soon(args: &[&str], parts: &[&str]) {
    let mut run = command(FSDP, args).stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
    let begin = Instant::now();
    while run.try_wait().unwrap().is_none() {
        if begin.elapsed() >= Duration::from_secs(60) {
            run.kill().unwrap();
            panic!("{args:?} waits forever");
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    let out = run.wait_with_output().unwrap();
    let stderr = String::from_utf8_lossy(&out.stderr);
    let start: String = stderr.chars().take(2000).collect();
    assert_eq!((out.status.code(), stderr.lines().count()), (Some(2), 1), "{args:?}: {start}");
    assert!(stderr.starts_with("error: ") && stderr.chars().count() < 1000, "{args:?}: {start}");
    parts.iter().for_each(|part| assert!(stderr.contains(part), "{args:?}: no {part:?} in: {start}"));
}

#[test]
fn models_larger_than_any_machine() {
    let dir = Dir::new();
    let model = dir.arg("model");
    good(FSDP, &["--max-steps", "1", "--no-sample", "--save-hf", &model]);
    let path = dir.path("model/config.json");
    let config: serde_json::Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
    let refused_with = |key: &str, value: serde_json::Value, parts: &[&str]| {
        let mut changed = config.clone();
        changed[key] = value;
        fs::write(&path, changed.to_string()).unwrap();
        refused_soon(&["--pretrain", &model], &[&["config.json: ", key], parts].concat());
    };
    // A key has the same limit as its flag.
    for (key, flag, most) in [
        ("num_hidden_layers", "num_layers", 4096u64),
        ("num_attention_heads", "num_heads", 65536),
        ("num_key_value_heads", "num_kv_heads", 65536),
        ("hidden_size", "embed_dim", 1 << 31),
        ("intermediate_size", "ff_hidden_dim", 1 << 31),
        ("vocab_size", "vocab_size", 1 << 31),
        ("max_position_embeddings", "max_positions", 1 << 31),
    ] {
        let says = |name: &str, n: u64| format!("{name} is {n}: it must be at most {most}");
        refused(&[&format!("--{flag}"), &(most + 1).to_string()], &[&says(flag, most + 1)]);
        for n in [most + 1, 10_000_000_000, 1 << 60] {
            refused_with(key, n.into(), &[&says(key, n)]);
        }
    }
    refused_with("num_hidden_layers", 10_000_000.into(), &["it must be at most 4096"]);
    refused_with("rms_norm_eps", (-1e-5).into(), &["is -0.00001; it must be a number from 0 to 1"]);
    refused_with("eos_token_id", 1_000_000_000_000u64.into(), &["is 1000000000000; it must be a token id"]);
    refused_with("layer_types", vec!["full_attention"; 1_000_000].into(), &["is a list of 1000000; it must list"]);
    refused_with(
        "per_layer_config",
        vec!["full_attention"; 1_000_000].into(),
        &["...: it changes what the model computes"],
    );
}

#[test]
fn pipes_and_devices_instead_of_files() {
    let dir = Dir::new();
    let model = dir.arg("model");
    good(FSDP, &["--max-steps", "1", "--no-sample", "--save-hf", &model]);
    let pipe_at = |name: &str| {
        let _ = fs::remove_file(dir.path(name));
        rustix::fs::mknodat(rustix::fs::CWD, dir.path(name), rustix::fs::FileType::Fifo, 0o600.into(), 0).unwrap();
        dir.arg(name)
    };
    let pipe = pipe_at("pipe");
    for (path, what) in [(pipe.as_str(), "it is a named pipe"), ("/dev/zero", "it is a device")] {
        for flag in ["--config", "--tokenizer", "--deepspeed"] {
            refused_soon(&[flag, path], &[path, what, "not a regular file"]);
        }
        refused_soon(
            &["--tokenizer-chat-template", path, "--apply-chat-template"],
            &[path, "is neither a file nor Jinja text"],
        );
    }
    for file in ["model/model.safetensors", "model/config.json", "tokenizer/tokenizer_config.json"] {
        fs::create_dir_all(dir.path("tokenizer")).unwrap();
        fs::write(dir.path("tokenizer/tokenizer.json"), TOKENIZER).unwrap();
        let flag = if file.starts_with("model") { "--pretrain" } else { "--tokenizer" };
        pipe_at(file);
        let path = dir.arg(file.split('/').next().unwrap());
        refused_soon(&[flag, &path], &[file, "it is a named pipe, not a regular file"]);
    }
}

const TOKENIZER: &str = r#"{"version": "1.0", "truncation": null, "padding": null, "added_tokens": [], "normalizer": null,
    "pre_tokenizer": null, "post_processor": null, "decoder": null,
    "model": {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "a"}}"#;

#[test]
fn tokenizers_templates_and_configurations_that_would_use_all_memory() {
    let dir = Dir::new();
    let write = |name: &str, text: String| {
        fs::write(dir.path(name), text).unwrap();
        dir.arg(name)
    };
    let part = serde_json::json!({"type": "Replace", "pattern": {"String": "a"}, "content": "a".repeat(1000)});
    let mut file: serde_json::Value = serde_json::from_str(TOKENIZER).unwrap();
    file["normalizer"] = serde_json::json!({"type": "Sequence", "normalizers": vec![part; 4]});
    let tokenizer = write("tokenizer.json", file.to_string());
    refused_soon(
        &["--tokenizer", &tokenizer],
        &["tokenizer.json: is not a usable tokenizer", "1000000000000 times longer"],
    );

    let rows = r#"{"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]}"#;
    let rows = write("rows.jsonl", format!("{rows}\n").repeat(2));
    let template =
        "{% set n = namespace(x='ab') %}{% for i in range(60) %}{% set n.x = n.x ~ n.x %}{% endfor %}{{ n.x }}";
    refused_soon(
        &["--dataset", &rows, "--apply-chat-template", "--tokenizer-chat-template", template],
        &["rows.jsonl: line 1 is rejected by line 1 of the chat template: the template computes with a value"],
    );

    let long = "x".repeat(1 << 20);
    let yaml = write("long.yaml", format!("optim: {{lr: {long}}}"));
    refused_soon(&["--config", &yaml], &["long.yaml: optim.lr is ", "xxx..."]);
    let json = write("key.json", format!("{{\"{long}\": 1}}"));
    refused_soon(&["--config", &json], &["key.json: unknown key xxx", "...: docs/files.md lists the keys of a file"]);
    let deepspeed = write("ds.json", format!("{{\"amp\": {{\"enabled\": true, \"opt_level\": \"{long}\"}}}}"));
    refused_soon(&["--deepspeed", &deepspeed], &["ds.json: amp is {", "...: use the bf16"]);
}

#[test]
fn arguments_that_are_not_utf8() {
    let out = Command::new(FSDP).arg(OsStr::from_bytes(b"caf\xe9")).output().unwrap();
    let stderr = String::from_utf8_lossy(&out.stderr);
    assert_eq!((out.status.code(), stderr.lines().count()), (Some(2), 1), "{stderr}");
    assert!(stderr.contains("is not UTF-8"), "{stderr}");
}

#[test]
fn closed_pipes() {
    for (word, status) in [("--help", 0), ("--print-config", 0), ("--bogus", 2)] {
        let closed = || {
            let (reader, writer) = std::io::pipe().unwrap();
            drop(reader);
            Stdio::from(writer)
        };
        let mut run = command(FSDP, &[word]);
        assert_eq!(run.stdout(closed()).stderr(closed()).status().unwrap().code(), Some(status), "{word}");
    }
    // A full disk is an error: the requested output is missing.
    let full = || File::options().write(true).open("/dev/full").unwrap();
    let out = command(FSDP, &["--print-config"]).stdout(full()).output().unwrap();
    let stderr = String::from_utf8_lossy(&out.stderr);
    assert_eq!((out.status.code(), stderr.lines().count()), (Some(1), 1), "{stderr}");
    assert!(stderr.contains("write standard output: No space left"), "{stderr}");
}

/// What a run writes replaces only files of its own kind: a slip of the hand would cost the data.
#[test]
fn files_that_are_none_of_ours_are_not_overwritten() {
    let dir = tempfile::tempdir().unwrap();
    let rows = "{\"text\": \"a row of a data set\"}\n".repeat(20);
    let path = dir.path().join("rows.jsonl");
    std::fs::write(&path, &rows).unwrap();
    let rows_path = path.to_str().unwrap();
    for (flag, part) in [
        ("--metrics-path", "is another file than --metrics-path writes"),
        ("--memory-timeline", "is another file than --memory-timeline writes"),
        ("--log-file", "the run reads"),
    ] {
        refused(&["--dataset", rows_path, flag, rows_path], &[flag, "rows.jsonl", part, "give another path"]);
        assert_eq!(std::fs::read_to_string(&path).unwrap(), rows, "{flag}");
    }
}
