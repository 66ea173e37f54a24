//! `--objective grpo --rollouts` from the command line: a step does not depend on how it is split, updates repeat the
//! groups of a step, also over a restart, adapters are compared with their base, and bad rows are refused by name.
use crate::common::runs::{Dir, FSDP, events, unlaunched};
use serde_json::{Value, json};
use std::fs;
use std::process::Output;

const TINY: &str = "--objective grpo --tokenizer bytes --embed-dim 16 --num-layers 1 --num-heads 2 --max-len 32 \
                    --lr 0.02 --lr-scheduler constant --warmup-steps 0 --no-shuffle --no-sample --seed 3";

fn run(dir: &Dir, flags: &str) -> Output {
    let mut command = unlaunched(FSDP);
    command.env("FLATSHARD_CACHE_DIR", dir.path("cache")).current_dir(dir.path(""));
    command.args(flags.split_whitespace()).output().unwrap()
}
fn stderr(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}
/// The steps of a tiny run, and what it said.
fn train(dir: &Dir, flags: &str) -> (Vec<Value>, String) {
    let metrics = dir.path("m.jsonl");
    let _ = fs::remove_file(&metrics);
    let ended = run(dir, &format!("{TINY} --metrics-path m.jsonl {flags}"));
    assert!(ended.status.success(), "{flags}: {}", stderr(&ended));
    (events(&metrics, "step"), stderr(&ended))
}
fn number(event: &Value, key: &str) -> f64 {
    event[key].as_f64().unwrap_or_else(|| panic!("{key} of {event}"))
}

/// Group `i`: two to four samples, which are about as likely as those of an untrained model.
fn group(i: usize) -> Value {
    let sample = |j: usize| {
        let ids: Vec<usize> = (0..2 + (i + j) % 3).map(|k| 97 + (7 * i + 3 * j + k) % 20).collect();
        let logprobs: Vec<f64> = ids.iter().map(|id| -5.2 - (id % 5) as f64 / 4.0).collect();
        json!({"ids": ids, "logprobs": logprobs, "reward": (i * j % 4) as f64 - 0.5 + i as f64 / 8.0})
    };
    json!({"prompt_ids": [65 + i, 66, 67], "samples": (0..2 + i % 3).map(sample).collect::<Vec<_>>()})
}
fn write(dir: &Dir, name: &str, rows: &[Value]) {
    fs::write(dir.path(name), rows.iter().map(|row| format!("{row}\n")).collect::<String>()).unwrap();
}
fn with_groups() -> Dir {
    let dir = Dir::new();
    write(&dir, "r.jsonl", &(0..8).map(group).collect::<Vec<_>>());
    dir
}

/// The shipped samples are those of the policy that the example starts from, and updates on the same samples make the
/// better ones more likely.
#[test]
fn the_shipped_example_learns() {
    let dir = Dir::new();
    let mut command = unlaunched(FSDP);
    command.current_dir(env!("CARGO_MANIFEST_DIR")).args(["--config", "configs/grpo.yaml"]);
    let ended = command.args(["--metrics-path", &dir.arg("m.jsonl")]).output().unwrap();
    assert!(ended.status.success(), "{}", stderr(&ended));
    let steps = events(&dir.path("m.jsonl"), "step");
    assert_eq!(steps.len(), 12, "three steps of eight groups, four times");
    let of = |step: usize, key: &str| number(&steps[step], key);
    assert!(of(0, "logprob_mismatch") < 1e-4 && of(1, "logprob_mismatch") > 1e-3, "{} {}", steps[0], steps[1]);
    for first in [0, 4, 8] {
        assert!(of(first + 3, "loss") < of(first, "loss") - 0.02, "{} {}", steps[first], steps[first + 3]);
    }
}

