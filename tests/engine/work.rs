//! The counted work of a step: FLOPs against the formula, against a GPU that counts its products, and with what the
//! formula leaves out; bytes against a real run.
use crate::common::counting_gpu::Counted;
use crate::common::*;
use flatshard::base::DType;
use flatshard::comm::mesh::MeshSizes;
use flatshard::data::MicroBatch;
use flatshard::device::Device;
use flatshard::device::gpu::GpuDevice;
use flatshard::engine::{Engine, EngineOptions, StepCounter, StepWork};
use flatshard::nn::{Arch, Checkpointing, Lora, SpImpl, Spec, Tuning};
use flatshard::optim::Rule;
use flatshard::store::ShardedOptions;
use std::sync::Arc;

/// Documents of 5 and 19 tokens.
fn packed(spec: &Spec) -> MicroBatch {
    MicroBatch { cu_seqlens: vec![0, 5, 2 * ROW as u32], ..batch(spec, 1, 0, 0) }
}
/// (query, key) pairs of a causal mask, by counting them.
fn pairs(batch: &MicroBatch, window: usize) -> u64 {
    let document = |i: usize| batch.cu_seqlens.partition_point(|&start| start as usize <= i);
    let sees = |q: usize, k: usize| document(q) == document(k) && (window == 0 || q - k < window);
    (0..batch.tokens.len()).map(|q| (0..=q).filter(|&k| sees(q, k)).count() as u64).sum()
}
/// Parameters of a model that are multiplied by each token: not the embedding, unless it is also the head.
fn multiplied(spec: &Spec) -> usize {
    let up = if spec.arch == Arch::Gpt { 1 } else { 2 };
    let inner = spec.heads * spec.head_dim;
    spec.layers * (spec.dim * spec.qkv() + inner * spec.dim + (up + 1) * spec.dim * spec.ff) + spec.vocab * spec.dim
}
/// 6 FLOPs per multiplied parameter and token; 12 per pair and column of attention.
fn formula(spec: &Spec, batches: &[MicroBatch]) -> [u64; 2] {
    let of = |batch: &MicroBatch| {
        let window = |i: usize| if spec.windowed.get(i) == Some(&true) { spec.window } else { 0 };
        let pairs: u64 = (0..spec.layers).map(|layer| pairs(batch, window(layer))).sum();
        [6 * (multiplied(spec) * batch.tokens.len()) as u64, 12 * pairs * (spec.heads * spec.head_dim) as u64]
    };
    batches.iter().map(of).fold([0, 0], |sum, of| [sum[0] + of[0], sum[1] + of[1]])
}
fn work_on(mesh: MeshSizes, rank: usize, options: &EngineOptions, batches: &[MicroBatch]) -> StepWork {
    StepCounter::new(options, mesh, rank).unwrap().step(batches).unwrap().clone()
}
fn work(options: &EngineOptions, batches: &[MicroBatch]) -> StepWork {
    work_on(MeshSizes::default(), 0, options, batches)
}
fn plain(spec: &Spec) -> EngineOptions {
    options(spec, fsdp(sharded()), SGD)
}

#[test]
fn flops_are_those_of_the_formula_for_every_family() {
    for spec in [llama(), gpt(), qwen2(), qwen3(), gemma3()] {
        for batches in [[batch(&spec, 1, 0, 0)], [packed(&spec)]] {
            let (work, [products, attention]) = (work(&plain(&spec), &batches), formula(&spec, &batches));
            assert_eq!((work.all_flops(), work.attention), (products + attention, attention), "{:?}", spec.arch);
            assert_eq!(work.flops.keys().collect::<Vec<_>>(), [&DType::F32]);
            assert_eq!(work.recomputed, attention / 6, "the scores, of which backward needs a product more");
        }
    }
}

#[test]
fn flops_have_the_dtype_of_their_inputs_and_micro_batches_add_up() {
    let spec = llama();
    let batches = [batch(&spec, 1, 0, 0), packed(&spec)];
    let sharded = ShardedOptions { dtype: DType::Bf16, grad_accum: 2, ..sharded() };
    let work = work(&options(&spec, fsdp(sharded), SGD), &batches);
    let [products, attention] = formula(&spec, &batches);
    assert_eq!(work.flops.into_iter().collect::<Vec<_>>(), [(DType::Bf16, products + attention)]);
}

#[test]
fn a_counter_counts_again_when_documents_differ() {
    let spec = llama();
    let mut counter = StepCounter::new(&plain(&spec), MeshSizes::default(), 0).unwrap();
    for batches in [[batch(&spec, 1, 0, 0)], [packed(&spec)], [batch(&spec, 2, 0, 1)]] {
        assert_eq!(counter.step(&batches).unwrap().attention, formula(&spec, &batches)[1]);
    }
}

