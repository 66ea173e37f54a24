//! Token-id data and models without a tokenizer, including vocabularies smaller than 256: training, evaluation,
//! packing, stages and generation.
use crate::common::runs::{Dir, FSDP, Run, events, unlaunched};
use serde_json::json;
use std::fs;

const VOCAB: u64 = 60;

/// 120 rows with a constant step between ids, also as a stream; a stage that continues from them.
fn files() -> Dir {
    let dir = Dir::new();
    let ids = |i: u64| (0..8 + i % 9).map(|t| (7 * (i + t)) % VOCAB).collect::<Vec<_>>();
    let rows: String = (0..120).map(|i| json!({"input_ids": ids(i)}).to_string() + "\n").collect();
    fs::write(dir.path("rows.jsonl"), rows).unwrap();
    let mut header = "{'descr': '<u2', 'fortran_order': False, 'shape': (2000,), }".to_string();
    header += &(" ".repeat(63 - (10 + header.len()) % 64) + "\n");
    let stream = (0..2000).flat_map(|t| ((7 * t % VOCAB) as u16).to_le_bytes());
    let npy = [b"\x93NUMPY\x01\x00", &(header.len() as u16).to_le_bytes()[..], header.as_bytes()].concat();
    fs::write(dir.path("stream.npy"), [npy, stream.collect()].concat()).unwrap();
    dir
}

/// Exit status, stdout and stderr of a small run in `dir`.
fn run(dir: &Dir, args: &str) -> (i32, String, String) {
    let mut command = unlaunched(FSDP);
    command.current_dir(dir.path("")).env("FLATSHARD_CACHE_DIR", dir.path("cache")).args(args.split_whitespace());
    command.stdout(std::process::Stdio::piped()).stderr(std::process::Stdio::piped());
    let ended = Run(command.spawn().unwrap()).end();
    (ended.status.code().unwrap_or(-1), ended.stdout, ended.stderr)
}
#[track_caller]
fn good(dir: &Dir, args: &str) -> (String, String) {
    let (code, out, text) = run(dir, args);
    assert_eq!(code, 0, "{args}: {text}");
    (out, text)
}
#[track_caller]
fn refused(dir: &Dir, args: &str, parts: &[&str]) {
    let (code, _, text) = run(dir, args);
    assert_eq!(code, 2, "{args}: {text}");
    parts.iter().for_each(|part| assert!(text.contains(part), "{part:?} is not in: {text}"));
}

const NEW: &str = "--vocab-size 60 --embed-dim 32 --num-layers 1 --num-heads 2 --warmup-steps 0 --lr 0.01 --max-len 16";

/// Of 120 rows, 44 at a step: the passes end in steps 3, 6, 9 and 11.
#[test]
fn an_interval_of_an_epoch_is_each_pass() {
    let dir = files();
    let train = "--dataset rows.jsonl --eval-dataset rows.jsonl --batch-size 44 --nproc-per-node 1 --epochs 4";
    let every = "--eval-every epoch --save-every epoch --keep 0 --ckpt-dir ck --metrics-path m.jsonl";
    good(&dir, &format!("{NEW} {train} {every}"));
    let steps =
        |event: &str| events(&dir.path("m.jsonl"), event).iter().map(|of| of["step"].clone()).collect::<Vec<_>>();
    assert_eq!(json!(steps("eval")), json!([3, 6, 9, 11]));
    assert_eq!(json!(steps("checkpoint")), json!([3, 6, 9, 11]));
}

#[test]
fn a_model_of_60_ids_is_trained_evaluated_and_writes_ids() {
    let dir = files();
    let train = "--dataset rows.jsonl --batch-size 4 --metrics-path m.jsonl --max-len 16 --warmup-steps 0 --lr 0.01";
    let (_, text) = good(&dir, &format!("{NEW} {train} --max-steps 60 --ckpt-dir ck --save-hf model"));
    assert!(text.contains("tokens   are given as ids: the model's vocab_size 60"), "{text}");
    let eval = &events(&dir.path("m.jsonl"), "eval")[0];
    assert!(eval["loss"].as_f64().unwrap() < 1.0 && eval["tokens"].as_u64() > Some(0), "{eval}");
    assert!(!fs::exists(dir.path("model/tokenizer.json")).unwrap());

    // Training continues from the model directory, packed, from its checkpoint, and on a stream, which it samples from.
    good(&dir, &format!("--pretrain model {train} --packing-samples --batch-size 2 --max-steps 3"));
    good(&dir, &format!("{NEW} {train} --max-steps 62 --ckpt-dir ck --resume auto"));
    let stream = "--pretrain model --dataset stream.npy --max-len 16 --batch-size 4 --max-steps 2 --sample-tokens 5";
    let (out, _) = good(&dir, stream);
    let (before, after) = out.split_once("\n--- generated ---\n").unwrap();
    assert!(before.starts_with("--- prompt (held-out tokens) ---\n") && after.split_whitespace().count() == 5, "{out}");

    // What follows 7, 14, 21 is what the rows say.
    for prompt in ["7 14 21", "7,14,21"] {
        let mut asked = std::process::Command::new(FSDP);
        asked.current_dir(dir.path("")).args(["--pretrain", "model", "--temperature", "0", "--max-new-tokens", "4"]);
        let out = asked.args(["--generate", prompt]).output().unwrap();
        assert_eq!(String::from_utf8_lossy(&out.stdout), "28 35 42 49\n", "{}", String::from_utf8_lossy(&out.stderr));
    }
    refused(&dir, "--pretrain model --generate Hello", &["no tokenizer.json", "--tokenizer", "\"3 17 5\""]);
    refused(&dir, "--pretrain model --generate 60", &["token id 60", "vocab_size is 60"]);
}