/// Four groups in a step, each of which is taken twice: on one rank or two, at once or accumulated.
#[test]
fn a_step_does_not_depend_on_its_split() {
    let dir = with_groups();
    for loss in ["--loss-type grpo --beta 0.05 --clip-high 0.28", "--loss-type dr_grpo --max-new-tokens 6"] {
        let steps = |split: &str| {
            train(&dir, &format!("--rollouts r.jsonl --updates-per-rollout 2 --epochs 1 {loss} {split}")).0
        };
        let alone = steps("--nproc-per-node 1 --batch-size 4");
        assert_eq!(alone.len(), 4, "two steps of each four groups, twice");
        assert_eq!(alone[0]["reward_mean"], alone[1]["reward_mean"]);
        assert_ne!(alone[0]["reward_mean"], alone[2]["reward_mean"]);
        assert!(alone.iter().any(|step| number(step, "clip_fraction") > 0.0), "{alone:?}");
        assert!(alone.iter().all(|step| step["completion_tokens"] == step["trained_tokens"]), "{alone:?}");
        for split in [
            "--nproc-per-node 2 --batch-size 2",
            "--nproc-per-node 1 --batch-size 1 --grad-accum 4",
            "--nproc-per-node 2 --batch-size 4 --ring-attn-size 2",
            "--nproc-per-node 2 --batch-size 4 --tp-size 2",
        ] {
            let is_cut = split.contains("tp-size");
            for (a, b) in alone.iter().zip(steps(split)) {
                assert_eq!(b["entropy"].is_null(), is_cut, "{split}");
                for key in ["loss", "reward_mean", "reward_std", "kl", "clip_fraction", "entropy", "logprob_mismatch"] {
                    let (a, b) = (a[key].as_f64(), b[key].as_f64());
                    let near = a.zip(b).map_or(a == b || is_cut, |(a, b)| (a - b).abs() < 3e-5 * a.abs().max(0.1));
                    assert!(near, "{loss} {split}: {key} {a:?} and {b:?}");
                }
            }
        }
    }
}

/// A run that resumes between the two updates of a step continues with the second one, bit for bit.
#[test]
fn a_run_resumes_between_updates_on_the_same_rollouts() {
    let dir = with_groups();
    let flags = "--rollouts r.jsonl --updates-per-rollout 2 --nproc-per-node 1 --batch-size 2 --beta 0.05";
    let whole = train(&dir, &format!("{flags} --max-steps 6")).0;
    train(&dir, &format!("{flags} --max-steps 3 --ckpt-dir ck"));
    let resumed = train(&dir, &format!("{flags} --max-steps 6 --ckpt-dir ck --resume auto")).0;
    let bits = |steps: &[Value]| -> Vec<_> {
        steps.iter().map(|step| (step["step"].as_u64(), number(step, "loss").to_bits(), number(step, "kl"))).collect()
    };
    assert_eq!(bits(&resumed), bits(&whole[3..]));
}

/// From a model, without any other flag than where the samples are; and with adapters over 4 bits, whose base is the
/// reference.
#[test]
fn a_model_learns_with_the_defaults_and_with_adapters() {
    let dir = with_groups();
    train(&dir, "--rollouts r.jsonl --nproc-per-node 1 --batch-size 2 --max-steps 1 --save-hf model");
    let ended = run(&dir, "--objective grpo --rollouts r.jsonl --pretrain model --nproc-per-node 2 --print-config");
    assert!(ended.status.success(), "{}", stderr(&ended));
    let plan = String::from_utf8_lossy(&ended.stdout).into_owned();
    for stated in ["lr: 1.0e-6", "loss_type: dapo", "beta: 0.0", "8 groups", "max_len: 16", "rollouts:"] {
        assert!(plan.contains(stated), "{stated}: {plan}");
    }
    let adapted = "--objective grpo --rollouts r.jsonl --pretrain model --lora-rank 2 --load-in-4bit --beta 0.1 --lr 0.05 \
                   --nproc-per-node 2 --batch-size 2 --max-steps 3 --metrics-path lora.jsonl";
    let ended = run(&dir, adapted);
    assert!(ended.status.success(), "{}", stderr(&ended));
    let steps = events(&dir.path("lora.jsonl"), "step");
    assert_eq!(number(&steps[0], "kl"), 0.0, "new adapters are 0");
    assert!(number(&steps[2], "kl") > 0.0, "{}", steps[2]);
}

