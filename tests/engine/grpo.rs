//! GRPO from outside: recorded rollouts are read from a file, and loss, metrics and every gradient are those of TRL's
//! function, on any mesh and however groups are split over micro-batches; equal bits in every store. The files are made
//! by `tests/golden/grpo.py`.
use crate::common::golden_tensors::Tensors;
use crate::common::stores::{assert_stores_agree, at_once, by_batch, kinds};
use crate::common::*;
use crate::preference::{PAIRS_OF_RANKS, gradients, holds_what_is_planned};
use flatshard::base::{DType, Result};
use flatshard::ckpt::{Checkpointer, hf};
use flatshard::comm::{Axis, MeshSizes};
use flatshard::data::{
    Cache, DataOptions, Dataset, Format, Loader, LoaderOptions, MicroBatch, Preferences, StepData, Tokenizer,
};
use flatshard::engine::{
    Engine, EngineOptions, Grpo, GrpoLoss, Objective, ReferenceModel, Step, StepCounts, StepReport, Strategy,
};
use flatshard::nn::{Checkpointing, Lora, SpImpl, Spec, Tuning};
use flatshard::optim::Moments;
use flatshard::store::{ShardedOptions, initialize};
use serde_json::Value;
use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::Arc;

const LR: f32 = 0.1;
const GROUPS: usize = 6;

struct Golden {
    spec: Spec,
    rollouts: Arc<Dataset>,
    cases: Vec<(String, Value)>,
    longest: u64,
    gradients: HashMap<String, Vec<f32>>,
}

fn file(name: &str) -> PathBuf {
    PathBuf::from(format!("{}/tests/golden/{name}", env!("CARGO_MANIFEST_DIR")))
}

impl Golden {
    fn read() -> Golden {
        let spec = hf::read(&file("preference/policy")).unwrap();
        let values: Value = serde_json::from_slice(&std::fs::read(file("grpo/values.json")).unwrap()).unwrap();
        let rollouts = Dataset::open(&DataOptions {
            paths: vec![file("grpo/rollouts.jsonl")],
            tokenizer: Tokenizer::Bytes,
            format: Format { preferences: Some(Preferences::Rollouts), ..Format::default() },
            vocab: spec.vocab,
            max_len: 16,
            max_samples: None,
            seed: 0,
            cache: Cache { dir: None, limit: 0, scratch: std::env::temp_dir() },
            cargo_home: None,
        });
        Golden {
            rollouts: Arc::new(rollouts.unwrap()),
            cases: values["cases"].as_object().unwrap().iter().map(|(k, v)| (k.clone(), v.clone())).collect(),
            longest: values["longest"].as_u64().unwrap(),
            gradients: Tensors::read(&file("grpo/gradients.safetensors")).floats,
            spec,
        }
    }
    fn case(&self, name: &str) -> &Value {
        &self.cases.iter().find(|case| case.0 == name).unwrap().1
    }
    fn options(&self, name: &str, strategy: Arc<dyn Strategy>) -> EngineOptions {
        let number = |key: &str| self.case(name)[key].as_f64().unwrap();
        let loss = match self.case(name)["loss_type"].as_str().unwrap() {
            "grpo" => GrpoLoss::Grpo,
            "dapo" => GrpoLoss::Dapo,
            _ => GrpoLoss::DrGrpo { longest: self.longest },
        };
        let beta = number("beta");
        let temperature = self.case(name)["temperature"].as_f64().unwrap_or(1.0) as f32;
        let grpo = Grpo { loss, beta, clip_low: number("clip_low"), clip_high: number("clip_high"), temperature };
        let frozen = ReferenceModel::Frozen(self.spec.clone().into());
        EngineOptions {
            objective: Objective::Grpo(grpo),
            reference: if beta > 0.0 { frozen } else { ReferenceModel::Base },
            grad_clip: 0.0,
            tokens: 200,
            ..options(&self.spec, strategy, SGD)
        }
    }
    /// The micro-batches of data-parallel rank `rank` of `of`, each of `size` groups; and what all ranks have.
    fn batches(&self, rank: usize, of: usize, size: usize) -> (Vec<MicroBatch>, StepCounts) {
        let options = LoaderOptions {
            batch_size: size,
            grad_accum: GROUPS / of / size,
            dp_rank: rank,
            dp_size: of,
            shuffle: false,
            seed: 0,
            packing: false,
            by_length: false,
            passes: 1,
            held_out: None,
        };
        let mut step = StepData::default();
        Loader::new(self.rollouts.clone(), options).unwrap().next(&mut step);
        let tokens = self.cases[0].1["completion_tokens"].as_u64().unwrap();
        (step.batches, StepCounts { rows: step.samples, sequences: step.sequences, tokens })
    }
}

fn step(options: &EngineOptions, counts: &StepCounts, number: u64) -> Step {
    Step { number, lr: LR, tokens: options.objective.divisor(counts) }
}

