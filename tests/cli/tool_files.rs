//! `--config` with files of Axolotl, LLaMA-Factory, torchtitan and DeepSpeed: each is read as our settings or refused
//! key by key, and notes about its keys are one line. Never tests single keys (spellings.rs does).
use crate::common::binaries::FLATSHARD;
use crate::common::runs::{Dir, FSDP, unlaunched};
use serde_json::{Value, json};
use std::fs;
use std::process::Output;

/// A directory with a model of bytes, rows of each kind, and a chat template.
pub fn work() -> Dir {
    let dir = Dir::new();
    let tiny = "--dataset synthetic --nproc-per-node 1 --embed-dim 16 --num-layers 1 --num-heads 2 --ff-hidden-dim 16 \
                --max-len 16 --max-positions 1024 --batch-size 1 --max-steps 1 --no-eval --no-sample --save-hf model";
    let out = ran(&dir, FSDP, tiny);
    assert!(out.status.success(), "{}", String::from_utf8_lossy(&out.stderr));
    let rows = |row: Value| format!("{row}\n").repeat(40);
    let said = |role: &str, text: &str| json!({"role": role, "content": text});
    let (ask, answer) = (said("user", "a"), said("assistant", "b"));
    fs::write(dir.path("alpaca.jsonl"), rows(json!({"instruction": "a", "input": "", "output": "b"}))).unwrap();
    fs::write(dir.path("chats.jsonl"), rows(json!({"talk": [&ask, &answer]}))).unwrap();
    fs::write(
        dir.path("pairs.jsonl"),
        rows(json!({"talk": [&ask], "chosen": &answer, "rejected": said("assistant", "c")})),
    )
    .unwrap();
    let template = "{% for m in messages %}{{ m.role }}: {{ m.content }}{{ eos_token }}{% endfor %}";
    fs::write(dir.path("chat.jinja"), template).unwrap();
    dir
}

pub fn ran(dir: &Dir, program: &str, args: &str) -> Output {
    let mut command = unlaunched(program);
    command.current_dir(dir.0.path()).env("FLATSHARD_CACHE_DIR", dir.path("cache"));
    command.args(args.split_whitespace()).output().unwrap()
}

/// The resolved settings of `file` with this text, and the notes about them.
#[track_caller]
pub fn plan(dir: &Dir, file: &str, text: &str, flags: &str) -> (Value, String) {
    fs::write(dir.path(file), text).unwrap();
    let out = ran(dir, FLATSHARD, &format!("train {file} --print-config --nproc-per-node 1 {flags}"));
    let stderr = String::from_utf8(out.stderr).unwrap();
    assert!(out.status.success(), "{text}: {stderr}");
    (serde_saphyr::from_str(&String::from_utf8(out.stdout).unwrap()).unwrap(), stderr)
}

#[track_caller]
pub fn refused(dir: &Dir, file: &str, text: &str, words: &[&str]) {
    fs::write(dir.path(file), text).unwrap();
    let out = ran(dir, FLATSHARD, &format!("train {file} --nproc-per-node 1"));
    let stderr = String::from_utf8(out.stderr).unwrap();
    assert_eq!(out.status.code(), Some(2), "{text}: {stderr}");
    for word in words.iter().chain(&[file]) {
        assert!(stderr.contains(word), "{text}: no {word:?} in: {stderr}");
    }
}

#[track_caller]
pub fn has(settings: &Value, expected: &[(&str, Value)]) {
    for (at, value) in expected {
        assert_eq!(settings.pointer(&format!("/{}", at.replace('.', "/"))), Some(value), "{at}");
    }
}

pub const AXOLOTL: &str = "
base_model: model
model_type: LlamaForCausalLM
tokenizer_type: AutoTokenizer
load_in_8bit: false
load_in_4bit: true
datasets:
  - path: alpaca.jsonl
    type: alpaca
dataset_prepared_path: prepared
val_set_size: 0.2
output_dir: out
adapter: qlora
lora_model_dir:
sequence_len: 512
sample_packing: true
pad_to_sequence_len: true
lora_r: 4
lora_alpha: 8
lora_target_linear: true
wandb_project:
wandb_watch:
gradient_accumulation_steps: 1
micro_batch_size: 1
num_epochs: 2
optimizer: adamw_bnb_8bit
lr_scheduler: cosine
learning_rate: 0.002
train_on_inputs: false
bf16: auto
fp16:
tf32: false
gradient_checkpointing: true
gradient_checkpointing_kwargs: {use_reentrant: false}
logging_steps: 1
flash_attention: true
warmup_steps: 0.1
evals_per_epoch: 2
saves_per_epoch: 1
weight_decay: 0.0
special_tokens:
  pad_token: <pad>