#[test]
fn samples_are_shown_with_their_advantages() {
    let dir = Dir::new();
    let sample = |text: &str, reward: f64| {
        let ids: Vec<u8> = text.bytes().collect();
        json!({"ids": ids, "logprobs": vec![-1.0; text.len()], "reward": reward})
    };
    let rows = [
        json!({"prompt_ids": [49, 43], "samples": [sample("12", 0.0), sample("3", 2.0)]}),
        json!({"prompt_ids": [49], "samples": [sample("this one is too long", 1.0)]}),
        json!({"prompt_ids": [50], "samples": [sample("5", 1.0)]}),
    ];
    write(&dir, "r.jsonl", &rows);
    let shown = |more: &str| -> Vec<Value> {
        let flags = "--objective grpo --tokenizer bytes --rollouts r.jsonl --max-len 12 --print-samples 3";
        let out = run(&dir, &format!("{flags} {more}"));
        assert!(out.status.success(), "{}", stderr(&out));
        String::from_utf8(out.stdout).unwrap().lines().map(|line| serde_json::from_str(line).unwrap()).collect()
    };
    let lines = shown("");
    let seen: Vec<_> = lines.iter().map(|line| (&line["row"], &line["sample"], &line["loss_text"])).collect();
    let [no, zero, one, two] = [json!(null), json!(0), json!(1), json!(2)];
    let [first, second, third] = [json!(["12"]), json!(["3"]), json!(["5"])];
    let expected = [(&zero, &zero, &first), (&zero, &one, &second), (&one, &no, &no), (&two, &zero, &third)];
    assert_eq!(seen, expected);
    assert_eq!(
        (&lines[0]["text"], &lines[2]["dropped"]),
        (&json!("1+12"), &json!("an answer does not fit within max_len"))
    );
    let advantage = 1.0 / (2f64.sqrt() + 1e-4);
    assert!((number(&lines[1], "advantage") - advantage).abs() < 1e-9, "{}", lines[1]);
    assert_eq!(number(&lines[3], "advantage"), 0.0);
    let undivided = shown("--loss-type dr_grpo --max-new-tokens 8");
    assert_eq!((number(&undivided[0], "advantage"), number(&undivided[0], "reward")), (-1.0, 0.0));
}

/// What is dropped, alone or not read is counted in the line about the data.
#[test]
fn the_data_line_names_what_does_not_count() {
    let dir = Dir::new();
    let mut rows: Vec<Value> = (0..4).map(group).collect();
    rows[0]["samples"][1]["text"] = json!("abc");
    rows[1]["source"] = json!("web");
    rows[2]["samples"].as_array_mut().unwrap().truncate(1);
    rows.push(json!({"prompt_ids": vec![65; 40], "samples": [{"ids": [1], "logprobs": [-1], "reward": 0}]}));
    write(&dir, "r.jsonl", &rows);
    let (_, said) = train(&dir, "--rollouts r.jsonl --nproc-per-node 1 --batch-size 2 --max-steps 1");
    for stated in [
        "in 4 groups; 1 of one sample, whose advantage is 0",
        "1 group dropped (an answer does not fit within max_len: 1)",
        "not read: `source` in 1 row, `text` of samples in 1 row",
    ] {
        assert!(said.contains(stated), "{stated}: {said}");
    }
}

