//! Freezing and parameter groups from outside: frozen tensors cost nothing and stay, and trained ones are unaffected.

use crate::common::stores::{by_tensor, reference, zero};
use crate::common::*;
use flatshard::base::CATEGORIES;
use flatshard::base::{Category, DType};
use flatshard::comm::{Axis, MeshSizes};
use flatshard::engine::{Engine, EngineOptions, StepReport, Strategy};
use flatshard::nn::{Decoder, Lora, Spec, Tuning};
use flatshard::store::{Offload, ShardedOptions, Stage, Wrap, ZeroOptions};
use std::collections::BTreeMap;
use std::sync::Arc;

fn freeze(patterns: &[&str]) -> Tuning {
    Tuning { freeze: patterns.iter().map(|p| p.to_string()).collect(), ..Tuning::default() }
}

/// A unit with frozen and trained tensors, one all frozen, norms and biases apart from their neighbors, the lowest
/// layers, a unit laid out unlike the others of its gradient slot.
const FROZEN: [&[&str]; 5] = [
    &[r"layers\.[13]\.mlp", r"h\.[02]\.mlp"],
    &[r"layers\.2\.", r"h\.1\."],
    &["layernorm", r"ln_[12f]\.bias", "k_proj"],
    &["embed_tokens", r"wte|wpe", r"layers\.[01]\.", r"h\.0\."],
    &[r"layers\.0\.mlp", r"h\.0\.mlp"],
];

/// The patterns of [`FROZEN`] that match this model.
fn frozen(spec: &Spec, patterns: &[&str]) -> Tuning {
    let names: Vec<String> = spec.layouts().into_iter().flat_map(|l| l.segments).map(|s| s.name).collect();
    let matches = |p: &&&str| {
        let mut layouts = spec.layouts();
        freeze(&[p]).apply(&mut layouts).is_ok()
    };
    let tuning = freeze(&patterns.iter().filter(matches).copied().collect::<Vec<_>>());
    assert!(!tuning.freeze.is_empty(), "{patterns:?} in {names:?}");
    tuning
}

fn strategies() -> Vec<(Arc<dyn Strategy>, usize)> {
    vec![
        (fsdp(sharded()), 1),
        (fsdp(ShardedOptions { wrap: Wrap::Size(8000), grad_accum: 2, ..sharded() }), 2),
        (fsdp(ShardedOptions { reshard: false, sync_each_batch: true, grad_accum: 2, ..sharded() }), 2),
        (fsdp(ShardedOptions { wrap: Wrap::None, ..sharded() }), 1),
        (ddp(DType::F32), 1),
    ]
}

/// One step of plain SGD without clipping: updates are independent, so each tensor must be either unchanged or bitwise
/// equal to what it becomes when everything is trained.
#[test]
fn trained_tensors_are_unaffected_and_frozen_ones_stay() {
    for spec in [llama(), Spec { dropout: 0.0, ..gpt() }] {
        for patterns in FROZEN {
            for (strategy, accum) in strategies() {
                for world in [1, 3] {
                    let all = EngineOptions { grad_clip: 0.0, ..options(&spec, strategy.clone(), SGD) };
                    let some = EngineOptions { tuning: frozen(&spec, patterns), ..all.clone() };
                    let before = outcome(world, &all, 0, accum);
                    let (all, some) = (outcome(world, &all, 1, accum), outcome(world, &some, 1, accum));
                    assert_eq!(all.steps[0].0, some.steps[0].0, "loss");
                    let mut layouts = spec.layouts();
                    frozen(&spec, patterns).apply(&mut layouts).unwrap();
                    for segment in layouts.iter().flat_map(|l| &l.segments) {
                        let expected = if segment.is_trained() { &all } else { &before };
                        let what = format!("{} of {} world {world}", segment.name, strategy.name());
                        assert!(some.weights[&segment.name] == expected.weights[&segment.name], "{what}");
                        assert!(all.weights[&segment.name] != before.weights[&segment.name], "{what} never learns");
                    }
                }
            }
        }
    }
}

#[test]
fn sharded_equals_replicated_with_frozen_tensors() {
    for dtype in [DType::F32, DType::Bf16] {
        for patterns in FROZEN {
            for world in [1, 2, 3] {
                let tuning = frozen(&llama(), patterns);
                let options = |strategy| EngineOptions { tuning: tuning.clone(), ..options(&llama(), strategy, ADAMW) };
                let replicated = outcome(world, &options(ddp(dtype)), 3, 1);
                let sharded = outcome(world, &options(fsdp(ShardedOptions { dtype, ..sharded() })), 3, 1);
                assert_same_bits(&replicated, &sharded, &format!("{patterns:?} world {world} {dtype}"));
            }
        }
    }
}

