//! A tensor-parallel model compared with the same model on one rank: losses, all gradients, traffic, and planned
//! memory. Weights are functions of a tensor's name and an element's index in the whole tensor, so every split has the
//! same weights.
mod specs;

use self::specs::*;
use crate::common::plain_store::{Docs, Plain, Told, distance, dot};
use crate::common::worlds::falcon_h1;
use flatshard::base::CATEGORIES;
use flatshard::base::rng::Rng;
use flatshard::base::{DType, Meter};
use flatshard::comm::recorder::{Entry, Log, Recorder};
use flatshard::comm::seam::Seam;
use flatshard::comm::{MeshSizes, shm};
use flatshard::device::Device;
use flatshard::device::cpu::CpuDevice;
use flatshard::device::gpu::GpuDevice;
use flatshard::device::gpu::sim::Sim;
use flatshard::engine::PlannedRank;
use flatshard::nn::{
    Activation, Arch, Checkpointing, Cuts, Decoder, Experts, Groups, Init, Lora, Minimized, QueryGrowth, Segment,
    Slice, Spec, Split, Tp, Tuning, WorkspaceOptions,
};
use std::collections::BTreeMap;
use std::sync::Arc;

/// 27 tokens: not a multiple of 2 or 4, so the last rank's rows are padded.
const LENGTHS: [usize; 4] = [13, 1, 8, 5];
const LOSS_SCALE: f32 = 0.25;
const DROPOUT_KEY: u64 = 99;
/// Factor of the load-balancing loss.
const BALANCE: f32 = 2.0;

#[derive(Clone)]
struct Run {
    spec: Spec,
    tuning: Tuning,
    cuts: Cuts,
    tp: usize,
    sequence_parallel: bool,
    checkpoint: Checkpointing,
    dtype: DType,
    lengths: Vec<usize>,
    /// On the simulated GPU.
    sim: bool,
    /// Weights are shifted by this much along a fixed direction.
    nudge: f32,
}

impl Run {
    fn alone(spec: Spec) -> Run {
        Run {
            spec,
            tuning: Tuning::default(),
            cuts: Cuts::ALL,
            tp: 1,
            sequence_parallel: false,
            checkpoint: Checkpointing::Off,
            dtype: DType::F32,
            lengths: LENGTHS.to_vec(),
            sim: false,
            nudge: 0.0,
        }
    }
    fn over(&self, tp: usize, sequence_parallel: bool) -> Run {
        Run { tp, sequence_parallel, ..self.clone() }
    }
}

/// The results of a pass.
struct Made {
    loss: f64,
    /// By whole tensor.
    grads: BTreeMap<String, Vec<f32>>,
    /// The next-token logits of the last token.
    logits: Vec<f32>,
    /// Planned and allocated bytes by category, on each rank.
    bytes: Vec<(Vec<usize>, Vec<usize>)>,
    /// Rank 0's collectives in training.
    entries: Vec<Entry>,
}

fn weight(segment: &Segment, place: usize, nudge: f32) -> f32 {
    let normal = Rng::named(7, &segment.name).normal(place as u64);
    let start = match segment.init {
        Init::Normal(_) | Init::Uniform(_) => 0.3 * normal,
        Init::Constant(c) => c + 0.2 * normal,
    };
    start + nudge * direction(segment, place)
}
fn direction(segment: &Segment, place: usize) -> f32 {
    Rng::named(8, &segment.name).normal(place as u64)
}
/// Index in the whole tensor of an element of this rank's part.
fn places(segment: &Segment) -> Vec<usize> {
    segment.stretches(0..segment.len()).flat_map(|(part, first)| first..first + part.len()).collect()
}

