//! Real processes from outside: whole runs, resuming, signals, deaths of ranks and of their parent.

use crate::common::runs::*;
use rustix::process::Signal;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::time::Duration;

#[test]
fn a_run_learns_and_its_metrics_are_complete() {
    let dir = Dir::new();
    let (metrics, ckpt, hf) = (dir.arg("m.jsonl"), dir.arg("ckpt"), dir.arg("hf"));
    let args =
        ["--max-steps", "40", "--eval-every", "20", "--metrics-path", &metrics, "--ckpt-dir", &ckpt, "--save-every"];
    let ended = good(FSDP, &[&args[..], &["20", "--save-hf", &hf]].concat());
    let metrics = dir.path("m.jsonl");

    let run = &events(&metrics, "run")[0];
    assert_eq!(run["world_size"], 2);
    assert_eq!(run["mesh"], serde_json::json!({"dp_replicate": 1, "dp_shard": 2, "sp": 1, "tp": 1}));
    assert_eq!(run["config"]["optim"]["lr"], 0.01);
    assert!(run["params"].as_u64() > Some(0) && run["planned_bytes"]["total"].as_u64() > Some(0));
    assert!(run["device"].as_str().unwrap().starts_with("cpu"));

    let steps = events(&metrics, "step");
    assert_eq!(steps.len(), 40);
    let keys = "event step loss lr grad_norm loss_scale skipped_steps samples tokens fill trained_tokens \
    tokens_per_sec \
                trained_tokens_per_sec step_time_s forward_time_s backward_time_s optimizer_time_s comm_time_s \
                exposed_comm_s comm_bytes data_time_s mem_bytes peak_mem_bytes mfu mfu_llm_foundry sol gpu";
    for (i, step) in steps.iter().enumerate() {
        assert_eq!(step.as_object().unwrap().keys().map(String::as_str).collect::<Vec<_>>().join(" "), keys);
        assert_eq!(step["step"], i + 1);
        assert_eq!(step["tokens"], 2 * 4 * 32);
        let number = |key: &str| step[key].as_f64().unwrap_or_else(|| panic!("{key} of {step}"));
        for key in keys.split(' ').skip(2).filter(|key| !["gpu", "loss_scale"].contains(key)) {
            assert!(number(key) >= 0.0, "{key}: {step}");
        }
        let rate = number("tokens") / number("step_time_s");
        assert!((rate / number("tokens_per_sec") - 1.0).abs() < 1e-9);
        let trained = number("trained_tokens") / number("step_time_s");
        assert!((trained / number("trained_tokens_per_sec") - 1.0).abs() < 1e-9);
        let passes = ["forward_time_s", "backward_time_s", "optimizer_time_s"].map(number);
        assert!(passes.iter().all(|&s| s > 0.0) && passes.iter().sum::<f64>() <= number("step_time_s"), "{step}");
        assert!(number("mem_bytes") <= number("peak_mem_bytes"), "{step}");
        // Operations of several groups overlap, and the time of each counts in comm_time_s: only the exposed time is
        // within the step.
        assert!(number("exposed_comm_s") <= number("step_time_s"), "{step}");
        assert!(number("data_time_s") < number("step_time_s"));
        assert!(number("comm_bytes") > 0.0 && number("mfu") > 0.0 && number("mfu_llm_foundry") > 0.0);
        assert!(number("mfu") < number("sol") && number("sol") <= 1.0, "{step}");
    }
    // The first sample is taken in step 1 and reported from step 2 on; about 1.5 MB are planned.
    assert!(steps[39]["mem_bytes"].as_u64() > Some(1 << 20));
    let loss = |i: usize| steps[i]["loss"].as_f64().unwrap();
    assert!(loss(0) > 5.0 && loss(39) < 0.7 * loss(0), "{} then {}", loss(0), loss(39));

    let evals = events(&metrics, "eval");
    assert_eq!(evals.iter().map(|e| e["step"].as_u64().unwrap()).collect::<Vec<_>>(), [20, 40]);
    assert!(evals[1]["loss"].as_f64() < evals[0]["loss"].as_f64());
    let of = |key: &str| evals[1][key].as_f64().unwrap();
    assert!((of("perplexity") - of("loss").exp()).abs() < 1e-9 * of("perplexity"));
    let saves = events(&metrics, "checkpoint");
    assert_eq!(saves.iter().map(|e| e["step"].as_u64().unwrap()).collect::<Vec<_>>(), [20, 40]);
    assert!(Path::new(saves[1]["path"].as_str().unwrap()).join("model.safetensors").exists());
    assert!(saves[1]["bytes"].as_u64() > Some(0) && saves[1]["seconds"].as_f64() > Some(0.0));
    let end = &events(&metrics, "end")[0];
    assert!(end["steps"] == 40 && end["seconds"].as_f64() > Some(0.0));
    assert_eq!(fs::read_to_string(dir.path("ckpt/latest")).unwrap().trim(), "step-00000040");
    assert!(dir.path("hf/config.json").exists() && dir.path("hf/model.safetensors").exists());
    assert!(ended.stderr.contains("step 40/40  loss ") && !ended.stderr.contains("[rank 1]"), "{}", ended.stderr);

    // Another run starts from the exported model: its first loss is close to the last one.
    let again = dir.arg("again.jsonl");
    good(FSDP, &["--pretrain", &hf, "--max-steps", "1", "--metrics-path", &again]);
    let first = events(&dir.path("again.jsonl"), "step")[0]["loss"].as_f64().unwrap();
    assert!((first - loss(39)).abs() < 0.3, "{first} after {}", loss(39));
}