/// Bytes of a rank in each category, as planned; checks that the engine holds exactly these.
fn held(world: usize, options: &EngineOptions) -> Vec<(Category, usize)> {
    let planned = options.bytes(&MeshSizes::sharded(world), 0).unwrap();
    ranks(world, |rank| {
        let meter = rank.meter.clone();
        let mut engine = Engine::new(rank.device, &rank.mesh, options)?;
        train(&mut engine, &options.spec, 2, 1)?;
        for (i, &(category, name)) in CATEGORIES.iter().enumerate() {
            assert_eq!(meter.live(category), planned[i].1, "{name} of {} world {world}", options.strategy.name());
        }
        Ok(())
    });
    planned
}

/// Bytes received in reductions of one step.
fn reduced(options: &EngineOptions) -> u64 {
    let bytes = ranks(2, |rank| {
        let mut engine = Engine::new(rank.device, &rank.mesh, options)?;
        let group =
            if engine.state().0.replicated() { rank.mesh.group(Axis::Loss) } else { rank.mesh.group(Axis::Fsdp) };
        engine.evaluate(&[batch(&options.spec, 1, 0, rank.rank)])?;
        let before = group.stats().bytes;
        train(&mut engine, &options.spec, 1, 1)?;
        Ok(group.stats().bytes - before)
    });
    bytes[0]
}

#[test]
fn frozen_tensors_have_no_gradient_optimizer_or_reduction_bytes() {
    let spec = Spec { dim: 64, ff: 192, layers: 4, heads: 4, kv_heads: 4, head_dim: 16, ..llama() };
    // Everything but the attention of two blocks: 2 * 4 * 64 * 64 parameters are trained.
    let tuning = freeze(&["embed_tokens", "lm_head", "norm", "mlp", r"layers\.[02]\."]);
    let learning = 2 * 4 * 64 * 64;
    for (strategy, share) in [(fsdp(sharded()), 2), (ddp(DType::F32), 1)] {
        let all = options(&spec, strategy, ADAMW);
        let some = EngineOptions { tuning: tuning.clone(), ..all.clone() };
        let bytes = |planned: &[(Category, usize)], category| planned.iter().find(|p| p.0 == category).unwrap().1;
        let (all_bytes, some_bytes) = (held(2, &all), held(2, &some));
        assert_eq!(bytes(&some_bytes, Category::Grads), 4 * learning / share);
        assert_eq!(bytes(&some_bytes, Category::Optimizer), 8 * learning / share);
        assert_eq!(bytes(&some_bytes, Category::Params), bytes(&all_bytes, Category::Params));
        // Saved in the reduction: half of every frozen gradient per rank, twice that in an all-reduce.
        let total = spec.layouts().iter().map(|l| l.len).sum::<usize>();
        let saved = reduced(&all) - reduced(&some);
        let expected = (4 * (total - learning) / share) as u64;
        assert!(saved >= expected && saved <= expected + 4 * 1024, "saved {saved} bytes, expected {expected}");
    }
}

#[test]
fn resident_frozen_weights_are_gathered_once() {
    // Each of two ranks receives half of the trained tensors, in the all-gather and in the reduction, and a few kB of
    // sums.
    let spec = Spec { dim: 64, ff: 192, layers: 4, heads: 4, kv_heads: 4, head_dim: 16, ..llama() };
    let tuning = freeze(&["embed_tokens", "lm_head", "norm", "mlp", r"layers\.[02]\."]);
    let learning = 2 * 4 * 64 * 64;
    let kept = fsdp(ShardedOptions { reshard: false, ..sharded() });
    let stages = [Stage::One, Stage::Two, Stage::Three].map(|stage| zero(ZeroOptions::new(stage, DType::F32)));
    for strategy in [vec![kept], stages.to_vec()].concat() {
        let options = EngineOptions { tuning: tuning.clone(), ..options(&spec, strategy, ADAMW) };
        let bytes = ranks(2, |rank| {
            let mut engine = Engine::new(rank.device, &rank.mesh, &options)?;
            train(&mut engine, &spec, 2, 1)?;
            let before = rank.mesh.group(Axis::Fsdp).stats().bytes;
            train(&mut engine, &spec, 1, 1)?;
            Ok(rank.mesh.group(Axis::Fsdp).stats().bytes - before)
        });
        let expected = 4 * learning..4 * learning + 4 * 1024;
        assert!(expected.contains(&bytes[0]), "{}: {} bytes, expected {expected:?}", options.strategy.name(), bytes[0]);
    }
}

fn lora(targets: &[&str]) -> Tuning {
    let targets = targets.iter().map(|t| t.to_string()).collect();
    Tuning { lora: Some(Lora { rank: 4, alpha: 6.0, dropout: 0.1, targets }), ..Tuning::default() }
}

