//! `--compile` on simulated GPUs (`ptx/driver`): micro-batches captured with their NCCL collectives as one CUDA graph
//! are bitwise equal to eager execution, in any order of streams; a hang in a graph is named and ended; packed rows and
//! profiled steps work too.

use crate::common::deep;
use crate::common::runs::{Agent, Dir, Ended, Run, launched, losses, send, steps, wait_until};
use crate::common::simcuda;
use rustix::process::Signal;
use std::process::{Command, Stdio};

const TINY: &str = "--embed-dim 64 --num-layers 2 --num-heads 2 --max-len 16 --batch-size 2 --warmup-steps 1 --lr \
0.02 --log-every 1 \
                    --no-sample --no-eval --no-measure-peak --device cuda --nproc-per-node 2";

fn command(machine: &str, args: &str) -> Command {
    let mut command = simcuda::run(crate::common::binaries::FSDP, &format!("gpus=2,{machine}"));
    command.args(TINY.split_whitespace()).args(args.split_whitespace());
    command.stdout(Stdio::piped()).stderr(Stdio::piped());
    command
}

/// How many calls ran in how many launches of how many graphs, as reported at the end of a run.
#[derive(Clone, Copy, PartialEq, Debug)]
struct Compiled {
    percent: u64,
    calls: u64,
    launches: u64,
    graphs: u64,
}
fn compiled(said: &str) -> Option<Compiled> {
    let is_count = |(_, rest): &(&str, &str)| rest.starts_with(|c: char| c.is_ascii_digit());
    let line = said.lines().find_map(|line| line.split_once("compile: ").filter(is_count))?.1;
    let [percent, calls, launches, graphs] = line
        .split(|c: char| !c.is_ascii_digit())
        .filter_map(|n| n.parse().ok())
        .collect::<Vec<u64>>()
        .try_into()
        .ok()?;
    Some(Compiled { percent, calls, launches, graphs })
}

type Losses = Vec<(u64, String, String)>;

#[track_caller]
fn train(machine: &str, args: &str) -> (Losses, Ended) {
    let dir = Dir::new();
    let metrics = dir.arg("metrics.jsonl");
    let ended = Run(command(machine, args).args(["--metrics-path", &metrics]).spawn().unwrap()).end();
    assert!(ended.status.success(), "{machine} {args}: {}\n{}", ended.stdout, ended.stderr);
    // Faults reported by the simulated libraries although the run continued.
    assert!(!ended.stderr.contains("simulated"), "{machine} {args}: {}", ended.stderr);
    (losses(&dir.path("metrics.jsonl")), ended)
}

/// All-gathers and reduce-scatters overlapping compute, with two micro-batches per step, changing masks, and products
/// fused with epilogues; experts, whose rows the host does not count; all-reduces over tp in layers; rings that send
/// and receive; heads exchanged for tokens.
#[test]
fn collectives_in_graphs_change_no_bit_in_any_stream_order() {
    let cases = [
        ("--precision bf16 --num-experts 4 --grad-accum 2", 2, 66, &["seed=7"][..]),
        ("--precision bf16 --arch gpt --grad-accum 2 --dropout 0.1", 2, 66, &["seed=5", "seed=6"]),
        ("--precision bf16 --tp-size 2", 1, 66, &["seed=2"]),
        ("--precision fp32 --ring-attn-size 2", 1, 67, &["seed=3"]),
        ("--precision fp32 --ring-attn-size 2 --sp-impl ulysses", 1, 67, &["seed=4"]),
    ];
    for (how, pieces, share, machines) in deep::first(3, cases) {
        let args = format!("--dataset synthetic --max-steps 3 {how}");
        let (single, _) = train("seed=0", &args);
        for machine in machines {
            let (graphs, ended) = train(machine, &format!("{args} --compile"));
            assert_eq!((single.len(), &graphs), (3, &single), "{how} {machine}");
            // The first step runs eagerly. In the others each micro-batch is one launch, the last including the update.
            let said = compiled(&ended.stderr).unwrap();
            let Compiled { percent, launches, graphs, .. } = said;
            assert_eq!((percent, launches, graphs), (share, 2 * pieces, pieces), "{how} {machine}: {said:?}");
        }
    }
}

/// How many rows a rank gets differs between ranks and steps, so collectives are in no graph; all else that repeats is,
/// in pieces.
#[test]
fn ranks_that_share_experts_capture_what_repeats() {
    let args = "--dataset synthetic --precision bf16 --num-experts 5 --ff-hidden-dim 48 --ep-size 2 --grad-accum 2 \
                --max-steps 3";
    for more in deep::first(1, ["--moe-overlap", ""]) {
        let args = format!("{args} {more}");
        let (single, _) = train("seed=0", &args);
        assert_eq!((single.len(), &train("seed=5", &args).0), (3, &single), "call by call {more}");
        let (graphs, ended) = train("seed=6", &format!("{args} --compile"));
        assert_eq!(graphs, single, "{more}");
        let said = compiled(&ended.stderr).unwrap();
        assert!(said.percent >= 30 && said.graphs > 10, "{more}: {said:?}");
    }
}

