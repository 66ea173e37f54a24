//! Muon's exchange: results do not depend on how a matrix is spread over ranks, and it holds what is planned.
//! `golden/muon.rs` compares the updates with PyTorch's.
use crate::common::stores::*;
use crate::common::*;
use flatshard::base::rng::Rng;
use flatshard::base::{Category, DType};
use flatshard::comm::recorder::{Log, Recorder};
use flatshard::comm::seam::Seam;
use flatshard::comm::{Axis, MeshSizes, Tag};
use flatshard::engine::{Engine, EngineOptions, Strategy};
use flatshard::nn::{Arch, Decoder, Lora, Spec, Storage, Tuning};
use flatshard::optim::Rule;
use flatshard::store::flat::{Flat, UnitPart};
use flatshard::store::{Offload, ShardedOptions, Stage, Wrap};
use std::sync::Arc;

#[test]
fn every_store_updates_matrices_with_the_same_bits() {
    for (spec, world, dtype) in [
        (llama(), 1, DType::F32),
        (llama(), 3, DType::F32),
        (gpt(), 4, DType::F32),
        (llama(), 2, DType::Bf16),
        (sparse(), 2, DType::F32),
    ] {
        let expected = outcome(world, &options(&spec, ddp(dtype), MUON), 3, 1);
        for (i, strategy) in every(dtype).into_iter().enumerate() {
            let what = format!("{} ({i}) {:?} world {world} {dtype}", strategy.name(), spec.arch);
            assert_same_bits(&expected, &outcome(world, &options(&spec, strategy, MUON), 3, 1), &what);
        }
    }
}

/// Rows and columns that do not divide: some owners get nothing in the last round, some ranks hold nothing of a matrix.
#[test]
fn replicas_and_tensor_parallel_ranks_update_with_the_same_bits() {
    let spec = Spec { ff: 45, ..llama() };
    for (dp_replicate, dp_shard, sp, tp) in [(2, 2, 1, 1), (1, 2, 2, 1), (1, 2, 1, 3), (4, 1, 1, 1), (2, 2, 1, 3)] {
        let sizes = MeshSizes { dp_replicate, dp_shard, sp, tp, ep: 1 };
        let mut stores = vec![fsdp(sharded()), zero(staged(Stage::One, DType::F32))];
        // Replicas of shards sum gradients in another order.
        stores.extend((dp_replicate == 1 || dp_shard == 1).then(|| ddp(DType::F32)));
        stores.extend((tp == 1).then(|| reference(by_tensor(DType::F32, 1))));
        let expected = outcome_on(sizes, &options(&spec, stores.remove(0), MUON), 3, 1);
        for strategy in stores {
            let what = format!("{} on {sizes:?}", strategy.name());
            assert_same_bits(&expected, &outcome_on(sizes, &options(&spec, strategy, MUON), 3, 1), &what);
        }
    }
}

/// The weights after updates with gradients that are functions of the tensor and the element, so that no sum over ranks
/// can differ.
pub fn updated(sizes: MeshSizes, options: &EngineOptions, updates: u64) -> Outcome {
    let results = mesh_ranks(sizes, |rank| {
        let mut engine = Engine::new(rank.device.clone(), &rank.mesh, options)?;
        let (dev, (store, optimizer)) = (&*rank.device, engine.state());
        for number in 1..=updates {
            store.for_each_shard(&mut |mut shard| {
                for segment in &shard.layout.segments {
                    let Some(owned) = shard.owned(segment.range()) else { continue };
                    let Some(grad) = &mut shard.grad else { continue };
                    let first = shard.start + owned.start - segment.start;
                    let values = grad.reborrow().slice(owned.clone()).host::<f32>("test")?;
                    let rng = Rng::named(number, &segment.name);
                    for (part, place) in segment.stretches(first..first + owned.len()) {
                        let of_part = values[part.start - first..part.end - first].iter_mut();
                        of_part.enumerate().for_each(|(i, x)| *x = rng.normal((place + i) as u64));
                    }
                }
                Ok(())
            })?;
            let constants = optimizer.constants(0.1).to_vec();
            let mut buf = dev.alloc(DType::F32, constants.len() + 1, Category::Other)?;
            dev.upload(bytemuck::cast_slice(&[&constants[..], &[0.5]].concat()), buf.view_mut())?;
            let (constants, scale) = (0..constants.len(), constants.len()..constants.len() + 1);
            optimizer.step(dev, store, buf.view().slice(constants), buf.view().slice(scale))?;
            optimizer.count();
        }
        Ok((Vec::new(), fragments(&mut engine)?))
    });
    gathered(&options.spec, results)
}

