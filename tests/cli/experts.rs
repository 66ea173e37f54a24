//! Mixtures of experts from the command line: model directories train, resume on other meshes and come back from
//! `--save-hf`; what they do not support is refused with one message.
use crate::common::runs::{Dir, FSDP, Run, events, unlaunched};
use crate::common::sparse_model;
use safetensors::tensor::TensorView;
use safetensors::{Dtype, SafeTensors};
use serde_json::{Value, json};
use std::fs;
use std::process::{Command, Stdio};

const TRAIN: &str = "--dataset rows.jsonl --max-len 16 --batch-size 4 --warmup-steps 0 --lr 0.01 \
                     --lr-scheduler constant --log-every 1 --no-sample";

/// The models of all families, and 120 rows with a constant step between ids.
fn files() -> Dir {
    let dir = Dir::new();
    for family in ["mixtral", "qwen2_moe", "qwen3_moe", "olmoe"] {
        sparse_model::write(family, &dir.path(family));
    }
    let ids = |i: u64| (0..8 + i % 9).map(|t| (7 * (i + t)) % 29).collect::<Vec<_>>();
    let rows: String = (0..120).map(|i| json!({"input_ids": ids(i)}).to_string() + "\n").collect();
    fs::write(dir.path("rows.jsonl"), rows).unwrap();
    dir
}

/// Exit status and stderr of a run in `dir`.
fn run(dir: &Dir, args: &str) -> (i32, String) {
    let mut command = unlaunched(FSDP);
    command.current_dir(dir.path("")).env("FLATSHARD_CACHE_DIR", dir.path("cache")).args(args.split_whitespace());
    let ended = Run(command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()).end();
    (ended.status.code().unwrap_or(-1), ended.stderr)
}
#[track_caller]
fn good(dir: &Dir, args: &str) {
    let (code, text) = run(dir, args);
    assert_eq!(code, 0, "{args}: {text}");
}
fn number(event: &Value, key: &str) -> f64 {
    event[key].as_f64().unwrap_or_else(|| panic!("{key} of {event}"))
}

/// Of every family: the loss falls, and the saved directory, of one file or of several, starts the next run where this
/// one ended.
#[test]
fn model_directories_train_and_come_back() {
    let dir = files();
    for (family, many) in [("mixtral", true), ("qwen2_moe", false), ("qwen3_moe", true), ("olmoe", false)] {
        let train =
            format!("--pretrain {family} {TRAIN} --nproc-per-node 2 --max-steps 40 --router-aux-loss-coef 0.01");
        let size = if many { "20KB" } else { "5GB" };
        let saved = format!("--save-hf {family}-tuned --max-shard-size {size}");
        good(&dir, &format!("{train} {saved} --metrics-path {family}.jsonl"));
        let there = |file: &str| dir.path(&format!("{family}-tuned")).join(file).exists();
        assert_eq!(there("model.safetensors.index.json"), many, "{family}");
        assert_eq!(there("model.safetensors"), !many, "{family}");
        let steps = events(&dir.path(&format!("{family}.jsonl")), "step");
        let (first, last) = (&steps[0], steps.last().unwrap());
        assert!(number(last, "loss") < 0.7 * number(first, "loss"), "{family}: {first} {last}");
        for step in &steps {
            // Perfectly even use gives top_k, and 1.
            assert!(number(step, "aux_loss") > 1.9 && number(step, "expert_load_max") >= 1.0, "{family}: {step}");
        }
        let again = format!("--pretrain {family}-tuned {TRAIN} --nproc-per-node 1 --max-steps 1 --lr 0");
        good(&dir, &format!("{again} --metrics-path {family}-again.jsonl"));
        let loss = |name: &str| number(events(&dir.path(name), "eval").last().unwrap(), "loss");
        let (then, now) = (loss(&format!("{family}.jsonl")), loss(&format!("{family}-again.jsonl")));
        assert!((then / now - 1.0).abs() < 2e-6, "{family}: {then} and {now}");
        // Every key that transformers writes about experts is in the saved config.
        let read = |name: &str| -> Value {
            serde_json::from_slice(&fs::read(dir.path(name).join("config.json")).unwrap()).unwrap()
        };
        let (theirs, ours) = (read(family), read(&format!("{family}-tuned")));
        for key in ["num_experts_per_tok", "norm_topk_prob", "moe_intermediate_size", "mlp_only_layers", "model_type"] {
            let optional = theirs.get(key).is_some() && ours.get(key).is_some();
            assert!(!optional || theirs[key] == ours[key], "{family}: {key}: {} and {}", theirs[key], ours[key]);
        }
    }
}

