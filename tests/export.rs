//! Models that change hands with Hugging Face transformers: what it saved is read, what is exported is what it reads.
//! `tests/golden/pretrained.py` is the other side.
mod common;
#[path = "common/held.rs"]
mod held;

use common::*;
use flatshard::base::{Category, DType, Result};
use flatshard::ckpt::{self, Checkpointer, Companions, Dtype, hf};
use flatshard::device::Buf;
use flatshard::nn::{Batch, Checkpointing, Cuts, Decoder, Groups, Spec, WorkspaceOptions};
use flatshard::optim::Rule;
use flatshard::strategy::{Generator, GeneratorOptions, Sampling, Strategy};
use held::*;
use safetensors::{SafeTensors, tensor::TensorView};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;

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
        let (tokens, positions) = (tokens.view(), positions.view());
        let batch = Batch { tokens, targets: targets.view(), positions, cu_seqlens: cu_seqlens.view(), rows: None };
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

/// Weights that are exact in bf16 come back by the bit, in f16 nearly so; whatever the files' sizes.
#[test]
fn what_is_exported_in_fewer_bits_gives_nearly_the_same_logits() {
    for name in ["llama", "gpt"] {
        let (tokens, _) = golden(name);
        let spec = hf::read(&pretrained(name)).unwrap();
        let here = logits(&pretrained(name), 2, &tokens);
        for (dtype, suffix, says, max) in
            [(Dtype::BF16, "bf16", "bfloat16", SMALL), (Dtype::F16, "fp16", "float16", ckpt::layout::MAX_FILE_BYTES)]
        {
            let to = Path::new(env!("CARGO_TARGET_TMPDIR")).join("export").join(format!("{name}-{suffix}"));
            let saved = ranks(2, |rank| {
                let mut held = Held::new(&rank, &spec, &*plain(), NO_STATE, max)?;
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

/// The likeliest token, again and again: what transformers' `generate` writes. An end of text ends it.
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
                let options = GeneratorOptions { spec: spec.clone(), strategy, cuts: Cuts::ALL, prompt: 5, count: 20 };
                let mut generator = Generator::new(dev.clone(), mesh, &options)?;
                let layouts = generator.decoder().layouts().to_vec();
                let mut ckpt = Checkpointer::new(dev, mesh, &spec, &layouts, &[])?;
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

/// Shape and bytes of each tensor of a file.
type Tensors = BTreeMap<String, (Vec<usize>, Vec<u8>)>;

/// A copy of a golden model whose tensors `change` may change; in one file.
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
        let mut held = Held::new(&rank, &spec, &*plain(), NO_STATE, SMALL)?;
        Ok(held.ckpt.load_model(dir, &mut *held.store))
    })
}

#[test]
fn a_tied_head_that_is_stored_again_must_be_the_table() {
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
fn tensors_that_are_missing_or_too_many_are_named_and_known_buffers_passed_over() {
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
    assert!(text.contains("no file holds 3 tensors: ") && text.contains("model.layers.1.mlp.up_proj.weight"), "{text}");
    let text = said(&|all| {
        all.insert("model.layers.0.mlp.experts.0.w1.weight".into(), one());
        all.insert("vision.patch.weight".into(), one());
    });
    assert!(text.contains("holds 2 tensors: ") && text.contains("vision.patch.weight"), "{text}");
}

/// What people have instead of a model directory.
#[test]
fn other_layouts_are_told_apart() {
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
    assert!(said(Path::new("meta-llama/Llama-3.2-1B")).contains("hf download meta-llama/Llama-3.2-1B"));
    assert!(said(&at("models--a--b")).contains("models--a--b/snapshots/0123"));
    assert!(said(&at("bin")).contains("pytorch_model*.bin only") && said(&at("bin")).contains("save_pretrained"));
    assert!(said(&at("adapter")).contains("LoRA"));
    assert!(said(&at("runs")).contains("step-*"));
    assert!(said(&at("file")).contains("cannot be listed"));
    ckpt::is_model(&pretrained("gpt")).unwrap();
}

/// What came with a model goes with it: the tokenizer's files by the byte, the config but for its dtype.
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
        let mut held = Held::new(&rank, &spec, &*plain(), ADAMW, SMALL)?;
        held.ckpt.accompany(Companions::of(&spec, Some(&from), None)?);
        held.ckpt.load_model(&from, &mut *held.store)?;
        held.ckpt.save(&again, 1, &mut *held.store, &mut held.optimizer, &state(1))?;
        held.ckpt.save_hf(&to, Dtype::BF16, &mut *held.store)?;
        ckpt::check_export(&to)?; // what we wrote may be replaced
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
    // Another model than the source's has its own config; a tokenizer of another place wins.
    let other = Spec { layers: 2, ..spec.clone() };
    let elsewhere = dir.path().join("elsewhere");
    fs::create_dir(&elsewhere).unwrap();
    fs::write(elsewhere.join("tokenizer.json"), "{}").unwrap();
    fs::remove_dir_all(&to).unwrap();
    ranks(1, |rank| {
        let mut held = Held::new(&rank, &other, &*plain(), NO_STATE, SMALL)?.fill()?;
        held.ckpt.accompany(Companions::of(&other, Some(&from), Some(&elsewhere.join("tokenizer.json")))?);
        held.ckpt.save_hf(&to, Dtype::F32, &mut *held.store)
    });
    assert_eq!(hf::read(&to).unwrap(), other);
    let names: Vec<String> = listed(&to).into_iter().filter(|n| !n.starts_with("model")).collect();
    assert_eq!(names, ["config.json", "generation_config.json", "tokenizer.json"]);
    assert_eq!(fs::read(to.join("tokenizer.json")).unwrap(), b"{}");
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