/// The same on one rank, where every tensor must have changed.
pub fn updated_alone(options: &EngineOptions, updates: u64) -> Outcome {
    let [start, end] = [0, updates].map(|updates| updated(MeshSizes::sharded(1), options, updates));
    end.weights.iter().for_each(|(name, bits)| assert_ne!(*bits, start.weights[name], "{name} is not updated"));
    end
}

/// Replicas of shards, ranks that share sequences, and ranks of tp, two of which may share a key/value head and whose
/// parts are uneven.
const MESHES: [MeshSizes; 5] = [
    MeshSizes { dp_replicate: 2, dp_shard: 2, sp: 1, tp: 1, ep: 1 },
    MeshSizes { dp_replicate: 1, dp_shard: 2, sp: 2, tp: 1, ep: 1 },
    MeshSizes { dp_replicate: 1, dp_shard: 1, sp: 1, tp: 6, ep: 1 },
    MeshSizes { dp_replicate: 1, dp_shard: 2, sp: 1, tp: 3, ep: 1 },
    MeshSizes { dp_replicate: 2, dp_shard: 2, sp: 1, tp: 3, ep: 1 },
];

/// Those of [`MESHES`] that can shard the model: GPT's fused projection of queries, keys and values has no columns by
/// heads.
pub fn meshes_of(spec: &Spec) -> impl Iterator<Item = MeshSizes> {
    let tp = spec.arch != Arch::Gpt;
    MESHES.into_iter().filter(move |sizes| tp || sizes.tp == 1)
}

/// Training over tp sums gradients in another order, so only updates from equal gradients have equal bits. Neither rows
/// nor columns of these models divide.
#[test]
fn equal_gradients_update_with_the_same_bits_on_every_mesh() {
    let llama = Spec { ff: 45, ..llama() };
    for (spec, dtype) in [(&llama, DType::F32), (&gpt(), DType::F32), (&llama, DType::Bf16)] {
        let one = updated_alone(&options(spec, ddp(dtype), MUON), 2);
        for sizes in meshes_of(spec) {
            // Over uneven parts of tp, the reference store does not know what the others own.
            let known = |strategy: &Arc<dyn Strategy>| sizes.tp == 1 || !strategy.name().contains("reference");
            for strategy in kinds(dtype).into_iter().filter(known) {
                let what = format!("{:?} in {dtype}, {} on {sizes:?}", spec.arch, strategy.name());
                assert_same_bits(&one, &updated(sizes, &options(spec, strategy, MUON), 2), &what);
            }
        }
    }
}

/// Whoever has an expert, and whoever iterates on its matrices, no bit is another one.
#[test]
fn ranks_that_share_experts_update_them_with_the_same_bits() {
    let options = options(&Spec { kv_heads: 6, ..sparse() }, fsdp(sharded()), MUON);
    let one = updated_alone(&options, 2);
    for (dp_replicate, dp_shard, sp, tp, ep) in [
        (1, 2, 1, 1, 2),
        (1, 4, 1, 1, 2),
        (1, 4, 1, 1, 4),
        (1, 6, 1, 1, 3),
        (2, 2, 1, 1, 2),
        (2, 4, 1, 1, 2),
        (1, 2, 2, 1, 2),
        (1, 4, 1, 2, 2),
        (2, 2, 1, 3, 2),
    ] {
        let sizes = MeshSizes { dp_replicate, dp_shard, sp, tp, ep };
        assert_same_bits(&one, &updated(sizes, &options, 2), &format!("{sizes:?}"));
    }
}