/// A model from scratch is a Mixtral, whose config keeps the factor of the load-balancing loss.
#[test]
fn a_model_from_scratch_is_a_mixtral() {
    let dir = files();
    let scratch = "--embed-dim 16 --num-layers 2 --num-heads 2 --vocab-size 32 --num-experts 5 --ff-hidden-dim 12";
    for (flags, per_token, factor) in [("", 2, 0.01), ("--num-experts-per-tok 3 --router-aux-loss-coef 0.5", 3, 0.5)] {
        let name = format!("scratch-{per_token}");
        let made = format!("{scratch} {TRAIN} {flags} --nproc-per-node 2 --max-steps 40 --save-hf {name}");
        good(&dir, &format!("{made} --metrics-path {name}.jsonl"));
        let config: Value = serde_json::from_slice(&fs::read(dir.path(&name).join("config.json")).unwrap()).unwrap();
        for (key, want) in [
            ("model_type", json!("mixtral")),
            ("num_local_experts", json!(5)),
            ("num_experts_per_tok", json!(per_token)),
            ("intermediate_size", json!(12)),
            ("router_aux_loss_coef", json!(factor)),
            ("output_router_logits", json!(true)),
        ] {
            assert_eq!(config[key], want, "{key}");
        }
        let steps = events(&dir.path(&format!("{name}.jsonl")), "step");
        let (first, last) = (&steps[0], steps.last().unwrap());
        assert!(number(last, "loss") < 0.8 * number(first, "loss"), "{first} {last}");
        good(
            &dir,
            &format!("--pretrain {name} {TRAIN} --nproc-per-node 1 --max-steps 1 --lr 0 --metrics-path again.jsonl"),
        );
        let loss = |name: &str| number(events(&dir.path(name), "eval").last().unwrap(), "loss");
        let (then, now) = (loss(&format!("{name}.jsonl")), loss("again.jsonl"));
        assert!((then / now - 1.0).abs() < 2e-6, "{then} and {now}");
        fs::remove_file(dir.path("again.jsonl")).unwrap();
    }
    // The shipped file, and what a model from scratch cannot be.
    let shipped = concat!(env!("CARGO_MANIFEST_DIR"), "/configs/moe.yaml");
    good(
        &dir,
        &format!("--config {shipped} --max-steps 1 --eval-every 0 --no-eval --no-sample --metrics-path shipped.jsonl"),
    );
    assert!(number(&events(&dir.path("shipped.jsonl"), "step")[0], "aux_loss") > 1.9);
    for (flags, part) in [
        ("--num-experts 0", "num_experts is 0: it must be at least 1"),
        ("--num-experts 70000", "num_experts is 70000: it must be at most 65536"),
        ("--num-experts 4 --num-experts-per-tok 0", "num_experts_per_tok is 0: it must be at least 1"),
        ("--num-experts 4 --num-experts-per-tok 5", "num_experts_per_tok 5 of 4 experts"),
        ("--num-experts 1", "num_experts_per_tok 2 of 1 experts"),
        ("--num-experts-per-tok 1", "the model has no experts"),
        ("--num-experts 4 --arch gpt", "num_experts 4 with arch gpt"),
        ("--num-experts 4 --pretrain olmoe", "--num-experts 4, but the model in olmoe has"),
        ("--num-experts-per-tok 1 --pretrain olmoe", "--num-experts-per-tok 1, but the model in olmoe has"),
    ] {
        let (code, text) = run(&dir, &format!("{TRAIN} {flags}"));
        assert!(code == 2 && text.contains(part) && text.lines().count() == 1, "{flags}: {code}: {text}");
    }
}

