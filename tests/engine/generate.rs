//! Text generation: caching keys and values changes no token, for any family, device and sharding of the weights; and
//! what a rank holds and receives meanwhile.

use crate::common::plain_store::{Docs, Plain, device, groups};
use crate::common::stores::*;
use crate::common::*;
use flatshard::base::CATEGORIES;
use flatshard::base::{DType, Error};
use flatshard::comm::{Axis, MeshSizes};
use flatshard::device::gpu::GpuDevice;
use flatshard::device::gpu::sim::Sim;
use flatshard::device::ops::PagedRows;
use flatshard::engine::{Engine, Generator, GeneratorOptions, PlannedRank, Prompt, SamplerSize, Sampling, Strategy};
use flatshard::nn::{Arch, CacheSize, Checkpointing, Cuts, Decoder, QueryGrowth, Spec, WorkspaceOptions};
use flatshard::store::{ShardedOptions, Stage, initialize};
use half::bf16;
use std::sync::{Arc, Mutex};

/// Windows in some layers, and softcaps on scores and logits.
fn gemma2() -> Spec {
    let windowed = vec![true, false, true, false];
    Spec { arch: Arch::Gemma2, window: 3, windowed, score_cap: 1.5, qk_norm: false, local_rope: None, ..gemma3() }
}
/// A window in every layer.
fn mistral() -> Spec {
    Spec { arch: Arch::Mistral, window: 6, windowed: vec![true; 4], ..llama() }
}
/// Queries that grow every few tokens.
fn ministral3() -> Spec {
    Spec {
        arch: Arch::Ministral3,
        query_growth: Some(QueryGrowth { beta: 0.5, original: 3, unrotated: false }),
        ..llama()
    }
}
fn families() -> [Spec; 14] {
    [
        llama(),
        gpt(),
        mistral(),
        ministral3(),
        qwen2(),
        qwen3(),
        gemma2(),
        gemma3(),
        gemma4(),
        qwen35(),
        granite_hybrid(),
        falcon_h1(llama(), [2, 4]),
        lfm2(),
        llama4(llama()),
    ]
}
const GREEDY: Sampling = Sampling { temperature: 0.0, top_k: 0, top_p: 1.0, min_p: 0.0, seed: 0, step: 0 };

/// Prompts and texts longer than an attention tile and than blocks of a delta rule, with windows on both sides of a
/// tile's edges, in scattered pages: the bits of the whole prefix, however it is divided into passes.
#[test]
fn cached_logits_are_those_of_the_whole_prefix() {
    const LENGTH: usize = 150;
    let pages = [3, 1, 5, 2, 4];
    let wide =
        |spec: Spec, window: usize| Spec { max_len: LENGTH, window: if spec.window > 0 { window } else { 0 }, ..spec };
    for (spec, dtype) in families().into_iter().flat_map(|spec| [(spec.clone(), DType::F32), (spec, DType::Bf16)]) {
        for (prompt, window) in [(1, 5), (70, 65)] {
            let (dev, spec) = (device(), wide(spec.clone(), window));
            let decoder = Decoder::new(spec.clone()).unwrap();
            let mut store = Plain::random(&dev, &decoder, dtype, 0.2);
            let workspace = |tokens| {
                let options = WorkspaceOptions { tokens, dtype, checkpoint: Checkpointing::Off, train: false };
                decoder.workspace(&dev, &groups(), &options).unwrap()
            };
            let docs = Docs::random(&dev, 5, spec.vocab, &[LENGTH], 0);
            let (mut whole, mut kept) = (workspace(LENGTH), workspace(prompt));
            decoder
                .remember(&dev, &mut kept, &CacheSize { pages: 6, rows: prompt, longest: LENGTH, slots: 2 })
                .unwrap();
            let (mut expected, made) = (vec![0f32; spec.vocab], Mutex::new(vec![0f32; spec.vocab]));
            for past in [0].into_iter().chain(prompt..LENGTH) {
                let n = if past == 0 { prompt } else { 1 };
                let mut batch = docs.batch();
                (batch.tokens, batch.positions) =
                    (batch.tokens.slice(past..past + n), batch.positions.slice(past..past + n));
                (batch.targets, batch.documents) = (batch.targets.slice(0..0), batch.documents.slice(0..0));
                let runs = [PagedRows { first: 0, rows: n, past, pages: &pages, slot: 1 }];
                let draw = |_: usize, logits: &[f32]| {
                    made.lock().unwrap().copy_from_slice(logits);
                    0
                };
                let (of, mut drawn) = ((&runs[..], &[n - 1][..]), Vec::new());
                decoder.go_on(&dev, &mut store, &batch, &mut kept, of, &draw, &mut drawn).unwrap();
                if past > prompt + 3 && past % 9 != 0 {
                    continue;
                }
                let all = docs.batch();
                decoder.next_token_logits(&dev, &mut store, &all, &mut whole, past + n - 1, &mut expected).unwrap();
                // The head of training rounds logits to the compute dtype before it caps them.
                let rounded = |x: f32| if dtype == DType::F32 { x } else { bf16::from_f32(x).to_f32() };
                let exact = dtype == DType::F32 || spec.logit_cap == 0.0;
                let same = expected.iter().zip(&*made.lock().unwrap()).all(|(a, b)| match exact {
                    true => rounded(*a) == *b,
                    false => (a - b).abs() < 0.02,
                });
                assert!(same, "{:?} in {dtype}, {n} tokens after {past}", spec.arch);
            }
        }
    }
}

