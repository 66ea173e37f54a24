//! Mixtures of experts compared with Hugging Face transformers: logits, losses and all gradients of tiny models of the
//! families, the routers' and those of the load-balancing loss included. Documents are packed here, and went
//! through transformers one by one. The files are made by `tests/golden/experts.py`. Then over ranks: every store ends
//! in the same bits, and no loss depends on how many ranks there are.

use crate::common::golden_tensors::Tensors;
use crate::common::plain_store::{Docs, Plain, Told, device, distance, groups};
use crate::common::stores::*;
use crate::common::{self, *};
use flatshard::base::rng::Rng;
use flatshard::base::{Category, DType, Result};
use flatshard::ckpt::hf;
use flatshard::comm::{Axis, MeshSizes};
use flatshard::data::MicroBatch;
use flatshard::device::ops::{Grouped, GroupedGemm};
use flatshard::device::{Device, IGNORE};
use flatshard::engine::{Dpo, Engine, EngineOptions, Kto, Objective, ReferenceModel, Rm, Step, Strategy, Teaching};
use flatshard::nn::{
    Checkpointing, Cuts, Decoder, Experts, Lora, Minimized, RowNorm, SpImpl, Spec, Tuning, WorkspaceOptions,
};
use flatshard::optim::Rule;
use flatshard::store::initialize;
use serde_json::Value;
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

const FAMILIES: [&str; 34] = [
    "mixtral",
    "qwen2_moe",
    "qwen3_moe",
    "olmoe",
    "gpt_oss",
    "deepseek_v3",
    "deepseek_v2",
    "glm4_moe_lite",
    "glm4_moe",
    "dots1",
    "granitemoe",
    "granitemoeshared",
    "ernie4_5_moe",
    "hunyuan_v1_moe",
    "minimax_m2",
    "solar_open",
    "qwen3_next",
    "qwen3_5_moe_text",
    "lfm2_moe",
    "exaone_moe",
    "mellum",
    "glm4_moe_normed",
    "granitemoehybrid",
    "nemotron_h",
    "flex_olmo",
    "afmoe",
    "granitemoe_swa",
    "hy_v3",
    "axk1",
    "sarvam_moe",
    "cohere2_moe",
    "cohere2_moe_normed",
    "llama4_text",
    "phimoe",
];
const TOLERANCE: f64 = 1e-5;

#[test]
fn logits_losses_and_gradients_match_transformers() {
    for name in FAMILIES {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/experts").join(name);
        let values: Value = serde_json::from_slice(&std::fs::read(path.with_extension("json")).unwrap()).unwrap();
        let golden = Tensors::read(&path.with_extension("safetensors"));
        let lengths: Vec<usize> =
            values["lengths"].as_array().unwrap().iter().map(|n| n.as_u64().unwrap() as usize).collect();
        let spec = hf::parse(values["config"].to_string().as_bytes()).unwrap();
        // What we write, we read.
        assert_eq!(hf::parse(hf::config(&spec).as_bytes()).unwrap(), spec, "{name}");
        let number = |key: &str| values[key].as_f64().unwrap();
        let targets = &golden.integers["targets"];
        let counted = targets.iter().filter(|&&t| t != -100).count() as f64;
        let tokens: Vec<u32> = golden.integers["tokens"].iter().map(|&t| t as u32).collect();

        for checkpoint in [Checkpointing::Off, Checkpointing::Selective, Checkpointing::Full] {
            let (dev, decoder) = (device(), Decoder::new(spec.clone()).unwrap());
            let mut store = Plain::new(&dev, &decoder, DType::F32, |segment, i| {
                let weight = &golden.floats[&format!("weight.{}", segment.name)];
                assert_eq!(weight.len(), segment.len(), "{}", segment.name);
                weight[i]
            });
            let docs = Docs::new(&dev, &tokens, targets, &lengths).turned(&dev, &spec);
            let options = WorkspaceOptions { tokens: tokens.len(), dtype: DType::F32, checkpoint, train: true };
            let mut ws = decoder.workspace(&dev, &groups(), &options).unwrap();
            let told = Told::new(&dev, (1.0 / counted) as f32).aux(&dev, number("factor") as f32);
            store.zero_grads(&dev);
            decoder.train(&dev, &mut store, &docs.batch(), &mut ws, &told.micro(), Minimized::Tokens).unwrap();

            let loss = ws.take_loss(&dev).unwrap() / counted;
            assert!((loss / number("loss") - 1.0).abs() < 1e-6, "{name}: loss {loss}");
            let mut load = vec![0f64; 1 + spec.sparse_blocks() * spec.experts.as_ref().unwrap().count];
            ws.take_load(&dev, bytemuck::cast_slice_mut(&mut load)).unwrap();
            if let Some(aux) = values["aux"].as_f64() {
                assert!((load[0] / aux - 1.0).abs() < 1e-6, "{name}: load-balancing loss {}", load[0]);
            }
            let routed = spec.sparse_blocks() * tokens.len() * spec.experts.as_ref().unwrap().top_k;
            assert_eq!(load[1..].iter().sum::<f64>(), routed as f64, "{name}: {checkpoint:?}");

            let theirs = golden.floats.keys().filter(|name| name.starts_with("grad.")).count();
            assert_eq!(store.segments().count(), theirs, "{name}: tensors");
            for (layer, segment) in store.segments() {
                let want = &golden.floats[&format!("grad.{}", segment.name)];
                // Of an expert without rows: zeros.
                let ours = store.grad(layer, segment);
                if want.iter().all(|&x| x == 0.0) {
                    assert!(ours.iter().all(|&x| x == 0.0), "{name}: gradient of {}", segment.name);
                    continue;
                }
                let error = distance(ours, want);
                assert!(error < TOLERANCE, "{name}: {checkpoint:?}: gradient of {}: {error:.1e}", segment.name);
            }
            let mut logits = vec![0f32; tokens.len() * spec.vocab];
            for (row, logits) in logits.chunks_exact_mut(spec.vocab).enumerate() {
                decoder.next_token_logits(&dev, &mut store, &docs.batch(), &mut ws, row, logits).unwrap();
            }
            let error = distance(&logits, &golden.floats["logits"]);
            assert!(error < TOLERANCE, "{name}: logits: {error:.1e}");
        }
    }
}

