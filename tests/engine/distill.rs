//! Distillation from outside: loss and every gradient as PyTorch's, on any mesh and however a step is split; equal bits
//! in every store; and the teacher stays what it was. The files are made by `tests/golden/distill.py`.
use crate::common::golden_tensors::Tensors;
use crate::common::stores::{at_once, kinds};
use crate::common::*;
use crate::preference::{PAIRS_OF_RANKS, documents, gradients, holds_what_is_planned};
use flatshard::base::{Category, DType, Result};
use flatshard::ckpt::{Checkpointer, hf};
use flatshard::comm::{Axis, MeshSizes};
use flatshard::data::{MicroBatch, SampleRow};
use flatshard::engine::{Engine, EngineOptions, Step, StepReport, Strategy, Teaching};
use flatshard::nn::{Checkpointing, Spec};
use flatshard::optim::Moments;
use flatshard::store::ShardedOptions;
use serde_json::Value;
use std::collections::{BTreeMap, HashMap};
use std::path::PathBuf;
use std::sync::Arc;

fn file(name: &str) -> PathBuf {
    PathBuf::from(format!("{}/tests/golden/{name}", env!("CARGO_MANIFEST_DIR")))
}

struct Golden {
    spec: Spec,
    teacher: Spec,
    /// Prompts and answers.
    rows: Vec<(Vec<u32>, Vec<u32>)>,
    /// By row and token of the answer.
    logprobs: Vec<Vec<f32>>,
    entropy: f64,
    cases: Vec<(String, Value)>,
    gradients: HashMap<String, Vec<f32>>,
}

impl Golden {
    fn read() -> Golden {
        let values: Value = serde_json::from_slice(&std::fs::read(file("distill/values.json")).unwrap()).unwrap();
        let ids = |ids: &Value| ids.as_array().unwrap().iter().map(|id| id.as_u64().unwrap() as u32).collect();
        Golden {
            spec: hf::read(&file("preference/policy")).unwrap(),
            teacher: hf::read(&file("distill/teacher")).unwrap(),
            rows: values["rows"].as_array().unwrap().iter().map(|r| (ids(&r["prompt"]), ids(&r["answer"]))).collect(),
            logprobs: serde_json::from_value(values["logprobs"].clone()).unwrap(),
            entropy: values["entropy"].as_f64().unwrap(),
            cases: values["cases"].as_object().unwrap().iter().map(|(k, v)| (k.clone(), v.clone())).collect(),
            gradients: Tensors::read(&file("distill/gradients.safetensors")).floats,
        }
    }
    /// The micro-batches of data-parallel rank `rank` of `of`, each of `size` rows.
    fn batches(&self, rank: usize, of: usize, size: usize) -> Vec<MicroBatch> {
        let own = self.rows.len() / of;
        let batch = |first: usize| {
            let plain = documents(self.rows[first..first + size].iter().map(|(p, a)| (p, a)));
            let group = |i: usize| {
                let ((prompt, ids), logprobs) = (&self.rows[i], &self.logprobs[i]);
                vec![SampleRow { prompt, ids, logprobs, reward: 0.0 }]
            };
            MicroBatch { recorded: MicroBatch::from_groups((first..first + size).map(group)).recorded, ..plain }
        };
        (rank * own..(rank + 1) * own).step_by(size).map(batch).collect()
    }
    fn options(&self, case: &Value, strategy: Arc<dyn Strategy>) -> EngineOptions {
        let number = |key: &str| case[key].as_f64().unwrap();
        let on_policy = case["on_policy"] == true;
        let teaching = Teaching {
            spec: self.teacher.clone(),
            alpha: number("alpha"),
            temperature: number("temperature"),
            on_policy,
        };
        let plain = options(&self.spec, strategy, SGD);
        EngineOptions { teacher: Some(teaching), grad_clip: 0.0, tokens: 200, ..plain }
    }
    fn step(&self) -> Step {
        Step { number: 1, lr: 0.1, tokens: self.rows.iter().map(|(_, answer)| answer.len() as u64).sum() }
    }
}

/// An engine with PyTorch's student and teacher.
fn engine(rank: &Rank, options: &EngineOptions) -> Result<Engine> {
    let (dev, mesh) = (&rank.device, &rank.mesh);
    let mut engine = Engine::new(dev.clone(), mesh, options)?;
    let layouts = engine.decoder().layouts().to_vec();
    let mut student = Checkpointer::new(dev.clone(), mesh, &options.spec, &layouts, Moments::NONE)?;
    student.load_model(&file("preference/policy"), engine.state().0)?;
    let (decoder, store) = engine.teacher().unwrap();
    let mut teacher = Checkpointer::new(dev.clone(), mesh, decoder.spec(), decoder.layouts(), Moments::NONE)?;
    teacher.load_model(&file("distill/teacher"), store)?;
    Ok(engine)
}

