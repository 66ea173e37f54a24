//! `--save-gguf`: the bytes of llama.cpp's own converter for each family and type, whatever the mesh; and what is
//! refused. `tests/golden/gguf_files.py` made the golden values, and runs the files in llama.cpp.
use crate::common::binaries::FLATSHARD;
use crate::common::runs::{Dir, FSDP};
use safetensors::{Dtype, tensor::TensorView};
use serde_json::{Value, json};
use sha2::{Digest, Sha256};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

/// Families whose files are read back too.
pub const READ: [&str; 10] =
    ["llama2", "llama3", "qwen2", "qwen3", "gemma2", "gemma3", "mixtral", "qwen2_moe", "qwen3_moe", "olmoe"];
const WRITTEN: [&str; 26] = [
    "smollm3",
    "granite",
    "olmo2",
    "olmo3",
    "seed_oss",
    "exaone4",
    "phi4",
    "phi4_mini",
    "starcoder2",
    "lfm2",
    "qwen3_5",
    "qwen3_5_moe",
    "ministral3",
    "glm4",
    "cohere2",
    "ernie4_5",
    "hunyuan",
    "lfm2_moe",
    "gemma4",
    "gemma4_moe",
    "gpt_oss",
    "deepseek_v2",
    "deepseek_v3",
    "glm4_moe_lite",
    "qwen3_next",
    "qwen3_vl",
];
pub const TYPES: [&str; 3] = ["f16", "bf16", "q8_0"];

pub fn tests() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests")
}
pub fn case(name: &str) -> Value {
    serde_json::from_slice(&fs::read(tests().join(format!("golden/gguf_files/{name}.json"))).unwrap()).unwrap()
}

/// The formula of `weights` in gguf_files.py.
fn weights(index: usize, name: &str, len: usize, gemma: bool) -> Vec<u8> {
    let value = |i: usize| {
        let x = (i as u64 + 1_000_003 * (index as u64 + 1)) * 2654435761 % (1 << 32);
        let x = (x ^ x >> 15) * 2246822519 % (1 << 32);
        let x = ((x ^ x >> 13) >> 8) as f32 / (1 << 24) as f32 - 0.5;
        match name {
            "model.embed_tokens.weight" | "lm_head.weight" => x * 2.0,
            norm if norm.ends_with("norm.weight") => x * 0.5 + if gemma { 0.0 } else { 1.0 },
            _ => x * 0.5,
        }
    };
    (0..len).flat_map(|i| value(i).to_le_bytes()).collect()
}

/// The model directory of a case.
pub fn write(name: &str, case: &Value, dir: &Path) {
    fs::create_dir_all(dir).unwrap();
    fs::write(dir.join("config.json"), case["config"].to_string()).unwrap();
    for (file, text) in case["files"].as_object().unwrap() {
        fs::write(dir.join(file), text.as_str().unwrap()).unwrap();
    }
    let pieces = case["tokenizer"] == "pieces";
    let tokenizer = if pieces || case["tokenizer"] == "gemma4" { "sentencepiece" } else { "byte_level" };
    let mut text = fs::read_to_string(tests().join(format!("data/golden/{tokenizer}/tokenizer.json"))).unwrap();
    if ["qwen2", "qwen35"].iter().any(|kind| case["tokenizer"] == *kind) {
        text = text.replace(r"\\p{N}{1,3}", r"\\p{N}");
    }
    if case["tokenizer"] == "qwen35" {
        text =
            text.replace(r"?\\p{L}+", r"?[\\p{L}\\p{M}]+").replace(r"[^\\s\\p{L}\\p{N}]", r"[^\\s\\p{L}\\p{M}\\p{N}]");
    }
    for (old, new) in case["renamed"].as_object().into_iter().flatten() {
        text = text.replace(old, new.as_str().unwrap());
    }
    if let Some(parts) = case["replaced"].as_object() {
        let mut whole: Value = serde_json::from_str(&text).unwrap();
        whole.as_object_mut().unwrap().extend(parts.clone());
        text = whole.to_string();
    }
    fs::write(dir.join("tokenizer.json"), text).unwrap();
    if pieces {
        fs::copy(tests().join("golden/gguf_files/tokenizer.model"), dir.join("tokenizer.model")).unwrap();
    }
    let from_one = ["gemma2", "gemma3", "qwen3_5", "qwen3_next"].iter().any(|family| name.starts_with(family));
    write_tensors(&case["tensors"], from_one, &dir.join("model.safetensors"));
}
fn write_tensors(tensors: &Value, gemma: bool, file: &Path) {
    let tensors: Vec<(String, Vec<usize>)> = serde_json::from_value(tensors.clone()).unwrap();
    let data: Vec<_> = tensors.iter().enumerate().map(|(i, (n, s))| weights(i, n, s.iter().product(), gemma)).collect();
    let views = tensors.iter().zip(&data).map(|((n, s), d)| (n, TensorView::new(Dtype::F32, s.clone(), d).unwrap()));
    fs::write(file, safetensors::serialize(views, None).unwrap()).unwrap();
}

