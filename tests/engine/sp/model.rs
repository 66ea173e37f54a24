//! Whole models with sequences sharded over ranks of sp, compared with one rank: loss, norm and weights after steps;
//! evaluation, generation; bytes sent and held.
use crate::common::*;
use flatshard::base::CATEGORIES;
use flatshard::base::rng::Rng;
use flatshard::base::{DType, Result};
use flatshard::comm::MeshSizes;
use flatshard::comm::delayed::Delayed;
use flatshard::comm::recorder::{Log, Recorder};
use flatshard::comm::seam::Seam;
use flatshard::comm::{Axis, Collective};
use flatshard::data::MicroBatch;
use flatshard::device::IGNORE;
use flatshard::engine::{Engine, EngineOptions, Sampling, StepReport};
use flatshard::nn::{Checkpointing, QueryGrowth, SpImpl, Spec};
use flatshard::store::ShardedOptions;
use std::sync::Arc;
use std::time::Duration;

/// Documents of packed samples, none with a length that the ranks divide, some shorter than their number.
const PACKED: [usize; 6] = [29, 1, 13, 3, 40, 5];
/// Dense sequences.
const DENSE: [usize; 2] = [32, 32];
const TOKENS: usize = 97;
const ALL: [SpImpl; 3] = [SpImpl::Ring, SpImpl::AllGather, SpImpl::Ulysses];

fn specs() -> [Spec; 5] {
    let long = |spec: Spec| Spec { max_len: 40, layers: 3, dropout: 0.0, ..spec };
    let gemma3 = Spec { windowed: vec![true, false, true], ..gemma3() };
    let growth = Some(QueryGrowth { beta: 0.5, original: 3, unrotated: false });
    // Queries that grow as well, Ministral 3's, and softcapped scores, Gemma 2's.
    let gemma4 = Spec { windowed: vec![true, false, true], shared_kv: 1, ..gemma4() };
    [Spec { query_growth: growth, ..llama() }, qwen3(), Spec { score_cap: 2.0, ..gemma3 }, gpt(), gemma4].map(long)
}

/// Whether this way can share sequences of the model: Ulysses refuses heads of several sizes.
fn shares(spec: &Spec, sp_impl: SpImpl) -> bool {
    spec.global_heads.is_none() || sp_impl != SpImpl::Ulysses
}

fn documents(spec: &Spec, seed: u64, lengths: &[usize]) -> MicroBatch {
    let (rng, n) = (Rng::new(seed, 4), lengths.iter().sum::<usize>());
    let draw = |i: usize| (rng.u64(i as u64) % spec.vocab as u64) as u32;
    let mut cu_seqlens = vec![0];
    cu_seqlens.extend(lengths.iter().scan(0, |at, &len| {
        *at += len as u32;
        Some(*at)
    }));
    let target =
        |i: usize| if i % 5 == 1 || cu_seqlens.contains(&(i as u32 + 1)) { IGNORE } else { draw(i + 1) as i32 };
    MicroBatch {
        tokens: (0..n).map(draw).collect(),
        targets: (0..n).map(target).collect(),
        positions: lengths.iter().flat_map(|&len| 0..len as u32).collect(),
        cu_seqlens,
        ..MicroBatch::default()
    }
}

fn sizes(dp_shard: usize, sp: usize) -> MeshSizes {
    MeshSizes { dp_replicate: 1, dp_shard, sp, tp: 1, ep: 1 }
}
fn with_sp(spec: &Spec, dtype: DType, sp_impl: SpImpl, checkpoint: Checkpointing) -> EngineOptions {
    let strategy = fsdp(ShardedOptions { dtype, ..sharded() });
    EngineOptions { tokens: TOKENS, sp_impl, checkpoint, ..options(spec, strategy, SGD) }
}