/// An expert that a rank has whole, and each tensor parallel part of which is whole, is iterated on where it is.
#[test]
fn whole_experts_do_not_travel_to_be_updated() {
    let rows = |ep| {
        let log = Log::default();
        mesh_ranks(MeshSizes { ep, ..MeshSizes::sharded(2) }, |rank| {
            let own = if rank.rank == 0 { log.clone() } else { Log::default() };
            let mesh = rank.mesh.wrap(|group| Arc::new(Recorder::new(group, own.clone())));
            // Only experts are trained.
            let freeze = vec!["attn|norm|embed|lm_head|mlp.gate|shared|mlp.up|mlp.down".into()];
            let tuning = Tuning { freeze, ..Tuning::default() };
            let options = EngineOptions { tuning, ..options(&sparse(), fsdp(sharded()), MUON) };
            let mut engine = Engine::new(rank.device, &mesh, &options)?;
            let before = mesh.group(Axis::World).stats().bytes;
            step(&mut engine, &[batch(&options.spec, 1, 0, rank.rank)], 1)?;
            Ok(mesh.group(Axis::World).stats().bytes - before)
        })
    };
    let (together, apart) = (rows(1), rows(2));
    assert!(
        together.iter().all(|&bytes| bytes > 10_000) && apart.iter().all(|&bytes| bytes < 1_000),
        "{together:?} {apart:?}"
    );
}

#[test]
fn offloaded_matrices_are_updated_with_the_same_bits() {
    let of = |offload| options(&llama(), fsdp(ShardedOptions { offload, dtype: DType::Bf16, ..sharded() }), MUON);
    let expected = outcome(2, &of(Offload::Nothing), 3, 1);
    for offload in [Offload::Optimizer, Offload::Gradients, Offload::Parameters] {
        assert_same_bits(&expected, &outcome(2, &of(offload), 3, 1), &format!("{offload:?}"));
    }
}

/// The next matrices are on their way while this rank iterates, and results of the last round while it goes on.
#[test]
fn exchanges_overlap_the_iteration_of_other_matrices() {
    let log = Log::default();
    let entries = ranks(2, |rank| {
        let own = if rank.rank == 0 { log.clone() } else { Log::default() };
        let mesh = rank.mesh.wrap(|group| Arc::new(Recorder::new(group, own.clone())));
        let mut engine = Engine::new(rank.device, &mesh, &options(&llama(), fsdp(sharded()), MUON))?;
        own.clear();
        step(&mut engine, &[batch(&llama(), 1, 0, rank.rank)], 1)?;
        Ok(())
    });
    assert_eq!(entries.len(), 2);
    // 28 matrices of four blocks on two ranks.
    assert_eq!(log.count(Seam::AllToAll), 2 * 14);
    let at = |seam, what, round| log.find(0, seam, Tag::new(what, round)).unwrap();
    for round in 1..13 {
        assert!(at(Seam::AllToAll, "muon there", round + 1) < at(Seam::Wait, "muon there", round));
        assert!(at(Seam::Wait, "muon there", round) < at(Seam::Wait, "muon back", round - 1));
    }
    let axes = log.entries().into_iter().filter(|e| e.seam == Some(Seam::AllToAll)).map(|e| e.axis);
    assert!(axes.into_iter().all(|axis| axis == Axis::World));
}

