//! `experiments plan` from outside: what it prints, what it refuses, and that its recommendation is a valid run_fsdp
//! command line.
use flatshard::run::HelpPage;
use flatshard::run::settings::args;
use flatshard::run::settings::args::Cli;
use flatshard::run::settings::args::Parsed;
use serde_json::Value;
use std::process::Command;

fn plan(flags: &str) -> (i32, String, String) {
    let mut command = Command::new(crate::EXPERIMENTS);
    let out = command.arg("plan").args(flags.split_whitespace()).output().unwrap();
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    (out.status.code().unwrap(), text(&out.stdout), text(&out.stderr))
}
const SMALL: &str = "--embed-dim 1024 --num-layers 8 --num-heads 16 --vocab-size 32000 --max-len 2048 --precision bf16";

fn document(flags: &str) -> Value {
    let (code, out, err) = plan(&format!("{flags} --json"));
    assert_eq!(code, 0, "{err}");
    serde_json::from_str(&out).unwrap()
}
fn strategy<'a>(plan: &'a Value, name: &str) -> &'a Value {
    let all = plan["strategies"].as_array().unwrap();
    all.iter().find(|s| s["strategy"] == name).unwrap_or_else(|| panic!("no {name} in {plan}"))
}

#[test]
fn table_and_json_agree() {
    let flags = format!("--gpus 16 --gpu h100 {SMALL}");
    let (code, text, _) = plan(&flags);
    assert_eq!(code, 0);
    let json = document(&flags);
    let name = json["recommended"].as_str().unwrap();
    assert!(text.contains(&format!("recommended: {name}\n    {}\n", json["command"].as_str().unwrap())), "{text}");
    assert!(text.contains("data-parallel ranks = ") && text.contains("tokens per step"), "{text}");
    assert!(text.contains("model    llama of") && text.contains("machine  16 x h100 (8 per node)"), "{text}");
    for name in ["ddp", "FULL_SHARD", "SHARD_GRAD_OP + checkpointing"] {
        assert!(text.lines().any(|line| line.starts_with(&format!("{name} "))), "{name} in {text}");
        let s = strategy(&json, name);
        let sum: u64 = s["bytes"].as_object().unwrap().values().map(|b| b.as_u64().unwrap()).sum();
        assert_eq!(s["total_bytes"], sum);
        assert!(
            s["step_s"].as_f64() > s["exposed_comm_s"].as_f64() && s["mfu_llm_foundry"].as_f64().unwrap() < 1.0,
            "{s}"
        );
    }
    let saved = |name: &str| strategy(&json, name)["bytes"]["saved"].as_u64().unwrap();
    assert!(saved("FULL_SHARD") > 2 * saved("FULL_SHARD + checkpointing"));
    // Sharded over 16: a sixteenth of parameters and moments, except for padding.
    let held = |name: &str| strategy(&json, name)["bytes"]["optimizer"].as_u64().unwrap() as f64;
    let ratio = held("ddp") / held("FULL_SHARD");
    assert!((ratio / 16.0 - 1.0).abs() < 0.01, "{ratio}");
}

#[test]
fn the_recommendation_is_a_run_fsdp_command_line() {
    for gpus in [2, 16] {
        let json = document(&format!("--gpus {gpus} {SMALL} --lr 1e-4"));
        let words: Vec<String> = json["command"].as_str().unwrap().split(' ').map(str::to_string).collect();
        let program = words.iter().position(|w| w == "run_fsdp").unwrap();
        assert_eq!(words[0] == "torchrun", gpus > 8);
        let Parsed::Run(cli) =
            args::parse::<Cli>(&HelpPage::training("run_fsdp", ""), words[program + 1..].to_vec()).unwrap()
        else {
            panic!("{words:?}")
        };
        assert_eq!((cli.settings.model.embed_dim, cli.settings.optim.lr), (Some(1024), Some(1e-4)));
    }
}

#[test]
fn settings_fixed_by_flags_are_not_varied() {
    let json = document(&format!("--gpus 8 {SMALL} --sharding SHARD_GRAD_OP --no-activation-checkpoint"));
    let all = json["strategies"].as_array().unwrap();
    assert!(all.iter().all(|s| s["strategy"].as_str().unwrap().starts_with("as given")), "{json}");
    assert!(all.iter().all(|s| !s["strategy"].as_str().unwrap().contains("checkpointing")), "{json}");
    let free = document(&format!("--gpus 8 {SMALL} --only SHARD_GRAD_OP"));
    assert_eq!(all[0]["step_s"], strategy(&free, "SHARD_GRAD_OP")["step_s"]);
}

