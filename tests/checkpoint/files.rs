//! Checkpoint files from outside: their content, who can read them, which ones are kept. For bad files and disks see
//! tests/checkpoint/damage.rs, for exports tests/checkpoint/export.rs.

use crate::common::known_state::*;
use crate::common::stores::*;
use crate::common::*;
use flatshard::base::{Category, DType};
use flatshard::ckpt::disk::{Disk, DiskOp};
use flatshard::ckpt::gguf::GgufType;
use flatshard::ckpt::{self, Checkpointer, Companions, Evaluations, Resume, TrainerState, layout, state::Checksums};
use flatshard::comm::MeshSizes;
use flatshard::engine::{PlannedRank, Strategy};
use flatshard::nn::Decoder;
use flatshard::store::{ShardedOptions, Stage, Wrap};
use safetensors::SafeTensors;
use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

/// Every store, in both precisions; the sharded one with units that split tensors differently.
fn strategies() -> Vec<(String, Arc<dyn Strategy>)> {
    let mut all: Vec<(String, Arc<dyn Strategy>)> = Vec::new();
    for (dtype, wrap) in DTYPES.into_iter().zip([Wrap::Transformer, Wrap::None]) {
        all.push((format!("fsdp {dtype}"), fsdp(ShardedOptions { dtype, wrap, ..sharded() })));
        all.push((format!("ddp {dtype}"), ddp(dtype)));
        all.push((format!("reference {dtype}"), reference(by_tensor(dtype, 1))));
        let stage = if dtype == DType::F32 { Stage::One } else { Stage::Three };
        all.push((format!("zero {dtype}"), zero(staged(stage, dtype))));
    }
    all
}

#[test]
fn bytes_do_not_depend_on_world_size_strategy_or_precision() {
    for (spec, rule) in [(llama(), ADAMW), (gpt(), SGD)] {
        let dir = tempfile::tempdir().unwrap();
        let first = dir.path().join("first");
        saved(3, &spec, &plain(), rule, SMALL, &first, 100);
        let reference = contents(&first.join("step-00000100"));
        assert!(reference.keys().filter(|n| n.starts_with("model-")).count() > 1, "{:?}", reference.keys());
        for world in 1..=5 {
            for (name, strategy) in strategies() {
                let other = dir.path().join(format!("{name} {world}"));
                saved(world, &spec, &strategy, rule, SMALL, &other, 100);
                for (file, bytes) in contents(&other.join("step-00000100")) {
                    assert!(bytes == reference[&file], "{file} differs when {name} saves with {world} ranks");
                }
                let states = ranks(world, |rank| {
                    let mut held = KnownState::new(&rank, &spec, &*strategy, rule, SMALL)?;
                    let path = first.join("step-00000100");
                    let read = held.ckpt.load(&path, &mut *held.store, &mut held.optimizer)?;
                    held.check()?;
                    assert_eq!(held.optimizer.steps(), 1100);
                    Ok(read)
                });
                let expected = ckpt::TrainerState { optimizer_steps: 1100, ..state(100) };
                states.iter().for_each(|read| assert_eq!(*read, expected));
            }
        }
    }
}

/// Replicas, shards, parts of sequences and of tensors: every element is written by one rank, and read by all that hold
/// it. The same for exports and async saves.
#[test]
fn bytes_do_not_depend_on_the_mesh() {
    let (spec, dir) = (llama(), tempfile::tempdir().unwrap());
    let first = dir.path().join("first");
    let write = |sizes: MeshSizes, strategy: &Arc<dyn Strategy>, to: &Path| {
        mesh_ranks(sizes, |rank| {
            let mut held = KnownState::new(&rank, &spec, &**strategy, ADAMW, SMALL)?.fill()?;
            held.ckpt.save(to, 9, &mut *held.store, &mut held.optimizer, &state(100))?;
            held.ckpt.save_async(to, 9, &mut *held.store, &mut held.optimizer, &state(200))?;
            held.ckpt.settle()?;
            held.ckpt.save_hf(&to.join("hf"), ckpt::Dtype::BF16, &mut *held.store)
        });
    };
    write(MeshSizes::sharded(1), &plain(), &first);
    let parts = ["step-00000100", "step-00000200", "hf"];
    let reference = parts.map(|part| contents(&first.join(part)));
    let is = |file: &str| !["config.json", "trainer_state.json"].contains(&file);
    assert!(reference[0].iter().filter(|f| is(f.0)).eq(reference[1].iter().filter(|f| is(f.0))), "behind training");

    let meshes = [4, 8].into_iter().flat_map(factorizations);
    let stores = strategies();
    for (i, sizes) in meshes.enumerate() {
        let (name, strategy) = &stores[i % stores.len()];
        let what = format!("{name} on {sizes:?}");
        let other = dir.path().join(format!("{i}"));
        write(sizes, strategy, &other);
        for (part, reference) in parts.iter().zip(&reference) {
            let found = contents(&other.join(part));
            assert!(found.keys().eq(reference.keys()), "{what}: {part}");
            found.iter().for_each(|(file, bytes)| assert!(*bytes == reference[file], "{what}: {part}/{file} differs"));
        }
        let (_, strategy) = &stores[(i + 3) % stores.len()];
        mesh_ranks(sizes, |rank| {
            let mut held = KnownState::new(&rank, &spec, &**strategy, ADAMW, SMALL)?;
            held.ckpt.load(&first.join("step-00000100"), &mut *held.store, &mut held.optimizer)?;
            held.check()
        });
    }
}

