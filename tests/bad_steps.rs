//! Steps that are not finite, planted in a model of which one token's embedding is NaN: they are left out by all ranks alike and
//! counted, and more of them in a row than `--max-bad-steps` end the run.
#[path = "common/runs.rs"]
mod runs;

use flatshard::optim::{Schedule, Shape, Warmup};
use runs::*;
use safetensors::SafeTensors;
use std::fs;

/// The model in `hf`, in which the embedding of the byte `token` is not a number.
fn poison(hf: &std::path::Path, token: usize) {
    let path = hf.join("model.safetensors");
    let mut file = fs::read(&path).unwrap();
    let (header, tensors) =
        (8 + u64::from_le_bytes(file[..8].try_into().unwrap()) as usize, SafeTensors::deserialize(&file).unwrap());
    let table = tensors.tensor("model.embed_tokens.weight").unwrap();
    let row = 4 * table.shape()[1];
    let at = header + (table.data().as_ptr() as usize - file[header..].as_ptr() as usize) + token * row;
    file[at..at + row].chunks_exact_mut(4).for_each(|x| x.copy_from_slice(&f32::NAN.to_le_bytes()));
    fs::write(&path, file).unwrap();
}

/// 40 steps of 8 rows of 32 bytes; `Z` stands in as many places as `at` has.
fn corpus(at: &[usize]) -> String {
    let mut text = "the quick brown fox jumps over the lazy dog. ".repeat(400).into_bytes();
    at.iter().for_each(|&at| text[at] = b'Z');
    String::from_utf8(text).unwrap()
}

#[test]
fn a_bad_step_is_left_out_by_all_ranks_and_counted_and_too_many_in_a_row_end_the_run() {
    let dir = Dir::new();
    let (hf, text, metrics) = (dir.arg("hf"), dir.arg("text.txt"), dir.arg("m.jsonl"));
    fs::write(dir.path("text.txt"), corpus(&[])).unwrap();
    let run = |args: &[&str]| {
        let args = [&["--dataset", &text, "--no-shuffle", "--no-sample", "--no-eval"], args].concat();
        let mut command = command(FSDP, &args);
        Run(command.env("FLATSHARD_CACHE_DIR", dir.path("cache")).spawn().unwrap()).end()
    };
    assert!(run(&["--max-steps", "1", "--save-hf", &hf]).status.success());
    poison(&dir.path("hf"), b'Z' as usize);
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
    // The schedule goes on in steps that are left out, as docs/differences.md says.
    let schedule = Schedule { shape: Shape::Cosine, peak: 0.01, rise: Warmup::Linear, warmup: 2, total: 8 };
    let lrs: Vec<f32> = steps.iter().map(|s| s["lr"].as_f64().unwrap() as f32).collect();
    assert_eq!(lrs, (1..=8).map(|step| schedule.lr(step)).collect::<Vec<f32>>());
    assert!(ended.stderr.contains("step 3: the gradient is not finite; no weight was changed"), "{}", ended.stderr);
    assert!(steps.iter().filter(|s| !bad.contains(&s["step"].as_u64().unwrap())).all(|s| s["loss"].is_f64()));

    // None may be left out: the first ends the run, with the step and the flag.
    let ended = run(&[&train[..], &["--max-bad-steps", "0"]].concat());
    assert_eq!(ended.status.code(), Some(1), "{}", ended.stderr);
    let says = "step 3: loss NaN, gradient norm NaN: step 1 in a row that is not finite, where --max-bad-steps is 0; lower --lr";
    assert!(ended.stderr.contains(says), "{}", ended.stderr);
}

/// A rate that no model survives: from the second step on nothing is finite any more.
#[test]
fn a_run_that_diverges_ends_after_ten_bad_steps_unless_told_otherwise() {
    for (args, step, most) in [(&[][..], 12, 10), (&["--max-bad-steps", "2"][..], 4, 2)] {
        let ended =
            Run::start(FSDP, &[&["--lr", "1e30", "--warmup-steps", "0", "--max-steps", "50"], args].concat()).end();
        assert_eq!(ended.status.code(), Some(1), "{}", ended.stderr);
        let says = format!(
            "gradient norm NaN: step {} in a row that is not finite, where --max-bad-steps is {most};",
            most + 1
        );
        assert!(ended.stderr.contains(&format!(": step {step}: loss ")), "{}", ended.stderr);
        assert!(ended.stderr.contains(&says), "{}", ended.stderr);
    }
}
