//! `--lora-merge` of adapters that PEFT trained in ways that this project does not: the tensors that PEFT's own merge
//! changes, or a refusal that names the reason. `tests/golden/adapters.py` wrote them.
use crate::common::golden_tensors::Tensors;
use crate::common::runs::unlaunched;
use safetensors::tensor::{Dtype, TensorView, serialize};
use serde_json::{Value, json};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Output;

fn golden(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/adapters").join(name)
}

/// Merges `adapter` into `base` as DIR/merged.
fn merge(dir: &Path, base: &str, adapter: &Path) -> Output {
    let mut command = unlaunched(crate::common::binaries::FSDP);
    command.current_dir(dir).arg("--pretrain").arg(golden(base)).arg("--lora-merge").arg(adapter);
    command.args(["--save-hf", "merged", "--overwrite", "--nproc-per-node", "3"]).output().unwrap()
}
fn refused(dir: &Path, base: &str, adapter: &Path) -> String {
    let Output { status, stderr, .. } = merge(dir, base, adapter);
    let text = String::from_utf8_lossy(&stderr).into_owned();
    assert_eq!(status.code(), Some(2), "{text}");
    assert!(!dir.join("merged").exists());
    text
}

#[test]
fn merges_are_those_of_peft() {
    for (base, adapter, counts) in [
        ("qwen2", "patterns", "8 adapters"),
        ("qwen2", "whole", "8 adapters and 7 whole tensors"),
        ("qwen2", "embeddings", "4 adapters and 8 whole tensors"),
        ("tied", "together", "2 adapters and 1 whole tensors"),
        ("gpt2", "transposed", "4 adapters"),
        ("qwen2", "tokens", "2 adapters and 2 whole tensors"),
        ("tied", "tied_tokens", "2 adapters and 1 whole tensors"),
        ("tied", "dora", "14 adapters"),
        ("gpt2", "dora_transposed", "4 adapters"),
        ("qwen2", "named_twice", "2 adapters and 2 whole tensors"),
        ("tied", "factors_together", "3 adapters and 1 whole tensors"),
        ("qwen3_moe", "stacked", "28 adapters"),
    ] {
        let dir = tempfile::tempdir().unwrap();
        let Output { status, stderr, .. } = merge(dir.path(), base, &golden(adapter));
        let text = String::from_utf8_lossy(&stderr);
        assert!(status.success() && text.contains(&format!("merge  {counts}  ")), "{adapter}: {text}");
        let read = |path: PathBuf| Tensors::read(&path).floats;
        let (mut wanted, changed) =
            (read(golden(base).join("model.safetensors")), read(golden(adapter).join("merged.safetensors")));
        // PEFT names a tied head too.
        wanted.extend(changed.into_iter().filter(|(name, _)| base != "tied" || name != "lm_head.weight"));
        let merged = read(dir.path().join("merged/model.safetensors"));
        assert_eq!(merged.len(), wanted.len(), "{adapter}");
        for (name, wanted) in wanted {
            let apart = merged[&name].iter().zip(&wanted).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
            assert!(apart < 1e-6, "{adapter}: {name} differs by {apart}");
        }
    }
}

