//! Training on the simulated GPU, where every operation but the matrix products runs through the PTX kernels: losses as
//! on the CPU, the same launches in each step, and a kernel fault that ends all ranks.

use crate::common::deep;
use crate::common::runs::unlaunched;
use crate::common::*;
use flatshard::base::{DType, Result};
use flatshard::device::Device;
use flatshard::device::gpu::GpuDevice;
use flatshard::device::gpu::sim::{Sim, Tally};
use flatshard::engine::{Dpo, Engine, EngineOptions, Objective, ReferenceModel, Rm, Step, StepReport};
use flatshard::nn::{Arch, Experts, Lora, Spec, Tuning};
use flatshard::optim::ScalerOptions;
use flatshard::store::{ShardedOptions, initialize};
use serde_json::Value;
use std::sync::Arc;

const WORLD: usize = 2;

fn reports(options: &EngineOptions, sim: bool, steps: u64) -> Vec<(StepReport, Vec<f32>)> {
    let device = |_: usize, meter| -> Result<Arc<dyn Device>> {
        match sim {
            true => Ok(Arc::new(GpuDevice::new(Arc::new(Sim::new()), meter)?)),
            false => Ok(Arc::new(flatshard::device::cpu::CpuDevice::new(meter))),
        }
    };
    let mut results = ranks_on(WORLD, device, |rank| {
        let mut engine = Engine::new(rank.device.clone(), &rank.mesh, options)?;
        if let Some((_, store)) = engine.reference() {
            initialize(store, 77, &*rank.device)?; // another model, so that the rewards are not zero
        }
        let reports = match options.objective {
            Objective::Sft => train(&mut engine, &options.spec, steps, 1)?,
            _ => {
                let pair = |number| batch(&options.spec, number, 0, rank.rank);
                let step = |number| Step { number, lr: 0.01 * number as f32, tokens: WORLD as u64 };
                (1..=steps).map(|n| engine.train_step(&[pair(n)], &step(n))).collect::<Result<Vec<_>>>()?
            }
        };
        let weights = fragments(&mut engine)?.into_iter().flat_map(|(_, _, values)| values).collect::<Vec<f32>>();
        Ok(reports.into_iter().map(|report| (report, weights.clone())).collect::<Vec<_>>())
    });
    results.swap_remove(0)
}

/// Experts of widths that fit tensor cores, where `sparse()` has others and a shared one.
fn mixtral() -> Spec {
    let experts = Experts { count: 5, top_k: 2, ff: 16, shared_ff: 0, dense: vec![], ..sparse().experts.unwrap() };
    Spec { arch: Arch::Mixtral, dim: 24, experts: Some(experts), ..llama() }
}

/// f32: the order of sums differs. bf16: roundings of activations differ, by 2^-9 each; f16: 2^-12. SGD, because AdamW
/// moves a weight by the learning rate whatever the sign of a near-zero gradient; AdamW is tested below.
#[test]
fn losses_and_weights_match_the_cpu() {
    let bounds = [(DType::F32, 2e-6, 1e-5, 1e-6), (DType::Bf16, 4e-3, 2e-2, 1e-3), (DType::F16, 5e-4, 2.5e-3, 1.25e-4)];
    for (i, (dtype, loss, norm, weight)) in bounds.into_iter().enumerate() {
        let lora = Lora { rank: 4, alpha: 8.0, dropout: 0.2, targets: vec!["all-linear".into()] };
        let adapters = Tuning { lora: Some(lora), ..Tuning::default() };
        let whole = [llama(), gpt(), sparse(), mixtral()].map(|spec| (spec, Tuning::default()));
        let cases = whole.into_iter().chain([(llama(), adapters)]).enumerate();
        for (_, (spec, tuning)) in cases.filter(|(j, _)| deep::meets(i, *j, 3)) {
            let scaler = (dtype == DType::F16).then(ScalerOptions::default);
            let strategy = fsdp(ShardedOptions { dtype, ..sharded() });
            let options = EngineOptions { scaler, tuning, aux_coef: 0.1, ..options(&spec, strategy, SGD) };
            let (cpu, sim) = (reports(&options, false, 3), reports(&options, true, 3));
            for (step, ((a, x), (b, y))) in cpu.iter().zip(&sim).enumerate() {
                let label = format!("{:?} in {dtype}, step {}", spec.arch, step + 1);
                assert!(!a.skipped && !b.skipped, "{label}");
                let near = |a: f64, b: f64, within: f64| (a - b).abs() <= within * a.abs();
                assert!(near(a.loss, b.loss, loss), "{label}: loss {} and {}", a.loss, b.loss);
                if let (Some(a), Some(b)) = (a.experts, b.experts) {
                    assert!(near(a.aux_loss, b.aux_loss, 10.0 * loss), "{label}: balance {a:?} and {b:?}");
                }
                let norms = (a.grad_norm as f64, b.grad_norm as f64);
                assert!(near(norms.0, norms.1, norm), "{label}: gradient norm {norms:?}");
                let far = x.iter().zip(y).map(|(x, y)| (x - y).abs()).fold(0.0, f32::max);
                assert!(far <= weight, "{label}: a weight is {far} off");
            }
        }
    }
}