/// Up to the model's last position.
#[test]
fn ranks_of_any_mesh_generate_the_same_text_and_free_the_cache() {
    for spec in families() {
        let write = |sizes| {
            let options = options(&spec, fsdp(sharded()), SGD);
            let mut texts = mesh_ranks(sizes, |rank| {
                let mut engine = Engine::new(rank.device, &rank.mesh, &options)?;
                let held = rank.meter.total();
                let text = engine.generate(&[1, 2, 3], spec.max_len - 3, &GREEDY)?;
                // Everything except a token's four bytes, which their group releases with its next operation.
                assert!(rank.meter.total() <= held + 4, "what was kept is given back");
                Ok(text)
            });
            texts.swap_remove(0)
        };
        let sizes = |dp_shard, sp| MeshSizes { dp_replicate: 1, dp_shard, sp, tp: 1, ep: 1 };
        // Ranks cannot share the state of a sequence.
        let other = if spec.recurrence.is_some() { sizes(1, 1) } else { sizes(1, 2) };
        assert_eq!(write(sizes(2, 1)), write(other), "{:?}", spec.arch);
    }
}

/// As in a chat, whose next prompt continues the last text, or departs from it.
#[test]
fn what_is_kept_of_the_last_text_changes_no_bit() {
    let sampling = Sampling { temperature: 1.0, ..GREEDY };
    for spec in [llama(), qwen35(), granite_hybrid(), nemotron_h(), lfm2()] {
        let spec = Spec { max_len: 90, ..spec };
        let options =
            GeneratorOptions { spec, strategy: ddp(DType::F32), cuts: Cuts::ALL, size: SamplerSize::of_one(80, 5) };
        ranks(1, |rank| {
            let new = || {
                let mut generator = Generator::new(rank.device.clone(), &rank.mesh, &options)?;
                initialize(generator.store(), 3, &*rank.device)?;
                Ok::<_, Error>(generator)
            };
            let mut prompt: Vec<u32> = (0..60).map(|i| i * 7 % 61).collect();
            let mut chat = new()?;
            for departs in [false, false, true, false] {
                if departs {
                    prompt[30] = 2;
                }
                let write = |generator: &mut Generator| {
                    let mut texts =
                        generator.sample(&[Prompt::new(0, prompt.clone(), 1)], 5, &sampling, &mut |_| true)?;
                    Ok::<_, Error>(texts.swap_remove(0))
                };
                let text = write(&mut chat)?;
                assert_eq!(text, write(&mut new()?)?, "{:?}", options.spec.arch);
                prompt.extend(text.ids);
                prompt.push(3);
            }
            Ok(())
        });
    }
}

