//! Programs that are given names of a hub.
use super::place::{Place, TOKEN};
use super::server::{Files, commit, files};
use crate::common::runs::{Agent, FSDP, Run, events, launched, unlaunched};
use serde_json::{Value, json};
use std::fs;
use std::path::Path;
use std::process::Stdio;

/// A run of the program in a place of its own.
pub fn run(place: &Place, args: &str, more: &[(&str, &str)]) -> (i32, String) {
    let mut command = command(place, args, more);
    let ended = Run(command.spawn().unwrap()).end();
    (ended.status.code().unwrap_or(-1), ended.stderr)
}

fn command(place: &Place, args: &str, more: &[(&str, &str)]) -> std::process::Command {
    let mut command = unlaunched(FSDP);
    command.current_dir(place.dir.path("")).env("FLATSHARD_CACHE_DIR", place.dir.path("own"));
    command.env("HF_ENDPOINT", &place.server.address).env("HF_HOME", place.dir.path("hf"));
    ["HF_HUB_CACHE", "HF_TOKEN", "HF_HUB_OFFLINE", "HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"]
        .iter()
        .for_each(|name| _ = command.env_remove(name));
    command.envs(more.iter().copied()).args(args.split_whitespace()).stdout(Stdio::piped()).stderr(Stdio::piped());
    command
}

/// A model with bytes as its tokenizer, as a repository.
fn trained(place: &Place) -> Files {
    let tiny = "--dataset synthetic --vocab-size 320 --embed-dim 16 --num-layers 1 --num-heads 2 --max-positions 128 \
                --max-len 16 --max-steps 1 --nproc-per-node 1 --no-eval --no-sample --save-hf model";
    let (code, text) = run(place, tiny, &[]);
    assert_eq!(code, 0, "{text}");
    let read = |name: &str| fs::read(place.dir.path("model").join(name)).unwrap();
    ["config.json", "model.safetensors"].map(|name| (name.to_string(), read(name))).into()
}

const ROW: &str = "{\"question\": \"what?\", \"response\": \"that\"}\n";

/// The seeds' command, and what makes it short.
const COMMAND: &str = "--pretrain meta-llama/Meta-Llama-3-8B --dataset Open-Orca/OpenOrca --input_key question \
                       --output_key response --max-steps 2 --no-sample --no-eval --no-measure-peak --nproc-per-node 2";

fn place_of_the_seeds() -> Place {
    let place = Place::new();
    let files_of_model = trained(&place);
    place.server.put("models", "meta-llama/Meta-Llama-3-8B", &commit('a'), files_of_model);
    let rows = ROW.repeat(40);
    place.server.put(
        "datasets",
        "Open-Orca/OpenOrca",
        &commit('d'),
        files(&[("1M-GPT4-Augmented.jsonl", rows.as_bytes())]),
    );
    place
}

/// As OpenRLHF's commands have it.
#[test]
fn the_split_that_is_evaluated_may_be_a_flag() {
    let place = place_of_the_seeds();
    let rows = ROW.repeat(40);
    let parts = [("train.jsonl", rows.as_bytes()), ("test.jsonl", rows.as_bytes())];
    place.server.put("datasets", "o/rows", &commit('e'), files(&parts));
    let eval = "--pretrain meta-llama/Meta-Llama-3-8B --dataset Open-Orca/OpenOrca --input_key question --output_key \
                response --max-steps 1 --no-sample --nproc-per-node 1 --eval_dataset o/rows";
    let (code, text) = run(&place, &format!("{eval} --eval_split test"), &[]);
    assert!(code == 0 && text.contains("test.jsonl") && !text.contains("train.jsonl"), "{text}");
    let (code, text) = run(&place, &format!("{eval}:train --eval_split test"), &[]);
    assert!(code == 2 && text.contains("--eval-split test: o/rows:train: this name has another split"), "{text}");
    fs::create_dir(place.dir.path("folder")).unwrap();
    for (name, rows) in parts {
        fs::write(place.dir.path("folder").join(name), rows).unwrap();
    }
    let (code, text) = run(&place, &format!("{} --eval.split test", eval.replace("o/rows", "folder")), &[]);
    assert!(code == 0 && text.contains("folder/test.jsonl") && !text.contains("train.jsonl"), "{text}");
    let (code, text) = run(&place, &format!("{} --eval-split dev", eval.replace("o/rows", "folder")), &[]);
    assert!(code == 2 && text.contains("folder has no split dev; it has train, test"), "{text}");
    let both = eval.replace("Open-Orca/OpenOrca", "folder:test").replace("o/rows", "folder:train");
    let (code, text) = run(&place, &both, &[]);
    let data = text.lines().find(|line| line.starts_with("data ")).unwrap_or_default();
    assert!(code == 0 && data.contains("folder/test.jsonl") && !data.contains("train.jsonl"), "{text}");
    let (code, text) = run(&place, &eval.replace("Open-Orca/OpenOrca", "folder:dev"), &[]);
    assert!(code == 2 && text.contains("--dataset folder:dev: folder has no split dev; it has train, test"), "{text}");
}

