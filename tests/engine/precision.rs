//! f16 with its loss scaler, and low-precision gradient reduction: all ranks skip overflowing steps together, the scale
//! otherwise changes no result, and fewer bytes cost the error of one rounding.
use crate::common::stores::{at_once, by_batch, every};
use crate::common::*;
use flatshard::base::DType;
use flatshard::comm::Axis;
use flatshard::comm::recorder::{Log, Recorder};
use flatshard::comm::seam::Seam;
use flatshard::device::IGNORE;
use flatshard::engine::{Engine, EngineOptions, StepReport, Strategy};
use flatshard::nn::{Spec, Tuning};
use flatshard::optim::ScalerOptions;
use flatshard::store::ShardedOptions;
use serde_json::Value;
use std::path::Path;
use std::process::Command;
use std::sync::Arc;

fn scaled(options: EngineOptions, initial: f32) -> EngineOptions {
    EngineOptions { scaler: Some(ScalerOptions { initial, ..ScalerOptions::default() }), ..options }
}
fn half() -> Arc<dyn Strategy> {
    fsdp(ShardedOptions { dtype: DType::F16, ..sharded() })
}
/// Everything in a report that two ranks must agree on, NaN or not.
fn bits(r: &StepReport) -> (u64, u32, bool, Option<u32>, bool) {
    (r.loss.to_bits(), r.grad_norm.to_bits(), r.skipped, r.loss_scale.map(f32::to_bits), r.stuck)
}

/// A power of two changes only exponents: loss, norm, clipping and weights are bitwise equal to those without it.
#[test]
fn without_overflow_the_scale_changes_no_bit() {
    for strategy in [fsdp(sharded()), ddp(DType::F32)] {
        for rule in [ADAMW, SGD] {
            let plain = options(&llama(), strategy.clone(), rule);
            let with = outcome(2, &scaled(plain.clone(), 65536.0), 4, 1);
            assert_same_bits(&outcome(2, &plain, 4, 1), &with, "a scaled loss");
        }
    }
}

#[test]
fn f16_learns_like_f32_and_is_closer_to_it_than_bf16() {
    for spec in [llama(), gpt()] {
        let run = |dtype| {
            outcome(2, &scaled(options(&spec, fsdp(ShardedOptions { dtype, ..sharded() }), SGD), 65536.0), 8, 1)
        };
        let exact = run(DType::F32);
        let [(half, half_loss), (brain, brain_loss)] =
            [DType::F16, DType::Bf16].map(|dtype| distance(&exact, &run(dtype)));
        println!("{:?}: f16 weights {half:.1e} loss {half_loss:.1e}, bf16 {brain:.1e} {brain_loss:.1e}", spec.arch);
        assert!(half_loss < 1e-3 && half_loss < brain_loss && half < brain);
        let falls = f64::from_bits(exact.steps[7].0) - f64::from_bits(exact.steps[0].0);
        assert!(falls.abs() > 10.0 * half_loss, "it has not learned enough to compare: {falls}");
    }
}

/// From 2^20 the gradients of activations overflow f16 until the scale has fallen far enough, in every store alike, and
/// until then no weight changes.
#[test]
fn overflow_skips_the_step_on_every_rank_and_halves_the_scale() {
    const STEPS: u64 = 8;
    for strategy in every(DType::F16) {
        let options = scaled(options(&llama(), strategy, SGD), 2f32.powi(20));
        let results = ranks(2, |rank| {
            let mut engine = Engine::new(rank.device, &rank.mesh, &options)?;
            let (mut reports, mut moved) = (vec![], vec![]);
            for number in 1..=STEPS {
                let before = fragments(&mut engine)?;
                reports.push(step(&mut engine, &[batch(&options.spec, number, 0, rank.rank)], number)?);
                moved.push(before != fragments(&mut engine)?);
            }
            Ok((reports, moved, engine.updates()))
        });
        let name = options.strategy.name();
        for (reports, moved, updates) in &results {
            assert!(reports.iter().map(bits).eq(results[0].0.iter().map(bits)), "{name}: ranks differ");
            let skipped = reports.iter().filter(|r| r.skipped).count();
            assert!(
                (1..STEPS as usize).contains(&skipped) && !reports[STEPS as usize - 1].skipped,
                "{name}: {skipped}"
            );
            assert_eq!(*updates, STEPS - skipped as u64, "{name}");
            assert!(reports.iter().zip(moved).all(|(r, moved)| r.skipped != *moved), "{name}: {moved:?}");
            let mut scale = 2f32.powi(20);
            for report in reports {
                assert_eq!(report.loss_scale, Some(scale), "{name}");
                assert!(report.loss.is_finite() && !report.stuck, "{name}: the loss itself is not scaled");
                scale *= if report.skipped { 0.5 } else { 1.0 };
            }
        }
    }
}

