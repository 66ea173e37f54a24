//! Several ranks of `--device cuda` on simulated GPUs (`ptx/driver`), with its NCCL, cuBLASLt and NVML: strategies
//! train as on the CPU, bitwise independent of stream order; a rank that dies, or whose kernel faults, ends the others
//! and is named.

use crate::common::deep;
use crate::common::runs::{Agent, DDP, Dir, FSDP, Run, dead, events, launched, losses, send, steps, wait_until};
use crate::common::simcuda;
use rustix::process::Signal;
use serde_json::Value;
use std::process::{Command, Stdio};

const TINY: &str = "--dataset synthetic --embed-dim 64 --num-layers 2 --num-heads 2 --max-len 16 --batch-size 2 \
                    --warmup-steps 1 --lr 0.02 --log-every 1 --no-sample --no-measure-peak";
/// Two ranks on one GPU, which then communicate over sockets; two GPUs, whose ranks read each other's memory.
pub const SHARED: &str = "--nproc-per-node 2 --ranks-per-gpu 2";
pub const APART: &str = "--nproc-per-node 2";

pub fn command(program: &str, machine: &str, args: &str) -> Command {
    let mut command = simcuda::run(program, machine);
    command.args(TINY.split_whitespace()).args(args.split_whitespace());
    command.stdout(Stdio::piped()).stderr(Stdio::piped());
    command
}

/// Step, loss and gradient norm as printed, and the whole output.
fn train(program: &str, machine: &str, args: &str) -> (Vec<(u64, String, String)>, Vec<Value>, String) {
    let dir = Dir::new();
    let metrics = dir.arg("metrics.jsonl");
    let ended =
        Run(command(program, machine, args).args(["--no-eval", "--metrics-path", &metrics]).spawn().unwrap()).end();
    assert!(ended.status.success(), "{machine} {args}: {}\n{}", ended.stdout, ended.stderr);
    // Faults reported by the simulated libraries although the run continued.
    assert!(!ended.stderr.contains("simulated"), "{machine} {args}: {}", ended.stderr);
    let path = dir.path("metrics.jsonl");
    (losses(&path), events(&path, "step"), ended.stderr)
}
fn number(text: &str) -> f64 {
    text.parse().unwrap()
}

/// bf16 rounds activations in other places (2^-9 each): bounds as in tests/device/simulated_training.rs. AdamW moves a
/// weight by the learning rate whatever the sign of a near-zero gradient, and both it and clipping hide the gradient's
/// scale: so norms before clipping are compared, and strategies run SGD without clipping, in the gate those of an odd
/// seed, and AdamW those of an even one.
#[track_caller]
fn trains_as_on_the_cpu(program: &str, machine: &str, shared: &str, args: &str) {
    let seed: usize = machine.trim_start_matches("seed=").split(',').next().unwrap().parse().unwrap();
    for (i, rule) in ["", "--optimizer sgd --grad-clip 0 --lr 0.05"].into_iter().enumerate() {
        if deep::meets(seed, i, 2) {
            agrees_with_the_cpu(program, machine, shared, &format!("{args} {rule} --max-steps 3"));
        }
    }
}
#[track_caller]
fn agrees_with_the_cpu(program: &str, machine: &str, shared: &str, args: &str) {
    let (cpu, ..) = train(program, machine, &format!("{args} --device cpu --nproc-per-node 2"));
    let (cuda, ..) = train(program, machine, &format!("{args} --device cuda {shared}"));
    assert_eq!((cpu.len(), cuda.len()), (3, 3));
    let (loss, norm) = if args.contains("bf16") { (2e-2, 5e-2) } else { (1e-4, 1e-4) };
    for ((step, a, x), (_, b, y)) in cpu.iter().zip(&cuda) {
        for (what, a, b, within) in [("loss", a, b, loss), ("gradient norm", x, y, norm)] {
            let (a, b) = (number(a), number(b));
            assert!((a - b).abs() <= within * a, "{args}: step {step}: {what}: {a} on the CPU, {b} on cuda");
        }
    }
}

