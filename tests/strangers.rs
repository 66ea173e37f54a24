//! What people type who do not know the program: numbers that are none or larger than any machine, flags that contradict each
//! other, files that are something else, streams that nobody reads. One message, status 2, no panic, before anything starts.
#[path = "common/runs.rs"]
mod runs;
use runs::*;
use std::ffi::OsStr;
use std::fs::{self, File};
use std::os::unix::ffi::OsStrExt;
use std::process::{Command, Output, Stdio};

fn output(args: &[&str]) -> Output {
    command(FSDP, args).output().unwrap()
}
/// Refused with one message of status 2 that holds all of `parts`, and nothing on standard output.
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
fn numbers_that_are_none() {
    for flag in ["--lr", "--eps", "--dropout", "--weight-decay", "--grad-clip", "--comm-timeout", "--lora-alpha"] {
        for value in ["nan", "inf", "1e400", "fast"] {
            refused(&[flag, value], &[&format!("'{value}'"), flag, "a number is expected"]);
        }
    }
    refused(&["--precision", "fp16", "--loss-scale", "nan"], &["--loss-scale", "a number is expected"]);
    for flag in ["--batch-size", "--max-steps", "--epochs", "--seed", "--max-bad-steps"] {
        for value in ["-1", "2.5", "1e3", "two", "nan"] {
            refused(&[flag, value], &[&format!("'{value}'"), flag, "a whole number, 0 or more, is expected"]);
        }
        refused(&[flag, "99999999999999999999"], &[flag, "the number is too large"]);
    }
}

#[test]
fn numbers_that_no_machine_holds() {
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
        "tp_size",
        "sample_tokens",
    ] {
        refused(&[&format!("--{key}"), WORD], &[&format!("{key} is {WORD}: it must be at most ")]);
    }
    // Each by itself may pass; their products would leave a machine word.
    let large = ["--embed-dim", "2147483648", "--ff-hidden-dim", "2147483648", "--num-layers", "4096"];
    refused(&large, &["4096 layers, width 2147483648", "larger than any machine"]);
    refused(
        &["--tp-size", "65536", "--ring-attn-size", "65536"],
        &["sp 65536 x tp 65536 = 4294967296, but there are 2"],
    );
    // These are only too much for this one.
    refused(&["--num-layers", "100", "--embed-dim", "65536"], &["this run needs", "GiB"]);
}

#[test]
fn flags_that_would_come_to_nothing() {
    refused(&["--momentum", "0.5"], &["--momentum 0.5 is without effect", "--optimizer sgd"]);
    refused(&["--min-lr-ratio", "0.2"], &["--min-lr-ratio 0.2", "--lr-scheduler cosine_with_min_lr"]);
    refused(&["--wrap-min-params", "5"], &["--wrap-min-params 5", "--auto-wrap size"]);
    refused(&["--no-eval", "--eval-every", "5"], &["--eval-every 5", "or use --eval"]);
    refused(&["--no-sample", "--sample-tokens", "5"], &["--sample-tokens 5", "or use --sample"]);
    let (dir, defaults) =
        (Dir::new(), ["--momentum", "0.9", "--min-lr-ratio", "0.1", "--no-eval", "--eval-every", "0"]);
    let mut print = defaults.to_vec();
    print.push("--print-config"); // a file of all settings has them all
    assert!(output(&print).status.success());

    // A model directory gives the shapes: flags may say the same, and nothing else.
    let model = dir.arg("model");
    good(FSDP, &["--max-steps", "1", "--no-sample", "--save-hf", &model]);
    let same = ["--pretrain", &model, "--print-config", "--num-layers", "2"];
    assert!(output(&same).status.success()); // and so do the other flags of `command`
    refused(&["--pretrain", &model, "--num-layers", "3"], &["--num-layers 3, but the model in", "has 2"]);
}

#[test]
fn files_that_are_something_else() {
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
    // A BOM is no part of the first row, nor of a configuration.
    let row = b"\xef\xbb\xbf{\"text\": \"hello to all who read this\"}\r\n\r\n".to_vec();
    let rows = [row, b"{\"text\": \"hello to all who read this\"}\r\n  \r\n".repeat(40)].concat();
    let (rows, config) = (write("rows.jsonl", &rows), write("c.json", b"\xef\xbb\xbf{\"optim\": {\"lr\": 0.25}}"));
    let out = output(&["--dataset", &rows, "--config", &config, "--print-config"]);
    let stdout = String::from_utf8_lossy(&out.stdout);
    assert!(out.status.success() && stdout.contains("41 rows"), "{stdout}{}", String::from_utf8_lossy(&out.stderr));
}

#[test]
fn arguments_that_are_no_text() {
    let out = Command::new(FSDP).arg(OsStr::from_bytes(b"caf\xe9")).output().unwrap();
    let stderr = String::from_utf8_lossy(&out.stderr);
    assert_eq!((out.status.code(), stderr.lines().count()), (Some(2), 1), "{stderr}");
    assert!(stderr.contains("is not UTF-8"), "{stderr}");
}

#[test]
fn nobody_reads() {
    for (word, status) in [("--help", 0), ("--print-config", 0), ("--bogus", 2)] {
        let closed = || {
            let (reader, writer) = std::io::pipe().unwrap();
            drop(reader);
            Stdio::from(writer)
        };
        let mut run = command(FSDP, &[word]);
        assert_eq!(run.stdout(closed()).stderr(closed()).status().unwrap().code(), Some(status), "{word}");
    }
    // A full disk is another matter: what was asked for is not there.
    let full = || File::options().write(true).open("/dev/full").unwrap();
    let out = command(FSDP, &["--print-config"]).stdout(full()).output().unwrap();
    let stderr = String::from_utf8_lossy(&out.stderr);
    assert_eq!((out.status.code(), stderr.lines().count()), (Some(1), 1), "{stderr}");
    assert!(stderr.contains("write standard output: No space left"), "{stderr}");
}