/// One step that changes nothing, then the export.
pub fn run(dir: &Path, args: &str) -> Output {
    let still = "--device cpu --dataset synthetic --max-len 16 --batch-size 1 --max-steps 1 --lr 0 --weight-decay 0 \
                 --no-eval --no-sample";
    Command::new(FSDP).args(still.split_whitespace()).args(args.split(' ')).current_dir(dir).output().unwrap()
}
#[track_caller]
pub fn exported(dir: &Path, args: &str) -> Vec<u8> {
    let out = run(dir, &format!("{args} --save-gguf model.gguf --overwrite"));
    assert!(out.status.success(), "{args}: {}", String::from_utf8_lossy(&out.stderr));
    fs::read(dir.join("model.gguf")).unwrap()
}
#[track_caller]
pub fn refused(dir: &Path, args: &str, parts: &[&str]) {
    let out = run(dir, args);
    let stderr = String::from_utf8_lossy(&out.stderr);
    assert_eq!(out.status.code(), Some(2), "{args}: {stderr}");
    parts.iter().for_each(|part| assert!(stderr.contains(part), "{args}: no {part:?} in {stderr}"));
}

#[track_caller]
fn compare(found: &[u8], golden: &Value, what: &str) {
    for part in golden["parts"].as_array().unwrap() {
        let (at, len) = (part[1].as_u64().unwrap() as usize, part[2].as_u64().unwrap() as usize);
        let sum = Sha256::digest(&found[at..at + len]);
        let hex: String = sum.iter().take(8).map(|byte| format!("{byte:02x}")).collect();
        assert_eq!(part[3], hex, "{what}: {} is not as the converter has it", part[0]);
    }
    assert_eq!(golden["bytes"], found.len(), "{what}");
}

#[test]
fn files_are_those_of_llama_cpps_converter() {
    let dir = Dir::new();
    for name in READ.into_iter().chain(WRITTEN) {
        let case = case(name);
        write(name, &case, &dir.path(name));
        for kind in TYPES {
            let args = format!("--pretrain {name} --gguf-type {kind} --nproc-per-node 1");
            if (name, kind) == ("gpt_oss", "q8_0") {
                refused(
                    dir.0.path(),
                    &format!("{args} --save-gguf refused.gguf"),
                    &["--gguf-type q8_0", "transposed", "llama-quantize"],
                );
                continue;
            }
            let found = exported(dir.0.path(), &args);
            compare(&found, &case["golden"][kind], &format!("{name} {kind}"));
        }
    }
}

/// The converter's file has no window either.
#[test]
fn a_window_that_llama_cpp_does_not_read_is_said() {
    let dir = Dir::new();
    let case = case("starcoder2");
    write("starcoder2", &case, &dir.path("base"));
    let mut config = case["config"].clone();
    config["sliding_window"] = json!(24);
    fs::write(dir.path("base/config.json"), config.to_string()).unwrap();
    let out = run(dir.0.path(), "--pretrain base --nproc-per-node 1 --save-gguf model.gguf");
    let said = String::from_utf8_lossy(&out.stderr);
    assert!(out.status.success() && said.contains("the same up to 24 tokens"), "{said}");
    compare(&fs::read(dir.path("model.gguf")).unwrap(), &case["golden"]["f16"], "starcoder2 with a window");
}