/// Of the load-balancing loss, large enough to matter next to the loss of the tokens.
const FACTOR: f64 = 30.0;

fn balanced(strategy: Arc<dyn Strategy>, rule: Rule) -> EngineOptions {
    EngineOptions { aux_coef: FACTOR, ..options(&sparse(), strategy, rule) }
}

#[test]
fn every_store_ends_in_the_same_bits() {
    for (world, rule, accum, dtype) in
        [(2, SGD, 1, DType::F32), (3, ADAMW, 1, DType::F32), (2, SGD, 2, DType::F32), (2, ADAMW, 1, DType::Bf16)]
    {
        let mut each = by_batch(dtype, accum);
        let mut checks = vec![(ddp(dtype), at_once(dtype, accum)), (each.remove(0), each)];
        if accum == 1 {
            checks.push((ddp(dtype), by_batch(dtype, 1)));
        }
        for (first, stores) in checks {
            let expected = outcome(world, &balanced(first, rule), 3, accum);
            for (i, strategy) in stores.into_iter().enumerate() {
                let what = format!("{} ({i}) world {world} {rule:?} {accum} micro-batches {dtype}", strategy.name());
                assert_same_bits(&expected, &outcome(world, &balanced(strategy, rule), 3, accum), &what);
            }
        }
    }
}

#[test]
fn recomputation_and_replicas_change_no_bit() {
    let kept = balanced(fsdp(sharded()), SGD);
    let expected = outcome(2, &kept, 3, 2);
    for checkpoint in [Checkpointing::Selective, Checkpointing::Full] {
        let recomputed = EngineOptions { checkpoint, ..kept.clone() };
        assert_same_bits(&expected, &outcome(2, &recomputed, 3, 2), &format!("{checkpoint:?}"));
    }
    let lora = Lora { rank: 2, alpha: 4.0, dropout: 0.0, targets: vec!["q_proj".into(), "o_proj".into()] };
    for tuning in [
        Tuning { lora: Some(lora), ..Tuning::default() },
        Tuning { freeze: vec!["experts".into()], ..Tuning::default() },
        Tuning { freeze: vec!["mlp.gate.".into()], ..Tuning::default() },
    ] {
        let of = |strategy| EngineOptions { tuning: tuning.clone(), ..balanced(strategy, SGD) };
        let what = format!("{tuning:?}");
        let (a, b) = (of(ddp(DType::F32)), of(fsdp(sharded())));
        let run = |options: &EngineOptions| {
            ranks(2, |rank| {
                let mut engine = Engine::new(rank.device, &rank.mesh, options)?;
                let reports = train(&mut engine, &options.spec, 3, 1)?;
                Ok(reports.iter().map(|r| (r.loss.to_bits(), r.grad_norm.to_bits())).collect::<Vec<_>>())
            })
        };
        assert_eq!(run(&a), run(&b), "{what}");
    }
}

