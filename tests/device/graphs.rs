//! Steps as graphs on the simulated GPU: graph launches are bitwise equal to eager calls, with far fewer calls; a graph
//! is not replayed when anything in it changed; and a step waits once.

use crate::common::deep;
use crate::common::*;
use flatshard::base::{Category, DType, Meter, Result};
use flatshard::comm::cuts;
use flatshard::device::gpu::calls::Calls;
use flatshard::device::gpu::graphs::{Given, Graphs};
use flatshard::device::gpu::sim::{Sim, Tally};
use flatshard::device::gpu::{Arg, Driver, GpuDevice, Kernel, LaunchShape};
use flatshard::device::{Buf, Device};
use flatshard::engine::{Engine, EngineOptions, StepReport};
use flatshard::nn::{Checkpointing, Lora, Spec, Tuning};
use flatshard::optim::ScalerOptions;
use flatshard::store::ShardedOptions;
use std::sync::Arc;

const WORLD: usize = 2;

/// The result of a rank's step.
#[derive(Clone, PartialEq, Debug)]
struct Done {
    report: StepReport,
    given: Given,
    tally: [u64; 3],
}

/// Rank 0's report of each step with its counts, and the final weights. `accum` gives the micro-batches of each step.
fn trained(
    options: &EngineOptions,
    steps: u64,
    graphs: bool,
    accum: impl Fn(u64) -> usize + Sync,
) -> (Vec<Done>, Vec<f32>) {
    let rank = |rank: Rank| {
        let sim = Arc::new(Sim::new());
        let front = graphs.then(|| Arc::new(Graphs::new(sim.clone())));
        let driver: Arc<dyn Driver> = match &front {
            Some(front) => front.clone(),
            None => sim.clone(),
        };
        let device: Arc<dyn Device> = Arc::new(GpuDevice::new(driver, rank.meter.clone())?);
        let mesh = match &front {
            Some(front) => cuts::watch(rank.mesh, front),
            None => rank.mesh,
        };
        let mut engine = Engine::new(device.clone(), &mesh, options)?;
        // What ranks agree on before the next step is downloaded with the step's result.
        let (word, mut read) = (device.alloc(DType::F32, 1, Category::Other)?, [1u8; 4]);
        let given = || front.as_ref().map_or(Given::default(), |front| front.given());
        let mut done = vec![];
        for number in 1..=steps {
            let batches: Vec<_> = (0..accum(number)).map(|i| batch(&options.spec, number, i, rank.rank)).collect();
            let tokens = engine.global_count(batches.iter().map(|b| b.loss_tokens()).sum())?;
            let (before, counted) = (given(), sim.tally());
            let step = flatshard::engine::Step { number, lr: 0.01 * number as f32, tokens };
            engine.begin_step(&batches, &step)?;
            // Otherwise the simulated GPU checks for faults after each launch.
            assert!(!graphs || sim.tally().waits == counted.waits, "the host waits before the end of a step");
            let report = engine.end_step(&step, Some((word.view(), &mut read)))?;
            assert_eq!(read, [0; 4]);
            let (now, Tally { waits, uploads, .. }) = (given(), sim.tally());
            let given = Given {
                asked: now.asked - before.asked,
                single: now.single - before.single,
                graphs: now.graphs - before.graphs,
                captured: now.captured - before.captured,
            };
            let tally = [waits - counted.waits, uploads - counted.uploads, rank.meter.allocations() as u64];
            done.push(Done { report, given, tally });
        }
        let weights = fragments(&mut engine)?.into_iter().flat_map(|(_, _, values)| values).collect::<Vec<f32>>();
        Ok((done, weights))
    };
    ranks(WORLD, rank).swap_remove(0)
}

fn dropping(spec: Spec) -> Spec {
    Spec { dropout: 0.2, ..spec }
}

