//! Every mesh of four and eight ranks compared with one rank on the same samples: equal loss curves, gradient norms and
//! weights; and checkpoints written by any mesh and resumed on any other.

use crate::common;
use crate::common::known_state::state;
use crate::common::stores::*;
use crate::common::*;
use flatshard::base::rng::Rng;
use flatshard::base::{DType, Result};
use flatshard::ckpt::Checkpointer;
use flatshard::comm::{Axis, MeshSizes};
use flatshard::data::MicroBatch;
use flatshard::device::IGNORE;
use flatshard::engine::{Engine, EngineOptions, StepReport, Strategy};
use flatshard::nn::{Checkpointing, Decoder, SpImpl, Spec};
use flatshard::optim::Rule;
use flatshard::store::ShardedOptions;
use std::path::Path;
use std::sync::Arc;

/// Tokens per sample: two chunks for each of eight ranks of sp.
pub const LEN: usize = 16;
/// Samples per step: two micro-batches of one for each of eight ranks of dp.
const SAMPLES: usize = 16;
pub const ACCUM: usize = 2;

/// Common to all shapes: heads divide by eight; vocabulary and columns divide by nothing. Qwen3 has two key/value
/// heads, which more ranks of tp share.
fn eighths(spec: Spec) -> Spec {
    Spec { vocab: 67, dim: 24, heads: 16, kv_heads: 8, head_dim: 4, ff: 41, max_len: LEN, ..spec }
}
pub fn shapes() -> [Spec; 4] {
    let gemma3 = Spec { windowed: vec![true, false], layers: 2, ..gemma3() };
    let [llama, qwen3, gemma3] = [Spec { layers: 3, ..llama() }, Spec { layers: 2, ..qwen3() }, gemma3].map(eighths);
    let sparse = eighths(Spec { layers: 2, ..sparse() });
    [llama, Spec { kv_heads: 2, ..qwen3 }, gemma3, sparse]
}

/// Every kind of store; the last shards nothing. Two of them reduce each micro-batch separately.
pub fn stores() -> Vec<Arc<dyn Strategy>> {
    [at_once(DType::F32, ACCUM), by_batch(DType::F32, ACCUM), vec![ddp(DType::F32)]].concat()
}

pub fn options(spec: &Spec, strategy: &Arc<dyn Strategy>, rule: Rule) -> EngineOptions {
    let tokens = SAMPLES / ACCUM * LEN;
    EngineOptions {
        grad_clip: 0.3,
        aux_coef: if spec.experts.is_some() { 3.0 } else { 0.0 },
        tokens,
        checkpoint: Checkpointing::Full,
        ..common::options(spec, strategy.clone(), rule)
    }
}

/// The step's sample `n`; some have no loss at the end, so that ranks divide by different numbers of tokens.
fn sample(spec: &Spec, step: u64, n: usize) -> (Vec<u32>, Vec<i32>) {
    let rng = Rng::new(5, step << 32 | n as u64);
    let tokens: Vec<u32> = (0..LEN as u64).map(|i| (rng.u64(i) % spec.vocab as u64) as u32).collect();
    let with_loss = LEN - 1 - n % 6;
    let target = |i: usize| if i < with_loss { tokens[i + 1] as i32 } else { IGNORE };
    (tokens.clone(), (0..LEN).map(target).collect())
}

/// Micro-batch `micro` of a rank of dp, as assigned by the loader.
fn micro_batch(spec: &Spec, step: u64, micro: usize, (rank, dp): (usize, usize)) -> MicroBatch {
    let rows = SAMPLES / ACCUM / dp;
    let first = (micro * dp + rank) * rows;
    let (tokens, targets): (Vec<_>, Vec<_>) = (first..first + rows).map(|n| sample(spec, step, n)).unzip();
    MicroBatch {
        tokens: tokens.concat(),
        targets: targets.concat(),
        positions: (0..(rows * LEN) as u32).map(|i| i % LEN as u32).collect(),
        cu_seqlens: (0..=rows as u32).map(|row| row * LEN as u32).collect(),
        ..MicroBatch::default()
    }
}

