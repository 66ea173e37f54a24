//! GRPO that samples what it learns from: rewards rise, samples are exactly on-policy and do not depend on the mesh, a
//! resumed run continues with the same bits, and a reward that cannot be computed ends the run by name.
use crate::common::runs::{Dir, FSDP, Run, events, send, unlaunched};
use flate2::Compression;
use flate2::write::GzEncoder;
use rustix::process::Signal;
use serde_json::{Value, json};
use std::fs;
use std::io::Write;
use std::process::{Command, Output, Stdio};
use std::thread;
use std::time::Duration;

const TINY: &str = "--objective grpo --dataset p.jsonl --tokenizer bytes --embed-dim 16 --num-layers 1 --num-heads 2 \
                    --max-len 32 --max-new-tokens 4 --lr-scheduler constant --warmup-steps 0 --no-shuffle --no-sample \
                    --seed 3 --group-size 4 --epochs 1";

fn run(dir: &Dir, flags: &[&str]) -> Output {
    let mut command = unlaunched(FSDP);
    command.env("FLATSHARD_CACHE_DIR", dir.path("cache")).current_dir(dir.path(""));
    let mut own = TINY.to_string();
    for (flag, value) in [("--dataset", "p.jsonl"), ("--max-len", "32")] {
        if flags.contains(&flag) {
            own = own.replace(&format!("{flag} {value}"), "");
        }
    }
    command.args(own.split_whitespace()).args(["--metrics-path", "m.jsonl"]).args(flags).output().unwrap()
}
/// The steps of a tiny run.
#[track_caller]
fn train(dir: &Dir, flags: &str, reward: &[&str]) -> Vec<Value> {
    let _ = fs::remove_file(dir.path("m.jsonl"));
    let flags: Vec<&str> = flags.split_whitespace().chain(["--reward"]).chain(reward.iter().copied()).collect();
    let ended = run(dir, &flags);
    assert!(ended.status.success(), "{flags:?}: {}", String::from_utf8_lossy(&ended.stderr));
    events(&dir.path("m.jsonl"), "step")
}
fn number(event: &Value, key: &str) -> f64 {
    event[key].as_f64().unwrap_or_else(|| panic!("{key} of {event}"))
}
fn with_prompts(count: usize) -> Dir {
    let dir = Dir::new();
    let row = |i: usize| format!("{}\n", json!({"prompt": format!("{i} of"), "answer": i}));
    fs::write(dir.path("p.jsonl"), (0..count).map(row).collect::<String>()).unwrap();
    dir
}

#[test]
fn rewards_rise_and_samples_are_those_of_the_policy() {
    let dir = with_prompts(160);
    let steps = train(&dir, "--nproc-per-node 1 --batch-size 8 --lr 0.02 --group-size 8", &["regex:[a-z]"]);
    let mean = |steps: &[Value]| steps.iter().map(|step| number(step, "reward_mean")).sum::<f64>() / steps.len() as f64;
    assert_eq!(steps.len(), 20);
    assert!(mean(&steps[16..]) > mean(&steps[..4]) + 0.1, "{} {}", mean(&steps[..4]), mean(&steps[16..]));
    assert!(steps.iter().all(|step| number(step, "logprob_mismatch") == 0.0), "{steps:?}");
    assert!(steps.iter().all(|step| number(step, "completion_tokens") <= 8.0 * 8.0 * 4.0), "{steps:?}");
    // The second update on the same samples is of a policy that has learned from them.
    let twice = train(
        &dir,
        "--nproc-per-node 1 --batch-size 8 --lr 0.02 --updates-per-rollout 2 --max-steps 4",
        &["regex:[a-z]"],
    );
    let apart: Vec<bool> = twice.iter().map(|step| number(step, "logprob_mismatch") > 1e-4).collect();
    assert_eq!(apart, [false, true, false, true], "{twice:?}");
    assert!(twice[0]["reward_mean"] == twice[1]["reward_mean"]);
}