#[test]
fn the_safetensors_crate_reads_what_we_write() {
    let (dir, spec) = (tempfile::tempdir().unwrap(), gpt());
    saved(2, &spec, &plain(), ADAMW, layout::MAX_FILE_BYTES, dir.path(), 7);
    let path = dir.path().join("step-00000007");
    assert_eq!(listed(&path), ["config.json", "model.safetensors", "optimizer.safetensors", "trainer_state.json"]);
    assert_eq!(fs::read_to_string(dir.path().join("latest")).unwrap(), "step-00000007\n");
    let mut tensors = 0;
    for (file, groups) in [("model", vec![""]), ("optimizer", vec!["exp_avg", "exp_avg_sq"])] {
        let bytes = fs::read(path.join(format!("{file}.safetensors"))).unwrap();
        let read = SafeTensors::deserialize(&bytes).unwrap();
        for layout in Decoder::new(spec.clone()).unwrap().layouts() {
            for (segment, group) in layout.segments.iter().flat_map(|s| groups.iter().map(move |g| (s, *g))) {
                let name = if group.is_empty() { segment.name.clone() } else { format!("{group}.{}", segment.name) };
                let tensor = read.tensor(&name).unwrap();
                assert_eq!(tensor.shape(), segment.shape);
                let found: Vec<u8> =
                    (0..segment.len()).flat_map(|i| value(group, &segment.name, i).to_le_bytes()).collect();
                assert_eq!(tensor.data(), found, "{name}");
                tensors += 1;
            }
        }
        assert!(tensors >= read.len(), "{file} holds more than the model");
    }
    let (_, sums): (_, Checksums) = ckpt::state::read(&path).unwrap();
    assert_eq!(sums.tensors.len(), tensors);
}