#[test]
fn fsdp_on_one_gpu_and_on_two() {
    trains_as_on_the_cpu(FSDP, "seed=2", SHARED, "--precision fp32 --grad-accum 2");
    trains_as_on_the_cpu(FSDP, "seed=1,gpus=2", APART, "--precision bf16 --arch gpt --activation-checkpoint");
}

#[test]
fn ddp_and_zero() {
    trains_as_on_the_cpu(DDP, "seed=3", SHARED, "--precision fp32");
    trains_as_on_the_cpu(FSDP, "seed=4", SHARED, "--precision fp32 --zero-stage 2");
}

/// Grouped sends and receives; all-reduces and all-gathers inside layers.
#[test]
fn tensor_and_sequence_parallel() {
    trains_as_on_the_cpu(FSDP, "seed=5,gpus=2", APART, "--precision fp32 --tp-size 2");
    trains_as_on_the_cpu(FSDP, "seed=7", SHARED, "--precision fp32 --ring-attn-size 2");
    trains_as_on_the_cpu(FSDP, "seed=11", SHARED, "--precision fp32 --ring-attn-size 2 --sp-impl ulysses");
}

/// Rows travel to the ranks that have their experts by grouped sends and receives, of as many as the host has read; in
/// several rounds where two experts get uneven numbers.
#[test]
fn experts_shared_by_ranks() {
    let experts = "--num-experts 5 --ff-hidden-dim 48 --ep-size 2";
    trains_as_on_the_cpu(FSDP, "seed=12", SHARED, &format!("--precision fp32 --grad-accum 2 {experts}"));
    let more = "--moe-overlap --activation-checkpoint --compile";
    trains_as_on_the_cpu(FSDP, "seed=13,gpus=2", APART, &format!("--precision fp32 {experts} {more}"));
    if !deep::deep() {
        return;
    }
    let skewed = "--num-experts 2 --num-experts-per-tok 1 --ff-hidden-dim 48 --ep-size 2 --zero-stage 3";
    trains_as_on_the_cpu(FSDP, "seed=14", SHARED, &format!("--precision fp32 {skewed}"));
}

/// Muon's owners exchange matrices by grouped sends and receives, alone and in graphs.
#[test]
fn muon_trains_as_on_the_cpu() {
    agrees_with_the_cpu(FSDP, "seed=6", SHARED, "--precision fp32 --optimizer muon --lr 0.01 --max-steps 3");
    agrees_with_the_cpu(
        FSDP,
        "seed=8,gpus=2",
        APART,
        "--precision fp32 --optimizer muon --lr 0.01 --max-steps 3 --compile",
    );
    agrees_with_the_cpu(DDP, "seed=9", SHARED, "--precision fp32 --optimizer muon --lr 0.01 --max-steps 3");
}

/// Frozen matrices in 4 bits are expanded by a kernel.
#[test]
fn qlora_trains_as_on_the_cpu() {
    let adapters = "--lora-rank 4 --lora-target-modules all-linear --ff-hidden-dim 192 --load-in-4bit";
    trains_as_on_the_cpu(FSDP, "seed=15", SHARED, &format!("--precision fp32 {adapters}"));
    trains_as_on_the_cpu(FSDP, "seed=16,gpus=2", APART, &format!("--precision bf16 {adapters}"));
}

/// Moments in 8 bits; moments and masters in bf16, rounded with the random numbers of the CPU.
#[test]
fn smaller_states_train_as_on_the_cpu() {
    let eight = "--precision fp32 --optimizer adamw8bit --max-steps 3";
    agrees_with_the_cpu(FSDP, "seed=17", SHARED, eight);
    let rounded = "--precision bf16 --moments-dtype bf16 --master-dtype bf16 --max-steps 3";
    agrees_with_the_cpu(FSDP, "seed=18,gpus=2", APART, rounded);
}

