//! Small worlds for tests: ranks as threads, models whose sizes do not divide evenly, batches that differ on every
//! rank.

use flatshard::base::rng::Rng;
use flatshard::base::{Category, DType, Meter, Result};
use flatshard::comm::mesh::{Mesh, MeshSizes};
use flatshard::comm::{Axis, shm};
use flatshard::data::MicroBatch;
use flatshard::device::ops::{DeltaShape, GluClamp, RotaryPairs, RouteRule, StateRule};
use flatshard::device::{Device, IGNORE};
use flatshard::engine::{Engine, EngineOptions, Objective, ReferenceModel, Step, StepReport, Strategy};
use flatshard::nn::{
    Activation, Arch, BlockFactors, Branch, Checkpointing, Cuts, DeltaForm, DeltaNet, Experts, HeadSizes, Latent,
    Layout, Mamba, QueryGrowth, Recurrence, Rotary, Scaling, SpImpl, Spec, Tuning,
};
use flatshard::optim::Rule;
use flatshard::store::{ReplicatedOptions, ShardedOptions};
use std::collections::BTreeMap;
use std::sync::Arc;

#[path = "cpu.rs"]
#[allow(clippy::duplicate_mod)] // benches include this file alone
mod chosen;
use chosen::cpu;

/// A kernel in the place of `adamw` that reads past its gradient.
pub const READS_PAST_ITS_GRADIENT: &str = "# 1 \"adamw.ptx\"
.version 8.0
.target sm_80
.address_size 64
.visible .entry adamw(
    .param .u64 p_g, .param .u64 p_m, .param .u64 p_v, .param .u64 p_p, .param .u64 p_out, .param .u64 p_h,
    .param .u64 p_scale, .param .u64 p_n)
.maxntid 256, 1, 1
{
    .reg .u64 %g, %n;
    .reg .f32 %a;
    ld.param.u64 %g, [p_g];
    ld.param.u64 %n, [p_n];
    shl.b64 %n, %n, 2;
    add.u64 %g, %g, %n;
    ld.global.f32 %a, [%g];
    ret;
}
";

/// Grouped-query attention, an untied head; no size is a power of two.
pub fn llama() -> Spec {
    Spec {
        arch: Arch::Llama,
        vocab: 61,
        dim: 20,
        layers: 4,
        heads: 6,
        kv_heads: 3,
        head_dim: 6,
        ff: 44,
        max_len: 12,
        norm_eps: 1e-5,
        tied: false,
        dropout: 0.0,
        ..Spec::default()
    }
}
/// Tied head, biases, dropout.
pub fn gpt() -> Spec {
    Spec {
        arch: Arch::Gpt,
        rope: None,
        activation: Activation::Gelu,
        heads: 5,
        kv_heads: 5,
        head_dim: 4,
        layers: 3,
        tied: true,
        dropout: 0.2,
        ..llama()
    }
}

