//! Flags of other tools: every row of `synonyms.tsv` works, and no flag has two meanings. Never starts a run:
//! whole_commands.rs does.
use clap::{Arg, Command, CommandFactory};
use flatshard::base::{Error, Result};
use flatshard::run::settings::Settings;
use flatshard::run::settings::args::{self, Cli, Parsed};
use flatshard::run::settings::defaults::defaults;
use flatshard::run::settings::help::HelpPage;
use flatshard::run::settings::spellings::argument;
use flatshard::run::settings::synonyms::{self, Synonym};
use flatshard::run::settings::value::StepInterval;
use serde_json::{Value, json};
use std::any::TypeId;
use std::sync::LazyLock;

fn read(words: &[String]) -> Result<Settings> {
    const PAGE: HelpPage = HelpPage::training("run_fsdp", "");
    static COMMAND: LazyLock<Command> = LazyLock::new(|| args::command::<Cli>(&PAGE));
    match args::parse_with::<Cli>(&COMMAND, &PAGE, words.iter().cloned(), &[])? {
        Parsed::Run(cli) => Ok(cli.settings),
        Parsed::Help(_) => panic!("{words:?} is help"),
    }
}
/// Our flag of `row`.
fn ours(row: &Synonym) -> Arg {
    static COMMAND: LazyLock<Command> = LazyLock::new(Cli::command);
    let Synonym { section, key, .. } = row;
    argument(&COMMAND, section, key).unwrap_or_else(|| panic!("{section}.{key} has a flag")).clone()
}
/// `--lr`, `--no-eval`, `--keep 0`.
pub fn shown(row: &Synonym, value: &str) -> String {
    let arg = ours(row);
    let long = arg.get_long().unwrap();
    let switch = arg.get_possible_values().iter().any(|v| v.matches("true", false));
    match value {
        "" => format!("--{long}"),
        "true" if switch => format!("--{long}"),
        "false" if switch => format!("--no-{long}"),
        value => format!("--{long} {value}"),
    }
}
/// Of flags of other tools.
fn rows() -> impl Iterator<Item = &'static Synonym> {
    synonyms::table().iter().filter(|row| ["flag", "idle", "refused"].contains(&row.kind) && !row.is_own())
}
/// Valid values of a flag.
fn sample(arg: &Arg) -> Vec<String> {
    let names = arg.get_possible_values();
    let kind = arg.get_value_parser().type_id();
    let one = match names.last() {
        Some(_) if names.iter().any(|name| name.matches("true", false)) => "true",
        Some(name) => name.get_name(),
        None if kind == TypeId::of::<f64>() || kind == TypeId::of::<f32>() => "0.5",
        None => "3",
    };
    vec![one.to_string(); arg.get_num_args().map_or(1, |n| n.min_values().max(1)).min(2)]
}
/// The typed form of another tool's flag: its first name and value, or two.
fn beside(row: &Synonym) -> Vec<String> {
    let Some(with) = &row.with else { return Vec::new() };
    if rows().any(|other| other.flag.names[0] == with.names[0] && other.value == "{1}") {
        return vec![format!("--{}", with.names[0]), "0.5".into(), "0.5".into()];
    }
    let value = match with.values.first() {
        Some(&"same") => "5", // the words of `every_row_works`
        value => value.copied().unwrap_or("3"),
    };
    vec![format!("--{}={}", with.names[0], object(value))]
}
/// A JSON object with the keys that a row asks for, or its value.
fn object(value: &str) -> String {
    let Some(keys) = value.strip_prefix('{').and_then(|keys| keys.strip_suffix('}')) else { return value.into() };
    let entry = |key: &str| match key {
        "decay_type" => (key.to_string(), json!("cosine")),
        "num_decay_steps" => (key.to_string(), json!(3)),
        _ => (key.to_string(), json!(0.5)),
    };
    Value::Object(keys.split_terminator(',').map(entry).collect()).to_string()
}
fn setting(settings: &Settings, row: &Synonym) -> Value {
    let tree = serde_json::to_value(settings).unwrap();
    let key = row.key.split('.').next().unwrap();
    assert!(tree[row.section].get(key).is_some(), "{row:?} is of no setting");
    tree[row.section][key].clone()
}

