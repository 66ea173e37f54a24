//! One test body for all stores: training is bitwise equal (losses, norms, all weights) however parameters are stored.
//! The baseline is the replicated store, which gathers nothing and reduces once.

use crate::common::stores::*;
use crate::common::*;
use flatshard::base::DType;
use flatshard::engine::{Engine, EngineOptions, Strategy};
use flatshard::nn::{Checkpointing, Lora, Spec, Tuning};
use flatshard::optim::Rule;
use flatshard::store::{ShardedOptions, Wrap};
use std::sync::Arc;

/// Three steps with each of `stores` compared with three with `first`.
fn check(
    spec: &Spec,
    world: usize,
    rule: Rule,
    accum: usize,
    first: Arc<dyn Strategy>,
    stores: Vec<Arc<dyn Strategy>>,
) {
    let expected = outcome(world, &options(spec, first, rule), 3, accum);
    for (i, strategy) in stores.into_iter().enumerate() {
        let what = format!("{} ({i}) {:?} world {world} {rule:?} {accum} micro-batches", strategy.name(), spec.arch);
        assert_same_bits(&expected, &outcome(world, &options(spec, strategy, rule), 3, accum), &what);
    }
}

#[test]
fn every_store_is_bitwise_equal_at_every_world_size() {
    // SGD first: Adam divides by the gradient's own size, which hides a wrong scale.
    for (rule, spec) in [(SGD, llama()), (ADAMW, gpt())] {
        for world in 1..=4 {
            check(&spec, world, rule, 1, ddp(DType::F32), every(DType::F32));
        }
    }
}

#[test]
fn every_store_is_bitwise_equal_in_every_family() {
    for (spec, world) in [(qwen2(), 2), (qwen3(), 3), (gemma3(), 2), (gemma4(), 3), (gemma4_experts(), 2)] {
        check(&spec, world, ADAMW, 1, ddp(DType::F32), every(DType::F32));
    }
}

#[test]
fn every_store_is_bitwise_equal_in_bf16() {
    for (spec, world, rule) in [(llama(), 3, SGD), (gpt(), 2, ADAMW)] {
        check(&spec, world, rule, 1, ddp(DType::Bf16), every(DType::Bf16));
    }
}

#[test]
fn accumulation_has_one_of_two_summation_orders_stated_by_each_store() {
    for (spec, world, rule) in [(llama(), 3, SGD), (gpt(), 2, ADAMW)] {
        check(&spec, world, rule, 3, ddp(DType::F32), at_once(DType::F32, 3));
        let mut each = by_batch(DType::F32, 3);
        check(&spec, world, rule, 3, each.remove(0), each);
    }
    // A rank that is alone has nothing to sum first: also if each micro-batch is to be reduced by itself.
    let alone = [at_once(DType::F32, 3), vec![by_batch(DType::F32, 3).remove(0)]].concat();
    check(&llama(), 1, SGD, 3, ddp(DType::F32), alone);
}

/// The result of one step, with the rank's samples in one micro-batch or in two.
fn one_step(world: usize, options: &EngineOptions, split: bool) -> Outcome {
    let results = ranks(world, |rank| {
        let index = rank.rank;
        let mut engine = Engine::new(rank.device, &rank.mesh, options)?;
        let (a, b) = (batch(&options.spec, 1, 0, index), batch(&options.spec, 1, 1, index));
        let batches = if split { vec![a, b] } else { vec![joined(&a, &b)] };
        let report = step(&mut engine, &batches, 1)?;
        Ok((vec![report], fragments(&mut engine)?))
    });
    gathered(&options.spec, results)
}

#[test]
fn two_micro_batches_equal_one_of_twice_the_size() {
    for strategy in [vec![ddp(DType::F32)], at_once(DType::F32, 2), by_batch(DType::F32, 2)].concat() {
        let options = EngineOptions { grad_clip: 0.0, ..options(&llama(), strategy, SGD) };
        for world in [1, 2] {
            let (weights, loss) = distance(&one_step(world, &options, true), &one_step(world, &options, false));
            // A weight moves by about 1e-3 in this step.
            assert!(weights < 1e-7 && loss < 1e-6, "weights differ by {weights}, loss by {loss}");
        }
    }
}

#[test]
fn checkpointing_changes_no_bit() {
    for strategy in every(DType::F32) {
        let kept = options(&gpt(), strategy, SGD);
        let recomputed = EngineOptions { checkpoint: Checkpointing::Full, ..kept.clone() };
        let what = format!("checkpointing, {}", kept.strategy.name());
        assert_same_bits(&outcome(2, &kept, 2, 1), &outcome(2, &recomputed, 2, 1), &what);
    }
}

