//! Model directories: what third-party ones may lack or have in addition, what accompanies an export, and what an
//! export never overwrites.
use super::*;
use flatshard::ckpt::Companions;
use flatshard::ckpt::disk::{Disk, DiskOp};
use flatshard::ckpt::gguf::GgufType;
use safetensors::{SafeTensors, tensor::TensorView};
use std::collections::BTreeMap;
use std::sync::Once;

/// Shape and bytes of each tensor of a file.
type Tensors = BTreeMap<String, (Vec<usize>, Vec<u8>)>;

/// A copy of a golden model in one file, with tensors modified by `change`.
fn changed(name: &str, to: &Path, change: impl FnOnce(&mut Tensors)) {
    fs::create_dir_all(to).unwrap();
    fs::copy(pretrained(name).join("config.json"), to.join("config.json")).unwrap();
    let bytes = fs::read(pretrained(name).join("model.safetensors")).unwrap();
    let read = SafeTensors::deserialize(&bytes).unwrap();
    let mut all = read.iter().map(|(n, t)| (n.to_string(), (t.shape().to_vec(), t.data().to_vec()))).collect();
    change(&mut all);
    let views = all.iter().map(|(n, (shape, data))| (n, TensorView::new(Dtype::BF16, shape.clone(), data).unwrap()));
    fs::write(to.join("model.safetensors"), safetensors::serialize(views, None).unwrap()).unwrap();
}

fn loaded(name: &str, dir: &Path) -> Vec<Result<()>> {
    let spec = hf::read(&pretrained(name)).unwrap();
    ranks(3, |rank| {
        let mut held = KnownState::new(&rank, &spec, &*plain(), NO_STATE, SMALL)?;
        Ok(held.ckpt.load_model(dir, &mut *held.store))
    })
}

#[test]
fn a_separately_stored_tied_head_must_equal_the_embedding() {
    let dir = tempfile::tempdir().unwrap();
    let (same, other) = (dir.path().join("same"), dir.path().join("other"));
    let twin = |all: &Tensors| all["transformer.wte.weight"].clone();
    changed("gpt", &same, |all| drop(all.insert("lm_head.weight".into(), twin(all))));
    loaded("gpt", &same).into_iter().for_each(|r| r.unwrap());
    changed("gpt", &other, |all| {
        let (shape, mut data) = twin(all);
        data[2 * 1000] ^= 1;
        all.insert("lm_head.weight".into(), (shape, data));
    });
    let errors: Vec<String> = loaded("gpt", &other).into_iter().map(|r| r.unwrap_err().to_string()).collect();
    let says = "lm_head.weight differs from transformer.wte.weight at element 1000";
    assert!(errors.iter().any(|e| e.contains(says) && e.contains("tie_word_embeddings")), "{errors:?}");
    assert!(errors.iter().all(|e| e.contains(says) || e.contains("could not read")), "{errors:?}");
    changed("gpt", &other, |all| drop(all.insert("lm_head.weight".into(), (vec![47, 1], vec![0; 94]))));
    assert!(loaded("gpt", &other)[0].as_ref().unwrap_err().to_string().contains("lm_head.weight has shape [47, 1]"));
}

#[test]
fn missing_and_extra_tensors_are_named_and_known_buffers_ignored() {
    let dir = tempfile::tempdir().unwrap();
    let to = dir.path().join("model");
    let one = || (vec![2], vec![0; 4]);
    changed("llama", &to, |all| {
        for name in ["model.rotary_emb.inv_freq", "model.layers.0.self_attn.rotary_emb.inv_freq"] {
            all.insert(name.into(), one());
        }
    });
    loaded("llama", &to).into_iter().for_each(|r| r.unwrap());
    changed("llama", &to, |all| {
        let bare = std::mem::take(all).into_iter();
        all.extend(bare.map(|(name, t)| (name.trim_start_matches("model.").to_string(), t)));
    });
    loaded("llama", &to).into_iter().for_each(|r| r.unwrap());
    let said = |change: &dyn Fn(&mut Tensors)| {
        changed("llama", &to, change);
        let error = loaded("llama", &to).swap_remove(1).unwrap_err();
        assert_eq!(error.exit_status(), 2);
        error.to_string()
    };
    let text = said(&|all| all.retain(|name, _| !name.contains(".1.mlp.")));
    assert!(text.contains("no file has 3 tensors: ") && text.contains("model.layers.1.mlp.up_proj.weight"), "{text}");
    let text = said(&|all| {
        all.insert("model.layers.0.mlp.experts.0.w1.weight".into(), one());
        all.insert("vision.patch.weight".into(), one());
    });
    assert!(text.contains("has 2 tensors: ") && text.contains("vision.patch.weight"), "{text}");
}