";

#[test]
fn axolotl_trains_and_its_notes_are_one_line() {
    let dir = work();
    let (read, said) = plan(&dir, "ax.yml", AXOLOTL, "");
    let expected = [
        ("model.pretrain", json!("model")),
        ("data.dataset", json!(["alpaca.jsonl"])),
        ("data.held_out", json!(0.2)),
        ("data.apply_chat_template", json!(false)),
        ("data.packing_samples", json!(true)),
        ("lora.rank", json!(4)),
        ("lora.target_modules", json!(["all-linear"])),
        ("lora.load_in_4bit", json!(true)),
        ("optim.optimizer", json!("adamw8bit")),
        ("precision.precision", json!("bf16")),
        ("fsdp.activation_checkpoint", json!(true)),
        ("checkpoint.ckpt_dir", json!("out")),
    ];
    has(&read, &expected);
    let about: Vec<&str> = said.lines().filter(|line| line.contains("ax.yml")).collect();
    assert!(matches!(about[..], [one] if one.contains("--verbose lists them")), "{about:?}");
    let (_, all) = plan(&dir, "ax.yml", AXOLOTL, "--verbose");
    for note in ["--micro_batch_size is read as --batch-size", "--model_type LlamaForCausalLM has no effect here"] {
        assert!(all.contains(note), "{all}");
    }
    let out = ran(&dir, FLATSHARD, "train ax.yml --nproc-per-node 1");
    let text = String::from_utf8_lossy(&out.stderr);
    // The final model has the adapters merged; checkpoints have them alone.
    let saved = ["out/model/model.safetensors", "out/step-00000022/adapter_model.safetensors"];
    assert!(out.status.success() && saved.iter().all(|file| dir.path(file).exists()), "{text}");
    assert_eq!(text.matches("\neval  step").count(), 5, "before training, and twice an epoch: {text}");
}