#[test]
fn a_step_that_is_skipped_changes_nothing() {
    let options = EngineOptions { grad_clip: 1.0, ..options(&llama(), fsdp(sharded()), MUON) };
    let checked = ranks(2, |rank| {
        let mut engine = Engine::new(rank.device, &rank.mesh, &options)?;
        let batches = [batch(&options.spec, 1, 0, rank.rank)];
        step(&mut engine, &batches, 1)?;
        let state = |engine: &mut Engine| -> flatshard::base::Result<Vec<u8>> {
            let (dev, mut all) = (engine.device().clone(), Vec::new());
            let (store, optimizer) = engine.state();
            store.for_each_shard(&mut |shard| {
                for view in [shard.master.as_view()]
                    .into_iter()
                    .chain(optimizer.states(shard.part()).collect::<Vec<_>>().iter().map(|s| s.as_view()))
                {
                    let mut bytes = vec![0; view.bytes()];
                    dev.download(view, &mut bytes)?;
                    all.extend(bytes);
                }
                Ok(())
            })?;
            Ok(all)
        };
        let dev = engine.device().clone();
        engine
            .state()
            .0
            .for_each_shard(&mut |shard| dev.upload(bytemuck::bytes_of(&f32::NAN), shard.master.slice(0..1)))?;
        engine.state().0.weights_changed()?;
        let before = state(&mut engine)?;
        let report = step(&mut engine, &batches, 2)?;
        if !report.skipped {
            return Ok(false);
        }
        Ok(before == state(&mut engine)?)
    });
    assert_eq!(checked, [true; 2]);
}

#[test]
fn without_a_matrix_to_update_muon_is_refused() {
    let lora = Lora { rank: 2, alpha: 4.0, dropout: 0.0, targets: vec!["q_proj".into()] };
    let frozen = Tuning { freeze: vec!["_proj".into()], ..Tuning::default() };
    for tuning in [Tuning { lora: Some(lora), ..Tuning::default() }, frozen] {
        let options = EngineOptions { tuning, ..options(&llama(), fsdp(sharded()), MUON) };
        let error = options.bytes(&MeshSizes::sharded(2), 0).unwrap_err();
        assert_eq!(error.exit_status(), 2);
        assert!(error.to_string().contains("`optimizer: muon` updates the matrices of blocks"), "{error}");
    }
    // One matrix is enough.
    let one = Tuning { freeze: vec!["[qkvo]_proj".into(), "gate_proj".into(), "up_proj".into()], ..Tuning::default() };
    let options = EngineOptions { tuning: one, ..options(&llama(), fsdp(sharded()), MUON) };
    options.bytes(&MeshSizes::sharded(2), 0).unwrap();
}

/// The head comment of `optim/muon.rs`.
#[test]
fn the_documented_bytes_hold() {
    let spec = Spec { dim: 64, ff: 192, layers: 3, heads: 4, kv_heads: 4, head_dim: 16, ..llama() };
    let largest = 64 * 192;
    for (dtype, n) in [(DType::F32, 2), (DType::Bf16, 4)] {
        let of = |rule: Rule| {
            let options = options(&spec, fsdp(ShardedOptions { dtype, ..sharded() }), rule);
            let planned = options.bytes(&MeshSizes::sharded(n), 0).unwrap();
            planned.into_iter().find(|p| p.0 == flatshard::base::Category::Optimizer).unwrap().1
        };
        // Of a round of n equal matrices a rank holds one's worth, or more where shards begin inside matrices.
        let square = 64 * 64;
        let (fixed, each) = match dtype {
            DType::F32 => (16 * largest + 8 * square, 16),
            _ => (8 * largest + 6 * square, 6 + 4), // here a rank holds more of a round than one matrix
        };
        let small = 2 * 8 * flatshard::device::LIMBS + 4 * (2 + 2 + 8);
        // Matrices have no second moment.
        let flat = Flat::new(Decoder::new(spec.clone()).unwrap().layouts(), Wrap::Transformer, n);
        let parts = flat.units[1..].iter().map(|unit| unit.part(Storage::Trained).unwrap());
        let vectors = |part: &UnitPart, rank: usize| {
            let (own, all) = (part.owned(rank), part.layout.segments.iter().filter(|s| s.shape.len() != 2));
            all.map(|s| (s.start + 256).min(own.end).saturating_sub(s.start.max(own.start))).sum::<usize>()
        };
        // As many as the rank with most of them has.
        let kept = |part: &UnitPart| (0..n).map(|rank| vectors(part, rank)).max().unwrap();
        let saved: usize = parts.map(|part| part.shard - kept(part)).sum();
        let pieces = of(MUON) + 4 * saved - of(ADAMW) - fixed - small;
        assert_eq!(pieces % each, 0);
        assert!((largest..=n * largest).contains(&(pieces / each)), "{dtype}: {pieces}");
    }
}
