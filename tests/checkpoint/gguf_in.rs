//! `--pretrain FILE.gguf`: the weights of the gguf package, the ids of the source's tokenizer, and the file itself when
//! it is written back; and what is refused. `tests/golden/gguf_in.py` made the files.
use super::gguf::{READ, TYPES, case, exported, refused, run, tests, write};
use crate::common::runs::{Dir, FSDP};
use flatshard::ckpt::gguf::as_directory;
use flatshard::data::Tokenizer;
use safetensors::SafeTensors;
use serde_json::{Value, json};
use sha2::{Digest, Sha256};
use std::fs;
use std::process::Command;

/// What a file is made of comes out of it again, byte for byte: keys, tokenizer, template and tensors.
#[test]
fn a_file_that_is_read_back_is_the_same_file() {
    let dir = Dir::new();
    for (name, kind) in READ.iter().zip(TYPES.iter().cycle()) {
        write(name, &case(name), &dir.path(name));
        let args = format!("--gguf-type {kind} --nproc-per-node 2 --cache-dir cache");
        let found = exported(dir.0.path(), &format!("--pretrain {name} {args}"));
        fs::write(dir.path("read.gguf"), &found).unwrap();
        // As in the hub's cache: a file under its hash, and a link with its name.
        let _ = fs::remove_file(dir.path("named.gguf"));
        fs::rename(dir.path("read.gguf"), dir.path("blob")).unwrap();
        std::os::unix::fs::symlink("blob", dir.path("named.gguf")).unwrap();
        let again = exported(dir.0.path(), &format!("--pretrain named.gguf {args}"));
        let differs = found.iter().zip(&again).position(|(a, b)| a != b);
        assert!(differs.is_none() && found.len() == again.len(), "{name} {kind}: differs at {differs:?}");
    }
}

/// Every type, rows of heads that are interleaved, experts that are one tensor; over ranks whose shards begin within
/// rows and blocks, and over tp.
#[test]
fn weights_are_those_of_the_gguf_package() {
    let dir = Dir::new();
    let golden = tests().join("golden/gguf_in");
    let hashes: Value = serde_json::from_slice(&fs::read(golden.join("hashes.json")).unwrap()).unwrap();
    for (name, mesh) in [
        ("quants", "--nproc-per-node 3"),
        ("quants", "--nproc-per-node 2 --tp-size 2"),
        ("mixtral", "--nproc-per-node 2 --ep-size 1"),
        ("qwen2moe", "--nproc-per-node 1"),
        ("qwen3moe", "--nproc-per-node 2 --ep-size 2"),
        ("olmoe", "--nproc-per-node 1"),
    ] {
        let file = golden.join(format!("{name}.gguf"));
        let args = format!("--pretrain {} {mesh} --save-hf out --overwrite --cache-dir cache", file.display());
        let out = run(dir.0.path(), &args);
        assert!(out.status.success(), "{name}: {}", String::from_utf8_lossy(&out.stderr));
        let bytes = fs::read(dir.path("out/model.safetensors")).unwrap();
        let saved = SafeTensors::deserialize(&bytes).unwrap();
        let expected = hashes[name].as_object().unwrap();
        assert_eq!(saved.len(), expected.len(), "{name}");
        for (tensor, hash) in expected {
            let data = saved.tensor(tensor).unwrap();
            // The step that changes nothing makes -0 to 0, as the golden values have it.
            let values =
                data.data().as_chunks::<4>().0.iter().flat_map(|x| (f32::from_le_bytes(*x) + 0.0).to_le_bytes());
            let sum = Sha256::digest(values.collect::<Vec<u8>>());
            let hex: String = sum.iter().take(8).map(|byte| format!("{byte:02x}")).collect();
            assert_eq!(*hash, hex, "{name} {mesh}: {tensor}");
        }
    }
}

/// The ids of a corpus are those of the tokenizer that the file was made from, and so are special tokens and templates.
#[test]
fn tokenizers_give_the_ids_of_their_source() {
    const CORPUS: &str = "The year 2026: it's 12345 tokens,\n\n  and don't WE'LL know it? \u{e9}t\u{e9} na\u{ef}ve \u{4f60}\u{597d} \
                          \u{1f600}\tfn main() {  println!(\"{x:?}\"); }   \r\n \u{2581}x e\u{301} <|im_end|>a</s> <s>";
    let dir = Dir::new();
    let others = ["ministral3", "hunyuan", "cohere2"].map(|rules| ("llama3", rules));
    for (name, rules) in READ.map(|name| (name, name)).into_iter().chain(others) {
        let own = case(name);
        write(name, &own, &dir.path(name));
        // As the published tokenizers of these families: a file only has the family's name for this.
        let path = dir.path(name).join("tokenizer.json");
        let mut json: Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
        match name {
            "qwen2" | "qwen3" | "qwen2_moe" | "qwen3_moe" => json["normalizer"] = json!({"type": "NFC"}),
            "gemma2" | "gemma3" => {
                json["normalizer"] = json!({"type": "Replace", "pattern": {"String": " "}, "content": "\u{2581}"});
                json["decoder"]["decoders"].as_array_mut().unwrap().retain(|part| part["type"] != "Strip");
            }
            _ => {}
        }
        if rules != name {
            json["pre_tokenizer"] = case(rules)["replaced"]["pre_tokenizer"].clone();
        }
        fs::write(path, json.to_string()).unwrap();
        exported(dir.0.path(), &format!("--pretrain {name} --nproc-per-node 1"));
        let made = as_directory(&dir.path("model.gguf"), &dir.path("cache")).unwrap();
        // With added_tokens_decoder, transformers does not read added_tokens.json: an id would be missing.
        let path = dir.path(name).join("tokenizer_config.json");
        let mut config: Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
        if let (Some(later), true) =
            (config["added_tokens_decoder"].as_object_mut(), path.with_file_name("added_tokens.json").exists())
        {
            later.insert("420".into(), json!({"content": "<image>"}));
        }
        fs::write(path, config.to_string()).unwrap();
        let [source, read] = [dir.path(name), made].map(|dir| Tokenizer::load(&dir.join("tokenizer.json")).unwrap());
        for text in CORPUS.split_inclusive('\n').chain([CORPUS, "", " ", "  a"]) {
            let ids = |tokenizer: &Tokenizer| {
                let mut ids = Vec::new();
                tokenizer.encode(text, &mut ids).unwrap();
                ids
            };
            let (expected, found) = (ids(&source), ids(&read));
            assert_eq!(expected, found, "{name}: {text:?}");
            assert_eq!(source.spelled(&expected), read.spelled(&found), "{name}: {text:?}");
        }
        assert_eq!((source.bos(), source.eos()), (read.bos(), read.eos()), "{name}");
        assert_eq!(source.affixes(), read.affixes(), "{name}");
        assert_eq!(source.template("default"), read.template("default"), "{name}");
    }
}

