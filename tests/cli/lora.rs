//! LoRA adapters end to end: trained on a base model, saved alone, resumed, merged. The files stay in target/tmp/lora,
//! where `tests/golden/lora.py check` loads them with PEFT.
use crate::common::golden_tensors::Tensors;
use crate::common::runs::unlaunched;
use serde_json::Value;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

fn base() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/pretrained/llama")
}

/// Runs and returns the events of the metrics.
fn run(dir: &Path, model: &Path, args: &[&str]) -> Vec<Value> {
    let Output { status, stderr, .. } = command(dir, model, args).output().unwrap();
    assert!(status.success(), "{}", String::from_utf8_lossy(&stderr));
    let text = fs::read_to_string(dir.join("m.jsonl")).unwrap_or_default();
    text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}
fn refused(dir: &Path, model: &Path, args: &[&str]) -> String {
    let Output { status, stderr, .. } = command(dir, model, args).output().unwrap();
    let text = String::from_utf8_lossy(&stderr).into_owned();
    assert_eq!(status.code(), Some(2), "{text}");
    text
}
fn command(dir: &Path, model: &Path, args: &[&str]) -> Command {
    let mut command = unlaunched(crate::common::binaries::FSDP);
    command.current_dir(dir).arg("--pretrain").arg(model);
    let rest = "--dataset synthetic --max-len 16 --batch-size 2 --warmup-steps 0 --metrics-path m.jsonl --no-sample";
    command.args(rest.split(' ')).args(args);
    command
}
fn evaluated(events: &[Value]) -> f64 {
    events.iter().rev().find(|e| e["event"] == "eval").unwrap()["loss"].as_f64().unwrap()
}
fn names(dir: &Path) -> Vec<String> {
    let mut names: Vec<String> =
        fs::read_dir(dir).unwrap().map(|e| e.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

const TRAIN: [&str; 10] = [
    "--lora-rank",
    "4",
    "--lora-target-modules",
    "q_proj",
    "down_proj",
    "--lora-alpha",
    "8",
    "--lora-dropout",
    "0.1",
    "--lr=0.01",
];

#[test]
fn adapters_are_saved_alone_resumed_and_merged() {
    let dir = Path::new(env!("CARGO_TARGET_TMPDIR")).join("lora");
    let _ = fs::remove_dir_all(&dir);
    fs::create_dir_all(&dir).unwrap();
    let with = |more: &[&'static str]| [&TRAIN[..], more].concat();
    let saving = with(&["--ckpt-dir", "ck", "--save-every", "3", "--max-steps", "6", "--save-adapter", "adapter"]);
    let saving = [&saving[..], &["--save-hf", "final"]].concat();
    let events = run(&dir, &base(), &saving);
    let (all, learns) = (&events[0]["params"], &events[0]["trainable_params"]);
    // Two layers, rank 4: q_proj 36 -> 40, down_proj 44 -> 36.
    assert_eq!(*learns, 2 * 4 * (36 + 40 + 44 + 36), "of {all}");
    let last = dir.join("ck/step-00000006");
    let files = [
        "adapter_config.json",
        "adapter_model.safetensors",
        "config.json",
        "optimizer.safetensors",
        "trainer_state.json",
    ];
    assert_eq!(names(&last), files);
    let exported = [&files[..3], &["flatshard.json"]].concat();
    assert_eq!(names(&dir.join("adapter")), exported);
    assert!(fs::metadata(last.join("adapter_model.safetensors")).unwrap().len() < 16 << 10);
    let config: Value = serde_json::from_slice(&fs::read(dir.join("adapter/adapter_config.json")).unwrap()).unwrap();
    assert_eq!(config["lora_dropout"], 0.1);

    // Interrupted after step 3: bitwise the same.
    let whole = fs::read(last.join("adapter_model.safetensors")).unwrap();
    fs::remove_dir_all(&last).unwrap();
    fs::remove_file(dir.join("ck/latest")).unwrap();
    let resume = with(&["--ckpt-dir", "ck", "--save-every", "3", "--max-steps", "6", "--resume", "auto"]);
    run(&dir, &base(), &resume);
    assert!(fs::read(last.join("adapter_model.safetensors")).unwrap() == whole, "a resumed run ends otherwise");
    let other = refused(&dir, &base(), &[&resume[..], &["--lora-alpha", "9"]].concat());
    assert!(other.contains("alpha 8"), "{other}");

    // The merged model is an ordinary one, with the loss of the adapted model.
    run(&dir, &base(), &["--lora-merge", "adapter", "--save-hf", "merged", "--nproc-per-node", "3"]);
    assert_eq!(names(&dir.join("merged")), ["config.json", "flatshard.json", "model.safetensors"]);
    // What the run itself has exported is this model.
    assert_eq!(names(&dir), ["adapter", "ck", "final", "m.jsonl", "merged"]);
    assert_eq!(names(&dir.join("final")), names(&dir.join("merged")));
    for name in ["config.json", "model.safetensors"] {
        let [ended, merged] = ["final", "merged"].map(|of| fs::read(dir.join(of).join(name)).unwrap());
        assert!(ended == merged, "{name} differs");
    }
    // A merged model is not a base model.
    let copy = dir.join("copy");
    fs::create_dir(&copy).unwrap();
    for name in ["config.json", "model.safetensors"] {
        fs::copy(base().join(name), copy.join(name)).unwrap();
    }
    for (to, flag) in [("copy", "--pretrain"), ("adapter", "--lora-merge")] {
        let text = refused(&dir, &copy, &["--lora-merge", "adapter", "--save-hf", to, "--overwrite"]);
        assert!(text.contains(&format!("--save-hf {to}: is the directory of {flag}")), "{text}");
    }
    let text = refused(&dir, &copy, &["--lora-merge", "adapter", "--save-hf", "merged"]);
    assert!(text.contains("contains a model that this run did not write"), "{text}");
    let text = refused(&dir, Path::new("adapter"), &[]);
    let says = format!("--pretrain {} --lora-merge adapter --save-hf", base().display());
    assert!(text.contains("is a LoRA adapter") && text.contains(&says), "{text}");
    // Text is that of the merged model, whether the adapter is named or is the newest checkpoint.
    let generated = |args: &[&str]| {
        let mut command = unlaunched(crate::common::binaries::FSDP);
        let sampling = ["--generate", "5 6 7", "--max-new-tokens", "8", "--temperature", "0"];
        let Output { status, stdout, stderr } = command.current_dir(&dir).args(args).args(sampling).output().unwrap();
        assert!(status.success(), "{}", String::from_utf8_lossy(&stderr));
        String::from_utf8(stdout).unwrap()
    };
    let model = base().display().to_string();
    let merged = generated(&["--pretrain", "merged"]);
    assert_ne!(merged, generated(&["--pretrain", &model]), "nothing was learnt");
    assert_eq!(merged, generated(&["--pretrain", "adapter"]));
    assert_eq!(merged, generated(&["--pretrain", &model, "--ckpt-dir", "ck", "--nproc-per-node", "3"]));
    let still = ["--max-steps", "1", "--lr", "0"];
    let (with, without) = (evaluated(&run(&dir, Path::new("merged"), &still)), evaluated(&run(&dir, &base(), &still)));
    let beside = evaluated(&events);
    assert!((with - beside).abs() < 1e-5 * beside, "merged {with}, beside {beside}");
    assert!(without - with > 1e-2, "nothing was learnt: {without} before, {with} after");
}

/// Then the base model is held in bf16 only.
/// A run with an adapter begins where the merged model does, and goes on with its rank, alpha and modules.
#[test]
fn an_adapter_is_trained_on() {
    let dir = Path::new(env!("CARGO_TARGET_TMPDIR")).join("lora-on");
    let _ = fs::remove_dir_all(&dir);
    fs::create_dir_all(&dir).unwrap();
    let new = [&TRAIN[..5], &["--lora-alpha=8", "--lr=0.01"]].concat();
    run(&dir, &base(), &[&new[..], &["--max-steps", "3", "--save-adapter", "first"]].concat());
    run(&dir, &base(), &["--lora-merge", "first", "--save-hf", "merged"]);
    let first_loss = |model: &Path, args: &[&str]| {
        let events = run(&dir, model, args);
        events.iter().find(|e| e["event"] == "step" && e["step"] == 1).unwrap()["loss"].as_f64().unwrap()
    };
    let one = [&new[..], &["--max-steps", "1"]].concat();
    let (from_base, from_merged) = (first_loss(&base(), &one), first_loss(&dir.join("merged"), &one));
    let on = ["--lora-adapter", "first", "--lr=0.01", "--max-steps", "2", "--save-adapter", "second"];
    let goes_on = first_loss(&base(), &on);
    assert!((goes_on - from_merged).abs() < 1e-5, "{goes_on} and {from_merged} merged");
    assert!((goes_on - from_base).abs() > 1e-3, "{goes_on} and {from_base} without the adapter");
    let [first, second] = ["first", "second"].map(|name| dir.join(name));
    let config =
        |of: &Path| -> Value { serde_json::from_slice(&fs::read(of.join("adapter_config.json")).unwrap()).unwrap() };
    assert_eq!(config(&second), config(&first));
    let weights = |of: &Path| fs::read(of.join("adapter_model.safetensors")).unwrap();
    assert!(weights(&second) != weights(&first), "nothing was learned");

    // Its dropout is its own, unless one is given.
    let dropping = dir.join("dropping");
    fs::create_dir(&dropping).unwrap();
    fs::copy(first.join("adapter_model.safetensors"), dropping.join("adapter_model.safetensors")).unwrap();
    let text = fs::read_to_string(first.join("adapter_config.json")).unwrap();
    fs::write(dropping.join("adapter_config.json"), text.replace(r#""lora_dropout": 0.0"#, r#""lora_dropout": 0.5"#))
        .unwrap();
    let with =
        |args: &[&'static str]| first_loss(&base(), &[&["--lora-adapter", "dropping"], &on[2..5], args].concat());
    assert!((with(&["--save-adapter", "third"]) - goes_on).abs() > 1e-4, "dropout is ignored");
    assert_eq!(config(&dir.join("third"))["lora_dropout"], 0.5);
    assert_eq!(with(&["--lora-dropout", "0"]), goes_on);

    // It names its model, and the defaults are those of adapters.
    let mut command = unlaunched(crate::common::binaries::FSDP);
    let Output { stdout, stderr, .. } = command
        .current_dir(&dir)
        .args(["--lora-adapter", "first", "--dataset", "synthetic", "--print-config"])
        .output()
        .unwrap();
    let (config, text) = (String::from_utf8_lossy(&stdout), String::from_utf8_lossy(&stderr));
    assert!(config.contains("lr: 0.0002") && config.contains(base().to_str().unwrap()), "{config}{text}");
    let text = refused(&dir, &base(), &["--lora-adapter", "first", "--lora-rank", "8"]);
    assert!(text.contains("--lora-rank 8") && text.contains("has 4: remove the flag"), "{text}");
    let dora = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/adapters/dora");
    let text = refused(&dir, &base(), &["--lora-adapter", dora.to_str().unwrap()]);
    assert!(text.contains("\"use_dora\" is set; such adapters are not trained on"), "{text}");
    let whole = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/adapters/whole");
    let text = refused(&dir, &base(), &["--lora-adapter", whole.to_str().unwrap()]);
    assert!(text.contains("\"lora_bias\" is set; such adapters are not trained on"), "{text}");
}

#[test]
fn in_bf16_the_model_is_the_same_and_a_resumed_run_too() {
    let dir = tempfile::tempdir().unwrap();
    let still = ["--precision", "bf16", "--max-steps", "1", "--lr", "0"];
    let beside = [&["--lora-rank", "4", "--lora-target-modules", "q_proj"][..], &still].concat();
    let losses = [&still[..], &beside].map(|args| evaluated(&run(dir.path(), &base(), args)));
    assert_eq!(losses[0], losses[1], "another model beside adapters that are nothing");

    // Frozen adapters are saved like the others.
    let part = [
        "--precision",
        "bf16",
        "--freeze",
        r"layers\.0\.",
        "--ckpt-dir",
        "ck",
        "--save-every",
        "2",
        "--max-steps",
        "4",
    ];
    let args = [&TRAIN[..], &part].concat();
    run(dir.path(), &base(), &args);
    let (last, file) = (dir.path().join("ck/step-00000004"), "adapter_model.safetensors");
    let whole = fs::read(last.join(file)).unwrap();
    fs::remove_dir_all(&last).unwrap();
    fs::remove_file(dir.path().join("ck/latest")).unwrap();
    run(dir.path(), &base(), &[&args[..], &["--resume", "auto"]].concat());
    assert!(fs::read(last.join(file)).unwrap() == whole, "a resumed run ends otherwise");
}

/// QLoRA. The files stay in target/tmp/lora-4bit.
#[test]
fn adapters_of_4_bit_weights_are_resumed_and_merged_into_the_original_weights() {
    let dir = Path::new(env!("CARGO_TARGET_TMPDIR")).join("lora-4bit");
    let _ = fs::remove_dir_all(&dir);
    fs::create_dir_all(&dir).unwrap();
    let new = "--embed-dim 64 --num-layers 2 --num-heads 4 --num-kv-heads 2 --ff-hidden-dim 192 --vocab-size 64 \
               --dataset synthetic --max-len 16 --max-steps 4 --warmup-steps 0 --lr 0.01 --no-sample --save-hf base";
    let made = unlaunched(crate::common::binaries::FSDP).current_dir(&dir).args(new.split_whitespace()).output();
    assert!(made.unwrap().status.success());
    let base = dir.join("base");
    let saving = ["--ckpt-dir", "ck", "--save-every", "3", "--max-steps", "6"];
    let trained = |more: &[&str]| run(&dir, &base, &[&TRAIN[..], more].concat());
    let in_full = trained(&["--max-steps", "6"]);
    let events =
        trained(&[&saving[..], &["--load-in-4bit", "--save-adapter", "adapter", "--save-hf", "final"]].concat());
    let params = |events: &[Value]| events[0]["planned_bytes"]["params"].as_u64().unwrap();
    // 2 ranks hold half each of two blocks' matrices: 4 bytes a weight, or 4.127 bits and the padding of each matrix.
    let weights = 2 * (2 * 64 * 64 + 2 * 32 * 64 + 3 * 64 * 192) / 2;
    let (saved, at_most) = (params(&in_full) - params(&events), weights as u64 * 4 - weights as u64 * 33 / 64);
    assert!(saved <= at_most && at_most - saved < 2 * 7 * 256 + 1024, "{saved} of {at_most} bytes");
    let [full, packed] = [&in_full, &events].map(|events| evaluated(events));
    assert!(full != packed && (full - packed).abs() < 0.1, "{full} in full, {packed} in 4 bits");

    let (last, file) = (dir.join("ck/step-00000006"), "adapter_model.safetensors");
    let whole = fs::read(last.join(file)).unwrap();
    fs::remove_dir_all(&last).unwrap();
    fs::remove_file(dir.join("ck/latest")).unwrap();
    trained(&[&saving[..], &["--load-in-4bit", "--resume", "auto"]].concat());
    assert!(fs::read(last.join(file)).unwrap() == whole, "a resumed run ends otherwise");
    let adapter = Tensors::read(&last.join(file)).floats;

    run(&dir, &base, &["--lora-merge", "adapter", "--save-hf", "merged"]);
    // The run's own export has the weights that it was trained on, those of the 4 bits, and so its loss.
    let ended = evaluated(&run(&dir, &dir.join("final"), &["--max-steps", "1", "--lr", "0"]));
    assert!((ended - packed).abs() < 1e-5 * packed, "{ended} of the export, {packed} in training");
    let ended = Tensors::read(&dir.join("final/model.safetensors")).floats;
    let [base, merged] = ["base", "merged"].map(|name| Tensors::read(&dir.join(name).join("model.safetensors")).floats);
    let mut changed = 0;
    for (name, w) in &base {
        let part = |which: &str| adapter.get(&format!("base_model.model.{}", name.replace(".weight", which)));
        assert_eq!(name.ends_with("proj.weight"), ended[name] != merged[name], "{name}");
        let (Some(a), Some(b)) = (part(".lora_A.weight"), part(".lora_B.weight")) else {
            assert!(merged[name] == *w, "{name} has no adapter");
            continue;
        };
        let inputs = a.len() / 4;
        for (i, (merged, w)) in merged[name].iter().zip(w).enumerate() {
            let (row, column) = (i / inputs, i % inputs);
            let dot: f32 = (0..4).map(|r| b[4 * row + r] * a[r * inputs + column]).sum();
            assert!((merged - (w + 2.0 * dot)).abs() < 1e-6, "{name}[{i}]: {merged}, {w} and {dot}");
            changed += (merged != w) as usize;
        }
    }
    assert!(changed > 10_000, "{changed} weights changed");
}

#[test]
fn invalid_combinations_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    for (args, words) in [
        (&["--lora-alpha", "8"][..], "--lora-rank"),
        (&["--lora-dropout", "0.1"], "--lora-rank"),
        (&["--lora-rank", "2", "--lora-dropout", "1"], "lora_dropout is 1: it must be in [0, 1)"),
        (&["--lora-rank", "2", "--lora-target-modules", "c_attn"], "q_proj"),
        (&["--load-in-4bit"], "--lora-rank"),
        (&["--lora-rank", "2", "--load-in-4bit"], "whole blocks of 64"),
        (&["--lora-merge", "nowhere"], "--save-hf"),
        (&["--lora-merge", "nowhere", "--save-hf", "out"], "nowhere"),
    ] {
        let text = refused(dir.path(), &base(), args);
        assert!(text.contains(words), "{text}");
    }
    assert_eq!(names(dir.path()), [""; 0]);
}

/// Adapters are of the weights that they were trained on; a run on others would train another model without a word.
#[test]
fn adapters_do_not_resume_on_another_base() {
    let dir = tempfile::tempdir().unwrap();
    let [one, other] = ["one", "other"].map(|name| dir.path().join(name));
    for to in [&one, &other] {
        fs::create_dir(to).unwrap();
        for file in fs::read_dir(base()).unwrap() {
            let file = file.unwrap();
            fs::copy(file.path(), to.join(file.file_name())).unwrap();
        }
    }
    let weights = other.join("model.safetensors");
    let mut bytes = fs::read(&weights).unwrap();
    *bytes.last_mut().unwrap() ^= 1; // an exponent's or a sign's bit
    fs::write(&weights, bytes).unwrap();
    let with = |more: &[&'static str]| [&TRAIN[..], &["--ckpt-dir", "ck"], more].concat();
    run(dir.path(), &one, &with(&["--max-steps", "1"]));
    let text = refused(dir.path(), &other, &with(&["--max-steps", "2", "--resume", "auto"]));
    assert!(text.contains("holds adapters of another model than --pretrain"), "{text}");
    run(dir.path(), &one, &with(&["--max-steps", "2", "--resume", "auto"]));
}

/// Regular expressions and ends of paths adapt the modules that PEFT adapts, and the saved config names these again.
/// `tests/golden/targets.py` asked PEFT.
#[test]
fn targets_are_those_of_peft() {
    let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden");
    let cases: Vec<Value> = serde_json::from_slice(&fs::read(golden.join("targets.json")).unwrap()).unwrap();
    for case in cases {
        let dir = tempfile::tempdir().unwrap();
        let strings = |value: &Value| -> Vec<String> {
            let one = value.as_str().map(|one| vec![one.to_string()]);
            one.unwrap_or_else(|| value.as_array().unwrap().iter().map(|v| v.as_str().unwrap().to_string()).collect())
        };
        let (targets, wanted) = (strings(&case["target"]), strings(&case["modules"]));
        let mut args =
            vec!["--lora-rank", "2", "--max-steps", "1", "--nproc-per-node", "1", "--save-adapter", "adapter"];
        args.push("--lora-target-modules");
        args.extend(targets.iter().map(String::as_str));
        run(dir.path(), &golden.join(case["model"].as_str().unwrap()), &args);
        let adapter = Tensors::read(&dir.path().join("adapter/adapter_model.safetensors")).floats;
        let module =
            |name: &String| name.strip_prefix("base_model.model.")?.strip_suffix(".lora_A.weight").map(String::from);
        let mut adapted: Vec<String> = adapter.keys().filter_map(module).collect();
        adapted.sort();
        assert_eq!(adapted, wanted, "{case}");
        let config = fs::read(dir.path().join("adapter/adapter_config.json")).unwrap();
        let config: Value = serde_json::from_slice(&config).unwrap();
        let saved = strings(&config["target_modules"]);
        let named = |module: &String| saved.iter().any(|target| module.ends_with(&format!(".{target}")));
        assert!(wanted.iter().all(named), "{case}: {saved:?}");
        let whole = targets == saved || wanted.len() % saved.len() == 0 && saved.iter().all(|name| !name.contains('.'));
        assert!(whole || saved.len() == wanted.len(), "{case}: {saved:?}");
    }
    let dir = tempfile::tempdir().unwrap();
    for (targets, part) in [
        (&[r"model\.layers\.9\..*"][..], "matches no module's whole path, such as model.layers.0.self_attn.q_proj"),
        (&["(q_proj"], "not a supported regular expression"),
        (&["q_proj|k_proj", "v_proj"], "must be its only value"),
        (&[".*embed_tokens"], "matches model.embed_tokens, whose adapters are not supported"),
        (&["self_attn.up_proj"], "matches no module's whole path"),
    ] {
        let args = [&["--lora-rank", "2", "--lora-target-modules"][..], targets].concat();
        let text = refused(dir.path(), &base(), &args);
        assert!(text.contains(part), "{targets:?}: {text}");
    }
}