/// As TRL's commands have it; and the rows of a part of it.
#[test]
fn the_split_that_is_trained_on_may_be_a_flag_and_sliced() {
    let place = place_of_the_seeds();
    let row = |split: &str, i: usize| format!("{{\"text\": \"the {split} row {i}\"}}\n");
    let rows = |split: &str| (0..50).map(|i| row(split, i)).collect::<String>();
    let parts = ["train_sft", "test_sft"].map(|split| (format!("data/{split}-00000-of-00001.jsonl"), rows(split)));
    let parts = parts.each_ref().map(|(name, rows)| (&name[..], rows.as_bytes()));
    place.server.put("datasets", "o/chats", &commit('e'), files(&parts));
    let trl = "--model_name_or_path meta-llama/Meta-Llama-3-8B --dataset_train_split train_sft --dataset_test_split \
               test_sft --max_steps 1 --no-sample --nproc-per-node 1 --metrics-path m.jsonl";
    let (code, text) = run(&place, &format!("{trl} --dataset_name o/chats[:60%]"), &[]);
    assert!(code == 0 && text.contains(" in 30 samples") && text.contains(" in 50 samples"), "{text}");
    let config = &events(&place.dir.path("m.jsonl"), "run")[0]["config"]["data"];
    let named = |split: &str| format!("o/chats@{}:{split}", commit('e'));
    assert_eq!(config["dataset"], json!([format!("{}[:60%]", named("train_sft"))]));
    assert_eq!(config["eval_dataset"], json!([named("test_sft")]));
    let shown =
        Run(command(&place, &format!("{trl} --dataset_name o/chats[-1:] --print-samples 9"), &[]).spawn().unwrap());
    let text = shown.end().stdout;
    assert!(text.matches("\"row\"").count() == 1 && text.contains("the train_sft row 49"), "{text}");
    let (code, text) = run(&place, "--dataset o/chats#500 --max-steps 1", &[]);
    assert!(code == 2 && text.contains("the first rows of a data set are NAME[:ROWS]"), "{text}");
}

#[test]
fn the_command_of_the_seeds_runs_names_its_commits_and_resumes_with_them() {
    let place = place_of_the_seeds();
    let token = [("HF_TOKEN", TOKEN)];
    let (code, text) = run(&place, &format!("{COMMAND} --metrics-path m.jsonl --ckpt-dir ckpt --save-every 1"), &token);
    assert_eq!(code, 0, "{text}");
    let pinned = format!("meta-llama/Meta-Llama-3-8B@{}", commit('a'));
    let data = format!("Open-Orca/OpenOrca@{}", commit('d'));
    assert!(
        text.contains(&format!("hub      pretrain {pinned}\n")) && text.contains(&format!("dataset {data}\n")),
        "{text}"
    );
    assert!(text.contains("download meta-llama/Meta-Llama-3-8B: 2 files") && !text.contains(TOKEN), "{text}");
    let config = &events(&place.dir.path("m.jsonl"), "run")[0]["config"];
    assert_eq!((&config["model"]["pretrain"], &config["data"]["dataset"]), (&json!(pinned), &json!([data])));
    assert!(!fs::read_to_string(place.dir.path("m.jsonl")).unwrap().contains(TOKEN));
    // Both revisions move; the run that continues does not.
    let rows = "{\"question\": \"other\", \"response\": \"rows\"}\n".repeat(50);
    place.server.put("datasets", "Open-Orca/OpenOrca", &commit('e'), files(&[("x.jsonl", rows.as_bytes())]));
    place.server.put("models", "meta-llama/Meta-Llama-3-8B", &commit('b'), files(&[("config.json", b"{}")]));
    let (code, text) =
        run(&place, &format!("{} --ckpt-dir ckpt --resume auto", COMMAND.replace("steps 2", "steps 3")), &[]);
    assert_eq!(code, 0, "{text}");
    assert!(text.contains(&format!("dataset {data}\n")) && text.contains("after step 2"), "{text}");
}