fn made(run: &Run) -> Made {
    let meters: Vec<Meter> = (0..run.tp).map(|_| Meter::default()).collect();
    let sizes = MeshSizes { dp_replicate: 1, dp_shard: 1, sp: 1, tp: run.tp, ep: 1 };
    let ranks = std::thread::scope(|scope| {
        let meshes = shm::threads(sizes, &meters).unwrap();
        let threads: Vec<_> = meshes
            .into_iter()
            .zip(&meters)
            .map(|(mesh, meter)| {
                scope.spawn(move || {
                    let log = Log::default();
                    let mesh = mesh.wrap(|group| Arc::new(Recorder::new(group, log.clone())));
                    let tp = Slice { index: mesh.coords.tp, of: run.tp };
                    let (sequence_parallel, cuts) = (run.sequence_parallel, run.cuts);
                    let split = Split { tp, sequence_parallel, cuts, ..Split::NONE };
                    let dev: Box<dyn Device> = match run.sim {
                        true => Box::new(GpuDevice::new(Arc::new(Sim::new()), meter.clone()).unwrap()),
                        false => Box::new(CpuDevice::new(meter.clone())),
                    };
                    let dev = &*dev;
                    let decoder = Decoder::split(run.spec.clone(), &run.tuning, &split).unwrap();
                    let tokens = run.lengths.iter().sum::<usize>() + 1;
                    let options =
                        WorkspaceOptions { tokens, dtype: run.dtype, checkpoint: run.checkpoint, train: true };
                    let held = |meter: &Meter| CATEGORIES.map(|(category, _)| meter.live(category));
                    let before = held(meter);
                    let mut ws = decoder.workspace(dev, &Groups::of(&mesh), &options).unwrap();
                    let there = held(meter).iter().zip(before).map(|(now, before)| now - before).collect();
                    let (sizes, rank) = (mesh.sizes, mesh.rank());
                    let planned = PlannedRank { mesh: sizes, rank, sharing: sizes.world(), stage: 0, gpu: false }
                        .bytes(|dev, mesh| decoder.workspace(&*dev, &Groups::of(mesh), &options))
                        .unwrap();
                    let planned = planned.into_iter().map(|(_, bytes)| bytes).collect();
                    let places: BTreeMap<String, Vec<usize>> = decoder
                        .layouts()
                        .iter()
                        .flat_map(|l| &l.segments)
                        .map(|s| (s.name.clone(), places(s)))
                        .collect();
                    let value = |s: &Segment, i: usize| weight(s, places[&s.name][i], run.nudge);
                    let mut store = Plain::new(dev, &decoder, run.dtype, value);
                    let docs = Docs::random(dev, 5, run.spec.vocab, &run.lengths, 6);
                    let told = Told::dropping(dev, &decoder, LOSS_SCALE, DROPOUT_KEY).aux(dev, BALANCE);
                    log.clear();
                    decoder.train(dev, &mut store, &docs.batch(), &mut ws, &told.micro(), Minimized::Tokens).unwrap();
                    let entries = log.entries();
                    let loss = ws.take_loss(dev).unwrap();
                    decoder.evaluate(dev, &mut store, &docs.batch(), &mut ws, None).unwrap();
                    let again = ws.take_loss(dev).unwrap();
                    let adapters = run.tuning.lora.as_ref().map_or(0.0, |lora| lora.dropout);
                    assert!(
                        run.spec.dropout + adapters > 0.0 || (loss - again).abs() < 1e-6 * loss,
                        "{loss} evaluates to {again}"
                    );
                    let mut logits = vec![0.0; run.spec.vocab];
                    let last = tokens - 2;
                    decoder.next_token_logits(dev, &mut store, &docs.batch(), &mut ws, last, &mut logits).unwrap();
                    let grads: Vec<(Segment, Vec<f32>)> = store
                        .segments()
                        .filter(|(_, s)| s.is_trained())
                        .map(|(layer, s)| (s.clone(), store.grad(layer, s).to_vec()))
                        .collect();
                    (loss, grads, logits, (planned, there), entries)
                })
            })
            .collect();
        threads.into_iter().map(|t| t.join().unwrap_or_else(|e| std::panic::resume_unwind(e))).collect::<Vec<_>>()
    });
    let mut grads: BTreeMap<String, Vec<f32>> = BTreeMap::new();
    for (index, rank) in ranks.iter().enumerate() {
        assert_eq!((rank.0, &rank.2), (ranks[0].0, &ranks[0].2), "ranks differ in loss or logits");
        for (segment, grad) in &rank.1 {
            let whole = segment.global_shape().iter().product();
            let to = grads.entry(segment.name.clone()).or_insert_with(|| vec![0.0; whole]);
            match segment.tp {
                Tp::Same if index > 0 => assert!(to == grad, "ranks differ in the gradient of {}", segment.name),
                // Added: partial sums, and disjoint parts of a split tensor.
                _ => places(segment).iter().zip(grad).for_each(|(&place, g)| to[place] += g),
            }
        }
    }
    let (loss, logits) = (ranks[0].0, ranks[0].2.clone());
    let entries = ranks[0].4.clone();
    Made { loss, grads, logits, bytes: ranks.into_iter().map(|r| r.3).collect(), entries }
}