/// Offsets count from the first tensor: the converter makes a name of the directory's.
#[test]
fn adapters_alone_are_those_of_llama_cpps_converter() {
    let dir = Dir::new();
    for name in READ.into_iter().chain(WRITTEN) {
        let case = case(name);
        write(name, &case, &dir.path(name));
        let (base, adapter) = (dir.path(name), dir.path("adapter"));
        fs::create_dir_all(&adapter).unwrap();
        let mut config = case["adapter"]["config"].clone();
        config["base_model_name_or_path"] = json!(base);
        fs::write(adapter.join("adapter_config.json"), config.to_string()).unwrap();
        write_tensors(&case["adapter"]["tensors"], false, &adapter.join("adapter_model.safetensors"));
        let out = dir.path(&format!("{name}.gguf"));
        let mut export = Command::new(FLATSHARD);
        let ended = export.arg("export").arg(&adapter).arg("--save-gguf").arg(&out).output().unwrap();
        assert!(ended.status.success(), "{name}: {}", String::from_utf8_lossy(&ended.stderr));
        let found = fs::read(&out).unwrap();
        let parts = case["adapter"]["parts"].as_array().unwrap();
        let place = |part: &Value| (part[1].as_u64().unwrap() as usize, part[2].as_u64().unwrap() as usize);
        let end = parts.iter().map(place).map(|(at, len)| (at + len).next_multiple_of(32)).max().unwrap();
        let (header, tensors) = found.split_at(found.len() - end);
        compare(tensors, &json!({"parts": parts, "bytes": end}), name);
        for part in parts {
            let tensor = part[0].as_str().unwrap();
            assert!(header.windows(tensor.len()).any(|window| window == tensor.as_bytes()), "{name}: no {tensor}");
        }
        fs::remove_dir_all(&adapter).unwrap();
    }
}

/// llama.cpp multiplies by some weights without a look at adapters, and has others transposed or as two.
#[test]
fn adapters_that_llama_cpp_does_not_apply_are_refused() {
    let dir = Dir::new();
    write("deepseek_v3", &case("deepseek_v3"), &dir.path("base"));
    fs::create_dir(dir.path("adapter")).unwrap();
    for (module, outputs, inputs, why) in [
        ("self_attn.q_b_proj", 96, 24, "to which llama.cpp applies no adapter"),
        ("self_attn.kv_b_proj", 128, 32, "to which llama.cpp applies no adapter"),
    ] {
        let config = json!({"peft_type": "LORA", "r": 4, "lora_alpha": 6, "bias": "none", "task_type": "CAUSAL_LM",
                            "target_modules": [module], "base_model_name_or_path": dir.path("base")});
        fs::write(dir.path("adapter/adapter_config.json"), config.to_string()).unwrap();
        let of = |side: &str, shape: [usize; 2]| {
            json!([format!("base_model.model.model.layers.1.{module}.lora_{side}.weight"), shape])
        };
        let tensors = json!([of("A", [4, inputs]), of("B", [outputs, 4])]);
        write_tensors(&tensors, false, &dir.path("adapter/adapter_model.safetensors"));
        let mut export = Command::new(FLATSHARD);
        let ended = export.arg("export").arg(dir.path("adapter")).arg("--save-gguf").arg(dir.path("out.gguf")).output();
        let (status, text) = ended.map(|out| (out.status, String::from_utf8_lossy(&out.stderr).into_owned())).unwrap();
        assert!(status.code() == Some(2) && text.contains(why) && text.contains("merge it"), "{module}: {text}");
    }
}

/// PEFT saves the embedding that has an adapter, as the base model has it.
#[test]
fn base_weights_next_to_an_adapter_are_not_of_it() {
    let dir = Dir::new();
    write("llama3", &case("llama3"), &dir.path("base"));
    fs::create_dir(dir.path("adapter")).unwrap();
    let config = json!({"peft_type": "LORA", "r": 4, "lora_alpha": 6, "bias": "none", "task_type": "CAUSAL_LM",
                        "target_modules": ["embed_tokens"], "base_model_name_or_path": dir.path("base")});
    fs::write(dir.path("adapter/adapter_config.json"), config.to_string()).unwrap();
    let parts = [("lora_embedding_A", [4, 384]), ("lora_embedding_B", [64, 4]), ("base_layer.weight", [384, 64])];
    let [a, b, base] = parts.map(|(part, shape)| json!([format!("base_model.model.model.embed_tokens.{part}"), shape]));
    let exported = |tensors: Value| {
        write_tensors(&tensors, false, &dir.path("adapter/adapter_model.safetensors"));
        let mut export = Command::new(FLATSHARD);
        export.arg("export").arg(dir.path("adapter")).arg("--save-gguf").arg(dir.path("out.gguf")).arg("--overwrite");
        let ended = export.output().unwrap();
        assert!(ended.status.success(), "{}", String::from_utf8_lossy(&ended.stderr));
        fs::read(dir.path("out.gguf")).unwrap()
    };
    let alone = exported(json!([a, b]));
    assert!(alone == exported(json!([a, b, base])));
}