#[test]
fn pairs_of_keys_that_other_tools_accept() {
    let dir = work();
    let none = AXOLOTL.replace("val_set_size: 0.2", "val_set_size: 0.0");
    let classes =
        ["axolotl.integrations.liger.LigerPlugin", "axolotl.integrations.cut_cross_entropy.CutCrossEntropyPlugin"];
    let plugins = format!("plugins:\n  - {}\n  - {}\n", classes[0], classes[1]);
    let (read, said) = plan(&dir, "ax.yml", &format!("{none}{plugins}"), "--verbose");
    has(&read, &[("run.eval", json!(false))]);
    assert!(said.contains("--evals_per_epoch 2 has no effect here"), "{said}");
    assert!(classes.iter().all(|class| said.contains(&format!("plugins: {class} has no effect here"))), "{said}");
    let other = format!("{none}{plugins}  - axolotl.integrations.kd.KDPlugin\n");
    refused(&dir, "ax.yml", &other, &["axolotl.integrations.kd.KDPlugin", "no Python classes"]);
    // Rows of their own are evaluated.
    let (read, said) = plan(&dir, "ax.yml", &format!("{none}test_datasets: [alpaca.jsonl]\n"), "--verbose");
    has(&read, &[("data.eval_dataset", json!(["alpaca.jsonl"])), ("run.eval", json!(true))]);
    assert!(said.contains("val_set_size: 0.0 has no effect here"), "{said}");
    let named = AXOLOTL.replace("path: alpaca.jsonl", "path: o/n\n    name: main\n    split: test");
    fs::write(dir.path("ax.yml"), named).unwrap();
    let out = ran(&dir, FLATSHARD, "train ax.yml");
    assert!(String::from_utf8_lossy(&out.stderr).contains("--dataset o/n/main:test: "), "a name of the hub");
    let accelerate = "
model: model
dataset: alpaca.jsonl
distributed_type: MULTI_CPU
gpu_ids: all
deepspeed_config: {deepspeed_multinode_launcher: standard}
parallelism_config: {parallelism_config_tp_size: 1, parallelism_config_dp_shard_size: 1}
lr_scheduler_type: cosine_with_min_lr
lr_scheduler_kwargs: {min_lr_rate: 0.1}
num_train_epochs: 0.5
eval_steps: 0.5
";
    let (read, _) = plan(&dir, "acc.yaml", accelerate, "");
    has(&read, &[("optim.min_lr_ratio", json!(0.1)), ("parallel.tp_size", json!(1)), ("run.epochs", json!(0.5))]);
    let (whole, _) = plan(&dir, "acc.yaml", &accelerate.replace("0.5", "1"), "");
    let steps = |read: &Value, at: &str| read.pointer(at).and_then(Value::as_u64).unwrap();
    let (half, all) = (steps(&read, "/run/max_steps"), steps(&whole, "/run/max_steps"));
    assert_eq!((half, steps(&read, "/run/eval_every")), (all.div_ceil(2), half.div_ceil(2)));
    refused(&dir, "acc.yaml", &accelerate.replace("ids: all", "ids: '0,1'"), &["gpu_ids", "CUDA_VISIBLE_DEVICES"]);
    // As transformers' Trainer takes them, from a file or as text.
    let fsdp =
        json!({"backward_prefetch": "backward_pre", "activation_checkpointing": true, "reshard_after_forward": false});
    fs::write(dir.path("fsdp.json"), fsdp.to_string()).unwrap();
    let plain = "model: model\ndataset: alpaca.jsonl\n";
    for given in ["fsdp.json".to_string(), fsdp.to_string()] {
        let (read, _) = plan(&dir, "plain.yaml", plain, &format!("--fsdp_config {given}"));
        has(&read, &[("fsdp.sharding", json!("SHARD_GRAD_OP")), ("fsdp.activation_checkpoint", json!(true))]);
    }
    let (read, _) = plan(&dir, "plain.yaml", &format!("{plain}fsdp_config: {{forward_prefetch: 'true'}}\n"), "");
    has(&read, &[("fsdp.forward_prefetch", json!(true))]);
    // The Trainer's constant has no warmup, and of two lengths of it one may be 0.
    for (keys, steps) in [
        ("lr_scheduler_type: constant\nwarmup_steps: 5\nwarmup_ratio: 0.5", 0),
        ("warmup_steps: 0\nwarmup_ratio: 0.5", 4),
        ("warmup_steps: 3\nwarmup_ratio: 0.0", 3),
    ] {
        let (read, _) = plan(&dir, "plain.yaml", &format!("{plain}max_steps: 8\n{keys}\n"), "");
        has(&read, &[("optim.warmup_steps", json!(steps))]);
    }
    fs::write(dir.path("fsdp.json"), "{\"min_params\": 3}").unwrap();
    fs::write(dir.path("plain.yaml"), plain).unwrap();
    let out = ran(&dir, FLATSHARD, "train plain.yaml --fsdp_config fsdp.json");
    let text = String::from_utf8_lossy(&out.stderr);
    assert!(out.status.code() == Some(2) && text.contains("unknown key fsdp_config.min_params"), "{text}");
}

