//! Preference objectives from outside: loss, rewards and every gradient as PyTorch's, on any mesh and however pairs are
//! split over micro-batches; equal bits in every store; and the reference model stays what it was. The files are made
//! by `tests/golden/preference.py`.
use crate::common::golden_tensors::Tensors;
use crate::common::stores::{assert_stores_agree, at_once, by_batch, kinds};
use crate::common::*;
use flatshard::base::{Category, DType, Result};
use flatshard::ckpt::{Checkpointer, hf};
use flatshard::comm::{Axis, MeshSizes};
use flatshard::data::MicroBatch;
use flatshard::device::IGNORE;
use flatshard::engine::{
    Dpo, Engine, EngineOptions, Kto, Objective, PreferenceMeans, ReferenceModel, Rm, Step, StepReport,
};
use flatshard::nn::{Checkpointing, Lora, SpImpl, Spec, Tuning};
use flatshard::optim::Moments;
use flatshard::store::initialize;
use serde_json::Value;
use std::collections::{BTreeMap, HashMap};
use std::path::PathBuf;

const LR: f32 = 0.1;

struct Golden {
    spec: Spec,
    /// With a score head.
    reward: Spec,
    /// Prompt, chosen, rejected.
    pairs: Vec<[Vec<u32>; 3]>,
    cases: Vec<(String, Value)>,
    /// By pair; empty without margins. By answer, 1 for a desirable one.
    numbers: Vec<f32>,
    /// Of labeled answers: how many rows further the mismatched answer is.
    shift: Option<usize>,
    gradients: HashMap<String, Vec<f32>>,
}

fn file(name: &str) -> PathBuf {
    PathBuf::from(format!("{}/tests/golden/preference/{name}", env!("CARGO_MANIFEST_DIR")))
}

impl Golden {
    fn read() -> Golden {
        let values: Value = serde_json::from_slice(&std::fs::read(file("values.json")).unwrap()).unwrap();
        let ids = |ids: &Value| ids.as_array().unwrap().iter().map(|id| id.as_u64().unwrap() as u32).collect();
        let pair = |row: &Value| ["prompt", "chosen", "rejected"].map(|key| ids(&row[key]));
        Golden {
            spec: hf::read(&file("policy")).unwrap(),
            reward: hf::read(&file("reward")).unwrap(),
            pairs: values["pairs"].as_array().unwrap().iter().map(pair).collect(),
            cases: values["cases"].as_object().unwrap().iter().map(|(k, v)| (k.clone(), v.clone())).collect(),
            numbers: Vec::new(),
            shift: None,
            gradients: Tensors::read(&file("gradients.safetensors")).floats,
        }
    }
    /// The options of a case.
    fn case(&self, name: &str, strategy: std::sync::Arc<dyn flatshard::engine::Strategy>) -> (EngineOptions, &Value) {
        let case = &self.cases.iter().find(|case| case.0 == name).unwrap().1;
        let dpo = self.options(Golden::objective(case), strategy);
        let options = match name {
            "rm" | "rm_margins" | "rm_logexp" => EngineOptions {
                spec: self.reward.clone(),
                objective: Objective::Rm(Rm),
                reference: ReferenceModel::Base,
                ..dpo
            },
            _ => dpo,
        };
        (options, case)
    }
    fn objective(case: &Value) -> Objective {
        let number = |key: &str| case[key].as_f64().unwrap_or(0.0);
        if let Some(desirable_weight) = case["desirable_weight"].as_f64() {
            let undesirable_weight = number("undesirable_weight");
            return Objective::Kto(Kto { beta: number("beta"), desirable_weight, undesirable_weight });
        }
        Objective::Dpo(Dpo {
            beta: number("beta"),
            label_smoothing: number("label_smoothing"),
            ipo: case["ipo"] == true,
            nll_coef: number("nll_loss_coef"),
        })
    }
    /// Sets what comes with the rows of a case.
    fn begin(&mut self, case: &Value) {
        let list = |key: &str| case[key].as_array().cloned().unwrap_or_default();
        let label = |label: &Value| if label == true { 1.0 } else { 0.0 };
        let margins = list("margins").into_iter().map(|margin| margin.as_f64().unwrap() as f32);
        self.numbers = margins.chain(list("labels").iter().map(label)).collect();
        self.shift = case["shift"].as_u64().map(|shift| shift as usize);
    }
    /// The pairs, or chosen answers with their labels, of `range` in one micro-batch.
    fn batch(&self, range: std::ops::Range<usize>) -> MicroBatch {
        let numbers = self.numbers.get(range.clone()).unwrap_or_default().to_vec();
        let pairs = &self.pairs;
        let Some(shift) = self.shift else {
            let both =
                pairs[range].iter().flat_map(|[prompt, chosen, rejected]| [(prompt, chosen), (prompt, rejected)]);
            return MicroBatch { numbers, ..documents(both) };
        };
        let mismatched = documents(range.clone().map(|i| (&pairs[i][0], &pairs[(i + shift) % pairs.len()][1])));
        let own = documents(pairs[range].iter().map(|[prompt, chosen, _]| (prompt, chosen)));
        MicroBatch { numbers, mismatched: Some(Box::new(mismatched)), ..own }
    }
    /// The micro-batches of data-parallel rank `rank` of `of`, each of `size` pairs.
    fn batches(&self, rank: usize, of: usize, size: usize) -> Vec<MicroBatch> {
        let own = self.pairs.len() / of;
        (rank * own..(rank + 1) * own).step_by(size).map(|first| self.batch(first..first + size)).collect()
    }
    fn options(
        &self,
        objective: Objective,
        strategy: std::sync::Arc<dyn flatshard::engine::Strategy>,
    ) -> EngineOptions {
        let reference = ReferenceModel::Frozen(self.spec.clone().into());
        EngineOptions { objective, reference, grad_clip: 0.0, tokens: 200, ..options(&self.spec, strategy, SGD) }
    }
    fn step(&self) -> Step {
        Step { number: 1, lr: LR, tokens: self.pairs.len() as u64 }
    }
}

