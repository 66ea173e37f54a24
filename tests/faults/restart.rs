//! Restarts: ranks killed repeatedly, on the same number of ranks or fewer; time limits; signals by name. A restarted
//! run is bitwise equal to an undisturbed one.

use crate::common::runs::*;
use rustix::process::Signal;
use std::fs;
use std::os::unix::process::ExitStatusExt;

/// 12 steps, a checkpoint every 2.
const LENGTH: [&str; 4] = ["--max-steps", "12", "--save-every", "2"];

#[test]
fn killed_ranks_are_restarted_and_the_run_is_bitwise_the_same() {
    let dir = Dir::new();
    let (quiet, metrics, ckpt, other) = (dir.arg("quiet.jsonl"), dir.arg("m.jsonl"), dir.arg("ckpt"), dir.arg("other"));
    good(FSDP, &[&LENGTH[..], &["--metrics-path", &quiet, "--ckpt-dir", &other]].concat());
    let args = ["--metrics-path", &metrics, "--ckpt-dir", &ckpt, "--max-restarts", "3"];
    let run = Run::start(FSDP, &[&LENGTH[..], &args].concat());
    let path = dir.path("m.jsonl");
    for (rank, after) in [(1, 3), (0, 7)] {
        wait_until("the next steps are done", || losses(&path).len() >= after);
        let ranks = run.ranks(2);
        send(Signal::KILL, ranks[rank]);
        wait_until("all ranks of that start are gone", || ranks.iter().all(|&pid| dead(pid)));
    }
    let ended = run.end();
    assert!(ended.status.success(), "{}", ended.stderr);
    let restarts = events(&path, "restart");
    assert_eq!(restarts.len(), 2, "{restarts:?}");
    assert_eq!((&restarts[1]["attempt"], &restarts[1]["world_size"]), (&2.into(), &2.into()));
    assert!(restarts[0]["message"].as_str().unwrap().contains("rank 1 was killed by signal 9"), "{}", restarts[0]);
    let from = restarts[1]["from"].as_str().unwrap();
    assert!(from.starts_with("step-000000"), "{from}");
    assert!(ended.stderr.contains(&format!("restart 2 of 3 on 2 ranks, from {from}")), "{}", ended.stderr);
    assert_eq!(losses(&path), losses(&dir.path("quiet.jsonl")));
    for file in ["model.safetensors", "optimizer.safetensors"] {
        let read = |ckpt: &str| fs::read(dir.path(ckpt).join("step-00000012").join(file)).unwrap();
        assert!(read("ckpt") == read("other"), "{file} differs");
    }
}

/// Ranks that share experts come back as they were; and without progress a restart takes a number of ranks that ep
/// divides.
#[test]
fn ranks_that_share_experts_are_restarted() {
    let sparse = ["--num-experts", "5", "--ff-hidden-dim", "48", "--ep-size", "2", "--nproc-per-node", "4"];
    let dir = Dir::new();
    let (quiet, metrics, ckpt, other) = (dir.arg("quiet.jsonl"), dir.arg("m.jsonl"), dir.arg("ckpt"), dir.arg("other"));
    let length = [&LENGTH[..], &sparse].concat();
    good(FSDP, &[&length[..], &["--metrics-path", &quiet, "--ckpt-dir", &other]].concat());
    let args = ["--metrics-path", &metrics, "--ckpt-dir", &ckpt, "--max-restarts", "1"];
    let run = Run::start(FSDP, &[&length[..], &args].concat());
    let path = dir.path("m.jsonl");
    wait_until("the next steps are done", || losses(&path).len() >= 5);
    let ranks = run.ranks(4);
    send(Signal::KILL, ranks[3]);
    let ended = run.end();
    assert!(ended.status.success() && ended.stderr.contains("restart 1 of 1 on 4 ranks"), "{}", ended.stderr);
    assert_eq!(losses(&path), losses(&dir.path("quiet.jsonl")));
    for file in ["model.safetensors", "optimizer.safetensors"] {
        let read = |ckpt: &str| fs::read(dir.path(ckpt).join("step-00000012").join(file)).unwrap();
        assert!(read("ckpt") == read("other"), "{file} differs");
    }

    // 12 sequences on 4 ranks; 3 would do without ep.
    let dir = Dir::new();
    let batch = ["--batch-size", "1", "--grad-accum", "3", "--max-steps", "40"];
    assert_eq!(worlds_of(&dir, 4, &[&sparse[..], &batch].concat(), "1:4"), [4, 4, 2]);
    let runs = events(&dir.path("m.jsonl"), "run");
    assert_eq!((&runs[2]["mesh"]["ep"], &runs[2]["config"]["batch"]["grad_accum"]), (&2.into(), &6.into()));
}

