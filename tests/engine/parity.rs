//! Sharded training is bitwise equal to replicated training (losses, norms, all weights), because both sum in rank
//! order and nothing else may depend on the sharding.

use crate::common::stores::kinds;
use crate::common::*;
use flatshard::base::{DType, Result};
use flatshard::engine::{Engine, EngineOptions, Step};
use flatshard::nn::{Checkpointing, Decoder, Spec};
use flatshard::optim::Rule;
use flatshard::store::{BackwardPrefetch, ShardedOptions, Wrap};
use std::collections::BTreeMap;

/// FSDP with `options` compared with DDP, three clipped steps.
fn check(spec: &Spec, world: usize, rule: Rule, sharded: ShardedOptions) {
    let accum = sharded.grad_accum;
    let replicated = outcome(world, &options(spec, ddp(sharded.dtype), rule), 3, accum);
    let what = format!("{:?} world {world} {rule:?} {sharded:?}", spec.arch);
    let norms = replicated.steps.iter().map(|s| f32::from_bits(s.1));
    assert!(norms.clone().any(|norm| norm > 0.5), "{what}: clipping was never active: {:?}", norms.collect::<Vec<_>>());
    assert_same_bits(&replicated, &outcome(world, &options(spec, fsdp(sharded), rule), 3, accum), &what);
}

#[test]
fn sharded_equals_replicated_at_every_world_size() {
    // SGD first: Adam divides by the gradient's own size, which hides a wrong scale.
    for rule in [SGD, ADAMW] {
        for spec in [llama(), gpt()] {
            for world in 1..=4 {
                check(&spec, world, rule, sharded());
            }
        }
    }
}

#[test]
fn sharded_equals_replicated_in_every_family() {
    for spec in [qwen2(), qwen3(), gemma3()] {
        check(&spec, 3, SGD, sharded());
        check(&spec, 2, ADAMW, ShardedOptions { dtype: DType::Bf16, grad_accum: 2, reshard: false, ..sharded() });
    }
}

#[test]
fn sharded_equals_replicated_with_any_wrapping() {
    for wrap in [Wrap::None, Wrap::Size(1), Wrap::Size(8000), Wrap::Size(usize::MAX)] {
        for reshard in [true, false] {
            check(&llama(), 3, SGD, ShardedOptions { wrap, reshard, ..sharded() });
        }
    }
}

#[test]
fn sharded_equals_replicated_with_and_without_prefetch_and_reshard() {
    for forward_prefetch in [true, false] {
        for backward_prefetch in [BackwardPrefetch::Pre, BackwardPrefetch::Post, BackwardPrefetch::None] {
            for reshard in [true, false] {
                let sharded = ShardedOptions { forward_prefetch, backward_prefetch, reshard, ..sharded() };
                check(&llama(), 2, SGD, sharded);
            }
        }
    }
}

#[test]
fn sharded_equals_replicated_with_accumulation() {
    // Gradients that are assigned instead of added, or reduced too early, are visible only with two micro-batches.
    for (spec, reshard) in [(llama(), true), (llama(), false), (gpt(), true)] {
        check(&spec, 3, SGD, ShardedOptions { grad_accum: 2, reshard, ..sharded() });
    }
    check(&llama(), 2, ADAMW, ShardedOptions { grad_accum: 3, wrap: Wrap::Size(8000), ..sharded() });
}

#[test]
fn sharded_equals_replicated_in_bf16() {
    for rule in [SGD, ADAMW] {
        for world in [1, 3] {
            check(&llama(), world, rule, ShardedOptions { dtype: DType::Bf16, ..sharded() });
        }
    }
    check(&gpt(), 2, SGD, ShardedOptions { dtype: DType::Bf16, grad_accum: 2, reshard: false, ..sharded() });
}

#[test]
fn checkpointing_changes_no_bit() {
    for (spec, strategy) in [(llama(), fsdp(sharded())), (gpt(), fsdp(sharded())), (gpt(), ddp(DType::F32))] {
        let kept = options(&spec, strategy, SGD);
        let expected = outcome(2, &kept, 3, 1);
        for checkpoint in [Checkpointing::Selective, Checkpointing::Full] {
            let recomputed = EngineOptions { checkpoint, ..kept.clone() };
            assert_same_bits(&expected, &outcome(2, &recomputed, 3, 1), &format!("{checkpoint:?}"));
        }
    }
}