/// Every loss, gradient and logit of `run` equals that of `alone`, up to this fraction of its size.
fn same(alone: &Made, made: &Made, most: f64, what: &str) {
    assert!((made.loss / alone.loss - 1.0).abs() < most, "{what}: loss {} and {}", alone.loss, made.loss);
    let off = distance(&made.logits, &alone.logits);
    assert!(off < most, "{what}: logits are off by {off:e}");
    assert_eq!(made.grads.keys().collect::<Vec<_>>(), alone.grads.keys().collect::<Vec<_>>(), "{what}");
    for (name, grad) in &alone.grads {
        let off = distance(&made.grads[name], grad);
        assert!(dot(grad, grad) > 0.0 && off < most, "{what}: the gradient of {name} is off by {off:e}");
    }
    for (planned, there) in &made.bytes {
        assert_eq!(planned, there, "{what}: bytes by category");
    }
}

const TIGHT: f64 = 3e-6;

#[test]
fn every_gradient_equals_that_of_one_rank() {
    let growing = Spec { query_growth: Some(QueryGrowth { beta: 0.5, original: 3, unrotated: false }), ..llama() };
    let xielu = Spec { arch: Arch::Apertus, activation: Activation::Xielu, ..qwen3() };
    for spec in [
        growing,
        xielu,
        qwen2(),
        qwen3(),
        gemma3(),
        gemma4(),
        phi3(),
        cohere2(),
        others(),
        qwen3_next(),
        qwen35(),
        olmo_hybrid(),
        granite_hybrid(),
        falcon_h1(llama(), [4, 8]),
        lfm2(),
        lfm3(),
    ] {
        let run = Run::alone(spec);
        let alone = made(&run);
        for (tp, sequence) in [(2, false), (2, true), (4, false), (4, true)] {
            let what = format!("{:?} over {tp}, sequence parallel {sequence}", run.spec.arch);
            // Gradients of decays are sums of terms of either sign.
            let most = if run.spec.side_by_side { 2.0 * TIGHT } else { TIGHT };
            same(&alone, &made(&run.over(tp, sequence)), most, &what);
        }
    }
}

/// What the inputs of layers come from is whole on every rank.
#[test]
fn inputs_of_layers_are_the_same_on_all_ranks() {
    let run = Run::alone(Spec { layer_inputs: 6, layer_words: 99, ..gemma4() });
    let alone = made(&run);
    for checkpoint in [Checkpointing::Off, Checkpointing::Full] {
        same(&alone, &made(&Run { checkpoint, ..run.over(2, false) }), TIGHT, &format!("inputs, {checkpoint:?}"));
    }
    let lora = Some(Lora { rank: 3, alpha: 5.0, dropout: 0.3, targets: vec!["all-linear".into()] });
    let run = Run { tuning: Tuning { lora, ..Tuning::default() }, ..run };
    let alone = made(&run);
    assert!(alone.grads.contains_key("model.per_layer_model_projection.lora_A.weight"));
    same(&alone, &made(&run.over(2, false)), TIGHT, "adapters of inputs");
    let split = Split { tp: Slice { index: 0, of: 2 }, sequence_parallel: true, ..Split::NONE };
    let refused = Decoder::split(run.spec, &Tuning::default(), &split).err().unwrap();
    assert!(refused.to_string().contains("sequence-parallel: the layers of gemma4 have inputs"), "{refused}");
}