#[test]
fn frozen_tensors_and_adapters_are_bitwise_equal() {
    let texts = |patterns: &[&str]| patterns.iter().map(|p| p.to_string()).collect::<Vec<_>>();
    let adapters = Lora { rank: 4, alpha: 6.0, dropout: 0.2, targets: texts(&["q_proj", "down_proj"]) };
    let tunings = [
        Tuning { freeze: texts(&["embed_tokens", r"layers\.[01]\.", "k_proj"]), ..Tuning::default() },
        Tuning { freeze: texts(&[r"layers\.2\.", "norm"]), ..Tuning::default() },
        Tuning { lora: Some(adapters), ..Tuning::default() },
    ];
    for tuning in tunings {
        for dtype in [DType::F32, DType::Bf16] {
            let losses = |strategy: Arc<dyn Strategy>| {
                let options = EngineOptions { tuning: tuning.clone(), ..options(&llama(), strategy, ADAMW) };
                let results = ranks(3, |rank| {
                    let mut engine = Engine::new(rank.device, &rank.mesh, &options)?;
                    let steps = train(&mut engine, &options.spec, 3, 1)?;
                    let mut weights = fragments(&mut engine)?;
                    weights.sort_by(|a, b| (&a.0, a.1).cmp(&(&b.0, b.1)));
                    Ok((steps, weights))
                });
                let steps = results[0].0.clone();
                (steps, tensors(results.into_iter().flat_map(|r| r.1).collect()))
            };
            let expected = losses(ddp(dtype));
            for strategy in every(dtype) {
                let name = strategy.name();
                assert!(losses(strategy) == expected, "{name} {dtype} {tuning:?}");
            }
        }
    }
}

/// Tensors assembled from all ranks' fragments; replicas must agree.
fn tensors(mut fragments: Fragments) -> Vec<(String, Vec<u32>)> {
    fragments.sort_by(|a, b| (&a.0, a.1).cmp(&(&b.0, b.1)));
    let mut whole: Vec<(String, Vec<u32>)> = Vec::new();
    for (name, start, values) in fragments {
        if whole.last().is_none_or(|last| last.0 != name) {
            whole.push((name.clone(), Vec::new()));
        }
        let tensor = &mut whole.last_mut().unwrap().1;
        tensor.truncate(start);
        assert_eq!(tensor.len(), start, "{name} has a gap");
        tensor.extend(values.iter().map(|x| x.to_bits()));
    }
    whole
}

#[test]
fn an_evaluation_leaves_nothing_stale_and_changes_nothing() {
    // Between two steps: what it gathered must not be reused after the weights have changed.
    let run = |strategy, evaluate: bool| {
        let options = options(&llama(), strategy, SGD);
        let results = ranks(3, |rank| {
            let index = rank.rank;
            let mut engine = Engine::new(rank.device, &rank.mesh, &options)?;
            let mut reports = Vec::new();
            for number in 1..=3 {
                let batches = [batch(&options.spec, number, 0, index)];
                let before = if evaluate { Some(engine.evaluate(&batches)?) } else { None };
                reports.push(step(&mut engine, &batches, number)?);
                if let Some((sum, tokens)) = before {
                    assert_eq!(sum / tokens as f64, reports[reports.len() - 1].loss, "step {number}");
                    engine.evaluate(&[batches[0].clone(), batch(&options.spec, 9, 0, index)])?;
                }
            }
            Ok((reports, fragments(&mut engine)?))
        });
        gathered(&options.spec, results)
    };
    let replicated = run(ddp(DType::F32), false);
    let whole = |reshard| fsdp(ShardedOptions { reshard, wrap: Wrap::None, ..sharded() });
    for strategy in every(DType::F32).into_iter().chain([true, false].map(whole)) {
        let what = format!("evaluate, then step, {}", strategy.name());
        assert_same_bits(&replicated, &run(strategy, true), &what);
    }
}

#[test]
fn external_weight_changes_are_picked_up() {
    // As a checkpoint does, after a forward-only pass has gathered.
    let losses = |strategy| {
        let options = options(&llama(), strategy, SGD);
        let losses = ranks(3, |rank| {
            let index = rank.rank;
            let mut engine = Engine::new(rank.device, &rank.mesh, &options)?;
            let batches = [batch(&options.spec, 1, 0, index)];
            let before = engine.evaluate(&batches)?.0;
            let dev = engine.device().clone();
            let (store, _) = engine.state();
            store.for_each_shard(&mut |shard| {
                let mut values = vec![0f32; shard.master.len()];
                dev.download(shard.master.as_view(), bytemuck::cast_slice_mut(&mut values))?;
                values.iter_mut().for_each(|x| *x *= 2.0);
                dev.upload(bytemuck::cast_slice(&values), shard.master)
            })?;
            store.weights_changed()?;
            Ok((before, engine.evaluate(&batches)?.0))
        });
        assert!(losses.iter().all(|l| *l == losses[0] && l.0 != l.1));
        losses[0]
    };
    let replicated = losses(ddp(DType::F32));
    for strategy in every(DType::F32) {
        let name = strategy.name();
        assert_eq!(losses(strategy), replicated, "{name}");
    }
}