/// Prompts to sample from, and recorded rollouts: names where paths can be.
#[test]
fn prompts_and_rollouts_have_names() {
    let place = Place::new();
    let golden = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/data/golden/parquet/prompts.parquet");
    let rows = fs::read(golden).unwrap();
    place.server.put("datasets", "o/p", &commit('a'), files(&[("data/train-00000-of-00001.parquet", &rows)]));
    let tiny = "--objective grpo --embed-dim 16 --num-layers 1 --num-heads 2 --max-positions 512 --max-len 64 \
                --batch-size 1 --max-steps 2 --nproc-per-node 1 --no-sample --no-shuffle";
    let drawn = "--reward length:2 --group-size 2 --max-new-tokens 2 --skip-bad-rows --record-rollouts r.jsonl";
    let (code, text) = run(&place, &format!("{tiny} {drawn} --dataset o/p --input-key q"), &[]);
    assert_eq!(code, 0, "{text}");
    assert!(text.contains(&format!("dataset o/p@{}\n", commit('a'))), "{text}");
    let recorded = fs::read(place.dir.path("r.jsonl")).unwrap();
    place.server.put("datasets", "o/r", &commit('b'), files(&[("r.jsonl", &recorded)]));
    let (code, text) = run(&place, &format!("{tiny} --rollouts o/r"), &[]);
    assert_eq!(code, 0, "{text}");
    assert!(text.contains(&format!("rollouts o/r@{}\n", commit('b'))), "{text}");
    let (code, text) = run(&place, &format!("{tiny} --rollouts o/none"), &[]);
    assert!(code == 2 && text.contains("--rollouts o/none: "), "{text}");
    // Prompts of a command line, too.
    let mut prompts = command(&place, "--save-hf model", &[]);
    prompts.args(tiny.replace("--objective grpo", "--dataset synthetic").split_whitespace());
    assert!(Run(prompts.spawn().unwrap()).end().status.success());
    let texts = |from: &str| {
        let flags =
            "--pretrain model --max-new-tokens 2 --nproc-per-node 1 --temperature 0 --max-samples 1 --input-key q";
        let mut command = command(&place, flags, &[]);
        command.args(["--generate", from]);
        Run(command.spawn().unwrap()).end()
    };
    let (named, local) = (texts("o/p"), texts(golden));
    assert!(named.status.success() && named.stdout.contains("\"ids\":"), "{}", named.stderr);
    assert_eq!(named.stdout, local.stdout);
    let none = texts("or/none");
    assert!(none.stderr.contains("--generate or/none: ") && none.stderr.contains("as text"), "{}", none.stderr);
    // What is missing is found before a download.
    place.server.seen();
    let (code, text) = run(&place, &format!("{tiny} --pretrain o/m --dataset o/p"), &[]);
    assert!(code == 2 && text.contains("add --reward") && place.server.seen().is_empty(), "{text}");
}