/// Norms of heads, which are wider than the model divides into; tied.
pub fn qwen3() -> Spec {
    Spec { arch: Arch::Qwen3, qk_norm: true, head_dim: 8, tied: true, ..llama() }
}
/// Local and global layers with a rotation each, norms of heads and behind branches, a scaled embedding; tied.
pub fn gemma3() -> Spec {
    Spec {
        arch: Arch::Gemma3,
        activation: Activation::GeGlu,
        local_rope: Some(Rotary::new(30.0)),
        window: 4,
        windowed: vec![true, true, false, true],
        query_scalar: Some(9.0),
        logit_cap: 5.0,
        qk_norm: true,
        post_norms: true,
        norm_from_one: true,
        scaled_embedding: true,
        tied: true,
        ..llama()
    }
}
/// Heads of two sizes, some pairs of which do not rotate; norms of values, which are keys in global layers; the last
/// two layers use keys and values of others, and are wider; inputs and factors of layers.
pub fn gemma4() -> Spec {
    Spec { head_dim: 4, ..as_gemma4(gemma3()) }
}
/// A Gemma 3 with what Gemma 4 has besides.
pub fn as_gemma4(gemma3: Spec) -> Spec {
    let scaling = Scaling::Proportional { part: 0.5, factor: 1.0 };
    Spec {
        arch: Arch::Gemma4,
        global_heads: Some(HeadSizes { kv_heads: 1, head_dim: 8 }),
        rope: Some(Rotary { theta: 50.0, scaling }),
        windowed: vec![true, false, true, false],
        query_scalar: None,
        score_scale: Some(1.0),
        norm_from_one: false,
        value_norm: true,
        keys_are_values: true,
        shared_kv: 2,
        wide_shared: true,
        layer_inputs: 6,
        layer_words: 64,
        layer_scalar: true,
        ..gemma3
    }
}
/// A dense layer and experts side by side in every block.
pub fn gemma4_experts() -> Spec {
    let experts = Experts { count: 7, top_k: 3, ff: 14, normalize: true, beside: true, ..Experts::default() };
    Spec { experts: Some(experts), ..gemma4() }
}
/// Biases of queries, keys and values.
pub fn qwen2() -> Spec {
    Spec { arch: Arch::Qwen2, qkv_bias: true, window: 5, windowed: vec![false, false, true, true], ..llama() }
}

/// Experts in three of four blocks, one of them shared. Some experts get no rows of a small batch.
pub fn sparse() -> Spec {
    let experts =
        Experts { count: 7, top_k: 3, ff: 14, shared_ff: 10, normalize: true, dense: vec![1], ..Experts::default() };
    Spec { arch: Arch::Qwen2Moe, qkv_bias: true, experts: Some(experts), ..llama() }
}

/// Gated delta nets, and in the last block attention with an output gate.
pub fn qwen35() -> Spec {
    let rule = StateRule::Delta { doubled: false };
    let shape = DeltaShape { key_heads: 2, value_heads: 4, key_dim: 5, value_dim: 6, rule };
    Spec {
        arch: Arch::Qwen35,
        norm_eps: 1e-2,
        qk_norm: true,
        norm_from_one: true,
        output_gate: true,
        rotary_dim: Some(4),
        recurrence: Some(Recurrence::Delta(DeltaNet { shape, taps: 4, form: DeltaForm::Joined })),
        recurrent: vec![true, true, true, false],
        ..llama()
    }
}

/// Mamba layers with two groups of heads, and attention without rotary positions in the last block.
pub fn granite_hybrid() -> Spec {
    with_mamba(llama(), [2, 4])
}

/// Mamba layers with so many groups and heads, and attention without rotary positions in the last block.
pub fn with_mamba(base: Spec, [key_heads, value_heads]: [usize; 2]) -> Spec {
    let rule = StateRule::Decay { limits: [0.0, f32::INFINITY] };
    let shape = DeltaShape { key_heads, value_heads, key_dim: 5, value_dim: 6, rule };
    Spec {
        arch: Arch::GraniteHybrid,
        norm_eps: 1e-2,
        fused_gate_up: true,
        rotated: vec![false; base.layers],
        residual_multiplier: 0.5,
        recurrence: Some(Recurrence::Delta(DeltaNet { shape, taps: 4, form: DeltaForm::Mamba(Mamba::default()) })),
        recurrent: (1..=base.layers).map(|layer| layer < base.layers).collect(),
        ..base
    }
}

/// Mamba with so many groups and heads next to attention in each block, and factors of what matrices give.
pub fn falcon_h1(base: Spec, of_mamba: [usize; 2]) -> Spec {
    let hybrid = with_mamba(base, of_mamba);
    let mamba = Mamba { normed: false, factors: [0.7, 0.6, 0.9, 1.3, 0.8], ..Mamba::default() };
    let recurrence = hybrid.recurrence.map(|mixer| match mixer {
        Recurrence::Delta(net) => Recurrence::Delta(DeltaNet { form: DeltaForm::Mamba(mamba), ..net }),
        other => other,
    });
    Spec {
        arch: Arch::FalconH1,
        fused_gate_up: false,
        rotated: Vec::new(),
        residual_multiplier: 1.0,
        recurrence,
        recurrent: vec![true; hybrid.layers],
        side_by_side: true,
        block_factors: BlockFactors { scores: 1.7, attention: 0.9, other: 0.7, gate: 0.6, mlp: 0.8 },
        ..hybrid
    }
}