/// Steps in which rank `r` of dp has batch `r` of each step; `one` has all of them in sequence.
fn trained(sizes: MeshSizes, options: &EngineOptions, steps: u64, lengths: [&[usize]; 2]) -> Outcome {
    let dp = sizes.dp_replicate * sizes.dp_shard;
    let results = mesh_ranks(sizes, |rank| {
        let mut engine = Engine::new(rank.device, &rank.mesh, options)?;
        let reports = (1..=steps).map(|number| {
            let batch = |i: usize| documents(&options.spec, 10 * number + i as u64, lengths[i]);
            let batches: Vec<_> =
                if dp == 1 { (0..2).map(batch).collect() } else { vec![batch(rank.mesh.group(Axis::Dp).rank())] };
            step(&mut engine, &batches, number)
        });
        Ok((reports.collect::<Result<Vec<StepReport>>>()?, fragments(&mut engine)?))
    });
    gathered(&options.spec, results)
}

/// Relative tolerances of losses and norms, and of weights.
#[track_caller]
fn assert_near(a: &Outcome, b: &Outcome, within: [f64; 3], label: &str) {
    for (step, (x, y)) in a.steps.iter().zip(&b.steps).enumerate() {
        let losses = (f64::from_bits(x.0), f64::from_bits(y.0));
        let norms = (f64::from(f32::from_bits(x.1)), f64::from(f32::from_bits(y.1)));
        for (what, (x, y), within) in [("loss", losses, within[0]), ("norm", norms, within[1])] {
            assert!((x - y).abs() <= within * x.abs(), "{label}, step {}: {what} {x} and {y}", step + 1);
        }
    }
    let (weights, _) = distance(a, b);
    assert!(f64::from(weights) <= within[2], "{label}: a weight is {weights} off");
}

#[test]
fn ranks_that_share_sequences_train_like_one() {
    for spec in specs() {
        for (dtype, within) in [(DType::F32, [1e-6, 1e-5, 2e-6]), (DType::Bf16, [2e-3, 3e-2, 3e-3])] {
            let one = with_sp(&spec, dtype, SpImpl::Ring, Checkpointing::Off);
            let lengths = [&PACKED[..], &DENSE];
            let expected = trained(sizes(1, 1), &one, 3, lengths);
            for (sizes, sp_impl, checkpoint) in [
                (sizes(1, 2), SpImpl::Ring, Checkpointing::Off),
                (sizes(2, 2), SpImpl::AllGather, Checkpointing::Full),
                (sizes(1, 4), SpImpl::Ring, Checkpointing::Selective),
                (sizes(2, 4), SpImpl::Ring, Checkpointing::Full),
                (sizes(1, 2), SpImpl::Ulysses, Checkpointing::Off),
                (sizes(2, 2), SpImpl::Ulysses, Checkpointing::Full),
                (sizes(1, 4), SpImpl::Ulysses, Checkpointing::Selective),
                (sizes(1, 8), SpImpl::Ulysses, Checkpointing::SelectiveEvery(2)),
            ] {
                if !shares(&spec, sp_impl) {
                    continue;
                }
                let label = format!("{:?} in {dtype}, {sp_impl:?} on {sizes:?}, {checkpoint:?}", spec.arch);
                let options = with_sp(&spec, dtype, sp_impl, checkpoint);
                assert_near(&expected, &trained(sizes, &options, 3, lengths), within, &label);
            }
        }
    }
}

#[test]
fn replicas_that_share_sequences_train_like_one_rank() {
    let [spec, ..] = specs();
    let run = |sizes: MeshSizes, sp_impl| {
        let options = with_sp(&spec, DType::F32, sp_impl, Checkpointing::Off);
        let lengths = [&PACKED[..], &PACKED];
        trained(sizes, &EngineOptions { strategy: ddp(DType::F32), ..options }, 2, lengths)
    };
    let one = run(sizes(1, 1), SpImpl::Ring);
    let replicas = MeshSizes { dp_replicate: 2, dp_shard: 1, sp: 2, tp: 1, ep: 1 };
    for sp_impl in [SpImpl::Ring, SpImpl::Ulysses] {
        assert_near(&one, &run(replicas, sp_impl), [1e-6, 1e-5, 2e-6], &format!("replicas, {sp_impl:?}"));
    }
}