/// A pair on each rank. A sum of log-probabilities has more rounding errors than a mean of losses.
#[test]
fn preferences_match_the_cpu() {
    let dpo = Objective::Dpo(Dpo { beta: 0.3, label_smoothing: 0.1, ipo: false, nll_coef: 0.2 });
    let frozen = ReferenceModel::Frozen(llama().into());
    let scored = Spec { score: true, ..llama() };
    for (dtype, within) in [(DType::F32, 1e-5), (DType::Bf16, 1e-2)] {
        for (spec, objective, reference) in
            [(llama(), dpo, frozen.clone()), (scored.clone(), Objective::Rm(Rm), ReferenceModel::Base)]
        {
            let strategy = fsdp(ShardedOptions { dtype, ..sharded() });
            let options = EngineOptions { objective, reference, ..options(&spec, strategy, SGD) };
            let (cpu, sim) = (reports(&options, false, 3), reports(&options, true, 3));
            for (step, ((a, x), (b, y))) in cpu.iter().zip(&sim).enumerate() {
                let label = format!("{objective:?} in {dtype}, step {}", step + 1);
                assert!((a.loss - b.loss).abs() <= within * a.loss, "{label}: loss {} and {}", a.loss, b.loss);
                let norms = (a.grad_norm, b.grad_norm);
                assert!((norms.0 - norms.1).abs() as f64 <= 5.0 * within * norms.0 as f64, "{label}: norm {norms:?}");
                let rewards = [a, b].map(|report| {
                    let means = report.preference.unwrap();
                    [means.reward_chosen, means.reward_rejected]
                });
                let off = [0, 1].map(|i| (rewards[0][i] - rewards[1][i]).abs());
                assert!(off.iter().all(|&off| off <= within), "{label}: rewards {rewards:?}");
                assert!(rewards[0].iter().all(|reward| *reward != 0.0), "{label}: rewards {rewards:?}");
                let far = x.iter().zip(y).map(|(x, y)| (x - y).abs()).fold(0.0, f32::max);
                assert!(far as f64 <= 0.2 * within, "{label}: a weight is {far} off");
            }
        }
    }
}

/// Whatever holds the weights, and however often they are reduced.
#[test]
fn every_store_has_the_same_bits_with_experts() {
    for dtype in deep::first(1, [DType::Bf16, DType::F32]) {
        let of = |strategy| {
            let options = EngineOptions { aux_coef: 0.1, ..options(&mixtral(), strategy, SGD) };
            let bits = |(report, _): &(StepReport, _)| (report.loss.to_bits(), report.grad_norm.to_bits());
            reports(&options, true, 2).iter().map(bits).collect::<Vec<_>>()
        };
        let all: Vec<_> = stores::kinds(dtype).into_iter().map(of).collect();
        assert!(all.iter().all(|bits| *bits == all[0]), "{dtype}: {all:?}");
    }
}

/// The same launches, products, copies and waits in every step, and no new buffer after the first, with experts too:
/// however many rows each has.
#[test]
fn every_step_has_the_same_launches() {
    let of = |spec| {
        let options = options(&spec, fsdp(ShardedOptions { dtype: DType::Bf16, ..sharded() }), ADAMW);
        let counts = ranks(WORLD, |rank| {
            let sim = Arc::new(Sim::new());
            let device: Arc<dyn Device> = Arc::new(GpuDevice::new(sim.clone(), rank.meter.clone())?);
            let mut engine = Engine::new(device, &rank.mesh, &options)?;
            let mut each = vec![];
            for number in 1..=4 {
                let before = sim.tally();
                step(&mut engine, &[batch(&options.spec, number, 0, rank.rank)], number)?;
                let Tally { launches, products, copies, waits, .. } = sim.tally();
                let done = [launches - before.launches, products - before.products, copies - before.copies];
                each.push((done, waits - before.waits, rank.meter.allocations()));
            }
            Ok(each)
        });
        for each in &counts {
            assert_eq!(each[1..], [each[3]; 3], "steps 2, 3 and 4: [launches, products, copies], waits, buffers");
        }
        counts[0][3].0
    };
    // Four blocks; backward recomputes norms and activations. A change here changes the work of a GPU.
    assert_eq!(of(llama()), [120, 87, 9], "[launches, products, copies] of a step");
    of(mixtral());
}