#[test]
fn what_cannot_be_merged_is_refused_before_anything_is_written() {
    let dir = tempfile::tempdir().unwrap();
    let text = refused(dir.path(), "qwen2", &golden("dora_embeddings"));
    assert!(text.contains("DoRA of model.embed_tokens.weight is not supported"), "{text}");
    let text = refused(dir.path(), "tied", &golden("apart"));
    assert!(text.contains("changes model.embed_tokens.weight") && text.contains("ties its head"), "{text}");

    let copied = |from: &str, change: &dyn Fn(&mut Value)| {
        let copy = dir.path().join("adapter");
        fs::create_dir_all(&copy).unwrap();
        fs::copy(golden(from).join("adapter_model.safetensors"), copy.join("adapter_model.safetensors")).unwrap();
        let config = fs::read(golden(from).join("adapter_config.json")).unwrap();
        let mut config: Value = serde_json::from_slice(&config).unwrap();
        change(&mut config);
        fs::write(copy.join("adapter_config.json"), config.to_string()).unwrap();
        copy
    };
    for (key, value, why) in [
        ("init_lora_weights", json!("pissa"), "\\\"init_lora_weights\\\" is \\\"pissa\\\": such an adapter belongs to"),
        ("use_dora", json!(true), "has no lora_magnitude_vector for"),
        ("invented", json!(3), "\\\"invented\\\" is 3: unknown key"),
        ("rank_pattern", json!({}), "for this model and rank 3 it must be [3, 8]"),
    ] {
        let text = refused(dir.path(), "qwen2", &copied("patterns", &|config| config[key] = value.clone()));
        assert!(text.replace('"', "\\\"").contains(why), "{key}: {text}");
    }

    for (key, value, why) in [
        ("target_parameters", json!(["experts.bias"]), "adapters of other parameters than those of experts"),
        ("use_dora", json!(true), "DoRA of model.layers.0.mlp.experts is not supported"),
        ("rank_pattern", json!({}), "of model.layers.0.mlp.experts; for this model and rank 2 the inner size is 2 * 3"),
    ] {
        let text = refused(dir.path(), "qwen3_moe", &copied("stacked", &|config| config[key] = value.clone()));
        assert!(text.contains(why), "{key}: {text}");
    }
    let text = refused(dir.path(), "qwen2", &golden("stacked"));
    assert!(text.contains("this model has no model.layers.0.mlp.experts"), "{text}");

    let text = refused(dir.path(), "tied", &copied("dora", &|config| config["use_dora"] = json!(false)));
    assert!(text.contains("has a lora_magnitude_vector for"), "{text}");
    let text =
        refused(dir.path(), "qwen2", &copied("tokens", &|config| config["trainable_token_indices"] = json!([3])));
    assert!(text.contains("for its trainable_token_indices it must be [1, 8]"), "{text}");
    let tokens = json!({"embed_tokens": [3, 20], "lm_head": [19]});
    let text =
        refused(dir.path(), "qwen2", &copied("tokens", &|config| config["trainable_token_indices"] = tokens.clone()));
    assert!(text.contains("an embedding of token 20, but this model has 20 tokens"), "{text}");

    // A tied head's own product.
    let apart = copied("factors_together", &|config| config["alpha_pattern"] = json!({"lm_head": 7}));
    assert!(refused(dir.path(), "tied", &apart).contains("ties its head to its embeddings"));

    // Tensors that the model does not have, or has in another shape.
    let text = refused(dir.path(), "gpt2", &golden("patterns"));
    assert!(text.contains("this model has no model.layers.0"), "{text}");
    let grown = copied("whole", &|_| ());
    let stored = |name: &str, rows: usize| {
        let zeros: Vec<u8> = vec![0; 4 * rows * 8];
        let tensor = TensorView::new(Dtype::F32, vec![rows, 8], &zeros).unwrap();
        let file = serialize([(name, tensor)], None).unwrap();
        fs::write(grown.join("adapter_model.safetensors"), file).unwrap();
        refused(dir.path(), "qwen2", &grown)
    };
    let text = stored("base_model.model.model.layers.0.self_attn.o_proj.lora_B.bias", 1);
    assert!(text.contains("o_proj.bias: `lora_bias` adds one") && text.contains("cannot be merged"), "{text}");
    let text = stored("base_model.model.score.weight", 1);
    assert!(text.contains("the head of a reward model, which needs --objective rm"), "{text}");
    let text = stored("base_model.model.model.embed_tokens.weight", 22);
    assert!(text.contains("[22, 8], but in this model it is [20, 8]: tokens were added"), "{text}");
    assert!(text.contains("resize_token_embeddings(22)"), "{text}");
}
