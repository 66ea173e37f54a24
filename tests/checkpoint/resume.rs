//! A run that is saved, stopped and resumed is bitwise equal to one that never stopped: losses, norms, weights, moments
//! and data order.

use crate::common::known_state::state;
use crate::common::runs::unlaunched;
use crate::common::*;
use flatshard::base::{DType, Result};
use flatshard::ckpt::{self, Checkpointer, TrainerState};
use flatshard::data::{Cache, DataOptions, Dataset, Format, Loader, LoaderOptions, StepData, Tokenizer};
use flatshard::engine::{Engine, EngineOptions};
use flatshard::nn::{Checkpointing, Spec};
use flatshard::store::{Offload, ShardedOptions};
use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::sync::Arc;

const ROWS: usize = 4;
const ACCUM: usize = 2;

/// Steps `from + 1..=to` of a run that resumes from its checkpoint of step `from` in `dir`, unless `from` is 0. Saves
/// at `save_at` and at the end. Returns (loss, norm) of every step as bits.
fn run(
    world: usize,
    options: &EngineOptions,
    from: Option<(&Path, u64)>,
    to: u64,
    save: &[(&Path, u64)],
) -> Vec<(u64, u32)> {
    let data = DataOptions {
        paths: vec!["synthetic".into()],
        tokenizer: Tokenizer::Bytes,
        format: Format::default(),
        vocab: options.spec.vocab,
        max_len: ROW,
        max_samples: Some(60), // the run crosses the end of an epoch
        seed: options.seed,
        cache: Cache::at(std::env::temp_dir()),
        cargo_home: None,
    };
    let source = Arc::new(Dataset::open(&data).unwrap());
    let reports = ranks(world, |rank| {
        let mut engine = Engine::new(rank.device.clone(), &rank.mesh, options)?;
        let loader = LoaderOptions {
            batch_size: ROWS / world,
            grad_accum: ACCUM,
            dp_rank: rank.rank,
            dp_size: world,
            shuffle: true,
            seed: options.seed,
            packing: false,
            by_length: false,
            passes: 1,
            held_out: None,
        };
        let mut loader = Loader::new(source.clone(), loader)?;
        let layouts = engine.decoder().layouts().to_vec();
        let mut ckpt = Checkpointer::new(rank.device, &rank.mesh, &options.spec, &layouts, options.rule.state())?;
        let mut start = 0;
        if let Some((dir, step)) = from {
            let (store, optimizer) = engine.state();
            let TrainerState { step: done, samples_consumed, .. } =
                ckpt.load(&dir.join(format!("step-{step:08}")), store, optimizer)?;
            loader.seek(samples_consumed);
            start = done;
        }
        let mut data = StepData::default();
        let mut reports = Vec::new();
        for number in start + 1..=to {
            loader.next(&mut data);
            let report = step(&mut engine, &data.batches, number)?;
            reports.push((report.loss.to_bits(), report.grad_norm.to_bits()));
            for (dir, _) in save.iter().filter(|(_, at)| *at == number) {
                let (store, optimizer) = engine.state();
                let now = TrainerState { samples_consumed: loader.position(), ..state(number) };
                ckpt.save(dir, 2, store, optimizer, &now)?;
            }
        }
        Ok(reports) as Result<_>
    });
    assert!(reports.iter().all(|r| *r == reports[0]), "ranks report different steps");
    reports.into_iter().next().unwrap()
}

fn contents(dir: &Path) -> BTreeMap<String, Vec<u8>> {
    let entries = fs::read_dir(dir).unwrap().map(|e| e.unwrap());
    entries.map(|e| (e.file_name().into_string().unwrap(), fs::read(e.path()).unwrap())).collect()
}

