//! Moments in bf16 or 8 bits, and masters in bf16: the same bits however they are sharded, in checkpoints, and in
//! memory.
use crate::common::known_state::state;
use crate::common::stores::*;
use crate::common::*;
use crate::muon::{meshes_of, updated, updated_alone};
use flatshard::base::DType;
use flatshard::ckpt::Checkpointer;
use flatshard::comm::{Axis, MeshSizes};
use flatshard::engine::{Engine, EngineOptions, StepReport, Strategy};
use flatshard::nn::{Experts, Spec};
use flatshard::optim::Rule;
use flatshard::store::{Offload, ReferenceOptions, ReplicatedOptions, ShardedOptions, Stage, Wrap, ZeroOptions};
use std::path::Path;
use std::sync::Arc;

const F32: DType = DType::F32;
const BF16: DType = DType::Bf16;
const U8: DType = DType::U8;

pub fn adamw(moments: DType) -> Rule {
    Rule::AdamW { beta1: 0.9, beta2: 0.95, eps: 1e-8, weight_decay: 0.1, moments }
}
/// With matrices large enough for 8-bit moments, of lengths that no block divides, and others that are too small.
pub fn wide(spec: Spec) -> Spec {
    let kv_heads = if spec.kv_heads == spec.heads { 6 } else { 2 };
    let experts = spec.experts.clone().map(|experts| Experts { ff: 60, ..experts });
    Spec { dim: 72, ff: 133, heads: 6, kv_heads, head_dim: 12, experts, ..spec }
}
/// Every kind of store, computing in `dtype`.
fn kinds(dtype: DType, masters: DType) -> Vec<Arc<dyn Strategy>> {
    let zero = |stage| zero(ZeroOptions { masters, ..staged(stage, dtype) });
    let sharded = ShardedOptions { dtype, masters, ..sharded() };
    vec![
        Arc::new(ReplicatedOptions { dtype, masters, bucket_bytes: 30_000, ..ReplicatedOptions::default() }),
        fsdp(sharded.clone()),
        fsdp(ShardedOptions { wrap: Wrap::None, ..sharded }),
        reference(ReferenceOptions { masters, ..by_tensor(dtype, 1) }),
        zero(Stage::One),
        zero(Stage::Two),
        zero(Stage::Three),
    ]
}

#[test]
fn rounded_states_do_not_depend_on_store_or_wrapping() {
    for (dtype, moments, masters, spec) in [
        (F32, BF16, F32, llama()),
        (F32, BF16, F32, gpt()),
        (BF16, F32, BF16, llama()),
        (BF16, BF16, BF16, llama()),
        (F32, U8, F32, wide(gpt())),
        (BF16, U8, BF16, wide(llama())),
    ] {
        for world in [1, 3] {
            let run = |strategy| outcome(world, &options(&spec, strategy, adamw(moments)), 3, 1);
            let mut all = kinds(dtype, masters).into_iter();
            let expected = run(all.next().unwrap());
            for strategy in all {
                let what = format!("{} world {world}, {moments} moments, {masters} masters", strategy.name());
                assert_same_bits(&expected, &run(strategy), &what);
            }
            let plain = outcome(world, &options(&spec, kinds(dtype, F32).remove(0), adamw(F32)), 3, 1);
            assert!(distance(&plain, &expected).0 > 0.0, "nothing was rounded");
        }
    }
}

/// From equal gradients, because over tp and sp they are sums in another order. The third update shows what the moments
/// of the second were rounded to.
#[test]
fn rounded_states_do_not_depend_on_the_mesh() {
    for (dtype, moments, masters, spec) in [
        (F32, BF16, F32, llama()),
        (F32, BF16, F32, gpt()),
        (BF16, F32, BF16, llama()),
        (BF16, BF16, BF16, llama()),
        (BF16, BF16, BF16, gpt()),
        (F32, U8, F32, wide(llama())),
    ] {
        let of = |strategy| options(&spec, strategy, adamw(moments));
        let one = updated_alone(&of(kinds(dtype, masters).remove(0)), 3);
        // Blocks of 8-bit moments are of a rank's part of a tensor.
        for sizes in meshes_of(&spec).filter(|sizes| sizes.tp == 1 || moments != U8) {
            for strategy in kinds(dtype, masters) {
                let what = format!("{} on {sizes:?}, {moments} moments, {masters} masters", strategy.name());
                assert_same_bits(&one, &updated(sizes, &of(strategy), 3), &what);
            }
        }
        let plain = updated(MeshSizes::sharded(1), &options(&spec, kinds(dtype, F32).remove(0), adamw(F32)), 3);
        assert!(distance(&plain, &one).0 > 0.0, "nothing was rounded");
    }
}

#[test]
fn offloading_rounded_states_changes_no_bit() {
    for (moments, masters, spec) in [(BF16, BF16, llama()), (U8, F32, wide(llama()))] {
        let run = |offload| {
            let strategy = fsdp(ShardedOptions { dtype: BF16, masters, offload, ..sharded() });
            outcome(2, &options(&spec, strategy, adamw(moments)), 3, 1)
        };
        let expected = run(Offload::Nothing);
        for offload in [Offload::Optimizer, Offload::Gradients, Offload::Parameters] {
            assert_same_bits(&expected, &run(offload), &format!("{moments} {offload:?}"));
        }
    }
}

