//! Ranks that share experts on the simulated GPU: they train as on the CPU, whatever the store, the number of ranks,
//! the parts and the rounds that rows travel in; and no buffer is made after the first step.

use crate::common::deep;
use crate::common::stores;
use crate::common::*;
use flatshard::base::{DType, Meter, Result};
use flatshard::comm::recorder::{Entry, Log, Recorder};
use flatshard::comm::seam::Seam;
use flatshard::comm::{Axis, MeshSizes};
use flatshard::device::Device;
use flatshard::device::cpu::CpuDevice;
use flatshard::device::gpu::GpuDevice;
use flatshard::device::gpu::sim::Sim;
use flatshard::engine::{Engine, EngineOptions};
use flatshard::nn::{Arch, Checkpointing, Decoder, Experts, Lora, Spec, Tuning};
use flatshard::optim::ScalerOptions;
use flatshard::store::ShardedOptions;
use std::sync::Arc;

type MakeDevice = fn(usize, Meter) -> Result<Arc<dyn Device>>;

fn on_sim(_: usize, meter: Meter) -> Result<Arc<dyn Device>> {
    Ok(Arc::new(GpuDevice::new(Arc::new(Sim::new()), meter)?))
}
fn on_cpu(_: usize, meter: Meter) -> Result<Arc<dyn Device>> {
    Ok(Arc::new(CpuDevice::new(meter)))
}

/// Experts of widths that fit tensor cores, which do not divide evenly.
fn mixtral() -> Spec {
    let experts = Experts { count: 5, top_k: 2, ff: 16, shared_ff: 0, dense: vec![], ..sparse().experts.unwrap() };
    Spec { arch: Arch::Mixtral, dim: 24, layers: 2, experts: Some(experts), ..llama() }
}
fn shared(world: usize, ep: usize) -> MeshSizes {
    MeshSizes { ep, ..MeshSizes::sharded(world) }
}

/// Of two steps; and of the first: how often each rank sent rows to experts, and gathered their counts. With `skewed`,
/// all tokens of the first step choose the first experts.
fn trained(
    sizes: MeshSizes,
    device: MakeDevice,
    options: &EngineOptions,
    accum: usize,
    skewed: bool,
) -> (Outcome, [usize; 2]) {
    let results = mesh_ranks_on(sizes, device, |rank| {
        let log = Log::default();
        let mesh = rank.mesh.wrap(|group| Arc::new(Recorder::new(group, log.clone())));
        let mut engine = Engine::new(rank.device, &mesh, options)?;
        if skewed {
            // Equal probabilities choose the first experts.
            let dev = engine.device().clone();
            engine.state().0.for_each_shard(&mut |mut shard| {
                for segment in shard.layout.segments.iter().filter(|s| s.name.ends_with("gate.weight")) {
                    let Some(owned) = shard.owned(segment.range()) else { continue };
                    dev.zero(shard.master.reborrow().slice(owned.clone()))?;
                    if let Some(param) = &mut shard.param {
                        dev.zero(param.reborrow().slice(owned))?;
                    }
                }
                Ok(())
            })?;
            engine.state().0.weights_changed()?;
        }
        let (mut reports, mut buffers, mut started) = (vec![], vec![], [0; 2]);
        for number in 1..=2 {
            let place = engine.mesh().group(Axis::Dp).rank();
            let batches: Vec<_> = (0..accum).map(|micro| batch(&options.spec, number, micro, place)).collect();
            reports.push(step(&mut engine, &batches, number)?);
            buffers.push(rank.meter.allocations());
            if number == 1 {
                let count = |seam, what| {
                    let is = |e: &&Entry| e.seam == Some(seam) && e.tag.what == what;
                    log.entries().iter().filter(is).count()
                };
                started = [count(Seam::AllToAll, "dispatch"), count(Seam::AllGather, "rows of experts")];
            }
        }
        assert_eq!(buffers[0], buffers[1], "buffers made in the second step");
        Ok(((reports, fragments(&mut engine)?), started))
    });
    let (results, started): (Vec<_>, Vec<_>) = results.into_iter().unzip();
    assert!(started.iter().all(|n| *n == started[0]), "ranks took different rounds: {started:?}");
    (gathered_of(Decoder::tuned(options.spec.clone(), &options.tuning).unwrap().layouts(), results), started[0])
}