/// Only the head is trained, and all targets are tokens 60 and 61. At this scale only their gradients overflow: rows on
/// one rank of tp, owned by one rank of fsdp. That rank alone detects it; no rank takes the step.
#[test]
fn an_overflow_on_one_rank_of_any_axis_skips_the_step_on_all() {
    let spec = Spec { vocab: 64, dim: 24, heads: 8, kv_heads: 4, head_dim: 4, ff: 40, ..llama() };
    let names = spec.layouts().into_iter().flat_map(|l| l.segments).map(|s| s.name);
    let others = names.filter(|name| name != "lm_head.weight").map(|name| format!("^{}$", name.replace('.', r"\.")));
    let tuning = Tuning { freeze: others.collect(), ..Tuning::default() };
    for sizes in factorizations(4).into_iter().filter(|sizes| sizes.sp == 1) {
        for strategy in [half(), ddp(DType::F16)] {
            let shards = if strategy.name() == "ddp" { 1 } else { sizes.dp_shard };
            let options = EngineOptions { tuning: tuning.clone(), ..options(&spec, strategy, SGD) };
            let try_scale = |initial: f32| {
                let scaler = Some(ScalerOptions { initial, dynamic: false, ..ScalerOptions::default() });
                let options = EngineOptions { scaler, ..options.clone() };
                let results = mesh_ranks(sizes, |rank| {
                    let mut engine = Engine::new(rank.device.clone(), &rank.mesh, &options)?;
                    let mut batch = batch(&spec, 1, 0, rank.mesh.group(Axis::Dp).rank());
                    let words = batch.targets.iter_mut().filter(|t| **t != IGNORE);
                    words.enumerate().for_each(|(i, t)| *t = 60 + i as i32 % 2);
                    let report = step(&mut engine, &[batch], 1)?;
                    let mut sees = false;
                    engine.state().0.for_each_shard(&mut |shard| {
                        let Some(grad) = shard.grad else { return Ok(()) };
                        let mut values = vec![0f32; grad.len()];
                        rank.device.download(grad.as_view(), bytemuck::cast_slice_mut(&mut values))?;
                        sees |= values.iter().any(|g| !g.is_finite());
                        Ok(())
                    })?;
                    Ok((report.skipped, sees))
                });
                let (skipped, sees): (Vec<bool>, Vec<bool>) = results.into_iter().unzip();
                (skipped, sees.into_iter().filter(|&sees| sees).count())
            };
            // 20 to 80 tokens: a target's logit has a gradient of 2e5 to 8e5, any other logit about 1/64 of that.
            assert_eq!(try_scale(2f32.powi(24)), (vec![true; 4], 4 / shards / sizes.tp), "{sizes:?}");
            assert_eq!(try_scale(65536.0), (vec![false; 4], 0), "{sizes:?}");
        }
    }
}

/// Without a smaller scale to try, one bad step is too many.
#[test]
fn a_fixed_scale_that_is_too_high_is_reported_as_stuck() {
    let fixed = ScalerOptions { initial: 2f32.powi(40), dynamic: false, ..ScalerOptions::default() };
    let options = EngineOptions { scaler: Some(fixed), ..options(&llama(), half(), SGD) };
    for reports in ranks(2, |rank| {
        let mut engine = Engine::new(rank.device, &rank.mesh, &options)?;
        train(&mut engine, &options.spec, 3, 1)
    }) {
        assert!(reports.iter().all(|r| r.skipped && r.stuck && r.loss_scale == Some(2f32.powi(40))));
    }
}