/// Blocks of one branch each: Mamba, experts of two matrices, attention, two matrices.
pub fn nemotron_h() -> Spec {
    use Branch::{FeedForward, Mixer};
    let rule = RouteRule { sigmoid: true, biased: true, scale: 2.5, ..RouteRule::PLAIN };
    let experts = Experts { dense: vec![3], rule: Some(rule), ..sparse().experts.expect("experts") };
    Spec {
        arch: Arch::NemotronH,
        activation: Activation::ReluSquared,
        fused_gate_up: false,
        recurrent: vec![true, false, false, false],
        single: vec![Mixer, FeedForward, Mixer, FeedForward],
        experts: Some(experts),
        ..granite_hybrid()
    }
}

/// Gated short convolutions, and attention in the last block.
pub fn lfm2() -> Spec {
    Spec {
        arch: Arch::Lfm2,
        qk_norm: true,
        recurrence: Some(Recurrence::Conv { channels: llama().dim, taps: 3 }),
        recurrent: vec![true, true, true, false],
        ..llama()
    }
}

/// A gpt-oss of the sizes of `sizes`: some inputs of experts are clamped.
pub fn gpt_oss(sizes: Spec) -> Spec {
    let experts = Experts {
        count: 7,
        top_k: 3,
        ff: 16,
        normalize: true,
        clamp: Some(GluClamp { alpha: 1.702, limit: 0.02 }),
        ..Experts::default()
    };
    let windowed = (0..sizes.layers).map(|i| i % 2 == 0).collect();
    let experts = Some(experts);
    Spec { arch: Arch::GptOss, qkv_bias: true, out_bias: true, sinks: true, window: 5, windowed, experts, ..sizes }
}

/// A DeepSeek V3 of the sizes of `sizes`: values are narrower than keys, and experts are in groups.
pub fn deepseek(sizes: Spec) -> Spec {
    let rule = RouteRule { sigmoid: true, biased: true, groups: 4, top_groups: 2, scale: 2.5, ..RouteRule::PLAIN };
    let experts = Experts {
        count: 8,
        top_k: 3,
        ff: 14,
        shared_ff: 10,
        normalize: true,
        dense: vec![0],
        rule: Some(rule),
        ..Experts::default()
    };
    let latent = Latent { q_rank: 9, kv_rank: 7, nope: 6, rope: 4, value: 8 };
    Spec {
        arch: Arch::DeepseekV3,
        kv_heads: sizes.heads,
        head_dim: latent.head_dim(),
        rotary_dim: Some(latent.rope),
        rotary_pairs: RotaryPairs::Adjacent,
        latent: Some(latent),
        experts: Some(experts),
        ..sizes
    }
}

/// A Llama 4 of the sizes of `sizes`: the first block is dense, and the second has no rotary positions.
pub fn llama4(sizes: Spec) -> Spec {
    let rule = RouteRule { sigmoid: true, ..RouteRule::PLAIN };
    let experts = Experts {
        count: 7,
        top_k: 1,
        ff: 14,
        shared_ff: 14,
        dense: vec![0],
        rule: Some(rule),
        weighs_inputs: true,
        ..Experts::default()
    };
    Spec {
        arch: Arch::Llama4,
        rotary_pairs: RotaryPairs::Adjacent,
        rotated: (0..sizes.layers).map(|i| i != 1).collect(),
        query_growth: Some(QueryGrowth { beta: 0.5, original: 3, unrotated: true }),
        qk_norm: true,
        norm_after_rope: true,
        bare_head_norms: true,
        experts: Some(experts),
        ..sizes
    }
}