#[test]
fn the_seed_determines_the_run() {
    let dir = Dir::new();
    let first = |seed: &str, name: &str| {
        good(FSDP, &["--max-steps", "1", "--no-sample", "--seed", seed, "--metrics-path", &dir.arg(name)]);
        losses(&dir.path(name))
    };
    let [a, again, b] = [("7", "a"), ("7", "again"), ("8", "b")].map(|(seed, name)| first(seed, name));
    assert_eq!(a, again);
    assert!(a[0].1 != b[0].1 && a[0].2 != b[0].2, "{a:?} {b:?}");
}

#[test]
fn ddp_and_fsdp_have_the_same_losses() {
    let dir = Dir::new();
    for (program, name) in [(FSDP, "fsdp"), (DDP, "ddp")] {
        good(program, &["--max-steps", "5", "--grad-accum", "2", "--metrics-path", &dir.arg(name)]);
    }
    assert_eq!(losses(&dir.path("fsdp")), losses(&dir.path("ddp")));
    assert_eq!(events(&dir.path("ddp"), "run")[0]["mesh"]["dp_replicate"], 2);
}

#[test]
fn text_is_sampled_on_standard_output() {
    let dir = Dir::new();
    fs::write(dir.path("text.txt"), "the quick brown fox jumps over the lazy dog. ".repeat(400)).unwrap();
    let mut run = command(FSDP, &["--dataset", &dir.arg("text.txt"), "--max-steps", "30", "--sample-tokens", "24"]);
    let ended = Run(run.env("FLATSHARD_CACHE_DIR", dir.path("cache")).spawn().unwrap()).end();
    assert!(ended.status.success(), "{}", ended.stderr);
    let (prompt, written) = ended.stdout.split_once("--- generated ---\n").expect("a sample");
    assert!(prompt.contains("quick") || prompt.contains("lazy") || prompt.contains("brown"), "{prompt}");
    assert!(written.trim_end_matches('\n').chars().count() >= 20, "{written:?}");
    assert!(ended.stderr.contains("text.txt: 1 file"), "{}", ended.stderr);
}

#[test]
fn resuming_is_bitwise_the_uninterrupted_run() {
    let dir = Dir::new();
    let (whole, parts, ckpt) = (dir.arg("whole"), dir.arg("parts"), dir.arg("ckpt"));
    // Dropout: the masks, too, must be those of the whole run.
    let args = ["--max-steps", "12", "--arch", "gpt", "--dropout", "0.1", "--lr-scheduler", "cosine"];
    good(FSDP, &[&args[..], &["--metrics-path", &whole]].concat());
    let saved = ["--metrics-path", &parts, "--ckpt-dir", &ckpt, "--resume", "auto", "--save-every", "5", "--keep", "2"];
    let first = Run::start(FSDP, &[&args[..], &saved].concat());
    wait_until("7 steps", || steps(&dir.path("parts")) >= 7);
    send(Signal::TERM, first.pid());
    let stopped = first.end();
    // Whatever step it had come to; if it was the last one, there was nothing to stop.
    assert!(stopped.status.code() == Some(143) || stopped.status.success(), "{}\n{}", stopped.status, stopped.stderr);
    good(FSDP, &[&args[..], &saved].concat());
    assert_eq!(losses(&dir.path("parts")), losses(&dir.path("whole")));
    assert_eq!(losses(&dir.path("whole")).len(), 12);

    // The same checkpoint on other numbers of ranks and as DDP: the same held-out loss but for rounding.
    let held_out = |program: &str, ranks: &str, batch: &str| {
        let name = format!("{ranks}{batch}");
        let shape = ["--nproc-per-node", ranks, "--batch-size", batch, "--resume", &ckpt, "--metrics-path"];
        good(program, &[&args[..], &shape, &[&dir.arg(&name)]].concat());
        events(&dir.path(&name), "eval")[0]["loss"].as_f64().unwrap()
    };
    let two = held_out(FSDP, "2", "4");
    assert!((held_out(FSDP, "1", "8") - two).abs() < 1e-5 * two);
    assert!((held_out(FSDP, "4", "2") - two).abs() < 1e-5 * two);
    assert!((held_out(DDP, "2", "4") - two).abs() < 1e-5 * two);
    // Training continues there.
    good(FSDP, &["--arch", "gpt", "--max-steps", "14", "--nproc-per-node", "3", "--resume", &ckpt]);
}

