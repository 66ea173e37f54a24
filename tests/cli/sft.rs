//! Fine-tuning end to end: packed samples do not attend to each other, the shipped example learns, and the row flags
//! work. Never tests single rows (tests/data does).

use crate::common::runs::unlaunched;
use crate::common::*;
use flatshard::base::Result;
use flatshard::base::rng::Rng;
use flatshard::data::{Cache, DataOptions, Dataset, Format, Loader, LoaderOptions, MicroBatch, StepData, Tokenizer};
use flatshard::engine::{Engine, StepReport};
use serde_json::Value;
use std::path::Path;
use std::process::{Command, Output};
use std::sync::Arc;

const LEN: usize = 12;

/// `n` rows of 2 to 12 tokens, without loss on their first halves.
fn rows(n: u64) -> (tempfile::TempDir, Arc<Dataset>) {
    let rng = Rng::new(11, 0);
    let row = |r: u64| {
        let len = 2 + (rng.uniform(r) * 11.0) as u64;
        let ids: Vec<u64> = (0..len).map(|i| rng.u64(r << 8 | i) % 61).collect();
        let labels = ids.iter().enumerate().map(|(i, &id)| if i < len as usize / 2 { -100 } else { id as i64 });
        format!("{{\"input_ids\": {ids:?}, \"labels\": {:?}}}\n", labels.collect::<Vec<_>>())
    };
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("t.jsonl"), (0..n).map(row).collect::<String>()).unwrap();
    let options = DataOptions {
        paths: vec![dir.path().join("t.jsonl")],
        tokenizer: Tokenizer::Bytes,
        format: Format::default(),
        vocab: 257,
        max_len: LEN,
        max_samples: None,
        seed: 1,
        cache: Cache::at(dir.path().join("cache")),
        cargo_home: None,
    };
    let data = Arc::new(Dataset::open(&options).unwrap());
    (dir, data)
}

pub fn loader(
    data: &Arc<Dataset>,
    batch_size: usize,
    grad_accum: usize,
    rank: (usize, usize),
    packing: bool,
) -> Loader {
    let ((dp_rank, dp_size), shuffle, by_length, held_out) = (rank, false, false, None);
    let options = LoaderOptions {
        batch_size,
        grad_accum,
        dp_rank,
        dp_size,
        shuffle,
        seed: 1,
        packing,
        by_length,
        passes: 1,
        held_out,
    };
    Loader::new(data.clone(), options).unwrap()
}

/// Sequences of an epoch.
fn sequences(data: &Arc<Dataset>, packing: bool) -> usize {
    let mut loader = loader(data, 1, 1, (0, 1), packing);
    let rows = loader.rows_per_epoch();
    loader.steps_until(rows, u64::MAX) as usize
}

/// One epoch as one step, every row once. Returns its report, the weights after it, and the number of samples.
fn epoch(data: &Arc<Dataset>, world: usize, batch: usize, packing: bool, spoil: bool) -> (Outcome, u64) {
    let spec = flatshard::nn::Spec { vocab: 257, ..llama() };
    let accum = sequences(data, packing) / world / batch;
    let samples = std::sync::atomic::AtomicU64::new(0);
    let results: Vec<(Vec<StepReport>, Fragments)> = ranks(world, |rank| {
        let mut loader = loader(data, batch, accum, (rank.rank, world), packing);
        let mut step_data = StepData::default();
        loader.next(&mut step_data);
        samples.store(step_data.samples, std::sync::atomic::Ordering::Relaxed);
        if spoil {
            step_data.batches.iter_mut().for_each(as_one_document);
        }
        let mut engine = Engine::new(rank.device, &rank.mesh, &options_for(&spec))?;
        let report = step(&mut engine, &step_data.batches, 1)?;
        Ok((vec![report], fragments(&mut engine)?)) as Result<_>
    });
    (gathered(&spec, results), samples.into_inner())
}

fn options_for(spec: &flatshard::nn::Spec) -> flatshard::engine::EngineOptions {
    // Without clipping, which would hide a gradient of the wrong size; SGD, because Adam hides it too.
    flatshard::engine::EngineOptions { grad_clip: 0.0, ..options(spec, fsdp(sharded()), SGD) }
}

/// Packing without document boundaries.
fn as_one_document(batch: &mut MicroBatch) {
    let n = batch.tokens.len() as u32;
    batch.cu_seqlens = vec![0, n];
}

#[test]
fn packed_samples_train_as_each_alone() {
    // Enough rows that their sequences divide evenly between two ranks.
    let (n, _dir, data) = (20..60)
        .map(|n| {
            let (dir, data) = rows(n);
            (n, dir, data)
        })
        .find(|(_, _, data)| sequences(data, true).is_multiple_of(2))
        .unwrap();
    let (alone, samples) = epoch(&data, 1, 1, false, false);
    assert_eq!(samples, n);
    for (world, batch) in [(1, 1), (2, 1), (1, 2)] {
        let (packed, samples) = epoch(&data, world, batch, true, false);
        assert_eq!(samples, n, "the epoch in one step");
        let (weights, loss) = distance(&alone, &packed);
        assert!(
            weights < 1e-6 && loss < 1e-6,
            "{world} ranks of {batch}: weights differ by {weights}, losses by {loss}"
        );
    }
    // The test detects samples that attend to each other.
    let (weights, loss) = distance(&alone, &epoch(&data, 1, 1, true, true).0);
    assert!(weights > 1e-5 && loss > 1e-4, "weights differ by {weights}, losses by {loss}");
}