/// The gradients of routers follow from sums over columns, so those of the ranks are added; the load-balancing loss's
/// is on one of them.
#[test]
fn experts_are_sharded_by_columns() {
    let (attention, mlp) = (Cuts { attention: false, ..Cuts::ALL }, Cuts { mlp: false, ..Cuts::ALL });
    let whole = [mixture(), gpt_oss(), deepseek(), gemma4_experts(), nemotron_h(), cohere2_moe(), llama4(), phimoe()];
    for (spec, all) in whole.into_iter().map(|spec| (spec, Cuts::ALL)).chain([(olmoe(), attention)]) {
        let run = Run::alone(spec);
        let alone = made(&run);
        let replicated = Cuts { mlp: mlp.mlp, ..all };
        for (tp, sequence, cuts, checkpoint) in [
            (2, false, all, Checkpointing::Off),
            (4, false, all, Checkpointing::Full),
            (2, all.attention, all, Checkpointing::Selective),
            (4, all.attention, all, Checkpointing::Full),
            (2, false, replicated, Checkpointing::Off),
        ] {
            let what = format!("{:?} over {tp}, sequence parallel {sequence}, {cuts:?}", run.spec.arch);
            same(&alone, &made(&Run { cuts, checkpoint, ..run.over(tp, sequence) }), TIGHT, &what);
        }
    }
}

#[test]
fn vocabulary_and_columns_need_not_divide() {
    let heads = |spec: Spec, kv_heads: usize| Spec { heads: 6, kv_heads, ..spec };
    // Sizes that divide, with one rank that has one more, and with one or two per rank.
    for (vocab, ff, tp) in [(96, 36, 3), (97, 37, 3), (98, 38, 3), (97, 6, 6), (97, 7, 6), (7, 11, 6)] {
        for spec in [heads(llama(), 6), heads(qwen2(), 3), heads(gemma3(), 1)] {
            if !spec.kv_heads.is_multiple_of(tp) && !tp.is_multiple_of(spec.kv_heads) {
                continue;
            }
            let run = Run::alone(Spec { vocab, ff, ..spec });
            let alone = made(&run);
            for sequence in [false, true] {
                let what = format!("{:?}: {vocab} words, {ff} columns over {tp}, {sequence}", run.spec.arch);
                same(&alone, &made(&run.over(tp, sequence)), TIGHT, &what);
            }
        }
    }
}

#[test]
fn several_logit_chunks_and_long_documents() {
    let run = Run { lengths: vec![290, 7, 233], ..Run::alone(qwen3()) };
    let alone = made(&run);
    for sequence in [false, true] {
        same(&alone, &made(&run.over(2, sequence)), 1e-5, &format!("530 tokens, sequence parallel {sequence}"));
    }
}

#[test]
fn recomputed_blocks_give_the_same_result() {
    for spec in [llama(), gemma3(), gemma4(), cohere2(), qwen35(), granite_hybrid(), falcon_h1(llama(), [4, 8]), lfm2()]
    {
        let run = Run::alone(spec);
        let alone = made(&run);
        for checkpoint in [Checkpointing::Full, Checkpointing::Selective] {
            for sequence in [false, true] {
                let cut = Run { checkpoint, ..run.over(2, sequence) };
                same(&alone, &made(&cut), TIGHT, &format!("{checkpoint:?}, sequence parallel {sequence}"));
            }
        }
    }
}