/// Adapters on weights in 4 bits, from a file; the adapter names the file as its base.
#[test]
fn adapters_start_from_a_file() {
    let dir = Dir::new();
    fs::copy(tests().join("golden/gguf_in/quants.gguf"), dir.path("base.gguf")).unwrap();
    let ok = |args: &str| {
        let out = run(dir.0.path(), &format!("--nproc-per-node 2 --cache-dir cache {args}"));
        assert!(out.status.success(), "{args}: {}", String::from_utf8_lossy(&out.stderr));
    };
    ok("--pretrain base.gguf --load-in-4bit --lora-rank 2 --save-adapter adapter --save-hf final --lr 0.1");
    let config: Value = serde_json::from_slice(&fs::read(dir.path("adapter/adapter_config.json")).unwrap()).unwrap();
    assert!(config["base_model_name_or_path"].as_str().unwrap().ends_with("base.gguf"), "{config}");
    ok("--pretrain base.gguf --lora-merge adapter --save-hf merged");
    assert!(dir.path("merged/model.safetensors").exists());
}

/// A file has logits' head or none, and never a score.
#[test]
fn a_reward_model_starts_from_a_file() {
    let dir = Dir::new();
    write("llama2", &case("llama2"), &dir.path("llama2"));
    exported(dir.0.path(), "--pretrain llama2 --nproc-per-node 1");
    let row = json!({"prompt": "the", "chosen": " cat", "rejected": " dog"});
    fs::write(dir.path("pairs.jsonl"), format!("{row}\n").repeat(4)).unwrap();
    let args = "--device cpu --nproc-per-node 2 --cache-dir cache --pretrain model.gguf --dataset pairs.jsonl --objective rm \
                --max-len 32 --batch-size 2 --max-steps 1 --no-eval --save-hf judge";
    let out = Command::new(FSDP).args(args.split_whitespace()).current_dir(dir.0.path()).output().unwrap();
    assert!(out.status.success(), "{}", String::from_utf8_lossy(&out.stderr));
    let bytes = fs::read(dir.path("judge/model.safetensors")).unwrap();
    let names = SafeTensors::deserialize(&bytes).unwrap().names().into_iter().map(str::to_string).collect::<Vec<_>>();
    assert!(names.iter().any(|name| name == "score.weight") && !names.iter().any(|name| name == "lm_head.weight"));
}

#[test]
fn files_that_cannot_be_read_are_refused_before_anything_starts() {
    let dir = Dir::new();
    let whole = fs::read(tests().join("golden/gguf_in/quants.gguf")).unwrap();
    let no = |bytes: &[u8], parts: &[&str]| {
        fs::write(dir.path("bad.gguf"), bytes).unwrap();
        refused(dir.0.path(), "--pretrain bad.gguf --cache-dir cache", &[&["bad.gguf"], parts].concat());
    };
    let changed = |from: &str, to: &str| {
        let at = whole.windows(from.len()).position(|window| window == from.as_bytes()).unwrap();
        [&whole[..at], to.as_bytes(), &whole[at + from.len()..]].concat()
    };
    no(&whole[..whole.len() - 1], &["truncated"]);
    no(&whole[..100], &["truncated"]);
    no(b"", &["truncated"]);
    no(b"PK\x03\x04 is another file", &["not a GGUF file"]);
    no(&changed("llama.block_count", "llama.clock_count"), &["block_count", "missing"]);
    no(&changed("llama.rope.freq_base", "llama.rope.freq_vase"), &["llama.rope.freq_vase", "not supported"]);
    no(&changed("blk.1.ffn_up.weight", "blk.1.ffn_xp.weight"), &["blk.1.ffn_xp.weight"]);
    no(
        &changed(
            "general.architecture\x08\0\0\0\x05\0\0\0\0\0\0\0llama",
            "general.architecture\x08\0\0\0\x05\0\0\0\0\0\0\0mamba",
        ),
        &["mamba", "supported"],
    );
    fs::create_dir(dir.path("several")).unwrap();
    fs::write(dir.path("several/a.gguf"), &whole).unwrap();
    refused(dir.0.path(), "--pretrain several", &["several/a.gguf", "name one of them"]);
    fs::write(dir.path("m-00001-of-00002.gguf"), &whole).unwrap();
    refused(dir.0.path(), "--pretrain m-00001-of-00002.gguf --cache-dir cache", &["m-00002-of-00002.gguf", "missing"]);
}