// --- the binary
// -------------------------------------------------------------------------------------------------------

fn run(args: &[&str]) -> Output {
    let mut command = unlaunched(crate::common::binaries::FSDP);
    command.current_dir(env!("CARGO_MANIFEST_DIR")).args(args).output().unwrap()
}
fn events(metrics: &Path, name: &str) -> Vec<Value> {
    let text = std::fs::read_to_string(metrics).unwrap();
    let all = text.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
    all.filter(|event| event["event"] == name).collect()
}

#[test]
fn the_shipped_example_learns_in_seconds() {
    let dir = tempfile::tempdir().unwrap();
    let metrics = dir.path().join("metrics.jsonl");
    let out = run(&["--config", "configs/sft.yaml", "--metrics-path", metrics.to_str().unwrap()]);
    assert!(out.status.success(), "{}", String::from_utf8_lossy(&out.stderr));
    let steps = events(&metrics, "step");
    let number = |event: &Value, key: &str| event[key].as_f64().unwrap();
    let (first, last) = (number(&steps[0], "loss"), number(steps.last().unwrap(), "loss"));
    assert!(first > 5.0 && last < 2.5, "loss from {first} to {last}");
    for step in &steps {
        assert!(number(step, "fill") > 0.6 && number(step, "fill") <= 1.0, "{step}");
        assert_eq!(number(step, "tokens"), number(step, "fill") * 2048.0, "{step}");
        assert!(number(step, "trained_tokens") < number(step, "tokens"), "loss on answers only: {step}");
        assert!(number(step, "samples") >= 4.0, "several samples a sequence: {step}");
    }
    let run = &events(&metrics, "run")[0];
    assert!(run["data"].as_str().unwrap().contains("samples of up to 512"), "{}", run["data"]);
}

#[test]
fn rows_are_refused_dropped_and_skipped_by_the_binary() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("qa.jsonl");
    let good = r#"{"q": "two and two", "a": "four"}"#;
    let long = format!(r#"{{"q": "{}", "a": "no room"}}"#, "word ".repeat(40));
    std::fs::write(&file, [good, &long, good, "{\"q\": 1}", good, good].join("\n")).unwrap();
    let metrics = dir.path().join("metrics.jsonl");
    let [file, metrics_path] = [&file, &metrics].map(|p| p.to_str().unwrap());
    let base = [
        "--dataset",
        file,
        "--input-key",
        "q",
        "--output-key",
        "a",
        "--input-template",
        "Q: {} A: ",
        "--max-len",
        "64",
        "--embed-dim",
        "32",
        "--num-layers",
        "1",
        "--batch-size",
        "1",
        "--max-steps",
        "3",
        "--metrics-path",
        metrics_path,
    ];
    let out = run(&base);
    let text = String::from_utf8_lossy(&out.stderr);
    assert_eq!(out.status.code(), Some(2), "{text}");
    assert!(
        text.contains("qa.jsonl: line 4 has no `a`") || text.contains("qa.jsonl: line 4 has a number as q"),
        "{text}"
    );
    assert!(text.contains("--skip-bad-rows") && !metrics.exists(), "{text}");

    let out = run(&[&base[..], &["--skip-bad-rows", "--no-shuffle"]].concat());
    let text = String::from_utf8_lossy(&out.stderr);
    assert!(out.status.success(), "{text}");
    assert!(text.contains("1 row dropped") && text.contains("1 bad row skipped"), "{text}");
    let steps = events(&metrics, "step");
    // "Q: two and two A: four" and the end: 5 of 23 tokens have loss, on two ranks.
    assert!(
        steps.iter().all(|s| s["tokens"] == 2 * 23 && s["trained_tokens"] == 2 * 5 && s["samples"] == 2),
        "{steps:?}"
    );
    for step in &steps {
        let [all, trained] = ["tokens_per_sec", "trained_tokens_per_sec"].map(|key| step[key].as_f64().unwrap());
        assert!((trained / all * 23.0 / 5.0 - 1.0).abs() < 1e-9, "{step}");
    }
}

/// The 400 samples of an array are packed several to a sequence.
#[test]
fn the_header_counts_samples_and_sequences() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("arr.json");
    let row = |i: usize| serde_json::json!({"instruction": format!("say {i}"), "input": "", "output": i.to_string()});
    std::fs::write(&file, Value::Array((0..400).map(row).collect()).to_string()).unwrap();
    let base =
        "--apply-chat-template --embed-dim 32 --num-layers 1 --max-steps 1 --batch-size 1 --max-len 256 --no-eval";
    let args: Vec<&str> = ["--dataset", file.to_str().unwrap()].into_iter().chain(base.split(' ')).collect();
    for (more, says) in [(&["--packing-samples"][..], ", packed into sequences of 256\n"), (&[], "; no padding\n")] {
        let out = run(&[&args[..], more].concat());
        let text = String::from_utf8_lossy(&out.stderr);
        assert!(out.status.success(), "{text}");
        let says = format!("tokens in 400 samples of up to 256{says}");
        assert!(text.contains(&says) && !text.contains("rows of"), "{text}");
    }
}