/// The learning rate changes with each step, masks with each micro-batch, gradients accumulate over two of them, and in
/// f16 the loss scale changes too: a value baked into a graph at capture would be detected.
#[test]
fn graphs_are_bitwise_equal_to_eager_calls() {
    let sharded = |dtype| fsdp(ShardedOptions { dtype, grad_accum: 2, ..sharded() });
    let scaler = Some(ScalerOptions { initial: 256.0, window: 2, ..ScalerOptions::default() });
    let full = Checkpointing::Full;
    let lora = Some(Lora { rank: 4, alpha: 8.0, dropout: 0.2, targets: vec!["all-linear".into()] });
    let tuning = Tuning { lora, ..Tuning::default() };
    let cases = [
        EngineOptions { checkpoint: full, tuning, ..options(&llama(), sharded(DType::Bf16), ADAMW) },
        EngineOptions { checkpoint: full, ..options(&dropping(llama()), sharded(DType::Bf16), ADAMW) },
        EngineOptions { scaler, ..options(&dropping(llama()), sharded(DType::F16), ADAMW) },
        options(&gpt(), sharded(DType::F32), SGD),
        options(&gpt(), ddp(DType::F32), ADAMW),
    ];
    for options in deep::first(3, cases) {
        let label = format!("{:?} by {}", options.spec.arch, options.strategy.dtype());
        let (single, weights) = trained(&options, 5, false, |_| 2);
        let (pieces, same) = trained(&options, 5, true, |_| 2);
        let reports = |done: &[Done]| done.iter().map(|d| d.report).collect::<Vec<_>>();
        assert_eq!(reports(&pieces), reports(&single), "{label}");
        let bits = |weights: &[f32]| weights.iter().map(|w| w.to_bits()).collect::<Vec<_>>();
        assert!(bits(&same) == bits(&weights), "{label}: other weights");

        // From the third step on nothing is captured: only graph launches, and calls that stand alone between two
        // collectives.
        let Given { asked, single, graphs, .. } = pieces[4].given;
        assert_eq!([pieces[2].given, pieces[3].given], [pieces[4].given; 2], "{label}: steps differ");
        assert_eq!(pieces[4].given.captured, 0, "{label}");
        assert!(asked >= 4 * (single + graphs), "{label}: {asked} calls asked for, {single} and {graphs} graphs given");
        // One wait, at the end. Numbers are uploaded once; for each micro-batch tokens, targets, positions, documents
        // and keys.
        for done in &pieces {
            assert_eq!(done.tally[..2], [1, 1 + 2 * 5], "{label}: waits, uploads");
        }
        assert!(pieces[1..].iter().all(|done| done.tally[2] == pieces[0].tally[2]), "{label}: a step allocates");
    }
}

/// The calls of one step on a GPU: a change here changes the benefit of --compile.
#[test]
fn a_step_needs_a_tenth_of_the_calls() {
    let options = options(&llama(), fsdp(ShardedOptions { dtype: DType::Bf16, ..sharded() }), ADAMW);
    let (done, _) = trained(&options, 4, true, |_| 1);
    assert_eq!(done[0].given, Given { asked: 216, single: 216, graphs: 0, captured: 0 });
    assert_eq!(done[3].given, Given { asked: 216, single: 0, graphs: 12, captured: 0 });
}

/// Another number of micro-batches in each step: captured graphs are used where they fit, the rest runs eagerly.
#[test]
fn steps_of_varying_shape_are_correct() {
    let options = options(&dropping(llama()), fsdp(sharded()), ADAMW);
    let accum = |number: u64| [1, 2, 1, 3][number as usize % 4];
    let ((single, weights), (pieces, same)) = (trained(&options, 6, false, accum), trained(&options, 6, true, accum));
    assert!(single.iter().zip(&pieces).all(|(a, b)| a.report == b.report));
    assert_eq!(weights, same);
}

fn floats(dev: &dyn Device, values: &[f32]) -> Buf {
    let mut buf = dev.alloc(DType::F32, values.len(), Category::Other).unwrap();
    dev.upload(bytemuck::cast_slice(values), buf.view_mut()).unwrap();
    buf
}
fn read(dev: &dyn Device, buf: &Buf) -> Vec<f32> {
    let mut values = vec![0.0f32; buf.len()];
    dev.download(buf.view(), bytemuck::cast_slice_mut(&mut values)).unwrap();
    values
}