/// Prompts and answers, each a document.
pub fn documents<'a>(rows: impl Iterator<Item = (&'a Vec<u32>, &'a Vec<u32>)>) -> MicroBatch {
    let mut batch = MicroBatch { cu_seqlens: vec![0], ..MicroBatch::default() };
    for (prompt, answer) in rows {
        let targets = prompt.iter().skip(1).map(|_| IGNORE).chain(answer.iter().map(|&id| id as i32));
        batch.targets.extend(targets.chain([IGNORE]));
        batch.tokens.extend(prompt.iter().chain(answer));
        batch.positions.extend(0..(prompt.len() + answer.len()) as u32);
        batch.cu_seqlens.push(batch.tokens.len() as u32);
    }
    batch
}

/// An engine with PyTorch's policy and reference, or its reward model.
fn engine(rank: &Rank, options: &EngineOptions) -> Result<Engine> {
    let (dev, mesh) = (&rank.device, &rank.mesh);
    let mut engine = Engine::new(dev.clone(), mesh, options)?;
    let layouts = engine.decoder().layouts().to_vec();
    let mut policy = Checkpointer::new(dev.clone(), mesh, &options.spec, &layouts, Moments::NONE)?;
    policy.load_model(&file(if options.spec.score { "reward" } else { "policy" }), engine.state().0)?;
    if let Some((decoder, store)) = engine.reference() {
        let mut frozen = Checkpointer::new(dev.clone(), mesh, decoder.spec(), decoder.layouts(), Moments::NONE)?;
        frozen.load_model(&file("reference"), store)?;
    }
    Ok(engine)
}

/// The parts of the reduced gradient that a rank owns.
pub fn gradients(engine: &mut Engine) -> Result<Fragments> {
    let (dev, mut fragments) = (engine.device().clone(), Vec::new());
    engine.state().0.for_each_shard(&mut |shard| {
        let Some(grad) = &shard.grad else { return Ok(()) };
        let mut values = vec![0f32; grad.len()];
        dev.download(grad.as_view(), bytemuck::cast_slice_mut(&mut values))?;
        for segment in &shard.layout.segments {
            let Some(owned) = shard.owned(segment.range()) else { continue };
            let first = shard.start + owned.start - segment.start;
            for (part, place) in segment.stretches(first..first + owned.len()) {
                let at = owned.start + part.start - first;
                fragments.push((segment.name.clone(), place, values[at..at + part.len()].to_vec()));
            }
        }
        Ok(())
    })?;
    Ok(fragments)
}

