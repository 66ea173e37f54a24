//! Flags of other tools: every row of `synonyms.tsv` works, whole command lines of those tools start the same run as
//! ours, and docs/coming-from.md is generated from the table. Trains one step.
use crate::common::runs::{FSDP, unlaunched};
use clap::{Arg, Command, CommandFactory};
use flatshard::base::{Error, Result};
use flatshard::run::StrategyName;
use flatshard::run::settings::Settings;
use flatshard::run::settings::args::{self, Cli, Parsed};
use flatshard::run::settings::config;
use flatshard::run::settings::defaults::defaults;
use flatshard::run::settings::help::HelpPage;
use flatshard::run::settings::spellings::argument;
use flatshard::run::settings::synonyms::{self, Synonym};
use flatshard::run::settings::value::StepInterval;
use serde_json::Value;
use std::any::TypeId;
use std::fs;
use std::path::Path;
use std::sync::LazyLock;
use tempfile::TempDir;

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
fn shown(row: &Synonym, value: &str) -> String {
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
    vec![format!("--{}={value}", with.names[0])]
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
                ("{}", _) => vec!["{}".to_string()],
                (object, _) if object.starts_with('{') => {
                    vec![format!("{{\"{}\":0.5}}", object.trim_matches(['{', '}']))]
                }
                (value, _) => vec![value.to_string()],
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
    assert!(note.contains("is read as") && note.contains(long.trim_start_matches("--")), "{typed:?}: {note}");
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
    refused("--lr_scheduler_kwargs {\"num_cycles\":2}", &["final learning rate as a fraction"]);
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

/// The objective of a command line also decides what the keys of its file mean.
#[test]
fn a_file_is_read_for_the_objective_of_the_command_line() {
    let place = Place(tempfile::tempdir().unwrap());
    let keys =
        "per_device_train_batch_size: 16\nmax_completion_length: 32\nwarmup_steps: 0.1\nuse_peft: true\nlora_r: 4\n";
    fs::write(place.0.path().join("trl.yaml"), keys).unwrap();
    let of_file = |line: &str| {
        let words = format!("{line} --config {}", place.0.path().join("trl.yaml").display());
        let words = words.split(' ').map(String::from);
        let Parsed::Run(cli) = args::parse::<Cli>(&HelpPage::training("run_fsdp", ""), words).unwrap() else {
            panic!("{line} is help")
        };
        config::resolve(&cli, None, StrategyName::Fsdp).unwrap()
    };
    let ours = of_file("--objective grpo --reward exact");
    assert_eq!((ours.batch.batch_size, ours.generate.max_new_tokens), (Some(2), Some(32)));
    assert_eq!((ours.optim.warmup_ratio, ours.optim.warmup_steps), (Some(0.1), None));
    assert_eq!((ours.lora.rank, ours.lora.alpha, ours.lora.dropout), (Some(4), Some(32.0), Some(0.05)));
    let ours = of_file("--objective grpo --rollouts r.jsonl --loss-type dr_grpo");
    assert_eq!(ours.batch.batch_size, Some(16));
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

struct Place(TempDir);

impl Place {
    fn output(&self, line: &str) -> (String, String) {
        let mut command = unlaunched(FSDP);
        // Quotes hold one word together.
        let parts = line.split('\'').enumerate();
        let words = parts.flat_map(|(n, part)| match n % 2 {
            0 => part.split_whitespace().map(String::from).collect(),
            _ => vec![part.to_string()],
        });
        let out = command.current_dir(self.0.path()).args(words).output().unwrap();
        let [stdout, stderr] = [out.stdout, out.stderr].map(|text| String::from_utf8(text).unwrap());
        assert!(out.status.success(), "{line}: {stderr}");
        (stdout, stderr)
    }
    fn config(&self, line: &str) -> String {
        self.output(&format!("{line} --print-config")).0
    }
}

/// Typical commands of those tools, and the equivalent ones here.
#[test]
fn whole_commands_start_the_same_run() {
    let place = Place(tempfile::tempdir().unwrap());
    let model = "--dataset synthetic --vocab-size 320 --embed-dim 32 --num-layers 1 --num-heads 2 --max-positions 64";
    place.output(&format!(
        "{model} --max-len 16 --max-steps 1 --nproc-per-node 1 --no-eval --no-sample --save-hf llama"
    ));
    let row = "{\"question\": \"what?\", \"answer\": \"that\"}\n";
    fs::write(place.0.path().join("rows.jsonl"), row.repeat(40)).unwrap();
    let pair = "{\"question\": \"what?\", \"better\": \"that\", \"worse\": \"this\"}\n";
    fs::write(place.0.path().join("pairs.jsonl"), pair.repeat(40)).unwrap();
    let sft = "--pretrain llama --tokenizer bytes --dataset rows.jsonl --input-key question --output-key answer \
         --max-len 16 --max-samples 500 --packing-samples --train-batch-size 16 --batch-size 2 --epochs 2 --seed 42 \
         --lr 5e-6 --betas 0.9 0.95 --weight-decay 0 --lr-scheduler cosine_with_min_lr --warmup-ratio 0.03 \
         --grad-clip 1.0 --precision bf16 --activation-checkpoint --log-every 1 --save-every 0 --eval-every epoch";
    let zero = format!(
        "{sft} --zero-stage 2 --cpu-offload optimizer --keep 3 --ckpt-dir ckpt --resume auto --save-hf out --tensorboard tb"
    );
    let flat = "--pretrain llama --tokenizer bytes --dataset rows.jsonl --input_key question --output_key answer \
         --max_len 16 --max_samples 500 --packing_samples --train_batch_size 16 --micro_train_batch_size 2 \
         --max_epochs 2 --seed 42 --learning_rate 5e-6 --adam_betas 0.9 0.95 --l2 0 --lr_scheduler cosine_with_min_lr \
         --lr_warmup_ratio 0.03 --max_norm 1.0 --param_dtype bf16 --gradient_checkpointing --logging_steps 1 \
         --save_steps -1 --eval_steps -1 --zero_stage 2 --adam_offload --attn_implementation flash_attention_2 \
         --max_ckpt_num 3 --ckpt_path ckpt --load_checkpoint --save_path out --use_tensorboard tb --local_rank -1 \
         --save_hf_ckpt --ds_tensor_parallel_size 1 --ring_attn_size 1 --ring_head_stride 1 --zpg 1 --lora_rank 0 \
         --aux_loss_coef 0 --dataset_split train --use_liger_kernel --full_determinism";
    let dotted = "--model.model_name_or_path llama --tokenizer bytes --data.dataset rows.jsonl --data.input_key question \
         --data.output_key answer --data.max_len 16 --data.max_samples 500 --ds.packing_samples --train.batch_size 16 \
         --train.micro_batch_size 2 --train.max_epochs 2 --train.seed 42 --adam.lr 5e-6 --adam.betas 0.9 0.95 \
         --adam.weight_decay 0 --optim adam --lr_scheduler cosine_with_min_lr --lr_warmup_ratio 0.03 --max_norm 1.0 \
         --ds.param_dtype bf16 --model.gradient_checkpointing_enable --logger.logging_steps 1 --ckpt.save_steps -1 \
         --eval.steps -1 --ds.zero_stage 2 --ds.adam_offload --ds.attn_implementation flash_attention_2 \
         --ckpt.max_num 3 --ckpt.path ckpt --ckpt.load_enable --ckpt.output_dir out --logger.tensorboard_dir tb \
         --ds.tensor_parallel_size 1 --ds.ring_attn_size 1 --data.dataloader_num_workers 4";
    let fsdp2 = "--model_name_or_path llama --tokenizer bytes --dataset rows.jsonl --input_key question --output_key answer \
         --max_len 16 --max_samples 500 --packing_samples --train_batch_size 16 --micro_train_batch_size 2 \
         --max_epochs 2 --seed 42 --learning_rate 5e-6 --adam_betas 0.9 0.95 --l2 0 --lr_scheduler cosine_with_min_lr \
         --lr_warmup_ratio 0.03 --max_norm 1.0 --bf16 --gradient_checkpointing --logging_steps 1 --save_steps -1 \
         --eval_steps -1 --no-fsdp2_reshard_after_forward --fsdp2_tp_size 1 --fsdp2_cp_size 1 --flash_attn \
         --ckpt_save_path out --max_checkpoints_to_keep -1 --hf_max_shard_size_gb 2 --backend fsdp2";
    let ours = format!(
        "{sft} --sharding SHARD_GRAD_OP --ckpt-dir out/dcp_ckpt --save-hf out/last_hf_ckpt --keep 0 \
         --max-shard-size 2GB --backend fsdp"
    );
    let trainer = "--model_name_or_path llama --tokenizer_name bytes --train_file rows.jsonl --input_key question \
         --output_key answer --max_seq_length 16 --packing True --per_device_train_batch_size 2 \
         --gradient_accumulation_steps 4 --num_train_epochs 2.0 --max_steps -1 --seed 42 --learning_rate 5e-6 \
         --adam_beta1 0.9 --adam_beta2 0.999 --adam_epsilon 1e-6 --weight_decay 0 --lr_scheduler_type cosine \
         --warmup_ratio 0.03 --max_grad_norm 0.5 --bf16 True --fp16 False --gradient_checkpointing True \
         --logging_steps 10 --save_strategy steps --save_steps 500 --save_total_limit 2 --eval_strategy epoch \
         --output_dir out --resume_from_checkpoint True --optim adamw_torch_fused --report_to tensorboard \
         --logging_dir tb --do_train --do_eval --dataloader_num_workers 4 --remove_unused_columns False \
         --fsdp 'full_shard auto_wrap' --fsdp_transformer_layer_cls_to_wrap LlamaDecoderLayer --ddp_timeout 1800 --tf32 False";
    let trained = "--pretrain llama --tokenizer bytes --dataset rows.jsonl --input-key question --output-key answer \
         --max-len 16 --packing-samples --batch-size 2 --grad-accum 4 --epochs 2 --seed 42 --lr 5e-6 \
         --betas 0.9 0.999 --eps 1e-6 --weight-decay 0 --lr-scheduler cosine --warmup-ratio 0.03 --grad-clip 0.5 \
         --precision bf16 --activation-checkpoint --log-every 10 --save-every 500 --keep 2 --eval-every epoch --eval \
         --ckpt-dir out --save-hf out/model --resume auto --optimizer adamw --tensorboard tb --sharding FULL_SHARD \
         --auto-wrap transformer --comm-timeout 1800 --no-tf32";
    let torchtitan = "--checkpoint.initial_load_path llama --model.hf_assets_path bytes --training.dataset_path rows.jsonl \
         --input-key question --output-key answer --training.steps 20 --training.seq_len 16 \
         --training.local_batch_size 2 --training.global_batch_size 16 --training.max_norm 1.0 \
         --training.mixed_precision_param bfloat16 --training.mixed_precision_reduce float32 --training.seed 7 \
         --optimizer.name AdamW --optimizer.lr 8e-4 --optimizer.beta2 0.99 --lr_scheduler.warmup_steps 5 \
         --lr_scheduler.decay_type linear --parallelism.tensor_parallel_degree 1 \
         --parallelism.data_parallel_shard_degree -1 --parallelism.context_parallel_degree 1 \
         --parallelism.fsdp_reshard_after_forward always --checkpoint.enable --checkpoint.folder ckpt \
         --checkpoint.interval 10 --checkpoint.keep_latest_k 2 --checkpoint.async_mode async \
         --activation_checkpoint.mode selective --metrics.log_freq 2 --compile.no-enable";
    let titan = "--pretrain llama --tokenizer bytes --dataset rows.jsonl --input-key question --output-key answer \
         --max-steps 20 --max-len 16 --batch-size 2 --train-batch-size 16 --grad-clip 1.0 --precision bf16 \
         --reduce-dtype fp32 --seed 7 --optimizer adamw --lr 8e-4 --betas 0.9 0.99 --warmup-steps 5 \
         --lr-scheduler linear --sharding FULL_SHARD --ckpt-dir ckpt --save-every 10 --keep 2 --async-save \
         --resume auto --activation-checkpoint selective --log-every 2 --no-compile";
    let factory = "--model_name_or_path llama --tokenizer bytes --stage sft --do_train true --finetuning_type lora \
         --lora_target all --dataset rows.jsonl --input_key question --output_key answer --template empty --cutoff_len 16 \
         --max_samples 500 --preprocessing_num_workers 16 --dataloader_num_workers 4 --output_dir out --logging_steps 10 \
         --save_steps 500 --plot_loss true --overwrite_output_dir true --save_only_model false --report_to none \
         --per_device_train_batch_size 1 --gradient_accumulation_steps 8 --learning_rate 1e-4 --num_train_epochs 3.0 \
         --lr_scheduler_type cosine --warmup_ratio 0.1 --bf16 true --ddp_timeout 180000000 --enable_liger_kernel true";
    let adapted = "--pretrain llama --tokenizer bytes --objective sft --lora-rank 8 --lora-target-modules all-linear \
         --dataset rows.jsonl --input-key question --output-key answer --max-len 16 --max-samples 500 --ckpt-dir out \
         --save-hf out/model --log-every 10 --save-every 500 --overwrite --batch-size 1 --grad-accum 8 --lr 1e-4 --epochs 3 \
         --lr-scheduler cosine --warmup-ratio 0.1 --precision bf16 --comm-timeout 180000000";
    let train_dpo = "--objective dpo --model.model_name_or_path llama --ref.model_name_or_path llama --tokenizer bytes \
         --data.dataset pairs.jsonl --data.prompt_key question --data.chosen_key better --data.rejected_key worse \
         --data.max_len 16 --model.beta 0.2 --model.label_smoothing 0.1 --model.nll_loss_coef 0.05 --model.aux_loss_coef 0 \
         --train.batch_size 16 --train.micro_batch_size 2 --train.max_epochs 1 --optim muon --muon.momentum 0.9 \
         --muon.ns_steps 6 --muon.nesterov --adam.lr 5e-7 --adam.betas 0.9 0.95 --adam.weight_decay 0 \
         --lr_scheduler cosine_with_min_lr --lr_warmup_ratio 0.03 --max_norm 1.0 --ds.param_dtype bf16 --ds.zero_stage 3 \
         --ds.packing_samples --ds.attn_implementation flash_attention_2 --ref.offload \
         --model.gradient_checkpointing_enable --logger.logging_steps 1 --ckpt.save_steps -1 --eval.steps -1 \
         --ckpt.output_dir out";
    let dpo = "--objective dpo --pretrain llama --ref-pretrain llama --tokenizer bytes --dataset pairs.jsonl \
         --prompt-key question --chosen-key better --rejected-key worse --max-len 16 --beta 0.2 --label-smoothing 0.1 \
         --nll-loss-coef 0.05 --train-batch-size 16 --batch-size 2 --epochs 1 --optimizer muon --muon-momentum 0.9 \
         --muon-ns-steps 6 --lr 5e-7 --betas 0.9 0.95 --weight-decay 0 --lr-scheduler cosine_with_min_lr \
         --warmup-ratio 0.03 --grad-clip 1.0 --precision bf16 --zero-stage 3 --packing-samples --activation-checkpoint \
         --log-every 1 --save-every 0 --eval-every epoch --save-hf out";
    let keys = "--prompt-key question --chosen-key better --rejected-key worse";
    let trl = format!(
        "--objective dpo --model_name_or_path llama --tokenizer bytes --dataset pairs.jsonl {keys} --max_length 16 \
         --loss_type sigmoid --f_divergence_type reverse_kl --beta 0.2 --precompute_ref_log_probs --use_peft --lora_r 32 \
         --lora_alpha 16 --per_device_train_batch_size 2 --gradient_accumulation_steps 8 --num_train_epochs 1 \
         --learning_rate 5e-7 --bf16 --gradient_checkpointing --padding_free False --pad_to_multiple_of 8 \
         --sync_ref_model False --logging_steps 25 --eval_strategy steps --eval_steps 50 --output_dir out \
         --no_remove_unused_columns"
    );
    let kept = format!(
        "--objective dpo --pretrain llama --tokenizer bytes --dataset pairs.jsonl {keys} --max-len 16 --beta 0.2 \
         --precompute-ref-logps --lora-rank 32 --lora-alpha 16 --lora-dropout 0.05 --batch-size 2 --grad-accum 8 --epochs 1 --lr 5e-7 \
         --precision bf16 --activation-checkpoint --log-every 25 --eval-every 50 --ckpt-dir out --save-hf out/model"
    );
    let stage = "model_name_or_path: llama\nstage: dpo\ndo_train: true\nfinetuning_type: lora\nlora_rank: 8\n\
         lora_target: all\npref_beta: 0.2\npref_loss: sigmoid\npref_ftx: 0.1\nsimpo_gamma: 0.5\nref_model_adapters: null\n\
         dataset: pairs.jsonl\ntemplate: empty\ncutoff_len: 16\noutput_dir: out\nlogging_steps: 10\nsave_steps: 500\n\
         per_device_train_batch_size: 1\ngradient_accumulation_steps: 8\nlearning_rate: 5.0e-6\nnum_train_epochs: 3.0\n\
         lr_scheduler_type: cosine\nwarmup_ratio: 0.1\nbf16: true\n";
    fs::write(place.0.path().join("dpo.yaml"), stage).unwrap();
    // The texts of messages alone.
    let empty = "{% for message in messages %}{{ message['content'] }}{% endfor %}";
    let stage = format!("--config dpo.yaml --tokenizer bytes {keys}");
    let staged = format!(
        "--objective dpo --pretrain llama --tokenizer bytes --dataset pairs.jsonl {keys} --apply-chat-template \
         --tokenizer-chat-template empty.jinja --max-len 16 --beta 0.2 --nll-loss-coef 0.1 --lora-rank 8 --lora-alpha 16 --lora-target-modules all-linear --ckpt-dir out \
         --save-hf out/model --log-every 10 --save-every 500 --batch-size 1 --grad-accum 8 --lr 5e-6 --epochs 3 \
         --lr-scheduler cosine --warmup-ratio 0.1 --precision bf16"
    );
    let commands = [(flat, &*zero), (dotted, &*zero), (fsdp2, &*ours), (trainer, trained), (torchtitan, titan)];
    let more = [(factory, adapted), (train_dpo, dpo), (&*trl, &*kept), (&*stage, &*staged)];
    fs::write(place.0.path().join("empty.jinja"), empty).unwrap();
    let as_text = format!("tokenizer_chat_template: {empty:?}");
    for (theirs, ours) in commands.into_iter().chain(more) {
        let ours = place.config(ours).replace("tokenizer_chat_template: empty.jinja", &as_text);
        assert_eq!(place.config(theirs), ours, "{theirs}");
    }
}

#[test]
fn a_run_logs_once_how_it_read_them() {
    let place = Place(tempfile::tempdir().unwrap());
    let stages = "training_stages: {a: {run: {max_steps: 1}}, b: {run: {max_steps: 1}}}\n\
                  model: {embed_dim: 32, num_layers: 1}\ndata: {dataset: synthetic, max_len: 16}\ncheckpoint: {ckpt_dir: c}\n";
    fs::write(place.0.path().join("c.yaml"), stages).unwrap();
    let (_, stderr) = place.output(
        "--config c.yaml --learning_rate 1e-3 --adam_beta2 0.99 --grad_accum 1 --devices 1 --fsdp-impl torch \
         --dataloader_num_workers 4 --no-sample",
    );
    for line in [
        "--learning_rate is read as --lr (Hugging Face Trainer, OpenRLHF)",
        "--adam_beta2 0.99 is read as --betas 0.9 0.99 (Hugging Face Trainer)",
        "--fsdp-impl torch is read as --fsdp-impl reference (PyTorch FSDP)",
        "--dataloader_num_workers 4 has no effect here: ",
    ] {
        assert_eq!(stderr.matches(line).count(), 1, "{line}: {stderr}");
    }
    assert!(!stderr.contains("grad_accum") && !stderr.contains("devices"), "{stderr}");
}

const HEAD: &str = "# Coming from other tools

```sh run
run_fsdp --dataset notes/ --learning_rate 1e-4 --warmup_ratio 0.1 --lr_scheduler_type linear --logging_steps 5 --output_dir out
run_fsdp --dataset notes/ --train.micro_batch_size 2 --train.batch_size 8 --ds.zero_stage 2 --eval.steps -1 --print-config
```

Flags of other tools are accepted, with dashes or underscores, and read as ours. At the start, the run logs how it read each of them.

- **Defaults** are always ours: `docs/differences.md`.
- **Switches** may stand alone or take `True` or `False`; `--no-x` turns them off.
- **A flag without an equivalent** is refused with the reason and our nearest flag, exit status 2. Values of `False` and 0 are accepted.
- **Two flags that give one setting different values** are refused by name. If a flag is repeated, the last one counts.

This page is generated from `src/run/settings/synonyms.tsv`; `tests/cli/spellings.rs` checks it.
";

/// The page of docs, from the table.
fn page() -> String {
    let mut page = String::from(HEAD);
    let rows: Vec<&Synonym> = synonyms::table().iter().filter(|row| !row.tool.starts_with("flatshard's")).collect();
    let mut tools: Vec<&str> = Vec::new();
    for tool in rows.iter().flat_map(|row| row.tool.split(", ")).filter(|tool| *tool != "flatshard") {
        if !tools.contains(&tool) {
            tools.push(tool);
        }
    }
    tools.sort_by_key(|tool| tool.to_lowercase());
    for tool in tools {
        page += &format!("\n## {tool}\n\n| theirs | ours | |\n| --- | --- | --- |\n");
        let mut last = "";
        for row in rows.iter().filter(|row| row.tool.split(", ").any(|of| of == tool)) {
            if row.spelling != last {
                page += &line(row, &rows);
            }
            last = if ["flag", "idle", "refused"].contains(&row.kind) { row.spelling } else { "" };
        }
    }
    page
}
fn line(row: &Synonym, rows: &[&Synonym]) -> String {
    let code = |text: &str| format!("`{}`", text.replace('|', "\\|"));
    let flag = |pattern: &synonyms::FlagPattern| {
        let value = if pattern.values.is_empty() { String::new() } else { format!(" {}", pattern.values.join("|")) };
        pattern.names.iter().map(|name| code(&format!("--{name}{value}"))).collect::<Vec<_>>().join(", ")
    };
    let value = row.value.trim_end_matches('?');
    let value = if value == "{,}" { "A B" } else { value };
    let setting = || code(&format!("{}.{}", row.section, row.key));
    let (theirs, ours) = match row.kind {
        "section" => (format!("the section {}", code(row.spelling)), format!("the section {}", code(row.section))),
        "key" => (format!("key {}", code(row.spelling)), format!("key {}", setting())),
        "value" => (code(&shown(row, row.spelling)), code(&shown(row, value))),
        "flag" => {
            let with = row.with.as_ref().map_or(String::new(), |with| format!(" with {}", flag(with)));
            let same = rows.iter().filter(|of| of.kind == "flag" && of.spelling == row.spelling && of.tool == row.tool);
            let ours = same.map(|row| {
                let value = row.value.trim_end_matches('?').replace("{}", "X");
                let value = if row.counts_samples() { "X/G".into() } else { value };
                code(&match row.key.split_once('.') {
                    Some((_, half)) => format!("{}, value {}", shown(row, ""), half.parse::<usize>().unwrap() + 1),
                    None if ["{0}", "{1}"].contains(&&*value) => {
                        format!("{}, word {}", shown(row, ""), if value == "{0}" { 1 } else { 2 })
                    }
                    None if value == "{,}" => format!("{}, split at commas", shown(row, "")),
                    None => shown(row, &value),
                })
            });
            (flag(&row.flag) + &with, ours.collect::<Vec<_>>().join(" "))
        }
        kind => {
            let with = row.with.as_ref().map_or(String::new(), |with| format!(" with {}", flag(with)));
            let nearest =
                if row.key.is_empty() { String::new() } else { format!("; nearest {}", code(&shown(row, value))) };
            (flag(&row.flag) + &with, if kind == "idle" { "no effect".into() } else { format!("refused{nearest}") })
        }
    };
    let gives_way = if row.is_weak() { "gives way to other flags" } else { "" };
    let why = if row.why.is_empty() { gives_way } else { row.why };
    format!("| {theirs} | {ours} | {why} |\n")
}

#[test]
fn the_page_is_generated_from_the_table() {
    let made = Path::new(env!("CARGO_TARGET_TMPDIR")).join("coming-from.md");
    fs::write(&made, page()).unwrap();
    let there =
        fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("docs/coming-from.md")).unwrap_or_default();
    assert!(there == page(), "docs/coming-from.md is not what synonyms.tsv gives: copy {} over it", made.display());
}
