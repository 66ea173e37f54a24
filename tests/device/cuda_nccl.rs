//! `--nccl-max-ctas` and `--nccl-windows` on the simulated NCCL of `ptx/driver`: they reach its communicators and
//! change no bit there; an older library refuses or trains without; mistakes with windows are noticed.
use crate::common::runs::{Agent, DDP, Dir, Ended, FSDP, Run, launched, losses};
use crate::common::simcuda;
use crate::cuda_ranks::{APART, command};
use std::process::Stdio;

/// Embedding and head together take 2 MiB, from which on buffers are registered.
const LARGE: &str = "--device cuda --precision fp32 --vocab-size 4096 --num-layers 1 --max-len 8 \
                     --batch-size 1 --max-steps 2 --no-eval";
const BOTH: &str = "--nccl-max-ctas 4 --nccl-windows";

fn run(program: &str, args: &str, vars: &[(&str, &str)]) -> (Vec<(u64, String, String)>, Ended) {
    let dir = Dir::new();
    let mut command = command(program, "seed=1,gpus=2", &format!("{LARGE} {args}"));
    command.args(["--metrics-path", &dir.arg("metrics.jsonl")]).env_remove("NCCL_MAX_CTAS").envs(vars.iter().copied());
    let ended = Run(command.spawn().unwrap()).end();
    let losses = if ended.status.success() { losses(&dir.path("metrics.jsonl")) } else { Vec::new() };
    (losses, ended)
}
#[track_caller]
fn trained(program: &str, args: &str, simulated: &str) -> (Vec<(u64, String, String)>, String) {
    let (losses, ended) = run(program, args, &[("FLATSHARD_SIMNCCL", simulated)]);
    assert!(ended.status.success() && losses.len() == 2, "{args} {simulated}: {}", ended.stderr);
    assert!(!ended.stderr.contains("simulated"), "{args} {simulated}: {}", ended.stderr);
    (losses, ended.stderr)
}
/// Limits and windows that the ranks' communicators had when they were destroyed.
fn traced(stderr: &str) -> (Vec<&str>, usize) {
    let lines = stderr.lines().filter_map(|line| line.split_once("max_ctas ")?.1.split_once(", windows "));
    let (limits, windows): (Vec<_>, Vec<_>) = lines.unzip();
    (limits, windows.iter().map(|n| n.parse::<usize>().unwrap()).sum())
}

#[test]
fn limits_and_windows_reach_every_communicator_and_change_no_bits() {
    for (program, more) in [(FSDP, APART), (DDP, "--nproc-per-node 2 --compile")] {
        let (plain, stderr) = trained(program, more, "trace");
        let (limits, windows) = traced(&stderr);
        assert!(limits.len() >= 2 && limits.iter().all(|limit| *limit == "not set") && windows == 0, "{stderr}");
        let (both, stderr) = trained(program, &format!("{more} {BOTH}"), "trace");
        let (limits, windows) = traced(&stderr);
        assert!(limits.len() >= 2 && limits.iter().all(|limit| *limit == "4"), "{stderr}");
        assert!(windows >= 2, "each rank registers one at least: {stderr}");
        assert_eq!(plain, both, "{more}");
    }
}

/// A communicator that is split off has the limit too.
#[test]
fn communicators_of_axes_have_the_limit() {
    let (_, stderr) = trained(FSDP, &format!("--nproc-per-node 4 --ranks-per-gpu 2 --tp-size 2 {BOTH}"), "trace");
    let (limits, _) = traced(&stderr);
    assert!(limits.len() > 4 && limits.iter().all(|limit| *limit == "4"), "{stderr}");
}

#[test]
fn a_library_without_windows_trains_without_and_refuses_the_flag() {
    let (plain, _) = trained(FSDP, APART, "");
    assert_eq!(trained(FSDP, &format!("{APART} --nccl-max-ctas 4"), "version=22605").0, plain);
    // New enough, on a machine where it has none.
    let (none, stderr) = trained(FSDP, &format!("{APART} {BOTH}"), "trace,windowless");
    assert_eq!((none, traced(&stderr).1), (plain, 0));
    let refused = |args: &str, vars: &[(&str, &str)], parts: &[&str]| {
        let (_, ended) = run(FSDP, &format!("{APART} {args}"), vars);
        assert_eq!((ended.status.code(), ended.stderr.matches("error: ").count()), (Some(2), 1), "{}", ended.stderr);
        parts.iter().for_each(|part| assert!(ended.stderr.contains(part), "no {part:?} in: {}", ended.stderr));
    };
    let old = [("FLATSHARD_SIMNCCL", "version=22605")];
    refused("--nccl-windows", &old, &["--nccl-windows needs NCCL 2.27.3 or newer", "is 2.26.5"]);
    refused("--nccl-max-ctas 4", &[("NCCL_MAX_CTAS", "2")], &["--nccl-max-ctas 4 has no effect", "NCCL_MAX_CTAS"]);
    refused("--nccl-max-ctas 0", &[], &["nccl_max_ctas is 0: it must be at least 1"]);
    refused("--nccl-max-ctas 65", &[], &["nccl_max_ctas is 65: it must be at most 64"]);
    refused("--nccl-max-ctas 4 --comm ipc", &[], &["--comm ipc does not use NCCL"]);
}

/// `gpu_check ranks windows` with `simulated` on rank 1.
fn checked(simulated: &str) -> [Ended; 2] {
    let agent = Agent::new();
    let start = |rank| {
        let mut command = simcuda::run(crate::common::binaries::GPU_CHECK, "gpus=2");
        launched(&mut command, rank, 2, agent.port).env_remove("NCCL_MAX_CTAS");
        command.env("NCCL_HOSTID", format!("host{rank}")); // they share a GPU
        command.env("FLATSHARD_SIMNCCL", if rank == 1 { simulated } else { "trace" });
        Run(command.args(["ranks", "windows"]).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap())
    };
    let ranks = [start(0), start(1)];
    ranks.map(Run::end)
}

#[test]
fn collectives_are_right_in_windows_and_where_one_rank_gets_none() {
    for simulated in ["trace", "windowless", "unregistered"] {
        for ended in checked(simulated) {
            let fine = ended.status.success() && !ended.stderr.contains("simulated");
            assert!(fine, "{simulated}: {}", ended.stderr);
        }
    }
}

#[test]
fn a_rank_that_does_not_register_a_window_is_named() {
    for ended in checked("forget_window") {
        assert!(!ended.status.success(), "{}", ended.stderr);
        let says = "rank 1 calls Part, but rank 0 calls Window";
        assert!(ended.stderr.contains(says) && ended.stderr.contains("invalid usage"), "{}", ended.stderr);
    }
}

#[test]
fn memory_that_is_freed_as_a_window_is_noticed() {
    let [first, second] = checked("keep_window");
    assert!(!first.stderr.contains("simulated"), "{}", first.stderr);
    assert!(second.stderr.contains("simulated NCCL: ncclMemFree of"), "{}", second.stderr);
    assert!(second.stderr.contains("buffers still registered"), "{}", second.stderr);
}