/// Of one step: its report, and all weights after it.
fn one_step(world: usize, strategy: Arc<dyn Strategy>, aux_coef: f64) -> (common::Outcome, f64, f64) {
    let options = EngineOptions { aux_coef, grad_clip: 0.0, ..options(&sparse(), strategy, SGD) };
    let results = ranks(world, |rank| {
        let mut engine = Engine::new(rank.device, &rank.mesh, &options)?;
        let of = |micro, rank| batch(&options.spec, 1, micro, rank);
        let batches = [0, 1].map(|micro| match world {
            1 => joined(&of(micro, 0), &of(micro, 1)),
            _ => of(micro, rank.rank),
        });
        let report = step(&mut engine, &batches, 1)?;
        Ok((vec![report], fragments(&mut engine)?))
    });
    let load = results[0].0[0].experts.unwrap();
    assert!(results.iter().all(|r| r.0[0].experts == Some(load)), "ranks report different loads");
    (gathered(&options.spec, results), load.aux_loss, load.max)
}

/// What equal stores cannot detect: a load-balancing loss of each rank's own tokens, or a division in all of them.
#[test]
fn two_ranks_equal_one_with_both_batches() {
    let (one, aux, max) = one_step(1, ddp(DType::F32), FACTOR);
    for strategy in [ddp(DType::F32), fsdp(sharded()), zero(staged(flatshard::store::Stage::Three, DType::F32))] {
        let (two, their_aux, their_max) = one_step(2, strategy, FACTOR);
        let (weights, loss) = common::distance(&one, &two);
        assert!((aux / their_aux - 1.0).abs() < 2e-6 && max == their_max, "{aux} {max}, {their_aux} {their_max}");
        assert!(weights < 2e-7 && loss < 2e-6, "weights differ by {weights}, loss by {loss}");
    }
    // The load-balancing loss reaches the weights.
    let (without, ..) = one_step(1, ddp(DType::F32), 0.0);
    assert!(common::distance(&one, &without).0 > 1e-5);
}

/// Documents of these lengths with a loss on every token.
fn documents(spec: &Spec, lengths: &[usize]) -> MicroBatch {
    let (rng, n) = (Rng::new(11, 0), lengths.iter().sum::<usize>());
    let draw = |i: usize| (rng.u64(i as u64) % spec.vocab as u64) as u32;
    let mut cu_seqlens = vec![0];
    lengths.iter().for_each(|&len| cu_seqlens.push(cu_seqlens[cu_seqlens.len() - 1] + len as u32));
    MicroBatch {
        tokens: (0..n).map(draw).collect(),
        targets: (0..n).map(|i| draw(n + i) as i32).collect(),
        positions: lengths.iter().flat_map(|&len| 0..len as u32).collect(),
        cu_seqlens,
        ..MicroBatch::default()
    }
}