/// The export that is there was written by this run, so the ranks that are started again replace it.
#[test]
fn a_restarted_run_replaces_its_own_export() {
    let dir = Dir::new();
    let (metrics, ckpt, hf) = (dir.arg("m.jsonl"), dir.arg("ckpt"), dir.arg("hf"));
    let args = ["--save-every", "2", "--ckpt-dir", &ckpt, "--save-hf", &hf, "--no-sample"];
    good(FSDP, &[&args[..], &["--max-steps", "2"]].concat());
    let export = || fs::read(dir.path("hf/model.safetensors")).unwrap();
    let before = export();
    let more = ["--max-steps", "100", "--resume", "auto", "--max-restarts", "1", "--metrics-path", &metrics];
    let run = Run::start(FSDP, &[&args[..], &more].concat());
    wait_until("a checkpoint of its own", || !events(&dir.path("m.jsonl"), "checkpoint").is_empty());
    send(Signal::KILL, run.ranks(2)[1]);
    let ended = run.end();
    assert!(ended.status.success() && ended.stderr.contains("restart 1 of 1"), "{}", ended.stderr);
    assert!(export() != before);
}

/// Ranks of each start of a run on `nproc`, whose ranks die twice before anything is saved. Its metrics are in `dir`.
fn worlds_of(dir: &Dir, nproc: usize, batch: &[&str], elastic: &str) -> Vec<u64> {
    let (metrics, ckpt) = (dir.arg("m.jsonl"), dir.arg("ckpt"));
    let args = ["--metrics-path", &metrics, "--ckpt-dir", &ckpt, "--max-restarts", "2", "--elastic", elastic];
    let run = Run::start(FSDP, &[batch, &args].concat());
    let path = dir.path("m.jsonl");
    for start in 0..2 {
        wait_until("it trains", || events(&path, "run").len() > start && steps(&path) > 3 * start);
        let ranks = run.ranks(nproc);
        send(Signal::KILL, ranks[nproc - 1]);
        wait_until("all ranks of that start are gone", || ranks.iter().all(|&pid| dead(pid)));
    }
    let ended = run.end();
    assert!(ended.status.success(), "{}", ended.stderr);
    events(&path, "run").iter().map(|e| e["world_size"].as_u64().unwrap()).collect()
}

/// Nothing is saved before the ranks die, twice: the second restart takes as many ranks as the batch of 12 sequences
/// can be split over. Sums of other ranks round otherwise, so the curves are near and not equal.
#[test]
fn without_progress_a_restart_takes_fewer_ranks_and_keeps_the_batch() {
    let (dir, quiet) = (Dir::new(), Dir::new());
    let batch = ["--batch-size", "2", "--grad-accum", "2", "--nproc-per-node", "3", "--max-steps", "40"];
    good(FSDP, &[&batch[..], &["--metrics-path", &quiet.arg("m.jsonl")]].concat());
    assert_eq!(worlds_of(&dir, 3, &batch, "1:3"), [3, 3, 2]);
    let path = dir.path("m.jsonl");
    let last = &events(&path, "run")[2]["config"]["batch"];
    assert_eq!((&last["batch_size"], &last["grad_accum"]), (&2.into(), &3.into()));
    let (a, b) = (losses(&path), losses(&quiet.path("m.jsonl")));
    assert_eq!(a.len(), 40);
    for (a, b) in a.iter().zip(&b) {
        let [x, y] = [a, b].map(|l| l.1.parse::<f64>().unwrap());
        assert!((x / y - 1.0).abs() < 1e-3, "step {}: {x} and {y}", a.0);
    }
}