/// A Phi 3.5 MoE of the sizes of `sizes`: some tokens have several experts nearly as good as the best.
pub fn phimoe(sizes: Spec) -> Spec {
    let rule = RouteRule { mixer: Some(0.8), ..RouteRule::PLAIN };
    let experts = Experts { count: 7, top_k: 2, ff: 14, rule: Some(rule), ..Experts::default() };
    Spec {
        arch: Arch::PhiMoe,
        layer_norm: true,
        norm_bias: true,
        qkv_bias: true,
        out_bias: true,
        head_bias: true,
        experts: Some(experts),
        ..sizes
    }
}

pub const SGD: Rule = Rule::Sgd { momentum: 0.9, weight_decay: 0.01 };
/// Muon with a momentum that shows in a few steps.
pub const MUON: Rule = Rule::Muon { momentum: 0.9, steps: 5, beta1: 0.9, beta2: 0.95, eps: 1e-8, weight_decay: 0.1 };
pub const ADAMW: Rule = Rule::AdamW { beta1: 0.9, beta2: 0.95, eps: 1e-8, weight_decay: 0.1, moments: DType::F32 };

pub fn sharded() -> ShardedOptions {
    ShardedOptions::default()
}
pub fn fsdp(options: ShardedOptions) -> Arc<dyn Strategy> {
    Arc::new(options)
}
/// Buckets of so few bytes that there are several.
pub fn ddp(dtype: DType) -> Arc<dyn Strategy> {
    replicas(dtype, DType::F32)
}
/// f32, whose gradients travel in `reduce_dtype`.
pub fn travelling(reduce_dtype: DType) -> Arc<dyn Strategy> {
    replicas(DType::F32, reduce_dtype)
}
fn replicas(dtype: DType, reduce_dtype: DType) -> Arc<dyn Strategy> {
    let options = ReplicatedOptions { dtype, reduce_dtype, bucket_bytes: 30_000, ..ReplicatedOptions::default() };
    Arc::new(options)
}

/// Rows of 12 tokens.
pub const ROW: usize = 12;

/// Two rows that depend on (step, micro-batch, rank), the last cut short: targets without loss differ between ranks.
pub fn batch(spec: &Spec, step: u64, micro: usize, rank: usize) -> MicroBatch {
    let rng = Rng::new(7, step << 32 | (micro as u64) << 16 | rank as u64);
    let n = 2 * ROW;
    let tokens: Vec<u32> = (0..n as u64).map(|i| (rng.u64(i) % spec.vocab as u64) as u32).collect();
    let kept = n - 1 - rank;
    let target = |i: usize| if i % ROW == ROW - 1 || i > kept { IGNORE } else { tokens[i + 1] as i32 };
    MicroBatch {
        targets: (0..n).map(target).collect(),
        positions: (0..n as u32).map(|i| i % ROW as u32).collect(),
        cu_seqlens: vec![0, ROW as u32, n as u32],
        tokens,
        ..MicroBatch::default()
    }
}

/// Two micro-batches as one.
pub fn joined(a: &MicroBatch, b: &MicroBatch) -> MicroBatch {
    let at = a.tokens.len() as u32;
    MicroBatch {
        tokens: [&a.tokens[..], &b.tokens].concat(),
        targets: [&a.targets[..], &b.targets].concat(),
        positions: [&a.positions[..], &b.positions].concat(),
        cu_seqlens: a.cu_seqlens.iter().copied().chain(b.cu_seqlens[1..].iter().map(|c| c + at)).collect(),
        ..MicroBatch::default()
    }
}

pub fn options(spec: &Spec, strategy: Arc<dyn Strategy>, rule: Rule) -> EngineOptions {
    EngineOptions {
        scaler: None,
        objective: Objective::Sft,
        reference: ReferenceModel::Base,
        teacher: None,
        spec: spec.clone(),
        tuning: Tuning::default(),
        strategy,
        rule,
        grad_clip: 0.5,
        tokens: 4 * ROW,
        checkpoint: Checkpointing::Off,
        seed: 3,
        sequence_parallel: false,
        cuts: Cuts::ALL,
        aux_coef: 0.0,
        samples: None,
        moe_overlap: false,
        sp_impl: SpImpl::Ring,
    }
}

