//! Non-finite steps, provoked by one token whose embedding overflows: all ranks skip and count them, and more than
//! `--max-bad-steps` of them in a row end the run. A model with non-finite weights is not trained, and an unchanged one
//! is not saved.

use crate::common::binaries::FLATSHARD;
use crate::common::programs::unlaunched;
use crate::common::runs::*;
use flatshard::optim::{DecayShape, Schedule, Warmup};
use safetensors::SafeTensors;
use std::fs;

/// Sets all elements of the embedding of the byte `token`, in the model in `hf`, from `with`.
fn poison(hf: &std::path::Path, token: usize, with: [f32; 2]) {
    poison_row(hf, &["embed_tokens.weight", "wte.weight"], token, with);
}
/// Sets all elements of a row of the first tensor whose name ends in one of `names`.
fn poison_row(hf: &std::path::Path, names: &[&str], row: usize, with: [f32; 2]) {
    let path = hf.join("model.safetensors");
    let mut file = fs::read(&path).unwrap();
    let (header, tensors) =
        (8 + u64::from_le_bytes(file[..8].try_into().unwrap()) as usize, SafeTensors::deserialize(&file).unwrap());
    let table = tensors.names().into_iter().find(|n| names.iter().any(|name| n.ends_with(name)));
    let table = tensors.tensor(table.unwrap()).unwrap();
    let width = 4 * table.shape()[1];
    let at = header + (table.data().as_ptr() as usize - file[header..].as_ptr() as usize) + row * width;
    let with = with.map(f32::to_le_bytes).concat();
    file[at..at + width].chunks_exact_mut(8).for_each(|x| x.copy_from_slice(&with));
    fs::write(&path, file).unwrap();
}

/// 40 steps of 8 rows of 32 bytes; `Z` stands in as many places as `at` has.
fn corpus(at: &[usize]) -> String {
    let mut text = "the quick brown fox jumps over the lazy dog. ".repeat(400).into_bytes();
    at.iter().for_each(|&at| text[at] = b'Z');
    String::from_utf8(text).unwrap()
}

/// A run on `text.txt` of the directory.
fn on_text(dir: &Dir, args: &[&str]) -> Ended {
    let text = dir.arg("text.txt");
    let args = [&["--dataset", &text, "--no-shuffle", "--no-sample", "--no-eval"], args].concat();
    let mut command = command(FSDP, &args);
    Run(command.env("FLATSHARD_CACHE_DIR", dir.path("cache")).spawn().unwrap()).end()
}

#[test]
fn all_ranks_skip_and_count_a_bad_step_and_too_many_in_a_row_end_the_run() {
    let dir = Dir::new();
    let (hf, metrics) = (dir.arg("hf"), dir.arg("m.jsonl"));
    fs::write(dir.path("text.txt"), corpus(&[])).unwrap();
    let run = |args: &[&str]| on_text(&dir, args);
    assert!(run(&["--arch", "gpt", "--no-tie-embeddings", "--max-steps", "1", "--save-hf", &hf]).status.success());
    poison(&dir.path("hf"), b'Z' as usize, [f32::MAX, 0.0]); // too large for the mean of a LayerNorm
    // Two rows of the third step of rank 1 alone, and one of the fifth of rank 0.
    fs::write(dir.path("text.txt"), corpus(&[32 * (2 * 8 + 5) + 3, 32 * (2 * 8 + 6) + 9, 32 * (4 * 8 + 1) + 20]))
        .unwrap();
    let train = ["--pretrain", &hf, "--max-steps", "8", "--metrics-path", &metrics];
    let ended = run(&[&train[..], &["--max-bad-steps", "1"]].concat());
    assert!(ended.status.success(), "{}", ended.stderr);
    let steps = events(&dir.path("m.jsonl"), "step");
    let bad: Vec<u64> =
        steps.iter().filter(|s| s["grad_norm"].is_null()).map(|s| s["step"].as_u64().unwrap()).collect();
    assert_eq!(bad, [3, 5], "{}", ended.stderr);
    let skipped: Vec<u64> = steps.iter().map(|s| s["skipped_steps"].as_u64().unwrap()).collect();
    assert_eq!(skipped, [0, 0, 1, 1, 2, 2, 2, 2]);
    // The schedule advances in skipped steps, as docs/differences.md says.
    let schedule =
        Schedule { shape: DecayShape::Cosine, peak: 0.01, rise: Warmup::Linear, warmup: 2, decay: None, total: 8 };
    let lrs: Vec<f32> = steps.iter().map(|s| s["lr"].as_f64().unwrap() as f32).collect();
    assert_eq!(lrs, (1..=8).map(|step| schedule.lr(step)).collect::<Vec<f32>>());
    assert!(ended.stderr.contains("step 3: the gradient is not finite; the update was skipped"), "{}", ended.stderr);
    assert!(steps.iter().filter(|s| !bad.contains(&s["step"].as_u64().unwrap())).all(|s| s["loss"].is_f64()));

    // With none allowed, the first one ends the run, and the error has the step and the flag.
    let ended = run(&[&train[..], &["--max-bad-steps", "0"]].concat());
    assert_eq!(ended.status.code(), Some(1), "{}", ended.stderr);
    let says =
        "step 3: loss NaN, gradient norm NaN: 1 consecutive non-finite steps, more than --max-bad-steps 0. Lower --lr";
    assert!(ended.stderr.contains(says), "{}", ended.stderr);
}

