//! `--comm ipc` on simulated GPUs (`ptx/driver`), whose memory several processes map: the bits of the shared-memory
//! group and of NCCL with two ranks, in any order of streams; a wait that is forgotten shows; a rank that is killed is
//! named; and where it does not work it is refused.

use crate::common::deep;
use crate::common::runs::{
    Agent, DDP, Dir, FSDP, Run, dead, events, launched, launched_on, losses, send, steps, wait_until,
};
use crate::common::simcuda;
use crate::cuda_ranks::{self, APART, SHARED};
use rustix::process::Signal;
use std::process::{Command, Output, Stdio};

fn command(program: &str, machine: &str, args: &str) -> Command {
    cuda_ranks::command(program, machine, &format!("--device cuda --no-eval {args}"))
}

/// The ranks of `gpu_check ranks ipc`: all verbs, dtypes and sizes, compared with a shared-memory group.
fn start(world: usize, machine: &str, agent: &Agent) -> Vec<Run> {
    let start = |rank| {
        let mut command = simcuda::run(crate::common::binaries::GPU_CHECK, machine);
        Run(launched(&mut command, rank, world, agent.port)
            .args(["ranks", "ipc"])
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap())
    };
    (0..world).map(start).collect()
}
fn check(world: usize, machine: &str) -> Vec<(Option<i32>, String)> {
    let agent = Agent::new();
    let ended = start(world, machine, &agent).into_iter().map(Run::end).collect::<Vec<_>>();
    ended.into_iter().map(|ended| (ended.status.code(), ended.stderr)).collect()
}

#[test]
fn results_have_the_bits_of_the_shared_memory_group_in_any_order_of_streams() {
    for (world, machine) in deep::first(2, [(2, "seed=0"), (3, "seed=1"), (3, "seed=2")]) {
        for (status, stderr) in check(world, machine) {
            assert!(status == Some(0) && !stderr.contains("simulated"), "{world} ranks, {machine}: {stderr}");
        }
    }
}

/// Whether a rank noticed that rank 0 did not do what `fault` names.
fn noticed(fault: &str) -> bool {
    let agent = Agent::new();
    let mut ranks = start(2, &format!("{fault},rank=0"), &agent);
    let mut failed = false;
    wait_until("both ranks end, or one fails", || {
        let statuses: Vec<_> = ranks.iter_mut().map(|rank| rank.0.try_wait().unwrap()).collect();
        failed = statuses.iter().flatten().any(|status| !status.success());
        failed || statuses.iter().all(Option::is_some)
    });
    // The other one would wait for its timeout.
    ranks.iter_mut().for_each(|rank| rank.0.kill().unwrap());
    let said: String = ranks.into_iter().map(|rank| rank.end().stderr).collect();
    assert!(said.contains("is skipped"), "{fault}: there is no such wait: {said}");
    failed
}

/// Waits of the compute stream for the group's and the other way round. Not each shows in each run: what is waited for
/// may have happened.
#[test]
fn a_forgotten_wait_for_another_stream_is_detected() {
    let mut waits = 1..25;
    assert!(waits.any(|wait| noticed(&format!("seed=1,forget_wait={wait}"))), "each of 24 waits can be forgotten");
}

/// Rank 0 runs everything as soon as it is enqueued, and rank 1 nothing before its host needs a result, which in these
/// rounds is after rank 0 has arrived in the shared-memory group. So without the wait for rank 1's part, rank 0 reads
/// it too early. These are the only waits for a peer: what a round overwrites needs none (`src/comm/ipc/mod.rs`,
/// rounds).
#[test]
fn a_forgotten_wait_for_a_peer_is_detected() {
    let mut waits = [90, 100, 110, 95].into_iter();
    assert!(waits.any(|wait| noticed(&format!("eager=1,forget_word={wait}"))), "waits for a peer can be forgotten");
}

fn train(program: &str, machine: &str, args: &str) -> Vec<(u64, String, String)> {
    let dir = Dir::new();
    let path = dir.arg("metrics.jsonl");
    let ended = Run(command(program, machine, args).args(["--metrics-path", &path]).spawn().unwrap()).end();
    assert!(ended.status.success() && !ended.stderr.contains("simulated"), "{machine} {args}: {}", ended.stderr);
    let losses = losses(&dir.path("metrics.jsonl"));
    assert_eq!(losses.len(), 3, "{machine} {args}");
    losses
}