/// One rank of a test.
pub struct Rank {
    pub rank: usize,
    pub world: usize,
    pub meter: Meter,
    pub device: Arc<dyn Device>,
    pub mesh: Mesh,
}

/// Runs `f` on every rank of a world of threads and returns what each made. The first failure fails the test.
pub fn ranks<T: Send>(world: usize, f: impl Fn(Rank) -> Result<T> + Sync) -> Vec<T> {
    ranks_on(world, |_, meter| Ok(Arc::new(cpu(meter))), f)
}

/// The same on other devices; `device` makes a rank's.
pub fn ranks_on<T: Send>(
    world: usize,
    device: impl Fn(usize, Meter) -> Result<Arc<dyn Device>> + Sync,
    f: impl Fn(Rank) -> Result<T> + Sync,
) -> Vec<T> {
    mesh_ranks_on(MeshSizes::sharded(world), device, f)
}

/// The same on another mesh.
pub fn mesh_ranks_on<T: Send>(
    sizes: MeshSizes,
    device: impl Fn(usize, Meter) -> Result<Arc<dyn Device>> + Sync,
    f: impl Fn(Rank) -> Result<T> + Sync,
) -> Vec<T> {
    let results = try_mesh_on(sizes, device, f);
    let failed = results.iter().filter_map(|r| r.as_ref().err());
    let failed: Vec<String> = failed.map(|e| e.to_string()).collect();
    assert!(failed.is_empty(), "{sizes:?}: ranks failed: {failed:#?}");
    results.into_iter().flatten().collect()
}

/// Each rank's result or error. A rank that fails aborts the others, so they need not wait for their timeout.
pub fn try_ranks_on<T: Send>(
    world: usize,
    device: impl Fn(usize, Meter) -> Result<Arc<dyn Device>> + Sync,
    f: impl Fn(Rank) -> Result<T> + Sync,
) -> Vec<Result<T>> {
    try_mesh_on(MeshSizes::sharded(world), device, f)
}

/// As [`ranks`], with another mesh.
pub fn mesh_ranks<T: Send>(sizes: MeshSizes, f: impl Fn(Rank) -> Result<T> + Sync) -> Vec<T> {
    mesh_ranks_on(sizes, |_, meter| Ok(Arc::new(cpu(meter))), f)
}

fn try_mesh_on<T: Send>(
    sizes: MeshSizes,
    device: impl Fn(usize, Meter) -> Result<Arc<dyn Device>> + Sync,
    f: impl Fn(Rank) -> Result<T> + Sync,
) -> Vec<Result<T>> {
    let world = sizes.world();
    let meters: Vec<Meter> = (0..world).map(|_| Meter::default()).collect();
    let meshes = shm::threads(sizes, &meters).unwrap();
    let start = |(mesh, meter): (Mesh, Meter)| {
        let (rank, member) = (mesh.rank(), mesh.member.clone());
        let result = device(rank, meter.clone()).and_then(|device| f(Rank { rank, world, meter, device, mesh }));
        if result.is_err() {
            member.abort();
        }
        result
    };
    std::thread::scope(|scope| {
        let threads: Vec<_> = meshes.into_iter().zip(meters).map(|rank| scope.spawn(|| start(rank))).collect();
        threads.into_iter().map(|thread| thread.join().unwrap_or_else(|e| std::panic::resume_unwind(e))).collect()
    })
}

/// Every mesh of this many ranks.
pub fn factorizations(world: usize) -> Vec<MeshSizes> {
    let divisors = |n: usize| (1..=n).filter(move |d| n.is_multiple_of(*d));
    let mut all = Vec::new();
    for dp_replicate in divisors(world) {
        for dp_shard in divisors(world / dp_replicate) {
            for sp in divisors(world / dp_replicate / dp_shard) {
                all.push(MeshSizes { dp_replicate, dp_shard, sp, tp: world / dp_replicate / dp_shard / sp, ep: 1 });
            }
        }
    }
    all
}

