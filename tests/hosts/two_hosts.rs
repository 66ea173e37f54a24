//! Whole runs on two simulated hosts of two ranks each: processes that share memory in pairs and use TCP over loopback.
//! Results must be bitwise equal to those of one host with four ranks.
mod attacks;

use crate::common::runs::*;
use rustix::process::Signal;
use std::fs;

/// A job as two torchrun agents start it. They hold MASTER_PORT.
struct Job {
    ranks: Vec<Run>,
    _agent: Agent,
}
impl Job {
    fn start(args: &[&str]) -> Job {
        Job::of(&[2, 2], args)
    }
    /// Number of ranks on each host.
    fn of(hosts: &[usize], args: &[&str]) -> Job {
        let agent = Agent::new();
        let port = agent.port;
        let places = hosts.iter().enumerate().flat_map(|(host, &n)| (0..n).map(move |local| (host, local, n)));
        let world: usize = hosts.iter().sum();
        let start = |(rank, (host, local, n)): (usize, (usize, usize, usize))| {
            let mut command = command(FSDP, args);
            launched_on(&mut command, [rank, world], [local, n], port);
            command.env("TORCHELASTIC_RUN_ID", format!("job {port}")).env("FLATSHARD_HOST_ID", format!("host{host}"));
            Run(command.spawn().unwrap())
        };
        Job { ranks: places.enumerate().map(start).collect(), _agent: agent }
    }
    fn end(self) -> Vec<Ended> {
        // All outputs are read concurrently: a full pipe would block one rank, and so all others.
        let threads: Vec<_> = self.ranks.into_iter().map(|run| std::thread::spawn(|| run.end())).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    }
    #[track_caller]
    fn good(self) -> Vec<Ended> {
        let ended = self.end();
        let said: Vec<_> = ended.iter().map(|e| format!("{}: {}", e.status, e.stderr)).collect();
        assert!(ended.iter().all(|e| e.status.success()), "{}", said.join("\n"));
        ended
    }
}

fn compared(cases: &[(&str, &[&str])]) {
    for (name, args) in cases {
        let dir = Dir::new();
        let (one, two) = (dir.arg("one"), dir.arg("two"));
        let args = [&["--max-steps", "4", "--num-heads", "4"], *args].concat();
        good(FSDP, &[&args[..], &["--nproc-per-node", "4", "--metrics-path", &one]].concat());
        let ended = Job::start(&[&args[..], &["--metrics-path", &two]].concat()).good();
        assert_eq!(losses(&dir.path("two")), losses(&dir.path("one")), "{name}");
        assert_eq!(losses(&dir.path("two")).len(), 4, "{name}");
        assert!(ended[0].stderr.contains("4 on 2 hosts over tcp, cpu"), "{}", ended[0].stderr);
    }
}

