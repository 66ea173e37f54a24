//! Bad checkpoints, failing ranks and full disks: on every rank, one message names the file, tensor or rank; nothing is
//! loaded and nothing is lost.

use crate::common::hooked_store::HookedStore;
use crate::common::known_state::*;
use crate::common::*;
use flatshard::base::{DType, Error, Result};
use flatshard::ckpt::{self, Checkpointer, Resume};
use flatshard::nn::{Decoder, Init, Layout, Spec};
use flatshard::optim::Rule;
use flatshard::store::{Shard, Store};
use safetensors::{Dtype, SafeTensors};
use serde_json::{Map, Value};
use std::fs;
use std::path::{Path, PathBuf};

/// A modification of a copy of a good checkpoint, and what the error must contain.
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
    ("bytes appended", |d| edit(model(d), |b| b.push(0)), &["model-00002-of-00003", "extra bytes"]),
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
        |d| edit(d.join("trainer_state.json"), |b| replace(b, "\"version\": 2", "\"version\": 3")),
        &["version 3", "reads version 2"],
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
        let early = ckpt::inspect(&copy, &spec, decoder.layouts(), &ADAMW.state()).unwrap_err();
        assert!(matches!(early, Error::Damaged(_)) && early.exit_status() == 2, "{what}: {early:?}");
        for (result, untouched) in load(2, &spec, ADAMW, &copy) {
            let error = result.expect_err(what);
            let text = error.to_string();
            assert!(says.iter().all(|s| text.contains(s)), "{what}: {text}");
            assert!(matches!(error, Error::Damaged(_)), "{what}: {error:?}");
            assert!(untouched, "{what} was found after weights had changed");
        }
        fs::remove_dir_all(copy).unwrap();
    }
    load(2, &spec, ADAMW, &good).into_iter().for_each(|(result, _)| result.unwrap());
}

/// A bit anywhere in the header of any file, whether or not the header still parses.
#[test]
fn every_flipped_bit_of_a_header_is_damage() {
    let (dir, spec) = (tempfile::tempdir().unwrap(), gpt());
    saved(1, &spec, &plain(), ADAMW, u64::MAX, dir.path(), 100);
    let good = dir.path().join("step-00000100");
    let decoder = Decoder::new(spec.clone()).unwrap();
    let inspect = || ckpt::inspect(&good, &spec, decoder.layouts(), &ADAMW.state());
    for name in ["model.safetensors", "optimizer.safetensors"] {
        let bytes = fs::read(good.join(name)).unwrap();
        for at in (0..8 + header_len(&bytes)).step_by(5) {
            edit(good.join(name), |b| b[at] ^= 1 << (at % 8));
            let error = inspect().expect_err("a changed header");
            assert!(matches!(&error, Error::Damaged(text) if text.contains(name)), "{name}, byte {at}: {error:?}");
            fs::write(good.join(name), &bytes).unwrap();
        }
    }
    inspect().unwrap();
}

