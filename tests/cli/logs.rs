//! Log output: lines on stderr, and a log file per rank.

use crate::common::runs::*;
use rustix::fs::{CWD, FileType, Mode, OFlags};
use rustix::process::{Pid, Resource, Rlimit, Signal, prlimit};
use std::fs;
use std::process::Stdio;

fn text(dir: &Dir, name: &str) -> String {
    fs::read_to_string(dir.path(name)).unwrap_or_else(|e| panic!("{name}: {e}"))
}
/// Level and text of each line, which must begin with a time, a level and a name.
#[track_caller]
fn lines<'t>(text: &'t str, name: &str) -> Vec<(&'t str, &'t str)> {
    let mut before = "";
    let line = |line: &'t str| {
        let (time, rest) = line.split_once(' ').unwrap();
        assert!(time.len() == 24 && time.ends_with('Z') && time >= before, "{before} and then {line}");
        before = time;
        let (head, said) = rest.split_once(": ").unwrap_or_else(|| panic!("no name: {line}"));
        let (level, who) = head.split_once(' ').unwrap();
        (who.trim() == name).then_some((level, said))
    };
    text.lines().filter_map(line).collect()
}

#[test]
fn each_rank_has_a_file_and_a_second_run_appends_to_it() {
    let dir = Dir::new();
    let (log, length) = (dir.arg("logs/run.log"), ["--max-steps", "3"]);
    let ended = good(FSDP, &[&length[..], &["--log-file", &log]].concat());
    let (zero, one) = (text(&dir, "logs/run.log"), text(&dir, "logs/run.log.rank-1"));
    // Rank 0's file has all lines of stderr, in order.
    let said: Vec<_> = lines(&zero, "rank 0").into_iter().map(|l| l.1).collect();
    let mut shown = said.iter();
    for line in ended.stderr.lines() {
        assert!(shown.any(|said| *said == line), "not in the file: {line}\n{zero}");
    }
    assert_eq!(ended.stderr.lines().filter(|l| l.starts_with("step ")).count(), 3, "{}", ended.stderr);
    let one_said = lines(&one, "rank 1");
    assert!(one_said[0].1.starts_with("rank 1 of 2 on "), "{one}");
    for first in ["timing  step 1  ", "timing  step 2  ", "done  step 3  "] {
        assert!(one_said.iter().any(|(level, said)| *level == "INFO" && said.starts_with(first)), "{first}: {one}");
    }
    assert!(!one.contains("timing  step 3") && !one.contains(": step "), "{one}");
    good(FSDP, &[&length[..], &["--log-file", &log]].concat());
    assert!(text(&dir, "logs/run.log").strip_prefix(&zero).is_some_and(|more| more.contains("step 3/3  ")));
    assert!(text(&dir, "logs/run.log.rank-1").strip_prefix(&one).is_some_and(|more| more.contains("done  step 3")));
}

#[test]
fn levels_and_the_rank_in_the_file_name() {
    let dir = Dir::new();
    let run = |level: &str, log: &str| {
        good(FSDP, &["--max-steps", "4", "--log-level", level, "--log-file", &dir.arg(log)]).stderr
    };
    assert_eq!(run("warn", "quiet-{rank}.log"), "");
    assert_eq!((text(&dir, "quiet-0.log"), text(&dir, "quiet-1.log")), (String::new(), String::new()));
    let shown = run("debug", "loud-{rank}.log");
    assert!(shown.contains("cpu") && shown.contains(" taken after "), "{shown}");
    for rank in 0..2 {
        let loud = text(&dir, &format!("loud-{rank}.log"));
        let of_a_rank = format!("rank {rank}");
        let debug = lines(&loud, &of_a_rank).into_iter().filter(|l| l.0 == "DEBUG").collect::<Vec<_>>();
        assert!(debug.iter().any(|l| l.1.starts_with("timing  step 4  ")), "{loud}");
    }
    let refused = Run::start(FSDP, &["--log-level", "loud"]).end();
    assert_eq!(refused.status.code(), Some(2), "{}", refused.stderr);
    assert!(refused.stderr.contains("error, warn, info, debug"), "{}", refused.stderr);
    let refused = Run::start(FSDP, &["--log-file", &dir.arg("")]).end();
    assert_eq!(refused.status.code(), Some(2), "{}", refused.stderr);
    assert!(refused.stderr.contains("is a directory"), "{}", refused.stderr);
}

#[test]
fn a_warmup_longer_than_the_run_is_noted_at_the_start() {
    let run = |warmup: &str| good(FSDP, &["--max-steps", "4", "--no-sample", "--warmup-steps", warmup]).stderr;
    let says = "warmup   30 steps in a run of 4: lr ends at 0.0013333333 of 0.01; shorten it with --warmup-steps N";
    let (long, whole) = (run("30"), run("4"));
    assert!(long.find(says).is_some_and(|at| at < long.find("step 1/4 ").unwrap()), "{long}");
    assert!(!whole.contains("in a run of 4"), "{whole}");
}

