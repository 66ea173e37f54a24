//! Vision-language checkpoints end to end: the text model is trained, in full and with adapters, resumed, merged and
//! exported; the vision tower comes out untouched. The files stay in target/tmp/towers, where `tests/golden/towers.py
//! check` loads them with transformers and PEFT.
use crate::common::runs::unlaunched;
use safetensors::tensor::TensorView;
use safetensors::{Dtype, SafeTensors};
use serde_json::Value;
use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Output;

fn tower(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/towers").join(name)
}

/// The exit status, and what it says.
fn run(dir: &Path, model: &Path, args: &str) -> (Option<i32>, String) {
    let mut command = unlaunched(crate::common::binaries::FSDP);
    command.current_dir(dir).arg("--pretrain").arg(model);
    let rest = "--dataset synthetic --max-len 16 --batch-size 2 --warmup-steps 0 --no-sample --lr=0.01";
    let Output { status, stderr, .. } = command.args(rest.split(' ')).args(args.split(' ')).output().unwrap();
    (status.code(), String::from_utf8_lossy(&stderr).into_owned())
}
fn done(dir: &Path, model: &Path, args: &str) -> String {
    let (code, text) = run(dir, model, args);
    assert_eq!(code, Some(0), "{text}");
    text
}
fn refused(dir: &Path, model: &Path, args: &str) -> String {
    let (code, text) = run(dir, model, args);
    assert_eq!(code, Some(2), "{text}");
    text
}

fn tensors(file: &Path) -> BTreeMap<String, Vec<u8>> {
    let bytes = fs::read(file).unwrap();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    file.tensors().into_iter().map(|(name, view)| (name, view.data().to_vec())).collect()
}

#[test]
fn text_is_trained_and_the_vision_tower_is_carried_through() {
    let dir = Path::new(env!("CARGO_TARGET_TMPDIR")).join("towers");
    let _ = fs::remove_dir_all(&dir);
    fs::create_dir_all(&dir).unwrap();
    let (model, source) = (tower("vl_gemma3"), tensors(&tower("vl_gemma3").join("model.safetensors")));
    let text = done(&dir, &model, "--max-steps 1 --ckpt-dir ck --save-dtype bf16 --save-hf one");
    assert!(text.contains("carried through: 34 tensors of the vision tower, "), "{text}");
    let more = "--max-steps 2 --ckpt-dir ck --resume auto --save-dtype bf16 --save-hf tuned";
    let text = done(&dir, &model, more);
    assert!(text.contains("carried through: 34 tensors"), "{text}");
    let tuned = tensors(&dir.join("tuned/model.safetensors"));
    assert!(tuned.keys().eq(source.keys()));
    let changed: Vec<&String> = source.iter().filter(|(name, bytes)| tuned[*name] != **bytes).map(|(n, _)| n).collect();
    assert!(!changed.is_empty() && changed.iter().all(|name| name.starts_with("language_model.")), "{changed:?}");
    assert!(dir.join("tuned/preprocessor_config.json").exists());

    let lora = "--lora-rank 2 --lora-target-modules all-linear --lora-alpha 8";
    done(&dir, &model, &format!("{lora} --max-steps 1 --ckpt-dir lora"));
    done(
        &dir,
        &model,
        &format!("{lora} --max-steps 2 --ckpt-dir lora --resume auto --save-adapter adapter --save-hf final"),
    );
    let adapters = tensors(&dir.join("adapter/adapter_model.safetensors"));
    assert_eq!(adapters.len(), 2 * 7 * 3);
    let prefix = "base_model.model.model.language_model.layers.";
    assert!(adapters.keys().all(|name| name.starts_with(prefix)), "{:?}", adapters.keys());
    let config: Value = serde_json::from_slice(&fs::read(dir.join("adapter/adapter_config.json")).unwrap()).unwrap();
    assert_eq!(config["exclude_modules"], r"(?!model\.language_model\.).*");
    done(&dir, &model, "--lora-adapter adapter --max-steps 1");
    done(&dir, &model, "--lora-merge adapter --save-hf merged");
    let merged = tensors(&dir.join("merged/model.safetensors"));
    assert!(merged.keys().eq(source.keys()));
    assert!(tensors(&dir.join("final/model.safetensors")) == merged, "the run's own export differs");
    assert!(dir.join("final/preprocessor_config.json").exists() && !dir.join("final/adapter_config.json").exists());
    let is_text = |name: &&String| name.starts_with("language_model.");
    assert!(source.iter().filter(|(name, _)| !is_text(name)).all(|(name, bytes)| merged[name] == *bytes));
    // It generates like the adapter on its base model.
    let said = |model: &str| {
        let mut command = unlaunched(crate::common::binaries::FSDP);
        command.current_dir(&dir).args(["--pretrain", model, "--generate", "3 17 5", "--temperature", "0"]);
        let Output { status, stdout, stderr } = command.args(["--max-new-tokens", "9"]).output().unwrap();
        assert!(status.success(), "{}", String::from_utf8_lossy(&stderr));
        stdout
    };
    assert_eq!(said("merged"), said("adapter"));

    // PEFT may give the tower adapters too. Trained on text alone, their products are 0 and change nothing.
    let bytes = fs::read(dir.join("adapter/adapter_model.safetensors")).unwrap();
    let own = SafeTensors::deserialize(&bytes).unwrap();
    let module = "base_model.model.model.vision_tower.vision_model.encoder.layers.0.self_attn.q_proj";
    for (b, merges) in [(0.0_f32, true), (1.0, false)] {
        let [a, b]: [Vec<u8>; 2] = [1.0, b].map(|x: f32| [x; 8].iter().flat_map(|x| x.to_le_bytes()).collect());
        let view = |bytes, shape: [usize; 2]| TensorView::new(Dtype::F32, shape.to_vec(), bytes).unwrap();
        let more = [
            (format!("{module}.lora_A.weight"), view(&a, [2, 4])),
            (format!("{module}.lora_B.weight"), view(&b, [4, 2])),
        ];
        let all = own.tensors().into_iter().chain(more);
        fs::write(dir.join("adapter/adapter_model.safetensors"), safetensors::serialize(all, None).unwrap()).unwrap();
        let again = "--lora-merge adapter --save-hf again --overwrite";
        match merges {
            true => {
                done(&dir, &model, again);
                assert!(tensors(&dir.join("again/model.safetensors")) == merged, "products of 0 changed the model");
            }
            false => {
                let text = refused(&dir, &model, again);
                assert!(text.contains("adapters of a vision tower are not supported"), "{text}");
            }
        }
    }
    fs::write(dir.join("adapter/adapter_model.safetensors"), &bytes).unwrap();
}

