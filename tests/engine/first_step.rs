//! Before anything is learned, policy and reference are one function, bit for bit: the first loss is ln 2 and rewards
//! are 0, in every precision, wherever adapters are, however weights are stored, and whether the reference is the
//! policy's base, a frozen copy, or was computed before. tests/device/cuda_training.rs has the GPU's.
use crate::common::stores::kinds;
use crate::common::*;
use crate::preference::documents;
use flatshard::base::rng::Rng;
use flatshard::base::{DType, Result};
use flatshard::comm::{Axis, MeshSizes};
use flatshard::data::MicroBatch;
use flatshard::engine::{
    Dpo, Engine, EngineOptions, Kto, Objective, ReferenceModel, ReferenceScorer, Step, StepReport, Strategy,
};
use flatshard::nn::{Arch, Checkpointing, Experts, Lora, Spec, Tuning};
use flatshard::store::{ShardedOptions, initialize};
use std::sync::Arc;

const DPO: Objective = Objective::Dpo(Dpo { beta: 0.1, label_smoothing: 0.0, ipo: false, nll_coef: 0.0 });
const KTO: Objective = Objective::Kto(Kto { beta: 0.1, desirable_weight: 1.0, undesirable_weight: 1.0 });
/// Answers per micro-batch.
const ANSWERS: usize = 4;

fn adapting(targets: &[&str]) -> Tuning {
    let targets = targets.iter().map(|target| target.to_string()).collect();
    Tuning { lora: Some(Lora { rank: 2, alpha: 4.0, dropout: 0.0, targets }), ..Tuning::default() }
}
fn in_dtype(dtype: DType) -> Arc<dyn Strategy> {
    fsdp(ShardedOptions { dtype, ..sharded() })
}

/// Answers of different lengths; `salt` distinguishes micro-batches.
fn answers(spec: &Spec, salt: u64) -> MicroBatch {
    let rng = Rng::new(11, salt);
    let ids = |from: u64, n: u64| (from..from + n).map(|i| (rng.u64(i) % spec.vocab as u64) as u32).collect();
    let rows: Vec<(Vec<u32>, Vec<u32>)> =
        (0..ANSWERS as u64).map(|i| (ids(100 * (i / 2), 3), ids(100 * i + 50, 4 + i))).collect();
    documents(rows.iter().map(|(prompt, answer)| (prompt, answer)))
}
/// A micro-batch of pairs, or of labeled answers with mismatched ones.
fn micro_batch(options: &EngineOptions, rank: usize) -> MicroBatch {
    let own = answers(&options.spec, rank as u64);
    if options.objective == DPO {
        return own;
    }
    let mismatched = Some(Box::new(answers(&options.spec, 7 + rank as u64)));
    MicroBatch { numbers: vec![1.0, 0.0, 0.0, 1.0], mismatched, ..own }
}

/// One rank's first step.
fn first(rank: &Rank, options: &EngineOptions) -> Result<StepReport> {
    let (dev, mesh) = (&rank.device, &rank.mesh);
    let mut batch = micro_batch(options, mesh.group(Axis::Dp).rank());
    if options.reference == ReferenceModel::Given {
        let mut scorer = ReferenceScorer::new(dev.clone(), mesh, options, &options.spec)?;
        initialize(scorer.model().1, options.seed, &**dev)?;
        let mut give = |batch: &mut MicroBatch| -> Result<()> {
            batch.reference = scorer.score(batch)?.to_vec();
            Ok(())
        };
        give(&mut batch)?;
        batch.mismatched.as_deref_mut().map_or(Ok(()), give)?;
    }
    let mut engine = Engine::new(dev.clone(), mesh, options)?;
    if let Some((_, store)) = engine.reference() {
        initialize(store, options.seed, &**dev)?;
    }
    let counted = if options.objective == DPO { ANSWERS / 2 } else { ANSWERS };
    engine.train_step(&[batch], &Step { number: 1, lr: 0.1, tokens: (counted * mesh.group(Axis::Dp).size()) as u64 })
}

/// ln 2 for a pair; and for a labeled answer 1 - sigmoid(0).
fn starts_at_its_reference(reports: &[StepReport], options: &EngineOptions, what: &str) {
    let expected = if options.objective == DPO { std::f32::consts::LN_2 } else { 0.5 };
    for report in reports {
        let means = report.preference.unwrap();
        assert_eq!(report.loss as f32, expected, "{what}: loss {}, {means:?}", report.loss);
        assert_eq!((means.reward_chosen, means.reward_rejected), (0.0, 0.0), "{what}");
        assert_eq!(means.kl.unwrap_or(0.0), 0.0, "{what}");
        assert!(report.grad_norm > 0.0, "{what}: nothing to learn");
    }
}

