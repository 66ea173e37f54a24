//! Ranks of an external launcher that disagree on the program, a setting, the data, the checkpoint to resume from, or
//! the output directory. All exit at once with status 2 and the difference, and nothing is written.

use crate::common::programs::write_program;
use crate::common::runs::*;
use std::fs;
use std::path::Path;
use std::process::Command;

/// A rank as torchrun starts it; `job` identifies the job.
fn rank(mut command: Command, rank: usize, world: usize, job: &Dir) -> Run {
    Run(launched(&mut command, rank, world, 29511).env("TORCHELASTIC_RUN_ID", job.arg("job")).spawn().unwrap())
}
/// Ranks that differ in their arguments; `common` ones come first.
fn ended(job: &Dir, common: &[&str], own: &[&[&str]]) -> Vec<Ended> {
    let start = |(r, args): (usize, &&[&str])| rank(command(FSDP, &[common, args].concat()), r, own.len(), job);
    let ranks: Vec<Run> = own.iter().enumerate().map(start).collect();
    ranks.into_iter().map(Run::end).collect()
}
/// All ranks exit with status 2 and one line that contains `says`.
#[track_caller]
fn refused(ranks: &[Ended], says: &str) {
    for (rank, ended) in ranks.iter().enumerate() {
        assert_eq!(ended.status.code(), Some(2), "rank {rank}: {}", ended.stderr);
        let lines: Vec<&str> = ended.stderr.lines().filter(|line| line.starts_with("error: ")).collect();
        assert_eq!(lines.len(), 1, "rank {rank}: {}", ended.stderr);
        assert!(lines[0].contains(says), "rank {rank}: no {says:?} in {}", lines[0]);
    }
}
fn files(dir: &Path) -> Vec<String> {
    let entries = fs::read_dir(dir).into_iter().flatten().flatten();
    entries.map(|e| e.file_name().to_string_lossy().into_owned()).collect()
}

#[test]
fn settings_that_differ_are_named_with_their_values_and_ranks() {
    const ALIKE: &str = "; start all ranks with the same arguments and configuration files";
    let dir = Dir::new();
    let (metrics, ckpt) = (dir.arg("m.jsonl"), dir.arg("ckpt"));
    let common = ["--metrics-path", &metrics, "--ckpt-dir", &ckpt, "--max-steps", "3"];
    let lr: [&[&str]; 3] = [&[], &["--lr", "0.003"], &[]];
    refused(
        &ended(&dir, &common, &lr),
        &format!(": ranks disagree on optim.lr: ranks 0 and 2 have 0.01, rank 1 has 0.003{ALIKE}"),
    );
    let two: [&[&str]; 2] = [&["--max-steps", "4"], &["--grad-clip", "9"]];
    refused(
        &ended(&dir, &common, &two),
        "ranks disagree on run.max_steps: rank 0 has 4, rank 1 has 3; optim.grad_clip: rank 0 has 1.0, rank 1 has 9.0;",
    );
    // Their meshes differ, so the world group is the only one they share.
    let mesh: [&[&str]; 2] = [&["--tp-size", "2"], &[]];
    refused(&ended(&dir, &common, &mesh), "parallel.tp_size: rank 0 has 2, rank 1 has 1");
    assert!(!dir.path("m.jsonl").exists() && files(&dir.path("ckpt")).is_empty());
}

#[test]
fn copies_of_the_data_may_be_anywhere_and_must_be_identical() {
    let dir = Dir::new();
    let text = "the quick brown fox jumps over the lazy dog. ".repeat(200);
    for (name, text) in [("a", &text), ("b", &text), ("c", &text.replace("dog", "cat"))] {
        fs::create_dir(dir.path(name)).unwrap();
        fs::write(dir.path(name).join("text.txt"), text).unwrap();
    }
    let [a, b, c] = ["a", "b", "c"].map(|name| dir.arg(name));
    let run = |other: &str| {
        let start = |r: usize, data: &str| {
            let mut command = command(FSDP, &["--dataset", data, "--max-steps", "1", "--no-sample"]);
            command.env("FLATSHARD_CACHE_DIR", dir.path("cache"));
            rank(command, r, 2, &dir)
        };
        let ranks = [start(0, &a), start(1, other)];
        ranks.map(Run::end)
    };
    for ended in run(&b) {
        assert!(ended.status.success(), "{}", ended.stderr);
    }
    refused(&run(&c), "ranks disagree on data: rank 0 has ");
    refused(&run(&c), "copies of --dataset on different hosts must be identical");
}