/// Of a vision-language model, the converter writes the text model.
#[test]
fn a_vision_language_model_exports_its_text_model() {
    let dir = Dir::new();
    for (name, kind, from, to) in [
        ("gemma3", "gemma3", "", "language_model."),
        ("qwen3_5", "qwen3_5", "model.", "model.language_model."),
        ("qwen3_5_moe", "qwen3_5_moe", "model.", "model.language_model."),
        ("ministral3", "mistral3", "model.", "model.language_model."),
        ("gemma4", "gemma4", "model.", "model.language_model."),
    ] {
        let case = case(name);
        write(name, &case, &dir.path(name));
        let mut outer = serde_json::json!({"model_type": kind, "vision_config": {}, "text_config": case["config"]});
        outer["tie_word_embeddings"] = case["config"]["tie_word_embeddings"].clone();
        outer["text_config"].as_object_mut().unwrap().shift_remove("architectures");
        fs::write(dir.path(name).join("config.json"), outer.to_string()).unwrap();
        let file = dir.path(name).join("model.safetensors");
        let bytes = fs::read(&file).unwrap();
        let text = safetensors::SafeTensors::deserialize(&bytes).unwrap();
        let renamed = text.tensors().into_iter().map(|(name, view)| (name.replacen(from, to, 1), view));
        let eye = TensorView::new(Dtype::U8, vec![3], &[1, 2, 3]).unwrap();
        let all: Vec<_> = renamed.chain([("vision_tower.eye".to_string(), eye)]).collect();
        fs::write(&file, safetensors::serialize(all, None).unwrap()).unwrap();
        let found = exported(dir.0.path(), &format!("--pretrain {name} --gguf-type f16 --nproc-per-node 1"));
        compare(&found, &case["golden"]["f16"], &format!("{name} with a vision tower"));
    }
}

/// Shards begin within rows, and ranks of tp have columns.
#[test]
fn the_file_does_not_depend_on_the_mesh() {
    let dir = Dir::new();
    for (name, meshes) in [
        ("llama3", &["--nproc-per-node 3", "--nproc-per-node 4 --tp-size 2", "--nproc-per-node 2 --strategy ddp"][..]),
        ("gemma2", &["--nproc-per-node 2 --tp-size 2"][..]),
        ("qwen3_5", &["--nproc-per-node 3", "--nproc-per-node 2 --tp-size 2"]),
        ("qwen3_moe", &["--nproc-per-node 2 --tp-size 2", "--nproc-per-node 4 --ep-size 2", "--nproc-per-node 3"]),
        ("qwen3_5_moe", &["--nproc-per-node 2 --ep-size 2"]),
        ("lfm2_moe", &["--nproc-per-node 2 --ep-size 2"]),
        ("gemma4_moe", &["--nproc-per-node 2 --ep-size 2"]),
        ("gpt_oss", &["--nproc-per-node 3", "--nproc-per-node 2 --tp-size 2", "--nproc-per-node 2 --ep-size 2"]),
        ("deepseek_v3", &["--nproc-per-node 3", "--nproc-per-node 2 --tp-size 2"]),
        ("qwen3_next", &["--nproc-per-node 3", "--nproc-per-node 2 --tp-size 2"]),
    ] {
        let case = case(name);
        write(name, &case, &dir.path(name));
        for mesh in meshes {
            for kind in ["f16", "q8_0"] {
                // Of gemma2's 96 columns each rank has 48, which are no whole blocks, and 16 of an expert's 32.
                if (name, kind) == ("gpt_oss", "q8_0") {
                    continue; // refused on any mesh
                }
                let cut = [
                    ("gemma2", "96 columns"),
                    ("qwen3_moe", "32 columns"),
                    ("deepseek_v3", "96 columns"),
                    ("qwen3_next", "32 columns"),
                ];
                let cut = cut.iter().find(|(of, _)| (*of, kind) == (name, "q8_0") && mesh.contains("--tp-size"));
                if let Some((_, columns)) = cut {
                    let args = format!("--pretrain {name} --gguf-type {kind} {mesh} --save-gguf refused.gguf");
                    refused(dir.0.path(), &args, &["--tp-size 2", columns, "--gguf-type f16"]);
                    assert!(!dir.path("refused.gguf").exists());
                    continue;
                }
                let found = exported(dir.0.path(), &format!("--pretrain {name} --gguf-type {kind} {mesh}"));
                compare(&found, &case["golden"][kind], &format!("{name} {kind} {mesh}"));
            }
        }
    }
}

