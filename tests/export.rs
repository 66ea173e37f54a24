//! Models that change hands with Hugging Face transformers: what it saved is read, what is exported is what it reads.
//! `tests/golden/pretrained.py` is the other side.
mod common;
#[path = "common/held.rs"]
mod held;

use common::*;
use flatshard::base::{Category, DType, Result};
use flatshard::ckpt::{self, Dtype, hf};
use flatshard::device::Buf;
use flatshard::nn::{Batch, Decoder, WorkspaceOptions};
use flatshard::optim::Rule;
use held::*;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

/// The model in `dir` on `world` ranks, and its logits after each of `tokens`.
fn logits(dir: &Path, world: usize, tokens: &[u32]) -> Vec<Vec<f32>> {
    logits_with(dir, None, world, tokens)
}

/// With the adapter in a directory of its own merged into it.
fn logits_with(dir: &Path, adapter: Option<&Path>, world: usize, tokens: &[u32]) -> Vec<Vec<f32>> {
    let spec = hf::read(dir).unwrap();
    let n = tokens.len();
    let each = ranks(world, |rank| {
        let mut held = Held::new(&rank, &spec, &*plain(), NO_STATE, SMALL)?;
        held.ckpt.load_model(dir, &mut *held.store)?;
        if let Some(adapter) = adapter {
            held.ckpt.merge(adapter, &mut *held.store)?;
        }
        let (decoder, dev) = (Decoder::new(spec.clone())?, &*held.dev);
        let options = WorkspaceOptions { tokens: n, dtype: DType::F32, checkpoint: false, train: false };
        let mut workspace = decoder.workspace(dev, &options)?;
        let upload = |values: &[u32]| -> Result<Buf> {
            let mut buf = dev.alloc(DType::U32, values.len(), Category::Other)?;
            dev.upload(bytemuck::cast_slice(values), buf.view_mut())?;
            Ok(buf)
        };
        let positions: Vec<u32> = (0..n as u32).collect();
        let (tokens, positions, cu_seqlens) = (upload(tokens)?, upload(&positions)?, upload(&[0, n as u32])?);
        let targets = dev.alloc(DType::I32, n, Category::Other)?;
        let (tokens, positions) = (tokens.view(), positions.view());
        let batch = Batch { tokens, targets: targets.view(), positions, cu_seqlens: cu_seqlens.view() };
        let mut row = |row| -> Result<Vec<f32>> {
            let mut out = vec![0.0; spec.vocab];
            decoder.next_token_logits(dev, &mut *held.store, &batch, &mut workspace, row, &mut out)?;
            Ok(out)
        };
        (0..n).map(&mut row).collect()
    });
    assert!(each.iter().all(|e| *e == each[0]), "ranks disagree");
    each.into_iter().next().unwrap()
}
const NO_STATE: Rule = Rule::Sgd { momentum: 0.0, weight_decay: 0.0 };

fn pretrained(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/pretrained").join(name)
}
fn golden(name: &str) -> (Vec<u32>, Vec<Vec<f32>>) {
    said(&pretrained(name))
}
fn said(dir: &Path) -> (Vec<u32>, Vec<Vec<f32>>) {
    let said: Value = serde_json::from_slice(&fs::read(dir.join("logits.json")).unwrap()).unwrap();
    let parse = |v: &Value| v.as_array().unwrap().iter().map(|x| x.as_f64().unwrap() as f32).collect::<Vec<_>>();
    let tokens = parse(&said["tokens"]).into_iter().map(|t| t as u32).collect();
    (tokens, said["logits"].as_array().unwrap().iter().map(parse).collect())
}

/// bf16 weights and the config of transformers 5; its fp32 logits.
#[test]
fn what_transformers_saved_gives_its_logits() {
    for name in ["llama", "gpt"] {
        let (tokens, theirs) = golden(name);
        let ours = logits(&pretrained(name), 2, &tokens);
        let pairs = || ours.iter().flatten().zip(theirs.iter().flatten());
        let largest = theirs.iter().flatten().fold(0f32, |m, x| m.max(x.abs()));
        let difference = pairs().fold(0f32, |m, (a, b)| m.max((a - b).abs())) / largest;
        assert_eq!(pairs().count(), tokens.len() * 47);
        assert!(difference < 2e-6, "{name}: logits differ by {difference:.1e} of their largest");
    }
}

/// An adapter of PEFT's, added to its model: the logits that PEFT has of the two.
#[test]
fn an_adapter_of_peft_merges_to_its_logits() {
    let adapter = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/lora");
    let (tokens, theirs) = said(&adapter);
    let largest = theirs.iter().flatten().fold(0f32, |m, x| m.max(x.abs()));
    let off = |ours: Vec<Vec<f32>>| {
        ours.iter().flatten().zip(theirs.iter().flatten()).fold(0f32, |m, (a, b)| m.max((a - b).abs())) / largest
    };
    for world in [1, 3] {
        let difference = off(logits_with(&pretrained("llama"), Some(&adapter), world, &tokens));
        assert!(difference < 2e-6, "logits differ by {difference:.1e} of their largest");
    }
    assert!(off(logits(&pretrained("llama"), 1, &tokens)) > 1e-2, "the adapter does nothing");
}