/// `steps` steps with `accum` micro-batches each.
pub fn train(engine: &mut Engine, spec: &Spec, steps: u64, accum: usize) -> Result<Vec<StepReport>> {
    (1..=steps)
        .map(|number| {
            let rank = engine.mesh().group(Axis::Dp).rank();
            let batches: Vec<_> = (0..accum).map(|micro| batch(spec, number, micro, rank)).collect();
            step(engine, &batches, number)
        })
        .collect()
}

/// One step at a learning rate high enough for its mistakes to show.
pub fn step(engine: &mut Engine, batches: &[MicroBatch], number: u64) -> Result<StepReport> {
    let tokens = engine.global_count(batches.iter().map(MicroBatch::loss_tokens).sum())?;
    engine.train_step(batches, &Step { number, lr: 0.01 * number as f32, tokens })
}

/// A rank's part of each tensor: (name, first element in the whole tensor, values).
pub type Fragments = Vec<(String, usize, Vec<f32>)>;

/// The master weights that this rank owns.
pub fn fragments(engine: &mut Engine) -> Result<Fragments> {
    let dev = engine.device().clone();
    let mut fragments = Vec::new();
    engine.state().0.for_each_shard(&mut |shard| {
        let mut values = vec![0f32; shard.master.len()];
        // Frozen weights may be kept in fewer bits.
        let mut wide = dev.alloc(DType::F32, values.len(), Category::Other)?;
        dev.copy(shard.master.as_view(), wide.view_mut())?;
        dev.download(wide.view(), bytemuck::cast_slice_mut(&mut values))?;
        let mut padding = vec![true; values.len()];
        for segment in &shard.layout.segments {
            let owned = shard.start..shard.start + values.len();
            let (from, to) = (segment.start.max(owned.start), segment.range().end.min(owned.end));
            if from < to {
                padding[from - owned.start..to - owned.start].fill(false);
                for (part, place) in segment.stretches(from - segment.start..to - segment.start) {
                    let at = segment.start + part.start - owned.start;
                    fragments.push((segment.name.clone(), place, values[at..at + part.len()].to_vec()));
                }
            }
        }
        let stained = values.iter().zip(padding).any(|(&x, padding)| padding && x.to_bits() != 0);
        assert!(!stained, "padding of unit {} is not zero", shard.unit);
        Ok(())
    })?;
    Ok(fragments)
}

/// Whole tensors from the fragments of all ranks. Ranks that hold the same element must agree on its bits.
pub fn whole(spec: &Spec, ranks: &[Fragments]) -> BTreeMap<String, Vec<f32>> {
    whole_of(&spec.layouts(), ranks)
}
fn whole_of(layouts: &[Layout], ranks: &[Fragments]) -> BTreeMap<String, Vec<f32>> {
    let mut all: BTreeMap<String, Vec<Option<f32>>> = BTreeMap::new();
    for segment in layouts.iter().flat_map(|l| &l.segments) {
        all.insert(segment.name.clone(), vec![None; segment.len()]);
    }
    for (name, start, values) in ranks.iter().flatten() {
        let tensor = all.get_mut(name).unwrap();
        for (held, &x) in tensor[*start..].iter_mut().zip(values) {
            assert!(held.is_none_or(|h| h.to_bits() == x.to_bits()), "ranks disagree on {name}");
            *held = Some(x);
        }
    }
    let filled = |(name, tensor): (String, Vec<Option<f32>>)| {
        let values = tensor.into_iter().map(|x| x.unwrap_or_else(|| panic!("no rank holds all of {name}")));
        (name.clone(), values.collect())
    };
    all.into_iter().map(filled).collect()
}

/// The result of a run, compared bitwise.
#[derive(Clone, PartialEq, Debug)]
pub struct Outcome {
    /// (loss, gradient norm) of each step, as bits.
    pub steps: Vec<(u64, u32)>,
    /// Bits of every weight.
    pub weights: BTreeMap<String, Vec<u32>>,
}