#[test]
fn axolotl_chats_and_pairs() {
    let dir = work();
    let chat =
        "- path: chats.jsonl\n    type: chat_template\n    field_messages: talk\n    roles: {user: [user, human]}";
    let chat = AXOLOTL.replace("- path: alpaca.jsonl\n    type: alpaca", chat) + "chat_template: llama3\n";
    let (read, _) = plan(&dir, "ax.yml", &chat, "--tokenizer-chat-template chat.jinja");
    has(&read, &[("data.input_key", json!("talk")), ("data.multiturn", json!(true))]);
    // The text of a template is used unless another one is named; tokens are those of the tokenizer.
    let jinja = "{% for m in messages %}{{ m.role }}: {{ m.content }}.{% endfor %}";
    let text = format!("chat_template_jinja: '{jinja}'\n");
    let (read, _) = plan(&dir, "ax.yml", &chat.replace("chat_template: llama3\n", &text), "");
    has(&read, &[("data.tokenizer_chat_template", json!(jinja))]);
    let (_, said) = plan(&dir, "ax.yml", &(chat.clone() + &text), "--tokenizer-chat-template chat.jinja --verbose");
    assert!(said.contains("chat_template_jinja has no effect here: chat_template names another"), "{said}");
    let other = chat.replace("pad_token: <pad>", "eos_token: <pad>");
    fs::write(dir.path("ax.yml"), other).unwrap();
    let out = ran(&dir, FLATSHARD, "train ax.yml --tokenizer-chat-template chat.jinja --nproc-per-node 1");
    let said = String::from_utf8_lossy(&out.stderr);
    assert!(out.status.code() == Some(2) && said.contains("eos_token=<pad>: the tokenizer bytes has none"), "{said}");
    let pairs = "- path: pairs.jsonl\n    type: chat_template.default\n    field_messages: talk";
    let pairs = AXOLOTL.replace("- path: alpaca.jsonl\n    type: alpaca", pairs) + "rl: dpo\nrl_beta: 0.3\n";
    let pairs = pairs.replace("sample_packing: true", "sample_packing: false");
    let (read, _) = plan(&dir, "ax.yml", &pairs, "--tokenizer-chat-template chat.jinja");
    has(&read, &[("objective.objective", json!("dpo")), ("objective.beta", json!(0.3))]);
    has(&read, &[("objective.prompt_key", json!("talk"))]);
    let named = pairs.replace("type: chat_template.default\n    field_messages: talk", "type: llama3.prompt_pairs");
    let asks = r#"{"prompt": "a", "chosen": "b", "rejected": "c"}"#;
    fs::write(dir.path("asks.jsonl"), format!("{asks}\n").repeat(40)).unwrap();
    fs::write(dir.path("ax.yml"), named.replace("pairs.jsonl", "asks.jsonl")).unwrap();
    let out = ran(&dir, FLATSHARD, "train ax.yml --print-samples 1 --nproc-per-node 1");
    let text = String::from_utf8_lossy(&out.stdout);
    let turn =
        r"<|start_header_id|>user<|end_header_id|>\n\na<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n";
    assert!(text.contains(turn), "{text}{}", String::from_utf8_lossy(&out.stderr));
    // Keys of its templates that ask for nothing, and those that change no result.
    let more = "gptq_groupsize:\ninvented: false\nothers: []\nprocessor_type: AutoProcessor\neot_tokens: [<|im_end|>]\n\
                tiled_mlp: true\nexpert_parallel_size: 1\ntensor_parallel_size: 1\n";
    let (read, said) = plan(&dir, "ax.yml", &format!("{AXOLOTL}{more}"), "--verbose");
    has(&read, &[("parallel.tp_size", json!(1))]);
    for part in
        ["invented: false has no effect here", "others: [] has no effect", "eot_tokens has no effect here: a turn"]
    {
        assert!(said.contains(part), "{said}");
    }
    // All at once, whoever finds them.
    let faulty =
        AXOLOTL.replace("type: alpaca", "type: oasst") + "invented: 1\nothers: 2\nlora_modules_to_save: [lm_head]\n";
    let faults =
        ["datasets[0].type is \"oasst\"", "unknown key invented", "unknown key others", "lora_modules_to_save lm_head"];
    refused(&dir, "ax.yml", &faulty, &faults);
    let steps = AXOLOTL.replace("fp16:", "max_steps: 50\nfp16:");
    let (read, said) = plan(&dir, "ax.yml", &steps, "--verbose");
    has(&read, &[("run.max_steps", json!(50))]);
    assert!(said.contains("--num_epochs 2 has no effect here: --max_steps overrides it"), "{said}");
    refused(&dir, "ax.yml", &format!("{AXOLOTL}eot_tokens: [</think>]\n"), &["eot_tokens", "a turn ends where"]);
    // Its cosine ends at a ratio, and all linear layers come with those that it names.
    let ratio = AXOLOTL.replace("fp16:", "cosine_min_lr_ratio: 0.1\nlora_target_modules: [q_proj]\nfp16:");
    let (read, said) = plan(&dir, "ax.yml", &ratio, "--verbose");
    has(&read, &[("optim.lr_scheduler", json!("cosine_with_min_lr")), ("optim.min_lr_ratio", json!(0.1))]);
    has(&read, &[("lora.target_modules", json!(["all-linear"]))]);
    assert!(said.contains("lora_target_modules has no effect here: lora_target_linear adapts"), "{said}");
    let constant = AXOLOTL.replace("lr_scheduler: cosine", "lr_scheduler: constant").replace("warmup_steps: 0.1\n", "");
    let (read, _) = plan(&dir, "ax.yml", &constant, "");
    has(&read, &[("optim.lr_scheduler", json!("constant")), ("optim.warmup_steps", json!(0))]);
    let fsdp = AXOLOTL.replace(
        "gradient_checkpointing: true",
        "gradient_checkpointing: false\nfsdp_version: 2\nfsdp_config: {activation_checkpointing: true}",
    );
    let (read, _) =
        plan(&dir, "ax.yml", &fsdp.replace("gradient_checkpointing_kwargs: {use_reentrant: false}\n", ""), "");
    has(&read, &[("fsdp.activation_checkpoint", json!(true))]);
    // Its pretraining data is joined and cut into full sequences.
    fs::write(dir.path("texts.jsonl"), "{\"text\": \"a long text, and more of it\"}\n".repeat(400)).unwrap();
    let texts =
        AXOLOTL.replace("datasets:\n  - path: alpaca.jsonl\n    type: alpaca", "pretraining_dataset: texts.jsonl");
    let (read, said) = plan(&dir, "ax.yml", &texts, "--verbose");
    has(&read, &[("data.join_rows", json!(true)), ("data.packing_samples", json!(false))]);
    assert!(said.contains("sample_packing has no effect here: the texts are joined"), "{said}");
}