#[test]
fn reducing_each_micro_batch_sums_in_another_order() {
    // (a0 + b0) + (a1 + b1) instead of (a0 + a1) + (b0 + b1): equal up to rounding. On one rank the order is the same.
    for (world, accum) in [(1, 3), (3, 2)] {
        let at_once = ShardedOptions { grad_accum: accum, ..sharded() };
        let each = ShardedOptions { sync_each_batch: true, ..at_once.clone() };
        let a = outcome(world, &options(&llama(), fsdp(at_once), SGD), 3, accum);
        let b = outcome(world, &options(&llama(), fsdp(each), SGD), 3, accum);
        let (weights, losses) = distance(&a, &b);
        assert!(weights < 1e-6 && losses < 1e-6, "world {world}: weights differ by {weights}, losses by {losses}");
    }
}

#[test]
fn two_ranks_equal_one_with_both_batches() {
    // What FSDP = DDP cannot detect: a wrong division in both.
    let one = EngineOptions { grad_clip: 0.0, ..options(&llama(), ddp(DType::F32), SGD) };
    let results = ranks(1, |rank| {
        let mut engine = Engine::new(rank.device, &rank.mesh, &one)?;
        let batches = [joined(&batch(&one.spec, 1, 0, 0), &batch(&one.spec, 1, 0, 1))];
        let report = step(&mut engine, &batches, 1)?;
        Ok((vec![report], fragments(&mut engine)?))
    });
    let one_rank = gathered(&one.spec, results);
    for strategy in [ddp(DType::F32), fsdp(sharded())] {
        let two = EngineOptions { strategy, ..one.clone() };
        let (weights, loss) = distance(&one_rank, &outcome(2, &two, 1, 1));
        assert!(weights < 1e-7 && loss < 1e-6, "weights differ by {weights}, loss by {loss}");
    }
}

#[test]
fn a_small_step_lowers_the_loss_by_the_rate_times_the_squared_norm() {
    // First order: L(w - lr g) = L(w) - lr |g|^2, so a gradient of the wrong size or of another loss is visible.
    let rule = Rule::Sgd { momentum: 0.0, weight_decay: 0.0 };
    for strategy in kinds(DType::F32) {
        let options = EngineOptions { grad_clip: 0.0, ..options(&llama(), strategy, rule) };
        ranks(2, |rank| {
            let index = rank.rank;
            let mut engine = Engine::new(rank.device, &rank.mesh, &options)?;
            let batches = [batch(&options.spec, 1, 0, index)];
            let tokens = engine.global_count(batches[0].loss_tokens())?;
            let lr = 1e-3;
            let report = engine.train_step(&batches, &Step { number: 1, lr, tokens })?;
            let fell = report.loss - engine.evaluate(&batches)?.0 / tokens as f64;
            let expected = lr as f64 * (report.grad_norm as f64).powi(2);
            assert!((fell / expected - 1.0).abs() < 0.02, "fell by {fell}, expected {expected}");
            Ok(())
        });
    }
}

#[test]
fn an_evaluation_gives_the_loss_of_the_next_step() {
    // A forward pass without dropout on the same batch, before the update: the same loss.
    for strategy in kinds(DType::F32) {
        let options = options(&llama(), strategy, SGD);
        ranks(2, |rank| {
            let index = rank.rank;
            let mut engine = Engine::new(rank.device, &rank.mesh, &options)?;
            for number in 1..=3 {
                let batches = [batch(&options.spec, number, 0, index)];
                let (sum, tokens) = engine.evaluate(&batches)?;
                let report = step(&mut engine, &batches, number)?;
                assert_eq!(tokens, (0..2).map(|r| batch(&options.spec, number, 0, r).loss_tokens()).sum::<u64>());
                assert_eq!(sum / tokens as f64, report.loss, "step {number}");
            }
            Ok(())
        });
    }
}

#[test]
fn clipping_scales_the_update_to_the_norm() {
    // SGD without momentum or decay: the update is lr * scale * gradient, so its norm is lr * max_norm when clipped.
    let rule = Rule::Sgd { momentum: 0.0, weight_decay: 0.0 };
    for strategy in kinds(DType::F32) {
        let run = |grad_clip, steps| {
            let options = EngineOptions { grad_clip, ..options(&llama(), strategy.clone(), rule) };
            outcome(2, &options, steps, 1)
        };
        let (before, clipped, free) = (run(0.0, 0), run(0.01, 1), run(0.0, 1));
        let moved = |after: &Outcome| {
            let pairs = before.weights.iter().flat_map(|(name, x)| x.iter().zip(&after.weights[name]));
            let square = |(x, y): (&u32, &u32)| (f32::from_bits(*x) as f64 - f32::from_bits(*y) as f64).powi(2);
            pairs.map(square).sum::<f64>().sqrt()
        };
        let norm = f32::from_bits(free.steps[0].1) as f64;
        assert_eq!(clipped.steps[0].1, free.steps[0].1, "the norm is reported before clipping");
        assert!((moved(&free) / (0.01 * norm) - 1.0).abs() < 1e-3, "{} for norm {norm}", moved(&free));
        assert!((moved(&clipped) / (0.01 * 0.01) - 1.0).abs() < 1e-2, "{}", moved(&clipped));
    }
}