#[test]
fn bad_rollouts_and_settings_are_refused_by_name() {
    let dir = with_groups();
    let refused = |flags: &str, expected: &[&str]| {
        let ended = run(&dir, &format!("{TINY} --nproc-per-node 1 --batch-size 2 --max-steps 1 {flags}"));
        let said = stderr(&ended);
        assert_eq!(ended.status.code(), Some(2), "{flags}: {said}");
        for text in expected {
            assert!(said.contains(text), "{flags}: {text}: {said}");
        }
    };
    let sample =
        |ids: Value, logprobs: Value, reward: Value| json!({"ids": ids, "logprobs": logprobs, "reward": reward});
    let row = |sample: Value| json!({"prompt_ids": [65], "samples": [sample]});
    let good = || sample(json!([66]), json!([-0.5]), json!(1));
    let masked = json!({"ids": [66, 67], "logprobs": [-1, -1], "reward": 1, "tool_mask": [1, 0]});
    for (bad, expected) in [
        (json!({"samples": [good()]}), "has no `prompt_ids`"),
        (json!({"prompt_ids": [], "samples": [good()]}), "has no prompt_ids"),
        (json!({"prompt_ids": [999], "samples": [good()]}), "has token id 999, but vocab_size is"),
        (json!({"prompt_ids": ["a"], "samples": [good()]}), "has \"a\" in its prompt_ids"),
        (json!({"prompt_ids": [65], "samples": []}), "has no samples"),
        (json!({"prompt_ids": [65], "samples": [good(), 7]}), "has a sample 1 that is a number"),
        (row(sample(json!([]), json!([]), json!(1))), "has a sample 0 that has no ids"),
        (row(sample(json!([-1]), json!([-1]), json!(1))), "has a sample 0 that has token id -1"),
        (row(sample(json!([66, 67]), json!([-1]), json!(1))), "has a sample 0 that has 1 logprobs for 2 ids"),
        (row(sample(json!([66]), json!([0.5]), json!(1))), "has a sample 0 that has 0.5 in its logprobs"),
        (row(sample(json!([66]), json!([null]), json!(1))), "has a sample 0 that has null in its logprobs"),
        (row(masked), "has a sample 0 that has a `tool_mask` that leaves out tokens"),
        (
            json!({"prompt_ids": [65], "samples": [good()], "completion_mask": [[0]]}),
            "has a `completion_mask` that leaves out tokens",
        ),
        (row(sample(json!([66]), json!([-1]), json!("good"))), "has a sample 0 that has \"good\" as reward"),
        (
            row(sample(json!([66]), json!([-1]), json!(null))),
            "has a sample 0 that has no `reward`; its keys are: ids, logprobs, reward (null)",
        ),
    ] {
        write(&dir, "bad.jsonl", &[group(0), group(1), bad]);
        refused("--rollouts bad.jsonl", &["bad.jsonl", "line 3", expected]);
    }
    for (logprob, reward, expected) in [
        ("NaN", "1", "has a sample 0 that has NaN in its logprobs, which must be finite"),
        ("-1", "-Infinity", "has a sample 0 that has -Infinity as reward; a finite number is expected"),
    ] {
        let row = format!("{{\"ids\": [66], \"logprobs\": [{logprob}], \"reward\": {reward}}}");
        fs::write(dir.path("nan.jsonl"), format!("{{\"prompt_ids\": [65], \"samples\": [{row}]}}\n")).unwrap();
        refused("--rollouts nan.jsonl", &[expected]);
    }
    // A rounding error is none of the file's.
    write(&dir, "rounded.jsonl", &[group(0), row(sample(json!([66]), json!([1e-6]), json!(1)))]);
    train(&dir, "--rollouts rounded.jsonl --nproc-per-node 1 --batch-size 2 --max-steps 1");
    fs::write(dir.path("text.txt"), "some text ".repeat(100)).unwrap();
    refused("--rollouts text.txt", &["has no rollouts", "`prompt_ids` and `samples`"]);
    refused("", &["nothing to learn from", "--dataset PROMPTS", "--rollouts FILE.jsonl"]);
    refused("--dataset r.jsonl", &["need rewards", "--reward exact, number", "--rollouts FILE in place of --dataset"]);
    refused("--rollouts r.jsonl --dataset r.jsonl", &["prompts are part of the rollouts"]);
    refused("--rollouts none.jsonl", &["--rollouts none.jsonl: no such file"]);
    refused("--rollouts r.jsonl --group-size 4", &["--group-size 4 has no effect here: the samples are recorded"]);
    refused("--rollouts r.jsonl --loss-type dr_grpo", &["--max-new-tokens N"]);
    refused("--rollouts r.jsonl --temperature 0", &["--temperature 0", "above 0"]);
    refused("--rollouts r.jsonl --loss_type bnpo", &["GRPO, DAPO and Dr. GRPO"]);
    write(&dir, "p.jsonl", &[json!({"prompt": "a"})]);
    let sampling = "--dataset p.jsonl --reward length:4 --max-new-tokens 4";
    for (flags, why) in [
        ("--group-size 1", "of which there are none"),
        ("--temperature 0", "all samples of a prompt are the same"),
        ("--top-k 1", "all samples of a prompt are the same"),
        ("--record-rollouts p.jsonl", "is among the prompts"),
        ("--record-rollouts none/r.jsonl", "its directory does not exist"),
        ("--record-rollouts .", "is a directory"),
    ] {
        refused(&format!("{sampling} {flags}"), &[flags, why]);
    }
}