/// Relative error, in norm, of each gradient.
fn errors(golden: &Golden, case: &str, fragments: &[Fragments]) -> BTreeMap<String, f64> {
    let norm = |x: &mut dyn Iterator<Item = f64>| x.map(|x| x * x).sum::<f64>().sqrt();
    let error = |(name, ours): (String, Vec<f32>)| {
        let theirs = &golden.gradients[&format!("{case}.{name}")];
        let off = norm(&mut ours.iter().zip(theirs).map(|(a, b)| (a - b) as f64));
        (name, off / norm(&mut theirs.iter().map(|&x| x as f64)))
    };
    whole(&golden.spec, fragments).into_iter().map(error).collect()
}

fn run(golden: &Golden, options: &EngineOptions, sizes: MeshSizes, size: usize) -> Vec<(StepReport, Fragments)> {
    mesh_ranks(sizes, |rank| {
        let mut engine = engine(&rank, options)?;
        let dp = sizes.dp_replicate * sizes.dp_shard;
        let report = engine.train_step(&golden.batches(rank.mesh.group(Axis::Dp).rank(), dp, size), &golden.step())?;
        Ok((report, gradients(&mut engine)?))
    })
}

/// On meshes of up to four ranks, with documents packed together and one by one; over tp then with sequence
/// parallelism.
#[test]
fn losses_and_gradients_agree_with_pytorch() {
    let golden = Golden::read();
    for (name, case) in &golden.cases {
        let mut worst = 0f64;
        let meshes =
            [1, 2, 4].into_iter().flat_map(factorizations).filter(|m| m.tp < 4 && m.dp_replicate * m.dp_shard < 4);
        for sizes in meshes {
            for (size, checkpoint) in [(3, Checkpointing::Off), (1, Checkpointing::Full)] {
                let grad_accum = golden.rows.len() / (sizes.dp_replicate * sizes.dp_shard) / size;
                let options = golden.options(case, fsdp(ShardedOptions { grad_accum, ..sharded() }));
                let options = EngineOptions { checkpoint, sequence_parallel: sizes.tp > 1 && size == 1, ..options };
                let (reports, fragments): (Vec<_>, Vec<_>) = run(&golden, &options, sizes, size).into_iter().unzip();
                let (ours, theirs) = (reports[0].loss, case["loss"].as_f64().unwrap());
                let what = format!("{name} on {sizes:?}, {size} rows a micro-batch");
                assert!((ours - theirs).abs() < 1e-5 * theirs, "{what}: loss {ours}, PyTorch {theirs}");
                if let Some(student) = &reports[0].student {
                    let t = case["temperature"].as_f64().unwrap();
                    assert!((student.reverse_kl - theirs / t / t).abs() < 1e-5, "{what}: {student:?}");
                    assert_eq!(student.completion_tokens, golden.step().tokens, "{what}");
                    assert!(student.logprob_mismatch < 1e-5, "{what}: {student:?}");
                    let near = student.entropy.map(|entropy| (entropy - golden.entropy).abs() < 1e-5);
                    assert_eq!(near, (sizes.tp == 1).then_some(true), "{what}: {student:?}");
                }
                assert_eq!(reports[0].student.is_some(), name.starts_with("own"));
                for (tensor, error) in errors(&golden, name, &fragments) {
                    assert!(error < 1e-5, "{what}: gradient of {tensor}: {error:.1e}");
                    worst = worst.max(error);
                }
            }
        }
        println!("{name}: worst gradient {worst:.1e}");
    }
}

/// Narrow weights and activations stay within what rounding explains.
#[test]
fn narrow_precisions_are_near() {
    let golden = Golden::read();
    for (dtype, tolerance) in [(DType::Bf16, 0.05), (DType::F16, 0.01)] {
        let (name, case) = &golden.cases[0];
        let options = golden.options(case, fsdp(ShardedOptions { dtype, ..sharded() }));
        let results = run(&golden, &options, MeshSizes::sharded(2), 3);
        let (reports, fragments): (Vec<_>, Vec<_>) = results.into_iter().unzip();
        let (ours, theirs) = (reports[0].loss, case["loss"].as_f64().unwrap());
        assert!((ours - theirs).abs() < tolerance * theirs, "{dtype}: loss {ours}, PyTorch {theirs}");
        let worst = errors(&golden, name, &fragments).into_values().fold(0.0, f64::max);
        assert!((1e-5..2.0 * tolerance).contains(&worst), "{dtype}: {worst:.1e}");
    }
}