#[test]
fn old_checkpoints_are_removed_and_interrupted_saves_do_not_count() {
    let (dir, spec) = (tempfile::tempdir().unwrap(), llama());
    let save = |step: u64, keep: usize| {
        ranks(2, |rank| {
            let mut held = KnownState::new(&rank, &spec, &*plain(), ADAMW, SMALL)?.fill()?;
            held.ckpt.save(dir.path(), keep, &mut *held.store, &mut held.optimizer, &state(step))
        });
    };
    for step in 1..=4 {
        save(step, 2);
    }
    assert_eq!(listed(dir.path()), ["latest", "step-00000003", "step-00000004"]);
    save(4, 2); // saving the same step again replaces it
    assert_eq!(listed(dir.path()), ["latest", "step-00000003", "step-00000004"]);

    // An interrupted save: some files are at full length, some truncated.
    let dead = dir.path().join(".tmp-step-00000005-00000000000000ff");
    fs::create_dir(&dead).unwrap();
    for (name, bytes) in contents(&dir.path().join("step-00000004")).into_iter().take(3) {
        fs::write(dead.join(name), &bytes[..bytes.len() / 2]).unwrap();
    }
    let resolve = || ckpt::resolve(Some(dir.path()), &Resume::Auto).unwrap();
    assert_eq!(resolve(), Some(dir.path().join("step-00000004")));
    for (result, _) in load(2, &spec, ADAMW, &resolve().unwrap()) {
        result.unwrap();
    }
    ckpt::prepare(dir.path()).unwrap();
    assert_eq!(listed(dir.path()), ["latest", "step-00000003", "step-00000004"]);

    let none = dir.path().join("none");
    assert_eq!(ckpt::resolve(Some(&none), &Resume::Auto).unwrap(), None);
    let error = ckpt::resolve(None, &Resume::Dir(none.clone())).unwrap_err();
    assert_eq!(error.exit_status(), 2, "{error}");
    let explicit = Resume::Dir(dir.path().join("step-00000003"));
    assert_eq!(ckpt::resolve(None, &explicit).unwrap(), Some(dir.path().join("step-00000003")));
    // A moved user's output directory holds checkpoints of transformers' Trainer.
    for step in [5, 500, 90] {
        let theirs = none.join(format!("checkpoint-{step}"));
        fs::create_dir_all(&theirs).unwrap();
        fs::write(theirs.join("trainer_state.json"), r#"{"global_step": 5, "log_history": [], "epoch": 1.0}"#).unwrap();
    }
    let theirs = none.join("checkpoint-500");
    for error in [ckpt::resolve(Some(&none), &Resume::Auto).unwrap_err(), ckpt::state::read(&theirs).unwrap_err()] {
        let text = error.to_string();
        assert!(text.contains(&format!("{}: is a checkpoint of transformers' Trainer", theirs.display())), "{text}");
    }
}

#[test]
fn planned_bytes_equal_allocated_bytes() {
    for world in [1, 3] {
        ranks(world, |rank| {
            let (spec, before) = (gpt(), rank.meter.live(Category::Other));
            let decoder = Decoder::new(spec.clone())?;
            let (layouts, moments) = (decoder.layouts(), ADAMW.state());
            let ckpt = Checkpointer::new(rank.device, &rank.mesh, &spec, layouts, moments)?;
            let held = rank.meter.live(Category::Other) - before;
            drop(ckpt);
            let planned =
                PlannedRank { mesh: rank.mesh.sizes, rank: rank.mesh.rank(), sharing: world, stage: 0, gpu: false }
                    .bytes(|dev, mesh| Checkpointer::new(dev, mesh, &spec, layouts, moments))?;
            assert!(planned.contains(&(Category::Other, held)), "{held} bytes, {planned:?} planned");
            Ok(())
        });
    }
}

/// What a crash of the machine may lose, tracked through the operations of all ranks in order.
#[derive(Default)]
struct Unsynced {
    /// Written but not yet synced by the same rank: another host's fsync does not flush this host's cache.
    content: BTreeSet<(usize, PathBuf)>,
    /// New names whose directories have not been synced since.
    names: BTreeSet<PathBuf>,
    /// Names given, in order.
    renamed: Vec<String>,
    writes: usize,
}

impl Unsynced {
    fn see(&mut self, rank: usize, op: DiskOp) {
        match op {
            DiskOp::Make(path) => drop(self.names.insert(path)),
            DiskOp::Create(path) | DiskOp::Open(path) if self.content.contains(&(rank, path.clone())) => {
                panic!("{path:?} was written, not synced, and opened again")
            }
            DiskOp::Create(path) => drop(self.names.insert(path)),
            DiskOp::Open(_) => {}
            DiskOp::Write(path) => {
                self.content.insert((rank, path));
                self.writes += 1;
            }
            DiskOp::Sync(path) => {
                self.names.retain(|name| name.parent() != Some(&path));
                self.content.remove(&(rank, path));
            }
            DiskOp::Rename { from, to } => {
                assert!(self.content.is_empty(), "{to:?} appears before its content is durable: {:?}", self.content);
                self.names.remove(&from);
                let inside = self
                    .names
                    .iter()
                    .find(|name| name.starts_with(&from) || to.ends_with("latest") || to.ends_with("best"));
                assert!(inside.is_none(), "{to:?} appears before {inside:?} is durable");
                self.renamed.push(to.file_name().unwrap().to_str().unwrap().into());
                self.names.insert(to);
            }
        }
    }
}

/// First the content, then the names in the new directory, then its own name, then the pointers to it, with the one
/// runs resume from last; each is durable before the next begins.
#[test]
fn a_save_is_durable_before_it_is_renamed() {
    let spec = llama();
    for world in [1, 3] {
        let dir = tempfile::tempdir().unwrap();
        let runs = dir.path().join("new/runs");
        let seen = Arc::new(Mutex::new(Unsynced::default()));
        ranks(world, |rank| {
            let mut held = KnownState::new(&rank, &spec, &*plain(), ADAMW, SMALL)?.fill()?;
            let (seen, number) = (seen.clone(), rank.rank);
            held.ckpt.on_disk(Disk::watched(move |op| seen.lock().unwrap_or_else(|e| e.into_inner()).see(number, op)));
            let best = |step| {
                let mut evaluations = Evaluations::default();
                evaluations.count(2, 1.5, true);
                TrainerState { evaluations: Some(evaluations), ..state(step) }
            };
            held.ckpt.save(&runs, 9, &mut *held.store, &mut held.optimizer, &state(1))?;
            held.ckpt.save(&runs, 9, &mut *held.store, &mut held.optimizer, &state(1))?;
            held.ckpt.save_async(&runs, 9, &mut *held.store, &mut held.optimizer, &best(2))?;
            held.ckpt.save_async(&runs, 9, &mut *held.store, &mut held.optimizer, &best(3))?;
            held.ckpt.settle()?;
            held.ckpt.save_hf(&dir.path().join("hf"), ckpt::Dtype::BF16, &mut *held.store)?;
            held.ckpt.accompany(Companions::default().of_bytes(true));
            held.ckpt.save_gguf(&dir.path().join("model.gguf"), GgufType::F16, &mut *held.store)
        });
        let seen = seen.lock().unwrap();
        assert!(seen.content.is_empty() && seen.names.is_empty(), "{:?} {:?}", seen.content, seen.names);
        let names =
            "step-00000001 latest step-00000001 latest step-00000002 best latest step-00000003 latest hf model.gguf";
        assert_eq!(seen.renamed.join(" "), names, "a name that stands is not written again");
        assert!(seen.writes > 4 * 10 * world, "{} writes were seen", seen.writes);
    }
}