#[test]
fn every_row_works() {
    for row in rows() {
        assert!(!row.tool.is_empty() && (row.kind == "flag" || !row.why.is_empty()), "{row:?}");
        let values = if row.flag.values.is_empty() { vec![""] } else { row.flag.values.clone() };
        for (name, value) in row.flag.names.iter().flat_map(|name| values.iter().map(move |value| (name, *value))) {
            let words = match (value, row.kind) {
                ("", "flag") if row.key.contains('.') => vec!["0.5".to_string()], // half of a pair
                ("", "flag") if ["{0}", "{1}"].contains(&row.value) => vec!["0.2".into(), "0.5".into()],
                ("", "flag") if row.counts_samples() => vec!["24".into()],
                // Of rows that apply together, the first takes the words.
                ("", "flag") => sample(&ours(rows().find(|other| other.spelling == row.spelling).unwrap())),
                ("", "idle" | "refused") => vec!["5".to_string()],
                ("<1", _) => vec!["0.5".to_string()],
                (value, _) => vec![object(value)],
            };
            for name in [name.replace('-', "_"), name.replace('_', "-")] {
                let typed = [vec![format!("--{name}")], words.clone(), beside(row)].concat();
                one_row(row, &typed, &words, &name);
            }
        }
    }
}
fn one_row(row: &Synonym, typed: &[String], words: &[String], name: &str) {
    let settings = read(typed);
    if row.kind == "refused" {
        let e = settings.err().unwrap_or_else(|| panic!("{typed:?} is not refused"));
        let text = e.to_string();
        assert!(matches!(e, Error::Input(_)) && text.contains(row.why) && text.contains(row.tool), "{typed:?}: {text}");
        let nearest = if row.key.is_empty() { "remove it".into() } else { shown(row, row.value) };
        return assert!(text.contains(&nearest), "{typed:?}: no {nearest} in {text}");
    }
    let settings = settings.unwrap_or_else(|e| panic!("{typed:?}: {e}"));
    let note = settings.notes.iter().find(|note| note.starts_with(&format!("--{name} ")));
    let note = note.unwrap_or_else(|| panic!("{typed:?}: not in {:?}", settings.notes));
    if row.kind == "idle" {
        assert!(note.contains("has no effect here") && note.contains(row.why), "{typed:?}: {note}");
        let alone = read(&beside(row)).unwrap();
        return assert_eq!(
            serde_json::to_value(&settings).unwrap(),
            serde_json::to_value(&alone).unwrap(),
            "{typed:?}"
        );
    }
    let long = format!("--{}", ours(row).get_long().unwrap());
    let is_read = note.contains("is read as") && note.contains(long.trim_start_matches("--"));
    assert!(is_read || row.is_weak() && note.contains("gives way to"), "{typed:?}: {note}");
    let expected = match row.key.split_once('.') {
        Some((key, half)) => {
            let mut pair = defaults()[row.section][key].clone();
            pair[half.parse::<usize>().unwrap()] = words[0].parse::<f64>().unwrap().into();
            pair
        }
        None => {
            let mut ours = row.convert(words);
            if row.counts_samples() {
                let given = row.with.as_ref().is_some_and(|with| with.names[0] != "objective");
                let of_prompt = if given { 3 } else { 8 };
                ours = vec![(24 / of_prompt).to_string()];
            } else if row.is_rate() {
                ours = vec![(0.5 / 3.0).to_string()];
            }
            match &ours[..] {
                [one] => ours = vec![format!("{long}={one}")],
                _ => ours.insert(0, long.clone()),
            }
            setting(&read(&ours).unwrap_or_else(|e| panic!("{ours:?}: {e}")), row)
        }
    };
    assert_eq!(setting(&settings, row), expected, "{typed:?}");
}

