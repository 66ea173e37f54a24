//! Adapters of experts: their gradients follow from those of the matrices W + alpha / rank B A; every mesh learns what
//! one rank does, whoever has the experts; and what they do not support is refused by name.
use crate::common::plain_store::{Docs, Plain, Told, device, distance, groups};
use crate::common::stores::*;
use crate::common::*;
use crate::meshes::{ACCUM, Part, assert_close, options, run, shapes, stores};
use flatshard::base::DType;
use flatshard::base::rng::Rng;
use flatshard::comm::MeshSizes;
use flatshard::engine::{Engine, EngineOptions, Strategy};
use flatshard::nn::{Arch, Checkpointing, Decoder, Experts, Lora, Minimized, Segment, Spec, Tuning, WorkspaceOptions};
use std::collections::BTreeMap;
use std::sync::Arc;

const RANK: usize = 3;
const SCALE: f32 = 2.0;

fn lora(targets: &[&str]) -> Tuning {
    let targets = targets.iter().map(|t| t.to_string()).collect();
    Tuning { lora: Some(Lora { rank: RANK, alpha: SCALE * RANK as f32, dropout: 0.0, targets }), ..Tuning::default() }
}
fn spec() -> Spec {
    let [.., sparse] = shapes();
    sparse
}

/// Experts, a shared one and a dense block; and Mixtral's names.
fn families() -> [(Spec, &'static [&'static str]); 2] {
    let experts = Experts { shared_ff: 0, dense: Vec::new(), ..sparse().experts.unwrap() };
    let mixtral = Spec { arch: Arch::Mixtral, qkv_bias: false, layers: 2, experts: Some(experts), ..sparse() };
    [(sparse(), &["gate_proj", "up_proj", "down_proj", "o_proj"]), (mixtral, &["w1", "w2", "w3", "q_proj"])]
}

/// A weight that depends on its name and index only, so that two models have the same.
fn value(name: &str, i: usize) -> f32 {
    0.3 * Rng::named(7, name).normal(i as u64)
}

/// `y (rows, columns) = f`, row by row.
fn matrix(rows: usize, columns: usize, f: impl Fn(usize, usize) -> f64) -> Vec<f32> {
    (0..rows * columns).map(|i| f(i / columns, i % columns) as f32).collect()
}

/// With W' = W + s B A, the gradients are dB = s dW' Aᵀ and dA = s Bᵀ dW'. The model with W' has no adapters, and its
/// gradients are those of transformers (`experts`).
#[test]
fn gradients_follow_from_those_of_the_merged_matrices() {
    for (spec, targets) in families() {
        let (dev, lengths) = (device(), [9, 3, 11, 1]);
        let (merged, adapted) = (Decoder::new(spec.clone()).unwrap(), Decoder::tuned(spec.clone(), &lora(targets)));
        let adapted = adapted.unwrap();
        let shapes: BTreeMap<&str, &[usize]> =
            adapted.layouts().iter().flat_map(|l| &l.segments).map(|s| (s.name.as_str(), &s.shape[..])).collect();
        let pair = |matrix: &str| {
            let module = matrix.trim_end_matches(".weight");
            [format!("{module}.lora_A.weight"), format!("{module}.lora_B.weight")]
        };
        let sum = |segment: &Segment, i: usize| {
            let [a, b] = pair(&segment.name);
            let base = value(&segment.name, i);
            if !shapes.contains_key(a.as_str()) {
                return base;
            }
            let (row, column) = (i / segment.shape[1], i % segment.shape[1]);
            let low = (0..RANK).map(|k| value(&b, row * RANK + k) * value(&a, k * segment.shape[1] + column));
            base + SCALE * low.sum::<f32>()
        };
        for checkpoint in [Checkpointing::Off, Checkpointing::Selective, Checkpointing::Full] {
            let trained = |decoder: &Decoder, weight: &dyn Fn(&Segment, usize) -> f32| {
                let mut store = Plain::new(&dev, decoder, DType::F32, weight);
                let docs = Docs::random(&dev, 3, spec.vocab, &lengths, 5);
                let options = WorkspaceOptions { tokens: 24, dtype: DType::F32, checkpoint, train: true };
                let mut ws = decoder.workspace(&dev, &groups(), &options).unwrap();
                let told = Told::new(&dev, 0.1).aux(&dev, 0.3);
                store.zero_grads(&dev);
                decoder.train(&dev, &mut store, &docs.batch(), &mut ws, &told.micro(), Minimized::Tokens).unwrap();
                (ws.take_loss(&dev).unwrap(), store)
            };
            let (loss, whole) = trained(&merged, &sum);
            let (adapted_loss, low) = trained(&adapted, &|segment, i| value(&segment.name, i));
            assert!((loss / adapted_loss - 1.0).abs() < 2e-6, "{targets:?}: {loss} and {adapted_loss}");
            let of_low: BTreeMap<&str, (usize, &Segment)> =
                low.segments().map(|(layer, s)| (s.name.as_str(), (layer, s))).collect();
            let mut compared = 0;
            for (layer, segment) in whole.segments() {
                let [a, b] = pair(&segment.name);
                let (Some(&(at, a)), Some(&(_, b))) = (of_low.get(a.as_str()), of_low.get(b.as_str())) else {
                    continue;
                };
                let (outputs, inputs) = (segment.shape[0], segment.shape[1]);
                let dw = whole.grad(layer, segment);
                let dot = |n: usize, f: &dyn Fn(usize) -> f64| SCALE as f64 * (0..n).map(f).sum::<f64>();
                let db = matrix(outputs, RANK, |row, k| {
                    dot(inputs, &|i| dw[row * inputs + i] as f64 * value(&a.name, k * inputs + i) as f64)
                });
                let da = matrix(RANK, inputs, |k, i| {
                    dot(outputs, &|row| dw[row * inputs + i] as f64 * value(&b.name, row * RANK + k) as f64)
                });
                for (want, own) in [(da, a), (db, b)] {
                    let got = low.grad(at, own);
                    if want.iter().all(|&x| x == 0.0) {
                        assert!(got.iter().all(|&x| x == 0.0), "{}: an expert without rows", own.name);
                        continue;
                    }
                    let error = distance(got, &want);
                    assert!(error < 1e-5, "{checkpoint:?}: gradient of {}: {error:.1e}", own.name);
                }
                assert!(low.grad(at, of_low[segment.name.as_str()].1).iter().all(|&x| x == 0.0), "a frozen gradient");
                compared += 1;
            }
            let experts = spec.experts.as_ref().unwrap();
            let modules = 3 * (spec.sparse_blocks() * (experts.count + usize::from(experts.shared_ff > 0)))
                + 3 * (spec.layers - spec.sparse_blocks())
                + spec.layers;
            assert_eq!(compared, modules, "{targets:?}");
        }
    }
}