#[test]
fn variables_mean_what_they_mean_to_huggingface_hub() {
    let place = place_of_the_seeds();
    let path = |name: &str| place.dir.path(name).display().to_string();
    fs::write(place.dir.path("secret"), format!("{TOKEN}\n")).unwrap();
    let (secret, cache) = (path("secret"), path("elsewhere"));
    let sends_token = || place.server.seen().iter().all(|request| request.header("authorization").is_some());
    let (code, text) =
        run(&place, &format!("{COMMAND} --print-samples 1"), &[("HF_TOKEN_PATH", &secret), ("HF_HUB_CACHE", &cache)]);
    assert!(code == 0 && sends_token(), "{text}");
    assert!(place.dir.path("elsewhere/models--meta-llama--Meta-Llama-3-8B/refs/main").exists());
    // HF_HOME has a token, and a cache that is empty.
    fs::create_dir_all(place.dir.path("hf")).unwrap();
    fs::copy(place.dir.path("secret"), place.dir.path("hf/token")).unwrap();
    let (code, text) = run(&place, &format!("{COMMAND} --print-samples 1"), &[("HF_HUB_OFFLINE", "yes")]);
    assert!(code == 2 && text.contains("HF_HUB_OFFLINE is set") && place.server.seen().is_empty(), "{text}");
    let (code, text) = run(&place, &format!("{COMMAND} --print-config"), &[]);
    assert!(code == 0 && sends_token() && place.dir.path("hf/hub").exists(), "{text}");
    let (code, text) = run(&place, &format!("{COMMAND} --print-config"), &[("HF_HUB_OFFLINE", "1")]);
    assert!(code == 0 && place.server.seen().is_empty(), "{text}");
    let none = [("HF_HUB_DISABLE_IMPLICIT_TOKEN", "1")];
    run(&place, &format!("{COMMAND} --print-config"), &none);
    assert!(place.server.seen().iter().all(|request| request.header("authorization").is_none()));
}

/// The base model that an adapter names is found on the hub, for an adapter there and for one that was saved here.
#[test]
fn the_base_model_of_an_adapter_is_found_by_its_name() {
    let place = Place::new();
    let golden = |path: &str| fs::read(Path::new("tests/golden/adapters").join(path)).unwrap();
    let base = ["config.json", "model.safetensors"].map(|name| (name.to_string(), golden(&format!("qwen2/{name}"))));
    place.server.put("models", "o/base", &commit('a'), base.into());
    let mut config: Value = serde_json::from_slice(&golden("patterns/adapter_config.json")).unwrap();
    config["base_model_name_or_path"] = json!("o/base");
    let (config, weights) = (config.to_string(), golden("patterns/adapter_model.safetensors"));
    let all = [("adapter_config.json", config.as_bytes()), ("adapter_model.safetensors", &weights)];
    place.server.put("models", "o/adapter", &commit('b'), files(&all));
    fs::create_dir(place.dir.path("saved")).unwrap();
    all.iter().for_each(|(name, content)| fs::write(place.dir.path("saved").join(name), content).unwrap());
    for from in ["o/adapter", "saved"] {
        let mut command = command(&place, "--max-new-tokens 2 --nproc-per-node 1 --temperature 0", &[]);
        command.args(["--pretrain", from, "--generate", "3 5"]);
        let ended = Run(command.spawn().unwrap()).end();
        assert!(ended.status.success(), "{from}: {}", ended.stderr);
        assert!(!ended.stdout.trim().is_empty());
    }
    // An adapter that is trained here names it so, for any machine.
    fs::write(place.dir.path("t.jsonl"), "{\"input_ids\": [1, 2, 3]}\n".repeat(8)).unwrap();
    let tune =
        "--pretrain o/base --dataset t.jsonl --lora-rank 2 --max-steps 1 --no-eval --no-sample --nproc-per-node 1";
    let (code, text) = run(&place, &format!("{tune} --save-adapter tuned"), &[]);
    assert_eq!(code, 0, "{text}");
    let config: Value =
        serde_json::from_slice(&fs::read(place.dir.path("tuned/adapter_config.json")).unwrap()).unwrap();
    assert_eq!([&config["base_model_name_or_path"], &config["revision"]], [&json!("o/base"), &json!(commit('a'))]);
    let (code, text) = run(&place, "--lora-merge tuned --save-hf of-tuned", &[]);
    assert!(code == 0 && text.contains("merge  4 adapters"), "{text}");
    // A merge takes both names.
    let (code, text) = run(&place, "--pretrain o/base --lora-merge o/adapter --save-hf merged", &[]);
    assert!(code == 0 && text.contains("merge  8 adapters"), "{text}");
    // Or finds the base by the adapter's.
    for (from, to) in [("o/adapter", "found"), ("saved", "again")] {
        let (code, text) = run(&place, &format!("--lora-merge {from} --save-hf {to}"), &[]);
        assert!(code == 0 && text.contains("merge  8 adapters"), "{text}");
        let merged = |dir: &str| fs::read(place.dir.path(dir).join("model.safetensors")).unwrap();
        assert_eq!(merged(to), merged("merged"));
    }
    // As GGUF it needs the base model's shapes alone.
    fs::remove_dir_all(place.dir.path("hf")).unwrap();
    place.server.seen();
    for (from, to) in [("o/adapter", "a/one.gguf"), ("saved", "b/one.gguf")] {
        let (code, text) = run(&place, &format!("--export --pretrain {from} --save-gguf {to}"), &[]);
        assert!(code == 0 && text.contains("export"), "{from}: {text}");
    }
    let made = ["a/one.gguf", "b/one.gguf"].map(|name| fs::read(place.dir.path(name)).unwrap());
    assert!(made[0] == made[1] && !made[0].is_empty());
    assert!(
        place
            .server
            .seen()
            .iter()
            .all(|request| !request.path.contains("o/base") || !request.is_get_of("model.safetensors"))
    );
}