/// A row for one of our names is for a value that ours does not accept, or needs another flag.
#[test]
fn no_flag_of_ours_has_a_second_meaning() {
    let command = Cli::command();
    let own = |name: &str| {
        let name = name.replace('_', "-");
        command.get_arguments().any(|arg| arg.get_long() == Some(&name))
    };
    for row in rows() {
        for name in row.flag.names.iter().filter(|name| own(name) && row.with.is_none()) {
            assert!(!row.flag.values.is_empty(), "{row:?}");
            for value in &row.flag.values {
                let words = ["run_fsdp".to_string(), format!("--{}={value}", name.replace('_', "-"))];
                let bare = *value == "true";
                let zero_rank = *name == "lora_rank"; // no adapters in OpenRLHF; nothing in ours
                assert!(bare || zero_rank || Cli::command().try_get_matches_from(words).is_err(), "{row:?}");
            }
        }
    }
}

#[test]
fn repeated_settings_must_agree() {
    let read = |line: &str| read(&line.split(' ').map(String::from).collect::<Vec<_>>());
    let e = read("--lr 1e-3 --learning_rate 0.002").unwrap_err().to_string();
    assert!(e.contains("--lr 1e-3") && e.contains("--learning_rate 0.002"), "{e}");
    assert_eq!(read("--lr 1e-3 --learning_rate 0.001").unwrap().optim.lr, Some(0.001));
    assert_eq!(read("--learning_rate 1 --learning-rate=2").unwrap().optim.lr, Some(2.0));
    let both = read("--micro_train_batch_size 2 --per_device_train_batch_size 4").unwrap_err().to_string();
    assert!(both.contains("--micro_train_batch_size 2") && both.contains("--batch-size"), "{both}");
    assert_eq!(read("--adam_beta1 0.8 --adam_beta2 0.9").unwrap().optim.betas, Some(vec![0.8, 0.9]));
    assert!(read("--adam_beta1 0.8 --betas 0.9 0.95").is_err());
    // False gives way.
    let precision = |line| serde_json::to_value(read(line).unwrap().precision.precision).unwrap();
    assert_eq!(precision("--bf16 False --fp16 True"), "fp16");
    assert_eq!(precision("--bf16 False --fp16 False"), "fp32");
    assert!(read("--bf16 --fp16").is_err());
    // The Trainer's own precedence.
    assert_eq!(read("--num_train_epochs 3.0 --max_steps -1").unwrap().run.epochs, Some(3.0));
    assert_eq!(read("--num_train_epochs 3 --max_steps 10").unwrap().run.epochs, None);
    assert_eq!(read("--num_train_epochs 0.5").unwrap().run.epochs, Some(0.5));
    assert_eq!(read("--eval_steps 0.1").unwrap().run.eval_every, Some(StepInterval::Share(0.1)));
    assert_eq!(read("--eval_steps -1").unwrap().run.eval_every, Some(StepInterval::Epoch(1)));
}