#[test]
fn checkpoints_that_do_not_fit_or_are_damaged_are_refused() {
    let dir = Dir::new();
    let ckpt = dir.arg("ckpt");
    good(FSDP, &["--max-steps", "2", "--ckpt-dir", &ckpt]);
    // A fresh run does not overwrite it.
    let fresh = Run::start(FSDP, &["--max-steps", "2", "--ckpt-dir", &ckpt]).end();
    assert_eq!(fresh.status.code(), Some(2), "{}", fresh.stderr);
    assert!(fresh.stderr.contains("step-00000002") && fresh.stderr.contains("--resume auto"), "{}", fresh.stderr);
    let refused = |more: &[&str], parts: &[&str]| {
        let args = [&["--max-steps", "4", "--ckpt-dir", &ckpt, "--resume", "auto"], more].concat();
        let ended = Run::start(FSDP, &args).end();
        assert_eq!(ended.status.code(), Some(2), "{more:?}: {}\n{}", ended.status, ended.stderr);
        assert_eq!(ended.stderr.matches("error: ").count(), 1, "{}", ended.stderr);
        for part in parts {
            assert!(ended.stderr.contains(part), "no {part:?} in {}", ended.stderr);
        }
        assert_eq!(fs::read_to_string(dir.path("ckpt/latest")).unwrap().trim(), "step-00000002");
    };
    refused(&["--embed-dim", "32"], &["64", "32"]);
    refused(&["--num-layers", "3"], &["layer"]);
    refused(&["--optimizer", "sgd"], &["--optimizer adamw"]);
    let model = dir.path("ckpt/step-00000002/model.safetensors");
    let whole = fs::read(&model).unwrap();
    fs::write(&model, &whole[..whole.len() - 100]).unwrap();
    refused(&[], &["model.safetensors"]);
    let mut flipped = whole.clone();
    let at = flipped.len() - 1000;
    flipped[at] ^= 1;
    fs::write(&model, &flipped).unwrap();
    refused(&[], &["checksum"]);
    fs::write(&model, &whole).unwrap();
    good(FSDP, &["--max-steps", "4", "--ckpt-dir", &ckpt, "--resume", "auto"]);
}

#[test]
fn sigterm_and_sigint_save_a_checkpoint() {
    for (signal, status) in [(Signal::TERM, 143), (Signal::INT, 130)] {
        let dir = Dir::new();
        let (metrics, ckpt) = (dir.arg("m"), dir.arg("ckpt"));
        let run = Run::start(FSDP, &["--max-steps", "1000000", "--metrics-path", &metrics, "--ckpt-dir", &ckpt]);
        wait_until("3 steps", || steps(&dir.path("m")) >= 3);
        let ranks = run.ranks(2);
        send(signal, run.pid());
        let ended = run.end();
        assert_eq!(ended.status.code(), Some(status), "{}", ended.stderr);
        assert!(ended.stderr.contains("signal") && !ended.stderr.contains("error"), "{}", ended.stderr);
        assert!(ranks.into_iter().all(dead));
        let last = events(&dir.path("m"), "step").pop().unwrap()["step"].as_u64().unwrap();
        assert_eq!(fs::read_to_string(dir.path("ckpt/latest")).unwrap().trim(), format!("step-{last:08}"));
        assert!(events(&dir.path("m"), "error").is_empty());
    }
}