/// Tokens are routed where they are. Rows that only make the ranks' shares equal are no tokens: they use no expert,
/// and count for no load. On some meshes a rank has no token at all.
#[test]
fn ranks_that_share_sequences_count_every_token_once() {
    let spec = Spec { max_len: 40, kv_heads: 6, ..sparse() };
    let row_norm = Spec { row_norm: Some(RowNorm::All), ..spec.clone() };
    let lengths = [&[29, 1, 13, 3, 5][..], &[2], &[1]];
    for (spec, lengths) in lengths.map(|lengths| (&spec, lengths)).into_iter().chain([(&row_norm, lengths[0])]) {
        let options = EngineOptions { tokens: 60, spec: spec.clone(), ..balanced(fsdp(sharded()), SGD) };
        let run = |sp, tp, sp_impl| {
            let cuts = Cuts { attention: spec.row_norm.is_none(), ..Cuts::ALL };
            let options = EngineOptions { sp_impl, cuts, ..options.clone() };
            let sizes = MeshSizes { sp, tp, ..MeshSizes::sharded(1) };
            let results = mesh_ranks(sizes, |rank| {
                let mut engine = Engine::new(rank.device, &rank.mesh, &options)?;
                let reports = (1..=2).map(|number| step(&mut engine, &[documents(spec, lengths)], number));
                Ok((reports.collect::<Result<Vec<_>>>()?, fragments(&mut engine)?))
            });
            let loads: Vec<_> = results[0].0.iter().map(|report| report.experts.unwrap()).collect();
            (gathered(spec, results), loads)
        };
        let (one, loads) = run(1, 1, SpImpl::Ring);
        let meshes = [(2, 1), (3, 1), (4, 1), (2, 2)].into_iter();
        for ((sp, tp), sp_impl) in meshes.flat_map(|mesh| [(mesh, SpImpl::Ring), (mesh, SpImpl::Ulysses)]) {
            let what = format!("{lengths:?} on sp {sp} x tp {tp}, {sp_impl:?}");
            let (many, theirs) = run(sp, tp, sp_impl);
            for (a, b) in loads.iter().zip(&theirs) {
                assert!((a.aux_loss / b.aux_loss - 1.0).abs() < 2e-6 && a.max == b.max, "{what}: {a:?} and {b:?}");
            }
            for (a, b) in one.steps.iter().zip(&many.steps) {
                let (norm, other) = (f32::from_bits(a.1), f32::from_bits(b.1));
                assert!((norm - other).abs() < 1e-5 * norm, "{what}: norms {norm} and {other}");
            }
            let (weights, loss) = common::distance(&one, &many);
            assert!(weights < 2e-6 && loss < 2e-6, "{what}: weights differ by {weights}, losses by {loss}");
        }
    }
}

/// Pairs `range`, each of two sequences whose first two tokens are the prompt.
fn pairs(spec: &Spec, range: Range<usize>) -> MicroBatch {
    let lengths: Vec<usize> = range.clone().flat_map(|i| [6 + i % 3, 5 + i % 4]).collect();
    let mut batch = documents(spec, &lengths);
    let rng = Rng::new(12, range.start as u64);
    batch.tokens.iter_mut().enumerate().for_each(|(i, t)| *t = (rng.u64(i as u64) % spec.vocab as u64) as u32);
    for border in batch.cu_seqlens.windows(2).map(|of| [of[0] as usize, of[1] as usize]) {
        batch.targets[border[0]] = IGNORE;
        batch.targets[border[1] - 1] = IGNORE;
    }
    batch
}