/// What users commonly have instead of a model directory.
#[test]
fn other_layouts_are_recognized() {
    let dir = tempfile::tempdir().unwrap();
    let at = |name: &str| dir.path().join(name);
    let said = |path: &Path| {
        let error = ckpt::is_model(path).unwrap_err();
        assert_eq!(error.exit_status(), 2);
        error.to_string()
    };
    for sub in ["models--a--b/snapshots/0123", "models--a--b/refs", "bin", "adapter", "runs/step-00000001"] {
        fs::create_dir_all(at(sub)).unwrap();
    }
    for (file, text) in [
        ("models--a--b/refs/main", "0123"),
        ("bin/pytorch_model.bin", ""),
        ("bin/config.json", "{}"),
        ("adapter/adapter_config.json", "{}"),
        ("file", ""),
    ] {
        fs::write(at(file), text).unwrap();
    }
    assert!(said(Path::new("meta-llama/Llama-3.2-1B")).contains("not a name of the hub (OWNER/NAME"));
    assert!(said(&at("models--a--b")).contains("models--a--b/snapshots/0123"));
    assert!(said(&at("bin")).contains("only pytorch_model*.bin") && said(&at("bin")).contains("save_pretrained"));
    assert!(said(&at("adapter")).contains("LoRA"));
    assert!(said(&at("runs")).contains("step-*"));
    assert!(said(&at("file")).contains("cannot be listed"));
    ckpt::is_model(&pretrained("gpt")).unwrap();
}

/// What came with a model is exported with it: the tokenizer's files verbatim, the config except for its dtype.
#[test]
fn companions_of_a_model_are_kept() {
    let (dir, spec) = (tempfile::tempdir().unwrap(), hf::read(&pretrained("llama")).unwrap());
    let (from, to, again) = (dir.path().join("from"), dir.path().join("to"), dir.path().join("runs"));
    changed("llama", &from, |_| {});
    let mut config: Value = serde_json::from_slice(&fs::read(from.join("config.json")).unwrap()).unwrap();
    config["eos_token_id"] = json!([3, 4]);
    config["transformers_version"] = json!("4.40.0");
    fs::write(from.join("config.json"), config.to_string()).unwrap();
    let kept = [
        "tokenizer.json",
        "tokenizer_config.json",
        "special_tokens_map.json",
        "chat_template.jinja",
        "merges.txt",
        "vocab.json",
        "generation_config.json",
    ];
    kept.iter().for_each(|name| fs::write(from.join(name), format!("{{\"{name}\": 1}}")).unwrap());
    fs::write(from.join("README.md"), "not ours to pass on").unwrap();
    ranks(2, |rank| {
        let mut held = KnownState::new(&rank, &spec, &*plain(), ADAMW, SMALL)?;
        held.ckpt.accompany(Companions::of(&spec, Some(&from), None)?);
        held.ckpt.load_model(&from, &mut *held.store)?;
        held.ckpt.save(&again, 1, &mut *held.store, &mut held.optimizer, &state(1))?;
        held.ckpt.save_hf(&to, Dtype::BF16, &mut *held.store)?;
        ckpt::check_export(&to, Some(RUN), false)?; // our own export may be replaced
        held.ckpt.save_hf(&to, Dtype::BF16, &mut *held.store)
    });
    for (out, dtype) in [(&to, "bfloat16"), (&again.join("step-00000001"), "float32")] {
        for name in kept {
            assert_eq!(fs::read(out.join(name)).unwrap(), fs::read(from.join(name)).unwrap(), "{name}");
        }
        assert!(!out.join("README.md").exists());
        let found: Value = serde_json::from_slice(&fs::read(out.join("config.json")).unwrap()).unwrap();
        let mut expected = config.clone();
        let key = if config.get("dtype").is_some() { "dtype" } else { "torch_dtype" };
        expected[key] = json!(dtype);
        assert_eq!(found, expected);
    }
    // A model that differs from the source gets its own config; an explicit tokenizer takes precedence.
    let other = Spec { layers: 2, ..spec.clone() };
    let elsewhere = dir.path().join("elsewhere");
    fs::create_dir(&elsewhere).unwrap();
    fs::write(elsewhere.join("tokenizer.json"), "{}").unwrap();
    fs::remove_dir_all(&to).unwrap();
    ranks(1, |rank| {
        let mut held = KnownState::new(&rank, &other, &*plain(), NO_STATE, SMALL)?.fill()?;
        held.ckpt.accompany(Companions::of(&other, Some(&from), Some(&elsewhere.join("tokenizer.json")))?);
        held.ckpt.save_hf(&to, Dtype::F32, &mut *held.store)
    });
    assert_eq!(hf::read(&to).unwrap(), other);
    let names: Vec<String> = listed(&to).into_iter().filter(|n| !n.starts_with("model")).collect();
    assert_eq!(names, ["config.json", "flatshard.json", "generation_config.json", "tokenizer.json"]);
    assert_eq!(fs::read(to.join("tokenizer.json")).unwrap(), b"{}");
}