/// Bytes received in a step, and the number of buffers that gradients are reduced from.
fn traffic(strategy: Arc<dyn Strategy>, accum: usize) -> (u64, usize) {
    let options = scaled(options(&llama(), strategy, SGD), 1024.0);
    let mut results = ranks(4, |rank| {
        let log = Log::default();
        let mesh = rank.mesh.wrap(|group| Arc::new(Recorder::new(group, log.clone())));
        let mut engine = Engine::new(rank.device, &mesh, &options)?;
        train(&mut engine, &options.spec, 1, accum)?;
        let before = mesh.stats().bytes;
        log.clear();
        train(&mut engine, &options.spec, 1, accum)?;
        let entries = log.entries();
        let reduced = entries
            .iter()
            .filter(|e| matches!(e.seam, Some(Seam::ReduceScatter | Seam::AllReduce)) && e.tag.what == "reduce");
        Ok((mesh.stats().bytes - before, reduced.map(|e| e.bytes).sum()))
    });
    results.swap_remove(0)
}

#[test]
fn two_byte_gradients_halve_the_traffic() {
    for narrow in [DType::Bf16, DType::F16] {
        for (accum, sync_each_batch) in [(1, false), (2, true)] {
            let of = |reduce_dtype| ShardedOptions { reduce_dtype, grad_accum: accum, sync_each_batch, ..sharded() };
            let ((wide, f32s), (less, narrows)) =
                (traffic(fsdp(of(DType::F32)), accum), traffic(fsdp(of(narrow)), accum));
            assert_eq!(f32s, 2 * narrows);
            // A rank of 4 receives 3/4 of each reduce-scattered buffer.
            assert_eq!(wide - less, narrows as u64 * 3 / 4, "{narrow}: all that has changed");
        }
        let ((wide, f32s), (less, narrows)) = (traffic(ddp(DType::F32), 1), traffic(travelling(narrow), 1));
        assert_eq!((f32s, wide - less), (2 * narrows, narrows as u64 * 3 / 2));
    }
}

/// The reduced gradient of one step on 3 ranks, tensor by tensor.
fn gradient(strategy: Arc<dyn Strategy>, accum: usize) -> Vec<(String, Vec<f32>)> {
    let options = EngineOptions { grad_clip: 0.0, ..options(&llama(), strategy, SGD) };
    // Unscaled: what f16 rounds to zero here is part of its error.
    let fragments = ranks(3, |rank| {
        let mut engine = Engine::new(rank.device.clone(), &rank.mesh, &options)?;
        train(&mut engine, &options.spec, 1, accum)?;
        // Written in place of the weights, so that the tensors can be read by name.
        engine.state().0.for_each_shard(&mut |mut shard| match shard.grad {
            Some(grad) => rank.device.copy(grad.as_view(), shard.master.reborrow()),
            None => Ok(()),
        })?;
        fragments(&mut engine)
    });
    whole(&options.spec, &fragments).into_iter().collect()
}
/// Relative to the norm of the exact gradient.
fn error(exact: &[(String, Vec<f32>)], other: &[(String, Vec<f32>)]) -> f64 {
    let pairs = exact.iter().zip(other).flat_map(|(a, b)| a.1.iter().zip(&b.1));
    let (difference, norm) = pairs.fold((0.0, 0.0), |(d, n), (&a, &b)| {
        let (a, b) = (a as f64, b as f64);
        (d + (a - b) * (a - b), n + a * a)
    });
    (difference / norm).sqrt()
}