/// Three steps in each store: the weights, bit for bit; the teacher is gathered and released like the student.
#[test]
fn every_store_has_the_same_bits() {
    let golden = Golden::read();
    for dtype in [DType::F32, DType::Bf16] {
        let outcome = |strategy: Arc<dyn Strategy>| {
            let (_, case) = golden.cases.iter().find(|(name, _)| name == "own_warm").unwrap();
            let options = golden.options(case, strategy);
            let results = ranks(3, |rank| {
                let (mut engine, mut reports) = (engine(&rank, &options)?, Vec::new());
                let batches = golden.batches(rank.rank, 3, 1);
                for number in 1..=3 {
                    reports.push(engine.train_step(&batches, &Step { number, ..golden.step() })?);
                    engine.evaluate(&batches)?;
                }
                Ok((reports, fragments(&mut engine)?))
            });
            gathered(&options.spec, results)
        };
        let replicated = outcome(ddp(dtype));
        for strategy in at_once(dtype, 2) {
            let what = format!("{} {dtype}", strategy.name());
            assert_same_bits(&replicated, &outcome(strategy), &what);
        }
    }
}

/// Of a teacher's logits no more than a chunk exists: for each token of the vocabulary it adds the rows of its
/// embedding and head, in shards and in slots, a column of the chunk, and one of the row of logits that any workspace
/// has, however many tokens a micro-batch has.
#[test]
fn logits_of_a_teacher_are_never_whole() {
    let (golden, ranks) = (Golden::read(), 2);
    // Chunks are of 256 tokens with both vocabularies.
    let (tokens, chunk, vocab) = (2048, 256, 1 << 16);
    let more = |vocab| {
        let all = golden.options(&golden.cases[0].1, fsdp(sharded()));
        let mut all = EngineOptions { spec: Spec { vocab, ..all.spec.clone() }, tokens, ..all };
        all.teacher.as_mut().unwrap().spec.vocab = vocab;
        let plain = EngineOptions { teacher: None, ..all.clone() };
        let [with, without] = [all, plain].map(|options| options.bytes(&MeshSizes::sharded(ranks), 0).unwrap());
        with.into_iter().zip(without).map(|((category, a), (_, b))| (category, a - b)).collect::<Vec<_>>()
    };
    // In f32; ranks of a host count their share of the slots.
    let tables = 2 * vocab * golden.teacher.dim * 4 / ranks;
    for ((category, less), (_, more)) in more(vocab).into_iter().zip(more(2 * vocab)) {
        let expected = match category {
            Category::Params | Category::Slots => tables,
            Category::Scratch => chunk * vocab * 4,
            Category::Other => vocab * 4,
            _ => 0,
        };
        assert_eq!(more - less, expected, "{category:?}");
    }
}

#[test]
fn a_teacher_is_planned_and_a_step_allocates_nothing() {
    let golden = Golden::read();
    for (sizes, dtype) in PAIRS_OF_RANKS.into_iter().flat_map(|sizes| [(sizes, DType::F32), (sizes, DType::Bf16)]) {
        for (i, strategy) in kinds(dtype).into_iter().enumerate() {
            let options = golden.options(&golden.cases[i % golden.cases.len()].1, strategy);
            mesh_ranks(sizes, |rank| {
                let mut engine = engine(&rank, &options)?;
                let batches = golden.batches(rank.mesh.group(Axis::Dp).rank(), rank.mesh.group(Axis::Dp).size(), 3);
                holds_what_is_planned(&rank, &options, &mut engine, &batches, golden.step())
            });
        }
    }
}

#[test]
fn what_cannot_be_taught_is_refused() {
    let golden = Golden::read();
    let plain = golden.options(&golden.cases[0].1, fsdp(sharded()));
    let mut other = plain.clone();
    other.teacher.as_mut().unwrap().spec.vocab += 1;
    let error = other.bytes(&MeshSizes::sharded(1), 0).unwrap_err().to_string();
    assert!(error.contains("teacher"), "{error}");
    assert!(plain.bytes(&MeshSizes::sharded(2), 0).is_ok());
}