/// Epilogues fused into a product, or in separate passes where cuBLASLt has no algorithm for it: in f32 only the order
/// of sums differs.
#[test]
fn fused_products_and_passes_agree() {
    let run = |blas: &str, args: &str| {
        let dir = Dir::new();
        let args = format!("{args} --device cuda --nproc-per-node 1 --arch gpt --max-steps 2 --no-eval --metrics-path");
        let mut command = command(FSDP, "seed=2", &args);
        let ended = Run(command.arg(dir.arg("metrics.jsonl")).env("FLATSHARD_SIMBLAS", blas).spawn().unwrap()).end();
        assert!(ended.status.success() && !ended.stderr.contains("simulated"), "{blas} {args}: {}", ended.stderr);
        losses(&dir.path("metrics.jsonl"))
    };
    for (args, within) in [("--precision fp32", 1e-6), ("--precision bf16", 4e-3)] {
        let (fused, plain) = (run("", args), run("plain", args));
        assert_ne!(fused, plain, "{args}: the same bits: nothing was fused");
        for ((step, a, _), (_, b, _)) in fused.iter().zip(&plain) {
            let (a, b) = (number(a), number(b));
            assert!((a - b).abs() <= within * a, "{args}: step {step}: {a} fused, {b} in passes");
        }
    }
}

/// Streams are ordered only by what the program requests. --compile: parts of steps as graphs.
#[test]
fn the_order_of_streams_changes_no_bit() {
    let run = |seed: usize, more: &str| {
        let args = format!("--device cuda {SHARED} --precision bf16 --max-steps 3 --grad-accum 2 --dropout 0.1 {more}");
        train(FSDP, &format!("seed={seed}"), &args).0
    };
    let first = run(0, "");
    assert_eq!(first.len(), 3);
    for seed in [1, 2] {
        assert_eq!(run(seed, ""), first, "seed {seed}");
    }
    assert_eq!(run(3, "--compile"), first, "with graphs");
}

/// Proves that the test above can fail: dropping one of the waits between streams changes bits.
#[test]
fn a_forgotten_wait_is_detected() {
    let run = |machine: &str| {
        // --no-tune: what ranks agree on before the first step has waits of its own.
        let args = format!("--device cuda {SHARED} --precision bf16 --max-steps 1 --no-eval --no-tune --metrics-path");
        let dir = Dir::new();
        let ended = Run(command(FSDP, machine, &args).arg(dir.arg("metrics.jsonl")).spawn().unwrap()).end();
        let planted = ended.stderr.contains("is skipped");
        (planted, losses(&dir.path("metrics.jsonl")))
    };
    let (_, right) = run("seed=2");
    // Not every wait is visible in a first step: some are implied by others, and what others order may come in that
    // order by chance, depending on when the other rank answers.
    for wait in [1, 7] {
        let (planted, bits) = run(&format!("seed=2,forget_wait={wait}"));
        assert!(planted, "there is no wait {wait}");
        assert!(bits != right, "wait {wait} does not show");
    }
}

/// Its launcher tells the others, so the rank is named long before any timeout.
#[test]
fn a_killed_rank_ends_the_others_and_is_named() {
    for (machine, seats) in [("seed=1", SHARED), ("seed=1,gpus=2", APART)] {
        let dir = Dir::new();
        let args = format!("--device cuda {seats} --precision fp32 --max-steps 100000 --no-eval --metrics-path");
        let run = Run(command(FSDP, machine, &args).arg(dir.arg("metrics.jsonl")).spawn().unwrap());
        let ranks = run.ranks(2);
        wait_until("two steps", || steps(&dir.path("metrics.jsonl")) > 1);
        send(Signal::KILL, ranks[1]);
        let ended = run.end();
        assert_eq!(ended.status.code(), Some(1), "{}", ended.stderr);
        assert!(ended.stderr.contains("rank 1"), "{}", ended.stderr);
        assert!(dead(ranks[0]));
    }
}

/// The simulated NCCL fails a collective for which only some ranks pass registered memory.
#[test]
fn memory_is_registered_on_all_ranks_or_on_none() {
    for refused in [&[][..], &[1]] {
        let agent = Agent::new();
        let start = |rank| {
            let mut command = simcuda::run(crate::common::binaries::GPU_CHECK, "gpus=2");
            launched(&mut command, rank, 2, agent.port).env("NCCL_HOSTID", format!("host{rank}")); // they share a GPU
            if refused.contains(&rank) {
                command.env("FLATSHARD_SIMNCCL", "unregistered");
            }
            Run(command.args(["ranks"]).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap())
        };
        for rank in [start(0), start(1)] {
            let ended = rank.end();
            assert!(ended.status.success() && !ended.stderr.contains("simulated"), "{refused:?}: {}", ended.stderr);
        }
    }
}