/// A merge writes the file of the merged model, and so does a run that trains adapters.
#[test]
fn a_merge_exports_the_merged_model() {
    let dir = Dir::new();
    write("qwen2", &case("qwen2"), &dir.path("base"));
    let ok = |args: &str| {
        let out = run(dir.0.path(), args);
        assert!(out.status.success(), "{args}: {}", String::from_utf8_lossy(&out.stderr));
    };
    ok(
        "--pretrain base --lora-rank 2 --save-adapter adapter --save-gguf final/model.gguf --lr 0.1 --max-steps 2 --nproc-per-node 2 --tp-size 2",
    );
    ok("--pretrain base --lora-merge adapter --save-hf merged --save-gguf both/model.gguf --nproc-per-node 2");
    let from_hf = exported(dir.0.path(), "--pretrain merged --nproc-per-node 1");
    assert!(fs::read(dir.path("both/model.gguf")).unwrap() == from_hf);
    assert!(fs::read(dir.path("final/model.gguf")).unwrap() == from_hf, "the run's own file differs");
    assert!(exported(dir.0.path(), "--pretrain base --nproc-per-node 1") != from_hf);
}

#[test]
fn what_cannot_be_a_gguf_file_is_refused_before_anything_starts() {
    let dir = Dir::new();
    write("llama3", &case("llama3"), &dir.path("base"));
    let no = |args: &str, parts: &[&str]| refused(dir.0.path(), &format!("--nproc-per-node 1 {args}"), parts);
    let new = "--embed-dim 64 --num-layers 2 --num-heads 2";
    no(&format!("{new} --arch gpt --save-gguf a.gguf"), &["save-gguf", "learned positions", "--save-hf DIR"]);
    no(&format!("{new} --vocab-size 64 --tokenizer none.json --save-gguf a.gguf"), &["tokenizer"]);
    let text = fs::read_to_string(dir.path("base/tokenizer.json")).unwrap();
    fs::write(dir.path("base/tokenizer.json"), text.replace("{1,3}", "{1,2}")).unwrap();
    no("--pretrain base --save-gguf a.gguf", &["tokenizer", "pre_tokenizer", "{1,2}"]);
    fs::write(dir.path("base/tokenizer.json"), text).unwrap();

    // Rotations that the file cannot say, or that llama.cpp would round.
    let config = fs::read_to_string(dir.path("base/config.json")).unwrap();
    let mut other: Value = serde_json::from_str(&config).unwrap();
    for key in ["rope_scaling", "rope_parameters"] {
        other.as_object_mut().unwrap().shift_remove(key);
    }
    let half = other["head_dim"]
        .as_u64()
        .unwrap_or_else(|| other["hidden_size"].as_u64().unwrap() / other["num_attention_heads"].as_u64().unwrap())
        as usize
        / 2;
    for (scaling, what) in [
        (
            json!({"rope_type": "longrope", "short_factor": vec![1.0; half], "long_factor": vec![2.0; half],
            "original_max_position_embeddings": 32}),
            "longrope in a llama model",
        ),
        (
            json!({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "truncate": false}),
            "YaRN with truncate: false",
        ),
    ] {
        other["rope_scaling"] = scaling;
        fs::write(dir.path("base/config.json"), other.to_string()).unwrap();
        no("--pretrain base --save-gguf a.gguf", &["save-gguf", "llama.cpp does not run", what]);
    }
    fs::write(dir.path("base/config.json"), config).unwrap();

    // What is there already.
    for (name, content) in [("old.gguf", &b"GGUF...."[..]), ("notes.txt", b"mine")] {
        fs::write(dir.path(name), content).unwrap();
    }
    no("--pretrain base --save-gguf old.gguf", &["old.gguf", "exists", "--overwrite"]);
    no("--pretrain base --save-gguf notes.txt --overwrite", &["notes.txt", "not a GGUF file", "never overwritten"]);
    no("--pretrain base --save-gguf base", &["base", "directory"]);
    assert_eq!(fs::read(dir.path("old.gguf")).unwrap(), b"GGUF....");
    let mut names: Vec<_> = fs::read_dir(dir.0.path()).unwrap().map(|e| e.unwrap().file_name()).collect();
    names.sort();
    assert_eq!(names, ["base", "notes.txt", "old.gguf"], "nothing is left");
    assert!(run(dir.0.path(), "--nproc-per-node 1 --pretrain base --save-gguf old.gguf --overwrite").status.success());
    assert!(fs::metadata(dir.path("old.gguf")).unwrap().len() > 1000);
}

/// A model that was trained on bytes has them as its vocabulary.
#[test]
fn a_model_of_bytes_needs_no_tokenizer() {
    let dir = Dir::new();
    let found =
        exported(dir.0.path(), "--embed-dim 64 --num-layers 2 --num-heads 2 --nproc-per-node 1 --gguf-type bf16");
    let has = |text: &str| found.windows(text.len()).any(|window| window == text.as_bytes());
    assert!(found.starts_with(b"GGUF") && has("gpt-2") && has("<|endoftext|>") && has("[PAD300]"));
}