/// What a flag means depends on others, and on the objective.
#[test]
fn flags_of_trl_and_openrlhf_mean_what_they_mean_there() {
    let words = |line: &str| line.split_whitespace().map(String::from).collect::<Vec<_>>();
    let same = |theirs: &str, ours: &str| {
        let [theirs, ours] = [theirs, ours]
            .map(|line| serde_json::to_value(read(&words(line)).unwrap_or_else(|e| panic!("{line}: {e}"))).unwrap());
        assert_eq!(theirs, ours);
    };
    let refused = |line: &str, says: &[&str]| {
        let text = read(&words(line)).err().unwrap_or_else(|| panic!("{line} is read")).to_string();
        assert!(says.iter().all(|part| text.contains(part)), "{line}: {text}");
    };
    let sft = "--objective sft";
    same(&format!("{sft} --use_peft"), &format!("{sft} --lora-rank 16 --lora-alpha 32 --lora-dropout 0.05"));
    same(
        &format!("{sft} --use_peft --lora_r 8 --lora_alpha 4 --lora_dropout 0 --lora_target_modules q_proj k_proj"),
        &format!("{sft} --lora-rank 8 --lora-alpha 4 --lora-dropout 0 --lora-target-modules q_proj k_proj"),
    );
    let least = "--lr_scheduler_type cosine_with_min_lr --lr 2e-3";
    let ratio = "--lr-scheduler cosine_with_min_lr --lr 2e-3 --min-lr-ratio";
    same(&format!("{least} --lr_scheduler_kwargs {{\"min_lr_rate\":0.25}}"), &format!("{ratio} 0.25"));
    same(&format!("{least} --lr_scheduler_kwargs={{\"min_lr\":5e-4}}"), &format!("{ratio} 0.25"));
    refused("--lr_scheduler_kwargs {\"min_lr\":5e-4}", &["the peak is not given"]);
    refused("--lr_scheduler_kwargs {\"num_cycles\":2}", &["a final learning rate (--min-lr-ratio)"]);
    let stable = "--lr_scheduler_type warmup_stable_decay --lr_scheduler_kwargs";
    same(&format!("{stable} {{\"num_decay_steps\":20}}"), "--lr-scheduler cosine --lr-decay-steps 20");
    same(
        &format!("{stable} {{\"num_decay_steps\":20,\"decay_type\":\"linear\"}}"),
        "--lr-scheduler linear --lr-decay-steps 20",
    );
    same(
        &format!("{stable}={{\"min_lr_ratio\":0.1,\"num_decay_steps\":20}}"),
        "--lr-scheduler cosine_with_min_lr --min-lr-ratio 0.1 --lr-decay-steps 20",
    );
    refused("--lr_scheduler_type warmup_stable_decay", &["--lr-decay-steps", "num_decay_steps"]);
    same("--optim paged_adamw_8bit", "--optimizer adamw8bit");
    same("--optim paged_adamw_32bit", "--optimizer adamw");
    same("--load_checkpoint", "");
    same("--load_checkpoint --ckpt_path c", "--resume auto --ckpt-dir c");
    let distill = "--objective distill";
    same(&format!("{distill} --lmbda 1.0 --beta 1.0"), &format!("{distill} --on-policy"));
    same(&format!("{distill} --lmbda 0 --beta 0"), &format!("{distill} --distill-alpha 1"));
    refused("--lmbda 1 --beta 0.5", &["--beta 0.5", "lmbda 0, beta 0"]);
    refused("--lmbda 1 --beta 0", &["--beta 0"]);
    same("--use_peft --load_in_4bit", "--lora-rank 16 --lora-alpha 32 --lora-dropout 0.05 --load-in-4bit");
    same(&format!("{sft} --use_peft False"), sft);
    refused("--use_peft False --lora_r 16", &["--lora_r 16", "--use_peft False"]);
    refused("--use_peft false --lora-rank 16", &["--lora-rank 16", "--use_peft False"]);
    same(
        &format!("{sft} --dataset_text_field text --loss_type nll --truncation_mode keep_start --log_level passive"),
        sft,
    );
    same("--dataset_text_field content", "--input-key content --pretrain-mode");
    refused("--objective dpo --truncation_mode keep_start", &["dropped and counted"]);
    refused("--objective dpo --max_completion_length 9", &["dropped and counted"]);

    same("--dtype bfloat16", "--precision bf16");
    same("--torch_dtype bfloat16 --bf16 true", "--precision bf16");
    refused("--dtype float16", &["master weights are fp32"]);

    let grpo = "--objective grpo --reward exact";
    same(
        &format!("{grpo} --max_completion_length 512 --num_generations 4 --per_device_train_batch_size 8"),
        &format!("{grpo} --max-new-tokens 512 --group-size 4 --batch-size 2"),
    );
    same(&format!("{grpo} --per_device_train_batch_size 16"), &format!("{grpo} --batch-size 2"));
    same(
        &format!("{grpo} --group-size 2 --per_device_train_batch_size 16"),
        &format!("{grpo} --group-size 2 --batch-size 8"),
    );
    refused(&format!("{grpo} --per_device_train_batch_size 4"), &["samples", "8 samples of a prompt", "--batch-size"]);
    // TRL's batch of a step is that of all its micro-batches.
    let four = "--per_device_train_batch_size 4 --num_generations 8";
    same(
        &format!("{grpo} {four} --gradient_accumulation_steps 2"),
        &format!("{grpo} --batch-size 1 --grad-accum 1 --group-size 8"),
    );
    same(
        &format!("{grpo} {four} --gradient_accumulation_steps 8"),
        &format!("{grpo} --batch-size 1 --grad-accum 4 --group-size 8"),
    );
    refused(&format!("{grpo} {four} --gradient_accumulation_steps 3"), &["4 is no multiple"]);
    let two = "--gradient_accumulation_steps 2";
    same(&format!("{grpo} {two} --steps_per_generation 2"), &format!("{grpo} {two}"));
    refused(&format!("{grpo} {two} --steps_per_generation 4"), &["its own batch"]);
    same(&format!("{grpo} --generation_batch_size 16"), &format!("{grpo} --train-batch-size 2"));
    // TRL adds several losses.
    refused(
        "--objective dpo --loss_type sigmoid sft",
        &["--loss_type sft has no equivalent (TRL): the losses of pairs"],
    );
    refused("--objective dpo --loss_type simpo", &["--loss_type simpo has no equivalent"]);
    refused("actor_rollout_ref.actor.gradclip=1", &["unknown flag --actor-rollout-ref.actor.gradclip", "nearest"]);
    let lora = "--objective sft --lora-rank 8 --lora-alpha 32 --lora-target-modules all-linear";
    same(&format!("{lora} --loss_scale default"), &format!("{lora} --multiturn"));
    // verl's settings, as Hydra takes them.
    same(
        &format!(
            "{grpo} data.train_files=p.jsonl actor_rollout_ref.rollout.n=4 data.train_batch_size=8 \
             actor_rollout_ref.actor.ppo_mini_batch_size=8 actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=8 \
             actor_rollout_ref.actor.optim.lr=1e-6 data.max_response_length=64 algorithm.adv_estimator=grpo \
             actor_rollout_ref.actor.use_kl_loss=True actor_rollout_ref.actor.kl_loss_coef=0.001 \
             actor_rollout_ref.actor.kl_loss_type=low_var_kl actor_rollout_ref.actor.entropy_coeff=0 \
             actor_rollout_ref.rollout.name=vllm trainer.total_epochs=2 trainer.n_gpus_per_node=2"
        ),
        &format!(
            "{grpo} --dataset p.jsonl --group-size 4 --train-batch-size 8 --batch-size 2 --lr 1e-6 --max-new-tokens 64 \
             --beta 0.001 --epochs 2 --nproc-per-node 2"
        ),
    );
    refused(
        &format!("{grpo} data.train_batch_size=8 actor_rollout_ref.actor.ppo_mini_batch_size=4"),
        &["updates on all of its samples"],
    );
    let recorded = "--objective grpo --rollouts r.jsonl";
    same(
        &format!("{recorded} --num_generations 4 --per_device_train_batch_size 4"),
        &format!("{recorded} --batch-size 4"),
    );
    same(&format!("{grpo} --loss_type dr_grpo --scale_rewards none"), &format!("{grpo} --loss-type dr_grpo"));
    same(
        &format!("{grpo} --scale_rewards group --beta 0 --use_vllm --vllm_mode colocate --shuffle_dataset True"),
        &format!("{grpo} --beta 0 --shuffle"),
    );
    refused(&format!("{grpo} --loss_type dr_grpo --scale_rewards group"), &["undivided", "--loss-type dapo"]);
    refused(&format!("{grpo} --scale_rewards False"), &["only dr_grpo", "--loss-type dr_grpo"]);
    refused(&format!("{grpo} --log_completions"), &["--record-rollouts FILE"]);
    same(&format!("{grpo} --log_completions False --repetition_penalty 1.0 --entropy_coef 0.0"), grpo);

    let swift = "--lora-rank 8 --lora-alpha 32 --lora-dropout 0.05 --lora-target-modules all-linear";
    same("--tuner_type lora", &format!("{swift} --multiturn"));
    same("--tuner_type lora --loss_scale last_round", &format!("{swift} --no-multiturn"));
    same("--objective dpo --tuner_type lora", &format!("--objective dpo {swift}"));
    same("--loss_scale default", "--multiturn");
    let verl = "actor_rollout_ref.actor.kl_loss_coef=0.1";
    same(&format!("{grpo} {verl}"), &format!("{grpo} --beta 0"));
    same(&format!("{grpo} {verl} actor_rollout_ref.actor.use_kl_loss=True"), &format!("{grpo} --beta 0.1"));
    let logs = "trainer.project_name=p trainer.logger=";
    same(&format!("{grpo} {logs}console"), grpo);
    same(&format!("{grpo} {logs}[\"console\",\"wandb\"]"), &format!("{grpo} --wandb-project p"));
    refused("--lmbda 0", &["no cross entropy", "--distill-alpha 1"]);
    refused("--objective dpo --rpo_alpha 0.5", &["all tokens of a batch", "--nll-loss-coef"]);
    same("--objective dpo --loss_type sigmoid", "--objective dpo");
    refused("--objective dpo --loss_type sigmoid sft", &["the losses of pairs"]);

    same("--warmup_steps 0.1", "--warmup-ratio 0.1");
    same("--warmup-steps=0.1", "--warmup-ratio 0.1");
    refused("--warmup_steps 1.5", &["whole number"]);

    same(
        &format!(
            "{grpo} --prompt_data p.jsonl --n_samples_per_prompt 4 --train_batch_size 32 --rollout_batch_size 8 \
             --micro_train_batch_size 8 --max_epochs 2 --num_episodes 3 --generate_max_len 64 --init_kl_coef 0.01 \
             --use_kl_loss --kl_estimator k3 --eps_clip_low_high 0.2 0.27 --advantage_estimator group_norm \
             --actor_learning_rate 1e-6 --colocate_all_models --vllm_num_engines 4 --label_key answer"
        ),
        &format!(
            "{grpo} --dataset p.jsonl --group-size 4 --train-batch-size 8 --batch-size 2 --updates-per-rollout 2 \
             --epochs 3 --max-new-tokens 64 --beta 0.01 --clip-low 0.2 --clip-high 0.27 --lr 1e-6"
        ),
    );
    refused(&format!("{grpo} --n_samples_per_prompt 4 --train_batch_size 64 --rollout_batch_size 8"), &["different"]);
    refused(&format!("{grpo} --init_kl_coef 0.01"), &["--use_kl_loss", "--beta B"]);
    refused(&format!("{grpo} --remote_rm_url http://x"), &["--reward COMMAND"]);
}

#[test]
fn a_hint_names_a_related_flag() {
    let refused = |flag: &str| read(&[format!("--{flag}"), "1".into()]).unwrap_err().to_string();
    for (flag, near) in [
        ("batch-sise", "--batch-size "),
        ("learning_rat", "--learning_rate"),
        ("no-shufle", "--shuffle "),
        ("wandb-run", "--wandb-"),
    ] {
        let text = refused(flag);
        assert!(
            text.starts_with(&format!("unknown flag --{}", flag.replace('_', "-"))) && text.contains(near),
            "{text}"
        );
    }
    for flag in ["frobnicate", "quantum", "temporal-shift", "nonsense.key"] {
        let text = refused(flag);
        assert!(!text.contains("nearest") && text.contains("--help-all lists all"), "{text}");
    }
    let text = refused("optim");
    assert!(text.contains("adamw_torch") && text.contains("Hugging Face Trainer"), "{text}");
    // clap names our flag; the user typed another.
    let text = read(&["--max_grad_norm".into(), "much".into()]).unwrap_err().to_string();
    assert!(text.contains("--max_grad_norm is read as --grad-clip"), "{text}");
}