/// When the reader of a log pipe exits, each process that writes to it warns once and continues training.
#[test]
fn lines_lost_by_a_log_file_are_one_warning() {
    let dir = Dir::new();
    let pipe = dir.path("log");
    rustix::fs::mknodat(CWD, &pipe, FileType::Fifo, 0o600.into(), 0).unwrap();
    let flags = OFlags::RDONLY | OFlags::NONBLOCK | OFlags::CLOEXEC;
    let reader = rustix::fs::open(&pipe, flags, Mode::empty()).unwrap();
    let (metrics, log) = (dir.arg("m.jsonl"), dir.arg("log"));
    let run = Run::start(FSDP, &["--max-steps", "300", "--log-file", &log, "--metrics-path", &metrics, "--no-eval"]);
    wait_until("it trains", || steps(&dir.path("m.jsonl")) > 2);
    drop(reader);
    let ended = run.end();
    assert!(ended.status.success(), "{}", ended.stderr);
    assert_eq!(
        ended.stderr.matches("warning: --log-file cannot be written (Broken pipe").count(),
        1,
        "{}",
        ended.stderr
    );
}

/// A skipped step is logged by rank 0, at a level that `warn` shows.
#[test]
fn problems_are_warnings() {
    let dir = Dir::new();
    let args = ["--precision", "fp16", "--loss-scale", "1e30", "--max-steps", "2", "--log-level", "warn"];
    let stderr = Run::start(FSDP, &[&args[..], &["--log-file", &dir.arg("log")]].concat()).end().stderr;
    assert!(stderr.contains("step 1: the gradient is not finite"), "{stderr}");
    let log = text(&dir, "log");
    let (level, said) = lines(&log, "rank 0")[0];
    assert!(level == "WARN" && stderr.lines().next() == Some(&format!("warning: {said}")), "{log}");
}

#[test]
fn a_restart_appends_to_the_same_files() {
    let dir = Dir::new();
    let (log, ckpt, metrics) = (dir.arg("log"), dir.arg("ckpt"), dir.arg("m.jsonl"));
    let args = ["--max-steps", "40", "--save-every", "2", "--max-restarts", "1", "--ckpt-dir", &ckpt];
    let run = Run::start(FSDP, &[&args[..], &["--log-file", &log, "--metrics-path", &metrics]].concat());
    wait_until("some steps are done", || steps(&dir.path("m.jsonl")) > 3);
    let ranks = run.ranks(2);
    send(Signal::KILL, ranks[1]);
    let ended = run.end();
    assert!(ended.status.success(), "{}", ended.stderr);
    let (zero, one) = (text(&dir, "log"), text(&dir, "log.rank-1"));
    let starts = |text: &str| text.matches(" of 2 on ").count();
    assert_eq!((starts(&zero), starts(&one)), (2, 2), "{zero}\n{one}");
    let launcher = lines(&zero, "launcher");
    let restart = launcher.iter().find(|l| l.1.starts_with("restart 1 of 1 on 2 ranks"));
    assert_eq!(restart.map(|l| l.0), Some("WARN"), "{zero}");
    assert!(launcher.iter().any(|l| l.1.contains("rank 1 was killed by signal 9")), "{zero}");
    // Rank 0 learned of its peer's death before it exited.
    assert!(lines(&zero, "rank 0").iter().any(|l| l.0 == "ERROR" && l.1.contains("rank 1")), "{zero}");
}

#[test]
fn metrics_that_cannot_be_written_cost_no_step_and_fail_the_run_at_its_end() {
    let dir = Dir::new();
    let mut command = unlaunched("bash");
    // The signal of a file that is too large would end the run before the error.
    command.args(["-c", "trap '' XFSZ; exec \"$@\"", "bash", FSDP]).stderr(Stdio::piped()).stdout(Stdio::null());
    let tiny = "--dataset synthetic --embed-dim 16 --num-layers 1 --num-heads 2 --vocab-size 32 --max-len 16 \
                --batch-size 2 --nproc-per-node 1 --max-steps 400 --no-sample --no-eval";
    command.args(tiny.split_whitespace()).args(["--metrics-path", &dir.arg("m.jsonl"), "--save-hf", &dir.arg("hf")]);
    let run = command.spawn().unwrap();
    wait_until("it has begun", || steps(&dir.path("m.jsonl")) > 0);
    // From now on files have at most 64 KB, as on a full disk.
    let limit = Rlimit { current: Some(64_000), maximum: None };
    for rank in children(run.id()) {
        prlimit(Pid::from_raw(rank as i32), Resource::Fsize, limit).unwrap();
    }
    let ended = run.wait_with_output().unwrap();
    let said = String::from_utf8_lossy(&ended.stderr);
    let kept = steps(&dir.path("m.jsonl"));
    assert!((10..400).contains(&kept), "{kept} steps in the metrics: {said}");
    assert!(said.contains("the run goes on without it") && said.contains("step 400/400"), "{said}");
    assert!(said.lines().any(|line| line.starts_with("error: ") && line.contains("m.jsonl")), "{said}");
    assert!(ended.status.code() == Some(1) && dir.path("hf/model.safetensors").exists(), "{}: {said}", ended.status);
}

#[test]
fn what_is_written_has_a_file_of_its_own() {
    let dir = Dir::new();
    let (one, also) = (dir.arg("one"), dir.arg("./one"));
    for other in [&one, &also] {
        let ended = Run::start(FSDP, &["--max-steps", "1", "--metrics-path", &one, "--log-file", other]).end();
        let says = ended.stderr.contains("--metrics-path and --log-file are one file");
        assert!(ended.status.code() == Some(2) && says, "{}: {}", ended.status, ended.stderr);
    }
    good(
        FSDP,
        &["--max-steps", "1", "--nproc-per-node", "1", "--metrics-path", "/dev/null", "--log-file", "/dev/null"],
    );
}