/// Heads are first cut over tp, then each tp rank's over sp: into one head each on 2 x 3 ranks, and for 2 x 4 into
/// shares of groups that form a ring.
#[test]
fn sequences_are_shared_within_tensor_parallel_ranks() {
    let [llama, qwen3, gemma3, ..] = specs().map(|spec| Spec { heads: 6, kv_heads: 2, vocab: 60, ..spec });
    for spec in [llama, qwen3, gemma3] {
        let lengths = [&PACKED[..], &DENSE];
        let run = |sizes, sp_impl, sequence_parallel| {
            let options = with_sp(&spec, DType::F32, sp_impl, Checkpointing::Full);
            trained(sizes, &EngineOptions { sequence_parallel, ..options }, 2, lengths)
        };
        let one = run(sizes(1, 1), SpImpl::Ring, false);
        for (sp, sequence_parallel) in [(2, false), (3, true), (4, false)] {
            let sizes = MeshSizes { tp: 2, ..sizes(1, sp) };
            for sp_impl in ALL {
                let label = format!("{:?}, {sp_impl:?} on {sizes:?}", spec.arch);
                assert_near(&one, &run(sizes, sp_impl, sequence_parallel), [1e-6, 1e-5, 2e-6], &label);
            }
        }
    }
}

#[test]
fn evaluation_and_generation_equal_those_of_one_rank() {
    for spec in specs() {
        let run = |sizes, sp_impl| {
            let options = with_sp(&spec, DType::F32, sp_impl, Checkpointing::Full);
            let mut results = mesh_ranks(sizes, |rank| {
                let mut engine = Engine::new(rank.device, &rank.mesh, &options)?;
                step(&mut engine, &[documents(&spec, 3, &PACKED)], 1)?;
                let (loss, tokens) = engine.evaluate(&[documents(&spec, 1, &PACKED), documents(&spec, 2, &DENSE)])?;
                let text = engine.generate(&[1, 2, 3], 9, &Sampling { temperature: 0.0, ..Sampling::default() })?;
                Ok((loss, tokens, text))
            });
            assert!(results.iter().all(|r| *r == results[0]), "ranks disagree: {results:?}");
            results.swap_remove(0)
        };
        let (loss, tokens, text) = run(sizes(1, 1), SpImpl::Ring);
        let all = ALL.map(|sp_impl| (3, sp_impl)).into_iter().chain([(4, SpImpl::Ulysses)]);
        for (ranks, sp_impl) in all.filter(|&(_, sp_impl)| shares(&spec, sp_impl)) {
            let made = run(sizes(1, ranks), sp_impl);
            assert!((made.0 - loss).abs() < 1e-5 * loss, "{:?} {sp_impl:?}: {} and {loss}", spec.arch, made.0);
            assert_eq!((made.1, &made.2), (tokens, &text), "{:?} {sp_impl:?}", spec.arch);
        }
    }
}

/// Whichever rank is late: the same bits.
#[test]
fn delays_change_nothing() {
    let [_, _, spec, ..] = specs();
    for sp_impl in ALL {
        let options = with_sp(&spec, DType::F32, sp_impl, Checkpointing::Full);
        let run = |seed: Option<u64>| {
            let results = mesh_ranks(sizes(1, 3), |rank| {
                let delayed = |group: Arc<dyn Collective>| -> Arc<dyn Collective> {
                    match seed.filter(|_| group.axis() == Axis::Sp) {
                        Some(seed) => Arc::new(Delayed::new(group, seed, &Seam::ALL, Duration::from_millis(1))),
                        None => group,
                    }
                };
                let mut engine = Engine::new(rank.device, &rank.mesh.wrap(delayed), &options)?;
                let reports = (1..=2).map(|number| step(&mut engine, &[documents(&spec, number, &PACKED)], number));
                Ok((reports.collect::<Result<Vec<StepReport>>>()?, fragments(&mut engine)?))
            });
            gathered(&spec, results)
        };
        let calm = run(None);
        for seed in 0..3 {
            assert_same_bits(&calm, &run(Some(seed)), &format!("{sp_impl:?}, seed {seed}"));
        }
    }
}