/// The loss of pairs and the load-balancing loss together: on every mesh as on one rank.
#[test]
fn preference_objectives_train_experts() {
    let dpo = Dpo { beta: 0.5, label_smoothing: 0.0, ipo: false, nll_coef: 0.0 };
    let spec = Spec { kv_heads: 6, ..sparse() };
    let kto = Kto { beta: 0.5, desirable_weight: 1.5, undesirable_weight: 0.5 };
    for (objective, score) in [(Objective::Dpo(dpo), false), (Objective::Rm(Rm), true), (Objective::Kto(kto), false)] {
        let labeled = matches!(objective, Objective::Kto(_));
        let spec = Spec { score, ..spec.clone() };
        let options = EngineOptions {
            objective,
            reference: if score { ReferenceModel::Base } else { ReferenceModel::Frozen(spec.clone().into()) },
            aux_coef: 0.5,
            tokens: 80,
            grad_clip: 0.0,
            ..options(&spec, fsdp(sharded()), SGD)
        };
        let run = |sizes: MeshSizes, aux_coef| {
            let results = mesh_ranks(sizes, |rank| {
                let options = EngineOptions { aux_coef, ..options.clone() };
                let mut engine = Engine::new(rank.device.clone(), &rank.mesh, &options)?;
                if let Some((_, store)) = engine.reference() {
                    initialize(store, 77, &*rank.device)?;
                }
                let (r, of) = (rank.mesh.group(Axis::Dp).rank(), rank.mesh.group(Axis::Dp).size());
                let mut batch = pairs(&spec, 0..4);
                if labeled {
                    batch.numbers = vec![1.0, 0.0, 1.0, 1.0, 0.0, 0.0, 1.0, 0.0];
                    batch.mismatched = Some(Box::new(pairs(&spec, 4..8)));
                }
                let tokens = if labeled { 8 } else { 4 };
                // The pairs of all ranks, cut by pair.
                let own = cut(&batch, 2 * 4 / of * r..2 * 4 / of * (r + 1));
                let report = |number| engine.train_step(std::slice::from_ref(&own), &Step { number, lr: 0.02, tokens });
                let reports = (1..=2).map(report).collect::<Result<Vec<_>>>()?;
                engine.evaluate_preferences(std::slice::from_ref(&own))?;
                let evaluated = engine.end_evaluation()?;
                Ok(((reports, fragments(&mut engine)?), evaluated))
            });
            let (results, evaluated): (Vec<_>, Vec<_>) = results.into_iter().unzip();
            let loads: Vec<_> = results[0].0.iter().map(|report| report.experts.unwrap()).collect();
            (gathered(&spec, results), loads, evaluated[0])
        };
        let (one, loads, evaluated) = run(MeshSizes::sharded(1), 0.5);
        // The load-balancing loss is part of what is minimized.
        assert!(common::distance(&one, &run(MeshSizes::sharded(1), 0.0).0).0 > 1e-5, "{objective:?}");
        assert_eq!(evaluated.mismatched, if labeled { 8.0 } else { 0.0 });
        for (dp_shard, sp, tp, ep) in [(2, 1, 1, 1), (1, 2, 1, 1), (1, 1, 2, 1), (2, 2, 1, 1), (2, 1, 1, 2)] {
            let (many, theirs, sums) = run(MeshSizes { dp_replicate: 1, dp_shard, sp, tp, ep }, 0.5);
            let what = format!("{objective:?} on {dp_shard} x {sp} x {tp}, ep {ep}");
            for (a, b) in loads.iter().zip(&theirs) {
                assert!((a.aux_loss / b.aux_loss - 1.0).abs() < 2e-6 && a.max == b.max, "{what}: {a:?} and {b:?}");
            }
            let (weights, loss) = common::distance(&one, &many);
            assert!(weights < 2e-6 && loss < 2e-6, "{what}: weights differ by {weights}, losses by {loss}");
            let apart = [(sums.loss, evaluated.loss), (sums.kl(), evaluated.kl())].map(|(a, b)| (a - b).abs());
            assert!(apart.iter().all(|&apart| apart < 1e-5), "{what}: {sums:?} and {evaluated:?}");
        }
    }
}