/// Each rank's part is rounded once, by at most 2^-9 of it in bf16 and 2^-12 in f16 (normal numbers); parts of ranks
/// and micro-batches have different signs and are larger than their sum. Sums are f32, so more micro-batches do not
/// make it worse, as rounding the sum each time would.
#[test]
fn two_byte_gradients_have_the_error_of_one_rounding() {
    for (narrow, bound) in [(DType::Bf16, 2f64.powi(-8)), (DType::F16, 2f64.powi(-10))] {
        for accum in [1, 6] {
            let of = |reduce_dtype| {
                fsdp(ShardedOptions { reduce_dtype, grad_accum: accum, sync_each_batch: true, ..sharded() })
            };
            let exact = gradient(of(DType::F32), accum);
            let sharded = error(&exact, &gradient(of(narrow), accum));
            let replicated = error(&exact, &gradient(travelling(narrow), accum));
            println!("{narrow}, {accum} micro-batches: sharded {sharded:.2e}, replicated {replicated:.2e}");
            for error in [sharded, replicated] {
                assert!(error > 0.01 * bound && error < bound, "{narrow}: {error:.2e}");
            }
        }
    }
}

/// Rounded in the same places, summed in the same order: sharding stores are bitwise equal here too.
#[test]
fn stores_agree_on_two_byte_gradients() {
    use flatshard::store::{ReferenceOptions, Stage, ZeroOptions};
    let reduce_dtype = DType::Bf16;
    let two = |options: ShardedOptions| fsdp(ShardedOptions { reduce_dtype, ..options });
    let tensors = |sync_each_batch| {
        stores::reference(ReferenceOptions { reduce_dtype, sync_each_batch, ..stores::by_tensor(DType::F32, 2) })
    };
    let staged = |stage| stores::zero(ZeroOptions { reduce_dtype, ..stores::staged(stage, DType::F32) });
    let accumulated = ShardedOptions { grad_accum: 2, ..sharded() };
    let each = ShardedOptions { sync_each_batch: true, ..accumulated.clone() };
    let run = |strategy| outcome(3, &options(&llama(), strategy, ADAMW), 3, 2);
    let (at_once, by_batch) = (run(two(accumulated)), run(two(each)));
    assert_same_bits(&at_once, &run(tensors(false)), "reference, at once");
    assert_same_bits(&at_once, &run(staged(Stage::One)), "ZeRO 1");
    assert_same_bits(&by_batch, &run(tensors(true)), "reference, by micro-batch");
    for stage in [Stage::Two, Stage::Three] {
        assert_same_bits(&by_batch, &run(staged(stage)), "ZeRO");
    }
}

/// Every store trains in f16 and ends like the manual one.
#[test]
fn every_store_trains_in_f16() {
    for accum in [1, 2] {
        let run = |strategy| outcome(2, &scaled(options(&llama(), strategy, ADAMW), 4096.0), 3, accum);
        let expected = run(ddp(DType::F16));
        for strategy in at_once(DType::F16, accum) {
            let name = strategy.name();
            assert_same_bits(&expected, &run(strategy), name);
        }
        for strategy in by_batch(DType::F16, accum) {
            let (weights, loss) = distance(&expected, &run(strategy.clone()));
            assert!(weights < 5e-2 && loss < 1e-2, "{}: weights {weights:.1e}, loss {loss:.1e}", strategy.name());
        }
    }
}

fn events(path: &Path) -> Vec<Value> {
    let text = std::fs::read_to_string(path).unwrap();
    let events = text.lines().map(|l| serde_json::from_str::<Value>(l).unwrap());
    events.filter(|e| e["event"] == "step").collect()
}
/// Steps of a tiny run of `program`.
fn run(program: &str, dir: &Path, args: &[&str]) -> Vec<Value> {
    let metrics = dir.join("metrics.jsonl");
    let _ = std::fs::remove_file(&metrics);
    let tiny = "--dataset synthetic --embed-dim 64 --num-layers 2 --num-heads 2 --max-len 32 --batch-size 4 \
    --log-every 1 \
                --warmup-steps 2 --lr 0.01 --device cpu --no-sample --metrics-path";
    let out = Command::new(program).args(tiny.split_whitespace()).arg(&metrics).args(args).output().unwrap();
    assert!(out.status.success(), "{args:?}: {}", String::from_utf8_lossy(&out.stderr));
    events(&metrics)
}
use crate::common::binaries::{DDP, FSDP};