/// A router whose logit overflows for one token, of one rank: all ranks skip the step, and go on, whether each has all
/// experts or they share them.
#[test]
fn a_router_logit_that_is_not_finite_skips_the_step_on_all_ranks() {
    let dir = Dir::new();
    let hf = dir.arg("hf");
    fs::write(dir.path("text.txt"), corpus(&[])).unwrap();
    let run = |args: &[&str]| on_text(&dir, args);
    let made = run(&["--num-experts", "3", "--max-steps", "1", "--save-hf", &hf]);
    assert!(made.status.success(), "{}", made.stderr);
    // Normalized, the token's even channels are the square root of 2, and their sum is the largest there is.
    poison(&dir.path("hf"), b'Z' as usize, [1.0, 0.0]);
    let width = 64.0;
    poison_row(&dir.path("hf"), &["block_sparse_moe.gate.weight"], 0, [f32::MAX / (0.62 * width), 0.0]);
    fs::write(dir.path("text.txt"), corpus(&[32 * (2 * 8 + 5) + 3, 32 * (4 * 8 + 1) + 20])).unwrap();
    for ep in ["1", "2"] {
        let metrics = format!("{ep}.jsonl");
        let train = ["--pretrain", &hf, "--max-steps", "8", "--metrics-path", &dir.arg(&metrics)];
        let ended = run(&[&train[..], &["--ep-size", ep]].concat());
        assert!(ended.status.success(), "ep {ep}: {}", ended.stderr);
        let steps = events(&dir.path(&metrics), "step");
        let skipped: Vec<u64> = steps.iter().map(|s| s["skipped_steps"].as_u64().unwrap()).collect();
        assert_eq!(skipped, [0, 0, 1, 1, 2, 2, 2, 2], "ep {ep}: {}", ended.stderr);
        assert!(steps[2]["aux_loss"].is_null() && steps[3]["aux_loss"].is_f64(), "{} {}", steps[2], steps[3]);
    }
}

/// A learning rate with which nothing is finite from the second step on.
#[test]
fn a_diverging_run_ends_after_ten_bad_steps_by_default() {
    for (args, step, most) in [(&[][..], 12, 10), (&["--max-bad-steps", "2"][..], 4, 2)] {
        let ended =
            Run::start(FSDP, &[&["--lr", "1e30", "--warmup-steps", "0", "--max-steps", "50"], args].concat()).end();
        assert_eq!(ended.status.code(), Some(1), "{}", ended.stderr);
        let says =
            format!("gradient norm NaN: {} consecutive non-finite steps, more than --max-bad-steps {most}.", most + 1);
        assert!(ended.stderr.contains(&format!(": step {step}: loss ")), "{}", ended.stderr);
        assert!(ended.stderr.contains(&says), "{}", ended.stderr);
    }
}