#[test]
fn what_has_no_equivalent_is_refused_key_by_key() {
    let dir = work();
    let two =
        AXOLOTL.replace("lora_model_dir:", "lora_modules_to_save: [lm_head]").replace("adamw_bnb_8bit", "adopt_adamw");
    let none = AXOLOTL.replace("adapter: qlora", "adapter: lora").replace("lora_r: 4\n", "");
    refused(&dir, "ax.yml", &none, &["adapter is", "without lora_r"]);
    let verl = "actor_rollout_ref:\n  model:\n    path: m\n";
    refused(&dir, "verl.yaml", verl, &["a file of verl", "actor_rollout_ref.model.path=M"]);
    let torchtune = "tokenizer:\n  _component_: torchtune.models.llama3.llama3_tokenizer\n";
    refused(&dir, "tune.yaml", torchtune, &["a recipe of torchtune", "as flags"]);
    refused(&dir, "ax.yml", &two, &["lora_modules_to_save", "adapters are trained alone", "adopt_adamw"]);
    for (from, to, words) in [
        ("type: alpaca", "type: gpteacher", ["datasets[0].type", "alpaca, chat_template or completion"]),
        ("type: alpaca", "split: train+test", ["datasets[0].split", "a data set of its own"]),
        ("type: alpaca", "shards: 4", ["datasets[0].shards", "has no equivalent"]),
        (
            "type: alpaca",
            "type: chat_template\n    chat_template: chatml\n  - path: more.jsonl\n    type: chat_template",
            ["datasets[0] and datasets[1]", "rendered by one template"],
        ),
        ("fp16:", "excess_length_strategy: drop\nfp16:", ["excess_length_strategy drop", "cut and counted"]),
        ("fp16:", "fp17: true", ["unknown key fp17", "fp16"]),
        ("weight_decay: 0.0", "rl: orpo", ["--rl orpo", "dpo, kto"]),
        ("weight_decay: 0.0", "peft_layers_to_transform: [0]", ["peft_layers_to_transform 0", "0 is the first"]),
    ] {
        refused(&dir, "ax.yml", &AXOLOTL.replace(from, to), &words);
    }
}

pub const LLAMA_FACTORY: &str = "
model_name_or_path: model
trust_remote_code: true
stage: sft
do_train: true
finetuning_type: lora
lora_rank: 4
lora_target: all
dataset: asks,more
template: llama3
cutoff_len: 64
overwrite_cache: true
preprocessing_num_workers: 16
output_dir: saves
logging_steps: 1
save_steps: 500
plot_loss: true
overwrite_output_dir: true
per_device_train_batch_size: 8
gradient_accumulation_steps: 1
learning_rate: 1.0e-4
num_train_epochs: 1.0
lr_scheduler_type: cosine
warmup_ratio: 0.1
bf16: true
val_size: 0.1
eval_strategy: steps
eval_steps: 500
";