/// A step of 100 layers has more collectives than a group keeps in flight (`RING` in src/comm/nccl/ring.rs), so the
/// host waits for the oldest; a graph with half that number is split there.
#[test]
fn more_collectives_than_the_history_holds_change_no_bit() {
    let args = "--dataset synthetic --num-layers 100 --num-heads 1 --embed-dim 16 --ff-hidden-dim 16 --max-len 4 \
    --batch-size 1 \
                --precision fp32 --max-steps 3";
    let (first, _) = train("seed=0", args);
    assert_eq!(first.len(), 3);
    if deep::deep() {
        assert_eq!(train("seed=5", args).0, first, "call by call");
    }
    let (graphs, ended) = train("seed=6", &format!("{args} --compile"));
    assert_eq!(graphs, first, "as graphs");
    // Two graphs of 128 collectives and the rest, in each of steps 2 and 3.
    let said = compiled(&ended.stderr).unwrap();
    assert_eq!((said.percent, said.launches, said.graphs), (67, 6, 3), "{said:?}");
}

/// Sequences that are a few tokens short are padded, so that all steps have one shape.
#[test]
fn packed_rows_are_captured_too() {
    let dir = Dir::new();
    let row = |i: usize| format!("{{\"q\":\"ask {}\",\"a\":\"{}\"}}\n", "x".repeat(i % 7), "y".repeat(1 + i * i % 9));
    std::fs::write(dir.path("rows.jsonl"), (0..300).map(row).collect::<String>()).unwrap();
    let args = format!(
        "--dataset {} --input-key q --output-key a --packing-samples --max-len 32 --precision fp32 --max-steps 3",
        dir.arg("rows.jsonl")
    );
    let (single, _) = train("seed=0", &args);
    let (graphs, ended) = train("seed=4", &format!("{args} --compile"));
    let said = compiled(&ended.stderr).unwrap();
    assert_eq!((said.percent, said.launches, said.graphs), (67, 2, 1), "{said:?}");
    for ((_, a, _), (_, b, _)) in single.iter().zip(&graphs) {
        let (a, b): (f64, f64) = (a.parse().unwrap(), b.parse().unwrap());
        assert!((a - b).abs() < 1e-4 * a, "{single:?} {graphs:?}");
    }
}

/// Profiled steps run eagerly, the steps before and after them as graphs, bitwise equal to a run without either.
#[test]
fn profiled_steps_run_eagerly() {
    let dir = Dir::new();
    let args = "--dataset synthetic --precision fp32 --max-steps 6";
    let (plain, _) = train("seed=0", args);
    let (profiled, ended) =
        train("seed=8", &format!("{args} --compile --profile-steps 4:4 --trace-folder {}", dir.arg("traces")));
    assert_eq!(profiled, plain);
    assert!(ended.stderr.contains("profiled steps run without CUDA graphs"), "{}", ended.stderr);
    let said = compiled(&ended.stderr).unwrap();
    assert_eq!((said.launches, said.graphs), (4, 1), "steps 2, 3, 5 and 6: {said:?}");
    let trace = std::fs::read_to_string(dir.path("traces/steps-4-4.json")).unwrap();
    for part in ["gather", "reduce", "update"] {
        assert!(trace.contains(part), "no {part} in the trace");
    }
}

/// An endless wait within a graph is reported with its launch, in the message and in the flight recorder.
#[test]
fn a_killed_rank_is_noticed_from_within_a_graph() {
    let dir = Dir::new();
    let agent = Agent::new();
    let start = |rank: usize| {
        let args = "--dataset synthetic --precision fp32 --max-steps 100000 --comm-timeout 3 --compile";
        // Without --nproc-per-node: started by another launcher.
        let mut command = simcuda::run(crate::common::binaries::FSDP, "gpus=2,seed=1");
        command
            .args(TINY.split_whitespace().take_while(|arg| *arg != "--nproc-per-node"))
            .args(args.split_whitespace());
        launched(&mut command, rank, 2, agent.port);
        command.args(["--metrics-path", &dir.arg("metrics.jsonl"), "--save-traces-folder", &dir.arg("traces")]);
        Run(command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap())
    };
    let (first, second) = (start(0), start(1));
    wait_until("three steps", || steps(&dir.path("metrics.jsonl")) > 2);
    send(Signal::KILL, second.pid());
    let ended = first.end();
    assert_eq!(ended.status.code(), Some(1), "{}", ended.stderr);
    for part in ["no answer within 3s", "from among ranks 1", "in replay of graph"] {
        assert!(ended.stderr.contains(part), "no {part:?} in: {}", ended.stderr);
    }
    let dump = std::fs::read_to_string(dir.path("traces/rank-0.json")).unwrap();
    assert!(dump.contains("\"graph\":"), "{dump}");
}