/// Prompts that are not trained on are judged before the first step, at intervals and at the end; what a text is worth
/// does not depend on the mesh, and evaluating changes no weight.
#[test]
fn other_prompts_are_judged_at_evaluations() {
    let dir = with_prompts(32);
    let long = "a prompt that is longer than any that is trained on: ".repeat(2);
    let rows = (0..5).map(|i| format!("{}\n", json!({"prompt": format!("{long}{i}"), "answer": i})));
    fs::write(dir.path("other.jsonl"), rows.collect::<String>()).unwrap();
    let flags = "--lr 0.02 --max-steps 4 --max-positions 256 --nproc-per-node 1 --batch-size 4";
    let evaluated = format!("{flags} --eval-dataset other.jsonl --eval-every 2 --eval-on-start");
    let alone = train(&dir, &evaluated, &["regex:[a-z]", "length:2"]);
    let of = |event: &str| events(&dir.path("m.jsonl"), event);
    let (evals, samples) = (of("eval"), of("samples"));
    assert_eq!(evals.iter().map(|eval| eval["step"].as_u64().unwrap()).collect::<Vec<_>>(), [0, 2, 4]);
    for (eval, samples) in evals.iter().zip(&samples) {
        let texts = samples["samples"].as_array().unwrap();
        let mean = texts.iter().map(|text| number(text, "reward")).sum::<f64>() / 5.0;
        let parts = ["regex:[a-z]", "length:2"].map(|name| number(&eval["rewards"], name));
        assert_eq!((texts.len(), &eval["prompts"]), (5, &json!(5)));
        assert!(
            (number(eval, "reward_mean") - mean).abs() < 1e-6 && (parts[0] + parts[1] - mean).abs() < 1e-6,
            "{eval}"
        );
        let written: f64 = texts.iter().map(|text| number(text, "tokens")).sum();
        assert!((number(eval, "completion_mean") - written / 5.0).abs() < 1e-9 && written <= 20.0, "{eval}");
    }
    let text = |samples: &[Value]| -> Vec<Value> { samples.iter().map(|event| event["samples"].clone()).collect() };
    let texts = text(&samples);
    let split = evaluated.replace("--nproc-per-node 1 --batch-size 4", "--nproc-per-node 2 --batch-size 2");
    train(&dir, &split, &["regex:[a-z]", "length:2"]);
    assert_eq!(text(&of("samples")), texts, "on two ranks");
    let unwatched = train(&dir, flags, &["regex:[a-z]", "length:2"]);
    let losses = |steps: &[Value]| steps.iter().map(|step| number(step, "grad_norm")).collect::<Vec<_>>();
    assert_eq!(losses(&unwatched), losses(&alone));
    // A program that fails ends the run by name, after the steps before it are saved.
    let fails = "while read -r line; do case $line in *other*|*longer*) exit 3;; esac; echo 1; done";
    let ended = run(
        &dir,
        &[
            &evaluated.replace(" --eval-on-start", " --ckpt-dir ck").split(' ').collect::<Vec<_>>()[..],
            &["--reward", fails],
        ]
        .concat(),
    );
    let said = String::from_utf8_lossy(&ended.stderr);
    assert!(
        ended.status.code() == Some(1) && said.contains("step 2: ") && said.contains("other.jsonl: line 1, sample 0"),
        "{said}"
    );
    assert!(dir.path("ck/step-00000002").is_dir(), "{said}");
    // One that fails once is started again, which the log says.
    let once =
        "while read -r line; do case $line in *longer*) [ -e once ] || { touch once; exit 3; };; esac; echo 1; done";
    let again: Vec<&str> = evaluated.split(' ').filter(|word| *word != "--eval-on-start").collect();
    let ended = run(&dir, &[&again[..], &["--reward", once]].concat());
    let said = String::from_utf8_lossy(&ended.stderr);
    assert!(ended.status.success() && said.contains("step 2: ") && said.contains("it was started again"), "{said}");
    let refused = run(&dir, &["--reward", "number", "--eval-dataset", "none.jsonl"]);
    let said = String::from_utf8_lossy(&refused.stderr);
    assert!(refused.status.code() == Some(2) && said.contains("--eval-dataset none.jsonl"), "{said}");
}

