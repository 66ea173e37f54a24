//! `--objective distill --on-policy`: a student comes nearer to its teacher on its own samples, which are exactly
//! on-policy and do not depend on the mesh; a resumed run continues with the same bits; what cannot be is refused.
use crate::common::runs::{Dir, FSDP, events, unlaunched};
use serde_json::{Value, json};
use std::fs;
use std::process::Output;

const TINY: &str = "--tokenizer bytes --num-layers 1 --num-heads 2 --max-len 24 --lr-scheduler constant --warmup-steps 0 \
                    --no-shuffle --no-sample --seed 3 --epochs 1";

fn run(dir: &Dir, flags: &str) -> Output {
    let mut command = unlaunched(FSDP);
    command.env("FLATSHARD_CACHE_DIR", dir.path("cache")).current_dir(dir.path(""));
    command.args(TINY.split_whitespace()).args(flags.split_whitespace()).output().unwrap()
}
#[track_caller]
fn train(dir: &Dir, flags: &str) -> Vec<Value> {
    let _ = fs::remove_file(dir.path("m.jsonl"));
    let data = if flags.contains("--dataset") { "" } else { "--dataset p.jsonl" };
    let flags = format!(
        "--objective distill --on-policy --teacher teacher {data} --embed-dim 16 --max-new-tokens 4 \
         --metrics-path m.jsonl {flags}"
    );
    let ended = run(dir, &flags);
    assert!(ended.status.success(), "{flags}: {}", String::from_utf8_lossy(&ended.stderr));
    events(&dir.path("m.jsonl"), "step")
}
fn number(event: &Value, key: &str) -> f64 {
    event[key].as_f64().unwrap_or_else(|| panic!("{key} of {event}"))
}
/// Prompts, and a teacher that has learned to answer with a few letters.
fn with_teacher(prompts: usize) -> Dir {
    let dir = Dir::new();
    let prompt = |i: usize| format!("{}\n", json!({"prompt": format!("{i} of")}));
    fs::write(dir.path("p.jsonl"), (0..prompts).map(prompt).collect::<String>()).unwrap();
    let answer = |i: usize| format!("{}\n", json!({"q": format!("{i} of"), "a": "abab"}));
    fs::write(dir.path("a.jsonl"), (0..64).map(answer).collect::<String>()).unwrap();
    let flags = "--dataset a.jsonl --input-key q --output-key a --embed-dim 24 --lr 0.02 --batch-size 8 --no-eval \
                 --nproc-per-node 1 --save-hf teacher";
    let ended = run(&dir, flags);
    assert!(ended.status.success(), "{}", String::from_utf8_lossy(&ended.stderr));
    dir
}

#[test]
fn a_student_learns_from_its_own_samples() {
    let dir = with_teacher(64);
    let steps = train(&dir, "--nproc-per-node 1 --batch-size 8 --lr 0.02 --group-size 2 --updates-per-rollout 2");
    assert_eq!(steps.len(), 16, "eight steps of eight prompts, twice");
    let mean = |steps: &[Value], key| steps.iter().map(|step| number(step, key)).sum::<f64>() / steps.len() as f64;
    let (before, after) = (mean(&steps[..2], "reverse_kl"), mean(&steps[14..], "reverse_kl"));
    assert!(after < 0.5 * before, "{before} {after}");
    assert!(mean(&steps[14..], "entropy") < mean(&steps[..2], "entropy") - 0.5, "{steps:?}");
    for (i, step) in steps.iter().enumerate() {
        // The second update on the same samples is of a student that has learned from them.
        assert_eq!(number(step, "logprob_mismatch") > 0.0, i % 2 == 1, "{step}");
        assert_eq!(
            (&step["reverse_kl"], &step["completion_tokens"]),
            (&step["loss"], &step["trained_tokens"]),
            "{step}"
        );
        assert!(number(step, "completion_tokens") <= 8.0 * 2.0 * 4.0, "{step}");
        assert!(step["reward_mean"].is_null() && step["kl"].is_null(), "{step}");
    }
}