/// Relative error, in norm, of each gradient of `case`; and the report.
fn errors(
    golden: &Golden,
    spec: &Spec,
    case: &str,
    results: Vec<(StepReport, Fragments)>,
) -> (StepReport, BTreeMap<String, f64>) {
    let (reports, fragments): (Vec<_>, Vec<_>) = results.into_iter().unzip();
    let errors = whole(spec, &fragments).into_iter().map(|(name, ours)| {
        let theirs = &golden.gradients[&format!("{case}.{name}")];
        let norm = |x: &mut dyn Iterator<Item = f64>| x.map(|x| x * x).sum::<f64>().sqrt();
        let off = norm(&mut ours.iter().zip(theirs).map(|(a, b)| (a - b) as f64));
        (name, off / norm(&mut theirs.iter().map(|&x| x as f64)))
    });
    (reports[0], errors.collect())
}

fn near(report: &StepReport, case: &Value, tolerance: f64, what: &str) {
    let PreferenceMeans { reward_chosen, reward_rejected, reward_accuracy, kl } = report.preference.unwrap();
    let all = [("reward_accuracy", reward_accuracy), ("kl", kl)].map(|(name, value)| value.map(|value| (name, value)));
    let rewards = [("reward_chosen", reward_chosen), ("reward_rejected", reward_rejected)];
    for (name, ours) in [("loss", report.loss)].into_iter().chain(rewards).chain(all.into_iter().flatten()) {
        let theirs = case[name].as_f64().unwrap();
        assert!((ours - theirs).abs() <= tolerance * theirs.abs().max(0.1), "{what}: {name} {ours}, PyTorch {theirs}");
    }
}