/// An engine with PyTorch's policy and reference.
fn engine(rank: &Rank, options: &EngineOptions) -> Result<Engine> {
    let (dev, mesh) = (&rank.device, &rank.mesh);
    let mut engine = Engine::new(dev.clone(), mesh, options)?;
    let layouts = engine.decoder().layouts().to_vec();
    let mut policy = Checkpointer::new(dev.clone(), mesh, &options.spec, &layouts, Moments::NONE)?;
    policy.load_model(&file("preference/policy"), engine.state().0)?;
    if let Some((decoder, store)) = engine.reference() {
        let mut frozen = Checkpointer::new(dev.clone(), mesh, decoder.spec(), decoder.layouts(), Moments::NONE)?;
        frozen.load_model(&file("preference/reference"), store)?;
    }
    Ok(engine)
}

fn near(report: &StepReport, case: &Value, tolerance: f64, what: &str) {
    let means = report.rollouts.unwrap();
    assert_eq!(means.kl.is_some(), case["beta"].as_f64().unwrap() > 0.0, "{what}");
    assert_eq!(means.completion_tokens, case["completion_tokens"].as_u64().unwrap(), "{what}");
    for (name, ours) in [
        ("loss", report.loss),
        ("reward_mean", means.reward_mean),
        ("reward_std", means.reward_std),
        ("clip_fraction", means.clip_fraction),
        ("logprob_mismatch", means.logprob_mismatch),
    ]
    .into_iter()
    .chain(means.kl.map(|kl| ("kl", kl)))
    .chain(means.entropy.map(|entropy| ("entropy", entropy)))
    {
        let theirs = case[name].as_f64().unwrap();
        assert!((ours - theirs).abs() <= tolerance * theirs.abs().max(0.1), "{what}: {name} {ours}, PyTorch {theirs}");
    }
}

fn norm(x: impl Iterator<Item = f64>) -> f64 {
    x.map(|x| x * x).sum::<f64>().sqrt()
}

/// On every mesh of up to four ranks, in each store in turn, with groups packed together and one by one, with
/// recomputation and without, with sequence parallelism and without, on rings and with Ulysses.
#[test]
fn losses_metrics_and_gradients_agree_with_trl() {
    let (golden, mut turn) = (Golden::read(), 0);
    for (name, case) in &golden.cases {
        let mut worst = 0f64;
        let meshes =
            [1, 2, 4].into_iter().flat_map(factorizations).filter(|m| m.tp < 4 && m.dp_replicate * m.dp_shard < 4);
        for sizes in meshes {
            // With tp, a rank has one head, which cannot be shared.
            let ulysses = if sizes.tp == 1 { SpImpl::Ulysses } else { SpImpl::Ring };
            for (size, checkpoint, sp_impl) in
                [(3, Checkpointing::Off, ulysses), (1, Checkpointing::Full, SpImpl::Ring)]
            {
                let dp = sizes.dp_replicate * sizes.dp_shard;
                let accum = GROUPS / dp / size;
                let mut stores =
                    [at_once(DType::F32, accum), by_batch(DType::F32, accum), vec![ddp(DType::F32)]].concat();
                turn += 1;
                let options = EngineOptions {
                    checkpoint,
                    sp_impl,
                    sequence_parallel: checkpoint != Checkpointing::Off,
                    ..golden.options(name, stores.swap_remove(turn % stores.len()))
                };
                let results = mesh_ranks(sizes, |rank| {
                    let mut engine = engine(&rank, &options)?;
                    let (batches, counts) = golden.batches(rank.mesh.group(Axis::Dp).rank(), dp, size);
                    let report = engine.train_step(&batches, &step(&options, &counts, 1))?;
                    Ok((report, gradients(&mut engine)?))
                });
                let store = options.strategy.name();
                let what = format!("{name} in {store} on {sizes:?}, {size} groups a micro-batch");
                let (reports, fragments): (Vec<_>, Vec<_>) = results.into_iter().unzip();
                reports.iter().for_each(|report| near(report, case, 1e-5, &what));
                assert_eq!(reports[0].rollouts.unwrap().entropy.is_some(), sizes.tp == 1, "{what}");
                for (tensor, ours) in whole(&options.spec, &fragments) {
                    let theirs = &golden.gradients[&format!("{name}.{tensor}")];
                    let off = norm(ours.iter().zip(theirs).map(|(a, b)| (a - b) as f64));
                    let error = off / norm(theirs.iter().map(|&x| x as f64));
                    assert!(error < 1e-5, "{what}: gradient of {tensor}: {error:.1e}");
                    worst = worst.max(error);
                }
            }
        }
        println!("{name}: worst gradient {worst:.1e}");
    }
}