#[test]
fn weight_decay_applies_to_matrices_only() {
    // One step from the same weights, with and without decay: they differ by lr * decay * weight, or not at all.
    let (decay, lr) = (0.5, 0.01);
    let adamw = |weight_decay| Rule::AdamW { beta1: 0.9, beta2: 0.95, eps: 1e-8, weight_decay, moments: DType::F32 };
    let sgd = |weight_decay| Rule::Sgd { momentum: 0.9, weight_decay };
    let layouts = Decoder::new(gpt()).unwrap().layouts().to_vec();
    for (with, without) in [(adamw(decay), adamw(0.0)), (sgd(decay), sgd(0.0))] {
        for strategy in kinds(DType::F32) {
            let run = |rule, steps| outcome(3, &options(&gpt(), strategy.clone(), rule), steps, 1).weights;
            let (start, with, without) = (run(with, 0), run(with, 1), run(without, 1));
            for segment in layouts.iter().flat_map(|l| &l.segments) {
                let name = &segment.name;
                let values = |of: &BTreeMap<String, Vec<u32>>| -> Vec<f32> {
                    of[name].iter().map(|&bits| f32::from_bits(bits)).collect()
                };
                if !segment.decay {
                    assert_eq!(values(&with), values(&without), "{name} is not to decay");
                    continue;
                }
                for ((w, with), without) in values(&start).into_iter().zip(values(&with)).zip(values(&without)) {
                    let expected = lr * decay * w;
                    assert!((without - with - expected).abs() < 1e-6 + 1e-3 * expected.abs(), "{name}: {w}");
                }
            }
        }
    }
    let decayed = layouts.iter().flat_map(|l| &l.segments).filter(|s| s.decay).count();
    assert!(decayed > 0 && layouts.iter().flat_map(|l| &l.segments).any(|s| !s.decay));
}

#[test]
fn a_non_finite_gradient_changes_no_weight() {
    for strategy in kinds(DType::F32) {
        let options = options(&llama(), strategy, ADAMW);
        ranks(3, |rank| {
            let index = rank.rank;
            let mut engine = Engine::new(rank.device, &rank.mesh, &options)?;
            let batches = [batch(&options.spec, 1, 0, index)];
            step(&mut engine, &batches, 1)?;
            spoil(&mut engine, index == 1)?;
            let before = fragments(&mut engine)?;
            let report = step(&mut engine, &batches, 2)?;
            assert!(report.skipped && !report.grad_norm.is_finite(), "{report:?}");
            let bits = |f: &Fragments| -> Vec<u32> { f.iter().flat_map(|f| &f.2).map(|x| x.to_bits()).collect() };
            assert_eq!(bits(&before), bits(&fragments(&mut engine)?));
            assert_eq!(engine.state().1.steps(), 1);
            Ok(())
        });
    }
}

/// Puts an infinity into the first weight of the last unit, `everywhere` or on one rank only.
fn spoil(engine: &mut Engine, here: bool) -> Result<()> {
    let dev = engine.device().clone();
    let (store, _) = engine.state();
    let (last, everywhere) = (store.units() - 1, store.replicated());
    store.for_each_shard(&mut |shard| match shard.unit == last && (here || everywhere) {
        true => dev.upload(bytemuck::bytes_of(&f32::INFINITY), shard.master.slice(0..1)),
        false => Ok(()),
    })?;
    store.weights_changed()
}

#[test]
fn all_ranks_generate_the_text_of_a_single_rank() {
    use flatshard::engine::Sampling;
    let generate = |world, strategy, temperature| {
        let options = options(&llama(), strategy, SGD);
        let mut texts = ranks(world, |rank| {
            let mut engine = Engine::new(rank.device, &rank.mesh, &options)?;
            engine.generate(&[1, 2, 3], 9, &Sampling { temperature, seed: 5, ..Sampling::default() })
        });
        assert!(texts.iter().all(|t| *t == texts[0]), "ranks generate different tokens");
        texts.remove(0)
    };
    for temperature in [0.0, 1.0] {
        let alone = generate(1, ddp(DType::F32), temperature);
        assert_eq!(alone.len(), 9);
        for strategy in kinds(DType::F32) {
            assert_eq!(alone, generate(3, strategy, temperature));
        }
    }
    assert_ne!(generate(1, ddp(DType::F32), 0.0), generate(1, ddp(DType::F32), 1.0));
}