#[test]
fn recomputation_is_counted_apart() {
    let spec = llama();
    let batches = [batch(&spec, 1, 0, 0)];
    let [_, attention] = formula(&spec, &batches);
    let off = work(&plain(&spec), &batches);
    let forward = attention / 3 * (spec.layers as u64 - 1) / spec.layers as u64;
    for (checkpoint, attention_again) in [(Checkpointing::Selective, 0), (Checkpointing::Full, forward)] {
        let again = work(&EngineOptions { checkpoint, ..plain(&spec) }, &batches);
        let products_again = (2 * ROW) as u64 * checkpoint.products_again(&spec);
        assert_eq!(again.recomputed - off.recomputed, products_again + attention_again, "{checkpoint:?}");
        assert_eq!(StepWork { recomputed: off.recomputed, ..again }, off, "{checkpoint:?}");
    }
}

#[test]
fn frozen_weights_have_no_gradient() {
    let spec = llama();
    let lora = Lora { rank: 3, alpha: 6.0, dropout: 0.0, targets: vec!["q_proj".into(), "v_proj".into()] };
    let options = EngineOptions { tuning: Tuning { lora: Some(lora), ..Tuning::default() }, ..plain(&spec) };
    let batches = [batch(&spec, 1, 0, 0)];
    let (tokens, [products, attention]) = ((2 * ROW) as u64, formula(&spec, &batches));
    let inner = (spec.heads + spec.kv_heads) * spec.head_dim;
    let adapters = spec.layers * 3 * 6 * (2 * spec.dim + inner);
    let work = work(&options, &batches);
    assert_eq!(work.all_flops(), products / 3 * 2 + attention + tokens * adapters as u64);
}

#[test]
fn ranks_of_tp_and_sp_share_the_flops() {
    let spec = Spec { heads: 4, kv_heads: 2, vocab: 60, ..llama() };
    let mut whole = packed(&spec);
    // Few enough targets of a rank would leave logits out.
    whole.targets = whole.tokens.iter().map(|&token| token as i32).collect();
    let batches = [whole];
    let [products, attention] = formula(&spec, &batches);
    let of = |sizes: MeshSizes, options: &EngineOptions| -> Vec<StepWork> {
        (0..sizes.world()).map(|rank| work_on(sizes, rank, options, &batches)).collect()
    };
    let tp = of(MeshSizes { tp: 2, ..MeshSizes::default() }, &plain(&spec));
    assert_eq!(tp[0].flops, tp[1].flops);
    assert_eq!(2 * tp[0].all_flops(), products + attention);
    for sp_impl in [SpImpl::Ring, SpImpl::AllGather, SpImpl::Ulysses] {
        let sp = of(MeshSizes { sp: 2, ..MeshSizes::default() }, &EngineOptions { sp_impl, ..plain(&spec) });
        assert_eq!(sp.iter().map(|work| work.attention).sum::<u64>(), attention, "{sp_impl:?}");
        assert_eq!(sp.iter().map(StepWork::all_flops).sum::<u64>(), products + attention, "{sp_impl:?}");
    }
}

/// Two counters that share no code agree.
#[test]
fn products_are_those_that_a_gpu_is_given() {
    let options = plain(&llama());
    let driver = Arc::new(Counted::default());
    let device = |_: usize, meter| Ok(Arc::new(GpuDevice::new(driver.clone(), meter)?) as Arc<dyn Device>);
    let batches = [batch(&options.spec, 1, 0, 0)];
    ranks_on(1, device, |rank| {
        let mut engine = Engine::new(rank.device, &rank.mesh, &options)?;
        driver.take();
        step(&mut engine, &batches, 1).map(drop)
    });
    let work = work(&options, &batches);
    assert_eq!(work.all_flops() - work.attention, driver.take().flops);
}

#[test]
fn received_bytes_are_those_of_a_run_and_moved_bytes_follow_the_optimizer() {
    let spec = llama();
    for strategy in [fsdp(sharded()), ddp(DType::F32)] {
        let options = options(&spec, strategy, ADAMW);
        let received = ranks(2, |rank| {
            let mut engine = Engine::new(rank.device, &rank.mesh, &options)?;
            let mut run = |number| -> flatshard::base::Result<u64> {
                let before = rank.mesh.stats().bytes;
                let batches = [batch(&spec, number, 0, 0)];
                engine.train_step(&batches, &flatshard::engine::Step { number, lr: 0.01, tokens: 1 })?;
                Ok(rank.mesh.stats().bytes - before)
            };
            run(1)?;
            run(2)
        });
        let counted = |rule: Rule| {
            work_on(MeshSizes::sharded(2), 0, &EngineOptions { rule, ..options.clone() }, &[batch(&spec, 2, 0, 0)])
        };
        let adamw = counted(ADAMW);
        assert_eq!(adamw.gathered + adamw.reduced, received[0]);
        // A moment more is read and written.
        let updated = spec.params() / if adamw.gathered > adamw.reduced { 2 } else { 1 };
        let more = adamw.moved[0] - counted(SGD).moved[0];
        // Padding of tensors this small is a quarter.
        assert!((8 * updated..11 * updated).contains(&(more as usize)), "{more} bytes for {updated} weights");
    }
}