#[test]
fn llama_factory_finds_its_data_sets_by_name() {
    let dir = work();
    let talks = json!({"file_name": "chats.jsonl", "formatting": "sharegpt", "columns": {"messages": "talk"},
        "tags": {"role_tag": "role", "content_tag": "content", "user_tag": "user", "assistant_tag": "assistant"}});
    let pairs = json!({"file_name": "pairs.jsonl", "formatting": "sharegpt", "ranking": true,
        "columns": {"messages": "talk", "chosen": "chosen", "rejected": "rejected"}});
    let info = json!({"asks": {"file_name": "alpaca.jsonl"}, "more": {"file_name": "alpaca.jsonl"}, "talks": talks,
        "orca": {"file_name": "orca.jsonl", "columns": {"prompt": "question", "response": "response",
            "system": "system_prompt"}},
        "sft": {"file_name": "asked.jsonl"},
        "asked": {"file_name": "asked.jsonl", "ranking": true, "columns": {"prompt": "instruction", "query": "input",
            "chosen": "chosen", "rejected": "rejected"}},
        "pairs": pairs, "hub": {"hf_hub_url": "owner/name", "split": "train_sft"},
        "openai": {"file_name": "chats.jsonl", "formatting": "openai", "columns": {"messages": "talk"},
            "tags": {"role_tag": "role", "content_tag": "content", "observation_tag": "tool"}},
        "drawn": {"file_name": "chats.jsonl", "num_samples": 5}, "shaped": {"file_name": "a.jsonl", "formatting": "x"},
        "odd": {"file_name": "chats.jsonl", "formatting": "sharegpt", "tags": {"who_tag": "who"}}});
    fs::create_dir(dir.path("data")).unwrap();
    fs::write(dir.path("data/dataset_info.json"), info.to_string()).unwrap();
    for file in ["alpaca.jsonl", "chats.jsonl", "pairs.jsonl"] {
        fs::rename(dir.path(file), dir.path("data").join(file)).unwrap();
    }
    let orca = json!({"system_prompt": "Be brief.", "question": "why?", "response": "because"});
    fs::write(dir.path("data/orca.jsonl"), format!("{orca}\n").repeat(40)).unwrap();
    let pair = json!({"instruction": "add", "input": "1 and 2", "chosen": "3", "rejected": "4"});
    fs::write(dir.path("data/asked.jsonl"), format!("{pair}\n").repeat(40)).unwrap();
    let chat = "--tokenizer-chat-template chat.jinja";
    let (read, said) = plan(&dir, "lf.yaml", LLAMA_FACTORY, chat);
    has(&read, &[("data.dataset", json!(["data/alpaca.jsonl", "data/alpaca.jsonl"])), ("data.max_len", json!(64))]);
    // LLaMA-Factory's defaults: twice the rank, and a loss on every answer.
    has(&read, &[("lora.alpha", json!(8.0)), ("data.multiturn", json!(true))]);
    let other = LLAMA_FACTORY.replace("stage: sft", "stage: sft\nmask_history: true\nlora_alpha: 3");
    let (read, _) = plan(&dir, "lf.yaml", &other, chat);
    has(&read, &[("lora.alpha", json!(3.0)), ("data.multiturn", json!(false))]);
    let ranked = LLAMA_FACTORY.replace("finetuning_type: lora", "finetuning_type: full");
    refused(&dir, "lf.yaml", &ranked, &["lora_rank", "finetuning_type full trains all parameters"]);
    let full = LLAMA_FACTORY.replace("finetuning_type: lora\nlora_rank: 4\nlora_target: all", "finetuning_type: full");
    let (read, _) = plan(&dir, "lf.yaml", &full, chat);
    has(&read, &[("data.multiturn", json!(true))]);
    assert_eq!(read.pointer("/lora/alpha"), None);
    assert_eq!(said.lines().filter(|line| line.contains("lf.yaml")).count(), 1, "{said}");
    for talks in ["talks", "openai"] {
        let (read, _) = plan(&dir, "lf.yaml", &LLAMA_FACTORY.replace("asks,more", talks), chat);
        has(&read, &[("data.input_key", json!("talk")), ("data.apply_chat_template", json!(true))]);
    }
    let (read, _) = plan(&dir, "lf.yaml", &LLAMA_FACTORY.replace("asks,more", "orca"), chat);
    has(&read, &[("data.system_key", json!("system_prompt")), ("data.input_key", json!("question"))]);
    // Templates that a tokenizer may not have: ChatML, and none at all.
    for (name, text) in [("chatml", "<|im_start|>user\\nadd\\n1 and 2<|im_end|>"), ("empty", "add\\n1 and 2")] {
        fs::write(
            dir.path("data/asked.jsonl"),
            "{\"instruction\": \"add\", \"input\": \"1 and 2\", \"output\": \"3\"}\n",
        )
        .unwrap();
        let one = LLAMA_FACTORY.replace("asks,more", "sft").replace("template: llama3", &format!("template: {name}"));
        fs::write(dir.path("lf.yaml"), one).unwrap();
        let out = ran(&dir, FLATSHARD, "train lf.yaml --print-samples 1");
        let seen: Value =
            serde_json::from_slice(&out.stdout).unwrap_or_else(|_| panic!("{}", String::from_utf8_lossy(&out.stderr)));
        let seen = seen["text"].as_str().unwrap();
        assert!(seen.starts_with(&text.replace("\\n", "\n")), "{name}: {seen}");
    }
    fs::write(dir.path("data/asked.jsonl"), format!("{pair}\n").repeat(40)).unwrap();
    // A limit of each data set, not of all.
    let limited = LLAMA_FACTORY.replace("cutoff_len", "max_samples: 9\ncutoff_len");
    let (read, _) = plan(&dir, "lf.yaml", &limited, chat);
    let paths: Vec<&str> = read["data"]["dataset"].as_array().unwrap().iter().filter_map(Value::as_str).collect();
    assert!(paths.len() == 2 && paths.iter().all(|path| path.ends_with("[:9]")), "{paths:?}");
    assert!(read["data"]["max_samples"].is_null(), "{read}");
    let texts = "texts.jsonl\npacking: true";
    fs::write(dir.path("texts.jsonl"), "{\"text\": \"a long text, and more of it\"}\n".repeat(400)).unwrap();
    let pt = LLAMA_FACTORY.replace("asks,more", texts).replace("stage: sft", "stage: pt");
    let (read, said) = plan(&dir, "lf.yaml", &pt, "--verbose");
    has(&read, &[("data.pretrain_mode", json!(true)), ("data.join_rows", json!(true))]);
    assert!(said.contains("packing has no effect here: the texts are joined"), "{said}");
    let out = ran(&dir, FLATSHARD, "train lf.yaml --nproc-per-node 1 --max-steps 2 --ckpt-dir joined");
    assert!(out.status.success(), "{}", String::from_utf8_lossy(&out.stderr));
    let (read, _) = plan(&dir, "lf.yaml", &pt.replace("packing: true", "packing: false"), "");
    has(&read, &[("data.pretrain_mode", json!(true)), ("data.join_rows", json!(false))]);
    let dpo = LLAMA_FACTORY.replace("asks,more", "pairs").replace("stage: sft", "stage: dpo\npref_beta: 0.2");
    let (read, _) = plan(&dir, "lf.yaml", &dpo, chat);
    has(&read, &[("objective.prompt_key", json!("talk")), ("objective.beta", json!(0.2))]);
    // Pairs of Alpaca rows have the input in their prompt.
    fs::write(dir.path("lf.yaml"), dpo.replace("dataset: pairs", "dataset: asked")).unwrap();
    let out = ran(&dir, FLATSHARD, &format!("train lf.yaml {chat} --print-samples 1"));
    let text = String::from_utf8_lossy(&out.stdout);
    assert!(text.contains("add\\n1 and 2"), "{text}{}", String::from_utf8_lossy(&out.stderr));
    for (from, to, words) in [
        ("asks,more", "askz", ["no data set askz", "asks"]),
        ("asks,more", "odd", ["odd.tags.who_tag", "no such tag"]),
        ("asks,more", "drawn", ["drawn.num_samples", "[:500]"]),
        ("asks,more", "shaped", ["shaped.formatting", "alpaca, sharegpt or openai"]),
    ] {
        refused(&dir, "lf.yaml", &LLAMA_FACTORY.replace(from, to), &words);
    }
    let out = ran(&dir, FLATSHARD, &format!("train lf.yaml --nproc-per-node 1 {chat} --max-steps 2"));
    assert_eq!(out.status.code(), Some(2), "the file is the last one");
    fs::write(dir.path("lf.yaml"), LLAMA_FACTORY).unwrap();
    let out = ran(&dir, FLATSHARD, &format!("train lf.yaml --nproc-per-node 1 {chat}"));
    assert!(out.status.success(), "{}", String::from_utf8_lossy(&out.stderr));
}