/// Steps `from + 1..=to`, resumed from the checkpoint of step `from` in a directory, or from the start; the last step
/// is saved if a directory is given.
#[derive(Clone, Copy)]
pub struct Part<'a> {
    pub from: Option<(&'a Path, u64)>,
    pub to: u64,
    pub save: Option<&'a Path>,
}

pub fn run(sizes: MeshSizes, options: &EngineOptions, part: Part) -> Outcome {
    let spec = &options.spec;
    let results = mesh_ranks(sizes, |rank| {
        let mut engine = Engine::new(rank.device.clone(), &rank.mesh, options)?;
        for (category, bytes) in options.bytes(&sizes, rank.mesh.rank())? {
            assert_eq!(rank.meter.live(category), bytes, "{category:?} on {sizes:?}, {}", options.strategy.name());
        }
        let layouts = engine.decoder().layouts().to_vec();
        let mut ckpt = Checkpointer::new(rank.device, &rank.mesh, spec, &layouts, options.rule.state())?;
        let mut done = 0;
        if let Some((dir, step)) = part.from {
            let (store, optimizer) = engine.state();
            done = ckpt.load(&dir.join(format!("step-{step:08}")), store, optimizer)?.step;
        }
        let place = (rank.mesh.group(Axis::Dp).rank(), rank.mesh.group(Axis::Dp).size());
        let steps = done + 1..=part.to;
        let reports = steps.map(|number| {
            let batches: Vec<_> = (0..ACCUM).map(|micro| micro_batch(spec, number, micro, place)).collect();
            let (loss, tokens) = engine.evaluate(&batches)?;
            let report = step(&mut engine, &batches, number)?;
            assert!((loss / tokens as f64 - report.loss).abs() < 1e-6, "evaluated {loss} of {tokens}, then {report:?}");
            Ok(report)
        });
        let reports = reports.collect::<Result<Vec<StepReport>>>()?;
        if let Some(dir) = part.save {
            let (store, optimizer) = engine.state();
            ckpt.save(dir, 9, store, optimizer, &state(part.to))?;
        }
        Ok((reports, fragments(&mut engine)?))
    });
    gathered_of(Decoder::tuned(spec.clone(), &options.tuning).unwrap().layouts(), results)
}

/// The same sums in another order: equal up to rounding.
#[track_caller]
pub fn assert_close(one: &Outcome, many: &Outcome, what: &str) {
    assert_eq!(one.steps.len(), many.steps.len(), "{what}");
    for (step, (a, b)) in one.steps.iter().zip(&many.steps).enumerate() {
        let (loss, other) = (f64::from_bits(a.0), f64::from_bits(b.0));
        assert!((loss - other).abs() < 2e-6 * loss, "{what}: loss {step} is {loss} on one rank, {other} on the mesh");
        let (norm, other) = (f32::from_bits(a.1), f32::from_bits(b.1));
        assert!((norm - other).abs() < 1e-5 * norm, "{what}: norm {step} is {norm} on one rank, {other} on the mesh");
    }
    let (weights, _) = distance(one, many);
    assert!(weights < 2e-6, "{what}: weights differ by {weights}");
}

/// Each mesh with each store in turn, and with replicas if nothing is left to shard.
fn check(world: usize, rule: Rule) {
    let mut stores = stores();
    if matches!(rule, Rule::Muon { .. }) {
        // Over uneven parts of tp, the reference store does not know what the others own.
        stores.retain(|strategy| !strategy.name().contains("reference"));
    }
    let ddp = stores.pop().unwrap();
    let mut turns = stores.iter().cycle();
    for spec in shapes() {
        let start = Part { from: None, to: 2, save: None };
        let one = run(MeshSizes::sharded(1), &options(&spec, &ddp, rule), start);
        let norms: Vec<f32> = one.steps.iter().map(|s| f32::from_bits(s.1)).collect();
        assert!(norms.iter().all(|norm| *norm > 0.3), "clipping was never active: {norms:?}");
        for (i, sizes) in factorizations(world).into_iter().enumerate() {
            let replicated = (sizes.dp_shard == 1).then_some((&ddp, SpImpl::Ring));
            let ulysses = (sizes.sp > 1).then_some(SpImpl::Ulysses);
            let in_turn = [SpImpl::Ring].into_iter().chain(ulysses).zip(turns.by_ref());
            for (strategy, sp_impl) in in_turn.map(|(sp_impl, strategy)| (strategy, sp_impl)).chain(replicated) {
                let sequence_parallel = sizes.tp > 1 && i % 2 == 0;
                let how = format!("{sp_impl:?}, {sequence_parallel}");
                let what = format!("{:?}, {} on {sizes:?}, {how}", spec.arch, strategy.name());
                let options = EngineOptions { sequence_parallel, sp_impl, ..options(&spec, strategy, rule) };
                assert_close(&one, &run(sizes, &options, start), &what);
            }
        }
    }
}