#[test]
fn what_a_tower_cannot_do_is_refused_before_anything_starts() {
    let dir = tempfile::tempdir().unwrap();
    let text = refused(dir.path(), &tower("vl_llava"), "--max-steps 1 --save-gguf model.gguf");
    assert!(text.contains("the export of a llava model is not supported"), "{text}");
    let text = refused(dir.path(), &tower("vl_qwen3"), "--max-steps 1 --objective rm");
    assert!(text.contains("a reward model with a vision tower is not supported"), "{text}");
    let other = dir.path().join("other");
    fs::create_dir(&other).unwrap();
    let config = fs::read_to_string(tower("vl_qwen3").join("config.json")).unwrap();
    fs::write(other.join("config.json"), config.replace("qwen3_vl\"", "paligemma\"")).unwrap();
    fs::copy(tower("vl_qwen3").join("model.safetensors"), other.join("model.safetensors")).unwrap();
    let text = refused(dir.path(), &other, "--max-steps 1");
    assert!(text.contains("model_type is \"paligemma\": its prompts attend to later tokens too"), "{text}");
}

/// A text model that was read from a vision-language model and saved keeps that one's names. Of tensors that share
/// memory, some tools save the first by name.
#[test]
fn a_text_model_under_other_names_is_the_same_model() {
    let dir = tempfile::tempdir().unwrap();
    let new =
        "--tokenizer bytes --embed-dim 16 --num-layers 1 --num-heads 2 --ff-hidden-dim 24 --tie-embeddings --seed 4";
    let made = unlaunched(crate::common::binaries::FSDP)
        .current_dir(dir.path())
        .args("--dataset synthetic --max-len 16 --max-steps 1 --no-sample --save-hf plain".split(' '))
        .args(new.split(' '))
        .output()
        .unwrap();
    assert!(made.status.success(), "{}", String::from_utf8_lossy(&made.stderr));
    let plain = dir.path().join("plain");
    let bytes = fs::read(plain.join("model.safetensors")).unwrap();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    let trained = |model: &Path, to: &str| {
        done(dir.path(), model, &format!("--max-steps 2 --save-hf {to}"));
        tensors(&dir.path().join(to).join("model.safetensors"))
    };
    let right = trained(&plain, "trained");
    let rules = [("within", "model.", "model.language_model."), ("head", "model.embed_tokens.", "lm_head.")];
    for (to, ours, theirs) in rules {
        let other = dir.path().join(to);
        fs::create_dir(&other).unwrap();
        for file in ["config.json", "tokenizer.json", "tokenizer_config.json"].map(|name| plain.join(name)) {
            if file.exists() {
                fs::copy(&file, other.join(file.file_name().unwrap())).unwrap();
            }
        }
        let renamed = file.tensors().into_iter().map(|(name, view)| (name.replacen(ours, theirs, 1), view));
        fs::write(other.join("model.safetensors"), safetensors::serialize(renamed, None).unwrap()).unwrap();
        assert!(trained(&other, &format!("trained-{to}")) == right, "{to}");
    }
}