/// On `sizes`, with each objective, and each reference that `options` can have.
fn each_reference(sizes: MeshSizes, options: &EngineOptions, what: &str) {
    let mut references = vec![ReferenceModel::Frozen(options.spec.clone().into()), ReferenceModel::Given];
    if options.tuning.lora.is_some() {
        references.push(ReferenceModel::Base);
    }
    for (objective, reference) in [DPO, KTO].into_iter().flat_map(|o| references.iter().map(move |r| (o, r.clone()))) {
        let name = match &reference {
            ReferenceModel::Base => "base",
            ReferenceModel::Frozen(_) => "a frozen copy",
            ReferenceModel::Given => "numbers",
        };
        let options = EngineOptions { objective, reference, ..options.clone() };
        let reports = mesh_ranks(sizes, |rank| first(&rank, &options));
        starts_at_its_reference(&reports, &options, &format!("{what} on {sizes:?}, {objective:?} with {name}"));
    }
}

const ALONE: MeshSizes = MeshSizes { dp_replicate: 1, dp_shard: 1, sp: 1, tp: 1, ep: 1 };

#[test]
fn in_every_precision_for_every_target() {
    let targets = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "all-linear"];
    for dtype in [DType::F32, DType::Bf16, DType::F16] {
        for target in targets {
            let options = EngineOptions { tuning: adapting(&[target]), ..options(&llama(), in_dtype(dtype), ADAMW) };
            each_reference(ALONE, &options, &format!("{target} in {dtype}"));
        }
        each_reference(ALONE, &options(&llama(), in_dtype(dtype), ADAMW), &format!("all weights in {dtype}"));
    }
}

/// Biases, norms behind branches, GELU, experts and their shared one.
#[test]
fn in_every_kind_of_block() {
    let biased = Spec { out_bias: true, mlp_bias: true, qkv_bias: true, ..llama() };
    let unshared = Experts { shared_ff: 0, dense: Vec::new(), ..sparse().experts.unwrap() };
    let mixtral = Spec { arch: Arch::Mixtral, qkv_bias: false, layers: 2, experts: Some(unshared), ..sparse() };
    for (name, spec) in
        [("biases", biased), ("gemma3", gemma3()), ("qwen3", qwen3()), ("experts", sparse()), ("mixtral", mixtral)]
    {
        let tuning = adapting(&["all-linear"]);
        let options = EngineOptions { tuning, ..options(&spec, in_dtype(DType::Bf16), ADAMW) };
        each_reference(ALONE, &options, name);
    }
    let gelu = Spec { dropout: 0.0, ..gpt() };
    each_reference(ALONE, &options(&gelu, in_dtype(DType::Bf16), ADAMW), "all weights of gpt");
}

/// Matrices in 4 bits under adapters, and products in FP8 with adapters and without, of which a reference of the same
/// shape has copies as the policy has them.
#[test]
fn with_4_bits_and_with_fp8() {
    let packed = Spec { dim: 64, heads: 4, kv_heads: 2, head_dim: 16, ff: 96, layers: 3, ..llama() };
    for target in ["o_proj", "all-linear"] {
        let tuning = Tuning { load_in_4bit: true, ..adapting(&[target]) };
        let options = EngineOptions { tuning, ..options(&packed, in_dtype(DType::Bf16), ADAMW) };
        each_reference(ALONE, &options, &format!("4 bits, {target}"));
        each_reference(MeshSizes::sharded(2), &options, &format!("4 bits, {target}"));
    }
    for tuning in [adapting(&["down_proj"]), Tuning::default()] {
        let tuning = Tuning { fp8: Some(Vec::new()), ..tuning };
        let options = EngineOptions { tuning, ..options(&llama(), in_dtype(DType::Bf16), ADAMW) };
        each_reference(ALONE, &options, "fp8");
        each_reference(MeshSizes::sharded(2), &options, "fp8");
    }
}

/// In each store, with recomputation, on ranks that share sequences, matrices or experts; and the dropout of adapters'
/// inputs changes nothing while they are 0.
#[test]
fn on_every_mesh_and_in_every_store() {
    let tuning = adapting(&["o_proj", "down_proj"]);
    for (i, strategy) in kinds(DType::Bf16).into_iter().enumerate() {
        let checkpoint = [Checkpointing::Off, Checkpointing::Full, Checkpointing::Selective][i % 3];
        let lora = tuning.lora.clone().map(|lora| Lora { dropout: [0.0, 0.3][i % 2], ..lora });
        let tuning = Tuning { lora, ..tuning.clone() };
        let name = strategy.name();
        let options = EngineOptions { tuning, checkpoint, ..options(&llama(), strategy, ADAMW) };
        each_reference(MeshSizes::sharded(2), &options, name);
    }
    let options = EngineOptions { tuning, ..options(&llama(), in_dtype(DType::Bf16), ADAMW) };
    for (sp, tp, sequence_parallel) in [(2, 1, false), (1, 3, false), (1, 3, true)] {
        let options = EngineOptions { sequence_parallel, ..options.clone() };
        each_reference(MeshSizes { sp, tp, ..ALONE }, &options, "split");
    }
    let experts = EngineOptions { spec: sparse(), tuning: adapting(&["all-linear"]), ..options };
    each_reference(MeshSizes { dp_shard: 2, ep: 2, ..ALONE }, &experts, "experts apart");
}
