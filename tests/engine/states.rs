//! Moments and masters in bf16: the same bits however they are sharded, in checkpoints, and in memory.
use crate::common::known_state::state;
use crate::common::stores::*;
use crate::common::*;
use flatshard::base::DType;
use flatshard::ckpt::Checkpointer;
use flatshard::comm::MeshSizes;
use flatshard::engine::{Engine, EngineOptions, StepReport, Strategy};
use flatshard::optim::Rule;
use flatshard::store::{Offload, ReferenceOptions, ReplicatedOptions, ShardedOptions, Stage, Wrap, ZeroOptions};
use std::path::Path;
use std::sync::Arc;

const F32: DType = DType::F32;
const BF16: DType = DType::Bf16;

pub fn adamw(moments: DType) -> Rule {
    Rule::AdamW { beta1: 0.9, beta2: 0.95, eps: 1e-8, weight_decay: 0.1, moments }
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
    for (dtype, moments, masters, spec) in
        [(F32, BF16, F32, gpt()), (BF16, F32, BF16, llama()), (BF16, BF16, BF16, llama())]
    {
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

#[test]
fn offloading_rounded_states_changes_no_bit() {
    let run = |offload| {
        let strategy = fsdp(ShardedOptions { dtype: BF16, masters: BF16, offload, ..sharded() });
        outcome(2, &options(&llama(), strategy, adamw(BF16)), 3, 1)
    };
    let expected = run(Offload::Nothing);
    for offload in [Offload::Optimizer, Offload::Gradients, Offload::Parameters] {
        assert_same_bits(&expected, &run(offload), &format!("{offload:?}"));
    }
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
            .map(|number| step(&mut engine, &[batch(&options.spec, number, 0, rank.mesh.dp.rank())], number))
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

/// Files are f32, which holds bf16 exactly, so a run resumes with its bits on another mesh; and a run with states of
/// the other dtype resumes from them too.
#[test]
fn rounded_states_resume_bitwise_and_are_converted() {
    let spec = llama();
    let of =
        |masters, moments| options(&spec, fsdp(ShardedOptions { dtype: BF16, masters, ..sharded() }), adamw(moments));
    let (small, large) = (of(BF16, BF16), of(F32, F32));
    let (two, hybrid) = (MeshSizes::sharded(2), MeshSizes { dp_replicate: 2, dp_shard: 1, sp: 1, tp: 1, ep: 1 });
    let dir = tempfile::tempdir().unwrap();
    let [there, full] = ["small", "large"].map(|name| dir.path().join(name));
    let whole = part(two, &small, None, 4, None);
    part(two, &small, None, 2, Some(&there));
    let rest = Outcome { steps: whole.steps[2..].to_vec(), ..whole };
    for mesh in [two, hybrid] {
        assert_same_bits(&rest, &part(mesh, &small, Some(&there), 4, None), "resumed");
    }
    part(two, &large, None, 2, Some(&full));
    for (options, from) in [(&small, &full), (&large, &there)] {
        let converted = part(two, options, Some(from), 4, None);
        let (loss, expected) = (f64::from_bits(converted.steps[1].0), f64::from_bits(rest.steps[1].0));
        assert!((loss - expected).abs() < 0.01 * expected, "{loss} after a conversion, {expected} without");
    }
}