/// nohup: a terminal that is closed ends nothing.
#[test]
fn a_hangup_that_is_ignored_at_the_start_stays_ignored() {
    let dir = Dir::new();
    let metrics = dir.arg("m");
    let nohup = dir.path("nohup.sh");
    fs::write(&nohup, format!("#!/bin/sh\ntrap '' HUP\nexec '{FSDP}' \"$@\"\n")).unwrap();
    fs::set_permissions(&nohup, fs::Permissions::from_mode(0o755)).unwrap();
    let run = Run::start(nohup.to_str().unwrap(), &["--max-steps", "1000000", "--metrics-path", &metrics]);
    wait_until("3 steps", || steps(&dir.path("m")) >= 3);
    send(Signal::HUP, run.pid());
    let now = steps(&dir.path("m"));
    wait_until("3 more steps", || steps(&dir.path("m")) >= now + 3);
    send(Signal::TERM, run.pid());
    let ended = run.end();
    assert_eq!(ended.status.code(), Some(143), "{}", ended.stderr);
}

/// While the ranks are starting, before some of them handle signals.
#[test]
fn a_signal_at_the_start_ends_everything() {
    for delay in [2, 5, 10, 20, 40, 80, 160] {
        let run = Run::start(FSDP, &["--max-steps", "1000000", "--nproc-per-node", "3"]);
        std::thread::sleep(Duration::from_millis(delay));
        let ranks = children(run.pid());
        send(Signal::TERM, run.pid());
        let ended = run.end();
        let by = ended.status.code().or(ended.status.signal().map(|n| 128 + n));
        assert_eq!(by, Some(143), "after {delay} ms: {}", ended.stderr);
        wait_until("all ranks are dead", || ranks.iter().all(|&r| dead(r)));
    }
}

/// Kills either rank at many points of a step and resumes each time; the result must be bitwise that of an undisturbed
/// run.
#[test]
fn a_rank_killed_at_any_moment_costs_nothing_but_time() {
    const STEPS: usize = 24;
    let dir = Dir::new();
    let (whole, parts, ckpt) = (dir.arg("whole"), dir.arg("parts"), dir.arg("ckpt"));
    // Wide and long enough that forward and backward take most of a step.
    let args = ["--max-steps", "24", "--embed-dim", "256", "--batch-size", "8", "--num-layers", "3"];
    good(FSDP, &[&args[..], &["--metrics-path", &whole]].concat());
    let step_time = {
        let mut times: Vec<f64> =
            events(&dir.path("whole"), "step").iter().map(|e| e["step_time_s"].as_f64().unwrap()).collect();
        times.sort_by(f64::total_cmp);
        times[STEPS / 2]
    };
    let saved = ["--metrics-path", &parts, "--ckpt-dir", &ckpt, "--save-every", "1", "--keep", "2", "--resume", "auto"];
    let saving = || -> bool {
        let list = fs::read_dir(dir.path("ckpt")).into_iter().flatten().flatten();
        list.into_iter().any(|e| e.file_name().to_string_lossy().starts_with(".tmp-step-"))
    };
    // Where in a step: forward is its first third, backward the rest; none: while a checkpoint is being written.
    let moments = [Some(0.15), Some(0.6), None, Some(0.3), None, Some(0.85), None];
    let mut killed_while_saving = 0;
    for (i, moment) in moments.into_iter().enumerate() {
        let victim = (i + 1) % 2;
        let run = Run::start(FSDP, &[&args[..], &saved].concat());
        let ranks = run.ranks(2);
        let before = steps(&dir.path("parts"));
        wait_until("a step", || steps(&dir.path("parts")) >= before + 2 || ranks.iter().any(|&r| dead(r)));
        match moment {
            Some(part) => {
                // The step's line comes before its checkpoint: the next step begins when that is there.
                wait_until("the checkpoint", || !saving() || ranks.iter().any(|&r| dead(r)));
                std::thread::sleep(Duration::from_secs_f64(part * step_time));
            }
            // Held where they are while one looks: what is being written then is so still when the kill comes.
            None => wait_until("a checkpoint being written", || {
                let ended = ranks.iter().any(|&r| dead(r));
                if !ended && saving() {
                    send_all(Signal::STOP, &ranks);
                    if saving() {
                        return true;
                    }
                    send_all(Signal::CONT, &ranks);
                }
                ended
            }),
        }
        if ranks.iter().any(|&r| dead(r)) {
            break; // all steps are done
        }
        send(Signal::KILL, ranks[victim]);
        killed_while_saving += saving() as usize;
        send_all(Signal::CONT, &ranks);
        let ended = run.end();
        assert_eq!(ended.status.code(), Some(1), "{}", ended.stderr);
        let told = format!("rank {victim} was killed by signal 9");
        assert!(ended.stderr.contains(&format!("error: {told}")), "{}", ended.stderr);
        assert!(ranks.into_iter().all(dead));
        let error = events(&dir.path("parts"), "error").pop().expect("an error event");
        assert!(error["message"].as_str().unwrap().contains(&told), "{error}");
    }
    assert!(killed_while_saving > 0, "no kill fell into a checkpoint's writing");
    good(FSDP, &[&args[..], &saved].concat());
    assert_eq!(losses(&dir.path("parts")), losses(&dir.path("whole")));
    assert!(!saving(), "what dead saves left is cleared away");
}