/// Dense and sparse models teach each other. A teacher that is the student leaves (1 - alpha) of its loss, whoever has
/// the experts; and on every mesh a student learns from another teacher what it learns on one rank.
#[test]
fn sparse_models_teach_and_learn() {
    const ALPHA: f64 = 0.75;
    let other = |spec: Spec| {
        let experts = spec.experts.clone().map(|e| Experts { count: 5, top_k: 2, shared_ff: 0, dense: vec![0], ..e });
        Spec { layers: 2, ff: 30, dim: 16, experts, ..spec }
    };
    let of = |spec: &Spec, teacher: Option<&Spec>, sizes: MeshSizes, seed| {
        let teaching = |spec: &Spec| Teaching { spec: spec.clone(), alpha: ALPHA, temperature: 2.0, on_policy: false };
        let options = EngineOptions {
            teacher: teacher.map(teaching),
            aux_coef: if spec.experts.is_some() { 0.5 } else { 0.0 },
            tokens: 80,
            grad_clip: 0.0,
            ..options(spec, fsdp(sharded()), SGD)
        };
        let results = mesh_ranks(sizes, |rank| {
            let mut engine = Engine::new(rank.device.clone(), &rank.mesh, &options)?;
            if let Some((_, store)) = engine.teacher() {
                initialize(store, seed, &*rank.device)?;
            }
            let (r, of) = (rank.mesh.group(Axis::Dp).rank(), rank.mesh.group(Axis::Dp).size());
            let own = cut(&pairs(spec, 0..4), 8 / of * r..8 / of * (r + 1));
            let tokens = engine.global_count(own.loss_tokens())?;
            let report = |number| engine.train_step(std::slice::from_ref(&own), &Step { number, lr: 0.02, tokens });
            Ok(((1..=2).map(report).collect::<Result<Vec<_>>>()?, fragments(&mut engine)?))
        });
        gathered(spec, results)
    };
    let loss = |outcome: &common::Outcome| f64::from_bits(outcome.steps[0].0);
    let meshes = [
        (1, 1, 1, 1),
        (2, 1, 1, 1),
        (1, 2, 1, 1),
        (1, 1, 2, 1),
        (2, 2, 1, 1),
        (2, 1, 1, 2),
        (4, 1, 1, 2),
        (4, 1, 1, 4),
        (2, 2, 1, 2),
        (2, 1, 2, 2),
    ]
    .map(|(dp_shard, sp, tp, ep)| MeshSizes { dp_replicate: 1, dp_shard, sp, tp, ep });
    let seed = options(&sparse(), fsdp(sharded()), SGD).seed;
    let [sparse, dense] = [sparse(), llama()].map(|spec| Spec { kv_heads: 6, ..spec });
    for (student, teacher) in [(&sparse, &sparse), (&sparse, &dense), (&dense, &sparse)] {
        let (student, teacher) = (student.clone(), other(teacher.clone()));
        let meshes = meshes.iter().filter(|sizes| sizes.ep == 1 || student.experts.is_some());
        let one = of(&student, Some(&teacher), MeshSizes::sharded(1), 77);
        let untaught = of(&student, None, MeshSizes::sharded(1), 0);
        assert!(common::distance(&one, &untaught).0 > 1e-5, "the teacher teaches nothing");
        for &sizes in meshes {
            let what = format!("{:?} taught by {:?} on {sizes:?}", student.arch, teacher.arch);
            let (weights, losses) = common::distance(&one, &of(&student, Some(&teacher), sizes, 77));
            assert!(weights < 2e-6 && losses < 2e-6, "{what}: weights differ by {weights}, losses by {losses}");
            let same = loss(&of(&student, Some(&student), sizes, seed)) / loss(&untaught);
            assert!((same / (1.0 - ALPHA) - 1.0).abs() < 1e-5, "{what}: {same} of the loss is left");
        }
    }
}
/// Sequences `range` of a micro-batch.
fn cut(batch: &MicroBatch, range: Range<usize>) -> MicroBatch {
    let starts = &batch.cu_seqlens[range.start..=range.end];
    let rows = starts[0] as usize..starts[starts.len() - 1] as usize;
    MicroBatch {
        tokens: batch.tokens[rows.clone()].to_vec(),
        targets: batch.targets[rows.clone()].to_vec(),
        positions: batch.positions[rows.clone()].to_vec(),
        numbers: batch.numbers.get(range.clone()).unwrap_or_default().to_vec(),
        mismatched: batch.mismatched.as_ref().map(|batch| Box::new(cut(batch, range.clone()))),
        cu_seqlens: starts.iter().map(|c| c - starts[0]).collect(),
        ..MicroBatch::default()
    }
}

/// An expert without rows: the gradient is assigned zeros, whatever the buffer held, and nothing is added.
#[test]
fn an_expert_without_rows_has_no_gradient() {
    let dev = device();
    let upload = |values: &[f32]| {
        let mut buf = dev.alloc(DType::F32, values.len(), Category::Other).unwrap();
        dev.upload(bytemuck::cast_slice(values), buf.view_mut()).unwrap();
        buf
    };
    let mut offsets = dev.alloc(DType::U32, 4, Category::Other).unwrap();
    dev.upload(bytemuck::cast_slice(&[0u32, 2, 2, 3]), offsets.view_mut()).unwrap();
    let (a, b) = (upload(&[1.0, 2.0, 3.0, 4.0, 5.0, 6.0]), upload(&[1.0, 1.0, 2.0]));
    for (accumulate, want) in [
        // Group 0: rows (1, 2) and (3, 4) times 1 and 1; group 2: row (5, 6) times 2; the stride is 3.
        (false, [4.0, 6.0, 9.0, 0.0, 0.0, 9.0, 10.0, 12.0, 9.0]),
        (true, [13.0, 15.0, 9.0, 9.0, 9.0, 9.0, 19.0, 21.0, 9.0]),
    ] {
        let mut c = upload(&[9.0; 9]);
        let (kind, offsets, a, b, c_view) = (Grouped::Weight, offsets.view(), a.view(), b.view(), c.view_mut());
        let (n, k, stride) = (2, 1, 3);
        let alike = false;
        dev.grouped_gemm(GroupedGemm { kind, n, k, offsets, a, b, c: c_view, stride, accumulate, alike }).unwrap();
        let mut got = [0f32; 9];
        dev.download(c.view(), bytemuck::cast_slice_mut(&mut got)).unwrap();
        assert_eq!(got, want);
    }
}