#[test]
fn adapters_are_split_with_their_matrices() {
    // Fused matrices have one adapter.
    let net =
        [(qwen3_next(), 0.3, 6 + 7), (qwen35(), 0.3, 8 + 7), (granite_hybrid(), 0.3, 4 + 6), (lfm2(), 0.3, 5 + 7)];
    // PEFT has no adapters of the matrix that ends its Mamba.
    let both = (falcon_h1(llama(), [4, 8]), 0.3, 2 * (7 + 1));
    let specs =
        [(qwen2(), 0.3, 14), (gemma3(), 0.0, 14), (gemma4(), 0.3, 6 + 7 + 5), (llama(), 0.3, 14), (phi3(), 0.3, 8)];
    for (spec, dropout, matrices) in specs.into_iter().chain(net).chain([both]) {
        let lora = Some(Lora { rank: 3, alpha: 5.0, dropout, targets: vec!["all-linear".into()] });
        let run = Run { tuning: Tuning { lora, ..Tuning::default() }, ..Run::alone(spec) };
        let alone = made(&run);
        assert!(alone.grads.keys().all(|name| name.contains("lora_")) && alone.grads.len() == 2 * matrices);
        // Masks are by channel of the whole tensor, in token order, also for rows and columns of which ranks have
        // parts.
        for (tp, sequence) in [(2, false), (4, true)] {
            same(&alone, &made(&run.over(tp, sequence)), TIGHT, &format!("adapters over {tp}, dropout {dropout}"));
        }
    }
}

#[test]
fn tensors_outside_the_tp_plan_are_replicated() {
    let run = Run::alone(llama());
    let alone = made(&run);
    let parts = [
        (Cuts { embedding: false, ..Cuts::ALL }, false),
        (Cuts { embedding: false, ..Cuts::ALL }, true),
        (Cuts { head: false, ..Cuts::ALL }, false),
        (Cuts { attention: false, ..Cuts::ALL }, false),
        (Cuts { mlp: false, ..Cuts::ALL }, false),
    ];
    for (cuts, sequence) in parts {
        same(&alone, &made(&Run { cuts, ..run.over(2, sequence) }), TIGHT, &format!("{cuts:?}, sequence {sequence}"));
    }
}

#[test]
fn dropout_masks_equal_those_of_one_rank_on_equal_rows() {
    let run = Run::alone(Spec { dropout: 0.3, ..llama() });
    same(&made(&run), &made(&run.over(2, false)), TIGHT, "dropout");
    // With sequence parallelism ranks have their own masks; forward and backward must draw the same ones.
    let (run, eps) = (run.over(2, true), 1e-3);
    let base = made(&run);
    let slope = (made(&Run { nudge: eps, ..run.clone() }).loss - made(&Run { nudge: -eps, ..run.clone() }).loss)
        / (2.0 * eps as f64);
    let decoder = Decoder::new(run.spec.clone()).unwrap();
    let segments = decoder.layouts().iter().flat_map(|l| &l.segments);
    let along: f64 = segments
        .map(|s| dot(&base.grads[&s.name], &(0..s.len()).map(|i| direction(s, i)).collect::<Vec<_>>()))
        .sum::<f64>()
        / LOSS_SCALE as f64;
    assert!((slope / along - 1.0).abs() < 0.01, "slope {slope}, gradient along {along}");
    let full = made(&Run { checkpoint: Checkpointing::Full, ..run.clone() });
    assert_eq!((base.loss, &base.grads), (full.loss, &full.grads), "recomputed with other masks");
    let other = made(&run.over(2, false));
    assert!((base.loss - other.loss).abs() > 1e-4, "the same masks on both ranks");
}