#[test]
fn no_rank_outlives_the_parent() {
    let dir = Dir::new();
    // Without output: a rank that writes to a dead parent would notice it by the failed write.
    let quiet =
        ["--max-steps", "1000000", "--log-every", "1000000", "--nproc-per-node", "3", "--metrics-path", &dir.arg("m")];
    let mut run = Run::start(FSDP, &quiet);
    wait_until("2 steps", || steps(&dir.path("m")) >= 2);
    let ranks = run.ranks(3);
    run.0.kill().unwrap();
    run.0.wait().unwrap();
    wait_until("all ranks are dead", || ranks.iter().all(|&r| dead(r)));
}

#[test]
fn the_first_rank_to_fail_is_named_with_its_error() {
    // A checkpoint directory that vanishes and cannot be made again: one rank fails in the save, the other because of
    // it. Which one depends on how far a save is when the directory vanishes.
    let dir = Dir::new();
    let (metrics, ckpt) = (dir.arg("m"), dir.arg("ckpt"));
    let run = Run::start(
        FSDP,
        &["--max-steps", "1000000", "--save-every", "3", "--ckpt-dir", &ckpt, "--metrics-path", &metrics],
    );
    wait_until("a checkpoint", || dir.path("ckpt/latest").exists());
    wait_until("its directory is gone", || fs::remove_dir_all(dir.path("ckpt")).is_ok());
    fs::write(dir.path("ckpt"), "in the way").unwrap();
    let ended = run.end();
    assert_eq!(ended.status.code(), Some(1), "{}", ended.stderr);
    let message = ended.stderr.lines().find(|l| l.starts_with("error: ")).expect("an error line");
    assert!(message.contains("error: rank ") && message.contains("step ") && message.contains("ckpt"), "{message}");
    assert_eq!(ended.stderr.matches("error: ").count(), 1, "{}", ended.stderr);
    let event = events(&dir.path("m"), "error").pop().expect("an error event");
    assert!(event["message"].as_str().unwrap().contains("ckpt"), "{event}");
}

#[test]
fn ranks_of_an_external_launcher_rendezvous_by_environment_variables() {
    let dir = Dir::new();
    let (ours, theirs) = (dir.arg("ours"), dir.arg("theirs"));
    good(FSDP, &["--max-steps", "4", "--metrics-path", &ours]);
    let agent = Agent::new();
    let start = |rank: usize, more: &[&str]| {
        let local = rank.to_string();
        let mut command = command(FSDP, &[&["--max-steps", "4", "--local-rank", &local], more].concat());
        launched(&mut command, rank, 2, agent.port);
        command.env("TORCHELASTIC_RUN_ID", dir.arg("id"));
        Run(command.spawn().unwrap())
    };
    let four = ["--metrics-path", &theirs];
    let ranks = [start(0, &four), start(1, &four)];
    for ended in ranks.map(Run::end) {
        assert!(ended.status.success(), "{}", ended.stderr);
    }
    assert_eq!(losses(&dir.path("theirs")), losses(&dir.path("ours")));

    // One of them stops answering: the other says which and where, after the time that it was given.
    let last = dir.arg("last");
    let forever = ["--max-steps", "1000000", "--comm-timeout", "2", "--metrics-path", &last];
    let ranks = [start(0, &forever), start(1, &forever)];
    wait_until("a step", || steps(&dir.path("last")) >= 1);
    send(Signal::STOP, ranks[1].pid());
    let [zero, one] = ranks;
    let zero = zero.end();
    assert_eq!(zero.status.code(), Some(1), "{}", zero.stderr);
    let message = zero.stderr.lines().find(|l| l.starts_with("error: ")).expect("an error line");
    for part in ["rank 0: step ", "no answer within 2s from rank 1"] {
        assert!(message.contains(part), "no {part:?} in {message}");
    }
    drop(one);
}