#[test]
fn samples_do_not_depend_on_the_mesh_and_can_be_recorded() {
    let dir = with_prompts(16);
    let flags = "--lr 0.01 --max-steps 3";
    let recorded = |name: &str| -> Vec<Value> {
        fs::read_to_string(dir.path(name)).unwrap().lines().map(|line| serde_json::from_str(line).unwrap()).collect()
    };
    let alone =
        train(&dir, &format!("{flags} --nproc-per-node 1 --batch-size 4 --record-rollouts r.jsonl"), &["length:2"]);
    let groups = recorded("r.jsonl");
    assert_eq!(groups.len(), 12);
    for split in ["--nproc-per-node 2 --batch-size 2", "--nproc-per-node 1 --batch-size 2 --grad-accum 2"] {
        let other = train(&dir, &format!("{flags} {split} --record-rollouts {}.jsonl", split.len()), &["length:2"]);
        for key in ["reward_mean", "reward_std", "completion_tokens", "logprob_mismatch"] {
            assert_eq!(alone[0][key], other[0][key], "{split}: {key}");
        }
        let mine = &recorded(&format!("{}.jsonl", split.len()))[..2];
        assert_eq!(mine, &groups[..2], "{split}");
    }
    // Recorded samples are those that the run has learned from.
    let _ = fs::remove_file(dir.path("m.jsonl"));
    let mut command = unlaunched(FSDP);
    command.env("FLATSHARD_CACHE_DIR", dir.path("cache")).current_dir(dir.path(""));
    let line = TINY.replace("--dataset p.jsonl", "--rollouts r.jsonl").replace("--max-new-tokens 4", "");
    let line = line.replace("--group-size 4", "--lr 0.01 --max-steps 1 --batch-size 4 --nproc-per-node 1");
    let ended = command.args(line.split_whitespace()).args(["--metrics-path", "m.jsonl"]).output().unwrap();
    assert!(ended.status.success(), "{}", String::from_utf8_lossy(&ended.stderr));
    let again = &events(&dir.path("m.jsonl"), "step")[0];
    for key in ["loss", "grad_norm", "reward_mean", "logprob_mismatch"] {
        assert_eq!(again[key], alone[0][key], "{key}");
    }
}

#[test]
fn a_resumed_run_samples_and_learns_the_same() {
    let dir = with_prompts(16);
    let flags = "--lr 0.01 --batch-size 2 --nproc-per-node 1";
    let whole = train(
        &dir,
        &format!("{flags} --max-steps 4 --ckpt-dir whole --record-rollouts w.jsonl"),
        &["number", "regex:x"],
    );
    train(&dir, &format!("{flags} --max-steps 2 --ckpt-dir part"), &["number", "regex:x"]);
    // A record of steps that are taken again has them once.
    fs::copy(dir.path("w.jsonl"), dir.path("r.jsonl")).unwrap();
    let again = format!("{flags} --max-steps 4 --ckpt-dir part --resume auto --record-rollouts r.jsonl");
    let rest = train(&dir, &again, &["number", "regex:x"]);
    assert_eq!(fs::read(dir.path("r.jsonl")).unwrap(), fs::read(dir.path("w.jsonl")).unwrap());
    const SAME: [&str; 6] = ["loss", "grad_norm", "completion_mean", "completion_cut", "flat_groups", "rewards"];
    let bits = |steps: &[Value]| steps.iter().map(|s| SAME.map(|key| s[key].to_string())).collect::<Vec<_>>();
    assert_eq!(bits(&rest), bits(&whole[2..]));
    // Between the updates on the samples of a step, also on another mesh: there to rounding.
    let twice = "--lr 0.01 --updates-per-rollout 3";
    let rewards = ["length:2", "regex:x"];
    let whole = train(&dir, &format!("{twice} --batch-size 2 --nproc-per-node 1 --max-steps 6"), &rewards);
    let halves = format!("{twice} --batch-size 1 --nproc-per-node 2 --ckpt-dir twice");
    train(&dir, &format!("{halves} --max-steps 2"), &rewards);
    fs::create_dir(dir.path("alone")).unwrap();
    copy(&dir.path("twice"), &dir.path("alone"));
    let rest = train(&dir, &format!("{halves} --max-steps 6 --resume auto"), &rewards);
    let both = train(&dir, &halves.replace("--ckpt-dir twice", "--max-steps 6"), &rewards);
    assert_eq!(bits(&rest), bits(&both[2..]));
    let other = format!("{twice} --batch-size 2 --nproc-per-node 1 --ckpt-dir alone --resume auto --max-steps 3");
    let other = &train(&dir, &other, &rewards)[0];
    for key in ["loss", "reward_mean", "completion_tokens", "logprob_mismatch"] {
        let [a, b] = [other, &whole[2]].map(|step| number(step, key));
        assert!((a - b).abs() < 1e-5, "{key}: {a} {b}");
    }
    // A checkpoint that has no samples is refused.
    train(&dir, "--lr 0.01 --batch-size 2 --nproc-per-node 1 --ckpt-dir once --max-steps 2", &rewards);
    let args =
        format!("{twice} --batch-size 2 --nproc-per-node 1 --ckpt-dir once --max-steps 4 --resume auto --reward json");
    let ended = run(&dir, &args.split_whitespace().collect::<Vec<_>>());
    let text = String::from_utf8_lossy(&ended.stderr);
    assert!(!ended.status.success() && text.contains("between the 3 updates"), "{text}");
}