/// As if it had never stopped, and up to rounding on another number of ranks.
#[test]
fn a_run_resumes_with_the_same_bits() {
    let dir = files();
    let train = format!("--pretrain qwen2_moe {TRAIN} --router-aux-loss-coef 0.02");
    good(&dir, &format!("{train} --nproc-per-node 2 --max-steps 6 --metrics-path whole.jsonl"));
    good(&dir, &format!("{train} --nproc-per-node 2 --max-steps 3 --ckpt-dir same"));
    for copy in ["other", "shared", "spread"] {
        let copied = Command::new("cp").arg("-r").arg(dir.path("same")).arg(dir.path(copy)).status().unwrap();
        assert!(copied.success());
    }
    let steps = |name: &str| -> Vec<Value> {
        let steps = events(&dir.path(&format!("{name}.jsonl")), "step");
        steps.into_iter().filter(|e| e["step"].as_u64() > Some(3)).collect()
    };
    for (name, ranks) in [
        ("same", "--nproc-per-node 2"),
        ("other", "--nproc-per-node 4 --batch-size 2"),
        ("shared", "--nproc-per-node 4 --batch-size 2 --ep-size 2 --save-every 1 --async-save"),
        ("spread", "--nproc-per-node 4 --batch-size 2 --ep-size 4 --backend zero --zero-stage 3"),
    ] {
        let resumed = "--max-steps 6 --resume auto";
        let train = train.replace("--batch-size 4", if name == "same" { "--batch-size 4" } else { "" });
        good(&dir, &format!("{train} {ranks} {resumed} --ckpt-dir {name} --metrics-path {name}.jsonl"));
        let (whole, ours) = (steps("whole"), steps(name));
        assert_eq!(ours.len(), 3);
        for (a, b) in whole.iter().zip(&ours) {
            for key in ["loss", "grad_norm", "aux_loss", "expert_load_max"] {
                let (a, b) = (number(a, key), number(b, key));
                let equal = if name == "same" { a.to_bits() == b.to_bits() } else { (a / b - 1.0).abs() < 1e-4 };
                assert!(equal, "{name}: {key}: {a} and {b}");
            }
        }
    }
}

/// Of every family, on ranks that share sequences, columns, experts, and all of these: the losses are those of one
/// rank, and what is saved is the same file.
#[test]
fn sequences_columns_and_experts_are_shared_by_ranks() {
    let dir = files();
    let train = format!("{} --max-steps 4 --router-aux-loss-coef 0.1", TRAIN.replace("--batch-size 4", ""));
    for family in ["mixtral", "qwen2_moe", "qwen3_moe", "olmoe"] {
        let meshes = [
            ("one", "--nproc-per-node 1 --batch-size 4"),
            ("sp", "--nproc-per-node 2 --batch-size 4 --ring-attn-size 2"),
            ("tp", "--nproc-per-node 2 --batch-size 4 --tp-size 2"),
            ("ep", "--nproc-per-node 2 --batch-size 2 --ep-size 2"),
            ("all", "--nproc-per-node 8 --batch-size 2 --ring-attn-size 2 --tp-size 2 --ep-size 2"),
        ];
        for (name, flags) in meshes {
            good(&dir, &format!("--pretrain {family} {train} {flags} --metrics-path {family}-{name}.jsonl"));
            good(&dir, &format!("--pretrain {family} {train} {flags} --lr 0 --save-hf {family}-{name}"));
            let steps = |name: &str| events(&dir.path(&format!("{family}-{name}.jsonl")), "step");
            for (a, b) in steps("one").iter().zip(&steps(name)) {
                for key in ["loss", "grad_norm", "aux_loss", "expert_load_max"] {
                    let (x, y) = (number(a, key), number(b, key));
                    assert!((x / y - 1.0).abs() < 1e-4, "{family} on {name}: {key}: {x} and {y}");
                }
            }
            let file = |name: &str| fs::read(dir.path(&format!("{family}-{name}")).join("model.safetensors")).unwrap();
            assert!(file("one") == file(name), "{family} on {name}: other bytes");
        }
    }
}