/// The collectives of one pass: (operation, purpose, layer) in order, and bytes.
fn traffic(run: &Run) -> (Vec<(Seam, &'static str, usize)>, usize) {
    let entries = made(run).entries;
    let started: Vec<&Entry> = entries.iter().filter(|e| e.bytes > 0).collect();
    (started.iter().map(|e| (e.seam.unwrap(), e.tag.what, e.tag.unit)).collect(), started.iter().map(|e| e.bytes).sum())
}

#[test]
fn a_block_reduces_twice_forward_and_twice_backward() {
    use Seam::{AllGather as Gather, AllReduce as Reduce, ReduceScatter as Scatter};
    let run = Run::alone(llama());
    assert_eq!(traffic(&run).0, [], "one rank alone");
    let (n, c, f32s) = (27, run.spec.dim, 4);
    let (sum, loss) = ((Reduce, "tp sum"), (Gather, "tp loss"));
    let of = |calls: &[((Seam, &'static str), usize)]| -> Vec<(Seam, &'static str, usize)> {
        calls.iter().map(|((seam, what), layer)| (*seam, *what, *layer)).collect()
    };
    let (calls, bytes) = traffic(&run.over(2, false));
    // The embedding; two per block; the loss and the head's input; two per block.
    let all =
        [(sum, 0), (sum, 1), (sum, 1), (sum, 2), (sum, 2), (loss, 0), (sum, 0), (sum, 2), (sum, 2), (sum, 1), (sum, 1)];
    assert_eq!(calls, of(&all));
    assert_eq!(bytes, 10 * n * c * f32s + 2 * n * 3 * f32s);

    // A recomputed block needs the input of its feed-forward branch: one all-reduce, and none for what nothing reads.
    let (calls, _) = traffic(&Run { checkpoint: Checkpointing::Full, ..run.over(2, false) });
    let again = [&all[..9], &[(sum, 1)], &all[9..]].concat();
    assert_eq!(calls, of(&again));

    // Sequence parallel: gathered before a branch, scattered after it. Backward gathers the gradient of the output, and
    // the input again.
    let (gather, scatter) = ((Gather, "tp gather"), (Scatter, "tp sum"));
    let forward = |layer| [(gather, layer), (scatter, layer), (gather, layer), (scatter, layer)];
    let backward = |layer| [(gather, layer), (gather, layer), (scatter, layer)].repeat(2);
    let head = [(gather, 0), (loss, 0), (scatter, 0)];
    let all =
        [&[(scatter, 0)], &forward(1)[..], &forward(2), &head, &backward(2), &backward(1), &[(gather, 0)]].concat();
    let (calls, bytes) = traffic(&run.over(2, true));
    assert_eq!(calls, of(&all));
    assert_eq!(bytes, (all.len() - 1) * (n + 1) * c * f32s + 2 * n * 3 * f32s);
}

#[test]
fn rounding_to_bf16_costs_no_more_than_on_one_rank() {
    for spec in [llama(), gemma3()] {
        let exact = Run::alone(spec);
        let run = Run { dtype: DType::Bf16, ..exact.clone() };
        let (exact, alone) = (made(&exact), made(&run));
        for (tp, sequence) in [(2, false), (2, true), (4, true)] {
            let cut = made(&run.over(tp, sequence));
            assert!((cut.loss / exact.loss - 1.0).abs() < 5e-3, "loss {} and {}", exact.loss, cut.loss);
            // For a norm's six numbers rounding matters more than the split: compare all of them together.
            let all = |made: &Made| made.grads.values().flatten().copied().collect::<Vec<f32>>();
            let (one, many) = (distance(&all(&alone), &all(&exact)), distance(&all(&cut), &all(&exact)));
            assert!(many < 1.5 * one, "over {tp}, sequence {sequence}: off by {many:e}, on one rank by {one:e}");
        }
    }
}

#[test]
fn the_simulated_gpu_gives_the_same_result() {
    for (spec, sequences) in [(gemma3(), &[false, true][..]), (phi3(), &[false]), (cohere2(), &[true])] {
        let run = Run { lengths: vec![5, 8], ..Run::alone(spec) };
        let alone = made(&run);
        for &sequence in sequences {
            let what = format!("{:?} simulated, sequence parallel {sequence}", run.spec.arch);
            same(&alone, &made(&Run { sim: true, ..run.over(2, sequence) }), 2e-5, &what);
        }
    }
}

#[test]
fn indivisible_sizes_are_refused_with_the_equation() {
    let refused = |spec: Spec, tp: usize, sequence_parallel: bool, cuts: Cuts| {
        let split = Split { tp: Slice { index: 0, of: tp }, sequence_parallel, cuts, ..Split::NONE };
        Decoder::split(spec, &Tuning::default(), &split).err().expect("refused").to_string()
    };
    let all = |spec: Spec, tp| refused(spec, tp, false, Cuts::ALL);
    for (said, what) in [
        (all(Spec { heads: 6, kv_heads: 6, ..llama() }, 4), "num_heads 6 is not divisible by tp-size 4"),
        (all(Spec { heads: 12, kv_heads: 6, ..llama() }, 4), "num_kv_heads 6 and tp-size 4"),
        (all(Spec { ff: 3, ..llama() }, 4), "ff_hidden_dim 3 < tp-size 4: a tp rank would have no columns"),
        (all(Spec { vocab: 3, ..llama() }, 4), "vocab_size 3 < tp-size 4: a tp rank would have no vocabulary entries"),
        (refused(Spec { tied: true, ..llama() }, 2, false, Cuts { head: false, ..Cuts::ALL }), "tied"),
        (refused(llama(), 2, true, Cuts { mlp: false, ..Cuts::ALL }), "sequence-parallel"),
    ] {
        assert!(said.contains(what), "{said}");
    }
    let narrow = |ff, shared_ff| Experts { ff, shared_ff, ..mixture().experts.unwrap() };
    let with = |experts| Spec { experts: Some(experts), ..mixture() };
    assert!(all(with(narrow(3, 8)), 4).contains("width of experts 3 < tp-size 4"));
    assert!(all(with(narrow(8, 3)), 4).contains("width of the shared expert 3 < tp-size 4"));
    let sp = Split { sp: Slice { index: 0, of: 2 }, ..Split::NONE };
    let ring = Decoder::split(qwen35(), &Tuning::default(), &sp).err().expect("refused").to_string();
    assert!(ring.contains("ring-attn-size 2: the gated delta nets of qwen3_5"), "{ring}");
    let ring = Decoder::split(granite_hybrid(), &Tuning::default(), &sp).err().expect("refused").to_string();
    assert!(ring.contains("ring-attn-size 2: the Mamba layers of granitemoehybrid"), "{ring}");
    let ring = Decoder::split(lfm2(), &Tuning::default(), &sp).err().expect("refused").to_string();
    assert!(ring.contains("ring-attn-size 2: the short convolutions of lfm2"), "{ring}");
    let heads = Spec { heads: 8, kv_heads: 8, ..qwen35() };
    assert!(all(heads, 8).contains("linear_num_key_heads 4 is not divisible by tp-size 8"));
    let heads = Spec { heads: 8, kv_heads: 8, ..granite_hybrid() };
    assert!(all(heads, 8).contains("the number of groups of Mamba layers 4 is not divisible by tp-size 8"));
    assert!(all(phi3(), 8).contains("num_kv_heads 4 is not divisible by tp-size 8: queries, keys and values of phi3"));
    assert!(all(olmoe(), 2).contains("olmoe normalizes all heads of a token together"));
    let odd = gpt_oss().experts.map(|experts| Experts { ff: 15, ..experts });
    assert!(all(Spec { experts: odd, ..gpt_oss() }, 2).contains("must divide intermediate_size 15"));
    let gpt = Spec { arch: Arch::Gpt, rope: None, activation: Activation::Gelu, head_dim: 5, ..llama() };
    assert!(all(gpt, 2).contains("arch gpt"));
}