#[test]
fn the_highest_mean_reward_is_the_best_and_patience_waits_for_it() {
    let dir = with_prompts(16);
    let flags = "--nproc-per-node 1 --batch-size 2 --lr 0.02 --max-steps 6 --eval-dataset p.jsonl --eval-every 1";
    let saves = "--save-on-best --load-best --ckpt-dir ck --save-hf hf";
    train(&dir, &format!("{flags} {saves}"), &["regex:[a-z]"]);
    let (mut highest, mut best) = (f64::NEG_INFINITY, 0);
    for event in events(&dir.path("m.jsonl"), "eval").iter().filter(|event| event["step"] != 0) {
        let reward = number(event, "reward_mean");
        assert_eq!(event["best"], reward > highest, "{event}");
        if reward > highest {
            (highest, best) = (reward, event["step"].as_u64().unwrap());
        }
    }
    assert_eq!(fs::read_to_string(dir.path("ck/best")).unwrap(), format!("step-{best:08}\n"));
    let saved = events(&dir.path("m.jsonl"), "checkpoint").into_iter().find(|event| event["step"] == best).unwrap();
    assert!(
        saved["eval_loss"].is_null() && number(&saved, "eval_reward") == highest && saved["best"] == true,
        "{saved}"
    );
    // Every text has the same reward, so that the first evaluation stays the best.
    train(&dir, &format!("{flags} --patience 2"), &["regex:^"]);
    let end = &events(&dir.path("m.jsonl"), "end")[0];
    assert_eq!((&end["steps"], &end["stopped"]), (&3.into(), &"patience".into()), "{end}");
}

fn copy(from: &std::path::Path, to: &std::path::Path) {
    for entry in fs::read_dir(from).unwrap().map(Result::unwrap) {
        let to = to.join(entry.file_name());
        match entry.file_type().unwrap().is_dir() {
            true => {
                fs::create_dir(&to).unwrap();
                copy(&entry.path(), &to);
            }
            false => drop(fs::copy(entry.path(), to).unwrap()),
        }
    }
}