/// Trains on `world` ranks and returns what all of them agree on.
pub fn outcome(world: usize, options: &EngineOptions, steps: u64, accum: usize) -> Outcome {
    outcome_on(MeshSizes::sharded(world), options, steps, accum)
}
pub fn outcome_on(sizes: MeshSizes, options: &EngineOptions, steps: u64, accum: usize) -> Outcome {
    let results = mesh_ranks(sizes, |rank| {
        let mut engine = Engine::new(rank.device, &rank.mesh, options)?;
        let reports = train(&mut engine, &options.spec, steps, accum)?;
        Ok((reports, fragments(&mut engine)?))
    });
    gathered(&options.spec, results)
}

pub fn gathered(spec: &Spec, results: Vec<(Vec<StepReport>, Fragments)>) -> Outcome {
    gathered_of(&spec.layouts(), results)
}
/// Of models with adapters: the layouts of one rank.
pub fn gathered_of(layouts: &[Layout], results: Vec<(Vec<StepReport>, Fragments)>) -> Outcome {
    let (reports, fragments): (Vec<_>, Vec<_>) = results.into_iter().unzip();
    let bits = |reports: &Vec<StepReport>| -> Vec<(u64, u32)> {
        assert!(reports.iter().all(|r| !r.skipped), "a step was skipped");
        reports.iter().map(|r| (r.loss.to_bits(), r.grad_norm.to_bits())).collect()
    };
    let steps = bits(&reports[0]);
    assert!(reports.iter().all(|r| bits(r) == steps), "ranks report different steps");
    let to_bits = |values: Vec<f32>| values.into_iter().map(f32::to_bits).collect();
    Outcome { steps, weights: whole_of(layouts, &fragments).into_iter().map(|(k, v)| (k, to_bits(v))).collect() }
}

/// Fails with the first difference.
pub fn assert_same_bits(a: &Outcome, b: &Outcome, what: &str) {
    for (i, (x, y)) in a.steps.iter().zip(&b.steps).enumerate() {
        let show = |s: &(u64, u32)| (f64::from_bits(s.0), f32::from_bits(s.1));
        assert_eq!(x, y, "{what}: step {} (loss, norm): {:?} and {:?}", i + 1, show(x), show(y));
    }
    for (name, x) in &a.weights {
        let y = &b.weights[name];
        if let Some(i) = (0..x.len()).find(|&i| x[i] != y[i]) {
            panic!("{what}: {name}[{i}]: {} and {}", f32::from_bits(x[i]), f32::from_bits(y[i]));
        }
    }
    assert_eq!((a.steps.len(), a.weights.len()), (b.steps.len(), b.weights.len()), "{what}");
}

/// Largest difference of two runs' weights, and of their losses.
pub fn distance(a: &Outcome, b: &Outcome) -> (f32, f64) {
    let pairs = a.weights.iter().flat_map(|(name, x)| x.iter().zip(&b.weights[name]));
    let weights = pairs.map(|(x, y)| (f32::from_bits(*x) - f32::from_bits(*y)).abs()).fold(0.0, f32::max);
    let losses = a.steps.iter().zip(&b.steps).map(|(x, y)| (f64::from_bits(x.0) - f64::from_bits(y.0)).abs());
    (weights, losses.fold(0.0, f64::max))
}

/// Rows of `row` tokens below 512, each rank's its own: for benches.
pub fn rows_of((row, rows): (usize, usize), rank: usize) -> MicroBatch {
    let rng = Rng::new(1, rank as u64);
    let tokens: Vec<u32> = (0..(row * rows) as u64).map(|i| (rng.u64(i) % 512) as u32).collect();
    MicroBatch {
        targets: tokens.iter().map(|&t| ((t * 7 + 1) % 512) as i32).collect(),
        positions: (0..row * rows).map(|i| (i % row) as u32).collect(),
        cu_seqlens: (0..=rows).map(|i| (i * row) as u32).collect(),
        tokens,
        ..MicroBatch::default()
    }
}