#[test]
fn ten_steps_equal_five_a_checkpoint_and_five_more() {
    let bf16 = ShardedOptions { dtype: DType::Bf16, grad_accum: ACCUM, ..sharded() };
    let f32 = ShardedOptions { dtype: DType::F32, ..bf16.clone() };
    let keep = ShardedOptions { reshard: false, ..bf16.clone() };
    let host = |offload, dtype| ShardedOptions { offload, dtype, ..bf16.clone() };
    let runs = [
        ("fsdp f32", 2, llama(), fsdp(f32.clone()), ADAMW),
        ("fsdp f32 on 4, dropout", 4, gpt(), fsdp(f32), ADAMW),
        ("fsdp bf16", 2, gpt(), fsdp(bf16.clone()), ADAMW),
        ("fsdp bf16, SHARD_GRAD_OP, sgd", 4, llama(), fsdp(keep), SGD),
        ("fsdp f32, optimizer offloaded", 2, llama(), fsdp(host(Offload::Optimizer, DType::F32)), ADAMW),
        ("fsdp bf16, all offloaded", 2, gpt(), fsdp(host(Offload::Parameters, DType::Bf16)), ADAMW),
        ("ddp f32", 2, gpt(), ddp(DType::F32), ADAMW),
        ("ddp bf16, sgd", 1, llama(), ddp(DType::Bf16), SGD),
    ];
    for (name, world, spec, strategy, rule) in runs {
        let options = EngineOptions { checkpoint: Checkpointing::Full, ..options(&spec, strategy, rule) };
        let dir = tempfile::tempdir().unwrap();
        let (never, again) = (dir.path().join("never stopped"), dir.path().join("taken up again"));
        let whole = run(world, &options, None, 10, &[(&never, 5), (&never, 10)]);
        let second = run(world, &options, Some((&never, 5)), 10, &[(&again, 10)]);
        assert_eq!(whole[5..], second, "{name}: (loss, norm) of steps 6 to 10");
        let (a, b) = (contents(&never.join("step-00000010")), contents(&again.join("step-00000010")));
        assert!(a.keys().eq(b.keys()), "{name}");
        for (file, bytes) in &a {
            assert!(*bytes == b[file], "{name}: {file} differs");
        }
        assert_ne!(a["model.safetensors"], contents(&never.join("step-00000005"))["model.safetensors"]);
        let losses: Vec<f64> = whole.iter().map(|s| f64::from_bits(s.0)).collect();
        assert!(losses.windows(2).all(|w| w[0] != w[1]), "{name}: steps are alike: {losses:?}");
    }
}

/// With another world size and strategy, weights are equal after loading (tests/checkpoint/files.rs), data continues at
/// the same position, and only the order of sums differs from then on.
#[test]
fn another_world_size_continues_with_the_same_data() {
    let spec = Spec { dropout: 0.0, ..llama() };
    let sharded = fsdp(ShardedOptions { grad_accum: ACCUM, ..sharded() });
    let dir = tempfile::tempdir().unwrap();
    let whole = run(2, &options(&spec, sharded.clone(), ADAMW), None, 8, &[(dir.path(), 5)]);
    for (world, strategy) in [(1, sharded.clone()), (4, sharded), (4, ddp(DType::F32))] {
        let other = run(world, &options(&spec, strategy, ADAMW), Some((dir.path(), 5)), 8, &[]);
        for (a, b) in whole[5..].iter().zip(&other) {
            let (a, b) = (f64::from_bits(a.0), f64::from_bits(b.0));
            assert!((a - b).abs() < 2e-5 * a, "{world} ranks: losses {a} and {b}");
        }
        assert_eq!(other.len(), 3);
    }
}

// --- the binary