/// Three steps on the same rollouts in each store: the weights, bit for bit.
#[test]
fn every_store_has_the_same_bits() {
    let golden = &Golden::read();
    for dtype in [DType::F32, DType::Bf16] {
        let outcome = |strategy: Arc<dyn Strategy>, accum: usize| {
            let options = golden.options("grpo_kl", strategy);
            let results = ranks(3, |rank| {
                let (mut engine, (batches, counts)) =
                    (engine(&rank, &options)?, golden.batches(rank.rank, 3, 2 / accum));
                let reports = (1..=3).map(|number| engine.train_step(&batches, &step(&options, &counts, number)));
                let reports = reports.collect::<Result<Vec<_>>>()?;
                Ok((reports, fragments(&mut engine)?))
            });
            gathered(&options.spec, results)
        };
        assert_stores_agree("grpo_kl", dtype, &outcome);
    }
}

#[test]
fn buffers_are_planned_and_a_step_allocates_nothing() {
    let golden = Golden::read();
    for sizes in PAIRS_OF_RANKS {
        for (strategy, name) in kinds(DType::F32).into_iter().zip(["dapo", "grpo_kl"].iter().cycle()) {
            let options = golden.options(name, strategy);
            mesh_ranks(sizes, |rank| {
                let mut engine = engine(&rank, &options)?;
                let (batches, counts) =
                    golden.batches(rank.mesh.group(Axis::Dp).rank(), rank.mesh.group(Axis::Dp).size(), 3);
                holds_what_is_planned(&rank, &options, &mut engine, &batches, step(&options, &counts, 1))
            });
        }
    }
}

/// With adapters the reference is the model without them: at first nothing diverges, and later the result is that of a
/// frozen copy of the base. Sparse models train the same on every mesh.
#[test]
fn adapters_and_experts_learn_from_rollouts() {
    let golden = Golden::read();
    let lora = Lora { rank: 2, alpha: 4.0, dropout: 0.0, targets: vec!["all-linear".into()] };
    let tuning = Tuning { lora: Some(lora), ..Tuning::default() };
    let run = |spec: &Spec, tuning: &Tuning, reference: ReferenceModel, sizes: MeshSizes, size: usize| {
        let lr = if spec.experts.is_some() { 0.02 } else { 2.0 };
        let dp = sizes.dp_replicate * sizes.dp_shard;
        let strategy = fsdp(ShardedOptions { grad_accum: GROUPS / dp / size, ..sharded() });
        let all = golden.options("grpo_kl", strategy);
        let options = EngineOptions { spec: spec.clone(), tuning: tuning.clone(), reference, ..all };
        let reports = mesh_ranks(sizes, |rank| {
            let mut engine = Engine::new(rank.device.clone(), &rank.mesh, &options)?;
            if let Some((_, store)) = engine.reference() {
                initialize(store, options.seed, &*rank.device)?;
            }
            let (batches, counts) = golden.batches(rank.mesh.group(Axis::Dp).rank(), dp, size);
            let step = |number| engine.train_step(&batches, &Step { lr, ..step(&options, &counts, number) });
            (1..=3).map(step).collect::<Result<Vec<_>>>()
        });
        reports[0].iter().map(|report| (report.loss, report.rollouts.unwrap().kl.unwrap())).collect::<Vec<_>>()
    };
    let same = |a: &[(f64, f64)], b: &[(f64, f64)], what: &str| {
        let apart = a.iter().zip(b).map(|(a, b)| (a.0 - b.0).abs().max((a.1 - b.1).abs())).fold(0.0, f64::max);
        assert!(apart < 1e-5, "{what}: {a:?} and {b:?}");
    };
    let mesh = |dp_shard, sp, tp, ep| MeshSizes { dp_replicate: 1, dp_shard, sp, tp, ep };
    let dense = &golden.spec;
    let base = run(dense, &tuning, ReferenceModel::Base, mesh(2, 1, 1, 1), 3);
    assert!(base[0].1.abs() < 1e-12 && base[2].1 > 1e-6, "{base:?}");
    let frozen = ReferenceModel::Frozen(dense.clone().into());
    same(&base, &run(dense, &tuning, frozen, mesh(2, 1, 1, 1), 3), "a frozen copy");
    same(&base, &run(dense, &tuning, ReferenceModel::Base, mesh(1, 1, 1, 1), 1), "one by one");

    let sparse = Spec { kv_heads: 6, ..sparse() };
    let frozen = || ReferenceModel::Frozen(sparse.clone().into());
    let one = run(&sparse, &Tuning::default(), frozen(), mesh(1, 1, 1, 1), 3);
    assert!(one[2].1 > 1e-6, "{one:?}");
    for sizes in [mesh(2, 1, 1, 1), mesh(1, 2, 1, 1), mesh(1, 1, 2, 1), mesh(2, 1, 1, 2)] {
        same(&one, &run(&sparse, &Tuning::default(), frozen(), sizes, 3), &format!("{sizes:?}"));
    }
}