#[test]
fn one_process_of_a_host_downloads_and_one_reports_a_failure() {
    let place = place_of_the_seeds();
    let start = |args: &str| {
        let agent = Agent::new();
        let ranks = [0, 1].map(|rank| {
            let mut command = command(&place, args, &[]);
            launched(&mut command, rank, 2, agent.port);
            Run(command.spawn().unwrap())
        });
        ranks.map(Run::end)
    };
    let args = COMMAND.replace("--nproc-per-node 2", "");
    place.server.seen();
    let ranks = start(&args);
    assert!(ranks.iter().all(|rank| rank.status.success()), "{}{}", ranks[0].stderr, ranks[1].stderr);
    let seen = place.server.seen();
    assert_eq!(seen.iter().filter(|request| request.path.starts_with("/api/")).count(), 2, "{seen:?}");
    let ranks = start(&args.replace("Meta-Llama-3-8B", "None"));
    assert!(ranks.iter().all(|rank| rank.status.code() == Some(2)));
    assert!(ranks[0].stderr.contains("--pretrain meta-llama/None: no such file or directory"), "{}", ranks[0].stderr);
    assert_eq!(ranks[1].stderr, "");
}

#[test]
fn samples_and_plans_of_names_need_no_weights_and_weights_of_mixtures_stay() {
    let place = place_of_the_seeds();
    for look in ["--print-samples 1", "--print-config"] {
        let (code, text) = run(&place, &format!("{COMMAND} {look}"), &[]);
        assert_eq!(code, 0, "{look}: {text}");
    }
    assert!(place.server.seen().iter().all(|request| !request.is_get_of("model.safetensors")));
    let mixed = COMMAND.replace("Open-Orca/OpenOrca", "Open-Orca/OpenOrca:train:0.5 own.jsonl:0.5");
    fs::write(place.dir.path("own.jsonl"), ROW.repeat(10)).unwrap();
    let (code, text) = run(&place, &format!("{mixed} --metrics-path m.jsonl"), &[]);
    assert_eq!(code, 0, "{text}");
    let config = &events(&place.dir.path("m.jsonl"), "run")[0]["config"];
    let expected = json!([format!("Open-Orca/OpenOrca@{}:train:0.5", commit('d')), "own.jsonl:0.5"]);
    assert_eq!(config["data"]["dataset"], expected);
    // A shape that the model on the hub does not have.
    let (code, text) = run(&place, &format!("{COMMAND} --num-layers 3"), &[]);
    assert!(code == 2 && text.contains("--num-layers 3"), "{text}");
}