const TORCHTITAN: &str = r#"
[job]
dump_folder = "./outputs"
[profiling]
enable_profiling = false
save_traces_folder = "trace"
[metrics]
log_freq = 1
enable_tensorboard = false
[model]
name = "llama3"
flavor = "debugmodel"
[optimizer]
name = "AdamW"
lr = 8e-4
[lr_scheduler]
warmup_steps = 2
decay_type = "linear"
[training]
local_batch_size = 2
seq_len = 16
max_norm = 1.0
steps = 3
dataset = "c4_test"
dataset_path = "notes.txt"
[parallelism]
data_parallel_shard_degree = -1
tensor_parallel_degree = 1
pipeline_parallel_degree = 1
[checkpoint]
enable = false
interval = 10
initial_load_path = "model"
[activation_checkpoint]
mode = "selective"
selective_ac_option = "op"
[validation]
enabled = false
dataset = "c4_validation"
"#;

#[test]
fn torchtitan_and_deepspeed_files() {
    let dir = work();
    fs::write(dir.path("notes.txt"), "a quick brown fox. ".repeat(300)).unwrap();
    let (read, _) = plan(&dir, "run.toml", TORCHTITAN, "");
    let expected = [
        ("data.dataset", json!(["notes.txt"])),
        ("optim.lr", json!(8e-4)),
        ("optim.lr_scheduler", json!("linear")),
        ("run.max_steps", json!(3)),
        ("batch.batch_size", json!(2)),
        ("run.eval", json!(false)),
        ("fsdp.activation_checkpoint", json!("selective")),
    ];
    has(&read, &expected);
    let every = TORCHTITAN.replace("option = \"op\"", "option = \"1\"")
        + "[quantize.linear.float8]\nenable_fsdp_float8_all_gather = true\n";
    let (read, _) = plan(&dir, "run.toml", &every, "");
    has(&read, &[("fsdp.activation_checkpoint", json!(true)), ("fsdp.activation_checkpoint_every", json!(1))]);
    let bare = TORCHTITAN.replace("dataset_path = \"notes.txt\"\n", "").replace("initial_load_path = \"model\"\n", "");
    refused(&dir, "run.toml", &bare, &["model.flavor", "training.dataset", "c4_test"]);
    let (named, _) = plan(&dir, "run.toml", &bare, "--pretrain model --dataset notes.txt");
    has(&named, &expected);
    refused(&dir, "run.toml", "[training]\nsteps = ", &["not TOML"]);
    let deepspeed = json!({"zero_optimization": {"stage": 2}, "train_micro_batch_size_per_gpu": 2});
    let flags = "--dataset synthetic --max-len 16";
    let (read, _) = plan(&dir, "ds.json", &deepspeed.to_string(), flags);
    has(&read, &[("fsdp.zero_stage", json!(2)), ("batch.batch_size", json!(2))]);
}

/// As Spectrum writes them.
#[test]
fn parameters_that_axolotl_unfreezes_are_trained_alone() {
    let dir = work();
    let text = "base_model: model\ndatasets: [{path: alpaca.jsonl, type: alpaca}]\nunfrozen_parameters:\n\
                - ^model.embed_tokens.weight$\n- model.layers.0.mlp.down_proj\n";
    let (settings, _) = plan(&dir, "ax.yml", text, "");
    has(&settings, &[("tune.unfreeze", json!(["^model.embed_tokens.weight$", "model.layers.0.mlp.down_proj"]))]);
    fs::write(dir.path("ax.yml"), text.replace("layers.0", "layers.7")).unwrap();
    let out = ran(&dir, FLATSHARD, "train ax.yml --nproc-per-node 1");
    let said = String::from_utf8(out.stderr).unwrap();
    assert_eq!(out.status.code(), Some(2), "{said}");
    assert!(said.contains("unfreeze: \"model.layers.7.mlp.down_proj\" matches no tensor"), "{said}");
}