#[test]
fn a_memory_budget_bounds_the_texts_at_once() {
    let dir = with_prompts(16);
    let flags = "--lr 0.01 --batch-size 4 --nproc-per-node 1 --max-steps 2 --reward length:2";
    let planned = |more: &str| -> (u64, u64) {
        let ended = run(&dir, &format!("{flags} {more} --print-config").split_whitespace().collect::<Vec<_>>());
        let text = String::from_utf8_lossy(&ended.stdout).into_owned();
        assert!(ended.status.success(), "{}", String::from_utf8_lossy(&ended.stderr));
        let plan: Value = serde_saphyr::from_str(&text).unwrap();
        let bytes = plan["plan"]["planned_bytes"]["total"].as_u64().unwrap();
        (plan["plan"]["texts_at_once"].as_u64().unwrap(), bytes)
    };
    let (all, bytes) = planned("");
    assert_eq!(all, 16, "four prompts of four texts");
    let budget = format!("--memory-budget {}", bytes - 1);
    let (fewer, within) = planned(&budget);
    assert!((1..16).contains(&fewer) && within < bytes, "{fewer} {within}");
    let flags = "--lr 0.01 --batch-size 4 --nproc-per-node 1 --max-steps 2";
    let (most, few) = (train(&dir, flags, &["length:2"]), train(&dir, &format!("{flags} {budget}"), &["length:2"]));
    for (a, b) in most.iter().zip(&few) {
        for key in ["loss", "grad_norm", "reward_mean", "completion_tokens"] {
            assert_eq!(a[key], b[key], "{key}");
        }
    }
}

#[test]
fn a_reward_that_cannot_be_computed_names_the_row_and_the_command() {
    let dir = with_prompts(8);
    let program = "while read l; do echo '{\"reward\": 0.25}'; done";
    let steps = train(&dir, "--batch-size 2 --max-steps 2 --nproc-per-node 2", &[program]);
    assert!(steps.iter().all(|step| number(step, "reward_mean") == 0.25), "{steps:?}");
    for (command, says) in [("exit 7", "exit status: 7"), ("while read l; do echo none; done", "wrote \"none\"")] {
        let _ = fs::remove_file(dir.path("m.jsonl"));
        let flags = ["--batch-size", "2", "--nproc-per-node", "1", "--max-steps", "2", "--reward", command];
        let ended = run(&dir, &flags);
        let text = String::from_utf8_lossy(&ended.stderr).into_owned();
        assert_eq!(ended.status.code(), Some(1), "{text}");
        assert!(
            [says, command, "p.jsonl: line 1, sample 0", "step 1"].iter().all(|part| text.contains(part)),
            "{text}"
        );
        assert!(events(&dir.path("m.jsonl"), "step").is_empty());
    }
    fs::write(dir.path("p.jsonl"), "{\"prompt\": \"a\"}\n").unwrap();
    let ended = run(&dir, &["--batch-size", "1", "--nproc-per-node", "1", "--reward", "exact"]);
    let text = String::from_utf8_lossy(&ended.stderr);
    assert!(ended.status.code() == Some(2) && text.contains("p.jsonl: line 1 has no `answer`"), "{text}");
}

/// What was learned before is saved: when a program fails, on one rank of two, and when a signal comes while it hangs.
/// A program that leaves a process behind, in a session of its own and with the rank's standard error.
#[test]
fn what_a_reward_leaves_behind_does_not_keep_the_run() {
    let dir = with_prompts(4);
    let program = "setsid sleep 3600 & echo $! > left; while read l; do echo True; done";
    let steps = train(&dir, "--lr 0.01 --batch-size 2 --nproc-per-node 1 --max-steps 2", &[program]);
    let left = fs::read_to_string(dir.path("left")).unwrap();
    assert!(Command::new("kill").arg(left.trim()).status().unwrap().success(), "it runs longer than the run");
    assert!(steps.iter().all(|step| number(step, "reward_mean") == 1.0), "{steps:?}");
}