/// A bit anywhere in the tensors of any file, seen by whichever rank reads it and reported by all.
#[test]
fn flipped_bits_are_reported_with_file_and_tensor() {
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
    let refusals: [(Spec, Rule, &[&str]); 7] = [
        (Spec { vocab: 20, dim: 61, ..spec.clone() }, ADAMW, &["embed_tokens.weight", "[61, 20]", "[20, 61]"]),
        (Spec { ff: 48, ..spec.clone() }, ADAMW, &["gate_proj.weight", "[44, 20]", "[48, 20]"]),
        (
            Spec { layers: 5, ..spec.clone() },
            ADAMW,
            &["no file has 27 tensors: model.layers.4.input_layernorm.weight, model.layers.4.", "..."],
        ),
        (Spec { layers: 3, ..spec.clone() }, ADAMW, &["has 27 tensors", "layers.3.", "this model does not"]),
        (Spec { tied: true, ..spec.clone() }, ADAMW, &["lm_head.weight", "this model does not"]),
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
    // Equal shapes, but a different computation.
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

/// Non-finite weights and moments: all ranks report the same, whoever holds them; in 16-bit files too. If there is also
/// damage, damage is reported first, so that an older checkpoint is used.
/// A tensor's checksum in trainer_state.json: the sum of a product's folded halves for each element and its index.
fn checksum(bytes: &[u8]) -> u64 {
    let of = |(i, element): (usize, &[u8; 4])| {
        let key = (i as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ u64::from(u32::from_le_bytes(*element));
        let product = u128::from(key) * 0xbf58_476d_1ce4_e5b9;
        product as u64 ^ (product >> 64) as u64
    };
    bytes.as_chunks::<4>().0.iter().enumerate().map(of).fold(0, u64::wrapping_add)
}

/// Sets elements of a saved tensor, with the checksums that a program would write next to them.
fn plant(dir: &Path, tensor: &str, strange: impl Fn(usize) -> Option<f32>) {
    let holds = |path: &PathBuf| {
        let bytes = fs::read(path).unwrap();
        path.extension().is_some_and(|e| e == "safetensors")
            && SafeTensors::deserialize(&bytes).unwrap().tensor(tensor).is_ok()
    };
    let (path, state) =
        (listed(dir).iter().map(|name| dir.join(name)).find(holds).unwrap(), dir.join("trainer_state.json"));
    let bytes = fs::read(&path).unwrap();
    let mut changed = bytes.clone();
    let tensors = SafeTensors::deserialize(&bytes).unwrap();
    let view = tensors.tensor(tensor).unwrap();
    let (at, len) = (view.data().as_ptr() as usize - bytes.as_ptr() as usize, view.data().len());
    let size = view.dtype().bitsize() / 8;
    for (i, value) in (0..len / size).filter_map(|i| Some((i, strange(i)?))) {
        let narrow = match view.dtype() {
            Dtype::F16 => half::f16::from_f32(value).to_le_bytes().to_vec(),
            Dtype::BF16 => half::bf16::from_f32(value).to_le_bytes().to_vec(),
            _ => value.to_le_bytes().to_vec(),
        };
        changed[at + i * size..][..size].copy_from_slice(&narrow);
    }
    fs::write(&path, &changed).unwrap();
    let Ok(text) = fs::read(&state) else { return };
    let mut map: Map<String, Value> = serde_json::from_slice(&text).unwrap();
    map.shift_remove("checksum");
    let sums = &mut map["checksums"]["tensors"];
    assert!(sums[tensor].is_string(), "{sums}");
    sums[tensor] = format!("{:016x}", checksum(&changed[at..at + len])).into();
    let own = format!("{:016x}", xxhash_rust::xxh3::xxh3_64(Value::Object(map.clone()).to_string().as_bytes()));
    map.insert("checksum".into(), own.into());
    fs::write(state, Value::Object(map).to_string()).unwrap();
}

/// Of checkpoints of earlier versions, and of models of others: what a run has lost is not saved.
#[test]
fn non_finite_values_are_counted_over_all_ranks() {
    let (dir, spec) = (tempfile::tempdir().unwrap(), llama());
    let (ckpt, half) = (dir.path().join("step-00000001"), [ckpt::Dtype::BF16, ckpt::Dtype::F16]);
    ranks(2, |rank| {
        let mut held = KnownState::new(&rank, &spec, &*plain(), ADAMW, 40_000)?.fill()?;
        held.ckpt.save(dir.path(), 1, &mut *held.store, &mut held.optimizer, &state(1))?;
        half.iter().try_for_each(|&dtype| {
            held.ckpt.save_hf(&dir.path().join(format!("{dtype:?}")), dtype, &mut *held.store).map(drop)
        })
    });
    let strange = |i: usize| (i % 7 == 3).then_some(if i.is_multiple_of(2) { f32::NAN } else { f32::NEG_INFINITY });
    for from in [&ckpt, &dir.path().join("BF16"), &dir.path().join("F16")] {
        for tensor in ["model.embed_tokens.weight", "model.layers.2.mlp.up_proj.weight"] {
            plant(from, tensor, strange);
        }
    }
    plant(&ckpt, "exp_avg_sq.model.norm.weight", |i| (i == 4).then_some(f32::NAN));
    let count = (61 * 20usize - 3).div_ceil(7);
    let says = |more: &str| {
        format!("tensor model.embed_tokens.weight has non-finite values (NaN or infinity): {count} of 1220 {more}")
    };
    for world in 1..=3 {
        for (strategy, name) in [(plain(), "fsdp"), (ddp(DType::Bf16), "ddp")] {
            let errors = ranks(world, |rank| {
                let mut held = KnownState::new(&rank, &spec, &*strategy, ADAMW, SMALL)?;
                let of = held.ckpt.load(&ckpt, &mut *held.store, &mut held.optimizer).unwrap_err();
                let models = half.map(|dtype| {
                    let from = dir.path().join(format!("{dtype:?}"));
                    held.ckpt.load_model(&from, &mut *held.store).unwrap_err()
                });
                Ok((of, models))
            });
            for (of, models) in errors {
                assert!(matches!(of, Error::Input(_)), "not damage: {of}");
                let text = of.to_string();
                let more = says("(2 more tensors have non-finite values); resume from an earlier checkpoint");
                assert!(text.contains(&more), "{name} on {world}: {text}");
                for (error, dtype) in models.iter().zip(half) {
                    let more = says("(1 more tensors have non-finite values); use a model without them");
                    assert!(error.to_string().contains(&more), "{name} on {world}, {dtype:?}: {error}");
                    assert_eq!(error.exit_status(), 2);
                }
            }
        }
    }
    edit(ckpt.join("model-00002-of-00003.safetensors"), |b| {
        let last = b.len() - 1;
        b[last] ^= 1;
    });
    for (result, _) in load(2, &spec, ADAMW, &ckpt) {
        assert!(matches!(result, Err(Error::Damaged(_))), "{result:?}");
    }
}

/// On one rank a weight is not finite: all fail, name the tensor, and nothing is there.
#[test]
fn lost_weights_are_not_saved() {
    let (dir, spec) = (tempfile::tempdir().unwrap(), llama());
    let errors = ranks(2, |rank| {
        let mut held = KnownState::new(&rank, &spec, &*plain(), ADAMW, 40_000)?.fill()?;
        let dev = held.dev.clone();
        held.each(&mut |group, tensor, at, to| {
            let lost = |i: usize| group.is_empty() && tensor == "model.layers.1.mlp.up_proj.weight" && i == 7;
            let value = |i: usize| if lost(i) { f32::INFINITY } else { value(group, tensor, i) };
            let values: Vec<f32> = (at..at + to.len()).map(value).collect();
            dev.upload(bytemuck::cast_slice(&values), to)
        })?;
        let saved = held.ckpt.save(dir.path(), 1, &mut *held.store, &mut held.optimizer, &state(1));
        let exported = held.ckpt.save_hf(&dir.path().join("hf"), ckpt::Dtype::BF16, &mut *held.store);
        Ok([saved.unwrap_err(), exported.unwrap_err()])
    });
    let says = [
        "rank 1 could not write its part of the checkpoint",
        "tensor model.layers.1.mlp.up_proj.weight has the value inf: the model is lost, and is not saved",
    ];
    for (errors, says) in errors.iter().zip(says) {
        errors.iter().for_each(|error| assert!(error.to_string().contains(says), "{error}"));
    }
    assert!(listed(dir.path()).is_empty(), "{:?}", listed(dir.path()));
}

/// Fails halfway through the store's shards on one rank, as a device or disk might.
fn failing(store: &mut dyn Store, f: &mut dyn FnMut(Shard<'_>) -> Result<()>) -> Result<()> {
    store.for_each_shard(&mut |shard| match shard.unit {
        2 => Err(Error::Run("this rank's device is gone".into())),
        _ => f(shard),
    })
}

/// After a failed save, the earlier checkpoint is the newest and loads, and there is nothing else.
fn still_there(dir: &Path, spec: &Spec) {
    assert_eq!(listed(dir), ["latest", "step-00000001"]);
    assert_eq!(ckpt::resolve(Some(dir), &Resume::Auto).unwrap(), Some(dir.join("step-00000001")));
    load(2, spec, ADAMW, &dir.join("step-00000001")).into_iter().for_each(|(result, _)| result.unwrap());
}

#[test]
fn one_rank_failing_to_save_fails_the_save_on_every_rank() {
    let (dir, spec) = (tempfile::tempdir().unwrap(), llama());
    saved(2, &spec, &plain(), ADAMW, SMALL, dir.path(), 1);
    for broken in 0..3 {
        let errors = ranks(3, |rank| {
            let KnownState { mut store, mut optimizer, mut ckpt, .. } =
                KnownState::new(&rank, &spec, &*plain(), ADAMW, SMALL)?.fill()?;
            if rank.rank == broken {
                store = Box::new(HookedStore { store, visit: failing });
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

/// A model larger than any disk: the first rank notices before a byte is written.
#[test]
fn a_checkpoint_that_does_not_fit_fails_and_leaves_nothing() {
    let (dir, spec) = (tempfile::tempdir().unwrap(), llama());
    saved(2, &spec, &plain(), ADAMW, SMALL, dir.path(), 1);
    let errors = ranks(2, |rank| {
        let mut held = KnownState::new(&rank, &spec, &*plain(), ADAMW, SMALL)?.fill()?;
        let mut huge = Layout::default();
        huge.push("huge", &[1 << 30, 1 << 20], true, Init::Constant(0.0));
        let decoder = Decoder::new(spec.clone())?;
        let layouts = [decoder.layouts(), &[huge]].concat();
        held.ckpt = Checkpointer::new(rank.device, &rank.mesh, &spec, &layouts, ADAMW.state())?;
        Ok(held.ckpt.save(dir.path(), 1, &mut *held.store, &mut held.optimizer, &state(2)).unwrap_err())
    });
    let text = errors[0].to_string();
    let needed = (3u64 << 52).to_string();
    let says =
        [dir.path().to_str().unwrap(), &needed[..4], "bytes", "are free", "`keep`", "another directory", "untouched"];
    assert!(says.iter().all(|s| text.contains(s)), "{text}");
    assert!(errors[1].to_string().contains("rank 0 could not make room"), "{}", errors[1]);
    errors.iter().for_each(|e| assert_eq!(e.exit_status(), 1));
    still_there(dir.path(), &spec);
}
