//! Warmup as a fraction of the run: its number of steps, which layer of settings decides, and what a resumed run keeps.
//! And a decay in the last steps alone.
use crate::common::runs::{Dir, FSDP, events, good, unlaunched};
use serde_json::Value;
use std::fs;

/// `optim.warmup_steps` of `--print-config`, or the exit status and the message.
fn steps(config: &str, args: &[&str]) -> String {
    let mut run = unlaunched(FSDP);
    let out = run.args(["--config", config, "--print-config"]).args(args).output().unwrap();
    match out.status.code() {
        Some(0) => serde_saphyr::from_slice::<Value>(&out.stdout).unwrap()["optim"]["warmup_steps"].to_string(),
        code => format!("{code:?} {}", String::from_utf8_lossy(&out.stderr)),
    }
}
#[track_caller]
fn refused(said: &str, parts: &[&str]) {
    assert!(said.starts_with("Some(2)") && parts.iter().all(|part| said.contains(part)), "{said}");
}

#[test]
fn a_ratio_is_rounded_up_to_steps() {
    let dir = Dir::new();
    let config = dir.arg("run.yaml");
    let write = |optim: &str, more: &str| {
        let text = format!("data: {{dataset: synthetic}}\nrun: {{max_steps: 30}}\noptim: {optim}\n{more}");
        fs::write(&config, text).unwrap();
    };
    write("{warmup_steps: 7}", "");
    // A flag replaces the file's alternative key.
    for (args, found) in [
        (&["--warmup-ratio", "0"][..], "0"),
        (&["--warmup-ratio", "0.1"], "3"),
        (&["--warmup-ratio=0.11"], "4"),
        (&["--warmup-ratio", "1"], "30"),
        (&["--warmup-ratio", "0.03", "--max-steps", "1000"], "30"),
        (&["--warmup-ratio", "0.03", "--warmup-steps", "1"], "1"), // equal in effect
        (&[], "7"),
    ] {
        assert_eq!(steps(&config, args), found, "{args:?}");
    }
    let both = ["--warmup-ratio", "0.1", "--warmup-steps", "4"];
    refused(&steps(&config, &both), &["warmup_ratio 0.1 of 30 steps is 3 steps", "warmup_steps is 4"]);
    refused(&steps(&config, &["--warmup-ratio", "1.5"]), &["warmup_ratio is 1.5"]);

    // Replaces the default, and in a stage also the file's value.
    let ckpt = ["--ckpt-dir", &dir.arg("ck"), "--stage", "a"];
    for (stage, found) in [("{optim: {warmup_steps: 5}}", "5"), ("{run: {max_steps: 11}}", "3")] {
        write("{warmup_ratio: 0.2}", &format!("training_stages: {{a: {stage}}}"));
        assert_eq!(steps(&config, &ckpt), found, "{stage}");
    }
    // Replaces DeepSpeed's default, but not a value of its file.
    let deepspeed = |params: &str| {
        let scheduler = format!(r#"{{"type": "WarmupLR", "params": {params}}}"#);
        let text = format!(r#"{{"zero_optimization": {{"stage": 1}}, "scheduler": {scheduler}}}"#);
        fs::write(dir.path("ds.json"), text).unwrap();
        steps(&config, &[&ckpt[..], &["--deepspeed", &dir.arg("ds.json")]].concat())
    };
    assert_eq!(deepspeed("{}"), "3");
    assert_eq!(deepspeed(r#"{"warmup_num_steps": "auto"}"#), "3");
    refused(&deepspeed(r#"{"warmup_num_steps": 6}"#), &["warmup_ratio 0.2", "warmup_steps is 6"]);
}

#[test]
fn extending_a_run_with_the_same_ratio_does_not_warm_up_again() {
    let dir = Dir::new();
    let (ckpt, metrics) = (dir.arg("ck"), dir.arg("m.jsonl"));
    let config = dir.arg("run.yaml");
    fs::write(
        &config,
        "model: {embed_dim: 32, num_layers: 1, num_heads: 2}\ndata: {dataset: synthetic, max_len: 8}\n\
         batch: {batch_size: 1}\noptim: {lr: 1.0, lr_scheduler: constant, grad_clip: 1.0e-3}\nrun: {eval: false}\n",
    )
    .unwrap();
    let run = |args: &[&str]| {
        let mut run = unlaunched(FSDP);
        run.args(["--config", &config, "--ckpt-dir", &ckpt, "--metrics-path", &metrics, "--no-sample"]).args(args);
        let out = run.output().unwrap();
        assert!(out.status.success(), "{}", String::from_utf8_lossy(&out.stderr));
    };
    let rates = || -> Vec<f64> {
        let text = fs::read_to_string(&metrics).unwrap();
        let events = text.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
        events.filter(|e| e["event"] == "step").map(|e| e["lr"].as_f64().unwrap()).collect()
    };
    run(&["--warmup-ratio", "0.5", "--max-steps", "4"]);
    assert_eq!(rates(), [0.5, 1.0, 1.0, 1.0]);
    run(&["--warmup-ratio", "0.5", "--max-steps", "8", "--resume", "auto"]);
    assert_eq!(rates()[4..], [1.0; 4], "{:?}", rates());
    // Another ratio is another schedule.
    run(&["--warmup-ratio", "1", "--max-steps", "10", "--resume", "auto"]);
    assert_eq!(rates()[8..], [0.9, 1.0], "{:?}", rates());
}

/// Warmup, the peak, and the decay of get_wsd_schedule of transformers: its numbers of such a run.
#[test]
fn the_decay_may_be_the_last_steps_alone() {
    let dir = Dir::new();
    for (decay, last) in [("0.25", 2), ("2", 2), ("4", 4)] {
        let metrics = dir.arg("m.jsonl");
        let args =
            ["--max-steps", "8", "--lr-scheduler", "linear", "--lr-decay-steps", decay, "--metrics-path", &metrics];
        let said = good(FSDP, &args);
        assert!(said.stderr.contains(&format!("linear in the last {last} steps, warmup 2")), "{}", said.stderr);
        let lrs = events(&dir.path("m.jsonl"), "step").iter().map(|s| s["lr"].as_f64().unwrap()).collect::<Vec<_>>();
        let expected = (0..8i32).map(|step| match step {
            0 => 0.005,
            step if step <= 8 - last => 0.01,
            step => 0.01 * f64::from(8 - step) / f64::from(last),
        });
        assert!(lrs.iter().zip(expected).all(|(lr, expected)| (lr - expected).abs() < 1e-8), "{decay}: {lrs:?}");
        fs::remove_file(metrics).unwrap();
    }
    for (args, says) in [
        (
            ["--lr-decay-steps", "epoch", "--lr-scheduler", "linear"],
            "lr_decay_steps is \"epoch\": it must be a number of",
        ),
        (["--lr-decay-steps", "0", "--lr-scheduler", "linear"], "lr_decay_steps is 0: it must be a number of steps"),
        (["--lr-decay-steps", "4", "--lr-scheduler", "constant"], "a constant learning rate does not decay"),
    ] {
        let out = unlaunched(FSDP).args(["--dataset", "synthetic", "--print-config"]).args(args).output().unwrap();
        let text = String::from_utf8(out.stderr).unwrap();
        assert!(out.status.code() == Some(2) && text.contains(says), "{text}");
    }
}