/// The text of ranks of `sizes`, and the bytes that those who write it received after the first token.
fn written(spec: &Spec, strategy: &Arc<dyn Strategy>, sizes: MeshSizes, sim: bool) -> (Vec<u32>, Vec<u64>) {
    let size = SamplerSize::of_one(4, 7);
    let options = GeneratorOptions { spec: spec.clone(), strategy: strategy.clone(), cuts: Cuts::ALL, size };
    let rank = |rank: Rank| {
        let mut generator = Generator::new(rank.device.clone(), &rank.mesh, &options)?;
        // The simulated GPU allocates some extra memory.
        let planned = PlannedRank { mesh: sizes, rank: rank.mesh.rank(), sharing: sizes.world(), stage: 0, gpu: false };
        let planned = planned.bytes(|dev, mesh| Generator::new(dev, mesh, &options))?;
        for (category, bytes) in planned.into_iter().filter(|_| !sim) {
            let name = CATEGORIES.iter().find(|c| c.0 == category).unwrap().1;
            assert_eq!(rank.meter.live(category), bytes, "{name} of {} on {sizes:?}", strategy.name());
        }
        initialize(generator.store(), 3, &*rank.device)?;
        let (mut first, mesh) = (None, &rank.mesh);
        let text = generator.generate(&[1, 2, 3, 4], 7, &GREEDY, &mut |_| {
            first.get_or_insert_with(|| mesh.group(Axis::Fsdp).stats().bytes);
            true
        })?;
        // Only the rank that writes the text sees its tokens.
        Ok((text, first.map_or(0, |first| mesh.group(Axis::Fsdp).stats().bytes - first)))
    };
    let results = match sim {
        false => mesh_ranks(sizes, rank),
        true => ranks_on(sizes.world(), |_, meter| Ok(Arc::new(GpuDevice::new(Arc::new(Sim::new()), meter)?)), rank),
    };
    let (mut texts, received): (Vec<_>, Vec<_>) = results.into_iter().unzip();
    assert!(texts.iter().all(|text| *text == texts[0]), "ranks disagree: {texts:?}");
    (texts.swap_remove(0), received)
}

#[test]
fn tp_ranks_hold_their_part_and_weights_may_stay_unsharded() {
    let stays: Arc<dyn Strategy> = fsdp(ShardedOptions { reshard: false, ..sharded() });
    let sizes = |dp_shard, tp| MeshSizes { dp_replicate: 1, dp_shard, sp: 1, tp, ep: 1 };
    for spec in [llama(), qwen3(), gemma3()] {
        let spec = Spec { vocab: 60, heads: 4, kv_heads: 2, ..spec };
        let (alone, _) = written(&spec, &ddp(DType::F32), sizes(1, 1), false);
        let apart = fsdp(sharded());
        let staged = [Stage::Two, Stage::Three].map(|stage| zero(staged(stage, DType::F32)));
        for (strategy, again) in [(&stays, false), (&apart, true), (&staged[0], false), (&staged[1], true)] {
            for sizes in [sizes(2, 1), sizes(1, 2), sizes(2, 2), sizes(1, 4)] {
                let (text, received) = written(&spec, strategy, sizes, false);
                assert_eq!(text, alone, "{:?}, {} on {sizes:?}", spec.arch, strategy.name());
                let gathers = received.iter().any(|&bytes| bytes > 0);
                assert_eq!(gathers, again && sizes.dp_shard > 1, "{} on {sizes:?}: {received:?}", strategy.name());
            }
        }
    }
}

#[test]
fn the_simulated_gpu_generates_what_the_cpu_generates() {
    let two = MeshSizes::sharded(2);
    for spec in [gpt(), qwen2(), gemma2(), gemma3(), ministral3()] {
        let spec = Spec { layers: 2, windowed: spec.windowed.iter().copied().take(2).collect(), ..spec };
        let strategy = fsdp(ShardedOptions { reshard: false, ..sharded() });
        assert_eq!(written(&spec, &strategy, two, true).0, written(&spec, &strategy, two, false).0, "{:?}", spec.arch);
    }
}
