//! Exchanging models with Hugging Face transformers: we read what it saves, and it reads what we export.
//! `tests/golden/pretrained.py` is the other side.
mod files;
mod mxfp4;
mod towers;

use crate::common::known_state::*;
use crate::common::*;
use flatshard::base::{Category, DType, Result};
use flatshard::ckpt::{self, Checkpointer, Companions, Dtype, hf};
use flatshard::device::Buf;
use flatshard::device::ops::documents_of_rows;
use flatshard::engine::{Generator, GeneratorOptions, SamplerSize, Sampling, Strategy};
use flatshard::nn::{Batch, Checkpointing, Cuts, Decoder, Groups, Spec, WorkspaceOptions};
use flatshard::optim::{Moments, Rule};
use serde_json::{Value, json};
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// The model in `dir` on `world` ranks, and its logits after each of `tokens`.
fn logits(dir: &Path, world: usize, tokens: &[u32]) -> Vec<Vec<f32>> {
    logits_with(dir, None, world, tokens)
}

/// With an adapter from a separate directory merged into it.
fn logits_with(dir: &Path, adapter: Option<&Path>, world: usize, tokens: &[u32]) -> Vec<Vec<f32>> {
    let spec = hf::read(dir).unwrap();
    let n = tokens.len();
    let each = ranks(world, |rank| {
        let mut held = KnownState::new(&rank, &spec, &*plain(), NO_STATE, SMALL)?;
        held.ckpt.load_model(dir, &mut *held.store)?;
        if let Some(adapter) = adapter {
            held.ckpt.merge(adapter, &mut *held.store)?;
        }
        let (decoder, dev) = (Decoder::new(spec.clone())?, &*held.dev);
        let options = WorkspaceOptions { tokens: n, dtype: DType::F32, checkpoint: Checkpointing::Off, train: false };
        let mut workspace = decoder.workspace(dev, &Groups::solo(&held.dev), &options)?;
        let upload = |values: &[u32]| -> Result<Buf> {
            let mut buf = dev.alloc(DType::U32, values.len(), Category::Other)?;
            dev.upload(bytemuck::cast_slice(values), buf.view_mut())?;
            Ok(buf)
        };
        let positions: Vec<u32> = (0..n as u32).collect();
        let (tokens, positions, cu_seqlens) = (upload(tokens)?, upload(&positions)?, upload(&[0, n as u32])?);
        let targets = dev.alloc(DType::I32, n, Category::Other)?;
        let documents = upload(&documents_of_rows(&[0, n as u32]).collect::<Vec<_>>())?;
        let (tokens, targets, positions) = (tokens.view(), targets.view(), positions.view());
        let (cu_seqlens, documents) = (cu_seqlens.view(), documents.view());
        let batch = Batch { tokens, targets, positions, cu_seqlens, documents, rows: None, padding: 0, labeled: None };
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
    generated(&pretrained(name))
}
fn generated(dir: &Path) -> (Vec<u32>, Vec<Vec<f32>>) {
    let said: Value = serde_json::from_slice(&fs::read(dir.join("logits.json")).unwrap()).unwrap();
    let parse = |v: &Value| v.as_array().unwrap().iter().map(|x| x.as_f64().unwrap() as f32).collect::<Vec<_>>();
    let tokens = parse(&said["tokens"]).into_iter().map(|t| t as u32).collect();
    (tokens, said["logits"].as_array().unwrap().iter().map(parse).collect())
}

/// bf16 weights and a transformers 5 config, with fp32 logits.
#[test]
fn models_saved_by_transformers_give_its_logits() {
    for name in ["llama", "gpt", "exaone", "sarvam_moe"] {
        let (tokens, theirs) = golden(name);
        let ours = logits(&pretrained(name), 2, &tokens);
        let pairs = || ours.iter().flatten().zip(theirs.iter().flatten());
        let largest = theirs.iter().flatten().fold(0f32, |m, x| m.max(x.abs()));
        let difference = pairs().fold(0f32, |m, (a, b)| m.max((a - b).abs())) / largest;
        assert_eq!(pairs().count(), tokens.len() * 47);
        assert!(difference < 2e-6, "{name}: logits differ by {difference:.1e} of their largest");
    }
}

/// A PEFT adapter merged into its model gives the logits PEFT computes.
#[test]
fn a_merged_peft_adapter_gives_its_logits() {
    let adapter = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/lora");
    let (tokens, theirs) = generated(&adapter);
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

/// Anything that is not an adapter of this model is refused by name, and nothing changes.
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
            let mut held = KnownState::new(&rank, &spec, &*plain(), NO_STATE, SMALL)?;
            Ok((held.ckpt.merge(dir.path(), &mut *held.store).unwrap_err().to_string(), held.untouched()?))
        });
        assert!(texts.iter().all(|t| t.1));
        texts.swap_remove(0).0
    };
    let same = |config: String| config;
    copy(&same);
    assert!(merge("gpt").contains("this model has no model.layers.0"));
    for (from, to, word) in [
        ("\"r\": 3", "\"r\": 4", "rank 4"),
        ("\"use_dora\": false", "\"use_dora\": true", "no lora_magnitude_vector"),
        ("\"LORA\"", "\"IA3\"", "IA3"),
        ("\"rank_pattern\": {}", "\"rank_pattern\": {\"q_proj\": 9}", "rank 9"),
        ("{", "{{", "not JSON"),
    ] {
        copy(&|config| config.replace(from, to));
        let text = merge("llama");
        assert!(text.contains(word), "{word}: {text}");
    }
    copy(&same);
    let weights = dir.path().join("adapter_model.safetensors");
    let bytes = fs::read(&weights).unwrap();
    let nan = [&bytes[..bytes.len() - 4], &f32::NAN.to_le_bytes()].concat(); // one more NaN in 16 bits
    fs::write(&weights, nan).unwrap();
    let text = merge("llama");
    assert!(text.contains("has non-finite values (NaN or infinity): 1 of"), "{text}");
    fs::write(&weights, &bytes[..bytes.len() - 7]).unwrap();
    assert!(merge("llama").contains("adapter_model.safetensors: is truncated"));
}