/// The optimizer of rank 1 reads past its gradient: that rank reports it, and rank 0 fails at once, before its timeout.
#[test]
fn a_kernel_fault_on_one_rank_ends_the_others() {
    let options = options(&llama(), fsdp(sharded()), ADAMW);
    let results = try_ranks_on(
        WORLD,
        |rank, meter| {
            let sim = Sim::new();
            let sim = if rank == 1 { sim.replace("adamw", "adamw.ptx", READS_PAST_ITS_GRADIENT)? } else { sim };
            Ok(Arc::new(GpuDevice::new(Arc::new(sim), meter)?))
        },
        |rank| {
            let mut engine = Engine::new(rank.device, &rank.mesh, &options)?;
            train(&mut engine, &options.spec, 3, 1)
        },
    );
    let said: Vec<String> = results.into_iter().map(|r| r.unwrap_err().to_string()).collect();
    for part in ["adamw", "sim", "out of bounds", "adamw.ptx:", "cta 0 warp 0 lane 0", "'g'"] {
        assert!(said[1].contains(part), "no {part:?} in: {}", said[1]);
    }
    assert!(said[0].ends_with("rank 1 failed"), "{}", said[0]);
}

/// Loss and gradient norm of each step of a run of the binary.
fn run(device: &str, precision: &str, more: &[&str]) -> Vec<[f64; 2]> {
    let dir = tempfile::TempDir::new().unwrap();
    let metrics = dir.path().join("metrics.jsonl");
    let mut command = unlaunched(crate::common::binaries::FSDP);
    let tiny = "--nproc-per-node 2 --dataset synthetic --embed-dim 64 --num-layers 2 --num-heads 2 --num-kv-heads 1 \
                --max-len 16 --batch-size 2 --grad-accum 2 --max-steps 4 --warmup-steps 1 --lr 0.02 \
                --activation-checkpoint \
                --no-eval";
    command.args(tiny.split_whitespace()).args(["--device", device, "--precision", precision]).args(more);
    let out = command.arg("--metrics-path").arg(&metrics).output().unwrap();
    assert!(out.status.success(), "{device} {precision}: {}", String::from_utf8_lossy(&out.stderr));
    let text = std::fs::read_to_string(&metrics).unwrap();
    let events: Vec<Value> = text.lines().map(|l| serde_json::from_str(l).unwrap()).collect();
    assert!(events[0]["device"].as_str().unwrap().starts_with(device), "{}", events[0]["device"]);
    let steps = events.iter().filter(|e| e["event"] == "step");
    for (step, key) in steps.flat_map(|e| ["forward_time_s", "backward_time_s", "optimizer_time_s"].map(|key| (e, key)))
    {
        assert_eq!(step[key].is_null(), more.contains(&"--compile"), "a graph has no parts to time: {step}");
    }
    events
        .iter()
        .filter(|e| e["event"] == "step")
        .map(|e| ["loss", "grad_norm"].map(|key| e[key].as_f64().unwrap()))
        .collect()
}

/// AdamW moves a weight by the learning rate whatever the sign of a near-zero gradient, and both it and clipping hide
/// the gradient's scale: so norms before clipping are compared too, and SGD without clipping.
#[test]
fn run_fsdp_trains_on_it_end_to_end() {
    let sgd = ["--optimizer", "sgd", "--grad-clip", "0", "--lr", "0.05"];
    let adamw = [("fp32", [1e-4, 1e-4]), ("bf16", [2e-2, 5e-2]), ("fp16", [1e-2, 5e-2])].map(|case| (case, &[][..]));
    let sgd = [("fp32", [1e-6, 1e-5]), ("bf16", [4e-3, 2e-2])].map(|case| (case, &sgd[..]));
    for ((precision, within), rule) in adamw.into_iter().chain(sgd) {
        let (cpu, sim) = (run("cpu", precision, rule), run("sim", precision, rule));
        assert_eq!((cpu.len(), sim.len()), (4, 4));
        for (step, (a, b)) in cpu.iter().zip(&sim).enumerate() {
            for (i, what) in ["loss", "gradient norm"].into_iter().enumerate() {
                let (a, b) = (a[i], b[i]);
                assert!(
                    (a - b).abs() <= within[i] * a,
                    "{precision} {rule:?}, step {}: {what} {a}, on sim {b}",
                    step + 1
                );
            }
        }
        assert!(sim[3][0] < 0.9 * sim[0][0] || !rule.is_empty(), "{precision}: it learns: {sim:?}");
    }
}

/// The learning rate warms up and falls, there is dropout, and gradients accumulate over two micro-batches.
#[test]
fn graphs_are_bitwise_equal_to_eager_steps() {
    let more = ["--dropout", "0.2", "--lr-scheduler", "cosine"];
    let single = run("sim", "bf16", &more);
    let graphs = run("sim", "bf16", &[&more[..], &["--compile"]].concat());
    assert_eq!(single.len(), 4);
    assert_eq!(single, graphs);
}