/// Every rank's weights, by name, of an engine with adapters.
fn adapted(world: usize, options: &EngineOptions, steps: u64) -> (Vec<StepReport>, BTreeMap<String, Vec<f32>>) {
    let results = ranks(world, |rank| {
        let mut engine = Engine::new(rank.device, &rank.mesh, options)?;
        let reports = train(&mut engine, &options.spec, steps, 1)?;
        Ok((reports, fragments(&mut engine)?))
    });
    let mut weights: BTreeMap<String, Vec<(usize, Vec<f32>)>> = BTreeMap::new();
    let reports = results[0].0.clone();
    for (name, start, values) in results.into_iter().flat_map(|r| r.1) {
        weights.entry(name).or_default().push((start, values));
    }
    let whole = |mut parts: Vec<(usize, Vec<f32>)>| {
        parts.sort_by_key(|p| p.0);
        parts.dedup_by_key(|p| p.0);
        parts.into_iter().flat_map(|p| p.1).collect()
    };
    (reports, weights.into_iter().map(|(name, parts)| (name, whole(parts))).collect())
}

#[test]
fn adapters_start_at_zero_train_alone_and_merge_into_the_model() {
    for (targets, world) in [(&["all-linear"][..], 1), (&["q_proj", "up_proj"], 3)] {
        let plain = options(&llama(), fsdp(sharded()), ADAMW);
        let tuned = EngineOptions { tuning: lora(targets), ..plain.clone() };
        let before = outcome(world, &plain, 1, 1);
        let (reports, weights) = adapted(world, &tuned, 4);
        assert_eq!(reports[0].loss.to_bits(), before.steps[0].0, "the adapters are not nothing at the start");
        let start = outcome(world, &plain, 0, 1);
        for (name, values) in &start.weights {
            assert!(weights[name].iter().map(|x| x.to_bits()).eq(values.iter().copied()), "{name} has changed");
        }
        let untouched: BTreeMap<String, Vec<f32>> =
            start.weights.keys().map(|name| (name.clone(), weights[name].clone())).collect();
        let same = adapted(world, &EngineOptions { strategy: ddp(DType::F32), ..tuned.clone() }, 4);
        assert_eq!(same.1, weights, "fsdp and ddp differ");

        // W + alpha / rank B A as a plain model has the loss of the adapted one.
        let merged: BTreeMap<String, Vec<f32>> = start
            .weights
            .keys()
            .map(|name| {
                let stem = name.trim_end_matches(".weight");
                let mut w = weights[name].clone();
                if let (Some(a), Some(b)) =
                    (weights.get(&format!("{stem}.lora_A.weight")), weights.get(&format!("{stem}.lora_B.weight")))
                {
                    let inputs = a.len() / 4;
                    for (i, w) in w.iter_mut().enumerate() {
                        let (row, column) = (i / inputs, i % inputs);
                        *w += 1.5 * (0..4).map(|k| b[row * 4 + k] * a[k * inputs + column]).sum::<f32>();
                    }
                }
                (name.clone(), w)
            })
            .collect();
        let after = |options: &EngineOptions, weights: &BTreeMap<String, Vec<f32>>| {
            let losses = ranks(1, |rank| {
                let mut engine = Engine::new(rank.device, &rank.mesh, options)?;
                let dev = engine.device().clone();
                let (store, _) = engine.state();
                store.for_each_shard(&mut |mut shard| {
                    for s in &shard.layout.segments {
                        dev.upload(bytemuck::cast_slice(&weights[&s.name]), shard.master.reborrow().slice(s.range()))?;
                    }
                    Ok(())
                })?;
                store.weights_changed()?;
                Ok(engine.evaluate(&[batch(&options.spec, 1, 0, 0)])?.0)
            });
            losses[0]
        };
        let (with, into) = (after(&tuned, &weights), after(&plain, &merged));
        assert!((with - into).abs() < 1e-5 * into, "adapted {with}, merged {into}");
        let unadapted = after(&plain, &untouched);
        assert!((into - unadapted).abs() > 1e-4 * into, "nothing was learnt: {into} and {unadapted}");
    }
}