/// Every kind of store on every mesh whose ranks share experts, and with tp: the same adapters, and what was frozen
/// stays.
#[test]
fn every_mesh_learns_the_adapters_of_one_rank() {
    let start = Part { from: None, to: 3, save: None };
    let tuned = |strategy: &Arc<dyn Strategy>| EngineOptions {
        tuning: lora(&["gate_proj", "down_proj", "v_proj"]),
        checkpoint: Checkpointing::Off,
        ..options(&spec(), strategy, SGD)
    };
    let one = run(MeshSizes::sharded(1), &tuned(&ddp(DType::F32)), start);
    let names = |part: &str| one.weights.keys().filter(|name| name.contains(part) && name.contains("lora_B")).count();
    // A sparse block and a dense one.
    assert_eq!((names(".experts."), names(".shared_expert."), names("lora_B")), (2 * 7, 2, 2 * 7 + 2 + 2 + 2));
    let mut sharded = stores();
    sharded.pop();
    let mut turns = sharded.iter().cycle();
    for ep in [1, 2, 4] {
        for sizes in factorizations(4).into_iter().filter(|sizes| sizes.dp_shard.is_multiple_of(ep)) {
            let (sizes, strategy) = (MeshSizes { ep, ..sizes }, turns.next().unwrap());
            let options = EngineOptions { sequence_parallel: sizes.tp > 2, ..tuned(strategy) };
            assert_close(&one, &run(sizes, &options, start), &format!("{} on {sizes:?}", strategy.name()));
        }
    }
    // The stores among each other.
    let sizes = MeshSizes { ep: 2, ..MeshSizes::sharded(4) };
    for stores in [at_once(DType::F32, ACCUM), by_batch(DType::F32, ACCUM)] {
        let mut outcomes = stores.iter().map(|strategy| (strategy.name(), run(sizes, &tuned(strategy), start)));
        let (_, first) = outcomes.next().unwrap();
        outcomes.for_each(|(name, outcome)| assert_same_bits(&first, &outcome, name));
    }
}

/// The forward pass has the same bits wherever an expert's rows are multiplied by its adapter.
#[test]
fn sharing_adapted_experts_changes_no_bit_of_the_forward_pass() {
    let strategy: Arc<dyn Strategy> = fsdp(flatshard::store::ShardedOptions { grad_accum: ACCUM, ..sharded() });
    let tuned = EngineOptions { tuning: lora(&["all-linear"]), ..options(&spec(), &strategy, SGD) };
    let loss = |ep| {
        let sizes = MeshSizes { ep, ..MeshSizes::sharded(4) };
        let results = mesh_ranks(sizes, |rank| {
            let mut engine = Engine::new(rank.device, &rank.mesh, &tuned)?;
            // B is zero at the start.
            engine.state().0.for_each_shard(&mut |mut shard| {
                for segment in shard.layout.segments.iter().filter(|s| s.name.ends_with("lora_B.weight")) {
                    if let Some(owned) = shard.owned(segment.range()) {
                        let first = shard.start + owned.start - segment.start;
                        let values = shard.master.reborrow().slice(owned).host::<f32>("test")?;
                        values.iter_mut().enumerate().for_each(|(i, x)| *x = value(&segment.name, first + i));
                    }
                }
                Ok(())
            })?;
            engine.state().0.weights_changed()?;
            engine.evaluate(&[batch(&tuned.spec, 1, 0, rank.mesh.rank())])
        });
        results[0].0
    };
    assert_eq!(loss(1), loss(2));
    assert_eq!(loss(1), loss(4));
}

#[test]
fn routers_and_dropout_of_experts_are_refused() {
    let refused = |tuning: Tuning| Decoder::tuned(spec(), &tuning).err().unwrap().to_string();
    for router in ["gate", "shared_expert_gate"] {
        let text = refused(lora(&["q_proj", router]));
        assert!(text.contains(router) && text.contains("a router") && text.contains("gate_proj"), "{text}");
    }
    let dropping = |targets| {
        let Tuning { lora: Some(lora), .. } = lora(targets) else { unreachable!() };
        Tuning { lora: Some(Lora { dropout: 0.1, ..lora }), ..Tuning::default() }
    };
    let text = refused(dropping(&["q_proj", "up_proj"]));
    assert!(text.contains("dropout 0.1") && text.contains(".experts.0.up_proj"), "{text}");
    Decoder::tuned(spec(), &dropping(&["q_proj", "o_proj"])).unwrap();
    let text = refused(Tuning { freeze: vec!["experts.2.up_proj.lora_A".into()], ..lora(&["up_proj"]) });
    assert!(text.contains("freeze all experts of a block or none"), "{text}");
}