/// Imported, exported and read again on other numbers of ranks: bitwise equal. The exports stay in target/tmp/export,
/// where `tests/golden/pretrained.py check` loads them into transformers.
#[test]
fn exported_models_give_the_same_logits() {
    for name in ["llama", "gpt"] {
        let (tokens, _) = golden(name);
        let spec = hf::read(&pretrained(name)).unwrap();
        let to = Path::new(env!("CARGO_TARGET_TMPDIR")).join("export").join(name);
        let _ = fs::remove_dir_all(&to);
        let max = if name == "gpt" { SMALL } else { ckpt::layout::MAX_FILE_BYTES }; // several files, and one
        ranks(3, |rank| {
            let mut held = KnownState::new(&rank, &spec, &*ddp(DType::Bf16), NO_STATE, max)?;
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

/// Files whose tensors have other names than those of transformers' class become files of the family that computes the
/// same.
#[test]
fn published_names_are_read_and_not_written() {
    for (name, family) in [("exaone", "llama"), ("sarvam_moe", "glm4_moe")] {
        let (tokens, _) = golden(name);
        let spec = hf::read(&pretrained(name)).unwrap();
        let to = Path::new(env!("CARGO_TARGET_TMPDIR")).join("export").join(name);
        let _ = fs::remove_dir_all(&to);
        ranks(2, |rank| {
            let mut held = KnownState::new(&rank, &spec, &*plain(), NO_STATE, SMALL)?;
            held.ckpt.accompany(Companions::of(&spec, Some(&pretrained(name)), None)?);
            held.ckpt.load_model(&pretrained(name), &mut *held.store)?;
            held.ckpt.save_hf(&to, Dtype::F32, &mut *held.store)
        });
        let config: Value = serde_json::from_slice(&fs::read(to.join("config.json")).unwrap()).unwrap();
        assert_eq!((&config["model_type"], hf::read(&to).unwrap()), (&family.into(), spec));
        let index = fs::read_to_string(to.join("model.safetensors.index.json")).unwrap();
        assert!(index.contains("model.layers.1.self_attn.k_proj.weight"), "{index}");
        let ours = logits(&to, 1, &tokens);
        assert!(ours == logits(&pretrained(name), 2, &tokens), "{name}");
        let said = json!({"tokens": tokens, "logits": ours});
        fs::write(to.with_file_name(format!("{name}.logits.json")), said.to_string()).unwrap();
    }
}

/// Weights that are exact in bf16 come back bit for bit, and nearly so in f16, for any file size.
#[test]
fn half_precision_exports_give_nearly_the_same_logits() {
    for name in ["llama", "gpt"] {
        let (tokens, _) = golden(name);
        let spec = hf::read(&pretrained(name)).unwrap();
        let here = logits(&pretrained(name), 2, &tokens);
        for (dtype, suffix, says, max) in
            [(Dtype::BF16, "bf16", "bfloat16", SMALL), (Dtype::F16, "fp16", "float16", ckpt::layout::MAX_FILE_BYTES)]
        {
            let to = Path::new(env!("CARGO_TARGET_TMPDIR")).join("export").join(format!("{name}-{suffix}"));
            let _ = fs::remove_dir_all(&to);
            let saved = ranks(2, |rank| {
                let mut held = KnownState::new(&rank, &spec, &*plain(), NO_STATE, max)?;
                held.ckpt.accompany(Companions::of(&spec, Some(&pretrained(name)), None)?);
                held.ckpt.load_model(&pretrained(name), &mut *held.store)?;
                held.ckpt.save_hf(&to, dtype, &mut *held.store)
            });
            let config: Value = serde_json::from_slice(&fs::read(to.join("config.json")).unwrap()).unwrap();
            assert_eq!(config.get("dtype").or(config.get("torch_dtype")), Some(&says.into()), "{name}");
            assert_eq!(hf::read(&to).unwrap(), spec);
            let params: usize = Decoder::new(spec.clone()).unwrap().layouts().iter().map(|l| l.params()).sum();
            if suffix == "bf16" {
                let index = fs::read(to.join("model.safetensors.index.json")).unwrap();
                let index: Value = serde_json::from_slice(&index).unwrap();
                assert_eq!(index["metadata"]["total_size"], 2 * params);
                let files = listed(&to).into_iter().filter(|f| f.ends_with(".safetensors")).count();
                assert!(to.join(format!("model-00001-of-{files:05}.safetensors")).exists() && files > 1);
            }
            assert!(saved[0].bytes < 4 * params as u64);
            let there = logits(&to, 3, &tokens);
            let largest = here.iter().flatten().fold(0f32, |m, x| m.max(x.abs()));
            let pairs = there.iter().flatten().zip(here.iter().flatten());
            let difference = pairs.fold(0f32, |m, (a, b)| m.max((a - b).abs())) / largest;
            assert!(difference <= if suffix == "bf16" { 0.0 } else { 1e-4 }, "{name} in {suffix}: {difference:.1e}");
            let said = json!({"tokens": tokens, "logits": there});
            fs::write(to.with_file_name(format!("{name}-{suffix}.logits.json")), said.to_string()).unwrap();
        }
    }
}

/// Greedy decoding gives what transformers' `generate` gives. An end of text ends it.
#[test]
fn greedy_text_is_that_of_transformers() {
    for name in ["llama", "gpt"] {
        let said: Value = serde_json::from_slice(&fs::read(pretrained(name).join("logits.json")).unwrap()).unwrap();
        let theirs: Vec<u32> = said["greedy"].as_array().unwrap().iter().map(|t| t.as_u64().unwrap() as u32).collect();
        let spec = hf::read(&pretrained(name)).unwrap();
        let greedy = Sampling { temperature: 0.0, ..Sampling::default() };
        let write = |world: usize, strategy: Arc<dyn Strategy>, sampling: Sampling, end: Option<u32>| {
            let all = ranks(world, |rank| {
                let (dev, mesh) = (rank.device, &rank.mesh);
                let (spec, strategy) = (spec.clone(), strategy.clone());
                let size = SamplerSize::of_one(5, 20);
                let options = GeneratorOptions { spec: spec.clone(), strategy, cuts: Cuts::ALL, size };
                let mut generator = Generator::new(dev.clone(), mesh, &options)?;
                let layouts = generator.layouts().to_vec();
                let mut ckpt = Checkpointer::new(dev, mesh, &spec, &layouts, Moments::NONE)?;
                ckpt.load_model(&pretrained(name), generator.store())?;
                generator.generate(&golden(name).0[..5], 20, &sampling, &mut |token| Some(token) != end)
            });
            assert!(all.iter().all(|text| *text == all[0]), "ranks disagree");
            all[0].clone()
        };
        for (world, strategy) in [(1, plain()), (3, plain()), (2, ddp(DType::F32))] {
            assert_eq!(write(world, strategy, greedy, None), theirs, "{name} on {world} ranks");
        }
        let end = theirs.iter().position(|t| *t == theirs[10]).unwrap();
        assert_eq!(write(2, plain(), greedy, Some(theirs[10])), theirs[..=end]);
        let one = Sampling { temperature: 5.0, top_k: 1, ..Sampling::default() };
        assert_eq!(write(1, plain(), one, None), theirs, "of one token the likeliest is picked at any temperature");
        let hot = |seed| write(2, plain(), Sampling { temperature: 5.0, seed, ..Sampling::default() }, None);
        assert!(hot(1) == hot(1) && hot(1) != hot(2));
    }
}