/// Five experts over two ranks, over four, and whole on each: the same losses, and text generated alike.
#[test]
fn ranks_share_experts_with_the_same_losses() {
    let dir = files();
    let train = format!("--pretrain mixtral {TRAIN} --nproc-per-node 4 --max-steps 8 --router-aux-loss-coef 0.02");
    let train = train.replace("--batch-size 4", "--batch-size 2");
    for ep in [1, 2, 4] {
        good(&dir, &format!("{train} --ep-size {ep} --metrics-path ep{ep}.jsonl --save-hf tuned{ep}"));
        let run = &events(&dir.path(&format!("ep{ep}.jsonl")), "run")[0];
        assert_eq!(run["mesh"]["ep"].as_u64(), (ep > 1).then_some(ep), "{run}");
    }
    let steps = |ep: u64| events(&dir.path(&format!("ep{ep}.jsonl")), "step");
    let one = steps(1);
    for ep in [2, 4] {
        let shared = steps(ep);
        assert_eq!((one.len(), one[0]["loss"].as_f64()), (shared.len(), shared[0]["loss"].as_f64()), "ep {ep}");
        for (a, b) in one.iter().zip(&shared) {
            for (key, most) in [("loss", 2e-6), ("grad_norm", 1e-5), ("aux_loss", 2e-6)] {
                let (a, b) = (number(a, key), number(b, key));
                assert!((a / b - 1.0).abs() < most, "ep {ep}: {key}: {a} and {b}");
            }
        }
        // Experts of other ranks are in the saved model, and nothing else.
        let size = |ep: u64| fs::metadata(dir.path(&format!("tuned{ep}")).join("model.safetensors")).unwrap().len();
        assert_eq!(size(1), size(ep));
    }
}