/// Bytes that R ranks of n rows receive in a step. A ring: forward, a block of c elements of keys and values makes R -
/// 1 hops in the compute dtype; backward, as many again, and R hops as f32 gradients. Ulysses: a row of queries, keys
/// and values, and one of outputs; backward, their gradients. Key/value heads that several ranks read are sent to each.
/// Full checkpointing recomputes all blocks but the last, with their forward transfers; selective keeps attention's
/// outputs, so a ring sends nothing twice, while Ulysses needs the other rows.
#[test]
fn bytes_match_the_formula() {
    let [spec, ..] = specs();
    let (d, layers) = (spec.head_dim, spec.layers);
    for (ranks, dtype) in [(2, DType::F32), (3, DType::Bf16), (4, DType::Bf16)] {
        let n = PACKED.iter().sum::<usize>().div_ceil(ranks);
        for checkpoint in [Checkpointing::Off, Checkpointing::Selective, Checkpointing::Full] {
            for sp_impl in ALL {
                let options = with_sp(&spec, dtype, sp_impl, checkpoint);
                let received = mesh_ranks(sizes(1, ranks), |rank| {
                    let log = Log::default();
                    let mesh = rank.mesh.wrap(|group| Arc::new(Recorder::new(group, log.clone())));
                    let mut engine = Engine::new(rank.device, &mesh, &options)?;
                    log.clear();
                    let before = mesh.group(Axis::Sp).stats().bytes;
                    step(&mut engine, &[documents(&spec, 1, &PACKED)], 1)?;
                    let among = log.entries().into_iter().filter(|entry| entry.axis == Axis::Sp);
                    // All-gathers and reduce-scatters record their full buffer, of which (R - 1) / R comes from other
                    // ranks.
                    let bytes = |entry: flatshard::comm::recorder::Entry| match entry.seam {
                        Some(Seam::SendRecv | Seam::AllToAll) => entry.bytes,
                        _ => entry.bytes / ranks * (ranks - 1),
                    };
                    let recorded = among.map(bytes).sum::<usize>();
                    assert_eq!(mesh.group(Axis::Sp).stats().bytes - before, recorded as u64, "counted and recorded");
                    Ok(recorded)
                });
                let others = ranks - 1;
                let block = ranks * n * 2 * spec.kv_heads * d;
                let rows = n * 2 * (spec.heads + spec.kv_heads.max(ranks)) * d;
                let is_recomputed = match sp_impl {
                    SpImpl::Ulysses => checkpoint != Checkpointing::Off,
                    _ => checkpoint == Checkpointing::Full,
                };
                let (forward, backward) = match sp_impl {
                    SpImpl::Ring => (others * block * dtype.size(), others * block * dtype.size() + ranks * block * 4),
                    SpImpl::AllGather => (others * block * dtype.size(), others * block * (dtype.size() + 4)),
                    SpImpl::Ulysses => (others * rows * dtype.size(), others * rows * dtype.size()),
                };
                let recomputed = if is_recomputed { (layers - 1) * forward } else { 0 };
                let label = format!("{ranks} {checkpoint:?} {sp_impl:?}: {received:?}");
                assert_eq!(received.iter().sum::<usize>(), layers * (forward + backward) + recomputed, "{label}");
            }
        }
    }
}

#[test]
fn planned_bytes_equal_allocated_bytes() {
    for spec in specs() {
        for sp_impl in ALL.into_iter().filter(|&sp_impl| shares(&spec, sp_impl)) {
            for sizes in [sizes(1, 2), sizes(2, 3), sizes(1, 4)] {
                let options = with_sp(&spec, DType::Bf16, sp_impl, Checkpointing::Off);
                mesh_ranks(sizes, |rank| {
                    let planned = options.bytes(&sizes, rank.mesh.rank())?;
                    let mut engine = Engine::new(rank.device, &rank.mesh, &options)?;
                    let buffers = rank.meter.allocations();
                    step(&mut engine, &[documents(&spec, 1, &PACKED)], 1)?;
                    assert_eq!(rank.meter.allocations(), buffers, "a step allocates buffers");
                    for (&(category, name), planned) in CATEGORIES.iter().zip(&planned) {
                        assert_eq!(
                            rank.meter.live(category),
                            planned.1,
                            "{name} of {:?} {sp_impl:?} {sizes:?}",
                            spec.arch
                        );
                    }
                    Ok(())
                });
            }
        }
    }
}
