//! Ranks as launchers start them, by environment variables alone: the same job under every launcher's names, and values
//! that no launcher sets are found or refused at once. Launchers are simulated, ranks are processes.

use crate::common::runs::*;
use rustix::process::Signal;

/// A rank with these launcher variables only.
fn rank(vars: &[(&str, String)], port: u16, args: &[&str]) -> Run {
    let mut command = command(FSDP, args);
    for name in ["MASTER_ADDR", "PMI_RANK", "PMIX_RANK", "OMPI_COMM_WORLD_RANK", "SLURM_JOB_ID", "SLURM_STEP_ID"] {
        command.env_remove(name);
    }
    command.env("MASTER_PORT", port.to_string()).envs(vars.iter().map(|(name, value)| (name, value)));
    Run(command.spawn().unwrap())
}
/// The names of a rank, of the ranks, of a local rank and of the local ranks, with their numbers on one host.
fn named(names: [&'static str; 4], rank: usize, world: usize) -> Vec<(&'static str, String)> {
    names.into_iter().zip([rank, world, rank, world].map(|n| n.to_string())).collect()
}
fn ended(ranks: Vec<Run>) -> Vec<Ended> {
    let threads: Vec<_> = ranks.into_iter().map(|run| std::thread::spawn(|| run.end())).collect();
    threads.into_iter().map(|thread| thread.join().unwrap()).collect()
}
#[track_caller]
fn refused(ended: &Ended, says: &str) {
    assert!(ended.status.code() == Some(2) && ended.stderr.contains(says), "{}: {}", ended.status, ended.stderr);
}

fn args(metrics: &str) -> [&str; 8] {
    ["--max-steps", "3", "--num-heads", "4", "--no-eval", "--no-sample", "--metrics-path", metrics]
}

#[test]
fn ranks_of_every_launcher_train_like_the_built_in_one() {
    let dir = Dir::new();
    let plain = dir.arg("plain");
    good(FSDP, &[&args(&plain)[..], &["--nproc-per-node", "2"]].concat());
    for names in [
        ["OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"],
        ["MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_LOCAL_RANK", "MV2_COMM_WORLD_LOCAL_SIZE"],
        ["PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"],
        ["JSM_NAMESPACE_RANK", "JSM_NAMESPACE_SIZE", "JSM_NAMESPACE_LOCAL_RANK", "JSM_NAMESPACE_LOCAL_SIZE"],
        ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_SIZE"],
        ["SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_STEP_ID"], // any step
    ] {
        let (agent, metrics) = (Agent::new(), dir.arg(names[0]));
        let ranks = [0, 1].map(|r| rank(&named(names, r, 2), agent.port, &args(&metrics)));
        for ended in ended(ranks.into()) {
            assert!(ended.status.success(), "{names:?}: {}", ended.stderr);
        }
        assert_eq!(losses(&dir.path(names[0])), losses(&dir.path("plain")), "{names:?}");
    }
    assert_eq!(losses(&dir.path("plain")).len(), 3);
}

/// A batch script has the variables of a task, though srun has not started any.
#[test]
fn a_shell_of_a_slurm_job_starts_its_own_ranks() {
    let dir = Dir::new();
    let job = ["SLURM_JOB_ID", "SLURM_NTASKS", "SLURM_PROCID", "SLURM_LOCALID", "SLURM_NNODES"];
    let numbers = ["77", "2", "0", "0", "1"].map(String::from);
    let vars: Vec<_> = job.into_iter().zip(numbers).collect();
    let says = "inside a Slurm job of 2 tasks on 1 host, but not started by srun: starting 1 rank on this host. For a rank \
                per task, put srun before this command";
    for (nproc, notes) in [("1", 1), ("2", 0)] {
        let metrics = dir.arg(nproc);
        let ended = rank(&vars, 29500, &[&args(&metrics)[..], &["--nproc-per-node", nproc]].concat()).end();
        assert!(ended.status.success(), "{}", ended.stderr);
        assert_eq!(ended.stderr.matches(says).count(), notes, "{}", ended.stderr);
        assert_eq!(losses(&dir.path(nproc)).len(), 3);
    }
}

/// As a Kubernetes operator starts them: four ranks without local ranks.
fn pods(port: u16, local_ranks: [Option<usize>; 4], args: &[&str]) -> Vec<Ended> {
    let start = |r: usize| {
        let mut vars = named(["RANK", "WORLD_SIZE", "", ""], r, 4);
        vars.truncate(2);
        vars.extend([("MASTER_ADDR", "127.0.0.1".into()), ("FLATSHARD_HOST_ID", format!("host{}", r / 2))]);
        vars.extend(local_ranks[r].map(|n| ("LOCAL_RANK", n.to_string())));
        rank(&vars, port, args)
    };
    ended((0..4).map(start).collect())
}

#[test]
fn ranks_without_a_local_rank_find_it() {
    let dir = Dir::new();
    let (plain, found) = (dir.arg("plain"), dir.arg("found"));
    let args =
        |metrics| ["--max-steps", "3", "--num-heads", "4", "--no-eval", "--no-sample", "--metrics-path", metrics];
    good(FSDP, &[&args(&plain)[..], &["--nproc-per-node", "4"]].concat());
    let agent = Agent::new();
    let ended = pods(agent.port, [None, None, Some(0), Some(1)], &args(&found));
    assert!(ended.iter().all(|e| e.status.success()), "{}", ended[0].stderr);
    assert!(ended[0].stderr.contains("4 on 2 hosts over tcp"), "{}", ended[0].stderr);
    assert_eq!(losses(&dir.path("found")), losses(&dir.path("plain")));
    assert_eq!(losses(&dir.path("plain")).len(), 3);
}

#[test]
fn ranks_that_cannot_find_their_local_rank_are_refused_at_once() {
    let agent = Agent::new();
    // Each alone, without waiting.
    let cases = [
        (["RANK", "WORLD_SIZE", "LOCAL_RANK", ""], 3, "RANK is set, but neither LOCAL_WORLD_SIZE nor MASTER_ADDR is"),
        (["PMI_RANK", "PMI_SIZE", "", ""], 2, "PMI_RANK is set, but neither MPI_LOCALNRANKS nor MASTER_ADDR is"),
        (["PMIX_RANK", "", "", ""], 1, "PMIX_RANK=1 is set, but no PMIx variable gives the world size"),
        (["OMPI_COMM_WORLD_RANK", "", "", ""], 1, "OMPI_COMM_WORLD_RANK is set but OMPI_COMM_WORLD_SIZE is not"),
    ];
    for (names, set, says) in cases {
        refused(&rank(&named(names, 1, 2)[..set], agent.port, &["--max-steps", "1"]).end(), says);
    }
    // All four refuse alike: each container calls its rank the first of its host, and they share a name.
    for ended in pods(agent.port, [Some(0); 4], &["--max-steps", "1"]) {
        refused(&ended, "rank 1 on host0 has LOCAL_RANK=0, but 1 of the 2 ranks on a host of this name precede it");
    }
}

#[test]
fn a_job_started_twice_on_one_port_is_reported() {
    let agent = Agent::new();
    let names = ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"];
    let start = |r: usize, args: &[&str]| rank(&named(names, r, 2), agent.port, args);
    let dir = Dir::new();
    let endless = ["--max-steps", "1000000", "--log-level", "error", "--metrics-path", &dir.arg("m")];
    // All at once, in any mixture: of each rank there is one.
    let mut left: Vec<(usize, Run)> = [0, 1, 0, 1].map(|r| (r, start(r, &endless))).into();
    let mut surplus = Vec::new();
    wait_until("two of four are refused", || {
        while let Some(i) = left.iter_mut().position(|(_, run)| run.0.try_wait().unwrap().is_some()) {
            surplus.push(left.swap_remove(i));
        }
        surplus.len() >= 2
    });
    left.sort_by_key(|(rank, _)| *rank);
    assert_eq!(left.iter().map(|(rank, _)| *rank).collect::<Vec<_>>(), [0, 1]);
    let pids: Vec<u32> = left.iter().map(|(_, run)| run.pid()).collect();
    let says =
        |r: usize| format!("is already rank {r} of 2 with MASTER_PORT={}: this job was started twice", agent.port);
    for (r, run) in surplus {
        refused(&run.end(), &format!("process {} on", pids[r]));
    }
    // And later, while they train.
    wait_until("a step", || steps(&dir.path("m")) > 0);
    for r in [1, 0] {
        refused(&start(r, &["--max-steps", "1"]).end(), &says(r));
    }
    let before = steps(&dir.path("m"));
    wait_until("another step", || steps(&dir.path("m")) > before);
    send_all(Signal::TERM, &pids);
    for (_, run) in left {
        let ended = run.end();
        assert_eq!(ended.status.code(), Some(143), "{}", ended.stderr);
    }
}