#[test]
fn steps_before_a_reward_that_fails_or_hangs_are_saved() {
    let dir = with_prompts(16);
    let flags = "--lr 0.01 --batch-size 2 --nproc-per-node 2 --max-steps 3";
    // Prompts are "0 of" to "15 of", four a step.
    let judge =
        |then: &str| format!("while read l; do case \"$l\" in *'\"prompt\":\"9 of'*) {then};; esac; echo 1; done");
    let whole = train(&dir, flags, &["while read l; do echo 1; done"]);
    let saved = |name: &str| fs::read_to_string(dir.path(name).join("latest")).unwrap_or_default();
    let fails = judge("exit 4");
    let args: Vec<&str> = flags.split_whitespace().chain(["--ckpt-dir", "failed", "--reward", &fails]).collect();
    let ended = run(&dir, &args);
    let text = String::from_utf8_lossy(&ended.stderr).into_owned();
    assert!(ended.status.code() == Some(1) && text.contains("p.jsonl: line 10, sample 0"), "{text}");
    assert!(text.contains("exit status: 4, twice") && saved("failed").starts_with("step-00000002"), "{text}");
    assert!(!text.contains("Collectives"), "{text}");
    let again = format!("{flags} --ckpt-dir failed --resume auto");
    let rest = train(&dir, &again, &["while read l; do echo 1; done"]);
    assert_eq!((rest.len(), &rest[0]["loss"], &rest[0]["grad_norm"]), (1, &whole[2]["loss"], &whole[2]["grad_norm"]));

    let hangs = judge("echo hangs > hangs; sleep 5000");
    let mut command = unlaunched(FSDP);
    command.env("FLATSHARD_CACHE_DIR", dir.path("cache")).current_dir(dir.path(""));
    command.args(TINY.split_whitespace()).args(flags.split_whitespace());
    let command = command
        .args(["--ckpt-dir", "hung", "--reward-timeout", "4000", "--reward", &hangs])
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    let run = Run(command.spawn().unwrap());
    while !dir.path("hangs").exists() {
        thread::sleep(Duration::from_millis(10));
    }
    send(Signal::TERM, run.pid());
    let ended = run.end(); // the program would hang for longer than a test may take
    assert_eq!(ended.status.code(), Some(143), "{}", ended.stderr);
    assert!(saved("hung").starts_with("step-00000002"), "{}", ended.stderr);
}

/// Lengths, each reward, and prompts that teach nothing, over all ranks.
#[test]
fn the_metrics_of_a_step_say_what_its_samples_are() {
    let dir = with_prompts(4);
    let flags = "--batch-size 2 --nproc-per-node 2 --max-steps 1 --record-rollouts r.jsonl --reward-weights 1 0.5";
    let step = train(&dir, flags, &["regex:[a-z]", "json"]).remove(0);
    let groups: Vec<Value> = ["r.jsonl", "r.1.jsonl"]
        .iter()
        .flat_map(|name| fs::read_to_string(dir.path(name)).unwrap().lines().map(str::to_string).collect::<Vec<_>>())
        .map(|line| serde_json::from_str(&line).unwrap())
        .collect();
    let samples: Vec<&Value> = groups.iter().flat_map(|group| group["samples"].as_array().unwrap()).collect();
    let lengths: Vec<f64> = samples.iter().map(|of| of["ids"].as_array().unwrap().len() as f64).collect();
    let mean = |values: &[f64]| values.iter().sum::<f64>() / values.len() as f64;
    let share = |is: &dyn Fn(&&&Value) -> bool| samples.iter().filter(is).count() as f64 / samples.len() as f64;
    let lower = share(&|of| of["text"].as_str().unwrap().bytes().any(|b| b.is_ascii_lowercase()));
    let flat = groups.iter().filter(|group| {
        let rewards: Vec<&Value> = group["samples"].as_array().unwrap().iter().map(|of| &of["reward"]).collect();
        rewards.windows(2).all(|pair| pair[0] == pair[1])
    });
    assert_eq!(samples.len(), 16);
    assert_eq!(number(&step, "completion_mean"), mean(&lengths));
    assert_eq!(number(&step, "completion_min"), lengths.iter().copied().fold(f64::INFINITY, f64::min));
    assert_eq!(number(&step, "completion_max"), lengths.iter().copied().fold(0.0, f64::max));
    assert_eq!(number(&step, "completion_cut"), share(&|of| of["ids"].as_array().unwrap().len() == 4));
    assert_eq!(number(&step, "flat_groups"), flat.count() as f64 / 4.0);
    assert_eq!(number(&step["rewards"], "regex:[a-z]"), lower);
    let sum = lower + 0.5 * number(&step["rewards"], "json");
    assert!((number(&step, "reward_mean") - sum).abs() < 1e-6, "{step}");
    assert!(number(&step, "sample_time_s") > 0.0 && number(&step, "reward_time_s") >= 0.0, "{step}");
}