#[test]
fn samples_do_not_depend_on_the_mesh_and_a_run_resumes() {
    let dir = with_teacher(16);
    let flags = "--lr 0.01 --max-steps 4 --group-size 2";
    let alone = train(&dir, &format!("{flags} --nproc-per-node 1 --batch-size 4 --record-rollouts r.jsonl"));
    let recorded = fs::read_to_string(dir.path("r.jsonl")).unwrap();
    assert_eq!(recorded.lines().count(), 16);
    let other = train(&dir, &format!("{flags} --nproc-per-node 2 --batch-size 2"));
    for step in [0, 3] {
        let [a, b] = [&alone, &other].map(|steps| number(&steps[step], "reverse_kl"));
        assert!((a - b).abs() < 1e-5 * a, "{a} {b}");
    }
    assert_eq!(alone[0]["completion_tokens"], other[0]["completion_tokens"]);
    assert!(alone.iter().chain(&other).all(|step| number(step, "logprob_mismatch") == 0.0), "{alone:?} {other:?}");
    // Prompts in another file, in a field that is named.
    let row = |i: usize| json!({"question": format!("{i} of"), "prompt": "wrong"});
    fs::write(dir.path("p.json"), json!((0..16).map(row).collect::<Vec<_>>()).to_string()).unwrap();
    let of =
        |key: &str| train(&dir, &format!("{flags} --nproc-per-node 1 --batch-size 4 --dataset p.json {key} question"));
    for key in ["--prompt-key", "--input-key"] {
        assert_eq!(number(&of(key)[3], "reverse_kl"), number(&alone[3], "reverse_kl"), "{key}");
    }
    let more = "--lr 0.01 --group-size 2 --nproc-per-node 1 --batch-size 4 --ckpt-dir ck";
    train(&dir, &format!("{more} --max-steps 2"));
    let rest = train(&dir, &format!("{more} --max-steps 4 --resume auto"));
    let bits =
        |steps: &[Value]| steps.iter().map(|s| [&s["loss"], &s["grad_norm"]].map(Value::to_string)).collect::<Vec<_>>();
    assert_eq!(bits(&rest), bits(&alone[2..]));
    assert!(rest.iter().all(|step| number(step, "mem_bytes") > 0.0), "{rest:?}");
}

#[test]
fn what_cannot_be_distilled_is_refused() {
    let dir = with_teacher(4);
    let on_policy =
        "--objective distill --on-policy --dataset p.jsonl --embed-dim 16 --max-new-tokens 4 --batch-size 1";
    for (flags, says) in [
        ("--objective distill --dataset p.jsonl".to_string(), "--teacher"),
        (on_policy.to_string(), "no teacher"),
        (format!("{on_policy} --teacher teacher --distill-alpha 0.5"), "no labels"),
        (format!("{on_policy} --teacher teacher --reward json"), "--objective grpo"),
        (format!("{on_policy} --teacher teacher --ring-attn-size 2"), "off-policy"),
        (format!("{on_policy} --teacher teacher --device sim"), "--device cpu"),
        (format!("{on_policy} --teacher teacher").replace("p.jsonl", "none"), "none: no such file or directory"),
        (format!("{on_policy} --teacher teacher --chosen-key a"), "single answers"),
    ] {
        let ended = run(&dir, &flags);
        let text = String::from_utf8_lossy(&ended.stderr);
        assert!(ended.status.code() == Some(2) && text.contains(says), "{flags}: {text}");
    }
    // Vocabularies of one size whose tokens have other ids.
    fs::create_dir(dir.path("own")).unwrap();
    for name in ["config.json", "model.safetensors"] {
        fs::copy(dir.path("teacher").join(name), dir.path("own").join(name)).unwrap();
    }
    for (model, vocab) in [("own", json!({"a": 0, "b": 1})), ("teacher", json!([["a", -1.0], ["c", -2.0]]))] {
        fs::write(dir.path(model).join("tokenizer.json"), json!({"model": {"vocab": vocab}}).to_string()).unwrap();
    }
    let flags = "--objective distill --on-policy --dataset p.jsonl --max-new-tokens 4 --batch-size 1 --max-len 24 \
                 --tokenizer bytes --pretrain own --teacher teacher";
    let ended = unlaunched(FSDP).current_dir(dir.path("")).args(flags.split_whitespace()).output().unwrap();
    let text = String::from_utf8_lossy(&ended.stderr);
    assert!(ended.status.code() == Some(2), "{text}");
    assert!(text.contains("--teacher teacher: its token 1 is \"c\", and the trained model's \"b\""), "{text}");
}