/// An index is third-party input and may contain anything.
#[test]
fn an_index_cannot_point_outside_its_directory() {
    let (dir, spec) = (tempfile::tempdir().unwrap(), llama());
    let export = dir.path().join("model");
    ranks(2, |rank| {
        let mut held = KnownState::new(&rank, &spec, &*plain(), ADAMW, SMALL)?.fill()?;
        held.ckpt.save_hf(&export, Dtype::F32, &mut *held.store)
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
    for name in ["../outside.safetensors", outside.to_str().unwrap(), "", ".", "..", "sub/../model.safetensors"] {
        fs::write(&index, text.replace("model-00001-of-00005.safetensors", name)).unwrap();
        let error = inspect().unwrap_err();
        assert!(error.contains("index.json") && error.contains("not a plain file name"), "{name}: {error}");
    }
    // It may be in a folder.
    fs::create_dir(export.join("sub")).unwrap();
    fs::rename(export.join("model-00001-of-00005.safetensors"), export.join("sub/first.safetensors")).unwrap();
    fs::write(&index, text.replace("model-00001-of-00005", "sub/first")).unwrap();
    inspect().unwrap();
    fs::rename(export.join("sub/first.safetensors"), export.join("model-00001-of-00005.safetensors")).unwrap();
    fs::write(&index, text.replace("model-00001-of-00005", "model-00002-of-00005")).unwrap();
    assert!(inspect().unwrap_err().contains("the index lists for it"));
    fs::write(&index, text.replace("weight_map", "weight_maq")).unwrap();
    assert!(inspect().unwrap_err().contains("no weight_map"));
    fs::write(&index, &text[..50]).unwrap();
    assert!(inspect().unwrap_err().contains("not an index"));
}

#[test]
fn an_export_equals_the_checkpoints_model_and_overwrites_no_foreign_files() {
    let (dir, spec) = (tempfile::tempdir().unwrap(), llama());
    saved(2, &spec, &plain(), ADAMW, SMALL, dir.path(), 1);
    let export = |to: &Path| {
        ranks(2, |rank| {
            let mut held = KnownState::new(&rank, &spec, &*plain(), ADAMW, SMALL)?.fill()?;
            Ok(held.ckpt.save_hf(to, Dtype::F32, &mut *held.store).map(|_| ()))
        })
    };
    let (new, empty, mine) = (dir.path().join("new"), dir.path().join("empty"), dir.path().join("mine"));
    fs::create_dir(&empty).unwrap();
    fs::create_dir(&mine).unwrap();
    fs::write(mine.join("thesis.tex"), "years").unwrap();
    for to in [&new, &empty, &new] {
        ckpt::check_export(to, Some(RUN), false).unwrap();
        export(to).into_iter().for_each(|r| r.unwrap());
        let checkpoint = contents(&dir.path().join("step-00000001"));
        for (name, bytes) in contents(to).into_iter().filter(|(name, _)| name != "flatshard.json") {
            assert!(checkpoint[&name] == bytes, "{name} differs");
        }
        assert!(!to.join("trainer_state.json").exists() && to.join("config.json").exists());
    }
    let refused = |to: &Path, run, overwrite| {
        let error = ckpt::check_export(to, run, overwrite).unwrap_err();
        assert_eq!(error.exit_status(), 2);
        error.to_string()
    };
    assert!(refused(&mine, Some(RUN), true).contains("thesis.tex"));
    for result in export(&mine) {
        let error = result.unwrap_err();
        assert_eq!(error.exit_status(), 2, "{error}");
    }
    assert_eq!(contents(&mine), BTreeMap::from([("thesis.tex".to_string(), b"years".to_vec())]));
    // A model next to a user's file, and weights without a config, are not ours to replace either.
    fs::write(new.join("README.md"), "mine").unwrap();
    assert!(refused(&new, Some(RUN), true).contains("README.md"));
    fs::remove_file(empty.join("config.json")).unwrap();
    assert!(refused(&empty, Some(RUN), true).contains("no config.json"));
    // Nor is a model of another run, without --overwrite; and anything but a regular file is not part of a model.
    fs::remove_file(new.join("README.md")).unwrap();
    for run in [Some("another"), None] {
        assert!(refused(&new, run, false).contains("did not write"));
        ckpt::check_export(&new, run, true).unwrap();
    }
    for to in [mine.join("thesis.tex"), mine.clone()] {
        std::os::unix::fs::symlink(&to, new.join("model-2.safetensors")).unwrap();
        assert!(refused(&new, Some(RUN), true).contains("contains model-2.safetensors"));
        fs::remove_file(new.join("model-2.safetensors")).unwrap();
    }
    // And the export loads as a model.
    ranks(3, |rank| {
        let mut held =
            KnownState::new(&rank, &spec, &*ddp(DType::Bf16), Rule::Sgd { momentum: 0.0, weight_decay: 0.0 }, SMALL)?;
        held.ckpt.load_model(&new, &mut *held.store)?;
        held.check()
    });
}

/// Another run takes the place while this one writes.
#[test]
fn a_trained_model_whose_place_is_taken_goes_next_to_it() {
    let (dir, spec) = (tempfile::tempdir().unwrap(), llama());
    let model = |to: &Path| {
        fs::create_dir(to).unwrap();
        fs::write(to.join("config.json"), "another run's").unwrap();
    };
    let save = |to: PathBuf, beside: bool, gguf: bool| {
        ranks(2, |rank| {
            let mut held = KnownState::new(&rank, &spec, &*plain(), ADAMW, SMALL)?.fill()?;
            let (place, first) = (to.clone(), Once::new());
            held.ckpt.on_disk(Disk::watched(move |op| match op {
                DiskOp::Create(_) if rank.rank == 0 && gguf => first.call_once(|| fs::write(&place, "GGUF").unwrap()),
                DiskOp::Create(_) if rank.rank == 0 => first.call_once(|| model(&place)),
                _ => {}
            }));
            held.ckpt.of_run("this");
            if beside {
                held.ckpt.export_beside();
            }
            held.ckpt.accompany(Companions::default().of_bytes(true));
            Ok(match gguf {
                true => held.ckpt.save_gguf(&to, GgufType::F16, &mut *held.store),
                false => held.ckpt.save_hf(&to, Dtype::F32, &mut *held.store),
            })
        })
    };
    for (gguf, name, beside) in [(false, "v1.5", "v1.5-this"), (true, "m.gguf", "m-this.gguf")] {
        let to = dir.path().join(name);
        let refused = save(to.clone(), false, gguf).swap_remove(0).unwrap_err().to_string();
        assert!(refused.contains("`overwrite`"), "{refused}");
        let taken = if gguf { fs::read(&to).unwrap() } else { fs::read(to.join("config.json")).unwrap() };
        fs::remove_dir_all(&to).or_else(|_| fs::remove_file(&to)).unwrap();
        let saved = save(to.clone(), true, gguf).swap_remove(0).unwrap();
        let (path, note) = (fs::canonicalize(dir.path()).unwrap().join(beside), saved.note.unwrap());
        assert_eq!(fs::canonicalize(&saved.path).unwrap(), path);
        assert!(note.contains("did not write") || note.contains("exists"), "{note}");
        assert!(note.ends_with(&format!("so the model is in {}", saved.path.display())), "{note}");
        assert_eq!(taken, if gguf { fs::read(&to).unwrap() } else { fs::read(to.join("config.json")).unwrap() });
        if !gguf {
            hf::read(&path).unwrap();
        }
    }
    let unfinished: Vec<String> = listed(dir.path()).into_iter().filter(|name| name.starts_with(".tmp")).collect();
    assert!(unfinished.is_empty(), "{unfinished:?}");
}