/// The loss is that of the distribution that was sampled, of recorded samples too; and ranks never share a prompt.
#[test]
fn a_temperature_is_that_of_samples_and_of_the_loss() {
    let dir = with_prompts(8);
    let flags = "--lr 0.01 --max-steps 1 --batch-size 4 --nproc-per-node 1";
    let warm = train(&dir, &format!("{flags} --temperature 1.5 --record-rollouts r.jsonl"), &["regex:[a-z]"]).remove(0);
    assert_eq!(number(&warm, "logprob_mismatch"), 0.0);
    let again = |temperature: &str| {
        let _ = fs::remove_file(dir.path("m.jsonl"));
        let mut command = unlaunched(FSDP);
        command.env("FLATSHARD_CACHE_DIR", dir.path("cache")).current_dir(dir.path(""));
        let line = TINY.replace("--dataset p.jsonl", "--rollouts r.jsonl").replace("--max-new-tokens 4", flags);
        let line = line.replace("--group-size 4", temperature);
        let ended = command.args(line.split_whitespace()).args(["--metrics-path", "m.jsonl"]).output().unwrap();
        assert!(ended.status.success(), "{}", String::from_utf8_lossy(&ended.stderr));
        events(&dir.path("m.jsonl"), "step").remove(0)
    };
    let same = again("--temperature 1.5");
    for key in ["loss", "grad_norm", "entropy", "logprob_mismatch"] {
        assert_eq!(same[key], warm[key], "{key}");
    }
    assert!(number(&again(""), "logprob_mismatch") > 1e-3);
    fs::write(dir.path("p.jsonl"), "{\"prompt\": \"a\"}\n").unwrap();
    let args = "--lr 0.01 --max-steps 1 --batch-size 1 --nproc-per-node 2 --reward json";
    let ended = run(&dir, &args.split_whitespace().collect::<Vec<_>>());
    let text = String::from_utf8_lossy(&ended.stderr);
    assert!(ended.status.code() == Some(2) && text.contains("1 prompt, fewer than the 2"), "{text}");
}

/// The prompts of the groups in a file of recorded rollouts, as text of bytes.
fn asked(dir: &Dir, name: &str) -> Vec<String> {
    let text = fs::read_to_string(dir.path(name)).unwrap();
    let prompt = |line: &str| {
        let row: Value = serde_json::from_str(line).unwrap();
        let ids = row["prompt_ids"].as_array().unwrap().iter().map(|id| id.as_u64().unwrap() as u8);
        String::from_utf8(ids.collect()).unwrap()
    };
    text.lines().map(prompt).collect()
}

/// A reward's program gets the fields of the row that the prompt is from.
#[test]
fn prompts_come_from_every_kind_of_file_of_rows() {
    let dir = Dir::new();
    let rows: Vec<Value> =
        (0..4).map(|i| json!({"question": format!("why {i}"), "answer": i.to_string(), "source": "w"})).collect();
    let lines: String = rows.iter().map(|row| format!("{row}\n")).collect();
    let mut gz = GzEncoder::new(fs::File::create(dir.path("p.jsonl.gz")).unwrap(), Compression::default());
    gz.write_all(lines.as_bytes()).unwrap();
    gz.finish().unwrap();
    fs::write(dir.path("p.json"), json!(rows).to_string()).unwrap();
    let csv: String = (0..4).map(|i| format!("why {i},{i},w\n")).collect();
    fs::write(dir.path("p.csv"), format!("question,answer,source\n{csv}")).unwrap();
    fs::create_dir(dir.path("folder")).unwrap();
    for (name, part) in [("a.jsonl", 0..2), ("b.jsonl", 2..4)] {
        let half: String = rows[part].iter().map(|row| format!("{row}\n")).collect();
        fs::write(dir.path("folder").join(name), half).unwrap();
    }
    let program = r#"while read -r l; do case "$l" in *'"source":"w"'*) echo 1;; *) echo 0;; esac; done"#;
    let flags = "--nproc-per-node 1 --batch-size 4 --max-steps 1";
    let mut first: Option<Value> = None;
    for (data, key) in [
        ("p.json", "--input-key"),
        ("p.jsonl.gz", "--prompt-key"),
        ("p.csv", "--prompt-key"),
        ("folder", "--input-key"),
        ("folder/a.jsonl folder/b.jsonl", "--input-key"),
    ] {
        let _ = fs::remove_file(dir.path("r.jsonl"));
        let flags = format!("{flags} --record-rollouts r.jsonl {key} question --dataset {data}");
        let step = train(&dir, &flags, &[program]).remove(0);
        assert_eq!(asked(&dir, "r.jsonl"), ["why 0", "why 1", "why 2", "why 3"], "{data}");
        assert_eq!(number(&step, "reward_mean"), 1.0, "{data}: {step}");
        let same = first.get_or_insert(step.clone());
        for key in ["loss", "entropy", "completion_tokens"] {
            assert_eq!(step[key], same[key], "{data}: {key}");
        }
    }
}