/// With adapters nothing writes the base model, so its weights are stored once, in the compute dtype; since nothing is
/// lost in conversion, the first loss is that of the base model.
#[test]
fn with_adapters_the_base_model_is_stored_once() {
    let spec = Spec { ff: 45, ..llama() };
    let tuning = lora(&["q_proj", "down_proj"]);
    let layouts = Decoder::tuned(spec.clone(), &tuning).unwrap().layouts().to_vec();
    let elements = |learns: bool| -> usize {
        let segments = layouts.iter().flat_map(|l| &l.segments).filter(|s| s.is_trained() == learns);
        segments.map(|s| s.len().next_multiple_of(256)).sum()
    };
    for dtype in [DType::F32, DType::Bf16, DType::F16] {
        let (each, copy) = (dtype.size(), if dtype == DType::F32 { 0 } else { dtype.size() });
        // All of it on one rank: only the tensors' own padding.
        let whole = (elements(false) * each, elements(true) * (4 + copy));
        let offloaded = |offload| fsdp(ShardedOptions { dtype, offload, ..sharded() });
        for (strategy, host, learns) in [
            (ddp(dtype), 0, whole.1),
            (offloaded(Offload::Nothing), 0, whole.1),
            (reference(by_tensor(dtype, 1)), 0, whole.1),
            (zero(ZeroOptions::new(Stage::Two, dtype)), 0, whole.1),
            (offloaded(Offload::Optimizer), 4 * elements(true), each * elements(true)),
            (offloaded(Offload::Parameters), whole.0 + whole.1, 0),
        ] {
            let plain = options(&spec, strategy, ADAMW);
            let tuned = EngineOptions { tuning: tuning.clone(), ..plain.clone() };
            let planned = held(1, &tuned);
            let bytes = |category| planned.iter().find(|p| p.0 == category).unwrap().1;
            let what = format!("{} in {dtype}, offload {:?}", tuned.strategy.name(), tuned.strategy.offload());
            let on_device = if tuned.strategy.offload() == Offload::Parameters { 0 } else { whole.0 + learns };
            assert_eq!(bytes(Category::Params), on_device, "{what}");
            assert!(
                bytes(Category::Host) >= host,
                "{what}: {} bytes on the host, {host} of weights",
                bytes(Category::Host)
            );
            held(2, &tuned);
            let first = |options: &EngineOptions| adapted(2, options, 1).0[0].loss;
            let (with, without) = (first(&tuned), first(&plain));
            // Without an adapter in between, the residual is added before the product is rounded.
            let within = if dtype == DType::F32 { 0.0 } else { 1e-5 };
            let apart = (with / without - 1.0).abs();
            assert!(apart <= within, "{what}: another model beside adapters that are nothing: {with}, {without}");
        }
    }
}

#[test]
fn invalid_adapters_are_refused() {
    let refused = |tuning: &Tuning, spec: &Spec| Decoder::tuned(spec.clone(), tuning).err().unwrap().to_string();
    let text = refused(&lora(&["q_proj", "k_porj"]), &llama());
    assert!(text.contains("k_porj") && text.contains("down_proj"), "{text}");
    assert!(refused(&lora(&[]), &llama()).contains("empty"));
    assert!(refused(&lora(&["c_attn"]), &gpt()).contains("gpt"));
    let rank = Tuning { lora: Some(Lora { rank: 0, ..lora(&["q_proj"]).lora.unwrap() }), ..Tuning::default() };
    assert!(refused(&rank, &llama()).contains("rank 0"));
}

#[test]
fn groups_scale_the_learning_rate_and_disable_decay() {
    // Plain SGD, one step: p - lr * scale * (g + decay * p), so a scale of 0 changes nothing, and 0.5 halves the
    // change.
    let base = EngineOptions { grad_clip: 0.0, ..options(&llama(), fsdp(sharded()), SGD) };
    let scaled = |name: &str, scale: f32| {
        let tuning = Tuning { lr_scale: vec![(name.to_string(), scale)], ..Tuning::default() };
        outcome(2, &EngineOptions { tuning, ..base.clone() }, 1, 1)
    };
    let (before, full) = (outcome(2, &base, 0, 1), outcome(2, &base, 1, 1));
    let (none, half) = (scaled("q_proj", 0.0), scaled("q_proj", 0.5));
    for (name, start) in &before.weights {
        if !name.contains("q_proj") {
            assert!(none.weights[name] == full.weights[name] && half.weights[name] == full.weights[name], "{name}");
            continue;
        }
        assert!(none.weights[name] == *start, "{name}");
        let value = |o: &Outcome, i: usize| f32::from_bits(o.weights[name][i]) as f64;
        for i in 0..start.len() {
            let (was, whole, halved) = (value(&before, i), value(&full, i), value(&half, i));
            assert!((2.0 * (halved - was) - (whole - was)).abs() < 1e-6, "{name}[{i}]: {was} {halved} {whole}");
        }
    }
    // Without decay an unused token's row stays; with it, it shrinks.
    let undecayed = Tuning { no_decay: vec!["lm_head|embed".into()], ..Tuning::default() };
    let kept = outcome(2, &EngineOptions { tuning: undecayed, ..base.clone() }, 1, 1);
    let rows =
        |o: &Outcome| o.weights["model.embed_tokens.weight"].chunks(llama().dim).map(<[_]>::to_vec).collect::<Vec<_>>();
    let same = |a: Vec<Vec<u32>>, b: Vec<Vec<u32>>| a.iter().zip(&b).filter(|(a, b)| a == b).count();
    assert_eq!(same(rows(&before), rows(&full)), 0);
    assert!(same(rows(&before), rows(&kept)) > 0);
}