/// As with torchrun, which does not set NCCL_HOSTID.
#[test]
fn ranks_of_another_launcher_share_a_gpu_only_if_named() {
    let mut command = command(FSDP, "gpus=1", "--device cuda --max-steps 1 --ranks-per-gpu 2");
    let ended = Run(launched(&mut command, 0, 2, Agent::new().port).spawn().unwrap()).end();
    assert_eq!(ended.status.code(), Some(2), "{}", ended.stderr);
    assert!(ended.stderr.contains("--ranks-per-gpu 2") && ended.stderr.contains("NCCL_HOSTID"), "{}", ended.stderr);
}

/// Without our launcher, a rank learns of failures only from NCCL. If ranks read each other's memory, NCCL reports
/// nothing, and the timeout ends the run. Over sockets it reports immediately that some rank left, but not which.
#[test]
fn a_killed_rank_is_noticed_without_a_launcher() {
    for (machine, sockets, says) in [
        ("seed=1,gpus=2", false, ["no answer within 3s", "from among ranks 1"]),
        ("seed=1,gpus=2", true, ["NCCL: remote process exited", "of 2 ("]),
    ] {
        let dir = Dir::new();
        let agent = Agent::new();
        let start = |rank| {
            let args = "--device cuda --precision fp32 --max-steps 100000 --no-eval --comm-timeout 3 --metrics-path";
            let mut command = command(FSDP, machine, args);
            launched(&mut command, rank, 2, agent.port);
            if sockets {
                command.envs([("NCCL_P2P_DISABLE", "1"), ("NCCL_SHM_DISABLE", "1")]);
            }
            Run(command.arg(dir.arg("metrics.jsonl")).spawn().unwrap())
        };
        let (first, second) = (start(0), start(1));
        wait_until("two steps", || steps(&dir.path("metrics.jsonl")) > 1);
        send(Signal::KILL, second.pid());
        let ended = first.end();
        assert_eq!(ended.status.code(), Some(1), "{}", ended.stderr);
        for part in says {
            assert!(ended.stderr.contains(part), "no {part:?} in: {}", ended.stderr);
        }
    }
}

#[test]
fn a_kernel_fault_on_one_rank_ends_the_other() {
    let args = format!("--device cuda {APART} --precision fp32 --max-steps 100000 --no-eval");
    let ended = Run(command(FSDP, "seed=2,gpus=2,fault=300,rank=1", &args).spawn().unwrap()).end();
    assert_eq!(ended.status.code(), Some(1), "{}", ended.stderr);
    for part in ["rank 1", "ILLEGAL_ADDRESS", "Most recent kernels"] {
        assert!(ended.stderr.contains(part), "no {part:?} in: {}", ended.stderr);
    }
}

/// NVML's values are in the metrics, and problems are reported once.
#[test]
fn hot_or_faulty_gpus_are_warned_about() {
    let dir = Dir::new();
    let args = "--device cuda --nproc-per-node 1 --precision fp32 --max-steps 2 --no-eval --metrics-path";
    let mut command = command(FSDP, "", args);
    command
        .arg(dir.arg("metrics.jsonl"))
        .env("FLATSHARD_SIMNVML", "throttle=64,ecc_uncorrected=2,sm_clock=1200,temperature=88");
    let ended = Run(command.spawn().unwrap()).end();
    assert!(ended.status.success(), "{}", ended.stderr);
    for part in ["the GPU throttles its clock to 1200 MHz: too hot, 88 C, 312 W", "lost data: 2 uncorrected ECC errors"]
    {
        assert_eq!(ended.stderr.matches(part).count(), 1, "{part:?} in: {}", ended.stderr);
    }
    let step = &events(&dir.path("metrics.jsonl"), "step")[0];
    let gpu = step.to_string();
    for part in [r#""sm_clock_mhz":1200"#, r#""ecc_uncorrected":2"#, r#""temperature_c":88"#] {
        assert!(gpu.contains(part), "no {part} in {gpu}");
    }
}