#[test]
fn fp16_runs_learn_like_fp32_and_report_their_scale() {
    let dir = tempfile::tempdir().unwrap();
    let losses = |steps: &[Value]| steps.iter().map(|s| s["loss"].as_f64().unwrap()).collect::<Vec<_>>();
    let plain = run(FSDP, dir.path(), &["--max-steps", "12"]);
    assert!(plain.iter().all(|s| s["loss_scale"].is_null() && s["skipped_steps"] == 0));
    for (program, more) in [(FSDP, "--reduce-dtype=fp32"), (FSDP, "--reduce-dtype=fp16"), (DDP, "--reduce-dtype=bf16")]
    {
        let half = run(program, dir.path(), &["--max-steps", "12", "--precision", "fp16", more]);
        assert!(half.iter().all(|s| s["loss_scale"] == 65536.0 && s["skipped_steps"] == 0), "{half:?}");
        for (step, (a, b)) in losses(&plain).iter().zip(losses(&half)).enumerate() {
            assert!((a - b).abs() < 0.02 * a, "{more}: step {}: {a} in fp32, {b} in fp16", step + 1);
        }
        let norms = |steps: &[Value]| steps[0]["grad_norm"].as_f64().unwrap();
        assert!((norms(&plain) / norms(&half) - 1.0).abs() < 0.01, "the norm is the unscaled gradient's");
        assert!(losses(&half)[11] < 0.9 * losses(&half)[0]);
    }
}

/// Stopped between overflowing steps and doublings of the scale, and resumed: the same lines and files, bit for bit.
#[test]
fn an_fp16_run_resumes_with_its_scale() {
    let dir = tempfile::tempdir().unwrap();
    let path = |name: &str| dir.path().join(name).to_str().unwrap().to_string();
    let fp16 = ["--precision", "fp16", "--initial-scale-power", "24", "--loss-scale-window", "3", "--max-steps", "16"];
    let whole = run(FSDP, dir.path(), &[&fp16[..], &["--save-every", "5", "--ckpt-dir", &path("a")]].concat());
    let from = path("a/step-00000005");
    let again = run(FSDP, dir.path(), &[&fp16[..], &["--resume", &from, "--ckpt-dir", &path("b")]].concat());
    let seen = |s: &Value| ["step", "loss", "grad_norm", "loss_scale", "skipped_steps"].map(|key| s[key].clone());
    assert_eq!(whole[5..].iter().map(seen).collect::<Vec<_>>(), again.iter().map(seen).collect::<Vec<_>>());
    // The scale falls and rises on both sides of the checkpoint.
    let scales: Vec<f64> = whole.iter().map(|s| s["loss_scale"].as_f64().unwrap()).collect();
    let skipped = whole[15]["skipped_steps"].as_u64().unwrap();
    assert!(scales.windows(2).any(|w| w[1] > w[0]) && scales[5] < scales[0], "{scales:?}");
    assert!(skipped > 1 && skipped < 16, "{skipped} skipped: {scales:?}");
    for file in ["model.safetensors", "optimizer.safetensors", "trainer_state.json"] {
        let read = |run: &str| std::fs::read(dir.path().join(run).join("step-00000016").join(file));
        match (read("a"), read("b")) {
            (Ok(a), Ok(b)) => assert!(a == b, "{file} differs"),
            (a, b) => assert!(a.is_err() && b.is_err() && file != "trainer_state.json", "{file} is in one of them"),
        }
    }
    let state: Value =
        serde_json::from_slice(&std::fs::read(dir.path().join("b/step-00000016/trainer_state.json")).unwrap()).unwrap();
    assert!(state["scaler"]["scale"].is_number() && state["scaler"]["good_steps"].is_number(), "{}", state["scaler"]);
}

/// A scale that overflows forever ends the run with advice.
#[test]
fn a_run_that_always_overflows_ends() {
    let args = "--dataset synthetic --embed-dim 64 --num-layers 2 --num-heads 2 --max-len 32 --batch-size 4 --device \
    cpu \
                --precision fp16 --loss-scale 1e12 --max-steps 50";
    let out = Command::new(FSDP).args(args.split_whitespace()).output().unwrap();
    let said = String::from_utf8_lossy(&out.stderr);
    assert_eq!(out.status.code(), Some(1), "{said}");
    assert!(said.contains("11 consecutive non-finite steps, more than --max-bad-steps 10"), "{said}");
}