/// Whatever sums gradients in another order gives nearly the same: micro-batches, ranks of tp, whose blocks are of
/// their own parts of tensors, and of ep. Replicas, and all stores on one mesh of ep, have the same bits.
#[test]
fn moments_in_blocks_on_every_mesh() {
    let close = |a: &Outcome, b: &Outcome, what: &str| {
        let (_, loss) = distance(a, b);
        assert!(loss < 1e-3, "{what}: losses differ by {loss}");
    };
    let on = |sizes, spec: &Spec, strategy| outcome_on(sizes, &options(spec, strategy, adamw(U8)), 3, 1);
    let one = MeshSizes::sharded(1);
    let plain = || fsdp(sharded());
    let spec = wide(llama());
    close(&on(one, &spec, plain()), &on(MeshSizes { tp: 2, ..one }, &spec, plain()), "tp 2");
    let hybrid = MeshSizes { dp_replicate: 2, ..one };
    assert_same_bits(&on(MeshSizes::sharded(2), &spec, plain()), &on(hybrid, &spec, plain()), "HYBRID_SHARD");
    let spec = wide(sparse());
    let shared = MeshSizes { ep: 2, ..MeshSizes::sharded(4) };
    let mut stores = kinds(F32, F32).into_iter().skip(1).map(|store| (store.name(), on(shared, &spec, store)));
    let (_, first) = stores.next().unwrap();
    stores.for_each(|(name, outcome)| assert_same_bits(&first, &outcome, name));
    close(&on(MeshSizes::sharded(4), &spec, plain()), &first, "ep 2");
}

/// Steps up to `to`, from the checkpoint in `from` or the start; saved into `save`.
fn part(sizes: MeshSizes, options: &EngineOptions, from: Option<&Path>, to: u64, save: Option<&Path>) -> Outcome {
    let results = mesh_ranks(sizes, |rank| {
        let mut engine = Engine::new(rank.device.clone(), &rank.mesh, options)?;
        let layouts = engine.decoder().layouts().to_vec();
        let mut ckpt = Checkpointer::new(rank.device, &rank.mesh, &options.spec, &layouts, options.rule.state())?;
        let (store, optimizer) = engine.state();
        let done = from.map(|dir| ckpt.load(&dir.join("step-00000002"), store, optimizer)).transpose()?;
        let reports: Vec<StepReport> = (done.map_or(0, |state| state.step) + 1..=to)
            .map(|number| {
                step(&mut engine, &[batch(&options.spec, number, 0, rank.mesh.group(Axis::Dp).rank())], number)
            })
            .collect::<flatshard::base::Result<_>>()?;
        if let Some(dir) = save {
            let (store, optimizer) = engine.state();
            ckpt.save_async(dir, 9, store, optimizer, &state(to))?;
            ckpt.settle()?;
        }
        Ok((reports, fragments(&mut engine)?))
    });
    gathered(&options.spec, results)
}

/// Files are f32, which holds bf16 exactly, and 8-bit blocks so that the same are made again. So a run resumes with its
/// bits on another mesh, and a run with states of another dtype resumes from them too.
#[test]
fn rounded_states_resume_bitwise_and_are_converted() {
    let spec = wide(llama());
    for (masters, moments) in [(BF16, BF16), (F32, U8), (BF16, U8)] {
        let of = |masters, moments| {
            options(&spec, fsdp(ShardedOptions { dtype: BF16, masters, ..sharded() }), adamw(moments))
        };
        resumes(&of(masters, moments), &of(F32, F32));
    }
}

/// Of `small`, on the same mesh and on another; and to and from `large`.
fn resumes(small: &EngineOptions, large: &EngineOptions) {
    let (two, hybrid) = (MeshSizes::sharded(2), MeshSizes { dp_replicate: 2, dp_shard: 1, sp: 1, tp: 1, ep: 1 });
    let dir = tempfile::tempdir().unwrap();
    let [there, full] = ["small", "large"].map(|name| dir.path().join(name));
    let whole = part(two, small, None, 4, None);
    part(two, small, None, 2, Some(&there));
    let rest = Outcome { steps: whole.steps[2..].to_vec(), ..whole };
    for mesh in [two, hybrid] {
        assert_same_bits(&rest, &part(mesh, small, Some(&there), 4, None), "resumed");
    }
    part(two, large, None, 2, Some(&full));
    let over_tp = MeshSizes { tp: 2, ..MeshSizes::sharded(2) };
    for (mesh, options, from) in [(two, small, &full), (two, large, &there), (over_tp, small, &there)] {
        let converted = part(mesh, options, Some(from), 4, None);
        let (loss, expected) = (f64::from_bits(converted.steps[1].0), f64::from_bits(rest.steps[1].0));
        assert!((loss - expected).abs() < 0.01 * expected, "{loss} after a conversion, {expected} without");
    }
}