/// Rows that are no prompts end the run, or are skipped and counted, and rewards get the row of the sample's prompt.
#[test]
fn skipped_and_dropped_prompts_are_counted_and_the_file_is_named() {
    let dir = Dir::new();
    let golden = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/data/golden/parquet/prompts.parquet");
    fs::copy(golden, dir.path("q.parquet")).unwrap();
    fs::write(dir.path("chat.jinja"), "{% for m in messages %}{{ m.content }}{% endfor %}").unwrap();
    let flags = "--dataset q.parquet --input-key q --nproc-per-node 1 --batch-size 5 --max-len 48 --max-positions 512 --max-steps 1 \
                 --apply-chat-template --tokenizer-chat-template chat.jinja --record-rollouts r.jsonl --reward";
    let flags: Vec<&str> = flags.split_whitespace().collect();
    let refused = run(&dir, &[&flags[..], &["length:9"]].concat());
    let text = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert!(refused.status.code() == Some(2) && text.contains("q.parquet: row 5 (from 0) is empty"), "{text}");
    // 1 for the row's own answer to its prompt: the prompt of row 6 is a Chinese character.
    let program = r#"while read -r l; do
        case "$l" in *'"id":0'*'"q":"What'*|*'"id":1'*|*'"id":3'*|*'"id":4'*|*'"id":6'*) echo 1;; *) echo 0;; esac; done"#;
    let ran = run(&dir, &[&flags[..], &[program, "--skip-bad-rows"]].concat());
    let text = String::from_utf8_lossy(&ran.stderr).into_owned();
    assert!(ran.status.success(), "{text}");
    assert_eq!(asked(&dir, "r.jsonl").len(), 5);
    assert_eq!(asked(&dir, "r.jsonl")[4], "漢");
    assert_eq!(number(&events(&dir.path("m.jsonl"), "step")[0], "reward_mean"), 1.0);
    let line = text.lines().find(|line| line.starts_with("data ")).unwrap();
    for part in [
        "q.parquet: 1 file",
        "in 5 prompts; 4 samples of each, of up to 4 tokens",
        "1 prompt dropped",
        "1 bad row skipped (the first: ",
        "is empty",
    ] {
        assert!(line.contains(part), "{part}: {line}");
    }
    assert!(!line.contains("prompts-") && !line.contains("not read"), "{line}");
    // Both keys, weights, and a file without prompts.
    for (more, says) in [
        ("--prompt-key id", "--prompt-key id and --input-key q both name the field"),
        ("--input-key nothing", "has no `nothing`; its keys are: id, q, blob, a"),
        ("--dataset q.parquet:0.5", "without weights"),
        ("--dataset chat.jinja", "chat.jinja: holds text, not rows"),
        ("--max-len 4 --skip-bad-rows", "--max-len 4 has no room for any prompt"),
        ("--output-key a", "none of the rewards compares"),
    ] {
        let (words, mut flags) = (more.split_whitespace().collect::<Vec<_>>(), flags.clone());
        if let Some(at) = flags.iter().position(|flag| *flag == words[0]) {
            flags.drain(at..at + 2);
        }
        let ended = run(&dir, &[&flags[..], &["length:9"], &words].concat());
        let text = String::from_utf8_lossy(&ended.stderr).into_owned();
        assert!(ended.status.code() == Some(2) && text.contains(says), "{more}: {text}");
    }
}