#[test]
fn a_model_that_fits_nowhere_is_reported_with_status_1() {
    let (code, text, _) =
        plan("--gpus 2 --embed-dim 16384 --num-layers 80 --num-heads 128 --max-len 4096 --precision bf16");
    assert_eq!(code, 1);
    assert!(text.contains("nothing fits: the smallest needs"), "{text}");
    // A budget is what has to be fit into, whatever the GPU has.
    let (code, text, _) = plan(&format!("--gpus 2 {SMALL} --memory-budget 1KB"));
    assert!(code == 1 && text.contains("raise --memory-budget") && !text.contains("recommended"), "{text}");
}

/// People plan before they download hundreds of gigabytes.
#[test]
fn a_config_json_without_weights_is_enough() {
    let dir = tempfile::TempDir::new().unwrap();
    let flags = format!("--gpus 8 --max-len 64 --only FULL_SHARD --pretrain {}", dir.path().display());
    let (code, _, said) = plan(&flags);
    assert!(code == 2 && said.contains("is not a model directory"), "{code} {said}");
    let config = "{\"model_type\": \"llama\", \"hidden_size\": 64, \"intermediate_size\": 96, \"num_hidden_layers\": 2,
        \"num_attention_heads\": 4, \"vocab_size\": 128, \"max_position_embeddings\": 64, \"rms_norm_eps\": 1e-5}";
    std::fs::write(dir.path().join("config.json"), config).unwrap();
    let (code, text, said) = plan(&flags);
    assert!(code == 0 && text.starts_with("model    llama of "), "{code} {text} {said}");
    // Rows are not read: what is planned is what the printed command runs.
    assert!(text.contains(" --batch-size ") && text.contains(" --grad-accum "), "{text}");
    assert_eq!(text.matches("--max-len").count(), 1, "{text}");
}

#[test]
fn what_a_vision_language_model_carries_is_in_the_plan() {
    let tower = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/golden/towers/vl_qwen3");
    let (code, text, said) = plan(&format!("--gpus 8 --max-len 16 --only FULL_SHARD --pretrain {tower}"));
    assert_eq!(code, 0, "{said}");
    assert!(
        text.contains("model    qwen3 of ") && text.contains("\nvision   carried through: 27 tensors of"),
        "{text}"
    );
}

#[test]
fn bad_input_is_refused_with_one_message() {
    let cases = [
        ("", "--gpus is missing"),
        ("--gpus 0", "--gpus 0: it must be 1 to"),
        ("--gpus 12", "12 = 1 x 8 + 4"),
        ("--gpus 8 --gpus-per-node 0", "--gpus-per-node 0: it must be at least 1"),
        ("--gpus 8 --gpu a100 --precision fp8", "on h100 and h200 only; use --precision bf16"),
        ("--gpus 8 --batch-size 100000 --max-len 100000", "a micro-batch has at most 268435456 tokens"),
        ("--gpus 8 --gpu h999", "--gpu h999: unknown GPU; known: a100, h200, h100, b200, 4090, 5090,"),
        ("--gpus 8 --calibrate", "use it with --gpu cpu, not h100"),
        ("--gpus 1 --gpu cpu", "add --calibrate"),
        ("--gpus 4096 --gpu cpu --calibrate --gpus-per-node 4096", "each rank needs a core"),
        ("--gpus 8 --num-heads 7", "embed_dim 256 is not a multiple of num_heads 7"),
        ("--gpus 8 --gpuss 9", "unknown flag --gpuss: the nearest known one is --gpus"),
        ("--gpus 8 --only nothing", "--only nothing: no such strategy; known strategies: ddp,"),
        ("--gpus 8 --pretrain /no/such/model", "/no/such/model"),
    ];
    for (flags, says) in cases {
        let (code, out, err) = plan(flags);
        assert_eq!((code, out.as_str()), (2, ""), "{flags}: {err}");
        assert!(err.contains(says) && err.lines().count() == 1, "{flags}: {err}");
    }
    let (code, out, _) = plan("--help");
    assert!(code == 0 && out.contains("--gpus-per-node") && out.contains("--embed-dim"), "{out}");
}

#[test]
fn a_trace_shows_gathers_overlapping_compute() {
    let dir = tempfile::TempDir::new().unwrap();
    let path = dir.path().join("trace.json");
    let (code, _, err) =
        plan(&format!("--gpus 8 {SMALL} --only FULL_SHARD --no-activation-checkpoint --trace {}", path.display()));
    assert_eq!(code, 0, "{err}");
    let events: Vec<Value> = serde_json::from_str(&std::fs::read_to_string(&path).unwrap()).unwrap();
    let find = |name: &str| events.iter().find(|e| e["name"] == name).unwrap_or_else(|| panic!("no {name}"));
    let span = |e: &Value| (e["ts"].as_f64().unwrap(), e["ts"].as_f64().unwrap() + e["dur"].as_f64().unwrap());
    // Unit 5 is gathered while unit 4 computes: in another row, at the same time as a product.
    let gather = find("gather 5");
    let (from, to) = span(gather);
    let products = events.iter().filter(|e| e["name"] == "gemm");
    assert!(products.clone().any(|e| e["tid"] != gather["tid"] && span(e).0 < to && span(e).1 > from));
    assert!(find("thread_name")["args"]["name"] == "compute" && to > from);
}