/// What is no adapter of this model is refused by name, and nothing has changed.
#[test]
fn adapters_that_do_not_fit_are_refused() {
    let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/lora");
    let dir = tempfile::tempdir().unwrap();
    let copy = |change: &dyn Fn(String) -> String| {
        let config = fs::read_to_string(golden.join("adapter_config.json")).unwrap();
        fs::write(dir.path().join("adapter_config.json"), change(config)).unwrap();
        fs::copy(golden.join("adapter_model.safetensors"), dir.path().join("adapter_model.safetensors")).unwrap();
    };
    let merge = |name: &str| {
        let spec = hf::read(&pretrained(name)).unwrap();
        let mut texts = ranks(2, |rank| {
            let mut held = Held::new(&rank, &spec, &*plain(), NO_STATE, SMALL)?;
            Ok((held.ckpt.merge(dir.path(), &mut *held.store).unwrap_err().to_string(), held.untouched()?))
        });
        assert!(texts.iter().all(|t| t.1));
        texts.swap_remove(0).0
    };
    let same = |config: String| config;
    copy(&same);
    assert!(merge("gpt").contains("which this model does not have"));
    for (from, to, word) in [
        ("\"r\": 3", "\"r\": 4", "rank 4"),
        ("\"use_rslora\": false", "\"use_rslora\": true", "use_rslora"),
        ("\"bias\": \"none\"", "\"bias\": \"all\"", "bias"),
        ("\"LORA\"", "\"IA3\"", "IA3"),
        ("\"rank_pattern\": {}", "\"rank_pattern\": {\"q_proj\": 9}", "rank_pattern"),
        ("{", "{{", "not JSON"),
    ] {
        copy(&|config| config.replace(from, to));
        let text = merge("llama");
        assert!(text.contains(word), "{word}: {text}");
    }
    copy(&same);
    let weights = dir.path().join("adapter_model.safetensors");
    let bytes = fs::read(&weights).unwrap();
    fs::write(&weights, &bytes[..bytes.len() - 7]).unwrap();
    assert!(merge("llama").contains("not a safetensors file"));
}

/// Imported, exported and read again, on other numbers of ranks: the same bits. The exports stay in target/tmp/export,
/// where `tests/golden/pretrained.py check` gives them to transformers.
#[test]
fn what_is_exported_gives_the_same_logits() {
    for name in ["llama", "gpt"] {
        let (tokens, _) = golden(name);
        let spec = hf::read(&pretrained(name)).unwrap();
        let to = Path::new(env!("CARGO_TARGET_TMPDIR")).join("export").join(name);
        let max = if name == "gpt" { SMALL } else { ckpt::layout::MAX_FILE_BYTES }; // several files, and one
        ranks(3, |rank| {
            let mut held = Held::new(&rank, &spec, &*ddp(DType::Bf16), NO_STATE, max)?;
            held.ckpt.load_model(&pretrained(name), &mut *held.store)?;
            held.ckpt.save_hf(&to, Dtype::F32, &mut *held.store)
        });
        assert_eq!(to.join("model.safetensors").exists(), name == "llama");
        assert_eq!(hf::read(&to).unwrap(), spec);
        let ours = logits(&to, 4, &tokens);
        assert!(ours == logits(&pretrained(name), 1, &tokens), "{name}");
        let said = json!({"tokens": tokens, "logits": ours});
        fs::write(to.with_file_name(format!("{name}.logits.json")), said.to_string()).unwrap();
    }
}

/// An export is a model directory of others: its index may say anything.
#[test]
fn an_index_cannot_lead_out_of_its_directory() {
    let (dir, spec) = (tempfile::tempdir().unwrap(), llama());
    let export = dir.path().join("model");
    ranks(2, |rank| {
        let mut held = Held::new(&rank, &spec, &*plain(), ADAMW, SMALL)?.fill()?;
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
    assert!(inspect().unwrap_err().contains("not an index"));
}

#[test]
fn an_export_is_the_checkpoint_s_model_and_overwrites_nothing_of_others() {
    let (dir, spec) = (tempfile::tempdir().unwrap(), llama());
    saved(2, &spec, &plain(), ADAMW, SMALL, dir.path(), 1);
    let export = |to: &Path| {
        ranks(2, |rank| {
            let mut held = Held::new(&rank, &spec, &*plain(), ADAMW, SMALL)?.fill()?;
            Ok(held.ckpt.save_hf(to, Dtype::F32, &mut *held.store).map(|_| ()))
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
