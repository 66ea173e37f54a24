//! Checkpoints from outside: what is in the files, who can read them, and what happens when they or the disk are bad.
mod common;
#[path = "common/held.rs"]
mod held;

use common::*;
use flatshard::base::{DType, Error, Result};
use flatshard::ckpt::{self, Resume, layout, state::Checksums};
use flatshard::nn::{Decoder, Layout, Spec};
use flatshard::optim::Rule;
use flatshard::store::{Piece, Store, Wrap};
use flatshard::strategy::Strategy;
use held::{DTYPES, Held, state, value};
use safetensors::SafeTensors;
use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// So that the tiny models take several files.
const SMALL: u64 = 20_000;

/// Both stores in both precisions; the sharded one with units that cut tensors elsewhere.
fn strategies() -> Vec<(String, Arc<dyn Strategy>)> {
    let mut all: Vec<(String, Arc<dyn Strategy>)> = Vec::new();
    for (dtype, wrap) in DTYPES.into_iter().zip([Wrap::Transformer, Wrap::None]) {
        all.push((format!("fsdp {dtype}"), fsdp(flatshard::store::ShardedOptions { dtype, wrap, ..sharded() })));
        all.push((format!("ddp {dtype}"), ddp(dtype)));
    }
    all
}
fn plain() -> Arc<dyn Strategy> {
    fsdp(sharded())
}

fn saved(world: usize, spec: &Spec, strategy: &Arc<dyn Strategy>, rule: Rule, max: u64, dir: &Path, step: u64) {
    ranks(world, |rank| {
        let mut held = Held::new(&rank, spec, &**strategy, rule, max)?.fill()?;
        held.optimizer.resume(step + 1000);
        held.ckpt.save(dir, 9, &mut *held.store, &mut held.optimizer, &state(step))
    });
}

/// What every rank of a world says when it loads `dir`, and whether it left the store alone.
fn load(world: usize, spec: &Spec, rule: Rule, dir: &Path) -> Vec<(Result<()>, bool)> {
    ranks(world, |rank| {
        let mut held = Held::new(&rank, spec, &*plain(), rule, SMALL)?;
        let result = held.ckpt.load(dir, &mut *held.store, &mut held.optimizer);
        Ok((result.map(|_| ()), held.untouched()?))
    })
}

fn contents(dir: &Path) -> BTreeMap<String, Vec<u8>> {
    let entries = fs::read_dir(dir).unwrap().map(|e| e.unwrap());
    entries.map(|e| (e.file_name().into_string().unwrap(), fs::read(e.path()).unwrap_or_default())).collect()
}
fn listed(dir: &Path) -> Vec<String> {
    contents(dir).into_keys().collect()
}