#[test]
fn every_mesh_of_four_equals_one_rank() {
    check(4, SGD);
}

#[test]
fn every_mesh_of_four_equals_one_rank_with_muon() {
    check(4, MUON);
}

#[test]
fn every_mesh_of_eight_equals_one_rank() {
    check(8, SGD);
}

#[test]
fn one_shard_with_many_replicas_is_bitwise_equal_to_ddp() {
    // A sum over replicas in rank order equals the sum of an all-reduce in rank order.
    let spec = &shapes()[0];
    let start = Part { from: None, to: 3, save: None };
    let replicas = MeshSizes { dp_replicate: 4, dp_shard: 1, sp: 1, tp: 1, ep: 1 };
    let expected = run(replicas, &options(spec, &ddp(DType::F32), ADAMW), start);
    for strategy in at_once(DType::F32, ACCUM) {
        for sizes in [replicas, MeshSizes::sharded(4)] {
            let what = format!("{} on {sizes:?}", strategy.name());
            assert_same_bits(&expected, &run(sizes, &options(spec, &strategy, ADAMW), start), &what);
        }
    }
}

#[test]
fn a_checkpoint_of_any_mesh_resumes_on_any_other() {
    for (spec, world) in shapes().into_iter().zip([8, 4, 4, 4]) {
        let dir = tempfile::tempdir().unwrap();
        let stores = stores();
        let options = |i: usize| options(&spec, &stores[i % stores.len()], SGD);
        let one = run(MeshSizes::sharded(1), &options(0), Part { from: None, to: 4, save: None });
        let rest = Outcome { steps: one.steps[2..].to_vec(), ..one.clone() };
        let meshes = factorizations(world);
        for (i, &sizes) in meshes.iter().enumerate() {
            let there = dir.path().join(format!("{i}"));
            run(sizes, &options(5 * i), Part { from: None, to: 2, save: Some(&there) });
            let other = meshes[(i + 1) % meshes.len()];
            let gone_on = run(other, &options(5 * i + 1), Part { from: Some((&there, 2)), to: 4, save: None });
            assert_close(&rest, &gone_on, &format!("{:?} saved on {sizes:?}, gone on on {other:?}", spec.arch));
        }
        // And one rank resumes from it.
        let alone = Part { from: Some((&dir.path().join("0"), 2)), to: 4, save: None };
        assert_close(&rest, &run(MeshSizes::sharded(1), &options(1), alone), "on one rank");
    }
}

/// Momentum of matrices that are cut over other ranks than before.
#[test]
fn muon_resumes_on_any_other_mesh() {
    let spec = &shapes()[0];
    let options = options(spec, &fsdp(ShardedOptions { grad_accum: ACCUM, ..sharded() }), MUON);
    let one = run(MeshSizes::sharded(1), &options, Part { from: None, to: 4, save: None });
    let rest = Outcome { steps: one.steps[2..].to_vec(), ..one };
    let (dir, meshes) = (tempfile::tempdir().unwrap(), factorizations(4));
    for (i, &sizes) in meshes.iter().enumerate() {
        let there = dir.path().join(format!("{i}"));
        run(sizes, &options, Part { from: None, to: 2, save: Some(&there) });
        let other = meshes[(i + 1) % meshes.len()];
        let gone_on = run(other, &options, Part { from: Some((&there, 2)), to: 4, save: None });
        assert_close(&rest, &gone_on, &format!("saved on {sizes:?}, gone on on {other:?}"));
    }
}