/// Adapters of experts are saved in the names of transformers' modules, whoever had the experts, resume on another mesh
/// and merge into the model.
#[test]
fn adapters_of_experts_are_saved_resumed_and_merged() {
    let dir = files();
    for (family, expert, kinds) in [
        ("mixtral", "model.layers.1.block_sparse_moe.experts.4.", ["w1", "w2", "w3"]),
        ("qwen2_moe", "model.layers.2.mlp.experts.3.", ["gate_proj", "up_proj", "down_proj"]),
    ] {
        let rows = TRAIN.replace("--batch-size 4 ", "");
        let train = format!(
            "--pretrain {family} {rows} --lora-rank 2 --lora-target-modules all-linear --ckpt-dir {family}-ck --save-every 10 \
             --router-aux-loss-coef 0.01"
        );
        let [four, two] = ["--nproc-per-node 4 --ep-size 2 --batch-size 1", "--nproc-per-node 2 --batch-size 2"];
        good(&dir, &format!("{train} {four} --max-steps 20 --metrics-path {family}-1.jsonl"));
        let rest = format!(
            "{train} {two} --resume auto --max-steps 30 --save-adapter {family}-adapter --save-hf {family}-final"
        );
        good(&dir, &format!("{rest} --metrics-path {family}-2.jsonl"));
        let adapter = dir.path(&format!("{family}-adapter"));
        let config: Value = serde_json::from_slice(&fs::read(adapter.join("adapter_config.json")).unwrap()).unwrap();
        let targets: Vec<&str> =
            config["target_modules"].as_array().unwrap().iter().map(|t| t.as_str().unwrap()).collect();
        // Those that have adapters, by name: PEFT's all-linear would add routers.
        // For PEFT with transformers 5, which needs them for one family.
        let fused = match family {
            "qwen2_moe" => json!(["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]),
            _ => Value::Null,
        };
        assert_eq!(config["target_parameters"], fused, "{family}");
        let both = if family == "qwen2_moe" { json!({r".*\.gate_up_proj": 4}) } else { Value::Null };
        assert_eq!(config["rank_pattern"], both, "{family}");
        let all = ["q_proj", "k_proj", "v_proj", "o_proj"].iter().chain(&kinds);
        assert!(all.clone().all(|name| targets.contains(name)) && targets.len() == all.count(), "{targets:?}");
        let bytes = fs::read(adapter.join("adapter_model.safetensors")).unwrap();
        let tensors = SafeTensors::deserialize(&bytes).unwrap();
        for kind in kinds {
            for matrix in ["lora_A", "lora_B"] {
                let name = format!("base_model.model.{expert}{kind}.{matrix}.weight");
                let shape = tensors.tensor(&name).unwrap().shape().to_vec();
                assert_eq!(shape[usize::from(matrix == "lora_B")], 2, "{name}: {shape:?}");
            }
        }
        assert!(tensors.names().iter().all(|name| name.contains("lora_") && !name.contains("mlp.gate.")));
        let merge = format!("--pretrain {family} --lora-merge {family}-adapter --save-hf {family}-merged");
        good(&dir, &format!("{merge} --nproc-per-node 4 --ep-size 2"));
        let [ended, merged] = ["final", "merged"]
            .map(|of| fs::read(dir.path(&format!("{family}-{of}")).join("model.safetensors")).unwrap());
        assert!(ended == merged, "{family}: the run's own export differs");
        let again = format!("--pretrain {family}-merged {TRAIN} --nproc-per-node 1 --max-steps 1 --lr 0");
        good(&dir, &format!("{again} --metrics-path {family}-again.jsonl"));
        let loss = |name: &str| number(events(&dir.path(name), "eval").last().unwrap(), "loss");
        let [half, then, now] = ["1", "2", "again"].map(|part| loss(&format!("{family}-{part}.jsonl")));
        assert!(then < half && (then / now - 1.0).abs() < 2e-6, "{family}: {half}, {then} and {now}");
        let [gate, up, down] = if family == "mixtral" { ["w1", "w3", "w2"] } else { kinds };
        let partial = |targets: &str| {
            let plan = format!("{train} {two} --max-steps 5 --ckpt-dir {family}-none --print-config");
            run(&dir, &plan.replace("all-linear", targets)).1
        };
        let said = partial(&format!("{gate} {up}"));
        let lost = format!("without {down}: PEFT 0.21 leaves them out");
        assert!(said.contains(&lost) && said.contains(&format!("add {down} to")), "{said}");
        for all in [format!("{gate} {up} {down}"), down.to_string(), "q_proj".into()] {
            assert!(!partial(&all).contains("PEFT"), "{all}");
        }
        let other = format!("{train} {two} --resume auto --max-steps 40").replace("all-linear", "q_proj");
        let (code, text) = run(&dir, &other);
        assert!(code == 2 && text.contains("target_modules"), "{family}: {code}: {text}");
    }
}

#[test]
fn what_experts_do_not_support_is_refused() {
    let dir = files();
    fs::write(dir.path("pairs.jsonl"), "{\"prompt\": \"a\", \"chosen\": \"b\", \"rejected\": \"c\"}\n".repeat(60))
        .unwrap();
    let refused = |args: &str, part: &str| {
        let (code, text) = run(&dir, args);
        assert!(code == 2 && text.contains(part) && text.lines().count() == 1, "{args}: {code}: {text}");
    };
    for (more, part) in [
        ("--lora-rank 2 --lora-target-modules q_proj gate", "target_modules names gate, a router"),
        ("--lora-rank 2 --lora-target-modules all-linear --lora-dropout 0.1", "dropout 0.1 with adapters of experts"),
        ("--lora-rank 2 --load-in-4bit", "load_in_4bit: models with experts are not supported"),
        ("--router-aux-loss-coef -1", "0 or more"),
        ("--ep-size 4", "ep 4 does not divide dp_shard 2"),
        ("--ep-size 2 --strategy ddp", "ep 2 does not divide dp_shard 1"),
        ("--ep-size 2 --sharding NO_SHARD", "ep 2 does not divide dp_shard 1"),
        ("--ep-size 0", "ep_size is 0"),
        ("--freeze experts.0.", "freeze all experts of a block or none"),
    ] {
        refused(&format!("--pretrain olmoe {TRAIN} --nproc-per-node 2 {more}"), part);
    }
    let pairs = TRAIN.replace("rows", "pairs");
    refused(&format!("--pretrain olmoe {pairs} --objective rm"), "transformers has no reward models of olmoe");
    refused(
        &format!("--pretrain mixtral {TRAIN} --batch-size 1 --nproc-per-node 8 --ep-size 8"),
        "ep-size 8 is more than the 5 experts of a block: a rank would have none",
    );
    let config = fs::read_to_string(dir.path("mixtral/config.json")).unwrap();
    let mut config: Value = serde_json::from_str(&config).unwrap();
    config["num_experts_per_tok"] = json!(9);
    fs::write(dir.path("mixtral/config.json"), config.to_string()).unwrap();
    refused(&format!("--pretrain mixtral {TRAIN}"), "num_experts_per_tok 9 of 5 experts");
    // Keys of other families' routers, which transformers does not read for this one either.
    let path = dir.path("qwen3_moe/config.json");
    let text = fs::read_to_string(&path).unwrap();
    let mut config: Value = serde_json::from_str(&text).unwrap();
    (config["n_group"], config["scoring_func"]) = (json!(2), json!("sigmoid"));
    fs::write(&path, config.to_string()).unwrap();
    let (code, said) = run(&dir, &format!("--pretrain qwen3_moe {TRAIN}"));
    assert!(code == 0 && said.contains("without effect: n_group, scoring_func\n"), "{code}: {said}");
    fs::write(&path, text).unwrap();
    // A router that is not there, or holds no weights.
    let path = dir.path("qwen3_moe/model.safetensors");
    let bytes = fs::read(&path).unwrap();
    let router = "model.layers.1.mlp.gate.weight";
    let tensors = SafeTensors::deserialize(&bytes).unwrap();
    let without = || tensors.tensors().into_iter().filter(|(name, _)| name != router);
    fs::write(&path, safetensors::serialize(without(), None).unwrap()).unwrap();
    refused(&format!("--pretrain qwen3_moe {TRAIN}"), router);
    let view = tensors.tensor(router).unwrap();
    let whole = TensorView::new(Dtype::I16, view.shape().to_vec(), view.data()).unwrap();
    let all = without().chain([(router.to_string(), whole)]);
    fs::write(&path, safetensors::serialize(all, None).unwrap()).unwrap();
    refused(&format!("--pretrain qwen3_moe {TRAIN}"), router);
}

/// Muon updates every expert's matrices, and pairs train experts as they train other models.
#[test]
fn muon_and_pairs_train_experts() {
    let dir = files();
    let muon = format!("--pretrain qwen2_moe {TRAIN} --optimizer muon --max-steps 20 --router-aux-loss-coef 0.01");
    for (name, ranks) in [("one", "--nproc-per-node 1"), ("two", "--nproc-per-node 2 --batch-size 2")] {
        let muon = if name == "two" { muon.replace("--batch-size 4", "") } else { muon.clone() };
        good(&dir, &format!("{muon} {ranks} --metrics-path {name}.jsonl"));
    }
    let [one, two] = ["one", "two"].map(|name| events(&dir.path(&format!("{name}.jsonl")), "step"));
    assert!(number(&one[19], "loss") < 0.8 * number(&one[0], "loss"), "{} {}", one[0], one[19]);
    for (a, b) in one.iter().zip(&two).take(3) {
        assert!((number(a, "loss") / number(b, "loss") - 1.0).abs() < 1e-4, "{a} and {b}");
    }

    let shipped = |name: &str| format!("--config {}/configs/{name}.yaml", env!("CARGO_MANIFEST_DIR"));
    let data = concat!(
        "--dataset ",
        env!("CARGO_MANIFEST_DIR"),
        "/configs/pairs.jsonl --eval-dataset ",
        env!("CARGO_MANIFEST_DIR"),
        "/configs/pairs_eval.jsonl"
    );
    let sparse = "--num-experts 4 --ff-hidden-dim 96 --embed-dim 64 --epochs 1 --eval-every epoch --lr 1e-3";
    good(&dir, &format!("{} {data} {sparse} --metrics-path dpo.jsonl", shipped("dpo")));
    let last = |name: &str| events(&dir.path(name), "eval").pop().unwrap();
    assert!(number(&last("dpo.jsonl"), "reward_accuracy") > 0.9, "{}", last("dpo.jsonl"));
    assert!(number(&events(&dir.path("dpo.jsonl"), "step")[0], "aux_loss") > 1.9);
    good(&dir, &format!("{} {data} {sparse} --save-hf scored --metrics-path rm.jsonl", shipped("rm")));
    let then = last("rm.jsonl");
    assert!(number(&then, "accuracy") > 0.9, "{then}");
    let config: Value = serde_json::from_slice(&fs::read(dir.path("scored/config.json")).unwrap()).unwrap();
    assert_eq!(config["architectures"], json!(["MixtralForSequenceClassification"]));
    let again = "--pretrain scored --epochs 1 --max-samples 64 --lr 0";
    good(&dir, &format!("{} {data} {again} --metrics-path again.jsonl", shipped("rm")));
    let now = last("again.jsonl");
    assert!((number(&then, "loss") - number(&now, "loss")).abs() < 1e-5, "{then} and {now}");
}