/// Six sequences of micro-batches of two go on three ranks or on one: one is taken if the range has it, and none below
/// the range.
#[test]
fn fewer_ranks_stay_within_the_elastic_range() {
    let batch = ["--batch-size", "2", "--nproc-per-node", "3", "--max-steps", "40"];
    for (elastic, last) in [("1:3", 1), ("2:3", 3)] {
        assert_eq!(worlds_of(&Dir::new(), 3, &batch, elastic), [3, 3, last], "--elastic {elastic}");
    }
}

#[test]
fn restarts_are_limited_and_bad_input_is_not_retried() {
    let dir = Dir::new();
    let (metrics, ckpt) = (dir.arg("m.jsonl"), dir.arg("ckpt"));
    let run = Run::start(
        FSDP,
        &["--max-steps", "100000", "--metrics-path", &metrics, "--ckpt-dir", &ckpt, "--max-restarts", "1"],
    );
    let path = dir.path("m.jsonl");
    for start in 0..2 {
        wait_until("it trains", || events(&path, "run").len() > start);
        let ranks = run.ranks(2);
        send(Signal::KILL, ranks[0]);
        wait_until("all ranks of that start are gone", || ranks.iter().all(|&pid| dead(pid)));
    }
    let ended = run.end();
    assert_eq!(ended.status.code(), Some(1));
    assert_eq!((events(&path, "restart").len(), events(&path, "error").len()), (1, 1));
    assert!(ended.stderr.contains("error: rank 0 was killed by signal 9"), "{}", ended.stderr);
    for (args, expected) in [
        (&["--max-restarts", "1"][..], "--max-restarts 1 needs checkpoints to resume from: add --ckpt-dir DIR"),
        (
            &["--elastic", "1:2"],
            "--elastic 1:2 has no effect here: --max-restarts is 0; remove it, or use --max-restarts N",
        ),
        (
            &["--max-restarts", "1", "--ckpt-dir", &ckpt, "--elastic", "3:4"],
            "--elastic 3:4: 2 starting ranks is outside MIN:MAX",
        ),
        (&["--time-limit", "soon"], "--time-limit soon: it must be seconds or H:M:S"),
        (&["--signals", "KILL"], "--signals KILL: it must be one of TERM, INT, HUP, USR1, USR2, QUIT"),
    ] {
        let ended = Run::start(FSDP, args).end();
        assert_eq!(ended.status.code(), Some(2), "{}", ended.stderr);
        assert!(ended.stderr.contains(expected), "{args:?}: {}", ended.stderr);
    }
}

#[test]
fn a_time_limit_and_a_named_signal_stop_a_run_with_a_checkpoint() {
    let dir = Dir::new();
    let (metrics, ckpt) = (dir.arg("m.jsonl"), dir.arg("ckpt"));
    let run = ["--max-steps", "100000", "--metrics-path", &metrics, "--ckpt-dir", &ckpt];
    let ended = Run::start(FSDP, &[&run[..], &["--time-limit", "0:02", "--max-restarts", "5"]].concat()).end();
    assert_eq!(ended.status.code(), Some(143), "{}", ended.stderr);
    let path = dir.path("m.jsonl");
    let done = steps(&path);
    let saved = events(&path, "checkpoint");
    assert_eq!((saved.len(), saved[0]["step"].as_u64(), events(&path, "restart").len()), (1, Some(done as u64), 0));

    let again = Run::start(FSDP, &[&run[..], &["--resume", "auto", "--signals", "SIGUSR1"]].concat());
    wait_until("it goes on", || steps(&path) > done);
    send(Signal::USR1, again.pid());
    assert_eq!(again.end().status.code(), Some(128 + 10));
    assert_eq!(events(&path, "checkpoint").last().unwrap()["step"].as_u64(), Some(steps(&path) as u64));
    // Signals that are not listed kill it at once.
    let third = Run::start(FSDP, &[&run[..], &["--resume", "auto", "--signals", "USR1"]].concat());
    let there = steps(&path);
    wait_until("it goes on again", || steps(&path) > there);
    send(Signal::TERM, third.pid());
    assert_eq!(third.end().status.signal(), Some(15));
}