/// 100 rows, the last 8 of which are held out. Those have 9 tokens, the others 4, so that a step's `tokens` reveals
/// them.
struct Job(tempfile::TempDir);
impl Job {
    fn new() -> Job {
        let dir = tempfile::tempdir().unwrap();
        let row = |r: usize| format!("{{\"input_ids\": {:?}}}\n", vec![r; if r < 92 { 4 } else { 9 }]);
        fs::write(dir.path().join("t.jsonl"), (0..100).map(row).collect::<String>()).unwrap();
        Job(dir)
    }
    /// Standard error, and the tokens of each step.
    fn run(&self, batch: &str, ranks: &str, steps: &str, more: &[&str]) -> (String, Vec<u64>) {
        let mut command = unlaunched(crate::common::binaries::FSDP);
        let _ = fs::remove_file(self.0.path().join("m.jsonl"));
        let tiny = "--dataset t.jsonl --embed-dim 32 --num-layers 1 --num-heads 2 --max-len 16 --no-sample --seed 3";
        command.args(tiny.split(' ')).args(["--ckpt-dir", "ck", "--resume", "auto", "--metrics-path", "m.jsonl"]);
        command.args(["--batch-size", batch, "--nproc-per-node", ranks, "--max-steps", steps]).args(more);
        let out = command.current_dir(self.0.path()).output().unwrap();
        let text = String::from_utf8_lossy(&out.stderr).into_owned();
        assert!(out.status.success(), "{text}");
        let events = fs::read_to_string(self.0.path().join("m.jsonl")).unwrap();
        let events = events.lines().map(|line| serde_json::from_str::<serde_json::Value>(line).unwrap());
        (text, events.filter(|e| e["event"] == "step").map(|e| e["tokens"].as_u64().unwrap()).collect())
    }
    /// Removes from the newest checkpoint what earlier versions did not write.
    fn age(&self) {
        let dir = ckpt::newest(&self.0.path().join("ck")).unwrap().unwrap();
        let (mut state, sums) = ckpt::state::read(&dir).unwrap();
        assert_eq!(state.data.shift_remove("held_out"), Some(8.into()));
        fs::write(dir.join(ckpt::state::FILE), ckpt::state::to_text(&state, &sums)).unwrap();
    }
}

/// The end of the data set stays out of training, whatever batch size, ranks and order follow.
#[test]
fn another_batch_size_does_not_train_on_held_out_rows() {
    for more in [&[][..], &["--packing-samples", "--max-len", "9"], &["--no-shuffle"]] {
        let job = Job::new();
        let first = if more == ["--no-shuffle"] { &[][..] } else { more };
        let (text, tokens) = job.run("5", "2", "3", first);
        assert!(tokens.len() == 3 && text.contains("  tokens 64"), "{text}");
        let (text, tokens) = job.run("6", "1", "20", more);
        assert!(!text.contains("held out") && text.contains("  tokens 64"), "{more:?}: {text}");
        // More than an epoch of rows of 4 tokens; packed, two per sequence.
        let samples = if more.contains(&"--packing-samples") { 12 } else { 6 };
        let whole = |t: &&u64| **t == 4 * samples || samples == 12 && t.is_multiple_of(4) && **t > 36;
        assert_eq!(tokens.iter().filter(whole).count(), 17, "{more:?}: {tokens:?}");
    }
}

/// Rows that nothing evaluates are trained on.
#[test]
fn without_evaluations_nothing_is_held_out() {
    for (flags, rows) in [(&["--no-eval"][..], 0), (&["--held-out", "0"], 0), (&[], 8)] {
        let job = Job::new();
        job.run("5", "2", "3", flags);
        let (state, _) = ckpt::state::read(&ckpt::newest(&job.0.path().join("ck")).unwrap().unwrap()).unwrap();
        assert_eq!(state.data["held_out"], rows, "{flags:?}");
    }
}

#[test]
fn checkpoints_without_a_held_out_count_use_the_old_rule() {
    let job = Job::new();
    job.run("5", "2", "3", &[]);
    job.age();
    let (text, _) = job.run("6", "1", "4", &[]);
    let says = "does not record its held-out rows: holding out the last 10, as for its steps of 10 sequences";
    assert!(text.contains(says), "{text}");
    // From here on checkpoints record it.
    let (text, _) = job.run("4", "1", "5", &[]);
    assert!(!text.contains("held out") && text.contains("  tokens "), "{text}");
    // Other rows cannot be split the same way.
    let (text, _) = job.run("4", "1", "6", &["--max-samples", "90"]);
    assert!(text.contains("warning: the data is not the checkpoint's"), "{text}");
}