/// Found while weights are read, each by the rank that reads it: the same message whatever the ranks, and nothing
/// starts.
#[test]
fn a_model_with_non_finite_weights_is_refused_by_tensor_and_count() {
    let dir = Dir::new();
    let (hf, ckpt, metrics) = (dir.arg("hf"), dir.arg("ckpt"), dir.arg("m.jsonl"));
    good(FSDP, &["--max-steps", "1", "--no-sample", "--save-hf", &hf]);
    poison(&dir.path("hf"), 90, [f32::NAN, 1.0]);
    poison(&dir.path("hf"), 7, [f32::NEG_INFINITY, f32::INFINITY]);
    let train = ["--max-steps", "2", "--max-bad-steps", "2", "--ckpt-dir", &ckpt, "--metrics-path", &metrics];
    let ranks = |more: &[&'static str]| [&train[..], more].concat();
    for args in [
        ranks(&["--nproc-per-node", "1"]),
        ranks(&["--nproc-per-node", "3"]),
        ranks(&["--strategy", "ddp"]),
        ranks(&["--tp-size", "2"]),
        vec!["--generate", "a"],
    ] {
        let ended = Run::start(FSDP, &[&["--pretrain", &hf], &args[..]].concat()).end();
        assert_eq!(ended.status.code(), Some(2), "{args:?}: {}", ended.stderr);
        let says = "tensor model.embed_tokens.weight has non-finite values (NaN or infinity): 96 of 20480; use a model without them";
        assert!(ended.stderr.contains(&format!("{hf}/model.safetensors: {says}")), "{args:?}: {}", ended.stderr);
    }
    assert!(events(&dir.path("m.jsonl"), "step").is_empty());
    assert_eq!(fs::read_dir(dir.path("ckpt")).unwrap().count(), 0, "neither checkpoints nor traces");
}

/// A loss scale that overflows in every step: the model is unchanged, so neither a checkpoint nor a model is written.
#[test]
fn a_run_whose_every_step_was_skipped_fails_and_saves_nothing() {
    let dir = Dir::new();
    let (ckpt, hf) = (dir.arg("ckpt"), dir.arg("hf"));
    let args =
        ["--precision", "fp16", "--loss-scale", "1e30", "--max-steps", "4", "--ckpt-dir", &ckpt, "--save-hf", &hf];
    for more in ["--no-async-save", "--async-save"] {
        let ended = Run::start(FSDP, &[&args[..], &["--save-every", "1", more]].concat()).end();
        assert_eq!(ended.status.code(), Some(1), "{}", ended.stderr);
        let says =
            ["no checkpoint after step 1: every step so far was skipped", "all 4 steps were skipped", "not saved"];
        says.iter().for_each(|says| assert!(ended.stderr.contains(says), "{}", ended.stderr));
        let there: Vec<_> = fs::read_dir(dir.path("ckpt")).unwrap().map(|e| e.unwrap().file_name()).collect();
        assert!(there.iter().all(|name| name == "comm_traces") && !dir.path("hf").exists(), "{there:?}");
    }
}

/// A step whose loss is finite and after which weights are not: the save after it ends the run, and what was kept
/// before is whole.
#[test]
fn lost_weights_are_not_saved_and_do_not_take_the_place_of_good_ones() {
    let dir = Dir::new();
    let (ckpt, hf) = (dir.arg("ckpt"), dir.arg("hf"));
    // The first step has a learning rate of 0; the second subtracts an infinity.
    let lost = ["--weight-decay", "3e38", "--lr", "1e3", "--warmup-type", "log", "--warmup-steps", "4"];
    for more in ["--no-async-save", "--async-save"] {
        let dir_args = ["--max-steps", "9", "--save-every", "1", "--keep", "1", "--ckpt-dir", &ckpt, "--save-hf", &hf];
        let ended = Run::start(FSDP, &[&lost[..], &dir_args, &["--no-eval", more]].concat()).end();
        assert_eq!(ended.status.code(), Some(1), "{}", ended.stderr);
        let says = [": tensor ", " has the value ", ": the model is lost, and is not saved. Lower --lr"];
        assert!(says.iter().all(|says| ended.stderr.contains(says)), "{}", ended.stderr);
        assert!(!dir.path("hf").exists());
        good(FSDP, &["--resume", &ckpt, "--weight-decay", "0", "--max-steps", "3", "--no-eval"]);
        fs::remove_dir_all(dir.path("ckpt")).unwrap();
    }
}

/// Weights that are finite and too large for any finite loss. An evaluation proves that the model is lost: then nothing
/// is saved. Without one, it is saved. The run fails either way.
#[test]
fn a_run_whose_last_steps_were_not_finite_fails() {
    let dir = Dir::new();
    let (ckpt, hf) = (dir.arg("ckpt"), dir.arg("hf"));
    let lost = ["--lr", "1e20", "--warmup-steps", "0", "--lr-scheduler", "constant", "--max-steps", "4"];
    let places = ["--ckpt-dir", &ckpt, "--save-every", "1", "--save-hf", &hf];
    let run = |more: &str| Run::start(FSDP, &[&lost[..], &places, &[more]].concat()).end();
    let checkpoints = || {
        fs::read_dir(dir.path("ckpt"))
            .unwrap()
            .filter(|e| e.as_ref().unwrap().file_name().to_string_lossy().starts_with("step-"))
            .count()
    };
    let skipped = "step 4: the last 3 steps were skipped because their gradients were not finite";
    let ended = run("--eval");
    assert_eq!(ended.status.code(), Some(1), "{}", ended.stderr);
    let says = format!("{skipped}, and the loss of the last evaluation is NaN: the model is not saved. Lower --lr");
    assert!(ended.stderr.contains(&says), "{}", ended.stderr);
    assert!(ended.stderr.contains("no checkpoint after step 2: the gradient of this step is not finite"));
    assert!(!dir.path("hf").exists());
    assert_eq!(checkpoints(), 1);
    fs::remove_dir_all(dir.path("ckpt")).unwrap();

    let ended = run("--no-eval");
    assert_eq!(ended.status.code(), Some(1), "{}", ended.stderr);
    assert!(ended.stderr.contains(&format!("{skipped}: the model may be lost, and was saved.")), "{}", ended.stderr);
    assert!(dir.path("hf").exists());
    assert_eq!(checkpoints(), 2);
}

/// The largest number of fp16 is 65,504.
#[test]
fn weights_beyond_the_type_of_a_file_are_not_exported() {
    let dir = Dir::new();
    let (hf, out, gguf) = (dir.arg("hf"), dir.arg("out"), dir.arg("out.gguf"));
    good(FSDP, &["--max-steps", "1", "--no-sample", "--save-hf", &hf]);
    poison_row(&dir.path("hf"), &["q_proj.weight"], 3, [7e4, 0.0]);
    let says = "q_proj.weight has the weight 7e4, and the largest of";
    for (args, dtype) in [
        (["--save-hf", &out, "--save-dtype", "fp16"], "fp16 is 6.5504e4"),
        (["--save-gguf", &gguf, "--gguf-type", "f16"], "f16 is 6.5504e4"),
    ] {
        let ended = unlaunched(FLATSHARD).args(["export", &hf]).args(args).output().unwrap();
        let text = String::from_utf8(ended.stderr).unwrap();
        assert_eq!(ended.status.code(), Some(1), "{text}");
        assert!(text.contains(&format!("{says} {dtype}")), "{text}");
        assert!(!dir.path("out").exists() && !dir.path("out.gguf").exists());
    }
    let whole =
        unlaunched(FLATSHARD).args(["export", &hf, "--save-hf", &out, "--save-dtype", "bf16"]).output().unwrap();
    assert!(whole.status.success(), "{whole:?}");
}