/// Prediction and measurement of the same step, on a shared machine: within an order of magnitude.
#[test]
fn a_calibrated_cpu_is_predicted_and_checked() {
    let model = "--embed-dim 128 --num-layers 4 --num-heads 4 --max-len 128 --batch-size 2";
    let json = document(&format!("--gpus 1 --gpu cpu --calibrate --check {model} --only FULL_SHARD"));
    let s = strategy(&json, "FULL_SHARD");
    let (predicted, measured) = (s["step_s"].as_f64().unwrap(), s["measured_step_s"].as_f64().unwrap());
    assert!(predicted > 0.2 * measured && predicted < 5.0 * measured, "{predicted} and {measured}");
    assert!((s["error"].as_f64().unwrap() - (predicted / measured - 1.0)).abs() < 1e-9);
}

/// As docs/memory.md and docs/optimizers.md say, on 8 ranks in bf16.
#[test]
fn smaller_weights_and_states_lower_the_planned_bytes() {
    let model = format!("{SMALL} --num-kv-heads 16 --ff-hidden-dim 2816");
    let bytes = |more: &str| {
        let json = document(&format!("--gpus 8 {model} --only FULL_SHARD --no-activation-checkpoint {more}"));
        move |category: &str| strategy(&json, "FULL_SHARD")["bytes"][category].as_f64().unwrap()
    };
    let near = |a: f64, b: f64, what: &str| assert!((a / b - 1.0).abs() < 2e-3, "{what}: {a} bytes and not {b}");
    // 33 / 64 bytes for each weight of 8 blocks' matrices instead of 2, and 4 for 16,384 of them; two blocks in slots.
    let (in_full, packed) = (bytes("--lora-rank 8"), bytes("--lora-rank 8 --load-in-4bit"));
    let block = (4 * 1024 * 1024 + 3 * 1024 * 2816) as f64;
    let saved = block * (2.0 - 33.0 / 64.0 - 4.0 / 16384.0);
    near(in_full("params") - packed("params"), saved * 8.0 / 8.0, "params");
    near(in_full("slots") - packed("slots"), saved * 2.0, "slots");
    let tile = packed("scratch") - in_full("scratch");
    assert!(tile > 0.0 && tile <= 2.0 * 4_194_304.0, "a tile of {tile} bytes");
    for same in ["grads", "optimizer"] {
        assert_eq!(in_full(same), packed(same), "{same}");
    }
    // Two bytes and 4 for each 256 of them instead of 8; the 17 norms have less than 4,096 elements each.
    let (adamw, eight) = (bytes(""), bytes("--optimizer adamw8bit"));
    let (before, after) = (adamw("optimizer"), eight("optimizer"));
    let (least, norms) = (before * (2.0 + 8.0 / 256.0) / 8.0, 17.0 * 1024.0 * 8.0);
    assert!(after >= 0.999 * least && after <= least + norms, "{after} bytes of {before}, at least {least}");
    for same in ["params", "grads", "slots", "scratch"] {
        assert_eq!(adamw(same), eight(same), "{same}");
    }
}

/// A reference model that is scored before training may be larger than the trained one.
#[test]
fn scoring_a_larger_reference_is_planned() {
    let dir = tempfile::TempDir::new().unwrap();
    let config = "{\"model_type\": \"llama\", \"hidden_size\": 4096, \"intermediate_size\": 8192,
        \"num_hidden_layers\": 16, \"num_attention_heads\": 32, \"num_key_value_heads\": 32, \"vocab_size\": 32000,
        \"max_position_embeddings\": 2048, \"rms_norm_eps\": 1e-5, \"tie_word_embeddings\": false}";
    std::fs::write(dir.path().join("config.json"), config).unwrap();
    std::fs::write(dir.path().join("model.safetensors"), "").unwrap();
    let bytes = |more: &str, category: &str| {
        let json = document(&format!("--gpus 8 {SMALL} --only FULL_SHARD --objective dpo --batch-size 2 {more}"));
        strategy(&json, "FULL_SHARD")["bytes"][category].as_f64().unwrap()
    };
    let larger = format!("--ref-pretrain {} --precompute-ref-logps", dir.path().display());
    let (own, scored) = (bytes("--precompute-ref-logps", "params"), bytes(&larger, "params"));
    // Two bytes a parameter in bf16, over 8 ranks; norms are less than a thousandth.
    let reference = 2.0 * (2u64 * 32000 * 4096 + 16 * (4 * 4096 * 4096 + 3 * 4096 * 8192)) as f64 / 8.0;
    assert!(own < 0.9 * reference && (scored / reference - 1.0).abs() < 1e-3, "{own} and {scored}, not {reference}");
    assert_eq!(bytes(&larger, "optimizer"), bytes("--precompute-ref-logps", "optimizer"));
}
