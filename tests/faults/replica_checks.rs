//! `--verify-every`: a bit flip in one rank's memory is found, with its rank and unit, and a run without a fault is not
//! changed.

use crate::common;
use crate::common::runs::*;
use crate::common::{Rank, batch, fsdp, mesh_ranks, options, sharded};
use flatshard::base::{DType, Result};
use flatshard::comm::Axis;
use flatshard::comm::mesh::MeshSizes;
use flatshard::device::ViewMut;
use flatshard::engine::{Engine, EngineOptions};
use flatshard::nn::{Spec, Storage};
use flatshard::run::r#loop::verify::Verify;
use flatshard::store::{PartId, ShardedOptions};
use std::path::Path;

/// What is flipped on the faulty rank.
#[derive(Clone, Copy, PartialEq, Debug)]
enum In {
    /// In the first shard whose buffer begins with a tensor of this name.
    Master(&'static str),
    Moment,
}

/// Two steps are trained and compared, then a bit flips on rank `at`: what each rank says of the third.
fn flipped(sizes: MeshSizes, options: &EngineOptions, at: usize, what: In) -> Vec<Option<String>> {
    let body = |rank: Rank| -> Result<Option<String>> {
        let mut engine = Engine::new(rank.device.clone(), &rank.mesh, options)?;
        let mut verify = Verify::new(rank.device, &rank.mesh, engine.state().0, 1)?;
        for number in 1..=2 {
            common::step(&mut engine, &[batch(&options.spec, number, 0, rank.mesh.group(Axis::Dp).rank())], number)?;
            let (store, optimizer) = engine.state();
            verify.after(number, store, optimizer)?;
        }
        let (store, optimizer) = engine.state();
        let flip = |view: ViewMut| view.host::<f32>("test").map(|x| x[0] = f32::from_bits(x[0].to_bits() ^ 1));
        match what {
            _ if rank.rank != at => {}
            In::Moment => optimizer.states(PartId { unit: 1, buffer: Storage::Trained.buffer() }).try_for_each(flip)?,
            In::Master(name) => {
                let mut found = false;
                store.for_each_shard(&mut |mut shard| {
                    let segment = shard.layout.segments.iter().find(|s| s.name == name);
                    let Some(range) = segment.and_then(|s| shard.owned(s.range())) else { return Ok(()) };
                    found = true;
                    flip(shard.master.reborrow().slice(range))
                })?;
                assert!(found, "rank {at} has nothing of {name}");
            }
        }
        Ok(verify.after(3, store, optimizer).err().map(|e| e.to_string()))
    };
    mesh_ranks(sizes, body)
}
#[track_caller]
fn all_say(found: Vec<Option<String>>, parts: &[&str]) {
    for said in found {
        let said = said.expect("the flipped bit is found");
        parts.iter().for_each(|part| assert!(said.contains(part), "no {part:?} in {said}"));
    }
}
fn spec() -> Spec {
    Spec { vocab: 64, dim: 24, heads: 8, kv_heads: 4, head_dim: 4, ff: 40, ..common::llama() }
}

#[test]
fn with_three_replicas_the_odd_one_is_named_with_the_unit() {
    let ddp = options(&spec(), common::ddp(DType::Bf16), common::ADAMW);
    let sizes = MeshSizes { dp_replicate: 3, dp_shard: 1, sp: 1, tp: 1, ep: 1 };
    let found = flipped(sizes, &ddp, 1, In::Master("model.layers.1.mlp.up_proj.weight"));
    all_say(
        found,
        &[
            "rank 1 differs from ranks 0 and 2 in unit ",
            "resume from a checkpoint of step 2 or earlier",
            "(from model.",
        ],
    );
    all_say(flipped(sizes, &ddp, 2, In::Moment), &["rank 2 differs from ranks 0 and 1 in unit 1 "]);
}

#[test]
fn with_two_replicas_both_are_named() {
    let hybrid = options(&spec(), fsdp(ShardedOptions { dtype: DType::Bf16, ..sharded() }), common::SGD);
    let sizes = MeshSizes { dp_replicate: 2, dp_shard: 2, sp: 1, tp: 1, ep: 1 };
    let at = 2; // with rank 0, the first shard of each unit
    let found = flipped(sizes, &hybrid, at, In::Master("model.layers.2.input_layernorm.weight"));
    all_say(found, &["rank 2 differs from rank 0 in unit 3 (from model.layers.2.", "no majority"]);
    // Without replicas there is nothing to compare.
    let alone = flipped(MeshSizes::sharded(2), &hybrid, 1, In::Moment);
    assert_eq!(alone, [None, None]);
}

#[test]
fn tensors_that_tp_does_not_shard_are_compared_over_tp() {
    let spec = spec();
    let options = options(&spec, fsdp(sharded()), common::SGD);
    let norm = In::Master("model.layers.0.input_layernorm.weight");
    let two = MeshSizes { dp_replicate: 1, dp_shard: 1, sp: 1, tp: 2, ep: 1 };
    all_say(flipped(two, &options, 1, norm), &["rank 1 differs from rank 0 in unit 1 ", "no majority"]);
    let cut = In::Master("model.layers.0.mlp.up_proj.weight");
    assert_eq!(flipped(two, &options, 1, cut), [None, None], "each has a part of its own");
    // Both kinds of replicas together are four, so the faulty one is known.
    let four = MeshSizes { dp_replicate: 2, ..two };
    all_say(flipped(four, &options, 3, norm), &["rank 3 differs from ranks 0 to 2 in unit 1 (from model.layers.0."]);
    all_say(flipped(four, &options, 3, cut), &["rank 3 differs from rank 1 in unit 1 ", "no majority"]);
}

/// Losses as bits, and the header line.
fn run(dir: &Dir, name: &str, args: &[&str]) -> (Vec<(u64, String, String)>, String) {
    let metrics = dir.arg(name);
    let ended = good(FSDP, &[&["--max-steps", "6", "--no-sample", "--metrics-path", &metrics], args].concat());
    (losses(Path::new(&metrics)), ended.stderr)
}

#[test]
fn checking_a_run_without_faults_does_not_change_its_losses() {
    let dir = Dir::new();
    let meshes: [(&[&str], &str); 4] = [
        (&["--strategy", "ddp", "--precision", "bf16"], "verify   every 2 steps, 2 replicas"),
        (
            &["--dp-replicate-size", "2", "--nproc-per-node", "4", "--batch-size", "2"],
            "verify   every 2 steps, 2 replicas",
        ),
        (
            &["--tp-size", "2", "--sequence-parallel"],
            "verify   every 2 steps, 2 copies of tensors that tp does not shard",
        ),
        (&[], "verify   nothing: no parameter is replicated"),
    ];
    for (i, (mesh, says)) in meshes.into_iter().enumerate() {
        let (plain, quiet) = run(&dir, &format!("plain{i}"), mesh);
        let (verified, told) = run(&dir, &format!("verified{i}"), &[mesh, &["--verify-every", "2"]].concat());
        assert!(plain.len() == 6 && plain == verified, "{mesh:?}: {plain:?}\n{verified:?}");
        assert!(told.contains(says) && !quiet.contains("verify "), "{mesh:?}: {told}");
    }
}