/// Two simulated hosts with one rank each, over TCP: both exit at once, and the hosts are named.
#[test]
fn ranks_of_two_hosts_name_the_hosts() {
    let dir = Dir::new();
    let agent = Agent::new();
    let run = |args: [&[&str]; 2]| {
        let start = |r: usize| {
            let mut command = command(FSDP, &[&["--max-steps", "1", "--no-sample"], args[r]].concat());
            launched_on(&mut command, [r, 2], [0, 1], agent.port);
            command.env("FLATSHARD_HOST_ID", format!("node{r}")).env("TORCHELASTIC_RUN_ID", dir.arg("job"));
            command.current_dir(dir.path(["a", "b"][r]));
            Run(command.spawn().unwrap())
        };
        [0, 1].map(start).map(Run::end)
    };
    ["a", "b"].iter().for_each(|name| fs::create_dir(dir.path(name)).unwrap());
    refused(
        &run([&[], &["--lr", "0.003"]]),
        "disagree on optim.lr: rank 0 on node0 has 0.01, rank 1 on node1 has 0.003;",
    );
    let apart = run([&["--ckpt-dir", "ckpt"], &["--ckpt-dir", "ckpt"]]);
    refused(
        &apart,
        "--ckpt-dir ckpt: files that rank 0 on node0 writes there are not visible to rank 1 on node1 (this rank",
    );
    // By another path, as with another mount point: the probe is found, and the run continues.
    std::os::unix::fs::symlink(dir.path("a/ckpt"), dir.path("link")).unwrap();
    let ended = run([&["--ckpt-dir", "ckpt"], &["--ckpt-dir", &dir.arg("link")]]);
    assert!(ended.iter().all(|ended| ended.status.success()), "{}{}", ended[0].stderr, ended[1].stderr);
    let mut left = files(&dir.path("a/ckpt"));
    left.sort();
    assert_eq!(left, ["latest", "step-00000001"]);
}

/// As after an update that one host missed: only the build-id differs.
#[test]
fn another_build_of_the_program_is_refused() {
    let dir = Dir::new();
    let mut exe = fs::read(FSDP).unwrap();
    let note = exe.windows(8).position(|w| w == b"\x03\0\0\0GNU\0").expect("the linker notes a build-id");
    exe[note + 8] ^= 0xff;
    let other = dir.arg("run_fsdp");
    write_program(Path::new(&other), exe);
    let args = ["--max-steps", "1"];
    let ranks = [rank(command(FSDP, &args), 0, 2, &dir), rank(command(&other, &args), 1, 2, &dir)].map(Run::end);
    refused(&ranks, "ranks disagree on program: rank 0 has flatshard ");
    refused(&ranks, "install the same binary on all hosts");
}

/// One rank finds the checkpoint; the other has its own directory and does not.
#[test]
fn ranks_that_would_resume_from_different_checkpoints_are_refused() {
    let dir = Dir::new();
    let (full, empty) = (dir.arg("full"), dir.arg("empty"));
    good(FSDP, &["--max-steps", "2", "--ckpt-dir", &full]);
    let own: [&[&str]; 2] = [&["--ckpt-dir", &full], &["--ckpt-dir", &empty]];
    let ranks = ended(&dir, &["--max-steps", "4", "--resume", "auto"], &own);
    refused(&ranks, "ranks disagree on resume: rank 0 has step 2 (");
    refused(&ranks, "rank 1 has the beginning; all hosts must use the same --ckpt-dir");
}

/// A relative path in a different working directory on each rank, as on hosts without a shared file system.
#[test]
fn an_output_directory_that_is_not_shared_is_refused() {
    let dir = Dir::new();
    ["a", "b"].iter().for_each(|name| fs::create_dir(dir.path(name)).unwrap());
    for flag in ["--ckpt-dir", "--save-hf"] {
        let start = |(r, at): (usize, &str)| {
            let mut command = command(FSDP, &["--max-steps", "1", flag, "out"]);
            command.current_dir(dir.path(at));
            rank(command, r, 2, &dir)
        };
        let ranks = [(0, "a"), (1, "b")].map(start).map(Run::end);
        refused(
            &ranks,
            &format!("{flag} out: files that rank 0 writes there are not visible to rank 1 (this rank's path is "),
        );
        refused(&ranks, "use a directory that all hosts share");
        assert!(ranks[1].stderr.contains(&dir.arg("b/out")), "{}", ranks[1].stderr);
        assert!(files(&dir.path("a/out")).is_empty() && files(&dir.path("b")).is_empty());
    }
    let one: [&[&str]; 2] = [&["--ckpt-dir", &dir.arg("out")], &[]];
    refused(
        &ended(&dir, &["--max-steps", "1"], &one),
        "ranks disagree on checkpoint.ckpt_dir: rank 0 has a value, rank 1 has nothing;",
    );
}