/// On every mesh of up to four ranks, in each store in turn, with pairs packed together and one by one, with
/// recomputation and without, with sequence parallelism and without, on rings and with Ulysses.
#[test]
fn losses_rewards_and_gradients_agree_with_pytorch() {
    let (mut golden, mut turn) = (Golden::read(), 0);
    for (name, case) in &golden.cases.clone() {
        golden.begin(case);
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
                let accum = golden.pairs.len() / dp / size;
                let f32 = DType::F32;
                let mut stores = [at_once(f32, accum), by_batch(f32, accum), vec![ddp(f32)]].concat();
                turn += 1;
                let (options, case) = golden.case(name, stores.swap_remove(turn % stores.len()));
                let options = EngineOptions {
                    checkpoint,
                    sp_impl,
                    sequence_parallel: checkpoint != Checkpointing::Off,
                    ..options
                };
                let results = mesh_ranks(sizes, |rank| {
                    let mut engine = engine(&rank, &options)?;
                    let report = engine
                        .train_step(&golden.batches(rank.mesh.group(Axis::Dp).rank(), dp, size), &golden.step())?;
                    Ok((report, gradients(&mut engine)?))
                });
                let (report, errors) = errors(&golden, &options.spec, name, results);
                let store = options.strategy.name();
                let what = format!("{name} in {store} on {sizes:?}, {size} pairs a micro-batch");
                near(&report, case, 1e-5, &what);
                for (tensor, error) in errors {
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
    let mut golden = Golden::read();
    for (name, dtype, tolerance) in [
        ("sigmoid", DType::Bf16, 0.05),
        ("sigmoid", DType::F16, 0.01),
        ("smooth", DType::Bf16, 0.05),
        ("smooth", DType::F16, 0.01),
        ("ipo", DType::Bf16, 0.05),
        ("ipo", DType::F16, 0.01),
        ("rm", DType::Bf16, 0.05),
        ("rm", DType::F16, 0.01),
        ("kto", DType::Bf16, 0.05),
        ("kto", DType::F16, 0.01),
    ] {
        let strategy = fsdp(flatshard::store::ShardedOptions { dtype, ..sharded() });
        let case = golden.case(name, strategy.clone()).1.clone();
        golden.begin(&case);
        let (options, case) = golden.case(name, strategy);
        let results = ranks(2, |rank| {
            let mut engine = engine(&rank, &options)?;
            let report = engine.train_step(&golden.batches(rank.rank, 2, 3), &golden.step())?;
            Ok((report, gradients(&mut engine)?))
        });
        let (report, errors) = errors(&golden, &options.spec, name, results);
        near(&report, case, tolerance, name);
        let worst = errors.values().copied().fold(0.0, f64::max);
        assert!((1e-5..2.0 * tolerance).contains(&worst), "{name} {dtype}: {worst:.1e}");
    }
}

/// Three steps in each store: the weights, bit for bit.
#[test]
fn every_store_has_the_same_bits() {
    let mut golden = Golden::read();
    let both = |name: &'static str| [(name, DType::F32), (name, DType::Bf16)];
    for (name, dtype) in [both("sigmoid"), both("rm"), both("kto")].concat() {
        let case = golden.case(name, ddp(dtype)).1.clone();
        golden.begin(&case);
        let golden = &golden;
        let outcome = |strategy: std::sync::Arc<dyn flatshard::engine::Strategy>, accum: usize| {
            let options = golden.case(name, strategy).0;
            let results = ranks(3, |rank| {
                let (mut engine, mut reports) = (engine(&rank, &options)?, Vec::new());
                let batches = golden.batches(rank.rank, 3, 2 / accum);
                for number in 1..=3 {
                    reports.push(engine.train_step(&batches, &Step { number, ..golden.step() })?);
                }
                Ok((reports, fragments(&mut engine)?))
            });
            gathered(&options.spec, results)
        };
        assert_stores_agree(name, dtype, &outcome);
    }
}

/// Evaluation reports the loss and the rewards of the training step before its update; rows that pad the last batch do
/// not count.
#[test]
fn evaluation_counts_real_answers() {
    let mut golden = Golden::read();
    for name in ["sigmoid", "kto_weights"] {
        let case = golden.case(name, fsdp(sharded())).1.clone();
        golden.begin(&case);
        let (options, case) = golden.case(name, fsdp(sharded()));
        let results = ranks(2, |rank| {
            let mut engine = engine(&rank, &options)?;
            let mut batches = golden.batches(rank.rank, 2, 3);
            let mut padding = golden.batch(0..2);
            padding.targets.fill(IGNORE);
            padding.mismatched.iter_mut().for_each(|batch| batch.targets.fill(IGNORE));
            batches.push(padding);
            // The second time nothing is left of the first; one micro-batch after another is like all at once.
            engine.evaluate_preferences(&batches)?;
            engine.end_evaluation()?;
            batches.chunks(1).try_for_each(|batch| engine.evaluate_preferences(batch))?;
            engine.end_evaluation()
        });
        for sums in results {
            let count = if name == "sigmoid" { sums.chosen_count } else { sums.chosen_count + sums.rejected_count };
            assert_eq!(count, golden.pairs.len() as f64);
            let report = StepReport {
                loss: sums.loss / count,
                experts: None,
                preference: Some(sums.means()),
                rollouts: None,
                student: None,
                grad_norm: 0.0,
                skipped: false,
                loss_scale: None,
                stuck: false,
            };
            near(&report, case, 1e-5, name);
        }
    }
}

/// With adapters the reference is the model without them: at first both are the same function, and later the result is
/// that of a frozen copy of the base.
#[test]
fn the_base_of_adapters_is_the_reference() {
    let golden = Golden::read();
    let lora = Lora { rank: 2, alpha: 4.0, dropout: 0.0, targets: vec!["all-linear".into()] };
    let tuning = Tuning { lora: Some(lora), ..Tuning::default() };
    let run = |reference: ReferenceModel, accum: usize| {
        let sharding = flatshard::store::ShardedOptions { grad_accum: accum, ..sharded() };
        let all = golden.case("sigmoid", fsdp(sharding)).0;
        let options = EngineOptions { tuning: tuning.clone(), reference, ..all };
        let reports = ranks(2, |rank| {
            let mut engine = Engine::new(rank.device.clone(), &rank.mesh, &options)?;
            if let Some((_, store)) = engine.reference() {
                initialize(store, options.seed, &*rank.device)?;
            }
            let batches = golden.batches(rank.rank, 2, 3 / accum);
            let step = |number| engine.train_step(&batches, &Step { number, lr: 5.0, ..golden.step() });
            (1..=4).map(step).collect::<Result<Vec<_>>>()
        });
        reports[0].clone()
    };
    let (base, frozen) = (run(ReferenceModel::Base, 1), run(ReferenceModel::Frozen(golden.spec.clone().into()), 1));
    assert!((base[0].loss - 2f64.ln()).abs() < 1e-9, "{}", base[0].loss);
    assert!(base[3].loss < base[0].loss - 1e-3, "{base:?}");
    for (a, b) in base.iter().zip(&frozen) {
        assert!((a.loss - b.loss).abs() < 1e-6, "{} and {}", a.loss, b.loss);
        let [a, b] = [a, b].map(|report| report.preference.unwrap());
        assert!((a.reward_chosen - b.reward_chosen).abs() < 1e-5, "{a:?} and {b:?}");
    }
    for (a, b) in base.iter().zip(run(ReferenceModel::Base, 3)) {
        assert!((a.loss - b.loss).abs() < 1e-6, "{} and {}", a.loss, b.loss);
    }
}

/// Adapters of a reward model train its head too: one step on any mesh, of which the head's gradient is PyTorch's,
/// since new adapters are 0.
#[test]
fn adapters_of_a_reward_model_train_its_head() {
    let mut golden = Golden::read();
    let case = golden.case("rm_margins", fsdp(sharded())).1.clone();
    golden.begin(&case);
    let lora = Lora { rank: 2, alpha: 4.0, dropout: 0.0, targets: vec!["all-linear".into()] };
    let tuning = Tuning { lora: Some(lora), ..Tuning::default() };
    let mut alone: Option<HashMap<String, Vec<f32>>> = None;
    for sizes in [1, 2, 4].into_iter().flat_map(factorizations).filter(|m| m.tp < 4 && m.dp_replicate * m.dp_shard < 4)
    {
        let options = golden.case("rm_margins", fsdp(sharded())).0;
        let options = EngineOptions { tuning: tuning.clone(), sequence_parallel: sizes.tp > 1, ..options };
        let dp = sizes.dp_replicate * sizes.dp_shard;
        let results = mesh_ranks(sizes, |rank| {
            let mut engine = engine(&rank, &options)?;
            let batches = golden.batches(rank.mesh.group(Axis::Dp).rank(), dp, golden.pairs.len() / dp);
            let report = engine.train_step(&batches, &golden.step())?;
            Ok((report, gradients(&mut engine)?))
        });
        near(&results[0].0, &case, 1e-5, &format!("{sizes:?}"));
        let mut found: HashMap<String, Vec<f32>> = HashMap::new();
        let score = "score.weight";
        for (name, at, values) in results.into_iter().flat_map(|(_, fragments)| fragments) {
            assert!(name == score || name.contains(".lora_"), "{name} is trained");
            let whole = found.entry(name).or_default();
            whole.resize(whole.len().max(at + values.len()), 0.0);
            whole[at..at + values.len()].copy_from_slice(&values);
        }
        let norm = |x: &[f32]| x.iter().map(|&x| (x as f64).powi(2)).sum::<f64>().sqrt();
        let near = |ours: &[f32], theirs: &[f32], what: &str| {
            let off: Vec<f32> = ours.iter().zip(theirs).map(|(a, b)| a - b).collect();
            assert!(norm(&off) < 1e-5 * norm(theirs).max(1e-3), "{sizes:?}: {what}");
        };
        near(&found[score], &golden.gradients["rm_margins.score.weight"], score);
        let alone = alone.get_or_insert_with(|| found.clone());
        assert_eq!(alone.len(), found.len());
        alone.iter().for_each(|(name, theirs)| near(&found[name], theirs, name));
        assert!(alone.values().filter(|gradient| norm(gradient) > 0.0).count() > alone.len() / 3);
    }
}

/// The reference adds its shard in the compute dtype, and nothing that training needs. With adapters it is the base
/// itself, without any weights of its own.
#[test]
fn a_frozen_reference_costs_its_weights_in_the_compute_dtype() {
    let spec = llama();
    let params = |options: &EngineOptions| {
        let bytes = options.bytes(&MeshSizes::sharded(2), 0).unwrap();
        let of = |category| bytes.iter().find(|(c, _)| *c == category).map_or(0, |b| b.1);
        [Category::Params, Category::Grads, Category::Optimizer, Category::Slots].map(of)
    };
    let strategy = fsdp(flatshard::store::ShardedOptions { dtype: DType::Bf16, ..sharded() });
    let plain = options(&spec, strategy, ADAMW);
    let objective = Objective::Dpo(Dpo { beta: 0.1, label_smoothing: 0.0, ipo: false, nll_coef: 0.0 });
    let frozen = ReferenceModel::Frozen(spec.into());
    let dpo = EngineOptions { objective, reference: frozen.clone(), ..plain.clone() };
    let ([weights, grads, optimizer, _], [more, same, unchanged, _]) = (params(&plain), params(&dpo));
    assert_eq!((grads, optimizer), (same, unchanged));
    // 6 bytes per parameter are masters and copies: the reference has only the latter.
    assert_eq!(6 * (more - weights), 2 * weights);

    let lora = Lora { rank: 2, alpha: 4.0, dropout: 0.0, targets: vec!["all-linear".into()] };
    let adapted = EngineOptions { tuning: Tuning { lora: Some(lora), ..Tuning::default() }, ..plain };
    let with = |reference| params(&EngineOptions { objective, reference, ..adapted.clone() });
    assert_eq!(with(ReferenceModel::Base), params(&adapted));
    assert_eq!(with(frozen)[0], params(&adapted)[0] + more - weights, "a model of its own is found by this test");
}

/// After a step: its reference's or teacher's buffers too, and another step allocates none.
pub fn holds_what_is_planned(
    rank: &Rank,
    options: &EngineOptions,
    engine: &mut Engine,
    batches: &[MicroBatch],
    first: Step,
) -> Result<()> {
    engine.train_step(batches, &first)?;
    let buffers = rank.meter.allocations();
    engine.train_step(batches, &Step { number: 2, ..first })?;
    let (sizes, what) = (&rank.mesh.sizes, options.strategy.name());
    assert_eq!(rank.meter.allocations(), buffers, "a step allocates buffers: {what} on {sizes:?}");
    for (category, planned) in options.bytes(sizes, rank.mesh.rank())? {
        assert_eq!(rank.meter.live(category), planned, "{category:?} of {what} on {sizes:?}");
    }
    Ok(())
}

/// Two ranks that shard, share sequences, or are split by tp; and replicas.
pub const PAIRS_OF_RANKS: [MeshSizes; 4] = [
    MeshSizes { dp_replicate: 1, dp_shard: 2, sp: 1, tp: 1, ep: 1 },
    MeshSizes { dp_replicate: 1, dp_shard: 1, sp: 2, tp: 1, ep: 1 },
    MeshSizes { dp_replicate: 1, dp_shard: 1, sp: 1, tp: 2, ep: 1 },
    MeshSizes { dp_replicate: 2, dp_shard: 1, sp: 1, tp: 1, ep: 1 },
];

#[test]
fn a_frozen_reference_is_planned_and_a_step_allocates_nothing() {
    let golden = Golden::read();
    for (sizes, dtype) in PAIRS_OF_RANKS.into_iter().flat_map(|sizes| [(sizes, DType::F32), (sizes, DType::Bf16)]) {
        for strategy in kinds(dtype) {
            let options = golden.case("sigmoid", strategy).0;
            mesh_ranks(sizes, |rank| {
                let mut engine = engine(&rank, &options)?;
                let batches = golden.batches(rank.mesh.group(Axis::Dp).rank(), rank.mesh.group(Axis::Dp).size(), 3);
                holds_what_is_planned(&rank, &options, &mut engine, &batches, golden.step())
            });
        }
    }
}

/// A causal model's weights are taken over, and its head of logits is replaced by a new score.
#[test]
fn a_reward_model_starts_from_a_causal_model() {
    let golden = Golden::read();
    let options = golden.case("rm", fsdp(sharded())).0;
    let results = ranks(2, |rank| {
        let (dev, mesh) = (&rank.device, &rank.mesh);
        let mut engine = Engine::new(dev.clone(), mesh, &options)?;
        let initial = fragments(&mut engine)?;
        let layouts = engine.decoder().layouts().to_vec();
        let mut checkpointer = Checkpointer::new(dev.clone(), mesh, &options.spec, &layouts, Moments::NONE)?;
        checkpointer.load_model(&file("policy"), engine.state().0)?;
        Ok((initial, fragments(&mut engine)?))
    });
    let (initial, loaded): (Vec<_>, Vec<_>) = results.into_iter().unzip();
    let [initial, loaded] = [initial, loaded].map(|fragments| whole(&options.spec, &fragments));
    let policy = Tensors::read(&file("policy/model.safetensors")).floats;
    for (name, values) in &loaded {
        let expected = if name == "score.weight" { &initial[name] } else { &policy[name] };
        assert_eq!(values, expected, "{name}");
    }
    assert!(!loaded.contains_key("lm_head.weight") && policy.contains_key("lm_head.weight"));
}