#[test]
fn a_prompt_is_rendered_like_training_rows() {
    let dir = tempfile::tempdir().unwrap();
    let model = dir.path().join("model");
    let model = model.to_str().unwrap();
    let run = |args: &[&str]| {
        let out = Command::new(crate::common::binaries::FSDP).args(args).output().unwrap();
        assert!(out.status.success(), "{args:?}: {}", String::from_utf8_lossy(&out.stderr));
        out.stdout
    };
    let tiny =
        "--dataset synthetic --embed-dim 32 --num-layers 1 --num-heads 2 --vocab-size 320 --max-len 64 --max-steps 1";
    run(&[&tiny.split(' ').collect::<Vec<_>>()[..], &["--save-hf", model]].concat());
    let text = |prompt, more: &[&str]| {
        let greedy = ["--pretrain", model, "--tokenizer", "bytes", "--temperature", "0", "--max-new-tokens", "9"];
        run(&[&greedy[..], &["--generate", prompt], more].concat())
    };
    const TEMPLATE: &str =
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{% if add_generation_prompt %}!{% endif %}";
    let chat = ["--tokenizer-chat-template", TEMPLATE, "--apply-chat-template"];
    let plain = text("<user>Why?!", &[]);
    assert_eq!(text("Why?", &chat), plain);
    assert_eq!(text("Why?", &["--input-template", "<user>{}!"]), plain);
    assert_ne!(text("Why?", &chat[..2]), plain, "a template that is not applied changes nothing");
}

#[test]
fn template_flags_are_checked_before_anything_starts() {
    let refused = |args: &[&str], parts: &[&str]| {
        let out = run(args);
        let text = String::from_utf8_lossy(&out.stderr).into_owned();
        assert_eq!(out.status.code(), Some(2), "{args:?}: {text}");
        parts.iter().for_each(|part| assert!(text.contains(part), "{part:?} is not in: {text}"));
    };
    let base = ["--dataset", "configs/sft.jsonl", "--apply-chat-template"];
    let with = |more: &[&'static str]| [&base[..], more].concat();
    refused(&with(&["--tokenizer", "tests/data/golden/byte_level"]), &["byte_level", "no default chat template"]);
    refused(&with(&["--tokenizer-chat-template", "no/such.jinja"]), &["no/such.jinja", "neither a file"]);
    refused(&with(&["--tokenizer-chat-template", "{% if %}"]), &["line 1 of the chat template"]);
    refused(&with(&["--tokenizer-chat-template", "{{ raise_exception('never') }}"]), &["sft.jsonl: line 1", "never"]);
    refused(&with(&["--input-template", "{}"]), &["--input-template", "chat template"]);
    refused(&with(&["--vocab-size", "300", "--tokenizer", "tests/data/golden/byte_level"]), &["--tokenizer"]);
    refused(&["--dataset", "configs/sft.jsonl", "--input-key", "messages"], &["--input-key", "--output-key"]);
    for flag in ["--apply-chat-template", "--multiturn", "--skip-bad-rows", "--packing-samples"] {
        for text in ["README.md", "synthetic"] {
            refused(&["--dataset", text, flag], &[flag, "has no effect here", text, ".json arrays of objects"]);
        }
    }
    let template = ["--tokenizer-chat-template", "{{ messages[0].content }}"];
    let small = ["--vocab-size", "300", "--tokenizer", "tests/data/golden/byte_level"];
    refused(&with(&[&template[..], &small].concat()), &["300", "360", "byte_level"]);
}

/// Keys that transformers' class does not have are listed, and the model trains.
#[test]
fn keys_without_effect_are_listed() {
    let dir = tempfile::tempdir().unwrap();
    let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/pretrained/llama");
    std::fs::copy(golden.join("model.safetensors"), dir.path().join("model.safetensors")).unwrap();
    let mut config: Value = serde_json::from_slice(&std::fs::read(golden.join("config.json")).unwrap()).unwrap();
    config["is_llama_config"] = true.into();
    config["transformers.js_config"] = serde_json::json!({"dtype": "fp16"});
    config["rope_interleaved"] = false.into();
    std::fs::write(dir.path().join("config.json"), config.to_string()).unwrap();
    let model = dir.path().display().to_string();
    let rest = "--dataset synthetic --max-len 16 --batch-size 2 --max-steps 1 --warmup-steps 0 --no-sample";
    let ended = run(&["--pretrain", &model].into_iter().chain(rest.split(' ')).collect::<Vec<_>>());
    let text = String::from_utf8_lossy(&ended.stderr);
    assert!(ended.status.success(), "{text}");
    assert!(text.contains("without effect: is_llama_config, transformers.js_config\n"), "{text}");
}