/// Two terms have one sum, in whatever order NCCL takes them. On two GPUs, and in the deep suite on one.
#[track_caller]
fn trains_as_over_nccl(program: &str, args: &str) {
    let nccl = train(program, "seed=2", &format!("{args} {SHARED} --max-steps 3"));
    for (machine, seats) in deep::first(1, [("seed=2,gpus=2", APART), ("seed=1", SHARED)]) {
        assert_eq!(
            train(program, machine, &format!("{args} {seats} --comm ipc --max-steps 3")),
            nccl,
            "{machine} {args}"
        );
    }
}
#[test]
fn fsdp_trains_as_over_nccl() {
    trains_as_over_nccl(FSDP, "--precision bf16 --grad-accum 2");
}
#[test]
fn ddp_trains_as_over_nccl_also_with_graphs() {
    trains_as_over_nccl(DDP, "--precision fp32");
    trains_as_over_nccl(DDP, "--precision fp32 --compile");
}
/// All-reduces within layers; grouped sends and receives.
#[test]
fn tensor_and_sequence_parallel_ranks_train_as_over_nccl() {
    trains_as_over_nccl(FSDP, "--precision fp32 --tp-size 2");
    trains_as_over_nccl(FSDP, "--precision fp32 --ring-attn-size 2");
    trains_as_over_nccl(FSDP, "--precision fp32 --ring-attn-size 2 --sp-impl ulysses");
}
/// Exchanges of uneven lengths.
#[test]
fn experts_and_owners_of_matrices_exchange_as_over_nccl() {
    trains_as_over_nccl(FSDP, "--precision fp32 --num-experts 5 --ff-hidden-dim 48 --ep-size 2");
    trains_as_over_nccl(FSDP, "--precision fp32 --optimizer muon");
}

/// Sums in rank order do not depend on the strategy. NCCL's do, with four ranks.
#[test]
fn four_ranks_train_alike_sharded_and_replicated() {
    for precision in ["fp32", "bf16"] {
        let args = format!("--precision {precision} --max-steps 3 --nproc-per-node 4 --ranks-per-gpu 4 --comm ipc");
        assert_eq!(train(FSDP, "seed=1", &args), train(DDP, "seed=2", &args), "{precision}");
    }
}

/// A stage and the parts to be summed, for the one set of ranks.
#[test]
fn memory_is_planned_and_metered() {
    let of = |comm: &str| {
        let args = format!("{APART} --precision fp32 --max-steps 1 {comm} --metrics-path");
        let dir = Dir::new();
        let ended = Run(command(FSDP, "gpus=2", &args).arg(dir.arg("metrics.jsonl")).spawn().unwrap()).end();
        assert!(ended.status.success(), "{}", ended.stderr);
        let of = |event: &str| events(&dir.path("metrics.jsonl"), event).remove(0);
        [&of("run")["planned_bytes"]["total"], &of("step")["mem_bytes"]].map(|bytes| bytes.as_u64().unwrap())
    };
    let ([planned, metered], without) = (of("--comm ipc"), of(""));
    assert_eq!(planned - without[0], 12 << 20);
    assert!((12 << 20..(12 << 20) + 1024).contains(&(metered - without[1])), "{metered} and {without:?}");
}

#[test]
fn a_killed_rank_ends_the_others_and_is_named() {
    let dir = Dir::new();
    let args = format!("{SHARED} --comm ipc --precision fp32 --max-steps 100000 --metrics-path");
    let run = Run(command(FSDP, "seed=1", &args).arg(dir.arg("metrics.jsonl")).spawn().unwrap());
    let ranks = run.ranks(2);
    wait_until("two steps", || steps(&dir.path("metrics.jsonl")) > 1);
    send(Signal::KILL, ranks[1]);
    let ended = run.end();
    assert_eq!(ended.status.code(), Some(1), "{}", ended.stderr);
    assert!(ended.stderr.contains("rank 1"), "{}", ended.stderr);
    assert!(dead(ranks[0]));
}

/// Its host does not come to the next meeting, or its GPU does not get to the round that this one waits for.
#[test]
fn a_killed_rank_is_named_without_a_launcher() {
    let (dir, agent) = (Dir::new(), Agent::new());
    let start = |rank| {
        let args = "--comm ipc --precision fp32 --max-steps 100000 --comm-timeout 3 --metrics-path";
        let mut command = command(FSDP, "seed=1,gpus=2", args);
        Run(launched(&mut command, rank, 2, agent.port).arg(dir.arg("metrics.jsonl")).spawn().unwrap())
    };
    let (first, second) = (start(0), start(1));
    wait_until("two steps", || steps(&dir.path("metrics.jsonl")) > 1);
    send(Signal::KILL, second.pid());
    let ended = first.end();
    assert_eq!(ended.status.code(), Some(1), "{}", ended.stderr);
    let named = ["no answer within 3s from rank 1", "no answer within 3s from among ranks 1"];
    assert!(named.iter().any(|text| ended.stderr.contains(text)), "{}", ended.stderr);
}

fn refused(mut command: Command, says: &str) {
    let Output { status, stderr, .. } = command.output().unwrap();
    let stderr = String::from_utf8_lossy(&stderr);
    assert!(status.code() == Some(2) && stderr.contains(says), "{stderr}");
    assert_eq!(stderr.matches("error: ").count(), 1, "{stderr}");
}
#[test]
fn several_hosts_and_other_devices_are_refused() {
    let mut far = command(FSDP, "", "--comm ipc --max-steps 1");
    launched_on(&mut far, [0, 4], [0, 2], Agent::new().port);
    refused(far, "--comm ipc works within one host, but the job has 4 ranks, 2 of them on this host");
    refused(cuda_ranks::command(FSDP, "", "--comm ipc --device cpu --max-steps 1"), "--comm ipc needs --device cuda");
}