/// Bounds as in simulated_training.rs. Rows travel at once and in halves, and are recomputed from their inputs or not.
#[test]
fn ranks_that_share_experts_train_as_on_the_cpu() {
    let bounds = [(DType::F32, 2e-6, 1e-5, 1e-6), (DType::Bf16, 4e-3, 2e-2, 1e-3), (DType::F16, 5e-4, 2.5e-3, 1.25e-4)];
    let lora = Lora { rank: 4, alpha: 8.0, dropout: 0.0, targets: vec!["all-linear".into()] };
    let adapters = Tuning { lora: Some(lora), ..Tuning::default() };
    let plain = Tuning::default;
    let shared_too = Spec { layers: 3, ..sparse() };
    for (i, (dtype, loss, norm, weight)) in bounds.into_iter().enumerate() {
        let cases = [
            (&shared_too, shared(2, 2), Checkpointing::Off, false, plain()),
            (&mixtral(), shared(4, 4), Checkpointing::Full, true, plain()),
            (&mixtral(), shared(4, 2), Checkpointing::Selective, false, adapters.clone()),
        ];
        let chosen = cases.into_iter().enumerate().filter(|(j, _)| deep::meets(i, *j, 3));
        for (_, (spec, sizes, checkpoint, moe_overlap, tuning)) in chosen {
            let scaler = (dtype == DType::F16).then(ScalerOptions::default);
            let strategy = fsdp(ShardedOptions { dtype, grad_accum: 2, ..sharded() });
            let options = EngineOptions {
                scaler,
                tuning,
                checkpoint,
                moe_overlap,
                aux_coef: 0.1,
                ..options(spec, strategy, SGD)
            };
            let [(cpu, _), (sim, _)] = [on_cpu as MakeDevice, on_sim].map(|on| trained(sizes, on, &options, 2, false));
            for (step, (a, b)) in cpu.steps.iter().zip(&sim.steps).enumerate() {
                let label = format!("{:?} in {dtype} on {sizes:?}, step {}", spec.arch, step + 1);
                let near = |a: f64, b: f64, within: f64| (a - b).abs() <= within * a.abs();
                let losses = [a.0, b.0].map(f64::from_bits);
                assert!(near(losses[0], losses[1], loss), "{label}: losses {losses:?}");
                let norms = [a.1, b.1].map(|bits| f64::from(f32::from_bits(bits)));
                assert!(near(norms[0], norms[1], norm), "{label}: gradient norms {norms:?}");
            }
            let (far, _) = distance(&cpu, &sim);
            assert!(far <= weight, "{:?} in {dtype} on {sizes:?}: a weight is {far} off", spec.arch);
        }
    }
}

/// Losses of a first step have the bits of ranks that share nothing, and all else those of any store and of halves.
#[test]
fn no_bit_depends_on_the_store_or_on_halves() {
    for dtype in deep::first(1, [DType::Bf16, DType::F32]) {
        let of = |sizes, strategy, moe_overlap| {
            let options = EngineOptions { moe_overlap, aux_coef: 0.1, ..options(&mixtral(), strategy, SGD) };
            trained(sizes, on_sim, &options, 1, false).0
        };
        let mut sharded = stores::kinds(dtype).split_off(1).into_iter();
        let first = sharded.next().unwrap();
        let expected = of(shared(4, 2), first.clone(), false);
        assert_same_bits(&expected, &of(shared(4, 2), first.clone(), true), &format!("{dtype}, in halves"));
        for strategy in sharded {
            let what = format!("{dtype}, {}", strategy.name());
            assert_same_bits(&expected, &of(shared(4, 2), strategy, false), &what);
        }
        for ep in [1, 4] {
            let other = of(shared(4, ep), first.clone(), false);
            assert_eq!(other.steps[0].0, expected.steps[0].0, "{dtype}, ep {ep}");
        }
    }
}

/// Rows wait for their round, and results stay. In the second step the router has learned, and there are other rounds.
#[test]
fn skewed_routing_takes_more_rounds_and_loses_nothing() {
    for dtype in deep::first(1, [DType::Bf16, DType::F32]) {
        let train = |ep, checkpoint, moe_overlap| {
            // No more tokens than there are, so that the buffers are as small as they get.
            let strategy = fsdp(ShardedOptions { dtype, ..sharded() });
            let options = EngineOptions {
                checkpoint,
                moe_overlap,
                tokens: 2 * ROW,
                aux_coef: 3.0,
                ..options(&mixtral(), strategy, SGD)
            };
            trained(shared(4, ep), on_sim, &options, 1, true)
        };
        let (alone, none) = train(1, Checkpointing::Off, false);
        assert_eq!(none, [0, 0]);
        // Of 48 rows of a rank, up to 60 are held at once: 96 in two rounds, or 192 in four.
        for (ep, rounds, checkpoint) in [(2, 2, Checkpointing::Off), (4, 4, Checkpointing::Full)] {
            let (whole, started) = train(ep, checkpoint, false);
            // In forward and in backward of two blocks; counts in forward only.
            assert_eq!(started, [2 * 2 * rounds, 2], "{dtype}, ep {ep}");
            assert_eq!(whole.steps[0].0, alone.steps[0].0, "{dtype}, ep {ep}");
            let (far, loss) = distance(&alone, &whole);
            let (near, close) = if dtype == DType::F32 { (2e-6, 1e-5) } else { (1e-3, 4e-2) };
            assert!(far < near && loss < close, "{dtype}, ep {ep}: weights differ by {far}, losses by {loss}");
            let (halves, twice) = train(ep, checkpoint, true);
            assert_eq!(twice, [2 * started[0], 2], "{dtype}, ep {ep}");
            assert_same_bits(&whole, &halves, &format!("{dtype}, ep {ep}, in halves"));
        }
    }
}