/// The bug this guards against: a changing number passed as a kernel argument. Such a graph is never replayed, so its
/// results are right, and the cost is visible.
#[test]
fn changed_scalar_arguments_are_never_stale() {
    for (changes, graphs) in [(true, 0), (false, 5)] {
        let front = Arc::new(Graphs::new(Arc::new(Sim::new())));
        let dev = GpuDevice::new(front.clone(), Meter::default()).unwrap();
        let (mut x, mut y, mut want) = (floats(&dev, &[1.0; 8]), floats(&dev, &[0.0; 8]), 0.0);
        for step in 0..6 {
            let factor = if changes { 2.0 + step as f32 } else { 2.0 };
            dev.upload(bytemuck::cast_slice(&[1f32; 8]), x.view_mut()).unwrap();
            dev.scale(factor, x.view_mut()).unwrap();
            dev.add(x.view(), y.view_mut()).unwrap();
            want += factor;
            assert_eq!(read(&dev, &y), [want; 8], "step {step}");
        }
        assert_eq!(front.given().graphs, graphs);
    }
}

/// The simulated GPU replays what was captured: arguments as they were, memory as it is now.
#[test]
fn a_graph_keeps_its_arguments_and_reads_current_memory() {
    let sim = Arc::new(Sim::new());
    let dev = GpuDevice::new(sim.clone(), Meter::default()).unwrap();
    let (mut x, mut y) = (floats(&dev, &[1.0; 8]), floats(&dev, &[10.0; 8]));
    let mut factor = 3.0;
    let mut calls = Calls::default();
    let scale = Kernel { variant: "scale_f32", entry: "scale" };
    let args = [Arg::InOut(x.view_mut()), Arg::U64(8), Arg::F32(factor)];
    calls.launch(scale, LaunchShape::line(1, 256), &args).unwrap();
    calls.copy(x.view(), y.view_mut());
    let mut graph = sim.capture(calls).unwrap();
    assert_eq!(read(&dev, &y), [10.0; 8], "a capture does nothing");
    factor += 4.0;
    dev.upload(bytemuck::cast_slice(&[2f32; 8]), x.view_mut()).unwrap();
    sim.replay(&mut graph).unwrap();
    assert_eq!(read(&dev, &y), [6.0; 8], "twice three, and not {factor}");
    sim.replay(&mut graph).unwrap();
    assert_eq!((read(&dev, &y)[0], sim.tally().graphs), (18.0, 2));
}

/// Buffers freed after their call live as long as it needs them; and their replacements are told apart, although the
/// calls look the same.
#[test]
fn operands_outlive_their_calls() {
    let front = Arc::new(Graphs::new(Arc::new(Sim::new())));
    let dev = GpuDevice::new(front.clone(), Meter::default()).unwrap();
    let mut y = floats(&dev, &[0.0; 8]);
    for step in 1..=4 {
        let x = floats(&dev, &[step as f32; 8]);
        dev.add(x.view(), y.view_mut()).unwrap();
        dev.add(x.view(), y.view_mut()).unwrap();
        drop(x);
    }
    assert_eq!(read(&dev, &y), [20.0; 8]);
}

/// A fault in a graph that a collective ended is reported by this rank, and by the other one before its timeout.
#[test]
fn a_kernel_fault_in_a_graph_ends_all_ranks() {
    let options = options(&llama(), fsdp(sharded()), ADAMW);
    let results = try_ranks_on(
        WORLD,
        |_, meter| Ok(Arc::new(flatshard::device::cpu::CpuDevice::new(meter))),
        |rank| -> Result<Vec<StepReport>> {
            let sim = if rank.rank == 1 {
                Sim::new().replace("adamw", "adamw.ptx", READS_PAST_ITS_GRADIENT)?
            } else {
                Sim::new()
            };
            let front = Arc::new(Graphs::new(Arc::new(sim)));
            let device: Arc<dyn Device> = Arc::new(GpuDevice::new(front.clone(), rank.meter.clone())?);
            let mesh = cuts::watch(rank.mesh, &front);
            let mut engine = Engine::new(device, &mesh, &options)?;
            train(&mut engine, &options.spec, 3, 1)
        },
    );
    let said: Vec<String> = results.into_iter().map(|r| r.unwrap_err().to_string()).collect();
    assert!(said[1].contains("adamw") && said[1].contains("out of bounds"), "{}", said[1]);
    assert!(said[0].ends_with("rank 1 failed"), "{}", said[0]);
}