#[test]
fn each_stage_reads_rows_of_ids() {
    let dir = files();
    let yaml = "model: {vocab_size: 60, embed_dim: 32, num_layers: 1, num_heads: 2}\n\
                data: {dataset: rows.jsonl, max_len: 16}\nbatch: {batch_size: 2}\n\
                training_stages:\n  one: {run: {max_steps: 2}}\n  two: {run: {max_steps: 2}, data: {dataset: stream.npy}}\n";
    fs::write(dir.path("run.yaml"), yaml).unwrap();
    good(&dir, "--config run.yaml --ckpt-dir ck --save-hf model --no-sample");
    assert!(fs::exists(dir.path("model/model.safetensors")).unwrap());
}

/// Bytes would be other tokens than those that the model was trained on.
#[test]
fn a_pretrained_model_without_a_tokenizer_reads_no_text() {
    let dir = files();
    let model =
        "--vocab-size 320 --embed-dim 16 --num-layers 1 --num-heads 2 --max-len 16 --max-steps 1 --save-hf model";
    good(&dir, &format!("{model} --dataset rows.jsonl"));
    fs::write(dir.path("texts.jsonl"), "{\"text\": \"abcdef\"}\n".repeat(20)).unwrap();
    let texts = "--pretrain model --dataset texts.jsonl --max-len 16 --max-steps 1";
    good(&dir, texts); // its config has the end of text of bytes
    let config = fs::read_to_string(dir.path("model/config.json")).unwrap();
    assert!(config.contains("\"eos_token_id\": 256"), "{config}");
    fs::write(dir.path("model/config.json"), config.replace("\"eos_token_id\": 256", "\"eos_token_id\": 2")).unwrap();
    let says = ["model: the model has no tokenizer.json", "name its tokenizer with --tokenizer"];
    refused(&dir, texts, &says);
    refused(&dir, "--pretrain model --max-len 16 --max-steps 1", &says);
    refused(&dir, "--pretrain model --generate Hello --max-new-tokens 2", &says);
    good(&dir, "--pretrain model --dataset rows.jsonl --max-len 16 --max-steps 1");
    good(&dir, &format!("{texts} --tokenizer bytes"));
}

#[test]
fn the_tokenizer_matters_from_the_first_row_with_text() {
    let dir = files();
    let text = |row: &str| {
        let rows = fs::read_to_string(dir.path("rows.jsonl")).unwrap();
        fs::write(dir.path("mixed.jsonl"), rows + row + "\n").unwrap();
    };
    let mixed = format!("{NEW} --dataset mixed.jsonl --max-steps 1");
    for row in [r#"{"text": "a"}"#, r#"{"messages": []}"#, r#"{"instruction": "a", "output": "b"}"#] {
        text(row);
        let says = ["mixed.jsonl: line 121 holds text", "vocab_size 60", "--tokenizer bytes", "257 or more"];
        refused(&dir, &mixed, &says);
        refused(&dir, &format!("{mixed} --skip-bad-rows"), &says);
    }
    text(r#"{"input_ids": [1, 60]}"#);
    refused(&dir, &mixed, &["mixed.jsonl: line 121", "token id 60", "vocab_size is 60"]);
    // A tokenizer that cannot be read counts as none, wherever it is named.
    let ids = format!("{NEW} --dataset rows.jsonl --max-steps 1");
    let (_, said) = good(&dir, &format!("{ids} --tokenizer no.json --save-hf model"));
    assert!(said.contains("are given as ids: --tokenizer no.json: no such file"), "{said}");
    fs::write(dir.path("model/tokenizer.json"), "{}").unwrap();
    good(&dir, "--pretrain model --dataset rows.jsonl --max-len 16 --max-steps 1");
    text(r#"{"text": "a"}"#);
    let says = ["line 121 holds text", "model/tokenizer.json: is no"];
    refused(&dir, "--pretrain model --dataset mixed.jsonl --max-len 16 --max-steps 1", &says);
    refused(
        &dir,
        &format!("{mixed} --tokenizer no.json --vocab-size 300"),
        &["line 121 holds text", "--tokenizer no.json"],
    );
    refused(&dir, &format!("{ids} --tokenizer no.json --input-key q --output-key a"), &["--tokenizer no.json"]);
}