#[test]
fn any_world_strategy_and_precision_writes_the_same_bytes_and_reads_any() {
    for (spec, rule) in [(llama(), ADAMW), (gpt(), SGD)] {
        let dir = tempfile::tempdir().unwrap();
        let first = dir.path().join("first");
        saved(3, &spec, &plain(), rule, SMALL, &first, 100);
        let reference = contents(&first.join("step-00000100"));
        assert!(reference.keys().filter(|n| n.starts_with("model-")).count() > 1, "{:?}", reference.keys());
        for world in 1..=4 {
            for (name, strategy) in strategies() {
                let other = dir.path().join(format!("{name} {world}"));
                saved(world, &spec, &strategy, rule, SMALL, &other, 100);
                for (file, bytes) in contents(&other.join("step-00000100")) {
                    assert!(bytes == reference[&file], "{file} differs when {name} saves with {world} ranks");
                }
                let states = ranks(world, |rank| {
                    let mut held = Held::new(&rank, &spec, &*strategy, rule, SMALL)?;
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

/// A change made to a copy of a good checkpoint, and what the error must say.
type Damage = (&'static str, fn(&Path), &'static [&'static str]);

fn edit(path: PathBuf, change: impl Fn(&mut Vec<u8>)) {
    let mut bytes = fs::read(&path).unwrap();
    change(&mut bytes);
    fs::write(path, bytes).unwrap();
}
fn model(dir: &Path) -> PathBuf {
    dir.join("model-00002-of-00003.safetensors")
}
fn header_len(bytes: &[u8]) -> usize {
    u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize
}
fn replace(bytes: &mut Vec<u8>, from: &str, to: &str) {
    assert_eq!(from.len(), to.len());
    let at = bytes.windows(from.len()).position(|w| w == from.as_bytes()).unwrap();
    bytes.splice(at..at + from.len(), to.bytes());
}

const DAMAGES: &[Damage] = &[
    ("model truncated", |d| edit(model(d), |b| b.truncate(b.len() - 1)), &["model-00002-of-00003", "truncated"]),
    ("model cut inside its header", |d| edit(model(d), |b| b.truncate(100)), &["model-00002-of-00003", "truncated"]),
    ("model empty", |d| edit(model(d), Vec::clear), &["model-00002-of-00003", "0 bytes"]),
    ("bytes appended", |d| edit(model(d), |b| b.push(0)), &["model-00002-of-00003", "too many"]),
    ("absurd header length", |d| edit(model(d), |b| b[7] = 0x7f), &["model-00002-of-00003", "truncated"]),
    ("header not JSON", |d| edit(model(d), |b| b[8] = b'x'), &["model-00002-of-00003", "header"]),
    ("overlapping offsets", |d| edit(model(d), |b| replace(b, "[0,", "[4,")), &["model-00002-of-00003", "offset"]),
    (
        "another dtype",
        |d| edit(model(d), |b| replace(b, "\"F32\"", "\"I32\"")),
        &["model-00002-of-00003", "tensor", "I32"],
    ),
    ("model file missing", |d| fs::remove_file(model(d)).unwrap(), &["model-00002-of-00003", "No such file"]),
    (
        "index missing",
        |d| fs::remove_file(d.join("model.safetensors.index.json")).unwrap(),
        &["index.json", "No such file"],
    ),
    ("index changed", |d| edit(d.join("model.safetensors.index.json"), |b| b[5] ^= 1), &["index.json", "changed"]),
    ("config changed", |d| edit(d.join("config.json"), |b| b[40] ^= 1), &["config.json", "changed"]),
    ("config missing", |d| fs::remove_file(d.join("config.json")).unwrap(), &["config.json", "No such file"]),
    ("state not JSON", |d| edit(d.join("trainer_state.json"), |b| b.truncate(90)), &["trainer_state.json", "JSON"]),
    (
        "state missing",
        |d| fs::remove_file(d.join("trainer_state.json")).unwrap(),
        &["trainer_state.json", "not a complete"],
    ),
    (
        "state changed",
        |d| edit(d.join("trainer_state.json"), |b| replace(b, "\"step\": 100", "\"step\": 900")),
        &["trainer_state.json", "changed"],
    ),
    (
        "newer version",
        |d| edit(d.join("trainer_state.json"), |b| replace(b, "\"version\": 1", "\"version\": 2")),
        &["version 2", "reads version 1"],
    ),
    (
        "optimizer missing",
        |d| fs::remove_file(d.join("optimizer-00002-of-00005.safetensors")).unwrap(),
        &["optimizer-00002-of-00005", "No such file"],
    ),
];

#[test]
fn damage_is_named_on_every_rank_before_anything_is_loaded() {
    let (dir, spec) = (tempfile::tempdir().unwrap(), llama());
    saved(2, &spec, &plain(), ADAMW, 40_000, dir.path(), 100);
    let good = dir.path().join("step-00000100");
    let names = listed(&good);
    for file in ["model-00002-of-00003.safetensors", "optimizer-00002-of-00005.safetensors"] {
        assert!(names.contains(&file.to_string()), "{names:?}");
    }
    for (what, damage, says) in DAMAGES {
        let copy = dir.path().join("copy");
        fs::create_dir(&copy).unwrap();
        contents(&good).into_iter().for_each(|(name, bytes)| fs::write(copy.join(name), bytes).unwrap());
        damage(&copy);
        let decoder = Decoder::new(spec.clone()).unwrap();
        let early = ckpt::inspect(&copy, &spec, decoder.layouts(), ADAMW.state()).unwrap_err();
        assert_eq!(early.exit_status(), 2, "{what}");
        for (result, untouched) in load(2, &spec, ADAMW, &copy) {
            let error = result.expect_err(what);
            let text = error.to_string();
            assert!(says.iter().all(|s| text.contains(s)), "{what}: {text}");
            assert_eq!(error.exit_status(), 2, "{what}: {text}");
            assert!(untouched, "{what} was found after weights had changed");
        }
        fs::remove_dir_all(copy).unwrap();
    }
    load(2, &spec, ADAMW, &good).into_iter().for_each(|(result, _)| result.unwrap());
}

/// A bit anywhere in the tensors of any file, seen by whichever rank reads it and reported by all.
#[test]
fn every_flipped_bit_names_its_file_and_tensor() {
    let (dir, spec) = (tempfile::tempdir().unwrap(), gpt());
    saved(2, &spec, &plain(), ADAMW, 40_000, dir.path(), 100);
    let good = dir.path().join("step-00000100");
    for (n, (name, bytes)) in contents(&good).into_iter().filter(|(n, _)| n.ends_with(".safetensors")).enumerate() {
        let start = 8 + header_len(&bytes);
        for at in [start, start + (bytes.len() - start) / 3 * (n % 3), bytes.len() - 1] {
            edit(good.join(&name), |b| b[at] ^= 1 << (n % 8));
            let read = SafeTensors::deserialize(&bytes).unwrap();
            let offset = |data: &[u8]| data.as_ptr() as usize - bytes.as_ptr() as usize;
            let hit = read.iter().find(|(_, t)| (offset(t.data())..offset(t.data()) + t.data().len()).contains(&at));
            let tensor = hit.unwrap().0;
            for (result, _) in load(3, &spec, ADAMW, &good) {
                let error = result.unwrap_err();
                let text = error.to_string();
                assert!(text.contains(&name) && text.contains(&format!("tensor {tensor} was changed")), "{text}");
                assert_eq!(error.exit_status(), 2);
            }
            fs::write(good.join(&name), &bytes).unwrap();
        }
    }
    load(3, &spec, ADAMW, &good).into_iter().for_each(|(result, _)| result.unwrap());
}

#[test]
fn a_checkpoint_of_another_model_or_optimizer_is_refused() {
    let (dir, spec) = (tempfile::tempdir().unwrap(), llama());
    saved(1, &spec, &plain(), ADAMW, SMALL, dir.path(), 1);
    let path = dir.path().join("step-00000001");
    let refusals: [(Spec, Rule, &[&str]); 6] = [
        (Spec { ff: 48, ..spec.clone() }, ADAMW, &["gate_proj.weight", "[44, 20]", "[48, 20]"]),
        (Spec { layers: 5, ..spec.clone() }, ADAMW, &["no file holds tensor model.layers.4."]),
        (Spec { layers: 3, ..spec.clone() }, ADAMW, &["holds tensor", "layers.3.", "does not have"]),
        (Spec { tied: true, ..spec.clone() }, ADAMW, &["lm_head.weight", "does not have"]),
        (
            Spec { heads: 3, kv_heads: 3, head_dim: 6, ..spec.clone() },
            ADAMW,
            &["q_proj.weight", "[36, 20]", "[18, 20]"],
        ),
        (spec.clone(), SGD, &["momentum_buffer.model.embed_tokens.weight"]),
    ];
    for (other, rule, says) in refusals {
        for (result, untouched) in load(2, &other, rule, &path) {
            let text = result.unwrap_err().to_string();
            assert!(says.iter().all(|s| text.contains(s)), "{text} lacks one of {says:?}");
            assert!(untouched);
        }
    }
    // Shapes that are alike and a computation that is not.
    let (dir, spec) = (tempfile::tempdir().unwrap(), gpt());
    saved(1, &spec, &plain(), ADAMW, SMALL, dir.path(), 1);
    let other = Spec { heads: 10, kv_heads: 10, head_dim: 2, norm_eps: 1e-6, ..spec };
    for (result, untouched) in load(2, &other, ADAMW, &dir.path().join("step-00000001")) {
        let text = result.unwrap_err().to_string();
        let says = ["config.json", "num_heads: 5 in the checkpoint, 10 now", "norm_eps: 0.00001"];
        assert!(says.iter().all(|s| text.contains(s)), "{text}");
        assert!(untouched);
    }
}

/// An export is a model directory of others: its index may say anything.
#[test]
fn an_index_cannot_lead_out_of_its_directory() {
    let (dir, spec) = (tempfile::tempdir().unwrap(), llama());
    let export = dir.path().join("model");
    ranks(2, |rank| {
        let mut held = Held::new(&rank, &spec, &*plain(), ADAMW, SMALL)?.fill()?;
        held.ckpt.save_hf(&export, &mut *held.store)
    });
    let index = export.join("model.safetensors.index.json");
    let text = fs::read_to_string(&index).unwrap();
    let outside = dir.path().join("outside.safetensors");
    fs::copy(export.join("model-00001-of-00005.safetensors"), &outside).unwrap();
    let inspect = || {
        let decoder = Decoder::new(spec.clone()).unwrap();
        ckpt::inspect_model(&export, &spec, decoder.layouts()).map_err(|e| e.to_string())
    };
    inspect().unwrap();
    for name in ["../outside.safetensors", outside.to_str().unwrap(), "", ".", "..", "sub/model.safetensors"] {
        fs::write(&index, text.replace("model-00001-of-00005.safetensors", name)).unwrap();
        let error = inspect().unwrap_err();
        assert!(error.contains("index.json") && error.contains("not a plain file name"), "{name}: {error}");
    }
    fs::write(&index, text.replace("model-00001-of-00005", "model-00002-of-00005")).unwrap();
    assert!(inspect().unwrap_err().contains("the index places there"));
    fs::write(&index, text.replace("weight_map", "weight_maq")).unwrap();
    assert!(inspect().unwrap_err().contains("no weight_map"));
    fs::write(&index, &text[..50]).unwrap();
    assert!(inspect().unwrap_err().contains("not JSON"));
}

#[test]
fn an_export_is_the_checkpoint_s_model_and_overwrites_nothing_of_others() {
    let (dir, spec) = (tempfile::tempdir().unwrap(), llama());
    saved(2, &spec, &plain(), ADAMW, SMALL, dir.path(), 1);
    let export = |to: &Path| {
        ranks(2, |rank| {
            let mut held = Held::new(&rank, &spec, &*plain(), ADAMW, SMALL)?.fill()?;
            Ok(held.ckpt.save_hf(to, &mut *held.store).map(|_| ()))
        })
    };
    let (new, empty, mine) = (dir.path().join("new"), dir.path().join("empty"), dir.path().join("mine"));
    fs::create_dir(&empty).unwrap();
    fs::create_dir(&mine).unwrap();
    fs::write(mine.join("thesis.tex"), "years").unwrap();
    for to in [&new, &empty, &new] {
        ckpt::check_export(to).unwrap();
        export(to).into_iter().for_each(|r| r.unwrap());
        let checkpoint = contents(&dir.path().join("step-00000001"));
        for (name, bytes) in contents(to) {
            assert!(checkpoint[&name] == bytes, "{name} differs");
        }
        assert!(!to.join("trainer_state.json").exists() && to.join("config.json").exists());
    }
    assert_eq!(ckpt::check_export(&mine).unwrap_err().exit_status(), 2);
    for result in export(&mine) {
        let error = result.unwrap_err();
        assert_eq!(error.exit_status(), 2, "{error}");
    }
    assert_eq!(contents(&mine), BTreeMap::from([("thesis.tex".to_string(), b"years".to_vec())]));
    // A model with somebody's file beside it, and weights without a config, are not ours to replace either.
    fs::write(new.join("README.md"), "mine").unwrap();
    assert!(ckpt::check_export(&new).unwrap_err().to_string().contains("README.md"));
    fs::remove_file(empty.join("config.json")).unwrap();
    assert!(ckpt::check_export(&empty).unwrap_err().to_string().contains("no config.json"));
    // And what was exported loads as a model.
    fs::remove_file(new.join("README.md")).unwrap();
    ranks(3, |rank| {
        let mut held =
            Held::new(&rank, &spec, &*ddp(DType::Bf16), Rule::Sgd { momentum: 0.0, weight_decay: 0.0 }, SMALL)?;
        held.ckpt.load_model(&new, &mut *held.store)?;
        held.check()
    });
}

#[test]
fn old_checkpoints_go_and_leftovers_of_dead_saves_are_no_checkpoints() {
    let (dir, spec) = (tempfile::tempdir().unwrap(), llama());
    let save = |step: u64, keep: usize| {
        ranks(2, |rank| {
            let mut held = Held::new(&rank, &spec, &*plain(), ADAMW, SMALL)?.fill()?;
            held.ckpt.save(dir.path(), keep, &mut *held.store, &mut held.optimizer, &state(step))
        });
    };
    for step in 1..=4 {
        save(step, 2);
    }
    assert_eq!(listed(dir.path()), ["latest", "step-00000003", "step-00000004"]);
    save(4, 2); // the same step again replaces it
    assert_eq!(listed(dir.path()), ["latest", "step-00000003", "step-00000004"]);

    // A save that died: its files are there, some at full length, some cut.
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
    let error = ckpt::resolve(None, &Resume::Dir(none)).unwrap_err();
    assert_eq!(error.exit_status(), 2, "{error}");
    let explicit = Resume::Dir(dir.path().join("step-00000003"));
    assert_eq!(ckpt::resolve(None, &explicit).unwrap(), Some(dir.path().join("step-00000003")));
}

/// A store that fails while its pieces are visited: as a device or a disk may, on one rank.
struct Failing(Box<dyn Store>);
impl flatshard::nn::ParamStore for Failing {
    fn acquire(&mut self, layer: usize, pass: flatshard::nn::Pass) -> Result<flatshard::nn::Weights<'_>> {
        self.0.acquire(layer, pass)
    }
    fn release(&mut self, layer: usize, pass: flatshard::nn::Pass) -> Result<()> {
        self.0.release(layer, pass)
    }
    fn grads(&mut self, layer: usize) -> Result<(flatshard::nn::Weights<'_>, flatshard::nn::Grads<'_>)> {
        self.0.grads(layer)
    }
    fn grads_ready(&mut self, layer: usize) -> Result<()> {
        self.0.grads_ready(layer)
    }
}
impl Store for Failing {
    fn name(&self) -> &'static str {
        self.0.name()
    }
    fn units(&self) -> usize {
        self.0.units()
    }
    fn replicated(&self) -> bool {
        self.0.replicated()
    }
    fn begin_micro_batch(&mut self, first: bool, last: bool) -> Result<()> {
        self.0.begin_micro_batch(first, last)
    }
    fn finish_grads(&mut self) -> Result<()> {
        self.0.finish_grads()
    }
    fn for_each_piece(&mut self, f: &mut dyn FnMut(Piece<'_>) -> Result<()>) -> Result<()> {
        self.0.for_each_piece(&mut |piece| match piece.unit {
            2 => Err(Error::Run("this rank's device is gone".into())),
            _ => f(piece),
        })
    }
    fn weights_changed(&mut self) -> Result<()> {
        self.0.weights_changed()
    }
}

/// After a failed save: the earlier checkpoint is the newest and loads, and there is nothing else.
fn still_there(dir: &Path, spec: &Spec) {
    assert_eq!(listed(dir), ["latest", "step-00000001"]);
    assert_eq!(ckpt::resolve(Some(dir), &Resume::Auto).unwrap(), Some(dir.join("step-00000001")));
    load(2, spec, ADAMW, &dir.join("step-00000001")).into_iter().for_each(|(result, _)| result.unwrap());
}

#[test]
fn a_rank_that_fails_while_saving_fails_the_save_on_every_rank() {
    let (dir, spec) = (tempfile::tempdir().unwrap(), llama());
    saved(2, &spec, &plain(), ADAMW, SMALL, dir.path(), 1);
    for broken in 0..3 {
        let errors = ranks(3, |rank| {
            let Held { mut store, mut optimizer, mut ckpt, .. } =
                Held::new(&rank, &spec, &*plain(), ADAMW, SMALL)?.fill()?;
            if rank.rank == broken {
                store = Box::new(Failing(store));
            }
            Ok(ckpt.save(dir.path(), 1, &mut *store, &mut optimizer, &state(2)).unwrap_err())
        });
        for (rank, error) in errors.iter().enumerate() {
            let says = if rank == broken { "device is gone".into() } else { format!("rank {broken} could not write") };
            assert!(error.to_string().contains(&says), "rank {rank}: {error}");
            assert_eq!(error.exit_status(), 1);
        }
        still_there(dir.path(), &spec);
    }
}

/// A model that no disk holds: the first rank finds out before a byte is written.
#[test]
fn a_checkpoint_that_does_not_fit_fails_and_leaves_nothing() {
    let (dir, spec) = (tempfile::tempdir().unwrap(), llama());
    saved(2, &spec, &plain(), ADAMW, SMALL, dir.path(), 1);
    let errors = ranks(2, |rank| {
        let mut held = Held::new(&rank, &spec, &*plain(), ADAMW, SMALL)?.fill()?;
        let mut huge = Layout::default();
        huge.push("huge", &[1 << 30, 1 << 20], true, flatshard::nn::Init::Constant(0.0));
        let decoder = Decoder::new(spec.clone())?;
        let layouts = [decoder.layouts(), &[huge]].concat();
        held.ckpt = ckpt::Checkpointer::new(rank.device, rank.group, &spec, &layouts, ADAMW.state())?;
        Ok(held.ckpt.save(dir.path(), 1, &mut *held.store, &mut held.optimizer, &state(2)).unwrap_err())
    });
    let text = errors[0].to_string();
    let needed = (3u64 << 52).to_string();
    let says = [dir.path().to_str().unwrap(), &needed[..4], "bytes", "are free", "--keep", "--ckpt-dir", "untouched"];
    assert!(says.iter().all(|s| text.contains(s)), "{text}");
    assert!(errors[1].to_string().contains("rank 0 could not make room"), "{}", errors[1]);
    errors.iter().for_each(|e| assert_eq!(e.exit_status(), 1));
    still_there(dir.path(), &spec);
}