#[test]
fn two_hosts_train_as_one_with_every_sharding() {
    compared(&[
        ("FULL_SHARD", &["--grad-accum", "2"]),
        ("bf16 gradients", &["--reduce-dtype", "bf16", "--precision", "bf16"]),
        ("one tensor at a time", &["--fsdp-impl", "reference"]),
        ("one replica a host", &["--sharding", "HYBRID_SHARD", "--dp-replicate-size", "2"]),
    ]);
}
#[test]
fn two_hosts_train_as_one_with_replicas() {
    compared(&[("DDP", &["--strategy", "ddp"]), ("ZeRO 2", &["--backend", "zero", "--zero-stage", "2"])]);
}
/// Of two ranks they stay in a host; of four they go through both.
#[test]
fn two_hosts_train_as_one_in_tensor_and_sequence_parallel() {
    compared(&[
        ("tp in hosts", &["--tp-size", "2"]),
        ("tp over hosts", &["--tp-size", "4"]),
        ("a ring in hosts", &["--ring-attn-size", "2", "--dp-replicate-size", "2"]),
        ("a ring over hosts", &["--ring-attn-size", "4"]),
        ("heads exchanged over hosts", &["--ring-attn-size", "4", "--sp-impl", "ulysses"]),
    ]);
}
/// Rows travel within hosts or over both; adapters and matrices' owners too.
#[test]
fn two_hosts_share_experts_as_one() {
    let sparse = ["--num-experts", "5", "--ff-hidden-dim", "48", "--ep-size"];
    let with = |more: &[&'static str]| [&sparse[..], more].concat();
    let muon = with(&["2", "--optimizer", "muon"]);
    compared(&[
        ("ep in hosts", &with(&["2"])),
        ("ep over hosts", &with(&["4", "--grad-accum", "2"])),
        ("ep over hosts in halves", &with(&["4", "--moe-overlap"])),
        ("ep in replicas", &with(&["2", "--sharding", "HYBRID_SHARD", "--dp-replicate-size", "2"])),
        ("muon", &muon),
    ]);
}
/// Without --dp-replicate-size: one replica per host.
#[test]
fn hybrid_shards_within_hosts_by_default() {
    let dir = Dir::new();
    let ended = Job::start(&["--max-steps", "2", "--sharding", "HYBRID_SHARD", "--metrics-path", &dir.arg("m")]).good();
    assert!(ended[0].stderr.contains("dp_replicate 2 x dp_shard 2"), "{}", ended[0].stderr);
    let one = ["--max-steps", "2", "--sharding", "HYBRID_SHARD", "--dp-replicate-size", "2", "--nproc-per-node", "4"];
    good(FSDP, &[&one[..], &["--metrics-path", &dir.arg("one")]].concat());
    assert_eq!(losses(&dir.path("m")), losses(&dir.path("one")));
}

#[test]
fn a_killed_rank_is_named_on_the_other_host_and_all_exit() {
    for victim in [3, 0] {
        let dir = Dir::new();
        let mut job = Job::start(&["--max-steps", "1000000", "--metrics-path", &dir.arg("m")]);
        wait_for_steps(3, &dir.path("m"), &mut job.ranks);
        send(Signal::KILL, job.ranks[victim].pid());
        let ended = job.end();
        let name = format!("rank {victim} on host{}", victim / 2);
        for (rank, e) in ended.iter().enumerate().filter(|(rank, _)| *rank != victim) {
            assert_eq!(e.status.code(), Some(1), "rank {rank}: {}", e.stderr);
            let named = e.stderr.contains(&name) || e.stderr.contains(&format!("rank {victim} failed"));
            assert!(named, "rank {rank}: {}", e.stderr);
        }
        let closed = format!("{name}: connection closed");
        assert!(ended.iter().any(|e| e.stderr.contains(&closed)), "{}", ended[1].stderr);
    }
}

#[test]
fn a_signal_saves_on_every_host() {
    let dir = Dir::new();
    let (metrics, ckpt) = (dir.arg("m"), dir.arg("ckpt"));
    let mut job = Job::start(&["--max-steps", "1000000", "--metrics-path", &metrics, "--ckpt-dir", &ckpt]);
    wait_for_steps(3, &dir.path("m"), &mut job.ranks);
    send(Signal::TERM, job.ranks[2].pid()); // one rank hears of it
    for e in job.end() {
        assert_eq!(e.status.code(), Some(143), "{}", e.stderr);
    }
    assert!(fs::read_to_string(dir.path("ckpt/latest")).unwrap().starts_with("step-"));
}

#[test]
fn checkpoints_move_from_one_host_to_two_and_back() {
    let dir = Dir::new();
    let whole = dir.arg("whole");
    let args = ["--lr-scheduler", "constant"];
    good(FSDP, &[&args[..], &["--max-steps", "9", "--nproc-per-node", "4", "--metrics-path", &whole]].concat());
    let (parts, ckpt) = (dir.arg("parts"), dir.arg("ckpt"));
    let saved =
        [&args[..], &["--metrics-path", &parts, "--ckpt-dir", &ckpt, "--resume", "auto", "--max-steps"]].concat();
    Job::start(&[&saved[..], &["3"]].concat()).good();
    good(FSDP, &[&saved[..], &["6", "--nproc-per-node", "4"]].concat());
    Job::start(&[&saved[..], &["9"]].concat()).good();
    assert_eq!(losses(&dir.path("parts")), losses(&dir.path("whole")));
    assert_eq!(losses(&dir.path("whole")).len(), 9);
}

#[test]
fn settings_that_do_not_fit_several_hosts_are_refused() {
    let refused = |job: Job, says: &str| {
        for e in job.end() {
            assert_eq!(e.status.code(), Some(2), "{}", e.stderr);
            assert!(e.stderr.contains(says), "{}", e.stderr);
        }
    };
    let args = |more: &[&'static str]| [&["--max-steps", "1"], more].concat();
    refused(Job::start(&args(&["--comm", "shm"])), "4 ranks, 2 of them on this host");
    refused(Job::start(&args(&["--num-nodes", "3"])), "num_nodes 3, but the launcher started 4 ranks on 2 hosts");
    if !cfg!(feature = "mpi") {
        refused(Job::start(&args(&["--comm", "mpi"])), "--features mpi");
    }
    let plain = Run::start(FSDP, &["--max-steps", "1", "--num-nodes", "2"]).end();
    assert!(plain.status.code() == Some(2) && plain.stderr.contains("torchrun"), "{}", plain.stderr);
    // Two ranks on one host, one on the other.
    for e in Job::of(&[2, 1], &args(&[])).end() {
        assert_eq!(e.status.code(), Some(2), "{}", e.stderr);
        assert!(e.stderr.contains("start the same number on each host"), "{}", e.stderr);
    }
}
