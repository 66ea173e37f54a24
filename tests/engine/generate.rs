//! Text generation: caching keys and values changes no token, for any family, device and sharding of the weights; and
//! what a rank holds and receives meanwhile.

use crate::common::plain_store::{Docs, Plain, device, groups};
use crate::common::stores::*;
use crate::common::*;
use flatshard::base::CATEGORIES;
use flatshard::base::DType;
use flatshard::comm::MeshSizes;
use flatshard::device::gpu::GpuDevice;
use flatshard::device::gpu::sim::Sim;
use flatshard::engine::{Engine, Generator, GeneratorOptions, PlannedRank, Sampling, Strategy};
use flatshard::nn::{Arch, Checkpointing, Cuts, Decoder, QueryGrowth, Spec, WorkspaceOptions};
use flatshard::store::{ShardedOptions, Stage, initialize};
use std::sync::Arc;

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
    Spec { arch: Arch::Ministral3, query_growth: Some(QueryGrowth { beta: 0.5, original: 3 }), ..llama() }
}
fn families() -> [Spec; 8] {
    [llama(), gpt(), mistral(), ministral3(), qwen2(), qwen3(), gemma2(), gemma3()]
}
const GREEDY: Sampling = Sampling { temperature: 0.0, top_k: 0, top_p: 1.0, seed: 0 };

/// Prompts and texts longer than an attention tile, with windows on both sides of its edges.
#[test]
fn cached_logits_equal_those_of_the_whole_prefix() {
    const LENGTH: usize = 150;
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
            decoder.remember(&dev, &mut kept, LENGTH).unwrap();
            let (mut expected, mut made) = (vec![0f32; spec.vocab], vec![0f32; spec.vocab]);
            for past in [0].into_iter().chain(prompt..LENGTH) {
                let n = if past == 0 { prompt } else { 1 };
                let mut batch = docs.batch();
                (batch.tokens, batch.positions) =
                    (batch.tokens.slice(past..past + n), batch.positions.slice(past..past + n));
                batch.targets = batch.targets.slice(0..0);
                let one = Docs::random(&dev, 5, spec.vocab, &[n], 0); // one document of n rows
                batch.documents = one.batch().documents;
                decoder.go_on(&dev, &mut store, &batch, &mut kept, past, &mut made).unwrap();
                if past > prompt + 3 && past % 9 != 0 {
                    continue;
                }
                let all = docs.batch();
                decoder.next_token_logits(&dev, &mut store, &all, &mut whole, past + n - 1, &mut expected).unwrap();
                let largest = expected.iter().fold(0f32, |m, x| m.max(x.abs()));
                let difference = expected.iter().zip(&made).fold(0f32, |m, (a, b)| m.max((a - b).abs())) / largest;
                let within = if dtype == DType::F32 { 2e-5 } else { 0.05 };
                assert!(difference < within, "{:?} in {dtype}, {n} tokens after {past}: {difference:.1e}", spec.arch);
            }
        }
    }
}

/// Ranks of sp cache nothing and serve as the baseline. The text exceeds the model's positions.
#[test]
fn cached_generation_equals_uncached_generation() {
    for spec in families() {
        let write = |sizes| {
            let options = options(&spec, fsdp(sharded()), SGD);
            let mut texts = mesh_ranks(sizes, |rank| {
                let mut engine = Engine::new(rank.device, &rank.mesh, &options)?;
                let held = rank.meter.total();
                let text = engine.generate(&[1, 2, 3], 2 * spec.max_len, &GREEDY)?;
                // Everything except a token's four bytes, which their group releases with its next operation.
                assert!(rank.meter.total() <= held + 4, "what was kept is given back");
                Ok(text)
            });
            texts.swap_remove(0)
        };
        let sizes = |dp_shard, sp| MeshSizes { dp_replicate: 1, dp_shard, sp, tp: 1, ep: 1 };
        assert_eq!(write(sizes(2, 1)), write(sizes(1, 2)), "{:?}", spec.arch);
    }
}

/// The text of ranks of `sizes`, and the bytes each received after the first token.
fn written(spec: &Spec, strategy: &Arc<dyn Strategy>, sizes: MeshSizes, sim: bool) -> (Vec<u32>, Vec<u64>) {
    let options =
        GeneratorOptions { spec: spec.clone(), strategy: strategy.clone(), cuts: Cuts::ALL, prompt: 4, count: 7 };
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
            first.get_or_insert_with(|| mesh.fsdp.stats().bytes);
            true
        })?;
        Ok((text, mesh.fsdp.stats().bytes - first.unwrap()))
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
